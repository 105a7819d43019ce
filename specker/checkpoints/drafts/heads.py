"""Read a draft head that reads the target's hidden states: EAGLE-3, and EAGLE-1 and 2.

Two layouts are read. SafeAILab's EAGLE, SpecForge and SGLang have a flat config.json and call an EAGLE-3 head's layer
`midlayer`. speculators, which vLLM reads, nests the layer's config under `transformer_layer_config` and calls it
`layers.0`. DeepSpec, EAGLE-1 and EAGLE-2 have a flat config and `layers.0`. `docs/checkpoints.md` lists the tensors.

A head of the wrong format drafts badly without any error, so every tensor and every field of config.json must be known.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.architectures import FULL, SLIDING
from specker.checkpoints.buffers import Buffers, Piece, Storage, activations, packs, part_of
from specker.checkpoints.checkpoint import Checkpoint, check_tensors, folder_of, open_files
from specker.checkpoints.parse import parse_config, read_json, reason
from specker.checkpoints.quantised.schemes import scheme_of
from specker.model.config import CheckpointError, ModelConfig
from specker.model.heads import HeadSpec, HeadWeights
from specker.model.weights import Matrix, Weights

DEEPSPEC = "Qwen3Eagle3Model"
FLAT = "LlamaForCausalLMEagle3", "LlamaForCausalLM", "LlamaForCausalLMEagle", DEEPSPEC  # architectures of flat configs
MASK = "mask_hidden"  # P-EAGLE's, [1, 1, A * Ht]
MASK_TOKEN = "mask_token_id", "pard_token", "ptd_token_id"  # speculators' field, and those of flat configs
FACTORS = "rope_freqs.weight"  # [D / 2], divisors of RoPE's frequencies, in a head that was a GGUF file
EXTRA = "d2t", "t2d", MASK, FACTORS  # tensors that are no layer's
# Fields of config.json that say what a head computes, beside those of its layers.
FIELDS = {
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "target_layer_ids",
    "num_target_layers",
    "bias",
    *MASK_TOKEN,
}
WINDOWS = {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}
# Fields that change nothing here: how the head was trained or saved, and what transformers adds.
IGNORED = {
    "architectures",
    "auto_map",
    "draft_num_hidden_layers",
    "embed_requires_grad",
    "has_no_defaults_at_init",
    "model_type",
    "quantization_config",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "step_loss_decay",
    "target_model_name_or_path",
    "torch_dtype",
    "transformer_layer_config",
    "ttt_length",
}
# safetensors' names of the dtypes that weights may have
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, eq=False)
class HeadCheckpoint(Checkpoint):
    """A head: its layers as a model of their own, and what a model does not have."""

    spec: HeadSpec = field(kw_only=True)
    parts: HeadWeights = field(kw_only=True)
    further: tuple["HeadCheckpoint", ...] = field(
        default=(), kw_only=True
    )  # MTP heads that draft in turn with this one

    @property
    def head_ids(self) -> Tensor | None:
        return self.parts.ids


class _Bin:
    """pytorch_model.bin, with the interface of a safetensors file."""

    def __init__(self, path: Path):
        try:
            self.tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # pickle and zip raise many types
            raise CheckpointError(f"{path} is not a file of tensors, or truncated ({reason(error)})") from error
        if not isinstance(self.tensors, dict) or not all(isinstance(x, Tensor) for x in self.tensors.values()):
            raise CheckpointError(f"{path} does not hold a table of tensors; export the head again")

    def keys(self) -> Any:
        return self.tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def get_slice(self, name: str) -> "_Header":
        return _Header(self.tensors[name])


class _Header:
    def __init__(self, x: Tensor):
        self.x = x

    def get_shape(self) -> list[int]:
        return list(self.x.shape)

    def get_dtype(self) -> str:
        return DTYPES.get(self.x.dtype, str(self.x.dtype))


def read(source: str | Path, target: Checkpoint, *, dtype: torch.dtype, quantize: str | None = None) -> HeadCheckpoint:
    """Read a head for `target` from a folder or hub id, in `dtype`, onto the target's device. `quantize` rounds the
    matrices of its layers and its LM head as `checkpoint.read` does. Raises CheckpointError."""
    check_stream(source, target.config)
    device = target.weights.norm.device
    folder = folder_of(source, weights=True, formats=("*.safetensors", "pytorch_model.bin"))
    raw = read_json(folder / "config.json")
    with ExitStack() as stack:
        where = _files(folder, stack)
        extra = {name: where.pop(name).get_tensor(name) for name in EXTRA if name in where}
        layout = Layout.of(folder, raw, where, target.config)
        if (factors := extra.get(FACTORS)) is not None:
            layout = replace(layout, ropes=tuple(r._replace(inv_freq=r.inv_freq / factors) for r in layout.ropes))
        config = layout.config
        packed = packs(config, dtype, device)
        storage = Storage(scheme_of(raw, str(source)), quantize, dtype, device, packed)
        found = read_tensors(where, layout.pieces(), config, storage, source)
    if "fc_norm" in found:
        found["fc_norm"] = found["fc_norm"].view(len(layout.spec.aux_layers), -1)
    ids = ids_of(extra, layout.spec.rows, config.vocab_size, source)
    return HeadCheckpoint(
        config,
        _weights(found, layout, target),
        folder,
        getattr(storage.scheme, "restored", ()),
        shared=target.tokens,
        activations=target.activations,
        spec=layout.spec,
        parts=HeadWeights(
            fc=found["fc"],
            **{name: found.get(name) for name in ("fc_bias", "hidden_norm", "input_norm", "fc_norm")},
            mask=_mask(extra.get(MASK), layout.spec, storage, source),
            ids=None if ids is None else ids.to(device),
        ),
    )


def check_stream(source: str | Path, target: ModelConfig) -> None:
    """Raise CheckpointError for a target whose hidden states have another scale here than a head was trained with."""
    if target.residual_scale != 1 or target.logits_scale != 1:
        raise CheckpointError(
            f"{source} is a head that reads the target's hidden states; specker keeps those of {target.architecture} "
            "in another scale (residual_multiplier, logits_scaling) and supports no heads for it"
        )


def _mask(mask: Tensor | None, spec: HeadSpec, storage: Storage, source: str | Path) -> Tensor | None:
    """P-EAGLE's mask_hidden as [A * Ht] on the device. Raises CheckpointError unless it fits the config."""
    if mask is None and spec.mask is None:
        return None
    if mask is None:
        raise CheckpointError(f"{source} has a mask token and lacks {MASK}, which a P-EAGLE head has")
    if spec.mask is None:
        raise CheckpointError(f"{source} has {MASK}, and its config.json lacks {MASK_TOKEN[0]}")
    size = len(spec.aux_layers) * spec.width
    if mask.numel() != size or not mask.is_floating_point() or not torch.isfinite(mask).all():
        raise CheckpointError(
            f"{MASK} of {source} must hold {size} finite numbers, got {list(mask.shape)} {mask.dtype}"
        )
    return mask.flatten().to(storage.device, activations(storage.dtype, storage.device))


