"""`python -m bench.gpu`, or `make gpu`: the parts in turn, each within its share of the time, one report, and with
--out one archive.

Exit codes: 0 if every part passed, 1 if one did not, 2 if this machine or the command does not allow a run, 130 after
an interrupt.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu import pack, parts, preflight, report
from bench.gpu.compiling import noted
from bench.gpu.parts import PLAN, Plan
from bench.gpu.preflight import Facts
from bench.gpu.report import Outcome, Run
from bench.gpu.running import ROOT, Command, share
from bench.gpu.running import run as run_step
from bench.gpu.smoke import FORMS, smoke

RESULTS = ROOT / "bench" / "results"


def cli() -> int:
    """`main`, which a lost connection or a SIGTERM interrupts as Ctrl-C does."""
    for name in ("SIGTERM", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.default_int_handler)
    try:
        return main()
    except KeyboardInterrupt:  # before the parts, which handle it themselves
        return 130


def main(argv: Sequence[str] | None = None, plan: Plan = PLAN, results: Path = RESULTS) -> int:
    """Run what the command line `argv` asks for; a rehearsal has commands of its own. Returns the exit code."""
    args = parse(argv, plan)
    deadline = time.monotonic() + 60 * args.minutes
    start = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        facts = asked(plan.facts)
    except ValueError as error:
        return refuse(str(error))
    smi = preflight.nvidia_smi(facts.uuid)
    cache = pack.placed()
    problems = [*preflight.problems(facts, smi), *preflight.carried(facts, cache)]
    fatal = [problem.sentence for problem in problems if problem.fatal]
    if fatal:
        return refuse("\n".join(fatal))
    say(f"{facts.name}, driver {smi.driver if smi else 'unknown'}, torch {facts.versions.get('torch')}")
    for problem in problems:
        say(problem.sentence)
    folder = results / (facts.folder or "gpu")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.keep(folder)
    except OSError as error:
        return refuse(f"{folder} cannot be written: {error.strerror}")
    command = shlex.join(["python", "-m", "bench.gpu", *(argv if argv is not None else sys.argv[1:])])
    run = Run(folder, start, command, args.parts, args.minutes, facts, smi, problems)
    keep(run, args.out)
    code = 0
    with tempfile.TemporaryDirectory() as scratch:
        try:
            in_turn(run, plan, deadline, Path(scratch), cache, args.out)
        except KeyboardInterrupt:
            code = 130
    keep(run, args.out)
    for line in report.shown(report.summary, run).splitlines():
        say(line)
    say(f"{args.out / report.ARCHIVE if args.out else folder / 'report.md'}")
    return code or int(any(outcome.bad for outcome in run.outcomes.values()))


def in_turn(run: Run, plan: Plan, deadline: float, scratch: Path, cache: Path | None, out: Path | None) -> None:
    """Run the parts, and keep what is known after each."""
    python = plan.facts.argv[0]
    pdl = os.environ.get("SPECKER_PDL") != "0"
    setting = parts.Setting(python, scratch / "compiled", run.folder, memory=run.facts.memory, cache=cache, pdl=pdl)
    minutes = [parts.SMOKE_MINUTES if name == "smoke" else plan.parts[name].minutes for name in run.parts]
    for n, name in enumerate(run.parts):
        limit = share(deadline - time.monotonic(), minutes[n:])
        log = run.folder / f"{name}.log"
        start = time.monotonic()
        say(f"{name}, at most {limit:.0f} s")
        run.outcomes[name] = outcome = Outcome("interrupted", 0.0, limit, log=log)
        try:
            log.unlink(missing_ok=True)
            setting.notes.unlink(missing_ok=True)
            if name == "smoke":
                outcome = smoked(run, plan, setting, limit, log, scratch)
            else:
                outcome = part(plan.parts[name], replace(setting, limit=limit), log, plan.grace)
            run.outcomes[name] = outcome
        except OSError as error:  # such as a full disk
            run.outcomes[name] = outcome = Outcome("failed", note=f"{error.filename}: {error.strerror}")
        finally:
            run.outcomes[name] = replace(
                run.outcomes[name],
                seconds=time.monotonic() - start,
                limit=limit,
                log=log if log.exists() else None,
                compiled=noted(setting.notes),
            )
            keep(run, out)
        say(f"{name}: {outcome.state} after {run.outcomes[name].seconds:.0f} s{outcome.note and ', '}{outcome.note}")
        if run.smoke is not None:
            if run.smoke.stop:
                return
            setting = replace(setting, pdl=pdl and run.smoke.pdl, graphs=run.smoke.graphs)


def keep(run: Run, out: Path | None) -> None:
    """Write the report and, into `out`, the archive. A full disk costs neither the other one nor the next parts."""
    for write in (report.write, *([partial(report.archive, out=out)] if out else [])):
        try:
            write(run)
        except OSError as error:
            say(f"{error.filename or out} cannot be written: {error.strerror}")


def smoked(run: Run, plan: Plan, setting: parts.Setting, limit: float, log: Path, scratch: Path) -> Outcome:
    """The smoke part. Without PDL, on an older GPU or with SPECKER_PDL=0, it has two forms."""
    dependent = setting.pdl and run.facts.capability is not None and run.facts.capability[0] in (9, 10)
    forms = [form for form in FORMS if dependent or not form.pdl]
    run.smoke = smoke(
        plan.ops(setting), lambda f, file: plan.form(setting, f, file), forms, limit, log, scratch, plan.grace
    )
    bad = [check for check in run.smoke.checks if check.state == "failed"]
    note = "; ".join(f"{check.name}: {check.note}" for check in bad)
    return Outcome("failed" if bad else "passed", note=note, ends=tuple(check.end for check in bad if check.end))


def part(this: parts.Part, setting: parts.Setting, log: Path, grace: float) -> Outcome:
    """Run a part's steps, even after one has failed; each gets a share of what is left by its weight."""
    if this.needs and not parts.found(this.needs):
        return Outcome("skipped", note=f"{this.needs[0]} is not installed")
    steps, deadline = this.steps(setting), time.monotonic() + setting.limit
    failed = late = 0
    ends: list[str] = []
    for n, step in enumerate(steps):
        limit = share(deadline - time.monotonic(), [other.weight for other in steps[n:]])
        ended = run_step(step, limit, log, grace)
        failed += ended.failed and not ended.late
        late += ended.late
        ends += ended.ends
    of = f" of {len(steps)} steps" if len(steps) > 1 else ""
    notes = [f"{count}{of} {how}" for count, how in ((failed, "failed"), (late, "reached the limit")) if count and of]
    state = "failed" if failed else "reached its time limit" if late else "passed"
    return Outcome(state, note=", ".join(notes), ends=tuple(ends))


