"""The weights of a loaded transformers model as a checkpoint of specker's decoder, without a second copy.

The decoder needs q, k and v as one matrix, and gate and up. They are fused layer by layer, and the model's parameters
become views of the result. The model still computes the same, and only one layer's matrices exist twice for a moment.
All other matrices are shared as they are. Only norms and biases are copied.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from specker.checkpoints.architectures import ARCHITECTURES
from specker.checkpoints.buffers import activations
from specker.checkpoints.checkpoint import DTYPES, Checkpoint
from specker.checkpoints.files import folder_of
from specker.checkpoints.parse import parse_config
from specker.checkpoints.pieces import Piece, pieces_of
from specker.integrations.target import read_sizes
from specker.model.config import CheckpointError, ModelConfig
from specker.model.split import WHOLE
from specker.model.weights import Rope, Weights


def adoptable(model: Any) -> bool:
    """Whether the model is one of specker's architectures, as transformers made it: no adapters, hooks, quantised,
    offloaded or split weights, and q, k and v apart."""
    kind, parameters = type(model), list(model.parameters())
    its = ARCHITECTURES.get(kind.__name__)
    if its is None or "qkv" in its.names or not kind.__module__.startswith("transformers.models.") or model.training:
        return False
    first = parameters[0]
    return (
        first.dtype in DTYPES
        and first.device.type in ("cpu", "cuda")
        and all(type(p.data) is Tensor and (p.dtype, p.device) == (first.dtype, first.device) for p in parameters)
        and not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        and all(
            type(m) in (nn.Linear, nn.Embedding, *_scaled(kind)) or type(m).__name__.endswith("TopKRouter")
            for m in model.modules()
            if hasattr(m, "weight") and m.weight.ndim == 2
        )
    )


def _scaled(kind: type) -> list[type]:
    """The embeddings in the module of a model's class that scale their rows, as ModelConfig.embed_scale does."""
    own = vars(sys.modules[kind.__module__]).values()
    return [x for x in own if isinstance(x, type) and issubclass(x, nn.Embedding) and x is not nn.Embedding]


def state(model: Any) -> tuple[tuple[int, int], ...]:
    """A value that changes when the model's weights move or change."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters())


@contextmanager
def files(model: Any, target: str | Path | None) -> Iterator[Path]:
    """A folder with the model's config, and with its tokenizer if it can be found. Raises CheckpointError if the user's
    `target` does not exist. If the folder is a temporary one, errors name the model in its place."""
    with TemporaryDirectory() as made:
        try:
            folder = folder_of(target or model.name_or_path or made, weights=False)
        except CheckpointError:
            if target is not None:
                raise
            folder = Path(made)
        if folder == Path(made):
            model.config.save_pretrained(made)
        try:
            yield folder
        except ValueError as error:
            if made not in str(error):
                raise
            name = type(model).__name__
            said = str(error).replace(str(Path(made) / "config.json"), f"the config of {name}").replace(made, name)
            raise (CheckpointError if isinstance(error, CheckpointError) else ValueError)(said) from None


def adopt(model: Any, context: int, folder: Path) -> Checkpoint | None:
    """The model's weights as a checkpoint of specker's decoder for up to `context` positions; None if its config is not
    supported. `folder`: for the tokenizer."""
    parsed = _parsed(model, context)
    if parsed is None:
        return None
    config, ropes = parsed
    if config.layer.recurrent is not None or config.layer.sinks or config.layer.kvs:  # transformers runs these itself
        return None
    kind, layers = activations(model.dtype, model.device), config.num_layers
    pieces: dict[tuple[str, int | None], list[Piece]] = {}
    for piece in pieces_of(config, WHOLE, whole_head=True, fused=True):
        pieces.setdefault((piece.buffer, piece.layer), []).append(piece)
    weights: dict[str, Any] = {}
    with torch.inference_mode(False), torch.no_grad():  # a parameter made in inference mode could not be trained
        for (name, layer), own in pieces.items():
            if layer is not None:
                weights.setdefault(name, [None] * layers)[layer] = _weight(model.model, own, kind)
            elif name != "head":
                weights[name] = _weight(model.model, own, kind)
    weights["head"] = model.lm_head.weight.detach()
    placed = tuple(rope.to(model.device) for rope in ropes)
    return Checkpoint(config, Weights(**weights, ropes=placed), folder)


def outer(model: Any, context: int | None, folder: Path) -> Checkpoint:
    """What a drafter that reads the model may use of it, without its layers: the embedding, the LM head and, of an
    architecture that specker's decoder knows, the final norm. `context`: most positions; None: all. `folder`: for sizes
    and tokenizer. Raises CheckpointError if these weights are not plain tensors on one device."""
    parsed, modules = _parsed(model, context), (model.get_input_embeddings(), model.get_output_embeddings())
    weights = [getattr(module, "weight", None) for module in modules]
    plain = [w.detach() for w in weights if isinstance(w, Tensor) and type(w.data) is Tensor and w.dtype in DTYPES]
    if len(plain) < 2 or plain[0].device != plain[1].device or plain[0].device.type not in ("cpu", "cuda"):
        raise CheckpointError(
            f"a drafter that reads hidden states uses the embedding and the LM head of {type(model).__name__}, and "
            "these must be plain tensors on one CPU or GPU, neither quantised nor offloaded"
        )
    embed, head = plain
    kind = activations(embed.dtype, embed.device)
    if parsed is None:
        config = read_sizes(folder, context).config
        norm = embed.new_empty(embed.shape[1], dtype=kind)  # never read
    else:
        config = parsed[0]
        last = [piece for piece in pieces_of(config, WHOLE, whole_head=True) if piece.buffer == "norm"]
        norm = _weight(model.get_decoder(), last, kind)
    return Checkpoint(config, Weights(embed=embed, norm=norm, head=head, ropes=()), folder)


def _parsed(model: Any, context: int | None) -> tuple[ModelConfig, tuple[Rope, ...]] | None:
    """The config of the model as it is loaded, which may differ from its folder's; None if specker does not support
    it."""
    with TemporaryDirectory() as made:
        model.config.save_pretrained(made)
        try:
            return parse_config(Path(made), context, None)
        except CheckpointError:
            return None


def _weight(decoder: Any, pieces: Sequence[Piece], kind: torch.dtype) -> Tensor:
    """The weight that the pieces make: a matrix in memory that the model shares, or a vector of dtype `kind`."""
    parts = [decoder.get_parameter(piece.name) for piece in pieces]
    if parts[0].dim() == 1:
        return (torch.cat([p.detach() for p in parts]).to(kind) + pieces[0].offset) * pieces[0].factor
    return _fused(parts) if len(parts) > 1 else parts[0].detach().flatten(0, -2)


def _fused(parts: Sequence[nn.Parameter]) -> Tensor:
    """One matrix with the rows of all parts [O, E], which become views of it."""
    first, size = parts[0], parts[0].element_size()
    ends = [p.data_ptr() + p.numel() * size for p in parts]
    held = first.untyped_storage()
    beside = [p.data_ptr() for p in parts[1:]] == ends[:-1] and ends[-1] <= held.data_ptr() + held.nbytes()
    if beside and all(p.is_contiguous() for p in parts):  # fused by an earlier call
        return first.detach().as_strided((sum(map(len, parts)), first.shape[1]), first.stride(), first.storage_offset())
    whole = torch.cat([*parts])
    for part, rows in zip(parts, whole.split([len(p) for p in parts]), strict=True):
        part.data = rows
    return whole
