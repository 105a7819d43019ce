"""What a kernel variant compiles to, without a GPU: its resources, its instructions and what is wrong with them.

A variant is one of specker/kernels/variant.py, the same object that its launcher launches. It is compiled to a cubin,
for AMD to two code objects, since launches there address tensors below 2 GiB by 32-bit offsets and others by 64-bit
pointers. Registers, stack and shared memory come from `cuobjdump --dump-resource-usage`, the instruction mix from the
PTX; for AMD both come from the assembly. A kernel fails if

* it spills: its stack frame, or its scratch memory, is not empty;
* its shared memory exceeds the architecture's limit for a block;
* it should use a half-precision dot (`dot`) and has no matrix instruction;
* its products' left operand should come from registers (`left`) and a wgmma reads it from shared memory;
* ptxas waits after each wgmma, so that none overlaps with other instructions;
* in a loop on sm_90, an instruction writes a register from which a wgmma in flight may still read its left operand;
* it should read wide (`wide`) and less than `WIDE` of the loaded bytes are read 16 bytes at a time or asynchronously;
* on AMD, a program may count its arrival before the stores of all its waves have arrived;
* on sm_100, a block lets the next kernel start before it has allocated its tensor memory;

Occupancy is an estimate of blocks per SM by registers (allocated per warp in units of 256), by shared memory (the
system takes 1 KiB of each block), by warps and, on sm_100, by tensor memory (512 columns); per CU by registers (512 a
lane and SIMD, in units of 8), by LDS and by waves.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from bench import instructions
from specker.kernels.deferred import Deferred

SHARED_SM = {80: 164, 90: 228, 100: 228}  # KiB per SM; a block may have 1 KiB less
LDS = {942: 64, 950: 160}  # KiB per CU, and the most a block may have
WIDE = 0.6  # of the loaded bytes, for kernels that should read wide; the rest are indices
WARPS_SM = 64
BLOCKS_SM = 32
REGISTERS_SM = 65536
TENSOR_SM = 512  # columns of tensor memory
LANES_WAVE = 64
WAVES_CU = 32
REGISTERS_LANE = 512  # of a SIMD, of which a CU has four


@dataclass(frozen=True)
class Report:
    """One variant on one architecture."""

    op: str
    kernel: str
    variant: str
    arch: int
    warps: int
    stages: int
    registers: int  # per thread
    stack: int  # bytes per thread; more than 0 means spills
    shared: int  # bytes per block
    matrix: str  # the matrix instructions in the PTX: "wgmma 8"; "wgmma.rs": the left operand is in registers
    loads: int  # global load instructions, asynchronous ones included
    wide: float  # share of the bytes loaded by 16-byte (or wider), asynchronous or bulk instructions
    asynchronous: int  # cp.async and bulk copies
    stores: int
    tensor: int  # columns of tensor memory of a block
    blocks: int  # an SM
    problems: tuple[str, ...]

    @property
    def occupancy(self) -> float:
        return self.blocks * self.warps / (WAVES_CU if self.arch in LDS else WARPS_SM)

    @property
    def target(self) -> str:
        return f"gfx{self.arch}" if self.arch in LDS else f"sm_{self.arch}"


def compile_variant(variant: Any, arch: int, near: bool = False) -> Any:
    """Triton's compiled kernel. `near`: see `source_of`."""
    import triton

    source, options = source_of(variant, arch, near), variant.compile_options(arch)
    return triton.compile(source, target=target_of(arch), options=options)


