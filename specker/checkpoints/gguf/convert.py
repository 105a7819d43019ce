"""Write a GGUF file's model or draft head as a folder in Hugging Face's format.

Matrices whose blocks gguf_blocks.py reads keep their bits (schemes.OwnFormat); others become float32, with a note.
`dense` writes float32, for tools that cannot read our quantised format.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.checkpoints import gguf_blocks
from specker.checkpoints.architectures import ARCHITECTURES
from specker.checkpoints.architectures.gguf import FREQUENCIES, File, Keys, Undo
from specker.checkpoints.gguf import experts, heads, model, vocabulary
from specker.checkpoints.gguf.header import check_header
from specker.checkpoints.gguf_blocks import BLOCKS, Value
from specker.checkpoints.parse import reason, unsupported
from specker.cpu.packed import FORMATS, Numbers, pack
from specker.model.config import CheckpointError

log = logging.getLogger("specker.steps")  # slow steps, which `Screen.progress` shows
WHOLE = "PreTrainedTokenizerFast"  # transformers' class that reads tokenizer.json unchanged
SHARD = 1 << 30  # bytes
TRANSFORMERS = "gemma3", "llama", "qwen2", "qwen3", "qwen3moe"  # llama.cpp's architectures whose config it makes
READ = sorted(
    {*heads.HEADS, *TRANSFORMERS, *(arch for its in ARCHITECTURES.values() if its.gguf for arch in its.gguf.files)}
)
Named = Callable[[str, Path], str | None]  # a tensor's name in GGUF, the file -> its name in the checkpoint


def read(path: Path) -> Any:
    """The file's keys and tensors, as gguf.GGUFReader. Raises CheckpointError."""
    from gguf import GGUFReader

    try:
        check_header(path)
        file = GGUFReader(path)  # takes a second for a large vocabulary
        if (arch := _architecture(file)) not in READ:
            raise unsupported(repr(arch), READ, f" in a GGUF file, which {path} is")
    except CheckpointError:
        raise
    except Exception as error:  # the reader raises many types for damaged files
        raise CheckpointError(f"{path} cannot be read as a GGUF file ({reason(error)}); download it again") from error
    return file


def _architecture(file: Any) -> str:
    return str(file.fields["general.architecture"].contents())


def convert(path: Path, folder: Path, file: Any, dense: bool) -> None:
    """Write the open `file` into the empty `folder`. Raises CheckpointError."""
    write = _convert_head if _architecture(file) in heads.HEADS else _convert_model
    try:
        write(path, folder, file, dense)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file lacks keys, and transformers raises many types
        raise CheckpointError(f"{path} cannot be converted ({reason(error)})") from error


def kept(path: Path, file: Any) -> Sequence[Any]:
    """The tensors that are converted. MTP heads in a file of their own draft with the target's embedding and LM head,
    of which the file may have copies."""
    every: Sequence[Any] = file.tensors
    return [tensor for tensor in every if tensor.name[:4] == "blk."] if model.only_head(_keys(path, file)) else every


def converted_size(tensors: Sequence[Any], dense: bool) -> int:
    """Bytes of a GGUF file's tensors after conversion, including a head that repeats the embedding."""
    total = 0
    for tensor in tensors:
        kind, shape = tensor.tensor_type.name, tensor.shape.tolist()  # columns first
        if not dense and kind in BLOCKS and len(shape) > 1:
            total += FORMATS[BLOCKS[kind].format].bytes_of(math.prod(shape[1:]), shape[0])
        else:
            total += 4 * int(tensor.n_elements)
    return total


def _convert_model(path: Path, folder: Path, file: Any, dense: bool) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    keys, arch = _keys(path, file), _architecture(file)
    supported = {its.model_type: (name, its.gguf, its) for name, its in ARCHITECTURES.items() if its.gguf is not None}
    hybrid = next((its for _, gguf, its in supported.values() if arch in gguf.files), None)
    config = _config(path) if hybrid is None else model.config_of(file, hybrid, keys)
    model_type = "mixtral" if config.model_type == "llama" and keys.get("expert_count") else config.model_type
    name, gguf, its = supported[model_type]
    named: Named = partial(model.name_of, its, config.num_hidden_layers)
    undo, more = gguf.undone(File(arch, config, file.tensors, dense))
    modules, restored = _save(path, folder, kept(path, file), config.tie_word_embeddings, dense, named, undo)
    settings = {k: v for k, v in config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    settings |= {"architectures": [name], "dtype": "float32"} | gguf.mend(settings, keys) | more
    if model.only_head(keys):  # it drafts with the target's tokenizer
        _write_config(folder, settings, modules, restored)
        return
    tokenizer = _tokenizer(path, file) if hybrid is None else vocabulary.tokenizer_of(path, file)
    tokenizer.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    ids = tokenizer.get_vocab() if gguf.ends else {}
    if ends := [ids[token] for token in gguf.ends if token in ids]:
        settings["eos_token_id"] = sorted({settings["eos_token_id"], *ends} - {None})
    _write_config(folder, settings, modules, restored)
    if hybrid is None:  # a hybrid's is whole; its model type's class may be another's, as Qwen3.5's for Qwen3-Next
        AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(folder)
    _name_whole_tokenizer(folder)


def _config(path: Path) -> Any:
    """transformers' config of the file. Raises CheckpointError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # the reader raises many types for damaged files
        raise CheckpointError(f"{path} cannot be read as a GGUF file ({reason(error)}); download it again") from error


def _tokenizer(path: Path, file: Any) -> Any:
    """transformers' tokenizer of the file, told whether a text begins with `bos`: before 5.23 it does not read that."""
    from transformers import AutoTokenizer

    fields = {name: file.fields.get(f"tokenizer.ggml.{name}") for name in ("model", "add_bos_token")}
    said = {name: field.contents() for name, field in fields.items() if field is not None}
    begins = said.get("add_bos_token", True if said.get("model") == "llama" else None)  # as llama.cpp has it
    more = {} if begins is None else {"add_bos_token": begins}
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **more)


