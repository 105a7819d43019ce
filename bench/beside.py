"""How many rounds a second do specker and transformers decode with the same target and the same drafts?

The checkpoints are random, so nearly every draft is refused and a round commits one token; what is compared is the
round itself: a draft, a verify pass over it, and what both do between. Both programs get the same weights:

    small        a small model drafts a chain with `--draft-tokens` tokens
    translated   the same, but in transformers it has another tokenizer (the same words in another order, and some
                 more), so that each round translates text and drafts; specker runs `small`'s
    mtp          MTP heads in DeepSeek-V3's layout on a Llama; each drafts one token
    dflash       a drafter of blocks, in z-lab's layout here and as Muse Glimmer's assistant there

Decoding is greedy, one text at a time. "same drafts" is the share of transformers' drafts that specker makes at the
same place of the same text, without those that the end of the text cuts. DeepSeek-V3's MTP has an embedding of 0 at
position 0 in vLLM, in SGLang and in specker, but not in transformers; here it has none in either, so that drafts can
agree. The time begins after the prompt's pass, for which transformers also loads MTP heads.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.generation import candidate_generator as generators
from transformers.models.muse_glimmer_assistant import modeling_muse_glimmer_assistant as muse
from transformers.utils import logging

import specker
from bench import harness
from specker.runtime.engine import Engine

MORE = 64  # words of the other tokenizer
WAYS = "small", "translated", "mtp", "dflash"
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}  # of Muse Glimmer


@dataclass(frozen=True)
class Args:
    ways: str = field(default=",".join(WAYS), metadata={"help": "comma-separated"})
    draft_tokens: int = field(default=4, metadata={"help": "tokens of a draft of a small model"})
    heads: int = field(default=3, metadata={"help": "MTP heads"})
    block: int = field(default=8, metadata={"help": "rows of a block of DFlash"})
    layers: int = 12
    hidden: int = 768
    vocab: int = 32000
    prompt: int = 32
    tokens: int = 48
    dtype: str = "float32"
    threads: int = 2
    rounds: int = 3
    save: bool = harness.save_flag()


@dataclass(frozen=True)
class Ran:
    """A call."""

    tokens: list[int]
    rounds: int
    seconds: float  # of these rounds
    drafts: dict[int, list[int]]  # by the length of the text


# --- checkpoints


def llama(folder: Path, args: Args, layers: int, seed: int) -> Path:
    """A random Llama."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": args.hidden // 64, "num_key_value_heads": args.hidden // 128, "head_dim": 64}
    config = LlamaConfig(**sizes, vocab_size=args.vocab, max_position_embeddings=1024, initializer_range=0.05)
    config.eos_token_id = config.bos_token_id = None
    LlamaForCausalLM(config).to(getattr(torch, args.dtype)).save_pretrained(folder)
    words(folder, range(args.vocab))
    return folder


def words(folder: Path, order: Any) -> None:
    """A tokenizer whose token i is the word number order[i]."""
    vocabulary = {f"w{n}": i for i, n in enumerate(order)}
    core = Tokenizer(models.WordLevel(vocabulary, "w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0").save_pretrained(folder)


def changed(folder: Path, tensors: dict[str, Tensor], **config: Any) -> None:
    """Add tensors and fields of config.json to a checkpoint."""
    file, raw = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    save_file(load_file(file) | tensors, file, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw | config))


