"""Assistants that read the target's K/V (Gemma 4; transformers, models/gemma4_assistant and the generator
`SinglePositionMultiTokenCandidateGenerator`).

An assistant has no K/V. Of a text of L tokens, whose root is column L - 1, its first step reads the root x and the
target's row f of column L - 2 after the final norm, which is the row that predicted x:

    h = pre([embed(x) | f])                      the target's embedding, scaled as the target scales it
    h = layers(h)                                a layer projects q alone, at position L - 1
    y = norm(h),  logits = lm_head(y),  f' = post(y)

The next step reads the drafted token and f'. All steps of a draft attend from position L - 1 to the same columns,
0 .. L - 2, in the K/V of the target's last layer of the same kind, full or with a sliding window, that has K/V of its
own. With a window of w, a row sees the last w + 1 of these columns: as transformers masks them, not as many as a row of
the target sees.

transformers shows an assistant K/V of refused drafts, too: after a round that refused some, its column L - 1 is that of
the first refused one, and a window may hold all of them. Here only columns of the text count.
"""

from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels.quant import Matrix
from specker.kernels.residual_merge import add_norm
from specker.kernels.row_linear import row_linear
from specker.kernels.tiles import MAX_ROWS
from specker.model.cache import KVCache, Lengths, Rows, sequence_bounds
from specker.model.decoder import Final, GroupRows, Model, Output, in_blocks, over_pages, packed_linear, run_layers
from specker.model.weights import Parameters


@dataclass(frozen=True)
class AssistantSpec:
    """What an assistant computes apart from its layers."""

    sources: tuple[int, ...]  # for each of its layers, the target's layer whose K/V it reads
    depth: int  # of the target's rows that it reads
    width: int  # of these rows
    chosen: int = 0  # clusters of ids whose rows of the LM head count in a step; 0: there are no clusters


class AssistantWeights(NamedTuple):
    """The tensors that a decoder does not have. E: the assistant's width, Ht: the target's."""

    pre: Matrix  # [E, 2 Ht], the embedding's columns first
    post: Matrix  # [Ht, E]
    centroids: Tensor | None = None  # [C, E], of the clusters
    order: Tensor | None = None  # [C, V / C] int64, each cluster's ids


class Assistant:
    """An assistant ready to run."""

    def __init__(self, parameters: Parameters, spec: AssistantSpec, weights: AssistantWeights):
        on_cpu = parameters.weights.norm.is_cpu
        linear = packed_linear(parameters.activations) if on_cpu else row_linear
        self.model, self.spec, self.weights = Model(parameters, linear), spec, weights

    def rows(self, cache: KVCache, lengths: Lengths, count: int = 1) -> Rows:
        """Place `count` rows for each text at its root's position. They see the columns before the root in `cache`, the
        target's. Each text has at least two tokens."""
        n = len(lengths)
        last = cache.place(lengths, 2, 0, 1)  # the column before the root, which is not in the cache
        rows = last._replace(positions=last.positions + 1)
        if count == 1:
            return rows
        return rows._replace(
            positions=rows.positions.repeat_interleave(count),
            ancestors=rows.ancestors.repeat_interleave(count, 0),
            cu_rows=sequence_bounds(count, cache.device, n),
            bounds=None,
        )

    def forward(self, cache: KVCache, rows: Rows, embedded: Tensor, features: Tensor) -> Final:
        """Run a step: the target's embeddings of tokens [T, Ht], and features [T, Ht], which are the target's rows
        after its final norm or what `feature` made of the last step. `cache`: the target's, which it only reads.
        Returns the rows for the LM head [T, E]."""
        model = self.model
        layers = [cache.layers[n] for n in self.spec.sources]
        hidden = self._linear(torch.cat((embedded, features), 1), self.weights.pre)

        def run(rows: Rows, hidden: Tensor) -> Output:
            batch = GroupRows(rows.positions, rows.slots, over_pages(model, rows), model.summed, rows.ring_rows)
            return run_layers(model, zip(model.layers, layers, repeat(batch), strict=False), hidden)

        final = in_blocks(model, rows, hidden, run).final
        if final.normed:
            return final
        return Final(add_norm(final.rows, None, model.norm, model.config.rms_norm_eps)[1], True)

    def feature(self, rows: Tensor) -> Tensor:
        """The rows for the LM head [T, E] of a step -> the features of the next one [T, Ht]."""
        return self._linear(rows, self.weights.post)

    def _linear(self, x: Tensor, weight: Matrix) -> Tensor:
        """Of any number of rows; the kernels take MAX_ROWS."""
        parts = [self.model.linear(part, weight) for part in x.split(MAX_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
