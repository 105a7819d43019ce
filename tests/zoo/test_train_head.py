"""train/head: tiny heads of both kinds learn from a tiny target, go on where they stopped, and draft in the engine as
they did in training."""

import copy
import json

import caches
import cases
import numpy as np
import pytest
import torch
from make_checkpoint import make
from make_dflash import Formula as BlockFormula
from make_gguf import write
from make_head import Formula

import specker
from specker.checkpoints.checkpoint import opened
from specker.checkpoints.checkpoint import read as read_checkpoint
from specker.model.cache import KVCache
from specker.model.prefill import prefill
from train import corpus
from train.head import __main__ as command
from train.head import fit, taps
from train.head.assistant import Reader
from train.head.blocks import Blocks
from train.head.eagle import Head
from train.head.export import LAYOUTS, export, export_blocks
from train.head.fit import Recipe, Training

DEPTHS = (2, 4, 5)
STEPS = 3
RANK = 12
CHAINED = ("dspark", "domino")  # kinds of drafters of blocks whose tokens know those before them
VISITS = 30_000
TEXTS = 96


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tensors are small, and torch's threads would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "layers": 8, "max_context": 256}  # which compiled layers take
    return make(tmp_path_factory.mktemp("target") / "chatty", tokenizer=True, tied=True, seed=1, **sizes)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory, one_thread):
    """A folder with texts of the target and its rows, as the stages answers and taps write them."""
    engine = specker.load(target, strategy="ar", dtype="float32", device="cpu", batch_size=32)
    prompts = [[n, 7 * n % 256] for n in range(TEXTS)]
    seeds, heats = [*range(TEXTS)], [0.7 * (n % 3 == 0) for n in range(TEXTS)]
    texts = engine.generate(prompts, 90, temperature=heats, seed=seeds)
    made = tmp_path_factory.mktemp("lessons")
    (made / "answers").mkdir()
    for part in np.split(np.arange(TEXTS), 2):
        corpus.save(made / "answers", {int(n): ([*prompts[n], *texts[n].tokens], 2) for n in part})
    taps.write(shards(made), made / "taps", opened(target), DEPTHS, torch.float32)
    return made


def shards(folder):
    return sorted((folder / "answers").glob("*.npz"))


@pytest.fixture(scope="module")
def lessons(folder):
    return taps.Lessons(shards(folder), folder / "taps", 64, STEPS)


@pytest.fixture(scope="module")
def dense(target):
    return read_checkpoint(target, dtype=torch.float32, device="cpu", pack=False)


def new(dense, lessons, folder, visits, rows=200, kind="eagle3", **how):
    """A training of a head of STEPS tokens a draft."""
    folder.mkdir(exist_ok=True)
    ids = fit.kept_ids(folder / "state.pt", lessons.counts(dense.config.vocab_size), rows)
    net = Head(dense, DEPTHS, ids, STEPS) if kind == "eagle3" else Blocks(dense, DEPTHS, 319, STEPS, 2, kind, RANK)
    return Training(net, lessons, Recipe(**{"visits": visits, "batch": 512, "length": 64, **how}), folder)


@pytest.fixture(scope="module")
def learnt(dense, lessons, tmp_path_factory):
    """(a finished training with its best weights, rounded as in its exported folders; its agreement before)"""
    training = new(dense, lessons, tmp_path_factory.mktemp("learnt") / "head", VISITS, muon=0.012)
    before = training.judge()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "EVERY", 30)
        training.fit()
    training.net.load_state_dict(torch.load(training.folder / "best.pt", weights_only=True))
    return training, before


@pytest.fixture(scope="module", params=LAYOUTS)
def exported(request, learnt, target, tmp_path_factory):
    """(the folder of the learnt head, and the net with the weights that the folder has)"""
    out = tmp_path_factory.mktemp("exported") / request.param
    export(learnt[0].net, target, out, request.param, "org/chatty")
    net = Head(read_checkpoint(target, dtype=torch.float64, device="cpu", pack=False), DEPTHS, learnt[0].net.ids)
    net.load_state_dict({name: x.to(torch.bfloat16).double() for name, x in learnt[0].net.state_dict().items()})
    net.head = net.head.to(torch.bfloat16).double()
    return out, net


