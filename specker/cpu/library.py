"""The compiled library: its structs (csrc/*.h) and the team of threads."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.cpu import build
from specker.layer_weights import KINDS

ACTIVATIONS = {"int8": 0, "bfloat16": 1, "float32": 2}
KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # -> the enum in csrc/layers.h
GATES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "clamped_silu": 3}  # LayerSpec.activation -> the enum in csrc/layers.h


def address(x: Tensor | None) -> int | None:
    """For a struct, which does not keep the tensor."""
    return None if x is None else x.data_ptr()


class Segment(Structure):
    _fields_ = [("data", c_void_p), ("rows", c_int64), ("format", c_int64)]


class Matrix(Structure):
    _fields_ = [("parts", Segment * 3), ("count", c_int64), ("O", c_int64), ("E", c_int64), ("activations", c_int64)]

    @classmethod
    def of(cls, weight: Any, activations: str) -> "Matrix":
        """weight: a tensor [O, E] in float32 or bfloat16, or `Packed`; it must outlive the struct. `activations`:
        the type to which a product rounds x, a key of ACTIVATIONS; with a bfloat16 tensor int8 means bfloat16."""
        if isinstance(weight, Tensor):
            runs = [(weight.data_ptr(), weight.shape[0], 0 if weight.dtype == torch.float32 else 1)]
        else:
            runs = weight.segments
        parts = (Segment * 3)(*(Segment(*run) for run in runs))
        return cls(parts, len(runs), *weight.shape, ACTIVATIONS[activations])


SCORING = {"softmax": 0, "sigmoid": 1}  # config.Experts.scoring -> the enum in csrc/layers.h
MIXERS = {"": 0, "DeltaNet": 1, "ShortConv": 2}  # config.Mixer -> the enum in csrc/layers.h


class Layer(Structure):
    _fields_ = [
        *((name, Matrix if kind.product else c_void_p) for name, kind in KINDS.items()),
        *((name, c_void_p) for name in ("rope", "v_norm")),
        *((name, c_int64) for name in ("Hkv", "D", "projects", "recurrent", "sliding_window", "rank", "place")),
    ]


class Mixing(Structure):
    _fields_ = [(name, c_int64) for name in ("kind", "Hk", "Hv", "Dk", "Dv", "C", "K", "block", "tiled")]


class Entry(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("embed_norm", "hidden_norm", "fc_bias", "norm_out", "final_norm")),
        ("final_eps", c_double),
        ("fc", POINTER(Matrix)),
        ("residual", c_int64),
    ]


class Exchanges(Structure):
    _fields_ = [
        ("memory", c_void_p),
        *((name, c_int64) for name in ("rank", "size", "room", "file", "limit", "sent", "lost")),
    ]


class Layers(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("E", "Hq", "Hkv", "D", "F", "heads", "activation")),
        *((name, c_int64) for name in ("experts", "chosen", "normalised", "scoring", "shared", "inner", "whole")),
        *((name, c_int64) for name in ("gated", "projected", "mixed", "positions")),
        ("mix", Mixing),
        ("layers", c_void_p),
        ("entry", POINTER(Entry)),
        *((name, c_double) for name in ("eps", "scale", "score_scale", "score_eps", "cap")),
        *((name, POINTER(Exchanges)) for name in ("ranks", "mixing", "beside")),
    ]


class Pool(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("slots", "table", "k", "v")),
        *((name, c_int64) for name in ("stride", "head", "format", "count")),
    ]


class Past(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("slots", "table", "state_of")),
        *((name, c_void_p) for name in ("inputs", "k", "u", "g", "states", "anchors")),
        *((name, c_int64) for name in ("count", "pages", "page", "X")),
    ]


class Places(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("T", "B", "W")),
        *((name, c_void_p) for name in ("positions", "cu_rows", "kv_len", "window", "words")),
        *((name, c_int64) for name in ("full", "pages", "page")),
        *((name, Pool) for name in ("all", "near")),
        ("past", Past),
    ]


class Forward(Structure):
    _fields_ = [
        ("model", POINTER(Layers)),
        ("rows", POINTER(Places)),
        ("groups", c_void_p),
        ("group_count", c_int64),
        ("aux_layers", c_void_p),
        ("aux_count", c_int64),
        *((name, c_void_p) for name in ("x", "features")),
        *((name, c_int64) for name in ("row", "raw")),
        *((name, c_void_p) for name in ("out", "routed")),
    ]


class ProductCall(Structure):
    _fields_ = [
        ("m", POINTER(Matrix)),
        *((name, c_void_p) for name in ("x", "norm", "y")),
        ("T", c_int64),
        ("eps", c_double),
    ]


class RestoreCall(Structure):
    _fields_ = [("m", POINTER(Matrix)), ("ids", c_void_p), ("count", c_int64), ("y", c_void_p)]


class ClustersCall(Structure):
    _fields_ = [
        *((name, POINTER(Matrix)) for name in ("weight", "centroids")),
        *((name, c_void_p) for name in ("x", "norm", "ids", "positions", "temperature", "seed")),
        *((name, c_int64) for name in ("T", "chosen", "k", "run")),
        ("eps", c_double),
        *((name, c_void_p) for name in ("best", "values", "sums")),
        ("refused", c_int64),
    ]


class SampleCall(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "positions", "temperature", "top_p", "top_k", "seed")),
        *((name, c_int64) for name in ("T", "V", "run")),
        ("tokens", c_void_p),
    ]


class AdjustCall(Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("logits", "text", "prompt", "length", "window", "parents", "places", "numbers")
        ),
        *((name, c_void_p) for name in ("bias_ids", "bias")),
        *((name, c_int64) for name in ("T", "V", "B", "C", "R", "K")),
        *((name, c_int64) for name in ("text_stride", "window_stride", "parents_stride", "floors")),
        ("out", c_void_p),
        ("refused", c_int64),
    ]


class Rule(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("joint", "scales")),
        *((name, c_int64) for name in ("joint_count", "scale_count")),
        ("token", c_double),
    ]


class ChainCall(Structure):
    _fields_ = [
        ("model", POINTER(Layers)),
        *((name, POINTER(Matrix)) for name in ("embed", "head")),
        ("ranks", POINTER(Exchanges)),
        *((name, c_double) for name in ("scale", "cap")),
        *((name, c_void_p) for name in ("norm", "ids", "own")),
        ("first", POINTER(Places)),
        *((name, c_void_p) for name in ("tokens", "features", "output", "groups", "later_groups")),
        *((name, c_int64) for name in ("group_count", "later_count", "raw")),
        *((name, c_void_p) for name in ("columns", "further")),
        *((name, c_int64) for name in ("last_position", "steps")),
        *((name, c_void_p) for name in ("temperature", "seed", "rules", "drafted", "probability")),
        ("done", c_int64),
    ]


@cache
def _loaded() -> tuple[Any, str | None]:
    """(the library or None, why there is none)."""
    try:
        path = build.library(_tell)
    except build.Unavailable as error:
        return None, str(error)
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:  # such as a file system that is mounted with noexec
        return None, f"the system does not load {path} ({error}): set SPECKER_CACHE to another folder"
    lib.team_new.restype, lib.team_new.argtypes = c_void_p, [c_int, c_void_p, c_int]
    lib.product_of.argtypes = [c_void_p, POINTER(ProductCall)]
    lib.restore.argtypes = [c_void_p, POINTER(RestoreCall)]
    lib.layers.argtypes = [c_void_p, POINTER(Forward), c_int]
    lib.draft_chain.argtypes = [c_void_p, POINTER(ChainCall), c_int]
    lib.cluster_topk.argtypes = [c_void_p, POINTER(ClustersCall), c_int]
    lib.sample.argtypes = [c_void_p, POINTER(SampleCall), c_int]
    lib.adjust.argtypes = [c_void_p, POINTER(AdjustCall), c_int]
    lib.copy_rows.argtypes = [c_int64, c_int64, *[c_void_p] * 4, c_int64]
    lib.copy_rows.restype = None
    lib.scale_columns.restype, lib.scale_columns.argtypes = c_int64, [c_int64]
    lib.gumbel.argtypes = [c_uint64, c_void_p, c_int64, c_int64, c_void_p]
    lib.gumbel.restype = None
    lib.gather_ranks.argtypes, lib.gather_ranks.restype = [POINTER(Exchanges), c_void_p, c_int64, c_void_p], None
    lib.suffix_new.restype, lib.suffix_new.argtypes = c_void_p, [c_void_p, c_int64]
    lib.suffix_free.restype, lib.suffix_free.argtypes = None, [c_void_p]
    lib.suffix_append.argtypes = [c_void_p, c_void_p, c_int64]
    lib.suffix_bytes.restype, lib.suffix_bytes.argtypes = c_int64, [c_void_p]
    lib.suffix_follow.restype, lib.suffix_follow.argtypes = c_int64, [c_void_p, c_void_p, *[c_int64] * 4]
    lib.suffix_draft.restype, lib.suffix_draft.argtypes = c_int64, [c_void_p, c_void_p, *[c_int64] * 6, *[c_void_p] * 3]
    return lib, None


def available() -> bool:
    """Whether the library is compiled or can be."""
    return _loaded()[0] is not None


def converts_halves() -> bool:
    """Whether an instruction of the library's level converts float16."""
    return "f16c" in build.LEVELS[build.level()][0]


