"""Distil the drafters from the target, on the corpus and on text that the target wrote itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .fit import fit
from .net import Net
from .sample import acceptance, block_accepted, draft_right, generate

MASK_ID = 1


class Lessons:
    """Training windows: of the corpus in every `every`-th step, otherwise of the target's own text."""

    def __init__(self, run, every: int = 2):
        self.run, self.every = run, every
        self.corpus, self.own = run.windows("train"), np.load(run.work / "own.npy", mmap_mode="r")

    def batch(self, step: int, part: int, rows: int, length: int) -> Tensor:
        """[rows, length] int64."""
        parts, own = self.run.p.micro, self.own
        if step % self.every == 0 or length > own.shape[1]:
            return self.corpus.batch(step * parts + part, rows, length - 1)
        rng = np.random.default_rng([self.run.seed, step, part])
        pick = rng.integers(len(own), size=rows)
        at = int(rng.integers(own.shape[1] - length + 1))
        return torch.from_numpy(own[np.sort(pick), at : at + length].astype(np.int64)).to(self.run.device)


class Judge:
    """Acceptance length on the target's own continuations of held-out text, greedy and at T = 0.7."""

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
    """Start from the target's embedding on its leading principal axes, so that training need not find its geometry
    again. A net as wide as the target starts as the target's first layers, which were trained to exit early."""
    if net.c.hidden == target.c.hidden:
        fresh = net.state_dict()
        net.load_state_dict(fresh | {name: w for name, w in target.state_dict().items() if name in fresh})
        return net
    embed = target.embed.float()
    axes = torch.linalg.eigh(embed.T @ embed).eigenvectors.flip(1)[:, : net.c.hidden]
    net.embed.copy_(embed @ axes)
    net.norm.fill_(target.norm.float().mean().item())
    return net


def train_draft(run, target: Net, name: str, which: int) -> list[dict] | None:
    """Train with KL(target || draft) at every position, alternately at temperature 1 and 0.7."""
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


@dataclass(frozen=True)
class Rounds:
    """A text as the drafter meets it when decoding, all rounds in one forward. First come `lead` tokens that see each
    other, then `count` rounds of `step` new committed tokens and `block` masks after them. A round sees all of itself
    and the earlier committed tokens, as their own round computed them."""

    lead: int
    step: int
    block: int
    count: int

    @property
    def tokens(self) -> int:
        """Tokens of the text, up to the last predicted one."""
        return self.lead + self.count * self.step + self.block

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """-> positions [R], sees [R, R] bool, is_mask [R] bool."""
        size = self.step + self.block
        place = torch.arange(size).repeat(self.count)
        round_ = torch.arange(self.count).repeat_interleave(size)
        positions = torch.cat((torch.arange(self.lead), self.lead + round_ * self.step + place))
        owner = torch.cat((torch.full((self.lead,), -1), round_))
        is_mask = torch.cat((torch.zeros(self.lead, dtype=torch.bool), place >= self.step))
        earlier = owner[None, :] < owner[:, None]
        return positions, (earlier & ~is_mask[None, :]) | (owner[None, :] == owner[:, None]), is_mask

    def predicts(self) -> tuple[Tensor, Tensor]:
        """-> the predicting rows [count * block], and each one's position; a row predicts the token after it."""
        last, i = self.step - 1, torch.arange(self.block)
        begin = torch.arange(self.count)[:, None]
        rows = self.lead + begin * (self.step + self.block) + last + i
        return rows.flatten(), (self.lead + begin * self.step + last + i).flatten()


NEAR = 0.8  # weight of a guess relative to the one before it: far guesses are seldom reached


def train_diffusion(run, target: Net) -> list[dict] | None:
    """Train shifted masked prediction: rounds as in decoding (`Preset.rounds`), or one block after a prefix that sees
    it."""
    net = start_from(run.net(run.p.diffusion), target)
    lessons, judge, budget = Lessons(run, every=4), Judge(run, target), run.p.batch // run.p.micro
    on = [[x.to(run.device) for x in (*layout.rows(), *layout.predicts())] for layout, _ in run.p.rounds]
    shares = np.cumsum([share for _, share in run.p.rounds])

    def loss(net, part, step, done):
        rng = np.random.default_rng([run.seed, step])
        which = int(np.searchsorted(shares, rng.random()))
        if which < len(shares):
            layout = run.p.rounds[which][0]
            positions, sees, is_mask, predicts, where = on[which]
            ids = lessons.batch(step, part, max(1, budget // len(where)), layout.tokens)
            rows = ids[:, positions].masked_fill(is_mask, MASK_ID)
            hidden = net(rows, mask=sees, rows=positions)[:, predicts]
            k, count = layout.block, layout.count
        else:
            k, count = int(rng.choice((4, 8, 16))), 1
            length = int(rng.choice((64, run.p.lengths[0][1])))
            ids = lessons.batch(step, part, budget // length, length)
            where = torch.arange(length - k - 1, length - 1, device=run.device)
            hidden = net(torch.cat((ids[:, :-k], torch.full_like(ids[:, -k:], MASK_ID)), dim=1))[:, where]
        with torch.no_grad():
            teacher = target(ids[:, :-1])[:, where]
        weight = (NEAR ** torch.arange(k, device=run.device)).repeat(count * len(ids))
        heat = (1.0, 0.7)[step // 2 % 2]
        total, losses = run.head_loss(
            net,
            hidden.flatten(0, 1),
            ids[:, where + 1].flatten(),
            weight / (weight.sum() * run.p.micro),
            teacher.flatten(0, 1),
            hard=0.1,
            heat=heat,
        )
        return total, {"kl": losses.mean() / run.p.micro}

    return fit("diffusion", net, loss, lambda: judge.diffusion(net), run.options(3), run.work)
