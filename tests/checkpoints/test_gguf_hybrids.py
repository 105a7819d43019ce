"""GGUF files of models with recurrent layers: Qwen3.5, Qwen3-Next, LFM2 and LFM2-MoE."""

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
from heads import traced
from make_checkpoint import exact_oracle, oracle, oracle_logits
from make_gguf import gguf
from make_hybrid_gguf import CONVOLVING, MODELS, source, write
from safetensors.torch import load_file
from torch import Tensor

import specker
from specker.checkpoints.checkpoint import opened, read, read_config, read_tokenizer
from specker.checkpoints.drafts import mtp
from specker.checkpoints.gguf.cache import converted
from specker.cpu import available
from specker.cpu.packed import Packed
from specker.model.cache import KVCache
from specker.model.config import CheckpointError, DeltaNet
from specker.model.decoder import Final, Model
from specker.model.prefill import prefill
from specker.model.split import Part

TEXT = [n * 7 % 128 for n in range(80)]
WIDE = {  # every matrix has rows of blocks of the K formats; a block of 256 weights holds four value heads
    "hidden": 256,
    "heads": 4,
    "head_dim": 64,
    "ffn": 256,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_value_heads": 8,
}
EXPERTS = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
FORMATS = {
    "attn_qkv": "Q5_K",
    "attn_gate": "Q4_K",
    "ssm_out": "Q6_K",
    "ssm_alpha": "Q8_0",
    "attn_q.": "Q4_K",
    "attn_output": "Q5_K",
    "exps": "Q4_K",
    "shexp": "Q8_0",
    "ffn_down": "Q6_K",
    "shortconv.in": "Q5_K",
    "token_embd.": "Q6_K",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available()  # the compiled layers are in the usual cache
    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))


def names(x: Any) -> list[str]:
    """Of the fields of a dataclass or a tuple."""
    return [field.name for field in fields(x)] if is_dataclass(x) else list(x._fields)


def logits_of(file: Path, dtype: torch.dtype = torch.float64) -> Tensor:
    model = Model(read(file, dtype=dtype, device="cpu", activations="float32"))
    held = KVCache(model.config, 128, dtype=dtype, device="cpu")
    last = model.config.num_layers
    return model.logits(Final(prefill(model, held, TEXT, aux_layers=(last,), last=len(TEXT))[last]))


@pytest.mark.parametrize("how", [{}, {"tied": True, "linear_num_value_heads": 2, "conv_L_cache": 4}], ids=str)
@pytest.mark.parametrize("arch", MODELS)
def test_the_logits_are_those_of_the_model_that_was_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, how: dict[str, Any]
) -> None:
    exact_oracle(monkeypatch)
    folder = source(
        tmp_path / "source", arch, **{k: v for k, v in how.items() if (k[:4] == "conv") <= (arch in CONVOLVING)}
    )
    file = write(tmp_path / "tiny.gguf", folder, arch)
    own, same = read_config(folder), read_config(file)
    rest = {"eos_ids": (), "architecture": own.architecture}
    if arch == "qwen3next":  # it becomes a mixture of Qwen3.5
        rest["intermediate_size"] = own.intermediate_size
    elif own.layer.experts is not None and arch != "lfm2moe":
        rest["intermediate_size"] = own.intermediate_size  # a file does not name it
    assert replace(same, **rest) == own
    want = oracle_logits(oracle(folder, torch.float64), torch.tensor(TEXT))
    assert (logits_of(file) - want).abs().max() < 1e-9


def in_float32(file: Path, new: Path) -> Path:
    """A copy of the file with all its tensors dequantised."""
    old = gguf.GGUFReader(file)
    out = gguf.GGUFWriter(new, old.fields["general.architecture"].contents())
    for name, field in old.fields.items():
        if not name.startswith(("GGUF.", "general.arch")):
            kinds = field.types
            inner = kinds[-1] if len(kinds) > 1 else None
            out.add_key_value(name, field.contents(), kinds[0], inner)
    for tensor in old.tensors:
        out.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    for step in (out.write_header_to_file, out.write_kv_data_to_file, out.write_tensors_to_file, out.close):
        step()
    return new


