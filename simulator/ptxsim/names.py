"""What the names in a program stand for: its registers and its labels."""

import re

from ptxsim.values import Unsupported


class Names:
    def __init__(self) -> None:
        self.widths: list[int] = []  # bits of each register; 1 for a predicate
        self.starts: dict[str, int] = {}  # label -> its basic block
        self.accumulators: set[int] = set()  # registers of a wgmma's result
        self._registers: dict[str, int] = {}
        self._prefixes: dict[str, int] = {}  # "%r" -> bits

    def declare(self, kind: str, names: list[str]) -> None:
        """Declare registers: "%a", or with "%r<9>" those whose names begin with %r."""
        width = 1 if kind == "pred" else int(kind[1:])
        for name in names:
            if "<" in name:
                self._prefixes[name[: name.index("<")]] = width
            else:
                self._add(name, width)

    def _add(self, name: str, width: int) -> int:
        if name not in self._registers:
            self._registers[name] = len(self.widths)
            self.widths.append(width)
        return self._registers[name]

    def register(self, name: str) -> int:
        """The number of a register. Unsupported if it is not declared."""
        if name in self._registers:
            return self._registers[name]
        prefix = re.match(r"%?[a-zA-Z]*", name)
        if prefix is None or prefix.group() not in self._prefixes:
            raise Unsupported(f"register {name}")
        return self._add(name, self._prefixes[prefix.group()])
