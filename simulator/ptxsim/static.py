"""What a kernel compiles to, without a GPU: its resources, its instructions and what is wrong with them.

A `Build` is compiled to a cubin, or for AMD to a code object. Registers, stack and shared memory come from `cuobjdump
--dump-resource-usage`, the instruction mix from the PTX; for AMD both come from the assembly. The instructions of the
main loop are counted in the SASS. A kernel fails if

* it spills: its stack frame, or its scratch memory, is not empty;
* its shared memory exceeds the architecture's limit for a block;
* it should use a half-precision dot (`dot`) and has no matrix instruction;
* its products' left operand should come from registers (`left`) and a wgmma reads it from shared memory;
* ptxas waits after each wgmma, so that none overlaps with other instructions;
* in a loop on sm_90, an instruction writes a register from which a wgmma in flight may still read its left operand;
* it should read wide (`wide`) and less than `WIDE` of the loaded bytes are read 16 bytes at a time or asynchronously;
* on AMD, a program may count its arrival before the stores of all its waves have arrived;
* on sm_100, a block lets the next kernel start before it has allocated its tensor memory.

Occupancy is an estimate of blocks per SM by registers (allocated per warp in units of 256), by shared memory (the
system takes 1 KiB of each block), by warps and, on sm_100, by tensor memory (512 columns); per CU by registers (512 a
lane and SIMD, in units of 8), by LDS and by waves.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ptxsim import assembly

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
class Build:
    """One compilation of a kernel, and what is expected of it."""

    name: str
    kernel: Any  # a @triton.jit function: runtime arguments first, constexprs last
    arguments: tuple[str | None, ...]  # types of the runtime arguments: "*bf16", "i32"; None for a None argument
    constants: Mapping[str, Any]  # the constexprs
    arch: int  # 80, 90, 100: sm_80, ..; 942, 950: gfx942, gfx950
    options: Mapping[str, Any] = field(default_factory=dict)  # of the compiler: num_warps, num_stages, ..
    below_2_gib: bool = False  # each tensor of the launch; Triton addresses these by 32-bit offsets on AMD
    dot: bool = False  # a half-precision dot must become matrix instructions
    left: bool = False  # on sm_90 these must read their left operand from registers
    wide: bool = False  # the big operand must be read 16 bytes at a time, or asynchronously

    @property
    def target(self) -> GPUTarget:
        amd = self.arch in LDS
        return GPUTarget("hip", f"gfx{self.arch}", LANES_WAVE) if amd else GPUTarget("cuda", self.arch, 32)

    def source(self) -> ASTSource:
        """What Triton compiles: the same as a launch's, so both have the same key in Triton's cache. ValueError if
        launches would compile something else."""
        kernel, names = self.kernel, self.kernel.arg_names
        runtime = names[: len(self.arguments)]
        if set(names[len(runtime) :]) != set(self.constants):
            raise ValueError(
                f"{self.name}: {kernel.__name__} takes {names}; given {len(runtime)} arguments and constexprs "
                f"{sorted(self.constants)}"
            )
        signature, constexprs, attrs = {}, dict(self.constants), {}
        for i, (name, param, kind) in enumerate(zip(runtime, kernel.params, self.arguments, strict=False)):
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
                raise ValueError(f"{self.name}: {kernel.__name__} recompiles with {name}: name it in do_not_specialize")
            if self.below_2_gib and kind.startswith("*") and not param.do_not_specialize:
                attrs[(i,)] = [*attrs[(i,)], ["tt.pointer_range", 32]]
        signature |= dict.fromkeys(self.constants, "constexpr")
        attrs |= {(i,): [] for i in range(len(runtime), len(names))}
        return ASTSource(kernel, {name: signature[name] for name in names}, constexprs, attrs)

    def compile(self) -> Any:
        """Triton's compiled kernel."""
        return triton.compile(self.source(), target=self.target, options=dict(self.options))


