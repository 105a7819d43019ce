"""gpt-oss as a GGUF file, named, split and repacked as llama.cpp's converter does."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_checkpoint import GPT_OSS, exact_oracle, make, oracle, oracle_logits
from make_gguf import LAYER, OUTER, add, ended, gguf
from make_harmony import TEMPLATE, TOKENS
from make_mxfp4 import make_mxfp4
from safetensors.torch import load_file
from torch import Tensor

import specker
from specker.checkpoints.checkpoint import read, read_config, read_tokenizer
from specker.cpu import Packed, available
from specker.model.cache import KVCache
from specker.model.config import CheckpointError
from specker.model.decoder import Final, Model
from specker.model.prefill import prefill
from specker.model.split import Part

# Epsilon is a number of float32, as it is in a file.
SIZES = {**GPT_OSS, "rms_norm_eps": 2**-17, "hidden": 64, "ffn": 96, "vocab": 320}
SIZES |= {"heads": 6, "kv_heads": 6, "head_dim": 32}  # which the compiled layers take
TEXT = [n * 7 % 256 for n in range(60)]
NAMES = LAYER | {"mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm"}
PARTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available()  # the compiled layers are in the usual cache
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))


def source(folder: Path, mxfp4: bool = False, **how: Any) -> Path:
    """A checkpoint of random weights, whose experts are perhaps in MXFP4."""
    return (make_mxfp4 if mxfp4 else make)(folder, **{**SIZES, **how})


def repacked(blocks: Tensor, scales: Tensor) -> np.ndarray:
    """MXFP4 as in a checkpoint -> in a file: a scale, then 16 bytes, of which byte i has the numbers i and i + 16."""
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.cat((scales.unsqueeze(-1), numbers[..., :16] | numbers[..., 16:] << 4), -1).flatten(-2).numpy()


def write(
    path: Path,
    folder: Path,
    kinds: dict[str, str] | None = None,
    change: Callable[[dict[str, Any]], object] = lambda keys: None,
    drop: str = "nothing",
) -> Path:
    """The checkpoint in `folder` as a GGUF file. `kinds`: formats of tensors by a part of their names in the file,
    others are in float32. `change` edits the keys after "gpt-oss."; tensors whose names contain `drop` are left out."""
    config = json.loads((folder / "config.json").read_text())
    rope, D = config["rope_parameters"], config["head_dim"]
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": D,
        "attention.value_length": D,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.sliding_window": config["sliding_window"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": D,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }
    change(keys)
    out = gguf.GGUFWriter(path, "gpt-oss")
    put = {int: out.add_uint32, float: out.add_float32, str: out.add_string}
    for name, value in keys.items():
        put[type(value)](f"gpt-oss.{name}", value)
    letters = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = [*letters[:255], "ab", *TOKENS]
    tokens += [f"<|reserved_{n}|>" for n in range(len(tokens), config["vocab_size"])]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-4o")
    out.add_token_list(tokens)
    out.add_token_types([1] * 256 + [3] * (len(tokens) - 256))
    out.add_token_merges(["a b"])
    out.add_eos_token_id(256)
    out.add_chat_template(TEMPLATE)
    tensors = load_file(folder / "model.safetensors")
    for name, x in tensors.items():
        for stored, data, kind in stored_as(name, x, tensors):
            if drop not in stored:
                kind = next((other for part, other in (kinds or {}).items() if part in stored), kind)
                if kind == "F32":
                    out.add_tensor(stored, np.ascontiguousarray(data))
                elif kind == "MXFP4":
                    out.add_tensor(stored, data, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
                else:
                    add(out, stored.removesuffix(".weight"), np.ascontiguousarray(data), kind)
    ended(out)
    return path


def stored_as(name: str, x: Tensor, tensors: dict[str, Tensor]) -> list[tuple[str, np.ndarray, str]]:
    """The tensors of a file that a checkpoint's becomes: names, values and formats."""
    if not name.startswith("model.layers."):
        return [(f"{OUTER[name.removesuffix('.weight')]}.weight", x.numpy(), "F32")]
    n, own = name.removeprefix("model.layers.").split(".", 1)
    if own == "self_attn.sinks":
        return [(f"blk.{n}.attn_sinks.weight", x.numpy(), "F32")]
    module, _, form = own.removeprefix("mlp.experts.").rpartition("_")
    if not own.startswith("mlp.experts."):
        stem, _, field = own.rpartition(".")
        return [(f"blk.{n}.{NAMES[stem]}.{field}", x.numpy(), "F32")]
    if form == "scales":
        return []
    field, kind = "bias" if form == "bias" else "weight", "MXFP4" if form == "blocks" else "F32"
    module = own.removeprefix("mlp.experts.") if form == "proj" else module
    x = x.mT if form == "proj" else x
    found = []
    for i, stored in enumerate(PARTS[module]):
        part = x[:, i :: len(PARTS[module])]
        if form == "blocks":
            data = repacked(part, tensors[name.replace("_blocks", "_scales")][:, i :: len(PARTS[module])])
        else:
            data = part.numpy()
        found.append((f"blk.{n}.{stored}.{field}", data, kind))
    return found


def logits_of(place: Path, dtype: torch.dtype = torch.float64) -> Tensor:
    model = Model(read(place, dtype=dtype, device="cpu", activations="float32"))
    held, last = KVCache(model.config, 128, dtype=dtype, device="cpu"), model.config.num_layers
    with torch.inference_mode():
        return model.logits(Final(prefill(model, held, TEXT, aux_layers=(last,), last=len(TEXT))[last]))


