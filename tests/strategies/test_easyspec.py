"""Layers side by side: the fuzzy pass follows the paper, the draft cache is exact after calibration, and the tokens
equal plain decoding."""

import importlib
import math

import cases
import pytest
import torch
from make_checkpoint import make
from one_round import accept, apart, draft, parents
from pairs import perturbed

import specker
from specker.checkpoints.checkpoint import read as read_checkpoint
from specker.kernels.round.repeat_rows import Repeated
from specker.model import decoder
from specker.model.cache import KVCache, sequence_bounds
from specker.model.decoder import Final, Model, forward
from specker.model.prefill import prefill
from specker.options import Sampling
from specker.runtime import strategies
from specker.runtime.control.policy import Budget
from specker.runtime.round.lm_head import LMHead
from specker.runtime.strategies.easyspec.layer_groups import LayerParallel, Schedule
from specker.runtime.strategies.model_drafter import AutoregressiveDrafter

merge = importlib.import_module("specker.kernels.residual_merge")

F64 = torch.float64
ARCHITECTURES = {"llama": {}, "qwen2": {"tied": True}, "qwen3": {}, "llama-bias": {"attention_bias": True}}
ARCHITECTURES |= {"mistral": {"sliding_window": 4}, "olmo2": {"kv_heads": 4}}
PROMPT = [5, 9, 40, 3, 77, 21]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        name: make(tmp_path_factory.mktemp(name), name.split("-")[0], layers=7, max_context=192, **more)
        for name, more in ARCHITECTURES.items()
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory, checkpoints):
    target = checkpoints["llama"]
    return target, perturbed(target, tmp_path_factory.mktemp("draft"), amount=0.05)


def loaded(folder, groups):
    checkpoint = read_checkpoint(folder, dtype=F64, device="cpu")
    model = Model(checkpoint)
    cache = KVCache(model.config, 64, dtype=F64, device="cpu", page_size=16)
    return model, cache, LayerParallel(model, cache, Schedule(groups))


# --- a plain implementation of the method, one token row at a time, from the checkpoint's tensors


def norm(x, weight, eps):
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def rotate(head, position, inv_freq):
    angle = torch.cat((position * inv_freq.float(),) * 2)  # always float32, as in transformers
    cos, sin = angle.cos().double(), angle.sin().double()
    half = len(head) // 2
    return head * cos + torch.cat((-head[half:], head[:half])) * sin


def attention(w, n, c, h, position, memory):
    """Layer n's attention for a row h at `position`; appends its K/V to memory[n]."""
    x = h if w.norm_in is None else norm(h, w.norm_in[n], c.rms_norm_eps)
    qkv = w.qkv[n] @ x + (0 if w.qkv_bias is None else w.qkv_bias[n])
    if c.layer.qk_norm == "projection":
        parts = qkv.split([c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim])
        q, k = (norm(part, each[n], c.rms_norm_eps) for part, each in zip(parts, (w.q_norm, w.k_norm), strict=False))
        qkv = torch.cat((q, k, parts[2]))
    heads = qkv.view(-1, c.head_dim)
    q, k, v = heads[: c.num_heads], heads[c.num_heads : -c.num_kv_heads], heads[-c.num_kv_heads :]
    if c.layer.qk_norm == "head":
        q = torch.stack([norm(head, w.q_norm[n], c.rms_norm_eps) for head in q])
        k = torch.stack([norm(head, w.k_norm[n], c.rms_norm_eps) for head in k])
    q, k = (torch.stack([rotate(head, position, w.ropes[0].inv_freq) for head in x]) for x in (q, k))
    memory[n].append((k, v))
    seen, out = memory[n][-c.layer.sliding_window(n) :], []
    for i, head in enumerate(q):
        kv = i * c.num_kv_heads // c.num_heads
        scores = torch.stack([head @ past_k[kv] for past_k, _ in seen]) / math.sqrt(c.head_dim)
        out.append(sum(p * past_v[kv] for p, (_, past_v) in zip(scores.softmax(0), seen, strict=True)))
    added = w.o[n] @ torch.cat(out) + (0 if w.o_bias is None else w.o_bias[n])
    return added if w.norm_o is None else norm(added, w.norm_o[n], c.rms_norm_eps)


