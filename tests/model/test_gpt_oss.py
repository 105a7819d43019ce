"""gpt-oss: sinks, biases and gates of experts, and its files, against transformers' model."""

import json
from types import SimpleNamespace

import pytest
import torch
from make_checkpoint import FULL, GPT_OSS, SLIDING, edit, exact_oracle, make, oracle, oracle_logits
from make_head import make_head
from safetensors.torch import load_file, save_file

import specker
from specker.checkpoints.checkpoint import read
from specker.model import prefill as chunks
from specker.model.cache import KVCache
from specker.model.config import CheckpointError, LayerSpec
from specker.model.decoder import Model, forward
from specker.model.prefill import prefill
from specker.model.split import Part
from specker.runtime.control.policy import Budget
from specker.runtime.engine import check_draft

F64 = torch.float64
TEXT = torch.randint(0, 128, (90,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("gpt_oss"), **GPT_OSS)


def logits(model, rings, chunk):
    """After each of the last 30 tokens of TEXT, of which 20 rows follow a prefill in chunks: a prompt of seven windows
    and a verify pass longer than one."""
    cache = KVCache(model.config, 256, dtype=F64, device="cpu", page_size=16, rings=rings)
    cache.k.fill_(torch.nan), cache.v.fill_(torch.nan)
    with torch.inference_mode():
        kept = prefill(model, cache, TEXT[:70], aux_layers=(3,), last=10, chunk=chunk)[3]
        rows = forward(model, cache, cache.after([70], [20]), model.embed_tokens(torch.tensor(TEXT[70:]))).hidden
        return model.logits(specker.model.decoder.Final(torch.cat((kept, rows))))


@pytest.mark.parametrize(("rings", "chunk"), [(False, 7), (False, 70), (True, 16)])
def test_logits_of_long_texts_are_those_of_transformers(folder, rings, chunk, monkeypatch):
    exact_oracle(monkeypatch)
    model = Model(read(folder, dtype=F64, device="cpu"))
    want = oracle_logits(oracle(folder, F64), torch.tensor(TEXT))[60:]
    assert (logits(model, rings, chunk) - want).abs().max() < 1e-9
    assert model.config.layer.sliding_windows == (12, 0, 12)


@pytest.mark.parametrize("name", ["sinks", "router_bias", "gate_up_bias", "down_bias", "qkv_bias", "o_bias"])
def test_every_bias_and_the_sinks_change_the_logits(folder, name):
    """Or the test above would prove nothing about them."""
    ck = read(folder, dtype=F64, device="cpu")
    want = logits(Model(ck), False, 70)
    vector = getattr(ck.weights, name)
    vector.fill_(-torch.inf if name == "sinks" else 0)
    assert (logits(Model(ck), False, 70) - want).abs().max() > 1e-2


def test_flash_attention_with_sinks_is_the_formula(monkeypatch):
    """From the log-sum-exp that it returns; on a GPU, tests/model/test_model.py runs it."""

    def fake(q, k, v, *rest, scale, window_size_left, window_size_right):
        assert (rest[:4], rest[5:], window_size_right) == ((None, None, 5, 9), (True, False), 0)
        k, v = (x[0].repeat_interleave(2, 1) for x in (k, v))
        z = torch.einsum("tgd,sgd->gts", q[0], k) * scale
        row, column = torch.arange(4, 9)[:, None], torch.arange(9)
        z = z.masked_fill((column > row) | (column < row - window_size_left), -torch.inf)
        return torch.einsum("gts,sgd->tgd", z.softmax(-1), v)[None], z.logsumexp(-1)[None], None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", fake)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, h, 16, generator=g) for n, h in ((5, 4), (9, 2), (9, 2)))
    sinks = torch.tensor([[-3.0, 0.5, 2.0, 30.0]])
    got = chunks.flash(q, k, v, True, 3, 0.25, sinks)
    assert (got - chunks.attend_with_sinks(q, k, v, 3, 0.25, sinks)).abs().max() < 1e-6
    assert got[:, 3].abs().max() < 1e-9 < got[:, 2].abs().max()


def test_rows_of_gate_and_up_are_taken_apart(folder):
    ck, given = read(folder, dtype=torch.float32, device="cpu"), load_file(folder / "model.safetensors")
    for n in range(3):
        experts = {name: given[f"model.layers.{n}.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj")}
        both = experts["gate_up_proj"].mT
        apart = torch.cat((both[:, ::2], both[:, 1::2]), 1)
        assert torch.equal(ck.weights.gate_up[n], apart.flatten(0, 1)) and apart.shape == (6, 64, 64)
        assert torch.equal(ck.weights.down[n], experts["down_proj"].mT.flatten(0, 1))
        bias = given[f"model.layers.{n}.mlp.experts.gate_up_proj_bias"]
        assert torch.equal(ck.weights.gate_up_bias[n], torch.cat((bias[:, ::2], bias[:, 1::2]), 1))


def test_a_rank_has_its_heads_and_columns(folder):
    whole = read(folder, dtype=torch.float32, device="cpu").weights
    parts = [read(folder, dtype=torch.float32, device="cpu", part=Part(n, 2)).weights for n in range(2)]
    assert torch.equal(torch.cat([p.sinks for p in parts], -1), whole.sinks)
    for name in ("gate_up", "gate_up_bias"):
        rows = [getattr(p, name).view(3, 6, 2, 16, -1) for p in parts]
        assert torch.equal(torch.cat(rows, 3).flatten(), getattr(whole, name).flatten())
    assert torch.equal(torch.cat([p.down for p in parts], -1), whole.down)
    assert torch.equal(parts[0].down_bias, whole.down_bias) and not parts[1].down_bias.any()
    assert all(torch.equal(p.router_bias, whole.router_bias) for p in parts)


def test_an_eagle_head_reads_its_hidden_rows(folder, tmp_path):
    like = json.loads((folder / "config.json").read_text())
    head = make_head(tmp_path / "head", like, layout="nested", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    engine = specker.load(folder, head, strategy="eagle", draft_tokens=3, dtype="float64")
    out = engine.generate(TEXT[:30], max_new_tokens=12)
    assert out.tokens == engine.generate_ar(TEXT[:30], max_new_tokens=12).tokens and out.stats.drafted > 10


def test_transformers_runs_it_itself(folder):
    """Its experts lie in memory otherwise than the decoder needs them."""
    from specker.integrations.adopt import adopt

    assert adopt(oracle(folder), 64, folder) is None


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
CHANGES = [
    ({"swiglu_limit": 10.0}, r"swiglu_limit 10\.0 is not supported; it must be 7\.0"),
    ({"swiglu_alpha": 1.0}, r"swiglu_alpha 1\.0 is not supported; it must be 1\.702"),
    ({"quantization_config": MXFP4}, r"the checkpoint lacks model\.layers\.0\.mlp\.experts\.gate_up_proj_blocks"),
    ({"num_local_experts": ...}, "num_local_experts must be a whole number from 1 to 4096, but .* lacks it"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 must be at most the number of experts, 6"),
    ({"layer_types": [SLIDING, "chunked", FULL]}, "chunked"),
    ({"num_local_experts": 5}, r"router\.weight has shape \(6, 64\), but config.json makes it \(5, 64\)"),
    ({"attention_bias": False}, r"bias, which GptOssForCausalLM"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=str)
def test_refusals(tmp_path, change, message):
    made = make(tmp_path, **GPT_OSS)
    edit(made, **change)
    with pytest.raises(CheckpointError, match=message):
        read(made, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("name", ["self_attn.sinks", "mlp.router.bias", "mlp.experts.gate_up_proj_bias"])
def test_a_missing_or_misshapen_tensor_is_refused(tmp_path, name):
    made, name = make(tmp_path, **GPT_OSS), f"model.layers.1.{name}"
    for way in ("short", "missing"):
        weights = load_file(made / "model.safetensors")
        tensor = weights.pop(name)
        if way == "short":
            weights[name] = tensor[..., :-1].clone()
        save_file(weights, made / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            read(made, dtype=torch.float32, device="cpu")


def test_drafts_on_a_gpu_are_no_longer_than_its_window():
    """Whose kernel hides no column of a verify pass, and counts in words of 64 columns."""

    def model(windows, cuda=True):
        spec = SimpleNamespace(layer=LayerSpec(sliding_windows=windows))
        return SimpleNamespace(config=spec, weights=SimpleNamespace(norm=SimpleNamespace(is_cuda=cuda)))

    for nodes, windows, cuda in ((127, (128, 0), True), (128, (128, 0), False), (255, (300,), True), (500, (0,), True)):
        check_draft(Budget(nodes, 4), [model(windows, cuda), model(())])
    with pytest.raises(ValueError, match=r"a draft of 128 tokens is too large on a GPU .* of 128: the most are 127 "):
        check_draft(Budget(128, 4), [model(()), model((0, 128))])
