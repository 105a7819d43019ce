"""`make gpu SHORT=1`, rehearsed without a GPU: a part that dies, a part beyond its time and a full disk leave a report
and an archive. What would travel, and the bits of products."""

import dataclasses
import json
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch
from test_make_gpu import GIB, H100, HANGS, one, python, rehearse, row_of, says  # noqa: F401

from bench import decode, e2e, harness
from bench.gpu import __main__ as program
from bench.gpu import bits, pack, parts, preflight
from bench.gpu.parts import Part, Setting
from bench.gpu.running import Step

WARM, FAMILY = "warm", "family"


@pytest.fixture
def archive(tmp_path):
    """Reads the archive: its files by name."""

    def read():
        with tarfile.open(tmp_path / "out" / "run.tar.gz") as tar:
            return {name: tar.extractfile(name).read().decode() for name in tar.getnames()}

    return read


def test_the_parts_of_a_short_run_and_one_that_dies_or_hangs(rehearse, archive, tmp_path, monkeypatch):  # noqa: F811
    """The other parts run, and the archive holds what each wrote."""
    monkeypatch.setenv("SHORT", "1")
    names = parts.SHORT["1"][1]
    those = dict.fromkeys((*names, "tests"), one(says("I ran")))
    those["bits"] = one(python("import os, signal; print('so far', flush=True); os.kill(os.getpid(), signal.SIGKILL)"))
    those["round"] = one(python(HANGS), weight=0.01)
    done = rehearse("--out", str(tmp_path / "out"), "--minutes", "0.5", **those)
    files = archive()
    report = files[f"{H100.folder}/report.md"]
    assert done.code == 1 and report == done.report
    states = {name: row_of(report, name)[1] for name in names}
    expected = dict.fromkeys(names, "passed") | {"bits": "failed", "round": "reached its time limit"}
    assert states == expected and not row_of(report, "tests")
    assert "so far" in files[f"{H100.folder}/bits.log"] and "kept what I had" in files[f"{H100.folder}/round.log"]
    assert set(files) == {f"{H100.folder}/{name}" for name in ("report.md", *(f"{part}.log" for part in names))}
    ended = [line for line in done.out.out.splitlines() if " after " in line]
    assert [line.split()[2] for line in ended] == [f"{name}:" for name in names]
    assert "not passed: bits failed, round reached its time limit" in done.out.out
    assert done.out.out.splitlines()[-1] == f"make gpu: {tmp_path / 'out' / 'run.tar.gz'}"


def test_the_archive_is_there_after_each_part(rehearse, archive, tmp_path):  # noqa: F811
    seen = []
    look = Part(1, lambda setting: [seen.append(archive()), Step((python(""),))][1:])
    rehearse("--out", str(tmp_path / "out"), "--parts", "bits,ar", "--minutes", "1", bits=one(says("I ran")), ar=look)
    [files] = seen
    assert (
        "I ran" in files[f"{H100.folder}/bits.log"] and row_of(files[f"{H100.folder}/report.md"], "bits")[1] == "passed"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("file", ["results/nvidia-h100-80gb-hbm3/report.part", "out/.run.tar.gz.part"])
def test_a_full_disk_costs_one_file(rehearse, archive, tmp_path, file):  # noqa: F811
    """The report or, the first time, the archive, which has a report in any case."""
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).symlink_to("/dev/full")
    done = rehearse("--out", str(tmp_path / "out"), "--parts", "bits", "--minutes", "1", bits=one(says("I ran")))
    assert done.code == 0 and "cannot be written: No space left on device" in done.out.out
    assert row_of(archive()[f"{H100.folder}/report.md"], "bits")[1] == "passed"


def test_a_row_that_no_section_expects_costs_that_section(rehearse, archive, tmp_path):  # noqa: F811
    row = json.dumps({"date": "9999-01-01T00:00:00Z", "way": "draft"})
    path = tmp_path / "results" / H100.folder / "e2e.jsonl"
    odd = one(python(f"open({str(path)!r}, 'w').write({row!r})"))
    done = rehearse("--out", str(tmp_path / "out"), "--parts", "family", "--minutes", "1", family=odd)
    assert "## strategies\n\nCannot be shown: KeyError: " in archive()[f"{H100.folder}/report.md"]
    assert done.code == 0 and row_of(done.report, "family")[1] == "passed" and "Cannot be shown" in done.out.out


