"""The command `specker`, or `python -m specker`: one of `COMMANDS`, otherwise `python -m specker.run`."""

import importlib
import sys
from typing import NoReturn

from specker.cli import COMMANDS
from specker.command import interrupt


def cli() -> NoReturn:
    interrupt.exit_on_ctrl_c()
    if (name := "".join(sys.argv[1:2])) == "serve" or name not in COMMANDS:
        from specker.cli import start

        start.quicken()
    if name in COMMANDS:
        sys.exit(importlib.import_module(f"specker.cli.{name}").main(sys.argv[2:]))
    from specker.cli import run

    run.cli()


if __name__ == "__main__":
    cli()