def _keys(path: Path, file: Any) -> Keys:
    arch = _architecture(file)
    start = f"{arch}."
    found = {name.removeprefix(start): x.contents() for name, x in file.fields.items() if name.startswith(start)}
    if (tokens := file.fields.get("tokenizer.ggml.tokens")) is not None:
        found.setdefault("vocab_size", len(tokens.data))
    if (mask := file.fields.get("tokenizer.ggml.mask_token_id")) is not None:
        found["mask_token_id"] = mask.contents()
    for tensor in file.tensors:
        if tensor.name == f"{FREQUENCIES}.weight":
            found[FREQUENCIES] = tensor.data.tolist()
    return Keys(found, path, arch, {tensor.name: tuple(tensor.shape.tolist()[::-1]) for tensor in file.tensors})


def _convert_head(path: Path, folder: Path, file: Any, dense: bool) -> None:
    """Write a head. It has no tokenizer of its own."""
    from transformers import PretrainedConfig

    arch, keys = _architecture(file), _keys(path, file)
    head = heads.HEADS[arch]
    settings = heads.config_of(keys, head)
    maps = [tensor for tensor in file.tensors if tensor.name == "d2t"]
    others = [tensor for tensor in file.tensors if tensor.name != "d2t"]
    extra = {tensor.name: heads.distances(torch.from_numpy(tensor.data.copy())) for tensor in maps}
    undo, _ = head.undone(File(arch, PretrainedConfig.from_dict(settings), others, dense))
    modules, restored = _save(path, folder, others, False, dense, partial(heads.name_of, head), undo, extra)
    _write_config(folder, settings, modules, restored)


def _write_config(folder: Path, settings: dict[str, Any], modules: dict[str, Any], restored: list[str]) -> None:
    if modules or restored:
        settings["quantization_config"] = {"quant_method": "specker", "modules": modules, "restored": restored}
    (folder / "config.json").write_text(json.dumps(settings, indent=1))


def _name_whole_tokenizer(folder: Path) -> None:
    """Name the class that reads tokenizer.json, which must define the whole tokenizer, as it is.

    transformers' tokenizer of a GGUF file lacks parts, such as Qwen2's normaliser, which the model's class adds when it
    reads the folder: it parses tokenizer.json in Python and builds it again, which takes a second for 150,000 tokens.
    It parses tokenizer.json once more for the added tokens, unless tokenizer_config.json lists them."""
    settings = folder / "tokenizer_config.json"
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    added = {token["id"]: {k: v for k, v in token.items() if k != "id"} for token in tokens}
    about = json.loads(settings.read_text(encoding="utf-8"))
    about |= {"tokenizer_class": WHOLE, "added_tokens_decoder": added}
    settings.write_text(json.dumps(about, indent=1, ensure_ascii=False), encoding="utf-8")


def _save(
    path: Path,
    folder: Path,
    tensors: Sequence[Any],
    tied: bool,
    dense: bool,
    named: Named,
    undo: Undo,
    extra: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Write the weights, and the tensors `extra` as they are, into shards of about SHARD bytes. `tied`: the head is the
    embedding. Returns the quantised modules and the restored formats (see schemes.OwnFormat)."""
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

    count = next((int(tensor.shape[2]) for tensor in tensors if len(tensor.shape) == 3), 0)
    for name, kind, x in experts.fused(_tensors(path, tensors, dense, named, undo), count):
        if name == "lm_head.weight" and tied:
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
    path: Path, tensors: Sequence[Any], dense: bool, named: Named, undo: Undo
) -> Iterator[tuple[str, str, Value]]:
    """Yield the name, format and value of each tensor of the checkpoint. A value is in float32 or, without `dense`,
    holds the numbers of its blocks if gguf_blocks.py reads their format."""
    from gguf.quants import dequantize

    for tensor in _with_progress(path, tensors):
        name = named(tensor.name, path)
        if name is None:
            continue
        kind, data = tensor.tensor_type.name, tensor.data
        x: Value
        if not dense and kind in BLOCKS and data.ndim > 1:
            x = gguf_blocks.read(kind, torch.from_numpy(data.copy()).flatten(0, -2))
        else:
            x = torch.from_numpy(dequantize(data, tensor.tensor_type).copy())
        for own, value in undo(name, x).items():
            yield own, kind, value
