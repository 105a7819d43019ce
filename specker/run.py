"""`python -m specker.run`: decode prompts from the command line (cli/run.py)."""

from specker.command import interrupt

if __name__ == "__main__":
    interrupt.exit_on_ctrl_c()  # before any other import

    from specker.cli import start

    start.quicken()

from specker.cli.run import cli

if __name__ == "__main__":
    cli()
