"""docs/adr: numbered records with every section, whose references exist. scripts/pages.py writes the index."""

import re
from pathlib import Path

import pytest

from examples.adr import records

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "adr"
FILES = sorted(FOLDER.glob("[0-9]*.md"))


def test_numbers_are_consecutive_and_those_of_the_titles():
    assert FILES
    for n, file in enumerate(FILES, 1):
        first = file.read_text(encoding="utf-8").split("\n", 1)[0]
        match = re.match(r"# (\d+)\. (.+)", first)
        assert match is not None and int(match.group(1)) == n == int(file.name[:4]), file.name
        assert re.sub(r"[^a-z0-9]+", "-", match.group(2).lower()).strip("-") == file.stem[5:]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_record_is_whole(file):
    text = file.read_text(encoding="utf-8")
    record = records.parse(text, file.name, "specker")
    assert record.status and record.consequences
    assert re.search(r"^Date: \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (FOLDER / link).exists(), link
    for path in re.findall(r"`([\w./-]+/[\w./-]+|[\w-]+\.(?:py|md))`", text):
        assert (ROOT / path).exists(), path
    log = (ROOT / "bench" / "LOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", log, re.MULTILINE)
    for cited in re.findall(r'`bench/LOG.md`,((?:\s+(?:(?:and|below)\s+)?"[^"]+",?)+)', text):
        for heading in re.findall(r'"([^"]+)"', cited):
            assert any(h.startswith(" ".join(heading.split())) for h in headings), heading


def test_every_record_is_read_as_data():
    """By the example that drafts records, as `python -m examples.adr index docs/adr` does."""
    found, skipped = records.read(FOLDER)
    assert [r.path for r in found] == [file.name for file in FILES]
    assert [why.split(":")[0] for why in skipped] == ["README.md"]
