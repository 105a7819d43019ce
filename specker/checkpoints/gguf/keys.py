"""The keys of an architecture in a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specker.model.config import CheckpointError


class Keys(dict[str, Any]):
    """Keys of a file, without the architecture's prefix."""

    def __init__(self, keys: Mapping[str, Any], path: Path, arch: str):
        super().__init__(keys)
        self.path, self.start = path, f"{arch}."

    def __missing__(self, name: str) -> Any:
        raise CheckpointError(f"{self.path} lacks the key {self.start}{name}; convert it again")

    def no(self, name: str, *usual: Any) -> None:
        """Raise CheckpointError if the key has another value than `usual`."""
        if (value := self.get(name, usual[0])) not in usual:
            raise CheckpointError(f"{self.path} has {self.start}{name} {value}, which is not supported")
