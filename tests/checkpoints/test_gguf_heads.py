"""EAGLE-3 heads in GGUF files draft as the same heads in safetensors."""

import json

import numpy as np
import pytest
import torch
from make_checkpoint import make
from make_head import make_head
from safetensors.torch import load_file, save_file

import specker
from specker.checkpoints.gguf import heads as gguf_heads

writer = pytest.importorskip("gguf")
exporter = pytest.importorskip("train.head.gguf")

OFTEN = [35, 74, 119]
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
HEAD = {"width": 64, "heads": (4, 2, 16), "inner": 64}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make(tmp_path_factory.mktemp("gguf-heads") / "target", layers=8, max_context=256, seed=2)


def head_of(target, folder, **how):
    return make_head(folder, json.loads((target / "config.json").read_text()), ids=OFTEN, **{**HEAD, **how})


def interleaved(x, heads):
    """The rows of q or k in llama.cpp's order."""
    return x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)


def write(folder, path, kind="F32", drop=(), keys=None, layers="target_layers", tensors=None):
    """The head in `folder` as a GGUF file. `keys`: further keys."""
    config = json.loads((folder / "config.json").read_text())
    out = writer.GGUFWriter(path, "eagle3")
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_vocab_size(config["vocab_size"])
    if layers:
        out.add_array(f"eagle3.{layers}", config.get("eagle_aux_hidden_state_layer_ids", [2, 4, 5]))
    out.add_uint32("eagle3.target_hidden_size", config.get("target_hidden_size", config["hidden_size"]))
    out.add_bool("eagle3.norm_before_residual", config.get("norm_before_residual", False))
    if config.get("norm_before_fc"):
        out.add_bool("eagle3.norm_before_fc", True)
    for name, value in (keys or {}).items():
        out.add_uint32(f"eagle3.{name}", value)
    own = {value: name for name, value in gguf_heads.OUTER.items()}
    inner = {value: name for name, value in gguf_heads.LAYER.items()}
    for name, x in {**load_file(folder / "model.safetensors"), **(tensors or {})}.items():
        x = x.numpy()
        if name == "d2t":
            out.add_tensor("d2t", x + np.arange(len(x)), raw_dtype=writer.GGMLQuantizationType.I64)
        if name in ("t2d", "d2t", *drop):
            continue
        stem = name.removesuffix(".weight")
        if stem.startswith(("midlayer", "layers.0")):
            stem = f"blk.0.{inner[stem.removeprefix('midlayer.').removeprefix('layers.0.')]}"
        else:
            stem = own.get(stem, stem)
        if stem.endswith(("attn_q", "attn_k")):
            x = interleaved(x, config["num_attention_heads" if stem.endswith("q") else "num_key_value_heads"])
        form = writer.GGMLQuantizationType[kind if x.ndim == 2 else "F32"]
        data = writer.quants.quantize(np.ascontiguousarray(x.astype(np.float32)), form)
        out.add_tensor(f"{stem}.weight", data, raw_dtype=form)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def load(target, head, dtype="float64", **options):
    options = {"policy": "fixed", "draft_tokens": 3, **options}
    return specker.load(str(target), str(head), strategy="eagle", device="cpu", dtype=dtype, **options)


def drafts(engine):
    seen = []
    engine.trace = seen.append
    out = engine.generate(TEXT, 32)
    assert engine.check(TEXT, out, 32).identical
    assert out.stats.accepted
    return [row["draft"] for row in seen]


KINDS = {
    "usual": {},
    "own embedding": {"own_embedding": True},
    "norm before fc": {"norm_before_fc": True, "norm_before_residual": True},
    "other layers": {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]},
}


@pytest.mark.parametrize("way", KINDS)
def test_drafts_are_those_of_the_same_head_in_safetensors(target, tmp_path, way):
    head = head_of(target, tmp_path / "head", **KINDS[way])
    file = write(head, tmp_path / "head.gguf", layers="extract_layers" if way == "usual" else "target_layers")
    engine, plain = load(target, file), load(target, head)
    assert engine.drafter.aux_layers == plain.drafter.aux_layers
    assert drafts(engine) == drafts(plain)
    assert engine.models.endswith(" + head.gguf")


