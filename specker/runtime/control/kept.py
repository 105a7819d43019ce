"""Keep what an engine has learnt about its drafts, what they cost here and how many tokens are right, for the engine of
a later process: a short command then neither measures anew nor drafts carefully at first.

A file of specker's cache belongs to models, options, versions and a processor with a number of threads; any of them
changed, another file is used. A file is written when an engine ends that has decoded a text, in one step, with its
SHA-256; of engines that run side by side the last one's stays. It decides how much is drafted, so a wrong one may cost
time, but never changes a token.
"""

import hashlib
import json
from copy import copy
from typing import Any

from specker.paths import cache_root, remember, remembered
from specker.runtime.control.auto import BUCKETS, AcceptanceHistory
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import LENGTHS, TREES


class Kept:
    def __init__(self, history: AcceptanceHistory, about: dict[str, Any]):
        """`about`: what the file belongs to, as JSON."""
        self.history = history
        key = json.dumps([about, LENGTHS, TREES, BUCKETS], sort_keys=True)
        self.path = cache_root() / "learnt" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def read(self) -> dict[str, Any] | None:
        """What `AcceptanceHistory.restore` takes; None if there is no file, or one that it cannot use."""
        data = remembered(self.path)
        if data is None:
            return None
        trial = copy(self.history)
        trial.costs = Costs(self.history.costs.prior, self.history.costs.reads)
        try:
            state: dict[str, Any] = json.loads(data)
            trial.restore(state)
        except (ValueError, LookupError, TypeError, AttributeError):  # written by code that was changed since
            return None
        return state

    def save(self) -> None:
        """Write the file if a text has ended since the history was made or restored. An error loses what was learnt."""
        if self.history.texts:
            remember(self.path, json.dumps(self.history.state()).encode())
