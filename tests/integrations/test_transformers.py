"""`Generate` against transformers' own `generate` on tiny random models, token by token: on specker's ops and by the
models' own forward."""

import copy
import tempfile
from functools import cache

import pytest
import torch
import transformers
from formulas import chi_square_bound, law
from make_checkpoint import FULL, GEMMA3, GRANITE, QWEN3_MOE, SLIDING, edit, make, randomize
from make_dflash import Formula as BlockFormula
from make_dflash import make_dflash
from make_head import Formula, make_head
from pairs import perturbed
from transformers import AutoModelForCausalLM, DynamicCache, LogitsProcessor, StoppingCriteria, TopKLogitsWarper
from transformers.cache_utils import StaticLayer

import specker
from specker.integrations import adopt
from specker.integrations import transformers as integration
from specker.integrations.transformers import Generate

OURS = {arch: {"arch": arch} for arch in ("llama", "mistral", "qwen2", "qwen3", "olmo2", "smollm3")}
OURS |= {  # the windows are shorter than the texts
    "mistral-window": {"arch": "mistral", "sliding_window": 12},
    "gemma3": GEMMA3 | {"layer_types": [SLIDING, FULL], "tied": False},
    "granite": GRANITE,
    "qwen3-moe": QWEN3_MOE | {"mlp_only_layers": [1]},
    "ministral": {"arch": "ministral", "sliding_window": 12, "layer_types": [SLIDING, FULL]},
}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 192}
OWN = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 192},
    "Gemma": {"hidden_size": 32, "num_key_value_heads": 1, "head_dim": 8, **SMALL},
    "Phi": {"hidden_size": 32, **SMALL},
    "Phi3": {"hidden_size": 32, "num_key_value_heads": 2, "sliding_window": 12, **SMALL},  # less than the texts
}
PROMPTS = torch.tensor([[0, 0, 5, 9, 40, 7], [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 8]])
MASK = (PROMPTS != 0).long()
PADDED = {"attention_mask": MASK, "pad_token_id": 0}
ONE = torch.tensor([[5, 9, 40, 7]])
NEW = 20
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """arch -> (folder of the target, of a draft, the target in transformers), made once."""

    @cache
    def made(arch):
        target = make(tmp_path_factory.mktemp(arch), layers=2, vocab=64, max_context=256, **OURS[arch])
        draft = perturbed(target, tmp_path_factory.mktemp(f"{arch}-draft"))
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, experts_implementation="eager")
        return target, draft, model

    return made


@cache
def own(name, vocab=64):
    """A model that specker's decoder does not know, or whose q, k and v are one matrix."""
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = getattr(transformers, f"{name}Config")(**OWN[name], vocab_size=vocab, **no_ids)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    randomize(model, 0)
    return model


class Guesses:
    """In place of `Drafts`: the model's greedy continuation, with every `wrong`-th guess wrong."""

    aux_layers = ()

    def __init__(self, target, draft=None, strategy="draft", *, device, dtype, requests, **options):
        self.requests = requests

    def draft(self, texts, most, sampling=None, rows=None):
        assert len(texts) <= self.requests
        return [self._guess(text, min(most, 5)) for text in texts]

    def _guess(self, text, count):
        end, tokens = len(text), list(text)
        while len(tokens) < end + count:
            tokens.append(following(self.model, tuple(tokens)))
        return [(t + i % self.wrong // (self.wrong - 1)) % 64 for i, t in enumerate(tokens)][end:]


@cache
def following(model, text):
    with torch.no_grad():
        return int(model(torch.tensor([text])).logits[0, -1].argmax())


@pytest.fixture
def guessed(monkeypatch):
    """guessed(model) -> a Generate whose drafts are Guesses."""

    def generate(model, wrong=4, **options):
        guesses = type("", (Guesses,), {"model": model, "wrong": wrong})
        monkeypatch.setattr(integration, "Drafts", guesses)
        return Generate(strategy="lookup", **options)

    return generate


@pytest.fixture
def only_ops(monkeypatch):
    """The model's own forward must not decode."""
    monkeypatch.delattr(Generate, "_verify")


def same(model, generate, ids=PROMPTS, seed=0, **options):
    """The output with `generate`, after comparing it with transformers' own."""
    torch.manual_seed(seed)
    want = model.generate(ids, **options)
    torch.manual_seed(seed)
    got = model.generate(ids, custom_generate=generate, **options)
    assert torch.equal(getattr(got, "sequences", got), getattr(want, "sequences", want))
    assert generate.stats.accepted > 0, "nothing was accepted: this proves little"
    return got, want


def late(got, ids=PROMPTS, row=1):
    """The new token that appears last in a row."""
    return max(new := got[row, ids.shape[1] :].tolist(), key=new.index)


# --- on specker's ops


LIKE_OTHERS = ("mistral", "smollm3", "ministral")  # what is particular to them, others of OURS have


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[pytest.mark.slow] if arch in LIKE_OTHERS else []) for arch in OURS]
)
def test_our_ops_emit_the_models_tokens(pairs, arch, only_ops):
    _, draft, model = pairs(arch)
    generate = Generate(draft, draft_tokens=3)
    got, _ = same(model, generate, **PADDED, **GREEDY)
    assert generate.stats.accepted < generate.stats.drafted, "the draft never erred: this proves little"
    if arch in ("llama", "gemma3"):
        got, _ = same(model, generate, **PADDED, **GREEDY, eos_token_id=[late(got), late(got, row=0)])
        assert (got[:, 6:] == 0).any(), "all rows ended at once: this proves little"
        same(model, generate, ONE, max_length=17, do_sample=False)


