"""Several processes: same tokens as one process, ranks that agree, and jobs that end if a rank ends."""

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import caches
import cases
import pytest
import torch
from jobs import on_ranks
from make_checkpoint import GEMMA3, GPT_OSS, LFM2_MOE, QWEN3_MOE, QWEN3_NEXT, make
from make_dflash import make_dflash
from make_head import make_head
from make_mtp import make_mtp
from pairs import perturbed
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import specker
from specker.checkpoints import buffers, checkpoint
from specker.cli import run
from specker.model.config import CheckpointError
from specker.model.split import Part
from specker.runtime import load
from specker.runtime.ranks import dist
from specker.runtime.round.round import Round, collect

PROMPT = [5, 9, 40, 77, 3, 8]
COUNT = 10  # tokens of a text
BESIDE = [[7], [3] * 70, [4, 5, 6, 7]]  # other prompts, in batches
SAMPLING: list[dict] = [
    {},
    {"temperature": 0.7, "seed": 4, "top_p": 0.9, "stop_ids": [*range(3, 60)], "min_tokens": COUNT},
    {"repetition_penalty": 1.05, "presence_penalty": 0.1, "logit_bias": [(9, 0.5)]},
]
ALIKE = (
    "tree",
    "easyspec-uneven",
    "easyspec-one",
    "ordered",
    "del-fixed",
    "eagle-tree",
    "eagle",
    "mtp",
    "dflash",
    "lookup",
    "static",
    "gemma3",
    "experts",
    "mixed",
    "short",
)  # one of SAMPLING each
ROOT = Path(__file__).parents[2]