def mlp(w, n, c, h):
    x = h if w.norm_post is None else norm(h, w.norm_post[n], c.rms_norm_eps)
    gate, up = (w.gate_up[n] @ x).chunk(2)
    added = w.down[n] @ (gate / (1 + (-gate).exp()) * up)
    return added if w.norm_down is None else norm(added, w.norm_down[n], c.rms_norm_eps)


def fuzzy(w, c, groups, h, position, memory):
    for group in groups:
        added = [attention(w, n, c, h, position, memory) for n in group]
        for n, a in zip(group, added, strict=True):
            h = h + a
            h = h + mlp(w, n, c, h)
    return h


@pytest.mark.parametrize(
    ("name", "groups"),
    cases.diagonal(
        ARCHITECTURES, [((0,), (1, 2, 3, 4), (5,), (6,)), ((0, 1), (2, 3, 4), (5, 6)), ((0, 1, 2, 3, 4, 5, 6),)]
    ),
)
def test_the_fuzzy_pass_follows_the_paper(checkpoints, name, groups):
    """A prompt in sequence, then rows by the schedule, against the plain implementation above."""
    model, cache, parallel = loaded(checkpoints[name], groups)
    w = read_checkpoint(checkpoints[name], dtype=F64, device="cpu").weights
    memory = [[] for _ in range(7)]
    for position, token in enumerate(PROMPT):
        fuzzy(w, model.config, [(n,) for n in range(7)], w.embed[token], position, memory)
    prefill(model, cache, PROMPT)
    rows = cache.after([len(PROMPT)], [3])
    got = parallel.forward(rows, model.embed_tokens(torch.tensor([7, 8, 99]))).hidden
    for i, token in enumerate([7, 8, 99]):
        want = fuzzy(w, model.config, groups, w.embed[token], len(PROMPT) + i, memory)
        assert (got[i] - want).abs().max() < 1e-12 * want.abs().max().clamp(min=1)
    for n in range(7):
        k, v = (torch.stack(x) for x in zip(*memory[n], strict=True))
        for ours, theirs in ((cache.k, k), (cache.v, v)):
            assert (ours[n].flatten(0, 1)[: len(PROMPT) + 3] - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_groups_of_one_are_the_layers_in_sequence(checkpoints, name):
    model, cache, parallel = loaded(checkpoints[name], tuple((n,) for n in range(7)))
    prefill(model, cache, PROMPT)
    rows, hidden = cache.after([len(PROMPT)], [4]), model.embed_tokens(torch.tensor([1, 2, 3, 4]))
    got = parallel.forward(rows, hidden).hidden
    written = cache.k[:, :1, : len(PROMPT) + 4]
    before = written.clone()
    assert torch.equal(got, forward(model, cache, rows, hidden).hidden) and torch.equal(written, before)


def test_sequence_bounds_keep_their_tensor():
    first = sequence_bounds(3, torch.device("cpu"), 2)
    assert first.tolist() == [0, 3, 6] and first.dtype == torch.int32
    for rows in range(2000):
        sequence_bounds(rows, torch.device("cpu"))
    assert sequence_bounds(3, torch.device("cpu"), 2) is first


def test_the_stacks_own_the_weights(checkpoints):
    """No second copy: a layer's weights are views of its group's."""
    model, _, parallel = loaded(checkpoints["llama"], ((0,), (1, 2, 3), (4, 5, 6)))
    for layers, group in zip(parallel.schedule.groups[1:], parallel.stacks[1:], strict=True):
        for i, n in enumerate(layers):
            own, stack = model.layers[n].mixer, group.mixer
            assert own.qkv.untyped_storage().data_ptr() == stack.qkv.untyped_storage().data_ptr()
            assert torch.equal(own.qkv, stack.qkv[i]) and torch.equal(own.o, stack.o[i])
            assert torch.equal(own.norm_in, stack.norm_in[i])
    assert [len(group.layers) for group in parallel.stacks] == [1, 3, 3]


def test_the_checkpoint_keeps_no_copy_of_stacked_weights(pair):
    """Only the stacks hold the weights of the draft's grouped layers."""
    engine = specker.load(*pair, strategy="easyspec", layer_parallel="3", device="cpu")
    parallel, weights = engine.drafter.layers, engine.draft.weights
    wide = [(layers, g) for layers, g in zip(parallel.schedule.groups, parallel.stacks, strict=True) if len(layers) > 1]
    stacks = {x.untyped_storage().data_ptr() for _, g in wide for x in (g.mixer.qkv, g.mixer.o)}
    grouped = [n for layers, _ in wide for n in layers]
    assert len(grouped) == 5 and len(stacks) == 2
    for held in (weights.qkv, weights.o):
        assert {held[n].untyped_storage().data_ptr() for n in grouped} <= stacks
    assert torch.equal(weights.qkv[2], engine.drafter.model.layers[2].mixer.qkv)


@pytest.mark.parametrize("groups", [(), ((0,), ()), ((1,), (0,)), ((0,), (2,)), ((0, 0),)])
def test_a_schedule_holds_every_layer_once(groups):
    with pytest.raises(ValueError, match="hold every layer from 0 on once and in order"):
        Schedule(groups)


def test_neighbours_in_one_storage_are_not_copied():
    from specker.runtime.strategies.easyspec.layer_groups import _in_one

    stacked = torch.arange(24.0).view(4, 3, 2)
    view = _in_one([stacked[1], stacked[2], stacked[3]])
    assert torch.equal(view, stacked[1:]) and view.data_ptr() == stacked[1].data_ptr()
    padded = torch.arange(32.0).view(4, 4, 2)[:, :3]
    for separate in (
        [stacked[0], stacked[2], stacked[3]],
        [stacked[1], stacked[0]],
        [stacked[0].clone(), stacked[1]],
        list(padded),  # evenly spaced, but with gaps
        list(torch.arange(24.0).view(2, 4, 3).mT),
    ):
        assert torch.equal(_in_one(separate), torch.stack(separate)) and _in_one(separate).is_contiguous()


@pytest.fixture
def kernels(monkeypatch):
    """Run all of a drafter's ops as kernels in the interpreter. Yields the linear for its model."""
    attend = importlib.import_module("specker.kernels.tree_attention")
    kv = importlib.import_module("specker.kernels.kv_calibrate")
    project = importlib.import_module("specker.kernels.kv_project")
    products = importlib.import_module("specker.kernels.row_linear")
    select = importlib.import_module("specker.kernels.vocab_topk")
    from specker.kernels.round import repeat_rows as repeat

    def add_norm(x, delta, weight, eps, following=None):
        split = delta is not None and delta.dim() == 3
        deltas = delta if split else x.unsqueeze(0)[:0] if delta is None else delta.unsqueeze(0)
        y, normed = merge.launch(x, deltas, weight.unsqueeze(0), eps, None, split)
        return y, normed[0]

    def linear(x, weight, bias=None, epilogue="none"):
        return products.launch(x, weight, bias, epilogue)

    def attention(*args, following=None):
        return attend.launch(*args)

    def topk(hidden, weight, token_ids, k, norm, noise, with_lse=True, out=None):
        return select.launch(hidden, weight, token_ids, k, norm, noise, with_lse, out)

    for name, kernel in {
        "model.decoder.add_norm": add_norm,
        "model.decoder.fuses": lambda hidden: True,
        "model.kv_formats.kv_calibrate": kv.launch,
        "model.decoder.kv_project": project.launch,
        "model.decoder.row_linear": linear,
        "model.decoder.tree_attention": attention,
        "model.decoder.residual_merge": merge.launch,
        "runtime.strategies.easyspec.layer_groups.repeat_rows": lambda *args: Repeated(*repeat.launch(*args)),
        "runtime.round.lm_head.vocab_topk": topk,
        "model.cache.kv_commit": importlib.import_module("specker.kernels.kv_commit").launch,
    }.items():
        monkeypatch.setattr(f"specker.{name}", kernel)
    return linear


def tiny_model(folder, linear):
    checkpoint = read_checkpoint(folder, dtype=torch.float32, device="cpu")
    return Model(checkpoint, linear=linear)


def tiny_cache(model):
    return KVCache(model.config, 48, dtype=torch.float32, device="cpu", page_size=16)


def catch_up(model, cache, tokens):
    """The layers in sequence over `tokens` after the cache's columns."""
    rows = cache.after(cache.exact_len, [len(tokens)])
    forward(model, cache, rows, model.embed_tokens(torch.tensor(tokens)))
    cache.exact_len[0] += len(tokens)


def columns(cache, first, end):
    """K and V of columns first..end - 1, [2, L, end - first, Hkv, D]."""
    return torch.stack((cache.k, cache.v)).flatten(2, 3)[:, :, cache.slots(0, first, end)]


def deepest(r):
    """The rows of a longest path of the draft, row 0 first."""
    paths = [[0]]
    for row, parent in enumerate(parents(r), 1):
        paths.append([*paths[parent], row])
    return max(paths, key=len)


@pytest.mark.parametrize("width", [1, 2])
def test_calibrated_columns_are_bit_for_bit_the_sequential_ones_under_the_kernels(tmp_path, kernels, width):
    """Two groups of two layers draft; three tokens are accepted, then one. After each catch-up the draft cache equals
    that of the layers in sequence over the same tokens and chunks. Before it, the fuzzy columns differ."""
    folder = make(tmp_path, layers=4, max_context=64, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=64)
    model, plain = (tiny_model(folder, kernels) for _ in range(2))
    cache, sequential = tiny_cache(model), tiny_cache(plain)
    head = LMHead(model.head, model.norm, model.config.rms_norm_eps)
    parallel = LayerParallel(model, cache, Schedule(((0, 1), (2, 3))))
    drafter = AutoregressiveDrafter(model, cache, head, width, layers=parallel)
    text, fuzzy = PROMPT[:3], None
    drafter._missing = lambda slot, text, fixed: 0  # the first catch-up processes the whole text
    for accepted, depth in ((3, 3), (1, 2), (0, 1)):  # the last draft serves only to trigger its catch-up
        r = draft(drafter, text, Budget(depth * width, depth), Sampling(temperature=0.7))
        [before], n = sequential.exact_len, len(text)
        catch_up(plain, sequential, text[before:])
        assert torch.equal(columns(cache, 0, n), columns(sequential, 0, n))
        if fuzzy is not None:
            error = (fuzzy - columns(sequential, before, before + 1)).abs().amax((0, 2, 3, 4))
            assert error[0] < 1e-5 and (error[1:] > 1e-3).all(), "only the first layer's input is the exact one"
        path = deepest(r)[: accepted + 1]
        if accepted:
            node = path[1] - 1 if r.draft.nodes is None else int(r.draft.nodes[0, path[1] - 1])
            fuzzy = columns(cache, n + node, n + node + 1)
        text = accept(drafter, r, path, 7)
        assert cache.exact_len == [n], "no fuzzy column is kept"


def batch_of(model, slots, texts):
    """A cache with `texts` prefilled by the layers in sequence, in the order of `slots`."""
    cache = KVCache(model.config, 48, dtype=torch.float32, device="cpu", page_size=16, sequences=len(texts))
    for slot in slots:
        cache.take(slot, 48)
    for slot, text in zip(slots, texts, strict=True):
        prefill(model, cache, text, slot=slot)
    return cache


def test_a_batch_has_the_bits_of_each_sequence_alone_under_the_kernels(tmp_path, kernels):
    """Verify rows of a chain and of trees, by layers in sequence and by groups, with rows placed by the device. Three
    ragged sequences in one forward equal each alone, bit for bit, including K/V."""
    folder = make(tmp_path, layers=3, max_context=64, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=64)
    texts = [[5, 9, 3], [7] * 21, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    parents = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 3], [0, 0, 0, 2]])
    tokens = torch.tensor([[4, 8, 15, 16, 23], [42, 4, 8, 15, 16], [3, 1, 4, 1, 5]])
    for up, side_by_side in ((None, True), (parents, False)):
        found = []
        for chosen in ([0, 1, 2], [0], [1], [2]):
            model = tiny_model(folder, kernels)
            cache = batch_of(model, range(len(chosen)), [texts[b] for b in chosen])
            length = torch.tensor([len(texts[b]) + 1 for b in chosen])
            rows = cache.place(length, 1, 0, 5, None if up is None else up[chosen])
            hidden = model.embed_tokens(tokens[chosen].flatten())
            if side_by_side:
                out = LayerParallel(model, cache, Schedule(((0,), (1, 2)))).forward(rows, hidden).hidden
            else:
                out = forward(model, cache, rows, hidden).hidden
            kv = torch.stack([cache.k.flatten(1, 2)[:, rows.slots], cache.v.flatten(1, 2)[:, rows.slots]])
            found += zip(out.split(5), kv.split(5, 2), strict=True)
        for together, alone in zip(found[:3], found[3:], strict=True):
            assert all(map(torch.equal, together, alone)), (up is not None, side_by_side)


