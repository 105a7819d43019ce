"""Write the generated parts of the pages: `make pages`, or `python scripts/pages.py [--check]`.

README.md and the pages of docs/ have parts between `<!-- generated NAME -->` and `<!-- end -->`: flags, options,
strategies, ops, the reference of Python (reference.py), the tree of files, the index of decision records, and numbers.
So does the struct of a layer in csrc/layers.h, whose fields are those of LayerWeights.
This script computes them from the code and from bench/results, so that no page repeats by hand what the code says.
Tables of measurements, between `<!-- results NAME -->` and `<!-- end -->`, come from bench/tables.py, and those of
docs/papers.md from bench/papers/page.py. `--check` writes nothing and ends with exit code 1 if a page would change.
"""

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a command is run from anywhere

from bench import plot, tables  # noqa: E402
from bench.papers import page as papers  # noqa: E402
from scripts.reference import described  # noqa: E402
from specker import kernels  # noqa: E402
from specker import options as config  # noqa: E402
from specker.cli import calibrate, serve  # noqa: E402
from specker.cli import flags as command  # noqa: E402
from specker.layer_weights import KINDS  # noqa: E402
from specker.runtime import strategies  # noqa: E402
from specker.zoo import catalogue  # noqa: E402

PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs" / "adr" / "README.md",
    ROOT / "specker" / "cpu" / "csrc" / "layers.h",
)
MARK = re.compile(r"(<!-- generated (\w+)(?: ([^>]+?))? -->)(\n?).*?<!-- end -->", re.DOTALL)
SOURCES = ("specker", "train", "examples", "scripts")  # the tree of files lists what they hold
# Folders without a docstring of their own; those outside of SOURCES are one line of the tree.
FOLDERS = {
    "specker/checkpoints": "Files on disk -> weights, config and tokenizer",
    "specker/cpu/csrc": "The kernels of the CPU's backend, in C",
    "specker/integrations/hub": "specker's `Generate` as a folder that transformers loads",
    "specker/integrations/hub/custom_generate": "The name that transformers looks for",
    "specker/model": "The decoder and its KV cache",
    "specker/runtime": "What drafts, verifies, accepts and schedules",
    "train": "Scripts that trained the bundled models, and that train drafts and heads for others",
    "examples": "Programs that use specker",
    "scripts": "Tools of the repository",
    "models": "specker-models, a distribution of its own: the bundled models and drafts",
    "docs": "These pages; adr/: decision records",
    "simulator": "ptx-simulator, a distribution of its own: executes in numpy what Triton compiles",
    "tests": "`make test`; ptx/ runs the ops in the simulator, support/ makes checkpoints and cases",
    "bench": "One script per question, kernels/ one per op; results/: rows; LOG.md: findings",
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated parts of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    args = parser.parse_args()
    try:
        stale = {path: new for path in PAGES if (new := filled(text_of(path))) != text_of(path)}
    except ValueError as error:
        parser.error(str(error))
    for path, new in stale.items():
        if not args.check:
            path.write_text(new, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'out of date' if args.check else 'written'}", file=sys.stderr)
    if stale and args.check:
        print("run `make pages` and commit the result", file=sys.stderr)
    return int(bool(stale) and args.check)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def filled(text: str) -> str:
    """`text` with every generated part. ValueError if a marker names a part that does not exist."""

    def part(mark: re.Match[str]) -> str:
        if mark[2] not in PARTS:
            raise ValueError(f"a page asks for {mark[2]!r}; scripts/pages.py has only {', '.join(PARTS)}")
        made = PARTS[mark[2]](*([mark[3]] if mark[3] else []))
        return f"{mark[1]}{mark[4]}{made}{mark[4]}<!-- end -->"

    return tables.fill(MARK.sub(part, text), measured())


@cache
def measured() -> dict[str, list[plot.Row]]:
    return tables.tables(sorted(path for path in plot.RESULTS.iterdir() if path.is_dir()))


# --- tables


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def escaped(text: str) -> str:
    """Text in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Code in a cell of a table. Markdown's dialects differ on how a bar is written there, so HTML writes it."""
    return f"`{text}`" if "|" not in text else f"<code>{text.replace('|', '&#124;')}</code>"


def flags(name: str) -> str:
    """The flags of a command, a table for each group of its help; of `serve` those that `specker` lacks."""
    groups = {"specker": command, "specker-calibrate": calibrate, "serve": serve}[name].parser()._action_groups
    if name == "serve":
        known = {group.title for group in command.parser()._action_groups}
        groups = [group for group in groups if group.title not in known]
    parts = []
    for group in groups:
        rows = [(code(usage(action)), escaped(action.help or "")) for action in group._group_actions]
        if rows:
            title = group.title or ""
            parts.append(f"### {title[:1].upper()}{title[1:]}\n\n{table(('flag', 'meaning'), rows)}")
    return "\n\n".join(parts)


def usage(action: argparse.Action) -> str:
    """A flag with its value, such as `--tree WIDTHxDEPTH`."""
    name = ", ".join(action.option_strings)
    if action.nargs == 0:
        return name
    value = action.metavar or f"{{{','.join(action.choices or ())}}}"
    value = {"?": f"[{value}]", "+": f"{value} ..."}.get(str(action.nargs), str(value)) if name else str(value)
    return f"{name} {value}".strip()


def options(name: str) -> str:
    """The options of Common, Sampling or a strategy in Python, by their help texts."""
    cls = getattr(config, name, None) or strategies.own_options()[name]
    rows = []
    for f in fields(cls):
        default = "" if f.default in (None, ()) else f"`{f.default}`"
        rows.append((f"`{f.name}`", default, escaped(f.metadata["help"].format_map(strategies.words()))))
    return table(("option", "default", "meaning"), rows)


def strategies_with_flags() -> str:
    rows = []
    for s in (*strategies.STRATEGIES.values(), strategies.VocabTrim):
        link = f"[`{s.name}`](#{s.name})" if s.name != "ar" else f"`{s.name}`"
        rows.append((link, s.summary, s.needs, own_flags(s.options)))
    return table(("strategy", "how it drafts", "needs", "its own flags"), rows)


def own_flags(cls: type | None) -> str:
    """The flags of a strategy's own options."""
    own = () if cls is None else (f.name for f in fields(cls) if f.metadata.get("flag", True))
    return ", ".join(f"`{strategies.flag(name)}`" for name in own)


def line(where: str) -> str:
    """`FILE: TEXT`: a link to the one line of a source file that holds this text."""
    name, text = where.split(": ", 1)
    lines = text_of(ROOT / name).splitlines()
    if len(numbers := [n for n, line in enumerate(lines, 1) if text in line]) != 1:
        raise ValueError(f"a page asks for the line of {name} with {text!r}, which {len(numbers)} lines have")
    return f"[{Path(name).name}:{numbers[0]}](../{name}#L{numbers[0]})"


def paper(name: str) -> str:
    """The tables of a paper's page; `picture`, `summary`: of all papers."""
    folders = sorted(path for path in plot.RESULTS.iterdir() if path.is_dir())
    if name == "picture":
        return papers.picture(folders, ROOT / "docs")
    rows = papers.read_rows(folders)
    return papers.summary(rows) if name == "summary" else papers.of_paper(name, rows)


def published() -> str:
    """The settings of --as-published, of each strategy that has them."""
    settings = {name: s.published({}) for name, s in strategies.STRATEGIES.items()}
    settings["vocabtrim"] = {**strategies.VocabTrim.published}
    rows = []
    for name, values in settings.items():
        shown = (f"`{name.replace('_', '-')} {value}`" for name, value in (values or {}).items())
        rows += [(f"`{name}`", ", ".join(shown))] if values else []
    return table(("strategy", "settings"), rows)


def drafts() -> str:
    """What `specker drafts` lists."""
    rows = []
    for known in catalogue.KNOWN:
        place = known.source if known.source.startswith("https:") else f"../{known.source}".replace("../docs/", "")
        draft = f"`{known.draft}`, {known.kind}"
        rows.append((f"`{known.target}`", draft, "yes" if known.tried else "", f"[source]({place})"))
    return table(("target", "draft", "run here", ""), rows)


def ops() -> str:
    """The ops by the first sentences of their contracts, and these contracts."""
    rows = [
        (f"[`{name}`](#{name})", escaped(first_sentence(getattr(kernels, name).__doc__ or "")))
        for name in kernels.__all__
    ]
    contracts = "\n\n".join(described(f"specker.kernels.{name}") for name in kernels.__all__)
    return f"{table(('op', 'what it does'), rows)}\n\n## Contracts\n\n{contracts}"


def records() -> str:
    """The index of docs/adr."""
    rows = []
    for path in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md")):
        text = text_of(path)
        title = re.match(r"# (\d+)\. (.+)", text)
        status = re.search(r"^## Status\n\n(.+)$", text, re.MULTILINE)
        if title is None or status is None:
            raise ValueError(f"{path.relative_to(ROOT)}: a record begins with `# N. Title` and has a `## Status`")
        rows.append((f"[{title[1]}]({path.name})", title[2], re.sub(r"\[(\d+)\]\(.*\)", r"\1", status[1])))
    return table(("number", "title", "status"), rows)


def ratio(case: str) -> str:
    """`NAME: WAY / WAY`: how many times as many tokens a second the first way of a run of bench/peers.py gives."""
    name, both = case.split(": ")
    speed = {row["way"]: row.get("tokens_per_second") for row in measured()[name]}
    one, other = both.split(" / ")
    return f"{speed[one] / speed[other]:.1f}"


# --- the tree of files


def tree() -> str:
    lines: list[str] = []
    if gone := [name for name in FOLDERS if not (ROOT / name).is_dir()]:
        raise ValueError(f"FOLDERS in scripts/pages.py describes {', '.join(gone)}, which is no folder")
    for top in SOURCES:
        lines += branch(ROOT / top, 0)
    for name, about in FOLDERS.items():
        if "/" not in name and name not in SOURCES:
            lines += leaf(f"{name}/", about, 0)
    return "\n".join(["```", *lines, "```"])


def branch(folder: Path, depth: int) -> Iterator[str]:
    """The lines of a folder: its files, then the folders in it."""
    name = folder.relative_to(ROOT).as_posix()
    about = sentence_of(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
    if not (about := about or FOLDERS.get(name, "")):
        raise ValueError(f"{name}/ is not described: write a docstring in its __init__.py, or add it to FOLDERS")
    yield from leaf(f"{folder.name}/", about, depth)
    for path in sorted(folder.glob("*.py")):
        if not path.name.startswith("__"):
            if not (about := sentence_of(path)):
                raise ValueError(f"{path.relative_to(ROOT)} has no docstring, whose first sentence the tree shows")
            yield from leaf(path.name, about, depth + 1)
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if inner.relative_to(ROOT).as_posix() in FOLDERS or any(inner.glob("*.py")):
            yield from branch(inner, depth + 1)


def leaf(name: str, about: str, depth: int) -> list[str]:
    start = f"{'  ' * depth}{name}"
    lines = textwrap.wrap(about, 92, break_long_words=False, break_on_hyphens=False)
    return [f"{start if n == 0 else '':<26}  {line}" for n, line in enumerate(lines)]


def sentence_of(path: Path) -> str:
    """The first sentence of a file's docstring, without the file's name in front."""
    return first_sentence(ast.get_docstring(ast.parse(text_of(path))) or "").removeprefix(f"{path.stem}: ")


def first_sentence(text: str) -> str:
    """Up to the first full stop, which `et al.` and `..` do not have."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    found = re.match(r"(.*?)(?<!\bal)(?<!\.)\.(?:\s|$)", paragraph)
    return found[1] if found else paragraph.rstrip(" .,")


def layer_weights() -> str:
    """The fields of a layer's struct in C, between comments."""
    lines = []
    for name, kind in KINDS.items():
        note = f"[{kind.shape}]" + (f", {kind.note}" if kind.note else "")
        lines.append(f"    {'matrix ' if kind.product else 'const float *'}{name}; // {note}")
    return "\n".join([" */", *lines, "    /* "])


PARTS: dict[str, Callable[..., str]] = {
    "drafts": drafts,
    "flags": flags,
    "layer_weights": layer_weights,
    "ops": ops,
    "line": line,
    "options": options,
    "own_flags": lambda name: own_flags(strategies.own_options()[name]),
    "paper": paper,
    "published": published,
    "ratio": ratio,
    "records": records,
    "reference": lambda names: described(*names.split()),
    "strategies_with_flags": strategies_with_flags,
    "tree": tree,
}

if __name__ == "__main__":
    sys.exit(main())