def read_tensors(
    where: dict[str, Any], pieces: Iterable[Piece], config: ModelConfig, storage: Storage, source: str | Path
) -> dict[str, Any]:
    """Read `pieces`, which must be all tensors of the open files, into buffers by name. Raises CheckpointError."""
    named = {p.name: p for p in pieces}
    check_tensors(where, named, config, "", storage)
    buffers = Buffers(named, config, storage)
    for name, p in named.items():
        if storage.scheme is not None and storage.covers(name):
            buffers.put(p, part_of(p, name, storage.scheme, lambda n: where[n].get_tensor(n)))
            continue
        x = where[name].get_tensor(name)
        if not torch.isfinite(x).all():
            raise CheckpointError(f"{name} of {source} holds NaN or infinity; export the head again")
        buffers.put(p, x)
    return buffers.done()


def _weights(found: dict[str, Any], layout: "Layout", target: Checkpoint) -> Weights:
    config, own = layout.config, target.weights
    embed = found.get("embed", own.embed)
    head: Matrix = found.get("head", embed if config.tied and "embed" in found else own.head)
    norm = found.get("norm")
    names = ("qkv", "qkv_bias", "q_norm", "k_norm", "o", "o_bias", "gate_up", "gate_up_bias", "down", "down_bias")
    return Weights(
        embed=embed,
        **{name: found.get(name) for name in (*names, "norm_in", "norm_post")},  # type: ignore[arg-type]
        norm=own.norm.new_ones(config.hidden_size) if norm is None else norm,
        head=head,
        ropes=tuple(rope.to(own.norm.device) for rope in layout.ropes),
    )


