"""Mixtures of experts as targets: what a verify pass reads, and what that costs."""

import json
from dataclasses import replace

import cases
import pytest
import torch
from make_checkpoint import FULL, GPT_OSS, LFM2_MOE, MIXTRAL, QWEN3_MOE, SLIDING, edit, exact_oracle, make, oracle
from pairs import perturbed
from recorded import kernels, recording
from safetensors.torch import load_file, save_file
from since import since

import specker
from specker.checkpoints.checkpoint import read, read_config
from specker.cli.screen import Screen
from specker.model import memory
from specker.model.cache import KVCache
from specker.model.config import CheckpointError, Experts, layer_elements
from specker.model.decoder import Model, experts_read, forward
from specker.model.prefill import prefill
from specker.runtime import warmup
from specker.runtime.control.costs import Costs
from specker.runtime.control.stats import Stats

PROMPT = [5, 9, 40, 77, 3, 8, 5, 9, 40]
TWO = LFM2_MOE | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0}
DENSE = {**QWEN3_MOE, "layers": 4, "mlp_only_layers": [1]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("moe"), max_context=160, **DENSE)
    return target, perturbed(target, tmp_path_factory.mktemp("draft"), amount=0.05)


def union(model, text: list[int], rows: int) -> float:
    """How many experts the last `rows` tokens choose in a layer, on average, by transformers' routers."""
    with torch.no_grad():
        out = model(torch.tensor([text]), output_router_logits=True)
    chosen = [logits[-rows:].topk(model.config.num_experts_per_tok).indices for logits in out.router_logits]
    return sum(len(each.unique()) for each in chosen) / len(chosen)


HOW = {
    "ar": {"strategy": "ar"},
    "chain": {"strategy": "draft", "draft_tokens": 3},
    "exit": {"strategy": "del", "policy": "fixed", "exit_layer": 2, "draft_tokens": 3},
}


@pytest.mark.parametrize("how", HOW)
def test_the_experts_that_verify_passes_read(pair, how, monkeypatch):
    exact_oracle(monkeypatch)
    target, draft = pair
    engine = specker.load(target, draft if how == "chain" else None, dtype="float64", **HOW[how])
    rounds: list[dict] = []
    engine.trace = rounds.append
    out = engine.generate(PROMPT, max_new_tokens=24)
    model, text, total = oracle(target, torch.float64), PROMPT + out.tokens, 0.0
    for row in rounds:
        drafted = text[: row["position"]] + row["draft"]
        N = len(row["draft"])
        if how != "exit" or not N:
            total += union(model, drafted, N + 1)
            continue
        with torch.no_grad():  # the first layers ran on all rows but the last when they drafted
            logits = model(torch.tensor([drafted]), output_router_logits=True).router_logits
        sizes = [len(x[-1 if n < 1 else -N - 1 :].topk(3).indices.unique()) for n, x in enumerate(logits)]
        total += sum(sizes) / len(sizes)
    assert len(rounds) == out.stats.rounds and out.stats.experts_read == pytest.approx(total / len(rounds))
    assert (out.stats.experts_read == 3) is (how == "ar") and out.stats.to_json()["experts_read"] <= 6


def test_rounds_of_fixed_shape_count_them_too(pair):
    engine = specker.load(*pair, strategy="draft", draft_tokens=3, dtype="float64", graphs="on", batch_size=2)
    outs = engine.generate([PROMPT, PROMPT[:4]], max_new_tokens=20)
    assert all(3 < out.stats.experts_read <= 6 for out in outs)


def test_the_table_names_them(pair, capsys):
    engine = specker.load(pair[0], strategy="lookup", dtype="float64")
    screen = Screen(False)
    for stats, shown in ((Stats(tokens=4, rounds=2, experts=9.0), True), (Stats(tokens=4, rounds=2), False)):
        screen.table(engine, [specker.cli.report.Result([], "", stats)])
        text = capsys.readouterr()
        assert ("experts read per layer" in text.out + text.err) is shown and ("4.5" in text.out + text.err) is shown


