"""One training loop for all models: schedule, checkpoints, loss log, progress."""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .net import Net
from .optim import Optimizer, lr_scale, stacked


@dataclass(frozen=True)
class FitOptions:
    tokens: int  # in total; may be lowered on resume: the schedule depends only on (tokens so far, tokens)
    batch: int  # tokens per step
    lr: float
    seed: int = 0
    eval_every: int = 250  # steps
    micro: int = 4  # parts of a batch
    workers: int = 1  # threads that process the parts; with one, the result depends only on the options
    save_every: float = 120.0  # seconds
    stop_after: int | None = None  # stop after this many steps of this model (to test the resume)


class Windows:
    """Windows of length + 1 tokens of one long row; their order depends only on (seed, step)."""

    def __init__(self, data: np.ndarray, seed: int, device: str):
        self.data, self.seed, self.device, self.orders = data, seed, device, {}

    def batch(self, step: int, rows: int, length: int) -> Tensor:
        """ids [rows, length + 1] int64."""
        count = (len(self.data) - 1) // length
        out = np.empty((rows, length + 1), dtype=np.int64)
        for r in range(rows):
            epoch, i = divmod(step * rows + r, count)
            if (epoch, length) not in self.orders:
                rng = np.random.default_rng([self.seed, epoch, length])
                self.orders = {(epoch, length): (rng.permutation(count), int(rng.integers(length)))}
            order, shift = self.orders[epoch, length]
            start = min(int(order[i]) * length + shift, len(self.data) - length - 1)
            out[r] = self.data[start : start + length + 1]
        return torch.from_numpy(out).to(self.device)


def twin_of(net: Net) -> Net:
    """A network that shares the weights but has its own gradients."""
    twin = copy.deepcopy(net)
    for mine, other in zip(twin.parameters(), net.parameters(), strict=True):
        mine.data = other.data
    return twin


class Workers:
    """Threads that each take the next part of the batch, so a core shared with other processes does fewer parts.

    One OpenMP team over both cores waits at every op for the busier core: measured three times slower."""

    def __init__(self, net: Net, count: int):
        self.nets = [net]
        for _ in range(count - 1):
            self.nets.append(twin_of(net))
        # the threads persist, because oneDNN keeps its compiled kernels per thread
        self.pool = ThreadPoolExecutor(count, initializer=self._begin) if count > 1 else None

    @staticmethod
    def _begin() -> None:
        torch.set_num_threads(1)
        torch._dynamo.config.recompile_limit = 64  # one per shape; the setting is per thread

    def gradients(self, parts: int, part_loss: Callable[[Net, int], tuple[Tensor, dict]]) -> dict[str, float]:
        """Sum the gradients of all parts' losses into the first net's; returns the summed values."""
        todo, lock, values, errors = iter(range(parts)), threading.Lock(), {}, []

        def work(net: Net) -> None:
            try:
                while True:
                    with lock:
                        part = next(todo, None)
                    if part is None:
                        return
                    loss, v = part_loss(net, part)
                    loss.backward()
                    with lock:
                        for k, x in v.items():
                            values[k] = values.get(k, 0.0) + float(x)
            except BaseException as e:
                errors.append(e)

        if self.pool is None:
            work(self.nets[0])
        else:
            list(self.pool.map(work, self.nets))
        if errors:
            raise errors[0]
        for twin in self.nets[1:]:
            for mine, other in zip(self.nets[0].parameters(), twin.parameters(), strict=True):
                if other.grad is not None:
                    mine.grad = other.grad if mine.grad is None else mine.grad.add_(other.grad)
                    other.grad = None
        return values


def save(path: Path, value) -> None:
    """Save atomically: a kill leaves the old file or the new one."""
    temporary = path.with_suffix(".tmp")
    torch.save(value, temporary)
    os.replace(temporary, path)


def progress(total: int, name: str):
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description:>9}"), BarColumn(), TextColumn("{task.percentage:>5.1f}%"), TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"), disable=not sys.stdout.isatty(),
    )  # fmt: skip
    return bar, bar.add_task(name, total=total, note="")


def fit(
    name: str,
    net: Net,
    train_loss: Callable[..., tuple[Tensor, dict]],
    held_out: Callable[[], dict],
    o: FitOptions,
    work: Path,
    optimizer: Callable[..., Optimizer] | None = None,
) -> list[dict] | None:
    """Train `net` in place. `train_loss(net, part, step=, done=)` returns the loss of one of `micro` parts of a batch
    and the values to log; both are summed over the parts. `optimizer` is made of (net, lr); the default is a Net's.
    Returns the loss log, or None if `stop_after` ended it early. The checkpoint is work/<name>.pt."""
    team = Workers(net, o.workers)
    opt = optimizer(net, o.lr) if optimizer else Optimizer(stacked(net), list(net.parameters()), o.lr)
    path, log, start = work / f"{name}.pt", [], 0
    if path.exists():
        saved = torch.load(path, map_location=net.embed.device, weights_only=True)
        net.load_state_dict(saved["net"])
        opt.load(saved["opt"])
        start, log = saved["step"], saved["log"]

    def checkpoint(step: int) -> None:
        save(path, {"net": net.state_dict(), "opt": opt.state(), "step": step, "log": log})

    bar, task = progress(o.tokens, name)
    last_save = last_print = time.perf_counter()
    since = start
    sums: dict[str, float] = {}
    step = start
    with bar:
        while step * o.batch < o.tokens:
            if o.stop_after is not None and step >= o.stop_after:
                checkpoint(step)
                return None
            done = step * o.batch / o.tokens
            values = team.gradients(o.micro, partial(train_loss, step=step, done=done))
            opt.step(lr_scale(done))
            step += 1
            for k, v in values.items():
                sums[k] = sums.get(k, 0.0) + float(v)
            now = time.perf_counter()
            if step % o.eval_every == 0 or step * o.batch >= o.tokens:
                n = step - since
                row = {"step": step, "tokens": step * o.batch, "tokens_per_s": round(n * o.batch / (now - last_print))}
                with torch.compiler.set_stance("force_eager"):  # every length would be compiled
                    judged = held_out()
                row |= {k: round(v / n, 4) for k, v in sums.items()} | {k: round(v, 4) for k, v in judged.items()}
                log.append(row)
                note = "  ".join(f"{k} {v}" for k, v in row.items() if k != "step")
                bar.update(task, completed=step * o.batch, note=note)
                if bar.disable:
                    print(f"{name} step {step} of {-(-o.tokens // o.batch)}: {note}", flush=True)
                sums, since, last_print = {}, step, time.perf_counter()
            else:
                bar.update(task, completed=step * o.batch)
            if now - last_save > o.save_every:
                checkpoint(step)
                last_save = now
    checkpoint(step)
    return log
