"""The CPU backend: decoder layers, products and noise in C, compiled for this processor (csrc/).

A decoding step reads every weight once, so memory bandwidth should limit its speed. PyTorch spends half of the step
elsewhere: a layer is a dozen operators, and each fetches its code and wakes its threads again. Here a team of threads
runs through all layers in one call and meets at its own barriers. A verify pass over several rows also reads the
weights once, and with 8-bit activations the products of quantised weights are cheap enough to hide behind the memory
reads.

The package computes the same functions as the ops in kernels/, which do not depend on it. It registers itself with
them when it is imported.
"""

from specker.cpu import layers
from specker.cpu.chain import Chains, Committed, Translated, Vocabulary, draft_chain
from specker.cpu.layers import (
    BLOCK,
    CachedRows,
    PairWeights,
    Records,
    Stack,
    fits,
    gumbel,
    product,
    restored,
    sample,
    serves,
    takes,
)
from specker.cpu.library import (
    ACTIVATIONS,
    available,
    converts_halves,
    on_compile,
    one_torch_thread,
    problem,
    team,
)
from specker.cpu.packed import Packed
from specker.kernels.cpu import use

use(layers)  # the ops call these functions

__all__ = [
    "ACTIVATIONS",
    "BLOCK",
    "CachedRows",
    "Chains",
    "Committed",
    "Packed",
    "PairWeights",
    "Records",
    "Stack",
    "Translated",
    "Vocabulary",
    "available",
    "converts_halves",
    "draft_chain",
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
