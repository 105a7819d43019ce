"""A draft for tests: the target with its weights perturbed, so that it agrees often and errs often."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def perturbed(target: Path, draft: Path, amount: float = 0.15, seed: int = 7) -> Path:
    """Copy checkpoint `target` to `draft` with noise of `amount` standard deviations on every weight."""
    shutil.copytree(target, draft, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, w in weights.items():
        weights[name] = w + amount * w.std().nan_to_num() * torch.randn(w.shape, generator=generator)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    return draft
