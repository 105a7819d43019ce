"""Tokenizers and chat templates that specker reads itself, against transformers."""

import copy
import ctypes
import json
import platform
import resource
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import transformers
from jinja2 import TemplateError
from since import since

import specker
from specker.checkpoints import template
from specker.checkpoints.tokenizer import CLASSES, Tokenizer, Tokens
from specker.runtime.strategies.vocabtrim import order

TEXTS = (
    *(
        "",
        "hello",
        " a  b\n\n\tc",
        "x =  12345 + 6\r\n",
        "naïve café A\u030a",
        "日本語 中文",
        "🙂👩\u200d👩\u200d👧",
        "I'LL it's\x00",
    ),
    *("<|endoftext|> <|pad|>user\nhi<|mask|>", "def f(x):\n        return x  # ▁a", "<bos><unk>"),
)
MODELS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}
NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": None, "pad_token": "<|pad|>"}
BASE = json.loads((specker.zoo.path("code-target") / "tokenizer.json").read_text(encoding="utf-8"))
WHOLE = "PreTrainedTokenizerFast"


def written(folder: Path, model: str, kind: str | None, parts: str | None = None, **settings: Any) -> Tokens:
    """A folder with the bundled vocabulary, and the parts that a class of transformers has instead of the file's
    own."""
    file = copy.deepcopy(BASE)
    if parts is not None:
        of_gemma = ("<unk>", "<bos>", "<eos>", "<pad>", "<mask>") if parts == "GemmaTokenizer" else ()
        for token in of_gemma:
            file["added_tokens"].append(file["added_tokens"][0] | {"id": len(file["model"]["vocab"]), "content": token})
            file["model"]["vocab"][token] = len(file["model"]["vocab"])
        merges = [tuple(merge) for merge in file["model"]["merges"]]
        its = getattr(transformers, parts)(vocab=dict(file["model"]["vocab"]), merges=merges)
        other = json.loads(its.backend_tokenizer.to_str())
        file |= {name: other[name] for name in ("normalizer", "pre_tokenizer", "decoder")}
        file["model"] |= {k: v for k, v in other["model"].items() if k not in ("vocab", "merges")}
    folder.mkdir(exist_ok=True)
    settings |= {} if kind is None else {"tokenizer_class": kind}
    for name, content in (
        ("config.json", {"model_type": model, "architectures": [MODELS[model]]}),
        ("tokenizer_config.json", settings),
        ("tokenizer.json", file),
    ):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return Tokens(folder, MODELS[model])


LLAMA = since("transformers", "5.23", "replaces parts of the file by Llama's")


