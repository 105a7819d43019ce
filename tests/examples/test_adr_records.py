"""Reading architecture decision records: the layouts in use, and files that are none."""

from pathlib import Path

import pytest

from examples.adr import records
from examples.adr.records import parse

NYGARD = """# 7. Use a message queue

Date: 2024-03-01

## Status

Accepted

Supersedes [3. Call each other](0003-call-each-other.md)

## Context

Services call each other over HTTP.

```sh
# not a heading
curl service
```

## Decision

We will use a queue.

### Which one

RabbitMQ.

## Consequences

Someone must run it.
"""
MADR = """---
status: "accepted"
date: 2024-01-01
---
# Use PostgreSQL for orders

## Context and Problem Statement

Orders need transactions.

<!-- This is an optional element. -->
## Decision Drivers

* cost

## Considered Options

* PostgreSQL
* MongoDB

## Decision Outcome

Chosen option: "PostgreSQL", because it has transactions.

### Consequences

* Good, because it is known.

### Confirmation

A review.

## Pros and Cons of the Options

### MongoDB

* Bad, because it is not.
"""
LOG4BRAINS = """# Log in with OpenID

- Status: draft
- Date: 2024-05-05

Technical Story: #12

## Context and Problem Statement ##

Users have two passwords.

## Decision Outcome ##

One password.

### Positive Consequences

Fewer tickets.

### Negative Consequences

One more service.
"""
SETEXT = """ADR-0004: Keep logs for a month
================================

Context
-------

Disks are full.

Decision
--------

Logs older than a month go.
"""


def test_nygards_layout():
    r = parse(NYGARD, "a/0007.md", "a")
    assert (r.title, r.path, r.repository) == ("Use a message queue", "a/0007.md", "a")
    assert r.status.startswith("Accepted\n\nSupersedes [3.")
    assert r.context.endswith("# not a heading\ncurl service\n```") and r.context.startswith("Services call")
    assert r.decision == "We will use a queue.\n\n### Which one\n\nRabbitMQ."
    assert r.consequences == "Someone must run it."


def test_madr():
    r = parse(MADR, "x.md", "x")
    assert (r.title, r.status) == ("Use PostgreSQL for orders", "accepted")
    assert r.context == "Orders need transactions."
    assert r.decision == 'Chosen option: "PostgreSQL", because it has transactions.'
    assert r.consequences == "* Good, because it is known."


def test_log4brains():
    r = parse(LOG4BRAINS, "x.md", "x")
    assert (r.title, r.status, r.decision) == ("Log in with OpenID", "draft", "One password.")
    assert r.consequences == "Fewer tickets.\n\nOne more service."


def test_underlined_headings_windows_lines_and_numbers_in_titles():
    r = parse(SETEXT.replace("\n", "\r\n"), "x.md", "x")
    assert (r.title, r.context) == ("Keep logs for a month", "Disks are full.")
    assert r.decision == "Logs older than a month go."


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no title"),
        ("# Notes\n\nSome text.\n", "no section for the context"),
        (NYGARD.replace("## Decision", "## Thoughts"), "no section for the decision"),
        (NYGARD.replace("Services call each other over HTTP.", "").split("```")[0] + "## Decision\n\nx\n", "context"),
        (MADR.replace('Chosen option: "PostgreSQL", because it has transactions.', "{option}"), "placeholder"),
        (SETEXT.replace("Logs older than a month go.", "TODO"), "placeholder"),
    ],
)
def test_what_is_no_record(text, why):
    with pytest.raises(ValueError, match=why):
        parse(text, "x.md", "x")


def test_a_folder_of_repositories(tmp_path):
    for name, text in {
        "one/doc/0001-a.md": NYGARD,
        "one/README.md": "# A project\n",
        "two/adr/x.md": MADR,
        "two/adr/copy.md": MADR.replace("transactions.", "transactions!"),
        ".git/y.md": LOG4BRAINS,
        "three/bad.md": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "three/latin.md").write_bytes("# Ä".encode("latin-1"))
    found, skipped = records.read(tmp_path)
    assert [(r.path, r.repository) for r in found] == [("one/doc/0001-a.md", "one"), ("two/adr/copy.md", "two")]
    assert [why.split(": ")[0] for why in skipped] == [
        "one/README.md",
        "three/bad.md",
        "three/latin.md",
        "two/adr/x.md",
    ]
    assert "not UTF-8 at byte 2" in skipped[2] and "as two/adr/copy.md" in skipped[3]
    assert {r.repository for r in records.read(tmp_path / "one")[0]} == {"one"}


def test_folders_without_records(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        records.read(tmp_path / "none")
    (tmp_path / "README.md").write_text("# A project\n")
    with pytest.raises(ValueError, match="none of its 1 Markdown files is an architecture decision record"):
        records.read(Path(tmp_path))