def test_the_last_sum_comes_with_the_final_norm_under_the_kernels(tmp_path, kernels):
    """Of all layers, of the first two and of groups: the bits of a norm taken later, and so the same logits."""
    model = tiny_model(make(tmp_path, layers=4, max_context=64), kernels)
    hidden = model.embed_tokens(torch.tensor([4, 8, 15]))
    for groups, layers in ((None, slice(None)), (None, slice(2)), (((0,), (1, 2, 3)), None)):
        cache = tiny_cache(model)
        rows = cache.after([0], [3])
        if groups is None:
            out = forward(model, cache, rows, hidden, layers, aux_layers=(2,))
            assert layers.stop is None or torch.equal(out.aux_hidden_states[2], out.hidden)
        else:
            out = LayerParallel(model, cache, Schedule(groups)).forward(rows, hidden)
        _, later = merge.launch(out.hidden, out.hidden[None][:0], model.norm[None], model.config.rms_norm_eps)
        assert out.final.normed and torch.equal(out.final.rows, later[0])
        assert torch.equal(model.logits(out.final), model.logits(Final(out.hidden)))


def test_calibration_is_batch_invariant_under_the_kernels(tmp_path, kernels):
    """Tokens calibrated together get the same K/V bits as one row at a time: in the interpreter, in float32."""
    model = tiny_model(make(tmp_path, layers=3, max_context=64), kernels)
    single, pairs = tiny_cache(model), tiny_cache(model)
    for token in PROMPT:
        catch_up(model, single, [token])
    for part in (PROMPT[:2], PROMPT[2:]):
        catch_up(model, pairs, part)
    assert torch.equal(columns(single, 0, len(PROMPT)), columns(pairs, 0, len(PROMPT)))


