"""The Python API: streaming, statistics, checks and refusals."""

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from make_checkpoint import byte_tokenizer, edit, make, tokens_of
from pairs import perturbed

import specker
from specker.kernels.quant import Quantized, quantised
from specker.model.cache import KVCache
from specker.options import Params
from specker.runtime import check
from specker.runtime.control.stats import Stats
from specker.runtime.detokenize import Detokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("target"), layers=2, tokenizer=True)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"))


def test_streamed_text_is_the_generated_text(pair):
    engine = specker.load(*pair, dtype="float64", draft_tokens=3)
    for temperature in (0.0, 1.0):
        whole = engine.generate("def f(x):", 50, temperature=temperature)
        chunks = list(engine.stream("def f(x):", 50, temperature=temperature))
        assert [t for c in chunks for t in c.tokens] == whole.tokens
        assert "".join(c.text for c in chunks) == whole.text
        assert sum(c.accepted for c in chunks) == chunks[-1].stats.accepted
        assert [c.finished for c in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finished == whole.finished == "length"
        # The pieces of accepted drafts and of the target's own tokens make up the whole text.
        assert any(drafted for c in chunks for _, drafted in c.pieces)


def test_a_stream_that_waits_does_not_disturb_the_next(pair):
    engine = specker.load(*pair, dtype="float64")
    expected = engine.generate([1, 2, 3], 30).tokens
    other = engine.generate([9, 8, 7], 30).tokens
    stream = engine.stream([9, 8, 7], 30)
    tokens = next(stream).tokens
    assert engine.generate([1, 2, 3], 30).tokens == expected
    assert tokens + [token for event in stream for token in event.tokens] == other


def test_characters_are_never_cut():
    tokenizer = byte_tokenizer()
    text = "naïve — 日本語 🙂 end"
    ids = tokenizer(text)["input_ids"]
    stream = Detokenizer(tokens_of(tokenizer))
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) == text and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert len([p for p in pieces if p]) == len(text)
    cut = Detokenizer(tokens_of(tokenizer))
    assert [cut.add(token) for token in tokenizer("a🙂")["input_ids"][:3]] == ["a", "", ""]
    assert cut.flush() == ""


def test_statistics_add_up(pair):
    engine = specker.load(*pair, "draft", dtype="float64", tree="3x3")
    out = engine.generate([1, 2, 3], 40)
    s = out.stats
    assert s.tokens == 40 == s.rounds + s.accepted and s.acceptance_length == 40 / s.rounds
    assert s.hits[0] >= s.hits[-1] and sum(s.hits) == s.accepted and len(s.hits) <= 3
    assert sum(s.seconds.values()) <= s.wall and all(v > 0 for name, v in s.seconds.items() if name != "watch")
    both = s + s
    assert (both.tokens, both.rounds, both.hits) == (80, 2 * s.rounds, [2 * h for h in s.hits])
    assert both.acceptance_length == s.acceptance_length and both.to_json()["accepted"] == 2 * s.accepted
    assert Stats().acceptance_length == 1.0 and Stats().tokens_per_second == 0.0


def test_check_finds_a_difference(pair):
    engine = specker.load(*pair, dtype="float64")
    good = engine.generate([1, 2, 3], 20)
    result = engine.check([1, 2, 3], good, 20)
    assert result.identical and result.ok and result.ar.tokens == good.tokens
    wrong = dataclasses.replace(good, tokens=[*good.tokens[:7], (good.tokens[7] + 1) % 300, *good.tokens[8:]])
    result = engine.check([1, 2, 3], wrong, 20)
    assert not result.identical and not result.ok and result.first_difference == 7 and result.gap > 0
    assert "at token 7" in result.message
    shorter = dataclasses.replace(good, tokens=good.tokens[:-1])
    assert not engine.check([1, 2, 3], shorter, 20).ok