@pytest.mark.parametrize("arch", MODELS)
def test_matrices_keep_their_blocks(tmp_path: Path, arch: str) -> None:
    """With out-projections of Qwen3.5 whose columns stay in the file's order, because a block holds several heads."""
    how = {"hidden": 256, "head_dim": 64, "ffn": 256} if arch in CONVOLVING else WIDE
    how |= {"ffn": 384, "block_multiple_of": 256} if arch == "lfm2" else {}
    more = EXPERTS if "num_experts" in MODELS[arch] else {}
    folder = source(tmp_path / "source", arch, vocab=128, **how, **more)
    file = write(tmp_path / "tiny.gguf", folder, arch, "Q8_0", FORMATS)
    config = json.loads((converted(file) / "config.json").read_text())
    checkpoint = read(file, dtype=torch.float32, device="cpu")
    tiled = arch in ("qwen35", "qwen35moe")
    mixer = checkpoint.config.layer.recurrent
    assert getattr(mixer, "tiled", False) == tiled == config.get("linear_out_proj_tiled", False)
    assert not checkpoint.restored and checkpoint.quantised == "int4, int5, int6 and int8"
    matrices = [x for buffer in ("qkv", "o", "gate_up", "down") for x in getattr(checkpoint.weights, buffer)]
    assert all(isinstance(x, Packed) for x in matrices)
    plain = in_float32(file, tmp_path / "plain.gguf")
    assert not getattr(read_config(plain).layer.recurrent, "tiled", False)
    want = logits_of(plain)
    assert (logits_of(file) - want).abs().max() < 1e-5 * want.abs().max()  # of numbers that the package rounds
    assert (logits_of(file, torch.float32) - want).abs().max() < 1e-4 * want.abs().max()


def test_as_many_value_heads_as_key_heads(tmp_path: Path) -> None:
    """They have one order, whatever the blocks are."""
    how = WIDE | {"linear_num_value_heads": 4, "linear_num_key_heads": 4}
    file = write(tmp_path / "tiny.gguf", source(tmp_path / "source", "qwen35", **how), "qwen35", "Q8_0", FORMATS)
    checkpoint = read(file, dtype=torch.float32, device="cpu")
    mixer = checkpoint.config.layer.recurrent
    assert isinstance(mixer, DeltaNet) and not mixer.tiled and isinstance(checkpoint.weights.o[0], Packed)
    want = logits_of(in_float32(file, tmp_path / "plain.gguf"))
    assert (logits_of(file) - want).abs().max() < 1e-5 * want.abs().max()


def test_columns_move_with_their_blocks_where_a_head_has_whole_blocks(tmp_path: Path) -> None:
    how = WIDE | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    file = write(tmp_path / "tiny.gguf", source(tmp_path / "source", "qwen35", **how), "qwen35", "Q8_0")
    checkpoint = read(file, dtype=torch.float32, device="cpu")
    mixer = checkpoint.config.layer.recurrent
    assert isinstance(mixer, DeltaNet) and not mixer.tiled and isinstance(checkpoint.weights.o[0], Packed)
    want = logits_of(in_float32(file, tmp_path / "plain.gguf"))
    assert (logits_of(file) - want).abs().max() < 1e-5 * want.abs().max()


def test_a_file_without_rounding_has_no_columns_in_another_order(tmp_path: Path) -> None:
    """`dense` is for other programs, which know nothing of such an order."""
    folder = source(tmp_path / "source", "qwen35", **WIDE)
    file = write(tmp_path / "tiny.gguf", folder, "qwen35", "Q8_0", FORMATS)
    assert "linear_out_proj_tiled" not in json.loads((converted(file, dense=True) / "config.json").read_text())
    want = oracle_logits(oracle(converted(file, dense=True), torch.float32), torch.tensor(TEXT))
    assert (logits_of(file, torch.float32) - want).abs().max() < 1e-3


def test_ranks_cannot_split_columns_in_another_order(tmp_path: Path) -> None:
    folder = source(tmp_path / "source", "qwen35", **WIDE)
    file = write(tmp_path / "tiny.gguf", folder, "qwen35", "Q8_0", FORMATS)
    with pytest.raises(CheckpointError, match=r"cannot split the target: its GGUF file's out-projections have the"):
        read(file, dtype=torch.float32, device="cpu", part=Part(0, 2), pack=False)