@dataclass(frozen=True)
class Layout:
    """Which tensors a head's files hold, and what they compute."""

    config: ModelConfig  # of the head's layers
    ropes: tuple[Any, ...]
    spec: HeadSpec
    layers: tuple[str, ...]  # the prefix of each layer's tensors
    own: frozenset[str]  # embed_tokens and lm_head, as far as the head has its own
    bias: bool  # fc has one
    norms: frozenset[str]  # input_norm and fc_norm, as far as the head has them

    @classmethod
    def of(cls, folder: Path, raw: dict[str, Any], where: dict[str, Any], target: ModelConfig) -> "Layout":
        """Raises CheckpointError for what config.json, the tensors and the target do not agree on."""
        nested = raw.get("transformer_layer_config")
        given = raw if nested is None else nested
        _check_fields(raw, nested)
        if nested is None and (named := (raw.get("architectures") or ["LlamaForCausalLM"])[0]) not in FLAT:
            raise CheckpointError(f"{folder} is not a draft head that specker reads: its architecture is {named}")
        if nested is not None and (kind := raw.get("speculators_model_type")) not in ("eagle3", "peagle"):
            raise CheckpointError(f"{folder} is a speculators head of type {kind!r}; specker reads eagle3 and peagle")
        form = "eagle3" if any(name.endswith("hidden_norm.weight") for name in where) else "eagle1"
        layers = _layers(where)
        if DEEPSPEC in (raw.get("architectures") or ()) and len(layers) > 1:  # all of them read the embedding
            raise CheckpointError(
                f"{folder} is a DeepSpec head of {len(layers)} layers; specker reads those of one layer"
            )
        width = raw.get("target_hidden_size") or given.get("hidden_size")
        if width != target.hidden_size:
            raise CheckpointError(
                f"{folder} is a head for a target of width {width}, and the target has {target.hidden_size}: it was "
                "trained for another model"
            )
        if (deep := raw.get("num_target_layers")) not in (None, target.num_layers):
            raise CheckpointError(
                f"{folder} is a head for a target of {deep} layers, and the target has {target.num_layers}: it was "
                "trained for another model"
            )
        if given.get("vocab_size") != target.vocab_size:
            raise CheckpointError(
                f"{folder} is a head for a vocabulary of {given.get('vocab_size')} ids, and the target has "
                f"{target.vocab_size}: it was trained for another model"
            )
        qwen = given.get("model_type") == "qwen3"
        positions = max(_number(given, "max_position_embeddings", 1), target.max_context)  # training does not limit it
        plain = {name: value for name, value in given.items() if name not in FIELDS | WINDOWS}
        plain |= {
            "architectures": ["Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"],
            "model_type": "qwen3" if qwen else "llama",
            "num_hidden_layers": len(layers),
            "max_position_embeddings": positions,
        }
        config, ropes = parse_config(folder, target.max_context, None, plain)
        own = frozenset(name for name in ("embed_tokens", "lm_head") if any(n.startswith(f"{name}.") for n in where))
        norms = frozenset(n for n in ("input_norm", "fc_norm") if any(name.startswith(f"{n}.") for name in where))
        D = raw.get("draft_vocab_size") or target.vocab_size
        depths, other = _depths(folder, raw, where, form, target)
        spec = HeadSpec(
            form,
            depths,
            target.hidden_size,
            D,
            residual=not raw.get("norm_before_residual", nested is not None),  # as vLLM reads a missing one
            # SpecForge means a norm before the LM head, which every head here has, and feeds back the rows before it.
            output=nested is not None and bool(raw.get("norm_output")),
            mask=_mask_token(raw, target.vocab_size),
            other=other,
        )
        sliding_windows = _sliding_windows(given, len(layers), qwen, target.max_context)
        layer = replace(config.layer, first="joined" if form == "eagle3" else "bare", sliding_windows=sliding_windows)
        config = replace(config, layer=layer, tied=config.tied and "embed_tokens" in own, eos_ids=())
        made = cls(config, ropes, spec, layers, own, form == "eagle1" and bool(raw.get("bias", True)), norms)
        made._check_shared(folder, target)
        for name, there in (("norm_before_fc", "input_norm"), ("fc_norm", "fc_norm")):
            if bool(raw.get(name)) != (there in norms):
                lacks = "lacks" if raw.get(name) else "has"
                raise CheckpointError(f"config.json says {name} {raw.get(name)}, and the checkpoint {lacks} {there}")
        return made

    def _check_shared(self, folder: Path, target: ModelConfig) -> None:
        """Raise CheckpointError unless the head can use the target's embedding and LM head where it has none."""
        H, Ht = self.config.hidden_size, target.hidden_size
        if "embed_tokens" not in self.own and Ht != H:
            raise CheckpointError(f"{folder} lacks embed_tokens.weight, and the target's rows have {Ht} instead of {H}")
        if "lm_head" in self.own or self.config.tied:
            return
        if self.spec.rows != target.vocab_size or Ht != H:
            raise CheckpointError(
                f"{folder} lacks lm_head.weight, and the target's head [{target.vocab_size}, {Ht}] is not "
                f"[{self.spec.rows}, {H}]"
            )

    def pieces(self) -> Iterator[Piece]:
        """Every tensor that the checkpoint must have, and no other."""
        c, spec = self.config, self.spec
        H, D, F, V = c.hidden_size, c.head_dim, c.intermediate_size, c.vocab_size
        Q, KV, A = c.num_heads * D, c.num_kv_heads * D, len(spec.aux_layers)

        def whole(name: str, buffer: str, layer: int | None, *shape: int, row: int = 0) -> Piece:
            return Piece(name, buffer, layer, row, shape, shape, (0,) * len(shape))

        if "embed_tokens" in self.own:
            yield whole("embed_tokens.weight", "embed", None, V, H)
        yield whole("fc.weight", "fc", None, H, A * spec.width if spec.form == "eagle3" else H + spec.width)
        if self.bias:
            yield whole("fc.bias", "fc_bias", None, H)
        if "input_norm" in self.norms:
            yield whole("input_norm.weight", "input_norm", None, A * spec.width)
        if "fc_norm" in self.norms:
            for n in range(A):
                yield Piece(f"fc_norm.{n}.weight", "fc_norm", None, n * spec.width, (spec.width,), (spec.width,), (0,))
        for i, prefix in enumerate(self.layers):
            E = 2 * H if i == 0 and spec.form == "eagle3" else H
            rows = {"q_proj": (0, Q), "k_proj": (Q, KV), "v_proj": (Q + KV, KV)}
            for name, (row, count) in rows.items():
                yield whole(f"{prefix}self_attn.{name}.weight", "qkv", i, count, E, row=row)
                if c.layer.qkv_bias:
                    yield whole(f"{prefix}self_attn.{name}.bias", "qkv_bias", i, count, row=row)
            yield whole(f"{prefix}self_attn.o_proj.weight", "o", i, H, Q)
            if c.layer.o_bias:
                yield whole(f"{prefix}self_attn.o_proj.bias", "o_bias", i, H)
            for row, name in enumerate(("gate_proj", "up_proj")):
                yield whole(f"{prefix}mlp.{name}.weight", "gate_up", i, F, H, row=row * F)
                if c.layer.mlp_bias:
                    yield whole(f"{prefix}mlp.{name}.bias", "gate_up_bias", i, F, row=row * F)
            yield whole(f"{prefix}mlp.down_proj.weight", "down", i, H, F)
            if c.layer.mlp_bias:
                yield whole(f"{prefix}mlp.down_proj.bias", "down_bias", i, H)
            if c.layer.qk_norm:
                for name in ("q_norm", "k_norm"):
                    yield whole(f"{prefix}self_attn.{name}.weight", name, i, D)
            if i or spec.form == "eagle3":
                yield whole(f"{prefix}input_layernorm.weight", "norm_in", i, H)
            yield whole(f"{prefix}post_attention_layernorm.weight", "norm_post", i, H)
        if spec.form == "eagle3":
            yield whole(f"{self.layers[0]}hidden_norm.weight", "hidden_norm", None, H)
            yield whole("norm.weight", "norm", None, H)
        if "lm_head" in self.own:
            yield whole("lm_head.weight", "head", None, spec.rows, H)


