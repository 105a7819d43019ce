"""Read the multi-token prediction (MTP) head that a target's own checkpoint holds.

Three layouts are read, as far as the target's own layers are supported, because the head's layer is like them: MiMo's
`mtp_layers.0`, Qwen3-Next's `mtp`, and DeepSeek-V3's, in which the head is one more layer. Of several heads the first
one drafts the whole chain.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from specker.checkpoints.buffers import Buffers, Piece, Storage, packs, part_of, pieces_of
from specker.checkpoints.checkpoint import Checkpoint, check_tensors, open_files
from specker.checkpoints.heads import HeadCheckpoint
from specker.checkpoints.parse import read_json
from specker.checkpoints.quantised import scheme_of
from specker.model.config import CheckpointError, ModelConfig
from specker.model.heads import HeadSpec, HeadWeights
from specker.model.split import WHOLE
from specker.model.weights import Weights

FURTHER = re.compile(r"mtp\.layers\.[1-9]")  # further heads of Qwen3-Next's layout; the others' names begin otherwise


@dataclass(frozen=True)
class Layout:
    """The names of a head's tensors, without `.weight`."""

    start: str  # of all of them
    layer: str  # of the layer's
    fc: str
    embed_norm: str
    hidden_norm: str
    norm: str
    swapped: bool = False  # fc has the hidden row's columns first
    zeroed: bool = True  # at position 0, the embedding is 0
    output: bool = True  # the head feeds back its rows after the final norm
    own: tuple[tuple[str, str], ...] = ()  # buffer and name of the head's own embedding and LM head


def layouts(prefix: str, layers: int) -> tuple[Layout, ...]:
    """The layouts for a target of this many layers, whose names begin with `prefix`."""
    mimo, deepseek = f"{prefix}mtp_layers.0.", f"{prefix}layers.{layers}."
    return (
        Layout(
            mimo,
            mimo,
            fc=f"{mimo}input_proj",
            embed_norm=f"{mimo}token_layernorm",
            hidden_norm=f"{mimo}hidden_layernorm",
            norm=f"{mimo}final_layernorm",
            swapped=True,
        ),
        Layout(
            "mtp.",
            "mtp.layers.0.",
            fc="mtp.fc",
            embed_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            norm="mtp.norm",
            zeroed=False,
        ),
        Layout(
            deepseek,
            deepseek,
            fc=f"{deepseek}eh_proj",
            embed_norm=f"{deepseek}enorm",
            hidden_norm=f"{deepseek}hnorm",
            norm=f"{deepseek}shared_head.norm",
            output=False,
            own=(("embed", f"{deepseek}embed_tokens"), ("head", f"{deepseek}shared_head.head")),
        ),
    )


def read(target: Checkpoint, *, dtype: torch.dtype, quantize: str | None = None) -> HeadCheckpoint:
    """Read the first MTP head of the target's checkpoint, in `dtype`, onto the target's device. `quantize` rounds its
    matrices as `checkpoint.read` does. Raises CheckpointError if the target has none, or one that does not fit."""
    folder, device, own = target.folder, target.weights.norm.device, target.weights
    config = _config(target.config)
    with ExitStack() as stack:
        every = open_files(folder, stack)
        prefix = "model." if any(name.startswith("model.") for name in every) else ""
        fitting = [x for x in layouts(prefix, target.config.num_layers) if any(_in(x.fc, name) for name in every)]
        if not fitting:
            raise CheckpointError(
                f"{folder} has no MTP heads (mtp_layers, mtp or further layers), with which strategy mtp drafts"
            )
        layout = fitting[0]
        where = {n: x for n, x in every.items() if n.startswith(layout.start) and not FURTHER.match(n)}
        scheme = scheme_of(read_json(folder / "config.json"), str(folder))
        storage = Storage(scheme, quantize, dtype, device, packs(config, dtype, device))
        pieces = {p.name: p for p in _pieces(layout, config, where)}
        check_tensors(where, pieces, config, "", storage)
        buffers = Buffers(pieces, config, storage)
        for name, p in pieces.items():
            if storage.scheme is not None and storage.covers(name):
                buffers.put(p, part_of(p, name, storage.scheme, lambda n: where[n].get_tensor(n)))
            else:
                buffers.put(p, where[name].get_tensor(name))
        found = buffers.done()
    fc, H = found.pop("fc"), config.hidden_size
    parts = HeadWeights(
        fc=torch.cat((fc[:, H:], fc[:, :H]), 1) if layout.swapped else fc,
        embed_norm=found.pop("embed_norm"),
        hidden_norm=found.pop("hidden_norm"),
    )
    absent = dict.fromkeys(
        ("qkv_bias", "q_norm", "k_norm", "o_bias", "gate_up_bias", "down_bias", "norm_in", "norm_post")
    )
    rows = {"embed": own.embed, "head": own.head}
    weights = Weights(**{**absent, **rows, **found}, ropes=own.ropes)
    spec = HeadSpec(
        "mtp", (target.config.num_layers,), H, config.vocab_size, output=layout.output, zeroed=layout.zeroed
    )
    return HeadCheckpoint(
        config, weights, folder, shared=target.tokens, activations=target.activations, spec=spec, parts=parts
    )


def _in(stem: str, name: str) -> bool:
    """Whether `name` is a tensor of the module `stem`."""
    return name.startswith(f"{stem}.")


def _config(c: ModelConfig) -> ModelConfig:
    """The config of the head's layer. Raises CheckpointError if the target's layers differ."""
    if len(set(c.layer.reaches)) > 1 or len(set(c.layer.ropes)) > 1:
        raise CheckpointError(
            f"the layers of this {c.architecture} differ, and specker cannot tell which the MTP head has"
        )
    layer = replace(c.layer, reaches=c.layer.reaches[:1], ropes=c.layer.ropes[:1])
    return replace(c, num_layers=1, layer=layer, tied=False, shares=())


def _pieces(layout: Layout, c: ModelConfig, where: dict[str, Any]) -> Iterator[Piece]:
    """Every tensor that the head must have, and those of its own embedding and LM head, if it has them."""
    H, V = c.hidden_size, c.vocab_size
    for p in pieces_of(c, WHOLE, True):
        if p.layer is not None:
            yield replace(p, name=layout.layer + p.name.removeprefix("layers.0."))
    yield Piece(f"{layout.fc}.weight", "fc", None, 0, (H, 2 * H), (H, 2 * H), (0, 0))
    for buffer in ("embed_norm", "hidden_norm", "norm"):
        name = f"{getattr(layout, buffer)}.weight"
        yield Piece(name, buffer, None, 0, (H,), (H,), (0,), c.norm_offset)
    for buffer, name in layout.own:
        if any(_in(name, other) for other in where):
            yield Piece(f"{name}.weight", buffer, None, 0, (V, H), (V, H), (0, 0))
