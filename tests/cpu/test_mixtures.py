"""Mixtures of experts by the compiled layers, against run_layers, and rows whose bits do not depend on others."""

from dataclasses import replace

import pytest
import torch
from make_checkpoint import FULL, GEMMA4_MIXED, GEMMA4_WIDE, GPT_OSS, MIXTRAL, QWEN3_MOE, SLIDING, make
from stacks import SIZES, cache_of, checked_chain, model_of, near

import specker
from specker import layer_weights
from specker.cpu import Packed, packed
from specker.kernels.quant import quantised
from specker.model.decoder import forward
from specker.model.prefill import prefill
from specker.model.weights import by_expert

SHAPE = {"layers": 3, "max_context": 512}
WIDE = QWEN3_MOE | {"num_experts": 20, "num_experts_per_tok": 5, "moe_intermediate_size": 64}
KINDS = {  # the experts' numbers are no multiples of a register
    "mixtral": MIXTRAL,
    "one": MIXTRAL | {"num_experts_per_tok": 1},
    "qwen3": WIDE,
    "as they are": WIDE | {"norm_topk_prob": False},
    "all": QWEN3_MOE | {"num_experts_per_tok": 6},
    "gpt-oss": GPT_OSS,
    "beside": GEMMA4_MIXED | GEMMA4_WIDE | {"layer_types": [SLIDING, FULL, FULL]},
    "some dense": WIDE | {"mlp_only_layers": [1], "ffn": 512},  # wider than a row's experts together
}
FORMS = [(dtype, kind) for dtype in (torch.float32, torch.bfloat16) for kind in (None, "int8", "int4", "fp8")]


def plain(model):
    """The model on torch's operators, with its matrices in float32."""
    model.stack = None
    model.embed, model.head = dense(model.embed), dense(model.head)
    for n, layer in enumerate(model.layers):
        w = layer.mixer
        matrices = {name: dense(own) for name, own in w.present().items() if layer_weights.KINDS[name].product}
        if w.router is not None:
            for name in ("gate_up", "down"):
                matrices[name] = by_expert(matrices[name].flatten(0, -2), len(w.router))
        w = replace(w, **matrices)
        model.layers[n] = layer._replace(mixer=w, layers=(w,))
    return model


def dense(w):
    return w.dequantised(torch.float32) if isinstance(w, Packed) else w.float()


def passes(model, text, counts=(1, 7, 150)):
    """A prompt, then few and many rows after it; and which experts they read."""
    cache = cache_of(model, length=512)
    with torch.inference_mode():
        kept = prefill(model, cache, text, aux_layers=(1, 3), last=30)
        outs = [
            forward(
                model,
                cache,
                cache.after([len(text)], [n]),
                model.embed_tokens(torch.arange(n) * 3 % 128),
                aux_layers=(2,),
            )
            for n in counts
        ]
    written = cache.slots(0, 0, len(text) + max(counts))
    kv = [x.flatten(1, 2)[:, written] for x in (cache.k, cache.v)]
    hidden = [x for out in outs for x in (out.hidden, out.aux_hidden_states[2])]
    return [*kept.values(), *hidden, *kv], [out.routed for out in outs]


CASES = [(kind, torch.float32, None) for kind in KINDS]
CASES += [("some dense", *form) for form in FORMS[1:]]
CASES += [("gpt-oss", torch.bfloat16, "int4"), ("beside", torch.bfloat16, "int8")]


@pytest.mark.parametrize(("kind", "dtype", "quantize"), CASES, ids=str)
def test_experts_are_those_of_run_layers(tmp_path, kind, dtype, quantize):
    """With activations in float32, as torch's operators have them here."""
    model = model_of(tmp_path, dtype=dtype, quantize=quantize, activations="float32", **KINDS[kind] | SHAPE)
    text = [n * 7 % 128 for n in range(300)]
    got, routed = passes(model, text)
    want, expected = passes(plain(model), text)
    assert all(near(a, b) for a, b in zip(got, want, strict=True))
    assert [len(each) for each in routed] == [len(each) for each in expected] == [model.config.mixtures] * 3
    for mine, theirs in zip(routed, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("dtype", "quantize"), FORMS, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(tmp_path, dtype, quantize):
    model = model_of(tmp_path, dtype=dtype, quantize=quantize, **KINDS["qwen3"] | SHAPE)
    text, more = list(range(1, 38)), [5, 9, 2, 7, 7, 1, 30, 8]
    with torch.inference_mode():
        chain, cache = checked_chain(model, text, more), cache_of(model)
        rows = prefill(model, cache, text + more, aux_layers=(3,), last=len(more))[3]  # the threads share many rows
        assert torch.equal(rows, chain)


def test_threads_change_no_bits(tmp_path):
    model = model_of(tmp_path, quantize="int4", **KINDS["qwen3"] | SHAPE)
    found, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found.append(passes(model, [1, 2, 3], (1, 7, 20))[0])
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("options", [{}, {"quantize": "int4"}, {"dtype": "float32", "batch_size": 3}], ids=str)
def test_a_draft_that_is_the_target_is_always_right(tmp_path, options):
    """A chain drafted in one call has the bits of the verify pass; tokens are those of plain decoding."""
    folder = make(tmp_path, **SIZES | KINDS["some dense"] | SHAPE)
    how = {"draft_quantize": options.get("quantize", "none")}
    options = {"device": "cpu", "policy": "fixed", "draft_tokens": 4} | options | how
    engine = specker.load(folder, folder, strategy="draft", **options)
    assert engine.model.stack is not None and "cpu" not in engine.remarks
    prompts = [[5, 9, 40, 77, 3], [7], [3, 4] * 20]
    outs = engine.generate(prompts, max_new_tokens=21)
    assert all(out.stats.accepted == out.stats.drafted > 10 for out in outs)
    assert all(out.stats.experts_read > 5 for out in outs)
    assert [out.tokens for out in outs] == [engine.generate_ar(prompt, 21).tokens for prompt in prompts]


def test_experts_of_several_formats_become_one(tmp_path):
    """Without loss where a format holds both."""
    a, b = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1)).unbind(0)
    forms = {kind: packed.of_quantised(quantised(w, kind)) for kind, w in (("int4", a), ("int8", b))}
    whole = packed.joined([*forms.values(), *forms.values()])
    one = packed.merged(whole)
    assert len(whole.runs) == 4 and len(one.runs) == 1 and one.kinds == {"int8"}
    assert torch.equal(
        one.dequantised(torch.float32), torch.cat([w.dequantised(torch.float32) for w in whole.quantised()])
    )
    alike = packed.merged(packed.joined([forms["int4"]] * 3))
    assert len(alike.runs) == 1 and alike.kinds == {"int4"}
    assert torch.equal(alike.dequantised(torch.float32), forms["int4"].dequantised(torch.float32).repeat(3, 1))
    with pytest.raises(ValueError, match="fp8 and integers cannot be joined"):
        packed.merged(packed.joined([forms["int4"], packed.of_quantised(quantised(a, "fp8"))]))
