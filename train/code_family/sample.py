"""Batched sampling from a Net, and the drafters' acceptance lengths on the result."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .net import Net


def gumbel(shape: tuple[int, ...], seed: int, position: int, device) -> Tensor:
    """The noise that target and drafter share at one position: argmax(log p / T + g) is an exact draw from p at T."""
    g = torch.Generator(device).manual_seed(seed * 1_000_003 + position)
    return -(-torch.rand(shape, generator=g, device=device).log()).log()


def choose(logits: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """logits [...,V] -> ids [...]; never the special tokens after <|endoftext|>."""
    logits = logits.float()
    logits[..., 1:3] = -torch.inf
    return (logits if temperature == 0 else logits / temperature + noise).argmax(-1)


@torch.no_grad()
def generate(net: Net, prompts: Tensor, new: int, temperature: float, seed: int = 0) -> Tensor:
    """prompts [B,P] -> [B,P+new], the token at position i drawn with `gumbel(seed, i)`; no stop token."""
    b, p = prompts.shape
    cache, ids = net.new_cache(b, p + new), prompts
    hidden = net(ids, past=cache)[:, -1:]
    for i in range(p, p + new):
        noise = gumbel((b, net.c.vocab), seed, i, ids.device) if temperature else None
        token = choose(net.logits(hidden)[:, 0], temperature, noise)
        ids = torch.cat((ids, token[:, None]), dim=1)
        if i + 1 < p + new:
            hidden = net(token[:, None], past=cache, done=i)
    return ids


def own_text(net: Net, data: np.ndarray, part: int, rows: int, length: int, seed: int) -> np.ndarray:
    """[rows, length] uint16: 16..64 tokens of the corpus that the target continues, at T = 0.7, 0.85 or 1."""
    rng = np.random.default_rng([seed, part])
    p = int(rng.integers(16, 65))
    prompts = np.stack([data[s : s + p] for s in rng.integers(0, len(data) - p, size=rows)]).astype(np.int64)
    ids = torch.from_numpy(prompts).to(net.embed.device)
    return generate(net, ids, length - p, (0.7, 0.85, 1.0)[part % 3], seed=part + 1).cpu().numpy().astype(np.uint16)


def acceptance(right: np.ndarray, chain: int = 4) -> float:
    """right [B,T] bool (would the drafter propose this token after the true ones before it?) -> acceptance length.

    Exact for a chain, whose context within the accepted part is the target's own text."""
    rounds = tokens = 0
    for row in right:
        i = 0
        while i + chain + 1 <= len(row):
            run = next((j for j in range(chain) if not row[i + j]), chain)
            rounds, tokens, i = rounds + 1, tokens + run + 1, i + run + 1
    return tokens / max(rounds, 1)


@torch.no_grad()
def draft_right(draft: Net, ids: Tensor, prompt: int, temperature: float, seed: int = 0) -> np.ndarray:
    """ids [B,T] of `generate` (same temperature and seed) -> [B,T-prompt] bool for `acceptance`."""
    hidden, right = draft(ids[:, :-1]), []
    for i in range(prompt, ids.shape[1]):
        noise = gumbel((len(ids), draft.c.vocab), seed, i, ids.device) if temperature else None
        right.append(choose(draft.logits(hidden[:, i - 1]), temperature, noise) == ids[:, i])
    return torch.stack(right, dim=1).cpu().numpy()


@torch.no_grad()
def block_accepted(
    net: Net, ids: Tensor, prompt: int, temperature: float, seed: int = 0, block: int = 8, every: int = 5
) -> float:
    """The diffusion drafter's acceptance length, with a block of masks after every `every`-th position."""
    total, places = 0.0, range(prompt, ids.shape[1] - block, every)
    for i in places:
        masked = torch.cat((ids[:, :i], torch.full_like(ids[:, :block], 1)), dim=1)
        hidden = net(masked)[:, i - 1 : i - 1 + block]
        shape = (len(ids), net.c.vocab)
        noise = torch.stack([gumbel(shape, seed, i + j, ids.device) for j in range(block)], 1) if temperature else None
        right = choose(net.logits(hidden), temperature, noise) == ids[:, i : i + block]
        total += 1 + right.long().cumprod(dim=1).sum(1).float().mean().item()
    return total / len(places)


def distinct4(ids: np.ndarray) -> float:
    """Share of distinct 4-grams within each row [B,T], averaged."""
    return float(np.mean([len({tuple(r[i : i + 4]) for i in range(len(r) - 3)}) / (len(r) - 3) for r in ids]))