@pytest.fixture(scope="module")
def rows_of(target):
    """A function of a text and depths: the target's rows [1, T, A, H] in float64."""
    model = specker.load(target, strategy="ar", device="cpu", dtype="float64").model

    def rows_of(text, depths=DEPTHS):
        cache = KVCache(model.config, 256, dtype=model.dtype, device="cpu")
        kept = prefill(model, cache, list(text), depths, len(text))
        return torch.stack([kept[depth] for depth in depths], 1)[None]

    rows_of.model = model
    return rows_of


def chains(net, rows, text, steps=STEPS):
    """The net's tokens and rows for its head from each position that has `steps` true tokens after it."""
    T = len(text) - steps
    tokens, places = torch.tensor(text)[None, 1:], torch.arange(T)[None]
    finals = net.chains(rows[:, :T], tokens, places, torch.zeros_like(places), steps)
    return [net.ids[net.logits(final)[0].argmax(-1)] for final in finals], finals


def test_a_head_learns(learnt):
    """The agreement with the target rises at every step of a chain, and the best judged weights are kept."""
    training, before = learnt
    after = training.judge()
    assert all(b > a + 0.1 for a, b in zip(before, after, strict=True)) and after[2] > before[2] + 0.15
    log = [json.loads(line) for line in (training.folder / "log.jsonl").read_text().splitlines()]
    assert log[-1]["visits"] == training.done >= VISITS > log[-1]["visits"] - 512
    assert max(log, key=lambda row: fit.expected(row["agreement"]))["agreement"] == after
    assert log[-1]["kl"] < 0.7 * log[0]["kl"]


def test_a_chain_sees_what_it_sees_in_an_engine(exported, rows_of):
    """Step k of the chain from position t, by an independent formula over the pairs of one draft alone, up to the
    float32 angles of RoPE."""
    folder, net = exported
    model, text = rows_of.model, [7, 49, 5, 60, 61, 7, 8, 30, 200, 3, 3, 9, 14]
    formula = Formula(folder, model.embed, model.head, model.norm, model.config.rms_norm_eps)
    rows = rows_of(text)
    with torch.no_grad():
        _, finals = chains(net, rows, text)
    for t in range(len(text) - STEPS):
        features = formula.features(list(rows[0, : t + 1].unbind(1)))
        for step in range(STEPS):
            out, logits = formula.outputs(features, torch.tensor(text[1 : len(features) + 1]))
            assert torch.allclose(net.logits(finals[step][0, t]), logits[-1], atol=1e-4), (t, step)
            features = torch.cat((features, out[-1:]))


def test_texts_of_a_window_do_not_see_each_other(exported, rows_of):
    _, net = exported
    a, b = [7, 49, 5, 60, 61, 7, 8, 30, 200], [3, 3, 9, 14, 9, 9, 1]
    with torch.no_grad():
        rows, T = torch.cat([rows_of(a), rows_of(b)], 1), len(a) + len(b) - STEPS
        text = torch.tensor([0] * len(a) + [1] * len(b))[None, :T]
        places = torch.tensor([*range(len(a)), *range(len(b))])[None, :T]
        both = net.chains(rows[:, :T], torch.tensor([(a + b)[1:]]), places, text, STEPS)
        alone = chains(net, rows_of(b), b)[1]
    for one, other in zip(both, alone, strict=True):
        assert torch.allclose(one[0, len(a) :], other[0], atol=1e-6)  # the softmax is in float32


def test_the_engine_drafts_as_the_trained_head_does(exported, target, rows_of):
    """Strategy eagle loads the folder, drafts the net's token in every round, and so agrees equally often."""
    folder, net = exported
    how = {"strategy": "eagle", "device": "cpu", "dtype": "float64", "policy": "fixed", "draft_tokens": 1}
    engine = specker.load(target, folder, **how)
    assert engine.drafter.aux_layers == DEPTHS
    accepted = agreed = drafted = 0
    for n in range(4):
        seen, prompt = [], [n + 3, 7 * n + 21]
        engine.trace = seen.append
        out = engine.generate(prompt, 60)
        assert out.tokens == cases.plain(target, prompt, 60)
        text = prompt + out.tokens
        with torch.no_grad():
            (wanted,), _ = chains(net, rows_of(text[:-1]), text, 1)
        for row in seen:
            if row["draft"]:
                at = row["position"]  # of the token after the root
                assert row["draft"] == [int(wanted[at - 2])]
                agreed += int(wanted[at - 2]) == text[at]
                drafted += 1
        accepted += out.stats.accepted
    assert accepted == agreed and 0.2 * drafted < agreed < drafted


