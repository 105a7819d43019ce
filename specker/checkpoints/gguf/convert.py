"""A GGUF file as a checkpoint: it is converted once, into a folder of the cache.

The folder has Hugging Face's format (config, tokenizer with chat template, safetensors), so all later code is the same
for both formats. Matrices whose blocks gguf_blocks.py reads keep their bits (quantised.OwnFormat); others become
float32, with a note. `dense=True` writes float32, for tools that cannot read our quantised format. The folder lies
under `$SPECKER_CACHE` (default: ~/.cache/specker/gguf). Its name contains the file's SHA-256, so a changed file never
uses an old folder. The cache remembers the SHA-256 of each file, so that a start does not read the whole file.
"""

import glob
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from specker.checkpoints.architectures import ARCHITECTURES
from specker.checkpoints.gguf import blocks
from specker.checkpoints.gguf import experts as gguf_experts
from specker.checkpoints.gguf import heads as gguf_heads
from specker.checkpoints.gguf.families import FAMILIES, FREQUENCIES, Family, name_of
from specker.checkpoints.parse import reason
from specker.cpu.packed import FORMATS, Numbers, pack
from specker.model.config import CheckpointError
from specker.paths import root as cache_root
from specker.paths import write

log = logging.getLogger("specker.steps")  # slow steps, which `Screen.progress` shows
PACKAGES = {"gguf": "0.17", "accelerate": "1.0"}  # minimum versions, as in the extra `gguf`
DONE = "converted.json"  # written last: source, SHA-256 and the sizes of the folder's files
WHOLE = "PreTrainedTokenizerFast"  # transformers' class that reads tokenizer.json unchanged


def file_of(source: str | Path) -> Path | None:
    """The GGUF file that `source` names: itself, or the only one in a folder without config.json. None if `source` is
    no GGUF checkpoint. Raises CheckpointError for a folder with several."""
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(f"{path} holds {len(files)} GGUF files; name one, such as {files[0]}")
    return files[0] if files else None


def converted(path: Path, dense: bool = False) -> Path:
    """The folder with the converted checkpoint, made on first use; with `dense` all in float32. Raises CheckpointError
    if packages or disk space are missing, or if the file is damaged or of an unsupported architecture."""
    digest = remembered_sha256(path)
    folder = cache_root() / "gguf" / f"{path.stem}-{digest[:16]}{'' if dense else '-packed'}"
    if _complete(folder):
        return folder
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"{path} is a GGUF file, and reading it needs {' and '.join(missing)}: pip install 'specker[gguf]'"
        )
    locks = cache_root() / "locks"
    for made in (folder.parent, locks):
        made.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{folder.name}.lock"):  # another process waits for the copy instead of making its own
        return folder if _complete(folder) else _converted(path, folder, digest, dense)


