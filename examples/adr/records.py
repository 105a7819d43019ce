"""Architecture decision records in Markdown: Nygard's layout and adr-tools' files, MADR and Log4brains' files."""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from markdown_it import MarkdownIt

FIELDS = {
    "status": ("status", "state"),
    "context": (
        "context",
        "context and problem statement",
        "context and problem",
        "problem",
        "problem statement",
        "background",
        "issue",
        "motivation",
        "rationale",
    ),
    "decision": ("decision", "decisions", "decision outcome", "outcome", "our decision"),
    "consequences": ("consequences", "positive consequences", "negative consequences", "implications"),
}
NAMES = {name: field for field, names in FIELDS.items() for name in names}
NUMBER = re.compile(r"^(?:adr[\s:#-]*)?\d+\s*[.:)\u2013-]*\s+|^adr[\s:#-]+\d*\s*[.:-]*\s*", re.IGNORECASE)
PLACEHOLDER = re.compile(r"^(?:\{.*\}|\[.*\]|<.*>|to ?do.?|tbd.?|\.{3}|n/?a)$", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Record:
    """One decision. Sections are Markdown without their headings, "" where they are absent."""

    path: str  # relative to the folder that was read
    repository: str  # held-out splits keep a repository's records together
    title: str
    status: str
    context: str
    decision: str
    consequences: str

    @property
    def text(self) -> str:
        """What makes two records the same: context and decision."""
        return f"{self.context}\n{self.decision}"


def read(folder: Path) -> tuple[list[Record], list[str]]:
    """The records below `folder`, by path, and a sentence for each Markdown file that is none. Raises ValueError if the
    folder does not exist or holds no record."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".md", ".markdown") and p.is_file())
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    tops = {p.relative_to(folder).parts[0] for p in files if len(p.relative_to(folder).parts) > 1}
    records: dict[str, Record] = {}
    skipped = []
    for file in files:
        name = file.relative_to(folder)
        repository = name.parts[0] if len(tops) > 1 and len(name.parts) > 1 else folder.resolve().name
        try:
            record = parse(file.read_bytes().decode("utf-8-sig"), name.as_posix(), repository)
        except UnicodeDecodeError as error:
            skipped.append(f"{name}: not UTF-8 at byte {error.start}")
            continue
        except ValueError as error:
            skipped.append(f"{name}: {error}")
            continue
        same = records.setdefault(_fingerprint(record), record)
        if same is not record:
            skipped.append(f"{name}: the same context and decision as {same.path}")
    if not records:
        raise ValueError(f"{folder}: none of its {len(files)} Markdown files is an architecture decision record")
    return list(records.values()), skipped


def parse(text: str, path: str, repository: str) -> Record:
    """Read one file. Raises ValueError with the reason if it has no title, context or decision, or only a template's
    placeholder for one."""
    front, body = _front_matter(re.sub(r"<!--.*?-->", "", text.replace("\r\n", "\n"), flags=re.DOTALL))
    title, preamble, found = "", "", {}
    for level, heading, lines in _sections(body):
        field = _field(heading)
        if field is None and not title and level <= 2:
            title, preamble = NUMBER.sub("", heading).strip(), lines
        elif field is not None:
            found[field] = "\n\n".join(part for part in (found.get(field, ""), lines) if part)
    title = title or str(front.get("title") or "")
    if not title:
        raise ValueError("no title")
    for field in ("context", "decision"):
        if not found.get(field):
            raise ValueError(f"no section for the {field}")
        if PLACEHOLDER.match(found[field]):
            raise ValueError(f"the {field} is a template's placeholder")
    stated = re.search(r"^[*-]?\s*\**status\**\s*:\s*(.+)$", preamble, re.IGNORECASE | re.MULTILINE)
    status = found.get("status") or (stated.group(1) if stated else "") or str(front.get("status") or "")
    return Record(
        path, repository, title, status.strip(), found["context"], found["decision"], found.get("consequences", "")
    )


def _front_matter(text: str) -> tuple[dict[str, object], str]:
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    if match is None:
        return {}, text
    try:
        values = yaml.safe_load(match.group(1))
    except yaml.YAMLError:
        values = None
    return values if isinstance(values, dict) else {}, text[match.end() :]


def _field(heading: str) -> str | None:
    """The field that a heading such as "Context" or "2. Decision Outcome:" begins."""
    return NAMES.get(re.sub(r"^\d+\s+|[^a-z0-9 ]", "", re.sub(r"[.):]", "", heading.lower())).strip())


def _sections(body: str) -> Iterator[tuple[int, str, str]]:
    """(level, heading, text) of each section. Headings below a known one that are not known themselves belong to its
    text, such as the options within a decision."""
    lines = body.split("\n")
    tokens = MarkdownIt().parse(body)
    heads = []  # level, heading, its first line, the line after it
    for token, inline in itertools.pairwise(tokens):
        if token.type == "heading_open" and token.level == 0 and token.map is not None:
            heads.append((int(token.tag[1]), inline.content.strip(), *token.map))
    within = 0  # the level of the known heading whose text this is
    kept: list[list] = []
    for level, heading, start, after in heads:
        known = _field(heading) is not None
        if known or not within or level <= within:
            kept.append([level, heading, start, after])
            within = level if known else 0
    for n, (level, heading, _, after) in enumerate(kept):
        end = kept[n + 1][2] if n + 1 < len(kept) else len(lines)
        yield level, heading, "\n".join(lines[after:end]).strip()


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def trigrams(text: str) -> set[tuple[str, ...]]:
    """Every three words in a row; of a shorter text, all of it."""
    each = words(text)
    return set(zip(each, each[1:], each[2:], strict=False)) or {tuple(each)}


def _fingerprint(record: Record) -> str:
    return hashlib.sha256(" ".join(words(record.text)).encode()).hexdigest()


def counts(records: list[Record]) -> Counter[str]:
    """Records of each repository."""
    return Counter(record.repository for record in records)


def as_rows(records: list[Record]) -> list[dict[str, str]]:
    return [asdict(record) for record in records]