class Killed(Exception):
    pass


@pytest.mark.parametrize(("kind", "killed"), [("eagle3", 7), pytest.param("dflash", 12, marks=pytest.mark.slow)])
def test_a_killed_training_ends_with_the_same_weights(dense, lessons, tmp_path, monkeypatch, kind, killed):
    """In the middle of an epoch, before and after the first line of the log; with a last save before the kill."""
    monkeypatch.setattr(fit, "EVERY", 10)
    whole = new(dense, lessons, tmp_path / "whole", 8_000, kind=kind)
    whole.fit()
    monkeypatch.setattr(fit, "SAVED", 0.0)
    first = new(dense, lessons, tmp_path / "parts", 8_000, kind=kind)
    step = first.step

    def dies():
        if first.done >= killed * 512:
            raise Killed
        step()

    first.step = dies
    with pytest.raises(Killed):
        first.fit()
    parts = new(dense, lessons, tmp_path / "parts", 8_000, kind=kind)
    parts.fit()
    assert parts.done == whole.done and parts.log == whole.log
    for name, x in whole.net.state_dict().items():
        assert torch.equal(parts.net.state_dict()[name], x), name
    for name in ("best.pt", "log.jsonl"):
        assert (tmp_path / "whole" / name).exists() and (tmp_path / "parts" / name).exists()
    kept = [torch.load(tmp_path / way / "best.pt", weights_only=True) for way in ("whole", "parts")]
    assert all(torch.equal(x, kept[1][name]) for name, x in kept[0].items())


def test_the_loss_is_the_divergence_of_every_step(dense, lessons, tmp_path):
    """In float64, by position and step: kept tokens only, prompts weigh less, and no chain leaves its text."""
    net = new(dense, lessons, tmp_path / "head", 1, rows=60).net
    batch = lessons.batch(lessons.trained[:3])
    assert {round(w, 6) for w in batch.weight.flatten().tolist()} == {0.0, taps.PROMPT, 1.0}
    T, total, sums = 64, 0.0, 0.0
    with torch.no_grad():
        got = float(net.loss(batch, 1.0, 0.7, 0))
        finals = net.chains(batch.taps[:, :T], batch.ids[:, 1:], batch.place[:, :T], batch.text[:, :T], STEPS)
        for b in range(3):
            for t in range(T):
                for step in range(STEPS):
                    at = t + 1 + step
                    if batch.text[b, at] != batch.text[b, t] or int(batch.best[b, at]) not in net.ids.tolist():
                        continue
                    p = ((net.head.double() @ batch.last[b, at].double()) / 0.7).softmax(-1)
                    q = ((net.head.double() @ finals[step][b, t].double()) / 0.7).softmax(-1)
                    weight = 0.8**step * float(batch.weight[b, at])
                    total += weight * float((p * (p / q).log()).sum())
                    sums += weight
    assert got == pytest.approx(total / sums, rel=1e-4)


@pytest.mark.parametrize(("some", "rank"), [(60, 0), (7, 0), (7, 5)])
def test_the_gradient_of_the_divergence(dense, monkeypatch, some, rank):
    """Against autograd over all logits, which the loss computes a few rows at a time."""
    monkeypatch.setattr("train.head.net.LOGITS", some * 50)
    net, rng = Head(dense, DEPTHS, torch.arange(50), STEPS).double(), torch.Generator().manual_seed(2)
    final, last = torch.randn(2, 30, dense.config.hidden_size, dtype=torch.float64, generator=rng)
    final = torch.cat([final, torch.randn(30, rank, dtype=torch.float64, generator=rng)], 1).requires_grad_()
    own = torch.randn(50, rank, dtype=torch.float64, generator=rng, requires_grad=True)
    places, weight = torch.arange(30).roll(3), torch.rand(30, dtype=torch.float64, generator=rng)
    got = net.divergence(net.taught(last, 0.7), places, final, weight, 0.7, own if rank else None) * 3
    inputs = (final, own) if rank else (final,)
    gradients = torch.autograd.grad(got, inputs)
    p, q = (x.log_softmax(-1) for x in (last[places] @ net.head.T / 0.7, final @ torch.cat([net.head, own], 1).T / 0.7))
    want = ((p.exp() * (p - q)).sum(-1) * weight).sum() * 3
    assert torch.allclose(got, want, rtol=1e-10)
    for one, other in zip(gradients, torch.autograd.grad(want, inputs), strict=True):
        assert torch.allclose(one, other, rtol=1e-8, atol=1e-12)


