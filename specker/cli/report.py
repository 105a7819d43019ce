"""Results of a run, and the object that `--json` writes."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from specker.options import Sampling
from specker.runtime.control.stats import Stats
from specker.runtime.versions import settings, versions


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
        row |= {"identical": all(r.check.identical for r in checked)}
    return row


def speedup(checked: list[Result]) -> float | None:
    """Tokens per second, over those of plain decoding; None if that took no time."""
    plain = ar_stats_of(checked).tokens_per_second
    return stats_of(checked).tokens_per_second / plain if plain else None


def stats_of(results: list[Result]) -> Stats:
    return sum((r.stats for r in results), Stats())


def ar_stats_of(results: list[Result]) -> Stats:
    return sum((r.check.ar.stats for r in results), Stats())
