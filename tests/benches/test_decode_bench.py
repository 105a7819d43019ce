"""bench/decode.py: bytes of a step by hand, goals, every case on a tiny shape, and cases that cannot run."""

import pytest
import torch

from bench import decode
from bench.decode import Args, Bench, Case, Decoded, Goal
from bench.harness import Timing
from bench.shapes import step_bytes
from specker.checkpoints import buffers
from specker.checkpoints.checkpoint import read
from specker.kernels import quant
from specker.model import memory
from specker.model.decoder import Model

RANDOM = "with random weights a run measures time and memory only: its text and acceptance mean nothing"


@pytest.fixture
def bench(tmp_path):
    (tmp_path / "shapes").mkdir()
    return Bench(Args(device="cpu", dtype="float32", rounds=4), tmp_path / "shapes")


@pytest.fixture
def rows_of(results, command_line):
    """Runs the bench with the given flags; returns the saved rows."""

    def run(*flags):
        how = ["--device", "cpu", "--dtype", "float32", "--rounds", "3", "--save"]
        command_line(["bench/decode.py", *how, *flags])
        decode.main()
        return results()

    return run


def timing(*seconds):
    return Timing(tuple(sorted(seconds)), None)


# --- arithmetic


@pytest.fixture
def model(bench, monkeypatch):
    """Makes a shape's model without values, as on a GPU."""

    class Anywhere(torch.Generator):
        def __new__(cls, device=None):
            return super().__new__(cls)

    monkeypatch.setattr(torch, "Generator", Anywhere)
    monkeypatch.setattr(buffers, "_fill", lambda *_: None)
    monkeypatch.setattr(quant, "CHUNK", 1 << 40)
    monkeypatch.setattr(memory, "free", lambda device: 1 << 50)

    def made(shape, quantize=None):
        checkpoint = read(bench.folder / shape, dtype=torch.bfloat16, device="meta", random=0, quantize=quantize)
        return Model(checkpoint)

    return made


def test_bytes_of_a_step_by_hand(bench, model):
    # qkv 64 x 128 (4 + 2 x 2 heads of 16), o 64 x 64, gate, up and down 3 x 64 x 96, two norms of 64; two layers, the
    # last norm, a head of 512 x 64; in float32, and 10 columns of K and V of 2 layers and 2 heads of 16
    weights = 2 * (8192 + 4096 + 18432 + 128) + 64 + 32768
    tiny = bench.engine(Case("ar", "tiny", 64)).model
    assert step_bytes(tiny, 0) == 4 * weights
    assert step_bytes(tiny, 10) == 4 * (weights + 10 * 128) and step_bytes(tiny, 10, 3) == 4 * (weights + 30 * 128)
    # layers 32 x (41,943,040 + 176,160,768), norms 65 x 4,096, head 128,256 x 4,096
    large = model("8b")
    assert step_bytes(large, 0) == 2 * (6_979_321_856 + 266_240 + 525_336_576)
    assert step_bytes(large, 0) == 2 * (8_030_261_248 - 525_336_576)  # all but the embedding
    assert step_bytes(large, 8192) - step_bytes(large, 0) == 1 << 30
    assert step_bytes(model("1b"), 0) == 2 * 1_235_814_400  # all of it: the head is the embedding
    # Qwen2.5-32B's 32,763,876,352, with biases of q, k and v, without the embedding
    assert step_bytes(model("32b"), 0) == 2 * (32_763_876_352 - 152_064 * 5120)
    # of a delta net 32 heads of 128 x 128 in float32, and after 32 columns records of 16 x 128 + 32 x 132 numbers
    hybrid = model("9b")
    more = step_bytes(hybrid, 32) - step_bytes(hybrid, 0)
    assert more == 32 * (24 * 4 * (16 * 128 + 32 * 132) + 8 * 2 * 2 * 4 * 256)


