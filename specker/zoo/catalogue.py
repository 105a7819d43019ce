"""Heads and drafts that are known for public targets, and the choice of `--draft auto`."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specker import zoo
from specker.fields import option

AUTO = "auto"  # as --draft
# Kinds of drafts, as `specker drafts` lists them:
HEAD3 = "EAGLE-3 head"
HEAD1 = "EAGLE head"
BLOCKS = "DFlash drafter"
ASSISTANT = "assistant"
SMALL = "small model"
PARALLEL = "PARD model"
KINDS = HEAD3, HEAD1, BLOCKS, ASSISTANT, SMALL, PARALLEL
STRATEGIES = {BLOCKS: "dflash", ASSISTANT: "mtp", SMALL: "draft", PARALLEL: "draft"}  # the other kinds' is eagle

EAGLE = "https://github.com/SafeAILab/EAGLE"
SPECULATORS = "https://github.com/vllm-project/speculators"
DFLASH = "https://github.com/z-lab/dflash"
HUB = "https://huggingface.co"
DFLASHES = f"{HUB}/collections/z-lab/dflash"
SPECFORGE = "https://github.com/sgl-project/SpecForge/blob/main/docs/community_resources/specbundle.md"
VLLM = "https://docs.vllm.ai/en/latest/features/speculative_decoding/draft_model/"
LLAMA_CPP = "https://github.com/ggml-org/llama.cpp/blob/master/examples/speculative-simple/README.md"
LLAMA_SERVER = "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md"
CODER_32B = "https://huggingface.co/ggml-org/Qwen2.5-Coder-1.5B-32B-speculative-GGUF"
LLAMA_32 = "https://kaitchup.substack.com/p/fast-speculative-decoding-with-llama"
GPT_OSS_EAGLE = "https://github.com/ggml-org/convert/pull/4"
VLLM_DFLASH = "https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/qwen3_dflash.py"
GEMMA = "https://ai.google.dev/gemma/docs/mtp/mtp"
AMD_135M = "https://huggingface.co/QuantFactory/AMD-Llama-135m-GGUF"
PARD = "https://github.com/AMD-AGI/PARD"
VLLM_PARD = "https://docs.vllm.ai/en/latest/features/speculative_decoding/parallel_draft_model/"


@dataclass(frozen=True)
class Known:
    """A draft for a target."""

    target: str  # hub id, or the name of a bundled target
    draft: str  # hub id, or the name of a bundled draft
    kind: str  # of KINDS
    named_by: str = ""  # where the pair is named; "": on the draft's own page of the hub
    tried: bool = False  # this project ran the pair

    @property
    def source(self) -> str:
        """The page or file that names the pair."""
        return self.named_by or f"{HUB}/{self.draft}"

    @property
    def bundled(self) -> bool:
        return self.draft in zoo.NAMES

    @property
    def strategy(self) -> str:
        """The strategy that drafts with it."""
        return STRATEGIES.get(self.kind, "eagle")

    def serves(self, strategy: str | None) -> bool:
        """Whether `strategy` (None: any) drafts with it. A bundled small model stands for the bundled drafts of all
        strategies."""
        if (family := zoo.target_of(self.target)) is not None:
            return strategy is None or strategy in family.drafts
        return strategy in (None, self.strategy) or (strategy == "easyspec" and self.kind == SMALL)


# The first one for a target is the choice of --draft auto. Heads stand before small models, because a head computes one
# layer for a token. Heads in speculators' layout stand first: their config.json states what others leave to convention.
KNOWN = (
    Known("code-target", "code-draft", SMALL, "models/README.md", tried=True),
    Known("meta-llama/Llama-3.1-8B-Instruct", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", HEAD3, SPECULATORS),
    Known("meta-llama/Llama-3.1-8B-Instruct", "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge", HEAD3, SPECFORGE),
    Known("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", HEAD3, EAGLE),
    Known("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE-LLaMA3.1-Instruct-8B", HEAD1, EAGLE),
    Known("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", BLOCKS, DFLASHES),
    Known("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", SMALL, LLAMA_32),
    Known("meta-llama/Llama-3.1-8B-Instruct", "amd/PARD-Llama-3.2-1B", PARALLEL, PARD),
    Known("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", SMALL, LLAMA_32),
    Known("meta-llama/Llama-3.3-70B-Instruct", "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3", HEAD3, SPECULATORS),
    Known(
        "meta-llama/Llama-3.3-70B-Instruct", "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge", HEAD3, SPECFORGE
    ),
    Known("meta-llama/Llama-3.3-70B-Instruct", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", HEAD3, EAGLE),
    Known("meta-llama/Llama-3.3-70B-Instruct", "amd/PARD-Llama-3.2-1B", PARALLEL, PARD),
    Known("meta-llama/Meta-Llama-3-8B-Instruct", "yuhuili/EAGLE-LLaMA3-Instruct-8B", HEAD1, EAGLE),
    Known("meta-llama/Meta-Llama-3-70B-Instruct", "yuhuili/EAGLE-LLaMA3-Instruct-70B", HEAD1, EAGLE),
    Known("meta-llama/Llama-2-7b-chat-hf", "yuhuili/EAGLE-llama2-chat-7B", HEAD1, EAGLE),
    Known("meta-llama/Llama-2-7b-chat-hf", "amd/AMD-Llama-135m", SMALL, AMD_135M),
    Known("meta-llama/Llama-2-13b-chat-hf", "yuhuili/EAGLE-llama2-chat-13B", HEAD1, EAGLE),
    Known("meta-llama/Llama-2-70b-chat-hf", "yuhuili/EAGLE-llama2-chat-70B", HEAD1, EAGLE),
    Known("lmsys/vicuna-7b-v1.3", "yuhuili/EAGLE-Vicuna-7B-v1.3", HEAD1, EAGLE),
    Known("lmsys/vicuna-13b-v1.3", "yuhuili/EAGLE3-Vicuna1.3-13B", HEAD3, EAGLE),
    Known("lmsys/vicuna-13b-v1.3", "yuhuili/EAGLE-Vicuna-13B-v1.3", HEAD1, EAGLE),
    Known("lmsys/vicuna-13b-v1.3", "double7/vicuna-68m", SMALL),
    Known("lmsys/vicuna-33b-v1.3", "yuhuili/EAGLE-Vicuna-33B-v1.3", HEAD1, EAGLE),
    Known("lmsys/vicuna-33b-v1.3", "double7/vicuna-68m", SMALL),
    Known("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B", HEAD3, EAGLE),
    Known("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B", PARALLEL, PARD),
    Known("Qwen/Qwen2.5-7B-Instruct", "amd/PARD-Qwen2.5-0.5B", PARALLEL, PARD),
    Known("Qwen/Qwen3-1.7B", "AngelSlim/Qwen3-1.7B_eagle3", HEAD3, EAGLE),
    Known("Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3", HEAD3, EAGLE),
    Known("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", BLOCKS, DFLASHES),
    Known("Qwen/Qwen3-4B", "Huang2020/Qwen3-4B-Domino-b16", BLOCKS),
    Known("Qwen/Qwen3-4B", "amd/PARD-Qwen3-0.6B", PARALLEL, VLLM_PARD),
    Known("Qwen/Qwen3-4B-Thinking-2507", "Qwen/Qwen3-0.6B", SMALL, VLLM),
    Known("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.eagle3", HEAD3, SPECULATORS),
    Known("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.peagle", HEAD3),
    Known("Qwen/Qwen3-8B", "AngelSlim/Qwen3-8B_eagle3", HEAD3, EAGLE),
    Known("Qwen/Qwen3-8B", "Tengyunw/qwen3_8b_eagle3", HEAD3, EAGLE),
    Known("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash", BLOCKS),
    Known("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", BLOCKS, DFLASHES),
    Known("Qwen/Qwen3-8B", "Huang2020/Qwen3-8B-Domino-b16", BLOCKS),
    Known("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", SMALL, VLLM),
    Known("Qwen/Qwen3-8B", "amd/PARD-Qwen3-0.6B", PARALLEL, VLLM_PARD),
    Known("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-0.6B-Base", SMALL, LLAMA_CPP),
    Known("Qwen/Qwen3-14B", "RedHatAI/Qwen3-14B-speculator.eagle3", HEAD3, SPECULATORS),
    Known("Qwen/Qwen3-14B", "AngelSlim/Qwen3-14B_eagle3", HEAD3, EAGLE),
    Known("Qwen/Qwen3-32B", "RedHatAI/Qwen3-32B-speculator.eagle3", HEAD3, SPECULATORS),
    Known("nex-agi/Qwen3-32B-Nex-N1", "nex-agi/SGLANG-EAGLE3-Qwen3-32B-Nex-N1", HEAD3, SPECFORGE),
    Known("Qwen/Qwen3-30B-A3B", "RedHatAI/Qwen3-30B-A3B-speculator.dflash", BLOCKS),
    Known("Qwen/Qwen3-30B-A3B-Instruct-2507", "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3", HEAD3),
    Known("Qwen/Qwen3-30B-A3B-Instruct-2507", "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash", BLOCKS),
    Known("Qwen/Qwen3-Coder-30B-A3B-Instruct", "JinnP/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct", HEAD3),
    Known("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash", BLOCKS, DFLASHES),
    Known("Qwen/Qwen3-Coder-Next", "z-lab/Qwen3-Coder-Next-DFlash", BLOCKS, DFLASHES),
    Known("Qwen/Qwen3.5-4B", "z-lab/Qwen3.5-4B-DFlash", BLOCKS, DFLASHES),
    Known("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash", BLOCKS, DFLASH),
    Known("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash", BLOCKS, DFLASH),
    Known("Qwen/Qwen3.5-35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash", BLOCKS, DFLASH),
    Known("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash", BLOCKS),
    Known("Qwen/Qwen3.6-27B", "Huang2020/Qwen3.6-27B-Domino", BLOCKS),
    Known("Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash", BLOCKS),
    Known("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2", BLOCKS),
    Known("google/gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant", ASSISTANT, GEMMA),
    Known("google/gemma-4-E4B-it", "google/gemma-4-E4B-it-assistant", ASSISTANT, GEMMA),
    Known("google/gemma-4-26B-A4B-it", "RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3", HEAD3, SPECULATORS),
    Known("google/gemma-4-26B-A4B-it", "google/gemma-4-26B-A4B-it-assistant", ASSISTANT, GEMMA),
    Known("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.eagle3", HEAD3, SPECULATORS),
    Known("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.dflash", BLOCKS, SPECULATORS),
    Known("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.dspark", BLOCKS),
    Known("google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash", BLOCKS, VLLM_DFLASH),
    Known("google/gemma-4-31B-it", "google/gemma-4-31B-it-assistant", ASSISTANT, GEMMA),
    Known("openai/gpt-oss-20b", "RedHatAI/gpt-oss-20b-speculator.eagle3", HEAD3, SPECULATORS),
    Known("openai/gpt-oss-20b", "amazon/gpt-oss-20b-p-eagle", HEAD3),
    Known("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash", BLOCKS, DFLASH),
    Known("openai/gpt-oss-120b", "RedHatAI/gpt-oss-120b-speculator.eagle3", HEAD3, SPECULATORS),
    Known("openai/gpt-oss-120b", "nvidia/gpt-oss-120b-Eagle3-v3", HEAD3, GPT_OSS_EAGLE),
    Known("openai/gpt-oss-120b", "lmsys/EAGLE3-gpt-oss-120b-bf16", HEAD3),
    Known("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash", BLOCKS, DFLASH),
    Known("Qwen/Qwen2.5-Coder-1.5B-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct", SMALL, "docs/results.md", tried=True),
    Known("Qwen/Qwen2.5-Coder-7B", "Qwen/Qwen2.5-Coder-0.5B", SMALL, LLAMA_SERVER),
    Known("Qwen/Qwen2.5-Coder-14B", "Qwen/Qwen2.5-Coder-0.5B", SMALL, LLAMA_SERVER),
    Known("Qwen/Qwen2.5-Coder-32B-Instruct", "Qwen/Qwen2.5-Coder-1.5B-Instruct", SMALL, CODER_32B),
)

# What names of quantised copies end with: Qwen3-8B-FP8, -AWQ, -GPTQ-Int4, -bnb-4bit, -GGUF; .Q4_K_M, -iq3_xxs, -f16.
QUANTISED = re.compile(
    r"[-._](gguf|awq|fp8([-_](dynamic|block|static))?|gptq([-_]int\d)?|int[48]|bnb-4bit|unsloth|[456]bit|mlx|mxfp4"
    r"|(quantized\.)?w\d+a\d+|i?q\d(_\w+)?|b?f(16|32))$"
)


def drafts_for(target: str | Path | None) -> tuple[Known, ...]:
    """What is known for a target, in order of preference; () if nothing is. `target`: a hub id, a local folder or a
    GGUF file, which need not exist; None: the bundled target. It is recognised by its name: the last part of the id,
    the name of the folder or the file, or the name in a folder's config.json, without what names the form of its
    weights. Bundled targets are recognised by their sizes."""
    if target is None:
        return tuple(known for known in KNOWN if known.target == "code-target")
    names = {_plain(name) for name in _names(target)}
    family = zoo.family_of(_sizes(_config(Path(target).expanduser())))
    found = [known for known in KNOWN if _plain(known.target) in names]
    if not found and family is not None:
        found = [known for known in KNOWN if zoo.target_of(known.target) is family]
    return tuple(found)


def choose(target: str | Path | None, strategy: str | None = None) -> Known:
    """The first known draft for `target` that `strategy` (None: any) drafts with. Raises ValueError."""
    every = drafts_for(target)
    for known in every:
        if known.serves(strategy):
            return known
    called = "the bundled target" if target is None else str(target)
    if every:
        raise ValueError(
            f"strategy {strategy!r} can use none of the drafts that are known for {called}: pass {option('draft')}, or "
            f"leave out {option('strategy')} for {every[0].draft}, {_a(every[0].kind)}"
        )
    if (family := zoo.target_of(target)) is not None and family.strategy is not None:
        raise ValueError(f"{called} brings its own draft, for strategy {family.strategy}: leave out {option('draft')}")
    raise ValueError(
        f"no draft is known for {called}: pass {option('draft')}, or leave it out and strategy lookup copies from the "
        "text; `specker drafts` lists the targets with known drafts"
    )


def reason(known: Known, strategy: str) -> str:
    """The sentence that says what `--draft auto` chose for `strategy`, and why."""
    if (family := zoo.target_of(known.target)) is not None:
        return f"drafting with {family.drafts[strategy].name}, which is bundled for {known.target}"
    every = [other for other in KNOWN if other.target == known.target]
    if len(every) == 1:
        why = "no other draft is known"
    elif known is not every[0]:
        why = f"strategy {strategy!r} drafts with it"
    else:
        why = "it is the first of the known ones"
    if known.strategy != "draft" and any(other.strategy == "draft" for other in every):
        why = "a head computes one layer for a token, a small model many"
    tried = "this project has run the pair" if known.tried else f"named by {known.source}, not yet run with specker"
    more = f"; `specker drafts {known.target}` lists all {len(every)}" if len(every) > 1 else ""
    return f"drafting with {known.draft}, {_a(known.kind)} for {known.target}, because {why} ({tried}){more}"


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def _names(target: str | Path) -> Iterator[str]:
    """What the target may be called."""
    path = Path(target).expanduser()
    if path.suffix == ".gguf":
        yield path.stem
        return
    yield path.absolute().name if path.is_dir() else str(target)
    if path.is_dir():
        yield str(_config(path).get("_name_or_path") or "")
        yield from (file.stem for file in path.glob("*.gguf"))
        # the hub's cache: models--ORG--NAME/snapshots/COMMIT
        yield from (part.split("--")[-1] for part in path.absolute().parts if part.startswith("models--"))


def _plain(name: str) -> str:
    """The last part of a name in lower case, without what names the form of its weights."""
    name = re.sub(r"^meta-(?=llama)", "", name.rstrip("/").split("/")[-1].lower())
    while (short := QUANTISED.sub("", name)) != name:
        name = short
    return name


def _config(folder: Path) -> dict[str, Any]:
    """The content of config.json; {} if there is none that can be read."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _sizes(raw: dict[str, Any]) -> SimpleNamespace:
    """The fields of config.json by which `zoo.family_of` recognises a target."""
    own = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    names = {name for family in zoo.FAMILIES for name in family.sizes}
    return SimpleNamespace(**{name: raw.get(own.get(name, name)) for name in names})
