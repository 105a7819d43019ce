"""Distil a draft for a chat model from text that the model wrote (train/corpus.py).

    python -m train.draft --target DIR --corpus corpus --out smollm2-draft --layers 0,1 --ffn 768
    python -m train.draft --target DIR --corpus corpus --out smollm2-draft-deep --layers 0,4,8,12,16,20,24,29 \\
        --heads 3 --ffn 256
    python -m train.draft --target DIR --corpus corpus --out smollm2-diffusion --layers 0,1,2 --heads 3 --ffn 512 \\
        --mask_token_id 16

The draft is a Llama model with the target's hidden size. It starts as layers of the target, of which it keeps the
first attention heads and the `ffn` largest neurons. The embedding, which is also the head, stays the target's own: it
is not trained and not saved (config.json: `specker`). The loss is KL(target || draft) over the target's best tokens, in
turn at temperature 1 and 0.7 (distillation on the target's own text: DistillSpec, arXiv 2310.08461).

With --mask_token_id the draft is a masked-diffusion drafter (DiffuSpec, arXiv 2510.02358) in Dream's layout: its rows
see each other, and row i - 1 predicts position i. It trains on texts as it meets them while decoding, all rounds of a
window in one forward: the committed tokens as earlier rounds left them, a few new ones, and a block of masks.

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
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model

from train.code_family.distill import NEAR, Rounds

BEST = 48  # the target's best tokens that the loss compares
FREQUENT = 4096  # rows of the head that every step scores
SAMPLED = 2048  # further rows, drawn anew in each step
ROUNDS = ((2, 4), (3, 8), (4, 16))  # committed tokens and masks of a diffusion drafter's rounds, in turn
LEAD = 64  # tokens of a window that no round guesses
PROBES = 64  # rows of the embedding that the draft keeps, to recognise its target


# of the target's config.json: what a draft says itself
LEFT_OUT = ("_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "architectures", "model_type")


@dataclass
class Args:
    target: str = field(metadata={"help": "checkpoint folder of the chat model"})
    corpus: str = field(metadata={"help": "folder of train/corpus.py"})
    out: str = field(metadata={"help": "folder of the draft"})
    layers: str = field(default="0,1", metadata={"help": "the target's layers that the draft starts from"})
    heads: int = field(
        default=0, metadata={"help": "query heads that a layer keeps, a multiple of a KV head's; 0: all"}
    )
    ffn: int = field(default=0, metadata={"help": "neurons that a layer keeps; 0: all"})
    mask_token_id: int = field(
        default=-1, metadata={"help": "train a masked-diffusion drafter with this token as the mask"}
    )
    tokens: int = field(default=4_000_000, metadata={"help": "stop after this many tokens"})
    batch: int = field(default=1024, metadata={"help": "tokens a step"})
    length: int = field(default=512, metadata={"help": "tokens of a window"})
    lr: float = field(default=3e-3, metadata={"help": "learning rate of the norms"})
    muon: float = field(default=6e-3, metadata={"help": "learning rate of the matrices"})
    bfloat16: bool = field(
        default=False, metadata={"help": "multiply in bfloat16 (for CPUs with AVX-512's or AMX's bfloat16)"}
    )
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


def lessons(corpus: Path, target: Any, bfloat16: bool) -> Lessons:
    """Read all shards; compute what is missing beside them."""
    parts = []
    for path in sorted(corpus.glob("*.npz")):
        with np.load(path) as shard:
            ids, ends, answers = shard["ids"], shard["ends"], shard["answers"]
        taught = corpus / "best" / path.name
        if not taught.exists():
            taught.parent.mkdir(exist_ok=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
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
        parts.append((ids, best, logits, weight))
    if not parts:
        raise SystemExit(f"{corpus} has no shards: write some with train/corpus.py")
    return Lessons(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@torch.inference_mode()
def teach(target: Any, conversations: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The target's BEST tokens after each position: ids [n, BEST] uint16, logits [n, BEST] float16. The logits are
    computed in float32 also under autocast: bfloat16 would make many of them equal."""
    best, logits = [], []
    for ids in conversations:
        hidden = target.model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0].float()
        for rows in hidden.split(256):
            with torch.autocast("cpu", enabled=False):
                top = target.lm_head(rows).topk(BEST)
            best.append(top.indices.numpy().astype(np.uint16))
            logits.append(top.values.numpy().astype(np.float16))
    return np.concatenate(best), np.concatenate(logits)


