"""Quantised Hugging Face checkpoints: GPTQ, AWQ, fp8 and compressed-tensors.

The tensors are written here from the formats' definitions. Where compressed-tensors is installed (`pip install
compressed-tensors`), checkpoints that it wrote are read too, and transformers dequantises both.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from make_checkpoint import LFM2, LFM2_MOE, MIXTRAL, QWEN3_5, QWEN3_MOE, edit, make, oracle
from safetensors.torch import load_file, save_file
from torch import Tensor

import specker
from specker.checkpoints.checkpoint import read, read_config
from specker.checkpoints.quantised.schemes import scheme_of
from specker.cpu import Packed
from specker.kernels.quant import Quantized
from specker.model.config import CheckpointError

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "layers": 2}
PROMPT = [5, 17, 80, 3, 41]
Written = tuple[dict[str, Tensor], Tensor]  # the module's tensors, and its weights in float32


# --- writers: O, E, generator -> tensors and weights --------------------------------------------------------------


def words(x: np.ndarray, bits: int, axis: int, order: list[int] | None = None) -> Tensor:
    """Unsigned numbers in int32 words along `axis`: number order[i] of each word at bit i * bits."""
    x = np.moveaxis(x.astype(np.int64), axis, -1)
    count = 32 // bits
    x = np.concatenate([x, np.zeros((*x.shape[:-1], -x.shape[-1] % count), np.int64)], -1)
    out = sum(x[..., n::count] << (bits * i) for i, n in enumerate(order or range(count)))
    out = np.moveaxis(np.asarray(out), -1, axis).astype(np.uint32)
    return torch.from_numpy(np.ascontiguousarray(out).view(np.int32))


def drawn(rng: np.random.Generator, O: int, E: int, bits: int, group: int, middle: bool) -> tuple[np.ndarray, ...]:
    """Numbers, zero points (all in the middle if `middle`) and float16 scales, each [O, ..]."""
    half = 1 << (bits - 1)
    q = rng.integers(0, 2 * half, (O, E))
    shape = O, -(-E // group)
    zero = np.full(shape, half) if middle else rng.integers(half - half // 4, half + half // 4, shape)
    return q, zero, ((1 + rng.random(shape)) * 1.5 / half * E**-0.5).astype(np.float16)


def formula(q: np.ndarray, zero: np.ndarray | float, scale: np.ndarray, rows: int, columns: int) -> Tensor:
    """(q - zero) * scale in float64, rounded to float32."""
    at = np.ix_(np.arange(q.shape[0]) // rows, np.arange(q.shape[1]) // columns)
    zero = zero[at] if isinstance(zero, np.ndarray) else zero
    return torch.from_numpy(((q - zero) * scale.astype(np.float64)[at]).astype(np.float32))


def gptq(bits: int, group: int, middle: bool, less: int = 1, index: bool = True) -> Callable[..., Written]:
    def write(O: int, E: int, rng: np.random.Generator) -> Written:
        size = E if group == -1 else group
        q, zero, scale = drawn(rng, O, E, bits, size, middle)
        tensors = {
            "qweight": words(q.T, bits, 0),
            "qzeros": words((zero.T - less) % (1 << bits), bits, 1),
            "scales": torch.from_numpy(scale.T.copy()),
        }
        if index:
            tensors["g_idx"] = torch.arange(E, dtype=torch.int32) // size
        return tensors, formula(q, zero, scale, 1, size)

    return write


def awq(group: int) -> Callable[..., Written]:
    def write(O: int, E: int, rng: np.random.Generator) -> Written:
        q, zero, scale = drawn(rng, O, E, 4, group, False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {
            "qweight": words(q.T, 4, 1, order),
            "qzeros": words(zero.T, 4, 1, order),
            "scales": torch.from_numpy(scale.T.copy()),
        }
        return tensors, formula(q, zero, scale, 1, group)

    return write


def fp8(rows: int, columns: int, scale_name: str, scalar: bool = False, dtype=torch.float32) -> Callable[..., Written]:
    """rows or columns 0: all."""

    def write(O: int, E: int, rng: np.random.Generator) -> Written:
        h, w = rows or O, columns or E
        q = torch.from_numpy(rng.standard_normal((O, E))).float().mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.from_numpy((1 + rng.random((-(-O // h), -(-E // w)))) / 120 * E**-0.5).to(dtype)
        expected = formula(q.double().numpy(), 0.0, scale.double().numpy(), h, w)
        return {"weight": q, scale_name: scale.reshape(()) if scalar else scale}, expected

    return write


def packed(bits: int, group: int, symmetric: bool, dtype=torch.float16) -> Callable[..., Written]:
    def write(O: int, E: int, rng: np.random.Generator) -> Written:
        size = E if group == -1 else group
        q, zero, scale = drawn(rng, O, E, bits, size, symmetric)
        scales = torch.from_numpy(scale).to(dtype)
        tensors = {
            "weight_packed": words(q, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor([O, E]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zero, bits, 0)
        return tensors, formula(q, zero, scales.double().numpy(), 1, size)

    return write


def plain(bits: int, rows: int, columns: int, symmetric: bool) -> Callable[..., Written]:
    def write(O: int, E: int, rng: np.random.Generator) -> Written:
        h, w, half = rows or O, columns or E, 1 << (bits - 1)
        shape = -(-O // h), -(-E // w)
        q = rng.integers(-half, half, (O, E))
        zero = np.zeros(shape, int) if symmetric else rng.integers(-half // 4, half // 4, shape)
        scale = ((1 + rng.random(shape)) * 1.5 / half * E**-0.5).astype(np.float16)
        tensors = {"weight": torch.from_numpy(q.astype(np.int8)), "weight_scale": torch.from_numpy(scale)}
        if not rows:
            tensors["weight_scale"] = tensors["weight_scale"].reshape(1)
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(zero.astype(np.int8))
        return tensors, formula(q, zero, scale, h, w)

    return write


def group_of(
    form: str, bits: int, strategy: str, kind: str = "int", targets=("Linear",), **more: Any
) -> dict[str, Any]:
    """A config group of compressed-tensors."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {"targets": list(targets), "weights": weights, "format": form}


