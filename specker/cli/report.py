"""Results of a run, and the object that `--json` writes."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from specker.options import Sampling
from specker.runtime.control.stats import Stats
from specker.runtime.versions import settings, versions

ENOUGH_TOKENS = 256  # with about 3 tokens a round some 85 rounds, whose mean length is known to about 7%


@dataclass
class Result:
    """What one turn has decoded so far, and how it compares with `ar` if --check is set."""

    tokens: list[int]  # ids
    text: str
    stats: Stats
    check: Any = None  # runtime.check.CheckResult
    ids: list[int] = field(default_factory=list)  # of the prompt
    sampling: Sampling = field(default_factory=Sampling)
    reasoning: str = ""  # of a conversation; `text` is without it
    finished: str | None = None  # as in runtime.text.Generation; "interrupted" if Ctrl-C ended an answer of a chat


def report(engine: Any, results: list[Result], sampling: Sampling, interrupted: bool) -> dict[str, Any]:
    """The object that `--json` writes. `total` joins the prompts; its rates use the summed counts and times."""
    total = Result([t for r in results for t in r.tokens], "".join(r.text for r in results), stats_of(results))
    checked = [r for r in results if r.check]
    out = {
        "strategy": engine.strategy,
        "target": engine.target_name,
        "draft": engine.draft_name,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "batch_size": engine.options.batch_size,
        "sampling": asdict(sampling),
        "settings": settings(engine.options),
        "versions": versions(),
        "prompts": [_prompt(r, sampling) for r in results],
        "total": _row(total, checked),
    }
    trim = engine.trim_report(total.stats)
    if (ranks := engine.ranks) is not None:
        names = {"tp": ranks.size, "dp": ranks.replicas, "draft": ranks.draft_ranks}
        out["ranks"] = names | {"reduce": "ordered" if ranks.ordered else "fast"}
    if engine.captures:
        out["graphs"] = engine.loop.graphs.to_json()
    out |= engine.remarks
    return out | ({"vocabulary": trim} if trim else {}) | ({"interrupted": True} if interrupted else {})


def _prompt(result: Result, sampling: Sampling) -> dict[str, Any]:
    seed = result.sampling.seed
    own: dict[str, Any] = {"seed": seed, "prompt_tokens": len(result.ids), "finish_reason": result.finished}
    if result.sampling != replace(sampling, seed=seed):  # /set changed it
        own["sampling"] = asdict(result.sampling)
    if result.reasoning:
        own["reasoning"] = result.reasoning
    return own | _row(result, [result] if result.check else [])


def _row(result: Result, checked: list[Result]) -> dict[str, Any]:
    row = {"tokens": result.tokens, "text": result.text, **result.stats.to_json()}
    if checked:
        row |= {"ar_tokens_per_second": ar_stats_of(checked).tokens_per_second, "speedup": speedup(checked)}
        row |= {"speedups": speedups(checked), "identical": all(r.check.identical for r in checked)}
    return row


def speedup(checked: list[Result]) -> float | None:
    """Tokens per second, over those of plain decoding; None if that took no time."""
    plain = ar_stats_of(checked).tokens_per_second
    return stats_of(checked).tokens_per_second / plain if plain else None


def speedups(checked: list[Result]) -> list[float]:
    """The speedup of each text; of a single text, of its halves. Their spread says how far `speedup` can be trusted."""
    if len(checked) == 1:
        return halves(checked[0].stats, checked[0].check.ar.stats)
    return [gain for r in checked if (gain := speedup([r])) is not None]


def halves(stats: Stats, plain: Stats) -> list[float]:
    """The speedup in the two halves of a text. They part at the end of the round that is nearest to the middle, and
    each bears half of the prefill, so the whole text's speedup lies between the two. [] if there is one round."""
    times, others = stats.token_times, plain.token_times
    count = min(len(times), len(others))
    ends = [i for i in range(1, count) if times[i] > times[i - 1]]  # rounds end before these tokens
    if not ends:
        return []
    middle = min(ends, key=lambda i: abs(i - count / 2))

    def seconds(of: Stats) -> tuple[float, float]:
        first = of.token_times[middle - 1] - of.seconds["prefill"] / 2
        return first, of.token_times[count - 1] - first

    return [slow / fast for slow, fast in zip(seconds(plain), seconds(stats), strict=True)]


def verdict(checked: list[Result]) -> str:
    """What --check says about speed, in a sentence."""
    stats, gain, each = stats_of(checked), speedup(checked) or 0.0, speedups(checked)
    if not stats.drafted:
        return f"no drafts: the {gain:.2f}x between the two runs is chance, or the cost of a drafter that did not draft"
    if len(checked) == 1:
        said = f"{gain:.2f}x of ar on one text of {stats.tokens} tokens"
        said += f" ({each[0]:.2f} and {each[1]:.2f} in its halves)" if each else ""
    else:
        spread = f"{min(each, default=gain):.2f} to {max(each, default=gain):.2f}"
        said = f"{gain:.2f}x of ar ({spread} over {len(checked)} texts, {stats.tokens} tokens in all)"
    if stats.tokens < ENOUGH_TOKENS:
        return f"{said}: too short to judge"
    return said if gain >= 1 else f"{said}: plain decoding was faster here, try --strategy ar"


def stats_of(results: list[Result]) -> Stats:
    return sum((r.stats for r in results), Stats())


def ar_stats_of(results: list[Result]) -> Stats:
    return sum((r.check.ar.stats for r in results), Stats())
