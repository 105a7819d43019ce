"""The forms of tool calls: what their grammars allow, and the calls read from such a text."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from make_checkpoint import add_tokens, byte_tokenizer, make
from serving import serving, streamed
from transformers import AddedToken

import specker
from specker import grammar
from specker.answers import reasoning
from specker.answers.calls import Calls
from specker.answers.parts import Part
from specker.answers.tool_formats import TAGS, format_of
from specker.runtime.round.grammars import Grammars
from specker.serve.api import Chat
from specker.serve.tools import functions_of, grammar_of

TALK = [{"role": "user", "content": "ab"}]
MOVE = {
    "type": "object",
    "properties": {"to": {"type": "string"}, "x": {"type": "integer"}, "way": {"enum": ["on foot", "by car"]}},
    "required": ["to", "x"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": MOVE}},
    {"type": "function", "function": {"name": "stop"}},
]
TO = 'a "b"\n</c> <tool_call>'
ARGUMENTS = json.dumps({"to": TO, "x": 7, "way": "by car"})
HERMES = "<tool_call>\n{\"name\": \"move\", \"arguments\": %s}\n</tool_call>" % ARGUMENTS  # fmt: skip  # noqa: UP031
XML = (
    f"<tool_call>\n<function=move>\n<parameter=to>\n{TO}\n</parameter>\n<parameter=x>\n7\n</parameter>\n"
    "<parameter=way>\nby car\n</parameter>\n</function>\n</tool_call>"
)
LLAMA = f'{{"name": "move", "parameters": {ARGUMENTS}}}'
LIST = f'[TOOL_CALLS] [{{"name": "move", "arguments": {ARGUMENTS}}}, {{"name": "stop", "arguments": {{}}}}]'
NAMED = f"[TOOL_CALLS]move[ARGS]{ARGUMENTS}[TOOL_CALLS]stop[ARGS]{{}}"
FORMS = {  # template, text before, calls, a wrong beginning
    "hermes": (
        "<tool_call>",
        "Well.\n",
        f'{HERMES}\n<tool_call>\n{{"name": "stop", "arguments": {{}}}}\n</tool_call>',
        '<tool_call>\n{"name": "fly"',
    ),
    "qwen-coder": (
        "<tool_call><function=",
        "Well.\n",
        f"{XML}\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        "<tool_call>\n<function=move>\n<parameter=x>\n",
    ),
    "llama": (
        '{"name": "f", "parameters": }',
        "",
        f'{LLAMA}; {{"name": "stop", "parameters": {{}}}}',
        '{"name": "fly"',
    ),
    "llama-python-tag": (
        '{"name": "f", "parameters": }',
        "",
        f'<|python_tag|>{LLAMA}; {{"name": "stop", "parameters": {{}}}}',
        "<|python_tag|>print",
    ),
    "mistral": ("[TOOL_CALLS]", "Well.\n", LIST, '[TOOL_CALLS] [{"name": "fly"'),
    "mistral-named": ("[TOOL_CALLS][ARGS]", "Well.\n", NAMED, "[TOOL_CALLS]fly"),
}
WAYS = {"special": True, "tokens": False, "text": None}  # what the tags are in the tokenizer


def tokenizer(special):
    made = byte_tokenizer()
    if special is not None:
        made.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS], special)
    return made


@pytest.fixture(scope="module", params=WAYS)
def model(request):
    """A tokenizer, its special tags, and what follows texts through grammars."""
    made = tokenizer(WAYS[request.param])
    config = SimpleNamespace(eos_ids=(256,), vocab_size=320)
    ids = {tag: made.convert_tokens_to_ids(tag) for tag in TAGS} if WAYS[request.param] else {}
    return made, ids, Grammars(SimpleNamespace(tokenizer=made, config=config))


def follows(model, form, text, ends=True):
    """Whether a text matches a grammar, or may be the beginning of one that does, in the tokens of the tokenizer."""
    made, special, grammars = model
    text = text.replace("</c> <tool_call>", "</c>") if special else text  # no string has a special token
    ids = made(text, add_special_tokens=False)["input_ids"]
    guide = grammars.guide(form)
    return guide.follow(ids) == len(ids) and guide.ended != "grammar" and (not ends or guide._matcher.is_accepting())


@pytest.mark.parametrize("form", FORMS)
def test_a_grammar_allows_calls_of_its_form_only(model, form):
    template, before, calls, wrong = FORMS[form]
    if form == "llama-python-tag" and not model[1]:
        pytest.skip("without the special token the tag is a text")
    auto = grammar_of(Chat(messages=TALK, tools=TOOLS), template, model[1])
    required = grammar_of(Chat(messages=TALK, tools=TOOLS, tool_choice="required"), template, model[1])
    assert follows(model, auto, before + calls) and follows(model, auto, 'a < b, [a] and {"names": 1}')
    assert follows(model, auto, "") and not follows(model, auto, wrong, ends=False)
    assert not follows(model, required, "a") and not follows(model, required, wrong, ends=False)
    one = calls if form in ("llama", "llama-python-tag", "mistral") else calls[: calls.rindex(calls[:5])].strip()
    assert follows(model, required, one) and not follows(model, required, "")


@pytest.mark.parametrize("form", FORMS)
def test_one_call_may_be_the_last(model, form):
    template, before, calls, _ = FORMS[form]
    if form == "llama-python-tag" and not model[1]:
        pytest.skip("without the special token the tag is a text")
    one = {"mistral": LIST[: LIST.index(", {")] + "]", "mistral-named": NAMED[: NAMED.rindex("[TOOL")]}
    one |= dict.fromkeys(("llama", "llama-python-tag"), calls.partition("; ")[0])
    first = one.get(form) or calls[: calls.rindex("\n<tool_call>")]
    for choice in ("auto", "required"):
        asked = Chat(messages=TALK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        text = grammar_of(asked, template, model[1])
        begin = before if choice == "auto" else ""
        assert follows(model, text, begin + first) and not follows(model, text, begin + calls)
        assert (choice == "required") is not follows(model, text, "a < b, [a]")


def test_arguments_that_are_not_required_may_be_missing(model):
    form = grammar_of(Chat(messages=TALK, tools=TOOLS), FORMS["qwen-coder"][0], model[1])
    begin, end = "<tool_call>\n<function=move>\n<parameter=to>\n\n</parameter>\n", "</function>\n</tool_call>"
    assert follows(model, form, f"{begin}<parameter=x>\n7\n</parameter>\n{end}")
    assert not follows(model, form, f"{begin}{end}", ends=False)


def tool(parameters):
    return {"type": "function", "function": {"name": "move", "parameters": parameters}}


def test_a_schema_that_is_one_of_its_own_definitions(model):
    asked = Chat(messages=TALK, tools=[tool({"$defs": {"Move": MOVE}, "$ref": "#/$defs/Move"})])
    form = grammar_of(asked, FORMS["qwen-coder"][0], model[1])
    assert follows(model, form, XML)
    assert not follows(model, form, "<tool_call>\n<function=move>\n</function>", ends=False)
    [call] = Calls(format_of(FORMS["qwen-coder"][0]), functions_of(asked)).add(XML)
    assert (call.kind, call.text) == ("call", ARGUMENTS)


SHARED = {
    "$defs": {
        "a/b": {"enum": [1, 2]},
        "pair": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}, "minItems": 2, "maxItems": 2},
        "tree": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/pair"}]}},
        "other": {"type": "object"},
    }
}
REFERRING = {  # the schema of an argument: a value of it, one that is none, and the definitions that it needs
    "one": ({"$ref": "#/$defs/a~1b"}, "2", "3", ["a/b"]),
    "one in another": ({"type": "array", "items": {"$ref": "#/$defs/pair"}}, "[[1,2]]", "[1", ["a/b", "pair"]),
    "itself": ({"$ref": "#/$defs/tree"}, "[[[1,2]],[]]", "[3", ["a/b", "pair", "tree"]),
    "part of one": ({"$ref": "#/%24defs/pair/items"}, "1", "3", ["a/b", "pair"]),
    "none": ({"type": "integer"}, "5", "a", []),
    "the whole": ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "null", "a", ["a/b", "other", "pair", "tree"]),
}


@pytest.mark.parametrize(("schema", "value", "wrong", "needs"), REFERRING.values(), ids=REFERRING)
def test_an_argument_takes_the_definitions_that_it_needs(model, schema, value, wrong, needs):
    asked = Chat(messages=TALK, tools=[tool({"properties": {"to": schema}, "required": ["to"], **SHARED})])
    form = grammar_of(asked, FORMS["qwen-coder"][0], model[1])
    [embedded] = re.findall(r"%json (.*) \"\\n</parameter>", form)
    assert sorted(json.loads(embedded).get("$defs", {})) == needs
    begin = "<tool_call>\n<function=move>\n<parameter=to>\n"
    assert follows(model, form, f"{begin}{value}\n</parameter>\n</function>\n</tool_call>")
    assert not follows(model, form, begin + wrong, ends=False)


@pytest.mark.parametrize("form", FORMS)
def test_the_grammar_of_many_tools_is_not_much_longer_than_they_are(form):
    shared = {f"d{n}": {"type": "object", "properties": {"x": {"type": "string"}}} for n in range(60)}
    one = {"properties": {f"a{n}": {"$ref": f"#/$defs/d{n}"} for n in range(60)}, "$defs": shared}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": one}} for n in range(128)]
    asked = Chat(messages=TALK, tools=tools)
    assert len(grammar_of(asked, FORMS[form][0], {"<|python_tag|>": 1})) < 3 * len(json.dumps(tools))


def test_tools_whose_definitions_all_need_one_another_are_refused():
    """Before gigabytes are written: each argument's schema has all of them."""
    names = [f"d{n}" for n in range(300)]
    every = [{"$ref": f"#/$defs/{name}"} for name in names]
    one = {"properties": dict(zip(names, every, strict=True)), "$defs": {name: {"anyOf": every} for name in names}}
    asked = Chat(messages=TALK, tools=[tool(one)])
    with pytest.raises(ValueError, match=r"the tools are too complex: their grammar has more than 16,777,216 char"):
        grammar_of(asked, FORMS["qwen-coder"][0], {})


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"properties": []}, "properties must be an object of schemas"),
        ({"properties": {"x": None}}, "properties must be an object of schemas"),
        ({"properties": {"x": {}}, "required": None}, "required must be a list"),
        ({"properties": {"x": {"type": "string", "enum": "ab"}}}, "enum of 'x' must be a list"),
        ({"$ref": "#/$defs/Move"}, "no JSON schema of an object"),
    ],
)
def test_parameters_that_are_no_schema_get_one_sentence(parameters, sentence):
    with pytest.raises(ValueError, match=f"the parameters of move.* {sentence}"):
        grammar_of(Chat(messages=TALK, tools=[tool(parameters)]), FORMS["qwen-coder"][0], {})


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_from_a_text_in_pieces(form, size):
    template, before, calls, _ = FORMS[form]
    asked = Chat(messages=TALK, tools=TOOLS)
    reader, text, segments = Calls(format_of(template), functions_of(asked)), before + calls, []
    for n in range(0, len(text), size):
        segments += reader.add(text[n : n + size])
    found = [segment.call for segment in segments if segment.call is not None]
    segments += reader.add("\n" if before else "", last=True)
    assert "".join(segment.text for segment in segments[: -len(found)]) == before.rstrip()
    functions = [call["function"] for call in found]
    assert [(f["name"], json.loads(f["arguments"])) for f in functions] == [
        ("move", json.loads(ARGUMENTS)),
        ("stop", {}),
    ]
    assert len({call["id"] for call in found}) == 2 and [call["index"] for call in found] == [0, 1]
    assert not form.startswith("mistral") or all(len(call["id"]) == 9 and call["id"].isalnum() for call in found)


