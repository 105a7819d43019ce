"""Draft heads that read the target's hidden states (EAGLE).

A head predicts from pairs: the pair of column t is the feature of the target's column t with the token x of column
t + 1, and predicts the token of column t + 2. It stands at RoPE position t, so a head's cache has one column less than
the text. A true column's feature comes from the target. A drafted token's feature is the head's own output of the
column before; its K/V is dropped after the round, and the accepted tokens run again with true features.

EAGLE-3 (arXiv 2503.01840), with the taps g of a column side by side, low to high:

    h = fc(g)                                              (for a drafted token: the head's output)
    r = h + o(attention([norm_in(embed(x)) | hidden_norm(h)]))
    r = r + mlp(norm_post(r))
    logits = lm_head(norm(r)), output r

EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858), with the target's rows f after its final norm:

    r = fc([embed(x) | f]) + bias;  r = r + o(attention(r));  r = r + mlp(norm_post(r))
    logits = lm_head(r), output r, with the target's lm_head

An MTP head of a target's own checkpoint (DeepSeek-V3, arXiv 2412.19437), applied again and again:

    r = fc([norm(embed(x)) | norm(f)]);  an ordinary layer;  logits = lm_head(norm(r)), output r or norm(r)

P-EAGLE (arXiv 2602.01469) is EAGLE-3, but a drafted token gets a mask token's embedding instead of its own, and the
feature fc(m) with a trained m instead of the head's output.
"""

from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.kernels.quant import Matrix
from specker.kernels.residual import add_norm
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final, GroupRows, Model, Output, over_pages, run_layers
from specker.model.weights import Parameters


@dataclass(frozen=True)
class HeadSpec:
    """What a head computes apart from its layers."""

    form: str  # "eagle3", "eagle1" or "mtp"
    taps: tuple[int, ...]  # depths of the target whose rows it reads, low to high
    width: int  # of the target's rows
    rows: int  # of its LM head
    residual: bool = True  # the first layer's residual is h itself; False: hidden_norm(h) (`norm_before_residual`)
    output: bool = False  # it feeds back norm(r) instead of r (`norm_output` of EAGLE-3.1)
    zeroed: bool = False  # at position 0, the embedding is 0 (MTP)
    mask: int | None = None  # the mask token of a head that drafts in one pass (P-EAGLE)
    other: tuple[int, ...] = ()  # the taps by the other reading of an ambiguous config.json; empty if it is clear


class HeadWeights(NamedTuple):
    """A head's tensors that a decoder does not have. H: its width, A: its number of taps, Ht: the target's width."""

    fc: Matrix  # [H, A * Ht]; EAGLE-1 and MTP [H, H + Ht]: the embedding's columns first
    fc_bias: Tensor | None = None  # [H]
    embed_norm: Tensor | None = None  # [H], MTP's
    hidden_norm: Tensor | None = None  # [H]
    input_norm: Tensor | None = None  # [A * Ht], over all taps side by side
    fc_norm: Tensor | None = None  # [A, Ht], over each tap
    mask: Tensor | None = None  # [A * Ht], which stands for the target's rows in a mask's pair (P-EAGLE)
    ids: Tensor | None = None  # [rows] int64, the target's id of each row of the LM head; None: row i is id i


class ReadingHead:
    """A head ready to run."""

    def __init__(self, parameters: Parameters, spec: HeadSpec, weights: HeadWeights, target: Model):
        self.model, self.spec, self.weights = Model(parameters), spec, weights
        self.final_norm = target.norm, target.config.rms_norm_eps  # of the target; EAGLE-1 and MTP read normed rows

    def features(self, taps: Tensor) -> Tensor:
        """The target's rows [A, T, Ht] after each depth of `spec.taps` -> features [T, H]."""
        w, eps = self.weights, self.model.config.rms_norm_eps
        if self.spec.form != "eagle3":
            norm, own = self.final_norm
            return add_norm(taps[0].contiguous(), None, norm, own)[1]
        if w.fc_norm is not None:
            taps = torch.stack([F.rms_norm(x, x.shape[-1:], n, eps) for x, n in zip(taps, w.fc_norm, strict=True)])
        rows = taps.transpose(0, 1).flatten(1)
        if w.input_norm is not None:
            rows = F.rms_norm(rows, rows.shape[-1:], w.input_norm, eps)
        return self.model.linear(rows.contiguous(), w.fc, w.fc_bias)

    def mask(self) -> tuple[Tensor, Tensor]:
        """The feature of a mask and the embedding of the mask token, [1, H] each (P-EAGLE)."""
        assert self.weights.mask is not None and self.spec.mask is not None
        token = torch.tensor([self.spec.mask], device=self.model.device)
        taps = self.weights.mask.view(len(self.spec.taps), 1, -1)
        return self.features(taps), self.model.embed_tokens(token)

    def forward(self, cache: KVCache, rows: Rows, features: Tensor, embedded: Tensor) -> tuple[Tensor, Final]:
        """Run pairs: features [T, H] and the embeddings of the tokens after them [T, H]. Writes the rows' K/V. Returns
        the output that a drafted token gets as its feature [T, H], and the rows for the LM head."""
        model, w, eps = self.model, self.weights, self.model.config.rms_norm_eps
        batch = GroupRows(rows.positions, rows.slots, over_pages(model, rows), model.summed)
        steps = zip(model.layers, cache.layers, repeat(batch), strict=False)
        if self.spec.form == "eagle1":
            stream = model.linear(torch.cat((embedded, features), -1), w.fc, w.fc_bias)
            out = run_layers(model, steps, stream)
            return out.hidden, Final(out.hidden, True)
        if self.spec.form == "mtp":
            return self._output(run_layers(model, steps, self._mtp_stream(rows, features, embedded)))
        embedding_norm = model.layers[0].attention.norm_in
        assert w.hidden_norm is not None and embedding_norm is not None
        normed = add_norm(features, None, w.hidden_norm, eps)[1]
        entered = torch.cat((add_norm(embedded, None, embedding_norm, eps)[1], normed), -1)
        return self._output(run_layers(model, steps, features if self.spec.residual else normed, entered=entered))

    def _mtp_stream(self, rows: Rows, features: Tensor, embedded: Tensor) -> Tensor:
        """The stream that enters an MTP head's layer [T, H]."""
        w, eps = self.weights, self.model.config.rms_norm_eps
        assert w.embed_norm is not None and w.hidden_norm is not None
        if self.spec.zeroed:
            embedded = torch.where((rows.positions == 0).unsqueeze(1), 0, embedded)
        pair = (embedded, w.embed_norm), (features, w.hidden_norm)
        return self.model.linear(torch.cat([add_norm(x, None, norm, eps)[1] for x, norm in pair], -1), w.fc)

    def _output(self, out: Output) -> tuple[Tensor, Final]:
        model, final = self.model, out.final
        if not self.spec.output:
            return out.hidden, final
        eps = model.config.rms_norm_eps
        own = final.rows if final.normed else add_norm(final.rows, None, model.norm, eps)[1]
        return own, Final(own, True)
