"""Targets and drafts with recurrent layers: texts that cross anchors, in every way of drafting and in any company, are
those of plain decoding; states are taken over, moved and dropped."""

import json
import shutil

import cases
import pytest
import torch
from make_checkpoint import LFM2, LFM2_MOE, QWEN3_5, QWEN3_NEXT, edit, exact_oracle, make, oracle, oracle_logits
from make_dflash import make_dflash
from make_head import make_head
from make_mtp import make_mtp
from pairs import perturbed
from safetensors.torch import load_file, save_file

import specker
from specker.checkpoints.checkpoint import read, read_config
from specker.integrations.adopt import outer
from specker.integrations.target import drafter_for
from specker.kernels.delta_rows import BLOCK
from specker.model.cache import KVCache
from specker.model.config import CheckpointError
from specker.model.prefill import prefill
from specker.model.states import sequence_bytes
from specker.options import Params

KINDS = {
    "qwen3.5": QWEN3_5 | {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "seed": 3},
    "lfm2": LFM2 | {"tied": False, "seed": 1, "heads": 2, "kv_heads": 1, "head_dim": 32},
    "lfm2-moe": LFM2_MOE | {"seed": 1, "heads": 2, "kv_heads": 1, "head_dim": 32},
}
LENGTHS = 1, 3, 33, 62, 64, 65, 130  # of prompts
HOW = {
    "chain": {"strategy": "draft", "draft_tokens": 5},
    "tree": {"strategy": "draft", "tree": "3x3"},
    "exit": {"strategy": "del", "policy": "fixed", "exit_layer": 2, "draft_tokens": 3},
    "lookup": {"strategy": "lookup", "draft_tokens": 4},
    "static": {"strategy": "draft", "tree": "2x3", "graphs": "on"},  # the device places the rows
}


def prompt_of(length: int) -> list[int]:
    """A text that repeats itself, for lookups."""
    g = torch.Generator().manual_seed(length)
    part = torch.randint(0, 128, (9,), generator=g).tolist()
    return (part * length)[:length]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """kind -> (target, draft)."""
    made = {}
    for kind, options in KINDS.items():
        target = make(tmp_path_factory.mktemp(kind), max_context=256, **options)
        made[kind] = target, perturbed(target, tmp_path_factory.mktemp(f"{kind}-draft"), amount=0.04)
    return made