def test_a_pass_reads_the_chosen_experts(pair):
    c = read(pair[0], dtype=torch.float32, device="cpu").config
    each, attention = 3 * 64 * 32, 64 * 16 * (2 * 4 + 2 * 2)
    rest = 4 * attention + 3 * 64 * 96 + 3 * 6 * 64  # a dense layer and three routers
    assert layer_elements(c) == rest + 3 * 3 * each
    assert layer_elements(c, 2) == rest + round(3 * 4.5 * each)
    assert layer_elements(c, 1000) == rest + 3 * 6 * each
    assert Experts(128, 8, 768, True).read(4) == pytest.approx(128 * (1 - (15 / 16) ** 4))


def test_weights_count_as_far_as_a_step_reads_them(pair):
    ck = read(pair[0], dtype=torch.float32, device="cpu")
    assert ck.layer_bytes == 4 * layer_elements(ck.config)


def test_more_rows_are_expected_to_cost_more():
    """Before anything is measured, and between the sizes that were."""
    reads = {1: 3.0, 2: 5.0, 3: 6.0, 4: 6.5}
    costs = Costs(lambda budget: 0.1, lambda rows: reads[min(4, max(1, int(rows)))])
    assert [costs.verify(1, n) / costs.plain(1) for n in (1, 2, 3)] == pytest.approx([1, 5 / 3, 2])
    assert costs.verify(2, 4) / costs.plain(2) == pytest.approx(6.5 / 5)
    costs._verifying(0).set(1, 0.006)
    costs._verifying(0).set(3, 0.012)
    assert costs.verify(1, 2) == pytest.approx(0.010)


@pytest.mark.parametrize("strategy", ["draft", "lookup"])
def test_the_measured_passes_have_different_tokens(pair, strategy, monkeypatch):
    engine = specker.load(pair[0], *pair[1:] * (strategy == "draft"), strategy=strategy, dtype="float64", batch_size=2)
    seen = []
    verify = warmup.launch

    def launch(r, *rest):
        verify(r, *rest)
        seen.append((r.batch.n, r.batch.window[:, : r.draft.size + 1].tolist()))

    monkeypatch.setattr(warmup, "launch", launch)
    monkeypatch.setattr(warmup, "MAX_SECONDS", 600.0)
    engine.warmup()
    sizes = {len(window[0]) for _, window in seen}
    assert max(sizes) > 4 and {n for n, _ in seen} == {1, 2}
    for n, window in seen:
        drafts = [row[1:] for row in window]
        assert all(len({*draft}) == len(draft) for draft in drafts)
        assert len({*map(tuple, drafts)}) == n or not drafts[0]


@torch.inference_mode()
def test_a_prompt_of_a_mixture_has_long_chunks_on_a_gpu(tmp_path, gpu_dtypes):
    """Each chunk reads nearly all experts, so 2,500 tokens are two chunks, and their rows stay in the kernel; a ring
    holds a chunk."""
    windows = {"sliding_window": 256, "use_sliding_window": True, "max_window_layers": 0}
    folder = make(tmp_path / "m", layers=2, max_context=4096, **QWEN3_MOE, **windows)
    model = Model(read(folder, dtype=torch.bfloat16, device="cpu", random=0, quantize="int8", pack=False))
    assert set(model.config.layer.sliding_windows) == {256}
    with recording() as log, torch.inference_mode():
        cache = KVCache(model.config, 4096, dtype=torch.bfloat16, device="cpu", page_size=16, rings=True)
        assert cache.rings is not None and cache.rings.most * 16 == 256 + 2048
        log.clear()
        prefill(model, cache, [3] * 2500)
    names = [name.split(":")[0] for name in kernels(log)]
    assert names.count("_expert_linear_kernel") == 2 * 2 * 2  # chunks, layers, products
    assert names.count("_expert_route_kernel") == 2 * 2
    assert not [launch for launch in log if launch[0].startswith("aten.sort")]  # as the reference does
    k, rows = 3, 2048
    reserved = memory.reserve([model.config], torch.bfloat16, torch.device("cuda"))
    assert reserved - memory.reserve([replace(model.config, hidden_size=0)], torch.bfloat16, torch.device("cuda")) == (
        rows * 4 * k * 64
    )


