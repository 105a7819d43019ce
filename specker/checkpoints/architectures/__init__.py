"""The supported architectures: a file for each family, which declares its settings and the names of its tensors."""

from specker.checkpoints.architectures import (
    gemma,
    gemma4,
    gpt_oss,
    granite,
    lfm2,
    llama,
    olmo,
    phi3,
    qwen,
    qwen3_next,
    smollm3,
)

ARCHITECTURES = (
    llama.FAMILY
    | qwen.FAMILY
    | qwen3_next.FAMILY
    | lfm2.FAMILY
    | gpt_oss.FAMILY
    | qwen.MIMO
    | gemma.FAMILY
    | gemma4.FAMILY
    | olmo.FAMILY
    | smollm3.FAMILY
    | granite.FAMILY
    | phi3.FAMILY
    | qwen.DREAM
)