def test_a_log_that_cannot_be_written_costs_one_part(rehearse, archive, tmp_path):  # noqa: F811
    (tmp_path / "results" / H100.folder / "bits.0.log").mkdir(parents=True)
    two = Part(1, lambda setting: [Step((says("I ran"), says("I too")))])
    how = ("--out", str(tmp_path / "out"), "--parts", "bits,ar", "--minutes", "1")
    done = rehearse(*how, bits=two, ar=one(says("I ran")))
    report = archive()[f"{H100.folder}/report.md"]
    assert done.code == 1 and row_of(report, "bits")[1] == "failed" and row_of(report, "ar")[1] == "passed"
    assert "bits.0.log: Is a directory" in report


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SHORT": "3"}, "SHORT must be 1 or 2, got '3'"),
        ({"WITHIN": "soon"}, "WITHIN must be a number of seconds, got 'soon'"),
    ],
)
def test_a_wrong_variable_is_refused(rehearse, monkeypatch, capsys, variables, said):  # noqa: F811
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exit:
        program.main([], parts.PLAN)
    assert exit.value.code == 2 and said in capsys.readouterr().err


def test_times_and_parts_of_short_runs(rehearse, monkeypatch):  # noqa: F811
    for short, (minutes, names) in parts.SHORT.items():
        monkeypatch.setenv("SHORT", short)
        args = program.parse([], parts.PLAN)
        assert args.parts == names and args.minutes == minutes == pytest.approx(
            sum(parts.PARTS[name].minutes for name in names)
        )
        monkeypatch.setenv("WITHIN", "180")
        assert program.parse([], parts.PLAN).minutes == 3 and program.parse(["--parts", "ab"], parts.PLAN).parts == (
            "ab",
        )
        monkeypatch.delenv("WITHIN")


def test_the_commands_of_a_short_run_name_cases_and_ways(tmp_path, command_line):
    setting = Setting("python", tmp_path / "notes", tmp_path, limit=300, memory=40 * GIB)
    names = [name for _, own in parts.SHORT.values() for name in own]
    commands = [c for name in names for step in parts.PARTS[name].steps(setting) for c in step.commands]
    scripts = [(c.argv[4], list(c.argv[4:])) for c in commands]
    assert len([1 for script, _ in scripts if script == "bench/decode.py"]) == len(parts.WARM_CASES) + 2
    for script, argv in scripts:
        command_line(argv)
        if script == "bench/decode.py":
            args = harness.arguments(decode.Args)
            found = [case.name for case in decode.chosen(args)]
            assert all(any(part in name for name in found) for part in args.cases.split(","))
        if script == "bench/e2e.py":
            args = harness.arguments(e2e.Args)
            assert set(args.ways.split(",")) <= set(e2e.SHAPES) and args.prompts >= args.batch_size and args.shape
    largest = max(len(step.commands) for name in names for step in parts.PARTS[name].steps(setting))
    assert largest <= 12


