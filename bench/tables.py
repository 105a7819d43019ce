"""The results as Markdown tables, which scripts/pages.py writes into README.md and docs/results.md.

They have the newest run of bench/e2e.py on each pair, those of bench/peers.py in which the most engines ran, the newest
run of bench/contexts.py on each model, that of bench/serving.py on each model and mix of prompts, and the newest rows
of a GPU's kernels and of decoding there.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from bench.plot import Row, contexts, end_to_end, on_gpus, peers, read, serving

MARK = re.compile(r"<!-- results (\S+)(?: only: (.+?))? -->\n.*?<!-- end -->", re.DOTALL)


def contexts_markdown(rows: list[Row]) -> str:
    """The table of one model over the length of the prompt: prompt tokens/s, and tokens/s after it."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    found = {(row["way"], row["prompt_tokens"]): row for row in rows}
    lines = [["prompt tokens", *ways], ["--:"] * (1 + len(ways))]
    for length in sorted({row["prompt_tokens"] for row in rows}):
        cells = [found[way, length] for way in ways if (way, length) in found]
        speeds = [f"{x['prefill_tokens_per_second']:.0f} / {x['decode_tokens_per_second']:.1f}" for x in cells]
        lines.append([f"{length:,}", *speeds])
    return with_origin(lines, rows[-1])


def serving_markdown(rows: list[Row]) -> str:
    """The table of one model and mix of prompts: tokens/s of the answers by the requests at once."""
    found = {(row["way"], row["concurrency"]): row["tokens_per_second"] for row in rows}
    numbers = sorted({row["concurrency"] for row in rows})
    lines = [["server", *(f"{n} at once" for n in numbers)], ["---", *["--:"] * len(numbers)]]
    for way in sorted({row["way"] for row in rows}, key=lambda way: -found.get((way, numbers[-1]), 0.0)):
        lines.append([way, *(f"{found[way, n]:.1f}" if (way, n) in found else "" for n in numbers)])
    return with_origin(lines, rows[-1])


def kernels_markdown(rows: list[Row]) -> str:
    """A row for each case of each op: specker's time, and how many times as long the others take."""
    lines = [
        ["op", "case", "us", "of the limit", "times of others", "goal", "met"],
        ["---", "---", *["--:"] * 2, *["---"] * 3],
    ]
    for ours in (row for row in rows if row["way"] == "specker"):
        others = [row for row in rows if (row["op"], row["case"]) == (ours["op"], ours["case"]) and row is not ours]
        beside = ", ".join(f"{row['way']} {row['ours_over_this']:.2f}" for row in others)
        met = {True: "yes", False: "no", None: ""}[ours.get("met")]
        goal = ours.get("goal", "").replace("|", "\\|")
        times = f"{ours['median'] * 1e6:.1f}", f"{ours['share']:.0%}"
        lines.append([f"`{ours['op']}`", ours["case"].replace("->", "→"), *times, beside, goal, met])
    return with_origin(lines, rows[-1])


def decode_markdown(rows: list[Row]) -> str:
    """A row for each case of bench/decode.py."""
    lines = [["case", "", "ms", "found", "goal", "met"], ["---", "---", "--:", *["---"] * 3]]
    for row in rows:
        digits = ".1%" if row.get("unit") == "%" else ".2f"
        found = f"{row['value']:{digits}} of {row['of']}" if "value" in row else ""
        met = {True: "yes", False: "no", None: ""}[row.get("met")]
        lines.append([row["case"], row["way"], f"{row['median'] * 1e3:.3f}", found, row.get("goal", ""), met])
    return with_origin(lines, rows[-1])


def markdown(rows: list[Row]) -> str:
    """The table of one pair: a row for each configuration, the columns of each temperature side by side."""
    temperatures = sorted({row["temperature"] for row in rows})
    found = {(row["way"], row["temperature"]): row for row in rows}
    names = ("tokens/s", "over `ar`", "acceptance length")
    head = [f"T = {t:g}: {names[0]}" if name == names[0] else name for t in temperatures for name in names]
    lines = [["configuration", *head], ["---", *["--:"] * len(head)]]
    for way in dict.fromkeys(row["way"] for row in rows):
        line = [f"`{way}`"]
        for t in temperatures:
            row = found.get((way, t), {})
            tau = row.get("acceptance_length", 1)
            digits = 0 if row.get("tokens_per_second", 0) >= 100 else 1
            line += [f"{row['tokens_per_second']:.{digits}f}", f"{row['over_ar']:.2f}"] if row else ["", ""]
            line.append(f"{tau:.2f}" if tau > 1 else "")
        lines.append(line)
    return with_origin(lines, rows[-1])


