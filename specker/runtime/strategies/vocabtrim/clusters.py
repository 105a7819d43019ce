"""Clusters of a draft head's rows: each draft step reads centroids, then the rows of the best clusters.

No row is left out, so a rare token can be drafted wherever the text leads; each step reads other rows
(kernels/clusters.py). The clusters are made once, by `specker calibrate --clusters FILE`, and are of equal size:
k-means over the head's rows, then an assignment with as many places as a cluster has rows. A centroid begins as the
mean of its rows. Its product with a hidden row is then the mean of their logits, which says little of a cluster with
one likely token among unlikely ones. So text helps: `fitted` moves the centroids until their softmax is each cluster's
share of the head's probabilities.

The file is in the safetensors format: `ids` [C, R] int32, `centroids` [C, E] float32 and `rows` [P, E] float32, a few
rows of the head by which a file of another model is found out, and one metadata entry with the version.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker import cpu
from specker.cpu.packed import Packed
from specker.fields import option
from specker.kernels.clusters import MAX_CLUSTERS, cluster_topk, draws_of
from specker.kernels.residual import add_norm
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model
from specker.model.prefill import prefill
from specker.model.sampling import Draws
from specker.model.weights import Matrix
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.vocabtrim.head import KeptRows

FORMAT, VERSION = "specker-vocab-clusters", 1
CHOSEN = 32  # clusters that a draft step reads by default, as Gemma 4's assistants do
PROBES = 8  # rows of the head in a file
ALIKE = 0.9  # least cosine between a row in the file and the draft's: int4 leaves 0.99, another model's are near 0
SWEEPS = 10  # of k-means
STEPS, BATCH = 1000, 256  # of the fit of centroids: steps, and hidden rows in each
RATE = 0.1  # of the fit's first step, in units of the centroids' root mean square
EXCHANGES = 30  # rounds of the assignment in which a nearer row takes another one's place
WINDOW = 512  # tokens of text that hidden rows see
CHUNK = 1 << 24  # similarities at a time: 64 MiB


@dataclass(frozen=True)
class VocabClusters:
    """Clusters of the ids 0 .. C R - 1."""

    ids: Tensor  # [C, R] int64
    centroids: Tensor  # [C, E] float32
    rows: Tensor  # [P, E] float32, rows of the head at `probes`

    @property
    def probes(self) -> Tensor:
        """The ids of `rows`, spread over the vocabulary."""
        return torch.arange(len(self.rows), dtype=torch.int64, device="cpu") * (self.ids.numel() // len(self.rows))

    def check(self, head: Matrix, path: object) -> None:
        """Raise ValueError unless these are clusters of the rows of `head` [V, E]. `path` is for the message."""
        (C, R), E = self.ids.shape, self.centroids.shape[1]
        if tuple(head.shape) != (C * R, E):
            raise ValueError(
                f"{path} has clusters of {C * R} rows of {E} numbers, but the draft's head is {list(head.shape)}"
            )
        own = dense(head, self.probes)
        if float(torch.cosine_similarity(own, self.rows, dim=1).min()) < ALIKE:
            raise ValueError(f"{path} has clusters of another model's rows: make a file with specker calibrate")

    def to_bytes(self) -> bytes:
        """Serialise; equal clusters give equal bytes."""
        from safetensors.torch import save

        about = {"format": FORMAT, "version": VERSION}
        tensors = {"ids": self.ids.int(), "centroids": self.centroids, "rows": self.rows}
        return save({name: x.contiguous() for name, x in tensors.items()}, {"specker": json.dumps(about)})


def dense(head: Any, ids: Tensor) -> Tensor:
    """The rows `ids` [n] of a head, restored: [n, E] float32 on the CPU."""
    rows = head[ids.to(head.device)]
    return (rows if isinstance(rows, Tensor) else rows.dequantised(torch.float32)).float().cpu()


def read(path: str | Path) -> VocabClusters:
    """Read a file of clusters. Raises ValueError if it is missing, corrupt or something else."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file of vocabulary clusters")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("specker", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is corrupt or truncated ({error})") from error
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise ValueError(f"{path} is no file of vocabulary clusters: make one with specker calibrate --clusters")
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    ids, centroids, rows = (tensors.get(name, none) for name in ("ids", "centroids", "rows"))
    fits = ids.dim() == centroids.dim() == rows.dim() == 2 and len(ids) == len(centroids) > 0 < len(rows)
    every = torch.arange(ids.numel(), dtype=torch.int64, device="cpu")
    if not fits or not torch.equal(ids.flatten().sort().values.long(), every):
        raise ValueError(f"{path}: expected every id once, in clusters of equal size, and a centroid for each")
    return VocabClusters(ids.long(), centroids.float(), rows.float())


# --- making clusters


def usual_count(rows: int) -> int:
    """The default number C of clusters of `rows` rows: the divisor with which a step reads least, C centroids and
    CHOSEN clusters; near sqrt(CHOSEN rows). Raises ValueError if no divisor is within a factor of 4 of that."""
    best = math.sqrt(CHOSEN * rows)
    count = min(_divisors(rows), key=lambda n: (n + CHOSEN * rows // n, n))
    if not best / 4 <= count <= best * 4 or count == rows:
        raise ValueError(f"{rows} rows do not divide into about {best:.0f} clusters of equal size")
    return count


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def clustered(head: Tensor, count: int | None = None, seed: int = 0) -> VocabClusters:
    """`count` clusters of equal size of the rows of a head [V, E] float32 (default: `usual_count`). Raises ValueError
    if `count` does not divide V.

    Lloyd's iterations with clusters of any size find the centroids. Then each row asks the nearest cluster that would
    take it, and a full cluster keeps the nearest rows (Gale and Shapley's deferred acceptance). The few rows that are
    left after EXCHANGES rounds go to the nearest cluster with a free place."""
    V = len(head)
    if not head.isfinite().all():
        raise ValueError("the head has rows that are not finite numbers")
    count = usual_count(V) if count is None else count
    if not 1 <= count <= V or V % count:
        near = sorted(_divisors(V), key=lambda n: abs(math.log(n / max(1, count))))[:2]
        raise ValueError(f"{count} clusters do not divide the {V} rows of the head; {near[0]} would")
    shuffled = torch.randperm(V, generator=torch.Generator().manual_seed(seed), dtype=torch.int64, device="cpu")
    centroids = head[shuffled[:count]].clone()
    for _ in range(SWEEPS):
        nearest = torch.cat([_near(part, centroids).argmax(1) for part in head.split(max(1, CHUNK // count))])
        sums, sizes = torch.zeros_like(centroids).index_add_(0, nearest, head), nearest.bincount(minlength=count)
        centroids = torch.where((sizes > 0).unsqueeze(1), sums / sizes.clamp(min=1).unsqueeze(1), centroids)
    ids = _assigned(head, centroids)
    rows = head[torch.arange(PROBES, dtype=torch.int64, device="cpu") * (V // PROBES)] if V >= PROBES else head[:1]
    return VocabClusters(ids, head[ids].mean(1), rows.clone())


def fitted(found: VocabClusters, head: Tensor, hidden: Tensor, seed: int = 0) -> VocabClusters:
    """The same clusters with centroids fitted to normed hidden rows [N, E] float32, such as the draft's over text.

    Adam minimises the cross entropy between softmax(centroids h) and each cluster's share of softmax(head h), the
    probability that the head gives to its tokens together."""
    (C, R), g = found.ids.shape, torch.Generator().manual_seed(seed)
    by = head[found.ids.flatten()]
    each = hidden.split(max(1, CHUNK // len(by)))
    share = torch.cat([(h @ by.T).view(-1, C, R).logsumexp(2).softmax(1) for h in each])
    with torch.enable_grad(), torch.inference_mode(False):
        centroids = found.centroids.clone().requires_grad_()
        optimiser = torch.optim.Adam([centroids], lr=RATE * float(found.centroids.square().mean().sqrt()))
        decay = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, STEPS)
        for _ in range(STEPS):
            at = torch.randint(len(hidden), (BATCH,), generator=g, dtype=torch.int64, device="cpu")
            loss = -(share[at] * (hidden[at] @ centroids.T).log_softmax(1)).sum(1).mean()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            decay.step()
    return VocabClusters(found.ids, centroids.detach(), found.rows)


def hidden_rows(model: Model, tokens: list[int]) -> Tensor:
    """The normed hidden rows of a text, in windows of WINDOW tokens: [N, E] float32 on the CPU."""
    found, top = [], model.config.num_layers
    with torch.inference_mode():
        for n in range(0, len(tokens), WINDOW):
            some = tokens[n : n + WINDOW]
            cache = KVCache(model.config, len(some), dtype=model.dtype, device=model.device)
            rows = prefill(model, cache, some, (top,), len(some))[top]
            found.append(add_norm(rows, None, model.norm, model.config.rms_norm_eps)[1].float().cpu())
    return torch.cat(found).clone()


def _near(rows: Tensor, centroids: Tensor) -> Tensor:
    """Minus half the squared distance of rows [n, E] to centroids [C, E], up to the row's own length: [n, C]."""
    return torch.addmm(-0.5 * centroids.square().sum(1), rows, centroids.T)


def _assigned(head: Tensor, centroids: Tensor) -> Tensor:
    """Rows assigned to clusters with V / C places: ids [C, R] int64, ascending in each cluster."""
    V, C = len(head), len(centroids)
    R = V // C
    every = torch.arange(V, dtype=torch.int64, device="cpu")
    own, near = torch.full_like(every, -1), head.new_empty(V)  # the cluster of each row, and how near it is
    least = head.new_full((C,), -math.inf)  # a full cluster refuses rows that are no nearer than this
    free, rounds = every, 0
    while len(free):
        found = [_near(head[part], centroids) for part in free.split(max(1, CHUNK // C))]
        best = [z.masked_fill_(z <= least, -math.inf).max(1) for z in found]
        near[free], own[free] = torch.cat([b.values for b in best]), torch.cat([b.indices for b in best])
        order = near.sort(descending=True, stable=True).indices
        order = order[own[order].sort(stable=True).indices]  # by cluster, the nearest first
        sizes = own.bincount(minlength=C)
        place = every - (sizes.cumsum(0) - sizes)[own[order]]
        full = sizes >= R
        rounds += 1
        least[full] = near[order[(sizes.cumsum(0) - sizes)[full] + R - 1]] if rounds < EXCHANGES else math.inf
        free = order[place >= R].sort().values
    return own.sort(stable=True).indices.view(C, R)


# --- the head


@dataclass(frozen=True)
class ClusteredRows:
    """The rows of a head whose draft steps read clusters of them; it takes the place of `KeptRows`."""

    clusters: VocabClusters
    chosen: int  # clusters that a step reads
    ranking: str = ""  # for the user
    text = 0  # no row follows the text
    counts = None

    @property
    def ids(self) -> Tensor:
        """[V] int64, the id of each row."""
        return self.clusters.ids.flatten()

    @property
    def rows(self) -> int:
        """Rows that a step reads."""
        return self.chosen * self.clusters.ids.shape[1]

    def step_bytes(self, weight: Matrix) -> int:
        """Bytes of the head that a step reads."""
        size = weight.element_size() if isinstance(weight, Tensor) else 4 if weight.device.type == "cpu" else 2
        return weight.nbytes * self.chosen // len(self.clusters.ids) + self.clusters.centroids.numel() * size

    def head(
        self, weight: Matrix, norm: Tensor, eps: float, activations: str = "int8", cap: float = 0.0
    ) -> "ClusteredHead":
        """A head with the rows `weight` [V, E], ordered by cluster."""
        return ClusteredHead(weight, norm, eps, activations, cap, kept=self)


@dataclass
class ClusteredHead(LMHead):
    kept: ClusteredRows = field(kw_only=True)

    def __post_init__(self) -> None:
        found, device = self.kept.clusters, self.weight.device
        self.token_ids = found.ids.flatten().to(device)
        self.draftable = set(self.token_ids.tolist())
        dtype = self.weight.dtype if isinstance(self.weight, Tensor) else self.norm.dtype
        self.centroids, self.chosen = found.centroids.to(device, dtype), self.kept.chosen

    @property
    def most(self) -> int:
        return self.kept.rows

    @property
    def step_bytes(self) -> int:
        return self.kept.step_bytes(self.weight)

    def _topk(
        self, final: Final, k: int, draws: Draws, positions: Tensor, with_lse: bool = True, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.centroids is not None and self.token_ids is not None
        norm, noise = None if final.normed else (self.norm, self.eps), draws.noise(positions)
        ids = self.token_ids.view(self.kept.clusters.ids.shape)
        if isinstance(self.weight, Packed):
            how = draws_of(noise), positions, with_lse, self.activations, self.cap
            best, values, lse = cpu.clusters(final.rows, self.weight, self.centroids, ids, self.chosen, k, norm, *how)
            return (best if out is None else out.copy_(best)), values, lse
        # Ranked without the soft cap, which changes no greedy choice.
        return cluster_topk(
            final.rows, self.weight, self.centroids, ids, self.chosen, k, norm, noise, with_lse, out=out
        )


HeadRows = KeptRows | ClusteredRows


def chosen_of(found: VocabClusters, asked: int | None) -> int:
    """How many clusters a step reads. Raises ValueError if that many are not there."""
    C = len(found.ids)
    if asked is not None and asked > min(C, MAX_CLUSTERS):
        raise ValueError(f"{option('vocab_chosen', asked)} is more than the {min(C, MAX_CLUSTERS)} clusters allow")
    return min(C, CHOSEN) if asked is None else asked
