"""A draft model over several ranks (`--draft-layout`): every layout has the text and the drafts of one process, and the
collectives that docs/gpus.md counts."""

import json

import pytest
import torch
from jobs import on_ranks
from make_checkpoint import QWEN3_NEXT, edit, make
from pairs import perturbed

import specker
from specker.checkpoints import checkpoint
from specker.model.config import CheckpointError
from specker.model.split import Part
from specker.runtime import strategies
from specker.runtime.ranks import dist
from specker.runtime.recipe import resolve

PROMPTS = [[5, 9, 40, 77, 3, 8], [7], [3] * 70]
SAMPLING = [{}, {"temperature": 0.7, "seed": 4, "top_p": 0.9}]
COUNT, LAYERS = 8, 5  # tokens; layers of the draft, whose groups are [0], [1, 2], [3], [4]
GROUPS, SEVERAL = 4, 1  # groups, and those of several layers
DRAFT, EASYSPEC = {"strategy": "draft"}, {"strategy": "easyspec", "layer_parallel": "2"}
CHAIN, TREE = {"draft_tokens": 4}, {"tree": "3x3"}
TRIM = {"strategy": "easyspec+vocabtrim", "vocab_keep": "40", "vocab_text": 0}
# case: options; collectives of the layers in the exact pass, in each other one, and of the head; None: not counted
CASES = {
    "draft replicated": (DRAFT | CHAIN, (0, 0, 0)),
    "draft tensor": (DRAFT | CHAIN, (2 * LAYERS, 2 * LAYERS, 1)),
    "draft tensor tree": (DRAFT | TREE, (2 * LAYERS, 2 * LAYERS, 1)),
    "draft tensor batch": (DRAFT | {"batch_size": 2}, None),
    "easyspec replicated": (EASYSPEC | CHAIN, (0, 0, 0)),
    "easyspec layer-parallel": (EASYSPEC | CHAIN, (0, SEVERAL, 0)),
    "easyspec tensor": (EASYSPEC | CHAIN, (2 * LAYERS, LAYERS + GROUPS, 1)),
    "easyspec both": (EASYSPEC | CHAIN, (LAYERS, LAYERS + SEVERAL, 1)),
    "easyspec both tree": (EASYSPEC | TREE, (LAYERS, LAYERS + SEVERAL, 1)),
    "easyspec both static": (EASYSPEC | CHAIN | {"graphs": "on"}, (LAYERS, LAYERS + SEVERAL, 1)),
    "easyspec both trimmed": (EASYSPEC | CHAIN | TRIM, (LAYERS, LAYERS + SEVERAL, 0)),
    "pard tensor": (DRAFT | CHAIN, None),
    "recurrent tensor": (DRAFT | CHAIN, None),
    "recurrent both": (EASYSPEC | CHAIN | {"layer_parallel": "1"}, None),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Pairs of target and draft: with biases everywhere and fewer KV heads than four ranks, with a PARD model, and with
    recurrent layers."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"max_context": 192, "vocab": 129, "heads": 4, "kv_heads": 2}
    target = make(folder / "target", layers=LAYERS, attention_bias=True, mlp_bias=True, **sizes)
    edit(perturbed(target, folder / "pard"), pard_token=126)
    recurrent = make(folder / "recurrent", max_context=192, vocab=129, **QWEN3_NEXT)
    pairs = {"pard": (target, folder / "pard")}
    pairs |= {"recurrent": (recurrent, perturbed(recurrent, folder / "recurrent-draft"))}
    usual = target, perturbed(target, folder / "draft")
    return {name: [str(model) for model in pairs.get(name.split()[0], usual)] for name in CASES}


def decoded(case):
    """What one process decodes and drafts."""
    options = {name: value for name, value in case["options"].items() if name not in ("draft_layout", "graphs")}
    engine, rows, runs = specker.load(*case["models"], device="cpu", dtype="float64", **options), [], []
    engine.trace = rows.append
    for how in case["sampling"]:
        rows.clear()
        texts = engine.generate(case["prompts"], COUNT, **how)
        plain = engine.generate_ar(case["prompts"], COUNT, **how)
        assert [text.tokens for text in texts] == [text.tokens for text in plain]
        drafts = [[row["prompt"], row["position"], row["draft"], row["parents"]] for row in rows]
        runs.append({"tokens": [text.tokens for text in texts], "drafts": drafts})
    return runs


QUICK = (
    *("draft tensor", "draft tensor batch", "easyspec tensor", "easyspec both"),
    *("easyspec both trimmed", "recurrent both"),
)
FOUR = ("draft tensor", "easyspec layer-parallel", "easyspec tensor", "easyspec both")


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, QUICK),
        pytest.param(2, tuple(name for name in CASES if name not in QUICK), marks=pytest.mark.slow),
        pytest.param(4, FOUR, marks=pytest.mark.slow),
    ],
    ids=["two", "two, other cases", "four"],
)
def test_layouts_have_the_drafts_of_one_process(models, tmp_path, ranks, names):
    cases = {}
    for n, name in enumerate(names):
        options, counts = CASES[name]
        cases[name] = {"models": models[name], "options": options | {"draft_layout": name.split()[1]}, "count": COUNT}
        cases[name] |= {"prompts": PROMPTS if "batch" in name else PROMPTS[:1]}
        both = options.get("draft_tokens") and counts and names != QUICK
        cases[name] |= {"sampling": SAMPLING if both else [SAMPLING[n % 2]]}
    (tmp_path / "cases").write_text(json.dumps(list(cases.values())))
    on_ranks(ranks, "tests/support/layout_worker.py", str(tmp_path / "cases"), str(tmp_path / "out"))
    found = [json.loads((tmp_path / f"out.{rank}.json").read_text()) for rank in range(ranks)]
    for i, (name, case) in enumerate(cases.items()):
        want, counts = decoded(case), CASES[name][1]
        for rank, got in enumerate(each[i] for each in found):
            assert [run["tokens"] for run in got["runs"]] == [run["tokens"] for run in want], (name, rank)
            if "batch" not in name and "static" not in name:  # a policy that follows the clock; drafts past the end
                assert got["runs"] == want, (name, rank)
            if counts and (rank == 0 or "replicated" not in name):
                exact, other, head = counts
                assert got["steps"], name
                for depth, count in got["steps"]:
                    assert count == exact + head + (depth - 1) * (other + head), (name, rank, depth)


