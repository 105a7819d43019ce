"""Text of tokens: whatever cuts a text into a prompt and an answer, and an answer into rounds, it stays the text that
the tokenizer makes of all tokens."""

import random
from functools import cache

import pytest
from make_checkpoint import make, tokens_of
from make_tokenizer import KINDS, LETTERS, tokenizer
from transformers import PreTrainedTokenizerFast

import specker
from specker.checkpoints.tokenizer import Tokenizer
from specker.runtime.detokenize import UNKNOWN, Detokenizer, prompt_text

RAW = {letter: byte for byte, letter in LETTERS.items()}
TEXTS = (
    "the cat",
    " naïve cat END",
    "日本語 e\u0301",
    "🙂👍🙂",
    "a\ufffd",
    "\ufffd\ufffd b",
    "→ß the",
    "  a\nb",
    "ENDEND",
)


@cache
def tokens_like(kind, reader):
    """The tokenizer as specker reads it, or as transformers does."""
    core, special = tokenizer(kind), {"bos_token": "<s>", "eos_token": "</s>"}
    if reader == "transformers":
        return tokens_of(PreTrainedTokenizerFast(tokenizer_object=core, **special))
    return tokens_of(Tokenizer(core, special, (), None))


@cache
def spelled(tokens, token):
    """The bytes of a token of a vocabulary that has all bytes."""
    name = tokens.tokenizer.convert_ids_to_tokens(token)
    if name in ("<s>", "</s>"):
        return b""
    if name in tokens.vocabulary and all(letter in RAW for letter in name) and "<0x00>" not in tokens.vocabulary:
        return bytes(RAW[letter] for letter in name)
    return bytes.fromhex(name[3:5]) if name.startswith("<0x") else name.replace("\u2581", " ").encode()


@cache
def ids_by_bytes(tokens):
    return {spelled(tokens, n): n for _, n in sorted(tokens.vocabulary.items())}


def texts(tokens, kind, rng):
    """Random ids: of texts, of lone bytes, and of any tokens."""
    by_bytes, ids = ids_by_bytes(tokens) if has_bytes(kind) else {}, []
    special = tokens.vocabulary["<s>"]
    for _ in range(rng.randint(1, 5)):
        choice = rng.random()
        if choice < 0.5 and has_bytes(kind):
            left = rng.choice(TEXTS).encode()
            while left:  # any division into tokens, not only the tokenizer's own
                fits = [n for n in range(1, min(len(left), 12) + 1) if left[:n] in by_bytes]
                ids.append(by_bytes[left[: (n := rng.choice(fits))]])
                left = left[n:]
        elif choice < 0.7 and has_bytes(kind):
            lone = rng.choice((b"\xf0", b"\x9f\x99", b"\xff", b"\xe2\x86", b"\xc3", b"\xf0\x9f\x99"))
            ids += [by_bytes[lone[n : n + 1]] for n in range(len(lone))]
        elif choice < 0.8:
            ids.append(special)
        else:
            ids += rng.choices(range(len(tokens.vocabulary)), k=rng.randint(1, 4))
    return ids


def has_bytes(kind):
    return kind in ("bytes", "llama", "gemma", "metaspace", "metaspace, after the bytes")


def is_text(raw):
    return raw.decode(errors="ignore").encode() == raw != b""


def finished(tokens, kind, ids):
    """The text of all ids as the tokenizer writes it, without a character that could still be completed."""
    if not has_bytes(kind):
        return tokens.tokenizer.decode(ids, skip_special_tokens=True)
    ids = [n for n in ids if spelled(tokens, n)]
    raw = b"".join(spelled(tokens, n) for n in ids)
    cut = next((n for n in (3, 2, 1) if n <= len(raw) and unfinished(raw[-n:])), 0)
    if kind == "bytes":
        text = tokens.tokenizer.decode(ids)
        return text[:-1] if cut else text
    ids, raw = ids[: len(ids) - cut], raw[: len(raw) - cut]
    # The decoder writes a run of bytes with a wrong one as unknown characters only; sentencepiece keeps the others.
    owners, at = [n for n, token in enumerate(ids) for _ in spelled(tokens, token)], 0
    while at < len(raw):
        size = next((n for n in (1, 2, 3, 4) if is_text(raw[at : at + n])), 0)
        if not size:
            ids[owners[at]] = tokens.vocabulary[UNKNOWN]
        at += size or 1
    return tokens.tokenizer.decode(ids)


def unfinished(raw):
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return (error.start, error.reason) == (0, "unexpected end of data")


