"""Answers in Harmony through the server: channels, calls, grammars and conversations."""

import json

import pytest
from make_harmony import IDS, harmony_tokenizer, make_harmony
from pairs import perturbed
from serving import free, serving, streamed

import specker
from specker import grammar
from specker.answers import channels
from specker.answers.harmony import last_message, of
from specker.answers.tool_formats import spelled
from specker.runtime.round.grammars import Grammars

TALK = [{"role": "user", "content": "ab"}]
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": PLACE}},
    {"type": "function", "function": {"name": "stop", "description": "Stop."}},
]
FUNCTIONS = {"move": PLACE, "stop": {"type": "object", "properties": {}, "additionalProperties": False}}
BEGUN = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>because<|end|>{BEGUN}"
TEXT = f"<|channel|>commentary<|message|>Look.<|end|>{BEGUN}"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.move <|constrain|>json<|message|>{"x": 1}'
BEFORE = " to=functions.stop<|channel|>commentary json<|message|>{}"
KNOWN = of(IDS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make_harmony(folder / "target")
    draft = perturbed(target, folder / "draft", amount=0.05)
    return specker.load(target, draft, strategy="draft", dtype="float64", device="cpu", batch_size=2, draft_tokens=3)


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine, name="tiny") as client:
        yield client
        assert free(engine)


@pytest.fixture
def say(client, answer_with):
    """Makes the model say a text, by a grammar that has no other, and returns the choice and the deltas."""

    def said(text, **more):
        answer_with(form=grammar.lark("start: " + spelled(text, IDS)))
        body = {"messages": TALK, **more}
        whole = client.post("/v1/chat/completions", json=body).json()
        chunks = streamed(client, "/v1/chat/completions", **body)
        return whole, [choice["delta"] for chunk in chunks for choice in chunk["choices"]]

    return said


def joined(deltas, name):
    return "".join(delta.get(name) or "" for delta in deltas)


def test_an_answer_without_tools(engine, say):
    whole, deltas = say(f"{THOUGHT}{FINAL}yes <b>")
    [choice] = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yes <b>", "reasoning_content": "because"}
    assert choice["finish_reason"] == "stop"
    assert joined(deltas, "reasoning_content") == "because" and joined(deltas, "content") == "yes <b>"
    counted = len(engine.tokenizer(THOUGHT.removesuffix(BEGUN))["input_ids"])
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == counted
    whole, deltas = say(THOUGHT.removesuffix(BEGUN), max_tokens=16)
    [choice] = whole["choices"]
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "length"
    assert choice["message"]["reasoning_content"] == joined(deltas, "reasoning_content") == "because"[:6]


def test_calls_of_an_answer(client, say):
    whole, deltas = say(f"{THOUGHT}{TEXT}{CALL}<|end|>{BEGUN}{BEFORE}", tools=TOOLS)
    [choice] = whole["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Look.", "because")
    assert choice["finish_reason"] == "tool_calls"
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [{"name": "move", "arguments": '{"x": 1}'}, {"name": "stop", "arguments": "{}"}]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["function"] for call in calls] == functions and [call["index"] for call in calls] == [0, 1]
    assert joined(deltas, "content") == "Look." and len({call["id"] for call in calls}) == 2
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = client.post("/v1/responses", json={"input": "ab", "tools": tools}).json()
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert body["output"][0]["content"] == [{"type": "reasoning_text", "text": "because"}]
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > len("because")
    tools = [{"name": "move", "input_schema": PLACE}]
    body = client.post("/v1/messages", json={"messages": TALK, "max_tokens": 300, "tools": tools}).json()
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use", "text"]
    assert body["content"][3]["text"].strip() == "{}"  # a call of a function that this request has not
    assert body["stop_reason"] == "tool_use"


def follows(text, form, ends=True):
    """Whether a text, after the prompt, matches a grammar or may be the beginning of one that does."""
    from types import SimpleNamespace

    tokenizer = harmony_tokenizer()
    config = SimpleNamespace(eos_ids=(IDS["<|return|>"], IDS["<|call|>"]), vocab_size=320)
    guide = Grammars(SimpleNamespace(tokenizer=tokenizer, config=config)).guide(form)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = guide.follow(ids) == len(ids) and guide.ended != "grammar"
    return whole and (not ends or guide.ended == "stop" or guide._matcher.is_accepting())


