"""Rounds of fixed shape: equal to plain decoding on a CPU without graphs; their launches; their host reads."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
from types import SimpleNamespace
from unittest.mock import patch

import cases
import pytest
import torch
from make_checkpoint import make
from make_dflash import make_dflash
from make_head import make_head
from one_round import apart
from pairs import admitted, flips, logits_of, perturbed
from recorded import kernels, recording

import specker
from bench.kernels.bench_layer_group import SHAPES as WIDTHS
from specker.checkpoints import buffers, checkpoint
from specker.kernels import prefetch
from specker.kernels.adjust_rows import adjust_rows
from specker.kernels.variant import Counters, counters
from specker.model.cache import KVCache
from specker.model.decoder import Model, forward
from specker.model.prefill import prefill
from specker.model.sampling import Draws
from specker.options import Sampling
from specker.runtime.control.policy import Budget, Fixed
from specker.runtime.engine import fixed_shapes
from specker.runtime.loop import Loop
from specker.runtime.round import round as rounds
from specker.runtime.round.batch import Batch, Shape
from specker.runtime.round.drafter import Draft
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.lm_head import LMHead
from specker.runtime.round.round import Round, launch
from specker.runtime.round.state import Request, State
from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts
from specker.runtime.strategies.model_drafter import AutoregressiveDrafter
from specker.runtime.strategies.vocabtrim.head import TrimmedHead
from specker.runtime.warmup import DRAWS, warm_rounds

SHAPES = {
    "chain-5": {"draft_tokens": 5},
    "tree-3x4": {"tree": "3x4"},
    "deep": {"tree": "22x3"},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "[[0],[1,2]]", "draft_tokens": 4},
    "easyspec-tree": {"strategy": "easyspec", "layer_parallel": "[[0],[1,2]]", "tree": "3x3"},
    "plus-minus-one": {"policy": "plus-minus-one"},
    "draft-and-verify": {"policy": "draft-and-verify"},
}
SAMPLING = {
    "greedy": {},
    "T0.7": {"temperature": 0.7},
    "T1-top": {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 5},
    "T1-top-p": {"temperature": 1.0, "top_p": 0.7, "seed": (1 << 64) - 3},
    "penalties": {"temperature": 0.7, "top_k": 20, "min_p": 0.05, "presence_penalty": 1.5},
}
PROMPTS = ([5, 9, 40], [1], list(range(3, 90)))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("target"), "llama", layers=3, max_context=192)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"))


def load(pair, **options):
    return specker.load(*pair, **{"strategy": "draft"} | options, dtype="float64", page_size=16)


@pytest.fixture(scope="module")
def plain(pairs):
    return load(pairs[:1], strategy="ar")


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_max_new_tokens_in_mid_draft(pairs, graphs):
    fast = load(pairs, graphs=graphs, draft_tokens=5)
    for count in range(1, 9):
        prompt = PROMPTS[count % 2 * 2]
        got = fast.generate(prompt, count)
        assert got.tokens == cases.plain(pairs[0], prompt, 8)[:count] and len(got.tokens) == count
        assert got.finished == "length" and got.stats.tokens == got.stats.accepted + got.stats.rounds


@pytest.mark.parametrize(
    ("shape", "graphs"), cases.one_in(2, ["chain-5", "deep", "tree-3x4", "easyspec"], ["off", "on"])
)
def test_the_context_ends_decoding(pairs, plain, shape, graphs):
    fast = load(pairs, graphs=graphs, **SHAPES[shape])
    prompt = [k % 100 for k in range(170)]
    got = fast.generate(prompt, 500)
    assert got.tokens == plain.generate(prompt, 500).tokens and len(got.tokens) == 22
    longer = plain.generate([k % 100 for k in range(191)], 500)  # room for one token
    assert fast.generate([k % 100 for k in range(191)], 500).tokens == longer.tokens and len(longer.tokens) == 1


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_stop_id_ends_the_text(pairs, graphs):
    fast, prompt = load(pairs, graphs=graphs, draft_tokens=5), [5, 9, 40, 3, 3, 3]
    free, other = (cases.plain(pairs[0], text, 30) for text in (prompt, PROMPTS[2]))
    for stop in dict.fromkeys(free[3:9]):
        got = fast.generate(prompt, 30, stop_ids=[stop])
        assert got.tokens == free[: free.index(stop) + 1] and got.finished == "stop"
        end = other.index(stop) + 1 if stop in other else 12
        assert fast.generate(PROMPTS[2], min(end, 12), stop_ids=[stop]).tokens == other[: min(end, 12)], (
            "the wasted round came through"
        )


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_draft_with_a_shorter_context(pairs, tmp_path, graphs):
    """Rounds of fixed shape while there is room, then host-placed rounds, which stop drafting."""
    short = make(tmp_path, "llama", layers=1, max_context=48)
    for shape in ({"draft_tokens": 4}, {"tree": "2x4"}):
        fast = load((pairs[0], short), graphs=graphs, **shape)
        for prompt, count in (([5, 9, 40], 48), (list(range(40)), 14), (list(range(100)), 4)):
            out = fast.generate(prompt, count)
            assert out.tokens == cases.plain(pairs[0], prompt, count)
        assert out.stats.drafted == 0  # the last prompt alone is longer than the draft's context
        assert (fast.loop.launched > 10) == (graphs == "on")


@pytest.mark.parametrize("shape", ["chain-5", "tree-3x4"])
def test_an_abandoned_stream(pairs, shape):
    """The round in flight is discarded."""
    fast = load(pairs, graphs="on", **SHAPES[shape])
    for prompt in PROMPTS:
        stream = fast.stream(PROMPTS[2], 60, temperature=0.7)
        next(stream), next(stream)
        stream.close()
        want = cases.plain(pairs[0], prompt, 9)
        assert fast.generate(prompt, 9).tokens == want and fast.generate_ar(prompt, 9).tokens == want


@pytest.mark.parametrize("context", [192, 64])
def test_each_round_sees_its_kv_bucket(pairs, tmp_path, monkeypatch, kv_buckets, context):
    """Rounds of fixed shape see a KV bucket that holds the text and the round. Host-placed rounds, the first ones of a
    short prompt and those beyond the draft's context, see all columns, also after smaller buckets."""
    kv_buckets((16, 32, 64, 128))
    draft = pairs[1] if context == 192 else make(tmp_path, "llama", layers=1, max_context=context)
    fast, seen = load((pairs[0], draft), graphs="on", draft_tokens=4), []

    def spy(r, target, cache, drafters):
        fixed, bucket = r.batch.fixed, r.batch.shape.bucket
        for c in (cache, drafters[0].cache):
            wide = min(bucket, c.capacity) // 16 if fixed else c.block_table.shape[1]
            assert c.table.shape[1] == wide
        assert not fixed or bucket >= len(r.requests[0].token_ids) + fast.loop.batches.lookahead
        seen.append((fixed, bucket))
        launch(r, target, cache, drafters)

    requests = [([5, 9, 40], 10), (list(range(3, 43)), 24), (list(range(3, 118)), 500), ([5, 9, 40], 10)]
    wanted = [cases.plain(pairs[0], *request) for request in requests]
    monkeypatch.setattr("specker.runtime.loop.launch", spy)
    assert [fast.generate(*request).tokens for request in requests] == wanted
    assert {(False, 0), (True, 32), (True, 64)} <= set(seen)
    assert context == 192 or any(a[0] and not b[0] and a[1] < 192 for a, b in itertools.pairwise(seen))


