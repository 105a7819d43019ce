"""Check a GGUF file's header before the packages `gguf` and transformers read it.

gguf.GGUFReader reads as many entries as a file names, even beyond its end, and transformers makes lists of a config's
sizes: for a damaged file both may never answer. Source: the GGUF specification (docs/gguf.md of ggml).
"""

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from specker.checkpoints.numbers import FIELDS
from specker.model.config import CheckpointError

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}  # by type
STRING, ARRAY = 8, 9
LONGEST = 1 << 22  # entries of an array: far more than a vocabulary's merges
SIZES = {  # keys after the architecture's prefix -> fields of config.json
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "hidden_size",
    "shortconv.l_cache": "conv_L_cache",
}


def check_header(path: Path) -> None:
    """Raise CheckpointError for a size that no model has, and ValueError or struct.error if an entry does not lie
    within the file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(data)
        for name, numbers in header.entries():
            field = FIELDS.get(SIZES.get(name.partition(".")[2], ""))
            if field is not None and numbers and max(numbers) > field.most:
                raise CheckpointError(f"{name} must be at most {field.most}, but {path} has {max(numbers)}")
        header.check_tensors()


class _Header:
    """Reads the entries of a header one after another."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at, self.order = data, 4, "<"
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if not self.numbers("I")[0] & 0xFFFF:  # the version, of a file with the other byte order
            self.order = ">"
        self.tensors, self.keys_left = self.numbers("QQ")

    def numbers(self, kinds: str) -> tuple[int, ...]:
        """The next numbers; `kinds`: letters of `struct`."""
        found = struct.unpack_from(self.order + kinds, self.data, self.at)
        self.at += struct.calcsize(self.order + kinds)
        return found

    def string(self) -> bytes:
        (size,) = self.numbers("Q")
        if size > len(self.data) - self.at:
            raise ValueError(f"a string at byte {self.at} has {size} bytes, and the file ends before")
        self.at += size
        return self.data[self.at - size : self.at]

    def entries(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each key with its numbers; of an array of strings and of a string ()."""
        for _ in range(self.keys_left):
            name, (kind,) = self.string().decode(), self.numbers("I")
            count = 1
            if kind == ARRAY:
                kind, count = self.numbers("IQ")
                if count > LONGEST:
                    raise ValueError(f"the array {name!r} has {count} entries")
            if kind == STRING:
                for _ in range(count):
                    self.string()
                yield name, ()
            elif kind in NUMBERS:
                yield name, self.numbers(f"{count}{NUMBERS[kind]}")
            else:  # also arrays of arrays, which no model has
                raise ValueError(f"{name!r} has the unknown type {kind}")

    def check_tensors(self) -> None:
        for _ in range(self.tensors):
            name, (count,) = self.string().decode(), self.numbers("I")
            shape = self.numbers(f"{min(count, 5)}Q")
            if count > 4 or math.prod(shape) > 8 * len(self.data):  # a number takes more than a bit
                raise ValueError(f"the tensor {name!r} has the shape {list(shape)}, which is more than the file holds")
            self.numbers("IQ")  # format and place, which GGUFReader checks
