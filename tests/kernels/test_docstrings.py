"""help() of a public op is its contract: every parameter, what it returns and raises, its source, an example."""

import doctest
import inspect
import re
from typing import Any

import pytest

from specker import kernels


@pytest.mark.parametrize("name", kernels.__all__)
def test_docstring(name: str) -> None:
    op: Any = getattr(kernels, name)
    doc = inspect.getdoc(op)
    assert doc is not None
    for section in ("Args:", "Returns:", "Raises:", "Source:", "Examples:"):
        assert re.search(rf"^{section}", doc, re.MULTILINE), section
    arguments = doc.split("Args:\n")[1].split("\n\n")[0]
    assert re.findall(r"^    (\w+): ", arguments, re.MULTILINE) == list(inspect.signature(op).parameters)
    assert re.search(r"^    \S", doc.split("Args:")[0], re.MULTILINE), "no formula"
    assert "the module" not in doc


@pytest.mark.parametrize("name", kernels.__all__)
def test_example(name: str) -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(kernels, name), name, globs={})
    assert test.examples
    out: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=out.append)
    assert not failed, "".join(out)