@dataclass(frozen=True)
class StaticReport:
    """What a build compiles to."""

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
    loop: int  # instructions of the longest loop with a matrix instruction, for a warp; 0 on AMD
    problems: tuple[str, ...]

    @property
    def occupancy(self) -> float:
        return self.blocks * self.warps / (WAVES_CU if self.arch in LDS else WARPS_SM)

    @property
    def target(self) -> str:
        return f"gfx{self.arch}" if self.arch in LDS else f"sm_{self.arch}"

    def __str__(self) -> str:
        what = f"{self.registers} registers, {self.shared} shared, {self.occupancy:.0%} {self.matrix}"
        return f"{self.target:<6} {self.variant:32} {'; '.join(self.problems) or what}"


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and SHARED of the only kernel in a cubin."""
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
    if written := assembly.overwritten(sass):
        found += (f"writes to registers that a wgmma in flight may read: {'; '.join(written)}",)
    return found


def serialised(ptx: str, sass: str) -> bool:
    """Whether ptxas waits after each wgmma although the PTX does not."""
    products, waits = (len(re.findall(rf"\b{name}\b", sass)) for name in ("HGMMA", "WARPGROUP\\.DEPBAR"))
    return waits >= products > ptx.count("wgmma.wait_group")


def disassembly(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "--print-code", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def problems(build: Build, used: dict[str, int], shared: int, counts: dict[str, Any]) -> tuple[str, ...]:
    found, arch = [], build.arch
    if used["STACK"] or used["LOCAL"]:
        found.append(f"spills: a stack frame of {used['STACK']} bytes, {used['LOCAL']} local")
    most = 1024 * (LDS[arch] if arch in LDS else SHARED_SM[arch] - 1)
    if shared > most:
        found.append(f"{shared} bytes of shared memory, a block may have {most}")
    if build.dot and not counts["matrix"]:
        found.append("a dot, and no matrix instruction")
    if build.left and arch == 90 and ("wgmma.rs" not in counts["matrix"] or "wgmma " in counts["matrix"]):
        found.append("the left operand does not come from registers")
    if build.wide and counts["wide"] < WIDE:
        found.append(f"only {counts['wide']:.0%} of the loaded bytes come 16 at a time")
    return tuple(found)


def misordered(arch: int, warps: int, asm: dict[str, str]) -> tuple[str, ...]:
    """Instructions in an order that would make a result depend on timing. A single wave publishes only its own stores,
    for which its release waits."""
    found = []
    if arch in LDS and warps > 1 and (early := assembly.published_early(asm["amdgcn"])):
        found.append(f"{early} releases may publish before other waves' stores have arrived")
    if arch not in LDS and assembly.allocates_late(asm["ptx"]):
        found.append("lets the next kernel start before it has allocated its tensor memory")
    return tuple(found)


def static_report(build: Build) -> StaticReport:
    """Compile a kernel and check what comes out. ValueError as `Build.source`."""
    done, arch, tensor, loop = build.compile(), build.arch, 0, 0
    shared, warps = done.metadata.shared, done.metadata.num_warps
    if arch in LDS:
        used, counts = assembly.amd_resources(done.asm["amdgcn"]), assembly.amd_mix(done.asm["amdgcn"])
        blocks = blocks_per_cu(arch, warps, used["REG"], shared)
    else:
        used, counts = resources(done.asm["cubin"]), assembly.mix(done.asm["ptx"])
        tensor = assembly.tensor_columns(done.asm["ptx"])
        blocks = blocks_per_sm(arch, warps, used["REG"], shared, tensor)
    found = problems(build, used, shared, counts) + misordered(arch, warps, done.asm)
    if counts["matrix"] and arch not in LDS:
        sass = disassembly(done.asm["cubin"])
        loop = assembly.longest_loop(sass)
        if "wgmma" in counts["matrix"]:
            found += warpgroups(done.asm["ptx"], sass)
    return StaticReport(
        kernel=build.kernel.__name__,
        variant=build.name + ", 32-bit offsets" * build.below_2_gib,
        arch=arch,
        warps=warps,
        stages=done.metadata.num_stages,
        registers=used["REG"],
        stack=used["STACK"],
        shared=shared,
        tensor=tensor,
        **counts,
        blocks=blocks,
        loop=loop,
        problems=found,
    )


def side_by_side(kernels: list[StaticReport]) -> list[str]:
    """What one block of each kernel, all for one architecture, needs more of than an SM has."""
    needs = (
        ("bytes of shared memory", sum(k.shared + 1024 for k in kernels), SHARED_SM[kernels[0].arch] * 1024),
        ("registers", sum(registers_of_block(k.warps, k.registers) for k in kernels), REGISTERS_SM),
        ("columns of tensor memory", sum(k.tensor for k in kernels), TENSOR_SM),
    )
    return [f"{need} {what}, an SM has {has}" for what, need, has in needs if need > has]
