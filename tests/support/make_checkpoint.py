"""Tiny random Hugging Face checkpoints, one for every architecture and option that the runtime reads.

transformers' own classes write them and, through `oracle`, compute the expected results. The scales are chosen so that
greedy text is not constant and every weight, bias and norm changes the logits.
"""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from specker.checkpoints.tokenizer import Tokens


class Family(NamedTuple):
    """transformers' classes of an architecture, and what their config takes."""

    name: str  # the beginning of the classes' names
    module: str  # of transformers.models
    config: str = ""  # the config's class, if it is not the model's
    biases: str = ""  # "attention" or "all": fields for them
    head_dim: bool = False  # transformers does not divide by the number of heads
    unset: tuple[str, ...] = ()  # fields that are None


OFFSET = "Gemma2", "Gemma3", "Qwen3_5", "Qwen3Next"  # classes whose norms add 1 to their weights
PADDED = ("pad_token_id",)  # the default is beyond `vocab`
FAMILIES = {
    "llama": Family("Llama", "llama", biases="all"),
    "mistral": Family("Mistral", "mistral", unset=("sliding_window",)),
    "ministral": Family("Ministral", "ministral", head_dim=True),
    "ministral3": Family("Ministral3", "ministral3", head_dim=True),
    "mixtral": Family("Mixtral", "mixtral"),
    "qwen2": Family("Qwen2", "qwen2"),
    "dream": Family("Qwen2", "qwen2"),
    "mimo": Family("Qwen2", "qwen2"),
    "qwen3": Family("Qwen3", "qwen3", biases="attention", head_dim=True),
    "qwen3_moe": Family("Qwen3Moe", "qwen3_moe", biases="attention", head_dim=True),
    "qwen3_next": Family("Qwen3Next", "qwen3_next", head_dim=True),
    "qwen3_5": Family("Qwen3_5", "qwen3_5", "Qwen3_5TextConfig", biases="attention", head_dim=True),
    "qwen3_5_moe": Family("Qwen3_5Moe", "qwen3_5_moe", "Qwen3_5MoeTextConfig", head_dim=True),
    "lfm2": Family("Lfm2", "lfm2", unset=PADDED),
    "lfm2_moe": Family("Lfm2Moe", "lfm2_moe", unset=PADDED),
    "gpt_oss": Family("GptOss", "gpt_oss", head_dim=True),
    "gemma2": Family("Gemma2", "gemma2", biases="attention", head_dim=True),
    "gemma3": Family("Gemma3", "gemma3", "Gemma3TextConfig", biases="attention", head_dim=True),
    "gemma4": Family("Gemma4", "gemma4", "Gemma4TextConfig", head_dim=True),
    "olmo2": Family("Olmo2", "olmo2", biases="attention"),
    "olmo3": Family("Olmo3", "olmo3", unset=PADDED),
    "smollm3": Family("SmolLM3", "smollm3", biases="all", unset=PADDED),
    "granite": Family("Granite", "granite", biases="all"),
    "phi3": Family("Phi3", "phi3", unset=PADDED),
}

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
# With these context lengths a head of 16 has frequencies in all three ranges of llama3's and yarn's scaling.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3: dict[str, Any] = {  # RoPE has a local base in windowed layers, a scaled global one in the others
    "arch": "gemma3",
    "tied": True,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 12,
    "query_pre_attn_scalar": 24,
    "rope": {SLIDING: {"rope_type": "default", "rope_theta": 1000.0}, FULL: {**LINEAR, "rope_theta": 50000.0}},
}
GEMMA2: dict[str, Any] = {  # caps that the tests' scores and logits reach
    "arch": "gemma2",
    "tied": True,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 12,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA4: dict[str, Any] = {  # as in 31B: layers of both kinds have unlike heads, and full ones project no V
    "arch": "gemma4",
    "tied": True,
    "layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "sliding_window": 12,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "rope": {
        SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
        FULL: {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.25},
    },
}
GEMMA4_SHARED: dict[str, Any] = {  # as in E2B: the last layers read earlier K/V, and are twice as wide
    **GEMMA4,
    "layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
}
GEMMA4_PLE: dict[str, Any] = {  # as E2B, with per-layer embeddings
    **GEMMA4_SHARED,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
}
GEMMA4_MIXED: dict[str, Any] = {  # as in 26B-A4B
    **GEMMA4,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}
