"""`register_attention` against transformers' eager attention, in float64."""

import pytest
import torch
import transformers
from make_checkpoint import exact_oracle, randomize
from transformers import AutoModelForCausalLM, DynamicCache

from specker.integrations.attention import register_attention
from specker.kernels.ancestors import unpack_words
from specker.kernels.tree_attention import ancestor_words

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "hidden_size": 32, "vocab_size": 64}
MODELS = {
    "Llama": {"num_key_value_heads": 2, **SMALL},
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 12, **SMALL},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 12, **SMALL},
    "Gemma3Text": {  # a mask for each kind of layer, and a scale of its own
        "num_key_value_heads": 2,
        "head_dim": 12,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 20,
        **SMALL,
    },
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 12, "attn_logit_softcapping": 2.0, **SMALL},
    "GptOss": {  # sinks
        "num_key_value_heads": 2,
        "head_dim": 12,
        "sliding_window": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **SMALL,
    },
}


@pytest.fixture
def pair(monkeypatch):
    """pair(name) -> one model twice, with eager attention and with specker's."""
    exact_oracle(monkeypatch)

    def make(name, **more):
        made = []
        for how in ("eager", register_attention()):  # of a config of its own, because from_config changes it
            config = getattr(transformers, f"{name}Config")(**{**MODELS[name], **more}, max_position_embeddings=512)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=how, experts_implementation="eager")
            model = model.double().eval()
            randomize(model, 0)
            made.append(model.requires_grad_(False))
        assert [model.config._attn_implementation for model in made] == ["eager", "specker"]
        return made

    return make


def ids(*shape, seed=0):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


def apart(models, *args, rows=slice(None), **options):
    a, b = (model(*args, **options).logits[rows] for model in models)
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_steps_equal_eager_attention(pair, name):
    """Causal prompts of two lengths, padded on the left, then single tokens and a chain."""
    models, prompt = pair(name), ids(2, 30)
    assert apart(models, prompt) < 1e-11
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, :7] = 0
    caches = [DynamicCache(config=model.config) for model in models]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for start, end in ((0, 30), (30, 31), (31, 32), (32, 40)):
        chunk = slice(start, end)
        logits = [
            model(
                ids(2, 40)[:, chunk],
                attention_mask=mask[:, :end],
                position_ids=positions[:, chunk],
                past_key_values=cache,
            ).logits
            for model, cache in zip(models, caches, strict=True)
        ]
        seen = mask[:, chunk].bool()
        assert (logits[0] - logits[1])[seen].abs().max() < 1e-11


def test_a_long_prompt_runs_on_torchs_attention(pair):
    models = pair("Llama")
    mask = torch.ones(2, 300, dtype=torch.int64)
    mask[1, :20] = 0
    assert apart(models, ids(2, 300), attention_mask=mask, rows=mask.bool()) < 1e-11
    assert apart(models, ids(1, 256)) < 1e-11


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_a_long_prompt_with_sinks_or_a_soft_cap_runs_on_the_op(pair, name):
    models = pair(name, sliding_window=400)
    mask = torch.ones(2, 300, dtype=torch.int64)
    mask[1, :20] = 0
    assert apart(models, ids(2, 300), attention_mask=mask, rows=mask.bool()) < 1e-11
    assert apart(models, ids(1, 290)) < 1e-11


