"""Four layers of a draft model side by side against the same layers in sequence (EasySpec), random weights.

Both read the same weights. If bandwidth is the limit, a batch of four only saves launches and waves: in graphs, the
goal is 1.1. In eager mode launches dominate, as in the paper, which reports 1.62; the eager ratio is printed too.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from bench import harness
from bench.kernels import common
from bench.kernels.common import DEVICE, Built, Case, Goal
from specker.checkpoints import checkpoint
from specker.kernels.kv_calibrate import kv_calibrate
from specker.kernels.tree_attention import tree_attention
from specker.model.cache import KVCache
from specker.model.config import layer_elements
from specker.model.decoder import Model, forward
from specker.runtime.strategies.easyspec.layer_groups import LayerParallel, Schedule

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
LAYERS = 4
CONTEXT = 2048 if DEVICE == "cuda" else 64
SHAPES = {  # hidden, heads, KV heads, feed-forward
    "1B": (2048, 32, 8, 8192),
    "8B": (4096, 32, 8, 14336),
}
SMALL = {"tiny": (64, 4, 2, 96)}


def a_model(shape: tuple[int, int, int, int]) -> Model:
    hidden, heads, kv_heads, inner = shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": CONTEXT + 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        made = checkpoint.read(folder, dtype=DTYPE, device=DEVICE, random=0)
    return Model(made)


@torch.inference_mode()
def build(shape: tuple[int, int, int, int], T: int) -> Built:
    model = a_model(shape)
    cache = KVCache(model.config, CONTEXT + 256, dtype=DTYPE, device=DEVICE)
    cache.k.normal_(), cache.v.normal_()
    cache.bucket(CONTEXT)
    parallel = LayerParallel(model, cache, Schedule((tuple(range(LAYERS)),)))
    hidden = torch.randn(T, model.config.hidden_size, dtype=DTYPE, device=DEVICE)
    length = torch.tensor([CONTEXT - 16], device=DEVICE)

    @torch.inference_mode()
    def run(call: Callable) -> torch.Tensor:
        return call(cache.place(length, 0, 0, T), hidden)

    def side_by_side(rows, hidden):  # type: ignore[no-untyped-def]
        return parallel.forward(rows, hidden).hidden

    def in_sequence(rows, hidden):  # type: ignore[no-untyped-def]
        return forward(model, cache, rows, hidden).hidden

    def stated(rows, hidden):  # type: ignore[no-untyped-def]
        """The group computed layer by layer."""
        eps = model.config.rms_norm_eps
        normed, mixed = [F.rms_norm(hidden, hidden.shape[-1:], w.mixer.norm_in, eps) for w in model.layers], []
        for w, x, (k, v) in zip(model.layers, normed, cache.layers, strict=True):
            qkv = F.linear(x, w.mixer.qkv)
            q = kv_calibrate(qkv, rows.positions, rows.slots, w.rope, k, v, None, None, eps)
            seen = rows.table, rows.kv_len, rows.window, rows.cu_rows, rows.ancestors, model.scale
            mixed.append(F.linear(tree_attention(q, k, v, *seen)[0].reshape(T, -1), w.mixer.o))
        for w, a in zip(model.layers, mixed, strict=True):
            hidden = hidden + a
            mlp = w.mixer
            gate, up = F.linear(F.rms_norm(hidden, hidden.shape[-1:], mlp.norm_post, eps), mlp.gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, mlp.down)
        return hidden

    def check() -> None:
        """Compare what the layers add with the same operations one by one."""
        a, b = (run(call).double() - hidden.double() for call in (side_by_side, stated))
        error = float((a - b).norm() / b.norm())
        assert error <= (0.05 if DEVICE == "cuda" else 1e-4), f"the group is {error:.1e} off what it states"

    kv = 2 * LAYERS * (CONTEXT - 16) * model.config.num_kv_heads * model.config.head_dim
    elements = layer_elements(model.config)
    cost = (elements + kv) * DTYPE.itemsize, 2 * T * elements
    return Built({"group": partial(run, side_by_side), "sequence": partial(run, in_sequence)}, check, cost)


def cases() -> Iterator[Case]:
    for name, shape in (SHAPES if DEVICE == "cuda" else SMALL).items():
        for T in (1, 12):
            yield Case(f"{name}, {T} rows", partial(build, shape, T), Goal(over=(("sequence", 1.1),)))


def eager(save: bool) -> None:
    """The same without graphs, where launches set the ratio."""
    rows = []
    for case in cases():
        built = case.build()
        timings = harness.measure(built.ways, rounds=30, warmup=3)
        ratio = timings["sequence"].median / timings["group"].median
        print(f"{case.name}, launched one by one: the group is {ratio:.2f}x as fast as the sequence (paper: 1.62)")
        for name, timing in timings.items():
            row = {"bench": "kernels", "op": "layer_group", "case": f"{case.name}, eager", "way": name}
            rows.append(row | {"device": DEVICE, **timing.row(), "sequence_over_group": ratio})
    if save:
        harness.save("layer_group", rows, DEVICE)


test_layer_group = common.benchmarks(cases())

if __name__ == "__main__":
    eager(save=common.main("layer_group", cases()))
