"""examples/engine.py: a foreign engine that speculates with specker's ops emits transformers' greedy tokens."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from make_checkpoint import exact_oracle, make, oracle, oracle_logits

from examples import engine as example
from examples import recurrent
from examples.engine import Engine
from specker.kernels import ancestor_words, sample_rows

PROMPTS = [[5, 9, 77, 3, 110, 42, 8], [7, 7], [(13 * n) % 128 for n in range(45)]]  # the last needs two prefill passes
NEW = 14
OPS = ("tree_attention", "vocab_topk", "accept_walk", "kv_commit", "row_linear")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a copy of it with noise in its weights, and an unrelated small model."""
    folder = tmp_path_factory.mktemp("engine")
    target = make(folder / "target", layers=2, eos=3)
    near = oracle(target)
    with torch.no_grad():
        for p in near.parameters():
            p.add_(0.02 * p.std() * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    near.save_pretrained(folder / "near")
    return {"target": target, "near": folder / "near", "far": make(folder / "far", layers=1, seed=1)}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> list[list[int]]:
    """What transformers decodes after each prompt, in float64 throughout."""
    with pytest.MonkeyPatch.context() as patch:
        exact_oracle(patch)
        model = oracle(folders["target"], torch.float64)
        texts = [model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0] for ids in PROMPTS]
    return [text[len(ids) :].tolist() for text, ids in zip(texts, PROMPTS, strict=True)]


def engine(folders: dict[str, Path], draft: str, tree: tuple[int, int] = (3, 4), **options) -> Engine:
    torch._dynamo.reset()  # every engine has graphs of its own, and dynamo's limit counts those of all engines
    return Engine(folders["target"], folders[draft], 3, 64, tree, dtype=torch.float64, **options)


def sampled(target: Path, texts: list[list[int]], seed: int, temperature: float) -> list[list[int]]:
    """Each token of `texts` drawn again, from transformers' logits after the tokens before it."""
    model, drawn = oracle(target, torch.float64), []
    for prompt, ids in zip(PROMPTS, texts, strict=True):
        positions = torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
        logits = oracle_logits(model, torch.tensor(prompt + ids))[positions]
        drawn.append(sample_rows(logits, temperature, 0, 1.0, seed, positions).tolist())
    return drawn


def test_equals_transformers(folders, expected):
    """Plain decoding and trees of a good draft, at temperature 0; above it they equal each other. A sequence ends with
    a stop id, also in the middle of an accepted path, while the others go on."""
    tested = engine(folders, "near")
    plain, passes = tested.generate(PROMPTS, NEW, plain=True)
    texts, whole = tested.generate(PROMPTS, NEW)
    assert plain == expected and passes == [len(ids) for ids in expected]
    assert texts == expected and sum(whole) * 2 < sum(passes)

    plain, passes = tested.generate(PROMPTS, NEW, plain=True, draw=(11, 0.8))
    texts, rounds = tested.generate(PROMPTS, NEW, draw=(11, 0.8))
    assert plain == sampled(folders["target"], plain, 11, 0.8) != expected
    assert texts == plain and sum(rounds) * 3 < sum(passes) * 2

    stop = expected[0][2]
    tested.stops = {stop}
    cut = [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in expected]
    assert len(cut[0]) == 3 and max(map(len, cut)) > 3
    texts, shorter = tested.generate(PROMPTS, NEW)
    assert texts == cut and shorter[0] < whole[0]  # rounds


