"""The ops. Each is a plain function of tensors here, and `torch.ops.specker.<op>` under torch.compile; neither knows of
the runtime. `from specker.kernels import tree_attention` is the function; its module, which has the reference and the
cost beside it, is reached with `from specker.kernels.tree_attention import ...`.

An op that has Triton kernels exposes `variants(arch: int) -> Iterator[Variant]` in its file: the forms of its kernels
that its launcher launches on sm_`arch` (80, 90, 100), built by the very function that the launcher calls. By that name
`make static` and tests/test_aot.py find it, compile it for all three without a GPU, and fail on spills, too much
shared memory, a dot without matrix instructions and narrow reads. See variant.py for what a `Variant` holds; mark two
or three with `smoke=True` for `make test`.
"""

from specker.kernels.accept import accept_walk
from specker.kernels.advance import advance, place_rows
from specker.kernels.kv_calibrate import kv_calibrate, kv_commit, rope_table
from specker.kernels.repeat_rows import repeat_rows
from specker.kernels.residual_merge import residual_merge
from specker.kernels.row_linear import row_linear
from specker.kernels.sample_rows import sample_rows
from specker.kernels.tree_attention import ancestor_words, tree_attention
from specker.kernels.vocab_topk import vocab_topk

__all__ = [
    "accept_walk",
    "advance",
    "ancestor_words",
    "kv_calibrate",
    "kv_commit",
    "place_rows",
    "repeat_rows",
    "residual_merge",
    "rope_table",
    "row_linear",
    "sample_rows",
    "tree_attention",
    "vocab_topk",
]
