"""A draft chain in one call of the compiled library: no Python runs between its tokens."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from specker.cpu.layers import Placement, Records, Stack, numbers, placed
from specker.cpu.library import ChainCall, Matrix, Rule, native, team


class Ends(Protocol):
    """The rule that ends a chain; see StopRule in runtime/control/policy.py."""

    @property
    def token(self) -> float: ...
    @property
    def joint(self) -> tuple[float, ...]: ...
    @property
    def scales(self) -> tuple[float, ...]: ...


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


def draft_chain(
    stack: Stack,
    vocabulary: Vocabulary,
    *,
    tokens: Tensor | None,
    rows: Placement,
    groups: tuple[Sequence[int], Sequence[int]],
    columns: Sequence[int],
    last_position: int,
    steps: int,
    sampling: Sequence[tuple[float, int]],
    rules: Sequence[Ends | None] | None,
    records: Records | None = None,
    features: Tensor | None = None,
    output: Tensor | None = None,
    raw: bool = False,
    own: Tensor | None = None,
    further: Sequence[int] = (),
) -> tuple[Any, Any]:
    """Draft up to `steps` tokens of n sequences.

    tokens: [T] int64, the committed ones that the cache lacks, each sequence's root last. For a stack that reads pairs:
    those of the pairs that wait, with `features` [T, E] float32, which with `raw` lack the target's final norm
    (`Pairs.final_norm`), and `output` [n, E] float32, contiguous, gets the outputs of each sequence's last pair; None
    if no pair waits, `output` then holds them. rows: the places of these tokens or, without tokens, of the first draft
    tokens' pairs, as arguments of `placed`. groups: the groups of layers (`Stack.run`) for committed tokens, and for
    draft tokens. columns: the cache's column of each sequence's first draft token. sampling: temperature and seed of
    each sequence; the draft ranks its candidates under the noise of the target's draws. rules: one per chain, None if
    it has no vote; drafting ends for all chains when most rules say so. Without rules it ends after `steps` tokens.
    records: of layers with a recurrent state, for these rows; later rows follow their table. For a model with another
    tokenizer, own [ids] int64: its id of each id of the head, and `further`, by sequence: by how much the positions at
    which the target draws are greater than its own. Returns numpy ids [done, n] int64 and their probabilities among the
    candidates [done, n] float32, 0 where logits are NaN."""
    n = len(columns)
    assert (output is None) == (stack.pairs is None) and (features is None) == (tokens is None or output is None)
    given = [None if x is None else x.contiguous() for x in (tokens, features)]
    first, more = placed(*rows, records=records)
    groups_ = [numbers(tuple(each)) for each in groups]
    at = np.array(columns, np.int64)
    drafted: Any = np.empty((steps, n), np.int64)
    probability: Any = np.empty((steps, n), np.float32)
    temperature, seed = zip(*sampling, strict=True)
    draws = numbers(temperature, "float64"), numbers(seed, "uint64")
    shift = np.array(further or [0] * n, np.int64)
    held: list[Any] = []
    ends = None
    if rules is not None:
        ends = (Rule * n)()
        for struct, rule in zip(ends, rules, strict=True):
            if rule is None:
                continue
            joint, scales = np.array(rule.joint, np.float32), np.array(rule.scales, np.float32)
            held += [joint, scales]
            struct.joint, struct.scales = joint.ctypes.data, scales.ctypes.data
            struct.joint_count, struct.scale_count, struct.token = len(joint), len(scales), rule.token
    embed, head = (Matrix.of(w, vocabulary.activations) for w in (vocabulary.embed, vocabulary.head))
    call = ChainCall(
        ctypes.pointer(stack.struct),
        ctypes.pointer(embed),
        ctypes.pointer(head),
        vocabulary.scale,
        vocabulary.cap,
        None if vocabulary.norm is None else vocabulary.norm.data_ptr(),
        None if vocabulary.ids is None else vocabulary.ids.data_ptr(),
        None if own is None else own.data_ptr(),
        ctypes.pointer(first),
        *(None if x is None else x.data_ptr() for x in (*given, output)),
        *(each.address for each in groups_),
        *map(len, groups),
        raw,
        at.ctypes.data,
        shift.ctypes.data,
        last_position,
        steps,
        *(each.address for each in draws),
        None if ends is None else ctypes.addressof(ends),
        drafted.ctypes.data,
        probability.ctypes.data,
        0,
    )
    crew = team()
    crew.run(native().draft_chain, call, crew.size)
    del more, held, given
    return drafted[: call.done], probability[: call.done]
