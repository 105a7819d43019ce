"""The bundled family: a small code model, its draft models and its masked-diffusion drafter, with held-out prompts.

`python -m specker.zoo.train` reproduces the weights; RECIPE.md, corpus.json and losses.json record how."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = ("code-target", "code-draft", "code-diffusion", "code-draft-deep")

PROMPTS = (
    '''\
def moving_average(values, window):
    """Return the means of every `window` consecutive values."""
    if window < 1:''',
    '''\
class Stack:
    """A last-in, first-out collection."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):''',
    '''\
import os
import sys


def read_lines(path, encoding="utf-8"):
    """Yield the lines of a text file without their line ends."""
    with open(path''',
    '''\
def parse_version(text):
    """Parse "1.2.3" into a tuple of integers.

    Raises ValueError if a part is not a number.
    """
    parts =''',
)


def path(name: str) -> Path:
    """The Hugging Face folder of one model of the family. Raises ValueError for another name."""
    if name not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")
    return Path(__file__).parent / name


def vocab_scores() -> Path:
    """The file of token counts of text that the target wrote; see specker/runtime/vocab_scores.py."""
    return Path(__file__).parent / "vocab_scores.safetensors"


def ngram() -> Path:
    """The file of trigrams of text that the target wrote; see specker/runtime/ngram.py."""
    return Path(__file__).parent / "ngram.safetensors"


def heldout() -> list[dict[str, str]]:
    """Function beginnings from modules never trained on, each {"prompt", "source" ("module:line"), "licence"}."""
    text = (Path(__file__).parent / "heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