def test_accepts_whole_chains_of_the_target_itself(folders, expected):
    """The draft's K/V follows the accepted path, so a model that drafts for itself is never refused: not with a trimmed
    head that has its tokens, whatever the order of the rows, and not with K/V in scattered pages."""
    kept = sorted({token for ids in expected for token in ids}, key=lambda token: token * 37 % 101)
    tested = engine(folders, "target", (1, 4), kept=torch.tensor(kept))
    order = torch.randperm(tested.table.numel(), generator=torch.Generator().manual_seed(2)).int()
    tested.table.copy_(order.view_as(tested.table))
    texts, rounds = tested.generate(PROMPTS, NEW)
    assert texts == expected and rounds == [-(-len(ids) // 5) for ids in expected]


def test_words_are_those_of_the_tree(folders):
    draft = engine(folders, "far").models[1]
    text, length = torch.arange(90).view(3, 30) % 64, torch.tensor([4, 9, 20])
    tokens, parents, words = example.draft_tree(draft, text, length, 3, 4, (0, 0.0))
    assert tokens.shape == parents.shape == (3, 12)
    assert torch.equal(words, torch.stack([ancestor_words(tree)[:, 0] for tree in parents]))
    assert len(set(parents.flatten().tolist())) > 4  # not three chains
    for b in range(3):  # siblings differ
        assert len(set(zip(parents[b].tolist(), tokens[b].tolist(), strict=True))) == 12


def test_a_round_is_one_graph(folders, expected):
    """fullgraph=True refuses graph breaks. The one graph holds the ops of all levels, layers and both caches; a bad
    draft changes no token."""
    graphs = []

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    assert engine(folders, "far", backend=record).generate(PROMPTS, NEW)[0] == expected
    names = [str(node.target) for node in graphs[-1].graph.nodes if node.op == "call_function"]
    count = {op: names.count(f"specker.{op}.default") for op in OPS}
    assert len(graphs) == 3  # a prefill pass of each model, and the round
    assert count == {"tree_attention": 2 + 4, "vocab_topk": 1 + 4, "accept_walk": 1, "kv_commit": 2, "row_linear": 24}


def test_aot_autograd_compiles_the_round(folders, expected):
    """The ops' schemas and fakes suffice for functionalisation, with which inductor begins."""
    assert engine(folders, "near", (2, 2), backend="aot_eager").generate(PROMPTS, NEW)[0] == expected


@pytest.mark.parametrize("example", [example, recurrent], ids=lambda module: module.__name__)
def test_imports_only_the_ops_of_specker(example):
    tree = ast.parse(Path(example.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name for name in modules if name.startswith("specker")} == {"specker.kernels"}


def test_a_recurrent_layer_in_trees_has_the_rows_of_plain_decoding(monkeypatch):
    """Also in float64; and not if the tree's path is not moved into place."""
    assert recurrent.main() == 0
    made = recurrent.GatedDeltaNet(32, 1, 2, 16, texts=2, columns=112, dtype=torch.float64)
    x = torch.randn(90, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain, trees = recurrent.decoded(made, 0, x, 5), recurrent.verified(made, 1, x, 5)
    assert float((plain - trees).abs().max()) < 1e-13
    monkeypatch.setattr(recurrent.GatedDeltaNet, "commit", lambda *_: None)
    assert recurrent.main() == 1


def test_refusals(folders, tmp_path):
    with pytest.raises(ValueError, match="1 to 63 tokens, one bit of a row's word each; got 8 x 8"):
        engine(folders, "far", (8, 8))
    with pytest.raises(ValueError, match=r"3 prompts of 2 to 50 ids, got prompts of \[7, 1, 3\] ids"):
        engine(folders, "far").generate([PROMPTS[0], [1], [1, 2, 3]], NEW)
    with pytest.raises(ValueError, match=r"3 prompts of 2 to 50 ids, got prompts of \[7\] ids"):
        engine(folders, "far").generate(PROMPTS[:1], NEW)
    biased = make(tmp_path / "biased", attention_bias=True)
    with pytest.raises(ValueError, match="default RoPE and without biases"):
        Engine(biased, biased, 1, 32)


def test_the_script_prints_its_acceptance_length(monkeypatch, capsys):
    """With the small model as target: tracing the large one takes ten seconds."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        sys, "argv", ["engine.py", "--target", str(example.DRAFT), "--prompt", "def add(", "--tree", "2x3"]
    )
    assert example.main() == 0
    out = capsys.readouterr().out
    assert out.startswith("def add(") and "same tokens: True" in out
    assert float(out.split("acceptance length: ")[1].split(";")[0]) > 2