def test_all_that_training_makes_is_on_its_device(dense):
    """Of every kind of head. On the device meta, which has no data, a tensor of the CPU is an error, and so is a value
    that the host reads, for which it would wait."""
    ids, H = torch.arange(50), dense.config.hidden_size
    blocks = [Blocks(dense, DEPTHS, 319, STEPS, 2, kind, RANK) for kind in ("dflash", *CHAINED)]
    for net in (Head(dense, DEPTHS, ids, STEPS), *blocks, Reader(dense, ids, STEPS)):
        net = copy.deepcopy(net).to("meta")
        shape = 2, 64 + net.beyond
        ints = (torch.zeros(shape, dtype=torch.int64, device="meta") for _ in range(4))
        text, place, best, own = ints
        rows = torch.zeros(*shape, len(net.taps) + 1, H, device="meta")
        batch = taps.Batch(own, text, place, torch.ones(shape, device="meta"), rows[:, :, 1:], rows[:, :, 0], best)
        net.loss(batch, 0.5, 0.7, 3).backward()
        assert {p.grad.device.type for p in net.parameters() if p.grad is not None} == {"meta"}
        assert [x.device.type for x in net.agreement(batch)] == ["meta"] * 2


def test_the_rows_are_the_target_s(folder, lessons, rows_of):
    """Those that an engine hands to a head, within bfloat16's rounding; and the target's best token."""
    model, near = rows_of.model, 0
    for path in shards(folder):
        rows = torch.from_numpy(np.load(folder / "taps" / f"{path.stem}.rows.npy")).view(torch.bfloat16).double()
        best, texts = np.load(folder / "taps" / f"{path.stem}.best.npy"), taps.Texts.read(path)
        for start, ids in list(zip(texts.starts, texts, strict=True))[:3]:
            own, wanted = rows[start : start + len(ids)], rows_of(ids.tolist(), (*DEPTHS, 8))[0]
            assert torch.allclose(own[:, :-1], wanted[:, :-1], rtol=2**-7, atol=2**-6 * float(wanted.std()))
            last = torch.nn.functional.rms_norm(wanted[:, -1], (64,), model.norm, model.config.rms_norm_eps)
            assert torch.allclose(own[:, -1], last, rtol=2**-7, atol=2**-6)
            logits, its = last @ model.head.T, torch.from_numpy(best[start : start + len(ids)].astype(np.int64))
            mine = logits.gather(1, its[:, None])[:, 0]
            assert bool((logits.max(-1).values - mine < 1e-3 * logits.std()).all())
            near += int((best[start + 2 : start + len(ids) - 1] == ids[3:]).sum())
    assert near > 100  # most of these texts are greedy


def test_the_rows_of_a_gguf_target(tmp_path, monkeypatch):
    """Its matrices are packed for the compiled layers, the LM head's too: the best tokens are those it decodes."""
    monkeypatch.setenv("SPECKER_CACHE", str(caches.empty(tmp_path / "cache")))
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 128, "layers": 2, "ffn": 256}
    file = write(tmp_path / "tiny.gguf", make(tmp_path / "source", **sizes), "Q8_0")
    prompts = [[n, 7 * n] for n in range(8)]
    made = specker.load(file, strategy="ar", device="cpu", kv_dtype="float32").generate(prompts, 20)
    (tmp_path / "answers").mkdir()
    corpus.save(tmp_path / "answers", {n: ([*prompts[n], *text.tokens], 2) for n, text in enumerate(made)})
    taps.write(shards(tmp_path), tmp_path / "taps", opened(file), (1, 2), torch.float32)
    best, ends = np.load(next((tmp_path / "taps").glob("*.best.npy"))), np.cumsum([2 + len(t.tokens) for t in made])
    rows = [part[1:-1].tolist() for part in np.split(best, ends[:-1])]
    assert rows == [text.tokens for text in made] and len(best) > 60


