"""The cases of several ops, from several processes."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from ptx import checks, counting

Item = tuple[str, int, str, str, int | None, int | None]  # part, architecture, dtype, op, most cases, turn


def everything(items: list[Item], jobs: int) -> Iterator[list[tuple[str, bool]]]:
    """`results` of each item, from `jobs` processes."""
    if jobs == 1:
        yield from map(results, items)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(results, items)


def results(item: Item) -> list[tuple[str, bool]]:
    """What an op's cases say, and whether something is wrong."""
    part, arch, dtype, op, first, turn = item
    torch.set_num_threads(1)
    if part == "counters":
        return [(text, False) for text in counting.counters(arch, dtype, [op], first)]
    if part == "invariance":
        rows = checks.invariance(arch, dtype, [op], first)
    else:
        rows = checks.check(arch, dtype, [op], first, turn)
    return [(str(row), bool(row.wrong)) for row in rows]
