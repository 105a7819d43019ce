"""What every op returns on a CPU and what engines decode, with other defaults of torch.
`python tests/support/defaults.py DEFAULTS JSON` prints [name, digest or tokens, log-probabilities] of each as a line of
JSON. A process of its own, since with buffers of a wrong size it may crash. tests/project/test_defaults.py compares the
lines."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEFAULTS: dict[str, Callable[[], object]] = {
    "usual": lambda: None,
    "float64": lambda: torch.set_default_dtype(torch.float64),
    "bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "meta": lambda: torch.set_default_device("meta"),
    "float64 on meta": lambda: (torch.set_default_dtype(torch.float64), torch.set_default_device("meta")),
}
PROMPT = [5, 9, 40, 7, 5, 9, 40, 7, 11, 5, 9]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "logprobs": 2}
DRAWN = GREEDY | {"temperature": 0.9, "top_p": 0.95, "min_p": 0.01, "seed": 3, "repetition_penalty": 1.1}
DRAWN |= {"frequency_penalty": 0.2, "logit_bias": ((9, 0.5), (10, -0.5))}


def tensors(x: Any) -> list[Tensor]:
    """The tensors in the fields and entries of x, in order."""
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, tuple | list) else getattr(x, "parts", ())
    return [found for part in parts for found in tensors(part)]


def random(x: Any, generator: torch.Generator) -> Any:
    """x with random numbers in place of its floating point ones, which are all alike."""
    if isinstance(x, tuple):
        return tuple(random(part, generator) for part in x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return torch.rand(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(x.dtype)


def calls() -> list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Calls of all public ops: a name, the op, its arguments."""
    sys.path.append(str(Path(__file__).parents[1] / "kernels"))
    from paths import Signal, World, inputs
    from test_op_arguments import CALLS

    from specker import kernels

    g = torch.Generator().manual_seed(1)
    found = [
        (f"{name}-{n}", getattr(kernels, name), (), {key: random(x, g) for key, x in given.items()})
        for n, (name, given) in enumerate(CALLS)
    ]
    rows = list(range(5))
    for name, text in (
        ("conv_rows", Signal(kernels.conv_rows, 4, "silu", True, False, torch.float32)),
        ("delta_rows", World(kernels.delta_rows, inputs(20, 1, 2, 16, 8, torch.float32))),
    ):
        for words in (None, kernels.ancestor_words(torch.tensor([0, 0, 1, 1]))):
            given = text.arguments(rows, 0, torch.arange(5), words)
            found.append((f"{name}-{words is None}", text.op, given, {}))
    assert {op.__name__ for _, op, *_ in found} == {*kernels.__all__}
    return found


def main(defaults: str, engines: dict[str, tuple[list[str], dict[str, Any]]]) -> None:
    made = calls()
    DEFAULTS[defaults]()
    for name, op, given, named in made:
        out = op(*given, **named)
        digest = hashlib.sha256()
        for x in tensors([out, list(given), named]):  # ops write to their arguments, too
            digest.update(f"{x.dtype} {list(x.shape)}".encode())
            digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        print(json.dumps([name, digest.hexdigest(), []]))
    import specker

    for name, (models, options) in engines.items():
        engine = specker.load(*models, device="cpu", **options)
        engine.warmup()
        for how in GREEDY, DRAWN:
            for text in engine.generate([PROMPT, PROMPT[:1]], **how):
                print(json.dumps([name, text.tokens, [each.logprob for each in text.logprobs]]))
        if "chat" in name:
            print(json.dumps([name, engine.chat([{"role": "user", "content": "a"}], **GREEDY).tokens, []]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
