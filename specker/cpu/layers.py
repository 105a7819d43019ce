"""Decoder layers, heads and single products by the compiled library.

Determinism: the order of a sum depends only on its length, not on other rows, threads or tiles. A row has the same bits
in any batch.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specker.cpu.communicator import Communicator, struct_of
from specker.cpu.library import (
    GATES,
    KV_TYPES,
    MIXERS,
    SCORING,
    AdjustCall,
    ClustersCall,
    Entry,
    Forward,
    Layer,
    Layers,
    Matrix,
    Mixing,
    Past,
    Places,
    Pool,
    ProductCall,
    RestoreCall,
    SampleCall,
    Segment,
    address,
    available,
    native,
    team,
)
from specker.cpu.packed import Packed
from specker.cpu.pages import Place
from specker.kernels.adjust_rows import Arguments as AdjustRows
from specker.kernels.cluster_topk import Arguments as ClusterTopk
from specker.kernels.delta_rows import BLOCK as DELTA_BLOCK
from specker.kernels.variant import rowwise
from specker.layer_weights import KINDS, LayerWeights

MAX_ROWS = 256  # most rows at once with plain weights; a round of more rows runs in blocks (model/decoder.py)
BLOCK = 16  # sums run in steps of this many elements
MOST_CONV = 16  # columns that a convolution reads at most


class Spec(Protocol):
    """The fields of LayerSpec (model/config.py) that the library reads."""

    @property
    def activation(self) -> str: ...
    @property
    def qk_norm(self) -> str: ...
    @property
    def experts(self) -> Any: ...
    @property
    def recurrent(self) -> Any: ...
    @property
    def gated(self) -> bool: ...
    @property
    def cap(self) -> float: ...
    @property
    def v_norm(self) -> bool: ...
    @property
    def kvs(self) -> Sequence[Any]: ...
    def mixer(self, layer: int) -> Any: ...
    def sliding_window(self, layer: int) -> int: ...


class Records(NamedTuple):
    """What L layers with a recurrent state keep, stacked, and where the rows of a call find it. All contiguous.

    The sizes are those of `delta_rows` (kernels/delta_rows.py); a short convolution keeps only its inputs."""

    inputs: Tensor  # [L, pages, page, C] float32, of the convolution
    k: Tensor | None  # [L, pages, page, Hk, Dk] float32
    u: Tensor | None  # [L, pages, page, Hv, Dv] float32
    g: Tensor | None  # [L, pages, page, Hv, 4] float32
    states: Tensor | None  # [L, X, 2, Hv, Dk, Dv] float32
    anchors: Tensor | None  # [L, X, Hv] int64, each text's highest anchor so far
    slots: Tensor  # [T] int64, rows of the flattened pages that the call writes
    table: Tensor  # [B, P] int32, pages by column; pages may repeat, as in a ring
    state_of: Tensor  # [B] int64, each sequence's states


class CachedRows(NamedTuple):
    """T rows of B sequences, the K/V and the records that they write, and the columns that they see; see
    kernels/tree_attention.py."""

    kv: tuple[Tensor, ...]
    """K and V [L, pages, page size, Hkv, D] of the layers of each kind of heads, in the order of `KVCache.kv`: float32,
    bfloat16 or float16, or [.., Hkv, D + 4] int8: D codes and the bytes of their scale, float32."""
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, rows of the flattened pages
    cu_rows: Tensor  # [B + 1] int32
    kv_len: Tensor  # [B] int32
    window: Tensor  # [B] int32
    words: Tensor | None  # [T, W] int64; None: a row sees its sequence up to itself, or with `full` all of it
    table: Tensor  # [B, P] int32
    full: bool = False
    in_rings: tuple[Tensor, Tensor] | None = None
    """Slots and table of the layers with a sliding window, whose K and V are then the third and fourth of `kv`, if
    these have a place of their own (model/rings.py)."""
    records: Records | None = None
    """Of the layers with a recurrent state; K and V are then those of the others. Rings of records hold the rows of a
    call or a draft, and two blocks before them."""


class PairWeights(NamedTuple):
    """How a pair, the embedding of a token and a feature, enters the layers of a head that reads a target's hidden
    states (model/heads.py). E: the head's width. Vectors are float32, `fc` is float32, bfloat16 or `Packed`."""

    embed_norm: Tensor | None  # [E]
    hidden_norm: Tensor | None  # [E]
    fc: Any = None  # [E, 2 E], makes the stream of both, the embedding first; None: the first layer's qkv reads both
    fc_bias: Tensor | None = None  # [E]
    residual: bool = True  # without fc, the stream begins as the feature; False: as its norm
    norm_out: Tensor | None = None  # [E], of the rows after the last layer
    final_norm: Tensor | None = None  # [E], the target's, of features that lack it
    final_eps: float = 0.0

    @property
    def served(self) -> bool:
        """Whether the library supports these sizes and dtypes."""
        vectors = self.embed_norm, self.hidden_norm, self.fc_bias, self.norm_out, self.final_norm
        plain = all(w is None or (fits(w) and w.dtype == torch.float32) for w in vectors)
        return plain and (self.fc is None or (takes(self.fc) and self.fc.shape[1] == 2 * self.fc.shape[0]))


