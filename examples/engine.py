"""Another engine that speculates with specker's ops: a Llama in plain torch, with its own weights and paged K/V, which
imports `specker.kernels` and nothing else of specker.

A round drafts a tree with a small model and a trimmed head (`vocab_topk`), verifies it in one pass of the large model
(`tree_attention`), keeps the path that agrees (`accept_walk`) and moves that path's K/V into place (`kv_commit`). A
round is one graph under torch.compile(fullgraph=True); plain decoding is a round with an empty tree. The script decodes
its prompts both ways, compares the tokens and exits with 1 if they differ.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from specker.kernels import accept_walk, kv_commit, row_linear, tree_attention, vocab_topk

PAGE, CHUNK = 16, 32  # columns of a K/V page; prompt tokens of a prefill pass, a multiple of PAGE
ZOO = Path(__file__).resolve().parents[1] / "models" / "specker_models"
TARGET, DRAFT = ZOO / "code-target", ZOO / "code-draft"
PROMPTS = "def moving_average(values, window):\n", "class Stack:\n    def push(self, item):", "import os\nimport sys\n"
LAYER = ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj mlp.up_proj",
         "mlp.down_proj", "input_layernorm", "post_attention_layernorm")  # fmt: skip
Ids = list[list[int]]  # of each sequence
Draw = tuple[int, float]  # seed, temperature


class Llama:
    """A Llama checkpoint and its K/V, in the pages of `table` [B, P] int32."""

    def __init__(self, folder: Path, table: Tensor, dtype: torch.dtype, kept: Tensor | None = None):
        config, device = json.loads((folder / "config.json").read_text()), table.device
        rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
        biased = config.get("attention_bias") or config.get("mlp_bias")
        if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default" or biased:
            raise ValueError(f"{folder}: this example reads Llama checkpoints with default RoPE and without biases")
        files = [load_file(file) for file in folder.glob("*.safetensors")]
        w = {name: x.to(device, dtype) for file in files for name, x in file.items()}
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.embed, self.eps, self.table = w["model.embed_tokens.weight"], config["rms_norm_eps"], table
        self.layers = [
            [torch.cat([w[f"model.layers.{n}.{name}.weight"] for name in names.split()]) for names in LAYER]
            for n in range(config["num_hidden_layers"])
        ]
        self.norm = w["model.norm.weight"], self.eps
        head = self.embed if config.get("tie_word_embeddings") else w["lm_head.weight"]
        self.kept = None if kept is None else kept.to(device)  # the token ids of the head's rows; None: all, in order
        self.head = head if self.kept is None else head[self.kept]
        frequency = rope["rope_theta"] ** -(torch.arange(0, self.dim, 2).float() / self.dim)
        angles = torch.outer(torch.arange(table.shape[1] * PAGE), frequency).repeat(1, 2)[:, None]  # [C, 1, D]
        self.cos, self.sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)
        pages = len(self.layers), table.numel(), PAGE, self.kv_heads, self.dim
        self.k, self.v = (torch.zeros(pages, dtype=dtype, device=device) for _ in "kv")

    def forward(self, tokens: Tensor, first: Tensor, column: int, depth: Tensor, words: Tensor) -> Tensor:
        """Hidden rows [B, R, E] of tokens [B, R], before the last norm. Row r of sequence b is stored in column
        first[b] + column + r and stands at position first[b] + depth[r]. It sees all columns before first[b] and those
        from there on that are set in words [B, R]."""
        (B, R), (Hq, Hkv, D) = tokens.shape, (self.heads, self.kv_heads, self.dim)
        slots = self.slots(first[:, None] + column + torch.arange(R, device=first.device))
        kv_len, window = (first + column + R).int(), torch.full_like(first, column + R, dtype=torch.int32)
        starts = torch.arange(0, B * R + 1, R, dtype=torch.int32, device=first.device)
        seen = self.table, kv_len, window, starts, words.reshape(-1, 1), D**-0.5
        place = (first[:, None] + depth).flatten()
        cos, sin, x = self.cos[place], self.sin[place], self.embed[tokens.flatten()]
        for k, v, (qkv, o, gate_up, down, norm1, norm2) in zip(self.k, self.v, self.layers, strict=True):
            heads = row_linear(F.rms_norm(x, norm1.shape, norm1, self.eps), qkv).view(B * R, Hq + 2 * Hkv, D)
            qk, value = heads.split((Hq + Hkv, Hkv), dim=1)
            a, b = qk.chunk(2, dim=-1)
            q, key = (qk * cos + torch.cat((-b, a), -1) * sin).split((Hq, Hkv), dim=1)
            k.view(-1, Hkv, D).index_copy_(0, slots, key)
            v.view(-1, Hkv, D).index_copy_(0, slots, value)
            x = x + row_linear(tree_attention(q, k, v, *seen)[0].flatten(1), o)
            x = x + row_linear(row_linear(F.rms_norm(x, norm2.shape, norm2, self.eps), gate_up, None, "silu_mul"), down)
        return x.view(B, R, -1)

    def slots(self, columns: Tensor) -> Tensor:
        """The cache slots [B * R] of columns [B, R]."""
        return (self.table.gather(1, columns // PAGE).long() * PAGE + columns % PAGE).flatten()

    def best(self, hidden: Tensor, position: Tensor, k: int, draw: Draw) -> tuple[Tensor, Tensor]:
        """The k best tokens after each row [B, R, k] and their log-probabilities. Both models rank with one noise, that
        of (seed, position, token), so the draft guesses what the target draws."""
        noise = draw[0], position.flatten(), draw[1]
        ids, logits, lse = vocab_topk(hidden.flatten(0, 1), self.head, self.kept, k, norm=self.norm, noise=noise)
        return ids.view(*hidden.shape[:2], k), (logits - lse[:, None]).view(*hidden.shape[:2], k)


def draft_tree(model: Llama, text: Tensor, length: Tensor, W: int, D: int, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """D levels of the W most probable continuations: tokens, parents [B, W * D], and the words [B, 1 + W * D]."""
    B, rows = len(length), torch.arange(1 + W * D, device=text.device)
    # The token before the root may come from a tree's last level, whose K/V is missing, so it runs beside the root.
    ends, pair = length[:, None] + rows[:2] - 1, ((2 << rows[:2]) - 1).expand(B, 2)
    hidden = model.forward(text.gather(1, ends), length - 1, 0, rows[:2], pair)[:, 1:]
    ids, score = (x[:, 0] for x in model.best(hidden, length[:, None], W, draw))  # [B, W]
    tokens, parents = [ids], [torch.zeros_like(ids)]
    words = [torch.ones_like(ids[:, :1]), (1 | 1 << rows[1 : 1 + W]).expand(B, W)]
    for level in range(1, D):
        start = 1 + (level - 1) * W  # the row of the previous level's first token
        hidden = model.forward(tokens[-1], length, start, torch.full_like(rows[:W], level), words[-1])
        ids, gain = model.best(hidden, (length + level)[:, None].expand(B, W), W, draw)  # [B, W, W]
        score, chosen = (score[:, :, None] + gain).flatten(1).topk(W)
        parent = chosen // W
        tokens.append(ids.flatten(1).gather(1, chosen))
        parents.append(start + parent)
        words.append(words[-1].gather(1, parent) | 1 << rows[start + W : start + 2 * W])
    return torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(words, 1)


def run_round(models: list[Llama], text: Tensor, length: Tensor, limit: Tensor, W: int, D: int, draw: Draw) -> Tensor:
    """One round with a tree of W x D, or of plain decoding if D is 0. text [B, C] is written; length [B] is where each
    text's last token stands, which has no K/V yet. Returns the new length, at most `limit` [B]."""
    (target, draft), drafted, root = models, W * D, text.gather(1, length[:, None])
    depth = (torch.arange(drafted + 1, device=text.device) + W - 1) // W
    plain = root[:, :0], root[:, :0], torch.ones_like(root)
    tokens, parents, words = draft_tree(draft, text, length, W, D, draw) if drafted else plain
    hidden = target.forward(torch.cat((root, tokens), 1), length, 0, depth, words)
    wanted = target.best(hidden, length[:, None] + depth, 1, draw)[0][:, :, 0]  # [B, W * D + 1]
    path, count, _ = accept_walk(tokens, parents, wanted)
    place = torch.arange(D + 1, device=text.device).expand(len(length), D + 1)
    path = torch.where(path[:, : D + 1] < 0, place, path[:, : D + 1])  # rows after the path's end stay where they are
    for model in models if drafted else ():
        kv_commit(model.k, model.v, model.slots(length[:, None] + path), model.slots(length[:, None] + place))
    text.scatter_(1, length[:, None] + 1 + place, wanted.gather(1, path))
    return torch.minimum(length + count, limit)


