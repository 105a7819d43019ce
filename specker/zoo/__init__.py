"""The bundled family: a small code model, its draft and its masked-diffusion drafter, with held-out prompts.

`python -m specker.zoo.train` reproduces the weights; RECIPE.md, corpus.json and losses.json tell how they came about."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = ("code-target", "code-draft", "code-diffusion")

PROMPTS = (
    'def moving_average(values, window):\n    """Return the means of every `window` consecutive values."""\n    if window < 1:',
    'class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self, items=()):\n        self._items = list(items)\n\n    def push(self, item):',
    'import os\nimport sys\n\n\ndef read_lines(path, encoding="utf-8"):\n    """Yield the lines of a text file without their line ends."""\n    with open(path',
    'def parse_version(text):\n    """Parse "1.2.3" into a tuple of integers.\n\n    Raises ValueError if a part is not a number.\n    """\n    parts =',
)  # fmt: skip


def path(name: str) -> Path:
    """The Hugging Face folder of one model of the family."""
    if name not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")
    return Path(__file__).parent / name


def heldout() -> list[dict[str, str]]:
    """Beginnings of functions and classes of modules never trained on: {"prompt", "source" = "module:line", "licence"}."""
    text = (Path(__file__).parent / "heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