def test_no_text_is_both_trained_on_and_judged(folder, lessons):
    for n, path in enumerate(shards(folder)):
        ends = taps.Texts.read(path).ends
        spans = [
            {int(np.searchsorted(ends, at, side="right")) for m, start in ws if m == n for at in (start, start + 66)}
            for ws in (lessons.trained, lessons.held)
        ]
        assert spans[0] and spans[1] and max(spans[0]) < min(spans[1])
        assert sum(m == n for m, _ in lessons.trained) > 8 * sum(m == n for m, _ in lessons.held)


# --- drafters of blocks


@pytest.fixture(scope="module")
def blocks(dense, lessons, target, tmp_path_factory):
    """(a finished training of a drafter of blocks; its agreement before; the folder of the drafter; in float64 the net
    with the weights that the folder has)"""
    training = new(dense, lessons, tmp_path_factory.mktemp("blocks") / "training", 20_000, kind="dflash")
    before = training.judge()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "EVERY", 30)
        training.fit()
    training.net.load_state_dict(torch.load(training.folder / "best.pt", weights_only=True))
    folder = training.folder.parent / "drafter"
    export_blocks(training.net, target, folder)
    whole = read_checkpoint(target, dtype=torch.float64, device="cpu", pack=False)
    net = Blocks(whole, DEPTHS, 319, STEPS, 2)
    kept = training.net.state_dict().items()
    net.load_state_dict({n: x.to(torch.bfloat16).double() if x.is_floating_point() else x for n, x in kept})
    return training, before, folder, net


def test_a_drafter_of_blocks_learns(blocks):
    """Later tokens of a block are judged where those before it are right."""
    training, before, *_ = blocks
    after = training.judge()
    assert after[0] > before[0] + 0.2 and fit.expected(after) > fit.expected(before) + 0.3
    log = [json.loads(line) for line in (training.folder / "log.jsonl").read_text().splitlines()]
    assert log[-1]["kl"] < 0.8 * log[0]["kl"]


def window(*texts, rows):
    """A batch of one window of texts, with the target's rows [1, T, A, H]."""
    ids = torch.tensor([[token for text in texts for token in text]])
    text = torch.tensor([[n for n, text in enumerate(texts) for _ in text]])
    place = torch.tensor([[n for text in texts for n in range(len(text))]])
    return taps.Batch(ids, text, place, torch.ones(ids.shape), rows, rows[:, :, -1], ids)


def test_a_block_sees_what_it_sees_in_an_engine(blocks, rows_of):
    """Blocks of all roots at once against an independent formula of one block after its text alone, up to the float32
    angles of RoPE; texts of a window do not see each other."""
    *_, folder, net = blocks
    formula = BlockFormula(folder, rows_of.model.embed, rows_of.model.head)
    a, b = [7, 49, 5, 60, 61, 7, 8, 30, 200], [3, 3, 9, 14, 9, 9, 1]
    batch = window(a, b, rows=torch.cat([rows_of(a), rows_of(b)], 1))
    roots = torch.tensor([[5, 1, 8, 10, 12]])
    with torch.no_grad():
        got = net.blocks(batch, roots)[0]
    for root, rows in zip(roots[0].tolist(), got, strict=True):
        text, at = (a, root) if root < len(a) else (b, root - len(a))
        before = list(rows_of(text)[0, :at].unbind(1))
        assert torch.allclose(rows, formula.rows(before, text[at], STEPS), atol=1e-4), root