def equal_heads(one: Any, other: Any) -> None:
    """Two heads have the same tensors."""
    layer = {"qkv", "o", "gate_up", "down", "norm_in", "norm_post", "q_norm", "k_norm", "norm"}
    both = (one.weights, other.weights, layer), (one.parts, other.parts, {"fc", "embed_norm"})
    for first, second, held in both:
        every = [(name, getattr(first, name), getattr(second, name)) for name in names(first)]
        assert all(torch.equal(x, y) for _, x, y in every if isinstance(x, Tensor))
        assert {name for name, x, _ in every if isinstance(x, Tensor)} > held


@pytest.mark.parametrize(("arch", "kind"), cases.diagonal(["qwen35", "qwen35moe", "qwen3next"], ["F32", "Q8_0"]))
def test_the_head_of_a_file_drafts(tmp_path: Path, arch: str, kind: str) -> None:
    more = EXPERTS if "num_experts" in MODELS[arch] else {}
    folder = source(tmp_path / "source", arch, mtp=True, **(WIDE if kind == "Q8_0" else {}), **more)
    file = write(tmp_path / "tiny.gguf", folder, arch, kind, FORMATS if kind == "Q8_0" else {})
    if kind == "F32":
        equal_heads(
            *(
                mtp.opened(opened(x)).read(read(x, dtype=torch.float64, device="cpu"), torch.float64)
                for x in (folder, file)
            )
        )
    dtype = "float64" if kind == "F32" else "float32"
    how = {"dtype": dtype, "device": "cpu"}
    plain = specker.load(str(file), strategy="ar", **how)
    drafting = specker.load(str(file), strategy="mtp", policy="fixed", **how)
    assert drafting.target.quantised == (None if kind == "F32" else "int4, int5, int6 and int8")
    found = drafting.generate(TEXT[:20], 40)
    assert found.tokens == plain.generate(TEXT[:20], 40).tokens and found.stats.drafted > 0


@pytest.mark.parametrize(
    ("arch", "kind", "part"),
    cases.diagonal(["qwen35", "qwen35moe", "qwen3next"], ["F32", "Q8_0"], ["blocks", "heads"]),
)
def test_a_head_in_a_file_of_its_own_drafts_as_in_the_models(tmp_path: Path, arch: str, kind: str, part: str) -> None:
    """As llama.cpp's converter divides a model with --no-mtp and --mtp. Some files have copies of the embedding and the
    LM head, and others have not."""
    more = EXPERTS if "num_experts" in MODELS[arch] else {}
    folder = source(tmp_path / "source", arch, mtp=True, **(WIDE if kind == "Q8_0" else {}), **more)
    how = {"kind": kind, "kinds": FORMATS if kind == "Q8_0" else {}}
    whole = write(tmp_path / "whole.gguf", folder, arch, **how)
    model = write(tmp_path / "model.gguf", folder, arch, part="model", **how)
    head = write(tmp_path / "mtp-model.gguf", folder, arch, part=part, **how)
    both = (opened(whole), None), (opened(model), head)
    equal_heads(*(mtp.opened(of, x).read(read(of, dtype=torch.float64, device="cpu"), torch.float64) for of, x in both))
    assert all(name.startswith("mtp.") for name in load_file(converted(head) / "model.safetensors"))
    on = {"dtype": "float64" if kind == "F32" else "float32", "device": "cpu"}
    fixed = {"strategy": "mtp", "policy": "fixed", **on}
    for sampling in ({}, {"temperature": 0.7, "seed": 4}):
        plain = specker.load(str(model), strategy="ar", **on).generate(TEXT[:20], 40, **sampling).tokens
        (own, ours), (other, theirs) = (
            traced(specker.load(str(file), draft, **fixed), TEXT[:20], 40, **sampling)
            for file, draft in ((whole, None), (model, str(head)))
        )
        assert own.tokens == other.tokens == plain and own.stats.drafted == other.stats.drafted > 0
        assert [(row["draft"], row["probability"]) for row in ours if row["draft"]] == [
            (row["draft"], row["probability"]) for row in theirs if row["draft"]
        ]


def test_auto_takes_the_head_beside_the_file(tmp_path: Path) -> None:
    folder = source(tmp_path / "source", "qwen35", mtp=True)
    model = write(tmp_path / "Tiny-Q4_K_M.gguf", folder, "qwen35", part="model")
    write(tmp_path / "mtp-Tiny-Q8_0.gguf", folder, "qwen35", part="heads")
    how = {"device": "cpu", "dtype": "float64"}
    engine, plain = specker.load(str(model), "auto", **how), specker.load(str(model), strategy="ar", **how)
    assert engine.options.strategy == "mtp" and "because it stands beside the" in engine.remarks["draft_choice"]
    assert engine.generate(TEXT[:20], 20).tokens == plain.generate(TEXT[:20], 20).tokens


