"""bench/plot.py draws the newest rows, and refuses a broken or empty folder with a clear message."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from bench import plot, tables

ROOT = Path(__file__).parents[1]


def kernel_row(date, way, op="merge", case="T 8", **more):
    row = {"bench": "kernels", "op": op, "case": case, "way": way, "median": 1e-5, "ours_over_this": 1.0}
    return {**row, "machine": "a card", "date": date, **more}


def write(folder, name, rows):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_newest_row_is_compared_with_baselines_of_the_same_run(tmp_path):
    old = [kernel_row("1", "specker", share=0.5), kernel_row("1", "torch"), kernel_row("1", "dropped since")]
    new = [kernel_row("2", "specker", share=0.8, goal=">= 85%"), kernel_row("2", "torch", ours_over_this=2.0)]
    write(tmp_path, "merge", new + old)
    [ways] = plot.kernels(plot.read(tmp_path))
    assert [(r["way"], r["date"]) for r in ways] == [("specker", "2"), ("torch", "2")]
    assert plot.goal_share(ways[0]) == 0.85 and plot.goal_share(ways[1]) is None
    figure = plot.draw_kernels([ways], "a card")
    left, right = figure.axes
    assert [bar.get_width() for bar in left.patches] == [80.0]
    assert left.collections[0].get_offsets().tolist() == [[85.0, 0.0]]
    assert right.collections[0].get_offsets().tolist() == [[2.0, 0.0]]


def test_pictures_and_table(tmp_path):
    run = {"bench": "e2e", "machine": "a card", "date": "3", "temperature": 0.0}
    rows = [
        {**run, "way": "ar", "tokens_per_second": 300.0, "over_ar": 1.0, "acceptance_length": 1.0},
        {**run, "way": "draft chain 4", "tokens_per_second": 450.0, "over_ar": 1.5, "acceptance_length": 3.25},
    ]
    write(tmp_path, "e2e", rows)
    write(tmp_path, "merge", [kernel_row("1", "specker", share=0.5, goal=">= 85%", met=False)])
    command = [sys.executable, "bench/plot.py", str(tmp_path)]
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "COLUMNS": "170"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("kernels", "e2e"):
        assert "</svg>" in (tmp_path / f"{name}.svg").read_text()
    for text in ("merge", "50%", ">= 85%", "no", "draft chain 4, T 0", "1.50x ar"):
        assert text in done.stdout


def test_lines_over_lengths_and_requests(tmp_path):
    about = {"machine": "a card", "command": "x", "commit": "c", "date": "2"}
    asked = {"bench": "contexts", "target": "tiny", "way": "specker", "limit": 90.0}
    over = [
        {
            **about,
            **asked,
            "prompt_tokens": n,
            "prefill_tokens_per_second": 5e4 / n,
            "decode_tokens_per_second": 9e3 / n,
        }
        for n in (512, 2048)
    ]
    load = [
        {**about, "model": "tiny", "mix": mix, "way": way, "concurrency": n, "tokens_per_second": 9.0 * n}
        for mix, way, n in (("short", "specker", 1), ("short", "other", 4), ("long", "specker", 8))
    ]
    write(tmp_path, "contexts", [{**over[0], "commit": "older"}, *over])
    write(tmp_path, "serving", load)
    rows = plot.read(tmp_path)
    left, right = plot.draw_contexts(plot.contexts(rows)["contexts-tiny"], dark=False).axes
    assert left.lines[0].get_xydata().tolist() == [[512, 5e4 / 512], [2048, 5e4 / 2048]]
    assert [line.get_ydata()[0] for line in right.lines] == [9e3 / 512, 90.0]
    short, long = plot.draw_serving(plot.serving(rows)["serving-tiny"], dark=True).axes
    assert [line.get_xydata().tolist() for line in short.lines] == [[[1, 9.0]], [[4, 36.0]]] and len(long.lines) == 1
    command = [sys.executable, "bench/plot.py", str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}).returncode == 0
    assert len([*tmp_path.glob("*-light.svg")]) == len([*tmp_path.glob("*-dark.svg")]) == 2


@pytest.mark.parametrize(("text", "message"), [("", "there are no rows"), ('{"bench": "e2e"\n', "merge.jsonl, line 1")])
def test_nothing_and_nonsense_are_refused(tmp_path, text, message):
    (tmp_path / "merge.jsonl").write_text(text)
    command = [sys.executable, "bench/plot.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True)
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
    columns = "tokens/s | over `ar` | acceptance length"
    assert table.splitlines() == [
        "`python x`; a card, 2 threads, float32; torch 2; commit abc.",
        "",
        f"| configuration | T = 0: {columns} | T = 0.7: {columns} |",
        "| --- | --: | --: | --: | --: | --: | --: |",
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


def test_the_table_of_engines():
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
    edits = [{**row, "categories": "edit", "base": "plain", "reference": "ar"} for row in (slow, fast)]
    assert plot.peers([slow, *edits]) == {"peers-M": [slow], "peers-M-edit": edits}
    assert "| over `plain` | texts as `ar` |" in tables.peers_markdown(edits)
    assert tables.peers_markdown(runs["peers-M"]).splitlines() == [
        "`python x`; a card, 2 threads; torch 2; commit abc.",
        "",
        "| engine | version | tokens/s | after the first | ms to the first | over `transformers float32` | "
        "texts as `ar float32` |",
        "| --- | --- | --: | --: | --: | --: | --: |",
        "| fast | 1.0 | 20.0 | 12.3 | 99 | 1.00 | 2 of 3 |",
        "| slow | 1.0 | 10.0 | 12.3 | 99 | 1.00 | 2 of 3 |",
        "| none |  | does not run: exit code 1 |  |  |  |  |",
    ]


def test_kinds_of_prompts_are_columns_of_one_table():
    run = {"bench": "peers", "command": "python x", "machine": "a card", "threads": 2, "commit": "abc", "base": "plain"}
    run |= {"versions": {"torch": "2"}, "date": "2"}
    speeds = {"chat": {"plain": (10.0, 1.0), "ours": (15.0, 1.5)}, "edit": {"plain": (12.0, 1.0), "ours": (36.0, 3.0)}}
    runs = {
        f"peers-M-{kind}": [
            {**run, "way": way, "tokens_per_second": speed, "over_base": {"median": ratio}}
            for way, (speed, ratio) in ways.items()
        ]
        for kind, ways in speeds.items()
    }
    runs["peers-M-edit"].append({**run, "way": "broken", "reason": "exit code 1"})
    lines = tables.fill("<!-- results peers-M -->\n<!-- end -->", runs).splitlines()
    assert lines[1] == "`python x`; a card, 2 threads; torch 2; commit abc."
    assert lines[3:] == [
        "| engine | chat: tokens/s | over `plain` | edit: tokens/s | over `plain` |",
        "| --- | --: | --: | --: | --: |",
        "| ours | 15.0 | 1.50 | 36.0 | 3.00 |",
        "| plain | 10.0 | 1.00 | 12.0 | 1.00 |",
        "<!-- end -->",
    ]
    some = tables.fill("<!-- results peers-M only: ours -->\n<!-- end -->", runs)
    assert "| ours |" in some and "| plain |" not in some
    with pytest.raises(ValueError, match="a page asks for theirs of peers-M, which has no such row"):
        tables.fill("<!-- results peers-M only: ours, theirs -->\n<!-- end -->", runs)


def test_tables_of_a_gpu(tmp_path):
    """The newest rows of its kernels and of decoding there."""
    origin = {"machine": "a card", "threads": 1, "versions": {}, "commit": "c", "command": "cmd", "device": "cuda"}
    kernel = {"bench": "kernels", "op": "grow", "case": "B 1 -> 2", "median": 2e-6, "ours_over_this": 1.0, "share": 0.5}
    decode = {"bench": "decode", "case": "ar 8b 512", "way": "ar", "median": 6e-3, "goal": ">= 80.0%", "met": True}
    rows = [
        {**kernel, "way": "specker", "median": 3e-6, "date": "1"},
        {**kernel, "way": "specker", "goal": "<= 10 us", "met": True, "date": "2"},
        {**kernel, "way": "torch", "ours_over_this": 1.5, "date": "2"},
        {**decode, "value": 0.7, "unit": "%", "of": "the bandwidth", "date": "1"},
        {**decode, "value": 0.816, "unit": "%", "of": "the bandwidth", "date": "2"},
        {**decode, "case": "verify", "value": 1.03, "unit": "x", "of": "one row", "met": None, "date": "2"},
    ]
    folder = tmp_path / "a-card"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row | origin) + "\n" for row in rows))
    runs = tables.tables([folder])
    lines = tables.fill("<!-- results kernels-a-card -->\n<!-- end -->", runs).splitlines()
    assert lines[-2] == "| `grow` | B 1 → 2 | 2.0 | 50% | torch 1.50 | <= 10 us | yes |" and lines[1].startswith(
        "`cmd`"
    )
    lines = tables.fill("<!-- results decode-a-card -->\n<!-- end -->", runs).splitlines()
    assert lines[-4].startswith("| --- |") and lines[-3:-1] == [
        "| ar 8b 512 | ar | 6.000 | 81.6% of the bandwidth | >= 80.0% | yes |",
        "| verify | ar | 6.000 | 1.03 of one row | >= 80.0% |  |",
    ]
