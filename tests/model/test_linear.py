"""Every linear of the layers and the head runs through the model's `linear`, which --linear chooses."""

import pytest
import torch
from make_checkpoint import make

import specker
from specker.checkpoints.checkpoint import read
from specker.kernels.linear import row_linear, row_linear_ref
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model, forward
from specker.model.prefill import prefill
from specker.runtime.strategies.easyspec.parallel import LayerParallel, Schedule

LAYERS = 4


def test_no_other_linear_runs(tmp_path, monkeypatch):
    calls = []

    def spy(*args, **how):
        calls.append(args[1].shape)
        return row_linear_ref(*args, **how)

    checkpoint = read(make(tmp_path, layers=LAYERS), dtype=torch.float64, device="cpu")
    model = Model(checkpoint, linear=spy)
    monkeypatch.setattr("specker.model.decoder.row_linear", None)
    cache = KVCache(model.config, 64, dtype=model.dtype, device="cpu", page_size=16)
    counted = []
    with torch.inference_mode():
        hidden = model.embed_tokens(torch.tensor([1, 2, 3]))
        rows = cache.after([0], [3])
        parallel = LayerParallel(model, cache, Schedule(((0,), (1, 2), (3,))))
        for call in (
            lambda: prefill(model, cache, [1, 2, 3]), lambda: forward(model, cache, rows, hidden),
            lambda: parallel.forward(rows, hidden), lambda: model.logits(Final(hidden)),
        ):  # fmt: skip
            calls.clear()
            call()
            counted.append(len(calls))
    # the group's two layers have one linear before attention and one after it
    assert counted == [4 * LAYERS, 4 * LAYERS, 4 * 2 + 2 + 2 * 2, 1]


@pytest.mark.parametrize("strategy", ["draft", "easyspec", "diffuspec", "del"])
def test_the_option_reaches_both_models(tmp_path, strategy):
    target = make(tmp_path / "target", layers=LAYERS)
    draft = None if strategy == "del" else make(tmp_path / "draft", "dream" if strategy == "diffuspec" else "llama")
    tokens = []
    for how, want in (("cublas", row_linear_ref), ("rows", row_linear), (None, row_linear)):
        engine = specker.load(target, draft, strategy, device="cpu", linear=how)
        assert engine.model.linear is engine.drafter.model.linear is want
        tokens.append(engine.generate([1, 2, 3], 20).tokens)
    assert tokens[0] == tokens[1] == tokens[2]


def test_cublas_reports_the_loss_of_batch_invariance(pair):
    engine = specker.load(*pair, device="cpu", linear="cublas")
    assert "not batch-invariant" in engine.remarks["linear"]