def test_bytes_of_experts_and_of_fewer_bits_by_hand(model):
    """gpt-oss-20b: 4 of 32 experts of 3 x 2880 x 2880 with 17 bytes for 32 numbers, and biases of 3 x 2880."""
    oss = model("gpt-oss-20b")
    each = 3 * 2880 * 2880 * 17 // 32 + 2 * 3 * 2880
    attention = 2 * (2880 * (64 + 16) * 64 + 80 * 64 + 64 * 64 * 2880 + 2880 + 64)
    router = 2 * 32 * 2880 + 4 * 32
    rest = 24 * (attention + router + 2 * 2 * 2880) + 2 * (2880 + 201088 * 2880)
    assert step_bytes(oss, 0) == 24 * 4 * each + rest
    # K and V of 8 heads of 64, of half of the layers for at most 128 columns
    assert step_bytes(oss, 4096) - step_bytes(oss, 0) == 2 * 2 * 8 * 64 * 12 * (4096 + 128)
    # two rows read 32 (1 - (28 / 32)^2) = 7.5 experts
    assert step_bytes(oss, 0, 2) == 24 * 7.5 * each + rest
    # int8: a byte for each number and two for each row of qkv, o, gate, up, down and the head
    weights, rows = 6_979_321_856 + 525_336_576, 32 * (6144 + 4096 + 2 * 14336 + 4096) + 128256
    assert step_bytes(model("8b", "int8"), 0) == weights + 2 * rows + 2 * 266_240


def test_every_shape_is_a_model_of_its_size(model):
    """Parameters, the embedding counted once: published as 21B and 30.7B."""
    for shape, billions in (("gpt-oss-20b", 20.9), ("gemma4-31b", 30.7)):
        made = model(shape, "none")
        count = sum(x.numel() for layer in made.layers for x in layer.mixer.present().values()) + made.embed.numel()
        count += made.head.numel() * (made.head is not made.embed)
        assert round(count / 1e9, 1) == billions


def test_bytes_are_those_of_the_weights(bench):
    """The weights in memory, without the embedding."""
    for shape, draft in (("tiny", None), ("tiny", "tiny"), ("tiny-hybrid", None)):
        engine = bench.engine(Case("ar", shape, 64, draft))
        numbers = sum(x.numel() for layer in engine.model.layers for x in layer.mixer.present().values())
        numbers += engine.model.head.numel() + engine.model.norm.numel()
        if (memory := engine.loop.slots.caches[0].memory) is not None:
            numbers += memory.states[:, 0, 0].numel()
        assert step_bytes(engine.model, 0) == 4 * numbers


def test_outside_and_over_ar_by_hand(bench, monkeypatch):
    """Rounds of 10 ms (one late) with forwards of 6 and 3.5 ms. `ar`: tokens at 5 ms each."""
    whole = Decoded(timing(0.01, 0.01, 0.01, 0.03), 1e-4, {})
    plain = Decoded(timing(*[0.005] * 4), 1e-4, {})
    monkeypatch.setattr(decode, "decode", lambda bench, engine, context, drafting: whole if drafting else plain)
    monkeypatch.setattr(decode, "forwards", lambda *_: {"target": timing(0.006), "draft": timing(0.0035)})
    goals = {"outside": Goal(most=0.04), "over ar": Goal(least=0.6)}
    outside, over = decode.run(bench, Case("round", "tiny", 64, "tiny", goals))
    assert outside["value"] == pytest.approx(0.05) and outside["goal"] == "<= 4.0%" and outside["met"] is False
    assert over["over_ar"] == pytest.approx(0.005 / 0.015)
    assert over["limit"] == pytest.approx(1 / 6)  # 5 draft steps and 1 target step of equal size
    assert over["value"] == pytest.approx(2) and over["met"] is True
    assert over["bytes"] == 6 * step_bytes(bench.engine(Case("", "tiny", 64, "tiny")).model, 64)


def test_the_share_of_the_bandwidth(bench, monkeypatch):
    done = Decoded(timing(0.002, 0.002, 0.002, 0.002), 1e-4, {})
    monkeypatch.setattr(decode, "decode", lambda *_: done)
    monkeypatch.setattr(decode.common, "this_machine", lambda: decode.common.Machine(1e8, 1, 1, 0, 2e8))
    case = Case("ar", "tiny", 64)
    read = step_bytes(bench.engine(case).model, 64 + decode.WARM + 2)
    bench.cuda = True
    [row] = decode.ar(bench, case).values()
    assert row["bytes"] == read and row["limit"] == read / 1e8 and row["value"] == pytest.approx(read / 1e8 / 0.002)
    assert row["share_specified"] == pytest.approx(row["value"] / 2)


# --- cases that run


