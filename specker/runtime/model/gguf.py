"""A GGUF file as a checkpoint: transformers reads and dequantises it once, into a folder of the cache.

The folder has Hugging Face's format (config, tokenizer with chat template, float32 safetensors), so everything after
it is the same for both formats. It lies under `$SPECKER_CACHE` (default: ~/.cache/specker/gguf) and is named by the
file's SHA-256: another file never meets an old folder.
"""

import hashlib
import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specker.runtime.model.config import ARCHITECTURES, CheckpointError, reason

PACKAGES = {"gguf": "0.17", "accelerate": "1.0"}  # floors, as in the extra `gguf`
DONE = "converted.json"  # written last: source, SHA-256 and the sizes of the folder's files


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


def converted(path: Path) -> Path:
    """The folder with the converted checkpoint, made on first use. Raises CheckpointError if packages or disk space
    are missing, or if the file is damaged or of an unsupported architecture."""
    digest = sha256(path)
    folder = cache_root() / "gguf" / f"{path.stem}-{digest[:16]}"
    if _complete(folder):
        return folder
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"{path} is a GGUF file, and reading it needs {' and '.join(missing)}: pip install 'specker[gguf]'"
        )
    _check_space(path, folder.parent)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        _convert(path, part)
        sizes = {file.name: file.stat().st_size for file in part.iterdir()}
        (part / DONE).write_text(json.dumps({"source": path.name, "sha256": digest, "sizes": sizes}, indent=1))
        if folder.exists() and not _complete(folder):
            shutil.rmtree(folder)
        try:
            part.rename(folder)
        except OSError:  # another process was first
            if not _complete(folder):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def cache_root() -> Path:
    """Where specker keeps converted and fetched checkpoints."""
    return Path(os.environ.get("SPECKER_CACHE") or Path.home() / ".cache" / "specker")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / DONE).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _check_space(path: Path, root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    need, free = 8 * path.stat().st_size, shutil.disk_usage(root).free  # float32 beside about 4 bits a weight
    if need > free:
        raise CheckpointError(
            f"converting {path} takes up to {need / 1e9:.1f} GB, but {root} has {free / 1e9:.1f} GB free; "
            "set SPECKER_CACHE to a folder on a larger disk"
        )


def _convert(path: Path, folder: Path) -> None:
    import transformers
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        config = AutoConfig.from_pretrained(**where)
    except Exception as error:  # the reader raises many types for damaged files
        raise CheckpointError(f"{path} cannot be read as a GGUF file ({reason(error)}); download it again") from error
    architectures = [arch for arch, kind in ARCHITECTURES.items() if kind == config.model_type]
    if not architectures:
        raise CheckpointError(
            f"{path} has a model of type {config.model_type!r}, which is not supported; supported: "
            + ", ".join(ARCHITECTURES)
        )
    try:
        if hasattr(transformers, "GgufConfig"):  # newer releases may leave weights in GGUF blocks
            where["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        where.pop("quantization_config", None)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be converted ({reason(error)})") from error
    weights = model.state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    settings = {k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    settings |= {"architectures": architectures[:1], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