def test_padded_slots_read_no_experts_of_their_own(pair):
    """A round of fixed shape pads three sequences to four slots. Its rows read what those of the three read."""
    read = {}
    for size in (3, 4):
        engine = specker.load(*pair, strategy="draft", draft_tokens=3, policy="fixed", graphs="on", batch_size=size)
        rounds = []
        engine.trace = lambda row, rounds=rounds: rounds.append(row)
        out = engine.generate([[5, 9, 40], [7], [3, 8]], 12)
        read[size] = [each.stats.experts_read for each in out]
        assert [each.tokens for each in out] == [
            each.tokens for each in engine.generate_ar([[5, 9, 40], [7], [3, 8]], 12)
        ]
    assert read[3] == read[4]


def test_random_weights_route_rows_apart(tmp_path):
    """A run with them would be too optimistic if all tokens chose the same experts."""
    sizes = {"num_experts": 32, "num_experts_per_tok": 2, "layers": 4, "mlp_only_layers": [1]}
    folder = make(tmp_path, max_context=64, **QWEN3_MOE | sizes)
    engine = specker.load(folder, strategy="ar", load="dummy", dtype="float32", device="cpu")
    model, cache = engine.model, engine.cache
    cache.take(0, 40)
    prefill(model, cache, [7, 3, 90, 61] * 4)
    x = model.embed_tokens(torch.arange(10, 122, 7))
    read = float(experts_read(model, [forward(model, cache, cache.place([17], 1, 0, 16), x)]))
    assert 0.8 < read / model.config.layer.experts.read(16) < 1.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 must be at most the number of experts, 6"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0 at least 1"),
        ({"moe_intermediate_size": ...}, "moe_intermediate_size must be a whole number from 1 to 1048576, .* lacks it"),
        ({"num_local_experts": ...}, "num_experts must be a whole number from 1 to 4096, but .* lacks it"),
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "architecture Qwen2MoeForCausalLM .*is not supported"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architecture DeepseekV3ForCausalLM .*is not supported"),
    ],
    ids=str,
)
def test_refusals(tmp_path, change, message):
    folder = make(tmp_path, layers=1, **QWEN3_MOE)
    edit(folder, **change)
    with pytest.raises(CheckpointError, match=message):
        read(folder, dtype=torch.float32, device="cpu")


def test_the_name_that_older_files_have(tmp_path):
    folder = make(tmp_path, layers=1, **QWEN3_MOE)
    count = json.loads((folder / "config.json").read_text())["num_local_experts"]
    edit(folder, num_local_experts=..., num_experts=count)
    assert read(folder, dtype=torch.float32, device="cpu").config.layer.experts.count == 6


@pytest.mark.parametrize("options", [MIXTRAL, GPT_OSS, QWEN3_MOE, LFM2_MOE], ids=lambda options: options["arch"])
def test_scores_are_divided_by_their_sum_unless_a_field_that_counts_says_otherwise(tmp_path, options):
    """transformers reads norm_topk_prob in some families; Mixtral's and gpt-oss's scores always have the sum 1."""
    edit(make(tmp_path, **options), norm_topk_prob=False)
    experts = read_config(tmp_path).layer.experts
    assert experts.normalised == (options in (MIXTRAL, GPT_OSS))


def test_a_shared_expert_is_refused(tmp_path):
    """Of Qwen2-MoE; a checkpoint that calls itself Qwen3-MoE must not lose one silently."""
    folder = make(tmp_path, layers=1, **QWEN3_MOE)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.shared_expert.up_proj.weight"] = torch.zeros(8, 64)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"mlp\.shared_expert\.up_proj\.weight, which Qwen3MoeForCausalLM"):
        read(folder, dtype=torch.float32, device="cpu")


@since("transformers", "5.23", "returns no router logits of LFM2-MoE")
def test_the_bias_chooses_other_experts_than_the_logits(tmp_path):
    """Without it the model would be another; so the tests that compare texts with transformers' compare the choice."""
    model = oracle(make(tmp_path, max_context=64, **LFM2_MOE))
    with torch.no_grad():
        scores = torch.cat(model(torch.tensor([PROMPT]), output_router_logits=True).router_logits).sigmoid()
    biases = [layer.feed_forward.expert_bias for layer in model.model.layers[1:]]
    biased = scores + torch.stack(biases).repeat_interleave(len(PROMPT), 0)
    chosen, usual = (x.topk(3).indices.sort().values for x in (biased, scores))
    assert float((chosen != usual).any(1).float().mean()) > 0.3


