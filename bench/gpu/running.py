"""Run commands with a time limit: what they write goes to a log, and a command that hangs is ended politely."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRACE = 10.0  # seconds between the signals that end a command
LINES = 30  # of the log of a command that failed, for the report


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # on top of this process's
    fine: tuple[int, ...] = (0,)  # exit codes that are no failure


@dataclass(frozen=True)
class Step:
    """Commands that run at once, and this step's weight in its part's time."""

    commands: tuple[Command, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class Ended:
    """How a step ended."""

    codes: tuple[int, ...]  # of its commands, negative for a signal
    late: bool  # it reached its time limit
    seconds: float
    failed: bool  # late, or a command's exit code is not fine
    ends: tuple[str, ...] = ()  # the last lines of each command that failed or was late


def run(step: Step, limit: float, log: Path, grace: float = GRACE) -> Ended:
    """Run a step's commands in the repository's folder, in process groups of their own, and append their output to
    `log`. After `limit` seconds every group gets SIGINT, after `grace` more SIGTERM, then SIGKILL. The groups also end
    if this process is interrupted."""
    start = time.monotonic()
    logs = [log] if len(step.commands) == 1 else [log.with_suffix(f".{n}.log") for n in range(len(step.commands))]
    processes: list[subprocess.Popen[bytes]] = []
    hung: list[subprocess.Popen[bytes]] = []
    ends = []
    try:
        for command, path in zip(step.commands, logs, strict=True):
            processes.append(_start(command, path))
        for process in processes:
            try:
                process.wait(max(0.0, limit - (time.monotonic() - start)))
            except subprocess.TimeoutExpired:
                hung = [each for each in processes if each.poll() is None]
                break
    finally:
        end(processes, grace)
        for process, command, path in zip(processes, step.commands, logs, strict=False):
            if process in hung or process.returncode not in command.fine:
                ends.append(f"$ {shown(command)}\n{tail(path, LINES)}")
        if len(logs) > 1:
            _join(logs, log)
    codes = tuple(process.returncode for process in processes)
    return Ended(codes, bool(hung), time.monotonic() - start, bool(ends), tuple(ends))


def _start(command: Command, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        file.write(f"$ {shown(command)}\n".encode())
        file.flush()
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | dict(command.env)
        how = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command.argv, cwd=ROOT, env=env, start_new_session=True, **how)  # type: ignore


def end(processes: Sequence["subprocess.Popen[bytes]"], grace: float) -> None:
    """End the process groups that still run; of those whose leader has ended, what it left behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        running = [process for process in processes if process.poll() is None]
        if running:
            _signal(running, number)
            deadline = time.monotonic() + grace
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
    _signal(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def _signal(processes: Sequence["subprocess.Popen[bytes]"], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _join(logs: Sequence[Path], log: Path) -> None:
    """Append the logs of commands that ran at once, one after another."""
    with log.open("ab") as file:
        for path in logs:
            if path.exists():
                file.write(path.read_bytes())
                path.unlink()


def shown(command: Command) -> str:
    """The command as it would be typed."""
    return " ".join([*(f"{name}={value}" for name, value in command.env.items()), shlex.join(command.argv)])


def share(left: float, weights: Sequence[float]) -> float:
    """The seconds of the first of several things that share `left` seconds by weight: what it does not use is left to
    the others."""
    return max(1.0, left * weights[0] / sum(weights))


def tail(log: Path, lines: int) -> str:
    """The last lines that a log's last command wrote."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * lines))
        text = file.read().decode(errors="replace").splitlines()
    begins = max((n for n, line in enumerate(text) if line.startswith("$ ")), default=-1)
    return "\n".join(text[begins + 1 :][-lines:])
