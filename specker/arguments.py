"""The options of `specker.load` and of a request as types, so that a type checker knows their names and values. Nothing
imports this at run time; tests/project/test_typing.py compares it with the dataclasses that define the options."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from specker.options import Tree, VocabKeep

Biases = Mapping[int, float] | Sequence[tuple[int, float]]
Prediction = str | Sequence[int] | Mapping[str, Any]
Bits = Literal["int8", "int4", "fp8", "none"]


class LoadOptions(TypedDict, total=False):
    """--help describes each option. An option whose flag is parsed from a text takes that text, too."""

    draft_tokens: int | None
    tree: Tree | str | None
    policy: str | None
    as_published: bool
    graphs: Literal["on", "off"] | None
    load: Literal["weights", "dummy"]
    quantize: Bits | None
    draft_quantize: Bits | Literal["stored"] | None
    activations: Literal["int8", "bfloat16", "float32"] | None
    kv_dtype: Literal["float32", "bfloat16", "float16", "int8"] | None
    huge_pages: Literal["on", "off"]
    max_context: int | None
    page_size: int
    batch_size: int
    kv_tokens: int | None
    prefix_cache: Literal["exact", "all", "off"]
    tp: int | None
    dp: int
    draft_ranks: int | None
    draft_layout: Literal["replicated", "layer-parallel", "tensor", "both"] | None
    reduce: Literal["fast", "ordered"]
    # easyspec
    layer_parallel: int | tuple[tuple[int, ...], ...] | str | None
    calibrate: Literal["every", "mismatch", "never"]
    # del
    exit_layer: int | None
    exit_cost: Literal["layers", "bytes", "measured"]
    eligible_layers: tuple[int, ...] | str | None
    exit_window: float
    exit_rules: Literal["specker", "paper"]
    # dflash, diffuspec
    cps: Literal["off", "chain", "tree"] | None
    ngram: str | None
    adl: tuple[int, int] | str | None
    cps_tau: float | None
    cps_candidates: int | None
    cps_beam: int | None
    cps_lambda: float | None
    cps_first: Literal["drafter", "both"]
    adl_step: int | None
    adl_rho: float | None
    # lookup
    lookup_share: Literal["on", "off"]
    lookup_corpus: str | None
    lookup_file: str | None
    # vocabtrim
    vocab_scores: str | None
    vocab_keep: VocabKeep | str | None
    vocab_text: int


class RequestOptions(TypedDict, total=False):
    """The fields of `specker.options.Sampling`, and those of `Params` that are not arguments of their own."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Biases
    seed: int
    stop_ids: Sequence[int]
    logprobs: int
    prefix_cache: Literal["exact", "all", "off"] | None
    cache_salt: str | None
    grammar: str | None
    ignore_eos: bool
    policy: str | None
    prediction: Prediction | None
    min_tokens: int


class EachOption(TypedDict, total=False):
    """`RequestOptions` for several prompts: one value for all, or a value for each."""

    temperature: float | Sequence[float]
    top_p: float | Sequence[float]
    top_k: int | Sequence[int]
    min_p: float | Sequence[float]
    repetition_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    logit_bias: Biases  # for all prompts
    seed: int | Sequence[int]
    stop_ids: Sequence[int]  # for all prompts
    logprobs: int | Sequence[int]
    prefix_cache: Literal["exact", "all", "off"] | None
    cache_salt: str | Sequence[str | None] | None
    grammar: str | Sequence[str | None] | None
    ignore_eos: bool | Sequence[bool]
    policy: str | Sequence[str | None] | None
    prediction: Prediction | Sequence[Prediction | None] | None
    min_tokens: int | Sequence[int]
