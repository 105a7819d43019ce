"""Settings that take turns with `ar`, and the fields of their rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.decoding import measured, row_of, ways_of
from bench.papers.models import Pair
from specker.fields import flag
from specker.runtime.control.stats import Stats
from specker.runtime.engine import Engine

Row = dict[str, Any]
MOST_ROUNDS = 9  # more would not make a median steadier
WARM = 8  # tokens that each engine decodes before it is timed


class Setting(NamedTuple):
    """A row of a paper's table."""

    title: str
    options: dict[str, Any]  # as `specker.load` takes them
    theirs: str = ""  # the paper's own figure
    draft: str = ""  # the field of `Pair` with its draft, if not the strategy's own
    sampled: bool = True  # whether it is also measured above temperature 0

    def load(self, pair: Pair) -> Engine:
        return pair.load(**self.options, draft=getattr(pair, self.draft) if self.draft else None)


class Turn(NamedTuple):
    """What one setting did in its turns."""

    row: Row
    engine: Engine
    stats: Stats


def flags(options: dict[str, Any]) -> str:
    """Options as the command takes them."""
    return " ".join(flag(name) if value is True else f"{flag(name)} {value}" for name, value in options.items())


def about(paper: str, pair: Pair, table: str, temperature: float) -> Row:
    """The fields of every row. `table`: which table of the paper's page the row is for."""
    fields = {"bench": "papers", "paper": paper, "table": table, "model": pair.about, "dtype": pair.weights}
    return fields | {"temperature": temperature, "device": pair.device}


def engines_of(pair: Pair, settings: Sequence[Setting], temperature: float) -> dict[str, Engine]:
    """An engine for `ar` and for each setting that is measured at this temperature, by title."""
    engines = {"ar": pair.load("ar")}
    engines |= {s.title: s.load(pair) for s in settings if s.sampled or temperature == 0}
    for engine in engines.values():
        engine.warmup()
        engine.generate(pair.texts[0], WARM, temperature=temperature)
    return engines


def turns(paper: str, pair: Pair, settings: Sequence[Setting], temperature: float, seconds: float) -> dict[str, Turn]:
    """Decode the prompts with every setting in turn, for about `seconds`, once at least. SystemExit if tokens are not
    those of `ar`."""
    engines = engines_of(pair, settings, temperature)
    timings = measured(ways_of(engines, pair, temperature), pair.texts, MOST_ROUNDS, warmup=0, seconds=seconds)
    asked = {s.title: s for s in (Setting("ar", {"strategy": "ar"}), *settings)}
    found = {}
    for title, engine in engines.items():
        timing, setting = timings[title], asked[title]
        stats: Stats = timing.last.stats
        row = row_of("papers", title, temperature, pair, timings, engine, pair.texts)
        row |= about(paper, pair, "speed", temperature)
        row |= {"flags": flags(setting.options), "theirs": setting.theirs}
        row |= {"over_ar_texts": timing.spread(timings["ar"])}
        row |= {"drafted_a_round": stats.drafted / stats.rounds, "rested": sum(stats.rests.values()) / stats.rounds}
        row |= {"shares": {stage: time / stats.wall for stage, time in stats.seconds.items()}}
        if stats.drafted:
            row["draft_ms"] = 1e3 * stats.seconds["draft"] / stats.drafted
        found[title] = Turn(row, engine, stats)
    return found