def test_check_allows_only_differences_within_rounding(pair):
    engine = specker.load(*pair, dtype="float32")
    good = engine.generate([1, 2, 3], 20, temperature=0.9)
    logits = {}

    original = check.gap

    def gap(*args):
        value, bound = original(*args)
        logits["bound"] = bound
        return bound / 2 if logits.get("close") else value, bound

    patched = pytest.MonkeyPatch()
    patched.setattr(check, "gap", gap)
    wrong = dataclasses.replace(good, tokens=[*good.tokens[:7], (good.tokens[7] + 1) % 300, *good.tokens[8:]])
    assert not engine.check([1, 2, 3], wrong, 20, temperature=0.9).ok
    logits["close"] = True
    assert engine.check([1, 2, 3], wrong, 20, temperature=0.9).ok
    patched.undo()
    assert logits["bound"] < 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_dtype_runs_and_checks(pair, dtype):
    engine = specker.load(*pair, dtype=dtype)
    out = engine.generate([1, 2, 3], 30)
    assert len(out.tokens) == 30 and engine.check([1, 2, 3], out, 30).ok


def test_unknown_options_are_refused(pair):
    with pytest.raises(TypeError, match=r"unknown option .draft_token. \(did you mean draft_tokens\?\); known: .*tree"):
        specker.load(*pair, draft_token=3)
    with pytest.raises(TypeError, match="unknown option 'temprature'"):
        specker.load(*pair).generate([1], temprature=1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"strategy": "medusa"}, "unknown strategy 'medusa'"),
        ({"strategy": "ar+draft"}, "do not compose"),
        ({"strategy": "ar"}, "uses no draft checkpoint"),
        ({"draft_tokens": 0}, "draft_tokens must be between 1 and 255, got 0"),
        ({"tree": "0x3"}, "WIDTHxDEPTH"),
        ({"tree": "3"}, "WIDTHxDEPTH"),
        ({"tree": "65x1"}, "too large"),
        ({"page_size": 0}, "page_size"),
        ({"max_context": 0}, "max_context"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"device": "tpu"}, "device"),
        ({"device": "meta"}, "not supported"),
    ],
)
def test_refusals_at_load(pair, kwargs, message):
    with pytest.raises(ValueError, match=message):
        specker.load(*pair, **kwargs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_cuda_without_a_gpu(pair):
    with pytest.raises(ValueError, match="needs a CUDA GPU, and torch finds none"):
        specker.load(*pair, device="cuda")


def test_a_cpu_takes_bfloat16_where_its_compiled_kernels_serve_the_target(pair, bundled):
    """The tiny pair's heads are too small for the kernels."""
    assert (bundled.dtype, bundled.model.dtype) == (torch.bfloat16, torch.float32)
    assert bundled.model.stack is not None
    assert specker.load(*pair, device="cpu").dtype == torch.float32


@pytest.mark.parametrize(
    "options",
    [{}, {"tree": "2x2"}, {"dtype": "float64"}, {"batch_size": 60}],  # 300 rows run in blocks
)
def test_where_the_check_allows_no_difference(options):
    assert specker.load(device="cpu", max_context=64, **options).bit_equal


def test_layers_that_are_not_compiled_may_differ_by_rounding(pair):
    assert not specker.load(*pair, device="cpu").bit_equal


@pytest.mark.parametrize(
    ("weight", "how", "exact"),
    [
        (torch.zeros(8, 64), {}, True),
        (torch.zeros(8, 64), {"chains": False}, False),  # ancestors in a tree stand at other columns
        (torch.zeros(8, 64), {"ordered": False}, False),
        (quantised(torch.ones(8, 64), "int8", 16), {}, True),
        (Quantized(torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 8), None), {}, False),  # groups of 8 columns
    ],
)
def test_where_the_check_allows_no_difference_on_a_gpu(weight, how, exact):
    """With weights that only torch multiplies, a row's bits depend on the batch."""
    on = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "stack": None}
    model = SimpleNamespace(**on, matrices=[torch.zeros(8, 64), weight])
    assert check.bit_equal(model, **{"chains": True, "ordered": True, **how}) == exact


def test_a_draft_is_needed_and_refused_alone(pair):
    with pytest.raises(ValueError, match="needs a draft checkpoint"):
        specker.load(pair[0], strategy="vocabtrim+lookup")
    assert specker.load(pair[0], device="cpu").options.strategy == "lookup"
    assert specker.load(*pair, device="cpu").options.strategy == "vocabtrim+lookup"
    with pytest.raises(ValueError, match="draft needs target"):
        specker.load(draft=pair[1])


