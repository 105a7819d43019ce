"""A decision for a new context: retrieve, prompt, decode with specker, write the record."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from examples.adr.index import Index
from examples.adr.prompts import fit
from examples.adr.records import Record

CONSEQUENCES = "To be written when the decision is reviewed."


@dataclass(frozen=True)
class Drafted:
    decision: str
    examples: list[Record]  # that the prompt holds, the best first
    stats: Any  # specker's, of this text
    finished: str  # "stop" or "length"


def draft(
    engine: Any,
    index: Index,
    context: str,
    title: str = "",
    examples: int = 2,
    max_new_tokens: int = 400,
    show: Callable[[str], None] = lambda piece: None,
    **sampling: Any,
) -> Drafted:
    """Decode the decision on `context`. `engine`: what `specker.load` gives. `show` gets the text piece by piece.
    `sampling`: fields of specker.options.Sampling. Raises ValueError if the context does not fit the model."""
    found = index.search(f"{title}\n{context}", examples)
    room = engine.target.config.max_context - max_new_tokens
    if room < 1:
        raise ValueError(f"--max-new-tokens {max_new_tokens}: the model's context is {room + max_new_tokens} tokens")
    ids, kept = fit(engine.tokenizer, context, found, room, title)
    pieces = []
    for chunk in engine.stream(ids, max_new_tokens, **sampling):
        pieces.append(chunk.text)
        show(chunk.text)
    return Drafted("".join(pieces).strip(), found[:kept], chunk.stats, chunk.finished)


def write(folder: Path, title: str, context: str, decision: str, day: date) -> Path:
    """Write the record as adr-tools numbers and lays out its files, and return its path. Existing files are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(m.group(1)) for p in folder.glob("*.md") if (m := re.match(r"(\d+)-", p.name))]
    number = max(numbers, default=0) + 1
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:80].strip("-") or "decision"
    path = folder / f"{number:04d}-{slug}.md"
    text = (
        f"# {number}. {title}\n\nDate: {day.isoformat()}\n\n## Status\n\nProposed\n\n"
        f"## Context\n\n{context.strip()}\n\n## Decision\n\n{_below(decision)}\n\n## Consequences\n\n{CONSEQUENCES}\n"
    )
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.link(part, path)  # unlike a rename it fails if another process has taken the number
    finally:
        part.unlink(missing_ok=True)
    return path


def _below(text: str) -> str:
    """Without the headings of a whole record, and with other headings below "## Decision"."""
    lines = []
    for line in text.splitlines():
        heading = re.match(r"#{1,6}\s+(.*?)\s*#*$", line)
        if heading is None:
            lines.append(line)
        elif heading.group(1).lower() not in ("decision", "decision outcome"):
            lines.append(f"### {heading.group(1)}")
    return "\n".join(lines).strip()


def title_of(decision: str) -> str:
    """A title for a decision: its first sentence, up to eight words, without "We will" and the like."""
    plain = re.sub(r"[*_`#>]", "", decision).strip()
    first = re.split(r"(?<=[.!?])\s|\n", plain, maxsplit=1)[0].rstrip(".:!?")
    start = r"^(?:we (?:will|have decided to|decided to|should)|the decision is to|chosen option:)\s+"
    first = re.sub(start, "", first, flags=re.IGNORECASE)
    short = " ".join(first.split()[:8])
    return short[:1].upper() + short[1:] or "Decision"
