"""Memory checks: of the weights before reading them, and of the K/V of a context before allocating it.

The arithmetic is independent of the device: bytes in, positions out. `free` returns the available bytes. If an
allocation fails anyway, `reported_as` turns the error into a sentence.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specker.fields import option
from specker.kernels.tiles import MAX_ROWS
from specker.kernels.tree_attention import partial_bytes, split_count, split_unit
from specker.model.chunks import SHORT, Chunks
from specker.model.config import ModelConfig
from specker.model.kv_formats import kept_dim
from specker.model.prefill import FLASH_DIM, PAGED_ROWS, serves_flash
from specker.model.rings import ring_columns, ringed
from specker.model.states import saved_bytes, sequence_bytes

PREFILL_ROWS = 2 * SHORT  # rows of a prefill chunk, doubled
LOGIT_ROWS = 256  # rows of logits to leave memory for at least: the largest window of one sequence
KERNELS = 1 << 29  # bytes on a GPU for compiled kernels, cuBLAS and captured graphs: an assumption
CPU = torch.device("cpu")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of a process in a container, its own
CONTROLS = (  # v2 and v1: folder; files of the limit and the use; entries of memory.stat for files and shared memory
    (".", "memory.max", "memory.current", "file", "shmem"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
)


@dataclass(frozen=True)
class Cost:
    """Bytes per position of the context, for one model."""

    position: int  # K and V, RoPE's tables and the indices: held for the engine's life
    passing: int  # of a prefill chunk: K and V of a layer on a GPU, otherwise the mask and the scores
    limit: int  # positions that the checkpoint supports
    ring_position: int = 0  # K and V of the layers in rings, held for the positions that rings have; not in `position`
    ring: int = 0  # positions that a ring has
    rings: int = 0  # sequences
    split: int = 0  # of tree_attention on a GPU: its partial results, per split of the context
    unit: int = 0  # columns of attention's shortest splits
    states: int = 0  # recurrent states and records of all sequences, whatever the context

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        dtype: torch.dtype,
        rings: int = 0,
        device: torch.device = CPU,
        rows: int = 0,
        sequences: int = 1,
        saved: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> "Cost":
        """`dtype`: of the activations. `rings`: the sequences of a cache that keeps layers with a sliding window in
        rings (model/rings.py); 0: it keeps all layers in pages. `rows`: of the largest verify pass. `sequences`: of the
        cache. `saved`: columns whose recurrent states it can save. `kv_dtype`: of K and V; None: `dtype`."""
        attending = [n for n in range(config.num_layers) if config.layer.mixer(n) is None]
        own = {n: heads for n in attending if (heads := config.kv(n)).source is None}
        kept = kv_dtype or dtype
        of = {n: 2 * heads.heads * kept_dim(heads.dim, kept) * kept.itemsize for n, heads in own.items()}
        each = max(of.values(), default=0)
        ring_position = sum(of[n] for n, apart in enumerate(ringed(config)) if apart) if rings else 0
        kv = sum(of.values()) - ring_position
        tables = {config.layer.rope(n): config.kv(n).dim for n in range(len(config.layer.ropes) or 1)}
        rope = sum(tables.values()) * 2 * max(4, dtype.itemsize)
        scores = 2 * config.num_heads * max(4, dtype.itemsize)  # before and after the softmax, in float32 at least
        gpu, ring = device.type == "cuda", ring_columns(config)
        flashes = gpu and serves_flash(config, dtype) and config.widest <= FLASH_DIM
        paged = gpu and config.causal and not flashes  # a prefill attends by tree_attention
        passing = each if flashes or paged else PREFILL_ROWS * (1 + scores)
        rows = min(max(rows, PAGED_ROWS if paged else 0), MAX_ROWS)
        split = partial_bytes(rows, config.num_heads, config.widest) if gpu else 0
        unit = min((split_unit(heads.heads) for heads in own.values()), default=split_unit(config.num_kv_heads))
        states = sequences * sequence_bytes(config, dtype) + saved * saved_bytes(config, dtype)
        return cls(kv + rope + 8 + 8 + 4, passing, config.max_context, ring_position, ring, rings, split, unit, states)

    def largest_pass(self, context: int, page_size: int, lookahead: int) -> int:
        """Bytes that the prefill of a context or a verify pass after it takes beside K and V, whichever are more."""
        context = min(context, self.limit)
        columns = -(-(context + lookahead) // page_size) * page_size
        splits = split_count(columns, self.unit) if self.split else 0
        return max(self.passing * context, self.split * splits if splits > 1 else 0)

    def kv(self, pages: int, page_size: int) -> int:
        """Bytes of a pool of `pages`, and of the recurrent states. The rings have at most as many; if they have fewer,
        an index leads to them."""
        ring = self.rings * -(-self.ring // page_size)
        inside = self.ring_position * min(pages, ring) + (8 * pages if self.ring_position and ring < pages else 0)
        return (self.position * pages + inside) * page_size + self.states


def reserve(configs: Sequence[ModelConfig], dtype: torch.dtype, device: torch.device, rows: int = 0) -> int:
    """Bytes to leave free beside weights and K/V: the widest activations of a prefill chunk, four copies of the logits
    of a verify pass (one in the dtype, three in float32: raw, divided by the temperature, with noise), and on a GPU
    KERNELS. `rows`: of the largest verify pass, all sequences together. The layers run many rows in blocks, but the
    logits of all rows are held at once. If the warm-up needs more, it ends with the error of `CacheMemory.running`,
    which names a shorter context."""
    vocab, activations = max(c.vocab_size for c in configs), max(_activations(c, dtype, device) for c in configs)
    kernels = KERNELS if device.type == "cuda" else 0
    return activations + max(rows, LOGIT_ROWS) * vocab * (dtype.itemsize + 3 * 4) + kernels


def _activations(c: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of a feed-forward's activations in a prefill chunk, doubled for what else there is. In a mixture a row has
    some in each expert that it chose, and the terms of the weighted sum in float32. On a CPU compiled layers take short
    chunks, and what `Cost.passing` reserves for scores covers torch's long ones, which write none."""
    experts, chunk = c.layer.experts, Chunks.of(c).long
    if experts is None:
        rows = PREFILL_ROWS if device.type == "cpu" else max(PREFILL_ROWS, chunk)
        return 2 * rows * 3 * max(c.widths, default=c.intermediate_size) * dtype.itemsize
    wide = max(experts.chosen * experts.width, experts.shared, c.intermediate_size if experts.dense else 0)
    return chunk * (2 * 3 * wide * dtype.itemsize + 4 * experts.chosen * c.hidden_size)