def test_factors_of_the_logits_are_in_the_draws(pairs, only_ops):
    """Granite's scale its logits, which changes no greedy token."""
    target, draft, model = pairs("granite")
    want = specker.load(target, strategy="ar", dtype="float64").generate(ONE[0].tolist(), NEW, temperature=0.9, seed=3)
    how = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "top_k": 0, "pad_token_id": 0}
    got = model.generate(ONE, custom_generate=Generate(draft, draft_tokens=3, seed=3), **how)
    assert got[0, ONE.shape[1] :].tolist() == want.tokens


@pytest.mark.parametrize(
    "options",
    [
        {"tree": "3x3"},
        {"strategy": "lookup"},
        {"strategy": "del", "policy": "fixed", "exit_layer": 1},
        {"batch_size": 2},
    ],
)
def test_our_ops_take_every_strategy(pairs, options, only_ops, cheap):
    _, draft, model = pairs("llama")
    needs = options.get("strategy") is None
    same(model, Generate(draft if needs else None, **options), **PADDED, **GREEDY)


def test_the_seed_gives_the_tokens_of_ar(pairs, guessed, cheap):
    target, draft, model = pairs("qwen2")
    plain = specker.load(target, strategy="ar", dtype="float64")
    how = {"temperature": 0.8, "top_k": 30, "top_p": 0.9}
    texts = [row[seen].tolist() for row, seen in zip(PROMPTS, MASK.bool(), strict=True)]
    want = [plain.generate(texts[row // 2], 16, seed=7 + row % 2, **how).tokens for row in range(6)]
    calls = {**PADDED, **how, "do_sample": True, "num_return_sequences": 2, "max_new_tokens": 16}
    for generate, more in ((Generate(draft, seed=7), {}), (guessed(model, seed=7), {"return_dict_in_generate": True})):
        got = model.generate(PROMPTS, custom_generate=generate, **calls, **more)
        assert getattr(got, "sequences", got)[:, 6:].tolist() == want
        assert generate.stats.accepted > 0 or more  # six rows rarely all accept


def test_the_engine_grows_with_the_calls(pairs, only_ops, monkeypatch, cheap):
    _, draft, model = pairs("llama")
    monkeypatch.setattr(integration, "LEAST_CONTEXT", 16)
    generate = Generate(draft)
    same(model, generate, ONE, max_new_tokens=8, do_sample=False)
    first = generate._engine[1]
    same(model, generate, ONE, max_new_tokens=10, do_sample=False)
    assert generate._engine[1] is first and first.max_context == 16
    same(model, generate, ONE, max_new_tokens=60, do_sample=False)
    assert generate._engine[1].max_context == 64 and generate._engine[1].loop.size == 1
    same(model, generate, **PADDED, max_new_tokens=20, do_sample=False)
    assert generate._engine[1].loop.size == 3


def test_the_weights_are_shared(pairs, tmp_path, only_ops, cheap):
    target, draft, _ = pairs("qwen2")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    with torch.no_grad():
        before, values = model(ONE).logits, copy.deepcopy(model.state_dict())
    generate = Generate(draft)
    with torch.inference_mode():
        model.generate(ONE, custom_generate=generate, **GREEDY)
    weights, layer = generate._engine[1].target.weights, model.model.layers[1]
    storages = {x.untyped_storage().data_ptr() for x in model.parameters()}
    matrices = [weights.embed, weights.head, *weights.qkv, *weights.o, *weights.gate_up, *weights.down]
    assert {x.untyped_storage().data_ptr() for x in matrices} <= storages
    assert layer.self_attn.k_proj.weight.data_ptr() == weights.qkv[1][64:].data_ptr()
    assert all(torch.equal(x, values[name]) for name, x in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(ONE).logits, before)
    places = adopt.state(model)
    model.generate(ONE, custom_generate=Generate(draft), **GREEDY)
    assert adopt.state(model) == places, "another Generate fused the fused matrices again"
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert all(torch.equal(x, values[name]) for name, x in again.state_dict().items())
    with torch.no_grad():  # a later change of the weights
        layer.self_attn.q_proj.bias.neg_()
        model.model.norm.weight.mul_(2)
    same(model, generate, ONE, **GREEDY)
    assert not torch.equal(model(ONE).logits, before) and model(ONE).logits.requires_grad


def test_a_bfloat16_model_runs_on_our_ops(tmp_path, only_ops, cheap):
    """Its norms and biases are copied in float32. The draft is the target, and a verify pass may round otherwise than a
    step of these sizes."""
    target = make(tmp_path, "qwen2", layers=2, vocab=64, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    want = specker.load(target, strategy="ar", dtype="bfloat16").generate(ONE[0].tolist(), NEW).tokens
    assert model.generate(ONE, custom_generate=Generate(strategy="ar"), **GREEDY)[0, 4:].tolist() == want
    generate = Generate(target)
    model.generate(ONE, custom_generate=generate, **GREEDY)
    assert generate.stats.accepted > 10 and generate._engine[1].model.dtype == torch.float32


def test_a_text_within_the_window_needs_none(tmp_path):
    """The compiled layers take no sliding windows, so the engine has no more positions than the window."""
    folder = make(tmp_path, "mistral", layers=2, vocab=64, max_context=256, sliding_window=40)
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64), []
    generate = Generate(strategy="lookup")
    for count in (30, 60):
        got = model.generate(ONE, custom_generate=generate, max_new_tokens=count, do_sample=False)
        assert torch.equal(got, model.generate(ONE, max_new_tokens=count, do_sample=False))
        engine = generate._engine[1]
        found.append((engine.max_context, engine.model.config.layer.sliding_windows))
    assert found[0] == (40, ()) and found[1][0] >= 64 and found[1][1] == (40, 40)


def test_a_changed_model_runs_its_own_forward(tmp_path, pairs, guessed, monkeypatch):
    """With hooks (adapters, offloading), in training, as a subclass, or with a config that specker lacks."""
    monkeypatch.delattr(Generate, "_serve")
    target, _, _ = pairs("llama")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 2 * out)
    same(model, guessed(model), ONE, **GREEDY)
    hook.remove()
    model.model.layers[0].mlp.forward = model.model.layers[1].mlp.forward
    same(model, guessed(model), ONE, **GREEDY)
    del model.model.layers[0].mlp.forward
    same(model.train(), guessed(model), ONE, **GREEDY)
    same(model.eval(), guessed(model), ONE, **GREEDY, return_dict_in_generate=True)
    model.__class__ = type("LlamaForCausalLM", (type(model),), {})
    same(model, guessed(model), ONE, **GREEDY)
    dynamic = make(tmp_path, vocab=64)
    edit(dynamic, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    model = AutoModelForCausalLM.from_pretrained(dynamic, dtype=torch.float64)
    same(model, guessed(model), ONE, **GREEDY)


def test_unusual_inputs_run_by_the_models_own_forward(pairs, guessed, monkeypatch):
    """A mask with holes, positions with gaps, processors beside a seed, a text beyond the positions."""
    monkeypatch.delattr(Generate, "_serve")
    model = pairs("llama")[2]
    same(model, guessed(model), ONE, **GREEDY, attention_mask=torch.tensor([[1, 0, 1, 1]]), pad_token_id=0)
    same(model, guessed(model), ONE, **GREEDY, position_ids=torch.tensor([[0, 3, 4, 9]]))
    same(model, guessed(model, max_context=20), ONE, **GREEDY)
    long = torch.arange(250)[None] % 60 + 1
    same(model, guessed(model), long, max_new_tokens=12, do_sample=False)
    for more in (
        {"repetition_penalty": 1.2},
        {"min_p": 0.1},
        {"top_p": 0.9, "logits_processor": [TopKLogitsWarper(9)]},
    ):
        how = {**PADDED, **more, "do_sample": True, "max_new_tokens": 8}
        got = model.generate(PROMPTS, custom_generate=guessed(model, seed=7), **how)
        assert torch.equal(got, model.generate(PROMPTS, custom_generate=Generate(strategy="ar", seed=7), **how))


# --- by the model's own forward


@pytest.mark.parametrize("name", OWN)
def test_other_models_emit_their_tokens(name, guessed):
    model = own(name)
    got, _ = same(model, guessed(model), **PADDED, **GREEDY)
    generate = guessed(model)
    same(model, generate, **PADDED, **GREEDY, eos_token_id=late(got))
    assert generate.stats.accepted >= 12, "finished rows ended the rounds of the others"
    same(model, generate, ONE, **GREEDY)
    assert len(generate.stats.hits) == 3 and generate.stats.accepted < generate.stats.drafted
    same(model, Generate(strategy="lookup"), ONE, **GREEDY)


def test_a_draft_model_drafts_for_another_architecture(tmp_path):
    """A causal draft of its own weights is right too rarely to show much; its tokens must not matter."""
    draft = make(tmp_path, "llama", layers=1, vocab=64)
    model, generate = own("GPT2"), Generate(draft)
    assert torch.equal(model.generate(ONE, **GREEDY), model.generate(ONE, custom_generate=generate, **GREEDY))
    assert generate.stats.drafted > 0 and generate.stats.tokens == NEW


class Count(LogitsProcessor):
    """Depends on how often and on what it was called."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        return scores.roll(len(self.calls), -1)


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.4},
    "bad words": {"bad_words_ids": [[31], [12, 9]], "no_repeat_ngram_size": 3},
    "least length": {"min_new_tokens": 12, "eos_token_id": list(range(30))},
    "all": {"repetition_penalty": 1.2, "min_new_tokens": 9, "eos_token_id": [3, 4], "sequence_bias": [[[7], 2.0]]},
}


@pytest.mark.parametrize(("name", "how"), [*(("GPT2", how) for how in PROCESSORS), ("llama", "all")])
def test_processors_see_what_plain_decoding_shows_them(pairs, guessed, name, how):
    model = own(name) if name in OWN else pairs(name)[2]
    for ids, more in ((PROMPTS, PADDED), (ONE, {"pad_token_id": 0})):
        generate, options = guessed(model), {**more, **PROCESSORS[how], "do_sample": False, "max_new_tokens": 20}
        assert torch.equal(model.generate(ids, **options), model.generate(ids, custom_generate=generate, **options))
    counts = Count(), Count()
    plain, fast = ([count] for count in counts)
    want = model.generate(ONE, logits_processor=plain, **GREEDY)
    assert torch.equal(want, model.generate(ONE, logits_processor=fast, custom_generate=guessed(model), **GREEDY))
    assert counts[0].calls == counts[1].calls


class Reads(StoppingCriteria):
    """Stops a row after the last of these tokens."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores, **_):
        return torch.tensor([tuple(row[-len(self.tokens) :].tolist()) == self.tokens for row in input_ids])


def test_stopping_criteria_cut_an_accepted_draft(pairs, guessed):
    model = pairs("llama")[2]
    text = model.generate(ONE, **GREEDY)[0].tolist()
    ends = set()
    for end in range(8, 20):
        generate = guessed(model)
        got, _ = same(model, generate, ONE, **GREEDY, stopping_criteria=[Reads(*text[end - 3 : end])])
        assert got.shape[1] == end
        ends.add((generate.stats.hits or [0])[-1] and len(generate.stats.hits))
    assert len(ends) > 1, "each text ended at the same place of its draft: this proves little"
    stop = [Reads(int(model.generate(PROMPTS, **PADDED, **GREEDY)[1, 14]))]  # without a stop id finished rows go on
    same(model, guessed(model), **PADDED, **GREEDY, stopping_criteria=stop)


def test_scores_logits_and_cache_are_those_of_plain_decoding(pairs, guessed):
    whole = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.1}
    for model in (pairs("llama")[2], own("GPT2"), own("Phi3")):
        stop = late(model.generate(PROMPTS, **PADDED, **GREEDY))
        got, want = same(model, guessed(model), **PADDED, **GREEDY, **whole, eos_token_id=stop)
        assert len(got.scores) == len(want.scores) == len(got.logits) == len(want.logits)
        for a, b in zip((*got.scores, *got.logits), (*want.scores, *want.logits), strict=True):
            assert a.dtype == b.dtype and torch.allclose(a, b, atol=1e-5)
        for a, b in zip(got.past_key_values.layers, want.past_key_values.layers, strict=True):
            assert a.keys.shape == b.keys.shape and not getattr(a, "record_past", False)
            assert torch.allclose(a.keys, b.keys) and torch.allclose(a.values, b.values)


def test_a_cache_continues(pairs, guessed):
    for model in (pairs("llama")[2], own("Phi3")):
        kept, whole = DynamicCache(config=model.config), model.generate(ONE, **GREEDY)
        got = ONE
        for length in (10, 17, 24):
            got = model.generate(
                got, past_key_values=kept, max_length=length, do_sample=False, custom_generate=guessed(model)
            )
            assert torch.equal(got, whole[:, :length]) and kept.get_seq_length() == length - 1
        continued = [guessed(model), None]
        caches = [copy.deepcopy(kept) for _ in continued]
        more = torch.cat((got, ONE), 1)
        a, b = (
            model.generate(more, past_key_values=c, custom_generate=g, max_new_tokens=20, do_sample=False)
            for c, g in zip(caches, continued, strict=True)
        )
        assert torch.equal(a, b)
    model = own("GPT2")
    same(model, guessed(model), **PADDED, **GREEDY, use_cache=False)


def test_an_interrupted_call_leaves_a_cache_that_drops_old_columns(guessed):
    class Interrupts:
        def put(self, tokens):
            if kept.get_seq_length() > 8:
                raise KeyboardInterrupt

    model = own("Phi3")
    kept = DynamicCache(config=model.config)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ONE, past_key_values=kept, custom_generate=guessed(model, streamer=Interrupts()), **GREEDY)
    assert kept.layers[0].is_sliding and not any(layer.record_past for layer in kept.layers)


@pytest.mark.parametrize("name", ["llama", "Gemma"])
def test_sampling_uses_torchs_random_numbers_as_generate_does(pairs, guessed, name):
    model = own(name) if name in OWN else pairs(name)[2]
    warped = {"do_sample": True, "max_new_tokens": 20, "temperature": 0.7, "top_p": 0.9, "min_p": 0.02}
    for seed in (3,):
        same(model, guessed(model), ONE, seed, **warped)
        same(model, guessed(model), ONE, seed, do_sample=True, max_new_tokens=20, top_k=9, repetition_penalty=1.2)
        torch.manual_seed(seed)
        want = model.generate(PROMPTS, **PADDED, **warped, num_return_sequences=2)
        torch.manual_seed(seed)
        got = model.generate(PROMPTS, **PADDED, **warped, num_return_sequences=2, custom_generate=guessed(model))
        assert torch.equal(got, want)


@pytest.mark.parametrize("seeded", [False, True])
def test_sampled_tokens_have_the_models_distribution(guessed, seeded):
    """Two tokens after a prompt, of which the first is drafted: chi-square against the exact joint law."""
    model, ids, draws = own("GPT2", 4), torch.tensor([[1, 3, 2]]), 120

    def after(more):
        with torch.no_grad():
            return law(model(torch.tensor([[1, 3, 2, *more]])).logits[0, -1].tolist(), 1.3, 3, 1.0)

    joint = torch.stack([after([])[first] * after([first]) for first in range(4)])
    generate, found, accepted = guessed(model, wrong=10**6), torch.zeros(4, 4), 0
    for seed in range(draws):
        if seeded:
            generate.seed = seed
        torch.manual_seed(seed)
        how = {"temperature": 1.3, "top_k": 3, "do_sample": True, "max_new_tokens": 3, "pad_token_id": 0}
        found[tuple(model.generate(ids, custom_generate=generate, **how)[0, 3:5].tolist())] += 1
        accepted += generate.stats.accepted
    assert draws / 10 < accepted < draws
    expected = draws * joint
    cells = expected > 1
    assert found[expected == 0].sum() == 0
    square = ((found - expected) ** 2 / expected)[cells].sum()
    assert square < chi_square_bound(int(cells.sum()) - 1)


# --- heads that read the model's hidden states

OFTEN = [9, 12, 48]  # ids that the model writes often, so that a random head with these rows is often right
HEADS = {
    "eagle": {"layout": "nested", "ids": OFTEN, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    "eagle1": {"layout": "eagle1"},
    "dflash": {"layout": "dflash", "ids": OFTEN, "layer_ids": [-1, 0], "size": 4, "mask": 63},
}


def sizes(model):
    c = model.config
    return {
        "hidden_size": c.hidden_size, "vocab_size": c.vocab_size, "num_hidden_layers": c.num_hidden_layers,
    }  # fmt: skip


def head_for(model, folder, kind, **more):
    made = make_dflash if kind == "dflash" else make_head
    return made(folder, sizes(model), **{**HEADS[kind], **more})


@pytest.fixture(scope="module")
def heads(pairs, tmp_path_factory):
    """kind -> folder of a head for the llama of `pairs`."""
    return cache(lambda kind: head_for(pairs("llama")[2], tmp_path_factory.mktemp(kind), kind))


def strategy_of(kind):
    return "dflash" if kind == "dflash" else "eagle"


def states(model, text, depths):
    """The model's rows of all tokens but the last after each depth."""
    rows, layers = [], model.model.layers
    hooks = [x.register_forward_pre_hook(lambda module, args: rows.append(args[0][0])) for x in layers]
    hooks.append(layers[-1].register_forward_hook(lambda module, args, out: rows.append(out[0])))
    with torch.no_grad():
        model(torch.tensor([text[:-1]]))
    for hook in hooks:
        hook.remove()
    return [rows[depth] for depth in depths]


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_drafts_what_its_formula_says(pairs, heads, kind, monkeypatch):
    """By the model's own forward, greedy. Both paths emit the model's tokens."""
    model, seen = pairs("llama")[2], []

    class Recorded(integration.Drafts):
        def draft(self, texts, most, sampling=None, rows=None):
            found = super().draft(texts, most, sampling, rows)
            seen.append((list(texts[0]), found[0], self.aux_layers))
            return found

    monkeypatch.setattr(integration, "Drafts", Recorded)
    generate = Generate(heads(kind), strategy_of(kind), draft_tokens=3)
    for more in ({}, {"return_dict_in_generate": True}):
        assert not seen
        got = model.generate(ONE, custom_generate=generate, **GREEDY, pad_token_id=0, **more)
        assert torch.equal(getattr(got, "sequences", got), model.generate(ONE, **GREEDY, pad_token_id=0))
        assert kind == "eagle1" or generate.stats.accepted, "nothing was accepted: this proves little"
    assert len(seen) > 10 and not any(x._forward_pre_hooks or x._forward_hooks for x in model.model.layers)
    own = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    norm = model.model.norm.weight.detach(), model.config.rms_norm_eps
    formula = BlockFormula(heads(kind), *own) if kind == "dflash" else Formula(heads(kind), *own, *norm)
    drafts = formula.block if kind == "dflash" else formula.chain
    for text, found, depths in seen:
        assert not found or found == drafts(states(model, text, depths), text, len(found))[0]


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_with_a_seed_a_head_changes_no_token(pairs, heads, kind):
    target, _, model = pairs("llama")
    how = {"temperature": 0.6, "top_k": 30}
    want = specker.load(target, strategy="ar", dtype="float64").generate(ONE[0].tolist(), NEW, seed=7, **how).tokens
    generate = Generate(heads(kind), strategy_of(kind), draft_tokens=3, seed=7)
    for more in ({}, {"return_dict_in_generate": True}):
        got = model.generate(
            ONE, custom_generate=generate, do_sample=True, max_new_tokens=NEW, pad_token_id=0, **how, **more
        )
        assert getattr(got, "sequences", got)[0, 4:].tolist() == want and generate.stats.drafted > 0


WAYS = {
    "padded": (PROMPTS, {"attention_mask": MASK}),
    "in chunks": (PROMPTS, {"attention_mask": MASK, "prefill_chunk_size": 4}),
    "sampled": (PROMPTS[1:2], {"do_sample": True, "temperature": 0.6}),
    "no cache": (ONE, {"use_cache": False}),
}


@pytest.mark.parametrize("kind", ["eagle", "dflash"])
def test_a_head_drafts_for_every_kind_of_call(pairs, heads, kind):
    model, generate, accepted = pairs("llama")[2], Generate(heads(kind), strategy_of(kind), draft_tokens=3), 0
    whole = {"return_dict_in_generate": True, "max_new_tokens": 12, "pad_token_id": 0, "do_sample": False}
    for ids, way in WAYS.values():
        found = []
        for how in ({}, {"custom_generate": generate}):
            torch.manual_seed(1)
            found.append(model.generate(ids, **{**whole, **way}, **how).sequences)
        assert torch.equal(*found) and generate.stats.drafted > 0
        accepted += generate.stats.accepted
    assert accepted, "nothing was accepted: this proves little"


@pytest.mark.parametrize("name", ["GPT2", "Phi"])
def test_a_head_drafts_for_a_model_that_the_decoder_lacks(name, tmp_path):
    model = own(name)
    text = model.generate(ONE, **GREEDY)[0, 4:].tolist()
    often = sorted(set(sorted(set(text), key=text.count)[-3:]))
    head = head_for(model, tmp_path / "eagle", "eagle", ids=often)
    same(model, Generate(head, "eagle", draft_tokens=3), ONE, **GREEDY)
    first = head_for(model, tmp_path / "eagle1", "eagle1")
    for strategy, draft, said in (("eagle", first, "after its final norm"), ("mtp", None, "decoder runs, not")):
        with pytest.raises(ValueError, match=said):
            model.generate(ONE, custom_generate=Generate(draft, strategy), **GREEDY)


def test_a_cache_whose_rows_nobody_kept_gets_no_drafts(pairs, heads):
    model, generate = pairs("llama")[2], Generate(heads("eagle"), "eagle", draft_tokens=3)
    kept, whole = DynamicCache(config=model.config), model.generate(ONE, **GREEDY)
    got = model.generate(ONE, past_key_values=kept, max_length=14, do_sample=False, custom_generate=generate)
    assert generate.stats.drafted > 0
    other = Generate(heads("eagle"), "eagle", draft_tokens=3)
    got = model.generate(got, past_key_values=kept, max_length=24, do_sample=False, custom_generate=other)
    assert torch.equal(got, whole) and other.stats.drafted == 0


def test_a_head_needs_plain_weights_and_layers(heads):
    model = own("GPT2")
    with pytest.raises(ValueError, match="target of width 64, and the target has 32"):
        model.generate(ONE, custom_generate=Generate(heads("eagle"), "eagle"), **GREEDY)
    broken = copy.deepcopy(model)
    broken.lm_head = torch.nn.Identity()
    with pytest.raises(ValueError, match="the embedding and the LM head of GPT2LMHeadModel, and these must be plain"):
        broken.generate(ONE, custom_generate=Generate(heads("eagle"), "eagle"), **GREEDY)
    with pytest.raises(ValueError, match="does not find the layers of GPT2LMHeadModel"):
        broken.config.n_layer = 7
        integration._Tapped(broken, (0,))


class Column:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.got, self.ended = [], False

    def put(self, tokens):
        self.got.append(tokens)

    def end(self):
        self.ended = True


@pytest.mark.parametrize("ids", [ONE, PROMPTS])
def test_a_streamer_gets_the_prompt_and_then_each_token(pairs, guessed, ids, cheap):
    _, draft, model = pairs("llama")
    options = {**GREEDY, **(PADDED if len(ids) > 1 else {"pad_token_id": 0})}
    options["eos_token_id"] = late(model.generate(ids, **options), ids, -1)
    for generate, more in ((Generate(draft), {}), (guessed(model), {"return_dict_in_generate": True})):
        streamer = generate.streamer = Column()
        got, _ = same(model, generate, ids, **options, **more)
        assert torch.equal(streamer.got[0], ids) and streamer.ended
        assert all(tokens.shape == (len(ids),) for tokens in streamer.got[1:])
        assert torch.equal(torch.stack(streamer.got[1:], 1), getattr(got, "sequences", got)[:, ids.shape[1] :])


REFUSED = [
    ({"num_beams": 2}, "no beams: leave out num_beams=2"),
    ({"prompt_lookup_num_tokens": 3}, "leave out the options for assisted_generation"),
    ({"inputs_embeds": torch.zeros(1, 3, 64, dtype=torch.float64)}, "pass input_ids, without inputs_embeds"),
    ({"return_dict_in_generate": True, "output_attentions": True}, "leave out output_attentions"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_not_done_is_refused(pairs, guessed, options, message):
    model = pairs("llama")[2]
    ids = None if "inputs_embeds" in options else ONE
    with pytest.raises(ValueError, match=message):
        model.generate(ids, custom_generate=guessed(model), max_new_tokens=4, pad_token_id=0, **options)


@pytest.mark.parametrize("name", ["llama", "Phi3"])
def test_a_static_cache_is_used_if_it_can_be_cropped(pairs, guessed, name):
    """With transformers 5.24 it can, unless a window is shorter than the text, as that of Phi3 here."""
    model = own(name) if name in OWN else pairs(name)[2]
    static = {"cache_implementation": "static", "min_new_tokens": 2, "eos_token_id": 3}  # a processor: not on the ops
    if name == "llama" and StaticLayer.is_croppable:
        same(model, guessed(model), **PADDED, **GREEDY, **static)
    else:
        with pytest.raises(ValueError, match="cannot drop rejected tokens from its StaticCache"):
            model.generate(ONE, custom_generate=guessed(model), pad_token_id=0, **GREEDY, **static)


@pytest.mark.parametrize(
    ("name", "changed", "strategy", "message"),
    [
        ("GPT2", {"eos_token_id": 999}, "lookup", "or a list of them, but the config of GPT2LMHeadModel has 999"),
        ("Gemma", {"hidden_size": 1 << 30}, "lookup", "but the config of GemmaForCausalLM has 1073741824"),
        ("GPT2", {}, "draft", "needs a draft checkpoint for GPT2LMHeadModel: pass draft"),
    ],
)
def test_messages_name_a_model_without_files(name, changed, strategy, message):
    """Its config is saved to a temporary folder, which says nothing to the user."""
    model = copy.deepcopy(own(name))
    vars(model.config).update(changed)
    with pytest.raises(ValueError, match=message) as caught:
        model.generate(ONE, custom_generate=Generate(strategy=strategy), **GREEDY)
    assert tempfile.gettempdir() not in str(caught.value)


def test_bad_arguments_are_refused(pairs):
    _, draft, model = pairs("llama")
    with pytest.raises(TypeError, match="draft must be a folder or a hub id, got a LlamaForCausalLM"):
        Generate(model)
    with pytest.raises(TypeError, match="option 'load' is for models that"):
        Generate(draft, load="dummy")
    with pytest.raises(TypeError, match="unknown option 'draft_token'"):
        Generate(draft, draft_token=3)
    with pytest.raises(ValueError, match="strategy 'lookup' uses no draft checkpoint"):
        Generate(draft, "lookup")
    with pytest.raises(ValueError, match="seed must be"):
        Generate(draft, seed=-1)
    with pytest.raises(ValueError, match="strategy 'draft' needs a draft checkpoint for LlamaForCausalLM: pass draft"):
        model.generate(ONE, custom_generate=Generate(), **GREEDY)
    with pytest.raises(ValueError, match="synced_gpus"):
        Generate(draft)(model, ONE, [], [], model.generation_config, synced_gpus=True)
    encoder = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
    )
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder"):
        encoder.generate(ONE, custom_generate=Generate(draft), max_new_tokens=4)


def test_the_hub_form(pairs, monkeypatch, tmp_path):
    _, draft, model = pairs("llama")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    folder = str(integration.__file__.replace("transformers.py", "hub"))
    how = {"custom_generate": folder, "trust_remote_code": True, "draft": str(draft), "options": {"draft_tokens": 3}}
    made, streamer = [], Column()
    monkeypatch.setattr(Generate, "_composed", lambda *args, new=Generate._composed: made.append(0) or new(*args))
    for more in ({"streamer": streamer}, {}):
        got = model.generate(ONE, **how, **GREEDY, **more)
        assert torch.equal(got, model.generate(ONE, **GREEDY)) and len(made) == 1
    assert len(streamer.got) == 1 + NEW
    for more, message in (({"assistant_model": model}, "its own drafter"), ({"synced_gpus": True}, "synced_gpus")):
        with pytest.raises(ValueError, match=message):
            model.generate(ONE, **how, **GREEDY, **more)
