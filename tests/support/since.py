"""Tests of what an older version of a package does otherwise: `make oldest` runs the suite with such versions."""

from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version


def since(package: str, least: str, why: str) -> Any:
    """A mark that skips a test with a version of `package` older than `least`."""
    return pytest.mark.skipif(Version(version(package)) < Version(least), reason=f"{package} before {least} {why}")
