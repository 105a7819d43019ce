"""DEL beside a full sweep of fixed exits and lengths, and the plus-minus-one rule.

The sweep needs no decoding per setting. Accepted drafts are the text itself, so it is enough to know which tokens of
`ar`'s text each layer predicts. The best fixed settings are also decoded: by layers, and by the seconds of rounds that
the warm-up measured. With L layers, drafts of g tokens by the first E layers give the paper's

    tokens per loaded layer = tokens / sum over rounds of (L + g E)

Where a setting drafts with several exits, they are counted in a pass that is not timed: a trace changes how rounds run.
"""

from collections.abc import Callable, Sequence

import torch

from bench.papers.measure import Row, Setting, about, turns
from bench.papers.models import Pair
from specker.kernels.sample_rows import sample_rows
from specker.model.decoder import Final, forward
from specker.options import Sampling
from specker.runtime.control.policy import LONGEST, Budget
from specker.runtime.control.stats import Stats
from specker.runtime.engine import Engine

PAPER = "del"
LENGTHS = range(LONGEST + 1)
USUAL = (
    Setting("the default", {"strategy": "del"}),
    Setting("as published", {"strategy": "del", "as_published": True}, "2.36 to 2.62"),
    Setting("costs in layers, as the paper counts", {"strategy": "del", "exit_cost": "layers"}),
    Setting("g of the best TPL as the length", {"strategy": "del", "policy": "del-length"}, sampled=False),
    Setting("half of the layers, length by `auto`", {"strategy": "del", "policy": "auto"}),
)


@torch.inference_mode()
def matches(engine: Engine, prompt: list[int], text: list[int], temperature: float) -> torch.Tensor:
    """[L - 1, n] bool: whether layer l's token (l = 1..L-1) after each position is the next token of `text` [n]."""
    model, cache = engine.model, engine.cache
    cache.take(0, len(prompt) + len(text))
    rows = cache.after([0], [len(prompt) + len(text) - 1])
    ids = torch.tensor([*prompt, *text[:-1]], device=model.device)
    depths = tuple(range(1, len(model.layers)))
    out = forward(model, cache, rows, model.embed_tokens(ids), aux_layers=depths)
    cache.release(0)
    kept, s = slice(len(prompt) - 1, None), Sampling(temperature=temperature)
    said = [
        sample_rows(
            model.logits(Final(out.aux_hidden_states[n][kept])), s.temperature, 0, 1.0, s.seed, rows.positions[kept]
        )
        for n in depths
    ]
    return torch.stack(said).cpu() == torch.tensor(text)


def counted(right: list[bool], g: int) -> tuple[int, int, int]:
    """Tokens, rounds and draft tokens of a text whose token i the exit layer has right or not, with drafts of g."""
    at = rounds = drafted = 0
    while at < len(right):
        room = min(g, len(right) - at - 1)
        accepted = 0
        while accepted < room and right[at + accepted]:
            accepted += 1
        at, rounds, drafted = at + accepted + 1, rounds + 1, drafted + room
    return at, rounds, drafted


def sweep(texts: list[torch.Tensor], layers: int, seconds: Callable[[int], Sequence[float]]) -> list[Row]:
    """For each exit E the length with the most tokens per loaded layer, and `fast_g`, the one of drafts with the most
    tokens a second. texts: the `matches` of each text. `seconds`: of rounds, by exit, for every length."""
    best = []
    for E in range(1, layers):
        cost, found = seconds(E), []
        for g in LENGTHS:
            each = [counted(match[E - 1].tolist(), g) for match in texts]
            tokens, rounds, drafted = map(sum, zip(*each, strict=True))
            row = {"exit": E, "g": g, "acceptance_length": tokens / rounds}
            row |= {"per_layer": tokens / (layers * rounds + drafted * E)}
            found.append(row | {"fast_g": g, "by_seconds": tokens / rounds * cost[0] / cost[g]})
        fast = max(found[1:], key=lambda row: row["by_seconds"])
        best.append(max(found, key=lambda row: row["per_layer"]) | {n: fast[n] for n in ("fast_g", "by_seconds")})
    return best


def per_layer(engine: Engine, stats: Stats, pair: Pair, temperature: float) -> float:
    """Tokens per loaded layer of what the engine decodes. `stats`: of these texts, as it has decoded them."""
    layers, rounds = len(engine.model.layers), []
    if len(stats.exits) <= 1:
        return stats.tokens / (layers * stats.rounds + sum(stats.exits) * stats.drafted)
    engine.trace = rounds.append
    for text in pair.texts:
        engine.generate(text, pair.max_new_tokens, temperature=temperature)
    engine.trace = None
    return sum(len(r["tokens"]) for r in rounds) / sum(layers + len(r["draft"]) * r["exit"] for r in rounds)


def run(pair: Pair, temperatures: list[float], seconds: float) -> list[Row]:
    rows: list[Row] = []
    plain = pair.load("ar")
    layers, timed = len(plain.model.layers), pair.load("del")
    timed.warmup()
    costs = timed.policies.history.costs
    for temperature in temperatures:
        texts = [plain.generate(ids, pair.max_new_tokens, temperature=temperature).tokens for ids in pair.texts]
        right = [matches(plain, ids, text, temperature) for ids, text in zip(pair.texts, texts, strict=True)]
        best = sweep(right, layers, lambda exit: costs.rounds(1, Budget(1, 1, exit), LONGEST))
        rows += [about(PAPER, pair, "sweep", temperature) | row for row in best]
        done = turns(PAPER, pair, [*USUAL, *fixed(best)], temperature, seconds / len(temperatures))
        for row, engine, stats in done.values():
            loads = per_layer(engine, stats, pair, temperature)
            rows.append(row | {"per_layer": loads, "lengths": stats.lengths, "exits": stats.exits})
    return rows


def fixed(best: list[Row]) -> list[Setting]:
    """The settings of a sweep that are decoded."""
    fast, second = sorted(best, key=lambda row: row["by_seconds"], reverse=True)[:2]
    loads = max(best, key=lambda row: row["per_layer"])
    chosen = {  # exit and length: title and the paper's figure
        (fast["exit"], fast["fast_g"]): ("best fixed setting by seconds", "1.87 to 2.21"),
        (second["exit"], second["fast_g"]): ("second best, at another exit", ""),
    }
    chosen.setdefault((loads["exit"], loads["g"]), ("best fixed setting by layers", ""))
    found = [
        Setting(title, {"strategy": "del", "policy": "fixed", "exit_layer": exit, "draft_tokens": g}, theirs)
        for (exit, g), (title, theirs) in chosen.items()
        if g
    ]
    rule = {"strategy": "del", "policy": "plus-minus-one", "exit_layer": fast["exit"]}
    return [*found, Setting("plus-minus-one rule at the best exit", rule, "1.99 to 2.43")]
