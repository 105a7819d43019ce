"""Drafts with another tokenizer: no token changes, and a draft that knows the target's tokens is accepted."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import pytest
from cases import plain
from make_checkpoint import LFM2, make
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import specker
from specker.checkpoints.tokenizer import Tokens
from specker.checkpoints.translation import SETTLED_AFTER, Reader, TokenTexts, Translation, _divided
from specker.integrations.drafts import Drafts

TEXT = (
    "def add(first, second):\n    return first + second  # the sum\n\nThe café in 東京 has no zażółć 🎉🎉 today, "
    "and    it is the first of the second; naïve résumés, 3,141 of 59.\n今日は世界、東京の天気は晴れです。"
)
PROMPTS = [TEXT[:60], TEXT[60:], "the 🎉 of the", "東京の"]


def byte_level() -> Any:
    """Byte-level BPE with merges, some of which end within a character."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|x|>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def pieces(spaced: bool = False) -> Any:
    """Like sentencepiece: words with their spaces, bytes for unknown characters, a token before each text. `spaced`: a
    space before each text, too."""
    core = Tokenizer(models.BPE())
    replace = normalizers.Replace(" ", "\u2581")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if spaced else replace
    core.train_from_iterator(
        [TEXT[:130].replace("🎉", "")], trainers.BpeTrainer(vocab_size=100, special_tokens=["<s>", "<|end|>"])
    )
    state = core.model.__getstate__()
    vocabulary = json.loads(state)
    known, merges = vocabulary["vocab"], [tuple(pair) for pair in vocabulary["merges"]]
    for byte in range(256):
        known[f"<0x{byte:02X}>"] = len(known)
    core.model = models.BPE(vocab=known, merges=merges, byte_fallback=True, fuse_unk=True)
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", known["<s>"])])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<|end|>")


