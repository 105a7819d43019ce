"""docs/adr: numbered records with every section, and an index that lists them."""

import re
from pathlib import Path

import pytest

from examples.adr import records

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "adr"
FILES = sorted(FOLDER.glob("[0-9]*.md"))


def test_numbers_are_consecutive_and_those_of_the_titles():
    assert len(FILES) >= 20
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
    assert 80 <= len(text.split()) <= 400
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (FOLDER / link).exists(), link
    for path in re.findall(r"`([\w./-]+/[\w./-]+|[\w-]+\.(?:py|md))`", text):
        assert (ROOT / path).exists(), path
    log = (ROOT / "bench" / "LOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", log, re.MULTILINE)
    for cited in re.findall(r'`bench/LOG.md`,((?:\s+(?:(?:and|below)\s+)?"[^"]+",?)+)', text):
        for heading in re.findall(r'"([^"]+)"', cited):
            assert any(h.startswith(" ".join(heading.split())) for h in headings), heading


def test_a_superseded_record_names_one_that_is_not_older():
    dates = {f.name: re.search(r"^Date: (\S+)$", f.read_text(encoding="utf-8"), re.MULTILINE).group(1) for f in FILES}
    for r in records.read(FOLDER)[0]:
        if r.status.startswith("Superseded"):
            (later,) = re.findall(r"\]\(([^)]+)\)", r.status)
            assert later != r.path and dates[later] >= dates[r.path], r.path


def test_the_index_lists_each_with_its_status():
    rows = re.findall(r"^\| \[(\d+)\]\((.+?)\) \| (.+?) \| (.+?) \|$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    found, skipped = records.read(FOLDER)
    assert [why.split(":")[0] for why in skipped] == ["README.md"]
    assert [(name, title) for _, name, title, _ in rows] == [(r.path, r.title) for r in found]
    for (_, _, _, status), r in zip(rows, found, strict=True):
        assert status == re.sub(r"\[(\d+)\]\(.*\)", r"\1", r.status)
    assert {status.split()[0] for *_, status in rows} == {"Accepted", "Rejected", "Superseded"}
