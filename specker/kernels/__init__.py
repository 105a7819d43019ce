"""The ops: plain functions of tensors, registered as `torch.ops.specker.<op>` for torch.compile.

They do not use the runtime. `from specker.kernels import tree_attention` imports the function; its file
(`specker.kernels.attention`) also has the reference and the cost.

An op with Triton kernels exposes `variants(arch: int) -> Iterator[Variant]` in its file: the kernel forms that its
launcher launches on sm_`arch` (80, 90, 100), built by the same function that the launcher calls. `make static` and
tests/test_aot.py find it by that name, compile every form for all three architectures without a GPU, and fail on
spills, too much shared memory, a dot without matrix instructions and narrow reads. See variant.py for what a `Variant`
holds; mark two or three with `smoke=True` for `make test`.
"""

from specker.kernels.accept import accept_walk
from specker.kernels.adjust import adjust_rows
from specker.kernels.attention import ancestor_words, tree_attention
from specker.kernels.clusters import cluster_topk
from specker.kernels.conv import conv_rows
from specker.kernels.delta import delta_rows
from specker.kernels.experts import expert_linear
from specker.kernels.kv import kv_calibrate, kv_commit, rope_table
from specker.kernels.linear import row_linear
from specker.kernels.project import kv_project
from specker.kernels.residual import residual_merge
from specker.kernels.route import expert_route
from specker.kernels.sample import sample_rows
from specker.kernels.topk import vocab_topk

__all__ = [
    "accept_walk",
    "adjust_rows",
    "ancestor_words",
    "cluster_topk",
    "conv_rows",
    "delta_rows",
    "expert_linear",
    "expert_route",
    "kv_calibrate",
    "kv_commit",
    "kv_project",
    "residual_merge",
    "rope_table",
    "row_linear",
    "sample_rows",
    "tree_attention",
    "vocab_topk",
]