def cut(target: Any, layers: list[int], heads: int, ffn: int, diffusion: bool) -> LlamaModel | Qwen2Model:
    """A model of the target's `layers`, each with its first `heads` query heads and its `ffn` largest neurons. A
    diffusion drafter is a Qwen2 model, whose q, k and v have a bias: 0 at first."""
    c = target.config
    heads, ffn = heads or c.num_attention_heads, ffn or c.intermediate_size
    group = c.num_attention_heads // c.num_key_value_heads
    D = c.hidden_size // c.num_attention_heads
    if heads % group:
        raise SystemExit(f"--heads {heads} must be a multiple of {group}, the query heads of a KV head")
    made, kind = (Qwen2Config, Qwen2Model) if diffusion else (LlamaConfig, LlamaModel)
    config = made(
        **{
            **{k: v for k, v in c.to_dict().items() if k not in LEFT_OUT},
            "num_hidden_layers": len(layers),
            "num_attention_heads": heads,
            "num_key_value_heads": heads // group,
            "head_dim": D,
            "intermediate_size": ffn,
        }
    )
    net = kind(config).float()
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
            for name in ("q_proj", "k_proj", "v_proj"):
                if diffusion:
                    getattr(a, name).bias.zero_()
            a.q_proj.weight.copy_(b.q_proj.weight[: heads * D])
            a.k_proj.weight.copy_(b.k_proj.weight[: heads // group * D])
            a.v_proj.weight.copy_(b.v_proj.weight[: heads // group * D])
            a.o_proj.weight.copy_(b.o_proj.weight[:, : heads * D])
            mine.mlp.gate_proj.weight.copy_(its.mlp.gate_proj.weight[kept])
            mine.mlp.up_proj.weight.copy_(its.mlp.up_proj.weight[kept])
            mine.mlp.down_proj.weight.copy_(its.mlp.down_proj.weight[:, kept])
    return net


@dataclass(frozen=True)
class Rows:
    """The rows of the head that a step scores. The draft's normaliser sums over them instead of the whole vocabulary: a
    sampled row counts for all that it stands for."""

    ids: Tensor  # [R] int64: first the most frequent ones, then a sample of the others
    weight: Tensor  # [R] float32, log of the number of ids that a row stands for
    column: Tensor  # [V] int64, the place of an id in `ids`; -1: not scored

    @classmethod
    def of(cls, frequent: Tensor, others: Tensor, vocab: int) -> "Rows":
        sample = others[torch.randint(len(others), (SAMPLED,))].unique()
        ids, column = torch.cat([frequent, sample]), torch.full((vocab,), -1)
        column[ids] = torch.arange(len(ids))
        weight = torch.zeros(len(ids))
        weight[len(frequent) :] = float(np.log(len(others) / len(sample)))
        return cls(ids, weight, column)


def loss_of(hidden: Tensor, embed: Tensor, best: Tensor, logits: Tensor, weight: Tensor, heat: float, rows: Rows):
    """Mean KL(target || draft) at temperature `heat` over the target's best tokens.

    hidden [n, E] float32, of the draft; best [n, BEST] int64 and logits [n, BEST] float32, of the target; weight [n]
    float32, of each position. The normaliser also sums over those of the target's tokens that `rows` lacks.
    """
    column = rows.column[best]
    scores = hidden @ embed[rows.ids].T / heat  # [n, R]
    own = scores.gather(1, column.clamp(min=0))
    at, which = (column < 0).nonzero(as_tuple=True)
    lacking = (hidden[at] * embed[best[at, which]]).sum(-1) / heat
    own = own.index_put((at, which), lacking)
    beside = torch.full_like(own, -1e4).index_put((at, which), lacking)
    lse = torch.logaddexp((scores + rows.weight).logsumexp(-1), beside.logsumexp(-1))
    p = (logits / heat).softmax(-1)
    kl = (p * (p.clamp(min=1e-9).log() - (own - lse[:, None]))).sum(-1)
    return (kl * weight).sum() / weight.sum().clamp(min=1)


def save(net: LlamaModel | Qwen2Model, embed: Tensor, out: Path, target: str, mask: int = -1) -> None:
    """Write the checkpoint folder: bfloat16 weights without the embedding, but with PROBES of its rows. `mask`: the
    mask token of a diffusion drafter."""
    part = out.with_name(out.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    config = net.config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config |= {"torch_dtype": "bfloat16", "dtype": "bfloat16", "specker": {"shares": ["embed_tokens"], "of": target}}
    if mask >= 0:
        config |= {"architectures": ["DreamModel"], "model_type": "Dream", "mask_token_id": mask}
    (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    state = {f"model.{k}": v.to(torch.bfloat16).contiguous() for k, v in net.state_dict().items()}
    ids = torch.arange(PROBES) * (len(embed) // PROBES)
    state["specker.shared_ids"], state["specker.shared_rows"] = ids, embed[ids].to(torch.bfloat16)
    save_file(state, part / "model.safetensors", metadata={"format": "pt"})
    out.mkdir(exist_ok=True)
    for file in part.iterdir():
        file.replace(out / file.name)
    part.rmdir()


@dataclass(eq=False)
class Training:
    """A draft in training. `step` and `judge` work on windows of the lessons; the last of them are only judged."""

    net: LlamaModel | Qwen2Model
    embed: Tensor  # [V, E], the target's
    data: Lessons
    args: Args
    done: int = 0  # tokens
    log: list[dict[str, float]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # the windows left of this epoch
    epoch: int = 0

    def __post_init__(self) -> None:
        length, vocab = self.args.length, len(self.embed)
        windows = len(self.data.ids) // length
        self.trained = max(1, windows - max(1, windows // 40))  # windows that are trained on
        counts = np.bincount(self.data.best[:, :8].ravel(), minlength=vocab)
        self.frequent = torch.from_numpy(counts).topk(min(FREQUENT, vocab // 2)).indices
        rest = torch.ones(vocab, dtype=torch.bool)
        rest[self.frequent] = False
        self.others = rest.nonzero()[:, 0]
        matrices = [p for p in self.net.parameters() if p.ndim == 2]
        vectors = [p for p in self.net.parameters() if p.ndim == 1]
        self.optimisers = (
            torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(vectors, weight_decay=0.0),
        )

    def __call__(self, windows: list[int], turn: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The examples of windows: hidden [n, E] of the draft's predicting rows, then best, logits and weight."""
        ids, *lessons = self.batch(windows)
        return self.hidden(ids), *lessons

    def batch(self, windows: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids [windows, length] int64, then for each position best, logits and weight."""
        at, data = np.array(windows)[:, None] * self.args.length + np.arange(self.args.length), self.data
        ids, best = (torch.from_numpy(x[at].astype(np.int64)) for x in (data.ids, data.best))
        logits = torch.from_numpy(data.logits[at].astype(np.float32))
        return ids, best.flatten(0, 1), logits.flatten(0, 1), torch.from_numpy(data.weight[at]).flatten()

    def hidden(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.args.bfloat16):
            hidden = self.net(inputs_embeds=self.embed[ids], use_cache=False).last_hidden_state
        return hidden.float().flatten(0, 1)

    def step(self) -> float:
        args = self.args
        left = max(args.tokens - self.done, args.batch) / (0.4 * args.tokens)
        scale = min(1.0, (self.done + args.batch) / 100_000) * min(1.0, left)
        for optimiser, rate in zip(self.optimisers, (args.muon, args.lr), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * scale
        count = max(1, args.batch // args.length)
        if len(self.order) < count:
            rng = np.random.default_rng([args.seed, self.epoch, self.done])
            self.order, self.epoch = rng.permutation(self.trained).tolist() * count, self.epoch + 1
        windows, self.order = self.order[:count], self.order[count:]
        rows = Rows.of(self.frequent, self.others, len(self.embed))
        heat = (1.0, 0.7)[self.done // args.batch % 2]
        hidden, best, logits, weight = self(windows, self.done // args.batch // 2)
        loss = loss_of(hidden, self.embed, best, logits, weight, heat, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.done += count * args.length
        return loss.item()

    @torch.no_grad()
    def judge(self) -> float:
        """The share of answer tokens, in the windows never trained on, at which the draft's best token is the
        target's; for a diffusion drafter of the first guesses of rounds."""
        right = total = 0
        for window in range(self.trained, len(self.data.ids) // self.args.length):
            hidden, best, _, weight = self([window], 0)
            answers = weight == 1
            right += int(((hidden @ self.embed.T).argmax(-1) == best[:, 0])[answers].sum())
            total += int(answers.sum())
        return right / max(total, 1)

    def save(self, path: Path) -> None:
        kept = {"net": self.net.state_dict(), "done": self.done, "log": self.log}
        kept["optimisers"] = [optimiser.state_dict() for optimiser in self.optimisers]
        torch.save(kept, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)

    def load(self, path: Path) -> None:
        kept = torch.load(path, weights_only=True)
        self.net.load_state_dict(kept["net"])
        for optimiser, its in zip(self.optimisers, kept["optimisers"], strict=True):
            optimiser.load_state_dict(its)
        self.done, self.log = kept["done"], kept["log"]


class DiffusionTraining(Training):
    """A diffusion drafter in training: the predicting rows are those of all rounds of a window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layouts = []
        for step, block in ROUNDS:
            layout = Rounds(LEAD, step, block, (self.args.length - LEAD - block) // step)
            positions, sees, is_mask = layout.rows()
            by_place = torch.full((block,), NEAR) ** torch.arange(block)
            self.layouts.append((positions, sees, is_mask, *layout.predicts(), by_place.repeat(layout.count)))

    def __call__(self, windows: list[int], turn: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A guess counts NEAR times the one before it: far guesses are seldom reached."""
        positions, sees, is_mask, predicts, at, by_place = self.layouts[turn % len(self.layouts)]
        ids, *lessons = self.batch(windows)
        rows = ids[:, positions].masked_fill(is_mask, self.args.mask_token_id)
        mask = torch.zeros(sees.shape).masked_fill(~sees, float("-inf"))[None, None]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.args.bfloat16):
            out = self.net(
                inputs_embeds=self.embed[rows], attention_mask=mask, position_ids=positions[None], use_cache=False
            )
        hidden = out.last_hidden_state.float()[:, predicts].flatten(0, 1)
        best, logits, weight = (x.unflatten(0, ids.shape)[:, at].flatten(0, 1) for x in lessons)
        return hidden, best, logits, weight * by_place.repeat(len(windows))


def main() -> None:
    (args,) = HfArgumentParser(Args).parse_args_into_dataclasses()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval().requires_grad_(False)
    data = lessons(Path(args.corpus), target, args.bfloat16)
    diffusion = args.mask_token_id >= 0
    net = cut(target, [int(n) for n in args.layers.split(",")], args.heads, args.ffn, diffusion)
    training = (DiffusionTraining if diffusion else Training)(net, target.model.embed_tokens.weight, data, args)
    del target
    out = Path(args.out)
    state = out.with_name(out.name + ".pt")
    if state.exists():
        training.load(state)
    print(f"{sum(p.numel() for p in net.parameters()):,} parameters, {len(data.ids):,} tokens of text", flush=True)
    losses: list[float] = []
    begun = saved = time.time()
    first = training.done
    while training.done < args.tokens:
        losses.append(training.step())
        last = training.done >= args.tokens
        if len(losses) == 50 or last:
            row = {"tokens": training.done, "kl": sum(losses) / len(losses), "agreement": training.judge()}
            training.log.append(row)
            losses.clear()
            speed = (training.done - first) / (time.time() - begun)
            print(
                f"{row['tokens']:,} tokens: kl {row['kl']:.3f}, agreement {row['agreement']:.3f}, {speed:.0f}/s",
                flush=True,
            )
        if time.time() - saved > 120 or last:
            training.save(state)
            saved = time.time()
    save(net, training.embed, out, Path(args.target).name, args.mask_token_id)


if __name__ == "__main__":
    main()
