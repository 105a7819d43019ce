"""A draft for tests: the target with perturbed weights, so that it is often right and often wrong. Also helpers that
step through rounds."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from specker.model.decoder import Model
from specker.options import Params


def perturbed(target: Path, draft: Path, amount: float = 0.15, seed: int = 7) -> Path:
    """Copy checkpoint `target` to `draft` with noise of `amount` standard deviations on every weight."""
    shutil.copytree(target, draft, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, w in weights.items():
        weights[name] = w + amount * w.std().nan_to_num() * torch.randn(w.shape, generator=generator)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    return draft


def logits_of(engine, prompt: list[int], count: int, drafting: bool = True, beside=(), **sampling) -> tuple:
    """The logits [count, V] from which fixed-shape rounds drew each token, and the text. `beside`: other prompts, in
    the slots before this one."""
    loop, rows = engine.loop, []
    drawing = patch.object(Model, "samples", False)  # a verify pass that draws tokens itself writes no logits
    with drawing, admitted(engine, [*beside, prompt], count, drafting, **sampling) as sequences:
        sequence = sequences[-1]
        while len(sequence.token_ids) < sequence.limit:
            r = loop.start()
            assert r.batch.fixed
            each = {s: path for s, path, tokens in loop.finish(r) if tokens}
            logits = r.batch.memory.get("logits", r.rows).view(r.batch.n, r.draft.size + 1, -1)
            rows.append(logits[len(sequences) - 1, each[sequence]].clone())
    return torch.cat(rows), sequence.token_ids


def flips(engine, prompt: list[int], text: list[int]) -> tuple[int, int]:
    """How many greedy tokens of fixed-shape rounds differ from `text` when each follows `text`'s own prefix, and the
    number of tokens."""
    loop, whole, turned = engine.loop, prompt + text, 0
    with admitted(engine, [prompt], len(text)) as [sequence]:
        while (known := len(sequence.token_ids)) < sequence.limit:
            loop.state.write(0, sequence)  # restores the given text
            r = loop.start()
            assert r.batch.fixed
            [(_, _, tokens)] = loop.finish(r)
            wrong = next((i for i, token in enumerate(tokens) if token != whole[known + i]), None)
            turned += wrong is not None
            sequence.token_ids[known:] = whole[known : known + (len(tokens) if wrong is None else wrong + 1)]
            engine.cache.exact_len[0] = len(sequence.token_ids) - 1
    return turned, len(text)


@contextmanager
def admitted(engine, prompts, count: int, drafting: bool = True, **sampling) -> Iterator[list]:
    """Prefilled requests in the engine's loop; the caller starts and finishes the rounds."""
    loop = engine.loop
    with torch.inference_mode():
        loop.clear()
        params = Params.of(max_new_tokens=count, **sampling)
        requests = [engine.session.request(p, params, index=i, speculates=drafting) for i, p in enumerate(prompts)]
        for request in requests:
            loop.prompts.admit(request)
        yield requests
        loop.clear()
