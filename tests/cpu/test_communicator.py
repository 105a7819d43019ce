"""Ranks of one machine that exchange through shared memory: whole tensors, layers of which each has a part, groups of
layers of which each attends for some, and lost ranks."""

import os
import signal
import time

import cases
import pytest
import torch
from make_checkpoint import GEMMA3, GPT_OSS, LFM2_MOE, QWEN3_MOE, QWEN3_NEXT, make
from ranks import in_ranks, seen_by
from stacks import SIZES, cache_of, model_of, near

from specker.checkpoints.checkpoint import read
from specker.cpu import communicator
from specker.cpu.communicator import RankLost
from specker.cpu.library import one_torch_thread
from specker.model.decoder import Model, forward
from specker.model.prefill import prefill
from specker.model.split import Part
from specker.runtime.strategies.easyspec.layer_groups import LayerParallel, Schedule

KINDS = {
    "qwen2": {"arch": "qwen2"},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "gemma3": GEMMA3 | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "experts": QWEN3_MOE | {"moe_intermediate_size": 64, "mlp_only_layers": [2]},
    "gpt-oss": GPT_OSS | {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "mixed": QWEN3_NEXT,
    "short": LFM2_MOE,
}
TEXT = list(range(1, 40))


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_what_the_others_send(tmp_path, size):
    """Also more than a slot holds, and many messages while some ranks are slow."""
    lengths = [1, 5, communicator.ROOM // 4 + 3, 3 * communicator.ROOM // 4, *range(1, 200)]

    def of_rank(rank, length):
        return torch.arange(length, dtype=torch.float32) * (rank + 1)

    def work(memory):
        rank, alike = memory.struct.rank, []
        for n, length in enumerate(lengths):
            if n % 50 == rank:
                time.sleep(0.01)
            out = torch.empty(size, length)
            memory.gather(of_rank(rank, length), out)
            alike.append(torch.equal(out, torch.stack([of_rank(r, length) for r in range(size)])))
        return alike

    assert in_ranks(size, tmp_path, work) == [[True] * len(lengths)] * size


@pytest.mark.parametrize("how", ["ends", "killed", "hangs"])
def test_a_lost_rank_is_noticed(tmp_path, how):
    """One that has ended at once, and one that hangs after the limit."""

    def work(memory):
        x, out = torch.ones(3), torch.empty(2, 3)
        memory.gather(x, out)
        if memory.struct.rank == 1:
            if how == "hangs":
                memory.limit(2)
                time.sleep(1)
                return ""
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(0)
        memory.limit(0.3 if how == "hangs" else 60)
        start = time.monotonic()
        for _ in range(2):  # what follows does not wait again
            with pytest.raises(RankLost) as lost:
                memory.gather(x, out)
        assert time.monotonic() - start < 30
        return str(lost.value)

    seconds = "0.3" if how == "hangs" else "60"
    message = f"another process of this job ended, or did not answer within {seconds} s"
    assert in_ranks(2, tmp_path, work)[0] == message


def hidden_of(model, count=7, *groups):
    """The rows of `count` tokens after TEXT. `groups`: a schedule of layers, and the ranks that share it."""
    cache = cache_of(model)
    with torch.inference_mode():
        prefill(model, cache, TEXT)
        rows, embedded = cache.after([len(TEXT)], [count]), model.embed_tokens(torch.arange(count))
        if groups:
            return LayerParallel(model, cache, *groups).forward(rows, embedded).hidden
        return forward(model, cache, rows, embedded).hidden


@pytest.mark.parametrize(
    ("kind", "size", "threads"),
    [*((kind, 2, 1) for kind in KINDS), ("biases", 4, 1), ("gpt-oss", 4, 1), ("experts", 2, 2)],
)
def test_parts_of_layers_make_the_layers(tmp_path, kind, size, threads):
    """With equal bits on all ranks, and for a row alone."""
    folder = make(tmp_path / "model", **SIZES | KINDS[kind] | {"ffn": 128})
    whole = Model(read(folder, dtype=torch.float32, device="cpu"))

    def work(memory):
        torch.set_num_threads(threads)
        with one_torch_thread():  # in a fork, OpenMP waits for the threads of the process that forked
            part = Part(memory.struct.rank, size)
            model = Model(read(folder, dtype=torch.float32, device="cpu", part=part), ranks=seen_by(memory))
            assert model.stack is not None
            return hidden_of(model), hidden_of(model, 1), [w.numel() for w in model.matrices]

    found = in_ranks(size, tmp_path, work)
    rows = [rank[0] for rank in found]
    assert near(rows[0], hidden_of(whole))
    assert all(torch.equal(other, rows[0]) for other in rows)
    assert all(torch.equal(alone[0], rows[0][0]) for _, alone, _ in found)
    assert sum(found[0][2]) < sum(w.numel() for w in whole.matrices)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_groups_divided_over_ranks_have_the_bits_of_one_process(tmp_path, size):
    """Each rank attends for some of a group's layers, with four ranks one of them for none."""
    schedule = Schedule(((0,), (1, 2, 3), (4, 5), (6,)))
    model = model_of(tmp_path / "model", "qwen2", layers=7)
    want = hidden_of(model, 7, schedule)
    found = in_ranks(size, tmp_path, lambda memory: hidden_of(model, 7, schedule, seen_by(memory)))
    assert all(torch.equal(rank, want) for rank in found)


@pytest.mark.parametrize(("layout", "size"), cases.diagonal(["tensor", "both"], [2, 4]))
def test_the_parts_of_a_draft_make_the_draft(tmp_path, layout, size):
    """Layers in sequence, then in groups, whose attention is divided by heads or by layers."""
    schedule = Schedule(((0,), (1, 2, 3), (4,)))
    folder = make(tmp_path / "model", **SIZES | KINDS["biases"] | {"ffn": 128, "layers": 5})
    whole = Model(read(folder, dtype=torch.float32, device="cpu"))

    def work(memory):
        ranks, part = seen_by(memory), Part(memory.struct.rank, size, layout == "both")
        model = Model(read(folder, dtype=torch.float32, device="cpu", part=part), ranks=ranks)
        assert model.stack is not None
        return hidden_of(model, 7, schedule, *([ranks] if layout == "both" else []))

    found = in_ranks(size, tmp_path, work)
    assert near(found[0], hidden_of(whole, 7, schedule))
    assert all(torch.equal(rank, found[0]) for rank in found)


def test_a_rank_that_is_lost_within_the_layers_ends_them(tmp_path):
    folder = make(tmp_path / "model", "qwen2", **SIZES | {"ffn": 128})

    def work(memory):
        part = Part(memory.struct.rank, 2)
        model = Model(read(folder, dtype=torch.float32, device="cpu", part=part), ranks=seen_by(memory))
        hidden_of(model)
        if memory.struct.rank:
            os._exit(0)
        with pytest.raises(RankLost, match="another process of this job ended, or did not answer within 60 s"):
            hidden_of(model)
        return True

    assert in_ranks(2, tmp_path, work) == [True, None]


def test_without_room_there_is_no_file(monkeypatch):
    """A container's /dev/shm may be small: to write beyond its end would end the process."""
    before = set(communicator.FOLDER.glob("specker-*"))
    monkeypatch.setattr(communicator, "ROOM", 1 << 50)
    assert communicator.new_file(2) is None and set(communicator.FOLDER.glob("specker-*")) <= before
    monkeypatch.setattr(communicator, "FOLDER", communicator.FOLDER / "missing")
    assert communicator.new_file(2) is None
    assert communicator.opened("/dev/shm/specker-of-another-machine", 0, 2) is None
