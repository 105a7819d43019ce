"""Log-probabilities name each token once, and its place in the text; texts go on from their prompts."""

import pytest
from make_checkpoint import make, tokens_of
from make_tokenizer import tokenizer
from serving import serving, streamed
from transformers import PreTrainedTokenizerFast

import specker
from specker.runtime.detokenize import UNKNOWN, Detokenizer
from specker.runtime.events import Logprob
from specker.serve import logprobs

SPACE = "\u2581"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An engine whose tokenizer is like sentencepiece's, and a client of it."""
    folder = make(tmp_path_factory.mktemp("target"), layers=1, vocab=384)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer("llama"), bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(folder)
    engine = specker.load(folder, strategy="ar", device="cpu", dtype="float64", batch_size=2)
    with serving(engine) as client:
        yield engine, client


def ids(engine, *names):
    return [engine.target.tokens.vocabulary[name] for name in names]


def test_a_completion_begins_with_its_space(served):
    engine, client = served
    prompt, cat = ids(engine, SPACE + "the"), str(*ids(engine, SPACE + "cat"))
    asked = {"prompt": prompt, "max_tokens": 3, "logit_bias": {cat: 100}, "logprobs": 1}
    [choice] = client.post("/v1/completions", json=asked).json()["choices"]
    assert choice["text"] == " cat cat cat" and choice["logprobs"]["tokens"] == [" cat"] * 3
    assert choice["logprobs"]["text_offset"] == [0, 4, 8]
    assert all(" cat" in best for best in choice["logprobs"]["top_logprobs"])
    del asked["logprobs"]
    got = streamed(client, "/v1/completions", **asked, echo=True)
    assert "".join(each["text"] for chunk in got for each in chunk["choices"]) == "the cat cat cat"
    chat = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 2, "logit_bias": {cat: 100}}
    [choice] = client.post("/v1/chat/completions", json=chat | {"logprobs": True}).json()["choices"]
    assert choice["message"]["content"] == " cat cat"
    assert b"".join(bytes(each["bytes"]) for each in choice["logprobs"]["content"]) == b" cat cat"


def test_an_answer_completes_the_prompts_last_character(served):
    engine, client = served
    first, *rest = ids(engine, *(f"<0x{byte:02X}>" for byte in "é".encode()))
    asked = {"prompt": [*ids(engine, "a"), first], "max_tokens": 2, "logit_bias": {str(rest[0]): 100}}
    for echo, text in ((False, f"é{UNKNOWN}"), (True, f"aé{UNKNOWN}")):
        assert client.post("/v1/completions", json=asked | {"echo": echo}).json()["choices"][0]["text"] == text


@pytest.mark.parametrize("most", [0, 1, 20])
def test_each_of_the_best_tokens_has_a_key(served, most):
    engine, client = served
    asked = {"prompt": ids(engine, "a", "b"), "max_tokens": 12, "temperature": 1.5, "seed": 1, "logprobs": most}
    shown = client.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    out = engine.generate(asked["prompt"], 12, temperature=1.5, seed=1, logprobs=max(most, 1))
    lone = 0
    for p, name, value, best in zip(
        out.logprobs, shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True
    ):
        named = {token for token, _ in p.best[:most]} | {p.token}
        assert len(best) == len(named) and best[name] == value == pytest.approx(p.logprob)
        assert sorted(best.values(), reverse=True) == [*best.values()]
        lone += sum(key.startswith("bytes:\\x") for key in best)
    assert lone > most


def test_tokens_with_the_same_text_have_two_keys():
    tokens = tokens_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer("llama"), eos_token="</s>"))
    names = "a", "<0x61>", "<0xF0>", "</s>", SPACE + "a"
    letter, byte, lone, end, word = (tokens.vocabulary[name] for name in names)
    best = [(byte, -1.0), (letter, -2.0), (lone, -3.0), (end, -4.0), (word, -5.0)]
    each = [Logprob(letter, -2.0, best), Logprob(lone, -3.0, best), Logprob(letter, -2.0, best)]
    shown = logprobs.of_text(tokens, Detokenizer(tokens, [letter]), each, 5)
    keys = "a", "bytes:\\xf0", "</s>", " a"
    assert shown["tokens"] == ["a", "bytes:\\xf0", "a"] and shown["text_offset"] == [0, 1, 1]
    assert shown["top_logprobs"][0] == {f"token_id:{byte}": -1.0, **dict(zip(keys, (-2, -3, -4, -5), strict=True))}
    begin = logprobs.of_text(tokens, Detokenizer(tokens), [Logprob(word, -1.0, [])], 0)
    assert begin["tokens"] == ["a"]  # the text's first space is left out


def test_bytes_lack_the_space_that_is_left_out_of_a_text():
    tokens = tokens_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer("llama"), eos_token="</s>"))
    named = SPACE + "the", SPACE + "cat", "a", "<0xC3>", "<0xA9>", SPACE + "the", "</s>"
    each = [Logprob(tokens.vocabulary[name], -1.0, [(tokens.vocabulary[SPACE + "cat"], -2.0)]) for name in named]
    shown = logprobs.of_chat(tokens, Detokenizer(tokens), each, 1)["content"]
    text = bytes(byte for one in shown for byte in one["bytes"]).decode()
    assert text == "the cataé the" == tokens.tokenizer.decode([p.token for p in each], skip_special_tokens=True)
    assert [bytes(one["top_logprobs"][0]["bytes"]) for one in shown[:2]] == [b"cat", b" cat"]
    assert shown[-1]["token"] == "</s>" and [one["token"] for one in shown[3:5]] == [UNKNOWN] * 2