def test_a_trace_changes_nothing(pairs, plain):
    """The traced rounds are those that run without a trace."""
    fast, prompt = load(pairs, graphs="on", draft_tokens=4), list(range(3, 90))
    want = fast.generate(prompt, 20)
    rounds, rows = fast.loop.launched, []
    fast.trace = rows.append
    got = fast.generate(prompt, 20)
    assert got.tokens == want.tokens == plain.generate(prompt, 20).tokens
    assert fast.loop.launched == 2 * rounds and len(rows) == got.stats.rounds == want.stats.rounds


def test_rounds_and_prefills_zero_their_counters(pairs, monkeypatch):
    """Whatever an aborted launch left. With SPECKER_DEBUG=1, a round that leaves some is an error."""
    cpu, fast = torch.device("cpu"), load(pairs, graphs="on", draft_tokens=4)
    own, shared, draft = fast.loop.graphs.counters.block(cpu), counters(cpu, 1), fast.loop.drafter.propose
    own.fill_(1), shared.fill_(1)
    fast.cache.take(0, 16)
    prefill(fast.model, fast.cache, [5, 9])
    assert own.all() and not shared.any()
    fast.cache.release(0)
    want = fast.generate(PROMPTS[2], 10).tokens
    assert not own.any()

    def aborted(batch):
        own[3] = 1
        return draft(batch)

    monkeypatch.setattr(fast.loop.drafter, "propose", aborted)
    monkeypatch.delenv("SPECKER_DEBUG", raising=False)
    assert fast.generate(PROMPTS[2], 10).tokens == want and own.any()
    monkeypatch.setenv("SPECKER_DEBUG", "1")
    with pytest.raises(RuntimeError, match="1 arrival counters on cpu are not zero after a round"):
        fast.generate(PROMPTS[2], 10)
    monkeypatch.setattr(fast.loop.drafter, "propose", draft)
    assert fast.generate(PROMPTS[2], 10).tokens == want


def test_float64_has_no_graphs_on_a_gpu(pairs):
    engine = load(pairs)
    options = dataclasses.replace(engine.options, graphs="on")
    gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float64, ple=None)
    with pytest.raises(ValueError, match=r"graphs='on' \(or SPECKER_GRAPHS=on\) needs kernels"):
        fixed_shapes(options, gpu, None)
    assert not fixed_shapes(dataclasses.replace(options, graphs=None), gpu, None)


@pytest.mark.parametrize(("drafting", "graphs", "fixed"), [(2, None, True), (1, None, False), (2, "off", False)])
def test_ranks_capture_rounds_where_every_rank_drafts(pairs, drafting, graphs, fixed):
    options = dataclasses.replace(load(pairs).options, graphs=graphs)
    gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, ple=None)
    assert fixed_shapes(options, gpu, SimpleNamespace(draft_ranks=drafting, size=2)) == fixed
    assert fixed_shapes(options, gpu, None) == (graphs is None)