@pytest.mark.parametrize(
    ("prompt", "count", "sampling", "message"),
    [
        ([], 5, {}, "prompt is empty"),
        ("", 5, {}, "prompt is empty"),
        ([1] * 256, 5, {}, "the prompt has 256 tokens, but the context of .* is 256"),
        ([1, 320], 5, {}, "token ids must be in 0..319"),
        (None, 5, {}, "a prompt must be a string or a list of token ids, got None"),
        (b"x", 5, {}, "a prompt must be a string or a list of token ids, got b'x'"),
        ([1.5], 5, {}, "a prompt must be a string or a list of token ids, got 1.5"),
        ([1], 0, {}, "max_new_tokens must be a whole number of at least 1, got 0"),
        ([1], 3.5, {}, "max_new_tokens must be a whole number of at least 1, got 3.5"),
        ([1], 5, {"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ([1], 5, {"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ([1], 5, {"temperature": -1.0}, "temperature"),
        ([1], 5, {"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ([1], 5, {"top_p": 1.5}, "top_p"),
        ([1], 5, {"top_k": -1}, "top_k"),
        ([1], 5, {"seed": -1}, "seed"),
    ],
)
def test_refusals_of_a_request(pair, prompt, count, sampling, message):
    with pytest.raises(ValueError, match=message):
        specker.load(*pair).generate(prompt, count, **sampling)


def test_an_engine_prints_as_a_line(pair):
    line = repr(specker.load(*pair, device="cpu", dtype="float32", strategy="draft", max_context=100))
    names = " + ".join(path.name for path in pair)
    assert line == f"<specker.Engine: {names}, cpu, float32, draft, context 100>"


def test_arrays_are_prompts(pair):
    engine = specker.load(*pair)
    want = engine.generate([1, 2, 3], 5).tokens
    for prompt in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, 2, 3), [np.int64(1), 2, 3]):
        assert engine.generate(prompt, np.int64(5)).tokens == want


def test_a_misspelt_option_has_a_suggestion(pair):
    engine = specker.load(*pair)
    with pytest.raises(TypeError, match=r"unknown option 'max_tokens' \(did you mean max_new_tokens\?\)"):
        engine.generate([1], max_tokens=3)
    with pytest.raises(ValueError, match="batch_size must be a whole number, got 'x'"):
        specker.load(*pair, batch_size="x")


def test_max_context_limits_and_is_limited(pair):
    assert len(specker.load(*pair, max_context=20).generate([1] * 12, 50).tokens) == 8
    with pytest.raises(ValueError, match="256"):
        specker.load(*pair, max_context=257)


def test_vocabulary_mismatch_is_refused(pair, tmp_path):
    bare = make(tmp_path / "bare", layers=1, vocab=200)
    with pytest.raises(ValueError, match="vocabularies of 320 and 200 ids"):
        specker.load(pair[0], bare)
    dream = make(tmp_path / "dream", "dream", layers=1, tokenizer=True)
    with pytest.raises(ValueError, match="bidirectional"):
        specker.load(pair[0], dream)


@pytest.mark.parametrize("sizes", [(320, 384), (384, 320)])
def test_a_padded_vocabulary_is_accepted(tmp_path, sizes):
    target = make(tmp_path / "target", layers=1, vocab=sizes[0], tokenizer=True, seed=1)
    draft = make(tmp_path / "draft", layers=1, vocab=sizes[1], tokenizer=True, seed=1)
    plain = specker.load(target, strategy="ar", dtype="float64")
    for options in ({"draft_tokens": 4}, {"tree": "3x3"}):
        fast = specker.load(target, draft, dtype="float64", **options)
        for temperature in (0.0, 1.0):
            want = plain.generate([1, 2, 3], 16, temperature=temperature)
            assert fast.generate([1, 2, 3], 16, temperature=temperature).tokens == want.tokens


def test_chat_needs_a_template(pair, tmp_path):
    engine = specker.load(*pair)
    ids = engine.encode_chat([{"role": "user", "content": "hi"}])
    assert engine.tokenizer.decode(ids) == "user: hi\nassistant: "
    bare = make(tmp_path, layers=1, tokenizer=True)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    edit(bare, "tokenizer_config.json", chat_template=...)
    with pytest.raises(ValueError, match="no chat template"):
        specker.load(bare, strategy="ar").encode_chat([{"role": "user", "content": "hi"}])


def test_ids_need_no_tokenizer(tmp_path):
    engine = specker.load(make(tmp_path, layers=1), strategy="ar")
    assert len(engine.generate([1, 2], 5).tokens) == 5
    assert [len(c.tokens) for c in engine.stream([1, 2], 5)] == [1] * 5
    with pytest.raises(ValueError, match="tokenizer"):
        engine.generate("text", 5)


def test_cache_invariants_are_checked(pair):
    config = specker.load(*pair).target.config
    cache = KVCache(config, 40, dtype=torch.float32, device="cpu", page_size=8)
    with pytest.raises(ValueError, match="cannot truncate a cache of 0 exact columns to 3"):
        cache.truncate(3)
    cache.k.zero_(), cache.v.zero_()
    cache.exact_len = [9]
    cache.check(committed=10)
    with pytest.raises(AssertionError):
        cache.check(committed=11)
    cache.v[1, 1, 0] = float("nan")
    with pytest.raises(AssertionError, match="NaN"):
        cache.check()
    cache.block_table[0, 1] = 0
    with pytest.raises(AssertionError):
        cache.check()


# --- the end of an engine


def test_a_closed_engine_has_freed_its_memory_and_says_so(tmp_path):
    """Requests that decode or wait are cancelled."""
    target = make(tmp_path / "target", "qwen2", layers=2, max_context=128, tokenizer=True, eos=None)
    with specker.load(target, strategy="lookup", dtype="float64", device="cpu") as engine:
        weights, cache = weakref.ref(engine.target.weights.embed), weakref.ref(engine.cache.k)
        session, stream, ended = engine.session, engine.stream([1, 2], 100, ignore_eos=True), []
        next(stream)
        queued = session.submit([4], Params(max_new_tokens=9), deliver=ended.append)
    assert queued.finished == "cancelled" and ended[0].finished == "cancelled"
    assert [event.finished for event in stream] == ["cancelled"]
    assert cache() is None
    engine.close()
    assert repr(engine) == "<specker.Engine: closed>"
    for use in (
        lambda: engine.generate([1], 2),
        lambda: engine.max_context,
        lambda: engine.encode("a"),
        lambda: engine.warmup(),
        lambda: session.submit([1]),
        lambda: session.step(),
        lambda: session.snapshot(),
        lambda: session.wait(0),
    ):
        with pytest.raises(ValueError, match="the engine is closed: load another one"):
            use()
    session = stream = queued = ended = use = None  # a request's policy knows what its models cost
    gc.collect()  # the errors' tracebacks
    assert weights() is None


def test_a_warm_up_tells_how_far_it_is(tmp_path):
    target, told = make(tmp_path / "target", "qwen2", layers=1, max_context=128), []
    engine = specker.load(target, strategy="lookup", dtype="float64", device="cpu")
    engine.warmup(lambda done, of: told.append((done, of)))
    assert told == [(n, told[-1][1]) for n in range(1, len(told) + 1)] and told[-1][0] == told[-1][1] > 1
    with pytest.raises(AttributeError, match="has no attribute 'generat'"):
        engine.generat([1])


def test_the_package_shows_what_it_has():
    assert {"Engine", "load", "zoo", "__version__"} <= {*dir(specker)}


def test_the_progress_of_loading_names_the_model(pair):
    for draft, names in ((None, ["target, 1 of 1"]), (pair[1], ["target, 1 of 2", "draft, 2 of 2"])):
        calls = []
        specker.load(pair[0], draft, on_progress=lambda *call, calls=calls: calls.append(call))
        assert [name for done, of, name in calls if done == of] == names