def test_the_logits_are_those_of_the_model_that_was_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact_oracle(monkeypatch)
    folder = source(tmp_path / "source")
    file = write(tmp_path / "tiny.gguf", folder)
    own, same = read_config(folder), read_config(file)
    assert own.layer.experts is not None and own.layer.experts.turns
    apart = replace(own, layer=replace(own.layer, experts=replace(own.layer.experts, turns=False)), eos_ids=(256, 262))
    assert same == apart
    with torch.no_grad():
        want = oracle_logits(oracle(folder, torch.float64), torch.tensor(TEXT))
    assert (logits_of(file) - want).abs().max() < 1e-9
    for rank in range(2):
        part = Part(rank, 2)
        ours, theirs = (read(x, dtype=torch.float32, device="cpu", part=part).weights for x in (file, folder))
        for name in ("gate_up", "down", "gate_up_bias", "down_bias", "sinks"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_mxfp4_keeps_its_bits(tmp_path: Path) -> None:
    """A CPU multiplies by the same numbers in the same order, whichever file has them."""
    folder = source(tmp_path / "source", mxfp4=True)
    file = write(tmp_path / "tiny.gguf", folder)
    ours, theirs = (read(x, dtype=torch.float32, device="cpu").weights for x in (file, folder))
    for layer in range(3):
        for name in ("gate_up", "down"):
            got, want = getattr(ours, name)[layer], getattr(theirs, name)[layer]
            assert isinstance(got, Packed) and got.kinds == {"mxfp4"}
            assert torch.equal(got.dequantised(torch.float32), want.dequantised(torch.float32))
    assert torch.equal(ours.gate_up_bias[1], theirs.gate_up_bias[1])
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(logits_of(file, dtype), logits_of(folder, dtype)), dtype
    engine = specker.load(file, strategy="lookup", device="cpu")
    assert engine.check(TEXT[:5], engine.generate(TEXT[:5], 30), 30).identical


def test_other_formats_of_experts(tmp_path: Path) -> None:
    """In one format gates and up projections keep their bits; in two they are restored."""
    folder = source(tmp_path / "source")
    one, two = (
        read(write(tmp_path / f"{part[0]}.gguf", folder, {part: "Q8_0"}), dtype=torch.float32, device="cpu")
        for part in ("exps.weight", "gate_exps.weight")
    )
    assert one.weights.gate_up[0].kinds == one.weights.down[0].kinds == {"int8"}
    assert two.restored == ("Q8_0 and F32",) or two.restored == ("F32 and Q8_0",)
    want = read(folder, dtype=torch.float32, device="cpu").weights.gate_up[0]
    ups, exact = (x.view(6, 2, -1)[:, 1] for x in (two.weights.gate_up[0], want))
    assert torch.equal(ups, exact) and not torch.equal(two.weights.gate_up[0], want)


def test_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    """Words end before a large letter, with their contraction; special tokens are those of Harmony."""
    file = write(tmp_path / "tiny.gguf", source(tmp_path / "source"))
    fast = read_tokenizer(file)
    split = fast.backend_tokenizer.pre_tokenizer.pre_tokenize_str

    def words(text: str) -> list[str]:
        return [text[slice(*where)] for _, where in split(text)]

    assert words("HelloWorld's ABCs") == ["Hello", "World's", " ABCs"]
    assert words("a 12345 (x)/\n/b  c") == ["a", " ", "123", "45", " (", "x", ")/\n/", "b", " ", " c"]
    assert words("I'LL NaïveÉtÉ") == ["I'LL", " Naïve", "Ét", "É"]
    text = "<|start|>assistant<|channel|>final<|message|>a<|return|>"
    ids = fast(text)["input_ids"]
    assert fast.decode(ids) == text and fast.decode(ids, skip_special_tokens=True) == "assistantfinala"
    assert fast.eos_token == "<|return|>" and len(fast("a")["input_ids"]) == 1 and fast.chat_template == TEMPLATE
    engine = specker.load(file, strategy="ar", device="cpu")
    assert engine.reader(engine.encode_chat([{"role": "user", "content": "a"}])).place == "header"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"change": lambda keys: keys.update({"expert_gating_func": 2})}, r"has gpt-oss\.expert_gating_func 2, which is n"),
    ({"change": lambda keys: keys.pop("attention.sliding_window")}, r"lacks the key gpt-oss\.attention\.sliding_win"),
    ({"change": lambda keys: keys.update({"rope.scaling.type": "linear"})}, r"rope\.scaling\.type linear, which is no"),
    ({"change": lambda keys: keys.pop("rope.scaling.factor")}, r"lacks the key gpt-oss\.rope\.scaling\.factor; conv"),
    ({"drop": "blk.1.ffn_up_exps.bias"}, r"lacks model\.layers\.1\.mlp\.experts\.gate_up_proj_bias, which config"),
    ({"drop": "blk.1.attn_sinks"}, r"lacks model\.layers\.1\.self_attn\.sinks, which config"),
]


@pytest.mark.parametrize(("how", "sentence"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, how: dict[str, Any], sentence: str) -> None:
    file = write(tmp_path / "tiny.gguf", source(tmp_path / "source"), **how)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        read(file, dtype=torch.float32, device="cpu")
    assert "\n" not in str(caught.value)
