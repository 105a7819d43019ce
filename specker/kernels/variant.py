"""variant: one compiled form of a kernel. The launcher and the compile-only checks use the same object, so the resource
table describes the code that runs.

An op file keeps its tile table in a cached function that returns the `Variant` for a dtype and shape. It launches
through that `Variant`, and lists representative ones:

    @lru_cache
    def _variant(dtype: torch.dtype, E: int, arch: int) -> Variant: ...      # the tile table
    def variants(arch: int) -> Iterator[Variant]: ...                         # what `make static` compiles

    _variant(x.dtype, E, arch(x.device))((T,), x, y, T)                       # in the launcher: grid, then arguments

A kernel takes its runtime arguments first and its constexprs last. `do_not_specialize` names the integers that change
from call to call (lengths). `do_not_specialize_on_alignment` names the pointers to small index tensors, which may be
views at any offset. Sizes that belong to a model (E, D, heads) are constexprs.

FP fusion is off, for these kernels only. With it the compiler turns a * b + c into one FMA where it sees fit. A row's
bits could then change with the surrounding code: with P, a tile's size or the compiler's version (Triton 3.10 flips the
default). Without it the code states what is computed, with `tl.fma` where one rounding is wanted, and the interpreter
computes the same. `TRITON_DEFAULT_FP_FUSION` would affect every kernel of the process, even other libraries'; the
launch option does not.

Programmatic dependent launch (sm_90 and newer): a kernel with a constexpr `PDL` may start before the previous kernel
in the stream has ended, which hides its start. Every such kernel calls `wait_for_previous` before it reads or writes
anything that a kernel writes; before that it may read only weights and tables that no kernel of the stream writes.
Every program must wait, even one that has nothing to do: the next kernel waits only for this grid, so an early exit
would let it run before older writes land. After its loop over weights or K/V, or after its wait if it has no loop, it
calls `let_next_start`; earlier or later calls, and prefetching its own weights before the wait, were within 1.3% on an
H100 (bench/LOG.md). PDL changes no bit of the results. SPECKER_PDL=0 turns it off. To test dependent launches on a
GPU, set `DELAYED` to the name of a kernel: it then lets the next kernel start before its own wait and sleeps, and a
kernel that does not wait reads memory that is not written yet.

Some kernels count the arrivals of their programs, and the last one finishes the work (`counters`). A round begins by
zeroing its counters, so an aborted launch spoils no later round. With SPECKER_DEBUG=1, the end of a round checks that
all counters are zero again, which waits for the device.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from specker.kernels.deferred import tl, triton

__all__ = [
    "AMD",
    "FP_FUSION",
    "SMS",
    "TYPES",
    "Counters",
    "Variant",
    "arch",
    "count_in",
    "counters",
    "is_last",
    "let_next_start",
    "reset_counters",
    "same_device",
    "sms",
    "start_after_previous",
    "sum_dtype",
    "tl",
    "triton",
    "wait_for_previous",
]

FP_FUSION = False
# Multiprocessors (CUs on AMD) of an architecture's usual card, which the compile-only checks assume: A100, H100, B200,
# MI300X (gfx942), MI355X (gfx950).
SMS = {80: 108, 90: 132, 100: 148, 942: 304, 950: 256}
AMD = (942, 950)  # gfx942, gfx950
PDL = os.environ.get("SPECKER_PDL") != "0"
DELAYED = ""  # the kernel that sleeps, in tests of PDL
ON_AMD = torch.version.hip is not None  # torch also calls AMD's devices "cuda"
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel with everything its compilation depends on."""

    name: str  # unique within the op: "bf16 P2 Q1 E4096"
    kernel: Any  # a @triton.jit function: runtime arguments first, constexprs last
    arguments: tuple[str | None, ...]  # types of the runtime arguments: "*bf16", "i32"; None for a None argument
    constexprs: Mapping[str, Any]
    num_warps: int  # warps of 32 lanes
    num_stages: int = 1
    dot: bool = False  # a half-precision dot must become matrix instructions
    left: bool = False  # on sm_90 these must read their left operand from registers
    wide: bool = True  # the big operand must be read 16 bytes at a time, or asynchronously
    smoke: bool = False  # `make test` compiles it: bfloat16, D 128 where it applies, a few per op
    options: Mapping[str, Any] = field(default_factory=dict)  # further compiler options on NVIDIA, such as maxnreg
    _compiled: dict[int, tuple[Any, ...]] = field(default_factory=dict, init=False, repr=False)  # for launches

    def warps(self, amd: bool) -> int:
        """The number of warps, or of waves of 64 lanes on AMD. There it is half, so that a lane has as many elements.
        Matrix kernels keep the number: one wave for each of a CU's four SIMDs, and enough registers for the
        accumulator."""
        return max(1, self.num_warps // 2) if amd and not self.dot else self.num_warps

    def dependent(self, arch: int) -> bool:
        """Whether the kernel may start before the previous one has ended."""
        return PDL and arch in (90, 100) and "PDL" in self.kernel.arg_names

    def constants(self, arch: int) -> dict[str, Any]:
        """The constexprs of a compilation for an architecture."""
        pdl = int(self.dependent(arch))
        target = {
            "PDL": 2 if pdl and self.kernel.__name__ == DELAYED else pdl,
            "ON_AMD": arch in AMD,
            "SM": 0 if arch in AMD else arch,  # 0 in the interpreter, too
        }
        return {**self.constexprs, **{name: x for name, x in target.items() if name in self.kernel.arg_names}}

    def compile_options(self, arch: int) -> dict[str, Any]:
        amd = arch in AMD
        return {
            "num_warps": self.warps(amd),
            "num_stages": self.num_stages,
            "enable_fp_fusion": FP_FUSION,
            **({"launch_pdl": True} if self.dependent(arch) else {}),
            **({} if amd else self.options),
        }

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch on the device of the first argument, a tensor; Triton alone would use the current device.

        Triton finds the compiled kernel anew at each launch, from all arguments, constants and options, which takes the
        host three times as long as this (bench/launch.py). Here only what Triton specialises in a launch selects it:
        the alignment of pointers, absent arguments and integers of more than 32 bits."""
        device = arguments[0].device
        if device.type != "cuda":
            return self._compile(grid, device, arguments)
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(grid, *arguments)
        values, key = [], device.index << 1 | PDL
        for x, specialised in zip(arguments, self._specialised, strict=True):
            kind = type(x)
            if kind is int:
                key = key << 3 | (1 if -(1 << 31) <= x < 1 << 31 else 2)
            elif kind is float:
                key = key << 3 | 3
            elif x is None:
                key = key << 3 | 4
            else:
                x = x.data_ptr()
                key = key << 3 | (5 if specialised and x % 16 else 6)
            values.append(x)
        launch = self._compiled.get(key)
        if launch is None or DELAYED or _observed():
            compiled = self._compile(grid, device, arguments)
            if not (ON_AMD or DELAYED):  # on AMD a launch also depends on the sizes of tensors
                self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
            return None
        run, function, metadata = launch
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        run(*grid, *(1,) * (3 - len(grid)), stream, function, metadata, None, None, None, *values, *self._constants)
        return None

    def _compile(self, grid: tuple[int, ...], device: torch.device, arguments: tuple[Any, ...]) -> Any:
        """Launch through Triton, which compiles the kernel for a new combination of arguments. Returns the kernel."""
        on = launched_on(device)
        return self.kernel[grid](*arguments, **self.constants(on), **self.compile_options(on))

    @cached_property
    def _specialised(self) -> tuple[bool, ...]:
        """For each argument, whether Triton compiles another kernel for a pointer that is not a multiple of 16."""
        params = self.kernel.params[: len(self.arguments)]
        return tuple(not (p.do_not_specialize or p.do_not_specialize_on_alignment) for p in params)

    @cached_property
    def _constants(self) -> tuple[None, ...]:
        """The launcher takes the constexprs too, and ignores them."""
        return (None,) * (len(self.kernel.params) - len(self.arguments))


def _observed() -> bool:
    """Whether a profiler listens to Triton's launches."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(hook.calls for hook in hooks)


@lru_cache
def arch(device: torch.device) -> int:
    """The device's column of the tile tables: 80, 90 (wgmma) or 100 (tcgen05), on AMD 942 or 950. Consumer cards of any
    generation use 80: they have its matrix instructions and at most 100 KiB of shared memory. Other AMD cards use 942,
    which needs 64 KiB of LDS. The interpreter uses Hopper's column."""
    if device.type != "cuda":
        return 90
    if ON_AMD:
        return 950 if torch.cuda.get_device_properties(device).gcnArchName.startswith("gfx950") else 942
    return {9: 90, 10: 100}.get(torch.cuda.get_device_capability(device)[0], 80)


def launched_on(device: torch.device) -> int:
    """The architecture that a launch compiles for; 0 in the interpreter, which has no programmatic launches."""
    return arch(device) if device.type == "cuda" else 0


@lru_cache
def sms(device: torch.device) -> int:
    """The number of the device's SMs (H200: 132, H100 PCIe: 114, H20: 78) or CUs. The interpreter has an H200's."""
    if device.type != "cuda":
        return SMS[90]
    return torch.cuda.get_device_properties(device).multi_processor_count


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


COUNTERS = 1 << 16


class Counters:
    """Counters of launches that cannot run at the same time, COUNTERS int32 per device: those of one stream, or those
    of one engine, whose captured graphs hold their addresses. Two engines on two streams have counters of their own."""

    def __init__(self) -> None:
        self.blocks: dict[torch.device, Tensor] = {}

    def block(self, device: torch.device) -> Tensor:
        if device not in self.blocks:
            self.blocks[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        return self.blocks[device]

    def reset(self) -> None:
        """Zero the counters for the launches from here on. A kernel that was aborted leaves counts behind, and every
        later launch would take the wrong program for the last one."""
        for block in self.blocks.values():
            block.zero_()

    def check(self) -> None:
        """Wait for the launches so far. Raise RuntimeError unless they have reset every counter."""
        for device, block in self.blocks.items():
            if left := int(block.count_nonzero()):
                raise RuntimeError(
                    f"{left} arrival counters on {device} are not zero after a round: a kernel was aborted, or ran "
                    "beside another one that counts in the same place"
                )


_shared: dict[tuple[torch.device, Any], Counters] = {}  # by device and stream, or "graphs": see `counters`
_counting = threading.local()


def count_in(own: Counters | None) -> Counters | None:
    """From here on, this thread's launches count in `own`; None: in the counters of their stream. Returns what they
    counted in before."""
    before = getattr(_counting, "own", None)
    _counting.own = own
    return before


def counters(device: torch.device, count: int) -> Tensor:
    """At least `count` zeros, int32, for a launch whose programs count arrivals to find the last one, which must reset
    its counter to 0. Graphs that were captured without `count_in` share the counters of their device, so they must not
    be replayed on several streams at once."""
    if count > COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    own = getattr(_counting, "own", None)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        block = (own or _of(device, "graphs")).blocks.get(device)
        # Zeros that are made in a capture are part of its graph, which fills them again before each launch.
        return torch.zeros(count, dtype=torch.int32, device=device) if block is None else block
    if own is None:
        own = _of(device, _stream(device))
        if device.type == "cuda":
            _of(device, "graphs").block(device)  # for a later capture
    return own.block(device)


def reset_counters(device: torch.device) -> None:
    """Zero the counters of the device's current stream (see `Counters.reset`)."""
    if (own := _shared.get((device, _stream(device)))) is not None:
        own.reset()


def _stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _of(device: torch.device, user: Any) -> Counters:
    if (device, user) not in _shared:
        _shared[device, user] = Counters()
    return _shared[device, user]


@triton.jit
def is_last(p_count, programs, ON_AMD: tl.constexpr):
    """Count the arrival of this program at `p_count` (see `counters`), and tell whether it is the last of `programs`.
    The last one resets the counter and sees what the other programs wrote before they arrived.

    Only one thread counts. The barrier orders the other threads' writes before it, so that its release publishes them
    too. On AMD neither does that for other waves: their stores may still be on the way to the L2 cache when the release
    writes that cache back for the other XCDs to see. So there every wave first waits until its stores are in L2."""
    if ON_AMD:
        tl.inline_asm_elementwise("s_waitcnt vmcnt(0) ; $0", "=v,~{memory}", [], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    last = tl.atomic_add(p_count, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(p_count, 0)
    return last


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernels before this one in the stream have ended. PDL: 0 for a launch that is not dependent, 1 for
    one that is, 2 for a kernel that is `DELAYED`."""
    if PDL == 2:  # let the next kernel start too early, then sleep for about 100 us, longer than its start takes
        tl.extra.cuda.gdc_launch_dependents()
        asm: tl.constexpr = "nanosleep.u32 100000; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel of the stream start. It waits for this one before it reads what this one writes."""
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def start_after_previous(PDL: tl.constexpr):
    """`wait_for_previous`, then `let_next_start`: for a kernel that reads nothing early, so that only its start is
    hidden."""
    wait_for_previous(PDL)
    let_next_start(PDL)


def same_device(first: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError unless every tensor is on `first`'s device; a kernel would read another device's addresses."""
    for name, other in others.items():
        if other is not None and other.device != first.device:
            raise ValueError(f"{name} must be on {first.device}, got {other.device}")


def rowwise(x: Tensor) -> Tensor:
    """x with contiguous rows; copies only unusual views."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


Kinds = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype by name


def check_dims(args: tuple[Any, ...], forms: dict[str, str]) -> None:
    """Raise ValueError unless the fields of `args` have as many dimensions as their forms name, and pages a size."""
    for name, form in forms.items():
        x = getattr(args, name)
        if x.dim() != form.count(",") + 1 or ("page_size" in form and not x.shape[1]):
            raise ValueError(f"{name} must be {form}, got {tuple(x.shape)}")


def check_kinds(args: tuple[Any, ...], kinds: Kinds) -> None:
    """Raise ValueError unless the fields of `args` have these shapes and dtypes, and the first argument's device."""
    given = {name: getattr(args, name) for name in kinds}
    for name, (shape, dtype) in kinds.items():
        x = given[name]
        if x.shape != shape or x.dtype != dtype:
            raise ValueError(f"{name} must be {list(shape)} {dtype}, got {tuple(x.shape)} {x.dtype}")
    same_device(args[0], **given)


def check_contiguous(k_cache: Tensor, v_cache: Tensor) -> None:
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()) or k_cache.dtype != v_cache.dtype:
        raise ValueError(f"the caches must be contiguous and of one dtype: {k_cache.dtype}, {v_cache.dtype}")


def check_within(name: str, index: Tensor, end: int, least: int = 0) -> None:
    """Raise ValueError unless all numbers of `index` are in least..end - 1; reads them on the host."""
    if index.numel():
        low, high = index.aminmax()
        if low < least or high >= end:
            raise ValueError(f"{name} must be in {least}..{end - 1}, got {low}..{high}")
