"""The decoder for every supported architecture: embedding, layers, and hidden rows at chosen depths.

`run_layers` is the only definition of a layer. Its callers choose the rows, the K/V and the attention: `forward` runs
few rows (a decoding step, a verify pass, a tree level) of one or several sequences with tree_attention, prefill.py runs
long chunks of a prompt with torch's SDPA, and strategies/easyspec/layer_groups.py runs several layers side by side.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specker.cpu import Packed, Stack, available, product, restored, serves
from specker.cpu.pages import Place
from specker.fields import option
from specker.kernels.expert_linear import expert_linear
from specker.kernels.expert_route import expert_route
from specker.kernels.kv_calibrate import rope_table
from specker.kernels.kv_project import kv_project
from specker.kernels.quant import Matrix, Quantized, streams
from specker.kernels.residual_merge import add_norm, residual_merge
from specker.kernels.row_linear import GATES, gated, row_linear, row_linear_ref
from specker.kernels.tiles import MAX_ROWS
from specker.kernels.tree_attention import MAX_WORDS, tree_attention
from specker.kernels.variant import sum_dtype
from specker.kernels.vocab_topk import draws_alike, vocab_topk
from specker.layer_weights import LayerWeights
from specker.model.cache import KVCache, RingRows, Rows
from specker.model.config import CheckpointError, ModelConfig
from specker.model.kv_formats import calibrated, keys, widened
from specker.model.recurrent import Paths, cached_rows, mix, paths
from specker.model.sampling import Draws
from specker.model.split import OtherRanks
from specker.model.weights import Group, Parameters, layers_of

# q [T, Hq, D], k and v [pages, page_size, Hkv, D] and the layer, for its sliding window, sinks and o -> [T, Hq, D]
Attend = Callable[[Tensor, Tensor, Tensor, int, LayerWeights], Tensor]


class GroupRows(NamedTuple):
    """T rows in each of a group's N layers, layer by layer."""

    positions: Tensor  # [N * T] int64
    slots: Tensor  # [N * T] int64, cache rows for their K/V
    attend: Attend
    join: Callable[[Tensor], Tensor]  # this rank's output of the o linear -> that of all heads, [T, E] or [N, T, E]
    ring_rows: RingRows | None = None  # where a layer whose K/V stands in rings has these rows
    idle: Tensor | None = None  # `Rows.idle`
    paths: Paths | None = None  # for layers with a recurrent state

    def slots_of(self, sliding_window: int) -> Tensor:
        """The cache rows of a layer with this sliding window."""
        return self.slots if self.ring_rows is None or not sliding_window else self.ring_rows.slots


# A group, K and V [pages, page_size, Hkv, D] of the rows' slots, or the `Memory` of a recurrent state, and the rows
GroupStep = tuple[Group, Any, GroupRows]


class Final(NamedTuple):
    """Rows for an LM head. The head applies the final norm, unless an earlier launch has applied it (`normed`)."""

    rows: Tensor  # [T, E], the residual stream or its final norm
    normed: bool = False

    def at(self, which: slice | Tensor) -> "Final":
        return Final(self.rows[which], self.normed)


class Output(NamedTuple):
    hidden: Tensor  # [T, E], the residual stream after the last layer run, before the final norm
    aux_hidden_states: dict[int, Tensor]  # n -> [T, E], the residual stream after n layers
    normed: Tensor | None = None  # [T, E], the final norm of `hidden`, if the last residual add computed it
    routed: tuple[Tensor, ...] = ()  # `starts` of `expert_route` [X + 1], of each mixture of experts

    @property
    def final(self) -> Final:
        return Final(self.hidden) if self.normed is None else Final(self.normed, True)


class PerLayerTable(NamedTuple):
    """What per-layer embeddings are made of (Gemma 4)."""

    table: Tensor | Packed  # [tokens, L P], on the host
    scale: float  # factor of its rows, rounded to the activations' dtype
    project: Matrix  # [L P, E]
    norm: Tensor  # [P]