def problem() -> str | None:
    """Why the library cannot be compiled or loaded, and a remedy; None if it can."""
    return _loaded()[1]


def native() -> Any:
    lib, why = _loaded()
    if lib is None:
        raise RuntimeError(f"the CPU kernels are not compiled: {why}")
    return lib


_telling: list[Callable[[str], None]] = []


def _tell(sentence: str) -> None:
    for on_progress in _telling:
        on_progress(sentence)


@contextmanager
def on_compile(on_progress: Callable[[str], None]) -> Iterator[None]:
    """Context manager: `on_progress` gets a sentence if the library has to be compiled."""
    _telling.append(on_progress)
    try:
        yield
    finally:
        _telling.remove(on_progress)


# --- the team


def _cpus() -> list[int]:
    """The CPUs of all threads of this process; [] if the system does not list them. OpenMP may bind each of its
    threads, and the calling one, to a CPU (OMP_PROC_BIND, KMP_AFFINITY), which new threads would inherit."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir() or not hasattr(os, "sched_getaffinity"):
        return []
    found: set[int] = set()
    for task in tasks.iterdir():
        with suppress(OSError):  # the thread has ended
            found |= os.sched_getaffinity(int(task.name))
    return sorted(found)


class Team:
    """Threads that run a function of the library together: the caller and `size` - 1 others."""

    def __init__(self, size: int):
        cpus = _cpus()
        self.size = size
        self.handle = native().team_new(size, (c_int * len(cpus))(*cpus), len(cpus))
        if not self.handle:
            raise ValueError(f"the system gives no {size} threads: lower OMP_NUM_THREADS")

    def call(self, function: Any, call: Structure) -> None:
        """Run a function that divides its work among the threads itself."""
        self.run(function, call, self.size)

    def run(self, function: Any, *args: Any) -> None:
        done = function(self.handle, *args)
        if done == 0:
            raise MemoryError
        if done < 0:  # the ops say more
            raise ValueError("positions, slots, pages, lengths or ids point outside of what they are an index into")


@cache
def _team(size: int, pid: int) -> Team:
    return Team(size)


_asked = threading.local()


def team() -> Team:
    """The team of this process with torch's number of threads."""
    return _team(getattr(_asked, "threads", 0) or torch.get_num_threads(), os.getpid())


@contextmanager
def one_torch_thread(when: bool = True) -> Iterator[None]:
    """Let torch's operators run in the calling thread only, if `when`; the team keeps its size. Torch's other threads
    spin for some milliseconds after each operator, on the cores that the team needs."""
    if not when:
        yield
        return
    before, outer = torch.get_num_threads(), getattr(_asked, "threads", 0)
    _asked.threads = outer or before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _asked.threads = outer
