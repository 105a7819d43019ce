"""python -m train.code_family.report [FOLDER]: evaluate an export on held-out prompts -> evaluation.json."""

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
from .train import MODELS

MODELS_FOLDER = Path(__file__).parents[2] / "models" / "specker_models"


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
def exit_agreement(target: Net, text: Tensor, prompt: int) -> list[float]:
    """The share of tokens behind the prompt of its own greedy text [B, T] that the target's first layers predict, with
    the shared norm and head, for 1, 2, .. of them."""
    found = []
    for rows in text.split(8):
        _, exits = target(rows[:, :-1], taps=tuple(range(target.c.layers)))
        wanted = rows[:, prompt:]
        found.append([(target.logits(h[:, prompt - 1 :]).argmax(-1) == wanted).float().mean().item() for h in exits])
    return np.average(found, 0, [len(rows) for rows in text.split(8)]).tolist()


@torch.no_grad()
def overlap(target: Net, draft: Net, ids: Tensor, prompt: int, temperature: float) -> float:
    """Mean of sum_v min(p, q) = 1 - TV: the rate at which p/q rejection accepts a first draft token."""
    p, q = ((n.logits(n(ids[:, :-1])[:, prompt - 1 :]).float() / temperature).softmax(-1) for n in (target, draft))
    return torch.minimum(p, q).sum(-1).mean().item()


def evaluate(folder: Path, compute: torch.dtype, prompt: int = 64, new: int = 192, draft: str = "code-draft") -> dict:
    from tokenizers import Tokenizer

    tok = Tokenizer.from_file(str(folder / "code-target" / "tokenizer.json"))
    names = [n for n in ("code-target", draft, "code-draft-deep", "code-diffusion") if (folder / n).exists()]
    nets = {n: load(folder / n, compute) for n in names}
    target, ids = nets["code-target"], held_out_prompts(folder, tok, prompt)
    new = min(new, target.c.context - prompt)
    size = {n: sum(p.numel() for p in net.parameters()) for n, net in nets.items()}
    out: dict = {"prompts": len(ids), "new_tokens": new, "parameters": size}
    out["exit_losses"] = [round(x, 3) for x in exit_losses(target, ids)]
    out["exit_agreement"] = [round(x, 3) for x in exit_agreement(target, generate(target, ids, new, 0.0), prompt)]
    for t in (0.0, 0.7, 1.0):
        text = generate(target, ids, new, t, seed=1)
        row = {"distinct_4grams": distinct4(text[:, prompt:].numpy())}
        if draft in nets:
            right = draft_right(nets[draft], text, prompt, t, seed=1)
            row |= {"draft_agreement": float(right.mean())}
            row |= {f"draft_chain{c}": acceptance(right, c) for c in (2, 4, 8)}
            row["draft_chain4_first_64"] = acceptance(right[:, :64], 4)  # before most texts begin to repeat
            if t:
                row["draft_overlap"] = np.mean([overlap(target, nets[draft], x, prompt, t) for x in text.split(8)])
        if "code-draft-deep" in nets:
            right = draft_right(nets["code-draft-deep"], text, prompt, t, seed=1)
            row |= {f"deep_draft_chain{c}": acceptance(right, c) for c in (2, 4, 8)}
        if "code-diffusion" in nets:
            for block in (4, 8, 16):
                row[f"diffusion_block{block}"] = block_accepted(nets["code-diffusion"], text, prompt, t, 1, block, 24)
        out[f"T={t}"] = {k: round(float(v), 3) for k, v in row.items()}
        if t == 0.7:
            out["samples"] = [tok.decode(r.tolist()) for r in text[:6]]
    return out


