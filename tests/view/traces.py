"""Made-up traces for tests of the page."""

import json
from pathlib import Path
from typing import Any

HEADER = {
    "specker_trace": 1,
    "strategy": "draft",
    "target": "big",
    "draft": "small",
    "device": "cpu",
    "dtype": "float32",
}
BEGIN = {"begin": 0, "where": "--prompt", "turn": 1, "text": "Hi", "prompt_tokens": 1, "seed": 0}
# A tree: rows 1 and 2 under the root, row 3 under row 1. The target takes rows 0, 1, 3 and adds a bonus token.
TREE: dict[str, Any] = {
    "prompt": 0, "round": 0, "position": 1, "draft": [5, 6, 7], "parents": [0, 0, 1], "confidence": [],
    "target": [5, 7, 9, 8], "path": [0, 1, 3], "tokens": [5, 7, 8], "pieces": [" a", " b", "\n"], "accepted": 2,
    "last": "bonus", "exit": 0, "sequences": 1, "seconds": {"draft": 0.002, "verify": 0.004, "accept": 0.001},
    "probability": [0.75, 0.2, 0.5], "agreed": [0.6, 0.01, 0.7], "own": [0.6, 0.7, 0.5, 0.9], "outside": [2],
    "source": "model", "names": {"5": " a", "6": " x", "7": " b", "8": "\n", "9": " y"},
}  # fmt: skip
# A chain of two whose first token is refused.
CHAIN: dict[str, Any] = {
    "prompt": 0, "round": 1, "position": 4, "draft": [5, 6], "parents": [0, 1], "confidence": [], "target": [9, 5, 5],
    "path": [0], "tokens": [9], "pieces": [" y"], "accepted": 0, "last": "recovered", "exit": 0, "sequences": 1,
    "source": "text", "matched": 6,
    "seconds": {"draft": 0.002, "verify": 0.004, "accept": 0.001},
}  # fmt: skip
END = {"end": 0, "finished": "length", "tail": "", "seconds": {}, "wall": 1.0}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def small(path: Path, strategy: str = "draft") -> str:
    return write(path, {**HEADER, "strategy": strategy}, BEGIN, TREE, CHAIN, END)


def long(path: Path, tokens: int) -> str:
    """`tokens` tokens in rounds of four, 16 tokens a line."""
    rows = []
    for n in range(tokens // 4):
        last = "\n" if n % 4 == 3 else f" w{n}"
        rows.append(
            {**TREE, "round": n, "position": 1 + 4 * n, "draft": [5, 6, 7, 8], "parents": [0, 1, 2, 3], "names": {},
             "target": [5, 6, 7, 9, 9], "path": [0, 1, 2, 3], "tokens": [5, 6, 7, 9],
             "pieces": [" one", " two", " six", last], "accepted": 3, "last": "recovered",
             "probability": [0.9, 0.8, 0.7, 0.6], "agreed": [0.9, 0.8, 0.7, 0.6], "own": [0.9, 0.8, 0.7, 0.6, 0.5],
             "outside": []}
        )  # fmt: skip
    return write(path, HEADER, BEGIN, {**TREE, "position": 1}, *rows, END)