@pytest.mark.parametrize("beside", [(), ([7] * 20, list(range(50, 99)))], ids=["alone", "batch"])
@pytest.mark.parametrize("shape", ["chain-5", "tree-3x4"])
def test_the_logits_are_those_of_plain_decoding(pairs, shape, beside):
    """On a GPU they are equal in bfloat16 (test_gpu.py); here they differ by the order of sums."""
    fast, plain = load(pairs, graphs="on", **SHAPES[shape], batch_size=1 + len(beside)), load(pairs, graphs="on")
    for prompt, how in ((PROMPTS[2], {}), (list(range(40)), {"temperature": 0.7})):
        a, text = logits_of(plain, prompt, 12, drafting=False, **how)
        b, same = logits_of(fast, prompt, 12, beside=beside, **how)
        assert text == same and (a - b).abs().max() < 1e-12 and len(a) == len(b) == 12


@pytest.mark.parametrize(
    ("shape", "draft", "beside", "graphs"),
    cases.diagonal(
        ["chain-5", "tree-3x4", "easyspec", "easyspec-tree", "draft-and-verify"],
        ["itself", "another"],
        ["alone", "batch"],
        ["off", "on"],
    ),
)
def test_caches_are_sound_after_every_round(pairs, shape, draft, beside, graphs):
    """After a round these columns of each sequence equal a pass over the text: in the target's cache those before the
    root, in the drafter's those that it drafted from and those that it counts as exact."""
    models = pairs if draft == "another" else (pairs[0], pairs[0])
    prompts = PROMPTS[2:] if beside == "alone" else (PROMPTS[2], list(range(40)), [7] * 20)
    fast = load(models, graphs=graphs, batch_size=1 if len(prompts) == 1 else 4, **SHAPES[shape])
    batch, drafter, longest = fast.loop, fast.drafter, 0

    with admitted(fast, prompts, 24) as sequences:
        while all(len(s.token_ids) + 6 < s.limit for s in sequences):
            before = [len(s.token_ids) for s in sequences]
            r = batch.start()
            assert r.batch.fixed == (graphs == "on")
            for slot, (sequence, _, tokens) in enumerate(batch.finish(r)):
                text, kept = sequence.token_ids, drafter.cache.exact_len[slot]
                longest = max(longest, len(tokens))
                assert fast.cache.exact_len[slot] == len(text) - 1 and kept >= len(text) - drafter.repeated
                assert apart(fast.model, fast.cache, text, len(text) - 1, slot) < 1e-12
                known = max(before[slot] if r.batch.fixed else 0, kept)
                assert apart(drafter.model, drafter.cache, text, known, slot) < 1e-12
    if draft == "itself" and shape == "chain-5":  # a tree is as deep as its best nodes
        assert longest == drafter.repeated, "no draft was fully accepted: this proves little"


@pytest.mark.parametrize("shape", ["chain-5", "tree-3x4"])
def test_flips_are_found(pairs, plain, shape):
    """`flips` counts tokens that rounding changed: none in float64, and at least one after a token is altered."""
    fast = load(pairs, graphs="on", **SHAPES[shape])
    prompt = list(range(40))
    text = plain.generate(prompt, 16).tokens
    assert flips(fast, prompt, text) == (0, 16)
    text[8] ^= 1
    turned, of = flips(fast, prompt, text)
    assert turned >= 1 and of == 16


# --- GPU launches, recorded without a GPU


RECORDED = {  # `vocabtrim` uses the bundled family, the others tiny models
    "ar": {"strategy": "ar"},
    "chain-4": {"draft_tokens": 4},
    "tree-3x4": {"tree": "3x4"},
    "tree-3x4-cap-7": {"tree": "3x4", "draft_tokens": 7},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "2", "tree": "2x3", "layers": (3, 4)},
    "draft-and-verify": {"policy": "draft-and-verify", "draft_tokens": 4},
    "del": {"strategy": "del"},
    "del-length": {"strategy": "del", "policy": "del-length"},
    "diffuspec": {"strategy": "diffuspec", "adl": "2-4", "cps": "off"},
    "diffuspec-fixed": {"strategy": "diffuspec", "draft_tokens": 5, "cps": "off"},
    "diffuspec-chain": {"strategy": "diffuspec", "draft_tokens": 5, "cps": "chain"},
    "diffuspec-tree": {"strategy": "diffuspec", "draft_tokens": 5, "cps": "tree"},
    "vocabtrim": {"strategy": "vocabtrim"},
    "eagle": {"strategy": "eagle", "draft_tokens": 4},
    "eagle-tree": {"strategy": "eagle", "tree": "3x3", "draft_tokens": 7},
    "dspine": {"strategy": "dflash", "layout": "dspine", "draft_tokens": 4},
    "lilicorr-tree": {"strategy": "dflash", "layout": "lilicorr", "draft_tokens": 4, "policy": "fixed", "cps": "tree"},
}


OTHERS = ("easyspec", "del", "diffuspec-fixed", "eagle", "eagle-tree")


