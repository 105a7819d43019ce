"""Read the multi-token prediction (MTP) heads that a target's own checkpoint holds, or another checkpoint of the same
model.

llama.cpp's converter writes a model and its heads into one GGUF file or two (`--no-mtp`, `--mtp`). Three layouts are
read, as far as the target's own layers are supported, because a head's layer is like them: MiMo's `mtp_layers.0`,
Qwen3-Next's `mtp`, and DeepSeek-V3's, in which each head is one more layer. What the heads read:

* Qwen3-Next: the target's rows after its final norm, and a head feeds back its rows after its own norm (vLLM,
  qwen3_next.py and qwen3_next_mtp.py; llama.cpp's pull request 24025 measured it).
* DeepSeek-V3: likewise (vLLM, deepseek_v2.py; SGLang, deepseek_nextn.py). vLLM fed back the rows before the head's norm
  until its pull request 45895; on DeepSeek-R1 the rows after it are accepted more often (ROCm/ATOM's 1764).
* MiMo: the target's rows before its final norm (XiaomiMiMo/vllm and vLLM, mimo.py: the model returns the residual
  stream, and `compute_logits` applies the norm). A row that is fed back is of the same kind, before the head's norm
  (exllamav3's pull request 238); vLLM's and SGLang's mimo_mtp.py return it after the norm, for drafts of one token.

Of several heads, each reads the output of the one before (DeepSeek-V3's paper, section 2.2; SGLang calls it chained in
multi_layer_eagle_worker_v2.py). MiMo's all read the target's rows: no checkpoint of this layout with several heads is
known, but MiMo-V2 has three, and the second one is right at 73% of the positions so, and at 47% with the output of the
one before (sglang-jax's pull request 1256).
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specker.checkpoints.architectures.heads import DEEPSEEK, MIMO, QWEN, HeadTable
from specker.checkpoints.buffers import Storage, packs
from specker.checkpoints.checkpoint import Checkpoint, Opened, OpenedHead
from specker.checkpoints.drafts.heads import (
    HeadCheckpoint,
    check_stream,
    check_target,
    head_pieces,
    layer_pieces,
    read_tensors,
    weights_of,
)
from specker.checkpoints.files import folder_of, open_files
from specker.checkpoints.gguf.cache import origin
from specker.checkpoints.parse import read_json, text_config
from specker.checkpoints.pieces import Piece, is_fused
from specker.checkpoints.quantised.schemes import scheme_of
from specker.fields import option
from specker.model.config import CheckpointError, ModelConfig
from specker.model.heads import HeadSpec, HeadWeights

OWN = "embed", "head"  # the embedding and LM head that a head may have


@dataclass(frozen=True)
class Layout:
    """How the heads' tensors are named, and what the heads compute; # stands for a head's number."""

    start: str  # of all of a head's names
    layer: str  # after that, of its layer's
    tensors: HeadTable  # after `start`
    spec: dict[str, Any]  # fields of HeadSpec
    first: int = 0  # the first head's number
    swapped: bool = False  # fc has the hidden row's columns first

    def head(self, n: int) -> "Layout":
        """The whole names of head n, counted from 0."""
        start, layer = (name.replace("#", str(self.first + n)) for name in (self.start, self.start + self.layer))
        return replace(
            self, start=start, layer=layer, tensors=tuple(x._replace(name=start + x.name) for x in self.tensors)
        )

    def modules(self, *fields: str) -> dict[str, str]:
        """The start of the names of these fields' modules, which may be quantised."""
        return {x.field: x.name.removesuffix("weight") for x in self.tensors if x.field in fields}

    def numbers(self, names: Iterable[str]) -> list[int]:
        """The numbers of the heads with a layer among these tensors."""
        stem = re.compile(re.escape(self.start + self.layer).replace(r"\#", r"(\d+)"))
        found = {int(match[1]) for name in names if (match := stem.match(name))}
        return sorted(n for n in found if n >= self.first)


def layouts(prefix: str, layers: int) -> tuple[Layout, ...]:
    """The layouts for a target of this many layers, whose names begin with `prefix`."""
    mimo = {"before_norm": True, "chained": False, "zeroed": True}
    return (
        Layout(f"{prefix}mtp_layers.#.", "", MIMO, mimo, swapped=True),
        Layout("mtp.", "layers.#.", QWEN, {"output": True}),
        Layout(f"{prefix}layers.#.", "", DEEPSEEK, {"output": True, "zeroed": True}, first=layers),
    )


