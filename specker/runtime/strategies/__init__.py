"""The strategies: one file or folder each, and one line each in `STRATEGIES`.

To add one, write a file with a subclass of `base.Strategy`, or a folder if it needs torch, and add it here. Its flags,
help, bounds and checks come from its options.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from specker import zoo
from specker.fields import flag, make, option
from specker.options import Common, Options, refuse_unknown
from specker.runtime.control.policy import AUTO, GENERAL, Policy
from specker.runtime.round.drafter import Drafter, Wrapper
from specker.runtime.strategies import ar, dflash, diffuspec, draft, dynamic_exit, eagle, easyspec, lookup, mtp
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy
from specker.runtime.strategies.blocks import SHARED
from specker.runtime.strategies.join import COPIED, JoinedDrafter, JoinedPolicy, joined_plan
from specker.runtime.strategies.lookup.ngram_policy import NgramPolicy
from specker.runtime.strategies.vocabtrim import NEEDS, PAPER, SUMMARY, TRIM, TrimOptions
from specker.zoo import catalogue

if TYPE_CHECKING:
    from specker.runtime.strategies.lookup.copy_drafter import LookupDrafter

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
COPY = lookup.Lookup.name
PLAIN = draft.SmallModel.name  # the strategy that drafts if the name is only `vocabtrim`
NAMES = (*STRATEGIES, TRIM)
POLICIES = tuple(dict.fromkeys((AUTO, *GENERAL, *(name for strategy in _ALL for name in strategy.policies))))
COLUMNS = {
    "strategy": 9,
    "how it drafts": 26,
    "needs": 15,
    "paper (arXiv)": 22,
    "its own flags": 20,
}  # widths, 100 in all


def of(options: Options) -> Strategy:
    """The strategy that drafts, without +vocabtrim."""
    return STRATEGIES[options.base]


def drafter(context: DraftContext) -> Drafter | None:
    """Make the drafter that the options describe."""
    inner, copy = of(context.options).drafter(context), context.options.copy
    return inner if inner is None or copy is None else JoinedDrafter(inner, lookup.copying(copy, context, COPIED.depth))


def copier(drafter: Drafter | None) -> LookupDrafter | None:
    """The part of a drafter that copies text; None if it has none."""
    from specker.runtime.strategies.lookup.copy_drafter import LookupDrafter

    while isinstance(drafter, Wrapper):
        drafter = drafter.copying if isinstance(drafter, JoinedDrafter) else drafter.inner
    return drafter if isinstance(drafter, LookupDrafter) else None


def policy(context: PolicyContext, asked: str | None = None) -> Policy:
    """A fresh policy for one text. `asked`: its name, instead of the engine's. Raises ValueError for a name that does
    not suit the strategy, or whose drafts are longer than those that the engine was made for."""
    if asked is not None:
        made = replace(context, options=replace(context.options, policy=asked))
        _check_policy(made.options, of(made.options))
        longest, most = plan(made).largest, plan(context).largest
        if longest.nodes > most.nodes or longest.depth > most.depth:
            raise ValueError(
                f"{option('policy', asked)} drafts up to {longest.nodes} tokens, and the engine was loaded for "
                f"{most.nodes} at most"
            )
        context = made
    model = of(context.options).policy(context)
    if context.options.copy is None:
        return model
    assert context.history is not None
    return JoinedPolicy(model, NgramPolicy(context.history.matches, COPIED))


def plan(context: PolicyContext) -> Plan:
    """The warm-up plan of the options."""
    model = of(context.options).plan(context)
    return model if context.options.copy is None else joined_plan(model)


def usual(target: object, draft: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a caller who names no strategy: the default one, and what goes with it for a bundled target.
    `options`: those that the caller named. Raises ValueError if no draft is known."""
    found: dict[str, Any] = {"strategy": _usual(target, draft)}
    family = zoo.target_of(target) if draft is None else None
    if family is not None and family.draft_tokens and found["strategy"] == family.strategy:
        shaped = any(options.get(name) is not None for name in ("draft_tokens", "tree", "policy"))
        found |= {} if shaped else {"draft_tokens": family.draft_tokens}
    return found


def _usual(target: object, draft: object) -> str:
    """The default strategy, which depends on whether the caller named a target and a draft, and on what draft "auto"
    chooses."""
    if draft is None and (family := zoo.target_of(target)) is not None:
        return family.strategy or Common.strategy
    if draft == catalogue.AUTO and (strategy := catalogue.choose(_source(target)).strategy) != PLAIN:
        return strategy
    return COPY if draft is None and target is not None else Common.strategy


def _source(target: object) -> str | None:
    return None if target is None else str(target)


def options(**flat: Any) -> Options:
    """Parse options from flat names, such as `strategy="draft", tree="4x5"`. Values are strings as on the command line
    or parsed values; None means omitted. Raises TypeError for an unknown name, ValueError for invalid options."""
    owners = _owners()
    refuse_unknown(flat, [f.name for f in fields(Common)] + list(owners))
    flat = {name: value for name, value in flat.items() if value is not None}
    asked = flat.get("strategy", Common.strategy)
    base, trimmed, copies = _parts(asked)
    for name in flat:
        own = owners.get(name, ())
        if TRIM in own and not trimmed:
            raise ValueError(f"{option(name)} is for strategy {TRIM} or a combination with it, not {asked!r}")
        if own and TRIM not in own and base not in own and not (copies and COPY in own):
            raise ValueError(f"{option(name)} is for strategy {' or '.join(own)}, not {asked!r}")
    strategy, common = STRATEGIES[base], make(Common, flat)
    chosen = None if strategy.options is None else make(strategy.options, flat)
    trim = make(TrimOptions, flat) if trimmed else None
    copy = make(lookup.LookupOptions, flat) if copies else None
    shared = {f.name: getattr(common, f.name) for f in fields(Common)}
    made = Options(**shared, base=base, own=chosen, copy=copy, trim=trim)
    _check_policy(made, strategy)
    strategy.check(made)
    return replace(made, policy=made.policy or strategy.default_policy(made))


