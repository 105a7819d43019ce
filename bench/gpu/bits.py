"""The bits of products with weights in sixteen and fewer bits, on a GPU.

* `repeats`: eight rows again and again while another kernel runs. A loop that overwrites the registers of a product in
  flight (docs/gpus.md) gives wrong bits rarely, and rather when something moves the timing.
* `rows`: the first rows of 1, 16 and 17 rows against those of 64, which take other tiles. A batch that grows in the
  middle of a text must not change it.

On a CPU, where a reference may multiply many rows in another order, only the repeats are compared.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench import harness
from specker.kernels.expert_linear import expert_linear
from specker.kernels.expert_route import expert_route
from specker.kernels.kv_calibrate import rope_table
from specker.kernels.kv_project import kv_project
from specker.kernels.quant import Matrix, quantised
from specker.kernels.row_linear import row_linear
from specker.kernels.vocab_topk import vocab_topk

KINDS = ("bfloat16", "int8", "fp8", "int4", "mxfp4")
ROWS = (1, 16, 17)
MOST_ROWS = 64
REPEATED_ROWS = 8
LINEARS = ((4096, 4096, "none"), (4096, 28672, "silu_mul"), (14336, 4096, "none"))
EQUAL = "equal bits"
Call = Callable[[int], tuple[Tensor, ...]]  # the results of the first n rows


@dataclass(frozen=True)
class Args:
    repeats: int = field(default=1000, metadata={"help": "of each product beside another kernel"})
    shrink: int = field(default=1, metadata={"help": "divide the sizes of the matrices by this, to try the bench"})
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    save: bool = harness.save_flag()


def calls(args: Args, kind: str) -> Iterator[tuple[str, Call]]:
    """Each op with weights of this kind."""
    by, dtype = args.shrink, torch.bfloat16 if args.device == "cuda" else torch.float32

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=args.device)

    def matrix(*shape: int) -> Matrix:
        plain = drawn(*shape) / shape[-1] ** 0.5
        return plain if kind == "bfloat16" else quantised(plain, kind).for_bfloat16()

    for columns, outputs, epilogue in LINEARS:
        E, O = columns // by, outputs // by
        x, weight = drawn(MOST_ROWS, E), matrix(O, E)
        yield f"row_linear {E} -> {O} {epilogue}", lambda n, x=x, w=weight, e=epilogue: (row_linear(x[:n], w, None, e),)

    E, heads, kv_heads, D = 4096 // by, 32 // by, 8 // by, 128
    x, qkv = drawn(MOST_ROWS, E), matrix((heads + 2 * kv_heads) * D, E)
    index = torch.arange(MOST_ROWS, device=args.device)
    rope = rope_table(1e4 ** -torch.linspace(0, 1, D // 2, device=args.device), 1.0, MOST_ROWS, dtype)

    def project(n: int) -> tuple[Tensor, ...]:
        k, v = (torch.zeros(1, MOST_ROWS, kv_heads, D, dtype=dtype, device=args.device) for _ in "kv")
        q = kv_project(x[:n], qkv, None, index[:n], index[:n], rope, k, v)
        return q, k[0, :n], v[0, :n]

    yield f"kv_project {E}", project

    head = matrix(32768 // by, E)
    yield f"vocab_topk {E}", lambda n: vocab_topk(x[:n], head, None, 10)

    X, chosen, hidden, width = 128 // by, 8, 2048 // by, 768 // by
    rows, logits = drawn(MOST_ROWS, hidden), torch.randn(MOST_ROWS, X, device=args.device)
    gate_up = matrix(X, 2 * width, hidden)

    def mixture(n: int) -> tuple[Tensor, ...]:
        experts, _, *places = expert_route(logits[:n], chosen)
        return (expert_linear(rows[:n], gate_up, experts, *places, "silu_mul", None),)

    yield f"expert_linear {hidden} -> {2 * width}", mixture


def differ(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> Tensor:
    """Whether any number differs or is NaN, as a tensor, so that the host need not wait."""
    return torch.stack([(a != b).any() for a, b in zip(some, others, strict=True)]).any()


def repeated(call: Call, count: int, device: str) -> int:
    """How many of `count` repeats beside another kernel differ from a call alone."""
    alone = call(REPEATED_ROWS)
    harness.wait()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    beside: AbstractContextManager[Any] = nullcontext()
    if device == "cuda":
        other = torch.randn(2048, 2048, dtype=torch.bfloat16, device=device)
        beside = torch.cuda.stream(torch.cuda.Stream())
    for _ in range(count):
        if device == "cuda":
            with beside:
                other @ other
        wrong += differ(call(REPEATED_ROWS), alone)
    return int(wrong)


def other_rows(call: Call, counts: tuple[int, ...]) -> list[int]:
    """The numbers of rows whose bits are not those of the first ones of many rows."""
    many = call(MOST_ROWS)
    return [n for n in counts if differ(call(n), tuple(x[:n] for x in many))]


def compared(args: Args, op: str, kind: str, call: Call) -> dict[str, Any]:
    row: dict[str, Any] = {"bench": "bits", "op": op, "kind": kind, "repeats": args.repeats}
    try:
        differing = repeated(call, args.repeats, args.device)
        rows = other_rows(call, ROWS) if args.device == "cuda" else []
    except Exception as error:  # also errors of compilers
        traceback.print_exc()
        return row | {"found": f"{type(error).__name__}: {error}".splitlines()[0]}
    found = [f"{differing} of {args.repeats} repeats differ"] if differing else []
    found += [f"{n} rows differ from {MOST_ROWS}" for n in rows]
    return row | {"found": ", ".join(found) or EQUAL}


@torch.inference_mode()
def main() -> None:
    args = harness.arguments(Args)
    torch.manual_seed(0)
    bad = []
    for kind in KINDS:
        rows = []
        for op, call in calls(args, kind):
            row = compared(args, op, kind, call)
            rows.append(row)
            print(f"{op} {kind}: {row['found']}", flush=True)
        bad += [f"{row['op']} {kind}" for row in rows if row["found"] != EQUAL]
        if args.save:  # after each kind, so that an interrupt keeps the rows
            harness.save("bits", rows, args.device)
    if bad:
        sys.exit(f"bench: other bits: {', '.join(bad)}")


if __name__ == "__main__":
    main()
