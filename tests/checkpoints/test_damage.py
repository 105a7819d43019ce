"""Checkpoints that are damaged, or made to do harm: each is refused with one sentence, before anything large is
computed or allocated."""

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from make_checkpoint import GEMMA3, GRANITE, LFM2, LLAMA3, MIXTRAL, PHI4, QWEN3_MOE, YARN, make

from specker.checkpoints.checkpoint import opened, read
from specker.checkpoints.drafts import dflash, eagle
from specker.checkpoints.parse import parse_config
from specker.cli import run
from specker.model.config import CheckpointError

TINY: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
NAN, INF = float("nan"), float("inf")
VALUES: list[Any] = [None, True, -1, 0, 3, 10**9, 2**50, 10**400, 0.0, -0.5, 1e-300, NAN, INF, "", "x"]
VALUES += [[], [1], [None], [[]], {}, {"a": 1}, "\0"]


def message(action: Callable[[], Any]) -> str | None:
    """The sentence of the CheckpointError; None if there is no error."""
    try:
        action()
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500
        return str(error)
    return None


def edited(folder: Path, change: dict[str, Any], name: str = "config.json") -> None:
    path = folder / name
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | change))


def rope(**change: Any) -> dict[str, Any]:
    return {"rope_parameters": {**YARN, **change}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 10**9}, "hidden_size must be a whole number from 1 to 1048576, but .* has 1000000000"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 1024, but .* has 1000000000"),
    ({"head_dim": 2**50}, "head_dim must be a whole number from 1 to 1024, but .* has 1125899906842624"),
    ({"vocab_size": 10**400}, r"vocab_size must be a whole number from 1 to 16777216, but .* has 10+\.\.\.0+$"),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings must be a whole number from 1 to 2147483647, but"),
    ({"hidden_size": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": None}, "head_dim 0 positive"),
    ({"architectures": 3}, "architectures must be a list of names, but config.json has 3"),
    ({"rope_parameters": None, "rope_scaling": [1]}, r"rope_scaling must be an object, but config.json has \[1\]"),
    ({"dtype": True}, "dtype must be a string, but config.json has True"),
    ({"torch_dtype": 1}, "torch_dtype must be a string, but config.json has 1"),
    ({"dtype": 1.5}, "dtype must be a string, but config.json has 1.5"),
    (rope(rope_theta=INF), "rope_theta must be a positive float32, but config.json has inf"),
    (rope(rope_theta=NAN), "rope_theta must be a positive float32, but config.json has nan"),
    (rope(rope_theta=-1.0), "rope_theta must be a positive float32, but config.json has -1.0"),
    ({"rope_parameters": None, "rope_theta": 0}, "rope_theta must be a positive float32, but config.json has 0"),
    (rope(factor=0), "factor must be a positive float32, but config.json has 0"),
    (rope(factor="4"), "factor must be a positive float32, but config.json has '4'"),
    (rope(rope_type="linear", rope_theta=1e-30, factor=1e-30), "of config.json do not give 8 finite frequencies"),
    ({"rms_norm_eps": NAN}, "rms_norm_eps must be a positive float32, but config.json has nan"),
    ({"eos_token_id": 128}, r"eos_token_id must be an id below vocab_size 128, or .*, but .*config.json has 128"),
    ({"eos_token_id": [5, -1]}, r"eos_token_id must be an id below vocab_size 128, .*, but .* has \[5, -1\]"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("llama"), tokenizer=True, vocab=128)


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(("change", "sentence"), REFUSED, ids=[str(change)[:60] for change, _ in REFUSED])
def test_settings_that_no_model_has(folder: Path, change: dict[str, Any], sentence: str) -> None:
    edited(folder, {"vocab_size": 128} | change)
    with pytest.raises(CheckpointError, match=sentence):
        opened(folder)


def test_experts_in_layers_that_no_model_has(tmp_path: Path) -> None:
    edited(make(tmp_path, **MIXTRAL), {"num_hidden_layers": 1000, "num_local_experts": 4000})
    with pytest.raises(CheckpointError, match="4000 experts in each of 1000 layers are more than 131072 in all"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"block_multiple_of": 0}, "block_multiple_of must be a whole number from 1 to 1048576, but .* has 0"),
        ({"block_ffn_dim_multiplier": 0.0}, r"block_ffn_dim_multiplier must be a positive float32, .* has 0\.0"),
        ({"block_ffn_dim_multiplier": 1e30}, "intermediate_size must be a whole number from 1 to 1048576, but .* adj"),
    ],
    ids=str,
)
def test_a_width_that_no_model_has(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    edited(make(tmp_path, **LFM2), change)
    with pytest.raises(CheckpointError, match=sentence):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "text", ['{"a":' * 100_000, "[" * 100_000 + "]" * 100_000, '{"a": ' + "9" * 10_000 + "}", "\0"]
)
def test_json_that_cannot_be_read(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"{name} is not valid JSON .*; download it again"):
        opened(folder)


def test_a_string_as_the_id_that_ends_a_text(folder: Path) -> None:
    edited(folder, {"eos_token_id": ["</s>"]}, "generation_config.json")
    with pytest.raises(CheckpointError, match=r"eos_token_id must be .*, but .*generation_config.json has \['</s>'\]"):
        opened(folder)