def words() -> dict[str, str]:
    """The {names} in the help texts of `Common`."""
    defaults = ", ".join(f"{s.usual} for {s.name}" for s in _ALL if s.usual != AUTO)
    names = f"{{{','.join(NAMES)}}}"
    return {"strategies": names, "trim": TRIM, "policies": ", ".join(POLICIES), "defaults": defaults}


def offers() -> dict[str, tuple[str, ...]]:
    """The values of --strategy and --policy that a shell completes."""
    drafting = [s.name for s in _ALL if s.drafts and s.name != COPY]
    trimmed = [f"{name}+{TRIM}" for name in drafting if not STRATEGIES[name].no_head]
    copying = (f"{name}+{COPY}" for name in (*drafting, TRIM, *trimmed))
    return {"strategy": (*NAMES, *trimmed, *copying), "policy": POLICIES}


def summaries() -> str:
    """A line for each strategy: its name and summary."""
    about = {**{s.name: s.summary for s in _ALL}, TRIM: SUMMARY}
    return "\n".join(f"{name:<{max(map(len, about))}}  {summary}" for name, summary in about.items())


def table() -> str:
    """The strategies with what they need, their papers and their own flags, in lines of at most 100 characters."""
    about: list[tuple[str, ...]] = [(s.name, s.summary, s.needs, s.paper, _own_flags(s.options)) for s in _ALL]
    about.append((TRIM, SUMMARY, NEEDS, PAPER, _own_flags(TrimOptions)))
    rows = [tuple(COLUMNS), tuple("-" * width for width in COLUMNS.values()), *about]
    lines = []
    for row in rows:
        cells = [
            textwrap.wrap(cell, width, break_on_hyphens=False, break_long_words=False)
            for cell, width in zip(row, COLUMNS.values(), strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (f"{part:<{width}}" for part, width in zip(parts, COLUMNS.values(), strict=True))
            lines.append("  ".join(padded).rstrip())
        lines += [""] if row in about else []
    return "\n".join(lines[:-1]) + "\n"


def _own_flags(options: Any) -> str:
    return "" if options is None else ", ".join(flag(f.name) for f in fields(options))


def own_options() -> dict[str, Any]:
    """The dataclass of each strategy that has options of its own."""
    return {s.name: s.options for s in _ALL if s.options is not None} | {TRIM: TrimOptions}


def flag_groups() -> Iterator[tuple[type, str, str, list[str]]]:
    """(class of the options, title, description, names) for each strategy that has its own flags, and for strategies
    that share some."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, owners in _owners().items():
        groups.setdefault(owners, []).append(name)
    for owners, names in groups.items():
        title = f"{'strategy' if len(owners) == 1 else 'strategies'} {' and '.join(owners)}"
        about = {TRIM: SUMMARY, **{s.name: s.summary for s in _ALL}}[owners[0]] if len(owners) == 1 else SHARED
        yield own_options()[owners[0]], title, about, names


def _owners() -> dict[str, tuple[str, ...]]:
    """Map each strategy-specific option to its strategies' names."""
    owners: dict[str, tuple[str, ...]] = {}
    for name, cls in own_options().items():
        for f in fields(cls):
            owners[f.name] = (*owners.get(f.name, ()), name)
    return owners


def _parts(asked: Any) -> tuple[str, bool, bool]:
    """(name of the strategy that drafts, whether its head is trimmed, whether copied text joins it). Raises ValueError
    for an unknown name."""
    if not isinstance(asked, str):
        raise ValueError(f"{option('strategy')} must be a string, got {asked!r}")
    parts = asked.split("+")
    for part in parts:
        if part not in NAMES:
            near = difflib.get_close_matches(part, NAMES, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"unknown strategy {part!r}{hint} (available: {', '.join(NAMES)})")
    copies = COPY in parts and len(parts) > 1
    bases = [part for part in parts if part != TRIM and not (copies and part == COPY)]
    if len(bases) > 1 or len(set(parts)) < len(parts):
        raise ValueError(f"strategies {' and '.join(parts)} do not compose: each one drafts")
    base, trimmed = next(iter(bases), PLAIN), TRIM in parts
    if trimmed and (reason := STRATEGIES[base].no_head):
        raise ValueError(f"strategies {base} and {TRIM} do not compose: {reason}")
    if copies and not STRATEGIES[base].drafts:
        raise ValueError(f"strategies {base} and {COPY} do not compose: {base} drafts nothing")
    return base, trimmed, copies


def _check_policy(options: Options, strategy: Strategy) -> None:
    policy = options.policy
    if policy is None:
        return
    if policy not in POLICIES:
        raise ValueError(f"{option('policy')} must be one of {', '.join(POLICIES)}, got {policy!r}")
    if policy not in (AUTO, *GENERAL, *strategy.policies):
        owners = " or ".join(s.name for s in _ALL if policy in s.policies)
        raise ValueError(f"{option('policy', policy)} is for strategy {owners}, not {options.strategy!r}")
    if policy != "fixed" and options.tree is not None:
        raise ValueError(f"{option('policy', policy)} is for chains: leave out {option('tree')}")