def torchrun(ranks, *args, timeout):
    """The result of a job of `ranks` processes, which torchrun ends if one of them fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *args]
    where = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target of 4 query and 2 KV heads with biases, drafts of its family, and a bidirectional one."""
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", "qwen2", layers=4, max_context=192, heads=4, kv_heads=2, vocab=129)
    draft = perturbed(target, folder / "draft")
    dream = make(folder / "dream", "dream", layers=2, max_context=192, vocab=129)
    gemma = make(folder / "gemma3", max_context=192, vocab=129, **GEMMA3 | {"tied": False})
    experts = make(folder / "experts", max_context=192, vocab=129, **QWEN3_MOE)
    mixed = make(folder / "mixed", max_context=192, vocab=129, **QWEN3_NEXT)
    short = make(folder / "short", max_context=192, vocab=130, **LFM2_MOE)
    oss = make(folder / "gpt-oss", max_context=192, vocab=129, **GPT_OSS)
    like, often = json.loads((target / "config.json").read_text()), [28, 125]
    eagle = make_head(folder / "eagle", like, layout="nested", ids=often, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    dflash = make_dflash(folder / "dflash", like, layout="dflash", ids=often, layer_ids=[1, 2])
    mtp = make_mtp(folder / "mtp", "mimo", heads=2, arch="mimo", vocab=129)
    wide = make(
        folder / "wide", "qwen2", layers=4, max_context=192, hidden=128, heads=4, head_dim=32, ffn=256, vocab=129
    )
    names = {
        "mtp": mtp,
        "wide": wide,
        "wide-draft": perturbed(wide, folder / "wide-draft"),
        "target": target,
        "draft": draft,
        "dream": dream,
        "gemma3": gemma,
        "experts": experts,
        "mixed": mixed,
        "mixed-draft": perturbed(mixed, folder / "mixed-draft"),
        "short": short,
        "gpt-oss": oss,
        "eagle": eagle,
        "dflash": dflash,
    }
    return {name: str(path) for name, path in names.items()}


def cases_of(models):
    pair, alone = [models["target"], models["draft"]], [models["target"]]
    shapes = {
        "ar": (alone, {"strategy": "ar"}),
        "chain": (pair, {"strategy": "draft", "draft_tokens": 4}),
        "tree": (pair, {"strategy": "draft", "tree": "3x3"}),
        "easyspec": (pair, {"strategy": "easyspec", "layer_parallel": "2", "tree": "2x3"}),
        "easyspec-uneven": (pair, {"strategy": "easyspec", "layer_parallel": "[[0],[1,2,3]]", "draft_tokens": 4}),
        "easyspec-one": (pair, {"strategy": "easyspec", "layer_parallel": "2", "draft_ranks": 1, "draft_tokens": 4}),
        "del": (alone, {"strategy": "del"}),
        "del-fixed": (alone, {"strategy": "del", "policy": "fixed", "exit_layer": 2, "draft_tokens": 3}),
        "diffuspec": ([models["target"], models["dream"]], {"strategy": "diffuspec", "cps": "off", "adl": "2-4"}),
        "ordered": (pair, {"strategy": "draft", "draft_tokens": 4, "reduce": "ordered"}),
        "static": (pair, {"strategy": "easyspec", "layer_parallel": "2", "draft_tokens": 4, "graphs": "on"}),
        "lookup": (alone, {"strategy": "lookup", "tree": "2x3"}),
        "batch": (pair, {"strategy": "easyspec", "layer_parallel": "2", "tree": "2x3", "batch_size": 2}),
        "del-batch": (alone, {"strategy": "del", "batch_size": 3}),
        "gemma3": ([models["gemma3"]], {"strategy": "lookup", "tree": "2x3"}),
        "experts": ([models["experts"]], {"strategy": "del", "policy": "fixed", "exit_layer": 2, "draft_tokens": 3}),
        "mixed": ([models["mixed"], models["mixed-draft"]], {"strategy": "draft", "tree": "3x3", "batch_size": 2}),
        "short": ([models["short"]], {"strategy": "del", "policy": "fixed", "exit_layer": 2, "draft_tokens": 3}),
        "gpt-oss": ([models["gpt-oss"]], {"strategy": "del", "policy": "fixed", "exit_layer": 2, "draft_tokens": 3}),
        "eagle": ([models["target"], models["eagle"]], {"strategy": "eagle", "draft_tokens": 3, "batch_size": 2}),
        "eagle-tree": ([models["target"], models["eagle"]], {"strategy": "eagle", "tree": "2x2", "graphs": "on"}),
        "mtp": ([models["mtp"]], {"strategy": "mtp", "draft_tokens": 3, "batch_size": 2}),
        "dflash": ([models["target"], models["dflash"]], {"strategy": "dflash", "draft_tokens": 3}),
        "vocabtrim": ([], {"strategy": "vocabtrim"}),
        "del+vocabtrim": ([], {"strategy": "del+vocabtrim", "vocab_keep": "2048"}),
    }
    how = {"dtype": "float64", "device": "cpu"}
    return {
        name: {"models": m, "options": {**how, **o}, "prompt": PROMPT, "count": COUNT}
        | {"sampling": SAMPLING[ALIKE.index(name) % len(SAMPLING) :][:1] if name in ALIKE else SAMPLING}
        | ({"beside": BESIDE} if "batch_size" in o else {})
        for name, (m, o) in shapes.items()
    }


@functools.cache
def one_rank(target):
    return specker.load(target, strategy="ar", dtype="float64", device="cpu")


@functools.cache
def plain(target, drawn, beside):
    """The texts of the prompts with this one of SAMPLING."""
    prompts = (PROMPT, *BESIDE) if beside else [PROMPT]
    return [one_rank(target).generate(prompt, COUNT, **SAMPLING[drawn]).tokens for prompt in prompts]


QUICK = {
    *("ar", "chain", "easyspec-uneven", "del"),
    *("static", "eagle", "mtp", "gpt-oss", "mixed"),
}


def assert_same(models, tmp_path, ranks, names=None):
    cases = {name: case for name, case in cases_of(models).items() if names is None or name in names}
    for n, case in enumerate(cases.values() if names else ()):  # one of SAMPLING each
        case["sampling"] = case["sampling"][n % len(case["sampling"]) :][:1]
    (tmp_path / "cases").write_text(json.dumps(list(cases.values())))
    on_ranks(ranks, "tests/support/dist_worker.py", str(tmp_path / "cases"), str(tmp_path / "out"))
    found = [json.loads((tmp_path / f"out.{rank}.json").read_text()) for rank in range(ranks)]
    for i, (name, case) in enumerate(cases.items()):
        drawn = [SAMPLING.index(how) for how in case["sampling"]]
        want = [plain((case["models"] or [None])[0], n, "beside" in case) for n in drawn]
        if name.startswith("easyspec"):  # a group split over ranks drafts the same tokens
            alone = specker.load(*case["models"], **{k: v for k, v in case["options"].items() if k != "draft_ranks"})
            accepted = [alone.generate(PROMPT, case["count"], **how).stats.accepted for how in case["sampling"]]
            assert [run["accepted"] for run in found[0][i]["runs"]] == accepted, name
        for rank in range(ranks):
            got = found[rank][i]
            assert [run["tokens"] for run in got["runs"]] == want, (name, rank)
            assert got["ar"] == want[0], (name, rank)
            accepted = sum(run["accepted"] for run in got["runs"])
            rests = name in ("del", "del-batch", "diffuspec")  # by the clock
            assert accepted > 0 or rests or name in ("ar", "lookup", "gemma3", "short"), name
            assert found[rank][-1] == {"alike": True, "by_rank": True, "close": True, "lowest": True}
            assert name != "chain" or (got["draft_prefix"] > 0) == (rank == 0), "the draft's K/V of a text is kept"
            assert got["rank"] == rank and got["head_rows"] < (129 if case["models"] else 8192)
    return found


def test_two_ranks_have_the_tokens_of_one(models, tmp_path):
    found = assert_same(models, tmp_path, 2, QUICK)
    assert plain(models["target"], 0, False) != plain(models["target"], 2, False), "the penalties change nothing"
    whole = checkpoint.read(models["target"], dtype=torch.float64, device="cpu").config
    one = 4 * (2 * whole.hidden_size + 3 * whole.hidden_size * whole.intermediate_size // 2)  # norms, half of the rest
    assert found[0][0]["layer_elements"] == found[1][0]["layer_elements"] > one
    assert [each[1]["drafts"] for each in found] == [True, False]
    assert [each[2]["drafts"] for each in found] == [True, True]


@pytest.mark.slow
def test_two_ranks_have_the_tokens_of_one_in_all_cases(models, tmp_path):
    assert_same(models, tmp_path, 2)


@pytest.mark.slow
def test_four_ranks_have_the_tokens_of_one(models, tmp_path):
    """Two ranks share each of the two KV heads."""
    assert_same(models, tmp_path, 4)


FLOATS = {"dtype": "float32", "kv_dtype": "float32"}
GROUPS = FLOATS | {"layer_parallel": "[[0],[1,2,3]]", "draft_tokens": 4}
COMPILED = {
    "chain": ("draft", {"draft_tokens": 4}),
    "sampled": ("draft", {"draft_tokens": 4}),
    "tree": ("draft", {"tree": "3x3", "batch_size": 4}),
    "float32": ("draft", FLOATS | {"draft_tokens": 4}),
    "easyspec": ("easyspec", {"layer_parallel": "2", "draft_tokens": 4}),
    "easyspec-tree": ("easyspec", {"layer_parallel": "[[0],[1,2,3]]", "tree": "2x3", "batch_size": 4}),
    "int8": ("draft", {"draft_tokens": 4, "quantize": "int8", "batch_size": 2}),
    "int4": ("easyspec", {"layer_parallel": "2", "draft_tokens": 4, "quantize": "int4", "draft_ranks": 1}),
    "trimmed": ("draft+vocabtrim", {"draft_tokens": 4, "vocab_keep": "40", "vocab_text": 0}),
    "float32 tensor": ("draft", FLOATS | {"draft_layout": "tensor", "draft_tokens": 4}),
    "groups": ("easyspec", GROUPS),
    "groups tensor": ("easyspec", GROUPS | {"draft_layout": "tensor"}),
    "groups both": ("easyspec", GROUPS | {"draft_layout": "both"}),
    "sampled tensor": ("draft", {"draft_layout": "tensor", "draft_tokens": 4, "batch_size": 4}),
    "tree both": ("easyspec", {"draft_layout": "both", "layer_parallel": "2", "tree": "2x3"}),
    "both-trimmed": (
        "easyspec+vocabtrim",
        {"draft_layout": "both", "layer_parallel": "2", "draft_tokens": 4, "vocab_keep": "40", "vocab_text": 0},
    ),
    "lookup": ("lookup", {"tree": "2x3", "quantize": "int8"}),
    "del": ("del", {"policy": "fixed", "exit_layer": 2, "draft_tokens": 3}),
}


RARELY = "trimmed", "both-trimmed", "del"  # are right, so that their texts must be longer
TWICE = "sampled", "easyspec", "tree both"  # each of their settings is also in another case


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, [name for name in COMPILED if name not in TWICE]),
        *(pytest.param(ranks, [*COMPILED], marks=pytest.mark.slow) for ranks in (2, 4)),
    ],
    ids=["two", "two, all cases", "four"],
)
def test_compiled_layers_of_ranks_have_the_tokens_of_plain_decoding(models, tmp_path, ranks, names):
    """Bit for bit those of the same ranks' `ar`, in every strategy, dtype and batch; and in float32 one process's."""
    cases = []
    for name in names:
        strategy, options = COMPILED[name]
        pair = [models["wide"], models["wide-draft"]][: 1 if strategy in ("lookup", "del") else 2]
        how = {"strategy": strategy, "device": "cpu", **options}
        sampling = [SAMPLING[name.startswith(("sampled", "easyspec-tree", "int8"))]]
        beside = {"beside": BESIDE} if "batch_size" in options else {}
        cases.append(
            {
                "models": pair,
                "options": how,
                "prompt": PROMPT,
                "count": 20 if name in RARELY else 12,
                "sampling": sampling,
                **beside,
            }
        )
    (tmp_path / "cases").write_text(json.dumps(cases))
    on_ranks(ranks, "tests/support/dist_worker.py", str(tmp_path / "cases"), str(tmp_path / "out"))
    found = [json.loads((tmp_path / f"out.{rank}.json").read_text()) for rank in range(ranks)]
    one, accepted = specker.load(models["wide"], strategy="ar", device="cpu", **FLOATS), {}
    for name, case, *each in zip(names, cases, *(rank[:-1] for rank in found), strict=True):
        tokens = each[0]["runs"][0]["tokens"]
        assert all(got["compiled"] and got["ar"] == tokens == got["runs"][0]["tokens"] for got in each), name
        accepted[name] = each[0]["runs"][0]["accepted"]
        if name == "float32":
            assert tokens == [one.generate(PROMPT, case["count"]).tokens]
    assert all(accepted.values()), accepted
    for name in ("float32", "groups"):  # the drafts are alike, whatever the ranks share
        assert len({count for other, count in accepted.items() if other.startswith(name)}) == 1, accepted