LFM2_CHANGES = [
    ({"routed_scaling_factor": 0.0}, "routed_scaling_factor must be a positive float32, but config.json has 0.0"),
    ({"routed_scaling_factor": "one"}, "routed_scaling_factor must be a positive float32"),
    ({"num_dense_layers": "two"}, "is not a valid Lfm2MoeForCausalLM config"),
    ({"layer_types": ...}, "layer_types must name each layer's kind, full_attention or conv, but .* lacks it"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 must be at most the number of experts, 6"),
    ({"num_experts": ...}, "num_experts must be a whole number from 1 to 4096, but .* lacks it"),
    ({"moe_intermediate_size": ...}, "moe_intermediate_size must be a whole number from 1 to 1048576, .* lacks it"),
    ({"use_expert_bias": False}, r"feed_forward\.expert_bias, which Lfm2MoeForCausalLM"),
    ({"num_dense_layers": 2}, r"layers\.1\.feed_forward"),
    ({"conv_bias": True}, "conv_bias is not supported"),
]


@pytest.mark.parametrize(("change", "message"), LFM2_CHANGES, ids=str)
def test_refusals_of_lfm2(tmp_path, change, message):
    folder = make(tmp_path, **LFM2_MOE)
    edit(folder, **change)
    with pytest.raises(CheckpointError, match=message):
        read(folder, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("shape", ["missing", "short", "matrix"])
def test_a_wrong_bias_is_refused(tmp_path, shape):
    folder = make(tmp_path, **LFM2_MOE)
    weights, name = load_file(folder / "model.safetensors"), "model.layers.2.feed_forward.expert_bias"
    bias = weights.pop(name)
    if shape != "missing":
        weights[name] = bias[:5].clone() if shape == "short" else bias[None]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read(folder, dtype=torch.float32, device="cpu")


OSS = GPT_OSS | {"layer_types": [SLIDING, FULL]}


@pytest.mark.parametrize(("arch", "kind"), cases.diagonal([MIXTRAL, QWEN3_MOE, TWO, OSS], ["int8", "int4"]))
def test_experts_are_rounded_and_routers_are_not(tmp_path, arch, kind):
    folder = make(tmp_path, **arch | {"layers": 2, "ffn": 64, "moe_intermediate_size": 64})
    exact = read(folder, dtype=torch.float64, device="cpu", quantize=kind).weights
    kept = read(folder, dtype=torch.float32, device="cpu", quantize=kind)
    w, plain = kept.weights, read(folder, dtype=torch.float32, device="cpu").weights
    for name in ("gate_up", "down"):
        for n in range(2):
            one = getattr(w, name)[n]
            assert one.kinds == {kind} and torch.equal(one.dequantised(torch.float64), getattr(exact, name)[n])
            assert not torch.equal(getattr(exact, name)[n].float(), getattr(plain, name)[n])
    assert torch.equal(w.router[1], plain.router[1]) and torch.equal(exact.router[1].float(), plain.router[1])
    assert (w.router_bias is None) == (arch not in (TWO, OSS))
    assert arch is not OSS or torch.equal(w.gate_up_bias, plain.gate_up_bias)
    if arch is TWO:  # whatever the weights' dtype
        half = read(folder, dtype=torch.bfloat16, device="cpu", quantize=kind).weights
        given = load_file(folder / "model.safetensors")
        want = torch.stack([given[f"model.layers.{n}.feed_forward.expert_bias"] for n in range(2)])
        for bias in (w.router_bias, half.router_bias, exact.router_bias.float()):
            assert bias.dtype == torch.float32 and torch.equal(bias, want)
    text = specker.load(folder, strategy="ar", dtype="float64", quantize=kind).generate(PROMPT, 12).tokens
    assert specker.load(folder, strategy="lookup", dtype="float32", quantize=kind).generate(PROMPT, 12).tokens == text