class Engine:
    """Decodes B prompts at once; a prompt and what follows it may have `context` tokens."""

    def __init__(self, target: Path, draft: Path, B: int, context: int, tree: tuple[int, int] = (4, 5),
                 kept: Tensor | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu",
                 backend: str = "eager"):  # fmt: skip
        if not tree[0] >= 1 <= tree[1] or tree[0] * tree[1] > 63:
            raise ValueError(f"a tree has 1 to 63 tokens, one bit of a row's word each; got {tree[0]} x {tree[1]}")
        self.tree, pages = tree, -(-(context + 64) // CHUNK) * CHUNK // PAGE  # with room for a tree
        self.table = torch.arange(B * pages, dtype=torch.int32, device=device).view(B, pages)
        self.models = [Llama(target, self.table, dtype), Llama(draft, self.table, dtype, kept)]
        stops = json.loads((target / "config.json").read_text()).get("eos_token_id")
        self.stops = set(stops if isinstance(stops, list) else [stops])
        compile_ = torch.compile(fullgraph=True, dynamic=False, backend=backend)
        self.forward, self.round = compile_(Llama.forward), compile_(run_round)

    @torch.no_grad()
    def generate(self, prompts: Ids, new: int, plain: bool = False, draw: Draw = (0, 0.0)) -> tuple[Ids, list[int]]:
        """Up to `new` tokens after each prompt (two ids or more), ended by a stop id, and each sequence's rounds."""
        (B, pages), sizes = self.table.shape, [len(prompt) for prompt in prompts]
        most = pages * PAGE - new - 64
        if len(sizes) != B or not all(2 <= size <= most for size in sizes):
            raise ValueError(f"expected {B} prompts of 2 to {most} ids, got prompts of {sizes} ids")
        text = torch.tensor([ids + [0] * (pages * PAGE - len(ids)) for ids in prompts], device=self.table.device)
        length = torch.tensor(sizes, device=text.device) - 1
        limit, depth = length + new, torch.arange(CHUNK, device=text.device)
        # A pass runs whole chunks; what it writes after a prompt's end is overwritten before it is read.
        for at in range(0, int(length.max()), CHUNK):
            for model in self.models:
                chunk, first = text[:, at : at + CHUNK].contiguous(), torch.full_like(length, at)
                self.forward(model, chunk, first, 0, depth, ((2 << depth) - 1).expand(chunk.shape))
        tree, rounds = (1, 0) if plain else self.tree, [0] * len(prompts)
        while True:
            found = [row[size : end + 1] for row, size, end in zip(text.tolist(), sizes, length.tolist(), strict=True)]
            if not any(going := [len(ids) < new and self.stops.isdisjoint(ids) for ids in found]):
                break
            rounds = [n + more for n, more in zip(rounds, going, strict=True)]
            length = self.round(self.models, text, length, limit, *tree, draw)
        return [ids[: next((n + 1 for n, i in enumerate(ids) if i in self.stops), new)] for ids in found], rounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=TARGET, help="a folder with a Llama checkpoint")
    parser.add_argument("--draft", type=Path, default=DRAFT, help="a small one with the same tokenizer")
    parser.add_argument("--tree", default="4x5", help="WIDTHxDEPTH")
    parser.add_argument("--prompt", action="append", help="may be repeated")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    prompts, new = [tokenizer.encode(prompt).ids for prompt in args.prompt or PROMPTS], 48
    kept = load_file(ZOO / "vocab_scores.safetensors")["ids"][:1024] if args.target == TARGET else None
    device, backend = ("cuda", "inductor") if torch.cuda.is_available() else ("cpu", "eager")
    W, D = map(int, args.tree.split("x"))
    sizes = len(prompts), max(map(len, prompts)) + new
    engine = Engine(args.target, args.draft, *sizes, (W, D), kept, device=device, backend=backend)
    plain, passes = engine.generate(prompts, new, plain=True, draw=(0, args.temperature))
    texts, rounds = engine.generate(prompts, new, draw=(0, args.temperature))
    for prompt, ids in zip(prompts, texts, strict=True):
        print(tokenizer.decode(prompt + ids), end="\n\n")
    print(f"target passes: {sum(rounds)}, in plain decoding {sum(passes)}")
    print(f"acceptance length: {sum(map(len, texts)) / sum(rounds):.2f}; same tokens: {texts == plain}")
    return int(texts != plain)


if __name__ == "__main__":
    raise SystemExit(main())