@pytest.mark.parametrize(("layout", "ranks"), [("tensor", 2), ("both", 2), ("both", 3)])
def test_the_parts_of_all_ranks_make_the_draft(models, layout, ranks):
    """Attention and its biases are whole on each rank in layout both, whose ranks need not divide the heads."""
    folder = models["easyspec both"][1]
    whole, *parts = (
        checkpoint.read(folder, dtype=torch.float64, device="cpu", part=part, whole_head=True)
        for part in (Part(), *(Part(rank, ranks, layout == "both") for rank in range(ranks)))
    )
    split = {"tensor": ("gate_up", "down", "qkv", "o"), "both": ("gate_up", "down")}[layout]
    for name in ("qkv", "o", "gate_up", "down"):
        each = [getattr(part.weights, name).numel() for part in parts]
        assert each == [getattr(whole.weights, name).numel() // (ranks if name in split else 1)] * ranks, name
    for name in ("o_bias", "down_bias"):
        total, own = sum(getattr(part.weights, name) for part in parts), getattr(whole.weights, name)
        assert torch.equal(total, own * (ranks if name == "o_bias" and layout == "both" else 1)), name
    assert torch.equal(torch.cat([part.weights.down for part in parts], -1), whole.weights.down)
    assert torch.equal(torch.cat([part.own_head for part in parts]), whole.weights.head)


REFUSED = [
    ({"strategy": "draft", "draft_layout": "both"}, "draft_layout='both' is for strategy easyspec, not 'draft'"),
    (
        {"strategy": "diffuspec", "draft_layout": "tensor"},
        "draft_layout='tensor' is for strategy draft or easyspec, not 'diffuspec'",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_layouts_that_cannot_be_met_are_refused(models, options, message):
    with pytest.raises(ValueError, match=message):
        specker.load(*models["easyspec both"], **options)


def test_a_draft_that_cannot_be_split_is_refused_before_weights_are_read(models):
    """On every rank, with the draft's numbers. Layout both splits no heads."""
    cpu = torch.device("cpu")
    for rank, layout in ((0, "tensor"), (2, "tensor"), (0, "both")):
        options = strategies.options(strategy="easyspec", draft_layout=layout, draft_ranks=3)
        ranks = dist.Ranks(Part(rank, 3), None, 3, None, False, 0, 1, cpu, 1.0, 1.0)
        if layout == "both":
            assert resolve(options, *models["easyspec both"], cpu, None, ranks).draft_part == Part(0, 3, True)
            continue
        with pytest.raises(CheckpointError, match="draft_ranks=3 does not divide the draft's num_attention_heads, 4"):
            resolve(options, *models["easyspec both"], cpu, None, ranks)
