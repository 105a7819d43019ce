"""Which strategies there are: specker's own, and those that installed packages bring."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import entry_points

from specker.options import Common
from specker.runtime.strategies import ar, dflash, diffuspec, draft, dynamic_exit, eagle, easyspec, lookup, mtp
from specker.runtime.strategies.base import Strategy
from specker.runtime.strategies.vocabtrim import TRIM

GROUP = "specker.strategies"  # the entry points of packages: the strategy's name = its class
_ALL: tuple[Strategy, ...] = (
    ar.PlainDecoding(),
    draft.SmallModel(),
    easyspec.EasySpec(),
    eagle.Eagle(),
    mtp.MultiTokenPrediction(),
    dflash.DFlash(),
    dynamic_exit.SelfDrafting(),
    diffuspec.DiffuSpec(),
    lookup.Lookup(),
)
STRATEGIES = {strategy.name: strategy for strategy in _ALL}


@dataclass(frozen=True)
class Installed:
    """The strategies of installed packages."""

    strategies: dict[str, Strategy] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)  # name of an entry point -> why it is left out


@cache
def installed() -> Installed:
    """Import the strategies of installed packages. A faulty package must not keep specker from starting: whoever asks
    for its strategy is told why it is left out."""
    found = Installed()
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            strategy = checked(entry.load()())
            if strategy.name != entry.name:
                raise ValueError(f"its class has the name {strategy.name!r}")
        except Exception as error:
            found.faults[entry.name] = f"{entry.value} cannot be used: {error or type(error).__name__}"
        else:
            found.strategies[entry.name] = strategy
    return found


def known() -> dict[str, Strategy]:
    """All strategies by their names: specker's own, then those of installed packages."""
    return STRATEGIES | installed().strategies


def checked(strategy: object) -> Strategy:
    """A strategy from outside of specker. Raises TypeError for another object, ValueError for a name that cannot be
    asked for and for options that an engine has already."""
    kind = type(strategy).__name__
    if not isinstance(strategy, Strategy):
        raise TypeError(f"a strategy must be an object of a subclass of Strategy, got a {kind}")
    name = getattr(strategy, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise ValueError(f"{kind} needs a name of letters, digits, - and _, got {name!r}")
    if name in (*STRATEGIES, TRIM):
        raise ValueError(f"{kind} needs a name of its own: {name!r} is one of specker's strategies")
    own = set() if strategy.options is None else {f.name for f in fields(strategy.options)}
    if taken := own & {f.name for f in fields(Common)}:
        raise ValueError(f"{kind} has an option {min(taken)!r}, which is one of specker's own")
    return strategy
