"""Launches of specker's kernels in the simulator: what its launchers need besides `ptxsim.simulated`."""

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import ptxsim

from specker.kernels import prefetch, variant

USES_ARCH = (
    "tree_attention",
    "expert_linear",
    "row_linear",
    "kv_project",
    "vocab_topk",
)  # the op files whose tiles depend on the architecture

# The parameters of each kernel that no kernel writes: weights and tables. A kernel that is launched as a dependent one
# may read them, and nothing else, before griddepcontrol.wait. A norm's weight is one only if the caller says so.
CONSTANT = {
    "_residual_merge_kernel": {"following_ptr"},
    "_tree_attention_kernel": {"following_ptr"},
    "_row_linear_kernel": {"w_ptr", "scale_ptr", "shift_ptr", "bias_ptr"},
    "_row_linear_merge_kernel": {"bias_ptr"},
    "_expert_linear_kernel": {"w_ptr", "scale_ptr", "shift_ptr", "bias_ptr", "following_ptr"},
    "_vocab_topk_kernel": {"w_ptr", "scale_ptr", "shift_ptr"},
    "_cluster_choose_kernel": {"w_ptr"},
    "_cluster_rows_kernel": {"w_ptr", "scale_ptr", "shift_ptr", "ids_ptr"},
    "_kv_calibrate_kernel": {"rope_ptr", "q_norm_ptr", "k_norm_ptr"},
    "_start_rows_kernel": {"embedding_ptr"},
    "_start_pairs_kernel": {"embedding_ptr", "norm_e_ptr", "norm_h_ptr"},
    "_kv_project_kernel": {"w_ptr", "scale_ptr", "shift_ptr", "bias_ptr", "rope_ptr", "q_norm_ptr", "k_norm_ptr"},
}


@contextmanager
def simulated(arch: int, constant: ptxsim.Constants | None = None, **options: Any) -> Iterator[ptxsim.Simulation]:
    """`ptxsim.simulated` with `CONSTANT` and `constant`, and with launchers that choose their tiles for sm_`arch`."""
    with ExitStack() as stack:
        for name in USES_ARCH:
            module = importlib.import_module(f"specker.kernels.{name}")
            stack.enter_context(patch.object(module, "arch", lambda device: arch))
        for module in (variant, prefetch):
            stack.enter_context(patch.object(module, "launched_on", lambda device: arch))
        yield stack.enter_context(ptxsim.simulated(arch, constant={**CONSTANT, **(constant or {})}, **options))