GEMMA4_WIDE: dict[str, Any] = {"global_head_dim": 64}  # of a size that the compiled CPU layers take
GEMMA4_WIDE_PLE = GEMMA4_WIDE | {"hidden_size_per_layer_input": 32}
GEMMA4_ALL: dict[str, Any] = {**GEMMA4_MIXED, **GEMMA4_PLE, "use_double_wide_mlp": False}
GRANITE: dict[str, Any] = {
    "arch": "granite",
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 2.0,
}
LONGROPE: dict[str, Any] = {  # of heads of 16, of which RoPE rotates 12
    "rope_type": "longrope",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
}
PHI4: dict[str, Any] = {"arch": "phi3", "rope": LONGROPE, "original_max_position_embeddings": 256}
LLAMA4: dict[str, Any] = {**YARN, "original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}
MIXTRAL: dict[str, Any] = {"arch": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "ffn": 48}
QWEN3_MOE: dict[str, Any] = {
    "arch": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
MIXED: dict[str, Any] = {  # gated delta nets, the last layer of four attends
    "layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
BESIDE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
QWEN3_5: dict[str, Any] = {"arch": "qwen3_5", **MIXED}
QWEN3_NEXT: dict[str, Any] = {"arch": "qwen3_next", **MIXED, **BESIDE}
LFM2: dict[str, Any] = {"arch": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}
LFM2_MOE: dict[str, Any] = {  # the first layer is dense
    "arch": "lfm2_moe",
    "layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
GPT_OSS: dict[str, Any] = {
    "arch": "gpt_oss",
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "ffn": 32,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 12,
    "rope": {**YARN, "truncate": False},
}
OLMO3: dict[str, Any] = {
    "arch": "olmo3",
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 12,
    "rope": {SLIDING: {"rope_type": "default", "rope_theta": 10000.0}, FULL: {**YARN, "rope_theta": 10000.0}},
}
SHORT = {"use_sliding_window": True, "sliding_window": 12}
WINDOWED: list[tuple[str, dict[str, Any]]] = [  # the tests' texts are longer
    ("mistral-short-window", {"arch": "mistral", "sliding_window": 12}),
    ("qwen2-short-window", {"arch": "qwen2", **SHORT, "max_window_layers": 1}),
    ("qwen3-short-window", {"arch": "qwen3", **SHORT, "layer_types": [FULL, SLIDING, SLIDING]}),
    ("ministral-short-window", {"arch": "ministral", "sliding_window": 12, "layer_types": [SLIDING, FULL, SLIDING]}),
    ("ministral3-short-window", {"arch": "ministral3", "sliding_window": 12, "rope": LLAMA4}),
    ("phi3-short-window", {"arch": "phi3", "sliding_window": 12}),
    ("gemma2", GEMMA2),
    ("gemma3", GEMMA3),
    ("gemma3-window-of-3", {**GEMMA3, "tied": False, "sliding_window": 3, "attention_bias": True}),
]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama-mha", {"kv_heads": 4}),
    ("llama-mqa", {"kv_heads": 1}),
    ("llama-tied", {"tied": True}),
    ("llama-head-dim", {"head_dim": 32}),
    ("llama-attention-bias", {"attention_bias": True}),
    ("llama-mlp-bias", {"mlp_bias": True}),
    ("llama-all-biases", {"attention_bias": True, "mlp_bias": True, "tied": True}),
    ("llama-odd", {"layers": 1, "hidden": 60, "heads": 3, "kv_heads": 3, "head_dim": 10, "ffn": 37, "vocab": 131}),
    ("llama-linear", {"rope": LINEAR}),
    ("llama-3.1", {"rope": LLAMA3}),
    ("llama-3.1-old-file", {"rope": LLAMA3, "old_rope": True}),
    ("llama-yarn", {"rope": YARN}),
    ("llama-bfloat16", {"dtype": torch.bfloat16}),
    ("llama-float16", {"dtype": torch.float16}),
    ("llama-sharded", {"shards": 3}),
    ("llama-base-model", {"tied": True, "prefix": False}),
    ("llama-eps", {"rms_norm_eps": 1e-2}),
    ("llama-geglu", {"hidden_act": "gelu_pytorch_tanh", "mlp_bias": True}),
    ("qwen2-gelu", {"arch": "qwen2", "hidden_act": "gelu"}),
    ("mistral", {"arch": "mistral"}),
    ("mistral-head-dim", {"arch": "mistral", "head_dim": 8, "tied": True}),
    ("mistral-window", {"arch": "mistral", "sliding_window": 256}),
    ("qwen2", {"arch": "qwen2"}),
    ("qwen2-tied", {"arch": "qwen2", "tied": True, "rope": {"rope_type": "default", "rope_theta": 1e6}}),
    ("mimo", {"arch": "mimo"}),
    ("qwen2-yarn", {"arch": "qwen2", "rope": YARN}),
    ("qwen2-yarn-factor", {"arch": "qwen2", "rope": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0}}),
    ("qwen2-window", {"arch": "qwen2", "use_sliding_window": True, "sliding_window": 256, "max_window_layers": 1}),
    ("qwen3", {"arch": "qwen3"}),
    ("qwen3-tied", {"arch": "qwen3", "tied": True, "head_dim": 32, "dtype": torch.bfloat16, "shards": 2}),
    ("qwen3-attention-bias", {"arch": "qwen3", "attention_bias": True}),
    *WINDOWED,
    ("gemma3-wide-window", {**GEMMA3, "sliding_window": 256, "query_pre_attn_scalar": 16, "shards": 2}),
    ("gemma2-wide-window", {**GEMMA2, "tied": False, "sliding_window": 256, "final_logit_softcapping": None}),
    ("gemma4-31b", GEMMA4),
    ("gemma4-shared", GEMMA4_SHARED),
    ("gemma4-shared-k-is-v", {**GEMMA4_SHARED, "attention_k_eq_v": True, "use_double_wide_mlp": False}),
    ("gemma4-e2b", GEMMA4_PLE),
    ("gemma4-e4b", {**GEMMA4_PLE, "use_double_wide_mlp": False, "shards": 3, "vocab_size_per_layer_input": 140}),
    ("gemma4-26b-a4b", GEMMA4_MIXED),
    ("gemma4-all", GEMMA4_ALL),
    ("gemma4-with-v", {**GEMMA4, "tied": False, "attention_k_eq_v": False, "sliding_window": 256, "shards": 2}),
    ("gemma3-capped", {**GEMMA3, "final_logit_softcapping": 2.0}),
    ("gemma3-one-kind", {**GEMMA3, "layer_types": [SLIDING] * 3, "sliding_window": 9}),
    ("olmo2", {"arch": "olmo2"}),
    ("olmo2-bias", {"arch": "olmo2", "tied": True, "attention_bias": True, "kv_heads": 4, "dtype": torch.bfloat16}),
    ("smollm3", {"arch": "smollm3", "no_rope_layers": [1, 0, 1], "tied": True}),
    ("granite", GRANITE),
    ("granite-biases", {**GRANITE, "tied": True, "attention_bias": True, "mlp_bias": True, "logits_scaling": 6.0}),
    ("ministral", {"arch": "ministral", "sliding_window": 256, "head_dim": 8}),
    ("ministral3", {"arch": "ministral3", "rope": LLAMA4}),
    ("phi3", {"arch": "phi3", "kv_heads": 4}),
    ("phi4-mini", {**PHI4, "tied": True}),
    ("mixtral", MIXTRAL),
    ("mixtral-window", {**MIXTRAL, "sliding_window": 12, "num_experts_per_tok": 1, "tied": True, "shards": 2}),
    ("qwen3-moe", QWEN3_MOE),
    ("qwen3-moe-fused", {**QWEN3_MOE, "fused": True, "norm_topk_prob": False}),
    ("qwen3-moe-some-dense", {**QWEN3_MOE, "mlp_only_layers": [1], "attention_bias": True, "num_experts_per_tok": 6}),
    ("qwen3-moe-step", {**QWEN3_MOE, "decoder_sparse_step": 2, "fused": True, "dtype": torch.bfloat16}),
    ("qwen3.5", QWEN3_5),
    ("qwen3.5-tied", {**QWEN3_5, "tied": True, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "shards": 2}),
    ("qwen3.5-bias", {**QWEN3_5, "attention_bias": True}),
    ("qwen3.5-moe", {"arch": "qwen3_5_moe", **MIXED, **BESIDE}),
    ("qwen3-next", {**QWEN3_NEXT, "decoder_sparse_step": 2}),
    ("qwen3-next-fused", {**QWEN3_NEXT, "fused": True, "norm_topk_prob": False}),
    ("lfm2", LFM2),
    ("lfm2-untied", {**LFM2, "tied": False, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}),
    ("lfm2-moe", LFM2_MOE),
    ("lfm2-moe-fused", {**LFM2_MOE, "fused": True, "norm_topk_prob": False, "num_dense_layers": 2}),
    ("lfm2-moe-without-bias", {**LFM2_MOE, "use_expert_bias": False, "tied": True, "shards": 2, "num_dense_layers": 0}),
    ("olmo3", OLMO3),
    ("gpt-oss", GPT_OSS),
    ("gpt-oss-one-kind", {**GPT_OSS, "layer_types": [SLIDING] * 3, "kv_heads": 4, "tied": True, "shards": 2}),
    ("dream", {"arch": "dream"}),
    ("dream-old-file", {"arch": "dream", "rope": {"rope_type": "default", "rope_theta": 1e6}, "old_rope": True}),
    ("dream-sharded", {"arch": "dream", "shards": 2, "kv_heads": 4}),
]


def once(write: Callable[..., Path]) -> Callable[..., Path]:
    """Write a checkpoint once in a process and copy it afterwards: transformers takes several times as long."""
    made: dict[str, Path] = {}
    originals = tempfile.TemporaryDirectory(prefix="checkpoints")

    @functools.wraps(write)
    def make(folder: Path, arch: str = "llama", **options: Any) -> Path:
        key = repr((arch, options))
        if key not in made:
            with torch.random.fork_rng(devices=[]):  # a test draws the same numbers after a copy
                made[key] = write(Path(originals.name) / str(len(made)), arch, **options)
        return Path(shutil.copytree(made[key], folder, copy_function=shutil.copy, dirs_exist_ok=True))

    return make


@once
def make(
    folder: Path,
    arch: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shards: int = 1,
    layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 96,
    vocab: int = 128,
    tied: bool = False,
    rope: dict[str, Any] | None = None,
    old_rope: bool = False,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    max_context: int = 256,
    prefix: bool = True,
    eos: int | list[int] | None = None,
    mask: int | None = None,
    tokenizer: bool = False,
    fused: bool = False,
    **more: Any,
) -> Path:
    """Write a random checkpoint into `folder` and return it.

    `shards` is a lower bound on the number of files; `old_rope` writes RoPE as transformers 4 did (rope_theta and
    rope_scaling); `prefix=False` saves the base model (no "model." in names, no head: with `tied` only); `mask` is the
    mask token, the last id for Dream unless given; `fused` writes all experts of a layer as one tensor; `tokenizer`
    adds a byte-level one (`vocab` becomes 320 at least); `more` goes to transformers' config (sliding_window,
    layer_types, rms_norm_eps, ...).
    """
    family, vocab = FAMILIES[arch], max(vocab, 320) if tokenizer else vocab
    mask = vocab - 1 if mask is None and arch == "dream" else mask
    options = dict(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        max_position_embeddings=max_context,
        tie_word_embeddings=tied,
        rope_parameters=deepcopy(rope or {"rope_type": "default", "rope_theta": 10000.0}),
        eos_token_id=eos,
        bos_token_id=None,
        **({"head_dim": head_dim} if head_dim * heads != hidden or family.head_dim else {}),
        **({"attention_bias": attention_bias} if family.biases else {}),
        **({"mlp_bias": mlp_bias} if family.biases == "all" else {}),
        **dict.fromkeys(family.unset),
        **({} if mask is None else {"mask_token_id": mask}),
    )
    config = getattr(transformers, family.config or f"{family.name}Config")(**{**options, **more})
    model = getattr(transformers, f"{family.name}ForCausalLM")(config).to(dtype)
    randomize(model, seed)
    saved = model if prefix else model.model
    size = sum(p.numel() * p.element_size() for p in saved.parameters())
    most = size // shards if shards > 1 else size * 2
    saved.save_pretrained(folder, max_shard_size=most, save_original_format=not fused)
    if arch == "dream":
        edit(
            folder,
            model_type="Dream",
            architectures=["DreamModel"],
            auto_map={"AutoModel": "modeling_dream.DreamModel"},
        )
    if arch == "mimo":
        edit(folder, model_type="mimo", architectures=["MiMoForCausalLM"])
    if old_rope:
        scaling = dict(options["rope_parameters"])
        theta = scaling.pop("rope_theta")
        plain = scaling["rope_type"] == "default"
        edit(folder, rope_parameters=..., rope_theta=theta, rope_scaling=None if plain else scaling)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Projections scale their input by 1.2; norms are 1 +- 0.2 (some models add the 1), biases and embeddings 0.3."""
    mean = 0 if type(model).__name__.startswith(OFFSET) else 1
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("dt_bias"):  # a state still has some of what it had a hundred tokens ago
            p.copy_(0.3 * noise - 4)
        elif name.endswith(("sinks", "gate_up_proj_bias")):  # of gpt-oss: some gates reach the clamp
            p.copy_(4 * noise if "bias" in name else 1 + noise)
        elif p.ndim == 1:
            own = 1 if "linear_attn.norm" in name else mean
            p.copy_(own + 0.2 * noise if "norm" in name else 0.3 * noise)
        else:
            p.copy_(noise * (0.3 if "embed" in name else 1.2 * p.shape[-1] ** -0.5))
    for name, bias in model.named_buffers():
        if "layer_scalar" in name:
            bias.copy_(1 + 0.3 * torch.randn(bias.shape, generator=generator))
        if "expert_bias" in name:  # as far apart as the scores, so that it chooses other experts
            bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))


def edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Change keys of a JSON file in `folder`, creating the file if needed; `...` deletes a key."""
    path = folder / name
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def byte_tokenizer() -> Any:
    """Ids 0..255 are the byte alphabet; <|end|> 256 (eos), <|mask|> 257, <|begin|> 258 (bos); with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", "<|mask|>", "<|begin|>")])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", mask_token="<|mask|>", bos_token="<|begin|>"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return fast


def tokens_of(tokenizer: Any) -> Tokens:
    """A tokenizer that is in no folder, as checkpoints have it."""
    found = Tokens(Path(), "")
    vars(found)["tokenizer"] = tokenizer
    return found


def add_tokens(folder: Path, *texts: str, special: bool = False) -> None:
    """Add tokens to the tokenizer in `folder`. `special`: text cannot spell them, and texts are shown without them."""
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    fast.add_tokens([transformers.AddedToken(text, special=special, normalized=False) for text in texts], special)
    fast.save_pretrained(folder)


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of the checkpoint, without fused operators. Dream and MiMo are Qwen2: see
    `oracle_logits`."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if json.loads((folder / "config.json").read_text())["model_type"] not in ("Dream", "mimo"):
        eager = dict.fromkeys(("attn_implementation", "experts_implementation"), "eager")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **eager).eval()
        if model.config.model_type == "gemma4_text":  # else Gemma 4 slices per-layer inputs, which it may not have
            model.config.output_hidden_states = True
        return model
    raw = json.loads((folder / "config.json").read_text())
    config = Qwen2Config.from_dict({k: v for k, v in raw.items() if k not in ("model_type", "auto_map")})
    return Qwen2ForCausalLM.from_pretrained(folder, config=config, dtype=dtype, attn_implementation="eager").eval()


def exact_oracle(monkeypatch: Any) -> None:
    """Make transformers compute RMSNorm and softmax in the model's dtype; its float32 is too coarse for 1e-9."""
    import transformers.models as models

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    def gemma(self: Any, x: Tensor) -> Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def gemma4(self: Any, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x if self.with_scale else x

    def gated(self: Any, x: Tensor, gate: Tensor) -> Tensor:
        return norm(self, x) * torch.nn.functional.silu(gate)

    for name, module in {(family.name, family.module) for family in FAMILIES.values()}:
        modeling = getattr(getattr(models, module), f"modeling_{module}")
        own = gemma4 if name == "Gemma4" else gemma if name.startswith(OFFSET) else norm
        monkeypatch.setattr(getattr(modeling, f"{name}RMSNorm"), "forward", own)
        if hasattr(modeling, "torch_chunk_gated_delta_rule"):
            monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", delta_rule)
            monkeypatch.setattr(getattr(modeling, f"{name}RMSNormGated"), "forward", gated)
    single = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))
    double = torch.nn.Module.double

    def without_frequencies(self: Any) -> Any:
        """Keep RoPE's frequencies in float32, in which they meet positions, with every version of transformers."""
        for module in double(self).modules():
            for name, x in module.named_buffers(recurse=False):
                if name.endswith("inv_freq"):
                    module.register_buffer(name, single(x), persistent=False)
        return self

    monkeypatch.setattr(torch.nn.Module, "double", without_frequencies)

    def route(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(x, self.weight)
        scores, chosen = logits.softmax(-1).topk(self.top_k)
        return logits, scores / scores.sum(-1, keepdim=True), chosen

    monkeypatch.setattr(models.mixtral.modeling_mixtral.MixtralTopKRouter, "forward", route)
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """transformers' torch_recurrent_gated_delta_rule of q, k, v [1, T, H, D] and g, beta [1, T, Hv], in their dtype."""
    q, k, v, g, beta = (x[0] for x in (q, k, v, g, beta))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q * q.shape[-1] ** -0.5, k))
    S, out = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
    for i in range(len(v)):
        S = S * g[i].exp()[:, None, None]
        u = beta[i][:, None] * (v[i] - torch.einsum("hkv,hk->hv", S, k[i]))
        S = S + k[i][:, :, None] * u[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", S, q[i]))
    return torch.stack(out)[None], None


@torch.no_grad()
def oracle_logits(model: Any, ids: Tensor, *, bidirectional: bool = False) -> Tensor:
    """Logits [T, V] of `ids` [T], with causal or all-to-all attention. Rows are not shifted."""
    if not bidirectional:
        return model(ids[None], use_cache=False).logits[0]
    everything = torch.zeros(1, 1, len(ids), len(ids), dtype=model.dtype)  # added to the scores
    return model(ids[None], attention_mask=everything, use_cache=False).logits[0]
