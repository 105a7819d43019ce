"""The CPU's backend: decoder layers, products and noise, compiled from C for the processor at hand (csrc/).

A decoding step reads every weight once, so memory bandwidth limits it, if nothing else takes time. PyTorch spends half
of the step elsewhere: a layer is a dozen operators, and each fetches its code and wakes its threads again. Here a team
of threads runs through all layers in one call and meets at barriers of its own. A verify pass over several rows reads
the weights once too, and products of quantised weights with activations in eight bits are cheap enough that its
arithmetic hides behind the memory.

The same functions as the ops in kernels/; nothing there needs this package.
"""

from specker.cpu.chain import Candidates, draft
from specker.cpu.layers import BLOCK, Stack, fits, gumbel, product, restored, sample, serves, takes
from specker.cpu.library import ACTIVATIONS, available, on_compile, one_torch_thread, problem, team
from specker.cpu.packed import Packed

__all__ = [
    "ACTIVATIONS",
    "BLOCK",
    "Candidates",
    "Packed",
    "Stack",
    "available",
    "draft",
    "fits",
    "gumbel",
    "on_compile",
    "one_torch_thread",
    "problem",
    "product",
    "restored",
    "sample",
    "serves",
    "takes",
    "team",
]