@pytest.fixture(scope="module")
def texts(pairs):
    """kind -> the texts of plain decoding after each prompt."""
    known = {}

    def of(kind):
        if kind not in known:
            engine = specker.load(pairs[kind][0], strategy="ar", dtype="float32")
            assert engine.model.stack is not None
            known[kind] = [engine.generate(prompt_of(n), max_new_tokens=70).tokens for n in LENGTHS]
        return known[kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_plain_decoding_has_the_text_of_transformers(pairs, texts, kind, monkeypatch):
    exact_oracle(monkeypatch)
    model = oracle(pairs[kind][0], torch.float64)
    for n, text in zip(LENGTHS, texts(kind), strict=True):
        best = oracle_logits(model, torch.tensor(prompt_of(n) + text))[n - 1 : -1].argmax(-1)
        assert best.tolist() == text
        assert len(set(text)) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_of_a_prompt_may_be_longer_than_a_ring(pairs, kind, monkeypatch):
    """The operators that are not compiled take 512 rows at once."""
    exact_oracle(monkeypatch)
    model, engine = oracle(pairs[kind][0], torch.float64), specker.load(pairs[kind][0], strategy="ar", dtype="float64")
    text = engine.generate(prompt_of(230), max_new_tokens=10).tokens
    assert engine.model.stack is None and engine.cache.rings.most * engine.cache.rings.page_size < 230
    best = oracle_logits(model, torch.tensor(prompt_of(230) + text))[229:-1].argmax(-1)
    assert best.tolist() == text


@pytest.mark.parametrize(("kind", "how"), cases.one_in(3, KINDS, HOW))
def test_every_strategy_has_the_text_of_plain_decoding(pairs, texts, kind, how):
    """Drafts cross an anchor at every offset."""
    target, draft = pairs[kind]
    side = draft if HOW[how]["strategy"] == "draft" else None
    engine = specker.load(target, side, dtype="float32", page_size=16, **HOW[how])
    drafted = accepted = 0
    for n, text in zip(LENGTHS, texts(kind), strict=True):
        out = engine.generate(prompt_of(n), max_new_tokens=70)
        assert out.tokens == text
        engine.cache.check()
        drafted, accepted = drafted + out.stats.drafted, accepted + out.stats.accepted
    assert 0 < accepted < drafted


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_from_the_states_of_an_earlier_one(pairs, kind):
    """With `--prefix-cache all` a request takes over the ring, the states and the K/V of a text that it continues; one
    that leaves the text further back than the states reach begins anew."""
    target, draft = pairs[kind]
    engine = specker.load(
        target, draft, dtype="float32", strategy="draft", tree="2x3", page_size=16, prefix_cache="all"
    )
    alone = specker.load(target, strategy="ar", dtype="float32", prefix_cache="off")
    first = engine.generate(prompt_of(100), max_new_tokens=40)
    whole = prompt_of(100) + first.tokens
    for text, taken in (
        (whole + [5, 6, 7], True),
        (whole[:135] + [9, 9], True),
        ([*whole[:20], 3, 4], kind != "qwen3.5"),
    ):
        out = engine.generate(text, max_new_tokens=40)
        assert out.tokens == alone.generate(text, max_new_tokens=40).tokens
        assert (out.stats.prefilled < len(text) - 1) == taken
        if not taken:
            break
        engine.generate(whole[:100], max_new_tokens=40)  # the ring holds this text again


def test_states_are_counted(pairs):
    """A sequence's states and records take what `sequence_bytes` says, whatever the context."""
    for target, _ in pairs.values():
        config = read_config(target)
        for sequences in (1, 3):
            cache = KVCache(config, 256, dtype=torch.bfloat16, device="cpu", sequences=sequences)
            rings = cache.rings
            spare = rings.page_size * sum(x[:, 0, 0].nbytes for x in rings.records) if sequences > 1 else 0
            more = sum(x[:, 0].nbytes for x in rings.memory[4:] if x is not None) if sequences > 1 else 0
            held = sum(x.nbytes for x in rings.memory if x is not None)
            assert held == sequences * sequence_bytes(config, torch.bfloat16) + spare + more


@pytest.mark.parametrize(("dtype", "shape"), [("float32", {"draft_tokens": 3}), ("float64", {"tree": "4x3"})])
def test_the_mtp_head_of_the_checkpoint_drafts(tmp_path, dtype, shape):
    options = {name: value for name, value in QWEN3_5.items() if name != "layers"}
    target = make_mtp(tmp_path, "qwen3-next", **options)
    engine = specker.load(target, strategy="mtp", dtype=dtype, **shape)
    for n, how in ((62, {}), (200, {}), (200, {"temperature": 0.7, "seed": 2})):
        out = engine.generate(prompt_of(n), max_new_tokens=30, **how)
        assert out.tokens == engine.generate_ar(prompt_of(n), max_new_tokens=30, **how).tokens
        assert out.stats.drafted > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_inside_transformers_finds_the_final_norm(pairs, kind):
    folder = pairs[kind][0]
    found, own = outer(oracle(folder, torch.float32), None, folder), read(folder, dtype=torch.float32, device="cpu")
    assert torch.equal(found.weights.norm, own.weights.norm) and torch.equal(found.weights.embed, own.weights.embed)


def test_heads_that_read_the_target(tmp_path):
    """EAGLE-3's in chains and trees, and DFlash's: they read rows of recurrent layers, of prompts of two chunks."""
    target = make(tmp_path / "target", max_context=256, **QWEN3_5)
    like = json.loads((make(tmp_path / "like", "qwen2", layers=4, max_context=256) / "config.json").read_text())
    eagle = make_head(tmp_path / "eagle", like, layout="nested", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    dflash = make_dflash(tmp_path / "dflash", like, layout="dflash", layer_ids=[1, 2])
    want = specker.load(target, strategy="ar", dtype="float32").generate(prompt_of(180), 30).tokens
    for head, strategy, shape in (
        (eagle, "eagle", {"draft_tokens": 3}),
        (eagle, "eagle", {"tree": "3x3"}),
        (dflash, "dflash", {"draft_tokens": 3}),
    ):
        out = specker.load(target, head, strategy, dtype="float32", **shape).generate(prompt_of(180), 30)
        assert out.tokens == want and out.stats.drafted > 60


def test_hidden_rows_of_several_chunks(pairs):
    model = specker.load(pairs["qwen3.5"][0], strategy="ar", dtype="float64").model
    found = []
    for chunk in (200, 48):
        cache = KVCache(model.config, 256, dtype=torch.float64, device="cpu")
        found.append(prefill(model, cache, prompt_of(200), (2, 4), 130, chunk))
    for n in (2, 4):
        one, several = (rows[n] for rows in found)
        assert one.shape == several.shape == (130, 64) and float((one - several).abs().max()) < 1e-12


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_multimodal_checkpoint(tmp_path, arch):
    more = {name: value for name, value in QWEN3_NEXT.items() if name != "arch"} if arch.endswith("moe") else QWEN3_5
    text = make(tmp_path / "text", **{**more, "arch": arch})
    both = shutil.copytree(text, tmp_path / "both")
    weights = load_file(text / "model.safetensors")
    moved = {
        name.replace("model.", "model.language_model.", 1): w for name, w in weights.items() if name != "lm_head.weight"
    }
    moved |= {"lm_head.weight": weights["lm_head.weight"], "model.visual.blocks.0.norm1.weight": torch.ones(4)}
    save_file(moved, both / "model.safetensors", {"format": "pt"})
    inner = json.loads((text / "config.json").read_text())
    outer = {"model_type": arch, "architectures": ["ForConditionalGeneration"], "text_config": inner}
    (both / "config.json").write_text(json.dumps({**outer, "vision_config": {}, "tie_word_embeddings": False}))
    one, other = (specker.load(folder, strategy="ar", dtype="float64") for folder in (text, both))
    assert one.generate(prompt_of(20), 20).tokens == other.generate(prompt_of(20), 20).tokens


def test_a_text_without_a_match_beside_a_large_tree(pairs):
    """Lookup pads its tree, with no path that is longer than an anchor's records."""
    prompt, engine = [*range(60)], specker.load(pairs["qwen3.5"][0], strategy="ar", dtype="float32")
    text = engine.generate(prompt, 40).tokens
    four = [token for first in (20, 40, 60, 80) for token in (7, 7, 7, 7, *range(first, first + 12))] + [7] * 6
    how = {"strategy": "lookup", "tree": "4x12", "policy": "fixed", "lookup_share": "off"}
    engine = specker.load(pairs["qwen3.5"][0], dtype="float32", batch_size=2, **how)
    engine.drafter.suffixes = 4, 8
    requests = [engine.session.request(prompt, Params(40))]
    requests.append(engine.session.request(four, Params.of(max_new_tokens=20, logit_bias={7: 100.0})))
    for _ in engine.session.stream(requests):
        pass
    assert requests[0].tokens == text and requests[1].tokens == [7] * 20
    assert requests[1].stats.drafted > 3 * BLOCK


def test_a_grammar_forces_no_longer_chain_than_a_state_allows(tmp_path):
    """A tree may have more rows, and a text beside it refuses all that pad its own draft."""
    pytest.importorskip("llguidance")
    target = make(tmp_path, max_context=256, vocab=259, tokenizer=True, **KINDS["qwen3.5"])
    engine, forced = specker.load(target, strategy="ar", dtype="float64"), "abcdefghijklmnopqrstuvwxyz " * 2
    hows = {"max_new_tokens": 20}, {"max_new_tokens": 70, "grammar": f'start: "{forced}" /[a-z]+/'}
    texts = [engine.generate(prompt_of(60), **how).tokens for how in hows]
    how = {"strategy": "lookup", "tree": "4x12", "policy": "fixed", "lookup_share": "off"}
    engine = specker.load(target, dtype="float64", batch_size=2, **how)
    engine.drafter.suffixes = 8, 8
    requests = [engine.session.request(prompt_of(60), Params.of(**how)) for how in hows]
    for _ in engine.session.stream(requests):
        pass
    assert [request.tokens for request in requests] == texts and requests[1].stats.forced > BLOCK


def test_refusals(pairs, tmp_path):
    target, draft = pairs["qwen3.5"]
    long = {"dtype": "float64", "strategy": "draft"}
    with pytest.raises(ValueError, match=f"too long for a model with recurrent layers: the most are {BLOCK}"):
        specker.load(target, draft, **long, draft_tokens=BLOCK + 1)
    with pytest.raises(ValueError, match="a draft of 128 tokens is too large for a model with recurrent layers"):
        specker.load(target, draft, **long, tree="32x4")
    specker.load(target, draft, **long, draft_tokens=BLOCK)
    alone = dict.fromkeys(("dtype", "max_context", "kv_tokens"))
    with pytest.raises(ValueError, match="has recurrent layers, and does not draft for another engine yet"):
        drafter_for(target, draft, "draft", device="cpu", requests=2, **alone)
    with pytest.raises(ValueError, match="EasySpec cannot run layers with a recurrent state side by side"):
        specker.load(target, draft, "easyspec", dtype="float64", layer_parallel="2")
    for changes, message in (
        (
            {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
            "layer_types sliding_attention are not supported",
        ),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types must name at least one layer of full_attention"),
        ({"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "must be a multiple of linear_num_key_heads 2"),
        ({"linear_key_head_dim": 24}, "linear_key_head_dim 24 is not supported; it must be a power of two"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim 9 is not supported; it must be between 2 and 8"),
        ({"linear_conv_kernel_dim": "four"}, "linear_conv_kernel_dim must be a whole number from 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported beside gated delta nets; it must be silu"),
    ):
        folder = shutil.copytree(target, tmp_path / str(len(message)), dirs_exist_ok=True)
        edit(folder, **changes)
        with pytest.raises(CheckpointError, match=message):
            read_config(folder)
    folder, weights = shutil.copytree(target, tmp_path / "bare"), load_file(target / "model.safetensors")
    del weights["model.layers.0.linear_attn.A_log"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"lacks model\.layers\.0\.linear_attn\.A_log, which config\.json requires"
    ):
        specker.load(folder, strategy="ar")