class Model:
    """Weights ready to run, the RoPE tables, and one-position index tensors."""

    def __init__(
        self,
        parameters: Parameters,
        linear: Callable[..., Tensor] = row_linear,
        ranks: OtherRanks | None = None,
    ):
        """`linear`: a function with the signature of `row_linear`, for the layers and the head; with another one no
        compiled layers run. `ranks`: the ranks that hold the other parts of a split model."""
        config, weights = parameters.local, parameters.weights
        self.config, self.ranks, self.part = config, ranks, parameters.part
        self.embed, self.norm = weights.embed, weights.norm
        self.dtype, self.device = weights.norm.dtype, weights.norm.device  # dtype of activations and K/V
        self.linear = linear
        ropes = [rope.to(self.device) for rope in weights.ropes]
        self.ropes = [rope_table(rope.inv_freq, rope.scale, config.max_context, self.dtype) for rope in ropes]
        self.layers = layers_of(weights, config, self.ropes)
        self.head: Any = parameters.own_head  # a matrix of any kind
        self.ple: PerLayerTable | None = None
        if config.layer.ple:
            assert weights.ple_table is not None and weights.ple_in is not None and weights.norm_ple_in is not None
            scale = torch.tensor(config.layer.ple**0.5, dtype=self.dtype, device="cpu").item()
            self.ple = PerLayerTable(weights.ple_table, scale, weights.ple_in, weights.norm_ple_in)
        self.positions = torch.arange(config.max_context, dtype=torch.int64, device=self.device)
        self.scale = config.head_dim**-0.5 if config.layer.scale is None else config.layer.scale
        self.embed_scale = config.embed_scale
        if config.embed_rounded:
            self.embed_scale = torch.tensor(config.embed_scale, dtype=self.dtype, device="cpu").item()
        check_sliding_windows(config, self.device)
        self.activations = parameters.activations
        self.stack = self._stack()

    def _stack(self) -> Stack | None:
        """The layers for the compiled CPU kernels; None if the kernels do not support this model."""
        if self.device.type != "cpu" or self.dtype != torch.float32 or self.linear is not row_linear:
            return None
        communicator = None if self.ranks is None else self.ranks.communicator
        if self.ranks is not None and communicator is None:
            return None
        c = self.config
        if not available() or Stack.lacks(c.layer):
            return None
        layers = [layer.mixer for layer in self.layers]
        attending = [n for n in range(c.num_layers) if c.layer.mixer(n) is None]
        if not Stack.takes(layers, *{c.kv(n).dim for n in attending}):
            return None
        ropes = [None if layer.mixer.recurrent else layer.rope for layer in self.layers]
        heads = c.num_heads, c.num_kv_heads
        numbers = c.rms_norm_eps, self.scale, self.activations
        return Stack(layers, c.layer, heads, ropes, *numbers, communicator, self.part.whole_mixers)

    @property
    def places(self) -> list[Place]:
        """Where the compiled kernels read this model's matrices."""
        if self.stack is None:
            return []
        return [*self.stack.places, *(self.head.places if isinstance(self.head, Packed) else [])]

    @property
    def counts_experts(self) -> bool:
        """Whether its outputs say which experts were read (`Output.routed`)."""
        return self.config.layer.experts is not None

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices of the layers' products, and the head."""
        layers = [matrix for group in self.layers for w in group.layers for matrix in w.products()]
        return [*layers, *([] if self.ple is None else [self.ple.project]), self.head]

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Tokens [T] int64 -> the first layer's input: embeddings [T, E] and, with per-layer embeddings, what each
        layer reads of the tokens beside them, [T, E + L P]."""
        rows = self.embedded(tokens)
        return rows if self.ple is None else torch.cat((rows, self._per_layer(self.ple, rows, tokens)), 1)

    def entering(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """A later layer's input: the stream [T, E] and what layers read of its tokens [T] or [n, T / n] int64, as
        `embed_tokens` has them."""
        if self.ple is None:
            return hidden
        tokens = tokens.flatten()
        return torch.cat((hidden, self._per_layer(self.ple, self.embedded(tokens), tokens)), 1)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Tokens [T] int64 -> their scaled embeddings [T, E]."""
        return self.scaled(self._rows(self.embed, tokens))

    def _rows(self, table: Tensor | Packed, tokens: Tensor) -> Tensor:
        """The rows of an embedding [V, E] of tokens [T] that are on its device."""
        return torch.embedding(table, tokens) if isinstance(table, Tensor) else restored(table, self.dtype, tokens)

    def _per_layer(self, ple: "PerLayerTable", rows: Tensor, tokens: Tensor) -> Tensor:
        """Per-layer embeddings of tokens [T] with the embeddings `rows` [T, E]: (norm(project(rows)) + table[token]) /
        sqrt(2), each with a scale, [T, L P]. On a GPU the host gathers the table's rows."""
        P, eps = self.config.layer.ple, self.config.rms_norm_eps
        if self.stack is not None and serves(rows, ple.project):  # a row has the same bits in any company, as in layers
            own = product(rows, ple.project, self.activations)
        else:
            own = torch.cat([self.linear(part, ple.project) for part in rows.split(MAX_ROWS)])
        own = own * rows.shape[1] ** -0.5
        own = F.rms_norm(own.unflatten(1, (-1, P)), (P,), ple.norm, eps).flatten(1)
        found = self._rows(ple.table, tokens.to(ple.table.device)).to(self.device, self.dtype)
        return (own + found * ple.scale) * 0.5**0.5

    def scaled(self, rows: Tensor) -> Tensor:
        """Rows of the embedding [T, E] -> the first layer's input."""
        rows = rows.to(self.dtype)
        return rows if self.embed_scale == 1 else rows * self.embed_scale

    def logits(self, final: Final, out: Tensor | None = None) -> Tensor:
        """Rows [T, E] -> logits [T, V] float32 (float64 in float64 runs). A part of a split model returns only its own
        columns. `out` [T, V]: memory for the logits, used if the head's kernel can write to it."""
        x, normed = final
        if self.stack is not None and not normed and serves(x, self.head):
            return self.capped(product(x, self.head, self.activations, self.norm, self.config.rms_norm_eps))
        if not normed:
            _, x = add_norm(x, None, self.norm, self.config.rms_norm_eps)
        parts = x.split(MAX_ROWS)
        if out is not None and fuses(x) and out.shape == (len(x), len(self.head)):
            for part, into in zip(parts, out.split(MAX_ROWS), strict=True):
                row_linear(part, self.head, epilogue="float32", out=into)
            return self.capped(out)
        logits = [self.linear(part, self.head, epilogue="float32") for part in parts]
        return self.capped(logits[0] if len(logits) == 1 else torch.cat(logits))

    def capped(self, logits: Tensor) -> Tensor:
        """The logits under the soft cap, in place."""
        return capped(logits, self.config.logits_cap)

    @property
    def samples(self) -> bool:
        """Whether `sampled` serves: where it draws the tokens that `draw` would draw from the logits."""
        whole = self.ranks is None and not self.config.logits_cap
        return whole and draws_alike(self.norm, self.head)

    def sampled(
        self, final: Final, draws: Draws, positions: Tensor, tokens: Tensor | None = None, peak: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows [T, E] at `positions` [T] -> the token after each row, [T] int64, drawn without filters in the launch of
        the LM head, which writes no logits; and that token's logit with its noise, [T], which is not finite if the row
        is not. `tokens` and `peak`: memory for these."""
        x, normed = final
        if not normed:
            _, x = add_norm(x, None, self.norm, self.config.rms_norm_eps)
        tokens = torch.empty_like(positions) if tokens is None else tokens
        peak = x.new_empty(len(x), dtype=sum_dtype(x.dtype)) if peak is None else peak
        into = tokens.unsqueeze(1), peak.unsqueeze(1)
        vocab_topk(x, self.head, None, 1, None, draws.held(positions), False, out=into)
        return tokens, peak

    def draw(self, draws: Draws, logits: Tensor, positions: Tensor) -> Tensor:
        """logits [T, V] (a part's columns) at `positions` [T] -> the token after each row, [T] int64."""
        if self.ranks is None:
            return draws.tokens(logits, positions)
        return self.ranks.draw(draws, logits, positions, self.config.vocab_size)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """A part's logits -> the whole vocabulary's logits [T, V]."""
        return logits if self.ranks is None else self.ranks.whole(logits, self.config.vocab_size)

    def summed(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, which completes a linear with split inputs."""
        return x if self.ranks is None else self.ranks.sum(x)

    def joined(self, x: Tensor) -> Tensor:
        """Sum the o linear's output x over all ranks, if each has only some heads."""
        return x if self.part.whole_mixers else self.summed(x)


def capped(logits: Tensor, cap: float) -> Tensor:
    """cap tanh(logits / cap), in place; as they are with a cap of 0."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def run_layers(
    model: Model,
    steps: Iterable[GroupStep],
    hidden: Tensor,
    first: int = 0,
    aux_layers: tuple[int, ...] = (),
    dense: bool = False,
    first_attention_input: Tensor | None = None,
) -> Output:
    """Run groups of layers in sequence, from depth `first` on, over rows with the residual stream `hidden` [T, E].
    Writes the rows' K/V. The layers of a group all attend from the group's input h; their feed-forwards then run in
    sequence (EasySpec, arXiv 2502.02493):

        a_i = norm_o_i(o_i(attention_i(norm_in_i(h))))      i = 0..N-1, in one batch
        h   = h + a_i;  h = h + norm_down_i(mlp_i(norm_post_i(h)))

    where each norm may be absent (LayerSpec.norms), and each mlp may be a mixture of experts (`_mixed`). Each residual
    add is fused with the norm of the next sublayer. `aux_layers`: depths n at which to keep the stream; each is
    the input of a group, or the end. For few rows on a GPU an ordinary layer is seven launches: norm, kv_project,
    attention (two for more than a few rows), o, norm, gate_up, down, and those of the router before experts; the norms
    also reduce the split-K partials of o and down. There, the last residual add is fused with the final norm, whichever
    layer is the last, because every head uses the same norm. `dense`: for a chunk of a prompt on a GPU, products by
    `dense_linear`. `first_attention_input`: if it is not the norm of `hidden` (LayerSpec.first). With per-layer
    embeddings `hidden` is [T, E + L P] (`Model.embed_tokens`)."""
    eps, layer = model.config.rms_norm_eps, model.config.layer
    hidden, per_layer = _apart(model, hidden)
    linear = dense_linear if dense else model.linear
    after = layer.norms != "before"
    kept: dict[int, Tensor] = {}
    routed: list[Tensor] = []
    few = fuses(hidden) and not dense
    delta = None  # output of the last feed-forward, or its split-K partials, not yet added to `hidden`
    for (w, layers, rope, sliding_window), kept_here, batch in steps:
        several = len(layers) > 1
        if first_attention_input is None:
            hidden, normed = _entering(hidden, delta, w.norm_in, eps, following=w.qkv if few else None)
        else:
            normed, first_attention_input = first_attention_input, None
        if several and w.norm_in is None:
            normed = normed.expand(len(batch.positions) // len(hidden), *hidden.shape)
        if first in aux_layers:
            kept[first] = hidden
        first += len(layers)
        if w.recurrent:
            mixer = layer.mixer(first - 1)
            assert mixer is not None and batch.paths is not None
            mixed = mix(mixer, w, kept_here, normed, batch.paths, linear, eps)
            added = _added(model, linear, mixed, w.o, None, few and not after)
        elif normed.numel():
            mixed = attended(model, linear, normed, w, rope, kept_here, batch, sliding_window, few)
            if several:
                added = linear(mixed.view(*normed.shape[:2], -1), w.o, w.o_bias)
            else:
                added = _added(model, linear, mixed, w.o, w.o_bias, few and not after)
        else:  # other ranks attend for the whole group
            added = normed
        added = batch.join(added)
        for i, mlp in enumerate(layers):
            output = _normed(added[i] if several else added, mlp.norm_o, eps)
            following = mlp.gate_up if few and mlp.router is None else None
            if i == 0:
                hidden, normed = _entering(hidden, output, mlp.norm_post, eps, following=following)
            else:
                hidden, normed = _entering(hidden, delta, mlp.norm_post, eps, output, following)
            if mlp.router is None:
                up = gate_times_up(partial(linear, normed, mlp.gate_up, mlp.gate_up_bias), layer.activation)
                delta = _added(model, linear, up, mlp.down, mlp.down_bias, few and not after)
            elif mlp.router_norm is not None:
                delta, starts = _mixed_beside(model, linear, hidden, normed, mlp, batch.idle)
                routed.append(starts)
            else:
                delta, starts = _mixed(model, linear, normed, mlp, batch.idle, few and not after)
                routed.append(starts)
            delta = _normed(model.summed(delta), mlp.norm_down, eps)
            if mlp.ple_gate is not None:
                hidden = hidden + delta
                gate = linear(hidden, mlp.ple_gate)
                up = gated(torch.cat((gate, per_layer[:, first - 1]), 1), layer.activation)
                delta = _normed(linear(up, mlp.ple_out), mlp.norm_ple, eps)
            if mlp.scalar is not None:
                hidden, delta = (hidden + delta) * mlp.scalar, None
    final: Tensor | None = None
    if few:
        hidden, final = add_norm(hidden, delta, model.norm, eps)
    elif delta is not None:
        hidden = hidden + delta
    if first in aux_layers:
        kept[first] = hidden
    return Output(hidden, kept, final, tuple(routed))


def _apart(model: Model, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The stream [T, E] of the input of a layer, and what the layers read of the rows' tokens, [T, L, P] (empty without
    per-layer embeddings)."""
    E, P = model.config.hidden_size, model.config.layer.ple
    if not P:
        return hidden, hidden[:, :0]
    return hidden[:, :E].contiguous(), hidden[:, E:].unflatten(1, (-1, P))


def attended(
    model: Model,
    linear: Callable[..., Tensor],
    normed: Tensor,
    w: LayerWeights,
    rope: Tensor,
    kv: tuple[Tensor, Tensor],
    batch: GroupRows,
    sliding_window: int,
    few: bool,
) -> Tensor:
    """The output of attention [N * T, Hq D] for the inputs [T, E] of a layer or [N, T, E] of N layers. Writes the rows'
    K/V. With LayerSpec.gated it is times the sigmoid of a gate."""
    (k, v), eps, several = kv, model.config.rms_norm_eps, normed.dim() == 3
    positions, slots, gate, weight = batch.positions, batch.slots_of(sliding_window), None, w.qkv
    q_norm, k_norm = w.q_norm, w.k_norm
    gates = model.config.num_heads * model.config.head_dim if model.config.layer.gated else 0
    if w.q_norm is not None and w.k_norm is None:  # it reads the K/V of another layer
        q = _rotated(linear(normed, weight, w.qkv_bias), batch.positions, rope, w.q_norm, eps)
    elif model.config.layer.v_norm:
        Hkv, D = k.shape[-2:]
        qkv = _with_normed_v(linear(normed, weight, w.qkv_bias), model.config.num_heads, Hkv, D, eps)
        q = calibrated(qkv, positions, slots, rope, k, v, w.q_norm, w.k_norm, eps)
    elif few and model.config.layer.qk_norm != "projection":
        if gates:
            gate, weight = linear(normed, weight[:gates]), weight[gates:]
        q = kv_project(normed, weight, w.qkv_bias, positions, slots, rope, k, v, w.q_norm, w.k_norm, eps)
    else:
        qkv = linear(normed, weight, w.qkv_bias)
        if gates:
            gate, qkv = qkv[..., :gates], qkv[..., gates:].contiguous()
        if model.config.layer.qk_norm == "projection":
            qkv, q_norm, k_norm = _whole_norms(qkv, w, eps), None, None
        qkv = qkv.flatten(0, 1) if several else qkv
        q = calibrated(qkv, positions, slots, rope, k, v, q_norm, k_norm, eps)
    mixed = batch.attend(q, k, v, sliding_window, w).flatten(1)
    return mixed if gate is None else mixed * torch.sigmoid(gate)


def _with_normed_v(qkv: Tensor, Hq: int, Hkv: int, D: int, eps: float) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) D] with a norm without a weight over each head of V. Without heads of V, V is K."""
    T = len(qkv)
    qk, v = qkv[:, : (Hq + Hkv) * D], qkv[:, -Hkv * D :]
    return torch.cat((qk, F.rms_norm(v.reshape(T, Hkv, D), (D,), None, eps).view(T, -1)), -1)


def _rotated(q: Tensor, positions: Tensor, rope: Tensor, norm: Tensor, eps: float) -> Tensor:
    """q [T, Hq D], normalised by head and rotated [T, Hq, D], as `kv_calibrate` does."""
    D = rope.shape[-1]
    heads = F.rms_norm(q.unflatten(-1, (-1, D)), (D,), norm[0], eps)
    cos, sin = rope[positions].unsqueeze(2).unbind(1)
    return torch.addcmul(heads * cos, heads.roll(D // 2, -1), sin).to(q.dtype)


def dense_linear(x: Tensor, weight: Matrix, bias: Tensor | None = None, epilogue: str = "none") -> Tensor:
    """`row_linear` for a chunk of a prompt on a GPU: cuBLAS's product, which is faster for so many rows. A quantised
    matrix keeps to the kernel, which decodes it in registers; for cuBLAS it would be restored in memory every time."""
    if isinstance(weight, Quantized) and streams(weight):
        parts = [row_linear(part, weight, bias, epilogue) for part in x.split(MAX_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return row_linear_ref(x, weight, bias, epilogue)


def packed_linear(activations: str) -> Callable[..., Tensor]:
    """`row_linear` on a CPU for matrices that may be `Packed`, for layers that the compiled library does not run as a
    whole. `activations`: the type to which it rounds rows of these products."""

    def linear(x: Tensor, weight: Any, bias: Tensor | None = None, epilogue: str = "none") -> Tensor:
        if not isinstance(weight, Packed):
            return row_linear(x, weight, bias, epilogue)
        y = product(x, weight, activations)
        if bias is not None:
            y += bias
        return gated(y, GATES[epilogue]) if epilogue in GATES else y

    return linear


def _whole_norms(qkv: Tensor, w: LayerWeights, eps: float) -> Tensor:
    """Apply RMSNorms to q and k of qkv [T, O] or [N, T, O], each over all its heads."""
    assert w.q_norm is not None and w.k_norm is not None
    norms = (w.q_norm, w.k_norm) if qkv.dim() == 2 else (w.q_norm.unsqueeze(1), w.k_norm.unsqueeze(1))
    q, k, v = qkv.split([norms[0].shape[-1], norms[1].shape[-1], qkv.shape[-1] - sum(n.shape[-1] for n in norms)], -1)
    q, k = (F.rms_norm(x, x.shape[-1:], None, eps) * norm for x, norm in zip((q, k), norms, strict=True))
    return torch.cat((q, k, v), -1)


def gate_times_up(gate_up: Callable[..., Tensor], activation: str) -> Tensor:
    """The feed-forward's gate times its up projection, [.., F]. `gate_up`: the product with both, [.., 2 F], which has
    epilogues for some activations."""
    if activation in GATES.values():
        return gate_up(epilogue=f"{activation}_mul")
    return gated(gate_up(), activation)


def _mixed(
    model: Model, linear: Callable[..., Tensor], x: Tensor, mlp: LayerWeights, idle: Tensor | None, few: bool
) -> tuple[Tensor, Tensor]:
    """A mixture of experts over x [T, E]: the chosen experts' outputs, weighted by the router's scores p,

        p, e = the largest entries of softmax(router(x));  y = sum over j of p_j mlp_(e_j)(x)

    or its partials as in `_added`, and where each expert's rows begin in their common order (`expert_route`, which
    scores by other rules than softmax too). `idle`: sequences that read no experts of their own."""
    layer, router, rule = model.config.layer, mlp.router, model.config.layer.experts
    assert rule is not None and router is not None
    # For few rows expert_route adds the router's splits up.
    logits = row_linear(x, router, epilogue="split") if few else linear(x, router, epilogue="float32")
    experts, scores, order, starts = expert_route(
        logits, rule.chosen, rule.normalised, idle, rule.scoring, mlp.router_bias, rule.scale, rule.eps
    )
    following = mlp.down if few else None
    of = partial(expert_linear, x, mlp.gate_up, experts, order, starts, bias=mlp.gate_up_bias, following=following)
    up = gate_times_up(of, layer.activation)
    epilogue = "split" if few and model.ranks is None and mlp.shared_down is None else "sum"
    y = expert_linear(up, mlp.down, experts, order, starts, epilogue, scores, mlp.down_bias)
    return (y if mlp.shared_down is None else y + _shared_expert(linear, x, mlp, layer.activation)), starts


def _mixed_beside(
    model: Model, linear: Callable[..., Tensor], hidden: Tensor, normed: Tensor, mlp: LayerWeights, idle: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Experts beside a feed-forward (`Experts.beside`) over the stream `hidden` [T, E] and its norm `normed`:

        p, e = the largest entries of softmax(router(norm(hidden))), divided by their sum
        y    = norm(mlp(normed)) + norm(sum over j of s_(e_j) p_j mlp_(e_j)(norm(hidden)))

    and where each expert's rows begin in their common order (`expert_route`)."""
    layer, rule, eps = model.config.layer, model.config.layer.experts, model.config.rms_norm_eps
    assert rule is not None and mlp.router_scale is not None
    logits = linear(_normed(hidden, mlp.router_norm, eps), mlp.router, epilogue="float32")
    experts, scores, order, starts = expert_route(logits, rule.chosen, rule.normalised, idle)
    scores = scores * mlp.router_scale.to(scores.dtype)[experts]
    x = _normed(hidden, mlp.norm_experts, eps)
    up = gate_times_up(partial(expert_linear, x, mlp.gate_up, experts, order, starts), layer.activation)
    mixed = expert_linear(up, mlp.down, experts, order, starts, "sum", scores)
    dense = _shared_expert(linear, normed, mlp, layer.activation)
    return _normed(dense, mlp.norm_shared, eps) + _normed(mixed, mlp.norm_mixed, eps), starts


