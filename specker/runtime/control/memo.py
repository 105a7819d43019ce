"""What runs learnt about their drafts, kept in a file of specker's cache for the next run: the costs of rounds, the
acceptance, and the chooser's credit.

There is one file for each target, draft, set of options, device and number of threads, `learnt/HASH.json`. An engine
starts from it, at the weight of a few recent drafts (auto.py), and forgets costs that its first rounds contradict
(costs.py). A process replaces the file in one step when it ends and now and then before; of processes that run side by
side the last one wins. A file that is damaged or not specker's is ignored with one remark. What the file holds can
change what is drafted, but never a token.
"""

import atexit
import hashlib
import json
import logging
import math
import platform
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from specker.paths import cache_root, write_cached
from specker.runtime.control.auto import BUCKETS, AcceptanceHistory
from specker.runtime.control.choose import Chooser
from specker.runtime.control.policy import MAX_NODES

log = logging.getLogger(__name__)

VERSION = 1  # raise it when the file's contents change, or what they mean
EVERY = 300.0  # seconds between two writes of one process
LARGEST = 1e6  # of the numbers of a file
SIZES = 4 * MAX_NODES  # the most sequences, tokens, rows or layers


def folder() -> Path:
    """Where the files of all engines are. Deleting it forgets them."""
    return cache_root() / "learnt"


class Memo:
    """One engine's file. When the engine is dropped, what was learnt since the last write is written."""

    def __init__(
        self,
        about: Mapping[str, str],
        history: AcceptanceHistory,
        chooser: Chooser,
        layers: Sequence[int],
        notes: dict[str, str],
        writes: bool = True,
    ) -> None:
        """Read the file and start from it. `about`: all that costs and acceptance depend on. `layers`: those whose
        counts the history holds (DEL), else empty. Adds a remark to `notes` if the file cannot be used. `writes`:
        False on ranks that only read."""
        self._texts = 0  # that ended since the last write
        self.about, self.history, self.chooser, self.layers = dict(about), history, chooser, list(layers)
        digest = hashlib.sha256(json.dumps([VERSION, self.about], sort_keys=True).encode())
        self.path = folder() / f"{digest.hexdigest()[:32]}.json"
        self._writes, self._warned = writes, False
        self._paused = False
        self._due = time.monotonic() + EVERY
        self._known: dict[str, Any] | None = None
        try:
            self._known = checked(json.loads(self.path.read_bytes()), self.about)
        except FileNotFoundError:
            pass
        except Exception as error:  # whatever lies in the cache, the run goes on
            notes["learn"] = f"{self.path} is ignored, and this run measures anew: {_reason(error)}"
        self.restore()
        _memos.add(self)

    def pause(self) -> None:
        """Keep nothing until `restore`, because a warm-up decodes made-up prompts."""
        self._paused = True

    def restore(self) -> None:
        """Start from the file's contents, after a warm-up has forgotten them."""
        self._texts, self._paused = 0, False
        if self._known is None:
            return
        learnt = self._known["learnt"]
        same = learnt["exits"] is not None and self._known["layers"] == self.layers
        exits = np.array(learnt["exits"], dtype=np.float64) if same else None
        self.history.restore(learnt, exits if np.shape(exits) == (2, len(self.layers), 2) else None)
        self.chooser.restore(self._known["chooser"])

    def ended(self) -> None:
        """Call when a text has ended. Writes the file in another thread if it is due."""
        self._texts += 1
        if time.monotonic() >= self._due and not self._paused and self._writes:
            threading.Thread(target=self._write, args=(self._packed(),), daemon=True).start()

    def save(self) -> None:
        """Write the file if a text has ended since the last time."""
        if self._texts and not self._paused and self._writes:
            self._write(self._packed())

    def _packed(self) -> bytes:
        self._texts, self._due = 0, time.monotonic() + EVERY
        kept = {"learnt": self.history.kept(), "chooser": self.chooser.kept(), "layers": self.layers}
        return json.dumps({"specker": VERSION, "about": self.about, **kept}).encode()

    def _write(self, data: bytes) -> None:
        try:
            write_cached(self.path, data)
        except OSError as error:
            if not self._warned:
                log.warning("%s cannot be written (%s), so the next run measures anew", self.path, _reason(error))
            self._warned = True

    def __del__(self) -> None:
        self.save()


_memos = WeakSet[Memo]()


@atexit.register
def _save_all() -> None:
    for memo in list(_memos):
        memo.save()
        memo.pause()


def processor(device: torch.device) -> str:
    """The name of a device, or of this machine's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def checked(raw: Any, about: dict[str, str]) -> dict[str, Any]:
    """The contents of a file, each number within its range. Raises ValueError, TypeError or LookupError for a file that
    specker did not write for this engine."""
    if raw["specker"] != VERSION or raw["about"] != about:
        raise ValueError("it was written for another engine")
    learnt, chooser = raw["learnt"], raw["chooser"]
    costs, drafts, exits = learnt["costs"], learnt["drafts"], learnt["exits"]

    def each(items: Any, read: Callable[[Any], Any]) -> list[Any]:
        return [read(item) for item in items]

    def ratio(item: Any) -> tuple[int, float]:
        return _whole(item[0]), _number(item[1], 1 / LARGEST)

    def curve(item: Any) -> list[Any]:
        *key, factor, ratios = item
        return [*each(key, _whole), _number(factor, 1 / LARGEST**2), each(ratios, ratio)]

    def share(item: Any) -> list[float]:
        total, count = each(item, _number)
        if total > MAX_NODES * (count + 1):
            raise ValueError("a mean is out of range")
        return [total, count]

    shares: dict[str, list[list[float]]] = {name: each(items, share) for name, items in drafts.items()}
    agrees = shares["agrees"]
    if len(agrees) > MAX_NODES or any(total > count for total, count in (*agrees, *shares["compared"])):
        raise ValueError("an agreement is above 1")
    if [len(shares[name]) for name in ("buckets", "compared", "tokens", "drafted")] != [BUCKETS, 1, 1, 1]:
        raise ValueError("a mean is missing")
    found: dict[str, Any] = {
        "costs": {
            "verify": each(costs["verify"], curve),
            "draft": each(costs["draft"], curve),
            "prefill": _number(costs["prefill"]),
        },
        "drafts": shares,
        "matches": [[_whole(length), *share(kept)] for length, *kept in learnt["matches"]],
        "exits": None if exits is None else each(exits, lambda part: each(part, lambda row: each(row, _number))),
    }
    if any(len(c) != 4 for c in found["costs"]["verify"]) or any(len(c) != 5 for c in found["costs"]["draft"]):
        raise ValueError("a cost is not that of a stage")
    if any(total > count for _, total, count in found["matches"]):
        raise ValueError("an agreement is above 1")
    kept = {"credit": _number(chooser["credit"], -LARGEST)}
    kept |= {name: _whole(chooser[name]) for name in ("lost", "opening")}
    return {"learnt": found, "chooser": kept, "layers": each(raw["layers"], _whole)}


def _number(x: Any, least: float = 0.0) -> float:
    if isinstance(x, bool) or not isinstance(x, int | float) or not (math.isfinite(x) and least <= x <= LARGEST):
        raise ValueError(f"{x!r} is not a number within its range")
    return float(x)


def _whole(x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x <= SIZES:
        raise ValueError(f"{x!r} is not a size")
    return x


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if type(error) is ValueError else "it is damaged"
