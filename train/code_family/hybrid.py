"""python -m train.code_family.hybrid: a target with recurrent layers and its MTP head, distilled from `code-target`.

The layers are Qwen3.5's: three gated delta nets, then gated attention. They are transformers' own modules. The MTP head
learns beside them, and its gradient flows into them. Both learn the teacher's distribution.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from . import corpus
from . import net as nets
from .export import load
from .fit import FitOptions, Windows, fit
from .net import LinearLoss, Net
from .optim import Optimizer

NAME = "hybrid-target"
DEPTH = 2  # tokens that the MTP head drafts in training
MTP_SHARE = 0.3  # weight of its first token's loss; a later one weighs half of the one before
MTP_ROWS = 4  # one row of so many counts in its loss, in rotation
HARD = 0.1  # share of the text's own tokens in the soft labels


def config_of(teacher: Net, hidden: int = 192, layers: int = 8, ffn: int = 320) -> Qwen3_5TextConfig:
    """A small hybrid with the teacher's vocabulary and context."""
    c = teacher.c
    rope = {"rope_type": "default", "rope_theta": c.rope_theta, "partial_rotary_factor": 0.5}
    return Qwen3_5TextConfig(
        vocab_size=c.vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, rms_norm_eps=1e-6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_parameters=rope,
        max_position_embeddings=c.context, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=2,
        attn_implementation="sdpa",
    )  # fmt: skip


class MTP(nn.Module):
    """A layer over pairs of a feature and the next token's embedding, under the names of Qwen3.5's checkpoints."""

    def __init__(self, c: Qwen3_5TextConfig):
        super().__init__()
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(c, c.layer_types.index("full_attention"))])
        self.norm = Qwen3_5RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        with torch.no_grad():  # starts as the feature
            self.fc.weight.copy_(torch.cat([0.1 * torch.eye(c.hidden_size), torch.eye(c.hidden_size)], 1))
            for w in (self.layers[0].self_attn.o_proj.weight, self.layers[0].mlp.down_proj.weight):
                w.normal_(std=(2 * c.num_hidden_layers * w.shape[1]) ** -0.5)

    def forward(self, features: Tensor, embedded: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """features, embedded [B,T,E] -> normed rows [B,T,E] for the LM head, which are the next step's features."""
        pair = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(features)), -1)
        return self.norm(self.layers[0](self.fc(pair), position_embeddings=rope))


