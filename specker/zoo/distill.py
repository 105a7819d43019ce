"""The two drafters, distilled from the target on the corpus and on text that the target wrote itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .fit import fit
from .net import Net
from .sample import acceptance, block_accepted, draft_right, generate

MASK_ID = 1


class Lessons:
    """Windows of the corpus in even steps, of the target's own text in odd ones."""

    def __init__(self, run):
        self.run = run
        self.corpus, self.own = run.windows("train"), np.load(run.work / "own.npy", mmap_mode="r")

    def batch(self, step: int, part: int, rows: int, length: int) -> Tensor:
        """[rows, length] int64."""
        parts, own = self.run.p.micro, self.own
        if step % 2 == 0 or length > own.shape[1]:
            return self.corpus.batch(step * parts + part, rows, length - 1)
        rng = np.random.default_rng([self.run.seed, step, part])
        pick = rng.integers(len(own), size=rows)
        at = int(rng.integers(own.shape[1] - length + 1))
        return torch.from_numpy(own[np.sort(pick), at : at + length].astype(np.int64)).to(self.run.device)


class Judge:
    """Acceptance on the target's own continuations of held-out text, greedy and at T = 0.7."""

    def __init__(self, run, target: Net, prompt: int = 64, rows: int = 32):
        held = np.load(run.work / "held.npy")
        new = min(128, target.c.context - prompt) if target.c.context > 200 else 32
        starts = np.linspace(0, len(held) - prompt - 1, rows).astype(int)
        prompts = torch.from_numpy(np.stack([held[s : s + prompt] for s in starts]).astype(np.int64)).to(run.device)
        self.prompt, self.texts = prompt, {t: generate(target, prompts, new, t) for t in (0.0, 0.7)}

    def draft(self, net: Net) -> dict[str, float]:
        return {f"chain4_T{t}": acceptance(draft_right(net, ids, self.prompt, t)) for t, ids in self.texts.items()}

    def diffusion(self, net: Net) -> dict[str, float]:
        return {f"block8_T{t}": block_accepted(net, ids, self.prompt, t, every=16) for t, ids in self.texts.items()}


@torch.no_grad()
def start_from(net: Net, target: Net) -> Net:
    """The target's embedding on its leading principal axes: its geometry need not be found anew."""
    embed = target.embed.float()
    axes = torch.linalg.eigh(embed.T @ embed).eigenvectors.flip(1)[:, : net.c.hidden]
    net.embed.copy_(embed @ axes)
    net.norm.fill_(target.norm.float().mean().item())
    return net


