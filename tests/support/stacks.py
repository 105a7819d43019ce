"""Small models on the compiled CPU layers, for tests/cpu."""

import torch
from make_checkpoint import make

from specker.checkpoints.checkpoint import read
from specker.model.cache import KVCache
from specker.model.decoder import Model, forward
from specker.model.prefill import prefill

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "layers": 4}


def model_of(folder, arch="llama", dtype=torch.float32, quantize=None, activations=None, **sizes):
    source = make(folder, arch, **SIZES | sizes)
    model = Model(read(source, dtype=dtype, device="cpu", quantize=quantize, activations=activations))
    assert model.stack is not None, "the compiled kernels decline these sizes"
    assert model.stack.packed == (quantize is not None)
    return model


def cache_of(model, sequences=1, length=128, kv_dtype=None):
    how = {"dtype": torch.float32, "device": "cpu", "page_size": 16, "kv_dtype": kv_dtype}
    cache = KVCache(model.config, length, sequences=sequences, **how)
    for kv in cache.kv:
        kv.zero_()
    for slot in range(sequences if sequences > 1 else 0):
        cache.take(slot, length - 16)
    return cache


def near(a, b):
    return (a - b).abs().max() <= 2e-5 * b.abs().max()


def checked_chain(model, text, more, kv_dtype=None, length=128):
    """The rows of `more` after `text`: of a chain that verifies them, which has the bits of plain decoding's rows, one
    at a time."""

    def rows_of(cache, length, ids):
        return forward(model, cache, cache.after([length], [len(ids)]), model.embed_tokens(torch.tensor(ids))).hidden

    cache = cache_of(model, 1, length, kv_dtype)
    prefill(model, cache, text)
    alone = torch.cat([rows_of(cache, len(text) + n, [token]) for n, token in enumerate(more)])
    cache = cache_of(model, 1, length, kv_dtype)
    prefill(model, cache, text)
    chain = rows_of(cache, len(text), more)
    assert torch.equal(chain, alone)
    return chain