# --- what travels


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A small repository as the one that would travel."""
    root = tmp_path / "checkout"
    (root / "models").mkdir(parents=True)
    for name, text in ((".gitignore", "build/\n"), ("a.py", "1"), ("models/b", "2")):
        (root / name).write_text(text)
    git = ["git", "-c", "user.email=a@b", "-c", "user.name=a"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], cwd=root, check=True)
    monkeypatch.setattr(pack, "ROOT", root)
    monkeypatch.setattr(pack, "CARRIED", root / "build" / "triton")
    return root


def test_what_would_travel(checkout, command_line, capsys, monkeypatch):
    (checkout / "build").mkdir()
    (checkout / "build" / "c").write_text("ignored")
    command_line(["pack"])
    pack.main()
    said = capsys.readouterr().out
    assert ", 3 files\n" in said and "0.0 MiB packed" in said and "make gpu SHORT=1 ARGS='--out DIR'" in said
    (checkout / "new.py").write_text("3")
    with pytest.raises(SystemExit, match=r"^pack: 1 files differ from the commit, as new.py: commit them$"):
        pack.main()
    (checkout / "new.py").unlink()
    monkeypatch.setattr(pack, "MOST", 10)
    with pytest.raises(SystemExit, match=r"^pack: more than 0 MiB, most of them in "):
        pack.main()


def test_a_cache_is_carried_without_what_launches_do_not_need(checkout, tmp_path, command_line, capsys, monkeypatch):
    """Triton finds its group of files in another folder."""
    cache = pytest.importorskip("triton.runtime.cache")
    knobs = pytest.importorskip("triton").knobs
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "made"))
    manager = cache.FileCacheManager("KEY1")
    files = {name: manager.put(text, name) for name, text in (("k.cubin", b"code"), ("k.json", "{}"), ("k.ttir", "t"))}
    manager.put_group("k.json", files)
    command_line(["pack", "--cache", tmp_path / "empty"])
    with pytest.raises(SystemExit, match=r"^pack: .*empty holds no kernel that Triton compiled"):
        pack.main()
    command_line(["pack", "--cache", tmp_path / "made"])
    pack.main()
    here = pack.triton_key()
    assert f"triton_key {here}" in capsys.readouterr().out
    there = tmp_path / "there"
    pack.CARRIED.rename(there)
    assert pack.placed(there) == there and pack.placed(tmp_path / "nowhere") is None
    monkeypatch.setattr(knobs.cache, "dir", str(there))
    found = cache.FileCacheManager("KEY1").get_group("k.json")
    assert found == {name: str(there / "KEY1" / name) for name in ("k.cubin", "k.json")}
    assert Path(found["k.cubin"]).read_bytes() == b"code" and not list(there.rglob("*.ttir"))
    facts = dataclasses.replace(H100, triton_key=here)
    assert preflight.carried(facts, there) == preflight.carried(facts, None) == []
    [problem] = preflight.carried(dataclasses.replace(H100, triton_key="other"), there)
    assert f"compiled by another Triton ({here}, here other)" in problem.sentence and not problem.fatal
    setting = Setting("python", tmp_path, tmp_path, cache=there)
    assert setting.environment()["TRITON_CACHE_DIR"] == str(there)


# --- bits


def test_a_product_whose_bits_change_is_found():
    x = torch.randn(64, 8)
    calls = []

    def rare(n):
        calls.append(n)
        y = x[:n] * 2
        y[0, 0] += 1e-6 * (len(calls) == 7)
        return y, torch.zeros(3)

    assert bits.repeated(rare, 10, "cpu") == 1 and set(calls) == {bits.REPEATED_ROWS}
    assert bits.repeated(lambda n: (x[:n],), 10, "cpu") == 0
    many = bits.other_rows(lambda n: (x[:n] * (1.5 if n == 17 else 1),), bits.ROWS)
    assert many == [17] and bits.other_rows(lambda n: (x[:n],), bits.ROWS) == []
    assert bits.repeated(lambda n: (torch.full((1,), torch.nan),), 1, "cpu") == 1


def test_every_product_of_every_kind_runs(results, command_line, monkeypatch, capsys):
    command_line(["bench/gpu/bits.py", "--repeats", "1", "--shrink", "8", "--device", "cpu", "--save"])
    bits.main()
    rows = results()
    assert {row["kind"] for row in rows} == set(bits.KINDS) and {row["found"] for row in rows} == {"equal bits"}
    assert {row["op"].split()[0] for row in rows} == {"row_linear", "kv_project", "vocab_topk", "expert_linear"}
    monkeypatch.setattr(bits, "KINDS", ("int8",))
    monkeypatch.setattr(bits, "repeated", lambda *_: 3)
    with pytest.raises(SystemExit, match=r"^bench: other bits: row_linear 512 -> 512 none int8, row_linear"):
        bits.main()
    assert "3 of 1 repeats differ" in capsys.readouterr().out
