"""The proposer for vLLM: by itself, and (marker `vllm`, `make vllm`) inside real engines in vLLM's own environment."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from make_checkpoint import edit, make
from make_dflash import make_dflash
from make_head import make_head
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import specker
from specker import zoo
from specker.integrations import vllm
from specker.integrations.drafts import Drafts
from specker.model.cache import KVCache
from specker.model.prefill import prefill

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.prefix) / "peers" / "vllm" / "bin" / "python"
TARGET, DRAFT = str(zoo.path("code-target")), str(zoo.path("code-draft"))
PROPOSER = "specker.integrations.vllm.Proposer"
STRATEGIES = ("draft", "easyspec", "vocabtrim", "easyspec+vocabtrim", "diffuspec", "lookup")


def config(own=None, requests=4, **more):
    return SimpleNamespace(
        model_config=SimpleNamespace(model=TARGET, max_model_len=128),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        device_config=SimpleNamespace(device="cpu"),
        additional_config={} if own is None else {"specker": own},
    )


@pytest.fixture
def rank(monkeypatch):
    """vLLM's process groups, as far as the proposer asks for them."""
    where = SimpleNamespace(rank_in_group=0, is_last_rank=True)
    groups = ModuleType("vllm.distributed.parallel_state")
    groups.get_tp_group = groups.get_pp_group = lambda: where
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", groups)
    return where


def step(proposer, texts, done=None):
    """propose() with vLLM's arguments: arrays larger than needed, and [] for requests whose prompt is not done."""
    token_ids = np.full((6, 128), 99, np.int32)
    count = np.zeros(6, np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)], count[row] = text, len(text)
    sampled = [[text[-1]] if done is None or done[row] else [] for row, text in enumerate(texts)]
    return proposer.propose(sampled, count, token_ids, slot_mappings=None)


def test_each_request_gets_its_draft(rank):
    proposer, drafts = vllm.Proposer(config({"dtype": "float64"})), Drafts(TARGET, device="cpu", dtype="float64")
    proposer.load_model(None)
    texts = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
    want = [drafts.draft([text], 3)[0] for text in texts]
    assert step(proposer, texts) == want and all(len(tokens) == 3 for tokens in want)
    assert step(proposer, texts[::-1], done=[True, False, True]) == [want[2], [], want[0]]


def test_other_ranks_draft_nothing(rank):
    """vLLM ignores their drafts, so they load no drafter."""
    for rank.rank_in_group, rank.is_last_rank in ((1, True), (0, False)):
        proposer = vllm.Proposer(config())
        assert proposer.drafts is None and step(proposer, [[1, 2], [3]]) == [[], []]


def test_settings_come_from_the_additional_config(rank):
    own = {"strategy": "vocabtrim", "vocab_keep": "512", "vocab_text": 0, "kv_tokens": 1024}
    drafts = vllm.Proposer(config(own, requests=300)).drafts
    assert len(drafts.drafter.head.token_ids) in range(500, 530) and len(drafts._slots) == 256
    assert drafts.drafter.cache.k.shape[1] == 1024 // 256 + 1 and drafts.limit == 128
    assert vllm.Proposer(config()).drafts.drafter.cache.k.shape[1] == 65536 // 256 + 1


@pytest.mark.parametrize(
    ("own", "error", "said"),
    [
        ({"strategy": "del"}, ValueError, "does not draft for another engine"),
        ({"tree": "2x2"}, ValueError, "one path"),
        ({"strategy": "eagle", "draft": "x"}, ValueError, 'pass the head to vLLM itself, as .*"eagle3"'),
        ({"strategy": "mtp+lookup"}, ValueError, "pass the head to vLLM itself"),
        ({"strategie": "draft"}, TypeError, "strategie"),
        (["draft"], ValueError, "must be a JSON object"),
    ],
)
def test_wrong_settings_are_refused(rank, own, error, said):
    with pytest.raises(error, match=said):
        vllm.Proposer(config(own))


def test_an_older_vllm_is_refused(rank, monkeypatch):
    monkeypatch.setattr(vllm, "version", lambda name: "0.20.1")
    with pytest.raises(
        ValueError, match=r"needs vLLM 0\.32\.0 or newer with its V1 model runner, and this is 0\.20\.1"
    ):
        vllm.Proposer(config())


