"""bench/plot.py draws the newest rows, and refuses a broken or empty folder with a clear message."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bench import plot, tables

ROOT = Path(__file__).parents[2]


def kernel_row(date, way, op="merge", case="T 8", **more):
    row = {"bench": "kernels", "op": op, "case": case, "way": way, "median": 1e-5, "ours_over_this": 1.0}
    return {**row, "machine": "a card", "date": date, **more}


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def plotted(folder):
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "170"}
    return subprocess.run([sys.executable, "bench/plot.py", folder], cwd=ROOT, env=env, capture_output=True, text=True)


def test_pictures_and_table(tmp_path):
    """Of the newest row of each kind."""
    about = {"machine": "a card", "command": "x", "commit": "c", "date": "3"}
    run = {**about, "bench": "e2e", "temperature": 0.0}
    old = [kernel_row("1", "specker", share=0.5, goal=">= 85%", met=False), kernel_row("1", "dropped since")]
    new = [kernel_row("2", "specker", share=0.8, goal=">= 75%", met=True), kernel_row("2", "torch")]
    asked = {**about, "bench": "contexts", "target": "tiny", "way": "specker", "limit": 90.0}
    speeds = {"prefill_tokens_per_second": 5e4, "decode_tokens_per_second": 9e3}
    load = {**about, "model": "tiny", "mix": "short", "way": "specker", "tokens_per_second": 9.0}
    rows = {
        "merge": new + old,
        "e2e": [
            {**run, "way": "ar", "tokens_per_second": 300.0, "over_ar": 1.0, "acceptance_length": 1.0},
            {**run, "way": "draft chain 4", "tokens_per_second": 450.0, "over_ar": 1.5, "acceptance_length": 3.25},
        ],
        "contexts": [{**asked, **speeds, "prompt_tokens": n} for n in (512, 2048)],
        "serving": [{**load, "concurrency": n} for n in (1, 4)],
    }
    for name, some in rows.items():
        write(tmp_path, name, some)
    done = plotted(tmp_path)
    assert done.returncode == 0, done.stderr
    pictures = {path.stem for path in tmp_path.glob("*.svg") if "</svg>" in path.read_text()}
    dark = {f"{name}-tiny-{shade}" for name in ("contexts", "serving") for shade in ("light", "dark")}
    assert pictures == {"kernels", "e2e"} | dark
    for text in ("merge", "80%", ">= 75%", "yes", "draft chain 4, T 0", "1.50x ar"):
        assert text in done.stdout
    assert ">= 85%" not in done.stdout and "dropped" not in done.stdout


@pytest.mark.parametrize(("text", "message"), [("", "there are no rows"), ('{"bench": "e2e"\n', "merge.jsonl, line 1")])
def test_nothing_and_nonsense_are_refused(tmp_path, text, message):
    (tmp_path / "merge.jsonl").write_text(text)
    done = plotted(tmp_path)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_runs_of_each_pair_are_kept_apart():
    run = {"bench": "e2e", "way": "ar", "temperature": 0.0}
    old, new = ({**run, "date": date} for date in ("1", "2"))
    real = {**run, "target": "SmolLM2", "categories": ""}
    some = {**real, "categories": "rag,qa"}
    failed = {**real, "way": "del", "reason": "no"}
    assert plot.end_to_end([old, new, real, some, failed]) == {
        "e2e": [new],
        "e2e-SmolLM2": [real],
        "e2e-SmolLM2-rag-qa": [some],
    }


def test_a_table_of_a_page_is_replaced():
    run = {"command": "python x", "machine": "a card", "threads": 2, "dtype": "float32", "commit": "abc"}
    run |= {"versions": {"torch": "2", "triton": None}, "acceptance_length": 1.0, "over_ar": 1.0}
    rows = [
        {**run, "way": "ar", "temperature": 0.0, "tokens_per_second": 20.04},
        {**run, "way": "ar", "temperature": 0.7, "tokens_per_second": 150.4},
        {
            **run,
            "way": "draft",
            "temperature": 0.0,
            "tokens_per_second": 30.0,
            "over_ar": 1.5,
            "acceptance_length": 2.5,
        },
    ]
    table = tables.markdown(rows)
    assert table.splitlines()[-2:] == [
        "| `ar` | 20.0 | 1.00 |  | 150 | 1.00 |  |",
        "| `draft` | 30.0 | 1.50 | 2.50 |  |  |  |",
    ]
    given = {"e2e": rows, "peers-M": rows}
    text = "a\n<!-- results e2e -->\nold | \\1\n<!-- end -->\nb\n<!-- end -->\n"
    assert tables.fill(text, given) == f"a\n<!-- results e2e -->\n{table}\n<!-- end -->\nb\n<!-- end -->\n"
    empty = text.replace("old | \\1\n", "")
    assert tables.fill(empty, given) == tables.fill(text, given)
    some = tables.fill(text.replace("e2e -->", "e2e only: draft -->"), given)
    assert "| `draft` |" in some and "| `ar` |" not in some and "<!-- results e2e only: draft -->\n" in some
    with pytest.raises(ValueError, match="a page asks for e2e, but bench/results has only other"):
        tables.fill(text, {"other": rows})
    with pytest.raises(ValueError, match="a page asks for tree of e2e, which has no such row"):
        tables.fill(text.replace("e2e -->", "e2e only: ar, tree -->"), given)


def test_the_servers_of_the_newest_run_are_shown(tmp_path):
    """The fastest one with most requests at once first."""
    about = {"model": "M", "mix": "short", "command": "python x", "machine": "a card", "threads": 2}
    about |= {"versions": {"torch": "2"}, "date": "2", "commit": "abc"}
    old = [{**about, "commit": "ab", "way": "gone", "concurrency": 1, "tokens_per_second": 1.0}]
    speeds = {("slow", 1): 9.44, ("slow", 4): 9.0, ("fast", 1): 7.0, ("fast", 4): 20.0, ("other", 1): 3.0}
    rows = [{**about, "way": way, "concurrency": n, "tokens_per_second": x} for (way, n), x in speeds.items()]
    write(tmp_path, "serving", old + rows)
    page = tables.fill("<!-- results serving-M-short -->\n<!-- end -->", tables.tables([tmp_path]))
    assert page.splitlines()[-6:-1] == [
        "| server | 1 at once | 4 at once |",
        "| --- | --: | --: |",
        "| fast | 7.0 | 20.0 |",
        "| slow | 9.4 | 9.0 |",
        "| other | 3.0 |  |",
    ]


def test_the_newest_whole_run_of_the_engines_is_shown():
    run = {"bench": "peers", "target": "M", "command": "python x", "machine": "a card", "threads": 2, "commit": "abc"}
    run |= {"versions": {"torch": "2"}, "date": "2"}
    slow = {**run, "way": "slow", "version": "1.0", "tokens_per_second": 10.0, "decode_tokens_per_second": 12.34}
    slow |= {"first_token_ms": 98.7, "over_base": {"median": 1.0}, "equal_texts": 2, "texts": 3}
    fast, broken = {**slow, "way": "fast", "tokens_per_second": 20.0}, {**run, "way": "none", "version": ""}
    broken["reason"] = "exit code 1"
    old = [{**row, "commit": "old", "date": "1"} for row in (slow, fast, broken)]
    fewer = [{**row, "command": "python y", "date": "3"} for row in (slow, broken, {**broken, "way": "other"})]
    runs = plot.peers([*old, broken, slow, fast, {"bench": "e2e"}, *fewer])
    assert runs == {"peers-M": [broken, slow, fast]}
