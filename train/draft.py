"""Distil a draft for a chat model from text that the model wrote (train/corpus.py).

    python train/draft.py --target DIR --corpus corpus --out smollm2-draft --layers 0,29 --ffn 1024
    python train/draft.py --target DIR --corpus corpus --out smollm2-draft-deep --layers 0,4,8,12,16,20,24,29 \\
        --heads 3 --ffn 256

The draft is a Llama model with the target's hidden size. It starts as layers of the target, of which it keeps the
first attention heads and the `ffn` largest neurons. The embedding, which is also the head, stays the target's own: it
is not trained and not saved (config.json: `specker`). The loss is KL(target || draft) over the target's best tokens, in
turn at temperature 1 and 0.7 (distillation on the target's own text: DistillSpec, arXiv 2310.08461).

The target's best tokens are computed once and kept beside the shards. A killed run goes on from its last checkpoint,
OUT.pt; a longer --tokens, or new shards, continue a finished one.
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, LlamaModel

BEST = 48  # the target's best tokens that the loss compares
FREQUENT = 4096  # rows of the head that every step scores
SAMPLED = 2048  # further rows, drawn anew in each step
PROBES = 64  # rows of the embedding that the draft keeps, to know its target again


@dataclass
class Args:
    target: str = field(metadata={"help": "checkpoint folder of the chat model"})
    corpus: str = field(metadata={"help": "folder of train/corpus.py"})
    out: str = field(metadata={"help": "folder of the draft"})
    layers: str = field(default="0,29", metadata={"help": "the target's layers that the draft starts from"})
    heads: int = field(
        default=0, metadata={"help": "query heads that a layer keeps, a multiple of a KV head's; 0: all"}
    )
    ffn: int = field(default=0, metadata={"help": "neurons that a layer keeps; 0: all"})
    tokens: int = field(default=4_000_000, metadata={"help": "stop after this many tokens"})
    batch: int = field(default=2048, metadata={"help": "tokens a step"})
    length: int = field(default=512, metadata={"help": "tokens of a window"})
    lr: float = 1e-3
    muon: float = field(default=4e-3, metadata={"help": "learning rate of the matrices"})
    threads: int = 2
    seed: int = 0


@dataclass(eq=False)
class Lessons:
    """Windows of the conversations with the target's best tokens. All arrays have a row for each position; the row
    at position i is about the token at i + 1."""

    ids: np.ndarray  # [n] uint16
    best: np.ndarray  # [n, BEST] uint16
    logits: np.ndarray  # [n, BEST] float16
    weight: np.ndarray  # [n] float32: 1 in answers, less in prompts, 0 at the last token
    ends: np.ndarray  # [conversations]

    def windows(self, length: int, seed: int) -> list[int]:
        """The first positions of an epoch's windows, in random order. A window may hold several conversations."""
        rng = np.random.default_rng(seed)
        first = np.arange(rng.integers(length), len(self.ids) - length, length)
        return rng.permutation(first).tolist()


def lessons(corpus: Path, target: Any) -> Lessons:
    """Read all shards; compute what is missing beside them."""
    parts = []
    for path in sorted(corpus.glob("*.npz")):
        with np.load(path) as shard:
            ids, ends, answers = shard["ids"], shard["ends"], shard["answers"]
        taught = corpus / "best" / path.name
        if not taught.exists():
            taught.parent.mkdir(exist_ok=True)
            best, logits = teach(target, np.split(ids, ends[:-1]))
            with taught.with_suffix(".part").open("wb") as file:
                np.savez(file, best=best, logits=logits)
            taught.with_suffix(".part").rename(taught)
        with np.load(taught) as known:
            best, logits = known["best"], known["logits"]
        weight = np.full(len(ids), 0.2, np.float32)
        for start, end, answer in zip([0, *ends[:-1]], ends, answers, strict=True):
            weight[start + answer - 1 : end] = 1.0
            weight[end - 1] = 0.0
        parts.append((ids, best, logits, weight, ends))
    lengths = np.cumsum([0] + [len(part[0]) for part in parts])
    columns = list(zip(*parts, strict=True))
    return Lessons(
        *(np.concatenate(column) for column in columns[:4]),
        np.concatenate([ends + start for ends, start in zip(columns[4], lengths, strict=False)]),
    )


@torch.inference_mode()
def teach(target: Any, conversations: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The target's BEST tokens after each position: ids [n, BEST] uint16, logits [n, BEST] float16."""
    best, logits = [], []
    for ids in conversations:
        hidden = target.model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0]
        for rows in hidden.split(256):
            top = target.lm_head(rows).topk(BEST)
            best.append(top.indices.numpy().astype(np.uint16))
            logits.append(top.values.numpy().astype(np.float16))
    return np.concatenate(best), np.concatenate(logits)