def needed(costs: Sequence[Cost], context: int, page_size: int, lookahead: int) -> int:
    """Bytes that a context needs: the K/V of all models, and what one model at a time takes beside it."""
    passing = (cost.largest_pass(context, page_size, lookahead) for cost in costs)
    return held(costs, context, page_size, lookahead) + max(passing)


def held(costs: Sequence[Cost], context: int, page_size: int, lookahead: int) -> int:
    """Bytes of all models' K/V, in whole pages and with the scratch columns."""
    pages = (-(-(min(context, cost.limit) + lookahead) // page_size) for cost in costs)
    return sum(cost.kv(count, page_size) for cost, count in zip(costs, pages, strict=True))


def largest(costs: Sequence[Cost], available: int, page_size: int, lookahead: int) -> int:
    """The longest context, up to the first model's limit, that fits into `available` bytes; 0 if none does."""
    return bisect_right(range(1, costs[0].limit + 1), available, key=lambda n: needed(costs, n, page_size, lookahead))


def sized(
    costs: Sequence[Cost], free: int | None, spare: int, page_size: int, lookahead: int, asked: int | None
) -> tuple[int, str | None]:
    """The context to run with, and a note if memory allows less than the first model's limit (else None).

    `free`: bytes, None for no limit; `spare` of them stay free. `asked`: the user's `max_context`, or None. The models'
    limits already include it, and it is never lowered. Raises ValueError if it does not fit, or if no context fits."""
    limit = costs[0].limit
    if free is None or (need := needed(costs, limit, page_size, lookahead)) <= free - spare:
        return limit, None
    most = largest(costs, free - spare, page_size, lookahead)
    about = f"{gib(need)} for K/V and a prefill, and {gib(max(0, free - spare))} are free beside {gib(spare)} kept for "
    about += "activations"
    if most < 2:
        raise ValueError(f"a context of {limit} positions needs {about}: not even 2 positions fit")
    if asked is not None:
        raise ValueError(
            f"{option('max_context', asked)} needs {about}: the largest {option('max_context')} that fits is {most}"
        )
    return most, f"the context is lowered to {most} positions: the checkpoint's {limit} need {about}"


def check_weights(name: str, size: int, elements: int, dtype: torch.dtype, free: int | None, where: str) -> None:
    """Raise ValueError if a model's weights, `size` bytes, do not fit into `free` bytes (None: unknown)."""
    if free is not None and size > free:
        raise ValueError(too_heavy(name, size, elements, dtype, free, where))


def too_heavy(name: str, size: int, elements: int, dtype: torch.dtype, free: int | None, where: str) -> str:
    """The message for weights that do not fit: the bytes needed, and what would fit."""
    quantised = size < elements * dtype.itemsize
    kind = "eight or four bits" if quantised else str(dtype).removeprefix("torch.")
    need = f"{name} needs {gib(size)} for its weights in {kind}"
    need += f", and the {where} has too little memory" if free is None else f", and {gib(free)} are free on the {where}"
    half = 2 * elements
    if quantised:
        return f"{need}: use a smaller model or a device with more memory"
    if dtype.itemsize == 2:
        return f"{need}: use {option('quantize', 'int8')} or int4, a smaller model or a device with more memory"
    if free is None or half <= free:
        return f"{need}: {option('dtype', 'bfloat16')} needs {gib(half)}"
    return f"{need}: not even {option('dtype', 'bfloat16')} would fit, which needs {gib(half)}"


def too_long(costs: Sequence[Cost], context: int, available: int, spare: int, page_size: int, lookahead: int) -> str:
    """The message if memory runs out although `context` seemed to fit. `available`: bytes that are free or in K/V. The
    suggested context leaves twice `spare` bytes and is at least a quarter shorter."""
    most = min(largest(costs, available - 2 * spare, page_size, lookahead), context - context // 4)
    if most < 2:
        return f"out of memory with a context of {context} positions: no shorter one would fit"
    return f"out of memory with a context of {context} positions: {option('max_context', most)} would fit"


@dataclass(frozen=True)
class CacheMemory:
    """The memory that an engine's caches must fit into."""

    configs: tuple[ModelConfig, ...]  # the models that have a cache of their own, the target first
    dtype: torch.dtype
    device: torch.device
    page_size: int
    lookahead: int  # columns of each cache beyond the context
    rows: int  # of the largest verify pass, all sequences together; 0 if another engine verifies
    rings: int  # sequences of the target's cache, which keeps sliding windows in rings; 0 if another engine runs it
    sequences: int  # of each cache
    saved: int  # columns whose recurrent states each cache can save
    kv_dtypes: tuple[torch.dtype, ...]  # of each model's K and V

    def of_drafts(self) -> "CacheMemory":
        """The same if another engine runs the target."""
        return replace(self, configs=self.configs[1:], kv_dtypes=self.kv_dtypes[1:], rows=0, rings=0)

    def sized(self, asked: int | None, copies: int = 0) -> tuple[int, str | None]:
        """`sized` with the memory that is free after loading the weights, less `copies` bytes that drafters will copy
        from them."""
        return sized(self._costs, _less(free(self.device), copies), self._spare, self.page_size, self.lookahead, asked)

    def pool(self, sequences: int, asked: int | None, copies: int = 0) -> tuple[int | None, str | None]:
        """(positions in the K/V pool, note). Positions are None if each of `sequences` has a whole context; the note
        says when memory allows less. `asked`: `kv_tokens`; `copies`: as in `sized`. Raises ValueError if it does not
        fit."""
        context = self.configs[0].max_context + self.lookahead
        if sequences == 1:
            return None, None
        limit, page, costs = _less(free(self.device), copies), self.page_size, self._costs
        least = -(-context // page)
        whole = pages = sequences * least
        if limit is not None:
            first = needed(costs, self.configs[0].max_context, page, self.lookahead)

            def more(count: int) -> int:
                return sum(cost.kv(count, page) - cost.kv(least, page) for cost in costs)

            pages = least + bisect_right(range(least + 1, whole + 1), limit - self._spare - first, key=more)
        most = pages * page
        if asked is not None:
            if asked > most and pages < whole:
                raise ValueError(
                    f"{option('kv_tokens', asked)} does not fit: the largest {option('kv_tokens')} that fits is {most}"
                )
            return asked, None
        if pages == whole:
            return None, None
        note = f"the K/V pool has {most} positions for {sequences} sequences, because memory allows no more"
        return most, f"{note}: some requests may wait"

    def allocating(self) -> AbstractContextManager[None]:
        """Context manager around allocating the caches: out of memory becomes a ValueError."""
        return reported_as(lambda: self._too_long(0))

    def running(self) -> AbstractContextManager[None]:
        """Context manager around running with the caches: out of memory becomes a ValueError."""
        context = self.configs[0].max_context
        return reported_as(lambda: self._too_long(held(self._costs, context, self.page_size, self.lookahead)))

    @property
    def _costs(self) -> list[Cost]:
        rings = self.rings, *(0 for _ in self.configs[1:])
        return [
            Cost.of(config, self.dtype, ring, self.device, self.rows, self.sequences, self.saved, kv_dtype)
            for config, ring, kv_dtype in zip(self.configs, rings, self.kv_dtypes, strict=True)
        ]

    @property
    def _spare(self) -> int:
        return reserve(self.configs, self.dtype, self.device, self.rows)

    def _too_long(self, in_caches: int) -> str:
        available, context = (free(self.device) or 0) + in_caches, self.configs[0].max_context
        return too_long(self._costs, context, available, self._spare, self.page_size, self.lookahead)


def free(device: torch.device) -> int | None:
    """Bytes that can be allocated now; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # in torch's pool
        return torch.cuda.mem_get_info(device)[0] + unused
    if not MEMINFO.is_file():
        return None
    lines = (line.split() for line in MEMINFO.read_text().splitlines())
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)


def allowed(available: int) -> int:
    """How many of these bytes the control group of the process, such as a container's, still allows (cgroup v2 or v1).
    What it holds of files counts as free, as in `free`."""
    for folder, *names, files, shared in CONTROLS:
        try:
            limit, used = (int((CGROUP / folder / name).read_text()) for name in names)
            held = dict(line.split() for line in (CGROUP / folder / "memory.stat").read_text().splitlines())
            return max(0, min(available, limit - used + int(held[files]) - int(held[shared])))
        except (OSError, ValueError, KeyError):  # another version, or "max"
            continue
    return available


def _less(available: int | None, taken: int) -> int | None:
    return None if available is None else max(0, available - taken)


@contextmanager
def reported_as(sentence: Callable[[], str]) -> Iterator[None]:
    """Turn an out-of-memory error inside the context into ValueError(sentence())."""
    try:
        yield
    except RuntimeError as error:  # torch, CUDA and Triton raise several types; the texts are stable
        if not any(text in str(error) for text in ("out of memory", "can't allocate memory")):
            raise
        raise ValueError(sentence()) from error


def gib(count: int) -> str:
    """Format bytes as GiB."""
    return f"{count / 2**30:.2f} GiB"