def peers_markdown(rows: list[Row]) -> str:
    """The table of one model in several engines; those that do not run come last."""
    about = {"base": "transformers float32", "reference": "ar float32", **rows[0]}  # older rows say neither
    columns = ("engine", "version", "tokens/s", "after the first", "ms to the first", f"over `{about['base']}`")
    lines = [[*columns, f"texts as `{about['reference']}`"], ["---", "---", *["--:"] * 5]]
    for row in sorted(rows, key=lambda row: row.get("tokens_per_second", 0), reverse=True):
        line = [row["way"], row["version"]]
        if "reason" in row:
            lines.append([*line, f"does not run: {row['reason']}", *[""] * 4])
            continue
        speeds = (row.get(name) for name in ("tokens_per_second", "decode_tokens_per_second"))
        line += ["" if speed is None else f"{speed:.1f}" for speed in speeds]
        line += [f"{row['first_token_ms']:.0f}", f"{row['over_base']['median']:.2f}"]
        lines.append([*line, f"{row['equal_texts']} of {row['texts']}"])
    return with_origin(lines, rows[-1])


def kinds_markdown(kinds: dict[str, list[Row]]) -> str:
    """The table of one model in several engines, each kind of prompt in two columns; slow engines come last."""
    found = {kind: {row["way"]: row for row in rows if "reason" not in row} for kind, rows in kinds.items()}
    base = next(iter(kinds.values()))[0]["base"]
    head = [name for kind in kinds for name in (f"{kind}: tokens/s", f"over `{base}`")]
    ratios: dict[str, list[float]] = {}
    for rows in found.values():
        for way, row in rows.items():
            ratios.setdefault(way, []).append(row["over_base"]["median"])
    lines = [["engine", *head], ["---", *["--:"] * len(head)]]
    for way in sorted(ratios, key=lambda way: sum(ratios[way]), reverse=True):
        line = [way]
        for rows in found.values():
            row = rows.get(way)
            line += [f"{row['tokens_per_second']:.1f}", f"{row['over_base']['median']:.2f}"] if row else ["", ""]
        lines.append(line)
    return with_origin(lines, next(iter(kinds.values()))[-1])


def with_origin(lines: list[list[str]], row: Row) -> str:
    """A table as Markdown below the command, machine and versions of its run, which are those of `row`."""
    return f"{origin(row)}\n\n{table(lines)}"


def origin(row: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items() if version)
    where = f"{row['machine']}, {row['threads']} threads{', ' + row['dtype'] if 'dtype' in row else ''}"
    return f"`{row['command']}`; {where}; {versions}; commit {row['commit']}."


def table(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES = {
    "peers": peers_markdown,
    "contexts": contexts_markdown,
    "serving": serving_markdown,
    "kernels": kernels_markdown,
    "decode": decode_markdown,
}


def tables(folders: Iterable[Path]) -> dict[str, list[Row]]:
    """The newest runs of all machines, by the names of their tables."""
    found: dict[str, list[Row]] = {}
    for folder in folders:
        rows = read(folder)
        loads = {f"{name}-{mix}": run for name, mixes in serving(rows).items() for mix, run in mixes.items()}
        for name, run in (end_to_end(rows) | peers(rows) | contexts(rows) | on_gpus(folder, rows) | loads).items():
            found[name] = max(found.get(name, run), run, key=lambda rows: rows[-1].get("date", ""))
    return found


def fill(text: str, runs: dict[str, list[Row]]) -> str:
    """`text` with each table between its markers `<!-- results NAME -->`, or `<!-- results NAME only: WAY, WAY -->` for
    some of its rows, and `<!-- end -->`. If there is no run NAME but several called NAME-KIND, the kinds of prompts are
    columns of one table. Raises ValueError if a marker names no run or a way that it lacks."""

    def filled(mark: re.Match[str]) -> str:
        name, only = mark[1], [way.strip() for way in (mark[2] or "").split(",") if way.strip()]
        kinds = {other.removeprefix(f"{name}-"): rows for other, rows in runs.items() if other.startswith(f"{name}-")}
        asked = {"": runs[name]} if name in runs else kinds
        if not asked:
            raise ValueError(f"a page asks for {name}, but bench/results has only {', '.join(runs)}")
        if missing := set(only) - {row["way"] for rows in asked.values() for row in rows}:
            raise ValueError(f"a page asks for {', '.join(sorted(missing))} of {name}, which has no such row")
        asked = {kind: [row for row in rows if not only or row["way"] in only] for kind, rows in asked.items()}
        if name in runs:
            kind = name.split("-")[0]
            found = TABLES.get(kind, markdown)(asked[""])
        else:
            found = kinds_markdown(asked)
        start = mark[0][: mark[0].index("\n") + 1]
        return f"{start}{found}\n<!-- end -->"

    return MARK.sub(filled, text)
