"""`python -m specker` and the command `specker` are `python -m specker.run`; `specker cache` is storage.py, `specker
drafts` is drafts.py, `specker serve` is serve/."""

import sys
from typing import NoReturn

from specker import interrupt


def cli() -> NoReturn:
    interrupt.ends_imports()
    if sys.argv[1:2] == ["cache"]:
        from specker import storage

        sys.exit(storage.main(sys.argv[2:]))
    if sys.argv[1:2] == ["serve"]:
        from specker.serve import __main__ as serve

        sys.exit(serve.main(sys.argv[2:]))
    if sys.argv[1:2] == ["drafts"]:
        from specker import drafts

        sys.exit(drafts.main(sys.argv[2:]))
    from specker import run

    run.cli()


if __name__ == "__main__":
    cli()
