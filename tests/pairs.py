"""A draft for tests: the target with its weights perturbed, so that it agrees often and errs often. And static rounds
looked at one by one."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specker.runtime import loop


def perturbed(target: Path, draft: Path, amount: float = 0.15, seed: int = 7) -> Path:
    """Copy checkpoint `target` to `draft` with noise of `amount` standard deviations on every weight."""
    shutil.copytree(target, draft, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, w in weights.items():
        weights[name] = w + amount * w.std().nan_to_num() * torch.randn(w.shape, generator=generator)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    return draft


def logits_of(engine, prompt: list[int], count: int, drafting: bool = True, **sampling) -> tuple:
    """What each token of static rounds was drawn from, [count, V], and the text."""
    ctx = engine._context(prompt, count, engine.drafter if drafting else None, sampling)
    loop._prefill(ctx)
    rows: list[torch.Tensor] = []
    while len(ctx.committed) < ctx.limit:
        assert loop._launch(ctx, ctx.rounds)
        report, _ = ctx.rounds.collect()
        rows.append(ctx.rounds.state.logits[report.path].clone())
        ctx.committed += report.tokens
    return torch.cat(rows)[:count], ctx.committed[: ctx.limit]


def flips(engine, prompt: list[int], text: list[int]) -> tuple[int, int]:
    """How many tokens static rounds would emit otherwise than `text` says, each after the text as it is, and of how
    many: greedy."""
    ctx = engine._context(prompt, len(text), engine.drafter, {})
    loop._prefill(ctx)
    whole, turned = prompt + text, 0
    while len(ctx.committed) < ctx.limit:
        ctx.rounds.reset()  # the text is said anew each round
        assert loop._launch(ctx, ctx.rounds)
        report, _ = ctx.rounds.collect()
        for token in report.tokens[: ctx.limit - len(ctx.committed)]:
            ctx.committed.append(whole[len(ctx.committed)])
            if token != ctx.committed[-1]:
                turned += 1
                break
    return turned, len(text)
