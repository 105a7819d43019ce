"""The strategies: one file or folder each, and one line each in `registry.py`.

To add one to specker, write a file with a subclass of `base.Strategy`, or a folder if it needs torch, and add it there.
Its flags, help, bounds and checks come from its options. A strategy of another package needs no change here: pass it to
`specker.load`, or name it as an entry point of the group `registry.GROUP`.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from specker import zoo
from specker.fields import flag, make, option
from specker.options import Common, Options, Source, refuse_unknown
from specker.runtime.control.policy import AUTO, GENERAL, Policy
from specker.runtime.round.drafter import Drafter
from specker.runtime.strategies import draft, lookup
from specker.runtime.strategies.base import SHAPE, DraftContext, Plan, PolicyContext, Strategy, shaped
from specker.runtime.strategies.blocks import SHARED
from specker.runtime.strategies.join import JOINED, JoinedPolicy, joined_plan, options_of
from specker.runtime.strategies.registry import STRATEGIES as STRATEGIES
from specker.runtime.strategies.registry import checked, installed, known
from specker.runtime.strategies.vocabtrim import TRIM, TrimOptions, VocabTrim
from specker.zoo import catalogue

if TYPE_CHECKING:
    from specker.runtime.strategies.lookup.copy_drafter import LookupDrafter

Named = str | Strategy | Sequence[str | Strategy]  # what a caller asks for
COPY = lookup.Lookup.name
PLAIN = draft.SmallModel.name  # the strategy that drafts if the name is only `vocabtrim`
COLUMNS = {
    "strategy": 9,
    "how it drafts": 26,
    "needs": 15,
    "paper (arXiv)": 22,
    "its own flags": 20,
}  # widths, 100 in all


def listed() -> tuple[Strategy | type[VocabTrim], ...]:
    """What can be joined with +."""
    return (*known().values(), VocabTrim)


def names() -> tuple[str, ...]:
    """The names that can be joined with +."""
    return tuple(s.name for s in listed())


def policies() -> tuple[str, ...]:
    """The names of all policies."""
    return tuple(dict.fromkeys((AUTO, *GENERAL, *(name for s in known().values() for name in s.policies))))


def of(options: Options) -> Strategy:
    """The strategy that drafts, without +vocabtrim and +lookup."""
    return options.base


def drafters(context: DraftContext) -> list[Drafter]:
    """Make the drafters of the options' sources; none for plain decoding. Raises ValueError if two of them have a
    model."""
    found, sources = [of(context.options).drafter(context)], context.options.sources
    for part, source in enumerate(sources[1:], 1):
        drafter = source.strategy.drafter(replace(context, options=options_of(context.options, part)))
        assert drafter is not None
        if drafter.model is not None or drafter.cache is not None or drafter.aux_layers:
            pair = f"{sources[0].strategy.name} and {source.strategy.name}"
            raise ValueError(f"strategies {pair} do not compose: {source.strategy.name} runs a model, too")
        found.append(drafter)
    return [drafter for drafter in found if drafter is not None]


def copier(drafters: Sequence[Drafter]) -> LookupDrafter | None:
    """The drafter that copies text; None if there is none."""
    from specker.runtime.strategies.lookup.copy_drafter import LookupDrafter

    return next((drafter for drafter in drafters if isinstance(drafter, LookupDrafter)), None)


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
    if not context.options.adapts:
        assert context.history is not None
        context = replace(context, history=context.history.of_one_text())
    first, sources = of(context.options).policy(context), context.options.sources
    if not context.options.adapts:
        first.may_skip_drafting = False
    if len(sources) == 1:
        return first
    others = []
    for part, source in enumerate(sources[1:], 1):
        assert context.history is not None
        history, own = context.history.of(part), options_of(context.options, part)
        seen = replace(context, options=own, history=history, confident=False)
        others.append(source.strategy.auto(seen, replace(JOINED, part=part)))
    return JoinedPolicy([first, *others], context.branches)


def plan(context: PolicyContext) -> Plan:
    """The warm-up plan of the options."""
    model = of(context.options).plan(context)
    return model if len(context.options.sources) == 1 else joined_plan(model, context.branches)


def usual(target: object, draft: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a caller who names no strategy: the default one, and what goes with it for a bundled target.
    `options`: those that the caller named. Raises ValueError if no draft is known."""
    found: dict[str, Any] = {"strategy": _usual(target, draft)}
    family = zoo.target_of(target) if draft is None else None
    if family is not None and family.draft_tokens and found["strategy"] == family.strategy:
        found |= {} if shaped(options) else {"draft_tokens": family.draft_tokens}
    return found


