"""Memory limits: arithmetic with made-up free memory, and the messages."""

import collections
import importlib
import math
import weakref

import pytest
import torch
from make_checkpoint import GEMMA3, GEMMA4, SLIDING, make
from recorded import kernels, recording
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import specker
from specker import cpu
from specker.checkpoints import checkpoint
from specker.checkpoints.checkpoint import read_config
from specker.cli import run
from specker.model import memory
from specker.model.cache import KVCache
from specker.model.decoder import Model
from specker.model.memory import Cost, gib, largest, needed, sized
from specker.model.prefill import PAGED_ROWS, prefill
from specker.runtime.strategies.base import LOOKAHEAD

attention = importlib.import_module("specker.kernels.tree_attention")

EIGHT = Cost(position=147_456, passing=131_584, limit=40_960)  # an 8B model in bfloat16
SMALL = Cost(position=114_688, passing=66_048, limit=32_768)
GIB = 1 << 30


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    return make(folder / "target", layers=3, max_context=512), make(
        folder / "draft", layers=1, max_context=2048, seed=1
    )


# --- arithmetic


@pytest.mark.parametrize("costs", [[EIGHT], [EIGHT, SMALL], [SMALL, EIGHT]])
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("room", [GIB // 4, GIB, 7 * GIB // 2, 64 * GIB])
def test_the_largest_context_fits_and_the_next_does_not(costs, page_size, room):
    most = largest(costs, room, page_size, LOOKAHEAD)
    assert 0 < most <= costs[0].limit and needed(costs, most, page_size, LOOKAHEAD) <= room
    assert most == costs[0].limit or needed(costs, most + 1, page_size, LOOKAHEAD) > room


def test_needed_by_hand():
    a, b = Cost(100, 7, 1000), Cost(10, 9, 50)
    # 60 + 4 columns are 4 pages of 16, and so are 50 + 4; the first model's prefill needs more
    assert needed([a, b], 60, 16, 4) == 100 * 64 + 10 * 64 + 9 * 50
    assert needed([a, b], 61, 16, 4) == 100 * 80 + 10 * 64 + 9 * 50
    assert needed([a, b], 100, 16, 4) == 100 * 112 + 10 * 64 + 7 * 100
    assert largest([a], 0, 16, 4) == 0


def test_sized():
    enough = needed([EIGHT], 40_960, 256, LOOKAHEAD)
    assert sized([EIGHT], None, GIB, 256, LOOKAHEAD, None) == (40_960, None)
    assert sized([EIGHT], enough + GIB, GIB, 256, LOOKAHEAD, None) == (40_960, None)
    context, note = sized([EIGHT], enough + GIB - 1, GIB, 256, LOOKAHEAD, None)
    assert context == largest([EIGHT], enough - 1, 256, LOOKAHEAD) < 40_960
    assert note is not None and f"lowered to {context} positions" in note and "40960" in note and gib(enough) in note
    most = largest([EIGHT], 2 * GIB, 256, LOOKAHEAD)
    words = f"max_context=40960 needs {gib(enough)} .* 2.00 GiB are free .* largest max_context that fits is {most}"
    with pytest.raises(ValueError, match=words):
        sized([EIGHT], 3 * GIB, GIB, 256, LOOKAHEAD, 40_960)
    with pytest.raises(ValueError, match=r"40960 positions needs .* 0.00 GiB are free .* not even 2 positions fit"):
        sized([EIGHT], GIB // 2, GIB, 256, LOOKAHEAD, None)


def test_weights_that_do_not_fit():
    billions = 8 * 10**9
    memory.check_weights("m", 2 * billions, billions, torch.bfloat16, 16 * 10**9, "cuda")
    memory.check_weights("m", 8 * billions, billions, torch.float64, None, "cpu")
    for dtype, free, words in (
        (torch.float32, 20 * GIB, "m needs 29.80 GiB .* in float32, and 20.00 GiB are free on the cuda: "
                                  "dtype='bfloat16' needs 14.90 GiB"),
        (torch.float32, 10 * GIB, "not even dtype='bfloat16' would fit, which needs 14.90 GiB"),
        (torch.float16, 10 * GIB, "in float16, and 10.00 GiB .* use quantize='int8' or int4, a smaller model or"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            memory.check_weights("m", dtype.itemsize * billions, billions, dtype, free, "cuda")
    words = "m needs 7.45 GiB for its weights in eight or four bits, and 5.00 GiB .*: use a smaller model or a device"
    with pytest.raises(ValueError, match=words):
        memory.check_weights("m", billions, billions, torch.bfloat16, 5 * GIB, "cuda")


def test_the_message_names_the_next_context_to_try():
    assert "max_context=30720 would fit" in memory.too_long([EIGHT], 40_960, 99 * GIB, GIB, 256, LOOKAHEAD)
    most = largest([EIGHT], GIB, 256, LOOKAHEAD)
    assert f"max_context={most} would fit" in memory.too_long([EIGHT], 40_960, 3 * GIB, GIB, 256, LOOKAHEAD)
    assert "no shorter one would fit" in memory.too_long([EIGHT], 40_960, GIB, GIB, 256, LOOKAHEAD)


def test_the_cost_equals_the_allocation(pair):
    engine = specker.load(*pair, device="cpu", page_size=16)
    found = counted = 0
    for model, cache in ((engine.model, engine.cache), (engine.drafter.model, engine.drafter.cache)):
        kv = 2 * cache.k.nbytes
        found += kv + cache.lengths.nbytes + 8 * cache.capacity + model.ropes[0].nbytes + model.positions.nbytes
        cost = Cost.of(model.config, torch.float32)
        counted += memory.held([cost], 512, 16, LOOKAHEAD)
        assert kv == 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim * 4 * (
            512 + LOOKAHEAD
        )
    # RoPE's table and the positions have no scratch columns; the lengths have one extra entry
    assert counted - 2 * LOOKAHEAD * (2 * 16 * 4 + 8) + 2 * 4 == found


def test_kv_is_counted_in_the_dtype_of_each_model(pair, tmp_path, free_memory):
    """By default float16 where the compiled layers run the model: here one of target and draft."""
    usual = torch.float16 if cpu.available() and cpu.converts_halves() else torch.float32
    compiled = make(tmp_path / "m", layers=3, head_dim=32, max_context=512)
    for target, draft in ((compiled, pair[1]), (pair[0], compiled)):
        engine = specker.load(target, draft, device="cpu", page_size=16)
        models = engine.model, engine.drafter.model
        kinds = [cache.k.dtype for cache in (engine.cache, engine.drafter.cache)]
        assert {*kinds} == {torch.float32, usual}
        assert [*engine.recipe.memory.kv_dtypes] == kinds
        each = zip(models, kinds, strict=True)
        costs = [Cost.of(model.config, torch.float32, kv_dtype=kind) for model, kind in each]
        spare = memory.reserve([model.config for model in models], torch.float32, torch.device("cpu"))
        for short in (0, 1):
            free_memory(needed(costs, 512, 16, LOOKAHEAD) + spare - short)
            engine = specker.load(target, draft, "draft", device="cpu", page_size=16)
            assert ("context" in engine.remarks) == bool(short)
        free_memory(1 << 40)


def test_every_rope_table_is_counted(tmp_path):
    costs = []
    for kind in ({"layer_types": [SLIDING] * 3}, {}):
        engine = specker.load(make(tmp_path, **GEMMA3 | kind), strategy="ar", device="cpu")
        costs.append(Cost.of(engine.model.config, torch.float32).position)
        table = engine.model.ropes[0].nbytes // engine.model.config.max_context
    assert costs[1] - costs[0] == table and len(engine.model.ropes) == 2


LLAMA = {"hidden": 256, "heads": 4, "kv_heads": 2, "max_context": 8192}
GPU = torch.device("cuda", 0)


def test_a_gpu_reserves_what_attention_writes(tmp_path, monkeypatch):
    """Partial results, of which each doubling of a long context adds 16; no scores, since flash attention writes none.
    Of the models' largest passes the largest counts."""
    config = read_config(make(tmp_path / "m", layers=1, **LLAMA))
    cost, cpu = (Cost.of(config, torch.bfloat16, device=device, rows=61) for device in (GPU, torch.device("cpu")))
    assert cpu.split == 0 and cost.passing == 2 * 2 * 16 * 2 < cpu.passing / 50
    for context in (100, 2000, 8192 - LOOKAHEAD, 8192):
        with recording() as log:
            columns = -(-(context + LOOKAHEAD) // 16)
            cache, ints = torch.empty(columns, 16, 2, 16, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
            q, words = torch.empty(61, 4, 16, dtype=torch.bfloat16), torch.zeros(61, 1, dtype=torch.int64)
            attention.launch(q, cache, cache, ints[:1, None].expand(1, columns), *[ints[:1]] * 2, ints, words, 1.0)
        arguments = next(arguments for name, _, arguments in log if name.startswith("_tree_attention_kernel"))
        scratch = sum(4 * math.prod(shape) for _, shape, *_ in arguments[8:10])
        assert cost.largest_pass(context, 16, LOOKAHEAD) == max(scratch, cost.passing * context)
        assert (scratch > cost.passing * context) == (context <= 2000)
    assert Cost.of(config, torch.bfloat16, device=GPU, rows=9999).split * 61 == 1024 * cost.split, "in blocks"
    long, window = (Cost.of(config, torch.float32, device=GPU, rows=rows) for rows in (PAGED_ROWS - 1, PAGED_ROWS + 1))
    assert cpu.passing / 20 > long.passing and long.split == PAGED_ROWS * cost.split // 61, "float32: by tree_attention"
    assert window.split == (PAGED_ROWS + 1) * cost.split // 61


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest new tensor."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.most = max(self.most, out.nbytes)
        return out


@pytest.mark.parametrize(("dtype", "served"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_a_gpu_reserves_what_a_prefill_of_wide_heads_takes(gpu_dtypes, tmp_path, dtype, served):
    """Gemma 4's full layers, which flash attention does not serve: no tensor of a late chunk holds scores, and all are
    within what is reserved."""
    kind = {**GEMMA4, "global_head_dim": 512, "heads": 8, "sliding_window": 256, "max_context": 16384}
    model = Model(checkpoint.read(make(tmp_path, **kind), dtype=dtype, device="cpu", random=0))
    cost = Cost.of(model.config, dtype, device=GPU)
    with recording() as log, torch.inference_mode():
        cache = KVCache(model.config, 16384, dtype=dtype, device="cpu", page_size=256)
        cache.exact_len[0] = 15 * 1024
        with Largest() as seen:
            prefill(model, cache, [3] * 512)
    assert sum(name.startswith("_tree_attention_kernel") for name in kernels(log)) == 512 // PAGED_ROWS * served
    scores = 512 * 16384 * 8 * 4  # of a chunk's rows and heads
    assert cost.split < seen.most <= cost.largest_pass(16384, 256, 0) < scores / 3


class Live(TorchDispatchMode):
    """Counts the bytes of new tensors for as long as they, or views of them, live."""

    def __init__(self):
        super().__init__()
        self.users, self.now, self.most = collections.Counter(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            storage = x.untyped_storage()._cdata if isinstance(x, torch.Tensor) else None
            if storage is None or (storage in before and storage not in self.users):
                continue  # of a tensor that is older
            size = x.untyped_storage().nbytes()
            self.now += size if storage not in self.users else 0
            self.users[storage] += 1
            weakref.finalize(x, self.drop, storage, size)
        self.most = max(self.most, self.now)
        return out

    def drop(self, storage, size):
        self.users[storage] -= 1
        if not self.users[storage]:
            del self.users[storage]
            self.now -= size


def test_a_gpu_reserves_what_a_long_chunk_takes(gpu_dtypes, tmp_path):
    """Of 2,048 rows, with hidden rows of three depths for a head."""
    kind = {"arch": "llama", "layers": 4, "hidden": 128, "ffn": 448, "heads": 8, "max_context": 8192}
    model = Model(checkpoint.read(make(tmp_path, **kind), dtype=torch.bfloat16, device="cpu", random=0))
    with recording(), torch.inference_mode():
        cache = KVCache(model.config, 8192, dtype=torch.bfloat16, device="cpu", page_size=256)
        cache.exact_len[0] = 4096
        with Live() as seen:
            prefill(model, cache, [3] * 2048, (1, 2, 4), 2048)
    passing = Cost.of(model.config, torch.bfloat16, device=GPU).largest_pass(6144, 256, 0)
    logits = 256 * model.config.vocab_size * (2 + 3 * 4)
    reserved = memory.reserve([model.config], torch.bfloat16, GPU) - memory.KERNELS - logits
    assert reserved / 2 < seen.most <= reserved + passing


def test_free(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "none")
    assert memory.free(torch.device("cpu")) is None
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemFree: 3 kB\nMemAvailable:   12 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert memory.free(torch.device("cpu")) == 12 * 1024
    for name, said in {"mem_get_info": (1000, 5000), "memory_reserved": 300, "memory_allocated": 100}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, said=said: said)
    assert memory.free(torch.device("cuda")) == 1200


def test_the_reserve_covers_kernels_on_a_gpu(pair):
    c = checkpoint.read_config(pair[0])
    logits, row = 256 * c.vocab_size * 16, 2 * 3 * c.intermediate_size * 4
    assert memory.reserve([c], torch.float32, torch.device("cuda")) == 2048 * row + logits + (512 << 20)
    common = memory.PREFILL_ROWS * row + logits
    assert memory.reserve([c, c], torch.float32, torch.device("cpu")) == common
    assert memory.reserve([c], torch.float32, torch.device("cpu"), 320) == common + 64 * c.vocab_size * 16


@pytest.mark.parametrize(
    "how", [{"strategy": "draft", "draft_tokens": 4}, {"tree": "2x2"}, {"policy": "plus-minus-one"}, {"policy": "auto"}]
)
def test_the_reserve_counts_the_rows_of_every_sequence(pair, how):
    """The layers run at most 256 rows at once, but a round holds the logits of all its rows."""
    engine = specker.load(*pair, device="cpu", page_size=16, max_context=16, batch_size=64, **how)
    counted = engine.recipe.memory.rows
    assert counted == len(engine.loop.state.logits) >= 64 * 5


# --- an engine with made-up memory


def room_for(pair, context, free_memory):
    """Set the free memory so that this context fits and the next does not; weights are not counted."""
    configs = [checkpoint.read_config(pair[0]), checkpoint.read_config(pair[1], max_context=512)]
    costs = [Cost.of(c, torch.float32) for c in configs]
    spare = memory.reserve(configs, torch.float32, torch.device("cpu"))
    free_memory(needed(costs, context, 16, LOOKAHEAD) + spare)


def test_a_lowered_context_is_reported(pair, free_memory):
    room_for(pair, 100, free_memory)
    engine = specker.load(*pair, "draft", device="cpu", page_size=16)
    most = engine.max_context
    assert 100 <= most < 116 and engine.cache.capacity == engine.drafter.cache.capacity < 512
    assert "the checkpoint's 512" in engine.remarks["context"] and f"lowered to {most}" in engine.remarks["context"]
    out = engine.generate([1, 2, 3], 600)
    assert len(out.tokens) == most - 3 and out.tokens == engine.generate_ar([1, 2, 3], 600).tokens
    with pytest.raises(ValueError, match=f"the largest max_context that fits is {most}"):
        specker.load(*pair, "draft", device="cpu", page_size=16, max_context=300)
    assert specker.load(*pair, "draft", device="cpu", page_size=16, max_context=most).remarks.keys() == {"cpu"}


def test_a_large_batch_leaves_less_for_its_context(pair, free_memory):
    """64 chains of 4 are 320 rows; with the reserve of 256 the longest context would be longer."""
    contexts = []
    for size in (32, 64):
        room_for(pair, 100, free_memory)
        how = {"strategy": "draft", "batch_size": size, "draft_tokens": 4, "policy": "fixed"}
        contexts.append(specker.load(*pair, device="cpu", page_size=16, **how).max_context)
    assert 100 <= contexts[0] < 116 and contexts[1] < 100


def test_a_draft_has_no_more_positions_than_its_target(pair):
    engine = specker.load(*pair, device="cpu", page_size=16)
    assert engine.drafter.cache.capacity == engine.cache.capacity == 512 + LOOKAHEAD
    prompt = [1, 2, 3] * 150
    long = engine.generate(prompt, 600)
    assert len(long.tokens) == 62 and long.tokens == engine.generate_ar(prompt, 600).tokens


def test_del_has_one_cache(pair, free_memory):
    configs = [checkpoint.read_config(pair[0])]
    spare = memory.reserve(configs, torch.float32, torch.device("cpu"))
    need = needed([Cost.of(configs[0], torch.float32)], 512, 16, LOOKAHEAD)
    for short in (0, 1):
        free_memory(need + spare - short)
        engine = specker.load(pair[0], device="cpu", page_size=16, strategy="del")
        assert (engine.max_context == 512) == (short == 0)


@pytest.mark.parametrize(
    ("strategy", "options", "rows"),
    [
        ("vocabtrim", {"vocab_keep": 8, "vocab_text": 4}, 12),
        ("vocabtrim", {"vocab_keep": 0.5, "vocab_text": 4}, 68),
        ("vocabtrim", {}, 128),
        ("del+vocabtrim", {"vocab_keep": 8, "vocab_text": 0}, 8),
    ],
)
def test_the_context_leaves_room_for_a_trimmed_head(pair, free_memory, strategy, options, rows):
    """A drafter copies its head's rows after the context was sized."""
    folders = [str(folder) for folder in pair[: 2 if strategy == "vocabtrim" else 1]]
    configs = [checkpoint.read_config(folder, max_context=512) for folder in folders]
    spare = memory.reserve(configs, torch.float32, torch.device("cpu"))
    need = needed([Cost.of(config, torch.float32) for config in configs], 512, 16, LOOKAHEAD)
    engine = specker.load(*folders, device="cpu", page_size=16, strategy=strategy, **options)
    head = engine.drafters[0].head.weight
    assert len(head) == rows
    for short in (0, 1):
        free_memory(need + spare + head.nbytes - short)
        engine = specker.load(*folders, device="cpu", page_size=16, strategy=strategy, **options)
        assert (engine.max_context == 512) == (short == 0)


def test_weights_are_refused_before_they_are_read(pair, free_memory, monkeypatch):
    free_memory(100_000, weights=True)
    monkeypatch.setattr("safetensors.safe_open", lambda *_, **__: pytest.fail("a file of weights was opened"))
    with pytest.raises(ValueError, match=r"target needs 0\.00 GiB for its weights in float64.*are free on the cpu"):
        specker.load(*pair, device="cpu", dtype="float64")


# --- running out of memory after the checks


def runs_out(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines")


def test_out_of_memory_while_reading(pair, monkeypatch):
    monkeypatch.setattr(checkpoint, "_read_weights", runs_out)
    with pytest.raises(ValueError, match=r"needs .* for its weights in float32"):
        specker.load(*pair, device="cpu")


def test_out_of_memory_while_allocating(pair, monkeypatch):
    monkeypatch.setattr("specker.runtime.engine.allocate", runs_out)
    with pytest.raises(ValueError, match="out of memory with a context of 512 positions: max_context=384 would fit"):
        specker.load(*pair, device="cpu")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_out_of_memory_while_warming_up(pair, monkeypatch, error):
    engine = specker.load(*pair, device="cpu", graphs="on")

    def out(*_):
        raise error

    monkeypatch.setattr("specker.runtime.warmup.launch", out)
    with pytest.raises(ValueError, match="out of memory with a context of 512 positions: max_context=384 would fit"):
        engine.warmup()


def test_out_of_memory_while_decoding(pair, tmp_path, monkeypatch, capsys):
    engine = specker.load(*pair, device="cpu")
    sentence = "out of memory with a context of 512 positions: max_context=384 would fit"
    stream = engine.stream([1, 2, 3], 40)
    next(stream)
    monkeypatch.setattr("specker.runtime.loop.launch", runs_out)
    for call in (
        lambda: next(stream), lambda: engine.generate([1], 9), lambda: engine.generate_ar([1], 9),
        lambda: list(engine.stream([1], 9)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            call()
    text = make(tmp_path, layers=3, max_context=512, tokenizer=True)
    assert run.main(["--target", str(text), "--strategy", "ar", "--device", "cpu", "--prompt", "x"]) == 2
    spelt = sentence.replace("max_context=384", "--max-context 384")
    assert capsys.readouterr().err.endswith(f"specker: error: {spelt}\n")


def test_other_errors_are_not_reported_as_out_of_memory():
    with pytest.raises(ValueError, match="said"), memory.reported_as(lambda: "said"):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    with pytest.raises(RuntimeError, match="another"), memory.reported_as(lambda: "said"):
        raise RuntimeError("another")


@pytest.mark.parametrize(
    ("folder", "limit", "used", "total"),
    [(".", "max", "current", ""), ("memory", "limit_in_bytes", "usage_in_bytes", "total_")],
)
def test_a_control_group_allows_what_it_does_not_hold(tmp_path, monkeypatch, folder, limit, used, total):
    """Pages of files that it holds can be freed; those of shared memory cannot. Without a limit all is allowed."""
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.allowed(500) == 500
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    for name, text in ((limit, "1000\n"), (used, "900\n")):
        (group / f"memory.{name}").write_text(text)
    files, shared = ("file", "shmem") if not total else ("total_cache", "total_shmem")
    (group / "memory.stat").write_text(f"anon 400\n{files} 500\n{shared} 200\n")
    assert memory.allowed(5000) == 400 and memory.allowed(300) == 300
    (group / f"memory.{used}").write_text("1500\n")
    assert memory.allowed(5000) == 0
    (group / f"memory.{limit}").write_text("9223372036854771712\n" if total else "max\n")
    assert memory.allowed(5000) == 5000