def tree(nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([int(torch.randint(0, n + 1, (), generator=generator)) for n in range(nodes)])


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
@pytest.mark.parametrize("numbers", [False, True])
def test_a_tree_of_drafts_in_one_forward(pair, name, numbers):
    """Two sequences with a prompt of 20 tokens, one of them padded, and a random tree of 70 drafts each (two words).
    Each row equals eager attention, and its path decoded alone."""
    models, past, nodes, padding = pair(name), 20, 70, 3
    parents = [tree(nodes, seed) for seed in range(2)]
    bits = [unpack_words(ancestor_words(p).tolist()) for p in parents]
    within = torch.tensor([[[b >> j & 1 for j in range(nodes + 1)] for b in each] for each in bits]).bool()
    mask = torch.cat((torch.ones(2, nodes + 1, past, dtype=torch.bool), within), 2)[:, None]
    mask[1, :, :, :padding] = False
    depth = within.sum(2) - 1 + past - torch.tensor([[0], [padding]])
    text, drafts = ids(2, past), ids(2, nodes + 1, seed=1)
    given = torch.where(mask, 0.0, -1e4).double() if numbers else mask
    before = torch.ones(2, past, dtype=torch.int64)
    before[1, :padding] = 0
    outs = []
    for model, seen in zip(models, (torch.where(mask, 0.0, -torch.inf).double(), given), strict=True):
        cache = DynamicCache(config=model.config)
        positions = (before.cumsum(1) - 1).clamp(min=0)
        model(text, attention_mask=before, position_ids=positions, past_key_values=cache)
        outs.append(model(drafts, attention_mask=seen, position_ids=depth, past_key_values=cache).logits)
    assert (outs[0] - outs[1]).abs().max() < 1e-11
    for b, row in ((0, 33), (1, 70)):
        path = torch.cat((text[b, b * padding :], drafts[b, within[b, row]]))
        alone = models[0](path[None]).logits[0, -1]
        assert (outs[1][b, row] - alone).abs().max() < 1e-11


def test_generate_runs_on_it(pair):
    eager, ours = pair("Qwen3")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    for more in ({}, {"cache_implementation": "static", "disable_compile": True}):
        a, b = (m.generate(ids(2, 4), attention_mask=mask, **options, **more) for m in (eager, ours))
        assert torch.equal(a, b)


def test_a_row_that_sees_nothing_spoils_no_other(pair):
    """Far from the end, where the columns before it exceed the window."""
    models, past = pair("Llama"), 300
    mask = torch.ones(1, 1, 3, past + 3, dtype=torch.bool).tril(past)
    mask[:, :, 1] = False
    mask[:, :, 2, past + 1] = False
    logits = []
    for model, seen in zip(models, (torch.where(mask, 0.0, -1e9).double(), mask), strict=True):
        cache = DynamicCache(config=model.config)
        model(ids(1, past), past_key_values=cache)
        positions = torch.arange(past, past + 3)[None]
        out = model(ids(1, 3), attention_mask=seen, position_ids=positions, past_key_values=cache)
        logits.append(out.logits)
    assert (logits[0] - logits[1])[:, [0, 2]].abs().max() < 1e-11 and logits[1].isfinite().all()
    apart_rows = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 0, 1]]).bool()[None, None]  # no column that all rows see
    a, b = (
        m(ids(1, 3), attention_mask=x).logits for m, x in zip(models, (apart_rows * 1e9 - 1e9, apart_rows), strict=True)
    )
    assert (a - b)[:, [0, 2]].abs().max() < 1e-11 and b.isfinite().all()


def test_the_same_mask_tensor_with_other_values(pair):
    models, prompt = pair("Llama"), ids(1, 6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    eager = torch.where(mask, 0.0, -torch.inf).double()
    first = models[1](prompt, attention_mask=mask).logits
    mask[..., 5, 2] = False
    eager[..., 5, 2] = -torch.inf
    other = models[1](prompt, attention_mask=mask).logits
    assert not torch.equal(first[0, 5], other[0, 5])
    assert (models[0](prompt, attention_mask=eager).logits - other).abs().max() < 1e-11


def test_what_the_op_lacks_is_refused(pair):
    _, model = pair("Llama")
    prompt, seen = ids(1, 8), torch.ones(1, 1, 8, 8)
    for mask, message in (
        (seen * 0.5, "must hold truth values"),
        (seen.long(), "must hold truth values"),
        (seen.expand(1, 4, 8, 8).bool(), r"must be \[1 or 1, 1, T, S\] for all heads, got \[1, 4, 8, 8\]"),
        (seen.expand(3, 1, 8, 8).bool(), r"got \[3, 1, 8, 8\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(prompt, attention_mask=mask)
    cache = DynamicCache(config=model.config)
    model(ids(1, 300), past_key_values=cache)
    far = torch.ones(1, 1, 8, 308, dtype=torch.bool)
    far[..., 0, 10] = False
    with pytest.raises(ValueError, match=r"in sequence 0 the rows' masks differ over 298 columns, and .* takes 256"):
        model(prompt, attention_mask=far, position_ids=torch.arange(300, 308)[None], past_key_values=cache)
    with pytest.raises(ValueError, match="no backward pass"):
        model.requires_grad_(True)(prompt)
    with pytest.raises(ValueError, match="no dropout: use another"):
        pair("Llama", attention_dropout=0.1)[1].train()(prompt)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_changes_in_place(pair, mode):
    eager, ours = pair("Llama")
    with mode():
        mask = torch.full((1, 1, 6, 6), -1e9, dtype=torch.float64).triu(1)
        for hidden in (0, 1, 2):  # columns that the last row does not see
            mask[..., -1, 1 : 1 + hidden] = -1e9
            want, got = (model(ids(1, 6), attention_mask=mask).logits for model in (eager, ours))
            assert (got - want).abs().max() < 1e-12