def _usual(target: object, draft: object) -> str:
    """The default strategy, which depends on whether the caller named a target and a draft, and on what draft "auto"
    chooses."""
    if draft is None and (family := zoo.target_of(target)) is not None:
        return family.strategy or Common.strategy
    source = None if target is None else str(target)
    if draft == catalogue.AUTO and (strategy := catalogue.choose(source).strategy) != PLAIN:
        return strategy
    return COPY if draft is None and target is not None else Common.strategy


def options(**flat: Any) -> Options:
    """Parse options from flat names, such as `strategy="draft", tree="4x5"`. Values are strings as on the command line
    or parsed values; None means omitted. `strategy`: as in `specker.load`. Raises TypeError for an unknown name,
    ValueError for invalid options."""
    flat = {name: value for name, value in flat.items() if value is not None}
    joined, parts = _parts(flat.get("strategy", Common.strategy))
    flat["strategy"] = asked = "+".join(parts)
    owners = _owners(joined)
    refuse_unknown(flat, [f.name for f in fields(Common)] + list(owners))
    for name in flat:
        own = owners.get(name, ())
        if TRIM in own and TRIM not in parts:
            raise ValueError(f"{option(name)} is for strategy {TRIM} or a combination with it, not {asked!r}")
        if own and TRIM not in own and not any(s.name in own for s in joined):
            raise ValueError(f"{option(name)} is for strategy {' or '.join(own)}, not {asked!r}")
    departures: tuple[tuple[str, Any], ...] = ()
    if flat.get("as_published"):
        paper, given = published(joined, parts), flat
        flat = published(joined, parts, given) | given
        chosen = {name: given[name] for name in (*SHAPE, *paper) if name in given}
        departures = tuple((name, value) for name, value in chosen.items() if str(value) != str(paper.get(name)))
    common = make(Common, flat)
    sources = [Source(s, None if s.options is None else make(s.options, flat)) for s in joined]
    if TRIM in parts:
        sources[0] = replace(sources[0], trim=make(TrimOptions, flat))
    shared = {f.name: getattr(common, f.name) for f in fields(Common)}
    made, first = Options(**shared, sources=tuple(sources), departures=departures), joined[0]
    _check_policy(made, first)
    if made.layout not in first.layouts:
        takers = " or ".join(s.name for s in known().values() if made.layout in s.layouts)
        raise ValueError(f"{option('draft_layout', made.layout)} is for strategy {takers}, not {made.strategy!r}")
    first.check(made)
    return replace(made, policy=made.policy or first.default_policy(made))