class Recorded:
    """A bfloat16 engine whose rounds are recorded, not run. Its texts are ragged and use different sampling
    settings."""

    def __init__(self, folder, strategy="draft", arch="qwen2", layers=(3, 2), layout="", **options):
        target = make(folder / "target", arch, layers=layers[0], max_context=6000)
        diffusion = strategy == "diffuspec"
        if strategy == "eagle":
            like = json.loads((target / "config.json").read_text())
            how = {"rows": 64, "heads": (4, 2, 16), "inner": 64, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
            draft = make_head(folder / "draft", like, layout="nested", **how)
        elif strategy == "dflash":
            like = json.loads((target / "config.json").read_text())
            how = {"heads": (4, 2, 16), "inner": 64, "layer_ids": [0, 1]}
            how |= {"markov": 8, "own": ()} if layout == "deepspec" else {}
            draft = make_dflash(folder / "draft", like, layout=layout, **how)
        else:
            draft = make(folder / "draft", "dream" if diffusion else arch, layers=layers[1], max_context=6000)
        models = {"ar": [target], "del": [target], "vocabtrim": []}.get(strategy, [target, draft])
        how = {"device": "cpu", "dtype": "bfloat16", "graphs": "on"}
        with patch.object(buffers, "activations", lambda dtype, device: dtype):  # as on a GPU
            self.engine = specker.load(*models, strategy=strategy, **how, **options)
        self.loop, self.plan = self.engine.loop, self.engine.plan
        self.budgets = self.plan.budgets or (Budget(0, 0),)
        self.asks = self.engine.policy().confident
        self.reads = 0

    def put(self, lengths, sampling, logprobs=0):
        """Texts of `lengths` into the batch; the first wants log-probabilities."""
        loop = self.loop
        loop.clear(forget=True)
        for slot, length in enumerate(lengths):
            draws = sampling if slot % 2 == 0 else DRAWS[0]
            how = {"limit": length, "sampling": draws, "policy": Fixed(0, 0), "logprobs": 0 if slot else logprobs}
            request = Request(index=slot, token_ids=[5] * length, **how)
            for cache in loop.slots.caches:
                cache.take(slot, loop.slots.columns(length))
                cache.exact_len[slot] = length - 1  # a prompt's prefill is no part of a round
            loop.active.append(request)
            loop.state.write(slot, request)
        loop.batches.see(1), loop.batches.see(0)  # a recording's tables are not valid after it
        loop.new_round(self.budgets[0], True)  # creates what is made once per number of slots

    @contextlib.contextmanager
    def recording(self):
        """Counts host reads and answers them with high confidence. Trimmed heads do not follow the text."""

        def goes_on(draft, r):
            self.reads += 1
            return draft.judge(r.requests, [0.9] * len(r.requests))

        with pytest.MonkeyPatch.context() as m, recording() as log:
            m.setattr(Draft, "goes_on", goes_on)
            m.setattr(TrimmedHead, "follow", lambda *_: None)
            m.setattr(self.loop.graphs, "counters", Counters())  # those of another recording have no values
            yield log

    def launch(self, budget):
        """A round of the texts in the batch."""
        r = self.loop.new_round(budget, True)
        r.batch.confident = self.asks
        launch(r, self.loop.target, self.loop.cache, self.loop.drafters)

    def round(self, lengths, sampling, budget, logprobs=0):
        """The launches of one round on texts of `lengths` tokens."""
        self.put(lengths, sampling, logprobs)
        with self.recording() as log:
            self.launch(budget)
        return log

    def warm(self):
        """The launches of a warm-up."""
        for n in range(self.loop.size, 0, -1):
            self.put([40] * n, DRAWS[0])
        with self.recording() as log:
            warm_rounds(self.loop, self.plan.budgets, self.plan.verified, self.plan.accepted, self.asks)
        return log


def ragged(n, first):
    """Lengths of n texts."""
    return [first + 13 * i % 29 for i in range(n)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A `Recorded` by name and batch size."""
    return functools.cache(
        lambda name, size: Recorded(tmp_path_factory.mktemp(name), **RECORDED[name], batch_size=size)
    )


@pytest.mark.parametrize(
    ("name", "case"), cases.one_in(4, RECORDED, ["1-greedy", "1-noise", "1-filtered", "8-filtered"])
)
def test_launches_do_not_depend_on_the_text(recorded, name, case):
    """Two rounds on texts of different lengths launch the same kernels with the same arguments, except for addresses.
    The host reads only the confidences of DEL and draft-and-verify, one per draft token. Empty slots change no launch:
    5 texts launch the same as 8."""
    size = int(case[0])
    sampling = dict(zip(("greedy", "noise", "filtered"), DRAWS, strict=True))[case[2:]]
    world = recorded(name, size)
    for budget in world.budgets:
        if budget.exit:
            budget = Budget(3, 3, budget.exit)
        world.reads = 0
        first = world.round(ragged(size, 50), sampling, budget)
        assert world.reads == (budget.depth if world.asks else 0)
        for count in {size, -(-5 * size // 8)}:
            assert first == world.round(ragged(count, 371), sampling, budget)
        if sampling.temperature == 0 or sampling.top_k:
            other = Sampling(sampling.temperature * 1.5, min(sampling.top_p, 0.9), sampling.top_k * 3, seed=8)
            again = world.round(ragged(size, 371), other, budget)
            assert [x[:2] for x in again] == [x[:2] for x in first], "another request's settings need another graph"
            assert len(kernels(first)) > 3 * 6


@pytest.mark.parametrize(("name", "size"), [("chain-4", 8), ("tree-3x4", 1)])
def test_penalties_read_the_texts_on_the_device(recorded, name, size):
    """Neither the text nor the numbers of a request change a launch."""
    world = recorded(name, size)
    some = Sampling(0.7, min_p=0.1, repetition_penalty=1.2, logit_bias=((5, 1.0),))
    other = Sampling(0.9, min_p=0.2, frequency_penalty=0.5, logit_bias=((5, 1.0), (9, -2.0)))
    logs = [world.round(ragged(size, n), s, world.budgets[-1]) for n, s in ((50, some), (371, some), (50, other))]
    assert logs[0] == logs[1] == logs[2]
    found = [kernel.split(":")[0] for kernel, *_ in logs[0]]
    assert all(found.count(f"_{name}_kernel") == 1 for name in ("count_text", "adjust_rows", "adjust_floor"))
    plain = world.round(ragged(size, 50), Sampling(0.7), world.budgets[-1])
    assert {key for key, *_ in plain.segments if key[0][0] == "accept"}.isdisjoint(key for key, *_ in logs[0].segments)


@pytest.mark.parametrize(("arch", "last"), [("qwen2", "residual_merge"), ("qwen3_moe", "expert_linear")])
def test_prefetching_adds_programs_to_norms_and_attention_and_no_launch(tmp_path, monkeypatch, arch, last):
    """The product with experts' gate and up prefetches without more programs."""
    world, sampling = Recorded(tmp_path, "ar", arch), Sampling()
    monkeypatch.setattr(prefetch, "launched_on", lambda device: 90)
    plain = world.round([50], sampling, world.budgets[-1])
    monkeypatch.setattr(prefetch, "MEBIBYTES", 1)
    ahead = world.round([50], sampling, world.budgets[-1])
    assert len(plain) == len(ahead)
    more = [name.split(":")[0] for (name, *_), other in zip(ahead, plain, strict=True) if name != other[0]]
    assert more == 3 * ["_residual_merge_kernel", "_tree_attention_kernel", f"_{last}_kernel"]
    programs = [a[1][0] - b[1][0] for a, b in zip(ahead, plain, strict=True) if a[0] != b[0]]
    assert programs == 3 * [132, 132, 0 if last == "expert_linear" else 132]


DENSE = ("aten.linear", "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.sort", "aten.topk")


@pytest.mark.parametrize(
    ("name", "size", "blocks"),
    [("chain-4", 64, 1), ("tree-3x4", 64, 1), ("chain-4", 256, 2), *((name, 64, 1) for name in OTHERS)],
)
def test_a_large_batch_runs_in_the_kernels(tmp_path, name, size, blocks):
    """Without cuBLAS and without a sort, whose bits or time depend on the batch. More than 1,024 rows run in blocks."""
    world = Recorded(tmp_path, **RECORDED[name], batch_size=size, kv_tokens=size * 512)
    budget = Budget(3, 3, 2) if world.budgets[0].exit else world.budgets[-1]
    for sampling in DRAWS:
        log = world.round(ragged(size, 50), sampling, budget)
        assert not [launch for launch in log if launch[0].startswith(DENSE)]
        verified = next(log[start:end] for key, start, end in log.segments if key[0][0] == "verify")
        seen = [kernel.split(":")[0] for kernel, *_ in verified]
        assert seen.count("_kv_project_kernel") == blocks * 3


def test_only_long_chunks_of_a_prompt_use_cublas(tmp_path):
    world = Recorded(tmp_path, **RECORDED["ar"])
    for rows, dense in ((256, False), (257, True), (512, True)):
        world.put([700], DRAWS[0])
        world.loop.cache.exact_len[0] = 0
        with world.recording() as log:
            prefill(world.loop.target, world.loop.cache, [5] * rows)
        assert any(launch[0].startswith(DENSE) for launch in log) == dense
        assert ("_kv_project_kernel" in [name.split(":")[0] for name in kernels(log)]) != dense


LAUNCHES = {"ar": 61, "chain-4": 197, "tree-3x4": 207, "easyspec": 164, "diffuspec-fixed": 115}
LAUNCHES |= {"diffuspec-chain": 117, "diffuspec-tree": 119}
LAUNCHES |= {"eagle": 113, "eagle-tree": 114, "draft-and-verify": 205, "del": 131, "del-length": 125}
"""Kernels and copies of a captured round of Llama-like models with 8 and 4 layers, a quarter of 8B's and of 1B's."""
GATHERED = {"ar": 0, "del": 0, "del-length": 0, "diffuspec-fixed": 2, "diffuspec-chain": 2, "diffuspec-tree": 2}
"""Extra copies in a batch's round: 1 at the end of a catch-up pass, since the roots' rows are not adjacent."""

NOISED = {"eagle": 4, "eagle-tree": 3}
"""Further launches above temperature 0: the positions of a head's draws are not those of its rows."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_batch_launches_the_kernels_of_one_text(tmp_path, name):
    """1 text and 8 launch the same kernels in number and kind, and at most one or two more copies."""
    made = {**RECORDED[name], "arch": "llama", "layers": (8, 4)}
    one, eight = (Recorded(tmp_path / str(size), batch_size=size, **made) for size in (1, 8))
    budget = Budget(3, 3, 2) if one.budgets[0].exit else one.budgets[0]
    for sampling in DRAWS[:2]:
        alone, batch = (world.round(ragged(n, 50), sampling, budget) for world, n in ((one, 1), (eight, 8)))
        kinds = [[kernel.split(":")[0] for kernel in kernels(log)] for log in (alone, batch)]
        assert kinds[0] == kinds[1]
        more = NOISED.get(name, 0) if sampling.temperature else 0
        assert len(alone) == LAUNCHES[name] + more and 0 <= len(batch) - len(alone) <= GATHERED.get(name, 1)


def test_a_searched_round_replays_as_many_graphs_as_a_chains(recorded):
    """The search of a block, whose launches `LAUNCHES` counts, is in the graph of the draft."""
    worlds = {name: recorded(name, 1) for name in ("chain-4", "diffuspec-fixed", "diffuspec-chain", "diffuspec-tree")}
    logs = {name: world.round([50], DRAWS[1], world.budgets[-1]) for name, world in worlds.items()}
    assert {name: len(log.segments) for name, log in logs.items()} == dict.fromkeys(worlds, 3)


SEARCHED = {  # by the scorer: kernels and copies of the draft of a block, of a beam's chain and of a tree
    "nothing": ({"layout": "zlab"}, {"off": 26, "chain": 28, "tree": 29}, 0),
    "a Markov head": ({"layout": "deepspec"}, {"off": 45, "tree": 35}, 4),  # "off": a chain by the head
    "transitions": ({"layout": "dspine"}, {"off": 106, "tree": 106}, 9),
    "an n-gram model": ({"layout": "zlab", "ngram": ""}, {"chain": 146, "tree": 147}, 9),
}  # and how many more a search has above temperature 0


@pytest.mark.parametrize("scorer", SEARCHED)
def test_a_search_adds_few_launches(tmp_path, scorer):
    """Three where what a path adds depends on no more than its last token, however many levels there are; two of them
    without a tree."""
    made, launches, more = SEARCHED[scorer]
    if "ngram" in made:
        counts = NGramCounts(128)
        counts.add([*range(128)] * 2)
        (tmp_path / "ngram").write_bytes(NGram.fit(counts).to_bytes())
        made = {**made, "ngram": str(tmp_path / "ngram")}
    how = {"strategy": "dflash", "arch": "llama", "draft_tokens": 4, "policy": "fixed", **made}
    found = {}
    for cps in launches:
        world = Recorded(tmp_path / cps, batch_size=1, cps=cps, **how)
        logs = [world.round([50], sampling, world.budgets[0]).segments[0] for sampling in DRAWS[:2]]
        found[cps], noisy = (end - start for _, start, end in logs)
        assert noisy - found[cps] == (more if cps != "off" or scorer == "transitions" else 0)
    assert found == launches


def at_width(folder, name):
    """A model with the widths and the vocabulary of Llama 3's 8B or 3.2's 1B, and two layers, as fake tensors."""
    hidden, heads, kv_heads, inner = WIDTHS[name]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": kv_heads, "num_hidden_layers": 2, "vocab_size": 128256}
    rest = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": name == "1B"}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **rest}
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(config))
    return Model(checkpoint.read(str(folder / name), dtype=torch.bfloat16, device="cpu", random=0))


@pytest.mark.parametrize(
    ("kind", "logprobs", "outside"), [(DRAWS[0], 0, 1), (DRAWS[1], 0, 1), (DRAWS[1], 1, 2), (DRAWS[2], 0, 4)]
)
@pytest.mark.parametrize("n", [1, 4])
def test_one_launch_outside_the_forwards(tmp_path, kind, logprobs, outside, n):
    """A chain of 4 by 1B for 8B. A forward is embedding, layers, final norm and LM head, which draws the tokens; all
    its launches are compared with those of a round. The other is settle. Where the logits are wanted, the argmax over
    their parts is one more, and filters take three. A batch also gathers the roots' rows once. A round begins with a
    memset of its kernels' counters."""
    depth = 4
    with recording() as log:  # not in inference mode, which hides copies made by `contiguous` and `to`
        target, draft = at_width(tmp_path, "8B"), at_width(tmp_path, "1B")
        caches = [KVCache(m.config, 4096, dtype=m.dtype, device="cpu", sequences=n) for m in (target, draft)]
        for cache in caches:
            cache.bucket(2048)
        sizes = {"wide": 2048, "vocab": 128256, "columns": 4096}
        state = State.empty(target.dtype, target.device, sequences=n, rows=depth + 1, **sizes)
        policy = Fixed(depth, depth)
        how = {"token_ids": [5], "limit": 9, "sampling": kind, "policy": policy, "logprobs": logprobs}
        sequences = [Request(index=i, **how) for i in range(n)]
        draws, head, graphs = Draws.of([kind], state.draw, True), LMHead(draft.head, draft.norm, 1e-5), Graphs()
        drafter = AutoregressiveDrafter(draft, caches[1], head, depth=depth)

        def round_():
            shape = Shape(n, Budget(depth, depth), True, draws=draws.kind)
            launch(Round(Batch(sequences, state, shape, draws, state.length, graphs)), *pair)

        def forwards():
            """The same forwards on rows and tokens that are there."""
            for model, (cache, rows, tokens) in zip((draft,) * depth + (target,), placed, strict=True):
                final = forward(model, cache, rows, model.embed_tokens(tokens)).final
                if model is draft:
                    head.best(final.at(slice(-n, None)), draws, rows.positions[-n:])
                else:
                    model.logits(final)

        pair = target, caches[0], [drafter]
        windows = [(depth + 1, 0, depth + 1), *((0, i, 1) for i in range(depth - 1)), (1, 0, depth + 1)]
        placed = []
        for cache, (back, first, count) in zip([caches[1]] * depth + caches[:1], windows, strict=True):
            tokens = torch.zeros(n * count, dtype=torch.int64)
            placed.append((cache, cache.place(state.length, back, first, count), tokens))
        counts = []
        for work in (round_, forwards):
            work()  # creates the constants
            log.clear()
            work()
            counts.append(len(log) - sum(name == "aten.zero_.default" for name, *_ in log))
            assert len(log) - counts[-1] == (work is round_)
    assert counts[0] - counts[1] == outside + (n > 1)


@pytest.mark.parametrize(("name", "count"), cases.one_in(2, RECORDED, [1, 5]))
def test_nothing_is_copied_from_the_host_within_a_graph(recorded, name, count):
    """The second run of a segment is captured; the first creates constants. Starting a round launches nothing, also
    with 5 texts in 8 slots."""
    world = recorded(name, min(8, 7 * count - 6))
    for sampling, budget in itertools.product(DRAWS, {world.budgets[0], world.budgets[-1]}):
        world.put(ragged(count, 60), sampling)
        with world.recording() as log:
            world.loop.new_round(budget, True)
            assert not log
            for _ in range(2):
                world.launch(budget)


# Their graph segments are those of other cases.
ALIKE = ("tree-3x4", "del-length", "diffuspec-fixed", "diffuspec-chain")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in RECORDED]
)
def test_equal_keys_launch_equal_kernels(recorded, name):
    """For any number of texts, any length and any sampling settings, with and without log-probabilities."""
    found = {}
    longest = 800 if name == "vocabtrim" else 1100
    asked = [(1, DRAWS[0], 50, 0), (1, DRAWS[0], 50, 1), (1, DRAWS[1], 50, 0), (1, DRAWS[2], longest, 0)]
    asked += [(8, DRAWS[1], 50, 0), (8, DRAWS[1], longest, 0)]
    for size, sampling, length, logprobs in asked:
        world = recorded(name, size)
        budgets = {world.budgets[0], world.budgets[-1]}
        for count, budget in itertools.product({1, size // 2 + 1, size}, budgets):
            log = world.round(ragged(count, length), sampling, budget, logprobs)
            for key, start, end in log.segments:
                assert key is not None and found.setdefault((size, key), log[start:end]) == log[start:end], key
    assert len(found) >= 10


def test_a_longer_bucket_changes_only_attention(recorded):
    """Only attention's grid changes; start_rows gets more columns of the page table."""
    for size in (1, 8):
        world = recorded("chain-4", size)
        near, far = (world.round([*ragged(size - 1, 40), n], DRAWS[0], world.budgets[0]) for n in (50, 1100))
        apart = [(a, b) for a, b in zip(near, far, strict=True) if a != b]
        grids = {a[0] for a, b in apart if a[:2] != b[:2]}
        assert grids and all("attention" in name for name in grids)
        assert all("attention" in a[0] or "start_rows" in a[0] for a, _ in apart)


WARM = [name for name in RECORDED if name not in ("tree-3x4", "tree-3x4-cap-7", "del-length", "diffuspec")]
SIMPLER = ("diffuspec-fixed", "diffuspec-chain", "eagle", "dspine")  # a tree or search of their kind is another case


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(pytest.param(name, 1, marks=[pytest.mark.slow] if name in SIMPLER else []) for name in WARM),
        ("tree-3x4-cap-7", 2),
    ],
)
def test_a_warm_up_leaves_nothing_to_compile(recorded, name, size):
    """The warm-up launches every kernel that a round launches with any number of texts, length and filter, and with
    log-probabilities; and every graph segment of a verify pass and of acceptance."""
    world = recorded(name, size)
    first = world.warm()
    warm, segments = set(kernels(first)), {key for key, *_ in first.segments}
    longest = 800 if name == "vocabtrim" else 5000
    budgets = {world.budgets[0], world.budgets[-1]}
    for budget, length, sampling, count in itertools.product(budgets, (50, longest), DRAWS, {1, size}):
        for logprobs in (0, 1):
            if length == 50 or (sampling == DRAWS[0] and not logprobs):
                log = world.round(ragged(count, length), sampling, budget, logprobs)
                assert set(kernels(log)) <= warm
                assert {key for key, *_ in log.segments if key[0][0] in ("verify", "accept")} <= segments


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("tree-3x4", 3),
        *(
            pytest.param(shape, 3, marks=pytest.mark.slow)
            for shape in ("chain-5", "draft-and-verify", "plus-minus-one")
        ),
    ],
)
def test_a_warm_up_leaves_nothing_to_capture(pairs, shape, size):
    """The warm-up runs every graph segment twice: it is compiled, then captured. This covers batches whose texts end
    one after another."""
    fast = load(pairs, graphs="on", batch_size=size, **SHAPES[shape])
    times = collections.Counter()

    def run(key, work):
        times[key] += 1
        work()

    fast.loop.graphs.run, fast.loop.graphs.passes = run, 2
    told = []
    fast.warmup(lambda done, of: told.append((done, of)))
    assert told and told[-1][0] == told[-1][1]
    warm = {key for key, n in times.items() if n > 1}
    times.clear()
    counts = [40, 20, 30] if "policy" in SHAPES[shape] else [16, 8, 12]  # its long drafts leave few rounds
    for how in SAMPLING.values():
        several = fast.generate(list(PROMPTS), counts, **how)
        for prompt, count, got in zip(PROMPTS, counts, several, strict=True):
            assert got.tokens == cases.plain(pairs[0], prompt, count, **how)
        fast.generate_ar(list(PROMPTS[:2]), 5, **how)
    assert {key[1] for key in times if key} == {1, 2, 3}.intersection(range(size + 1))
    assert set(times) - {None} <= warm and len(times) > 4


