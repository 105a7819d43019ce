"""Drafters that guess a block in one pass and read the target's hidden states (DFlash, arXiv 2602.06036, and DSpark).

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

W has a bias (deepseek-ai/DeepSpec, deepspec/modeling/dspark/markov_head.py).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specker.kernels import quant
from specker.kernels.ancestors import chain_words, pack_bits
from specker.kernels.quant import Matrix
from specker.kernels.residual import add_norm
from specker.model.cache import KVCache, Rows
from specker.model.decoder import Final, GroupRows, Model, Output, forward, in_blocks, over_pages, run_layers
from specker.model.kept import calibrated
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

    @property
    def most(self) -> int:
        """The most draft tokens of a block."""
        return self.size if self.following else self.size - 1


class Markov(NamedTuple):
    """A Markov head of rank r. Its kinds and their equations are at the top."""

    kind: str  # vanilla, gated or rnn
    w1: Tensor  # [V, r] by the target's ids
    w2: Tensor  # [rows, r]
    joint: Tensor | None = None  # W: gated [r, H + r], rnn [3 r, 2 r + H]
    joint_bias: Tensor | None = None  # [r] or [3 r]


class BlockWeights(NamedTuple):
    """The tensors that a decoder does not have. H: the drafter's width, A: its number of auxiliary layers, Ht: the
    target's width, r: the Markov head's rank."""

    fc: Matrix  # [H, A * Ht]
    hidden_norm: Tensor  # [H]
    mask: Tensor | None  # [H], the embedding of a mask; None: that of the id `mask_token_id`
    ids: Tensor | None  # [rows] int64, the target's id of each row of the LM head; None: row i is id i
    markov: Markov | None
    confidence: tuple[Tensor, Tensor] | None  # proj [1, H + r] and its bias [1]; [1, H] if it does not read w1


class BlockModel:
    """A drafter of blocks ready to run."""

    def __init__(self, parameters: Parameters, spec: BlockSpec, weights: BlockWeights):
        self.model, self.spec, self.weights = Model(parameters), spec, weights
        model, config = self.model, self.model.config
        layers = [layer.attention for layer in model.layers]
        first = config.num_heads * config.head_dim  # the row of qkv at which the keys begin
        # One product makes K and V of a column in all layers, so these rows are kept together, a second time.
        self._kv = _joined([w.qkv[first:] for w in layers])  # [L * 2 * Hkv * D, H]
        biases = [w.qkv_bias[first:] for w in layers if w.qkv_bias is not None]
        self._kv_bias = torch.cat(biases) if biases else None
        self._k_norm = torch.cat([w.k_norm for w in layers if w.k_norm is not None])  # [L, D]
        self._mask = weights.mask
        if self._mask is None:
            assert config.mask_token_id is not None
            self._mask = model.embed_tokens(torch.tensor([config.mask_token_id], device=model.device))[0]

    def keep(self, cache: KVCache, positions: Tensor, slots: Tensor, hidden: Tensor) -> None:
        """Write K and V of T committed tokens at `positions` [T] int64 to the rows `slots` [T] int64 of every layer.
        `aux_layers` [T, A, Ht]: the target's rows of these tokens."""
        model, w, L, T = self.model, self.weights, len(self.model.layers), len(positions)
        eps = model.config.rms_norm_eps
        rows = model.linear(hidden.flatten(1).contiguous(), w.fc)
        kv = model.linear(add_norm(rows, None, w.hidden_norm, eps)[1], self._kv, self._kv_bias)
        kv = kv.view(T, L, -1).transpose(0, 1).reshape(L * T, -1)
        layer = torch.arange(L, device=slots.device).unsqueeze(1) * (cache.k.shape[1] * cache.page_size)
        k, v = cache.k.flatten(0, 1), cache.v.flatten(0, 1)
        places = positions.repeat(L), (slots + layer).view(-1), model.ropes[0]
        calibrated(kv, *places, k, v, self._k_norm, self._k_norm, eps)

    def block(self, cache: KVCache, rows: Rows, roots: Tensor, count: int) -> Final:
        """Run blocks of `count` rows, roots [n] int64 and masks, one for each sequence of `rows`. Returns their rows
        for the LM head [n * count, H]."""
        model, n, causal = self.model, len(roots), self.spec.causal
        assert self._mask is not None
        masks = self._mask.expand(n, count - 1, -1)
        embedded = torch.cat((model.embed_tokens(roots).unsqueeze(1), masks), 1).flatten(0, 1)
        if all(causal):
            return forward(model, cache, rows, embedded).final
        chain, full = (words(count, str(model.device)) for words in (_chain, _full))
        rows = rows._replace(ancestors=full.repeat(n, 1))
        if not any(causal):
            return forward(model, cache, rows, embedded).final

        def run(rows: Rows, hidden: Tensor) -> Output:
            each = [rows, rows._replace(ancestors=chain.repeat(len(hidden) // count, 1))]
            batches = [GroupRows(x.positions, x.slots, over_pages(model, x), model.summed) for x in each]
            steps = zip(model.layers, cache.layers, [batches[own] for own in causal], strict=False)
            return run_layers(model, steps, hidden)

        return in_blocks(model, rows, embedded, run).final

    def predicting(self, final: Final, n: int, drafts: int) -> Final:
        """The rows of n blocks that predict the first `drafts` tokens after the root, [n * drafts, H]."""
        first = 0 if self.spec.following else 1
        rows = final.rows.view(n, -1, final.rows.shape[-1])[:, first : first + drafts]
        return Final(rows.flatten(0, 1), final.normed)

    def normed(self, final: Final) -> Tensor:
        """The final norm of rows [T, H]."""
        return final.rows if final.normed else add_norm(final.rows, None, self.model.norm, self._eps)[1]

    @property
    def _eps(self) -> float:
        return self.model.config.rms_norm_eps

    def latent(self, tokens: Tensor) -> Tensor:
        """The Markov head's row e of each token [n] int64 -> [n, r]."""
        assert self.weights.markov is not None
        return self.weights.markov.w1[tokens].to(self.model.dtype)

    def bias(
        self, latent: Tensor, normed: Tensor, state: Tensor | None, ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """What the Markov head adds to the logits [n, rows] float32 after tokens with rows `latent` [n, r], and its
        next state [n, r]. `normed` [n, H]: the block's rows that predict; `state`: None at the root and for heads that
        have none; `ids` [K] int64: only of these rows."""
        head = self.weights.markov
        assert head is not None
        found = latent
        if head.kind == "gated":
            found = torch.sigmoid(self._joint(head, normed, latent)) * latent
        elif head.kind == "rnn":
            state = torch.zeros_like(latent) if state is None else state
            gate, candidate, out = self._joint(head, state, latent, normed).chunk(3, -1)
            gate, found = torch.sigmoid(gate), torch.tanh(out)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
        rows = head.w2 if ids is None else head.w2[ids]
        return self.model.linear(found, rows, epilogue="float32"), state

    def _joint(self, head: Markov, *parts: Tensor) -> Tensor:
        """W of the parts side by side."""
        return self.model.linear(torch.cat(parts, -1), head.joint, head.joint_bias)

    def confidence(self, normed: Tensor, latent: Tensor | None) -> Tensor:
        """How likely the target is to accept the tokens that rows [n, H] predict, [n] float32. `latent` [n, r]: of the
        tokens before them."""
        assert self.weights.confidence is not None
        weight, bias = self.weights.confidence
        x = normed if latent is None or weight.shape[1] == normed.shape[1] else torch.cat((normed, latent), -1)
        return torch.sigmoid(x.float() @ weight[0].float() + bias.float())


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