def compressed(*groups: dict[str, Any], ignore=("lm_head",), **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": groups[0]["format"] if len(groups) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {f"group_{n}": each for n, each in enumerate(groups)},
        "ignore": list(ignore),
        **more,
    }


@dataclass(frozen=True)
class Format:
    settings: dict[str, Any]  # quantization_config
    write: Callable[..., Written]
    kind: str  # what the run has
    shifts: bool
    name: str  # in messages


def of_gptq(bits: int, group: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False, **more}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
W8A8 = {"input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}}


def a_gptq(bits: int, group: int, middle: bool, less: int = 1, index: bool = True, **settings: Any) -> Format:
    name = f"GPTQ ({bits} bits, {'one scale a row' if group == -1 else f'groups of {group}'})"
    write = gptq(bits, group, middle, less, index)
    return Format(of_gptq(bits, group, middle, **settings), write, f"int{bits}", not middle, name)


def an_fp8(blocks: str, write: Callable[..., Written], **settings: Any) -> Format:
    return Format(FP8 | settings, write, "fp8", False, f"fp8 ({blocks})")


def a_ct(group: dict[str, Any], write: Callable[..., Written], kind: str, blocks: str) -> Format:
    weights = group["weights"]
    name = f"compressed-tensors ({group['format']}, {weights['num_bits']} bits, {blocks})"
    return Format(compressed(group), write, kind, not weights["symmetric"], name)


PACKED = "pack-quantized"
INT = "int-quantized"
FLOAT = "float-quantized"
FORMATS = {
    "gptq": a_gptq(4, 32, True),
    "gptq-asymmetric": a_gptq(4, 32, False, index=False),
    "gptq-rows": a_gptq(4, -1, True),
    "gptq-8": a_gptq(8, 32, True),
    "gptq-8-asymmetric": a_gptq(8, 32, False),
    "gptq-v2": a_gptq(4, 32, False, less=0, checkpoint_format="gptq_v2"),
    "gptq-v2-zeros-in-v1": a_gptq(4, 32, True, less=0, checkpoint_format="gptq"),
    "awq": Format(AWQ, awq(32), "int4", True, "AWQ (4 bits, groups of 32)"),
    "fp8-blocks": an_fp8("blocks of 128 x 128", fp8(128, 128, "weight_scale_inv")),
    "fp8-blocks-bfloat16": an_fp8(
        "blocks of 16 x 32", fp8(16, 32, "weight_scale_inv", dtype=torch.bfloat16), weight_block_size=[16, 32]
    ),
    "fp8-matrix": an_fp8(
        "one scale a matrix",
        fp8(0, 0, "weight_scale", scalar=True),
        weight_block_size=None,
        activation_scheme="static",
    ),
    "fp8-matrix-inv": an_fp8("one scale a matrix", fp8(0, 0, "weight_scale_inv"), weight_block_size=None),
    "packed-4": a_ct(group_of(PACKED, 4, "group", group_size=32), packed(4, 32, True), "int4", "groups of 32"),
    "packed-4-asymmetric": a_ct(
        group_of(PACKED, 4, "group", group_size=32, symmetric=False),
        packed(4, 32, False, torch.bfloat16),
        "int4",
        "groups of 32",
    ),
    "packed-8-rows": a_ct(group_of(PACKED, 8, "channel"), packed(8, -1, True), "int8", "one scale a row"),
    "packed-8-asymmetric": a_ct(
        group_of(PACKED, 8, "group", group_size=16, symmetric=False), packed(8, 16, False), "int8", "groups of 16"
    ),
    "int8-rows": a_ct(group_of(INT, 8, "channel") | W8A8, plain(8, 1, 0, True), "int8", "one scale a row"),
    "int8-asymmetric": a_ct(
        group_of(INT, 8, "group", group_size=32, symmetric=False), plain(8, 1, 32, False), "int8", "groups of 32"
    ),
    "int8-matrix": a_ct(group_of(INT, 8, "tensor"), plain(8, 0, 0, True), "int8", "one scale a matrix"),
    "int4-in-int8": a_ct(group_of(INT, 4, "channel"), plain(4, 1, 0, True), "int8", "one scale a row"),
    "float-rows": a_ct(group_of(FLOAT, 8, "channel", "float"), fp8(1, 0, "weight_scale"), "fp8", "one scale a row"),
    "float-blocks": a_ct(
        group_of(FLOAT, 8, "block", "float", block_structure=[128, 128]),
        fp8(128, 128, "weight_scale"),
        "fp8",
        "blocks of 128 x 128",
    ),
    "float-matrix": a_ct(
        group_of(FLOAT, 8, "tensor", "float"), fp8(0, 0, "weight_scale", scalar=True), "fp8", "one scale a matrix"
    ),
}


def quantise(
    folder: Path, form: Format, only: Callable[[str], bool] = lambda _: True, seed: int = 0
) -> dict[str, Tensor]:
    """Replace the layers' matrices by drawn ones. Returns their weights by name."""
    rng = np.random.default_rng(seed)
    tensors, expected = {}, {}
    for name, x in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if x.dim() == 2 and any(part in name for part in ("proj", ".experts.", ".feed_forward.")) and only(module):
            parts, expected[name] = form.write(x.shape[0], x.shape[1], rng)
            tensors |= {f"{module}.{part}": y for part, y in parts.items()}
        else:
            tensors[name] = x
    save_file(tensors, folder / "model.safetensors")
    edit(folder, quantization_config=form.settings)
    return expected


def reference(folder: Path, expected: dict[str, Tensor]) -> Any:
    """transformers' unquantised model of `folder` with the expected matrices, in float64."""
    model = oracle(folder, torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in expected:
                p.copy_(expected[name])
    return model.double()


def greedy(model: Any, count: int = 30) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return out[0, len(PROMPT) :].tolist()


def equal_weights(folder: Path, expected: dict[str, Tensor], **options: Any) -> Any:
    """Compare all matrices of the run with the expected ones, packed for the CPU and not. Returns the latter."""
    found, packed = (read(folder, dtype=torch.float32, device="cpu", pack=p, **options).weights for p in (False, True))
    names = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    for buffer, modules in names.items():
        for layer in range(SIZES["layers"]):
            want = torch.cat([expected[f"model.layers.{layer}.{module}.weight"] for module in modules])
            for got in (getattr(found, buffer)[layer], getattr(packed, buffer)[layer]):
                assert torch.equal(got if isinstance(got, Tensor) else got.dequantised(torch.float32), want), buffer
    return found


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_the_weights_are_the_formulas(tmp_path, form):
    folder = make(tmp_path, **SIZES)
    expected = quantise(folder, form)
    found = equal_weights(folder, expected)
    assert {found.qkv[1].kind, found.down[1].kind} == {form.kind}
    assert (found.o[0].shift is not None) is form.shifts
    assert isinstance(found.head, Tensor) and read_config(folder).hidden_size == 64
    scheme = scheme_of(json.loads((folder / "config.json").read_text()), "x")
    assert scheme is not None and scheme.name == form.name
    equal_weights(folder, expected, quantize="none")


@pytest.mark.parametrize("name", cases.one_in(4, FORMATS))
def test_tokens_are_those_of_transformers(tmp_path, name):
    folder = make(tmp_path / "plain", arch="qwen2", **SIZES)  # its qkv has a bias
    model = reference(folder, expected := quantise(make(tmp_path / "quantised", arch="qwen2", **SIZES), FORMATS[name]))
    engine = specker.load(tmp_path / "quantised", strategy="ar", dtype="float64", device="cpu")
    want = greedy(model)
    assert len(expected) == 14 and len(set(want)) > 5, "this text proves little"
    assert engine.generate(PROMPT, 30).tokens == want


@pytest.mark.parametrize(
    ("name", "kind"), cases.diagonal(["gptq", "awq", "fp8-blocks", "packed-4", "int8-rows"], ["qwen3.5", "lfm2"])
)
def test_recurrent_layers(tmp_path, name, kind):
    """Their in- and out-projections stay quantised; the gates a and b do not, though the file has them quantised."""
    options = LFM2 if kind == "lfm2" else QWEN3_5 | {"linear_num_value_heads": 8}
    sizes = {**options, **SIZES, "hidden": 128, "layers": 4, "tied": False}
    sizes |= {"layer_types": ["conv", "conv", "full_attention", "conv"]} if kind == "lfm2" else {}
    folder, other = make(tmp_path / "plain", **sizes), make(tmp_path / "quantised", **sizes)
    model = reference(folder, expected := quantise(other, FORMATS[name]))
    want = greedy(model)
    engine = specker.load(other, strategy="ar", dtype="float64", device="cpu")
    assert len(expected) > 10 and len(set(want)) > 5, "this text proves little"
    assert engine.generate(PROMPT, 30).tokens == want
    w = specker.load(other, strategy="ar", dtype="float32", device="cpu").target.weights
    kinds = [isinstance(x, Packed) for stack in (w.qkv, w.o) for x in stack]
    assert all(kinds) and (kind == "lfm2" or isinstance(w.gates[0], Tensor))


EXPERTS = {
    "mixtral": (MIXTRAL, "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": (QWEN3_MOE, "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "lfm2_moe": (
        LFM2_MOE | {"layer_types": ["full_attention"], "num_dense_layers": 0},
        "feed_forward.experts",
        ("w1", "w3", "w2"),
    ),
}


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-blocks", "packed-4", "int8-rows"])
@pytest.mark.parametrize("arch", EXPERTS)
def test_experts_are_read_by_their_names(tmp_path, arch, name):
    options, module, parts = EXPERTS[arch]
    form = FORMATS[name]
    folder = make(tmp_path, **SIZES | options | {"layers": 1, "moe_intermediate_size": 64, "ffn": 64})
    expected = quantise(folder, form, lambda module: not module.endswith(".gate"))
    count = options.get("num_experts") or options["num_local_experts"]
    gate, up, down = ([expected[f"model.layers.0.{module}.{n}.{p}.weight"] for n in range(count)] for p in parts)
    w = read(folder, dtype=torch.float32, device="cpu").weights
    assert w.gate_up[0].kinds == w.down[0].kinds == {form.kind}
    want = torch.cat([x for pair in zip(gate, up, strict=True) for x in pair])
    assert torch.equal(w.gate_up[0].dequantised(torch.float32), want)
    assert torch.equal(w.down[0].dequantised(torch.float32), torch.cat(down))


def test_zero_points_below_one(tmp_path):
    """GPTQ's first format stores zero point 0 as 15, which no reader may take for 16."""

    def write(O: int, E: int, rng: np.random.Generator) -> Written:
        q, zero, scale = drawn(rng, O, E, 4, 32, False)
        zero[:] = rng.integers(0, 2, zero.shape)
        tensors = {
            "qweight": words(q.T, 4, 0),
            "qzeros": words((zero.T - 1) % 16, 4, 1),
            "scales": torch.from_numpy(scale.T.copy()),
        }
        return tensors, formula(q, zero, scale, 1, 32)

    folder = make(tmp_path, **SIZES)
    equal_weights(folder, quantise(folder, Format(of_gptq(4, 32, False), write, "int4", True, "")))


@pytest.mark.parametrize("symmetric", [True, False])
def test_float32_scales(tmp_path, symmetric):
    """w is rounded once if there are no zero points; with them the shift is rounded too."""

    def write(O: int, E: int, rng: np.random.Generator) -> Written:
        q, zero, _ = drawn(rng, O, E, 4, 32, symmetric)
        scale = ((1 + rng.random(zero.shape)) / 40).astype(np.float32)
        tensors = {"weight_packed": words(q, 4, 1), "weight_scale": torch.from_numpy(scale)}
        if not symmetric:
            tensors["weight_zero_point"] = words(zero, 4, 0)
        return tensors, formula(q, zero, scale, 1, 32)

    folder = make(tmp_path, **SIZES)
    settings = compressed(group_of("pack-quantized", 4, "group", group_size=32, symmetric=symmetric))
    expected = quantise(folder, Format(settings, write, "int4", not symmetric, ""))
    if symmetric:
        equal_weights(folder, expected)
    else:
        got = read(folder, dtype=torch.float32, device="cpu").weights.o[1].dequantised(torch.float32)
        want = expected["model.layers.1.self_attn.o_proj.weight"]
        torch.testing.assert_close(got, want, rtol=2**-23, atol=2**-24 * 15 / 20)


def test_a_last_block_that_is_smaller(tmp_path):
    """130 rows and 160 columns in blocks of 128 x 128: groups of 32 columns."""
    folder = make(tmp_path, **SIZES | {"ffn": 160})
    expected = quantise(folder, FORMATS["fp8-blocks"])
    assert equal_weights(folder, expected).down[0].group == 32
    scheme = scheme_of({"quantization_config": FP8}, "x")
    parts, want = FORMATS["fp8-blocks"].write(130, 160, np.random.default_rng(0))
    assert scheme is not None and scheme.stored("q_proj", (130, 160))["q_proj.weight_scale_inv"][0] == (2, 2)
    got = scheme.read("q_proj", (130, 160), lambda name: parts.get(name.removeprefix("q_proj.")))
    assert torch.equal(got.dequantised(torch.float32), want)


def test_modules_that_are_not_quantised(tmp_path):
    """Each method's own list."""
    down = "model.layers.1.mlp.down_proj"
    lists = {
        "gptq": {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.gate_proj"]]},
        "gptq-v2": {"dynamic": {r"-:.*\.1\.mlp\.down_proj": {}}},
        "awq": {"modules_to_not_convert": ["self_attn", down]},
        "fp8-blocks": {"modules_to_not_convert": ["lm_head", "model.layers.1", "mlp.gate"]},
        "packed-4": {"ignore": ["lm_head", down, r"re:.*self_attn\.[qk]_proj"]},
    }
    kept = {
        "gptq": lambda m: m.endswith(("q_proj", "k_proj", "gate_proj")),
        "gptq-v2": lambda m: m != down,
        "awq": lambda m: "self_attn" not in m and m != down,
        "fp8-blocks": lambda m: "layers.1" not in m,
        "packed-4": lambda m: m != down and not m.endswith(("q_proj", "k_proj")),
    }
    for name, more in lists.items():
        folder = make(tmp_path / name, **SIZES)
        dense = load_file(folder / "model.safetensors")
        form = FORMATS[name]
        form = Format({**form.settings, **more}, form.write, form.kind, form.shifts, form.name)
        expected = quantise(folder, form, kept[name])
        assert 0 < len(expected) < 14
        equal_weights(folder, dense | expected)


def test_config_groups_name_their_modules(tmp_path):
    """A name comes before a pattern, a pattern before Linear; also the head."""
    settings = compressed(
        group_of("pack-quantized", 4, "group", group_size=32),
        group_of("int-quantized", 8, "channel", targets=[r"re:.*self_attn.*", "lm_head"]),
        group_of("float-quantized", 8, "tensor", "float", targets=["model.layers.0.self_attn.o_proj"]),
        {"targets": ["re:.*norm"], "weights": None, "input_activations": {}, "format": None},
        ignore=[],
    )
    forms = {name: FORMATS[name].write for name in ("packed-4", "int8-rows", "float-matrix")}
    folder = make(tmp_path, **SIZES)
    rng, tensors, expected = np.random.default_rng(0), {}, {}
    for name, x in load_file(folder / "model.safetensors").items():
        if not ("proj" in name or "lm_head" in name):
            tensors[name] = x
            continue
        which = "float-matrix" if name.endswith("0.self_attn.o_proj.weight") else "int8-rows"
        parts, expected[name] = forms["packed-4" if "mlp" in name else which](*x.shape, rng)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": y for part, y in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    edit(folder, quantization_config=..., compression_config=settings)
    found = equal_weights(folder, expected)
    assert (found.down[1].kind, found.qkv[0].kind, found.o[0].kind, found.o[1].kind) == ("int4", "int8", "fp8", "int8")
    assert torch.equal(found.head.dequantised(torch.float32), expected["lm_head.weight"])


@pytest.mark.parametrize("extra", ["input_scale", "weight_zero_point"])
def test_tensors_that_change_nothing(tmp_path, extra):
    folder = make(tmp_path, **SIZES)
    expected = quantise(folder, FORMATS["int8-rows"])
    state = load_file(folder / "model.safetensors")
    for name in expected:
        state[name.removesuffix("weight") + extra] = torch.zeros(1)
    save_file(state, folder / "model.safetensors")
    equal_weights(folder, expected)


# --- the libraries' own -------------------------------------------------------------------------------------------

PRESETS = ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"]


@pytest.mark.parametrize("preset", PRESETS)
def test_checkpoints_that_compressed_tensors_wrote(tmp_path, preset):
    """As llm-compressor writes them: weights and tokens are those of transformers' dequantised model."""
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    sizes = SIZES | {"hidden": 256, "head_dim": 64, "ffn": 384}
    model = oracle(make(tmp_path / "plain", **sizes), torch.float32)
    config = QuantizationConfig(
        config_groups={preset: ["Linear"]}, ignore=["lm_head"], quantization_status=QuantizationStatus.INITIALIZED
    )
    apply_quantization_config(model, config)
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        rows = module.weight.detach()
        if scheme.weights.strategy == "group":
            rows = rows.unflatten(-1, (-1, scheme.weights.group_size))
        elif scheme.weights.strategy == "block":
            h, w = scheme.weights.block_structure
            rows = rows.unflatten(0, (-1, h)).unflatten(-1, (-1, w)).transpose(1, 2).flatten(-2)
        elif scheme.weights.strategy == "tensor":
            rows = rows.flatten()
        low, high = rows.aminmax(dim=-1)
        scale, zero = calculate_qparams(low, high, scheme.weights)
        with torch.no_grad():  # few digits: the weights are then exact in any order of operations
            module.weight_scale.copy_(scale.bfloat16().reshape(module.weight_scale.shape))
            if not scheme.weights.symmetric:
                module.weight_zero_point.copy_(zero.reshape(module.weight_zero_point.shape))
    compressor = library.compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "quantised")
    compressor.update_config(tmp_path / "quantised")

    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    restored = AutoModelForCausalLM.from_pretrained(
        tmp_path / "quantised",
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    expected = {name: p.detach() for name, p in restored.named_parameters() if "proj" in name}
    found = equal_weights(tmp_path / "quantised", expected)
    assert isinstance(found.o[0], Quantized)
    engine = specker.load(tmp_path / "quantised", strategy="ar", dtype="float64", device="cpu")
    assert engine.generate(PROMPT, 30).tokens == greedy(restored.double())


def test_fp8_checkpoints_as_transformers_dequantises_them(tmp_path):
    pytest.importorskip("accelerate")
    folder = make(tmp_path, **SIZES | {"hidden": 256, "ffn": 384, "head_dim": 64})
    expected = quantise(folder, FORMATS["fp8-blocks"])
    model = oracle(folder, torch.float32)
    restored = {name: p.detach() for name, p in model.named_parameters() if name in expected}
    assert restored["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    equal_weights(folder, restored)
    engine = specker.load(folder, strategy="ar", dtype="float64", device="cpu")
    assert engine.generate(PROMPT, 30).tokens == greedy(model.double())


# --- what is refused ----------------------------------------------------------------------------------------------


def ct(**weights: Any) -> dict[str, Any]:
    """compressed-tensors' settings with changes in those of the weights."""
    return compressed(group_of("pack-quantized", 4, "group", group_size=32) | {"weights": WEIGHTS | weights})


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
CT = "compressed-tensors"
REFUSALS: list[tuple[dict[str, Any], str]] = [  # quantization_config, what the message names
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"load_in_4bit": True}, "unknown method"),
    (of_gptq(3, 128, True), "gptq with 3 bits"),
    (of_gptq(4, 128, True, desc_act=True), "gptq with desc_act"),
    (of_gptq(4, 128, True, checkpoint_format="marlin"), "gptq in the format marlin"),
    (of_gptq(4, 128, True, is_marlin_format=True), "gptq in the format marlin"),
    (of_gptq(4, 128, True, dynamic={"+:.*down.*": {"bits": 8}}), "gptq with settings for single modules"),
    ({**AWQ, "version": "gemv"}, "awq in the version gemv"),
    ({**AWQ, "bits": 8}, "awq with 8 bits"),
    ({**AWQ, "zero_point": False}, "awq without zero points"),
    ({**FP8, "fmt": "e5m2"}, "fp8 in the format e5m2"),
    ({**FP8, "kv_cache_scheme": "static"}, "fp8 with a quantised KV cache"),
    (ct() | {"kv_cache_scheme": {"num_bits": 8}}, f"{CT} with a quantised KV cache"),
    (
        ct() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        f"{CT} with sparsity in the format sparse-24-bitmask",
    ),
    (ct() | {"transform_config": {"config_groups": {"R1": {}}}}, f"{CT} with transforms"),
    (ct() | {"quantization_status": "frozen"}, f"{CT} with the status frozen"),
    (compressed(group_of("marlin-24", 4, "group", group_size=32)), f"{CT} in the format marlin-24"),
    (
        compressed(group_of("nvfp4-pack-quantized", 4, "tensor_group", "float")),
        f"{CT} in the format nvfp4-pack-quantized",
    ),
    (
        compressed(group_of("pack-quantized", 4, "group") | {"output_activations": {"num_bits": 8}}),
        f"{CT} with quantised outputs",
    ),
    (ct(num_bits=2), f"{CT}: pack-quantized with 2 bits of type int"),
    (
        compressed(group_of("float-quantized", 8, "channel", "float", symmetric=False)),
        f"{CT}: float-quantized with 8 bits of type float and zero points",
    ),
    (ct(actorder="group"), f"{CT} with actorder group"),
    (ct(dynamic=True), f"{CT} with dynamic scales of weights"),
    (ct(strategy="tensor_group"), f"{CT} with the strategy tensor_group"),
    (ct(strategy="tensor", symmetric=False), f"{CT}: pack-quantized with zero points and the strategy tensor"),
]


@pytest.mark.parametrize("settings, named", REFUSALS, ids=[named for _, named in REFUSALS])
def test_what_is_not_supported_is_named(settings, named):
    with pytest.raises(CheckpointError) as refusal:
        scheme_of({"quantization_config": settings}, "x")
    assert str(refusal.value) == f"quantised weights ({named}) are not supported; use the unquantised checkpoint"


@pytest.mark.parametrize(
    "settings",
    [
        "gptq",
        {"quant_method": "gptq"},
        of_gptq(4, -2, True),
        {**FP8, "weight_block_size": [128]},
        {**FP8, "weight_block_size": [0, 128]},  # columns of no rows
        of_gptq(4, float("inf"), True),
        {"quant_method": "specker", "modules": {}, "restored": 5},
        compressed(group_of("pack-quantized", 4, "group")),
        ct() | {"ignore": ["re:("]},
        {"quant_method": "compressed-tensors", "config_groups": []},
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings):
    with pytest.raises(CheckpointError, match=r"the quantization_config of x cannot be read \(\w+"):
        scheme_of({"quantization_config": settings}, "x")


def test_experts_that_are_no_number():
    with pytest.raises(CheckpointError, match="num_local_experts must be a whole number from 1 to 4096, but x has 'a'"):
        scheme_of({"quantization_config": {"quant_method": "mxfp4"}, "num_local_experts": "a"}, "x")


def test_no_settings():
    assert scheme_of({}, "x") is None and scheme_of({"quantization_config": None}, "x") is None


MODULE = "model.layers.1.mlp.up_proj"
FILES: list[tuple[str, str, Callable[[dict[str, Tensor]], Any], str]] = [  # format, id, change, message
    ("gptq", "missing", lambda s: s.pop(f"{MODULE}.qzeros"), rf"the checkpoint lacks {MODULE}\.qzeros"),
    (
        "gptq",
        "act-order",
        lambda s: s[f"{MODULE}.g_idx"].copy_(s[f"{MODULE}.g_idx"].flip(0)),
        rf"{MODULE}.g_idx is not in order: .* \(gptq with desc_act\) are not supported",
    ),
    (
        "gptq",
        "dtype",
        lambda s: s.update({f"{MODULE}.qweight": s[f"{MODULE}.qweight"].long()}),
        rf"{MODULE}.qweight is stored as I64, but config.json with GPTQ \(4 bits, groups of 32\) makes it otherwise",
    ),
    (
        "awq",
        "shape",
        lambda s: s.update({f"{MODULE}.scales": s[f"{MODULE}.scales"][:1]}),
        rf"{MODULE}.scales has shape \(1, 96\), but config.json makes it \(2, 96\)",
    ),
    (
        "awq",
        "unquantised",
        lambda s: s.update({f"{MODULE}.weight": torch.zeros(96, 64)}),
        rf"the checkpoint has {MODULE}.weight, which LlamaForCausalLM with this config.json does not use",
    ),
    ("fp8-matrix", "scale", lambda s: s.pop(f"{MODULE}.weight_scale"), rf"the checkpoint lacks {MODULE}.weight_scale,"),
    (
        "float-matrix",
        "scales",
        lambda s: s.update({f"{MODULE}.weight_scale": torch.ones(2)}),
        rf"{MODULE}.weight_scale has shape \(2,\), but config.json makes it one number",
    ),
    (
        "packed-4-asymmetric",
        "zeros",
        lambda s: s.pop(f"{MODULE}.weight_zero_point"),
        rf"the checkpoint lacks {MODULE}.weight_zero_point",
    ),
    (
        "fp8-blocks",
        "head",
        lambda s: s.update({"lm_head.weight": s["lm_head.weight"].to(torch.float8_e4m3fn)}),
        "lm_head.weight is stored as F8_E4M3",
    ),
]


@pytest.mark.parametrize("name, change, message", [f[:1] + f[2:] for f in FILES], ids=[f"{f[0]}-{f[1]}" for f in FILES])
def test_files_that_do_not_fit_are_refused(tmp_path, name, change, message):
    folder = make(tmp_path, **SIZES)
    quantise(folder, FORMATS[name])
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read(folder, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    "name, ffn, more, message",
    [
        ("gptq", 80, {}, "int4 needs groups of a multiple of 32 columns .*; got 80 columns in groups of 16"),
        ("awq", 96, {"group_size": 16}, "int4 needs groups of .*; got 64 columns in groups of 16"),
        ("fp8-blocks", 72, {}, "fp8 needs groups of a multiple of 16 columns .*; got 72 columns in groups of 8"),
    ],
)
def test_groups_that_the_kernels_cannot_take(tmp_path, name, ffn, more, message):
    """Found before any weight is read."""
    folder = make(tmp_path, **SIZES | {"ffn": ffn})
    edit(folder, quantization_config={**FORMATS[name].settings, **more})
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=rf"the quantised weights of model\.layers\.0\..*_proj cannot be read: {message}"
    ):
        read(folder, dtype=torch.float32, device="cpu")