@dataclass(frozen=True, eq=False)
class OpenedHeads(OpenedHead):
    """The MTP heads of a checkpoint; `config`: of each one's layer."""

    layout: Layout
    count: int

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        return (self.config,) * self.count

    def read(self, target: Checkpoint, dtype: torch.dtype, quantize: str | None = None) -> HeadCheckpoint:
        """The first head, with the others as its `further`."""
        device = target.weights.norm.device
        storage = Storage(self.scheme, quantize, dtype, device, packs(self.config, dtype, device))
        heads: list[HeadCheckpoint] = []
        with ExitStack() as stack:
            every = open_files(self.folder, stack)
            for n in range(self.count):
                heads.append(self._head(n, target, every, storage, heads[0] if heads else None))
        return replace(heads[0], further=tuple(heads[1:]))

    def _head(
        self, n: int, target: Checkpoint, every: dict[str, Any], storage: Storage, first: HeadCheckpoint | None
    ) -> HeadCheckpoint:
        """Head n of the open files `every`. `first`: head 0, whose embedding and LM head all heads use."""
        layout, config = self.layout, self.config
        names, layer = layout.head(n), (layout.start + layout.layer).split("#")[0]
        where = {
            name: x
            for name, x in every.items()
            if name.startswith(names.start) and (name.startswith(names.layer) or not name.startswith(layer))
        }
        if first is not None:
            where = _shared(where, every, names, layout.head(0), n)
        found = read_tensors(where, _pieces(names, config, where), config, storage, self.folder)
        fc, H = found["fc"], config.hidden_size
        fc = torch.cat((fc[:, H:], fc[:, :H]), 1) if layout.swapped else fc
        parts = HeadWeights(fc, embed_norm=found["embed_norm"], hidden_norm=found["hidden_norm"])
        weights = weights_of(found, (first or target).weights, target.weights.ropes)
        spec = HeadSpec("mtp", (target.config.num_layers,), H, config.vocab_size, **layout.spec)
        return HeadCheckpoint(
            config, weights, self.folder, shared=target.tokens, activations=target.activations, spec=spec, parts=parts
        )


def opened(target: Opened, source: str | Path | None = None) -> OpenedHeads:
    """Open the MTP heads of the target's checkpoint, whose files are downloaded, or those in `source`: another
    checkpoint of the target's model, whose other tensors are not read. Raises CheckpointError if it has no heads, or
    some that do not fit."""
    folder, layers = target.folder, target.config.num_layers
    check_stream(source or folder, target.config)
    if source is not None:
        folder = folder_of(source, weights=True)
    elif not any(folder.glob("*.safetensors*")) and not Path(target.source).expanduser().exists():
        folder = folder_of(target.source, weights=True)
    called, raw = origin(folder) or folder, read_json(folder / "config.json")
    with ExitStack() as stack:
        every = open_files(folder, stack)
    prefix = "model." if any(name.startswith("model.") for name in every) else ""
    fitting = [x for x in layouts(prefix, layers) if _has(every, x.head(0).modules("fc")["fc"])]
    if not fitting:
        another = " and is no assistant" if source is not None else ""
        raise CheckpointError(
            f"{called} has no MTP heads (mtp_layers, mtp or further layers){another}, with which strategy mtp drafts; "
            f"pass {option('draft')}: a checkpoint of the target's model that has them, or an assistant"
        )
    if source is not None:
        _check_model(called, text_config(raw), target.config)
    numbers, first = fitting[0].numbers(every), fitting[0].first
    if numbers != list(range(first, first + len(numbers))):
        raise CheckpointError(
            f"the MTP heads of {called} are numbered {numbers}; {first} is the first one, and none may lack"
        )
    config, scheme = _config(target.config), scheme_of(raw, str(folder))
    named = target.source if source is None else source
    return OpenedHeads(named, folder, config, target.ropes, scheme, fitting[0], max(1, len(numbers)))


def _check_model(called: str | Path, raw: dict[str, Any], target: ModelConfig) -> None:
    """Raise CheckpointError unless config.json is of the target's model, as far as its sizes say."""
    own = {
        "of {} layers": ("num_hidden_layers", target.num_layers),
        "of width {}": ("hidden_size", target.hidden_size),
        "with {} ids": ("vocab_size", target.vocab_size),
    }
    sizes = {phrase: (raw.get(name), size) for phrase, (name, size) in own.items()}
    check_target(called, "MTP heads for a target", sizes)


def _shared(where: dict[str, Any], every: dict[str, Any], names: Layout, first: Layout, n: int) -> dict[str, Any]:
    """The tensors of head n without its copies of the first head's embedding and LM head. Raises CheckpointError if
    they differ: the heads share them (DeepSeek-V3's paper, section 2.2)."""
    rest = dict(where)
    others = first.modules(*OWN)
    for field, own in names.modules(*OWN).items():
        for name in [name for name in where if name.startswith(own)]:
            twin = others[field] + name.removeprefix(own)
            if twin not in every or not torch.equal(rest.pop(name).get_tensor(name), every[twin].get_tensor(twin)):
                raise CheckpointError(f"MTP head {n + 1} has {name}, which is not the first head's; they must be equal")
    return rest


def _has(names: Iterable[str], module: str) -> bool:
    return any(name.startswith(module) for name in names)


def _config(c: ModelConfig) -> ModelConfig:
    """The config of the head's layer, which attends. Raises CheckpointError if the target's layers differ."""
    mixed = c.layer.experts is not None and c.layer.experts.dense
    if len(set(c.layer.sliding_windows)) > 1 or len(set(c.layer.ropes)) > 1 or mixed:
        raise CheckpointError(
            f"the layers of this {c.architecture} differ, and specker cannot tell which the MTP head has"
        )
    layer = replace(c.layer, sliding_windows=c.layer.sliding_windows[:1], ropes=c.layer.ropes[:1], mixers=())
    return replace(c, num_layers=1, layer=layer, tied=False, shares=())


def _pieces(layout: Layout, c: ModelConfig, where: dict[str, Any]) -> Iterator[Piece]:
    """Every tensor that the head must have, and those of its own embedding and LM head, if it has them."""
    for p in layer_pieces(c, is_fused(where)):
        yield replace(p, name=layout.layer + p.name.removeprefix("layers.0."))
    has = {field for field, module in layout.modules(*OWN).items() if _has(where, module)}
    yield from head_pieces(layout.tensors, {"H": c.hidden_size, "V": c.vocab_size}, has, c)