def test_the_engine_runs_the_trained_drafter(blocks, target):
    _, _, folder, net = blocks
    engine = specker.load(target, folder, "dflash", device="cpu", dtype="float64", policy="fixed")
    assert (
        engine.drafter.aux_layers == DEPTHS and engine.options.draft_tokens == STEPS and engine.drafter.spec.size == 4
    )
    out = [engine.generate([n + 3, 7 * n + 21], 60) for n in range(3)]
    assert [each.tokens for each in out] == [cases.plain(target, [n + 3, 7 * n + 21], 60) for n in range(3)]
    assert sum(each.stats.accepted for each in out) > 0.2 * sum(each.stats.rounds for each in out)
    assert int(net.mask) == 319


@pytest.fixture(scope="module", params=CHAINED)
def chained(request, target, tmp_path_factory):
    """(a drafter of blocks whose bias is random, in float64, its folder)"""
    net = Blocks(
        read_checkpoint(target, dtype=torch.float64, device="cpu", pack=False),
        DEPTHS,
        319,
        STEPS,
        2,
        request.param,
        RANK,
    )
    rng = torch.Generator().manual_seed(3)
    for name, x in net.named_parameters():
        x.data = torch.randn(x.shape, generator=rng).double() if name in net.tables else x.data
        x.data = x.data.to(torch.bfloat16).double()
    folder = tmp_path_factory.mktemp("chained") / request.param
    export_blocks(net, target, folder)
    return net, folder


def test_tokens_of_a_block_know_those_before_them_as_in_an_engine(chained, rows_of):
    """The logits with the bias, after a text's own tokens, against an independent formula."""
    net, folder = chained
    formula = BlockFormula(folder, rows_of.model.embed, rows_of.model.head)
    text = [7, 49, 5, 60, 61, 7, 8, 30, 200, 3, 3, 9, 14]
    batch, biased = window(text, rows=rows_of(text)), 0
    with torch.no_grad():
        for root in range(0, len(text) - STEPS, STEPS + 1):
            at, state = torch.arange(root, root + STEPS), None
            final = net.blocks(batch, torch.tensor([[root]]))
            latent = net._latent(batch, at.view(1, 1, -1), final)[0, 0]
            got = net.logits(final)[0, 0] + latent @ net.chained.w2.T
            rows = formula.rows(list(rows_of(text)[0, :root].unbind(1)), text[root], STEPS)
            for k, (row, logits) in enumerate(zip(rows, got, strict=True)):
                z, added, state = formula.step(k, row, text[root + k], state, 1.0, None)
                assert torch.allclose(logits, z + added, atol=2e-3), (root, k)
                biased += bool(added.abs().max() > 0.1)
    assert biased >= 2 * 3


def test_the_engine_runs_drafters_that_chain_their_tokens(chained, target):
    net, folder = chained
    engine = specker.load(target, folder, "dflash", device="cpu", dtype="float64", policy="fixed")
    assert engine.drafter.aux_layers == DEPTHS and engine.options.draft_tokens == STEPS
    assert engine.drafter.spec.following == (net.kind == "dspark")
    assert engine.generate([7, 70], 40).tokens == cases.plain(target, [7, 70], 40)


@pytest.mark.parametrize("kind", CHAINED)
def test_what_chains_tokens_learns(dense, lessons, tmp_path, kind):
    """A drafter that has learnt a little is nearer to the target with its bias than without it, on held-out texts."""
    training = new(dense, lessons, tmp_path / "training", 12_000, kind=kind, lr=0.03)
    training.fit()
    net, held = training.net, lessons.batch(lessons.held)
    with torch.no_grad():
        biased = net.loss(held, 1.0, 1.0, 0)
        net.chained.w2.zero_()
        assert biased < 0.97 * net.loss(held, 1.0, 1.0, 0)


