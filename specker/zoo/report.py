"""python -m specker.zoo.report [FOLDER]: evaluates an exported family on the held-out prompts -> evaluation.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from .export import load
from .net import Net
from .sample import acceptance, block_accepted, distinct4, draft_right, generate


def held_out_prompts(folder: Path, tok, length: int) -> Tensor:
    """The last `length` tokens of each prompt, [B,length]."""
    rows = [json.loads(line)["prompt"] for line in (folder / "heldout.jsonl").read_text().splitlines()]
    ids = [tok.encode(r, add_special_tokens=False).ids for r in rows]
    return torch.tensor([r[-length:] for r in ids if len(r) >= length])


@torch.no_grad()
def exit_losses(target: Net, ids: Tensor) -> list[float]:
    """Cross-entropy of the shared norm and head after each layer, on the held-out prompts."""
    _, exits = target(ids[:, :-1], taps=tuple(range(target.c.layers)))
    return [F.cross_entropy(target.logits(h).float().flatten(0, 1), ids[:, 1:].flatten()).item() for h in exits]


@torch.no_grad()
def overlap(target: Net, draft: Net, ids: Tensor, prompt: int, temperature: float) -> float:
    """Mean of sum_v min(p, q) = 1 - TV: what p/q rejection accepts of a first draft token."""
    p, q = ((n.logits(n(ids[:, :-1])[:, prompt - 1 :]).float() / temperature).softmax(-1) for n in (target, draft))
    return torch.minimum(p, q).sum(-1).mean().item()


def evaluate(folder: Path, compute: torch.dtype, prompt: int = 64, new: int = 192, draft: str = "code-draft") -> dict:
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(folder / "code-target" / "tokenizer.json"))
    names = [n for n in ("code-target", draft, "code-diffusion") if (folder / n).exists()]
    nets = {n: load(folder / n, compute) for n in names}
    target, ids = nets["code-target"], held_out_prompts(folder, tok, prompt)
    size = {n: sum(p.numel() for p in net.parameters()) for n, net in nets.items()}
    out: dict = {"prompts": len(ids), "new_tokens": new, "parameters": size}
    out["exit_losses"] = [round(x, 3) for x in exit_losses(target, ids)]
    for t in (0.0, 0.7, 1.0):
        text = generate(target, ids, new, t, seed=1)
        row = {"distinct_4grams": distinct4(text[:, prompt:].numpy())}
        if draft in nets:
            right = draft_right(nets[draft], text, prompt, t, seed=1)
            row |= {"draft_agreement": float(right.mean())}
            row |= {f"draft_chain{c}": acceptance(right, c) for c in (2, 4, 8)}
            if t:
                row["draft_overlap"] = np.mean([overlap(target, nets[draft], x, prompt, t) for x in text.split(8)])
        if "code-diffusion" in nets:
            for block in (4, 8, 16):
                row[f"diffusion_block{block}"] = block_accepted(nets["code-diffusion"], text, prompt, t, 1, block, 24)
        out[f"T={t}"] = {k: round(float(v), 3) for k, v in row.items()}
        if t == 0.7:
            out["samples"] = [tok.decode(r.tolist()) for r in text[:6]]
    return out


def main(
    folder: Annotated[Path, typer.Argument(help="of the export; default: the package's own")] = Path(__file__).parent,
    draft: str = "code-draft",
    fp32: Annotated[bool, typer.Option(help="instead of bf16")] = False,
) -> None:
    result = evaluate(folder, torch.float32 if fp32 else torch.bfloat16, draft=draft)
    samples = result.pop("samples")
    print("\n\n--------\n".join(samples))
    text = json.dumps(result, indent=1)
    print(text)
    (folder / "evaluation.json").write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