def test_a_head_in_a_file_of_its_own_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = source(tmp_path / "source", "qwen35", mtp=True)
    model = write(tmp_path / "model.gguf", folder, "qwen35", part="model")
    head = write(tmp_path / "mtp-model.gguf", folder, "qwen35", part="heads")
    how = {"device": "cpu", "dtype": "float64"}
    with pytest.raises(
        CheckpointError, match=r"mtp-model\.gguf holds only MTP heads: pass it as draft of its model, w"
    ):
        specker.load(str(head), strategy="ar", **how)
    with pytest.raises(
        CheckpointError, match=r"model\.gguf has no MTP heads .* and is no assistant, with which strateg"
    ):
        specker.load(str(model), str(model), strategy="mtp", **how)
    layers = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    deeper = write(
        tmp_path / "deeper.gguf", source(tmp_path / "deeper", "qwen35", layers=5, layer_types=layers), "qwen35"
    )
    with pytest.raises(
        CheckpointError, match=r"is MTP heads for a target of 4 layers, and the target has 5: it was tr"
    ):
        specker.load(str(deeper), str(head), strategy="mtp", **how)
    cut = write(tmp_path / "cut.gguf", folder, "qwen35", part="heads", drop="ffn_up")
    with pytest.raises(CheckpointError, match=r"lacks mtp\.layers\.0\.mlp\.up_proj\.weight"):
        specker.load(str(model), str(cut), strategy="mtp", **how)


def test_a_list_of_recurrent_layers(tmp_path: Path) -> None:
    """Newer files have it; a head's block is among them."""
    kinds = [True, False, False, True, True]

    def change(keys: dict[str, Any]) -> None:
        keys["attention.recurrent_layers"] = kinds
        del keys["full_attention_interval"]

    layers = ["linear_attention" if each else "full_attention" for each in kinds]
    folder = source(tmp_path / "source", "qwen35", layers=5, layer_types=layers)
    file = write(tmp_path / "tiny.gguf", folder, "qwen35", change=change)
    assert read_config(file).layer == read_config(folder).layer


def test_rows_of_an_earlier_file_of_qwen3_next(tmp_path: Path) -> None:
    """In 2025 llama.cpp left the matrix of q, k, v and z as it was."""
    folder = source(tmp_path / "source", "qwen3next")
    want = logits_of(write(tmp_path / "new.gguf", folder, "qwen3next"))
    assert torch.equal(logits_of(write(tmp_path / "old.gguf", folder, "qwen3next", early=True)), want)


@pytest.mark.parametrize("arch", MODELS)
def test_the_tokenizer_of_a_file(tmp_path: Path, arch: str) -> None:
    """Tokens that text spells whole, marks that belong to letters, Unicode's form, and a first token, by `pre`."""
    file = write(tmp_path / "tiny.gguf", source(tmp_path / "source", arch, vocab=320), arch)
    fast = read_tokenizer(file)
    tokens = gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()
    first = ["<|endoftext|>"] if arch in CONVOLVING else []

    def pieces(text: str) -> list[str]:
        ids = fast(text)["input_ids"]
        found = fast.convert_ids_to_tokens(ids)
        assert [tokens[i] for i in ids] == found and found[: len(first)] == first
        return list(found[len(first) :])

    assert pieces("cab<think><|im_end|>") == ["c", "ab", "<think>", "<|im_end|>"]
    assert fast.decode(fast("c<think>ab<|im_end|>")["input_ids"], skip_special_tokens=True) == "c<think>ab"
    assert fast.eos_token == "<|im_end|>" and fast.chat_template.startswith("{% for m in")
    composed = len(pieces("a\u0301")) == len("\u00e1".encode())
    assert composed == (arch not in CONVOLVING)
    split = fast.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    counts = [len(split(text)) for text in ("123", "x\u0e31x", "I've \n b")]
    own = {each: [1, 2, 4] for each in CONVOLVING} | {"qwen3next": [3, 2, 4]}
    assert counts == own.get(arch, [3, 1, 4])