def translated(folder: Path, small: Path) -> Path:
    """The small model with its words in another order, and some more words."""
    LlamaForCausalLM.from_pretrained(small).save_pretrained(folder)
    x = load_file(small / "model.safetensors")
    order = torch.randperm(V := len(x["lm_head.weight"]))
    rows = {name: x[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    more = {name: torch.cat((w[order], w.new_zeros(MORE, w.shape[1]))) for name, w in rows.items()}
    changed(folder, more, vocab_size=V + MORE)
    words(folder, [*order.tolist(), *range(V, V + MORE)])
    return folder


def with_heads(folder: Path, args: Args) -> Path:
    """A target with MTP heads, whose layers are its last one with noise."""
    x, new, H = load_file(llama(folder, args, args.layers, 0) / "model.safetensors"), {}, args.hidden
    for k in range(args.heads):
        p = f"model.layers.{args.layers + k}."
        for name, old in x.items():
            if name.startswith(last := f"model.layers.{args.layers - 1}."):
                new[p + name.removeprefix(last)] = old + 0.01 * torch.randn_like(old)
        new |= {f"{p}{name}.weight": torch.ones(H, dtype=old.dtype) for name in ("enorm", "hnorm", "shared_head.norm")}
        new[f"{p}eh_proj.weight"] = (torch.randn(H, 2 * H) * H**-0.5).to(old.dtype)
    changed(folder, new, num_nextn_predict_layers=args.heads, num_mtp_layers=args.heads)
    return folder


def blocks(folder: Path, args: Args) -> tuple[Path, Any]:
    """A drafter of blocks in z-lab's layout, and transformers' model of it."""
    taps = [1, args.layers // 2, args.layers - 3]
    sizes = {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": args.hidden // 64, "num_key_value_heads": args.hidden // 128, "head_dim": 64}
    usual = sizes | {"rms_norm_eps": 1e-6, "max_position_embeddings": 1024, "layer_types": ["full_attention"] * 3}
    block = {"block_size": args.block, "mask_token_id": args.vocab - 1, "target_layer_ids": taps}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = muse.MuseGlimmerAssistantConfig(**usual, **block, rope_parameters=rope)
    model = muse.MuseGlimmerAssistantModel(config).to(getattr(torch, args.dtype)).eval()
    own = {name: old for old, name in RENAMED.items()}
    folder.mkdir()
    save_file({own.get(n, n): x.contiguous() for n, x in model.state_dict().items()}, folder / "model.safetensors")
    raw = usual | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": args.vocab}
    raw |= {"rope_theta": 10000.0, "num_target_layers": args.layers, "block_size": block.pop("block_size")}
    (folder / "config.json").write_text(json.dumps(raw | {"dflash_config": block, "attention_bias": False}))
    return folder, model


# --- the programs


def ours(engine: Engine, args: Args, prompt: list[int]) -> Ran:
    out = engine.generate(prompt, args.tokens)
    return Ran(out.tokens, out.stats.rounds, out.stats.wall - out.stats.seconds["prefill"], {})


def drafted(engine: Engine, args: Args, prompt: list[int]) -> Ran:
    """`ours` with its drafts; the trace takes time."""
    rows: list[dict[str, Any]] = []
    engine.trace = rows.append
    ran = ours(engine, args, prompt)
    engine.trace = None
    return replace(ran, drafts={row["position"]: row["draft"] for row in rows})


@torch.inference_mode()
def theirs(model: Any, kind: type, how: dict[str, Any], args: Args, prompt: list[int]) -> Ran:
    """transformers, with what its candidate generator `kind` drafts."""
    drafts: dict[int, list[int]] = {}
    starts, get = [], kind.get_candidates  # type: ignore[attr-defined]

    def noted(self: Any, input_ids: Tensor, *rest: Any, **more: Any) -> Any:
        starts.append(time.perf_counter())
        found = get(self, input_ids, *rest, **more)
        drafts[input_ids.shape[1]] = found[0][0, input_ids.shape[1] :].tolist()
        return found

    kind.get_candidates = noted  # type: ignore[attr-defined]
    try:
        x = torch.tensor([prompt])
        call = {"max_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0, **how}
        tokens = model.generate(x, attention_mask=torch.ones_like(x), **call)[0, len(prompt) :].tolist()
    finally:
        kind.get_candidates = get  # type: ignore[attr-defined]
    return Ran(tokens, len(starts) - 1, time.perf_counter() - starts[1], drafts)  # the first one has the prompt's pass


def loaded(folder: Path, args: Args) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()


def constant(model: Any, args: Args) -> Any:
    """A draft model that always drafts as many tokens."""
    config = model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = args.draft_tokens, "constant"
    config.assistant_confidence_threshold = 0.0
    return model


def both(way: str, folder: Path, args: Args) -> tuple[Engine, Callable[[list[int]], Ran]]:
    """specker's engine, and a call of transformers."""
    how = {"device": "cpu", "dtype": args.dtype, "policy": "fixed", "prefix_cache": "off"}
    if way == "mtp":
        source = with_heads(folder / way, args)
        model = loaded(source, args)
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{args.layers + k}\." for k in range(args.heads)]
        engine = specker.load(source, strategy="mtp", draft_tokens=args.heads, **how)
        drafter: Any = engine.drafter
        for head in drafter.heads if args.heads > 1 else [drafter.reading]:
            head.spec = replace(head.spec, zeroed=False)
        return engine, partial(theirs, model, generators.MTPCandidateGenerator, {"use_mtp": True}, args)
    target = llama(folder / "target", args, args.layers, 0) if not (folder / "target").exists() else folder / "target"
    model = loaded(target, args)
    if way == "dflash":
        source, assistant = blocks(folder / way, args)
        engine = specker.load(target, source, "dflash", **how)
        more = {"assistant_model": assistant, "speculation_type": "dflash"}
        return engine, partial(theirs, model, generators.DFlashTokenCandidateGenerator, more, args)
    small = llama(folder / way, args, 2, 1)
    engine = specker.load(target, small, "draft", draft_tokens=args.draft_tokens, **how)
    kind, more = generators.AssistedCandidateGenerator, {"assistant_model": constant(loaded(small, args), args)}
    if way == "translated":
        other = translated(folder / "other", small)
        kind, more = (
            generators.AssistedCandidateGeneratorDifferentTokenizers,
            {
                "assistant_model": constant(loaded(other, args), args),
                "tokenizer": PreTrainedTokenizerFast.from_pretrained(target),
                "assistant_tokenizer": PreTrainedTokenizerFast.from_pretrained(other),
            },
        )
    return engine, partial(theirs, model, kind, more, args)


def measured(way: str, args: Args) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(args.vocab - 1, (args.prompt,), generator=generator).tolist()
    with TemporaryDirectory() as folder:
        engine, call = both(way, Path(folder), args)
        engine.warmup()
        traced, other = drafted(engine, args, prompt), call(prompt)
        rates: dict[str, list[float]] = {"specker": [], "transformers": []}
        for _ in range(args.rounds):  # in turns
            for name, ran in (("specker", ours(engine, args, prompt)), ("transformers", call(prompt))):
                rates[name].append(ran.rounds / ran.seconds)
    found = [(traced.drafts.get(at), draft) for at, draft in other.drafts.items() if draft]
    agreed = [a == b for a, b in found if a and len(a) == len(b)]  # at the end specker's drafts are shorter
    row: dict[str, Any] = {"way": way, "same": sum(agreed) / max(1, len(agreed)), "compared": len(agreed)}
    row |= {"same_tokens": traced.tokens == other.tokens, "acceptance_length": len(traced.tokens) / traced.rounds}
    for name, each in rates.items():
        row |= {name: harness.quantile(each, 0.5), f"{name}_range": [min(each), max(each)]}
    row["ratio"] = row["specker"] / row["transformers"]
    return row | {name: value for name, value in asdict(args).items() if name not in ("ways", "save")}


def main() -> None:
    args = harness.arguments(Args)
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    rows = [measured(way, args) for way in args.ways.split(",")]
    table = Table(title=f"rounds a second, {args.dtype}, {harness.machine()}")
    for heading in ("way", "specker", "transformers", "ratio", "same drafts", "same tokens"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows:
        cells = ("{:.1f} ({:.1f}-{:.1f})".format(row[n], *row[f"{n}_range"]) for n in ("specker", "transformers"))
        share = f"{row['same']:.0%} of {row['compared']}"
        table.add_row(row["way"], *cells, f"{row['ratio']:.2f}", share, "yes" if row["same_tokens"] else "no")
    Console(width=100).print(table)
    if args.save:
        print(harness.save("beside", rows))


if __name__ == "__main__":
    main()