def published(
    joined: Sequence[Strategy], parts: Sequence[str], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The options with the values of the strategies' papers, beside those that the user gave. `parts`: the names, with
    vocabtrim's. Raises ValueError for strategies of which no paper's setting is offered."""
    settings: list[Mapping[str, Any] | None] = [strategy.published(given or {}) for strategy in joined]
    if None in settings:
        raise ValueError(f"{option('as_published')} is {as_published()}, not {'+'.join(parts)!r}")
    settings += [VocabTrim.published] if TRIM in parts else []
    return {name: value for each in settings if each is not None for name, value in each.items()}


def as_published() -> str:
    """Which strategies can be drafted with as published."""
    names = [s.name for s in known().values() if s.published({}) is not None]
    return f"for strategy {TRIM}, and for {', '.join(names)}, alone or with +{TRIM}"


def about_published(options: Options) -> str:
    """What a run with `as_published` says of its settings."""
    papers = [options.base.paper, *([VocabTrim.paper] if options.trim is not None else [])]
    said = f"settings as published: {', '.join(papers)}"
    if options.departures:
        said += f"; but {', '.join(option(name, value) for name, value in options.departures)}"
    return said


def words() -> dict[str, str]:
    """The {names} in the help texts of `Common`."""
    defaults = ", ".join(f"{s.usual} for {s.name}" for s in known().values() if s.usual != AUTO)
    joined = f"{{{','.join(names())}}}"
    about = {"policies": ", ".join(policies()), "defaults": defaults, "published": as_published()}
    return {"strategies": joined, "trim": TRIM, **about}


def offers() -> dict[str, tuple[str, ...]]:
    """The values of --strategy and --policy that a shell completes."""
    drafting = [s for s in known().values() if s.drafts and s.name != COPY]
    trimmed = [f"{s.name}+{TRIM}" for s in drafting if not s.no_head]
    copying = (f"{name}+{COPY}" for name in (*(s.name for s in drafting), TRIM, *trimmed))
    return {"strategy": (*names(), *trimmed, *copying), "policy": policies()}


def summaries() -> str:
    """A line for each strategy: its name and summary."""
    about = _summaries()
    return "\n".join(f"{name:<{max(map(len, about))}}  {summary}" for name, summary in about.items())


def table() -> str:
    """The strategies with what they need, their papers and their own flags, in lines of at most 100 characters."""
    about: list[tuple[str, ...]] = []
    for s in listed():
        own = () if s.options is None else fields(s.options)
        about.append((s.name, s.summary, s.needs, s.paper, ", ".join(flag(f.name) for f in own)))
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


def own_options() -> dict[str, Any]:
    """The dataclass of each strategy that has options of its own."""
    return {s.name: s.options for s in listed() if s.options is not None}


def flag_groups() -> Iterator[tuple[type, str, str, list[str]]]:
    """(class of the options, title, description, names) for each strategy that has its own flags, and for strategies
    that share some."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, owners in _owners().items():
        groups.setdefault(owners, []).append(name)
    for owners, names in groups.items():
        title = f"{'strategy' if len(owners) == 1 else 'strategies'} {' and '.join(owners)}"
        about = _summaries()[owners[0]] if len(owners) == 1 else SHARED
        yield own_options()[owners[0]], title, about, names


def _summaries() -> dict[str, str]:
    return {s.name: s.summary for s in listed()}


def _owners(given: Sequence[Strategy] = ()) -> dict[str, tuple[str, ...]]:
    """Map each strategy-specific option to its strategies' names; `given` may be strategies that are not known."""
    classes = own_options() | {s.name: s.options for s in given if s.options is not None}
    owners: dict[str, tuple[str, ...]] = {}
    for name, cls in classes.items():
        for f in fields(cls):
            owners[f.name] = (*owners.get(f.name, ()), name)
    return owners


def _parts(asked: Any) -> tuple[list[Strategy], list[str]]:
    """(the strategies that draft, the one with a model first; the names of all parts, vocabtrim too) of what a caller
    asks for, as in `specker.load`. Raises ValueError for an unknown name and for parts that do not compose."""
    several = asked if isinstance(asked, list | tuple) else [asked]
    if not several or not all(isinstance(part, str | Strategy) for part in several):
        raise ValueError(f"{option('strategy')} must be a name, a Strategy or a list of these, got {asked!r}")
    strategies, parts = known(), list[str]()
    for part in several:
        if isinstance(part, Strategy):
            if part is not strategies.get(getattr(part, "name", "")):
                strategies = strategies | {checked(part).name: part}
            parts.append(part.name)
        else:
            parts += part.split("+")
    for part in parts:
        if part in strategies or part == TRIM:
            continue
        if (fault := installed().faults.get(part)) is not None:
            raise ValueError(f"strategy {part!r} of an installed package is left out: {fault}")
        near = difflib.get_close_matches(part, names(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown strategy {part!r}{hint} (available: {', '.join(names())})")
    joined = [strategies[part] for part in parts if part != TRIM]
    if TRIM in parts and all(s.name == COPY for s in joined):
        joined.append(strategies[PLAIN])
    joined.sort(key=lambda s: (not s.runs_model, s.name == COPY))
    if len(set(parts)) < len(parts) or sum(s.runs_model for s in joined) > 1:
        raise ValueError(f"strategies {' and '.join(parts)} do not compose: each one drafts")
    first = joined[0]
    if TRIM in parts and first.no_head:
        raise ValueError(f"strategies {first.name} and {TRIM} do not compose: {first.no_head}")
    if len(joined) > 1 and (plain := [s.name for s in joined if not s.drafts]):
        others = " and ".join(s.name for s in joined if s.drafts)
        raise ValueError(f"strategies {plain[0]} and {others} do not compose: {plain[0]} drafts nothing")
    return joined, parts


def _check_policy(options: Options, strategy: Strategy) -> None:
    policy = options.policy
    if policy is None:
        return
    if policy not in (AUTO, *GENERAL, *strategy.policies):
        if policy not in policies():
            raise ValueError(f"{option('policy')} must be one of {', '.join(policies())}, got {policy!r}")
        owners = " or ".join(s.name for s in known().values() if policy in s.policies)
        raise ValueError(f"{option('policy', policy)} is for strategy {owners}, not {options.strategy!r}")
    if policy == AUTO and options.as_published:
        raise ValueError(f"{option('policy', AUTO)} rests and learns: leave out {option('as_published')}")
    if policy != "fixed" and options.tree is not None:
        raise ValueError(f"{option('policy', policy)} is for chains: leave out {option('tree')}")