@pytest.mark.parametrize("ids", [None, [0, 2, 4]])
def test_an_exported_head_becomes_such_a_file(target, tmp_path, ids):
    """train.head.gguf, with a target's file of which it needs the tokenizer and the number of layers."""
    own = {} if ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    head = head_of(target, tmp_path / "head", **own)
    out = writer.GGUFWriter(tmp_path / "target.gguf", "llama")
    out.add_block_count(8)
    out.add_tokenizer_model("gpt2")
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    exporter.write(head, tmp_path / "target.gguf", tmp_path / "head.gguf", "F32")
    engine, plain = load(target, tmp_path / "head.gguf"), load(target, head)
    assert engine.drafter.aux_layers == plain.drafter.aux_layers and drafts(engine) == drafts(plain)
    fields = writer.GGUFReader(tmp_path / "head.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    nested = make_head(tmp_path / "nested", json.loads((target / "config.json").read_text()), layout="nested")
    with pytest.raises(ValueError, match="not a head in the flat layout"):
        exporter.write(nested, tmp_path / "target.gguf", tmp_path / "other.gguf")
    with pytest.raises(ValueError, match="--kind must be"):
        exporter.write(head, tmp_path / "target.gguf", tmp_path / "other.gguf", "Q9")
    assert not (tmp_path / "other.gguf").exists()


def test_factors_of_the_frequencies_are_read(target, tmp_path):
    """Of RoPE like Llama 3.1's, a file holds only the factors by which frequencies are divided."""
    scaling = {"rope_type": "linear", "factor": 4.0}
    head = head_of(target, tmp_path / "head", rope_scaling=scaling)
    factors = {"rope_freqs.weight": torch.full((8,), 4.0)}
    engine = load(target, write(head, tmp_path / "head.gguf", tensors=factors))
    plain = head_of(target, tmp_path / "plain")
    assert drafts(engine) == drafts(load(target, head)) != drafts(load(target, plain))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_matrices_in_eight_bits(target, tmp_path, dtype):
    """They stay in eight bits in float32, and are restored in float64, where drafts are those of the rounded head."""
    head = head_of(target, tmp_path / "head")
    file = write(head, tmp_path / "head.gguf", "Q8_0")
    engine = load(target, file, dtype)
    if dtype == "float32":
        assert (
            engine.draft.quantised == "int8" and engine.remarks["draft_weights"] == "the draft's matrices are in int8"
        )
        drafts(engine)
        return
    q8 = writer.GGMLQuantizationType.Q8_0
    rounded = {
        name: torch.from_numpy(writer.quants.dequantize(writer.quants.quantize(x.numpy(), q8), q8))
        if x.dim() == 2
        else x
        for name, x in load_file(head / "model.safetensors").items()
    }
    save_file(rounded, head / "model.safetensors")
    assert drafts(engine) == drafts(load(target, head))


REFUSED = {
    "unknown key": ({"keys": {"norm_output": 1}}, "has the key eagle3.norm_output, which specker does not know"),
    "no layers": ({"layers": None}, "lacks the key eagle3.target_layers"),
    "unknown tensor": (
        {"tensors": {"gate.weight": torch.ones(3)}},
        "has the tensor gate.weight, which specker does not",
    ),
    "missing tensor": ({"drop": ("midlayer.mlp.up_proj.weight",)}, "lacks layers.0.mlp.up_proj.weight"),
    "another target": ({"keys": {}, "width": 32}, "a head for a target of width 32, and the target has 64"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_other_files_are_refused(target, tmp_path, way):
    how, says = REFUSED[way]
    head = head_of(target, tmp_path / "head")
    if "width" in how:
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps(config | {"target_hidden_size": how["width"]}))
    how = {name: value for name, value in how.items() if name != "width"}
    with pytest.raises(ValueError, match=says):
        load(target, write(head, tmp_path / "head.gguf", **how))


def test_a_head_is_no_target(target, tmp_path):
    head = write(head_of(target, tmp_path / "head"), tmp_path / "head.gguf")
    with pytest.raises(ValueError, match="architecture LlamaForCausalLMEagle3 is not supported"):
        specker.load(str(head), strategy="ar", device="cpu")
