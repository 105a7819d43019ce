"""GGUF files of Gemma 4, and of the assistants that read its K/V."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_assistant import CLUSTERS, TARGETS, make_assistant, make_target
from make_checkpoint import GEMMA4, GEMMA4_MIXED, GEMMA4_PLE, GEMMA4_SHARED, exact_oracle, make, oracle, oracle_logits
from make_draft_gguf import SPACE, tensors_of, write_gemma4
from make_gguf import gguf
from torch import Tensor

import specker
from specker.checkpoints.checkpoint import read, read_config, read_tokenizer
from specker.checkpoints.drafts import assistant
from specker.cpu import available
from specker.cpu.packed import Packed
from specker.model.cache import KVCache
from specker.model.config import CheckpointError
from specker.model.decoder import Final, Model
from specker.model.prefill import prefill

TEXT = [n * 7 % 128 for n in range(40)]
EXACT = {"rms_norm_eps": 2**-20}  # a number of float32, as it is in a file
KINDS: dict[str, dict[str, Any]] = {
    "31b": GEMMA4,
    "e2b": GEMMA4_PLE,
    "26b-a4b": GEMMA4_MIXED,
    "with v": {**GEMMA4_SHARED, "tied": False, "final_logit_softcapping": None},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available()  # the compiled layers are in the usual cache
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))


def logits_of(source: Path, dtype: torch.dtype = torch.float64) -> Tensor:
    model = Model(read(source, dtype=dtype, device="cpu", activations="float32"))
    held = KVCache(model.config, 64, dtype=dtype, device="cpu")
    last = model.config.num_layers
    return model.logits(Final(prefill(model, held, TEXT, aux_layers=(last,), last=len(TEXT))[last]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_the_model_that_was_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    exact_oracle(monkeypatch)
    folder = make(tmp_path / "source", **KINDS[kind], **EXACT)
    file = write_gemma4(tmp_path / "tiny.gguf", folder)
    own, same = read_config(folder), read_config(file)
    assert replace(same, eos_ids=own.eos_ids) == own and {1, 4} <= {*same.eos_ids}
    found, want = logits_of(file), oracle_logits(oracle(folder, torch.float64), torch.tensor(TEXT))
    assert torch.equal(found, logits_of(folder)) and (found - want).abs().max() < 1e-9
    if kind == "26b-a4b":
        assert torch.equal(found, logits_of(write_gemma4(tmp_path / "old.gguf", folder, apart=True)))


@pytest.mark.parametrize("kind", ["e2b", "26b-a4b"])
def test_matrices_keep_their_blocks(tmp_path: Path, kind: str) -> None:
    """Also the table of per-layer embeddings, of which rows are gathered."""
    sizes = {"hidden": 256, "heads": 8, "head_dim": 64, "global_head_dim": 128, "ffn": 256, **EXACT}
    sizes |= {"hidden_size_per_layer_input": 128} if kind == "e2b" else {"moe_intermediate_size": 256}
    folder = make(tmp_path / "source", **{**KINDS[kind], **sizes})
    formats = {"per_layer_token": "Q5_K", "per_layer_model": "Q8_0", "inp_gate": "Q8_0", "proj.": "Q8_0"}
    formats |= {"router": "F32", "gate_inp": "F32", "exps.scale": "F32", "attn_k.": "Q6_K", "attn": "Q4_K"}
    formats |= {"exps": "Q4_K", "ffn": "Q8_0", "token_embd": "Q6_K"}
    file = write_gemma4(tmp_path / "tiny.gguf", folder, formats)
    checkpoint = read(file, dtype=torch.float32, device="cpu")
    assert not checkpoint.restored
    assert kind != "e2b" or not available() or isinstance(checkpoint.weights.ple_table, Packed)
    plain = gguf.GGUFReader(file)
    restored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in plain.tensors}
    want = logits_of(write_gemma4(tmp_path / "plain.gguf", folder, extra=restored))
    assert (logits_of(file) - want).abs().max() < 1e-5 * want.abs().max()  # of numbers that the package rounds
    assert (logits_of(file, torch.float32) - want).abs().max() < 1e-4 * want.abs().max()


def test_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    file = write_gemma4(tmp_path / "tiny.gguf", make(tmp_path / "source", **GEMMA4, vocab=320))
    fast = read_tokenizer(file)

    def pieces(text: str) -> list[str]:
        ids = fast(text)["input_ids"]
        assert fast.decode(ids, skip_special_tokens=True) == text.replace("<turn|>", "")
        return list(fast.convert_ids_to_tokens(ids))

    assert pieces("ab a  a") == ["<bos>", "a", "b", f"{SPACE}a", SPACE, f"{SPACE}a"]
    assert pieces("a\n\nb<turn|>") == ["<bos>", "a", "\n\n", "b", "<turn|>"]
    assert pieces("\u00e9") == ["<bos>", "<0xC3>", "<0xA9>"]


@pytest.mark.parametrize("kind", TARGETS)
def test_an_assistant_drafts_as_the_one_in_safetensors(tmp_path: Path, kind: str) -> None:
    """Beside a target in safetensors, and beside one in a file."""
    target = make_target(tmp_path / "target", kind)
    folder = make_assistant(tmp_path / "assistant", target)
    file = write_gemma4(tmp_path / "assistant.gguf", folder)
    config, base = read_config(target), read(target, dtype=torch.float64, device="cpu")
    own, found = (assistant.Layout.open(source, config) for source in (folder, file))
    kvs = found.config.layer.kvs  # no tensor of a file says whether the target projects V
    kvs = tuple(kv._replace(single=its.single) for kv, its in zip(kvs, own.config.layer.kvs, strict=True))
    assert (
        replace(found.config, layer=replace(found.config.layer, kvs=kvs), rms_norm_eps=own.config.rms_norm_eps)
        == own.config
    )
    assert found.spec == own.spec
    one, other = (each.read(base, torch.float64) for each in (own, found))
    assert isinstance(one, assistant.AssistantCheckpoint) and isinstance(other, assistant.AssistantCheckpoint)
    assert all(torch.equal(x, y) for x, y in zip(one.parts[:2], other.parts[:2], strict=True))
    for name, x in vars(one.weights).items():
        y = getattr(other.weights, name)
        assert not isinstance(x, Tensor) or torch.equal(x, y)
    how: dict[str, Any] = {"strategy": "mtp", "policy": "fixed", "draft_tokens": 3, "device": "cpu"}
    engine = specker.load(str(write_gemma4(tmp_path / "target.gguf", target)), str(file), dtype="float64", **how)
    out = engine.generate(TEXT[:12], 12)
    assert out.stats.drafted and engine.check(TEXT[:12], out, 12).identical


def test_an_assistants_clusters_are_left_out(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "31b")
    folder = make_assistant(tmp_path / "assistant", target, clusters=CLUSTERS)
    skipped = {"masked_embd_centroids.weight": np.ones((16, 32), np.float32), "masked_embd_ordering": np.arange(128)}
    file = write_gemma4(tmp_path / "assistant.gguf", folder, {"token_embd": "Q8_0"}, extra=skipped)
    own, found = (assistant.Layout.open(source, read_config(target)) for source in (folder, file))
    assert own.clusters and not found.clusters
    head = found.read(read(target, dtype=torch.float64, device="cpu"), torch.float64).weights.head
    want = tensors_of(folder)["model.embed_tokens.weight"].double()
    assert isinstance(head, Tensor) and (head - want).abs().max() < 0.02 * want.abs().max()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "frequencies": ({"extra": {"rope_freqs.weight": np.full(16, 2, np.float32)}}, "has rope_freqs that scale frequen"),
    "rotated part": ({"keys": {"rope.dimension_count": 8}}, r"has gemma4\.rope\.dimension_count 8, which is not supp"),
    "rotated swa": ({"keys": {"rope.dimension_count_swa": 8}}, r"gemma4\.rope\.dimension_count_swa 8, which is not "),
    "values": ({"keys": {"attention.value_length": 8}}, r"has gemma4\.attention\.value_length 8, which is not suppo"),
    "joined": ({"extra": {"blk.0.attn_qkv.weight": np.ones((4, 64), np.float32)}}, r"the tensor blk\.0\.attn_qkv"),
    "tokenizer": ({"keys": {".tokenizer.ggml.model": "llama"}}, "has the tokenizer 'llama' with the pre-tokenizer No"),
}


@pytest.mark.parametrize("way", REFUSED)
def test_other_files_are_refused(tmp_path: Path, way: str) -> None:
    how, says = REFUSED[way]
    file = write_gemma4(tmp_path / "tiny.gguf", make(tmp_path / "source", **GEMMA4), **how)
    with pytest.raises(CheckpointError, match=says):
        read(file, dtype=torch.float32, device="cpu")
