"""Train a head on the target's rows (taps.py): the loop, checkpoints, a log."""

import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.head.net import Net
from train.head.taps import Batch, Lessons

HEATS = (1.0, 0.7)  # temperatures of the target, in turn
DECAY = 0.3  # the learning rates fall linearly over this last share
JUDGED = 48  # held-out windows that are judged
EVERY = 50  # steps between two lines of the log
SAVED = 120.0  # seconds between two checkpoints


@dataclass(frozen=True)
class Recipe:
    visits: int  # positions to train on, counted again in every epoch
    batch: int = 1024  # positions of a step
    length: int = 512  # positions of a window
    lr: float = 3e-3  # learning rate of the norms and tables
    muon: float = 6e-3  # learning rate of the matrices
    bfloat16: bool = False  # multiply in bfloat16
    seed: int = 0


@dataclass(eq=False)
class Training:
    net: Net
    lessons: Lessons
    recipe: Recipe
    folder: Path
    device: str = "cpu"
    done: int = 0  # visits
    log: list[dict[str, Any]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # since the last line of the log
    epoch: int = 0
    left: list[int] = field(default_factory=list)  # windows of this epoch
    best: float = -1.0  # the longest expected draft of a judgement so far
    ahead: dict[tuple[int, ...], "Future[Batch]"] = field(default_factory=dict)  # windows of the next step

    def __post_init__(self) -> None:
        self.net.to(self.device)
        self.reader = ThreadPoolExecutor(1)
        matrices, others = [], []
        for name, p in self.net.named_parameters():
            (matrices if p.ndim == 2 and name not in self.net.tables else others).append(p)
        self.optimisers = (
            torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, weight_decay=0.0),
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
        windows = self._next(self.at_once)
        batch = self._read(windows)
        turn = self.done // (len(windows) * recipe.length)
        with self._autocast():
            loss = net.loss(batch, share, HEATS[turn % len(HEATS)], turn)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.losses.append(loss.detach())  # not a number yet: that would wait for the device
        self.done += len(windows) * recipe.length

    def judge(self) -> list[float]:
        """The agreement on held-out windows at each token of a draft."""
        right = of = torch.zeros(self.net.beyond, dtype=torch.int64, device=self.device)
        held = self.lessons.held[:JUDGED]
        for n in range(0, len(held), self.at_once):
            with self._autocast():
                some, total = self.net.agreement(self.lessons.batch(held[n : n + self.at_once], self.device))
            right, of = right + some, of + total
        return (right / of.clamp(min=1)).tolist()

    @property
    def at_once(self) -> int:
        """Windows of a step."""
        return max(1, self.recipe.batch // self.recipe.length)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.recipe.bfloat16)

    def _read(self, windows: list[int]) -> Batch:
        """The batch of these windows. A thread reads the next one from the disk while the device computes."""

        def read(some: list[int]) -> Batch:
            return self.lessons.batch([self.lessons.trained[n] for n in some], self.device)

        ready = self.ahead.pop(tuple(windows), None)
        following = self.left[: self.at_once]
        self.ahead = {tuple(following): self.reader.submit(read, following)}
        return read(windows) if ready is None else ready.result()

    def _next(self, count: int) -> list[int]:
        """The next windows: the epochs' permutations, which depend on the seed alone."""
        while len(self.left) < 2 * count:
            rng = np.random.default_rng([self.recipe.seed, self.epoch])
            self.left = self.left + rng.permutation(len(self.lessons.trained)).tolist()
            self.epoch += 1
        windows, self.left = self.left[:count], self.left[count:]
        return windows

    def _judge(self) -> dict[str, Any]:
        """Add a line to the log, and keep the weights if they are the best ones so far."""
        shares = self.judge()
        row = {"visits": self.done, "kl": float(torch.stack(self.losses).mean()), "agreement": shares}
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
        kept = torch.load(self.state, map_location=self.device, weights_only=True)
        put_weights(self.net, kept["net"], self.state)
        for optimiser, its in zip(self.optimisers, kept["optimisers"], strict=True):
            optimiser.load_state_dict(its)
        for name in ("done", "log", "losses", "epoch", "left", "best"):
            setattr(self, name, kept[name])
        count = len(self.lessons.trained)
        self.left = [n for n in self.left if n < count]


def expected(shares: Sequence[float]) -> float:
    """The expected number of accepted tokens of a draft with these agreements: a_1 + a_1 a_2 + .."""
    return sum(math.prod(shares[: n + 1]) for n in range(len(shares)))


def kept_ids(state: Path, counts: Tensor, rows: int) -> Tensor:
    """The tokens whose rows the LM head keeps, ascending [rows] int64: those of a training that goes on, else the most
    frequent ones."""
    if state.exists():
        return torch.load(state, map_location="cpu", weights_only=True)["ids"]
    order = counts.argsort(descending=True, stable=True)
    return order[: min(rows, len(counts))].sort().values


def put_weights(net: Net, weights: dict[str, Tensor], path: Path) -> None:
    """Load the weights that were read from `path`. Raises ValueError if they are those of another head."""
    if {name: x.shape for name, x in weights.items()} != {name: x.shape for name, x in net.state_dict().items()}:
        raise ValueError(f"{path} is of a head with other sizes: give the settings it began with, or another --out")
    net.load_state_dict(weights)


def _write(x: Any, path: Path) -> None:
    part = path.with_suffix(".part")
    torch.save(x, part)
    part.rename(path)
