"""`python -m specker` is `python -m specker.run`."""

from specker.run import cli

if __name__ == "__main__":
    cli()
