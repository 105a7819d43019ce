"""Train a head on the target's rows (taps.py): KL from the target over unrolled steps, checkpoints, a log."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from train.head.net import MATRICES, NORMS, Head
from train.head.taps import Batch, Lessons

HEATS = (1.0, 0.7)  # temperatures of the target, in turn
STEP_WEIGHT = 0.8  # step k of a chain counts 0.8 ** k
FIRST = 0.1  # this share of training has chains of one step
DECAY = 0.3  # the learning rates fall linearly over this last share
JUDGED = 48  # held-out windows that are judged
EVERY = 50  # steps between two lines of the log
SAVED = 120.0  # seconds between two checkpoints


@dataclass(frozen=True)
class Recipe:
    visits: int  # positions to train on, counted again in every epoch
    batch: int = 1024  # positions of a step
    length: int = 512  # positions of a window
    steps: int = 3  # unrolled steps
    lr: float = 3e-3  # learning rate of the norms
    muon: float = 6e-3  # learning rate of the matrices
    bfloat16: bool = False  # multiply in bfloat16
    seed: int = 0


def loss_of(net: Head, batch: Batch, steps: int, heat: float) -> Tensor:
    """Mean KL(target || head) at temperature `heat` over the kept tokens, positions and steps, weighted. A position
    whose most probable token is not kept does not count."""
    T = batch.ids.shape[1] - steps
    chains = net.chains(batch.taps[:, :T], batch.ids[:, 1:], batch.place[:, :T], batch.text[:, :T], steps)
    with torch.no_grad():
        logits = net.logits(batch.last[:, 1:] / heat).float()  # [B, T + steps - 1, rows]
        teacher = logits.softmax(-1)
        entropy = logits.logsumexp(-1) - (teacher * logits).sum(-1)
        weights = counted(net, batch)
    total = sums = torch.zeros(())
    for step, final in enumerate(chains):
        at = slice(step, step + T)
        weight = STEP_WEIGHT**step * weights[:, at] * (batch.text[:, :T] == batch.text[:, 1:][:, at])
        z = net.logits(final / heat).float()
        cross = F.cross_entropy(z.flatten(0, 1), teacher[:, at].flatten(0, 1), reduction="none").view(weight.shape)
        total = total + ((cross - entropy[:, at]) * weight).sum()
        sums = sums + weight.sum()
    return total / sums.clamp(min=1)


def counted(net: Head, batch: Batch) -> Tensor:
    """The weight of what is predicted after each position but the first one, [B, W - 1]; 0 where the target's most
    probable token is not kept."""
    return (batch.weight * (net.row[batch.best] >= 0))[:, 1:]


@torch.no_grad()
def agreement(net: Head, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
    """How often the head's best token is the target's, at each step of chains over the true tokens, for the answers'
    tokens: (right [steps], of how many [steps])."""
    T = batch.ids.shape[1] - steps
    chains = net.chains(batch.taps[:, :T], batch.ids[:, 1:], batch.place[:, :T], batch.text[:, :T], steps)
    right, of = [], []
    for step, final in enumerate(chains):
        at = slice(step + 1, step + 1 + T)
        counts = (batch.weight[:, at] == 1) & (batch.text[:, :T] == batch.text[:, at])
        drafted = net.ids[net.logits(final).argmax(-1)]
        right.append((drafted == batch.best[:, at])[counts].sum())
        of.append(counts.sum())
    return torch.stack(right), torch.stack(of)


@dataclass(eq=False)
class Training:
    net: Head
    lessons: Lessons
    recipe: Recipe
    folder: Path
    done: int = 0  # visits
    log: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # since the last line of the log
    epoch: int = 0
    left: list[int] = field(default_factory=list)  # windows of this epoch
    best: float = -1.0  # the longest expected draft of a judgement so far

    def __post_init__(self) -> None:
        matrices = [getattr(self.net, name) for name in MATRICES]
        norms = [getattr(self.net, name) for name in NORMS]
        self.optimisers = (
            torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(norms, weight_decay=0.0),
        )

    @property
    def state(self) -> Path:
        return self.folder / "state.pt"

    def fit(self) -> None:
        """Train to the end, from the last checkpoint if there is one."""
        if self.state.exists():
            self._load()
        begun, first, saved = time.monotonic(), self.done, time.monotonic()
        while self.done < self.recipe.visits:
            self.step()
            ended = self.done >= self.recipe.visits
            if len(self.losses) == EVERY or ended:
                row = self._judge()
                speed = (self.done - first) / (time.monotonic() - begun)
                steps = ", ".join(f"{share:.3f}" for share in row["agreement"])
                print(f"{self.done:,} visits: kl {row['kl']:.3f}, agreement {steps}, {speed:.0f}/s", flush=True)
            if time.monotonic() - saved >= SAVED or ended:
                self._save()
                saved = time.monotonic()

    def step(self) -> None:
        recipe, net = self.recipe, self.net
        share = self.done / recipe.visits
        for optimiser, rate in zip(self.optimisers, (recipe.muon, recipe.lr), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * min(1.0, (1 - share) / DECAY)
        windows = self._next(max(1, recipe.batch // recipe.length))
        batch = self.lessons.batch([self.lessons.trained[n] for n in windows])
        heat = HEATS[self.done // (len(windows) * recipe.length) % len(HEATS)]
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
            loss = loss_of(net, batch, 1 if share < FIRST else recipe.steps, heat)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.losses.append(loss.item())
        self.done += len(windows) * recipe.length

    def judge(self) -> list[float]:
        """The agreement on held-out windows at each step."""
        right = of = torch.zeros(self.recipe.steps, dtype=torch.int64)
        for window in self.lessons.held[:JUDGED]:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.bfloat16):
                some, total = agreement(self.net, self.lessons.batch([window]), self.recipe.steps)
            right, of = right + some, of + total
        return (right / of.clamp(min=1)).tolist()

    def _next(self, count: int) -> list[int]:
        """The next windows: the epochs' permutations, which depend on the seed alone."""
        while len(self.left) < count:
            rng = np.random.default_rng([self.recipe.seed, self.epoch])
            self.left = self.left + rng.permutation(len(self.lessons.trained)).tolist()
            self.epoch += 1
        windows, self.left = self.left[:count], self.left[count:]
        return windows

    def _judge(self) -> dict[str, Any]:
        """Add a line to the log, and keep the weights if they are the best ones so far."""
        shares = self.judge()
        row = {"visits": self.done, "kl": sum(self.losses) / len(self.losses), "agreement": shares}
        self.log.append(row)
        self.losses.clear()
        if (length := expected(shares)) > self.best:
            self.best = length
            _write(self.net.state_dict(), self.folder / "best.pt")
        return row

    def _save(self) -> None:
        about = {name: getattr(self, name) for name in ("done", "log", "losses", "epoch", "left", "best")}
        kept = {"net": self.net.state_dict(), "optimisers": [o.state_dict() for o in self.optimisers], **about}
        _write({**kept, "ids": self.net.ids, "seed": self.recipe.seed}, self.state)
        lines = "".join(json.dumps(row) + "\n" for row in self.log)
        part = self.folder / "log.jsonl.part"
        part.write_text(lines)
        part.rename(self.folder / "log.jsonl")

    def _load(self) -> None:
        kept = torch.load(self.state, weights_only=True)
        self.net.load_state_dict(kept["net"])
        for optimiser, its in zip(self.optimisers, kept["optimisers"], strict=True):
            optimiser.load_state_dict(its)
        for name in ("done", "log", "losses", "epoch", "left", "best"):
            setattr(self, name, kept[name])
        count = len(self.lessons.trained)
        self.left = [n for n in self.left if n < count]


def expected(shares: Sequence[float]) -> float:
    """The expected number of accepted tokens of a chain with these agreements: a_1 + a_1 a_2 + .."""
    return sum(math.prod(shares[: n + 1]) for n in range(len(shares)))


def kept_ids(state: Path, counts: Tensor, rows: int) -> Tensor:
    """The tokens whose rows the LM head keeps, ascending [rows] int64: those of a training that goes on, else the most
    frequent ones."""
    if state.exists():
        return torch.load(state, weights_only=True)["ids"]
    order = counts.argsort(descending=True, stable=True)
    return order[: min(rows, len(counts))].sort().values


def _write(x: Any, path: Path) -> None:
    part = path.with_suffix(".part")
    torch.save(x, part)
    part.rename(path)