class Engine:
    """A vLLM engine in its own process (bench/vllm_engine.py)."""

    def __init__(self, folder: Path, **options):
        file, self.log = folder / "options.json", folder / "log"
        common = {"model": TARGET, "dtype": "float32", "max_model_len": 512, "max_num_seqs": 3, "enforce_eager": True}
        file.write_text(json.dumps({"options": common | options}))
        env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("w") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            self.process = subprocess.Popen([PYTHON, ROOT / "bench/vllm_engine.py", file], env=env, **pipes)
        assert "ready" in self.read()

    def read(self) -> dict:
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        return json.loads(line)

    def ask(self, prompts, count, **sampling) -> dict:
        request = {"prompts": prompts, "count": count, "sampling": {"temperature": 0, **sampling}}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.read()

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)


def requests() -> list[list[int]]:
    """18 prompts of 1 to 150 tokens, some of them equal, some with a common beginning."""
    rng = random.Random(0)
    texts = list(AutoTokenizer.from_pretrained(TARGET)(list(zoo.PROMPTS))["input_ids"])
    long = [token for text in texts for token in text][:150]
    found = [*texts, long, long, texts[0], long[:70], [7], [7]]
    found += [[*long[:60], *rng.choice(texts)] for _ in range(18 - len(found))]
    rng.shuffle(found)
    return found[:18]


# Three slots; prompts are prefilled in chunks of at most 48 tokens beside the decoding of others.
BUSY = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}
needs_vllm = pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed beside specker: `make vllm`")


@pytest.fixture(scope="module")
def plain_engine(tmp_path_factory):
    engine = Engine(tmp_path_factory.mktemp("plain"), **BUSY)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(plain_engine):
    """Plain vLLM's tokens for `requests`."""
    return plain_engine.ask(requests(), 40)["tokens"]


FLAGS = {"norm_before_fc": True, "fc_norm": True, "norm_output": True}
# method of vLLM, maker and its arguments
HEADS = {
    "SafeAILab": ("eagle3", make_head, {"ids": list(range(3, 90, 2))}),
    "SafeAILab, own embedding": ("eagle3", make_head, {"own_embedding": True}),
    "SpecForge, fc_norm": ("eagle3", make_head, {"fc_norm": True}),
    "speculators": ("eagle3", make_head, {"layout": "nested", "norm_before_residual": False}),
    "speculators, all flags": ("eagle3", make_head, {"layout": "nested", "norm_before_residual": True, **FLAGS}),
    "speculators, two layers": ("eagle3", make_head, {"layout": "nested", "layers": 2, "norm_before_residual": True}),
    "EAGLE-1": ("eagle", make_head, {"layout": "eagle1", "fc_bias": False}),
    "z-lab": ("dflash", make_dflash, {}),
    "speculators, dflash": ("dflash", make_dflash, {"layout": "dflash", "ids": list(range(3, 90, 2))}),
}