def _files(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that holds it. Names have no prefix `model.`."""
    if not list(folder.glob("*.safetensors*")) and (path := folder / "pytorch_model.bin").is_file():
        file = _Bin(path)
        where = dict.fromkeys(file.keys(), file)
    else:
        where = open_files(folder, stack)
    return where


def _layers(where: dict[str, Any]) -> tuple[str, ...]:
    """The prefix of each layer's tensors. Raises CheckpointError if a number is missing."""
    numbers = sorted({int(found[1]) for name in where if (found := re.match(r"layers\.(\d+)\.", name))})
    first = ["midlayer."] if any(name.startswith("midlayer.") for name in where) else []
    if numbers != list(range(len(first), len(first) + len(numbers))) or not (first or numbers):
        raise CheckpointError(
            f"the head's layers are numbered {numbers}; layers.0 or midlayer is the first one, and none may lack"
        )
    return (*first, *(f"layers.{n}." for n in numbers))


def _mask_token(raw: dict[str, Any], vocab: int) -> int | None:
    """The token of a P-EAGLE head's masks; None for other heads. Raises CheckpointError."""
    token = next((raw[name] for name in MASK_TOKEN if raw.get(name) is not None), None)
    parallel = raw.get("speculators_model_type") == "peagle"
    if (token is None and parallel) or not (token is None or (type(token) is int and 0 <= token < vocab)):
        raise CheckpointError(f"a P-EAGLE head needs {MASK_TOKEN[0]}, an id below {vocab}; it is {token!r}")
    return token


def _sliding_windows(given: dict[str, Any], layers: int, qwen: bool, context: int) -> tuple[int, ...]:
    """LayerSpec.sliding_windows of the head's layers: those of its config, and at most the positions that it was
    trained for. A head that attends to more columns than in training drafts badly."""
    kinds = given.get("layer_types")
    if kinds is None:  # as Qwen3 in transformers; Llama has no window without layer_types
        first = _number(given, "max_window_layers", 28) if qwen and given.get("use_sliding_window") else layers
        kinds = [FULL if n < first else SLIDING for n in range(layers)]
    if not isinstance(kinds, list) or len(kinds) < layers or set(kinds) - {FULL, SLIDING}:
        raise CheckpointError(
            f"layer_types must name {FULL} or {SLIDING} for each of the head's {layers} layers, got {kinds}"
        )
    size = _number(given, "sliding_window", 0)
    if SLIDING in kinds[:layers] and not size:
        raise CheckpointError(f"layer_types names {SLIDING} layers, and the head's config has no sliding_window")
    trained = _number(given, "max_position_embeddings", 0) or context
    seen = [min(trained, size if kind == SLIDING else context) for kind in kinds[:layers]]
    return tuple(n if n < context else 0 for n in seen) if min(seen) < context else ()


def _number(given: dict[str, Any], name: str, default: int) -> int:
    """A whole number of config.json from 0 on, or the default if it is null or missing. Raises CheckpointError."""
    value = given.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise CheckpointError(f"{name} of a head must be a whole number from 0 on, got {value!r}")
    return default if value is None else value


def _depths(
    folder: Path, raw: dict[str, Any], where: dict[str, Any], form: str, target: ModelConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The depths of the target that the head reads: depth n is the input of layer n, or the last layer's output. Then
    the depths by the other reading of the field, () if there is none."""
    total = target.num_layers
    if form == "eagle1":
        return (total,), ()
    if not any(name.startswith("fc.") for name in where):
        raise CheckpointError(f"{folder} lacks fc.weight, which an EAGLE-3 head has")
    own = raw.get("eagle_config") or {}
    if own.get("use_aux_hidden_state") is False:
        raise CheckpointError(f"{folder} says use_aux_hidden_state false, and an EAGLE-3 head reads hidden states")
    name = "eagle_aux_hidden_state_layer_ids"
    other: tuple[int, ...] = ()
    if raw.get("target_layer_ids") is not None:  # DeepSpec: the output of layer n
        field = "target_layer_ids"
        depths = tuple(n + 1 for n in _numbers(raw[field], field))
        if total in depths:  # transformers norms this one, and specker does not
            raise CheckpointError(f"{field} names the last of the target's {total} layers, which specker does not read")
    elif raw.get(name) is not None:  # vLLM and speculators: the input of layer n
        field, depths = name, _numbers(raw[name], name)
        other = tuple(n + 1 for n in depths)
    elif own.get(name) is not None:  # SGLang and SpecForge: the output of layer n
        field = f"eagle_config.{name}"
        other = _numbers(own[name], field)
        depths = tuple(n + 1 for n in other)
    else:
        depths, field = (2, total // 2, total - 3), "the default"
    if "fc.weight" in where:  # not quantised
        columns = where["fc.weight"].get_slice("fc.weight").get_shape()[-1]
        if columns != len(depths) * target.hidden_size:
            raise CheckpointError(
                f"fc.weight has {columns} columns, but {field} makes it {len(depths) * target.hidden_size}"
            )

    def fits(depths: tuple[int, ...]) -> bool:
        return list(depths) == sorted(set(depths)) and all(0 <= n <= total for n in depths)

    if not fits(depths):
        raise CheckpointError(
            f"{field} names the depths {depths}, which must ascend within the target's {total} layers"
        )
    return depths, other if fits(other) else ()


def _numbers(ids: Any, field: str) -> tuple[int, ...]:
    """The list `ids`. Raises CheckpointError unless it holds whole numbers."""
    if not isinstance(ids, list) or any(type(n) is not int for n in ids):
        raise CheckpointError(f"{field} must be a list of layers' numbers, got {ids!r}")
    return tuple(ids)


def ids_of(maps: dict[str, Tensor], rows: int, vocab: int, source: str | Path) -> Tensor | None:
    """The target's id of each row of the LM head, by d2t, which holds their distances. Raises CheckpointError."""
    if "d2t" not in maps:
        if rows != vocab:
            raise CheckpointError(f"{source} has a head of {rows} rows for {vocab} ids and no d2t, which says which")
        return None
    offsets = maps["d2t"]
    if offsets.shape != (rows,) or offsets.dtype not in (torch.int64, torch.int32):
        raise CheckpointError(f"d2t of {source} must be [{rows}] int64, got {list(offsets.shape)} {offsets.dtype}")
    ids = torch.arange(rows) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < rows:
        raise CheckpointError(f"d2t of {source} must name {rows} different ids below {vocab}")
    if (kept := maps.get("t2d")) is not None and not (
        kept.shape == (vocab,) and int(kept.sum()) == rows and bool(kept.bool()[ids].all())
    ):
        raise CheckpointError(f"d2t and t2d of {source} name different ids; export the head again")
    return ids


def _check_fields(raw: dict[str, Any], nested: dict[str, Any] | None) -> None:
    """Raise CheckpointError for a field of config.json that specker does not know."""
    import transformers

    known = set(transformers.Qwen2Config().to_dict()) | set(transformers.Qwen3Config().to_dict())
    known |= {"mlp_bias", "pretraining_tp", "rope_theta", "rope_scaling", "num_key_value_heads", "tie_word_embeddings"}
    known |= FIELDS | WINDOWS | IGNORED | set(vars(transformers.PretrainedConfig())) | {"attention_bias"}
    for part in (raw, nested or {}):
        if unknown := sorted(name for name in part if name not in known and not name.startswith("_")):
            raise CheckpointError(
                f"config.json has the field {unknown[0]!r}, which specker does not know; it may change what the head "
                "computes, and then the head would draft badly"
            )
