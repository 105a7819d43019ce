"""EAGLE-3 heads in GGUF files draft as the same heads in safetensors."""

import json

import cases
import pytest
import torch
from make_checkpoint import make
from make_gguf import ended, gguf, write_head
from make_head import make_head
from safetensors.torch import load_file, save_file

import specker

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


def load(target, head, dtype="float64", **options):
    options = {"policy": "fixed", "draft_tokens": 3, **options}
    return specker.load(str(target), str(head), strategy="eagle", device="cpu", dtype=dtype, **options)


def drafts(engine):
    seen = []
    engine.trace = seen.append
    assert engine.generate(TEXT, 32).stats.accepted
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
    file = write_head(tmp_path / "head.gguf", head, layers="extract_layers" if way == "usual" else "target_layers")
    engine, plain = load(target, file), load(target, head)
    assert engine.drafter.aux_layers == plain.drafter.aux_layers
    assert drafts(engine) == drafts(plain)
    assert engine.generate(TEXT, 16).tokens == cases.plain(target, TEXT, 16)
    assert engine.models.endswith(" + head.gguf")


@pytest.mark.parametrize("ids", [None, [0, 2, 4]])
def test_an_exported_head_becomes_such_a_file(target, tmp_path, ids):
    """train.head.gguf, with a target's file of which it needs the tokenizer and the number of layers."""
    own = {} if ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    head = head_of(target, tmp_path / "head", **own)
    out = gguf.GGUFWriter(tmp_path / "target.gguf", "llama")
    out.add_block_count(8)
    out.add_tokenizer_model("gpt2")
    ended(out)
    exporter.write(head, tmp_path / "target.gguf", tmp_path / "head.gguf", "F32")
    engine, plain = load(target, tmp_path / "head.gguf"), load(target, head)
    assert engine.drafter.aux_layers == plain.drafter.aux_layers and drafts(engine) == drafts(plain)
    fields = gguf.GGUFReader(tmp_path / "head.gguf").fields
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
    engine = load(target, write_head(tmp_path / "head.gguf", head, tensors=factors))
    plain = head_of(target, tmp_path / "plain")
    assert drafts(engine) == drafts(load(target, head)) != drafts(load(target, plain))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_matrices_in_eight_bits(target, tmp_path, dtype):
    """They stay in eight bits in float32, and are restored in float64, where drafts are those of the rounded head."""
    head = head_of(target, tmp_path / "head")
    file = write_head(tmp_path / "head.gguf", head, "Q8_0")
    engine = load(target, file, dtype)
    if dtype == "float32":
        assert engine.draft.quantised == "int8"
        assert engine.remarks["draft_weights"] == "the draft's matrices are in int8"
        out = engine.generate(TEXT, 32)
        assert engine.check(TEXT, out, 32).identical and out.stats.accepted
        return
    q8 = gguf.GGMLQuantizationType.Q8_0
    rounded = {
        name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), q8), q8)) if x.dim() == 2 else x
        for name, x in load_file(head / "model.safetensors").items()
    }
    save_file(rounded, head / "model.safetensors")
    assert drafts(engine) == drafts(load(target, head))


REFUSED = {
    "unknown key": ({"keys": {"norm_output": 1}}, "has the key eagle3.norm_output, which specker does not know"),
    "no layers": ({"layers": ""}, "lacks the key eagle3.target_layers"),
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
        load(target, write_head(tmp_path / "head.gguf", head, **how))


def test_a_head_is_no_target(target, tmp_path):
    head = write_head(tmp_path / "head.gguf", head_of(target, tmp_path / "head"))
    with pytest.raises(ValueError, match="architecture LlamaForCausalLMEagle3 is not supported"):
        specker.load(str(head), strategy="ar", device="cpu")
