"""Draft heads that read the target's hidden states (EAGLE).

A head predicts from pairs: the pair of column t is the feature of the target's column t with the token x of column
t + 1, and predicts the token of column t + 2. It stands at RoPE position t, so a head's cache has one column less than
the text. A true column's feature comes from the target. A drafted token's feature is the head's own output of the
column before; its K/V is dropped after the round, and the accepted tokens run again with true features.

EAGLE-3 (arXiv 2503.01840), with the auxiliary hidden states g of a column side by side, low to high:

    h = fc(g)                                              (for a drafted token: the head's output)
    r = h + o(attention([norm_in(embed(x)) | hidden_norm(h)]))
    r = r + mlp(norm_post(r))
    logits = lm_head(norm(r)), output r

EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858), with the target's rows f after its final norm:

    r = fc([embed(x) | f]) + bias;  r = r + o(attention(r));  r = r + mlp(norm_post(r))
    logits = lm_head(r), output r, with the target's lm_head

An MTP head of a target's own checkpoint (DeepSeek-V3, arXiv 2412.19437), applied again and again, or in turn with
others; f before or after the target's final norm (checkpoints/drafts/mtp.py):

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

from specker.cpu import PairWeights
from specker.kernels.quant import Matrix
from specker.kernels.residual_merge import add_norm
from specker.kernels.round.start_pairs import start_pairs
from specker.model.cache import KVCache, Lengths, Rows
from specker.model.decoder import Final, GroupRows, Model, Output, compiled, fuses, over_pages, run_layers
from specker.model.rows import begin
from specker.model.weights import Parameters


@dataclass(frozen=True)
class HeadSpec:
    """What a head computes apart from its layers."""

    form: str  # "eagle3", "eagle1" or "mtp"
    aux_layers: tuple[int, ...]  # depths of the target whose rows it reads, low to high
    width: int  # of the target's rows
    rows: int  # of its LM head
    residual: bool = True  # the first layer's residual is h itself; False: hidden_norm(h) (`norm_before_residual`)
    output: bool = False  # it feeds back norm(r) instead of r (`norm_output` of EAGLE-3.1)
    before_norm: bool = False  # it reads the target's last rows before their final norm (MiMo)
    chained: bool = True  # a further MTP head reads the output of the head before; False: the target's rows (MiMo)
    zeroed: bool = False  # at position 0, the embedding is 0 (MTP)
    mask: int | None = None  # the mask token of a head that drafts in one pass (P-EAGLE)
    other: tuple[int, ...] = ()  # the depths by the other reading of an ambiguous config.json; empty if it is clear
    unsure: bool = False  # older heads of this layout mean by their `norm_output` the opposite of `output`


class HeadWeights(NamedTuple):
    """A head's tensors that a decoder does not have. H: its width, A: its number of auxiliary layers, Ht: the target's
    width."""

    fc: Matrix  # [H, A * Ht]; EAGLE-1 and MTP [H, H + Ht]: the embedding's columns first
    fc_bias: Tensor | None = None  # [H]
    embed_norm: Tensor | None = None  # [H], MTP's
    hidden_norm: Tensor | None = None  # [H]
    input_norm: Tensor | None = None  # [A * Ht], over all depths side by side
    fc_norm: Tensor | None = None  # [A, Ht], over each depth
    mask: Tensor | None = None  # [A * Ht], which stands for the target's rows in a mask's pair (P-EAGLE)
    ids: Tensor | None = None  # [rows] int64, the target's id of each row of the LM head; None: row i is id i


class PairInputs(NamedTuple):
    """What T pairs enter the layers with. Compiled layers take the features and the embeddings instead."""

    stream: Tensor  # [T, H], the residual stream that enters the first layer
    joined: Tensor  # [T, 2 * H], the embeddings and the features side by side, normed


class DraftHead:
    """A head ready to run."""

    def __init__(self, parameters: Parameters, spec: HeadSpec, weights: HeadWeights, final_norm: tuple[Tensor, float]):
        """`final_norm`: the target's, weight [Ht] and epsilon, for heads that read normed rows."""
        self.model, self.spec, self.weights = Model(parameters), spec, weights
        self.final_norm = final_norm
        self.raw = False  # whether compiled layers apply `final_norm` to what `kept` returns
        if self.model.stack is not None:
            self._compile()

    def _compile(self) -> None:
        """Let the compiled CPU layers read pairs, or do without these layers if they cannot."""
        model, w, spec = self.model, self.weights, self.spec
        embed_norm, hidden_norm = self.norms or (None, None)
        fused = spec.form == "eagle3"  # its first qkv reads the pair
        norm, eps = self.final_norm
        raw = not fused and not spec.before_norm
        pairs = PairWeights(
            embed_norm,
            hidden_norm,
            fc=None if fused else w.fc,
            fc_bias=None if fused else w.fc_bias,
            residual=spec.residual,
            norm_out=model.norm if spec.output else None,
            final_norm=norm if raw else None,
            final_eps=eps,
        )
        assert model.stack is not None
        if pairs.served:
            model.stack.read(pairs)
            self.raw = raw
        else:
            model.stack = None

    @property
    def normed(self) -> bool:
        """Whether `forward` has applied the final norm to the rows for the LM head."""
        return self.spec.form == "eagle1" or self.spec.output or fuses(self.model.norm)

    def features(self, hidden: Tensor) -> Tensor:
        """The target's rows [T, A, Ht] after each depth of `spec.aux_layers` -> features [T, H]."""
        w, eps = self.weights, self.model.config.rms_norm_eps
        if self.spec.form != "eagle3":
            rows, (norm, own) = hidden[:, 0].contiguous(), self.final_norm
            return rows if self.spec.before_norm else add_norm(rows, None, norm, own)[1]
        rows = hidden.flatten(1)
        if w.input_norm is not None:
            rows = F.rms_norm(rows, rows.shape[-1:], w.input_norm, eps)
        if w.fc_norm is not None:  # after input_norm, as in vLLM
            each = rows.view(hidden.shape)
            rows = (F.rms_norm(each, each.shape[-1:], None, eps) * w.fc_norm).flatten(1)
        return self.model.linear(rows, w.fc, w.fc_bias)

    def kept(self, hidden: Tensor) -> Tensor:
        """What waits for the tokens of the pairs of the target's rows [T, A, Ht]: their features or, with `raw`, what
        becomes the features by the target's final norm [T, H]."""
        return hidden[:, 0] if self.raw else self.features(hidden)

    @property
    def norms(self) -> tuple[Tensor, Tensor] | None:
        """Of a pair's embedding and of its feature, [H] each."""
        w = self.weights
        if self.spec.form == "eagle1":
            return None
        embed_norm = w.embed_norm if self.spec.form == "mtp" else self.model.layers[0].mixer.norm_in
        assert embed_norm is not None and w.hidden_norm is not None
        return embed_norm, w.hidden_norm

    def pairs(self, features: Tensor, embedded: Tensor, positions: Tensor) -> PairInputs:
        """Features [T, H] of the columns at `positions` [T] and the embeddings of the tokens after them [T, H]."""
        if self.spec.zeroed:
            embedded = torch.where((positions == 0).unsqueeze(1), 0, embedded)
        if self.model.stack is not None:
            return PairInputs(features, embedded)
        if (norms := self.norms) is None:
            return PairInputs(features, torch.cat((embedded, features), -1))
        eps = self.model.config.rms_norm_eps
        embedded, normed = (add_norm(x, None, w, eps)[1] for x, w in zip((embedded, features), norms, strict=True))
        return PairInputs(features if self.spec.residual else normed, torch.cat((embedded, normed), -1))

    def begin(
        self,
        cache: KVCache,
        lengths: Lengths,
        back: int,
        first: int,
        tokens: Tensor,
        features: Tensor,
        parents: Tensor | None = None,
        text: bool = False,
    ) -> tuple[Rows, PairInputs]:
        """Place pairs first, first + 1, .. of each sequence's window, as `KVCache.place` does. tokens [n, count] int64;
        with `text`, tokens [n, C] of which a pair takes the one at its own column, and lengths on the device. features
        [n * m, H]: those of the same pairs or, with `parents`, of the m pairs before, among which are the parents.
        Returns the rows and what `pairs` does. No pair may be at position 0, whose embedding `start_pairs` would not
        zero."""
        model = self.model
        n, count = len(lengths), len(features) // len(lengths) if text else tokens.shape[1]
        device = isinstance(lengths, Tensor) and model.stack is None
        if device and isinstance(model.embed, Tensor) and model.embed.dtype == features.dtype:
            window = cache.window(lengths, back, first, count, parents)  # type: ignore[arg-type]
            eps, normed = model.config.rms_norm_eps, not self.spec.residual
            stream, joined, positions, slots, kv_len, words = start_pairs(
                model.embed, tokens, text, features, self.norms, eps, normed, window
            )
            return cache.rows_of(window, positions, slots, kv_len, words), PairInputs(stream, joined)
        if text:
            assert isinstance(lengths, Tensor)
            each = torch.arange(count, dtype=torch.int64, device=cache.device)
            columns = (lengths - back + first).unsqueeze(1) + each
            tokens = tokens.gather(1, columns.clamp(0, tokens.shape[1] - 1))
        rows, embedded = begin(model, cache, lengths, back, first, tokens, parents)
        if parents is not None:
            m = len(features) // n
            row = (parents[:, first - 1 : first - 1 + count] - (first - m)).clamp(0, m - 1)
            features = features[(row + m * torch.arange(n, dtype=torch.int64, device=row.device).unsqueeze(1)).view(-1)]
        return rows, self.pairs(features, embedded, rows.positions)

    def mask(self) -> tuple[Tensor, Tensor]:
        """The feature of a mask and the embedding of the mask token, [1, H] each (P-EAGLE)."""
        assert self.weights.mask is not None and self.spec.mask is not None
        token = torch.tensor([self.spec.mask], dtype=torch.int64, device=self.model.device)
        hidden = self.weights.mask.view(1, len(self.spec.aux_layers), -1)
        return self.features(hidden), self.model.embed_tokens(token)

    def forward(self, cache: KVCache, rows: Rows, pairs: PairInputs, kept: bool = False) -> tuple[Tensor, Final]:
        """Run pairs, with `kept` of what `kept` returned. Writes the rows' K/V. Returns the output that a
        drafted token gets as its feature [T, H], and the rows for the LM head."""
        model, w, (stream, joined) = self.model, self.weights, pairs
        if model.stack is not None:
            raw, layers = kept and self.raw, range(len(model.layers) + 1)
            rows_of = compiled(model, cache, rows, joined, layers, features=stream, raw=raw)
            return rows_of.hidden, Final(rows_of.hidden, self.normed)
        batch = GroupRows(rows.positions, rows.slots, over_pages(model, rows), model.summed)
        steps = zip(model.layers, cache.layers, repeat(batch), strict=False)
        if self.spec.form == "eagle1":
            out = run_layers(model, steps, model.linear(joined, w.fc, w.fc_bias))
            return out.hidden, Final(out.hidden, True)
        if self.spec.form == "mtp":
            return self._output(run_layers(model, steps, model.linear(joined, w.fc)))
        return self._output(run_layers(model, steps, stream, first_attention_input=joined))

    def _output(self, out: Output) -> tuple[Tensor, Final]:
        model, final = self.model, out.final
        if not self.spec.output:
            return out.hidden, final
        eps = model.config.rms_norm_eps
        own = final.rows if final.normed else add_norm(final.rows, None, model.norm, eps)[1]
        return own, Final(own, True)
