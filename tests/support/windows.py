"""Arguments of the ops on a round's rows: views among poison, block tables, trees."""

import random

import torch
from torch import Tensor

POISON = -(10**15)


def table(pages: int, B: int = 1, seed: int = 0) -> Tensor:
    """A row-strided view: the first pages of a wider table, whose other columns must not be read."""
    order = list(range(B * pages))
    random.Random(seed).shuffle(order)
    wide = torch.full((B, pages + 3), 10**9, dtype=torch.int32)
    wide[:, :pages] = torch.tensor(order, dtype=torch.int32).view(B, pages)
    return wide[:, :pages]


def among(numbers: list[list[int]]) -> tuple[Tensor, Tensor]:
    """A row-strided view with poison before and after it, and the whole tensor."""
    x = torch.tensor(numbers, dtype=torch.int64)
    around = torch.full((x.shape[0] + 2, x.shape[1] + 5), POISON)
    around[1:-1, 2:-3] = x
    return around[1:-1, 2:-3], around


def a_tree(n: int, rng: random.Random) -> list[int]:
    """Random parents of n drafts."""
    return [rng.randint(0, j) for j in range(n)]