def asked(command: Command) -> Facts:
    """What the interpreter of the parts says about itself and the GPU; ValueError if it cannot be asked."""
    try:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | dict(command.env)
        done = subprocess.run(command.argv, cwd=ROOT, capture_output=True, text=True, env=env, timeout=300)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError) as error:
        said = getattr(error, "strerror", None) or "it wrote no facts about this machine"
        raise ValueError(f"{command.argv[0]} cannot be asked: {said}") from None
    return Facts.of(found)


def parse(argv: Sequence[str] | None, plan: Plan) -> argparse.Namespace:
    names = ("smoke", *plan.parts)
    told = "; ".join(f"{n}: {','.join(own)} in {minutes:g} minutes" for n, (minutes, own) in parts.SHORT.items())
    parser = argparse.ArgumentParser("make gpu", description="Run specker's checks and benches on this machine's GPU.")
    parser.add_argument("--short", help=f"what to run where time is short ({told}; or the variable SHORT)")
    parser.add_argument(
        "--parts",
        help=f"some of {', '.join(names)}, or all; separated by commas or spaces (default: those of --short, or "
        f"{','.join(parts.DEFAULT)}; or the variable PARTS)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"time that all parts share (default: that of --short, or {parts.MINUTES:g}; or the seconds in the "
        "variable WITHIN)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"after each part pack report, rows and logs into {report.ARCHIVE}"
    )
    args = parser.parse_args(argv)
    short = args.short or os.environ.get("SHORT") or ""
    if short and short not in parts.SHORT:
        parser.error(f"SHORT must be {' or '.join(parts.SHORT)}, got {short!r}")
    usual, default = parts.SHORT.get(short, (parts.MINUTES, parts.DEFAULT))
    chosen = (args.parts or os.environ.get("PARTS") or ",".join(default)).replace(",", " ").split()
    chosen = list(names) if chosen == ["all"] else chosen
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        parser.error(f"--parts has {', '.join(unknown) or 'no name'}; there are {', '.join(names)} and all")
    args.parts = tuple(name for name in names if name in chosen)
    if args.minutes is None:
        try:
            args.minutes = float(os.environ["WITHIN"]) / 60 if os.environ.get("WITHIN") else usual
        except ValueError:
            parser.error(f"WITHIN must be a number of seconds, got {os.environ['WITHIN']!r}")
    if not 0 < args.minutes < float("inf"):
        parser.error(f"the time must be a positive number of minutes, got {args.minutes:g}")
    return args


def refuse(why: str) -> int:
    print("\n".join(f"make gpu: {line}" for line in why.splitlines()), file=sys.stderr)
    return 2


def say(text: str) -> None:
    print(f"make gpu: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(cli())
