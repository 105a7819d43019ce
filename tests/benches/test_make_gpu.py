"""`make gpu`, rehearsed without a GPU: a driver, facts and parts of the tests' own."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu import __main__ as program
from bench.gpu import ops, parts, preflight
from bench.gpu.parts import Part, Plan, Setting
from bench.gpu.preflight import Facts
from bench.gpu.running import Command, Step
from bench.gpu.smoke import FORMS
from specker.cli import flags as specker_flags

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
H100 = Facts(
    executable="python3",
    versions={"python": "3.12.4", "torch": "2.13.0+cu130", "triton": "3.9.0", "transformers": "5.23.0"},
    required={"torch": "2.11", "triton": "3.6"},
    pinned_triton="3.9.0",
    torch_cuda="13.0",
    available=True,
    devices=1,
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    memory=79 * GIB,
    sms=132,
    driver_cuda="13.0",
    ptxas=("/triton/ptxas-blackwell", "13.4"),
    assemblers={"ptxas_blackwell": ("/triton/ptxas-blackwell", "13.4"), "ptxas": ("/triton/ptxas", "12.9")},
    compiler="/usr/bin/gcc",
    folder="nvidia-h100-80gb-hbm3",
    commit="0123456789ab",
)
XML = """<?xml version="1.0" ?>
<nvidia_smi_log>
  <driver_version>580.65.06</driver_version>
  <cuda_version>13.0</cuda_version>
  <gpu id="00000000:01:00.0"><uuid>GPU-other</uuid><product_name>NVIDIA T4</product_name></gpu>
  <gpu id="00000000:02:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name>
    <persistence_mode>Enabled</persistence_mode>
    <mig_mode><current_mig>Disabled</current_mig></mig_mode>
    <uuid>GPU-1234</uuid>
    <fb_memory_usage><total>81559 MiB</total><used>4 MiB</used></fb_memory_usage>
    <compute_mode>Default</compute_mode>
    <ecc_mode><current_ecc>Enabled</current_ecc></ecc_mode>
    <temperature><gpu_temp>31 C</gpu_temp></temperature>
    <{power}><{limit}>700.00 W</{limit}><default_power_limit>700.00 W</default_power_limit></{power}>
    <clocks><graphics_clock>345 MHz</graphics_clock><sm_clock>345 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></clocks>
    <applications_clocks><graphics_clock>1980 MHz</graphics_clock></applications_clocks>
    <max_clocks><sm_clock>1980 MHz</sm_clock><mem_clock>2619 MHz</mem_clock></max_clocks>
    <{reasons}s>
      <{reasons}_gpu_idle>Active</{reasons}_gpu_idle>
      <{reasons}_hw_thermal_slowdown>Not Active</{reasons}_hw_thermal_slowdown>
    </{reasons}s>
  </gpu>
