"""Answers of the endpoints: texts are those of the engine, whole and streamed, and bad input gets one sentence."""

import json
import logging
import re
import threading
import time
from functools import partial

import openai
import pytest
from make_checkpoint import make
from pairs import perturbed
from prometheus_client.parser import text_string_to_metric_families
from serving import free, serving, streamed, until

import specker
from specker import grammar
from specker.runtime.strategies import copier
from specker.runtime.strategies.lookup.text_file import _unpacked
from specker.serve import app

TALK = [{"role": "user", "content": "ab cd"}]


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Makes an engine: one serves one server only."""
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", "qwen2", layers=2, max_context=400, tokenizer=True)
    draft = perturbed(target, folder / "draft", amount=0.05)
    options = {"dtype": "float64", "device": "cpu", "page_size": 16, "batch_size": 3, "draft_tokens": 3}
    return partial(specker.load, target, draft, strategy="draft", **options)


@pytest.fixture(scope="module")
def engine(load):
    return load()


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine, name="tiny") as client:
        yield client


def test_a_completion_is_the_engines_text(engine, client):
    want = engine.generate("ab cd", 20)
    body = client.post("/v1/completions", json={"model": "tiny", "prompt": "ab cd", "max_tokens": 20}).json()
    assert body["object"] == "text_completion" and body["model"] == "tiny"
    [choice] = body["choices"]
    assert choice == {"index": 0, "text": want.text, "logprobs": None, "finish_reason": "length"}
    usage, ids = body["usage"], engine.encode("ab cd")
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (len(ids), 20, len(ids) + 20)
    found = usage["completion_tokens_details"]
    assert found["accepted_prediction_tokens"] == want.stats.accepted > 0
    assert found["accepted_prediction_tokens"] + found["rejected_prediction_tokens"] == want.stats.drafted


def test_prompts_of_ids_and_several_prompts(engine, client):
    prompts = ["ab", "cd ef"]
    body = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 9}).json()
    assert [c["text"] for c in body["choices"]] == [engine.generate(p, 9).text for p in prompts]
    ids = [engine.encode(p) for p in prompts]
    again = client.post("/v1/completions", json={"prompt": ids, "max_tokens": 9}).json()
    assert again["choices"] == body["choices"]
    one = client.post("/v1/completions", json={"prompt": ids[1], "max_tokens": 9}).json()
    assert one["choices"][0]["text"] == body["choices"][1]["text"]
    assert len(engine.encode(client.post("/v1/completions", json={"prompt": "ab"}).json()["choices"][0]["text"])) <= 17


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3}])
def test_a_stream_has_the_text_of_the_whole_answer(engine, client, sampling):
    asked = {"prompt": "ab cd", "max_tokens": 24, "n": 2, "logprobs": 2, **sampling}
    whole = client.post("/v1/completions", json=asked).json()
    got = streamed(client, "/v1/completions", **asked, stream_options={"include_usage": True})
    assert len(got) > 2 and got[-1]["choices"] == [] and got[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in got[:-1])
    for n, choice in enumerate(whole["choices"]):
        parts = [c for chunk in got for c in chunk["choices"] if c["index"] == n]
        own = engine.generate("ab cd", 24, **{**sampling, "seed": sampling.get("seed", 0) + n})
        assert "".join(p["text"] for p in parts) == choice["text"] == own.text
        assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        said = [p["logprobs"] for p in parts if p["logprobs"]]
        for key in ("tokens", "token_logprobs", "top_logprobs"):
            assert [x for each in said for x in each[key]] == choice["logprobs"][key]
        assert all(0 < len(best) <= 3 for best in choice["logprobs"]["top_logprobs"])


def test_offsets_and_bytes_are_those_of_the_text(client, answer_with):
    """Of characters that have several tokens, too."""
    text, places = "é→ ab cd ef", [0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    answer_with(text)

    def both(path, key, **asked):
        """Of the whole answer and of the chunks."""
        got = [choice for chunk in streamed(client, path, **asked) for choice in chunk["choices"]]
        parts = [choice["logprobs"][key] for choice in got if choice.get("logprobs")]
        assert len(parts) > 2
        whole = client.post(path, json=asked).json()["choices"][0]["logprobs"][key]
        return whole, [each for part in parts for each in part]

    for offsets in both("/v1/completions", "text_offset", prompt="a", max_tokens=40, logprobs=0):
        assert offsets[: len(places)] == places
    for shown in both("/v1/chat/completions", "content", messages=TALK, logprobs=True):
        assert bytes(byte for one in shown for byte in one["bytes"]).decode() == text


def test_a_request_without_a_seed_is_drawn_anew(client):
    asked = {"prompt": "ab", "max_tokens": 30, "temperature": 1.5}
    texts = {client.post("/v1/completions", json=asked).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1


def test_chat_with_openais_client(engine, client):
    want = engine.generate(engine.encode_chat(TALK), 16, temperature=0.7, seed=3)
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
        assert [model.id for model in api.models.list()] == ["tiny"]
        asked = {"model": "tiny", "messages": TALK, "temperature": 0.7, "seed": 3}
        answer = api.chat.completions.create(**asked, max_completion_tokens=16, logprobs=True, top_logprobs=3)
        [choice] = answer.choices
        assert choice.message.content == want.text and choice.message.role == "assistant"
        assert choice.finish_reason == "length" and answer.usage.completion_tokens == 16
        assert [len(one.top_logprobs) for one in choice.logprobs.content] == [3] * 16
        assert [one.token for one in choice.logprobs.content] == [engine.tokenizer.decode([t]) for t in want.tokens]
        got = list(api.chat.completions.create(**asked, max_tokens=16, stream=True))
        assert got[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in got) == want.text
        assert got[-1].choices[0].finish_reason == "length" and got[-1].usage is None
        parts = [{"type": "text", "text": "ab "}, {"type": "text", "text": "cd"}]
        same = api.chat.completions.create(**{**asked, "messages": [{"role": "user", "content": parts}]}, max_tokens=16)
        assert same.choices[0].message.content == want.text
        with pytest.raises(openai.BadRequestError, match="presence_penalty must be between -2 and 2"):
            api.chat.completions.create(**asked, presence_penalty=3)
        adjusted = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"99": 5}}
        want = engine.generate(
            engine.encode_chat(TALK), 16, temperature=0.7, seed=3, **adjusted | {"logit_bias": {99: 5}}
        )
        other = api.chat.completions.create(**asked, **adjusted, max_tokens=16, user="me")
        assert other.choices[0].message.content == want.text != answer.choices[0].message.content


def test_each_streamed_text_has_a_role(client):
    got = streamed(client, "/v1/chat/completions", messages=TALK, n=2, max_tokens=3)
    assert sorted(c["index"] for chunk in got for c in chunk["choices"] if c["delta"].get("role")) == [0, 1]


def test_an_empty_answer_is_a_text(client, answer_with):
    answer_with(form=grammar.lark('start: ""'))
    [choice] = client.post("/v1/chat/completions", json={"messages": TALK}).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": ""} and choice["finish_reason"] == "stop"


ASKED = {  # fields of a request, and the options of the engine that they mean
    "min_p": ({"min_p": 0.3, "temperature": 0.9}, {"min_p": 0.3, "temperature": 0.9}),
    "repetition": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "llama.cpp's name": ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
    "all of them": ({"top_k": -1, "temperature": 0.9}, {"temperature": 0.9}),
    "nothing drafted": ({"speculation": "off"}, {"policy": "off"}),
    "a policy": ({"speculation": "draft-and-verify", "cache_prompt": False}, {"prefix_cache": "off"}),
    "what means nothing": ({"suffix": ""}, {}),
    "null": (dict.fromkeys(("n", "stream", "stop", "logit_bias", "echo", "ignore_eos", "cache_prompt")), {}),
}


@pytest.mark.parametrize("fields", ASKED)
def test_sampling_fields(engine, client, fields):
    asked, options = ASKED[fields]
    if "temperature" in asked:
        asked, options = asked | {"seed": 3}, options | {"seed": 3}
    body = client.post("/v1/completions", json={"prompt": "ab cd", "max_tokens": 24} | asked).json()
    want = engine.generate("ab cd", 24, **options)
    assert body["choices"][0]["text"] == want.text
    found = body["usage"]["completion_tokens_details"]
    assert (found["accepted_prediction_tokens"] > 0) == (asked.get("speculation") != "off")


def test_a_text_does_not_end_before_min_tokens(engine, client):
    first = engine.generate("ab cd", 1).tokens[0]
    asked = {"prompt": "ab cd", "max_tokens": 12, "stop_token_ids": [first]}
    for least in (0, 9):
        body = client.post("/v1/completions", json=asked | {"min_tokens": least}).json()
        assert body["choices"][0]["text"] == engine.generate("ab cd", 12, stop_ids=[first], min_tokens=least).text
        assert (body["usage"]["completion_tokens"] > 9) == (least == 9)
    answer = client.post("/v1/completions", json=asked | {"min_tokens": 13})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "min_tokens must be at most max_tokens, 12; got 13"
    assert client.post("/v1/completions", json=asked | {"min_tokens": -1}).status_code == 400


def test_a_text_ends_at_the_stop_ids_that_are_asked_for(engine, client):
    tokens = engine.generate("ab cd", 12).tokens
    asked = {"prompt": "ab cd", "max_tokens": 12}
    body = client.post("/v1/completions", json=asked | {"stop_token_ids": [tokens[5]]}).json()
    assert body["usage"]["completion_tokens"] == tokens.index(tokens[5]) + 1
    assert body["choices"][0]["finish_reason"] == "stop"
    own = engine.session._stop_ids
    engine.session._stop_ids = frozenset(tokens[5:6])
    try:
        counts = {
            ignores: client.post("/v1/completions", json=asked | {"ignore_eos": ignores}).json()["usage"]
            for ignores in (False, True)
        }
    finally:
        engine.session._stop_ids = own
    assert counts[False]["completion_tokens"] == tokens.index(tokens[5]) + 1 < counts[True]["completion_tokens"] == 12


def test_echo(engine, client):
    want = [engine.generate(p, 5).text for p in ("ab", "cd ef")]
    asked = {"prompt": ["ab", "cd ef"], "max_tokens": 5, "echo": True, "n": 2, "best_of": 2}
    body = client.post("/v1/completions", json=asked).json()
    assert [c["text"] for c in body["choices"]] == ["ab" + want[0]] * 2 + ["cd ef" + want[1]] * 2
    ids = engine.encode("ab")
    got = streamed(client, "/v1/completions", prompt=ids, max_tokens=5, echo=True)
    assert "".join(c["text"] for chunk in got for c in chunk["choices"]) == engine.decode(ids) + want[0]


def test_reasoning_effort_is_a_variable_of_the_template(engine, client, chat_template):
    asked = {"messages": TALK, "max_tokens": 4, "reasoning_effort": "low"}
    answer = client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400 and "the model's chat template knows no reasoning_effort" in answer.text
    told = "{{ reasoning_effort or 'none' }} " + engine.tokenizer.chat_template
    chat_template(engine, told)
    want = {
        effort: engine.generate(engine.encode_chat(TALK, reasoning_effort=effort), 4).text for effort in ("low", "")
    }
    body = client.post("/v1/chat/completions", json=asked).json()
    assert body["choices"][0]["message"]["content"] == want["low"] != want[""]


def test_stop_strings_end_a_text_before_them(engine, client):
    text = engine.generate("ab cd", 40).text
    stop = text[8:11]
    want = text[: text.index(stop)]
    body = client.post("/v1/completions", json={"prompt": "ab cd", "max_tokens": 40, "stop": stop}).json()
    assert body["choices"][0]["text"] == want and body["choices"][0]["finish_reason"] == "stop"
    got = streamed(client, "/v1/completions", prompt="ab cd", max_tokens=40, stop=["zzzz", stop])
    assert "".join(c["text"] for chunk in got for c in chunk["choices"]) == want


def test_an_answer_without_a_limit_ends_with_the_context(load):
    with serving(engine := load(max_context=120)) as client:
        body = client.post("/v1/chat/completions", json={"messages": TALK, "seed": 1}).json()
        assert body["choices"][0]["finish_reason"] in ("length", "stop")
        assert (
            body["usage"]["total_tokens"] in range(90, engine.max_context + 1)
            or body["choices"][0]["finish_reason"] == "stop"
        )
        body = client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 9999, "ignore_eos": True}).json()
        assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("key", [None, "secret"])
def test_only_requests_of_one_key_share_texts_and_kv(load, key, monkeypatch, tmp_path):
    """The key is the salt or, without one, the API key. Sharing shows in what was accepted and taken over. The texts
    are kept in a file, now and then or at the end."""
    monkeypatch.delenv("SPECKER_API_KEY", raising=False)
    monkeypatch.setattr(app, "SAVE", 300.0 if key else 0.02)
    made = load(strategy="draft+lookup", prefix_cache="all", lookup_file=str(tmp_path / "texts"))
    with serving(made, api_key=key) as client:
        client.headers["Authorization"] = f"Bearer {key}"

        def kept():
            path = tmp_path / "texts"
            return sorted(name for name, _ in _unpacked(path.read_bytes())[2]) if path.exists() else []

        def shared(salt):
            asked = {"prompt": "ab cd ef", "max_tokens": 24, "cache_salt": salt}
            body = client.post("/v1/completions", json=asked).json()
            return body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

        assert [shared(salt) for salt in ("a", "b", "a", None, None, "c")] == [0, 0, 1, 0, 1, 0]
        pools = copier(made.drafters).pools
        want = sorted(map(pools.name, ("a", "b", "c", *([""] if key else []))))
        if key:
            assert not kept()
        else:
            until(lambda: kept() == want)
    assert kept() == want


def test_usage_counts_prompts_once_as_the_call_found_them(load):
    with serving(load(prefix_cache="all")) as client:

        def counts(prompt, **more):
            body = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **more}).json()
            return body["usage"]["prompt_tokens"], body["usage"]["prompt_tokens_details"]["cached_tokens"]

        prompt, tokens = "ab cd ef gh", len("ab cd ef gh")
        assert counts(prompt, n=2, cache_salt="own") == (tokens, 0)
        assert counts(prompt, n=2, cache_salt="own") == (tokens, tokens - 1)
        assert counts(prompt, cache_salt="own", cache_prompt=False) == (tokens, 0)
        assert counts(["ab", "ab"], n=2)[0] == 4


BAD = {
    "a salt that is no string": ({"cache_salt": 3}, "cache_salt: "),
    "a field that does not exist": ({"max_token": 3}, "there is no field 'max_token'"),
    "a field whose name is a number": ({"0": 1}, "there is no field '0'"),
    "no prompt": ({"prompt": None}, "prompt: "),
    "an empty prompt": ({"prompt": []}, "the prompt is empty"),
    "ids beyond the vocabulary": ({"prompt": [10**6]}, "token ids must be in"),
    "no tokens": ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    "temperature": ({"temperature": -1}, "temperature must be 0 or at least"),
    "infinite temperature": ({"temperature": "inf"}, "temperature must be 0 or at least"),
    "top_p": ({"top_p": 0}, "top_p must be in"),
    "top_k": ({"top_k": -2}, "top_k must be at least 0"),
    "a top_k that no integer holds": ({"top_k": 10**30}, "top_k must be at most 2147483647, got 1000"),
    "min_p": ({"min_p": 2}, "min_p must be in [0, 1], got 2"),
    "a repetition penalty": ({"repeat_penalty": 0}, "repetition_penalty must be in [0.01, 100], got 0"),
    "a bias": ({"logit_bias": {"5": 101}}, "logit_bias must give ids, each once, values between -100 and 100"),
    "a bias of no id": ({"logit_bias": {"a": 1}}, "logit_bias must give ids, each once, values between -100 and 100"),
    "a bias of an unknown id": ({"logit_bias": {"999999": 1}}, "logit_bias must be of ids below 320"),
    "too many biases": ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias takes at most 300 ids, got 301"),
    "a stop id": ({"stop_token_ids": [999999]}, "stop_token_ids must be below 320"),
    "suffix": ({"suffix": "x"}, "suffix is not supported: the model has no tokens for it, such as <|fim_prefix|>"),
    "a suffix of ids": ({"prompt": [1], "suffix": "x"}, "suffix needs a prompt that is a text"),
    "best_of": ({"best_of": 3}, "best_of must be n, 1: all texts are returned"),
    "speculation": ({"speculation": "fast"}, "speculation must be one of off, auto, "),
    "n": ({"n": 0}, "n: Input should be greater"),
    "more texts than the queue holds": ({"n": 100}, "100 texts are asked for, but the server"),
    "half a surrogate pair": ({"prompt": "\udc00"}, "prompt: the text has half of a surrogate pair"),
    "half of one in a stop string": ({"stop": ["a", "\ud800"]}, "stop[1]: the text has half of a surrogate pair"),
    "half of one in a name": ({"\ud800": 1}, "the text has half of a surrogate pair"),
    "a stop string that is a number": ({"stop": ["a", 5]}, "stop: Input should be a valid string"),
    "a prompt of numbers and texts": ({"prompt": [1, "a"]}, "prompt[1]: Input should be a valid integer"),
    "a prompt of ids and digits": ({"prompt": [1, "2"]}, "prompt[1]: Input should be a valid integer"),
    "a prompt of truths": ({"prompt": [[True]]}, "prompt[0][0]: Input should be a valid integer"),
    "a stop id that is text": ({"stop_token_ids": ["1"]}, "stop_token_ids[0]: Input should be a valid integer"),
    "an empty stop string": ({"stop": ""}, "stop must be a string or a list of strings, none of them empty"),
    "a penalty": ({"frequency_penalty": 9}, "frequency_penalty must be between -2 and 2, got 9"),
    "echo": ({"echo": True, "logprobs": 1}, "echo and logprobs exclude each other"),
    "logprobs": ({"logprobs": 99}, "logprobs: Input should be less than or equal to 20"),
    "response_format": ({"response_format": {"type": "xml"}}, "response_format.type: Input should be 'text'"),
}
BAD_CHAT = {
    "no messages": ({"messages": []}, "messages: List should have at least 1 item"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities: answers are text, 'audio' is not supported"),
    "verbosity": ({"verbosity": "high"}, "the model's chat template knows no verbosity"),
    "another verbosity": ({"verbosity": "huge"}, "verbosity: Input should be 'low', 'medium' or 'high'"),
    "a role": ({"messages": [{"content": "a"}]}, "messages[0].role: Field required"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content: the parts of a message's content must be texts",
    ),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    "tool_choice alone": ({"tool_choice": "required"}, "tool_choice needs tools"),
    "tools without a place in the template": (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools need a chat template with <tool_call>, [TOOL_CALLS] or",
    ),
    "both turns": (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message and add_generation_prompt exclude each other",
    ),
    "nothing to continue": (
        {"continue_final_message": True},
        "continue_final_message needs an assistant's text as the last message",
    ),
    "a broken call": (
        {"messages": [*TALK, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        "messages[1].tool_calls[0].function.arguments: must be a string with JSON in it",
    ),
    "a call that is a number": (
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        "messages[0].tool_calls: Input should be a valid list",
    ),
    "a call in a thousand brackets": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 900 + "]" * 900}}]}]},
        "messages[0].tool_calls[0].function.arguments: lists and objects are nested more than 100 deep",
    ),
    "a call in brackets without end": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 10**5}}]}]},
        "messages[0].tool_calls[0].function.arguments: must be a string with JSON in it",
    ),
    "a schema in a hundred brackets": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": eval("{'a':" * 120 + "1" + "}" * 120)}}},
        "lists and objects are nested more than 100 deep",
    ),
    "a text that is no text": (
        {"messages": [*TALK, {"role": "user", "content": "a\ud800"}]},
        "messages[1].content: the text has half of a surrogate pair",
    ),
    "a message that is a number": ({"messages": [*TALK, 5]}, "messages[1]: Input should be a valid dictionary"),
    "a text that is a number": ({"messages": [*TALK, {"role": "user", "content": 5}]}, "messages[1].content: Input"),
    "a part without a text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content: the text of a part must be a string",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_field_of_a_completion_gets_one_sentence(client, case):
    fields, sentence = BAD[case]
    body = json.dumps({"prompt": "ab", "max_tokens": 2, **fields})
    refused(client.post("/v1/completions", content=body, headers=JSON), 400, sentence)


@pytest.mark.parametrize("case", BAD_CHAT)
def test_a_bad_field_of_a_chat_gets_one_sentence(client, case):
    fields, sentence = BAD_CHAT[case]
    body = json.dumps({"messages": TALK, "max_tokens": 2, **fields})
    refused(client.post("/v1/chat/completions", content=body, headers=JSON), 400, sentence)


def test_other_refusals(engine, client):
    refused(client.post("/v1/completions", content=b'{"prompt"', headers=JSON), 400, "the body is not JSON")
    refused(client.post("/v1/completions", json=[1]), 400, "the body must be a JSON object")
    refused(client.post("/v1/completions", json={"model": "gpt", "prompt": "a"}), 404, "the model 'gpt' is not served")
    answer = client.post("/v1/completions", json={"model": "m" * 10**6, "prompt": "a"})
    refused(answer, 404, f"the model '{'m' * 60}' is not served")
    assert len(answer.content) < 1000
    answer = client.post("/v1/completions", json={"prompt": "a", "x" * 10**6: 1})
    refused(answer, 400, "there is no field 'xxx")
    assert len(answer.content) < 1000
    refused(
        client.post("/v1/completions", content=b"[" * 10**5, headers=JSON), 400, "the body is not JSON in UTF-8, or"
    )
    refused(client.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=JSON), 400, "prompt: the text has half")
    refused(client.post("/v1/completions", json={"prompt": [1] * 400}), 413, "the prompt has 400 tokens, but")
    refused(client.get("/v1/nothing"), 404, "Not Found")
    refused(client.get("/v1/completions"), 405, "Method Not Allowed")
    refused(client.post("/tokenize", json={"model": "gpt", "prompt": "a"}), 404, "the model 'gpt' is not served")
    refused(client.post("/tokenize", json={}), 400, "give one of prompt and messages")
    assert client.get("/docs").status_code == 404
    assert free(engine)


JSON = {"content-type": "application/json"}


def refused(answer, status, sentence):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(sentence) and "\n" not in error["message"]
    assert error["code"] == status and set(error) == {"message", "type", "param", "code"}


def test_a_body_has_a_size_limit_with_and_without_a_length(load):
    def body():
        for _ in range(40):
            yield b" " * (1 << 15)

    with serving(load(), body=1) as client:
        refused(client.post("/v1/completions", content=b" " * (1 << 20) + b"{}"), 413, "the body is larger than 1 MiB")
        refused(client.post("/v1/completions", content=body(), headers=JSON), 413, "the body is larger than 1 MiB")
        assert client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 1}).status_code == 200


def test_messages_name_the_model_as_the_server_does(load, monkeypatch, chat_template):
    with serving(engine := load(), name="served") as client:
        monkeypatch.setattr(type(engine.tokenizer), "is_fast", False)
        asked = {"prompt": "ab", "response_format": {"type": "json_object"}}
        sentence = "a grammar needs a fast tokenizer (tokenizer.json), and served has none"
        refused(client.post("/v1/completions", json=asked), 400, sentence)
        sentence = "the prompt has 400 tokens, but the context of served is 400"
        refused(client.post("/v1/completions", json={"prompt": [1] * 400}), 413, sentence)
        chat_template(engine, None)
        answer = client.post("/v1/chat/completions", json={"messages": TALK})
        assert answer.json()["error"]["message"] == "the tokenizer of served has no chat template"


def test_a_key_and_origins(load):
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serving(load(), api_key="secret", allow_origin=("https://a.example",)) as client:
        refused(client.get("/v1/models"), 401, "the API key is missing or wrong")
        refused(client.get("/metrics", headers={"authorization": "Bearer secre"}), 401, "the API key is missing")
        assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert client.get("/v1/models", auth=("anybody", "secret")).status_code == 200
        refused(client.get("/v1/models", auth=("secret", "")), 401, "the API key is missing or wrong")
        assert client.get("/view").headers["www-authenticate"] == "Basic"
        assert (
            client.get("/health").json() == {"status": "ok", "drafting": "not yet"}
            and client.get("/").status_code == 200
        )
        answer = client.options("/v1/completions", headers=ask)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert (
            "access-control-allow-origin"
            not in client.options("/v1/completions", headers={**ask, "Origin": "https://b.example"}).headers
        )
    with serving(load()) as client:
        assert "access-control-allow-origin" not in client.options("/v1/completions", headers=ask).headers


def test_a_models_name_may_have_slashes(load):
    with serving(load(), name="a/b c") as client:
        api = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
        assert api.models.retrieve("a/b c") == api.models.list().data[0]
        with pytest.raises(openai.NotFoundError, match="the model 'a/b' is not served here, but 'a/b c' is"):
            api.models.retrieve("a/b")
        assert client.get("/").json()["api"] == "/v1" and client.get("/").json()["view"] is None


def test_the_last_message_is_continued(engine, client):
    def text(**more):
        body = {"messages": [*TALK, {"role": "assistant", "content": "ef g"}], "max_tokens": 9, **more}
        return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]

    talk = [*TALK, {"role": "assistant", "content": "ef g"}]
    prompt = engine.encode_chat(talk, continue_final_message=True, add_generation_prompt=False)
    assert engine.tokenizer.decode(prompt).endswith("ef g") and prompt != engine.encode_chat(talk)
    want = engine.generate(prompt, 9).text
    assert text(continue_final_message=True) == text(continue_final_message=True, add_generation_prompt=False) == want
    assert text() == text(add_generation_prompt=True) == engine.generate(engine.encode_chat(talk), 9).text != want
    ended = engine.encode_chat(talk, add_generation_prompt=False)
    assert text(add_generation_prompt=False) == engine.generate(ended, 9).text


def test_a_template_that_changes_the_last_message_continues_none(load, chat_template):
    with serving(engine := load(), name="tiny") as client:
        chat_template(engine, "{% for m in messages %}{{ m.content[:2] }}{% endfor %}")
        asked = {"messages": [{"role": "assistant", "content": "abc\ndef"}], "continue_final_message": True}
        sentence = "the chat template of tiny changes the last message, so it has no continuation"
        refused(client.post("/v1/chat/completions", json=asked), 400, sentence)


def test_tokenize(engine, client):
    ids = engine.encode("ab cd")
    assert client.post("/tokenize", json={"prompt": "ab cd"}).json() == {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": engine.max_context,
    }
    assert client.post("/tokenize", json={"messages": TALK}).json()["tokens"] == engine.encode_chat(TALK)


def test_metrics(load):
    with serving(engine := load()) as client:
        before = metrics(client)
        usage = client.post("/v1/completions", json={"prompt": "ab cd", "max_tokens": 20}).json()["usage"]
        client.post("/v1/completions", json={"prompt": "ab", "temperature": -1})
        after = metrics(client)
    assert before["specker_tokens_total"] == 0 and after["specker_tokens_total"] == 20
    found = usage["completion_tokens_details"]
    assert after["specker_accepted_tokens_total"] == found["accepted_prediction_tokens"]
    assert after["specker_drafted_tokens_total"] == sum(found.values())
    assert after["specker_requests_total", "length"] == 1
    assert after["specker_acceptance_length"] == pytest.approx(20 / after["specker_rounds_total"], abs=0.3)
    assert after["specker_stage_seconds_total", "verify"] > 0 and after["specker_first_token_seconds_count"] == 1
    assert after["specker_running"] == after["specker_waiting"] == after["specker_kv_pages_used", "target"] == 0
    assert after["specker_kv_pages", "target"] == engine.cache.spare
    assert "specker_lookup_bytes" not in after


def test_health_and_metrics_say_why_nothing_is_drafted(load):
    def drafting(client):
        return client.get("/health").json()["drafting"]

    asked = {"prompt": [7, 8], "max_tokens": 2}
    target = load.args[0]
    with serving(specker.load(target, strategy="lookup", lookup_share="off", device="cpu")) as client:
        assert drafting(client) == "not yet"
        client.post("/v1/completions", json=asked)
        assert drafting(client) == "no, because there was nothing to copy"
        undrafted = {key[1]: value for key, value in metrics(client).items() if "undrafted" in key[0]}
        assert undrafted == {"there was nothing to copy": 2}
        client.post("/v1/completions", json=asked | {"speculation": "off"})
        assert drafting(client) == "no, because no round asked for a draft"
    with serving(load()) as client:
        client.post("/v1/completions", json=asked)
        assert drafting(client) == "yes"
    with serving(specker.load(target, strategy="ar", device="cpu")) as client:
        assert drafting(client) == "no, because ar drafts nothing"


def test_the_memory_of_texts_to_copy_from_is_a_metric(load):
    with serving(load(strategy="draft+lookup")) as client:
        sizes = []
        for text in ("ab cd", "cd ab", "ba dc"):
            client.post("/v1/completions", json={"prompt": text, "max_tokens": 20, "cache_salt": "a"})
            sizes.append(metrics(client)["specker_lookup_bytes"])
    assert 0 < sizes[0] < sizes[1] < sizes[2], "ended texts stay"


def test_a_call_is_logged_without_its_text(client, caplog):
    with caplog.at_level(logging.INFO, "specker.serve"):
        body = client.post("/v1/completions", json={"prompt": "ab cd", "max_tokens": 9, "n": 2, "seed": 1}).json()
        streamed(client, "/v1/completions", prompt="ab cd", max_tokens=9)
        until = time.monotonic() + 20  # a line may come after its answer
        while len(caplog.messages) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    whole, stream = caplog.messages
    prompt = body["usage"]["prompt_tokens"]
    assert re.fullmatch(rf"{body['id']}: {prompt} \+ 18 tokens, [\d.]+ s, [\d.]+ tokens a round, length length", whole)
    assert re.fullmatch(rf"cmpl-\w+: {prompt} \+ 9 tokens, [\d.]+ s, [\d.]+ tokens a round, length", stream)


def test_the_live_page(load):
    with serving(engine := load(batch_size=1), view=True) as client:
        text = client.post("/v1/completions", json={"prompt": "ab cd", "max_tokens": 12}).json()["choices"][0]["text"]
        page = client.get(client.get("/").json()["view"])
        assert (
            page.headers["content-type"].startswith("text/html")
            and "default-src" in page.headers["content-security-policy"]
        )
        data = client.get("/view/data").json()
        assert data["queue"] == {"running": 0, "waiting": 0}
        builders = [each.name for each in threading.enumerate() if each.name.startswith(("asyncio_", "specker-view"))]
        assert builders == ["specker-view_0"]
        [turn] = [turn for trace in data["traces"] for turn in trace["turns"]]
        assert turn["prompt"] == "ab cd" and turn["finished"] == "length"
        assert "".join(piece for row in turn["rounds"]["pieces"] for piece in row) + turn["tail"] == text
    assert free(engine)
    with serving(load()) as client:
        assert client.get("/view").status_code == 404


def metrics(client):
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {
        (s.name, *s.labels.values()) if s.labels else s.name: s.value
        for family in families
        for s in family.samples
        if "le" not in s.labels
    }