@pytest.mark.vllm
@needs_vllm
def test_heads_draft_what_vllms_own_classes_draft(tmp_path):
    """For the same hidden states and texts. vLLM computes in float32, so nearly tied tokens could differ; none do."""
    target = make(tmp_path / "target", layers=8, max_context=64, seed=2)
    sizes, asked, wanted = json.loads((target / "config.json").read_text()), [], {}
    for n, (name, (method, maker, how)) in enumerate(HEADS.items()):
        folder = maker(tmp_path / str(n), sizes, **how)
        if method == "dflash":  # vLLM's CPU op norms the text's keys of all layers by the first one's weights
            x = load_file(folder / "model.safetensors")
            x["layers.1.self_attn.k_norm.weight"] = x["layers.0.self_attn.k_norm.weight"].clone()
            save_file(x, folder / "model.safetensors")
        if "speculators" in name:  # vLLM reads this part too
            verifier = {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
            proposal = {"proposal_type": "greedy", "speculative_tokens": 4}
            own = {"algorithm": method, "proposal_methods": [proposal], "verifier": verifier}
            edit(folder, speculators_config=own)
        strategy = "dflash" if method == "dflash" else "eagle"
        engine = specker.load(target, folder, strategy, device="cpu", dtype="float64", policy="fixed", draft_tokens=4)
        seen, drafts = [], []
        engine.trace = seen.append
        text = [3, 1, 4, 1, 5, 9] + engine.generate([3, 1, 4, 1, 5, 9], 24).tokens
        for row in seen:
            if not (size := len(row["draft"])):
                continue
            before, file, model = text[: row["position"]], tmp_path / f"{n}-{row['position']}.pt", engine.model
            cache = KVCache(model.config, 64, dtype=model.dtype, device="cpu")
            rows = prefill(model, cache, before[:-1], engine.drafter.aux_layers, len(before))
            taps = torch.cat([rows[depth] for depth in engine.drafter.aux_layers], 1)
            if method == "eagle":
                taps = torch.nn.functional.rms_norm(taps, taps.shape[-1:], model.norm, model.config.rms_norm_eps)
            torch.save(taps.float(), file)
            drafts.append({"text": before, "taps": str(file), "count": size})
            wanted.setdefault(name, []).append(row["draft"])
        asked.append({"folder": str(folder), "method": method, "drafts": drafts})
    (tmp_path / "asked.json").write_text(json.dumps({"target": str(target), "heads": asked}))
    program = [PYTHON, Path(__file__).with_name("vllm_heads.py"), tmp_path / "asked.json"]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(program, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for (name, want), found in zip(wanted.items(), json.loads(done.stdout), strict=True):
        assert found == want and len(want) > 5, name


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tokens_are_plain_vllms(plain, tmp_path, strategy):
    """At batch 1, and with requests that come, wait for slots and end beside others."""
    speculative = {"model": PROPOSER, "num_speculative_tokens": 4}
    own = {"specker": {"strategy": strategy, "kv_tokens": 2048}}
    caching = {"enable_prefix_caching": strategy == "draft"}
    engine = Engine(tmp_path, **BUSY, **caching, speculative_config=speculative, additional_config=own)
    found = engine.ask(requests(), 40)
    alone = [engine.ask([ids], 40) for ids in requests()[:3]]
    engine.close()
    assert found["tokens"] == plain
    assert [each["tokens"][0] for each in alone] == plain[:3]
    assert (
        found["accepted"][0] > 0 and sum(found["accepted"]) > (0.1 if strategy == "lookup" else 0.3) * found["drafted"]
    )


@pytest.mark.vllm
@needs_vllm
def test_preempted_requests_keep_their_tokens(plain_engine, tmp_path):
    """vLLM drops requests and prefills them anew. Its pool holds the blocks of one finished request, and each new
    request begins with one block. So of two that run at once, one can only finish after the other was dropped, whatever
    is accepted and however fast the machine is."""
    block, prompt, count, limit = 32, 20, 100, 128
    last = -(-(prompt + count - 1) // block)  # the last token needs no K/V
    assert last == limit // block == 4 and last + -(-prompt // block) > 4
    pool = {"block_size": block, "num_gpu_blocks_override": 1 + last, "max_model_len": limit}  # vLLM keeps one empty
    speculative = {"model": PROPOSER, "num_speculative_tokens": 4}
    texts = [ids[-prompt:] for ids in requests() if len(ids) >= prompt][:6]
    assert len(texts) == 6
    want = plain_engine.ask(texts, count)["tokens"]
    engine = Engine(tmp_path, **BUSY, **pool, enable_prefix_caching=False, speculative_config=speculative)
    found = engine.ask(texts, count)
    engine.close()
    assert found["preemptions"] > 0 and found["tokens"] == want


@pytest.mark.vllm
@needs_vllm
def test_acceptance_is_that_of_vllms_own_draft_model(tmp_path):
    found = []
    ways = (
        {"speculative_config": {"model": DRAFT, "method": "draft_model", "num_speculative_tokens": 4}},
        {"speculative_config": {"model": PROPOSER, "num_speculative_tokens": 4},
         "additional_config": {"specker": {"dtype": "float32"}}},
    )  # fmt: skip
    for n, way in enumerate(ways):
        folder = tmp_path / str(n)
        folder.mkdir()
        engine = Engine(folder, enable_prefix_caching=False, **way)
        found.append(engine.ask(requests()[:8], 60))
        engine.close()
    assert found[0]["tokens"] == found[1]["tokens"]
    theirs, ours = (np.array(each["accepted"]) / each["drafted"] * 4 for each in found)
    assert np.abs(theirs - ours).max() < 0.02, (theirs, ours)