def test_ranks_that_share_no_memory_use_gloo(models, tmp_path):
    """As on several machines, and without a compiler on one of them: then no rank runs compiled layers."""
    script = tmp_path / "apart.py"
    script.write_text(f"""
import os, specker
from specker.cpu import communicator
from specker.runtime.ranks.dist import leave
opened = communicator.opened
communicator.opened = lambda *how: None if os.environ["RANK"] == "1" else opened(*how)
for quantize in (None, "int8"):
    how = dict(strategy="easyspec", layer_parallel="2", quantize=quantize, draft_quantize=quantize, device="cpu")
    engine = specker.load({models["wide"]!r}, {models["wide-draft"]!r}, **how)
    assert engine.ranks.communicator is None and engine.model.stack is None and not engine.ranks.ordered
    print(engine.generate([5, 9, 40], 20).tokens == engine.generate_ar([5, 9, 40], 20).tokens)
leave(0)
""")
    assert [each.stdout.split() for each in on_ranks(2, str(script))] == [["True"] * 2] * 2


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_all_ranks_make_the_model(tmp_path, monkeypatch, arch, size):
    """Each rank reads only its slices, and together they are the model."""
    from safetensors import safe_open

    biased = {"attention_bias": True, "mlp_bias": True} if arch == "llama" else {}
    folder = make(tmp_path / "m", arch, layers=2, heads=4, kv_heads=2, tied=False, **biased)
    whole = checkpoint.read(folder, dtype=torch.float64, device="cpu")
    c = whole.config
    read = []
    monkeypatch.setattr(buffers, "_copy", lambda to, source: read.append(source.numel()) or to.copy_(source))
    parts, counts = [], []
    for rank in range(size):
        read.clear()
        parts.append(checkpoint.read(folder, dtype=torch.float64, device="cpu", part=Part(rank, size)))
        counts.append(sum(read))
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        elements = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    split = {n: e for n, e in elements.items() if "_proj" in n or "lm_head" in n}
    kv = sum(e for n, e in split.items() if "k_proj" in n or "v_proj" in n)
    biases = sum(e for n, e in split.items() if n.endswith("bias") and ("o_proj" in n or "down_proj" in n))
    rest = sum(elements.values()) - sum(split.values()) + biases
    # with 4 ranks, two share a KV head
    mine = (sum(split.values()) - kv - biases) / size + kv / min(size, 2)
    assert all(count == rest + mine for count in counts), (counts, rest + mine)
    D = c.head_dim
    for layer in range(2):
        o = torch.cat([p.weights.o[layer] for p in parts], 1)
        down = torch.cat([p.weights.down[layer] for p in parts], 1)
        assert torch.equal(o, whole.weights.o[layer]) and torch.equal(down, whole.weights.down[layer])
        q = torch.cat([p.weights.qkv[layer][: c.num_heads // size * D] for p in parts])
        assert torch.equal(q, whole.weights.qkv[layer][: c.num_heads * D])
        for rank, part in enumerate(parts):  # the KV head of a rank's query heads
            k = part.weights.qkv[layer][c.num_heads // size * D :][: max(c.num_kv_heads // size, 1) * D]
            first = (c.num_heads + rank * c.num_kv_heads // size) * D
            assert torch.equal(k, whole.weights.qkv[layer][first : first + len(k)])
        for name in ("o_bias", "down_bias"):
            if biased:
                assert torch.equal(
                    sum(getattr(p.weights, name)[layer] for p in parts), getattr(whole.weights, name)[layer]
                )
    assert torch.equal(torch.cat([p.own_head for p in parts]), whole.weights.head)


@pytest.mark.parametrize("fused", [False, True])
def test_every_expert_is_split(tmp_path, fused):
    folder = make(tmp_path / "m", layers=1, fused=fused, **QWEN3_MOE)
    whole, *parts = (
        checkpoint.read(folder, dtype=torch.float64, device="cpu", part=part).weights
        for part in (Part(), Part(0, 2), Part(1, 2))
    )
    gate_up, down = whole.gate_up[0].view(6, 2, 32, 64), whole.down[0].view(6, 64, 32)
    for rank, part in enumerate(parts):
        half = slice(16 * rank, 16 * rank + 16)
        assert torch.equal(part.gate_up[0].view(6, 2, 16, 64), gate_up[:, :, half])
        assert torch.equal(part.down[0].view(6, 64, 16), down[:, :, half])
        assert torch.equal(part.router[0], whole.router[0])
    with pytest.raises(CheckpointError, match="tp=4 does not divide the target's experts' intermediate size, 30"):
        odd = make(tmp_path / "odd", layers=1, **QWEN3_MOE | {"moe_intermediate_size": 30, "kv_heads": 4})
        checkpoint.read(odd, dtype=torch.float64, device="cpu", part=Part(0, 4))


def test_what_cannot_be_split_is_refused(tmp_path):
    folder = make(tmp_path / "m", heads=4, kv_heads=2)
    for size, message in ((3, "num_attention_heads, 4"), (8, "num_attention_heads, 4")):
        with pytest.raises(CheckpointError, match=f"tp={size} does not divide the target's {message}"):
            checkpoint.read(folder, dtype=torch.float32, device="cpu", part=Part(0, size))
    six = make(tmp_path / "six", heads=6, kv_heads=2, hidden=96)
    with pytest.raises(CheckpointError, match="neither divides the target's num_key_value_heads, 2"):
        checkpoint.read(six, dtype=torch.float32, device="cpu", part=Part(0, 3))


def test_a_process_takes_its_own_gpu(monkeypatch):
    """Unless the user names another. A single process takes the calling thread's current one."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert dist.own_device(torch.device("cuda")) == torch.device("cuda", 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    own = [str(dist.own_device(torch.device(name))) for name in ("cuda", "cuda:1", "cpu")]
    assert own == ["cuda:3", "cuda:1", "cpu"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2}, "tp=2 times dp=1 is 2, but this job has 1 process: start it with torchrun"),
        ({"dp": 3}, "tp=1 times dp=3 is 3"),
        ({"draft_ranks": 2}, "draft_ranks=2 is more than the 1 ranks"),
    ],
)
def test_rank_options_that_need_more_processes_are_refused(pair, options, message):
    with pytest.raises(ValueError, match=message):
        specker.load(*pair, **options)


def test_an_impossible_job_ends_with_one_message(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert run.main(["--tp", "4", "--prompt", "x"]) == 2
    message = "--tp 4 times --dp 1 is 4, but this job has 2 processes"
    assert capsys.readouterr().err.count(f"specker: error: {message}") == 1


def test_the_report_of_torchrun_ends_with_the_error(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert run.main(["--tp", "4", "--prompt", "x"]) == 2
    failure = ProcessFailure(0, 1, 2, str(tmp_path / "error.json"))  # as torchrun reads it
    *_, code, _, last, border = str(ChildFailedError("specker.run", {0: failure})).splitlines()
    assert code.startswith("  exitcode  : 2") and set(border) == {"="}
    assert last.startswith("  traceback : specker: error: --tp 4 times --dp 1 is 4, but this job has 1 process")


def test_ranks_that_share_a_socket_are_told(monkeypatch, tmp_path):
    """If they share a target: replicas, and ranks of other machines, do not count."""
    for node in ("node0", "node1"):
        (tmp_path / node).mkdir()
    monkeypatch.setattr(load, "NODES", tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert load.shared_cores(1) is load.shared_cores(2) is None
    assert load.shared_cores(8).startswith("4 ranks share 2 sockets of this machine, where one process with all its ")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert load.shared_cores(8) is None


def test_several_processes_cannot_share_stdin(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run.main(["--prompts", "-"]) == 2
    assert "several processes cannot share stdin: put the prompts in a file" in capsys.readouterr().err


def test_replicas_share_the_prompts_and_keep_their_order(tmp_path):
    prompts = tmp_path / "p.jsonl"
    texts = ["def f(x):", "class A:", "import os"]
    prompts.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    args = ["--prompts", str(prompts), "--max-new-tokens", "6", "--dtype", "float64", "--temperature", "0.7"]
    out = tmp_path / "out.json"
    done = on_ranks(2, "-m", "specker.run", "--dp", "2", *args, "--json", str(out))
    got = json.loads(out.read_text())
    engine = specker.load(dtype="float64", device="cpu")
    assert [row["tokens"] for row in got["prompts"]] == [engine.generate(t, 6, temperature=0.7).tokens for t in texts]
    assert got["ranks"] == {"tp": 1, "dp": 2, "draft": 1, "reduce": "fast"}
    assert got["total"]["rounds"] == sum(row["rounds"] for row in got["prompts"])
    assert sum(each.stdout.count("\n") for each in done) >= len(texts)


def test_other_weights_on_a_rank_end_the_job(models, tmp_path):
    """With one message, without a hang."""
    script = tmp_path / "other.py"
    script.write_text(f"""
import os, sys
from specker.cli import run
from specker.runtime.ranks import dist
if os.environ["RANK"] == "1":
    dist.fingerprint = lambda folder: b"something else"
sys.exit(run.main(["--target", {models["target"]!r}, "--strategy", "ar", "--prompt", "x"]))
""")
    said = "".join(each.stderr for each in on_ranks(2, str(script), codes=[2, 2]))
    assert said.count("specker: error: rank 1 of the job has another target than rank 0") == 1


DIFFERENT = {
    "strategy": (["--strategy", "ar"], ["--strategy", "lookup"], "--strategy"),
    "max-new-tokens": (["--max-new-tokens", "3"], ["--max-new-tokens", "9"], "--max-new-tokens"),
    "prompt": (["--prompt", "a"], ["--prompt", "b"], "--prompt"),
    "two": (["--seed", "1", "--check"], ["--seed", "2"], "--check and another --seed"),
    "split": (["--reduce", "ordered"], ["--draft-ranks", "2", "--max-context", "64"], None),
}


@pytest.mark.parametrize("case", cases.one_in(2, DIFFERENT))
def test_ranks_with_different_settings_end_with_one_sentence(models, case):
    """They waited for each other, or decoded different numbers of tokens."""
    *each, named = DIFFERENT[case]
    named = named or "--max-context and another --draft-ranks and another --reduce"
    usual = {"--target": models["target"], "--device": "cpu", "--strategy": "ar", "--max-new-tokens": "3"}
    commands = []
    for own in each:
        given = [word for flag, value in usual.items() if flag not in own for word in (flag, value)]
        commands.append(["-m", "specker.run", *given, *own])
    done = on_ranks(2, each=commands, codes=[2, 2])
    said = f"specker: error: rank 1 of the job has another {named} than rank 0: start all ranks with the same settings"
    assert said in "".join(rank.stderr for rank in done)
    assert all("Traceback" not in rank.stderr for rank in done)


def test_a_rank_that_is_done_has_no_traceback_if_another_one_fails(tmp_path):
    script = tmp_path / "done.py"
    script.write_text("""
import os, sys
import torch.distributed as td
from specker.cli import run
def ends():
    td.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        raise ValueError("out.json cannot be written")
    return 0
run.run, run.parse = ends, lambda argv: ()
sys.exit(run.main())
""")
    first, second = (done.stderr for done in on_ranks(2, str(script), codes=[2, 1]))
    assert first.endswith("specker: error: out.json cannot be written\n")
    assert "Traceback" not in second


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.slow), "hung"])
def test_a_lost_rank_ends_the_job(tmp_path, how):
    """A dead or hung rank ends the job within the timeout, with one message of the other rank of its replica. The other
    replica has time for its own prompts."""
    script = tmp_path / "lost.py"
    script.write_text(f"""
import os, signal, sys, time
from pathlib import Path
from specker.cli import run
from specker.runtime import loop
from specker.runtime.ranks import dist
rank, pids, ended = os.environ["RANK"], Path({str(tmp_path)!r}), dist.leave
(pids / rank).write_text(str(os.getpid()))
launch, warmed, rounds = loop.launch, dist.Ranks.warmed, []
def lost(*args):
    rounds.append(0)
    if rank == "1" and len(rounds) == 3:
        {"os.kill(os.getpid(), signal.SIGKILL)" if how == "killed" else "time.sleep(1000)"}
    return launch(*args)
def begins(ranks):
    ranks.timeout = 3.0 if rank == "0" else 100.0  # a loaded machine loses no other rank
    warmed(ranks)
    loop.launch = lost
def leave(code):
    for other in "123" if rank == "0" and {how == "hung"} else "":  # torchrun ends them
        os.kill(int((pids / other).read_text()), signal.SIGKILL)
    return ended(code)
dist.Ranks.warmed, dist.leave = begins, leave
sys.exit(run.main(["--dp", "2", "--strategy", "draft", "--prompt", "def f(x):", "--max-new-tokens", "200"]))
""")
    if how == "killed":
        done = torchrun(4, str(script), timeout=150)
        said, _, report = done.stderr.partition(" failed (exitcode: -9)")  # torchrun's own traceback follows
        least = 0  # torchrun may end the other rank first
        assert done.returncode != 0 and "SIGKILL" in report
    else:
        said, least = "".join(each.stderr for each in on_ranks(4, str(script), codes=[1, -9, -9, -9])), 1
    message = "specker: error: another process of this job ended, or did not answer within 3 s"
    assert least <= said.count(message) <= 1, said
    assert "[rank0]" not in said and "Traceback" not in said


def test_a_rank_that_loads_longer_is_waited_for(models, tmp_path):
    """Rank 0 alone reads the draft and may compile for minutes; only after the warm-up is a rank that takes so long a
    lost one."""
    script = tmp_path / "slow.py"
    script.write_text(f"""
import time, specker
from pathlib import Path
from specker.runtime import load
from specker.runtime.ranks import dist
dist.TIMEOUT = 1.0
load.NODES = Path("/nowhere")
read = load.read_checkpoint
def slow(source, **how):
    if how.get("owner") is not None:
        time.sleep(2)
    return read(source, **how)
load.read_checkpoint = slow
engine = specker.load({models["target"]!r}, {models["draft"]!r}, device="cpu", dtype="float64")
assert engine.warnings["shared_cores"].startswith("2 ranks share 1 socket of this machine")
engine.ranks.timeout = 100.0  # a loaded machine may need more than 1 s for the steps below
engine.warmup()
assert engine.ranks.limit == 100.0
engine.generate([5, 9, 40], 4)
dist.leave(0)
""")
    on_ranks(2, str(script))


def test_ranks_measure_the_same_rounds(models, tmp_path):
    """Though their clocks differ: a rank that measured fewer rounds would leave the warm-up while the others wait. With
    compiled layers, one that prefilled other rows of prompts would wait in another exchange."""
    script = tmp_path / "clocks.py"
    script.write_text(f"""
import os, time, types, specker
from specker.runtime import prompts, warmup
from specker.runtime.ranks import dist
dist.TIMEOUT = dist.START = 30.0
hurry = 1000.0 if os.environ["RANK"] == "1" else 1.0
warmup.time = prompts.time = types.SimpleNamespace(perf_counter=lambda: hurry * time.perf_counter())
engine = specker.load({models["target"]!r}, {models["draft"]!r}, device="cpu", dtype="float64")
engine.warmup()
engine.generate([5, 9, 40], 4)
how = dict(device="cpu", quantize="int8", batch_size=2)
engine = specker.load({models["wide"]!r}, {models["wide-draft"]!r}, **how)
texts = [[n] * 150 for n in range(1, 5)]
together = [each.tokens for each in engine.generate(texts, [20, 3, 9, 12])]
print(together == [engine.generate(text, len(found)).tokens for text, found in zip(texts, together)])
dist.leave(0)
""")
    assert [each.stdout.split() for each in on_ranks(2, str(script))] == [["True"]] * 2


class Never:
    """An event of a device that waits for ever."""

    def query(self):
        return False


def test_a_device_that_waits_for_a_lost_rank_is_not_waited_for(monkeypatch):
    """As a replayed graph's collective does."""
    how = {"ordered": False, "replica": 0, "replicas": 1, "device": torch.device("cuda", 0), "timeout": 0.1}
    ranks = dist.Ranks(Part(0, 2), None, 1, None, limit=0.05, **how)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_set_pg_timeout", lambda *_: None)
    with pytest.raises(dist.RankLost, match=r"another process of this job did not answer within 0\.05 s"):
        ranks.wait(Never())
    ranks.warmed()
    with pytest.raises(dist.RankLost, match=r"within 0\.1 s"):
        ranks.wait(Never())
    r = Round(None, done=Never(), wait=ranks.wait)
    with pytest.raises(dist.RankLost):
        collect(r)


def test_ranks_with_other_counts_keep_the_same_rows(tmp_path):
    """Those of rank 0, which alone counts what is written."""
    target = make(tmp_path / "target", "qwen2", layers=4, max_context=192, heads=4, kv_heads=2, tokenizer=True)
    pair = [str(target), str(perturbed(target, tmp_path / "draft"))]
    strategies = {"easyspec+vocabtrim": pair, "del+vocabtrim": pair[:1]}
    for name, rank in itertools.product(strategies, range(2)):
        caches.empty(tmp_path / f"{name}-{rank}")
    script = tmp_path / "counts.py"
    script.write_text(f"""
import os, torch, specker
os.environ["SPECKER_VOCAB_LEARN"] = "on"
from specker.runtime.strategies.vocabtrim import scores as vocab_scores
from specker.checkpoints.checkpoint import read_tokenizer
from specker.runtime.ranks.dist import leave
from specker.runtime.strategies.vocabtrim.counts import VocabCounts
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
own = range(200, 210) if rank == 0 else range(220, 230)
how = dict(device="cpu", dtype="float64", vocab_keep="40", vocab_text=0)
for name, models in {strategies!r}.items():
    os.environ["SPECKER_CACHE"] = f"{tmp_path}/{{name}}-{{rank}}"
    VocabCounts(vocab_scores.tokenizer_hash(read_tokenizer({str(target)!r})), {{}}).add([*own] * 9)
    engine = specker.load(*models, strategy=name, **how)
    out = engine.generate([5, 9, 40], 20)
    assert out.tokens == engine.generate_ar([5, 9, 40], 20).tokens
    assert set(range(200, 210)) <= set(engine.trimmed_head.ids.tolist()) and 220 not in engine.trimmed_head.ids
    assert (engine.trimmed_head.counts is not None) == (rank == 0)
    print(f"{{name}}: rank {{rank}} keeps {{len(engine.trimmed_head.ids)}} rows")
leave(0)
""")
    out = "".join(each.stdout for each in on_ranks(2, str(script)))
    assert all(f"{name}: rank {rank} keeps 40 rows" in out for name in strategies for rank in range(2))
