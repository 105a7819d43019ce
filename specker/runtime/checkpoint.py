"""A Hugging Face checkpoint (local folder or hub id) read into fused, layer-stacked tensors.

Every kind of weight is one buffer [L, ...] for all layers, so that a group of layers is a slice. Tensors go from the
memory-mapped safetensors file straight to their place in it, cast on the way: no second copy of the weights exists.
What the decoder cannot run exactly is refused here, by name.
"""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# architecture -> model_type; a base model (LlamaModel) has the same weights under names without "model."
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "DreamModel": "Dream",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
CHUNK = 1 << 22  # elements cast at a time: a cast on the way to a GPU is staged on the host

CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # config, generation config, tokenizer, chat template
OTHER_FORMATS = ["consolidated*", "*/*"]  # the same weights once more, in the original format


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message is one sentence with what is wrong and what to do."""


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder has to know; nothing here depends on the run's dtype or device."""

    architecture: str  # a key of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head's q and k before RoPE
    tied: bool  # the LM head is the embedding
    causal: bool  # False: a diffusion drafter, all rows see all rows
    shifted_logits: bool  # row i - 1 predicts position i (causal models and Dream); False: row i does
    mask_token_id: int | None
    max_context: int  # positions
    eos_ids: tuple[int, ...]  # sorted; what config.json, generation_config.json and the tokenizer name; may be empty
    bos_id: int | None


@dataclass(frozen=True, eq=False)
class Weights:
    """V vocabulary, E hidden, F intermediate, L layers, Hq and Hkv heads of D, in the run's dtype and on its device."""

    embed: Tensor  # [V, E]
    qkv: Tensor  # [L, (Hq + 2 * Hkv) * D, E], rows: q heads, k heads, v heads
    qkv_bias: Tensor | None  # [L, (Hq + 2 * Hkv) * D]
    q_norm: Tensor | None  # [L, D]
    k_norm: Tensor | None  # [L, D]
    o: Tensor  # [L, E, Hq * D]
    o_bias: Tensor | None  # [L, E]
    gate_up: Tensor  # [L, 2 * F, E], gate rows first
    gate_up_bias: Tensor | None  # [L, 2 * F]
    down: Tensor  # [L, E, F]
    down_bias: Tensor | None  # [L, E]
    norm_in: Tensor  # [L, E]
    norm_post: Tensor  # [L, E]
    norm: Tensor  # [E]
    head: Tensor  # [V, E], the very tensor `embed` when tied
    inv_freq: Tensor  # [D / 2] float32, whatever the run's dtype
    rope_scale: float  # cos and sin are multiplied by it (yarn)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    config: ModelConfig
    weights: Weights
    folder: Path

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer and chat template, read on first use. Raises CheckpointError if there is none."""
        return _tokenizer(self.folder, self.config.architecture)


def load(
    source: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_context: int | None = None,
    bidirectional: bool | None = None,
) -> Checkpoint:
    """Read a local folder or a hub id ("org/name") in `dtype` onto `device`.

    `max_context` lowers the number of positions (default: all the checkpoint was made for). `bidirectional=True` makes
    a Qwen2 or Qwen3 checkpoint a masked-diffusion drafter; Dream always is one. Raises CheckpointError.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(map(str, DTYPES))}; got {dtype}")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError(f"device {device} was asked for but torch sees no GPU; use cpu")
    folder = _folder(source, weights=True)
    config, inv_freq, rope_scale = _read_config(folder, max_context, bidirectional)
    buffers = _read_weights(folder, config, dtype, device)
    buffers.setdefault("head", buffers["embed"])
    absent = dict.fromkeys(("qkv_bias", "q_norm", "k_norm", "o_bias", "gate_up_bias", "down_bias"))
    weights = Weights(**{**absent, **buffers}, inv_freq=inv_freq.to(device), rope_scale=rope_scale)  # type: ignore[arg-type]
    return Checkpoint(config, weights, folder)


def read_config(
    source: str | Path, *, max_context: int | None = None, bidirectional: bool | None = None
) -> ModelConfig:
    """What `load` would give as `.config`, without reading (or downloading) any weights. Raises CheckpointError."""
    return _read_config(_folder(source, weights=False), max_context, bidirectional)[0]


