"""A decoder's settings, and the error that says why a checkpoint cannot be one."""

from dataclasses import dataclass
from typing import NamedTuple


class CheckpointError(ValueError):
    """The checkpoint cannot be used. The message is one sentence: what is wrong and what to do."""


def no_source(missing: str, *others: str) -> str:
    """The message for a checkpoint that is not there: what to give instead, `others` too."""
    *kinds, last = "a checkpoint's folder", "a GGUF file", "a hub id such as Qwen/Qwen3-0.6B", *others
    return f"there is no {missing}; give {', '.join(kinds)} or {last}"


class KV(NamedTuple):
    """The heads of a layer that attends, of K and V. A head of q is as wide."""

    heads: int
    dim: int
    single: bool = False  # V is K's projection, before K's norm and RoPE: there is no projection of V
    source: int | None = (
        None  # the earlier layer whose K and V it reads instead of its own, as in Gemma 4's last layers
    )


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: a router chooses some of many feed-forwards for each row, and their outputs are added,
    weighted by its scores (arXiv 2401.04088)."""

    count: int
    chosen: int  # by each row
    width: int  # intermediate size of each expert
    normalised: bool  # the scores of a row's chosen experts are divided by their sum (+ `eps`)
    dense: tuple[int, ...] = ()  # layers that have an ordinary feed-forward instead
    shared: int = (
        0  # intermediate size of an expert that every row reads, times the sigmoid of a gate; 0: there is none
    )
    beside: bool = False
    """Gemma 4's block: the expert that every row reads has no gate, each of the two parts has a norm of its output, and
    the experts and the router read norms of their own of the stream; a score has a factor of its expert."""
    scoring: str = "softmax"  # the router's scores: softmax over the experts, or the sigmoid of each one's logit
    biased: bool = False
    """A bias of each expert is added: with softmax to its logit (gpt-oss), with sigmoid to its score, only to choose
    by."""
    scale: float = 1.0  # factor of the scores
    eps: float = 0.0  # added to the sum by which scores are divided; for sigmoid
    turns: bool = False
    """In the checkpoint the rows of each gate and up projection take turns, and matrices that are not quantised are
    transposed (gpt-oss)."""

    def read(self, rows: float) -> float:
        """How many experts a layer reads for so many rows, if the router chooses all equally often."""
        return self.count * (1 - (1 - self.chosen / self.count) ** rows)


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net instead of attention (arXiv 2412.06464; kernels/delta_rows.py): q, k and v come out of a short
    convolution, the output is normalised by head and times silu of a gate z."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # columns that the convolution reads, its own included
    tiled: bool = False
    """The columns of the out-projection have the value heads in llama.cpp's order: the first one of each key head, then
    the second ones, and so on."""

    @property
    def channels(self) -> int:
        """Of the convolution: all heads of q, of k, of v."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Inputs of the out-projection: all heads of v."""
        return self.value_heads * self.value_dim

    @property
    def projected(self) -> int:
        """Rows of the in-projection: q, k, v, then z, then b and a of each value head."""
        return self.channels + self.values + 2 * self.value_heads


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution instead of attention (LFM2): out_proj(c * conv(b * x))."""

    channels: int
    kernel: int  # columns that the convolution reads, its own included

    @property
    def values(self) -> int:
        """Inputs of the out-projection."""
        return self.channels

    @property
    def projected(self) -> int:
        """Rows of the in-projection: b, c, x."""
        return 3 * self.channels


Mixer = DeltaNet | ShortConv


@dataclass(frozen=True)
class LayerSpec:
    """What a layer computes, apart from its sizes. All layers are alike, except for `mixers`, `sliding_windows`,
    `ropes` and `kvs`.
    The decoder implements every value; another implementation (the compiled CPU layers) reports a value that it
    lacks."""

    activation: str = "silu"
    """In the feed-forward's gate: silu (SwiGLU), gelu or gelu_tanh (GeGLU, arXiv 2002.05202), or clamped_silu
    (kernels/row_linear.py)."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False  # also of experts
    norms: str = "before"
    """Where attention and the feed-forward have RMSNorms: "before" them (Llama), "after" them, on their outputs (OLMo
    2), or "both" (Gemma 3)."""
    qk_norm: str = ""
    """RMSNorm of q and of k before RoPE: "" for none, over each "head" (Qwen3, Gemma 3), or over the whole
    "projection", all heads together (OLMo 2)."""
    scale: float | None = None  # factor of the attention scores; None: head_dim ** -0.5
    cap: float = 0.0  # soft cap of the attention scores z: cap tanh(z / cap) (Gemma 2); 0: none
    sliding_windows: tuple[int, ...] = ()
    """Each layer's sliding window: how many of the last columns a row sees, including its own; 0: all columns. Empty if
    no layer has a window."""
    mixers: tuple[Mixer | None, ...] = ()
    """What mixes the columns in each layer: None is attention; the others keep a recurrent state. Empty if all layers
    attend. All states of a model have the same sizes."""
    sinks: bool = False  # each query head has a logit that takes its share of the softmax (kernels/tree_attention.py)
    kvs: tuple[KV, ...] = ()  # each layer's heads of K and V, if they differ (Gemma 4); see ModelConfig.kv
    v_norm: bool = False  # RMSNorm without a weight over each head of V
    ple: int = 0  # width of what each layer reads of a row's token (per-layer embeddings, Gemma 4); 0: nothing
    scaled: bool = False  # a layer ends by multiplying the stream by a number of its own
    gated: bool = False  # the output of attention is times the sigmoid of a gate, which further rows of qkv compute
    ropes: tuple[int, ...] = ()  # the RoPE table of each layer, an index into Weights.ropes; empty if there is only one
    experts: Experts | None = None  # the feed-forwards are mixtures of experts
    first: str = "usual"
    """The input of the first layer's attention: "usual", the norm of the stream; "joined", the norms of the next
    token's embedding and of the stream side by side (EAGLE-3); or "bare", the stream itself (EAGLE-1)."""

    def sliding_window(self, layer: int) -> int:
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def mixer(self, layer: int) -> Mixer | None:
        """What has a recurrent state in this layer; None if the layer attends."""
        return self.mixers[layer] if self.mixers else None

    @property
    def recurrent(self) -> Mixer | None:
        """What has a recurrent state in some layers."""
        return next((mixer for mixer in self.mixers if mixer is not None), None)

    def rope(self, layer: int) -> int:
        return self.ropes[layer] if self.ropes else 0

    def mixture(self, layer: int) -> Experts | None:
        """The layer's experts; None if its feed-forward is an ordinary one."""
        return None if self.experts is None or layer in self.experts.dense else self.experts

    def share(self, layer: int) -> float:
        """The part of the layer's feed-forward weights that a row reads."""
        mixture = self.mixture(layer)
        return 1.0 if mixture is None else mixture.chosen / mixture.count


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's settings; none depends on the run's dtype or device."""

    architecture: str  # a key of ARCHITECTURES (checkpoints/architectures)
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # both: of the layers with a sliding window, if `layer.kvs` says how layers differ
    intermediate_size: int  # the smallest, if `widths` names each layer's
    rms_norm_eps: float
    layer: LayerSpec
    tied: bool  # the LM head is the embedding
    causal: bool  # False: a diffusion drafter, in which all rows see each other
    shifted_logits: bool  # row i - 1 predicts position i (causal models and Dream); False: row i does
    mask_token_id: int | None
    max_context: int  # positions
    eos_ids: tuple[int, ...]  # sorted, from config.json, generation_config.json and the tokenizer; may be empty
    embed_scale: float = 1.0  # factor of the embedding's rows, but not of the head's
    embed_rounded: bool = False  # embed_scale is rounded to the activations' dtype first, as in Gemma's training
    residual_scale: float = 1.0
    """Factor m of what attention and the feed-forward add to the residual stream h (Granite). The stream is kept as
    h / m, so that layers add their outputs as they are: embed_scale contains 1 / m and rms_norm_eps 1 / m^2, because
    norm(h / m, eps / m^2) = norm(h, eps)."""
    logits_scale: float = 1.0  # factor of the logits, which the final norm's weight contains (Granite)
    logits_cap: float = 0.0  # soft cap of the logits z: cap tanh(z / cap) (Gemma 2); 0: none
    ple_ids: int = 0  # rows of the table of per-layer embeddings
    rotated: int = 0
    """RoPE rotates only this many of a head's first dimensions (Phi-4-mini); 0: all. The rows of q and k are then read
    in another order, in which a head's halves hold the halves of these dimensions first."""
    widths: tuple[int, ...] = ()  # each layer's intermediate size, if they differ
    norm_offset: float = 0.0  # added to the weights of all RMSNorms when they are read (Gemma's lack it)
    shares: tuple[str, ...] = ()  # the target's tensors that this draft uses: embed_tokens, lm_head or both
    pard_token: int | None = None  # the mask token of a causal model that drafts in one pass (PARD)

    def kv(self, layer: int) -> KV:
        """The heads of K and V of a layer that attends."""
        return self.layer.kvs[layer] if self.layer.kvs else KV(self.num_kv_heads, self.head_dim)

    def width(self, layer: int) -> int:
        """The intermediate size of a layer's ordinary feed-forward."""
        return self.widths[layer] if self.widths else self.intermediate_size

    @property
    def widest(self) -> int:
        """The largest `head_dim` of a layer."""
        return max((kv.dim for kv in self.layer.kvs), default=self.head_dim)

    @property
    def mixtures(self) -> int:
        """The number of layers that are mixtures of experts."""
        return sum(self.layer.mixture(n) is not None for n in range(self.num_layers))


def _attention(c: ModelConfig, layer: int) -> int:
    """Elements of a layer's projections of attention."""
    kv = c.kv(layer)
    q = (3 if c.layer.gated else 2) * c.num_heads
    own = 0 if kv.source is not None else kv.heads if kv.single else 2 * kv.heads
    return c.hidden_size * kv.dim * (q + own)


def layer_elements(config: ModelConfig, rows: float = 1) -> int:
    """Elements of all layers' linear weights that a pass over so many rows reads in addition to the head; of experts,
    the expected number (`Experts.read`)."""
    c = config
    mixers = [c.layer.mixer(n) for n in range(c.num_layers)]
    mixing = sum(
        _attention(c, n) if m is None else c.hidden_size * (m.projected + m.values) for n, m in enumerate(mixers)
    )
    widths = (c.width(n) for n in range(c.num_layers) if c.layer.mixture(n) is None)
    dense = 3 * c.hidden_size * sum(widths)
    mixing += 3 * c.num_layers * c.layer.ple * c.hidden_size
    if (experts := c.layer.experts) is None:
        return mixing + dense
    mixture = c.hidden_size * (experts.count + 3 * experts.width * experts.read(rows) + 3 * experts.shared)
    return mixing + dense + round(c.mixtures * mixture)