</nvidia_smi_log>
"""
NEW = XML.format(power="gpu_power_readings", limit="current_power_limit", reasons="clocks_event_reason")
OLD = XML.format(power="power_readings", limit="power_limit", reasons="clocks_throttle_reason")
SMI = preflight.parse(NEW, "GPU-1234")


# --- preflight


def test_a_machine_that_fits_has_no_problems():
    assert (
        preflight.problems(H100, SMI) == preflight.problems(dataclasses.replace(H100, pinned_triton="3.9"), SMI) == []
    )
    named = dict(preflight.table(H100, SMI))
    assert named["driver"] == "580.65.06" and named["ptxas for this GPU"] == "CUDA 13.4 (/triton/ptxas-blackwell)"
    assert named["specker's kernels are made"] == "at their first use"
    assert named["SM clock now, application, max"] == "345 MHz, 1980 MHz, 1980 MHz" and named["ECC"] == "Enabled"
    assert dict(preflight.table(Facts(), None))["driver"] == "unknown"


@pytest.mark.parametrize("text", [NEW, OLD])
def test_nvidia_smi_is_read(text):
    smi = preflight.parse(text, "GPU-1234")
    assert smi == SMI and smi.reasons == ("gpu idle",) and smi.power_limit == "700.00 W"
    assert smi.max_clock == "1980 MHz" and smi.memory_used == "4 MiB"
    assert preflight.parse(text, "GPU-9").name == "NVIDIA T4"  # the first
    assert preflight.parse("<nvidia_smi_log><attached_gpus>0</attached_gpus></nvidia_smi_log>") is None


UNSEEN = {"available": False, "devices": 0, "capability": None, "name": ""}


def test_the_smoke_run_checks_every_op():
    sources = [path.read_text() for path in (ROOT / "specker" / "kernels").rglob("*.py")]
    names = {name for source in sources for name in re.findall(r"^def (\w+)_cost\(", source, re.M)}
    assert len(names) > 15 and names | {"repeat_rows"} == {name.split()[0] for name in ops.CHECKS}


MISMATCHES = [  # facts, nvidia-smi's, what the sentence says, whether it stops
    ({"missing": ("rich", "pytest")}, {}, "python3 lacks rich, pytest: install it, or name another interpreter", True),
    (UNSEEN | {"driver_cuda": None}, None, "there is no NVIDIA GPU or driver here (torch 2.13.0+cu130 sees no", True),
    (UNSEEN | {"torch_cuda": None}, {}, "is a build for CPUs: install a build for CUDA 13 (", True),
    (UNSEEN | {"driver_cuda": "12.4"}, {}, "for CUDA 13.0 and the driver supports CUDA 12.4: install driver 580", True),
    (UNSEEN | {"torch_says": "CUDA unknown error"}, {}, "sees no device (CUDA unknown error): run nvidia-smi", True),
    ({"versions": H100.versions | {"torch": "2.9.1"}}, {}, "torch 2.9.1 is older than 2.11, the least that", True),
    ({"pinned_triton": "3.8.1"}, {}, "Triton 3.9.0 is installed, and torch 2.13.0+cu130 was released with", False),
    ({"pinned_triton": "3.8"}, {}, "Triton 3.9.0 is installed, and torch 2.13.0+cu130 was released with 3.8:", False),
    ({"compiler": None}, {}, "there is no C compiler, with which Triton builds its launcher: apt-get", True),
    ({"headers": False}, {}, "Python.h is missing, with which Triton builds its launcher: install pyt", True),
    (
        {"driver_cuda": "12.4"},
        {},
        "with ptxas of CUDA 13.4, which the driver's CUDA 12.4 refuses: install driver 580 or newer, or set "
        "TRITON_PTXAS_BLACKWELL_PATH=/triton/ptxas (CUDA 12.9)",
        True,
    ),
    ({"capability": (7, 5)}, {}, "compute capability 7.5, and the kernels need 8.0", True),
    ({"memory": 15 * GIB}, {}, "has 15 GiB of memory: cases of the 8B and 32B shapes do not fit", False),
    ({"commit": "0123456789ab+"}, {}, "files differ from commit 0123456789ab, so rows name 0123456789ab+", False),
    ({"commit": "unknown"}, {}, "the commit is unknown, so no row can name it: run in a checkout, with git", False),
    ({"devices": 4}, {}, "torch sees 4 GPUs and the first is used: choose with CUDA_VISIBLE_DEVICES", False),
    ({}, None, "there is no nvidia-smi: clocks, power and other processes are not checked", False),
    (
        {},
        {"compute_mode": "Prohibited"},
        "compute mode is Prohibited: on your own machine, sudo nvidia-smi -c DEFAULT",
        True,
    ),
    ({}, {"compute_mode": "Exclusive_Process"}, "only one process may use the GPU at a time", False),
    ({}, {"mig": "Enabled"}, "MIG is on, so this is a slice of a GPU", False),
    ({}, {"persistence": "Disabled"}, "persistence mode is off", False),
    ({}, {"reasons": ("gpu idle", "hw thermal slowdown")}, "lowers its clocks (hw thermal slowdown): cool it", False),
    ({}, {"application_clock": "1095 MHz"}, "the application clock is 1095 MHz of at most 1980 MHz", False),
    (
        {},
        {"power_limit": "310.00 W"},
        "310.00 W of 700.00 W, the default: on your own machine, sudo nvidia-smi -pl 700",
        False,
    ),
    ({}, {"memory_used": "40536 MiB"}, "40536 MiB of the GPU's memory are in use", False),
]


@pytest.mark.parametrize(("fact", "said", "sentence", "fatal"), MISMATCHES, ids=[row[2][:30] for row in MISMATCHES])
def test_each_mismatch_has_its_sentence(monkeypatch, fact, said, sentence, fatal):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    smi = None if said is None else dataclasses.replace(SMI, **said)
    [problem] = preflight.problems(dataclasses.replace(H100, **fact), smi)
    assert sentence in problem.sentence and problem.fatal is fatal and "\n" not in problem.sentence
    assert problem.sentence.count("sudo") == problem.sentence.count("on your own machine, sudo")


# --- a rehearsal: commands that need no GPU


def python(code: str, **env: str) -> Command:
    return Command((sys.executable, "-S", "-c", code), env)


def says(code: object) -> Command:
    return python(f"print({json.dumps(code)!r})")


def decodes(tokens, code=0, says=""):
    """A command that writes tokens as `specker.run --json` does."""

    def made(setting, form, file):
        text = json.dumps({"prompts": [{"tokens": tokens(form)}]})
        return python(f"open({str(file)!r}, 'w').write({text!r}); print({says!r}); raise SystemExit({code})")

    return made


def the_same(form):
    return [5, 6, 7]


def one(*commands: Command, weight: float = 1.0, needs: tuple[str, ...] = ()) -> Part:
    return Part(weight, lambda setting: [Step((command,)) for command in commands], needs)


@pytest.fixture
def rehearse(tmp_path, monkeypatch, capsys):
    """Runs the program with other commands; returns its exit code, its report and its output."""
    fake = tmp_path / "bin" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{NEW}END\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    for name in ("PARTS", "WITHIN", "SHORT", "SPECKER_PDL"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv, known=H100, ops=None, form=None, grace=5.0, **those):
        plan = Plan(
            facts=says(dataclasses.asdict(known)),
            ops=lambda setting: ops or python("print('row_linear: as its reference')"),
            form=form or decodes(the_same),
            parts=those,
            grace=grace,
        )
        names = ",".join(("smoke", *those))
        code = program.main(argv or ["--parts", names, "--minutes", "1"], plan, tmp_path / "results")
        path = tmp_path / "results" / known.folder / "report.md"
        return SimpleNamespace(
            code=code,
            report=path.read_text() if path.exists() else "",
            folder=path.parent,
            out=capsys.readouterr(),
        )

    return run


def row_of(text: str, first: str) -> list[str]:
    """The cells of the table row that begins with `first`."""
    found = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in found[0].strip("|").split("|")] if found else []


ORIGIN = {"date": "9999-01-01T00:00:00Z"}
ROWS = {
    "decode": [
        {
            "case": "ar 8b 512", "way": "ar", "median": 0.00412, "p20": 0.0041, "p80": 0.0042, "bytes": 1.5e10,
            "bandwidth": 3.1e12, "specified": 3.35e12, "value": 0.85, "unit": "%", "of": "the bandwidth",
            "goal": ">= 80.0%", "met": True,
        },
        {"case": "round 8b+1b 8192", "way": "", "reason": "not begun: 330 s were over"},
    ],
    "row_linear": [
        {
            "bench": "kernels", "op": "row_linear", "case": "T 8", "way": "specker", "median": 9e-6, "share": 0.7,
            "share_specified": 0.65, "empty": 2e-6, "ours_over_this": 1.0, "goal": ">= 88%", "met": False,
        },
        {"bench": "kernels", "op": "row_linear", "case": "T 8", "way": "torch", "median": 1e-5, "ours_over_this": 1.11},
    ],
    "layer_group": [
        {"bench": "kernels", "op": "layer_group", "case": "8B, 1 rows", "way": "sequence", "ours_over_this": 1.12}
    ],
    "ab": [{"case": "ar 8b 8192", "way": "PDL", "median": 0.004, "p20": 0.004, "p80": 0.005, "times": 1.07}],
    "bits": [
        {"op": "kv_project", "kind": "int8", "repeats": 1000, "found": "equal bits"},
        {"op": "vocab_topk", "kind": "fp8", "repeats": 1000, "found": "2 of 1000 repeats differ"},
    ],
    "e2e": [
        {
            "target": "code-target as 8b", "way": way, "temperature": 0.7, "batch_size": 8, "tokens_per_second": 500.0,
            "over_ar": over, "acceptance_length": 2.5, "warmup_seconds": 3.2, "prompts": 8, **differing,
        }
        for way, over, differing in (("ar", 1.0, {}), ("draft", 1.84, {"differing_within_rounding": 0}))
    ] + [{"target": "code-target as 8b", "way": "del", "temperature": 0.7, "batch_size": 8, "reason": "wrong tokens"}],
}  # fmt: skip


def writes(name: str) -> Command:
    """A command that appends rows, an old one first, to a file beside its report."""
    lines = [json.dumps(row) for row in ({"case": "of an earlier run", "date": "2000-01-01T00:00:00Z"},)]
    lines += [json.dumps(row | ORIGIN) for row in ROWS[name]]
    text = "\n".join(lines) + "\n"
    return python(f"import os; open(os.environ['FOLDER'] + '/{name}.jsonl', 'w').write({text!r})")


def test_the_report_of_a_run_has_all_sections(rehearse, tmp_path):
    folder = str(tmp_path / "results" / H100.folder)
    rows = {name: dataclasses.replace(writes(name), env={"FOLDER": folder}) for name in ROWS}
    flips = "tree 4x4, bfloat16: 3 of 2048 tokens turned by rounding"
    counts = "1 failed, 40 passed in 61.20s (0:01:01)"
    broken = python(f"print('{flips}\\n{counts}\\nE   assert 1 == 2'); raise SystemExit(1)")
    done = rehearse(
        decode=one(rows["decode"]),
        kernels=one(rows["row_linear"], rows["layer_group"]),
        ab=one(rows["ab"]),
        bits=one(rows["bits"]),
        family=one(rows["e2e"]),
        tests=one(broken, python("")),
        sanitizer=one(python(""), needs=("no-such-program",)),
    )
    text = done.report
    heads = [line for line in text.splitlines() if line.startswith("## ")]
    assert heads == [
        "## Parts",
        "## Preflight",
        "## Smoke",
        "## Bits of products",
        "## Strategies",
        "## PDL and graphs, in turn",
        "## Decoding against its goals",
        "## Kernels",
        "## Tests",
        "## Failures",
    ]
    assert text.startswith("# specker on NVIDIA H100 80GB HBM3\n") and "commit 0123456789ab" in text
    assert "* parts: 7 of 8 have ended; not passed: tests" in text and "* goals: 1 of 2 measured ones are met" in text
    assert row_of(text, "smoke")[1] == row_of(text, "decode")[1] == "passed" and row_of(text, "tests")[1] == "failed"
    assert row_of(text, "sanitizer")[1] == "skipped" and "* sanitizer: no-such-program is not installed" in text
    assert "* tests: 1 of 2 steps failed" in text
    assert row_of(text, "driver")[1] == "580.65.06" and row_of(text, "Triton")[1] == "3.9.0"
    assert [row_of(text, form.name)[1] for form in FORMS] == ["passed"] * 4
    cells = ["ar 8b 512", "ar", "4.120", "4.100", "4.200", "15.00", "3.10", "3.35", "85.0% of the bandwidth"]
    assert row_of(text, "ar 8b 512") == [*cells, ">= 80.0%", "yes"]
    assert row_of(text, "round 8b+1b 8192")[8] == "not begun: 330 s were over"
    assert row_of(text, "row_linear") == [
        "row_linear", "T 8", "9.0", "70%", "65%", "7.0", "torch 1.11x", ">= 88%", "**no**",
    ]  # fmt: skip
    assert row_of(text, "vocab_topk") == ["vocab_topk", "fp8", "1000", "2 of 1000 repeats differ"]
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| code-target")]
    assert [cells[3] for cells in found] == ["ar", "draft", "del"] and found[2][-1] == "wrong tokens"
    assert found[1][4:] == ["500", "1.84x", "2.50", "3", "8", "all equal"]
    assert row_of(text, "ar 8b 8192") == ["ar 8b 8192", "PDL", "4.000", "4.000", "5.000", "1.070x"]
    assert "of an earlier run" not in text and f"## Tests\n\n* {flips}\n* {counts}\n\n" in text
    end = text[text.index("## Failures") :].splitlines()
    assert end[2] == "### tests: failed" and end[-2:] == ["E   assert 1 == 2", "```"] and "### decode" not in text
    assert done.code == 1 and done.out.out.splitlines()[-8:-1] == [
        "make gpu: commit 0123456789ab, 8 of 8 parts; not passed: tests failed",
        "make gpu: kernels: 0 compiled in 0 s of all processes, 0 from the cache",
        "make gpu: bits of 2 products: vocab_topk fp8: 2 of 1000 repeats differ",
        "make gpu: code-target as 8b, batch 8: 2 with the tokens of ar, 1.84x draft at T 0.7, 1.00x ar at T 0.7; "
        "wrong tokens or no run: del: wrong tokens; by rounding: none",
        "make gpu: ar, of the bandwidth: 8b 512 85%",
        "make gpu: groups of layers over layers in turn: 8B, 1 rows 1.12x",
        "make gpu: ab: PDL 1.07x",
    ]
    assert {path.stem for path in done.folder.glob("*.log")} == {
        "smoke", "decode", "kernels", "ab", "tests", "bits", "family"
    }  # fmt: skip


# --- smoke


def test_nothing_runs_after_an_op_is_wrong(rehearse):
    wrong = python("print('row_linear is wrong: AssertionError: error 3.1'); raise SystemExit(1)")
    done = rehearse(ops=wrong, decode=one(python("")))
    assert done.code == 1 and row_of(done.report, "ops")[1:] == ["failed", "0", "exit code 1"]
    assert row_of(done.report, "decode")[1] == "not run" and not (done.folder / "decode.log").exists()
    assert "Nothing else was run." in done.report and "row_linear is wrong: AssertionError: error 3.1" in done.report
    assert not row_of(done.report, FORMS[0].name)


def another_text(*names):
    return decodes(lambda form: [5, 6, 8] if form.name in names else [5, 6, 7])


@pytest.mark.parametrize(
    ("names", "states", "rest"),
    [
        ([0], ["failed"], None),
        ([1], ["passed", "failed", "passed", "not run"], "PDL off"),
        ([2], ["passed", "passed", "failed", "not run"], "graphs off"),
        ([1, 2], ["passed", "failed", "failed", "not run"], "PDL and graphs off"),
        ([3], ["passed", "passed", "passed", "failed"], "PDL off"),
    ],
)
def test_what_fails_is_off_in_the_other_parts(rehearse, names, states, rest):
    """The plainest form fails by its exit code, the others by their tokens."""
    form = another_text(*(FORMS[n].name for n in names)) if names != [0] else decodes(the_same, code=1)
    settings = []
    seen = Part(1, lambda setting: [settings.append(setting), Step((python(""),))][1:])
    done = rehearse(form=form, decode=seen)
    assert [row[1] for f in FORMS if (row := row_of(done.report, f.name))] == states and done.code == 1
    if rest is None:
        assert settings == [] and "Nothing else was run." in done.report
        return
    assert f"The other parts ran with {rest}." in done.report
    assert row_of(done.report, FORMS[names[0]].name)[3] == "token 2 differs from that with PDL and graphs off"
    [setting] = settings
    assert (setting.pdl, setting.graphs) == ("PDL" not in rest, "graphs" not in rest)
    [step] = parts.decode(setting)
    assert step.commands[0].env["SPECKER_PDL"] == str(int(setting.pdl))
    assert step.commands[0].argv[-2:] == ("--capture", str(setting.graphs))


# --- time


HANGS = """
import time
print('a first result', flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print('kept what I had')
"""


def test_a_part_that_hangs_is_ended_and_its_log_kept(rehearse):
    start = time.monotonic()
    those = {"decode": one(python(HANGS)), "kernels": one(says("I ran"), weight=20)}
    done = rehearse("--parts", "decode kernels", "--minutes", "1", **those)
    assert time.monotonic() - start < 30
    log = (done.folder / "decode.log").read_text()
    assert "a first result\n" in log and "kept what I had\n" in log
    assert "I ran" in (done.folder / "kernels.log").read_text() and row_of(done.report, "kernels")[1] == "passed"
    assert row_of(done.report, "decode")[1] == "reached its time limit" and done.code == 1
    assert "### decode: reached its time limit" in done.report and "kept what I had\n```" in done.report


def test_an_interrupt_leaves_a_report(rehearse, monkeypatch):
    monkeypatch.setattr(program, "run_step", lambda *_: signal.raise_signal(signal.SIGINT))
    done = rehearse(decode=one(python("")), kernels=one(python("")))
    assert done.code == 130 and row_of(done.report, "decode")[1] == "interrupted"
    assert row_of(done.report, "smoke")[1] == "passed" and row_of(done.report, "kernels")[1] == "not run"


# --- the command


def test_a_fatal_mismatch_is_all_that_is_said(rehearse):
    done = rehearse(known=dataclasses.replace(H100, driver_cuda="12.4", headers=False), decode=one(python("")))
    lines = done.out.err.splitlines()
    assert done.code == 2 and len(lines) == 2 and all(line.startswith("make gpu: ") for line in lines)
    assert not done.folder.exists()
    plan = dataclasses.replace(parts.PLAN, facts=Command(("/no/such/python",)))
    assert program.main([], plan) == 2
    plan = dataclasses.replace(plan, facts=python("print('Segmentation fault')"))
    assert program.main([], plan) == 2


@pytest.mark.parametrize("short", ["", "1"])
def test_without_a_gpu_one_sentence_says_so(tmp_path, short):
    """The real program, on a machine whose GPU, if it has one, is hidden."""
    env = {k: v for k, v in os.environ.items() if k not in ("PARTS", "WITHIN")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PATH": str(tmp_path), "PYTHONPATH": str(ROOT), "SHORT": short}
    done = subprocess.run([sys.executable, "-m", "bench.gpu"], cwd=ROOT, env=env, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("make gpu: ") and "torch" in line and not done.stdout


def test_the_commands_of_every_part_exist(tmp_path):
    setting = Setting("python", tmp_path / "notes", tmp_path, limit=300, memory=40 * GIB)
    steps = [parts.ops(setting), *(step for part in parts.PARTS.values() for step in part.steps(setting))]
    commands = [command for step in steps for command in getattr(step, "commands", (step,))]
    words = {word for command in commands for word in command.argv}
    assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("bench/kernels/bench_*.py")} < words
    assert {
        "tests/runtime/test_gpu.py",
        "tests/kernels/test_row_linear.py",
    } < words and "tests/cli/test_chat.py" not in words
    for form in FORMS:
        command = parts.form(setting, form, tmp_path / "f.json")
        job, *_ = specker_flags.parse(list(command.argv[command.argv.index("specker.run") + 1 :]))
        assert job.check and command.env["SPECKER_GRAPHS"] == ("on" if form.graphs else "off")
