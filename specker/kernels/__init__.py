"""The ops: plain functions of tensors, registered as `torch.ops.specker.<op>` for torch.compile.

They do not use the runtime. An op's file has its name: `from specker.kernels import tree_attention` imports the
function, and `from specker.kernels.tree_attention import tree_attention_ref` its reference. The package's attribute of
that name is the function, so code that needs the module itself calls `importlib.import_module`.

An op with Triton kernels exposes `variants(arch: int) -> Iterator[Variant]` in its file: the kernel forms that its
launcher launches on sm_`arch` (80, 90, 100), built by the same function that the launcher calls. `make static` and
tests/kernels/test_aot.py find it by that name, compile every form for all three architectures without a GPU, and fail
on spills, too much shared memory, a dot without matrix instructions and narrow reads. See variant.py for what a
`Variant` holds; mark two or three with `smoke=True` for `make test`.
"""

from specker.kernels.accept_walk import accept_walk
from specker.kernels.adjust_rows import adjust_rows
from specker.kernels.cluster_topk import cluster_topk
from specker.kernels.conv_rows import conv_rows
from specker.kernels.delta_rows import delta_rows
from specker.kernels.expert_linear import expert_linear
from specker.kernels.expert_route import expert_route
from specker.kernels.kv_calibrate import kv_calibrate, rope_table
from specker.kernels.kv_commit import kv_commit
from specker.kernels.kv_project import kv_project
from specker.kernels.residual_merge import residual_merge
from specker.kernels.row_linear import row_linear
from specker.kernels.sample_rows import sample_rows
from specker.kernels.tree_attention import ancestor_words, tree_attention
from specker.kernels.vocab_topk import vocab_topk

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