def train_draft(run, target: Net, name: str, which: int) -> list[dict] | None:
    """KL(target || draft) at every position, at the temperature 1 and, every other time, 0.7."""
    net, lessons, judge = start_from(run.net(getattr(run.p, name)), target), Lessons(run), Judge(run, target)

    def loss(net, part, step, done):
        n = min(run.length(done), 512) if step % 2 == 0 else run.p.lengths[0][1]
        ids = lessons.batch(step, part, run.p.batch // (n * run.p.micro), n + 1)
        with torch.no_grad():
            teacher = target(ids[:, :-1]).flatten(0, 1)
        hidden, label = net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        scale = torch.full((len(label),), 1 / run.p.batch, device=run.device)
        heat = (1.0, 0.7)[step // 2 % 2]
        total, losses = run.head_loss(net, hidden, label, scale, teacher, hard=0.05, heat=heat)
        return total, {"own_kl" if step % 2 else "kl": 2 * losses.mean() / run.p.micro}

    return fit(name, net, loss, lambda: judge.draft(net), run.options(which), run.work)


def packed(n: int, k: int, c: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The layout that supervises n tokens at once and shows each block what it will see in use.

    Rows: n clean tokens, causal among themselves (the cached prefix), then for each block of k the c committed tokens
    before it, run again, and k masks; a block sees the clean rows before its c tokens and all of itself.
    -> positions [R], sees [R,R] bool, is_mask [R] bool, predicts [n] rows that predict the tokens 0..n-1 (shifted)."""
    blocks = torch.arange(n // k)
    first = blocks * k + c  # the first masked position of each block; positions count from c tokens before the window
    size = k + c
    inside = (first[:, None] - c + torch.arange(size)).flatten()
    positions = torch.cat((torch.arange(n), inside))
    owner = torch.cat((torch.full((n,), -1), blocks.repeat_interleave(size)))
    begin = (first - c)[owner.clamp(min=0)]
    clean_column, own = owner[None, :] < 0, owner[:, None] == owner[None, :]
    sees = torch.where(
        owner[:, None] < 0,
        clean_column & (positions[None, :] <= positions[:, None]),
        (clean_column & (positions[None, :] < begin[:, None])) | (own & (owner[:, None] >= 0)),
    )
    in_block = torch.arange(size).repeat(n // k)
    is_mask = torch.cat((torch.zeros(n, dtype=torch.bool), in_block >= c))
    predicts = (n + blocks[:, None] * size + c - 1 + torch.arange(k)).flatten()
    return positions, sees, is_mask, predicts


def train_diffusion(run, target: Net) -> list[dict] | None:
    """Shifted masked prediction in three layouts: `packed` (60%), prefix ++ a block of masks (30%), uniform (10%)."""
    net = start_from(run.net(run.p.diffusion), target)
    n = run.p.lengths[0][1]
    lessons, judge = Lessons(run), Judge(run, target)
    layouts = {k: packed(n, k, k // 4) for k in (4, 8, 16, 32)}
    if run.device != "cpu":
        layouts = {k: tuple(x.to(run.device) for x in v) for k, v in layouts.items()}

    def loss(net, part, step, done):
        rng = np.random.default_rng([run.seed, step])
        k = int(rng.choice((4, 8, 16, 32), p=(0.4, 0.3, 0.2, 0.1)))
        mode, size = rng.random(), run.p.batch // run.p.micro
        near = 0.93 ** torch.arange(k, device=run.device)  # the far guesses of a block are seldom reached
        if mode < 0.6:
            positions, sees, is_mask, predicts = layouts[k]
            ids = lessons.batch(step, part, size // n, n + k // 4)[:, : n + k // 4]
            lead = k // 4  # the block's first token stands behind `lead` tokens, so the clean rows are ids[:, :n]
            rows = ids[:, positions].masked_fill(is_mask, MASK_ID)
            hidden = net(rows, mask=sees, rows=positions)[:, predicts]
            label, where, weight = ids[:, lead : lead + n], torch.arange(lead - 1, lead - 1 + n), near.repeat(n // k)
        elif mode < 0.9:
            length = int(rng.choice((n // 4, n)))
            ids = lessons.batch(step, part, size // length, length)
            rows = torch.cat((ids[:, :-k], torch.full_like(ids[:, -k:], MASK_ID)), dim=1)
            where = torch.arange(length - k - 1, length - 1)
            hidden, label, weight = net(rows)[:, where], ids[:, where + 1], near
        else:
            length = n // 2
            ids = lessons.batch(step, part, size // length, length)
            hit = torch.from_numpy(rng.random(length) < rng.uniform(0.1, 0.9)).to(run.device)
            hit[0], hit[-1] = False, True
            where = hit.nonzero()[:, 0] - 1
            hidden = net(ids.masked_fill(hit, MASK_ID))[:, where]
            label, weight = ids[:, where + 1], torch.ones(len(where), device=run.device)
        with torch.no_grad():
            teacher = target(ids)[:, where]
        weight = weight.repeat(len(ids))
        scale = weight / (weight.sum() * run.p.micro)
        total, losses = run.head_loss(
            net, hidden.flatten(0, 1), label.flatten(), scale, teacher.flatten(0, 1), hard=0.1
        )
        return total, {"kl": losses.mean() / run.p.micro}

    return fit("diffusion", net, loss, lambda: judge.diffusion(net), run.options(3), run.work)
