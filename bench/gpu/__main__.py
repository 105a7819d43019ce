"""`python -m bench.gpu`, or `make gpu`: the parts in turn, each within its share of the time, and one report.

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
from pathlib import Path
from typing import Any

from bench.gpu import parts, preflight, report
from bench.gpu.compiling import noted
from bench.gpu.parts import PLAN, Plan
from bench.gpu.preflight import Facts
from bench.gpu.report import Outcome, Run
from bench.gpu.running import ROOT, Command, share
from bench.gpu.running import run as run_step
from bench.gpu.smoke import FORMS, smoke

RESULTS = ROOT / "bench" / "results"
MINUTES = 20.0


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
    problems = preflight.problems(facts, smi)
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
    report.write(run)
    code = 0
    with tempfile.TemporaryDirectory() as scratch:
        try:
            in_turn(run, plan, deadline, Path(scratch))
        except KeyboardInterrupt:
            code = 130
    path = report.write(run)
    bad = [name for name, outcome in run.outcomes.items() if outcome.bad]
    say(f"{'not passed: ' + ', '.join(bad) if bad else 'every part passed'}; {path}")
    return code or int(bool(bad))


def in_turn(run: Run, plan: Plan, deadline: float, scratch: Path) -> None:
    """Run the parts and write the report after each."""
    python = plan.facts.argv[0]
    pdl = os.environ.get("SPECKER_PDL") != "0"
    setting = parts.Setting(python, scratch / "compiled", run.folder, memory=run.facts.memory, pdl=pdl)
    weights = [parts.SMOKE_WEIGHT if name == "smoke" else plan.parts[name].weight for name in run.parts]
    for n, name in enumerate(run.parts):
        limit = share(deadline - time.monotonic(), weights[n:])
        log = run.folder / f"{name}.log"
        log.unlink(missing_ok=True)
        setting.notes.unlink(missing_ok=True)
        start = time.monotonic()
        say(f"{name}, at most {limit:.0f} s")
        run.outcomes[name] = Outcome("interrupted", 0.0, limit, log=log)
        try:
            if name == "smoke":
                outcome = smoked(run, plan, setting, limit, log, scratch)
            else:
                outcome = part(plan.parts[name], replace(setting, limit=limit), log, plan.grace)
            run.outcomes[name] = outcome
        finally:
            run.outcomes[name] = replace(
                run.outcomes[name],
                seconds=time.monotonic() - start,
                limit=limit,
                log=log if log.exists() else None,
                compiled=noted(setting.notes),
            )
            report.write(run)
        say(f"{name}: {outcome.state} after {run.outcomes[name].seconds:.0f} s{outcome.note and ', '}{outcome.note}")
        if run.smoke is not None:
            if run.smoke.stop:
                return
            setting = replace(setting, pdl=pdl and run.smoke.pdl, graphs=run.smoke.graphs)


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
    parser = argparse.ArgumentParser("make gpu", description="Run specker's checks and benches on this machine's GPU.")
    parser.add_argument(
        "--parts",
        default=os.environ.get("PARTS") or ",".join(parts.DEFAULT),
        help=f"some of {', '.join(names)}, or all; separated by commas or spaces (default: "
        f"{','.join(parts.DEFAULT)}, or the variable PARTS)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"time that all parts share (default: {MINUTES:g}, or the seconds in the variable WITHIN)",
    )
    args = parser.parse_args(argv)
    chosen = args.parts.replace(",", " ").split()
    chosen = list(names) if chosen == ["all"] else chosen
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        parser.error(f"--parts has {', '.join(unknown) or 'no name'}; there are {', '.join(names)} and all")
    args.parts = tuple(name for name in names if name in chosen)
    if args.minutes is None:
        try:
            args.minutes = float(os.environ["WITHIN"]) / 60 if os.environ.get("WITHIN") else MINUTES
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