@pytest.mark.parametrize("form", FORMS)
def test_a_number_that_is_too_large_stays_a_number(form):
    template, _, calls, _ = FORMS[form]
    functions = functions_of(Chat(messages=TALK, tools=TOOLS))
    found = Calls(format_of(template), functions).add(calls.replace("7", "-1e999"))
    assert json.loads(found[0].text, parse_constant=pytest.fail)["x"] == -sys.float_info.max


@pytest.mark.parametrize("form", FORMS)
def test_half_a_call_stays_text(form):
    template, before, calls, _ = FORMS[form]
    text = before + calls[: len(calls) // 3]
    reader = Calls(format_of(template), functions_of(Chat(messages=TALK, tools=TOOLS)))
    got = [segment for character in text for segment in reader.add(character)] + reader.add("", last=True)
    assert "".join(segment.text for segment in got) == text and not reader.found


def test_an_object_that_is_no_call_is_a_text():
    reader = Calls(format_of(FORMS["llama"][0]), functions_of(Chat(messages=TALK, tools=TOOLS)))
    assert reader.add('{"name') == [] and reader.add('s": 1}') == [Part("text", '{"names": 1}')]
    assert reader.add(LLAMA) == [Part("text", LLAMA)]  # calls come first


def test_a_template_that_knows_no_calls_is_refused():
    with pytest.raises(ValueError, match=r"tools need a chat template with <tool_call>, \[TOOL_CALLS\] or"):
        grammar_of(Chat(messages=TALK, tools=TOOLS), "{{ messages }}", {})
    assert grammar_of(Chat(messages=TALK), "", {}) is None


def test_a_form_follows_reasoning_that_the_prompt_has_begun(model):
    schema = grammar.json_schema({"type": "object", "properties": {"x": {"enum": [1]}}, "required": ["x"]})
    called = grammar_of(Chat(messages=TALK, tools=TOOLS, tool_choice="required"), "<tool_call>", model[1])
    for form, text in ((schema, '{"x":1}'), (called, HERMES)):
        whole = reasoning.preceded(form, model[1])
        assert follows(model, whole, f"a {{<b> </thin\n</think>\n\n{text}")
        assert not follows(model, whole, text) and not follows(model, whole, "a</think>b", ends=False)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("models"), "mistral", layers=1, max_context=400, tokenizer=True)
    add_tokens(target, "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", special=True)
    (target / "chat_template.jinja").write_text("{# [TOOL_CALLS][ARGS] </think> #}{{ messages[0].content }}")
    return specker.load(target, strategy="lookup", dtype="float64", device="cpu", batch_size=2)