MADE = {"bytes": byte_level, "pieces": pieces, "spaced": lambda: pieces(True)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model for each tokenizer."""
    out = {}
    for seed, (name, make_tokenizer) in enumerate(MADE.items()):
        tokenizer, folder = make_tokenizer(), tmp_path_factory.mktemp(name)
        out[name] = make(folder, layers=4, vocab=len(tokenizer), seed=seed, max_context=512)
        tokenizer.save_pretrained(folder)
    return out


def translation(target: Path, draft: Path) -> Translation:
    tokens = [Tokens(folder, "LlamaForCausalLM") for folder in (target, draft)]
    sizes = [len(each.vocabulary) for each in tokens]
    return Translation.between(*tokens, (sizes[0], sizes[1]), free=True)


@pytest.mark.parametrize(
    ("target", "draft"), [("bytes", "pieces"), ("bytes", "spaced"), ("pieces", "bytes"), ("bytes", "bytes")]
)
@pytest.mark.parametrize("step", [1, 3])
def test_a_growing_text_is_divided_as_the_whole_text(
    folders: dict[str, Path], target: str, draft: str, step: int
) -> None:
    t = translation(folders[target], folders[draft])
    tokenizer, own = (Tokens(folders[name], "LlamaForCausalLM").tokenizer for name in (target, draft))
    for text in (TEXT, TEXT * 3, "世界" * 90, "🎉" * 50):
        ids = tokenizer.encode(text)
        reader = Reader(t)
        before = list(reader.ids)
        for end in range(1, len(ids) + step, step):
            same = reader.read(ids[:end])
            assert reader.ids[:same] == before[:same] and reader.settled <= len(reader.ids)
            before = list(reader.ids)
            read = b"".join(t.draft.texts[n] for n in before)
            said = b"".join(t.target.texts[n] for n in ids[:end])
            assert read.replace(b" ", b"") == said.replace(b" ", b"")  # half a character, too
        reader.guess(before[:2])
        assert reader.read(ids) == len(before) == len(reader.ids)
        if " " in text or draft != "spaced":
            assert reader.ids == own.encode(text)
        assert len(reader.ids) - reader.settled < 8 * SETTLED_AFTER


def test_tokens_are_the_same_if_their_bytes_are(folders: dict[str, Path]) -> None:
    t = translation(folders["bytes"], folders["pieces"])
    shared = dict(zip(t.ids.tolist(), t.rows.tolist(), strict=True))
    ours, theirs = (Tokens(folders[name], "LlamaForCausalLM").vocabulary for name in ("bytes", "pieces"))
    assert shared[ours["Ġthe"]] == theirs["\u2581the"]
    assert shared[ours["<|end|>"]] == theirs["<|end|>"] and ours["<|x|>"] not in shared
    assert shared[ours["Ċ"]] == theirs["\n"]  # not its byte
    assert shared[ours["ð"]] == theirs["<0xF0>"]
    assert t.own[ours["<|x|>"]] == theirs["<s>"] == t.start and t.prefix == [t.start]
    reader = Reader(t)
    reader.read([ours["Ġ"], ours["<|x|>"], ours["<|end|>"]])
    assert reader.ids == [t.start, *t.encode(" <|x|>"), theirs["<|end|>"]]


WAYS: list[dict[str, Any]] = [
    {"draft_tokens": 4},
    {"tree": "3x3", "batch_size": 4},
    {"strategy": "easyspec", "draft_tokens": 3, "batch_size": 4},
    {"strategy": "easyspec", "tree": "2x3", "prefix_cache": "off"},
    {"strategy": "vocabtrim+lookup", "vocab_keep": "60", "vocab_text": 20, "batch_size": 4},
    {"strategy": "draft+lookup", "policy": "plus-minus-one", "graphs": "on"},
]


@pytest.mark.parametrize(("pair", "way"), cases.one_in(2, [("bytes", "spaced"), ("pieces", "bytes")], WAYS))
def test_no_token_changes(folders: dict[str, Path], pair: tuple[str, str], way: dict[str, Any]) -> None:
    target, draft = (folders[name] for name in pair)
    options = {"strategy": "draft", "dtype": "float64", "device": "cpu", "page_size": 16, "max_context": 160, **way}
    engine = specker.load(target, draft, **options)
    for temperature in (0.0, 0.7):
        out = engine.generate(PROMPTS, 9, temperature=temperature, seed=5, ignore_eos=True)
        for prompt, found in zip(PROMPTS, out, strict=True):
            ids = engine.encode(prompt)
            assert found.tokens == plain(target, ids, 9, temperature=temperature, seed=5, ignore_eos=True)
            assert found.stats.drafted > 0 or "lookup" in engine.strategy  # that may rest
    cache = engine.loop.drafter.cache if engine.loop.drafter is not None else None
    assert cache is not None
    for slot in range(len(cache.exact_len)):
        cache.check(slot=slot)


def test_a_draft_whose_text_needs_more_memory_or_context_stops_drafting(folders: dict[str, Path]) -> None:
    prompt, options = "🎉" * 100, {"dtype": "float64", "device": "cpu", "page_size": 16, "draft_tokens": 3}
    t = translation(folders["bytes"], folders["pieces"])
    length = len(Tokens(folders["bytes"], "LlamaForCausalLM").tokenizer.encode(prompt))
    assert len(t.encode(prompt)) > length + 256
    both = folders["bytes"], folders["pieces"], "draft"
    wide = specker.load(*both, **options)
    narrow = specker.load(*both, max_context=length + 20, **options)
    full = specker.load(*both, batch_size=2, kv_tokens=length + 16 + 256, **options)  # one request at a time
    for engine, prompts in ((wide, [prompt]), (narrow, [prompt]), (full, [prompt, "a" + prompt[1:]])):
        for found, text in zip(engine.generate(prompts, 16, ignore_eos=True), prompts, strict=True):
            assert found.tokens == plain(folders["bytes"], engine.encode(text), 16, ignore_eos=True)
            assert (found.stats.drafted > 0) == (engine is wide)


def test_a_space_of_the_tokenizers_own_is_dropped_within_a_text() -> None:
    """A sentencepiece tokenizer may put it before a text as a token of its own."""
    pieces = TokenTexts([b" ", b"("], set(), {})
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [0, 1] if text == "(" else [0])
    assert _divided(b"(", False, tokenizer, pieces, spaced=True) == [0, 1]
    assert _divided(b"(", True, tokenizer, pieces, spaced=True) == [1]


def test_refusals(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only 2 of the draft's are the target's, too"):
        few = make(tmp_path / "few", vocab=300)
        core = Tokenizer(models.WordLevel({f"word{n}": n for n in range(298)} | {"a": 298, "<|end|>": 299}, "a"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        core.add_special_tokens(["<|end|>"])
        PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(few)
        specker.load(folders["bytes"], few, "draft", device="cpu")
    with pytest.raises(ValueError, match=r"different tokenizers .*: use a draft of the target's own family"):
        dream = make(tmp_path / "dream", "dream", vocab=330)
        pieces().save_pretrained(dream)
        specker.load(folders["bytes"], dream, "diffuspec", device="cpu")
    with pytest.raises(ValueError, match="a draft with recurrent layers cannot read changed text again"):
        recurrent = make(tmp_path / "recurrent", vocab=len(pieces()), **LFM2)
        pieces().save_pretrained(recurrent)
        specker.load(folders["bytes"], recurrent, "draft", device="cpu")
    with pytest.raises(ValueError, match="a PARD model cannot draft from changed text"):
        masks = make(tmp_path / "masks", vocab=len(pieces()), pard_token=3)
        pieces().save_pretrained(masks)
        specker.load(folders["bytes"], masks, "draft", device="cpu")
    with pytest.raises(ValueError, match="calibrate='never' needs a draft with the target's tokenizer"):
        specker.load(folders["bytes"], folders["pieces"], "easyspec", device="cpu", calibrate="never")
    with pytest.raises(ValueError, match="has another tokenizer, and does not draft for another engine yet"):
        Drafts(folders["bytes"], folders["pieces"], "draft", device="cpu")
