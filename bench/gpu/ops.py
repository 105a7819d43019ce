"""Three ops against their references, on a GPU where there is one: `python bench/gpu/ops.py`.

The checks are those of the kernels' benches. `make gpu` runs them first, and also under Triton's and NVIDIA's
sanitizers, so they stay small and capture no graph.
"""

import sys
import traceback
from collections.abc import Callable

import torch

from bench.kernels import bench_row_linear, bench_tree_attention, bench_vocab_topk
from bench.kernels.common import DEVICE, Built

SIZE = 4096 if DEVICE == "cuda" else 256
OPS: dict[str, Callable[[], Built]] = {
    "row_linear": lambda: bench_row_linear.build(8, SIZE, SIZE, "none", 1),
    "tree_attention": lambda: bench_tree_attention.build(8, (1000,)),
    "vocab_topk": lambda: bench_vocab_topk.build(8, 10),
}


def main() -> None:
    torch.manual_seed(0)
    for name, build in OPS.items():
        try:
            build().check()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # also errors of compilers and of CUDA
            traceback.print_exc()
            sys.exit(f"{name} is wrong: {type(error).__name__}: {error}")
        print(f"{name}: as its reference", flush=True)


if __name__ == "__main__":
    main()