@pytest.mark.parametrize("kind", ["dflash", "domino"])
def test_the_loss_of_blocks_is_the_divergence_of_every_token(dense, lessons, tmp_path, kind):
    """In float64: token k counts exp(-(k - 1) / 2) for blocks of 4 rows, and nothing behind the end of a text."""
    net = new(dense, lessons, tmp_path / "head", 1, kind=kind).net
    if net.chained is not None:
        net.chained.w2.data.normal_()
    batch = lessons.batch(lessons.trained[:2])
    roots = torch.rand(2, 64, generator=torch.Generator().manual_seed(5)).topk(16).indices  # the blocks of step 5
    total = sums = 0.0
    with torch.no_grad():
        got, other = (float(net.loss(batch, 0.5, 0.7, turn)) for turn in (5, 7))
        finals = net.blocks(batch, roots)
        at = roots[..., None] + torch.arange(STEPS)
        added = 0 if net.chained is None else net._latent(batch, at, finals) @ net.chained.w2.T
        logits = (net.logits(finals) + added).double()
        for b in range(2):
            for n, root in enumerate(roots[b].tolist()):
                for k in range(STEPS):
                    at = root + k
                    if batch.text[b, at] != batch.text[b, root]:
                        continue
                    p = ((net.head.double() @ batch.last[b, at].double()) / 0.7).softmax(-1)
                    q = (logits[b, n, k] / 0.7).softmax(-1)
                    weight = np.exp(-k / 2) * float(batch.weight[b, at])
                    total += weight * float((p * (p / q).log()).sum())
                    sums += weight
    assert got == pytest.approx(total / sums, rel=1e-4)
    assert got != pytest.approx(other, rel=1e-3)  # at other roots


# --- the command


@pytest.fixture
def main(command_line):
    """Runs the command with flags; returns its exit code."""

    def run(*argv):
        command_line(["train.head", *argv, "--threads", 1])
        return command.main()

    return run


@pytest.fixture
def small(short_answers):
    """Flags of a small run."""
    sizes = {"tokens": 400, "visits": 1000, "length": 32, "batch": 64, "rows": 100, "max_new_tokens": 40}
    sizes["batch_size"] = 6
    return [word for name, n in {**sizes, "max_context": 256}.items() for word in (f"--{name}", n)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", command.KINDS)
def test_the_stages_on_a_gpu(target, tmp_path, main, small, kind, capsys):
    """The head that a GPU trains has about the rows and the agreement that it has on a CPU."""
    out = tmp_path / "out"
    bfloat16 = ["--bfloat16", "true", "--device", "cuda"]
    assert main("--target", target, "--out", out, "--kind", kind, *small, *bfloat16) == 0
    said = capsys.readouterr().out
    args = command.Args(str(target), str(out), kind=kind, length=32, batch=64, rows=100, max_context=256)
    net, lessons = command.trained(args, opened(target))
    there = json.loads((args.own / "log.jsonl").read_text().splitlines()[-1])["agreement"]
    fit.put_weights(net, torch.load(args.own / "state.pt", map_location="cpu", weights_only=True)["net"], args.own)
    here = Training(net, lessons, Recipe(1, batch=64, length=32), tmp_path).judge()
    assert here == pytest.approx(there, abs=0.05)
    strategy, folder = (
        {"eagle3": "eagle", "dflash": "dflash", "assistant": "mtp"}[kind],
        said.split("head is in ")[1].strip(),
    )
    engine = specker.load(target, folder, strategy, device="cuda", policy="fixed")
    assert engine.generate([9, 4], 40).tokens == engine.generate_ar([9, 4], 40).tokens


def test_the_stages_make_a_head_and_are_done_once(target, tmp_path, main, small, capsys):
    out = tmp_path / "out"
    assert main("--target", target, "--out", out, *small) == 0
    assert "the head is in" in capsys.readouterr().out
    engine = specker.load(target, out / "head", "eagle", device="cpu", dtype="float64")
    assert engine.generate([9, 4], 20).tokens == engine.generate_ar([9, 4], 20).tokens
    written = {path: path.stat().st_mtime_ns for part in ("answers", "taps") for path in (out / part).iterdir()}
    state = torch.load(out / "state.pt", weights_only=True)
    again = ["--target", target, "--out", out, *small, "--layout", "speculators"]
    assert main(*again) == 0 and (out / "head-speculators" / "config.json").exists()
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert torch.load(out / "state.pt", weights_only=True)["log"] == state["log"]
    assert main(*again, "--stages", "answers", "taps", "--tokens", 1200) == 0
    assert len(list((out / "taps").iterdir())) > len([path for path in written if path.parent.name == "taps"])


def test_a_drafter_of_blocks_learns_from_the_same_answers(folder, target, tmp_path, main, small):
    for part in ("answers", "taps"):
        (tmp_path / part).symlink_to(folder / part)
    own = ("--taps", *DEPTHS, "--kind", "dflash", "--block", 5, "--layers", 1, "--stages", "train", "export")
    assert main("--target", target, "--out", tmp_path, *small, *own) == 0
    engine = specker.load(target, tmp_path / "dflash" / "head", "dflash", device="cpu", dtype="float64")
    assert len(engine.drafter.model.layers) == 1 and engine.drafter.spec.most == 4
    assert not (tmp_path / "state.pt").exists()


def test_what_does_not_fit_is_refused_in_a_sentence(target, tmp_path, monkeypatch, main, small, capsys, folder):
    def says(sentence, *argv, out=tmp_path / "new"):
        assert main("--target", target, "--out", out, *small, *argv) == 2
        assert sentence in capsys.readouterr().err

    says("--stages must be of answers, taps, train, export, got 'fit'", "--stages", "fit")
    says("--layout must be flat or speculators, got 'gguf'", "--layout", "gguf")
    says("--steps must be at most 8, got 9", "--steps", 9)
    says("--rows must be at least 1, got 0", "--rows", 0)
    says("--kind must be one of eagle3, dflash, dspark, domino, assistant, got 'mtp'", "--kind", "mtp")
    says("--block must be between 2 and 64, got 1", "--block", 1)
    says("--layout speculators is for --kind eagle3", "--kind", "dflash", "--layout", "speculators")
    says("has no texts: run the stage answers first", "--stages", "taps")
    says("--taps must ascend within 1 to 8", "--stages", "taps", "--taps", 4, 2, out=folder)
    says("holds rows of", "--stages", "train", "--taps", 1, 2, 3, out=folder)
    says("has no trained head: run the stage train first", "--stages", "export", out=folder)
    says("no shard has texts for two windows of 100003 tokens", "--stages", "train", "--length", 100000, out=folder)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "answers").symlink_to(folder / "answers")
    says("lacks the target's rows of 0000000: run the stage taps first", "--stages", "train", out=tmp_path / "part")
    monkeypatch.setattr(taps.shutil, "disk_usage", lambda path: taps.shutil._ntuple_diskusage(1, 1, 5))
    says("lower --tokens or name another folder", "--stages", "taps", out=tmp_path / "part")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n[]\n')
    says("bad.jsonl line 2: expected a JSON object", "--prompts", tmp_path / "bad.jsonl")


