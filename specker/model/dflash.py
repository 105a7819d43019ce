"""Drafters that guess a block in one pass and read the target's hidden states: DFlash (arXiv 2602.06036), DFlash2,
DSpark, Domino (arXiv 2605.29707), DSpine and LiLiCorr (arXiv 2608.20530).

A column of the drafter's cache belongs to a committed token. Its K and V come from the target's rows of that token at
several depths, side by side in g, without a pass through the drafter's layers:

    c = hidden_norm(fc(g));  k = rope(k_norm(k_proj(c))), v = v_proj(c) in every layer

A block is the root and masks. Its rows run through the layers, which are Qwen3's, and see all columns and the whole
block; a causal layer's rows see the block up to themselves. The block's own K and V are dropped after the round.

Row i of a DFlash block predicts its own position, so the root's row predicts nothing. Row i of a DSpark block predicts
the position after it. DSpark adds to the logits of a draft token a bias that depends on the token x before it, and
estimates how likely the target is to accept the token:

    logits = lm_head(h) + w2(b),  p = sigmoid(proj([h | e])),  h = norm(row), e = w1[x]

    vanilla  b = e
    gated    b = sigmoid(W [h | e]) e
    rnn      b = tanh(o),  s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  g, c, o = W [s | e | h],  s = 0 at the root

W has a bias (deepseek-ai/DeepSpec, deepspec/modeling/dspark/markov_head.py). Domino's bias depends on all tokens since
the root, by a GRU over their embeddings, and the first `plain` tokens get none (sgl-project/SpecForge,
specforge/modeling/draft/domino.py):

    gru      s <- GRU(embed(x), s),  b = silu(W [h | s])

DFlash2 (z-lab/dflash, dflash/model.py) wraps attention and the feed-forward of each layer in two convolutions over the
block, whose kernels of a few taps come from the sublayer's normed input u. C channels share what is added to a kernel:

    y_i = sum_t (base[t] + d_i[t]) x_(i - t),  d = W u;  x = u before the sublayer, and its output after it

Its selector then chooses each token among the best candidates c of its row, by the token x before it:

    score(c) = logit(c) + < A[x] * P h, B[c] >

DSpine (dspine.py) and LiLiCorr (lilicorr.py) score the candidates anew, by the candidate before.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from specker.cpu import restored
from specker.cpu.packed import Packed
from specker.kernels import quant
from specker.kernels.ancestors import chain_words, pack_bits
from specker.kernels.quant import Matrix
from specker.kernels.residual_merge import add_norm
from specker.kernels.variant import sum_dtype
from specker.model.cache import KVCache, Rows
from specker.model.decoder import (
    Final,
    GroupRows,
    GroupStep,
    Model,
    Output,
    attended,
    forward,
    fuses,
    gate_times_up,
    in_blocks,
    over_pages,
    run_layers,
)
from specker.model.dspine import Injection, inject
from specker.model.kv_formats import calibrated
from specker.model.lilicorr import Corrector
from specker.model.weights import Parameters


@dataclass(frozen=True)
class BlockSpec:
    """What a drafter of blocks computes apart from its layers."""

    aux_layers: tuple[int, ...]  # depths of the target whose rows it reads, low to high
    width: int  # of the target's rows
    rows: int  # of its LM head
    size: int  # rows of the longest block, the root included
    following: bool  # a row predicts the position after its own (DSpark); False: its own position
    causal: tuple[bool, ...]  # for each layer, whether a row of the block sees only the rows up to itself
    candidates: int = 0  # of a row, among which a head chooses (DFlash2, DSpine, LiLiCorr); 0: no head does

    @property
    def most(self) -> int:
        """The most draft tokens of a block."""
        return self.size if self.following else self.size - 1


class Markov(NamedTuple):
    """A head of rank r that adds a bias to the logits. Its kinds and their equations are at the top."""

    kind: str  # vanilla, gated, rnn or gru
    w1: Tensor | None  # [V, r] by the target's ids; None: it reads the embedding (gru)
    w2: Tensor  # [rows, r]
    joint: Tensor | None = None  # W: gated [r, H + r], rnn [3 r, 2 r + H], gru [r, H + S]
    joint_bias: Tensor | None = None  # [r] or [3 r]
    entering: Tensor | None = None  # [3 S, H], the GRU's matrix of the embedding
    recurrent: Tensor | None = None  # [3 S, S], the GRU's matrix of the state
    plain: int = 0  # the first tokens of a draft without a bias (gru)


class Convolution(NamedTuple):
    """The convolutions before and after a sublayer (DFlash2)."""

    base: Tensor  # [2, taps, H]
    weight: Tensor  # [2 * taps * H / C, H]


class Selector(NamedTuple):
    """What chooses among candidates (DFlash2), of rank r."""

    before: Tensor  # A [V, r], by the target's ids
    after: Tensor  # B [V, r]
    project: Tensor  # P [r, H]


class BlockWeights(NamedTuple):
    """The tensors that a decoder does not have. H: the drafter's width, A: its number of auxiliary layers, Ht: the
    target's width, r: the Markov head's rank."""

    fc: Matrix  # [H, A * Ht]
    hidden_norm: Tensor  # [H]
    mask: Tensor | None  # [H], the embedding of a mask; None: that of the id `mask_token_id`
    ids: Tensor | None  # [rows] int64, the target's id of each row of the LM head; None: row i is id i
    markov: Markov | None
    confidence: tuple[Tensor, Tensor] | None  # proj [1, H + r] and its bias [1]; [1, H] if it does not read w1
    convolutions: tuple[tuple[Convolution, Convolution], ...] = ()  # of each layer's attention and feed-forward
    selector: Selector | None = None
    injection: Injection | None = None
    corrector: Corrector | None = None


class BlockRows(NamedTuple):
    """Rows of blocks, after all layers."""

    final: Final  # for the LM head [T, H]
    last: Tensor | None = None  # [T, H], before the last layer's injection (DSpine)


class BlockModel:
    """A drafter of blocks ready to run."""

    def __init__(self, parameters: Parameters, spec: BlockSpec, weights: BlockWeights):
        self.model, self.spec, self.weights = Model(parameters), spec, weights
        model, config = self.model, self.model.config
        layers = [layer.mixer for layer in model.layers]
        first = config.num_heads * config.head_dim  # the row of qkv at which the keys begin
        # One product makes K and V of a column in all layers, so these rows are kept together, a second time.
        self._kv = _joined([w.qkv[first:] for w in layers])  # [L * 2 * Hkv * D, H]
        biases = [w.qkv_bias[first:] for w in layers if w.qkv_bias is not None]
        self._kv_bias = torch.cat(biases) if biases else None
        self._k_norm = torch.cat([w.k_norm for w in layers if w.k_norm is not None])  # [L, D]
        if weights.convolutions:  # which the compiled CPU layers lack
            model.stack = None
        self._mask = weights.mask
        if self._mask is None:
            assert config.mask_token_id is not None
            mask = torch.tensor([config.mask_token_id], dtype=torch.int64, device=model.device)
            self._mask = model.embed_tokens(mask)[0]

    def keep(self, cache: KVCache, positions: Tensor, slots: Tensor, hidden: Tensor) -> Tensor:
        """Write K and V of T committed tokens at `positions` [T] int64 to the rows `slots` [T] int64 of every layer.
        `hidden` [T, A, Ht]: the target's rows of these tokens. Returns c, what the drafter reads of them [T, H]."""
        model, w, L, T = self.model, self.weights, len(self.model.layers), len(positions)
        eps = model.config.rms_norm_eps
        c = add_norm(model.linear(hidden.flatten(1).contiguous(), w.fc), None, w.hidden_norm, eps)[1]
        kv = model.linear(c, self._kv, self._kv_bias)
        kv = kv.view(T, L, -1).transpose(0, 1).reshape(L * T, -1)
        layer = torch.arange(L, dtype=torch.int64, device=slots.device).unsqueeze(1)
        layer *= cache.k.shape[1] * cache.page_size
        k, v = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
        slots = (slots + layer).view(-1)
        calibrated(kv, positions.repeat(L), slots, model.ropes[0], k, v, self._k_norm, self._k_norm, eps)
        return c

    def block(self, cache: KVCache, rows: Rows, roots: Tensor, count: int) -> BlockRows:
        """Run blocks of `count` rows, roots [n] int64 and masks, one for each sequence of `rows`."""
        model, n, causal = self.model, len(roots), self.spec.causal
        assert self._mask is not None
        masks = self._mask.expand(n, count - 1, -1)
        embedded = torch.cat((model.embed_tokens(roots).unsqueeze(1), masks), 1).flatten(0, 1)
        if (injection := self.weights.injection) is not None:  # its layers are causal
            for layer in range(len(model.layers)):
                last = forward(model, cache, rows, embedded, slice(layer, layer + 1)).hidden
                embedded = inject(model, injection, layer, last, roots)
            return BlockRows(Final(embedded), last)
        usual = not self.weights.convolutions
        if all(causal) and usual:
            return BlockRows(forward(model, cache, rows, embedded).final)
        chain, full = (words(count, str(model.device)) for words in (_chain, _full))
        rows = rows._replace(ancestors=full.repeat(n, 1))
        if not any(causal) and usual:
            return BlockRows(forward(model, cache, rows, embedded).final)

        def run(rows: Rows, hidden: Tensor) -> Output:
            each = [rows, rows._replace(ancestors=chain.repeat(len(hidden) // count, 1))]
            batches = [GroupRows(x.positions, x.slots, over_pages(model, x), model.summed) for x in each]
            steps = zip(model.layers, cache.layers, [batches[own] for own in causal], strict=False)
            return run_layers(model, steps, hidden) if usual else self._convolved_layers(steps, hidden, count)

        return BlockRows(in_blocks(model, rows, embedded, run).final)

    def _convolved_layers(self, steps: Iterable[GroupStep], hidden: Tensor, count: int) -> Output:
        """`run_layers` with DFlash2's convolutions over blocks of `count` rows."""
        model, eps = self.model, self._eps
        few, activation = fuses(hidden), model.config.layer.activation
        for (w, (mlp,), rope, window), kv, batch, (outer, inner) in (
            (*step, each) for step, each in zip(steps, self.weights.convolutions, strict=True)
        ):
            assert w.norm_in is not None and mlp.norm_post is not None
            x, kernel = self._before(outer, add_norm(hidden, None, w.norm_in, eps)[1], count)
            mixed = attended(model, model.linear, x, w, rope, kv, batch, window, few)
            hidden = hidden + convolved(model.linear(mixed, w.o, w.o_bias), outer.base[1], kernel, count)
            x, kernel = self._before(inner, add_norm(hidden, None, mlp.norm_post, eps)[1], count)
            up = gate_times_up(partial(model.linear, x, mlp.gate_up, mlp.gate_up_bias), activation)
            hidden = hidden + convolved(model.linear(up, mlp.down, mlp.down_bias), inner.base[1], kernel, count)
        return Output(hidden, {})

    def _before(self, w: Convolution, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """A sublayer's input, made of rows [T, H], and what is added to the kernel for its output [T, taps, H / C]."""
        kernels = self.model.linear(x, w.weight).view(len(x), 2, w.base.shape[1], -1)
        return convolved(x, w.base[0], kernels[:, 0], count), kernels[:, 1]

    def predicting(self, rows: BlockRows, n: int, drafts: int) -> BlockRows:
        """The rows of n blocks that predict the first `drafts` tokens after the root, [n * drafts, H]."""
        first = 0 if self.spec.following else 1

        def of(x: Tensor) -> Tensor:
            return x.view(n, -1, x.shape[-1])[:, first : first + drafts].flatten(0, 1)

        return BlockRows(Final(of(rows.final.rows), rows.final.normed), None if rows.last is None else of(rows.last))

    def normed(self, final: Final) -> Tensor:
        """The final norm of rows [T, H]."""
        return final.rows if final.normed else add_norm(final.rows, None, self.model.norm, self._eps)[1]

    def head_rows(self, ids: Tensor) -> Tensor:
        """The LM head's rows of `ids` [..] int64, [.., H]."""
        head, dtype = self.model.head, self.model.dtype
        if isinstance(head, Tensor):
            return head[ids]
        own = ids.flatten()
        rows = restored(head, dtype, own) if isinstance(head, Packed) else head[own].dequantised(dtype)
        return rows.view(*ids.shape, -1)

    @property
    def _eps(self) -> float:
        return self.model.config.rms_norm_eps

    def latent(self, tokens: Tensor) -> Tensor:
        """The Markov head's row e of each token [n] int64 -> [n, r]; with a GRU its embedding [n, H]."""
        assert self.weights.markov is not None
        w1 = self.weights.markov.w1
        return self.model.embed_tokens(tokens) if w1 is None else w1[tokens].to(self.model.dtype)

    def bias(
        self, latent: Tensor, normed: Tensor, state: Tensor | None, ids: Tensor | None, step: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the Markov head adds to the logits of draft token `step` [n, rows] float32, None for nothing, after
        tokens with rows `latent` [n, r], and its next state [n, r or S]. `normed` [n, H]: the block's rows that
        predict; `state`: None at the root and for heads that have none; `ids` [K] int64: only of these rows."""
        assert self.weights.markov is not None
        found, state = self.before(latent, normed, state, step)
        if found is None:
            return None, state
        w2 = self.weights.markov.w2
        return self.model.linear(found, w2 if ids is None else w2[ids], epilogue="float32"), state

    def before(
        self, latent: Tensor, normed: Tensor, state: Tensor | None, step: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """b of the Markov head's equations [n, r], with which w2 makes the bias, None for nothing; and the next state.
        The arguments are those of `bias`."""
        head = self.weights.markov
        assert head is not None
        if head.kind == "gru":
            assert head.entering is not None and head.recurrent is not None
            state = latent.new_zeros(len(latent), head.recurrent.shape[1]) if state is None else state
            state = torch.gru_cell(latent, state, head.entering, head.recurrent)
            if step < head.plain:
                return None, state
            return torch.nn.functional.silu(self._joint(head, normed, state)), state
        if head.kind == "gated":
            return torch.sigmoid(self._joint(head, normed, latent)) * latent, None
        if head.kind == "rnn":
            state = torch.zeros_like(latent) if state is None else state
            gate, candidate, out = self._joint(head, state, latent, normed).chunk(3, -1)
            gate = torch.sigmoid(gate)
            return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)
        return latent, None

    def _joint(self, head: Markov, *parts: Tensor) -> Tensor:
        """W of the parts side by side."""
        return self.model.linear(torch.cat(parts, -1), head.joint, head.joint_bias)

    def scores(self, before: Tensor, ids: Tensor, projected: Tensor) -> Tensor:
        """What the selector adds to the logits of the candidates `ids` [n, K] int64 after tokens `before` [n] int64,
        [n, K]. `projected` [n, r]: P h of the rows that predict."""
        assert self.weights.selector is not None
        wide, (before_rows, after_rows, _) = sum_dtype(projected.dtype), self.weights.selector
        asked = before_rows[before].to(wide) * projected.to(wide)
        return (after_rows[ids].to(wide) * asked.unsqueeze(1)).sum(-1)

    def confidence(self, normed: Tensor, latent: Tensor | None) -> Tensor:
        """How likely the target is to accept the tokens that rows [n, H] predict, [n] float32. `latent` [n, r]: of the
        tokens before them."""
        assert self.weights.confidence is not None
        weight, bias = self.weights.confidence
        x = normed if latent is None or weight.shape[1] == normed.shape[1] else torch.cat((normed, latent), -1)
        return torch.sigmoid(x.float() @ weight[0].float() + bias.float())


def convolved(x: Tensor, base: Tensor, added: Tensor, count: int) -> Tensor:
    """Convolve rows [T, H] of blocks of `count` rows with kernels base [taps, H] + added [T, taps, G], of which H / G
    channels share one. Before a block there are zeros."""
    taps, groups = added.shape[1:]
    rows = x.view(-1, count, groups, x.shape[1] // groups)
    kernel = base.view(taps, groups, -1) + added.reshape(-1, count, taps, groups, 1)
    out = kernel[:, :, 0] * rows
    for tap in range(1, min(taps, count)):
        out[:, tap:] += kernel[:, tap:, tap] * rows[:, :-tap]
    return out.view_as(x)


def _joined(parts: list[Matrix]) -> Matrix:
    """Concatenate matrices along their rows."""
    if all(isinstance(x, Tensor) for x in parts):
        return torch.cat(parts)  # type: ignore[arg-type]
    return quant.joined(parts)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _full(count: int, device: str) -> Tensor:
    """Ancestor words [count, W] of rows that all see each other."""
    return pack_bits([(1 << count) - 1] * count, count).to(device)


@lru_cache(maxsize=64)
def _chain(count: int, device: str) -> Tensor:
    """Ancestor words [count, W] of rows that see the rows up to themselves."""
    return chain_words(count, 0).to(device)