def check(tokens: Tokens) -> None:
    """The folder is read without transformers, and as AutoTokenizer reads it."""
    ours, theirs = tokens.tokenizer, transformers.AutoTokenizer.from_pretrained(tokens.folder, local_files_only=True)
    assert type(ours) is Tokenizer
    for text in TEXTS:
        for special in (True, False):
            ids = ours(text, add_special_tokens=special)["input_ids"]
            assert ids == list(theirs(text, add_special_tokens=special)["input_ids"])
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    for name in ("special_tokens_map", "all_special_ids", "chat_template", "eos_token_id", "bos_token"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert list(map(repr, ours.added_tokens_decoder.items())) == list(map(repr, theirs.added_tokens_decoder.items()))
    tokens = ["<|pad|>", "absent"]
    assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours.convert_ids_to_tokens([3, 300]) == theirs.convert_ids_to_tokens([3, 300])


@pytest.mark.parametrize(
    ("model", "kind", "parts", "settings"),
    [
        ("llama", WHOLE, None, NAMED | {"add_bos_token": True, "chat_template": "{{ bos_token }}"}),
        ("llama", "TokenizersBackend", "GPT2Tokenizer", {"additional_special_tokens": ["<|pad|>"]}),
        pytest.param("llama", "LlamaTokenizerFast", None, NAMED, marks=LLAMA),
        ("llama", "GPT2Tokenizer", "GPT2Tokenizer", NAMED),
        ("llama", "Qwen2TokenizerFast", "Qwen2Tokenizer", {"extra_special_tokens": {"image_token": "<|mask|>"}}),
        ("qwen2", None, "Qwen2Tokenizer", {}),
        ("qwen2", WHOLE, "Qwen2Tokenizer", NAMED),
        ("gemma3_text", "GemmaTokenizer", "GemmaTokenizer", {"chat_template": [{"name": "a", "template": "b"}]}),
    ],
    ids=str,
)
def test_ids_and_texts_are_those_of_transformers(
    tmp_path: Path, model: str, kind: str | None, parts: str | None, settings: dict[str, Any]
) -> None:
    check(written(tmp_path, model, kind, parts, **settings))


@pytest.mark.parametrize("name", ["code-target", "code-draft", "hybrid-target"])
def test_the_bundled_tokenizers_are_those_of_auto_tokenizer(name: str) -> None:
    folder = specker.zoo.path(name)
    [architecture] = json.loads((folder / "config.json").read_text())["architectures"]
    check(Tokens(folder, architecture))


def test_a_template_in_a_file_replaces_that_of_the_settings(tmp_path: Path) -> None:
    tokens = written(tmp_path, "llama", WHOLE, chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    check(tokens)
    assert tokens.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "new a"


@pytest.mark.parametrize(
    ("model", "kind", "parts", "settings"),
    [
        ("llama", WHOLE, None, {"split_special_tokens": True}),
        ("llama", WHOLE, None, {"eos_token": "</a new token>"}),
        ("llama", WHOLE, None, {"added_tokens_decoder": {"0": BASE["added_tokens"][0] | {"id": 0, "lstrip": True}}}),
        ("llama", "Qwen2Tokenizer", "GPT2Tokenizer", {}),  # the class replaces the file's parts
        ("llama", "GPT2Tokenizer", "GPT2Tokenizer", {"add_prefix_space": True}),
        ("qwen2", WHOLE, "GPT2Tokenizer", {}),  # AutoTokenizer takes Qwen2's class
        ("llama", None, None, {}),
    ],
    ids=str,
)
def test_what_transformers_would_change_is_left_to_it(
    tmp_path: Path, model: str, kind: str | None, parts: str | None, settings: dict[str, Any]
) -> None:
    for token in settings.get("added_tokens_decoder", {}).values():
        token.pop("id", None)
    found = written(tmp_path, model, kind, parts, **settings).tokenizer
    assert isinstance(found, transformers.PreTrainedTokenizerBase)


def test_every_class_is_one_of_transformers() -> None:
    """A later version of transformers that changes one is noticed here."""
    for name, its in CLASSES.items():
        found = getattr(transformers, name)(vocab={"<|endoftext|>": 0, "<unk>": 1}, merges=[])
        assert found.special_tokens_map == its.special


def test_the_remembered_order_names_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path))
    ours = written(tmp_path / "a", "llama", WHOLE)
    first = order.tokenizer_hash(ours)
    assert first is not None and order.tokenizer_hash(written(tmp_path / "b", "llama", WHOLE)) == first
    assert len([*(tmp_path / "tokenizers").iterdir()]) == 1


# --- chat templates ---------------------------------------------------------------------------------------------------

