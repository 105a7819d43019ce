"""A variant of specker's kernels as what ptxsim compiles, with the constants and options of its launches."""

from ptxsim import Build

from specker.kernels.deferred import Deferred
from specker.kernels.variant import Variant


def build(variant: Variant, arch: int, below_2_gib: bool = False) -> Build:
    kernel = variant.kernel
    return Build(
        variant.name,
        kernel.real() if isinstance(kernel, Deferred) else kernel,
        variant.arguments,
        variant.constants(arch),
        arch,
        variant.compile_options(arch),
        below_2_gib,
        variant.dot,
        variant.left,
        variant.wide,
    )