def test_every_case_on_a_tiny_shape(rows_of, capsys):
    rows = rows_of()
    found = {(row["case"], row["way"]): row for row in rows}
    assert list(found) == [
        *(
            (f"{kind} {shape} {n}", way)
            for shape in ("tiny", "tiny-hybrid")
            for kind, ways in (("ar", ("ar",)), ("verify", ("8 rows", "64 rows")))
            for n in (64, 160)
            for way in ways
        ),
        ("first tiny+tiny 64", "first request"),
        ("round tiny+tiny 64", "outside"),
        ("round tiny+tiny 64", "over ar"),
        ("ar tiny int8 batch 3 64", "ar"),
        *((f"prefill tiny{kind} 160", way) for kind in ("", " int8") for way in ("one length", "new lengths")),
        *(("beside tiny 64", way) for way in ("specker ar", "transformers", "transformers, compiled")),
        ("launches tiny 64", ""),
    ]
    for (case, _), row in found.items():
        assert row["bench"] == "decode" and row["machine"] and row["commit"] and row["dtype"] == "float32"
        assert "random weights" in row["remarks"]["sizing"]
        if row["way"]:
            assert row["remarks"]["sizing"] == RANDOM
            assert set(row["remarks"]) - {"cpu"} == {"sizing"} | ({"weights"} if "int8" in case else set())
        assert ("reason" in row) == (row["way"] in ("transformers, compiled", ""))
        assert "met" not in row and ("reason" in row or row["median"] > 0)
    plain, verify = found["ar tiny 64", "ar"], found["verify tiny 64", "64 rows"]
    assert plain["rounds"] == 3 and plain["host"] > 0 and "value" not in plain
    assert plain["bytes"] == 4 * (2 * (8192 + 4096 + 18432 + 128) + 64 + 32768 + (64 + 8 + 1) * 128)
    assert verify["value"] == verify["median"] / verify["one"]
    first = found["first tiny+tiny 64", "first request"]
    assert first["value"] == first["median"] / first["later"]
    batch = found["ar tiny int8 batch 3 64", "ar"]
    assert batch["batch"] == 3 and batch["tokens_per_second"] == 3 / batch["median"] and plain["batch"] == 1
    outside, over = found["round tiny+tiny 64", "outside"], found["round tiny+tiny 64", "over ar"]
    assert outside["value"] == 1 - sum(outside["forwards"].values()) / outside["median"]
    assert all(outside["stages"][name] > 0 for name in ("draft", "verify", "accept"))
    assert over["ar_seconds"] > 0 and over["value"] == over["over_ar"] / over["limit"]
    assert "does not compile on a CPU" in found["beside tiny 64", "transformers, compiled"]["reason"]
    assert found["launches tiny 64", ""]["reason"] == "the profiler saw no work on a GPU"
    shown = capsys.readouterr().out
    assert RANDOM in shown and "of one row" in shown


def test_fewer_layers_compile_the_kernels_and_leave_no_rows(tmp_path, results, command_line):
    made = Bench(Args(device="cpu", dtype="float32", layers=1), tmp_path).engine(Case("ar", "tiny", 64))
    assert len(made.model.layers) == 1
    command_line(["bench/decode.py", "--layers", "1", "--save"])
    with pytest.raises(SystemExit, match=r"^bench: rows of fewer layers are no results: leave out --save or --layers$"):
        decode.main()


# --- cases that do not run


def test_a_case_that_does_not_fit_is_a_row_and_the_others_run(rows_of, free_memory):
    free_memory(1 << 30, weights=True)
    refused, done = rows_of("--cases", "ar 32b 512, ar tiny 64")
    assert refused["case"] == "ar 32b 512" and done["case"] == "ar tiny 64"
    assert "needs 122.05 GiB for its weights in float32, and 1.00 GiB are free on the cpu" in refused["reason"]
    assert refused["remarks"] == {"sizing": "random weights"} and "median" not in refused
    assert done["median"] > 0 and "reason" not in done


def test_a_failed_case_is_a_row_and_the_bench_goes_on(rows_of, results, monkeypatch, capsys):
    def wrong(bench, case):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(decode.KINDS, "verify", wrong)
    with pytest.raises(SystemExit, match="bench: failed: verify tiny 64"):
        rows_of("--cases", "ar tiny 64,verify tiny 64,launches tiny")
    assert "Traceback" in capsys.readouterr().err
    done, failed, refused = results()
    assert done["median"] > 0 and failed["failed"] and "failed" not in refused
    assert failed["reason"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert refused["case"] == "launches tiny 64" and "no work on a GPU" in refused["reason"]


def test_each_of_the_first_requests_prefills_its_prompt(bench):
    """No cache keeps a text for the next request, which would be compared with a request that computes less."""
    case = Case("first", "tiny", 64, "tiny")
    decode.first(bench, case)
    caches = bench.engine(case).loop.slots.caches
    assert len(caches) == 2 and not any(cache.prefixes.root.children for cache in caches)
