"""Where chunks of prompts begin, and that a prompt which goes on from earlier columns runs in a fresh one's chunks."""

import cases
import pytest
import torch
from make_checkpoint import GEMMA3, LFM2, QWEN3_MOE, make

import specker
from specker.checkpoints.checkpoint import read_config
from specker.model.chunks import Chunks

LLAMA = {"arch": "llama", "layers": 3, "max_context": 400}


def boundaries(chunks, end):
    found, column = [], 0
    while column < end:
        found.append(column)
        column += chunks.rows(column)
    return [*found, column]


def test_boundaries_depend_on_the_column_alone():
    chunks = Chunks(512, 2048)
    at = boundaries(chunks, 9000)
    assert at == [0, 512, 1024, 1536, 2048, 4096, 6144, 8192, 10240]
    for column in (0, 1, 511, 512, 700, 2047, 2048, 2049, 4095, 4096, 9000):
        assert chunks.whole(column) == max(n for n in at if n <= column)
        assert column + chunks.rows(column) == min(n for n in at if n > column)


def test_which_models_have_long_chunks(tmp_path):
    """Those in which every layer attends to all columns, and mixtures of experts, whose chunks are long from the first
    on; not where rings, saved states or rows that see their whole chunk keep them short."""
    kinds = {"llama": LLAMA, "windows": GEMMA3, "recurrent": LFM2, "mixture": QWEN3_MOE, "diffusion": {"arch": "dream"}}
    found = {name: Chunks.of(read_config(make(tmp_path / name, **kind))) for name, kind in kinds.items()}
    short, long = Chunks(512, 512), Chunks(2048, 2048)
    assert found == {"llama": (512, 2048), "windows": short, "mixture": long, "diffusion": short, "recurrent": short}


@pytest.mark.parametrize(("dtype", "strategy"), [("float32", "ar"), ("float32", "lookup"), ("bfloat16", "del")])
def test_a_shared_beginning_has_the_bits_of_a_fresh_prefill(tmp_path, monkeypatch, chunk_prompts, dtype, strategy):
    """With torch's operators, whose bits depend on a chunk's rows: after short and long chunks, and within one."""
    monkeypatch.setattr("specker.model.decoder.available", lambda: False)
    chunk_prompts(16, 64, 64)
    target, how = make(tmp_path, **LLAMA), {"strategy": strategy, "device": "cpu", "dtype": dtype, "page_size": 16}
    fresh, shared = (specker.load(target, prefix_cache=kind, **how) for kind in ("off", "exact"))
    text = [n * 7 % 90 + 3 for n in range(300)]
    shared.generate(text, 5)
    for known, taken in ((290, 256), (200, 192), (70, 64), (50, 48)):
        prompt, rows = text[:known] + [5, 9] * 20, []
        for engine in (fresh, shared):
            got = engine.generate(prompt, 5)
            assert got.tokens == cases.plain(target, prompt, 5) or dtype == "bfloat16"
            at = engine.cache.slots(0, 0, len(prompt) - 1)
            rows.append(torch.stack([x.flatten(1, 2)[:, at] for x in (engine.cache.k, engine.cache.v)]))
        assert got.stats.prefilled == len(prompt) - 1 - taken and torch.equal(*rows)