@pytest.mark.parametrize(("context", "longest_draft"), cases.one_in(2, [192, 160], [192, 64]))
def test_a_warm_up_covers_every_kv_bucket(pairs, tmp_path, kv_buckets, context, longest_draft):
    """Up to the context's last token, whether or not a bucket ends there, and with a draft of a shorter context."""
    kv_buckets((48, 96, 192))
    draft = pairs[1] if longest_draft == 192 else make(tmp_path, "llama", layers=1, max_context=longest_draft)
    fast = load((pairs[0], draft), graphs="on", draft_tokens=4, max_context=context)
    times = collections.Counter()

    def run(key, work):
        times[key] += 1
        work()

    fast.loop.graphs.run, fast.loop.graphs.passes = run, 2
    fast.warmup()
    warm = {key for key, n in times.items() if n > 1}
    times.clear()
    for length in (3, 40, 88, context - 10):
        fast.generate(list(range(3, 3 + length % 100)) + [7] * (length - length % 100), 10)
        fast.generate_ar([9] * length, 10)
    assert set(times) - {None} <= warm and {key[2] for key in times if key} >= {0, 48, 96}


@pytest.mark.parametrize("strategy", ["draft", "del"])
def test_a_warm_up_covers_every_filter(pairs, strategy, monkeypatch):
    """Uncaptured launches, for a first round or a prompt's rows, use different kernels for each filter."""
    from specker.model import sampling

    seen = set()

    def spy(logits, temperature, top_k, top_p, seed, positions, draw=None):
        seen.add((temperature > 0, top_k > 0, top_p < 1, draw is None))
        return sample(logits, temperature, top_k, top_p, seed, positions, draw)

    sample = sampling.sample_rows
    monkeypatch.setattr(sampling, "sample_rows", spy)
    engine = load(pairs[: 1 + (strategy == "draft")], strategy=strategy, graphs="on")
    engine.warmup()
    warm = set(seen)
    for how in ({}, {"temperature": 0.7}, {"top_k": 9}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.8}):
        how = {"temperature": 0.5, **how} if how else how
        engine.generate([5, 9], 5, **how)
        engine.generate(list(range(60)), 5, **how)
    assert seen == warm and len([kind for kind in warm if kind[-1]]) == 5