def test_calls_follow_any_number_of_thoughts():
    auto, required = (channels.calls_of(KNOWN, BEGUN, FUNCTIONS, must) for must in (False, True))
    for form in (auto, required):
        for text in (CALL, f"{THOUGHT}{BEFORE}", f"{THOUGHT}{TEXT}{THOUGHT}{CALL}"):
            assert follows(text, form), text
        bare = CALL.replace(" <|constrain|>json", "")
        assert follows(bare, form) and follows(bare.replace("commentary", "analysis"), form)
        for text in ("a", CALL.replace("move", "fly"), CALL.replace("1", '"1"'), f"{CALL}<|end|>", f"{FINAL}a<|end|>"):
            assert not follows(text, form, ends=False), text
        assert not follows(THOUGHT, form)
    assert follows(f"{THOUGHT}{FINAL}a\nb", auto) and not follows(f"{THOUGHT}{FINAL}", required, ends=False)
    for begun, before in (("", BEGUN), (f"{BEGUN}{FINAL}so", f" on<|end|>{BEGUN}")):
        assert follows(before + CALL, channels.calls_of(KNOWN, begun, FUNCTIONS, True))
    assert follows("on", channels.calls_of(KNOWN, f"{BEGUN}{FINAL}so", FUNCTIONS, False))


def test_a_form_holds_for_the_final_message():
    form = grammar.json_schema({"enum": ["yes"]})
    whole = channels.schema_of(KNOWN, BEGUN, form)
    for text in (
        f'{FINAL}"yes"',
        f'{THOUGHT}{THOUGHT}{FINAL}"yes"',
        FINAL.replace("<|m", " json<|m") + '"yes"',
    ):
        assert follows(text, whole), text
    for text in ('"yes"', f"{FINAL}no", TEXT, CALL):
        assert not follows(text, whole, ends=False), text
    assert channels.schema_of(KNOWN, f"{BEGUN}{FINAL}", form) == form
    thinking = channels.schema_of(KNOWN, f"{BEGUN}<|channel|>analysis<|message|>be", form)
    assert follows(f'cause<|end|>{BEGUN}{FINAL}"yes"', thinking) and not follows("cause", thinking)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_forms_and_calls_are_those_of_plain_decoding(engine, client, temperature):
    """The bytes of a random model: reasoning ends by the bias, with a probability that lets it be short."""
    bias = {str(IDS["<|end|>"]): 100, str(IDS["<|message|>"]): 50}
    how = {"temperature": temperature, "seed": 4, "logit_bias": bias, "max_tokens": 300}
    form = {"type": "json_schema", "json_schema": {"schema": PLACE}}
    tools = {"tools": TOOLS, "tool_choice": "required"}
    for asked in ({"response_format": form}, tools):
        choice = client.post("/v1/chat/completions", json={"messages": TALK, **how, **asked}).json()["choices"][0]
        message = choice["message"]
        prompt = [*engine.encode_chat(TALK, **({"tools": described(TOOLS)} if asked is tools else {}))]
        text = last_message(engine.tokenizer.decode(prompt))
        assert text == BEGUN
        if asked is tools:
            [call] = message["tool_calls"]
            assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] in ("move", "stop")
            lark, arguments = (
                channels.calls_of(KNOWN, BEGUN, FUNCTIONS, True),
                json.loads(call["function"]["arguments"]),
            )
            assert call["function"]["name"] == "stop" or 0 <= arguments["x"] <= 99
        else:
            lark = channels.schema_of(KNOWN, BEGUN, grammar.json_schema(PLACE))
            assert choice["finish_reason"] == "stop" and 0 <= json.loads(message["content"])["x"] <= 99
        how_plain = {"temperature": temperature, "seed": 4, "grammar": lark}
        plain = engine.generate_ar(prompt, 300, logit_bias={int(n): b for n, b in bias.items()}, **how_plain)
        said = message["content"] if asked is not tools else call["function"]["arguments"]
        assert plain.text.endswith(said) and plain.finished == "stop"


def described(tools):
    """As the server passes them on: the template needs a description."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def test_a_conversation_with_calls_reaches_the_template(engine, client):
    call = {"id": "1", "type": "function", "function": {"name": "move", "arguments": '{"x": 1}'}}
    messages = [
        *TALK,
        {"role": "assistant", "content": "Look.", "reasoning_content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    talk = (
        "<|start|>system<|message|>Reasoning: low<|end|><|start|>user<|message|>ab<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>so\n\nLook.<|end|>"
        '<|start|>assistant to=functions.move<|channel|>commentary json<|message|>{"x": 1}<|call|>'
        "<|start|>functions to=assistant<|channel|>commentary<|message|>done<|end|><|start|>assistant"
    )
    asked = {"messages": messages, "reasoning_effort": "low", "max_tokens": 9, "logprobs": True}
    body = client.post("/v1/chat/completions", json=asked).json()
    want = engine.generate(engine.tokenizer(talk)["input_ids"], 9)
    assert body["usage"]["prompt_tokens"] == len(engine.tokenizer(talk)["input_ids"])
    got = [one["token"] for one in body["choices"][0]["logprobs"]["content"]]
    assert got == [engine.tokenizer.decode([token]) for token in want.tokens]


def test_a_message_is_continued_in_its_channel(say):
    talk = [*TALK, {"role": "assistant", "content": "be"}]
    whole, _ = say("cause", messages=talk, continue_final_message=True)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "cause"}
    whole, _ = say(f"{BEGUN}{FINAL}so", add_generation_prompt=False)
    assert whole["choices"][0]["message"]["content"] == "so"