# --- the strategy

SHAPES = {"chain": {"draft_tokens": 4}, "tree": {"tree": "3x4"}, "capped": {"tree": "4x3", "draft_tokens": 5}}


def engine(pair, **options):
    return specker.load(*pair, strategy="easyspec", dtype="float64", page_size=16, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_draft_cache_is_exact_after_calibration(pair, shape, monkeypatch):
    """At the start of every draft, after the catch-up, with rows placed by the host or the device. Without
    calibration the cache is not exact, so the test can fail."""
    differences = {}
    for calibrate, graphs in (("every", "off"), ("every", "on"), ("never", "off")):
        fast = engine(pair, graphs=graphs, layer_parallel="3", calibrate=calibrate, **SHAPES[shape])
        worst = []

        def checked(self, batch, start=AutoregressiveDrafter.start, worst=worst):
            caught = start(self, batch)
            n = int(batch.state.length[0])
            assert batch.fixed or self.cache.exact_len == [n]
            worst.append(apart(self.model, self.cache, batch.state.committed[0, :n].tolist(), n))
            return caught

        with monkeypatch.context() as patch:
            patch.setattr(AutoregressiveDrafter, "start", checked)
            fast.generate(PROMPT, 24, temperature=0.7)
        assert len(worst) > 5 and (fast.loop.launched > 5) == (graphs == "on")
        differences[calibrate, graphs] = max(worst)
    *exact, fuzzy = differences.values()
    assert max(exact) < 1e-12 < 1e-6 < fuzzy


@pytest.mark.parametrize(("calibrate", "size"), cases.one_in(2, ["mismatch", "never"], [1, 3]))
def test_tokens_are_those_of_plain_decoding_where_fuzzy_columns_stay(pair, calibrate, size):
    """Also in a batch, whose sequences end at different times and change slots."""
    how = {"layer_parallel": "3", "draft_tokens": 4, "batch_size": size, "graphs": "on"}
    fast, counts = engine(pair, calibrate=calibrate, **how), (16, 6, 10, 5, 8)
    prompts = ([5, 9, 40], [1], list(range(3, 90)), [7, 8], [2, 3, 5, 8])
    drafted = accepted = 0
    for temperature in (0.0, 0.7):
        done = fast.generate(list(prompts), list(counts), temperature=temperature)
        for prompt, count, out in zip(prompts, counts, done, strict=True):
            assert out.tokens == cases.plain(pair[0], prompt, count, temperature=temperature)
            drafted, accepted = drafted + out.stats.drafted, accepted + out.stats.accepted
    assert 0 < accepted < drafted
    assert fast.loop.launched == 0 and not fast.drafter.keeps_prefix


def test_combines_with_a_trimmed_head(pair, tmp_path):
    from specker.runtime.strategies.vocabtrim.scores import VocabScores

    path = tmp_path / "s.safetensors"
    path.write_bytes(VocabScores.from_counts(torch.arange(128)).to_bytes())
    how = {"vocab_scores": str(path), "vocab_keep": "100", "vocab_text": 9, "dtype": "float64", "draft_tokens": 3}
    fast = specker.load(*pair, strategy="easyspec+vocabtrim", **how)
    got = fast.generate(PROMPT, 20, temperature=0.7)
    assert got.tokens == fast.generate_ar(PROMPT, 20, temperature=0.7).tokens and len(fast.trimmed_head.ids) == 109


# --- schedules


def test_schedules():
    assert Schedule.parallel(10, 4).groups == ((0,), (1, 2, 3, 4), (5, 6, 7, 8), (9,))
    assert Schedule.parallel(9, 4).groups == ((0,), (1, 2, 3, 4), (5, 6, 7), (8,))
    assert Schedule.parallel(9, 1).groups == tuple((n,) for n in range(9))
    assert [Schedule.parallel(n, 4).groups for n in (1, 2)] == [((0,),), ((0,), (1,))]
    assert Schedule.of(((0, 1), (2,)), 3).groups == ((0, 1), (2,)) and str(Schedule.of(2, 4)) == "[[0],[1,2],[3]]"
    s = Schedule.parallel(10, 4)
    assert [s.owner(n, 2) for n in range(10)] == [0, 0, 0, 1, 1, 0, 0, 1, 1, 0]
    assert [s.owner(n, 8) for n in range(1, 5)] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer_parallel": "0"}, "layer_parallel must be a width"),
        ({"layer_parallel": "two"}, "layer_parallel must be a width"),
        ({"layer_parallel": "[[0],[]]"}, "layer_parallel must be a width"),
        ({"layer_parallel": "[[0],[1.5]]"}, "layer_parallel must be a width"),
        ({"layer_parallel": "[[0],[2,1]]"}, "once and in order"),
        ({"layer_parallel": "[[0],[0,1]]"}, "once and in order"),
        ({"strategy": "draft", "layer_parallel": "4"}, "layer_parallel is for strategy easyspec"),
        ({"strategy": "ar", "layer_parallel": "4"}, "layer_parallel is for strategy easyspec"),
        ({"strategy": "draft+easyspec"}, "do not compose"),
    ],
)
def test_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        strategies.options(**{"strategy": "easyspec", **options})


