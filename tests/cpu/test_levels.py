"""Layers, noise and draws by the library of every level of instructions that this processor can run."""

from pathlib import Path

import levels
import pytest
import torch
import warm
from make_checkpoint import GEMMA3, QWEN3_MOE, make

from specker.cpu import build

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "layers": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("levels")
    gemma = GEMMA3 | {"layer_types": ["full_attention", "sliding_attention"] * 2}
    kinds = {"llama": {}, "qwen3": {"arch": "qwen3"}, "gelu": {"hidden_act": "gelu"}, "gemma3": gemma}
    kinds["experts"] = QWEN3_MOE | {"mlp_only_layers": [1]}
    return [str(make(folder / name, **SIZES, **kind)) for name, kind in kinds.items()]


@pytest.fixture(scope="module")
def own(folders: list[str]) -> dict[tuple[str, ...], torch.Tensor]:
    """By the level that all tests use."""
    return levels.everything(folders)


@pytest.mark.parametrize(
    "level", [pytest.param(x, marks=[] if x in ("avx2", "portable") else pytest.mark.slow) for x in build.LEVELS]
)
def test_every_level_computes_the_same(
    level: str, folders: list[str], own: dict[tuple[str, ...], torch.Tensor], tmp_path: Path
) -> None:
    """The noise and the tokens drawn with it have the same bits everywhere, and so do layers where the processor has a
    fused multiply-add, with activations in float32. Elsewhere a sum has twice the roundings."""
    if not build.LEVELS[level][0] <= build._features() or level == build.level():
        pytest.skip("this processor has no such instructions, or all tests use them")
    path = tmp_path / "found.pt"
    warm.run(levels.__file__, str(path), *folders, env={"SPECKER_CPU": level}).check_returncode()
    found, fused = torch.load(path), "portable" not in (level, build.level())
    assert found.keys() == own.keys() and len(found) == 2 + len(folders) * len(levels.KINDS) * 5
    assert all(x.isfinite().all() and len(x.unique()) > 3 for x in own.values())
    for name, got in found.items():
        if fused or name in (("noise",), ("drawn",)):
            assert torch.equal(got, own[name]), name
        else:
            most = 0.05 if "torch.int8" in name else 2e-3 if "torch.float16" in name else 2e-5  # a code may be the next
            assert (got - own[name]).abs().max() <= most * own[name].abs().max(), name