RECIPE = """# The bundled family

Four small models of Python source with one tokenizer: `code-target` (Llama), `code-draft` (Llama, two thin layers,
distilled), `code-draft-deep` (Llama, twelve thin layers, distilled) and `code-diffusion` (Qwen2 weights in Dream's
layout, bidirectional, distilled). They exist so that every strategy runs, and is tested, without a download. They are
weak models: their text looks like Python and means little. `vocab_scores.safetensors` counts the tokens of text that
the target wrote, `ngram.safetensors` its trigrams.

    python -m train.code_family.train --workers 2 --out models/specker_models --records train/code_family
    python -m train.code_family.report

trains and evaluates them anew. A killed run goes on from its last checkpoint; a smaller `--target-tokens` starts
the decay early. With one worker the weights are a function of corpus, options and machine; with two the order of
additions varies.

## Corpus
{corpus}

Left out: tests, vendored copies, generated tables, long lines, files that are not ASCII, and files of which over
40% of the twelve-line runs stand in an earlier file. At most 12 MB of one distribution. The held-out modules and
files of the same path elsewhere are never trained on; `heldout.jsonl` has 96 beginnings of their functions. From
held-out modules of which over 10% of the runs do stand in a file trained on ({copied}) there are no prompts.
`corpus.json` has versions and licences.

## Training
* Tokenizer: byte-level BPE, 8,192 ids; a newline and the indentation behind it are one token.
* Target: {target}. Muon for the matrices, AdamW for the rest, weight decay 0.1, 2% warm-up, then flat, then linear
  decay over the last quarter; windows of 256, then 512 (from 85%), then 1,024 (from 97%). As in LayerSkip: layer
  dropout rising with depth to 0.1, and each step one early exit in rotation through the shared norm and head, on a
  quarter of the positions, at 0.25 of the loss, rising with depth.
* Draft: {draft}. KL to the target's distribution, in turn at temperature 1 and 0.7, half of it on text the target
  wrote (6,144 continuations of training text, 1.6M tokens).
* Deep draft: {deep}. Trained as the draft is, in sequence: nothing in it knows that its layers will run side by side.
* Diffusion drafter: {diffusion}. It starts as the target's first four layers. KL to the target's next-token
  distribution at masked positions, row i - 1 for the token at i, in turn at temperature 1 and 0.7; 90% rounds as they
  are in use (2 to 8 new tokens and 4 to 32 masks behind the text as earlier rounds left it), the rest one block behind
  a prefix that sees it; three quarters on text the target wrote, a guess weighing 0.8 of the one before it.
* The other drafters start from the target's embedding on its leading principal axes.
* Losses: `losses.json`. Seed 0. A CPU with two cores and AMX, about 3,000 tokens/s of the target with other work beside
  it. The weights here come from runs that were resumed with other totals, so that the target's decay began at 78%.

## Results on the held-out prompts
{prompts} prompts of 64 tokens, {new_tokens} new ones each. Acceptance length counts the target's own token.

{table}

Cross-entropy after layer 1..{layers} on the prompts (what an early exit sees): {exits}.
"""


def recipe(records: Path, result: dict) -> str:
    losses, made = (json.loads((records / f"{n}.json").read_text()) for n in ("losses", "corpus"))
    say = {}
    for name, log in losses.items():
        size = result["parameters"][MODELS[name]] / 1e6
        say[name] = f"{size:.2f}M parameters, {log[-1]['tokens'] / 1e6:.1f}M tokens"
    say["target"] += f", held-out loss {losses['target'][-1]['held_out']:.2f}"
    names = [d["name"] for d in made["distributions"] if d["files"]]
    temperatures = [k for k in result if k.startswith("T=")]
    rows = list(dict.fromkeys(k for t in temperatures for k in result[t]))
    table = ["| | " + " | ".join(temperatures) + " |", "|---|" + "---|" * len(temperatures)]
    for r in rows:
        table.append(f"| {r.replace('_', ' ')} | " + " | ".join(str(result[t].get(r, "")) for t in temperatures) + " |")
    return RECIPE.format(
        **dict.fromkeys(MODELS, "") | say,
        corpus=f"{made['bytes'] / 1e6:.0f} MB of Python source from {len(names)} libraries: {', '.join(names)}.",
        copied=", ".join(made["not_tested"]) or "none",
        table="\n".join(table),
        prompts=result["prompts"],
        new_tokens=result["new_tokens"],
        layers=len(result["exit_losses"]),
        exits=", ".join(map(str, result["exit_losses"])),
    )


def main(
    folder: Annotated[Path, typer.Argument(help="of the export; default: the bundled models")] = MODELS_FOLDER,
    records: Annotated[Path, typer.Option(help="folder of corpus.json and losses.json")] = Path(__file__).parent,
    draft: str = "code-draft",
    fp32: Annotated[bool, typer.Option(help="instead of bf16")] = False,
) -> None:
    result = evaluate(folder, torch.float32 if fp32 else torch.bfloat16, draft=draft)
    samples = result.pop("samples")
    print("\n\n--------\n".join(samples))
    text = json.dumps(result, indent=1)
    print(text)
    (records / "evaluation.json").write_text(text + "\n")
    (records / "RECIPE.md").write_text(recipe(records, result))


if __name__ == "__main__":
    typer.run(main)
