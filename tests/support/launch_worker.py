"""Launch one kernel with several arguments through a `Variant` and through Triton, with a libcuda that does nothing.
Then switch dependent launches on and off. Prints what reached Triton's launcher, as JSON. A process of its own, because
Triton keeps its driver."""

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.nvidia.driver import CudaLauncher

from bench.launch import Pointer, install
from specker.kernels import variant as variants
from specker.kernels.variant import Variant, start_after_previous


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["b_ptr"])
def _kernel(a_ptr, b_ptr, c_ptr, n, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a_ptr + offsets, mask=offsets < n) * scale
    if b_ptr is not None:
        x += tl.load(b_ptr + offsets, mask=offsets < n)
    tl.store(c_ptr + offsets, x, mask=offsets < n)


@triton.jit
def _dependent_kernel(x_ptr, PDL: tl.constexpr):
    start_after_previous(PDL)
    tl.store(x_ptr, 1.0)


# Settings of PDL, one after another in one process: a name, PDL, and the kernel that sleeps.
SWITCHED = (
    ("on", True, ""),
    ("off", False, ""),
    ("late", True, "_dependent_kernel"),
    ("on again", True, ""),
    ("another is late", True, "_another_kernel"),
    ("off again", False, ""),
)


def main() -> None:
    launches = []
    call = CudaLauncher.__call__
    state = {"device": 0, "hooked": 0}

    def recorded(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        plain = [arg.data_ptr() if hasattr(arg, "data_ptr") else arg for arg in args[:5]]
        launches.append([[x, y, z], stream, function, plain, state["device"]])
        return call(self, x, y, z, stream, function, packed, metadata, enter, leave, *args)

    @contextmanager
    def device(which):
        before, state["device"] = state["device"], which.index
        yield
        state["device"] = before

    def listen(_):
        state["hooked"] += 1

    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        CudaLauncher.__call__ = recorded
        torch.cuda.current_device = lambda: state["device"]
        torch.cuda.device = device
        torch._C._cuda_getCurrentRawStream = lambda index: 100 + index
        triton.runtime.driver.active.get_current_device = lambda: state["device"]
        triton.runtime.driver.active.get_current_stream = lambda index: 100 + index
        variant = Variant("fp32", _kernel, ("*fp32", "*fp32", "*fp32", "i32", "fp32"), {"BLOCK": 64}, 4)
        out = {}
        for name in sys.argv[1:]:
            where = torch.device("cuda", int(name == "device"))
            a = Pointer(torch.float32, 4096 + 4 * (name == "a"), where)
            b = None if name == "none" else Pointer(torch.float32, 8192 + 4 * (name == "b"), where)
            arguments = a, b, Pointer(torch.float32, 12288, where), 1 << 31 if name == "wide" else 1000, 2.0
            if name == "hook":
                triton.knobs.runtime.launch_enter_hook.add(listen)
            launches.clear()
            for _ in range(3):
                variant((7, 2), *arguments)
            with device(where):
                variant.kernel[(7, 2)](*arguments, **variant.constants(90), **variant.compile_options(90))
            out[name] = launches.copy()
        triton.knobs.runtime.launch_enter_hook.remove(listen)  # with it, every launch goes through Triton
        dependent = Variant("fp32", _dependent_kernel, ("*fp32",), {}, 4)
        switched = {}
        for name, pdl, late in SWITCHED:
            variants.PDL, variants.DELAYED = pdl, late
            launches.clear()
            for _ in range(2):
                dependent((1,), Pointer(torch.float32, 4096))
            switched[name] = [function for _, _, function, *_ in launches]
        found = {"launches": out, "hooked": state["hooked"], "compiled": len(variant._compiled), "switched": switched}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
