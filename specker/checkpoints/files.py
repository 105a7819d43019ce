"""The files of a checkpoint: where they are, their tensors, and whether these are what config.json requires."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints.buffers import Storage, part_of
from specker.checkpoints.gguf.cache import converted, file_of
from specker.checkpoints.parse import read_json, reason
from specker.checkpoints.pieces import Piece
from specker.model.config import CheckpointError, ModelConfig, no_source
from specker.model.weights import Matrix

CONFIG_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # config, generation config, tokenizer, chat template
OTHER_FORMATS = ["consolidated*", "*/*"]  # a second copy of the weights, in the original format
SHARED_ROWS = ("specker.shared_ids", "specker.shared_rows")  # [n] int64, [n, E]: rows of the target's embedding
BIN = "pytorch_model.bin"
HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/(.+\.gguf))?")  # a hub id, and perhaps a file there
BIN_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def folder_of(source: str | Path, weights: bool, formats: tuple[str, ...] = ("*.safetensors",)) -> Path:
    """The local folder of `source`: converted if it is a GGUF file, downloaded if it is a hub id, and both if it is a
    GGUF file on the hub ("org/name/file.gguf"). `formats`: of the files with weights."""
    path = Path(source).expanduser()
    if (file := file_of(path)) is not None:
        return converted(file)
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give a GGUF file, or the checkpoint's folder with its config.json")
    hub = None if isinstance(source, Path) else HUB.fullmatch(source)
    if hub is None or (hub[2] and Path(path.parts[0]).exists()):  # a path of a file in a folder that is here
        kind = "file" if path.suffix == ".gguf" else "folder"
        raise CheckpointError(no_source(f"{kind} {path}"))
    from huggingface_hub import hf_hub_download, snapshot_download

    repository, name = hub.groups()
    patterns = CONFIG_FILES + ([*formats] if weights else [])
    try:
        if name is None:
            return Path(snapshot_download(repository, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS))
        file = Path(hf_hub_download(repository, name))
    except Exception as error:  # the hub's errors share no base class
        raise CheckpointError(
            f"{source} is not a local {'folder' if name is None else 'file'} and could not be downloaded from the hub "
            f"({reason(error)}); check the name, the network and your access rights"
        ) from error
    return converted(file)


def open_files(folder: Path, stack: ExitStack, or_bin: bool = False) -> dict[str, Any]:
    """Map all shards: tensor name -> the open file that holds it. Closing `stack` closes them. `or_bin`: without
    safetensors files, pytorch_model.bin will do."""
    from safetensors import SafetensorError, safe_open

    if or_bin and not list(folder.glob("*.safetensors*")) and (folder / BIN).is_file():
        tensors = _Bin(folder / BIN)
        return dict.fromkeys(tensors.keys(), tensors)
    where: dict[str, Any] = {}
    for path in _shards(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is corrupt or truncated ({reason(error)}); download it again") from error
        where.update(dict.fromkeys(file.keys(), file))
    return where


def _shards(folder: Path) -> list[Path]:
    """The paths of all safetensors files. Raises CheckpointError if one is missing."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"{index} has no weight_map; download it again")
        files = [Path(str(name)) for name in sorted(set(map(str, names.values())))]
        for file in files:
            if file.is_absolute() or ".." in file.parts:
                raise CheckpointError(f"{index} names {file}, which is outside of the checkpoint's folder; not read")
        paths = [folder / file for file in files]
        for path in paths:
            if not path.is_file():
                raise CheckpointError(f"{index.name} names {path.name}, which is not in {folder}; download it")
        return paths
    if list(folder.glob("pytorch_model*.bin*")):
        raise CheckpointError(
            f"{folder} has only pytorch_model.bin; convert it: load it with transformers and call save_pretrained"
        )
    raise CheckpointError(
        f"{folder} has no model.safetensors and no model.safetensors.index.json; specker reads only safetensors"
    )


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
        return BIN_DTYPES.get(self.x.dtype, str(self.x.dtype))


def read_piece(p: Piece, name: str, where: dict[str, Any], storage: Storage) -> Matrix:
    """A piece of the tensor `name` of the open files, or of the tensors that store it quantised."""
    if storage.scheme is None or not storage.covers(name):
        return p.read(where[name], name)
    return part_of(p, name, storage.scheme, lambda n: where[n].get_tensor(n) if n in where else None)


def check_tensors(
    where: dict[str, Any], pieces: dict[str, Piece], c: ModelConfig, prefix: str, storage: Storage
) -> None:
    """Raise CheckpointError for missing, unexpected and misshapen tensors. Reads only headers, except for a tied
    head."""
    wanted: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    ignored: set[str] = set()
    for name, p in pieces.items():
        if storage.covers(name):
            assert storage.scheme is not None
            wanted |= storage.scheme.stored(name.removesuffix(".weight"), p.matrix)
            ignored.update(storage.scheme.optional(name.removesuffix(".weight")))
        else:
            wanted[name] = p.in_file, ("F64", "F32", "F16", "BF16")
    missing = [name for name in wanted if name not in where]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        hint = " (or set tie_word_embeddings)" if missing[0] == "lm_head.weight" else ""
        raise CheckpointError(f"the checkpoint lacks {missing[0]}{more}, which config.json requires{hint}")
    for name, (expected, dtypes) in wanted.items():
        header = where[name].get_slice(name)
        shape, stored = tuple(header.get_shape()), header.get_dtype()
        if shape != expected:
            vocab = f" (vocab_size {c.vocab_size})" if expected[0] == c.vocab_size and ".layers." not in name else ""
            raise CheckpointError(
                f"{name} has shape {shape}, but config.json makes it {expected}{vocab}; they must agree"
            )
        if stored not in dtypes:
            how = (
                "names no quantisation" if storage.scheme is None else f"with {storage.scheme.name} makes it otherwise"
            )
            raise CheckpointError(f"{name} is stored as {stored}, but config.json {how}; download the checkpoint again")
    unread = () if any(p.layer is not None for p in pieces.values()) else (f"{prefix}layers.",)
    for name in where.keys() - wanted.keys() - ignored:
        if name.startswith(unread):
            continue
        if name == "lm_head.weight" and c.tied and f"{prefix}embed_tokens.weight" in where:
            embed, head = (where[n].get_tensor(n) for n in (f"{prefix}embed_tokens.weight", name))
            if embed.dtype != head.dtype or not torch.equal(embed, head):
                raise CheckpointError(
                    "lm_head.weight differs from embed_tokens.weight although tie_word_embeddings is true; "
                    "set it to false in config.json to use both"
                )
        elif not (name.endswith("rotary_emb.inv_freq") or (c.shares and name in SHARED_ROWS)):
            # old checkpoints saved the buffer inv_freq; config.json defines it
            raise CheckpointError(
                f"the checkpoint has {name}, which {c.architecture} with this config.json does not use"
            )