def test_a_warm_up_covers_unequal_drafts(pairs, tmp_path, monkeypatch):
    """Of two texts one has left the draft's context: the host places the round, and the texts verify unequally many
    rows. Their logits take other forms of the kernels of penalties and draws."""
    seen = set()

    def adjust(logits, text, prompt, length, window, numbers, parents, places, *rest, **more):
        seen.add(("adjust", places is not None))
        return adjust_rows(logits, text, prompt, length, window, numbers, parents, places, *rest, **more)

    def each(draws, which):
        seen.add(("draws", draws.kind, draws.adjusts))
        return of_each(draws, which)

    of_each = Draws.each
    monkeypatch.setattr(rounds, "adjust_rows", adjust)
    monkeypatch.setattr(Draws, "each", each)
    draft = make(tmp_path, "llama", layers=1, max_context=64)
    engine = load((pairs[0], draft), graphs="on", draft_tokens=4, policy="fixed", batch_size=2)
    engine.warmup()
    warm = set(seen)
    seen.clear()
    for how in SAMPLING.values():
        engine.generate([[7] * 100, [5, 9, 40]], 8, **how)
    assert seen <= warm and {("adjust", True), ("draws", "filtered", True), ("draws", "greedy", False)} <= seen


def test_long_blocks_are_placed_by_the_host():
    """A diffusion drafter's repeated rows and masks must fit into one window of 256."""
    plain = specker.load(strategy="ar", device="cpu", dtype="float64")
    engine = specker.load(strategy="diffuspec", draft_tokens=130, device="cpu", dtype="float64", graphs="on")
    prompt = [n % 500 for n in range(200)]
    assert engine.generate(prompt, 5).tokens == plain.generate(prompt, 5).tokens
    assert engine.loop.launched == 0


def test_the_cost_of_watching_includes_the_uncaptured_round(monkeypatch):
    """A round in which DEL watches is not captured. With captured rounds, the extra time is part of the cost."""
    from specker.runtime.strategies.dynamic_exit.exit_policy import DynamicExit

    learn = DynamicExit.learn
    for usual in (0.0, 1e9):
        told, rounds = [], []

        def spy(self, layers, match, confidence, seconds=0.0, told=told):
            told.append(seconds)
            learn(self, layers, match, confidence, seconds)

        monkeypatch.setattr(DynamicExit, "learn", spy)
        monkeypatch.setattr(DynamicExit, "_affordable", lambda self: True)
        monkeypatch.setattr(Loop, "usual", property(lambda self, usual=usual: usual))
        engine = specker.load(strategy="del", device="cpu", graphs="on")
        engine.trace = lambda row, rounds=rounds: rounds.append(row["seconds"])
        engine.generate(list(range(60)), 30)
        watched = [spent for spent in rounds if spent["watch"]]
        stages = ("prefill", "draft", "verify", "accept", "watch") if usual == 0 else ("watch",)
        assert len(watched) > 2
        assert told == pytest.approx([sum(spent[stage] for stage in stages) for spent in watched])