def target_of(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("hip", f"gfx{arch}", LANES_WAVE) if arch in LDS else GPUTarget("cuda", arch, 32)


def source_of(variant: Any, arch: int, near: bool = False) -> Any:
    """What Triton compiles: the same as a launch's, so both have the same key in Triton's cache. `near`: the launch's
    tensors take less than 2 GiB, so that Triton addresses them by 32-bit offsets on AMD. ValueError if launches would
    compile something else."""
    from triton.compiler import ASTSource

    kernel, given = variant.kernel, variant.constants(arch)
    kernel = kernel.real() if isinstance(kernel, Deferred) else kernel  # Triton 3.6 takes no other
    names = kernel.arg_names
    runtime = names[: len(variant.arguments)]
    if set(names[len(runtime) :]) != set(given):
        raise ValueError(
            f"{variant.name}: {kernel.__name__} takes {names}; given {len(runtime)} arguments and constexprs "
            f"{sorted(given)}"
        )
    signature, constexprs, attrs = {}, dict(given), {}
    for i, (name, param, kind) in enumerate(zip(runtime, kernel.params, variant.arguments, strict=False)):
        if kind is None:
            signature[name], constexprs[name], attrs[(i,)] = "constexpr", None, []
            continue
        kind, _, multiple = kind.partition(":")
        signature[name] = kind
        if multiple:
            attrs[(i,)] = [["tt.divisibility", int(multiple)]]
        elif kind.startswith("*"):
            if not param.do_not_specialize:
                attrs[(i,)] = [] if param.do_not_specialize_on_alignment else [["tt.divisibility", 16]]
        elif kind[0] in "iu" and not param.do_not_specialize:
            raise ValueError(f"{variant.name}: {kernel.__name__} recompiles with {name}: name it in do_not_specialize")
        if near and kind.startswith("*") and not param.do_not_specialize:
            attrs[(i,)] = [*attrs[(i,)], ["tt.pointer_range", 32]]
    signature |= dict.fromkeys(given, "constexpr")
    attrs |= {(i,): [] for i in range(len(runtime), len(names))}
    return ASTSource(kernel, {name: signature[name] for name in names}, constexprs, attrs)


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and SHARED of the only kernel in a cubin."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def blocks_per_cu(arch: int, waves: int, registers: int, shared: int) -> int:
    by_registers = 4 * min(8, REGISTERS_LANE // (8 * -(-max(registers, 1) // 8))) // waves
    return min(WAVES_CU // waves, by_registers, LDS[arch] * 1024 // max(shared, 1))


def blocks_per_sm(arch: int, warps: int, registers: int, shared: int, tensor: int = 0) -> int:
    by_registers = REGISTERS_SM // registers_of_block(warps, registers)
    by_tensor = TENSOR_SM // tensor if tensor else BLOCKS_SM
    return min(BLOCKS_SM, WARPS_SM // warps, by_registers, by_tensor, SHARED_SM[arch] * 1024 // (shared + 1024))


def registers_of_block(warps: int, registers: int) -> int:
    return warps * -(-registers * 32 // 256) * 256


def warpgroups(ptx: str, sass: str) -> tuple[str, ...]:
    """What is wrong with the waits for wgmma. ptxas only warns of the one, and says nothing of the other."""
    found = ("ptxas waits after each wgmma",) if serialised(ptx, sass) else ()
    if written := instructions.overwritten(sass):
        found += (f"writes to registers that a wgmma in flight may read: {'; '.join(written)}",)
    return found


def serialised(ptx: str, sass: str) -> bool:
    """Whether ptxas waits after each wgmma although the PTX does not."""
    products, waits = (len(re.findall(rf"\b{name}\b", sass)) for name in ("HGMMA", "WARPGROUP\\.DEPBAR"))
    return waits >= products > ptx.count("wgmma.wait_group")


def disassembly(cubin: bytes) -> str:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def problems(variant: Any, arch: int, used: dict[str, int], shared: int, counts: dict[str, Any]) -> tuple[str, ...]:
    found = []
    if used["STACK"] or used["LOCAL"]:
        found.append(f"spills: a stack frame of {used['STACK']} bytes, {used['LOCAL']} local")
    most = 1024 * (LDS[arch] if arch in LDS else SHARED_SM[arch] - 1)
    if shared > most:
        found.append(f"{shared} bytes of shared memory, a block may have {most}")
    if variant.dot and not counts["matrix"]:
        found.append("a dot, and no matrix instruction")
    if variant.left and arch == 90 and ("wgmma.rs" not in counts["matrix"] or "wgmma " in counts["matrix"]):
        found.append("the left operand does not come from registers")
    if variant.wide and counts["wide"] < WIDE:
        found.append(f"only {counts['wide']:.0%} of the loaded bytes come 16 at a time")
    return tuple(found)


def misordered(variant: Any, arch: int, asm: dict[str, str]) -> tuple[str, ...]:
    """Instructions in an order that would make a result depend on timing. A single wave publishes only its own stores,
    for which its release waits."""
    found = []
    several = arch in LDS and variant.warps(True) > 1
    if several and (early := instructions.published_early(asm["amdgcn"])):
        found.append(f"{early} releases may publish before other waves' stores have arrived")
    if arch not in LDS and instructions.allocates_late(asm["ptx"]):
        found.append("lets the next kernel start before it has allocated its tensor memory")
    return tuple(found)


def report(op: str, variant: Any, arch: int, near: bool = False) -> Report:
    done = compile_variant(variant, arch, near)
    shared, warps, tensor = done.metadata.shared, variant.warps(arch in LDS), 0
    if arch in LDS:
        used, counts = instructions.amd_resources(done.asm["amdgcn"]), instructions.amd_mix(done.asm["amdgcn"])
        blocks = blocks_per_cu(arch, warps, used["REG"], shared)
    else:
        used, counts = resources(done.asm["cubin"]), instructions.mix(done.asm["ptx"])
        tensor = instructions.tensor_columns(done.asm["ptx"])
        blocks = blocks_per_sm(arch, warps, used["REG"], shared, tensor)
    found = problems(variant, arch, used, shared, counts) + misordered(variant, arch, done.asm)
    if "wgmma" in counts["matrix"]:
        found += warpgroups(done.asm["ptx"], disassembly(done.asm["cubin"]))
    return Report(
        op=op,
        kernel=variant.kernel.__name__,
        variant=variant.name + ", 32-bit offsets" * near,
        arch=arch,
        warps=warps,
        stages=variant.num_stages,
        registers=used["REG"],
        stack=used["STACK"],
        shared=shared,
        tensor=tensor,
        **counts,
        blocks=blocks,
        problems=found,
    )
