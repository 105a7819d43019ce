"""GGUF files that are damaged, or made to do harm: each is refused with one sentence, before anything large is read or
allocated."""

import random
import struct
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import QWEN3_MOE, make
from make_gguf import gguf, write

from specker.checkpoints.checkpoint import opened
from specker.checkpoints.gguf import convert
from specker.model.config import CheckpointError

TINY: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32, "vocab": 100}
START = 24  # bytes of magic, version and counts


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole")
    source = make(folder / "source", **TINY)
    return write(folder / "tiny.gguf", source, more=lambda out: out.add_custom_alignment(32)).read_bytes()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))


def after(data: bytes, name: str) -> int:
    """The place of a key's type, or of the number of a tensor's dimensions."""
    return data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def placed(name: str, at: int, kind: str, value: int) -> Any:
    """A change of a file: `value` at so many bytes after a name, or from the beginning if the name is empty."""

    def change(data: bytes) -> bytes:
        out, start = bytearray(data), after(data, name) if name else 0
        struct.pack_into(f"<{kind}", out, start + at, value)
        return bytes(out)

    return change


ARRAY, TENSOR = "tokenizer.ggml.token_type", "blk.0.attn_q.weight"
DAMAGE: list[tuple[str, Any, str]] = [
    ("empty", lambda data: b"", "cannot be read as a GGUF file"),
    ("magic", lambda data: b"GGML" + data[4:], "it does not begin with GGUF"),
    ("tensors", placed("", 8, "Q", 2**60), "cannot be read as a GGUF file"),
    ("keys", placed("", 16, "Q", 2**60), "cannot be read as a GGUF file"),
    ("string", placed("", START, "Q", 2**60), "a string at byte 32 has 1152921504606846976 bytes, and the file ends"),
    ("array", placed(ARRAY, 8, "Q", 2**50), f"the array '{ARRAY}' has 1125899906842624 entries"),
    ("short array", placed(ARRAY, 8, "Q", 2**20), r"cannot be read as a GGUF file \(error: unpack_from requires"),
    ("array of arrays", placed(ARRAY, 4, "I", 9), f"'{ARRAY}' has the unknown type 9"),
    ("type", placed("llama.block_count", 0, "I", 77), "'llama.block_count' has the unknown type 77"),
    ("layers", placed("llama.block_count", 4, "I", 10**9), "llama.block_count must be at most 1024, but .* 1000000000"),
    ("width", placed("llama.embedding_length", 4, "I", 10**9), "llama.embedding_length must be at most 1048576, but"),
    ("alignment", placed("general.alignment", 4, "I", 0), "Invalid alignment"),
    ("dimensions", placed(TENSOR, 0, "I", 2**31), f"the tensor '{TENSOR}' has the shape"),
    ("shape", placed(TENSOR, 4, "Q", 2**60), f"the tensor '{TENSOR}' has the shape .*, which is more than the file"),
    ("format", placed(TENSOR, 20, "I", 999), "999.* is not a valid GGMLQuantizationType"),
    ("offset", placed(TENSOR, 24, "Q", 2**40), "cannot reshape array of size 0"),
    ("half", lambda data: data[: len(data) // 2], "cannot be read as a GGUF file"),
]


@pytest.mark.parametrize(("change", "sentence"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_a_damaged_header(whole: bytes, tmp_path: Path, change: Any, sentence: str) -> None:
    (tmp_path / "tiny.gguf").write_bytes(change(whole))
    with pytest.raises(CheckpointError, match=sentence) as caught:
        opened(tmp_path / "tiny.gguf")
    assert "\n" not in str(caught.value)


def test_a_key_that_is_missing(tmp_path: Path) -> None:
    folder = make(tmp_path / "source", **{**TINY, **QWEN3_MOE})

    def keys(out: Any) -> None:
        out.add_expert_count(6)
        out.add_expert_used_count(3)

    file = write(tmp_path / "tiny.gguf", folder, arch="qwen3moe", more=keys)
    with pytest.raises(CheckpointError, match=r"lacks the key qwen3moe\.expert_feed_forward_length; convert"):
        opened(file)


KEYS = ("general.architecture", "llama.block_count", "llama.rope.freq_base", "tokenizer.ggml.model", ARRAY)
KEYS += (ARRAY, "tokenizer.ggml.tokens", "tokenizer.ggml.merges", TENSOR)
FIELDS = (0, "I"), (4, "I"), (4, "Q"), (8, "Q"), (24, "Q")  # bytes after a name, kind


def test_any_number_of_the_header(whole: bytes, tmp_path: Path) -> None:
    """A message or a header that can be read: never another error, and never an endless loop."""
    rng, path, said = random.Random(11), tmp_path / "tiny.gguf", []
    end = after(whole, "output_norm.weight")
    for _ in range(200):
        at, kind = rng.choice(FIELDS)
        start = after(whole, rng.choice(KEYS)) + at if rng.random() < 0.5 else rng.randrange(4, end)
        size, data = 8 * struct.calcsize(kind), bytearray(whole)
        struct.pack_into(f"<{kind}", data, start, rng.choice((0, 1, 9, 2 ** (size - 1), 2 ** (size // 2), 2**size - 1)))
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        try:
            convert.read(path)
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    assert 10 < said.count("") < 190 and not any("\n" in sentence for sentence in said)


def test_a_file_of_the_other_byte_order(tmp_path: Path) -> None:
    out = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    out.add_block_count(10**6)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    with pytest.raises(CheckpointError, match=r"llama.block_count must be at most 1024, but .* has 1000000"):
        opened(tmp_path / "big.gguf")