TALK = [
    {"role": "system", "content": "Be brief; é <b>"},
    {"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "image"}], "name": None},
    {
        "role": "assistant",
        "content": " yes \n",
        "reasoning": "why",
        "tool_calls": [{"arguments": {"é": [1, 2.5, None]}}],
    },
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "ü"}}}]
TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] }}\n{% endfor %}{{ tools | tojson }}",
    "{% for m in messages %}\n  {% if loop.index0 == 1 %}\n{% continue %}\n  {% endif %}\n{{ m.content | trim }}|\n"
    "{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n > 2 %}{% break %}{% endif %}{{ ns.n }}{% endfor %}"
    "{% for m in messages %}{{ m | tojson(indent=2) }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{{ x }}{% endfor %}",
    "{{ dict(a=1) | tojson }}{{ strftime_now('%Y') }}{{ deep }}{{ documents }}{{ messages[-1].thinking }}"
    "{{ messages[-1].content }}{% if add_generation_prompt %}<a>{% endif %}",
    "{{ raise_exception('no system role: ' ~ messages[0].content) }}",
    "{{ messages.append(1) }}{{ messages[0].content }}",
    "{{ ''.__class__.__mro__ }}{{ messages[0].content }}",
    "{% set ns = namespace(__init__=1) %}{{ messages[0].content }}",
    "{{ namespace.__init__.__globals__ }}{{ messages[0].content }}",
    "{% for m in %}",
    "{{ messages[-1]['content'] | upper }}",
    "no messages",
)


@since("transformers", "5.23", "renders some templates otherwise")
@pytest.mark.parametrize("source", TEMPLATES)
def test_a_template_writes_what_it_writes_with_transformers(source: str, tmp_path: Path) -> None:
    tokens = written(tmp_path, "llama", WHOLE, **NAMED, chat_template=source)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    last = {"role": "assistant", "content": "x <= y  "}
    blocks = {"role": "assistant", "content": [{"type": "text", "text": "ab"}]}
    for talk, more in (
        (TALK, {"add_generation_prompt": True, "tools": TOOLS, "deep": date(2026, 1, 2)}),
        (TALK[:1], {"documents": [{"title": "t"}], "deep": {"a": (1, {"b": None})}}),
        ([*TALK, last], {"continue_final_message": True}),
        ([*TALK, blocks], {"continue_final_message": True}),
        ([TALK[0], {"role": "assistant"}], {"continue_final_message": True}),
        ([], {}),
    ):
        said = []
        for one in (tokens.tokenizer, theirs):
            before = copy.deepcopy(talk)
            try:
                said.append(one.apply_chat_template(talk, tokenize=False, **more))
            except (TemplateError, ArithmeticError, TypeError, ValueError, LookupError, AttributeError) as error:
                said.append(type(error))
            assert talk == before
        assert said[0] == said[1]


def test_a_template_sees_no_objects() -> None:
    class Sharp:
        def cut(self) -> None: ...

    assert template.plain({"a": Sharp(), 1: [True, (2,)]}) == {"a": "<Sharp>", 1: [True, (2,)]}
    with pytest.raises(TemplateError):
        template.render("{{ x.cut() }}", [{"role": "user", "content": "a"}], x=Sharp())


def test_a_function_may_describe_a_tool() -> None:
    def add(a: int) -> int:
        """Add.

        Args:
            a: a number
        """
        return a

    text = template.render("{{ tools | tojson }}", [{"role": "user", "content": "a"}], tools=[add])
    assert json.loads(text)[0]["function"]["name"] == "add"
    with pytest.raises(ValueError, match="a tool must be a JSON schema or a function, got 3"):
        template.render("", [{"role": "user", "content": "a"}], tools=[3])


@since("tokenizers", "0.23.3", "keeps more of a file")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's malloc_trim")
def test_reading_returns_what_it_freed(tmp_path):
    """A file of 100,000 tokens becomes many small pieces of memory, of which the tokenizer keeps few."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    trim = ctypes.CDLL(None).malloc_trim
    tokens = written(tmp_path, "qwen2", WHOLE)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = file["model"]["vocab"]
    file["model"]["vocab"] |= {f"word {n}": len(vocab) + n for n in range(100_000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    del file, vocab
    trim(0)
    assert len(tokens.tokenizer) > 100_000
    before = resident()
    trim(0)
    assert before - resident() < 4 << 20