def origin(folder: Path) -> str | None:
    """The name of the GGUF file that was converted into the folder; None if it is another checkpoint."""
    try:
        return str(json.loads((folder / DONE).read_text())["source"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _converted(path: Path, folder: Path, digest: str, dense: bool) -> Path:
    from gguf import GGUFReader

    for left in folder.parent.glob(f"{glob.escape(folder.name)}.*"):  # left by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        file = GGUFReader(path)  # takes a second for a large vocabulary
        tensors, architecture = file.tensors, file.fields["general.architecture"].contents()
    except Exception as error:  # the reader raises many types for damaged files
        raise CheckpointError(f"{path} cannot be read as a GGUF file ({reason(error)}); download it again") from error
    size = converted_size(tensors, dense)
    _check_space(path, folder.parent, size)
    log.info("converting %s once into %s (%.2f GB)", path.name, folder, size / 1e9)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        if architecture == gguf_heads.ARCHITECTURE:
            _convert_head(path, part, file, dense)
        else:
            _convert(path, part, file, dense)
        sizes = {file.name: file.stat().st_size for file in part.iterdir()}
        (part / DONE).write_text(json.dumps({"source": path.name, "sha256": digest, "sizes": sizes}, indent=1))
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """The file's SHA-256. Computing it takes about a second per GB, so that happens on first use, and again only if the
    path, size, modification time or inode has changed."""
    path = path.resolve()
    note = cache_root() / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    identity = _identity(path)
    with suppress(OSError, ValueError, LookupError, TypeError):  # no note yet, or a damaged one
        known = json.loads(note.read_text())
        if known["file"] == identity and len(bytes.fromhex(known["sha256"])) == 32:
            return str(known["sha256"])
    log.info("computing the SHA-256 of %s, once", path.name)
    digest = sha256(path)
    if _identity(path) == identity:  # it did not change meanwhile
        with suppress(OSError):  # without the note, the next start hashes again
            write(note, json.dumps({"file": identity, "sha256": digest}).encode())
    return digest


def _identity(path: Path) -> dict[str, Any]:
    about = path.stat()
    return {"path": str(path), "size": about.st_size, "mtime_ns": about.st_mtime_ns, "inode": about.st_ino}


def _complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / DONE).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _check_space(path: Path, root: Path, size: int) -> None:
    """Raise CheckpointError if the disk has no room for weights of `size` bytes and a tokenizer."""
    free = shutil.disk_usage(root).free
    if size + TOKENIZER > free:
        raise CheckpointError(
            f"converting {path} takes {(size + TOKENIZER) / 1e9:.2f} GB, but {root} has {free / 1e9:.2f} GB free; set "
            "SPECKER_CACHE to a folder on a larger disk"
        )


def converted_size(tensors: Sequence[Any], dense: bool) -> int:
    """Bytes of a GGUF file's tensors after conversion, including a head that repeats the embedding."""
    total = 0
    for tensor in tensors:
        kind, shape = tensor.tensor_type.name, tensor.shape.tolist()  # columns first
        if not dense and kind in blocks.PACKED and len(shape) > 1:
            total += FORMATS[blocks.PACKED[kind]].bytes_of(math.prod(shape[1:]), shape[0])
        else:
            total += 4 * int(tensor.n_elements)
    return total


def _convert(path: Path, folder: Path, file: Any, dense: bool) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        config = AutoConfig.from_pretrained(**where)
    except Exception as error:  # the reader raises many types for damaged files
        raise CheckpointError(f"{path} cannot be read as a GGUF file ({reason(error)}); download it again") from error
    keys = _keys(file)
    model_type = "mixtral" if config.model_type == "llama" and keys.get("expert_count") else config.model_type
    family = FAMILIES.get(model_type)
    if family is None:
        raise CheckpointError(
            f"{path} has a model of type {config.model_type!r}, which is not supported in a GGUF file; supported: "
            + ", ".join(FAMILIES)
        )
    try:
        modules, restored = _save(path, folder, file.tensors, config, dense, partial(name_of, family))
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be converted ({reason(error)})") from error
    tokenizer.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    settings = {k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    kinds = [arch for arch, its in ARCHITECTURES.items() if its.model_type == model_type]
    settings |= {"architectures": kinds, "dtype": "float32"} | family.mend(settings, keys)
    vocabulary = tokenizer.get_vocab() if family.ends else {}
    if ends := [vocabulary[token] for token in family.ends if token in vocabulary]:
        settings["eos_token_id"] = sorted({settings["eos_token_id"], *ends} - {None})
    _write_config(folder, settings, modules, restored)
    _write_whole_tokenizer(folder)


def _keys(file: Any) -> dict[str, Any]:
    """What `Family.mend` reads: keys without the architecture's prefix, and the divisors of RoPE's frequencies."""
    start = f"{file.fields['general.architecture'].contents()}."
    found = {name.removeprefix(start): x.contents() for name, x in file.fields.items() if name.startswith(start)}
    for tensor in file.tensors:
        if tensor.name == f"{FREQUENCIES}.weight":
            found[FREQUENCIES] = tensor.data.tolist()
    return found


def _convert_head(path: Path, folder: Path, file: Any, dense: bool) -> None:
    """Write an EAGLE-3 head. It has no tokenizer of its own."""
    from transformers import PretrainedConfig

    settings = gguf_heads.config_of(path, {name: field.contents() for name, field in file.fields.items()})
    maps = [tensor for tensor in file.tensors if tensor.name == "d2t"]
    others = [tensor for tensor in file.tensors if tensor.name != "d2t"]
    rows = [int(tensor.shape[-1]) for tensor in file.tensors if tensor.name in ("d2t", "output.weight")]
    settings |= {"draft_vocab_size": rows[0] if rows else None, "tie_word_embeddings": False}
    settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
    extra = {tensor.name: gguf_heads.distances(torch.from_numpy(tensor.data.copy())) for tensor in maps}
    config = PretrainedConfig.from_dict(settings)
    try:
        modules, restored = _save(path, folder, others, config, dense, gguf_heads.name_of, extra)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be converted ({reason(error)})") from error
    _write_config(folder, settings, modules, restored)


def _write_config(folder: Path, settings: dict[str, Any], modules: dict[str, Any], restored: list[str]) -> None:
    if modules or restored:
        settings["quantization_config"] = {"quant_method": "specker", "modules": modules, "restored": restored}
    (folder / "config.json").write_text(json.dumps(settings, indent=1))


def _write_whole_tokenizer(folder: Path) -> None:
    """Save the tokenizer so that tokenizer.json alone defines it, and name the class that reads it as it is.

    A GGUF file lacks parts of a tokenizer, such as Qwen2's normaliser. transformers adds them at each start: the
    model's class parses tokenizer.json in Python and builds it again, which takes a second for 150,000 tokens. It
    parses tokenizer.json once more for the added tokens, unless tokenizer_config.json lists them."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    added = {token["id"]: {k: v for k, v in token.items() if k != "id"} for token in tokens}
    about = json.loads(settings.read_text(encoding="utf-8"))
    about |= {"tokenizer_class": WHOLE, "added_tokens_decoder": added}
    settings.write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")


SHARD = 1 << 30  # bytes
TOKENIZER = 50_000_000  # bytes that a tokenizer and the other files take at most


Named = Callable[[str, Path], str | None]  # a tensor's name in GGUF, the file -> its name in the checkpoint


def _save(
    path: Path,
    folder: Path,
    tensors: Sequence[Any],
    config: Any,
    dense: bool,
    named: Named,
    extra: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Write the weights, and the tensors `extra` as they are, into shards of about SHARD bytes. Returns the quantised
    modules and the restored formats (see quantised.OwnFormat)."""
    from safetensors.torch import save_file

    modules: dict[str, Any] = {}
    restored: set[str] = set()
    shards: list[dict[str, Tensor]] = [extra or {}]
    where: dict[str, str] = {}
    size = 0

    def write_shard() -> None:
        name = f"model-{len(shards):05}.safetensors"
        save_file(shards[-1], folder / name, {"format": "pt"})
        where.update(dict.fromkeys(shards[-1], name))
        shards[-1] = {}

    experts = next((int(tensor.shape[2]) for tensor in tensors if len(tensor.shape) == 3), 0)
    for name, kind, x in gguf_experts.fused(_tensors(path, tensors, config, dense, named), experts):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module = name.removesuffix(".weight")
        if isinstance(x, Numbers):
            new = {f"{module}.packed": pack(x).runs[0].data}
            modules[module] = x.format
        else:
            if not dense and kind not in ("F32", "F16", "BF16", "F64"):
                restored.add(kind)
            new = {name: x}
        shards[-1] |= {key: y.contiguous() for key, y in new.items()}
        size += sum(y.nbytes for y in new.values())
        if size >= SHARD:
            write_shard()
            shards.append({})
            size = 0
    write_shard()
    if len(shards) == 1:
        (folder / where.popitem()[1]).rename(folder / "model.safetensors")
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return modules, sorted(restored)


def _with_progress(path: Path, tensors: Sequence[Any]) -> Iterator[Any]:
    """Yield `tensors` one by one, and log a record after each tenth of their bytes."""
    total, done = sum(int(tensor.n_bytes) for tensor in tensors), 0
    for tensor in tensors:
        yield tensor
        before, done = done, done + int(tensor.n_bytes)
        if 10 * before // total < 10 * done // total < 10:
            log.info("converting %s: %d%%", path.name, 100 * done // total)


def _tensors(
    path: Path, tensors: Sequence[Any], config: Any, dense: bool, named: Named
) -> Iterator[tuple[str, str, Tensor | Numbers]]:
    """Yield the name, format and value of each tensor, with the names and the order of rows that Hugging Face uses. A
    value is in float32 or, without `dense`, holds the numbers of its blocks if gguf_blocks.py reads their format."""
    from gguf.quants import dequantize

    family = FAMILIES.get(config.model_type, Family())
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for tensor in _with_progress(path, tensors):
        name = named(tensor.name, path)
        if name is None:
            continue
        kind, rows = tensor.tensor_type.name, tensor.data
        x: Tensor | Numbers
        if not dense and kind in blocks.READERS and rows.ndim > 1:
            x = blocks.read(kind, torch.from_numpy(rows.copy()).flatten(0, -2))
        else:
            x = torch.from_numpy(dequantize(rows, tensor.tensor_type).copy())
        part = name.split(".")[-2]
        if part in heads and family.permuted:
            order = torch.arange(len(rows)).view(heads[part], -1, 2).transpose(1, 2).flatten()
            if isinstance(x, Numbers):
                x = Numbers(x.format, *(None if y is None else y[order] for y in x[1:]))  # type: ignore[arg-type]
            else:
                x = x[order]
        if family.norm_offset and part.endswith("norm") and isinstance(x, Tensor):
            x = x - family.norm_offset
        yield name, kind, x
