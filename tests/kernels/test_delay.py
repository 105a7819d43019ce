"""Programmatic dependent launch on a GPU: whichever kernel is late, decoding gives the bits that it gives without."""

import pytest
import torch
from pairs import logits_of
from small_models import small_model

import specker
from specker.kernels import variant
from specker.kernels.variant import Variant
from specker.runtime.round.graphs import Graphs

SETTINGS = {
    "chain": ({"strategy": "draft", "draft_tokens": 4}, {}),
    "tree": ({"strategy": "draft", "tree": "3x4"}, {"temperature": 0.7, "top_p": 0.9, "top_k": 50}),
    "vocabtrim": ({"strategy": "vocabtrim", "draft_tokens": 4}, {"temperature": 0.7}),
    "easyspec": ({"strategy": "easyspec", "draft_tokens": 4}, {}),
    "penalties": (
        {"strategy": "draft", "draft_tokens": 4},
        {"temperature": 1.0, "min_p": 0.1, "presence_penalty": 1.5},
    ),
}


KINDS = {  # of small_models.py, and a kernel that no other has
    "eagle": "_start_pairs_kernel",
    "mtp": "_start_pairs_kernel",
    "dflash": "_tree_attention_kernel",
    "mixture": "_expert_linear_kernel",
    "delta nets": "_delta_rows_kernel",
    "convolutions": "_conv_rows_kernel",
    "clusters": "_cluster_rows_kernel",
}


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("options", "sampling"), SETTINGS.values(), ids=SETTINGS)
def test_a_kernel_that_is_late_changes_no_bit(options, sampling, monkeypatch):
    engine = specker.load(device="cuda", dtype="bfloat16", graphs="on", **options)
    prompt = next(ids for row in specker.zoo.heldout() if len(ids := engine.encode(row["prompt"])) > 40)
    assert_late_changes_nothing(engine, prompt, sampling, monkeypatch)


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_late_kernel_of_small_models_changes_no_bit(heads, kind, tmp_path, monkeypatch):
    models, options, _ = small_model(kind, tmp_path, heads)
    engine = specker.load(*models, device="cuda", dtype="bfloat16", graphs="on", **options)
    prompt = [3 * n % 110 + 1 for n in range(50)]
    assert KINDS[kind] in assert_late_changes_nothing(engine, prompt, {"temperature": 0.7}, monkeypatch)


def assert_late_changes_nothing(engine, prompt, sampling, monkeypatch):
    """Each kernel sleeps in turn after it has let the next one start. Its rounds run once launched one by one, then as
    graphs. What differs names the kernel that was late: the one after it does not wait, or reads too early. Returns the
    kernels' names."""
    if variant.arch(torch.device("cuda")) not in (90, 100):
        pytest.skip("programmatic dependent launch needs sm_90 or sm_100")
    launched: set[str] = set()
    call = Variant.__call__

    def noted(self: Variant, *arguments) -> None:
        if "PDL" in self.kernel.arg_names:
            launched.add(self.kernel.__name__)
        call(self, *arguments)

    def decoded(pdl: bool, delayed: str = "") -> tuple[torch.Tensor, list[int]]:
        monkeypatch.setattr(variant, "PDL", pdl)
        monkeypatch.setattr(variant, "DELAYED", delayed)
        engine.loop.graphs = Graphs(engine.loop.graphs.device)  # captured ones hold the kernels of another setting
        return logits_of(engine, prompt, 40, **sampling)

    monkeypatch.setattr(Variant, "__call__", noted)
    logits, text = decoded(False)
    assert launched >= {"_row_linear_kernel", "_tree_attention_kernel", "_settle_kernel"}
    wrong = []
    for name in ("", *sorted(launched)):
        ours, same = decoded(True, name)
        if same != text or not torch.equal(ours, logits):
            wrong.append(name or "none is late")
    assert wrong == []
    return launched
