"""Checkpoints with experts in MXFP4, as gpt-oss has them."""

from pathlib import Path
from typing import Any

import torch
from make_checkpoint import edit, make
from safetensors.torch import load_file, save_file
from torch import Tensor


def drawn(X: int, O: int, E: int, seed: int) -> tuple[Tensor, Tensor]:
    """Blocks [X, O, E / 32, 16] and scales [X, O, E / 32] of weights of about 0.1."""
    by = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (X, O, E // 32, 16), dtype=torch.uint8, generator=by)
    return blocks, torch.randint(121, 124, (X, O, E // 32), dtype=torch.uint8, generator=by)


def make_mxfp4(folder: Path, **sizes: Any) -> Path:
    make(folder, **sizes)
    tensors = {}
    for n, (name, x) in enumerate(load_file(folder / "model.safetensors").items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # [X, E, O]
            blocks, scales = drawn(len(x), x.shape[2], x.shape[1], seed=n)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = x
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return folder