class Hybrid(nn.Module):
    """The model and its head, in float32."""

    def __init__(self, c: Qwen3_5TextConfig):
        super().__init__()
        self.causal, self.mtp = Qwen3_5ForCausalLM(c), MTP(c)
        with torch.no_grad():
            for name, w in self.causal.model.layers.named_parameters():
                if w.ndim == 2:
                    last = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                    w.normal_(std=(w.shape[1] * (2 * c.num_hidden_layers if last else 1)) ** -0.5)

    @property
    def embed(self) -> Tensor:
        return self.causal.model.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B,T] -> normed rows [B,T,E]."""
        return self.causal.model(ids, use_cache=False).last_hidden_state

    def drafts(self, rows: Tensor, ids: Tensor):
        """Yield the rows of draft step 1, 2, ..: row t of step i predicts token t + i + 1. rows: of `ids` [B,T]."""
        features, steps = rows, ids.shape[1] - DEPTH
        for i in range(1, DEPTH + 1):
            # Step i's pair of column t has the token t + i, and stands at column t + i - 1.
            columns = torch.arange(i - 1, i - 1 + steps)[None]
            rope = self.causal.model.rotary_emb(features, columns[None].expand(3, 1, -1))
            features = self.mtp(features[:, :steps], F.embedding(ids[:, i : i + steps], self.embed), rope)
            yield features

    def state(self) -> dict[str, Tensor]:
        """Weights under the names of a checkpoint; the head is tied, so there is no lm_head."""
        found = {f"model.{name}": w for name, w in self.causal.model.state_dict().items()}
        return found | {f"mtp.{name}": w for name, w in self.mtp.state_dict().items()}


class Muon(Optimizer):
    """As Optimizer, for matrices of any names."""

    def __init__(self, net: Hybrid, lr: float):
        layers = [*net.causal.model.layers.parameters(), *net.mtp.parameters()]
        super().__init__([(w, None) for w in layers if w.ndim == 2], list(net.parameters()), lr)


def train(teacher: Net, data: Windows, held: Windows, o: FitOptions, work: Path, compiled: bool) -> Hybrid | None:
    """Train a hybrid and its head against the teacher; None if `o.stop_after` ended it early."""
    torch.manual_seed(o.seed)
    net = Hybrid(config_of(teacher))
    axes = torch.linalg.svd(teacher.embed.float(), full_matrices=False)
    with torch.no_grad():
        net.embed.copy_(axes.U[:, : net.embed.shape[1]] * axes.S[: net.embed.shape[1]])
    ops = (nets._head_chunk, nets._head_chunk_kl)
    if compiled:
        torch._dynamo.config.recompile_limit = 64
        ops = tuple(torch.compile(f, dynamic=False) for f in ops)

    def loss_of(rows: Tensor, label: Tensor, taught: Tensor, scale: float, heat: float) -> tuple[Tensor, Tensor]:
        """The loss of rows [n,E] against the teacher's rows [n,E'], and its mean."""
        each = torch.full((len(rows),), scale / len(rows))
        soft = taught, teacher.embed
        total, losses = LinearLoss.apply(rows, net.embed, label, each, soft, HARD, torch.tensor(heat), ops, 512)
        return total, losses.mean()

    def loss(net: Hybrid, part: int, step: int, done: float):
        length = 256 if done < 0.85 else 512
        ids = data.batch(step * o.micro + part, o.batch // (length * o.micro), length + DEPTH)
        heat = (1.0, 0.7)[step % 2]
        with torch.no_grad():
            taught = teacher(ids[:, :-1])
        rows = net(ids[:, :-1])
        total, own = loss_of(rows[:, :length].flatten(0, 1), ids[:, 1 : length + 1].flatten(),
                             taught[:, :length].flatten(0, 1), 1 / o.micro, heat)  # fmt: skip
        values = {"kl": own / o.micro}
        for i, drafted in enumerate(net.drafts(rows, ids[:, :-1]), 1):
            some = slice(step % MTP_ROWS, drafted.shape[1], MTP_ROWS)
            at = torch.arange(drafted.shape[1])[some] + i  # the target's row that predicts the same token
            extra, kl = loss_of(drafted[:, some].flatten(0, 1), ids[:, at + 1].flatten(), taught[:, at].flatten(0, 1),
                                MTP_SHARE * 0.5 ** (i - 1) / o.micro, heat)  # fmt: skip
            total, values[f"mtp{i}"] = total + extra, kl / o.micro
        return total, values

    @torch.no_grad()
    def judge() -> dict[str, float]:
        """Loss of held-out text, and how often the head's token is the target's own best one."""
        sums = [0.0] * (1 + DEPTH)
        for i in range(4):
            ids = held.batch(i, 4, 512)
            rows = net(ids)
            logits = F.linear(rows, net.embed)
            sums[0] += F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
            best, right = logits.argmax(-1), torch.tensor(True)
            for k, drafted in enumerate(net.drafts(rows, ids), 1):
                guess = F.linear(drafted, net.embed).argmax(-1)
                # Step k's row t guesses the token after column t + k.
                right = right & (guess == best[:, k : k + guess.shape[1]])
                sums[k] += right.float().mean().item()
        return {"held_out": sums[0] / 4} | {f"draft{k}": sums[k] / 4 for k in range(1, 1 + DEPTH)}

    log = fit("hybrid", net, loss, judge, o, work, Muon)
    if log is None:
        return None
    corpus.write_json(work / "hybrid_losses.json", log)
    return net


def export(net: Hybrid, like: Path, folder: Path) -> None:
    """Write `folder` in bfloat16, with the tokenizer's files of the folder `like`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    own = net.causal.config.to_dict() | {"architectures": ["Qwen3_5ForCausalLM"], "dtype": "bfloat16"}
    own |= {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
    own = {k: v for k, v in own.items() if k not in ("transformers_version", "_name_or_path")}
    keep = ("linear_attn.A_log", "linear_attn.norm.weight")  # in float32, as Qwen3.5's files have them
    state = {k: (w if k.endswith(keep) else w.to(torch.bfloat16)).contiguous() for k, w in net.state().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(own, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(like / name, folder / name)


def main(
    work: Annotated[Path, typer.Option(help="corpus, tokens and checkpoints")] = Path("~/.cache/specker/zoo"),
    teacher: Annotated[Path, typer.Option(help="the folder of code-target")] = Path(
        "models/specker_models/code-target"
    ),
    out: Annotated[Path | None, typer.Option(help="folder of the export; default WORK/export")] = None,
    tokens: Annotated[int, typer.Option(help="may be lowered on resume: the decay starts early")] = 8_000_000,
    batch: Annotated[int, typer.Option(help="tokens of a step")] = 2048,
    lr: float = 4e-3,
    seed: int = 0,
    workers: Annotated[int, typer.Option(help="threads; more than one is not bit-reproducible")] = 1,
    corpus_bytes: Annotated[int, typer.Option(help="0: the whole corpus")] = 0,
    stop_after: Annotated[int | None, typer.Option(help="leave after this many steps")] = None,
) -> None:
    """Train the hybrid; after a kill, the same command resumes."""
    from tokenizers import Tokenizer

    torch.set_num_threads(1)
    work = work.expanduser()
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "held.npy").exists():
        texts, held, record = corpus.collect(corpus_bytes or None)
        tok = Tokenizer.from_file(str(teacher / "tokenizer.json"))
        corpus.write_json(work / "corpus.json", record)
        np.save(work / "train.npy", corpus.encode(tok, texts))
        np.save(work / "held.npy", corpus.encode(tok, [text for _, text in held]))
    data, held = (Windows(np.load(work / f"{name}.npy", mmap_mode="r"), seed, "cpu") for name in ("train", "held"))
    o = FitOptions(tokens, batch, lr, seed, eval_every=100, micro=2, workers=workers, stop_after=stop_after)
    compiled = bool(shutil.which("g++"))
    net = train(load(teacher).requires_grad_(False), data, held, o, work, compiled)
    if net is None:
        print("stopped; the same command goes on from here")
        return
    export(net, teacher, (out or work / "export") / NAME)
    print(f"wrote {(out or work / 'export') / NAME}")


if __name__ == "__main__":
    typer.run(main)
