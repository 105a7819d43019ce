"""Every linear of the layers and the head runs through the model's `linear`."""

import torch
from make_checkpoint import make

from specker.checkpoints.checkpoint import read
from specker.kernels.row_linear import row_linear_ref
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model, forward
from specker.model.prefill import prefill
from specker.runtime.strategies.easyspec.layer_groups import LayerParallel, Schedule

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