@pytest.mark.parametrize("reader", ["specker", "transformers"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_goes_on_from_the_text_of_its_prompt(kind, reader):
    tokens, rng, cuts = tokens_like(kind, reader), random.Random(kind), 0
    for _ in range(80):
        ids = texts(tokens, kind, rng)
        at = rng.randint(0, len(ids))
        prompt, answer = ids[:at], ids[at:]
        before = finished(tokens, kind, prompt)
        if kind == "bytes" or UNKNOWN not in before:
            assert prompt_text(tokens, prompt) == before
        stream = Detokenizer(tokens, prompt)
        for n, token in enumerate(answer):
            assert stream.written == len(finished(tokens, kind, prompt + answer[:n])) - len(before)
            expected = finished(tokens, kind, prompt + answer[: n + 1])[len(before) + stream.written :]
            assert stream.add(token) == expected
        assert (
            stream.flush() == ""
            and Detokenizer(tokens, prompt).all(answer) == finished(tokens, kind, ids)[len(before) :]
        )
        cuts += before != tokens.tokenizer.decode(prompt, skip_special_tokens=True)
    assert (cuts > 0) == has_bytes(kind)


def read(stream, ids, rng):
    """The pieces of rounds of random numbers of tokens, and how many tokens the text takes."""
    pieces, taken = [], 0
    while ids and not stream.stopped:
        size = rng.randint(1, 6)
        for token in ids[:size]:
            pieces.append(stream.add(token))
            taken += 1
            if stream.stopped:
                break
        ids = ids[size:]
    return [*pieces, stream.flush()], taken


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_is_found_where_it_is_complete(kind):
    """Within a token that also begins a character, too."""
    tokens, rng, ended, within = tokens_like(kind, "specker"), random.Random(kind), 0, 0
    for _ in range(150):
        ids = texts(tokens, kind, rng)
        at = rng.randint(0, len(ids))
        prompt, answer = ids[:at], ids[at:]
        begin = len(finished(tokens, kind, prompt))
        text = finished(tokens, kind, ids)[begin:]
        stops = ("END", UNKNOWN, " ", "🙂") if rng.random() < 0.5 else (text[n : n + 2] for n in range(2, 8, 3))
        stops = tuple(stop for stop in stops if stop)
        end = next((n for n in range(len(text) + 1) if text[:n].endswith(stops)), None)
        expected, count = text, len(answer)
        if end is not None:
            expected = text[: end - max(len(stop) for stop in stops if text[:end].endswith(stop))]
            lengths = (len(finished(tokens, kind, prompt + answer[:n])) - begin for n in range(len(answer) + 1))
            count = next(n for n, length in enumerate(lengths) if length >= end)
            raw = tokens.tokenizer.decode([answer[count - 1]])
            within += raw.endswith(UNKNOWN) and raw != UNKNOWN
            ended += 1
        rounds = [read(Detokenizer(tokens, prompt, stops), answer, random.Random(n)) for n in range(3)]
        assert rounds[0] == rounds[1] == rounds[2]
        assert ("".join(rounds[0][0]), rounds[0][1]) == (expected, count)
    assert ended > 20 and (kind != "bytes" or within > 3)


def test_bytes_beside_characters_cost_only_themselves():
    """sentencepiece shows é and one unknown character; the decoder of tokenizers would show three unknown ones."""
    tokens = tokens_like("llama", "specker")
    ids = [tokens.vocabulary[name] for name in ("a", "<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "b")]
    assert Detokenizer(tokens).all(ids) == f"aé{UNKNOWN * 2}b"
    assert [Detokenizer(tokens, ids[:n]).all(ids[n:]) for n in (2, 3, 5)] == [
        f"é{UNKNOWN * 2}b",
        f"{UNKNOWN * 2}b",
        f"{UNKNOWN * 2}b",
    ]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Loads a model with a tokenizer of a kind."""

    @cache
    def load(kind):
        folder = make(tmp_path_factory.mktemp("target"), layers=1, vocab=384)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer(kind), bos_token="<s>", eos_token="</s>")
        fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        fast.save_pretrained(folder)
        return specker.load(folder, strategy="lookup", device="cpu", dtype="float32", draft_tokens=4)

    return load


@pytest.mark.parametrize("kind", ["llama", "bytes"])
def test_texts_of_an_engine_begin_where_the_prompt_ends(engine, kind):
    model = engine(kind)
    ids = model.tokenizer.convert_ids_to_tokens, model.target.tokens.vocabulary
    name = "\u2581cat" if kind == "llama" else "Ġcat"
    asked = {"max_new_tokens": 3, "logit_bias": {ids[1][name]: 100}}
    prompt = [ids[1][name.replace("cat", "the")]]
    assert model.generate(prompt, **asked).text == " cat cat cat"
    assert "".join(event.text for event in model.stream(prompt, **asked)) == " cat cat cat"
    assert model.generate(prompt, **asked, stop=" cat").text == ""
    assert model.chat([{"role": "user", "content": "the"}], **asked).text == " cat cat cat"
    first = model.generate([ids[1]["<s>"]], **asked).text
    assert first == ("cat cat cat" if kind == "llama" else " cat cat cat")


def test_a_stop_string_in_a_token_that_begins_a_character_ends_the_text(engine):
    model = engine("bytes")
    token = model.target.tokens.vocabulary["D" + LETTERS[0xF0]]
    out = model.generate([1, 2], 8, stop="D", logit_bias={token: 100})
    assert (out.text, out.tokens, out.finished) == ("", [token], "stop")
    assert model.generate([1, 2], 3, logit_bias={token: 100}).text == f"D{UNKNOWN}D{UNKNOWN}D"


def test_an_unknown_character_that_the_model_writes_stays(engine):
    model = engine("llama")
    token = model.target.tokens.vocabulary[UNKNOWN]
    assert model.generate([1, 2], 3, logit_bias={token: 100}).text == UNKNOWN * 3
    [*events] = model.stream([1, 2], 3, logit_bias={token: 100})
    assert [text for event in events for text in event.texts] == [UNKNOWN] * 3
