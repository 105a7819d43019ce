"""A draft chain in one call of the compiled library: no Python runs between its tokens."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from specker.cpu.communicator import Communicator, struct_of
from specker.cpu.layers import CachedRows, Stack, call_array, placed
from specker.cpu.library import ChainCall, Matrix, Rule, address, native, team


class Ends(Protocol):
    """The rule that ends a chain; see StopRule in runtime/control/policy.py."""

    @property
    def token(self) -> float: ...
    @property
    def joint(self) -> tuple[float, ...]: ...
    @property
    def scales(self) -> tuple[float, ...]: ...


class Committed(NamedTuple):
    """Tokens that the cache lacks, which a draft begins with, each sequence's root last; of a stack that reads pairs,
    those of the pairs that wait."""

    tokens: Tensor | None  # [T] int64; None: no pair waits, and `output` holds the outputs of the last ones
    features: Tensor | None = None  # [T, E] float32, of pairs
    output: Tensor | None = None  # [n, E] float32, contiguous: gets the outputs of each sequence's last pair
    raw: bool = False  # the features lack the target's final norm (`PairWeights.final_norm`)


class Chains(NamedTuple):
    """A draft chain of each of n sequences."""

    columns: Sequence[int]  # the cache's column of each sequence's first draft token
    last_position: int
    steps: int  # tokens, at most
    sampling: Sequence[tuple[float, int]]
    """Temperature and seed of each sequence; the draft ranks its candidates under the noise of the target's draws."""
    rules: Sequence[Ends | None] | None
    """One per chain, None if it does not count. All chains end when a token is not worth its price on average, by the
    rules' ratios of its probabilities to the least ones. Without rules they end after `steps` tokens."""


class Translated(NamedTuple):
    """For a draft model with another tokenizer than the target's."""

    ids: Tensor  # [ids of the target] int64, the draft model's id of each
    ahead: Sequence[int]  # by sequence: how many more tokens the target's text has; maybe negative


@dataclass(frozen=True)
class Vocabulary:
    """A drafter's embedding and LM head."""

    embed: Any  # [V, E], a matrix that `Matrix.of` accepts
    scale: float  # factor of its rows
    head: Any  # [K, E]
    ids: Tensor | None  # [K] int64, token ids of the head's rows
    norm: Tensor | None  # [E], weight of the final norm; None: the layers' outputs are normed
    activations: str
    cap: float = 0.0  # soft cap of the logits
    ranks: Communicator | None = None  # that hold the head's other rows


def draft_chain(
    stack: Stack,
    vocabulary: Vocabulary,
    rows: CachedRows,
    committed: Committed,
    groups: tuple[Sequence[int], Sequence[int]],
    chains: Chains,
    translated: Translated | None = None,
) -> tuple[Any, Any]:
    """Draft chains of n sequences. rows: the places of the committed tokens or, without such, of the first draft
    tokens' pairs; the records of later rows follow their table. groups: the groups of layers (`Stack.run`) for
    committed tokens, and for draft tokens. Returns numpy ids [done, n] int64 and their probabilities among the
    candidates [done, n] float32, 0 where logits are NaN."""
    n, steps, (tokens, features, output, raw) = len(chains.columns), chains.steps, committed
    assert (output is None) == (stack.pair_weights is None) and (features is None) == (tokens is None or output is None)
    given = [None if x is None else x.contiguous() for x in (tokens, features)]
    first, more = placed(rows)
    starts = [call_array(tuple(of_layers)) for of_layers in groups]
    at = np.array(chains.columns, np.int64)
    drafted: Any = np.empty((steps, n), np.int64)
    probability: Any = np.empty((steps, n), np.float32)
    temperature, seed = zip(*chains.sampling, strict=True)
    draws = call_array(temperature, "float64"), call_array(seed, "uint64")
    shift = np.array([0] * n if translated is None else translated.ahead, np.int64)
    held: list[Any] = []
    ends = None
    if chains.rules is not None:
        ends = (Rule * n)()
        for struct, rule in zip(ends, chains.rules, strict=True):
            if rule is None:
                continue
            joint, scales = np.array(rule.joint, np.float32), np.array(rule.scales, np.float32)
            held += [joint, scales]
            struct.joint, struct.scales = joint.ctypes.data, scales.ctypes.data
            struct.joint_count, struct.scale_count = len(joint), len(scales)
            struct.token = rule.token
    embed, head = (Matrix.of(w, vocabulary.activations) for w in (vocabulary.embed, vocabulary.head))
    call = ChainCall(
        ctypes.pointer(stack.struct),
        ctypes.pointer(embed),
        ctypes.pointer(head),
        struct_of(vocabulary.ranks),
        vocabulary.scale,
        vocabulary.cap,
        address(vocabulary.norm),
        address(vocabulary.ids),
        None if translated is None else translated.ids.data_ptr(),
        ctypes.pointer(first),
        *map(address, (*given, output)),
        *(array.address for array in starts),
        *map(len, groups),
        raw,
        at.ctypes.data,
        shift.ctypes.data,
        chains.last_position,
        steps,
        *(array.address for array in draws),
        None if ends is None else ctypes.addressof(ends),
        drafted.ctypes.data,
        probability.ctypes.data,
        0,
    )
    team().call(native().draft_chain, call)
    stack.check_ranks()
    del more, held, given
    return drafted[: call.done], probability[: call.done]