def _folder(source: str | Path, weights: bool) -> Path:
    """The local folder of `source`, downloaded if it is a hub id."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the checkpoint's folder, which holds config.json")
    if isinstance(source, Path) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        raise CheckpointError(
            f"there is no folder {path}; give a checkpoint's folder or a hub id such as Qwen/Qwen3-0.6B"
        )
    from huggingface_hub import snapshot_download

    patterns = CONFIG_FILES + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(source, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS))
    except Exception as error:  # the hub's errors share no base class
        raise CheckpointError(
            f"{source} is not a folder here and could not be had from the hub ({_reason(error)}); "
            "check the name, the network and your access rights"
        ) from error


def _reason(error: Exception) -> str:
    """An exception as half a sentence: its type and the first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _json(path: Path, required: bool = True) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path.parent} has no {path.name}; give a checkpoint's folder")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({_reason(error)}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; download it again")
    return value


def _read_config(
    folder: Path, max_context: int | None, bidirectional: bool | None
) -> tuple[ModelConfig, Tensor, float]:
    """The model's config, RoPE's inverse frequencies [D / 2] and RoPE's attention scaling."""
    raw = _json(folder / "config.json")
    arch = _architecture(raw)
    hf = _hf_config(folder, raw, arch)
    if hf.hidden_act != "silu":
        raise CheckpointError(f"hidden_act {hf.hidden_act!r} is not supported; only 'silu' is")
    dream, llama, qwen3 = arch == "DreamModel", arch == "LlamaForCausalLM", arch == "Qwen3ForCausalLM"
    heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    if heads % kv_heads or head_dim % 2:
        raise CheckpointError(
            f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}, "
            f"and head_dim {head_dim} even"
        )
    context = _context(hf, arch, max_context)
    diffusion, mask = _diffusion(raw, arch, bidirectional)
    inv_freq, rope_scale = _rope(hf, head_dim)
    attention_bias = (llama or qwen3) and bool(hf.attention_bias)
    config = ModelConfig(
        architecture=arch,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=hf.intermediate_size,
        rms_norm_eps=float(hf.rms_norm_eps),
        qkv_bias=attention_bias or dream or arch == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=llama and bool(hf.mlp_bias),
        qk_norm=qwen3,
        tied=bool(hf.tie_word_embeddings),
        causal=not diffusion,
        shifted_logits=dream or not diffusion,
        mask_token_id=mask,
        max_context=context,
        eos_ids=_eos_ids(folder, raw),
        bos_id=raw.get("bos_token_id"),
    )
    return config, inv_freq, rope_scale


def _architecture(raw: dict[str, Any]) -> str:
    """The architecture named by config.json, or CheckpointError naming what is not supported."""
    named = raw.get("architectures") or [a for a, t in ARCHITECTURES.items() if t == raw.get("model_type")]
    name = str(named[0]) if named else f"of model_type {raw.get('model_type')!r}"
    arch = name if name in ARCHITECTURES else re.sub("Model$", "ForCausalLM", name)
    if arch not in ARCHITECTURES or raw.get("model_type", ARCHITECTURES[arch]) != ARCHITECTURES[arch]:
        also = f" with model_type {raw.get('model_type')!r}" if arch in ARCHITECTURES else ""
        raise CheckpointError(f"architecture {name}{also} is not supported; supported: {', '.join(ARCHITECTURES)}")
    quantised = raw.get("quantization_config") or raw.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unknown method") if isinstance(quantised, dict) else quantised
        raise CheckpointError(f"quantised weights ({method}) are not supported; use the unquantised checkpoint")
    return arch


def _hf_config(folder: Path, raw: dict[str, Any], arch: str) -> Any:
    """transformers' config object, which fills in defaults and brings older spellings of RoPE into one form."""
    from transformers import AutoConfig, Qwen2Config

    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"RoPE that differs by layer type ({', '.join(rope)}) is not supported")
    try:
        if arch == "DreamModel":  # unknown to transformers, and its own code is never run: Qwen2's fields and weights
            return Qwen2Config.from_dict({k: v for k, v in raw.items() if k not in ("model_type", "auto_map")})
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # validation raises several kinds, one of them KeyError
        raise CheckpointError(f"{folder / 'config.json'} is not a valid {arch} config ({_reason(error)})") from error


def _context(hf: Any, arch: str, wanted: int | None) -> int:
    """Positions to run with. Sliding-window attention is full attention as long as no context exceeds the window."""
    limit = hf.max_position_embeddings
    context = limit if wanted is None else wanted
    if not 1 <= context <= limit:
        raise CheckpointError(
            f"max_context must be between 1 and this checkpoint's max_position_embeddings {limit}; got {context}"
        )
    if arch == "LlamaForCausalLM":
        return context
    layers = {"sliding_attention"} if arch == "MistralForCausalLM" else set(hf.layer_types)
    if layers - {"sliding_attention", "full_attention"}:
        raise CheckpointError(f"layer_types {', '.join(sorted(layers))} are not supported; only full_attention is")
    window = hf.sliding_window
    if "sliding_attention" in layers and window is not None and context > window:
        raise CheckpointError(
            f"{arch} has a sliding window of {window}, which is not supported beyond it; "
            f"with --max-context {window} or less attention is identical"
        )
    return context