def test_questions_of_the_test_are_left_out(tmp_path):
    test = json.loads(corpus.HELD_OUT.read_text("utf-8").splitlines()[0])["turns"][0]
    rows = [{"prompt": test}, {"turns": [test, "b"]}, {"prompt": "What is 1?"}, {"turns": ["Why?", "And?"]}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["turns"] for row in command.questions(str(tmp_path / "q.jsonl"))] == [["What is 1?"], ["Why?"]]
    assert command.questions("") == []


def test_shards_hold_the_ids_of_large_vocabularies(tmp_path):
    corpus.save(tmp_path, {3: ([5, 65535, 70000, 151000], 1)})
    assert corpus.read(tmp_path) == [(3, [5, 65535, 70000, 151000], 1)]
    corpus.save(tmp_path, {3: ([5, 65535], 1)})
    assert taps.Texts.read(tmp_path / "0000003.npz").ids.dtype == np.uint16


def test_a_layer_that_is_not_llama_s_is_refused(tmp_path):
    target = make(tmp_path / "target", "olmo2", layers=8)
    with pytest.raises(ValueError, match="cannot start as those of Olmo2ForCausalLM"):
        Head(read_checkpoint(target, dtype=torch.float32, device="cpu", pack=False), DEPTHS, torch.arange(9))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_a_head_for_other_families_is_loaded(arch, tmp_path):
    """Without the biases and the q and k norms of the target's layer."""
    target = make(tmp_path / "target", arch, layers=8)
    net = Head(read_checkpoint(target, dtype=torch.float32, device="cpu", pack=False), DEPTHS, torch.arange(9))
    export(net, target, tmp_path / "head", "flat", "a")
    engine = specker.load(target, tmp_path / "head", "eagle", device="cpu", dtype="float64")
    assert engine.generate([9, 4], 12).tokens == engine.generate_ar([9, 4], 12).tokens
