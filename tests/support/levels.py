"""What the compiled CPU kernels compute besides products (packings.py), to compare levels of instructions.

python tests/support/levels.py OUT.pt FOLDER..     by the compiled library of this process (SPECKER_CPU) -> OUT.pt
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from specker import cpu
from specker.checkpoints.checkpoint import read
from specker.model.cache import KVCache
from specker.model.decoder import Model, forward
from specker.model.kv_formats import widened
from specker.model.prefill import prefill

SEEDS = (0, 5, 2**64 - 1)
FILTERS = ((0, 1.0), (40, 1.0), (0, 0.9), (50, 0.8))
# Dtype and rounding of the weights, dtype of K and V. In bfloat16, instructions for it add up in another order.
KINDS = (
    (torch.float32, None, torch.float32),
    (torch.bfloat16, None, torch.float32),
    (torch.float32, "int4", torch.float32),
    (torch.float32, "int8", torch.float16),
    (torch.float32, None, torch.int8),
)
TREE = torch.tensor([[-1, 0, 0, 1, 2]] * 3)


def noise() -> Tensor:
    positions = torch.tensor([0, 1, 77, 1 << 33])
    return torch.cat([cpu.gumbel(seed, positions, 4096) for seed in SEEDS])


def drawn() -> Tensor:
    """A token of each of twelve rows, with every filter and seed."""
    logits = 3 * torch.randn(12, 1000, generator=torch.Generator().manual_seed(1))
    draws = [(0.7, top_k, top_p, seed) for top_k, top_p in FILTERS for seed in SEEDS]
    return cpu.sample(logits, draws, torch.arange(12) * 9, 1)


def layers(folder: Path, dtype: torch.dtype, quantize: str | None, kv_dtype: torch.dtype) -> dict[str, Tensor]:
    """A tree of 5 rows after each of three prompts: the residual stream at three depths, K and V."""
    model = Model(read(folder, dtype=dtype, device="cpu", quantize=quantize, activations="float32"))
    assert model.stack is not None, "the compiled kernels decline these sizes"
    how = {"dtype": torch.float32, "device": "cpu", "page_size": 16, "kv_dtype": kv_dtype}
    cache = KVCache(model.config, 128, sequences=3, **how)
    cache.k.zero_(), cache.v.zero_()
    lengths = (3, 39, 17)
    for slot, length in enumerate(lengths):
        cache.take(slot, 100)
        prefill(model, cache, list(range(1, length + 1)), slot=slot)
    with torch.inference_mode():
        rows = cache.place(torch.tensor(lengths), 0, 0, 5, TREE)
        out = forward(model, cache, rows, model.embed_tokens(torch.arange(15)), aux_layers=(1, 3))
    kept = {str(depth): rows for depth, rows in out.aux_hidden_states.items()}
    return {"hidden": out.hidden, **kept, "k": widened(cache.k, torch.float32), "v": widened(cache.v, torch.float32)}


def everything(folders: list[str]) -> dict[tuple[str, ...], Tensor]:
    found: dict[tuple[str, ...], Tensor] = {("noise",): noise(), ("drawn",): drawn()}
    for folder in map(Path, folders):
        for kind in KINDS:
            parts = layers(folder, *kind)
            found |= {(folder.name, *map(str, kind), part): x for part, x in parts.items()}
    return found


if __name__ == "__main__":
    torch.save(everything(sys.argv[2:]), sys.argv[1])