class Stack:
    """A model's decoder layers on a CPU."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        spec: Spec,
        heads: tuple[int, int],
        ropes: Sequence[Tensor | None],
        eps: float,
        scale: float,
        activations: str = "float32",
        ranks: Communicator | None = None,
        whole_mixers: bool = False,
    ):
        """heads: Hq and, unless `spec.kvs` has those of each layer, Hkv; ropes: the table [C, 2, D] of each layer that
        attends; scale: factor of attention's scores. A matrix is float32, bfloat16 or `Packed`, everything else
        float32. `DeltaNet` and `ShortConv` in model/config.py give the order of a recurrent layer's rows in qkv.
        activations: see `Matrix.of`. ranks: those that hold the other parts of these layers, or with
        `whole_mixers` of their feed-forwards alone."""
        self.layers, self.ropes, self.heads, self.activations = layers, ropes, heads, activations
        self._layers = (Layer * len(layers))()
        mixer = spec.recurrent
        counts: dict[bool, int] = {False: 0, True: 0}  # layers of each kind, without those that read others' K/V
        D = next((rope.shape[2] for rope in ropes if rope is not None), 0)
        sizes = {D, *(kv.dim for kv in spec.kvs)}
        self.places: list[Place] = []  # of the matrices
        self._copies: list[Tensor] = []  # that are read in place of those of `layers`
        self._ones = {n: torch.ones(n, dtype=torch.float32, device="cpu") for n in sizes}  # weights of norms of V
        self.convolutions = [None if w.conv is None else w.conv.T.contiguous() for w in layers]  # [K, C]
        for n, (struct, w, rope) in enumerate(zip(self._layers, layers, ropes, strict=True)):
            kv = spec.kvs[n] if spec.kvs else None
            struct.Hkv, struct.D = heads[1:] + (D,) if kv is None else (kv.heads, kv.dim)
            struct.v_norm = self._ones[struct.D].data_ptr() if spec.v_norm else None
            struct.sliding_window, struct.rope = spec.sliding_window(n), address(rope)
            struct.recurrent = int(spec.mixer(n) is not None)
            kind = bool(struct.recurrent if mixer is not None else struct.sliding_window)
            struct.rank, struct.place = counts[kind], sum(counts.values())
            if kv is None or kv.source is None:
                counts[kind] += 1
            else:
                struct.rank, struct.place = self._layers[kv.source].rank, self._layers[kv.source].place
            struct.projects = 0 if kv is None else 2 if kv.source is not None else int(kv.single)
            self._point(struct, w, self.convolutions[n])
        # For a prompt's chunk of more than 256 rows torch is faster with plain weights, but it cannot read packed ones.
        # With 8 to 32 rows it is up to ten times slower, because its threads and the team's threads wake in turn.
        self.packed = any(isinstance(matrix, Packed) for w in layers for matrix in w.products())
        self.most = 1 << 30 if self.packed else MAX_ROWS
        self.mixtures = [w.router is not None for w in layers]
        self.experts, chosen, normalised, scoring, factors = 0, 0, 0, 0, (1.0, 0.0)
        if (rule := spec.experts) is not None:
            self.experts, chosen, normalised = rule.count, rule.chosen, int(rule.normalised)
            scoring, factors = SCORING[rule.scoring], (rule.scale, rule.eps)
        E, widths = layers[0].o.shape[0], [w.down.shape[-1] for w in layers]
        shared = [matrix.shape[-1] for w in layers for matrix in (w.shared_down, w.ple_out) if matrix is not None]
        inner = [chosen * width if mixed else width for width, mixed in zip(widths, self.mixtures, strict=True)]
        self.struct = Layers(
            *(E, heads[0], *(max(getattr(layer, name) for layer in self._layers) for name in ("Hkv", "D"))),
            *(max(widths + shared), max(heads[0] // layer.Hkv for layer in self._layers)),
            *(GATES[spec.activation], self.experts, chosen, normalised, scoring),
            int(any(w.shared_down is not None for w in layers)),
            max(inner + shared),
            *(int(spec.qk_norm == "projection"), int(spec.gated)),
            max((layer.qkv.O + layer.gates.O + 15) // 16 * 16 for layer in self._layers),
            max(layer.o.E for layer in self._layers),
            min((len(rope) for rope in ropes if rope is not None), default=1 << 62),
            *(_mixing(mixer), ctypes.addressof(self._layers), None, eps, scale, *factors, spec.cap),
            struct_of(ranks),
            struct_of(None if whole_mixers else ranks),
        )
        self._communicators = [] if ranks is None else [ranks]
        self.pair_weights: PairWeights | None = None
        self.chains = not spec.kvs and all(w.ple_gate is None for w in layers)  # whether `draft_chain` serves it
        self._windowed = bool(self._layers[0].sliding_window)  # the first layer, whose K and V are first

    def _point(self, struct: Layer, w: LayerWeights, convolution: Tensor | None) -> None:
        """Write the addresses of a layer's weights to its struct."""
        for name, weight in w.present().items():
            if KINDS[name].product:
                activations = self.activations if KINDS[name].quantisable else "float32"
                setattr(struct, name, Matrix.of(_rows(weight), activations))
                runs = [weight] if isinstance(weight, Tensor) else [run.data for run in weight.runs]
                parts = getattr(struct, name).parts
                self.places += [self._place(parts[i], data) for i, data in enumerate(runs)]
            else:
                setattr(struct, name, (weight if name != "conv" or convolution is None else convolution).data_ptr())

    def _place(self, part: Segment, data: Tensor) -> Place:
        def move(copy: Tensor) -> None:
            self._copies.append(copy)
            part.data = copy.data_ptr()

        return Place(data.data_ptr(), data.nbytes, move)

    def read(self, pairs: PairWeights) -> None:
        """From now on, run over pairs."""
        vectors = pairs.embed_norm, pairs.hidden_norm, pairs.fc_bias, pairs.norm_out, pairs.final_norm
        self.pair_weights = pairs  # the struct holds addresses
        self._fc = None if pairs.fc is None else Matrix.of(pairs.fc, self.activations)
        self._entry = Entry(
            *map(address, vectors),
            pairs.final_eps,
            None if self._fc is None else ctypes.pointer(self._fc),
            int(pairs.residual),
        )
        self.struct.entry = ctypes.pointer(self._entry)

    def divide_groups(self, ranks: Communicator) -> None:
        """From now on, each of the ranks attends for its own layers of a group; all have these layers."""
        self.struct.beside = struct_of(ranks)
        self._communicators.append(ranks)

    def check_ranks(self) -> None:
        """Raise RankLost, after a call, if its exchanges lacked a rank."""
        for ranks in self._communicators:
            ranks.check()

    @staticmethod
    def lacks(layer: Spec) -> str:
        """What the layer computes and the library does not, for messages; empty if it computes all."""
        if layer.activation not in GATES:
            return f"the activation {layer.activation}"
        if layer.kvs and all(kv.source is not None for kv in layer.kvs):
            return "attention to the K/V of another model"
        if layer.recurrent is not None and layer.recurrent.kernel > MOST_CONV:
            return f"convolutions over {layer.recurrent.kernel} columns"
        if layer.experts is not None and layer.experts.scoring not in SCORING:
            return f"routers that score by {layer.experts.scoring}"
        return ""

    @staticmethod
    def takes(layers: Sequence[LayerWeights], *head_dims: int) -> bool:
        """Whether the library supports the sizes and dtypes of these layers. `head_dims`: of those that attend."""
        vectors = [x for w in layers for name, x in w.present().items() if not KINDS[name].product]
        matrices = [matrix for w in layers for matrix in w.products()]
        sizes = [matrix.shape[-1] for matrix in matrices]
        sizes += [x.shape[0] for w in layers for x in (w.conv, w.norm_mix) if x is not None]
        return (
            available()
            and all(takes(matrix) for matrix in matrices)
            and all(Stack.takes_sizes(size) for size in head_dims)
            and Stack.takes_sizes(0, sizes)
            and all(fits(x) and x.dtype == torch.float32 for x in vectors)
            and all(w.qkv_bias is None for w in layers if w.recurrent)
        )

    @staticmethod
    def takes_sizes(head_dim: int, sizes: Sequence[int] = ()) -> bool:
        """Whether the library supports layers with this head size of attention and these other sizes: E, Hq D and F;
        of recurrent layers the channels C, Dk, Dv and Hv Dv, and of a shared expert S."""
        return head_dim % (2 * BLOCK) == 0 and all(size % BLOCK == 0 for size in sizes)

    def run(
        self,
        x: Tensor,
        rows: CachedRows,
        groups: Sequence[int],
        aux_layers: Sequence[int] = (),
        features: Tensor | None = None,
        raw: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run groups of layers, as decoder.run_layers does, over x [T, E], or with per-layer embeddings [T, E + L P];
        over pairs, if the stack reads them, x holds the embeddings and `features` [T, E] the features. groups: the
        first layer of each group, then the end. raw: the features lack the target's final norm
        (`PairWeights.final_norm`). Returns [1 + len(aux_layers), T, E]: the residual stream after the last layer, and
        at the depths `aux_layers`; and [mixtures, X + 1] int32: where each expert's choices begin, sorted by expert, in
        each mixture of experts that has run. Raises ValueError, before anything is written, if positions, slots, pages,
        lengths or states point outside of their memory."""
        x, starts, depths = x.contiguous(), call_array(tuple(groups)), call_array(tuple(aux_layers))
        features = None if features is None else features.contiguous()
        assert (features is None) == (self.pair_weights is None) and (features is None or features.shape == x.shape)
        out = torch.empty(1 + len(aux_layers), len(x), self.struct.E, dtype=torch.float32, device="cpu")
        mixtures = sum(self.mixtures[groups[0] : groups[-1]])
        routed = torch.empty(mixtures, self.experts + 1, dtype=torch.int32, device="cpu")
        if rows.in_rings is None and len(rows.kv) > 2:  # of both kinds of layers, over the same pages
            kv = (*rows.kv[2:], *rows.kv[:2]) if self._windowed else rows.kv
            rows = rows._replace(kv=kv, in_rings=(rows.slots, rows.table))
        places, held = placed(rows)
        assert len(x) == places.T
        assert (rows.records is None) == (self.struct.mix.kind == 0) and not (rows.full and rows.records)
        call = Forward(
            ctypes.pointer(self.struct),
            ctypes.pointer(places),
            starts.address,
            len(groups),
            depths.address,
            len(aux_layers),
            x.data_ptr(),
            address(features),
            x.shape[1],
            raw,
            out.data_ptr(),
            routed.data_ptr() if routed.shape[0] else None,
        )
        team().call(native().layers, call)
        self.check_ranks()
        del held
        return out, routed


class CallArray(NamedTuple):
    """Numbers for a call. The struct that holds the address does not keep the array."""

    array: Any
    address: int


@lru_cache(maxsize=256)
def call_array(values: tuple[float, ...], dtype: str = "int64") -> CallArray:
    """The same array for the same numbers: numpy takes longer to make it, and to tell its address, than to look it
    up. No call writes to it."""
    array = np.array(values, dtype)
    return CallArray(array, array.ctypes.data)


def placed(rows: CachedRows) -> tuple[Places, list[Tensor]]:
    """The struct of the rows and the columns they see, and the tensors that must outlive it."""
    words = rows.words
    held = [part.contiguous() for part in (rows.positions, rows.cu_rows, rows.kv_len, rows.window)]
    if words is not None:
        held.append(words.contiguous())
    places = Places(
        rows.positions.shape[0],
        rows.kv_len.shape[0],
        0 if words is None else words.shape[1],
        *(part.data_ptr() for part in held[:4]),
        None if words is None else held[4].data_ptr(),
        int(rows.full),
        rows.table.shape[1],
        rows.kv[0].shape[2],
        _pool(rows.kv[:2], (rows.slots, rows.table), held),
        Pool() if rows.in_rings is None else _pool(rows.kv[2:], rows.in_rings, held),
        Past() if rows.records is None else _past(rows.records, held),
    )
    return places, held


def _pool(kv: tuple[Tensor, ...], index: tuple[Tensor, Tensor], held: list[Tensor]) -> Pool:
    """The struct of the K/V of some layers, and of the rows' slots and their table; `held` gets the tensors that must
    outlive it."""
    k, v = kv
    slots, table = (part.contiguous() for part in index)
    held += slots, table
    size = k.element_size()
    return Pool(
        slots.data_ptr(),
        table.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0) * size,
        k.shape[-1] * size,
        KV_TYPES[k.dtype],
        k.shape[1],
    )


def _past(records: Records, held: list[Tensor]) -> Past:
    """The struct of records; `held` gets the tensors that must outlive it."""
    *memory, slots, table, state_of = records
    assert all(x is None or fits(x) for x in memory)
    held += (own := [part.contiguous() for part in (slots, table, state_of)])
    return Past(
        *map(address, (*own, *memory)),
        records.inputs.shape[1],
        table.shape[1],
        records.inputs.shape[2],
        0 if records.states is None else records.states.shape[1],
    )


def _mixing(mixer: Any) -> Mixing:
    """The struct of a mixer (model/config.py); None if no layer has a recurrent state."""
    if mixer is None:
        return Mixing()
    return Mixing(
        MIXERS[type(mixer).__name__],
        *(getattr(mixer, name, 0) for name in ("key_heads", "value_heads", "key_dim", "value_dim")),
        mixer.channels,
        mixer.kernel,
        DELTA_BLOCK,
        getattr(mixer, "tiled", False),
    )


def product(
    x: Tensor, weight: Any, activations: str = "float32", norm: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """x [T, E] float32 times weight [O, E]^T -> [T, O] float32, after an RMSNorm with weight `norm` [E] if args. The
    weight is float32, bfloat16 or `Packed`, E a multiple of BLOCK. `activations`: see `Matrix.of`."""
    x, y = x.contiguous(), torch.empty(len(x), len(weight), dtype=torch.float32, device="cpu")
    matrix = Matrix.of(weight, activations)
    call = ProductCall(ctypes.pointer(matrix), x.data_ptr(), address(norm), y.data_ptr(), len(x), eps)
    team().run(native().product_of, call)
    return y


def clusters(args: ClusterTopk, draws: Sequence[tuple[float, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """What `kernels.cluster_topk` returns for rows [T, E] float32. The weight and the centroids are float32 or
    bfloat16, E a multiple of BLOCK. `draws`: temperature and seed, one pair for all rows or for each of as many equal
    runs of rows. Rows are rounded to bfloat16 beside a weight of bfloat16."""
    T, hidden, ids = len(args.hidden), args.hidden.contiguous(), args.token_ids.long().contiguous()
    best = torch.empty(T, args.k, dtype=torch.int64, device="cpu")
    values = torch.empty(T, args.k, dtype=torch.float32, device="cpu")
    sums = torch.empty(T if args.with_lse else 0, dtype=torch.float32, device="cpu")
    if not T:
        return best, values, sums
    activations = "bfloat16" if args.weight.dtype == torch.bfloat16 else "float32"
    temperature, seed = zip(*draws, strict=True)
    numbers: list[Any] = [np.array(temperature, np.float64), np.array(seed, np.uint64)]
    at = None if args.noise is None else args.noise[1].contiguous()
    by, eps = (None, 0.0) if args.norm is None else (args.norm[0].contiguous(), args.norm[1])
    call = ClustersCall(
        *(ctypes.pointer(Matrix.of(w, activations)) for w in (args.weight, args.centroids)),
        *map(address, (hidden, by, ids, at)),
        *(each.ctypes.data for each in numbers),
        *(T, args.clusters, args.k, T // len(draws)),
        eps,
        *(best.data_ptr(), values.data_ptr(), sums.data_ptr() if args.with_lse else None),
    )
    team().call(native().cluster_topk, call)
    return best, values, sums


def restored(weight: Any, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """The rows `ids` [n] int64 of a matrix (all rows without ids), restored in float32 and then rounded to `dtype`."""
    count = len(weight) if ids is None else len(ids)
    y = torch.empty(count, weight.shape[1], dtype=torch.float32, device="cpu")
    ids = None if ids is None else ids.contiguous()
    matrix = Matrix.of(weight, "float32")
    team().run(native().restore, RestoreCall(ctypes.pointer(matrix), address(ids), count, y.data_ptr()))
    return y.to(dtype)


def gumbel(seed: int, positions: Tensor, padded: int) -> Tensor:
    """[T, padded] float32, `padded` a multiple of 4: the noise of ids 0 .. padded - 1 at `positions` [T] int64; see
    kernels/noise.py. Runs in the calling thread: torch's threads, once woken, spin for a while and slow down the
    team."""
    positions, out = positions.contiguous(), torch.empty(len(positions), padded, dtype=torch.float32, device="cpu")
    native().gumbel(seed, positions.data_ptr(), len(positions), padded // 4, out.data_ptr())
    return out


def sample(
    logits: Tensor, draws: Sequence[tuple[float, int, float, int]], positions: Tensor, run: int | None = None
) -> Tensor:
    """The tokens [T] int64 that `kernels.sample_rows` draws from logits [T, V] float32 at `positions` [T] int64.
    `draws`: temperature, top_k, top_p and seed for each `run` rows (default: for all rows)."""
    logits, positions, T = logits.contiguous(), positions.contiguous(), logits.shape[0]
    out = torch.empty(T, dtype=torch.int64, device="cpu")
    temperature, top_k, top_p, seed = zip(*draws, strict=True)
    draw_types = (temperature, "float64"), (top_p, "float64"), (top_k, "int64"), (seed, "uint64")
    held = [call_array(*column) for column in draw_types]  # until the call has ended
    call = SampleCall(
        logits.data_ptr(),
        positions.data_ptr(),
        *(column.address for column in held),
        T,
        logits.shape[1],
        run or max(T, 1),
        out.data_ptr(),
    )
    team().call(native().sample, call)
    return out


def adjust(args: AdjustRows) -> Tensor:
    """What `kernels.adjust_rows` returns for logits [T, V] float32. Raises ValueError for numbers that are read and
    point outside of the other arguments."""
    logits, out = args.logits.contiguous(), torch.empty(args.logits.shape, dtype=torch.float32, device="cpu")
    text, window, parents = (None if x is None else rowwise(x) for x in (args.text, args.window, args.parents))
    own = args.prompt, args.length, args.places, args.numbers, args.bias_ids, args.bias
    prompt, length, places, numbers, bias_ids, bias = (None if x is None else x.contiguous() for x in own)
    held = text, prompt, length, window, parents, places, numbers, bias_ids, bias  # until the call has ended
    call = AdjustCall(
        logits.data_ptr(),
        *map(address, held),
        *(*logits.shape, args.window.shape[0], args.text.shape[1], args.window.shape[1]),
        0 if bias is None else bias.shape[1],
        *(0 if x is None else x.stride(0) for x in (text, window, parents)),
        bool(args.floors),
        out.data_ptr(),
    )
    team().call(native().adjust, call)
    return out


def fits(x: Tensor) -> bool:
    """Whether the library may read x: a contiguous CPU tensor outside autograd and torch.compile."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.is_cpu and not (x.requires_grad and torch.is_grad_enabled())
    return plain and x.layout is torch.strided and x.is_contiguous()


def takes(weight: Any) -> bool:
    """Whether the library can read a matrix."""
    if isinstance(weight, Packed):
        return True
    return isinstance(weight, Tensor) and fits(weight) and weight.dtype in (torch.float32, torch.bfloat16)


def _rows(weight: Any) -> Any:
    """A matrix of experts [X, O, E] as [X * O, E]."""
    return weight.flatten(0, 1) if isinstance(weight, Tensor) and weight.dim() == 3 else weight


def serves(x: Tensor, weight: Any) -> bool:
    """Whether `product` takes these arguments."""
    return x.shape[1] == weight.shape[1] and len(x) > 0 and weight.shape[1] % BLOCK == 0 and takes(weight)