def test_special_tokens_mark_calls_and_reasoning(engine, answer_with, chat_template):
    ids = {
        tag: engine.tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>", "[TOOL_CALLS]", "[ARGS]")
    }
    said = [f"<[{ids.get(part)}]>" if part in ids else json.dumps(part) for part in SAID]
    body = {"messages": TALK, "tools": TOOLS}
    with serving(engine, name="tiny") as client:
        answer_with(form=grammar.lark("start: " + " ".join(said)))
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
        deltas = [c["delta"] for chunk in streamed(client, "/v1/chat/completions", **body) for c in chunk["choices"]]
        plain = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 40}).json()["choices"][0]["text"]
        chat_template(engine, "{{ messages[0].content }}")
        chat = client.post("/v1/chat/completions", json={"messages": TALK}).json()["choices"][0]["message"]["content"]
    message = whole["message"]
    assert (message["reasoning_content"], message["content"], whole["finish_reason"]) == ("so", "ab", "tool_calls")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["stop", "stop"]
    assert "".join(d.get("content", "") for d in deltas) == "ab"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "so"
    assert len([call for d in deltas for call in d.get("tool_calls", ())]) == 2
    assert plain == chat == "soabstop{}stop{}"


SAID = ["<think>", "so", "</think>", "ab", *("[TOOL_CALLS]", "stop", "[ARGS]", "{}") * 2]


def test_a_required_call_of_special_tokens(engine):
    with serving(engine, name="tiny") as client:
        body = {"messages": TALK, "tools": TOOLS[1:], "tool_choice": "required", "max_tokens": 300, "seed": 1}
        choice = client.post("/v1/chat/completions", json=body | {"temperature": 0.5}).json()["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "stop", "arguments": "{}"} and choice["finish_reason"] == "tool_calls"