def cut(target: Any, layers: list[int], heads: int, ffn: int) -> LlamaModel:
    """A model of the target's `layers`, each with its first `heads` query heads and its `ffn` largest neurons."""
    c = target.config
    heads, ffn = heads or c.num_attention_heads, ffn or c.intermediate_size
    group = c.num_attention_heads // c.num_key_value_heads
    D = c.hidden_size // c.num_attention_heads
    if heads % group:
        raise SystemExit(f"--heads {heads} must be a multiple of {group}, the query heads of a KV head")
    config = LlamaConfig(
        **{
            **{k: v for k, v in c.to_dict().items() if k not in ("_name_or_path", "transformers_version", "dtype")},
            "num_hidden_layers": len(layers),
            "num_attention_heads": heads,
            "num_key_value_heads": heads // group,
            "head_dim": D,
            "intermediate_size": ffn,
        }
    )
    net = LlamaModel(config).float()
    net.embed_tokens = None
    with torch.no_grad():
        net.norm.weight.copy_(target.model.norm.weight)
        for mine, n in zip(net.layers, layers, strict=True):
            its = target.model.layers[n]
            size = (its.mlp.gate_proj.weight.norm(dim=1) * its.mlp.up_proj.weight.norm(dim=1)).float()
            kept = (size * its.mlp.down_proj.weight.norm(dim=0)).topk(ffn).indices.sort().values
            mine.input_layernorm.weight.copy_(its.input_layernorm.weight)
            mine.post_attention_layernorm.weight.copy_(its.post_attention_layernorm.weight)
            a, b = mine.self_attn, its.self_attn
            a.q_proj.weight.copy_(b.q_proj.weight[: heads * D])
            a.k_proj.weight.copy_(b.k_proj.weight[: heads // group * D])
            a.v_proj.weight.copy_(b.v_proj.weight[: heads // group * D])
            a.o_proj.weight.copy_(b.o_proj.weight[:, : heads * D])
            mine.mlp.gate_proj.weight.copy_(its.mlp.gate_proj.weight[kept])
            mine.mlp.up_proj.weight.copy_(its.mlp.up_proj.weight[kept])
            mine.mlp.down_proj.weight.copy_(its.mlp.down_proj.weight[:, kept])
    return net


def loss_of(hidden: Tensor, embed: Tensor, best: Tensor, logits: Tensor, weight: Tensor, heat: float, rows: Tensor):
    """KL(target || draft) at temperature `heat`, over the target's best tokens [n, BEST].

    hidden [n, E]. The draft's normaliser sums over `rows` [R]: the first FREQUENT are certain, the others a sample of
    all other ids, which counts as often as it stands for an id; and over the target's tokens that `rows` lacks.
    """
    V = len(embed)
    where = torch.full((V,), -1)
    where[rows] = torch.arange(len(rows))
    column = where[best]  # [n, BEST]
    scores = hidden @ embed[rows].T / heat  # [n, R]
    missing = column < 0
    own = scores.gather(1, column.clamp(min=0))
    if missing.any():
        at, which = missing.nonzero(as_tuple=True)
        extra = (hidden[at] * embed[best[at, which]]).sum(-1) / heat
        own = own.index_put((at, which), extra)
    correction = torch.zeros(len(rows))
    correction[FREQUENT:] = float(np.log((V - FREQUENT) / (len(rows) - FREQUENT)))
    lse = torch.logsumexp(scores + correction, -1)
    lse = torch.logaddexp(lse, torch.where(missing, own, -torch.inf).logsumexp(-1).nan_to_num(neginf=-1e4))
    p = (logits / heat).softmax(-1)
    kl = (p * (p.clamp(min=1e-9).log() - (own - lse[:, None]))).sum(-1)
    return (kl * weight).sum() / weight.sum().clamp(min=1)


def save(net: LlamaModel, embed: Tensor, out: Path, target: str) -> None:
    """Write the checkpoint folder: bfloat16 weights without the embedding, and some of its rows to know the target."""
    part = out.with_name(out.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    config = net.config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config |= {"torch_dtype": "bfloat16", "dtype": "bfloat16", "specker": {"shares": ["embed_tokens"], "of": target}}
    (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    state = {f"model.{k}": v.to(torch.bfloat16).contiguous() for k, v in net.state_dict().items()}
    ids = torch.arange(PROBES) * (len(embed) // PROBES)
    state["specker.shared_ids"], state["specker.shared_rows"] = ids, embed[ids].to(torch.bfloat16)
    save_file(state, part / "model.safetensors", metadata={"format": "pt"})
    out.mkdir(exist_ok=True)
    for file in part.iterdir():
        file.replace(out / file.name)
    part.rmdir()


def main() -> None:
    (args,) = HfArgumentParser(Args).parse_args_into_dataclasses()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval().requires_grad_(False)
    data = lessons(Path(args.corpus), target)
    held = max(
        args.length, len(data.ids) // 40 // args.length * args.length
    )  # the last conversations are not trained on
    train = Lessons(data.ids[:-held], data.best[:-held], data.logits[:-held], data.weight[:-held], data.ends)
    embed = target.model.embed_tokens.weight
    frequent = torch.from_numpy(np.bincount(data.best[:, :8].ravel(), minlength=len(embed))).topk(FREQUENT).indices
    others = torch.ones(len(embed), dtype=torch.bool)
    others[frequent] = False
    others = others.nonzero()[:, 0]

    net = cut(target, [int(n) for n in args.layers.split(",")], args.heads, args.ffn)
    del target
    matrices = [p for p in net.parameters() if p.ndim == 2]
    optimisers = [
        torch.optim.Muon(matrices, lr=args.muon, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in net.parameters() if p.ndim == 1], lr=args.lr, weight_decay=0.0),
    ]
    out = Path(args.out)
    state, done, log = out.with_name(out.name + ".pt"), 0, []
    if state.exists():
        kept = torch.load(state, weights_only=True)
        net.load_state_dict(kept["net"])
        for optimiser, its in zip(optimisers, kept["optimisers"], strict=True):
            optimiser.load_state_dict(its)
        done, log = kept["done"], kept["log"]
    print(f"{sum(p.numel() for p in net.parameters()):,} parameters, {len(data.ids):,} tokens of text", flush=True)

    def batch(source: Lessons, starts: list[int]) -> tuple[Tensor, ...]:
        at = np.array(starts)[:, None] + np.arange(args.length)
        ids = torch.from_numpy(source.ids[at].astype(np.int64))
        best = torch.from_numpy(source.best[at].astype(np.int64)).flatten(0, 1)
        logits = torch.from_numpy(source.logits[at].astype(np.float32)).flatten(0, 1)
        return ids, best, logits, torch.from_numpy(source.weight[at]).flatten()

    def hidden_of(ids: Tensor) -> Tensor:
        return net(inputs_embeds=embed[ids], use_cache=False).last_hidden_state.flatten(0, 1)

    @torch.no_grad()
    def judge() -> dict[str, float]:
        """Agreement of the greedy tokens, and of the best token with the text, in answers never trained on."""
        right = total = 0.0
        for start in range(len(data.ids) - held, len(data.ids) - args.length + 1, args.length):
            ids, best, _, weight = batch(data, [start])
            guess = (hidden_of(ids) @ embed.T).argmax(-1)
            here = weight == 1
            right, total = right + float((guess == best[:, 0])[here].sum()), total + float(here.sum())
        return {"agreement": round(right / max(total, 1), 4)}

    epoch, order, saved, begun, since = done // max(len(train.ids), 1), [], time.time(), time.time(), done
    losses: list[float] = []
    while done < args.tokens:
        scale = min(1.0, (done + args.batch) / 100_000) * min(
            1.0, max(args.tokens - done, args.batch) / (0.4 * args.tokens)
        )
        for optimiser, lr in zip(optimisers, (args.muon, args.lr), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = lr * scale
        count = args.batch // args.length
        if len(order) < count:
            order, epoch = train.windows(args.length, args.seed + epoch), epoch + 1
        starts, order = order[:count], order[count:]
        ids, best, logits, weight = batch(train, starts)
        rows = torch.cat([frequent, others[torch.randint(len(others), (SAMPLED,))].unique()])
        heat = (1.0, 0.7)[done // args.batch % 2]
        loss = loss_of(hidden_of(ids), embed, best, logits, weight, heat, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        done += args.batch
        losses.append(loss.item())
        if len(losses) == 50 or done >= args.tokens:
            row = {"tokens": done, "kl": round(sum(losses) / len(losses), 4), **judge()}
            log.append(row)
            print(row, f"{(done - since) / (time.time() - begun):.0f} tokens/s", flush=True)
            losses.clear()
        if time.time() - saved > 120 or done >= args.tokens:
            kept = {
                "net": net.state_dict(),
                "optimisers": [o.state_dict() for o in optimisers],
                "done": done,
                "log": log,
            }
            torch.save(kept, state.with_suffix(".tmp"))
            state.with_suffix(".tmp").rename(state)
            saved = time.time()
    save(net, embed, out, Path(args.target).name)


if __name__ == "__main__":
    main()