def test_a_tokenizer_may_end_texts_with_an_id_that_the_model_lacks(folder: Path) -> None:
    table = {"5": {"content": "<|stop|>"}, "5000": {"content": "<|stop|>"}, "-1": {"content": "<|stop|>"}}
    edited(folder, {"eos_token": "<|stop|>", "added_tokens_decoder": table}, "tokenizer_config.json")
    assert opened(folder).config.eos_ids == (5,)
    edited(folder, {"added_tokens_decoder": {"5": 6}}, "tokenizer_config.json")
    with pytest.raises(CheckpointError, match=r"the tokenizer's files in .* do not name its tokens \(TypeError: .*\)"):
        opened(folder)


def test_a_tokenizer_with_settings_of_the_wrong_type(folder: Path) -> None:
    edited(folder, {"model_max_length": "512"}, "tokenizer_config.json")
    with pytest.raises(CheckpointError, match=r"the tokenizer in .* cannot be read \(TypeError: .*\)"):
        _ = read(folder, dtype=torch.float32, device="cpu").tokenizer


def test_the_command_line_ends_with_code_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(folder, {"architectures": ["\x1b[31mred\nline"]})
    assert run.main(["--target", str(folder), "--strategy", "ar", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert "architecture \N{REPLACEMENT CHARACTER}[31mred line is not supported" in said and said.count("\n") == 1


# --- random damage


def places(x: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a JSON document."""
    for key, value in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield (*at, key)
        yield from places(value, (*at, key))


def damaged(document: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The document with another value, or none, in one place."""
    out = copy.deepcopy(document)
    *way, last = rng.choice(list(places(out)))
    inner: Any = out
    for key in way:
        inner = inner[key]
    inner[last] = rng.choice(VALUES)
    if rng.random() < 0.05:
        del inner[last]
    return out


FAMILIES = [{"rope": YARN}, {"rope": LLAMA3}, GEMMA3, GRANITE, PHI4, QWEN3_MOE, MIXTRAL, {"arch": "smollm3"}]


@pytest.mark.parametrize("options", FAMILIES, ids=lambda options: options.get("arch", "llama"))
def test_any_value_in_config_json(tmp_path: Path, options: dict[str, Any]) -> None:
    """A message, or a config that is what the file says: never another error."""
    make(tmp_path, **options)
    rng, document, said = random.Random(7), json.loads((tmp_path / "config.json").read_text()), []
    for _ in range(80):
        raw = damaged(document, rng)
        said.append(message(lambda: parse_config(tmp_path, None, None, raw)))  # noqa: B023
    assert 5 < said.count(None) < 75, "the damage is too small, or too large"


def test_any_byte_of_weights_and_index(tmp_path: Path) -> None:
    make(tmp_path, **TINY, vocab=40, shards=2)
    rng, said = random.Random(3), []
    files = {path: path.read_bytes() for path in tmp_path.iterdir() if path.name.startswith("model")}
    for _ in range(120):
        path, whole = rng.choice(list(files.items()))
        size = 8 + struct.unpack("<Q", whole[:8])[0] if path.suffix == ".safetensors" else len(whole)
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            data[rng.randrange(size)] = rng.choice(b'\0\1\x7f\xff019-"[{}],./')
        path.write_bytes(data[: rng.randrange(size)] if rng.random() < 0.1 else data)
        said.append(message(lambda: read(tmp_path, dtype=torch.float32, device="cpu")))
        path.write_bytes(whole)
    assert 5 < said.count(None) < 115


HEAD_DAMAGE: list[tuple[str, str, dict[str, Any], str]] = [
    ("eagle", "flat", {"architectures": 3}, "architectures of .* must be a list of names, got 3"),
    (
        "eagle",
        "nested",
        {"transformer_layer_config": [1]},
        r"transformer_layer_config of .* be an object, got \[1\]",
    ),
    ("eagle", "flat", {"eagle_config": "x"}, "eagle_config of .* must be an object, got 'x'"),
    ("eagle", "window", {"transformer_layer_config.layer_types": [[]]}, r"layer_types must name .*, got \[\[\]\]"),
    ("eagle", "flat", {"max_position_embeddings": 2**40}, "max_position_embeddings must be a whole number from 1 to"),
    ("dflash", "z-lab", {"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number from 1 to 1024"),
    ("dflash", "z-lab", {"max_position_embeddings": "x"}, "max_position_embeddings must be a whole number from 1 to"),
    ("dflash", "z-lab", {"layer_types": [{}] * 2}, "layer_types of .* must name one of"),
    ("dflash", "z-lab", {"dflash_config": [5]}, r"dflash_config of .* must be an object, got \[5\]"),
    ("dflash", "z-lab", {"dflash_config.projector_type": []}, r"with projector_type \[\]; specker reads dflash"),
    ("dflash", "z-lab", {"final_logit_softcapping": 10**400}, "final_logit_softcapping of .* must be a number from 0"),
    ("dflash", "z-lab", {"dflash_config.output_multiplier": 10**400}, "output_multiplier of .* a number above 0"),
    ("dflash", "dspark", {"markov_head_type": []}, r"has a Markov head of type \[\]; specker runs"),
]


@pytest.mark.parametrize(("strategy", "layout", "change", "sentence"), HEAD_DAMAGE)
def test_heads(heads: Any, tmp_path: Path, strategy: str, layout: str, change: dict[str, Any], sentence: str) -> None:
    made = heads(strategy, layout)
    for path in made.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, value in change.items():
        outer, _, inner = name.rpartition(".")
        old = json.loads((tmp_path / "config.json").read_text())
        edited(tmp_path, {outer: {**old[outer], inner: value}} if outer else {name: value})
    with pytest.raises(CheckpointError, match=sentence):
        {"eagle": eagle, "dflash": dflash}[strategy].Layout.open(tmp_path, opened(made.target).config)
