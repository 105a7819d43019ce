"""Fields of other servers' APIs that a model may know: they have their effect, or mean nothing."""

import pytest
from make_checkpoint import add_tokens, make, tokens_of
from make_tokenizer import tokenizer
from serving import serving, streamed
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

import specker
from specker.serve.api import Completion
from specker.serve.infill import Infill

TALK = [{"role": "user", "content": "ab cd"}]
FIM = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}<tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }} {{ thinking }} {{ thinking_budget }}{% endif %}"
    "{{ verbosity }}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("models"), "qwen2", layers=1, max_context=400, tokenizer=True)
    add_tokens(target, *FIM, "<|fim_pad|>")
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return specker.load(target, strategy="lookup", dtype="float64", device="cpu", batch_size=2)


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine, name="tiny") as client:
        yield client


def chat_text(engine, **template):
    return engine.generate(engine.encode_chat(TALK, **template), 9).text


def test_a_suffix_asks_for_the_middle(engine, client):
    before, behind, middle = FIM
    prompts = "ab", " cd"
    asked = {"prompt": prompts, "suffix": "ef", "max_tokens": 12}
    want = [engine.generate(f"{before}{prompt}{behind}ef{middle}", 12).text for prompt in prompts]
    assert want[0] != engine.generate("ab", 12).text
    assert [c["text"] for c in client.post("/v1/completions", json=asked).json()["choices"]] == want
    got = streamed(client, "/v1/completions", **asked | {"prompt": "ab", "echo": True})
    assert "".join(choice["text"] for chunk in got for choice in chunk["choices"]) == "ab" + want[0]
    plain = client.post("/v1/completions", json={"prompt": "ab", "suffix": "", "max_tokens": 12}).json()
    assert plain["choices"][0]["text"] == engine.generate("ab", 12).text


@pytest.mark.parametrize("name", [*FIM, "<|fim_pad|>"])
def test_a_middle_ends_where_the_model_says_so(engine, client, name):
    [token] = engine.encode(name)
    asked = {"prompt": "ab", "suffix": "ef", "max_tokens": 5, "logit_bias": {str(token): 100}, "stop": "never"}
    [choice] = client.post("/v1/completions", json=asked).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("marks", [FIM, ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), None])
def test_models_are_known_by_their_tokens(marks, special):
    core = tokenizer("bytes")
    core.add_tokens([AddedToken(mark, special=special) for mark in marks or FIM[:2]])
    tokens = tokens_of(PreTrainedTokenizerFast(tokenizer_object=core))
    found = Infill.of(tokens)
    if marks is None:
        assert found is None
        return
    asked = found.prompted(Completion(prompt=["a", "b"], suffix="c", stop="x", stop_token_ids=[5]))
    assert asked.prompts == ["{}{}{}c{}".format(marks[0], prompt, *marks[1:]) for prompt in ("a", "b")]
    ids = [tokens.vocabulary[mark] for mark in marks]
    assert asked.stop == (["x"] if special else ["x", *marks])
    assert asked.stop_token_ids == ([5, *ids] if special else [5])


@pytest.mark.parametrize("verbosity", ["low", "medium", None])
def test_verbosity_is_a_variable_of_the_template(engine, client, chat_template, verbosity):
    own = {} if verbosity is None else {"verbosity": verbosity}
    asked = {"messages": TALK, "max_tokens": 9, "modalities": ["text"], **own}
    body = client.post("/v1/chat/completions", json=asked).json()
    assert body["choices"][0]["message"]["content"] == chat_text(engine, **own)
    response = client.post("/v1/responses", json={"input": "ab cd", "max_output_tokens": 9, "text": own}).json()
    assert response["output"][0]["content"][0]["text"] == chat_text(engine, **own)
    chat_template(engine, TEMPLATE.replace("{{ verbosity }}", ""))
    answer = client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == (400 if verbosity == "low" else 200)
    if verbosity != "low":
        assert answer.json()["choices"][0]["message"]["content"] == chat_text(engine)


THINKING = {
    "on": ({"type": "enabled"}, {"enable_thinking": True, "thinking": True}),
    "a budget": (
        {"type": "enabled", "budget_tokens": 2000},
        {"enable_thinking": True, "thinking": True, "thinking_budget": 2000},
    ),
    "off": ({"type": "disabled"}, {"enable_thinking": False, "thinking": False, "thinking_budget": 0}),
    "as the model likes": ({"type": "adaptive", "display": "summarized"}, {}),
}


@pytest.mark.parametrize("case", THINKING)
def test_thinking_is_what_the_template_reads(engine, client, chat_template, case):
    given, variables = THINKING[case]
    asked = {"messages": TALK, "max_tokens": 9, "temperature": 0, "thinking": given}
    body = client.post("/v1/messages", json=asked).json()
    assert body["content"][0]["text"] == chat_text(engine, **variables)
    assert (chat_text(engine, **variables) == chat_text(engine)) == (not variables)
    chat_template(engine, "{% for m in messages %}{{ m.content }}{% endfor %}")
    body = client.post("/v1/messages", json=asked).json()
    assert body["content"][0]["text"] == chat_text(engine)


COUNTED = {
    "a text": {},
    "a system message": {"system": "be"},
    "tools": {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "none"}},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "a message to continue": {"messages": [*TALK, {"role": "assistant", "content": "ef"}]},
}


@pytest.mark.parametrize("case", COUNTED)
def test_the_tokens_of_messages_are_counted(client, case):
    asked = {"model": "tiny", "messages": TALK, **COUNTED[case]}
    count = client.post("/v1/messages/count_tokens", json=asked)
    assert count.status_code == 200 and {*count.json()} == {"input_tokens"}
    usage = client.post("/v1/messages", json={**asked, "max_tokens": 1}).json()["usage"]
    assert count.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_what_cannot_be_counted_gets_one_sentence(client):
    def refused(status, sentence, **asked):
        answer = client.post("/v1/messages/count_tokens", json=asked)
        assert answer.status_code == status and answer.json()["type"] == "error"
        assert answer.json()["error"]["message"].startswith(sentence)

    refused(404, "the model 'other' is not served here", model="other", messages=TALK)
    refused(400, "messages: Field required", model="tiny")
    refused(400, "there is no field 'n'", messages=TALK, n=2)
    refused(413, "the prompt has 9999", messages=[{"role": "user", "content": "a" * 99_980}])
