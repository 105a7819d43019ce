"""The packages of the optional parts, for messages that say how to install them.

The messages name these packages and not an extra of specker: that works in a clone, beside a wheel and in any other
environment."""

import re
import shlex
from importlib.metadata import version
from importlib.util import find_spec

EXTRAS = {  # as in pyproject.toml
    "gguf": ("gguf>=0.18", "accelerate>=1.4", "transformers>=5.18", "huggingface_hub>=1.31"),
    "serve": ("fastapi>=0.132", "llguidance>=1.8", "prometheus_client>=0.20", "uvicorn>=0.35"),
}


def install(extra: str) -> str:
    """The command that installs the packages of an extra."""
    return f"pip install {shlex.join(EXTRAS[extra])}"


def missing(extra: str) -> list[str]:
    """The packages of an extra that are not installed, or too old."""
    each = [package.split(">=") for package in EXTRAS[extra]]
    return [name for name, least in each if find_spec(name) is None or _numbers(version(name)) < _numbers(least)]


def _numbers(of: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", of)]