def _shared_expert(linear: Callable[..., Tensor], x: Tensor, w: LayerWeights, activation: str) -> Tensor:
    """The expert that every row of x [T, E] reads: sigmoid(gate x) * down(act(gate x) * up x), or without this gate."""
    y = linear(gate_times_up(partial(linear, x, w.shared_gate_up), activation), w.shared_down)
    return y if w.shared_gate is None else y * torch.sigmoid(linear(x, w.shared_gate))


def fuses(hidden: Tensor) -> bool:
    """Whether layers run in the fewest launches: on a GPU, through row_linear's kernels."""
    return hidden.is_cuda and hidden.dtype != torch.float64


def _added(
    model: Model, linear: Callable[..., Tensor], x: Tensor, weight: Matrix, bias: Tensor | None, few: bool
) -> Tensor:
    """The linear's output, which the caller adds to the stream: [T, E] or, for few rows on one GPU, its split-K
    partials [S, T, E]."""
    if few and bias is None and model.ranks is None:
        return row_linear(x, weight, epilogue="split")
    return linear(x, weight, bias)


def _entering(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor | None,
    eps: float,
    other: Tensor | None = None,
    following: Matrix | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the stream y = x + delta + other, all [T, E], and the input of the next sublayer: the RMSNorm of y with
    `norm` [E], N of them [N, T, E] with N norms [N, E], or y itself without a norm. With a norm, `delta` may be split-K
    partials [S, T, E]. `following`: the sublayer's first matrix, see `residual_merge`."""
    if norm is None:
        y = x if delta is None else x + delta
        y = y if other is None else y + other
        return y, y
    if norm.dim() == 1 and other is None:
        return add_norm(x, delta, norm, eps, following)
    split = delta is not None and delta.dim() == 3
    if delta is None:
        deltas = x.unsqueeze(0)[:0]
    else:
        deltas = delta if split else delta.unsqueeze(0)
    norms = norm.view(-1, norm.shape[-1])
    y, normed = residual_merge(x, deltas, norms, eps, other, split, constant=True, following=following)
    return y, normed if norm.dim() == 2 else normed[0]


def _normed(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """A sublayer's output x [T, E], normalised if the layer has a norm for it."""
    return x if norm is None else add_norm(x, None, norm, eps)[1]


def forward(
    model: Model,
    cache: KVCache,
    rows: Rows,
    hidden: Tensor,
    layers: slice = slice(None),
    aux_layers: tuple[int, ...] = (),
) -> Output:
    """Run `layers` over T rows of one or several sequences. `hidden` [T, E]: the residual stream before the first of
    them, as `Model.embed_tokens` (for layer 0) or `Model.entering` gives it. Writes the rows' K/V in those layers.
    `aux_layers`: depths n at which to keep the stream."""
    first, last, _ = layers.indices(len(model.layers))

    def run(rows: Rows, hidden: Tensor) -> Output:
        if model.stack is not None:
            return compiled(model, cache, rows, hidden, range(first, last + 1), aux_layers)
        attend = over_pages(model, rows)
        batch = GroupRows(rows.positions, rows.slots, attend, model.joined, rows.ring_rows, rows.idle, paths(rows))
        steps = zip(model.layers[layers], cache.layers[layers], repeat(batch), strict=False)
        return run_layers(model, steps, hidden, first, aux_layers)

    return in_blocks(model, rows, hidden, run)


def in_blocks(model: Model, rows: Rows, hidden: Tensor, run: Callable[[Rows, Tensor], Output]) -> Output:
    """`run` over all rows of a round. More rows than the batch-invariant kernels serve run in blocks of whole
    sequences, one after another: a row attends to its own sequence alone, so its bits do not change."""
    most = MAX_ROWS if model.stack is None else model.stack.most
    if len(hidden) <= most:
        return run(rows, hidden)
    outs = [run(block, hidden[at]) for at, block in rows.blocks(most)]
    aux = {n: torch.cat([out.aux_hidden_states[n] for out in outs]) for n in outs[0].aux_hidden_states}
    normed = [out.normed for out in outs if out.normed is not None]
    routed = tuple(starts for out in outs for starts in out.routed)
    return Output(torch.cat([out.hidden for out in outs]), aux, torch.cat(normed) if normed else None, routed)


def compiled(
    model: Model,
    cache: KVCache,
    rows: Rows,
    hidden: Tensor,
    groups: Sequence[int],
    aux_layers: tuple[int, ...] = (),
    features: Tensor | None = None,
    raw: bool = False,
) -> Output:
    """`run_layers` by the compiled CPU kernels. `groups`: the first layer of each group, then the end. `features`: of
    pairs, whose embeddings are `hidden`; `raw`: see `Stack.run`."""
    assert model.stack is not None
    out, routed = model.stack.run(hidden, cached_rows(cache, rows), groups, aux_layers, features, raw)
    aux = dict(zip(aux_layers, out[1:].unbind(0), strict=True)) if aux_layers else {}
    return Output(out[0], aux, routed=tuple(routed) if routed.shape[0] else ())


def experts_read(model: Model, outs: Sequence[Output]) -> Tensor:
    """How many experts the passes read in a layer, on average over the mixtures of experts, [1] float32."""
    starts = torch.stack([each for out in outs for each in out.routed])
    return ((starts[:, 1:] > starts[:, :-1]).sum() / model.config.mixtures).view(1)


def over_pages(model: Model, rows: Rows) -> Attend:
    """Attention for few rows. A row sees its sequence's columns up to kv_len, except those of the window that are not
    its ancestors and those outside the layer's sliding window."""
    _, _, kv_len, window, words, cu_rows, every, _, ring_rows, _ = rows

    def attend(q: Tensor, k: Tensor, v: Tensor, sliding_window: int, w: LayerWeights) -> Tensor:
        table = every if ring_rows is None or not sliding_window else ring_rows.table
        if k.dtype != q.dtype:  # of a CPU's cache in fewer bits
            k, v = (x[table.flatten().long()] for x in (k, v))
            k, v = keys(k, q.dtype), widened(v, q.dtype)
            table = torch.arange(table.numel(), dtype=table.dtype, device=table.device).view_as(table)
        scale, cap = model.scale, model.config.layer.cap
        args = q, k, v, table, kv_len, window, cu_rows, words, scale, sliding_window, cap, w.sinks
        return tree_attention(*args, following=w.o)[0]

    return attend


def check_sliding_windows(c: ModelConfig, device: torch.device) -> None:
    """Raise CheckpointError for sliding windows that the device's kernels do not support: on a GPU, those so short that
    they may hide columns of a verify pass. `runtime.engine.check_draft` keeps verify passes as short as the windows."""
    least = 64 * MAX_WORDS // 2 if device.type == "cuda" else 1
    if short := [window for window in c.layer.sliding_windows if 0 < window < least]:
        raise CheckpointError(
            f"the checkpoint has a sliding window of {short[0]}, and a GPU's kernels take none below {least}; use "
            f"{option('device', 'cpu')}"
        )
