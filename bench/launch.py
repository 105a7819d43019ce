"""The host's time to launch a kernel, without a GPU: Triton's own launcher calls a libcuda that does nothing.

    python bench/launch.py [--budget 10]

An eager decode step of an 8B model (inside vLLM, or with graphs off) is about 230 launches. With 10 us each the host
needs 2.3 ms, in which an H100 reads 8 GB, the weights in 8 bits. Two ways to launch are timed in turn, in seconds of
this thread: `Variant.__call__`, and Triton's `kernel[grid](...)`, which it replaces. A real driver adds its own time to
both. Exit code 1 if a launch through a `Variant` takes longer than the budget, in microseconds.
"""

import argparse
import ctypes
import importlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STUB = Path(__file__).with_name("libcuda_stub.c")
GPU = torch.device("cuda", 0)


class Pointer:
    """Stands in for a tensor on a GPU."""

    def __init__(self, dtype: torch.dtype, address: int, device: torch.device = GPU):
        self.dtype, self.device, self.address = dtype, device, address

    def data_ptr(self) -> int:
        return self.address


def install(folder: Path) -> None:
    """Build the stub, and make Triton use it as the driver of a Hopper GPU."""
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", library, STUB], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    triton.knobs.nvidia.libcuda_path = str(folder)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    triton.runtime.driver.set_active(CudaDriver())


def cases() -> dict[str, tuple[Any, tuple[int, ...], tuple[Any, ...]]]:
    """Launches of an 8B model's decode step: variant, grid and arguments."""
    from specker.kernels.variant import TYPES

    dtypes = {name: dtype for dtype, name in TYPES.items()}
    found = {}
    for op in ("row_linear", "kv_project", "kv_calibrate"):
        variants = importlib.import_module(f"specker.kernels.{op}").variants(90)
        variant = next(v for v in variants if v.arguments[0] == "*bf16")
        arguments = tuple(
            None
            if kind is None
            else Pointer(dtypes[kind[1:]], 4096 * (i + 1))
            if kind[0] == "*"
            else 1.0
            if kind[0] == "f"
            else 5
            for i, kind in enumerate(variant.arguments)
        )
        found[f"{op}, {len(arguments)} arguments"] = variant, (1, 128, 1), arguments
    return found


def per_call(call: Callable[[], object], count: int = 2000) -> float:
    """Microseconds."""
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="The host's time to launch a kernel, without a GPU.")
    parser.add_argument("--budget", type=float, default=10.0, help="microseconds a launch")
    args = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        for name, (variant, grid, arguments) in cases().items():
            options = {**variant.constants(90), **variant.compile_options(90)}

            def ours(variant: Any = variant, grid: Any = grid, arguments: Any = arguments) -> None:
                variant(grid, *arguments)

            def theirs(variant: Any = variant, grid: Any = grid, arguments: Any = arguments, by: Any = options) -> None:
                variant.kernel[grid](*arguments, **by)

            theirs(), ours(), ours()
            times = [(per_call(ours), per_call(theirs)) for _ in range(7)]
            own, other = (statistics.median(each) for each in zip(*times, strict=True))
            worst = max(worst, own)
            print(f"{name}: {own:.1f} us, through Triton {other:.1f} us")
    sys.exit(worst > args.budget)


if __name__ == "__main__":
    main()