def with_key(name: str, value: Any) -> dict[str, Any]:
    return {"change": lambda keys: keys.update({name: value})}


def without_key(name: str) -> dict[str, Any]:
    return {"change": lambda keys: keys.pop(name)}


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("qwen35", without_key("ssm.group_count"), r"lacks the key qwen35\.ssm\.group_count; convert it again"),
    ("qwen35", without_key("rope.dimension_count"), r"lacks the key qwen35\.rope\.dimension_count; convert it again"),
    ("lfm2", without_key("shortconv.l_cache"), r"lacks the key lfm2\.shortconv\.l_cache; convert it again"),
    ("qwen35moe", with_key("expert_gating_func", 2), r"has qwen35moe\.expert_gating_func 2, which is not supported"),
    ("lfm2moe", with_key("expert_gating_func", 1), r"has lfm2moe\.expert_gating_func 1, which is not supported"),
    ("lfm2moe", with_key("expert_weights_scale", 1.5), r"has lfm2moe\.expert_weights_scale 1\.5, which is not supp"),
    ("lfm2moe", with_key("expert_feed_forward_length", [32] * 4), r"cannot be converted \(.*moe_intermediate_size"),
    ("lfm2moe", with_key("leading_dense_block_count", 1), r"lacks model\.layers\.1\.feed_forward\.gate\.weight and 3"),
    ("lfm2moe", without_key("expert_used_count"), r"lacks the key lfm2moe\.expert_used_count; convert it again"),
    ("lfm2moe", {"drop": "exp_probs_b"}, r"lacks model\.layers\.2\.feed_forward\.expert_bias and 1 more, w"),
    ("lfm2", {"extra": "blk.0.exp_probs_b"}, r"has the tensor blk\.0\.exp_probs_b\.weight, which no supported arch"),
    ("qwen35", with_key("rope.scaling.type", "yarn"), r"has qwen35\.rope\.scaling\.type yarn, which is not supported"),
    ("qwen35", with_key("rope.scaling.factor", 4.0), r"has qwen35\.rope\.scaling\.factor 4\.0, which is not supported"),
    ("lfm2", with_key("attention.causal", False), r"has lfm2\.attention\.causal False, which is not supported"),
    ("lfm2", with_key("attention.head_count_kv", 2), r"lfm2\.attention\.head_count_kv with one number, or 0, for each"),
    ("qwen35", with_key("ssm.time_step_rank", 5), r"time_step_rank 5, which must be a multiple of its .* 2"),
    ("qwen35", with_key("ssm.state_size", 10**9), r"qwen35\.ssm\.state_size must be at most 1024, but .* 1000000000"),
    ("qwen35", {"drop": "token_embd"}, r"lacks the tensor token_embd\.weight; convert it again"),
    ("qwen35", {"drop": "blk.1.ssm_out"}, r"lacks model\.layers\.1\.linear_attn\.out_proj\.weight, which config"),
    ("qwen35", {"drop": "blk.1.ssm_dt"}, r"lacks model\.layers\.1\.linear_attn\.dt_bias, which config"),
    ("lfm2", {"drop": "blk.0.shortconv.conv"}, r"lacks model\.layers\.0\.conv\.conv\.weight, which config"),
    ("qwen35", {"pre": "deepseek-llm"}, r"the pre-tokenizer 'deepseek-llm', which is not supported for this archi"),
    ("qwen35", {"extra": "blk.0.attn_sinks"}, r"has the tensor blk\.0\.attn_sinks\.weight, which no supported arch"),
    ("qwen35", {"extra": "blk.5.nextn.enorm"}, r"has the tensor blk\.5\.nextn\.enorm\.weight, which no supported"),
    (
        "qwen35",
        {"sign": -1},
        r"that model\.layers\.0\.linear_attn\.A_log is made of, -exp\(A_log\), must be negative; con",
    ),
]


@pytest.mark.parametrize(("arch", "how", "sentence"), BAD, ids=[f"{row[0]}-{n}" for n, row in enumerate(BAD)])
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, arch: str, how: dict[str, Any], sentence: str) -> None:
    file = write(tmp_path / "tiny.gguf", source(tmp_path / "source", arch), arch, **how)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        read(file, dtype=torch.float32, device="cpu")
    assert "\n" not in str(caught.value)
