"""A few tests of decoding once more as on an older processor: other kernels and another rounding, the same promises."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import processors
import pytest
import torch

from specker.cpu import build

ROOT = Path(__file__).parents[2]
AGAIN = [
    "tests/cpu/test_products.py",
    "tests/cpu/test_layers.py::test_a_row_has_the_same_bits_alone_in_a_chain_and_in_a_batch",
    "tests/kernels/test_quant.py::test_many_rows_are_as_exact_as_few",
    "tests/zoo/test_bundled.py::test_check_passes_on_the_built_in_prompts",
]
CHILD = """
import sys, pytest, torch
from specker.cpu import build
from specker.kernels.row_linear import multiplies_bfloat16
assert torch.backends.cpu.get_cpu_capability() == "AVX2" and not multiplies_bfloat16() and build.level() == "avx2"
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not torch.cpu._is_avx2_supported(), reason="no x86-64 with AVX2"
)
@pytest.mark.skipif(
    build.level() == "avx2" and not torch.cpu._is_avx512_supported(), reason="every test runs on such a processor here"
)
def test_decoding_on_an_older_processor() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no worker of this run
    known = "-k", "not test_every_level_computes_the_same"  # which includes this level in the run on any processor
    command = [sys.executable, "-c", CHILD, *AGAIN, *known, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=ROOT, env=env | processors.OLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