def test_a_schedule_of_another_depth_is_refused(pair):
    with pytest.raises(ValueError, match=r"has 3 layers, but the draft has 7"):
        engine(pair, layer_parallel="[[0],[1],[2]]")


# --- mutations that must be caught


def test_mutation_fuzzy_columns_kept(pair, monkeypatch):
    """Without truncation of fuzzy K/V, the cache check fails."""
    accept = AutoregressiveDrafter.accept

    def kept(self, batch, draft, accepted):
        accept(self, batch, draft, accepted)
        if draft.size and not batch.fixed:
            self.keep(draft, 0, accepted.paths[0])

    monkeypatch.setattr(AutoregressiveDrafter, "accept", kept)
    with pytest.raises(AssertionError):
        test_the_draft_cache_is_exact_after_calibration(pair, "chain", monkeypatch)


def test_mutation_merged_in_the_wrong_order(checkpoints, monkeypatch):
    """With A_i added to another layer's residual, the fuzzy pass differs from the paper's."""
    run = decoder.run_layers

    def swapped(model, steps, hidden):
        def flipped(batch):
            return batch._replace(join=lambda added: batch.join(added).flip(0))

        steps = [(group, kv, flipped(batch) if len(group.layers) > 1 else batch) for group, kv, batch in steps]
        return run(model, steps, hidden)

    monkeypatch.setattr("specker.runtime.strategies.easyspec.layer_groups.run_layers", swapped)
    with pytest.raises(AssertionError):
        test_the_fuzzy_pass_follows_the_paper(checkpoints, "llama", ((0,), (1, 2, 3, 4), (5,), (6,)))