def _diffusion(raw: dict[str, Any], arch: str, wanted: bool | None) -> tuple[bool, int | None]:
    """Whether the model is a diffusion drafter, and its mask token."""
    dream, mask = arch == "DreamModel", raw.get("mask_token_id")
    if wanted is False and dream:
        raise CheckpointError("DreamModel is always bidirectional; it cannot be loaded as a causal model")
    if wanted and arch not in ("DreamModel", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        raise CheckpointError(f"{arch} cannot be bidirectional; DreamModel, Qwen2ForCausalLM and Qwen3ForCausalLM can")
    diffusion = dream or bool(wanted)
    if diffusion and not (isinstance(mask, int) and 0 <= mask < raw["vocab_size"]):
        raise CheckpointError(
            f"a bidirectional {arch} needs mask_token_id in config.json, an id below vocab_size; it is {mask}"
        )
    return diffusion, mask


def _rope(hf: Any, head_dim: int) -> tuple[Tensor, float]:
    """inv_freq [D / 2] float32 and the attention scaling, as transformers' initialisers compute them."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = hf.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor", 1.0)
    if partial not in (None, 1.0):
        raise CheckpointError(f"partial_rotary_factor {partial} is not supported; RoPE must turn whole heads")
    try:
        if kind == "default":  # not in transformers' table: its model classes compute this one themselves
            powers = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            return 1.0 / (rope["rope_theta"] ** powers), 1.0
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"rope type {kind!r} lacks a parameter in config.json ({_reason(error)})") from error
    return inv_freq.float(), float(scale)


def _eos_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Ids the files name, not a config class's default: Llama's would make any vocabulary stop at id 2."""
    found: set[int] = set()
    for source in (raw, _json(folder / "generation_config.json", required=False)):
        ids = source.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    tokenizer = _json(folder / "tokenizer_config.json", required=False)
    eos = tokenizer.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text is not None:
        added = [{**token, "id": int(i)} for i, token in tokenizer.get("added_tokens_decoder", {}).items()]
        added = added or _json(folder / "tokenizer.json", required=False).get("added_tokens", [])
        found.update(token["id"] for token in added if token.get("content") == text)
    return tuple(sorted(found))


@dataclass(frozen=True)
class _Piece:
    """A tensor of the checkpoint and its place: buffers[buffer][layer][row : row + shape[0]]."""

    name: str  # without the "model." prefix
    buffer: str  # a field of Weights
    layer: int | None  # None: the buffer is not stacked
    row: int
    shape: tuple[int, ...]


def _pieces(c: ModelConfig) -> Iterator[_Piece]:
    q, kv, e, f = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    linear = [  # name, buffer, first row, rows, columns, has a bias
        ("self_attn.q_proj", "qkv", 0, q, e, c.qkv_bias),
        ("self_attn.k_proj", "qkv", q, kv, e, c.qkv_bias),
        ("self_attn.v_proj", "qkv", q + kv, kv, e, c.qkv_bias),
        ("self_attn.o_proj", "o", 0, e, q, c.o_bias),
        ("mlp.gate_proj", "gate_up", 0, f, e, c.mlp_bias),
        ("mlp.up_proj", "gate_up", f, f, e, c.mlp_bias),
        ("mlp.down_proj", "down", 0, e, f, c.mlp_bias),
    ]
    norms = [("input_layernorm", "norm_in", e), ("post_attention_layernorm", "norm_post", e)]
    if c.qk_norm:
        norms += [("self_attn.q_norm", "q_norm", c.head_dim), ("self_attn.k_norm", "k_norm", c.head_dim)]
    yield _Piece("embed_tokens.weight", "embed", None, 0, (c.vocab_size, e))
    for i in range(c.num_layers):
        for name, buffer, row, rows, columns, bias in linear:
            yield _Piece(f"layers.{i}.{name}.weight", buffer, i, row, (rows, columns))
            if bias:
                yield _Piece(f"layers.{i}.{name}.bias", f"{buffer}_bias", i, row, (rows,))
        for name, buffer, rows in norms:
            yield _Piece(f"layers.{i}.{name}.weight", buffer, i, 0, (rows,))
    yield _Piece("norm.weight", "norm", None, 0, (e,))
    if not c.tied:
        yield _Piece("lm_head.weight", "head", None, 0, (c.vocab_size, e))


def _read_weights(folder: Path, c: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Check every tensor's name, shape and dtype against the config, then fill the buffers (fields of Weights)."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        where: dict[str, Any] = {}  # tensor name -> the open file that holds it
        for path in _shards(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is corrupt or truncated ({_reason(error)}); download it again"
                ) from error
            where.update(dict.fromkeys(file.keys(), file))
        prefix = "model." if any(name.startswith("model.") for name in where) else ""
        pieces = {p.name if p.name == "lm_head.weight" else prefix + p.name: p for p in _pieces(c)}
        _check(where, pieces, c, prefix)
        shapes: dict[str, tuple[int, ...]] = {}
        for p in pieces.values():  # the last piece of a buffer ends it
            stacked = () if p.layer is None else (c.num_layers,)
            shapes[p.buffer] = (*stacked, p.row + p.shape[0], *p.shape[1:])
        buffers = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        for name, p in pieces.items():
            whole = buffers[p.buffer] if p.layer is None else buffers[p.buffer][p.layer]
            _copy(whole[p.row : p.row + p.shape[0]], where[name].get_tensor(name))
    return buffers


def _shards(folder: Path) -> list[Path]:
    """The safetensors files, all of them there."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = _json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index} has no weight_map; download it again")
        paths = [folder / str(name) for name in sorted(set(names.values()))]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{index.name} names {path.name}, which is not in {folder}; download it too")
        return paths
    if list(folder.glob("pytorch_model*.bin*")):
        raise CheckpointError(
            f"{folder} has only pytorch_model.bin; convert it: load it with transformers and save_pretrained it again"
        )
    raise CheckpointError(
        f"{folder} has no model.safetensors and no model.safetensors.index.json; only safetensors is read"
    )


def _check(where: dict[str, Any], pieces: dict[str, _Piece], c: ModelConfig, prefix: str) -> None:
    """Refuse missing, unexpected, misshapen and quantised tensors. Reads headers alone, but for a tied head."""
    missing = [name for name in pieces if name not in where]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        hint = " (or set tie_word_embeddings)" if missing[0] == "lm_head.weight" else ""
        raise CheckpointError(f"the checkpoint lacks {missing[0]}{more}, which config.json calls for{hint}")
    for name, p in pieces.items():
        header = where[name].get_slice(name)
        shape, stored = tuple(header.get_shape()), header.get_dtype()
        if shape != p.shape:
            vocab = f" (vocab_size {c.vocab_size})" if p.shape[0] == c.vocab_size and p.layer is None else ""
            raise CheckpointError(
                f"{name} has shape {shape}, but config.json makes it {p.shape}{vocab}; they must agree"
            )
        if stored not in ("F64", "F32", "F16", "BF16"):
            raise CheckpointError(
                f"{name} is stored as {stored}: quantised weights are not supported; use the unquantised checkpoint"
            )
    for name in where.keys() - pieces.keys():
        if name == "lm_head.weight" and c.tied:
            embed, head = (where[n].get_tensor(n) for n in (f"{prefix}embed_tokens.weight", name))
            if embed.dtype != head.dtype or not torch.equal(embed, head):
                raise CheckpointError(
                    "lm_head.weight differs from embed_tokens.weight although tie_word_embeddings is true; "
                    "set it to false in config.json to use both"
                )
        elif not name.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints saved; config.json gives it
            raise CheckpointError(
                f"the checkpoint has {name}, which {c.architecture} with this config.json does not use"
            )


def _copy(target: Tensor, source: Tensor) -> None:
    """target[:] = source, cast in pieces."""
    rows = max(1, CHUNK // max(1, source[0].numel()))
    for i in range(0, len(source), rows):
        target[i : i + rows].copy_(source[i : i + rows])


def _tokenizer(folder: Path, arch: str) -> Any:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        raise CheckpointError(f"{folder} has no tokenizer ({', '.join(names)}); copy it there or pass token ids")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

    try:
        if arch != "DreamModel":
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # AutoTokenizer would ask for Dream's own code; it is Qwen2's tokenizer with a few more special tokens
        fast = (folder / "tokenizer.json").is_file()
        return (PreTrainedTokenizerFast if fast else Qwen2Tokenizer).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as for configs
        raise CheckpointError(f"the tokenizer in {folder} cannot be read ({_reason(error)})") from error
