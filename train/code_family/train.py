"""python -m train.code_family.train: corpus, tokenizer, target, own text, drafters, export; skips finished stages."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer
from torch import Tensor

from specker.checkpoints.checkpoint import read_tokenizer
from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts
from specker.runtime.strategies.vocabtrim.scores import VocabScores, tokenizer_hash

from . import corpus, distill
from . import net as nets
from .distill import Rounds
from .export import export, load
from .fit import FitOptions, Windows, fit, progress
from .net import LinearLoss, Net, NetConfig
from .sample import own_text


@dataclass(frozen=True)
class Preset:
    target: NetConfig
    draft: NetConfig
    deep: NetConfig  # many thin layers, for layer-parallel drafting
    diffusion: NetConfig
    tokens: tuple[int, ...]  # for each of MODELS
    lr: tuple[float, ...]
    batch: int = 4096  # tokens, in `micro` parts
    micro: int = 4
    lengths: tuple[tuple[float, int], ...] = ((0.85, 256), (0.97, 512), (1.0, 1024))  # (up to this fraction, window)
    rounds: tuple[
        tuple[Rounds, float], ...
    ] = (  # layouts of the diffusion drafter's text, and each one's share of the steps
        (Rounds(64, 2, 4, 94), 0.3),
        (Rounds(64, 3, 8, 61), 0.35),
        (Rounds(64, 4, 16, 44), 0.1),
        (Rounds(64, 8, 32, 20), 0.05),
        (Rounds(704, 3, 8, 33), 0.1),  # for the distances of long texts
    )
    own_rows: int = 6144  # windows of the target's own text
    ngram_least: int = 8  # least count of a bundled trigram
    drop: float = 0.1  # the last layer's dropout; it rises exponentially from 0 at the first
    exits: int = 4  # every so many layers have an early exit in a step, in rotation
    exit_scale: float = 0.4  # weight of each exit's loss
    exit_share: float = 0.25  # share of the positions at which exits are judged
    corpus_bytes: int | None = None
    eval_every: int = 50


MODELS = {"target": "code-target", "draft": "code-draft", "deep": "code-draft-deep", "diffusion": "code-diffusion"}
PRESETS = {
    "base": Preset(
        NetConfig(256, 12, 4, 2, 704),
        NetConfig(96, 2, 2, 1, 256),
        NetConfig(96, 12, 2, 1, 256),
        NetConfig(256, 4, 4, 2, 704, diffusion=True),
        tokens=(11_000_000, 16_000_000, 6_000_000, 5_600_000),
        lr=(3e-3, 4e-3, 3e-3, 1.5e-3),
    ),
    "tiny": Preset(
        NetConfig(64, 3, 2, 1, 128, vocab=512, head_dim=32, context=128),
        NetConfig(32, 1, 1, 1, 64, vocab=512, head_dim=32, context=128),
        NetConfig(32, 3, 1, 1, 64, vocab=512, head_dim=32, context=128),
        NetConfig(32, 2, 2, 1, 64, vocab=512, head_dim=32, context=128, diffusion=True, eps=1e-6),
        tokens=(16_384, 8_192, 8_192, 8_192),
        lr=(3e-3, 4e-3, 3e-3, 3e-3),
        batch=512,
        micro=2,
        lengths=((0.7, 64), (1.0, 128)),
        rounds=((Rounds(16, 2, 4, 8), 0.8),),
        own_rows=16,
        ngram_least=1,
        corpus_bytes=200_000,
        eval_every=8,
    ),
}


class Run:
    """The options of one command, and the loss, compiled if they say so."""

    def __init__(
        self,
        preset: Preset,
        work: Path,
        device: str,
        compiled: bool,
        seed: int,
        stop_after: int | None,
        workers: int,
        compute: torch.dtype,
        start: Path | None,
    ):
        self.p, self.work, self.device, self.compiled = preset, work, device, compiled
        self.seed, self.stop_after, self.workers = seed, stop_after, workers
        self.compute, self.start = compute, start
        self.ops = (nets._head_chunk, nets._head_chunk_kl)
        self.target_head: Tensor | None = None  # [V,E] of the teacher, in `compute`
        if compiled:
            torch._dynamo.config.recompile_limit = 64  # the many shapes are intended
            nets.Block.forward = torch.compile(nets.Block.forward, dynamic=False)
            self.ops = tuple(torch.compile(f, dynamic=False) for f in self.ops)

    def net(self, c: NetConfig) -> Net:
        torch.manual_seed(self.seed)
        return Net(c, self.compute).to(self.device)

    def saved(self, name: str) -> dict | None:
        path = self.work / f"{name}.pt"
        return torch.load(path, map_location=self.device, weights_only=True) if path.exists() else None

    def trained(self, name: str) -> Net:
        net = self.net(getattr(self.p, name))
        net.load_state_dict(self.saved(name)["net"])
        return net.requires_grad_(False)

    def teacher(self) -> Net:
        net = self.trained("target").to(self.compute)  # as it is exported
        self.target_head = net.embed
        return net

    def head_loss(self, net: Net, hidden, label, scale, teacher=None, hard: float = 0.0, heat: float = 1.0):
        """(sum of scale * loss, losses [T]) of the rows hidden [T,E]; `teacher`: the target's hidden rows, for KL."""
        chunk, n = 512 if self.device == "cpu" else 4096, len(hidden)
        if self.compiled and n % chunk:  # pad to whole chunks, because every new shape would be compiled
            hidden, label, scale = (F.pad(x, (0, 0) * (x.ndim - 1) + (0, -n % chunk)) for x in (hidden, label, scale))
            teacher = None if teacher is None else F.pad(teacher, (0, 0, 0, -n % chunk))
        soft = None if teacher is None else (teacher, self.target_head)
        heat = torch.tensor(heat, device=self.device)
        total, losses = LinearLoss.apply(hidden, net.embed, label, scale, soft, hard, heat, self.ops, chunk)
        return total, losses[:n]

    def options(self, which: int) -> FitOptions:
        p = self.p
        more = {"micro": p.micro, "workers": self.workers, "stop_after": self.stop_after, "eval_every": p.eval_every}
        return FitOptions(p.tokens[which], p.batch, p.lr[which], self.seed, **more)

    def windows(self, split: str) -> Windows:
        return Windows(np.load(self.work / f"{split}.npy", mmap_mode="r"), self.seed, self.device)

    def length(self, done: float) -> int:
        return next(n for upto, n in self.p.lengths if done < upto or upto == 1.0)


def make_corpus(run: Run) -> None:
    texts, held, record = corpus.collect(run.p.corpus_bytes)
    (run.work / "texts.json").write_text(json.dumps({"train": texts, "held": held}))
    corpus.write_json(run.work / "corpus.json", record)


def make_tokenizer(run: Run) -> None:
    texts = json.loads((run.work / "texts.json").read_text())
    if run.start is None:
        tok = corpus.train_tokenizer(texts["train"], run.p.target.vocab)
    else:
        tok = Tokenizer.from_file(str(run.start / "code-target" / "tokenizer.json"))
    np.save(run.work / "train.npy", corpus.encode(tok, texts["train"]))
    np.save(run.work / "held.npy", corpus.encode(tok, [t for _, t in texts["held"]]))
    rows = corpus.prompts([tuple(x) for x in texts["held"]], tok)
    (run.work / "heldout.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tok.save(str(run.work / "tokenizer.json"))


def train_target(run: Run) -> list[dict] | None:
    """Cross-entropy after the last layer, plus LayerSkip: layer dropout and early exits in rotation."""
    c, net, data, held = run.p.target, run.net(run.p.target), run.windows("train"), run.windows("held")
    if run.start is not None:
        net.load_state_dict(load(run.start / "code-target").state_dict())
    drop = [run.p.drop * (2 ** (i / (c.layers - 1)) - 1) for i in range(c.layers)]

    def loss(net, part, step, done):
        rng = np.random.default_rng([run.seed, step])
        n, parts = run.length(done), run.p.micro
        taps = tuple(range(step % run.p.exits, c.layers - 1, run.p.exits))
        skip = frozenset(i for i in range(c.layers) if i not in taps and rng.random() < drop[i])
        ids = data.batch(step * parts + part, run.p.batch // (n * parts), n)
        hidden, exits = net(ids[:, :-1], skip, taps)
        hidden, label = hidden.flatten(0, 1), ids[:, 1:].flatten()
        scale = torch.full((len(label),), 1 / run.p.batch, device=run.device)
        total, losses = run.head_loss(net, hidden, label, scale)
        rows = torch.from_numpy(rng.permutation(len(label))[: round(len(label) * run.p.exit_share)]).to(run.device)
        early = torch.cat([x.flatten(0, 1)[rows] for x in exits])
        rows = rows.repeat(len(exits))
        extra, losses_early = run.head_loss(net, early, label[rows], run.p.exit_scale / run.p.exit_share * scale[rows])
        return total + extra, {"loss": losses.mean() / parts, "exit": losses_early.mean() / parts}

    @torch.no_grad()
    def held_out():
        length, batches, losses = min(512, c.context), 4, []
        for i in range(batches):
            ids = held.batch(i, 8, length)
            hidden, label = net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
            for h, y in zip(hidden.split(512), label.split(512), strict=True):
                losses.append(F.cross_entropy(net.logits(h).float(), y).item())
        return {"held_out": float(np.mean(losses))}

    return fit("target", net, loss, held_out, run.options(0), run.work)


def write_own_text(run: Run) -> None:
    """Write the target's own text for its drafters, because in use they continue such text, not the corpus."""
    data, net = np.load(run.work / "train.npy", mmap_mode="r"), run.teacher()
    rows = min(128, run.p.own_rows)
    length = run.p.lengths[0][1] + 9  # a window, its next token and the lead of the longest block
    parts = range(run.p.own_rows // rows)
    bar, task = progress(len(parts), "own text")
    with bar, ThreadPoolExecutor(run.workers) as pool:
        done = []
        for block in pool.map(lambda part: own_text(net, data, part, rows, length, run.seed), parts):
            done.append(block)
            bar.advance(task)
    np.save(run.work / "own.npy", np.concatenate(done))


STAGES = ("corpus", "tokenizer", "target", "own", "draft", "deep", "diffusion", "export")


def do(run: Run, stage: str, out: Path, records: Path) -> bool:
    """Run one stage unless it is done; returns False if `stop_after` ended it early."""
    made = {"corpus": "corpus.json", "tokenizer": "tokenizer.json", "own": "own.npy"}
    if stage in made:
        if not (run.work / made[stage]).exists():
            {"corpus": make_corpus, "tokenizer": make_tokenizer, "own": write_own_text}[stage](run)
        return True
    if stage == "export":
        export_all(run, out, records)
        return True
    which = list(MODELS).index(stage)
    saved = run.saved(stage)
    if saved and saved["step"] * run.p.batch >= run.p.tokens[which]:
        return True
    if stage == "target":
        return train_target(run) is not None
    if stage == "diffusion":
        return distill.train_diffusion(run, run.teacher()) is not None
    return distill.train_draft(run, run.teacher(), stage, which) is not None


def export_all(run: Run, out: Path, records: Path) -> None:
    """Export what is trained so far: the checkpoints and prompts to `out`, corpus.json and losses.json to `records`."""
    logs = {}
    for name, folder in MODELS.items():
        if saved := run.saved(name):
            export(run.trained(name), run.work / "tokenizer.json", out / folder)
            logs[name] = saved["log"]
    if (run.work / "own.npy").exists():
        own = np.load(run.work / "own.npy", mmap_mode="r")
        counts = torch.from_numpy(np.bincount(own.ravel(), minlength=run.p.target.vocab))
        about = {"totals": {"texts": len(own), "tokens": own.size}, "source": "target"}
        digest = tokenizer_hash(read_tokenizer(out / "code-target"))
        scores = VocabScores.from_counts(counts, tokenizer=digest, **about)
        (out / "vocab_scores.safetensors").write_bytes(scores.to_bytes())
        trigrams = NGramCounts(run.p.target.vocab)
        for text in own:
            trigrams.add(text)
        ngram = NGram.fit(trigrams, run.p.ngram_least, tokenizer=digest, totals=about["totals"])
        (out / "ngram.safetensors").write_bytes(ngram.to_bytes())
    shutil.copyfile(run.work / "heldout.jsonl", out / "heldout.jsonl")
    shutil.copyfile(run.work / "corpus.json", records / "corpus.json")
    rows = (f' "{k}": [\n  ' + ",\n  ".join(map(json.dumps, v)) + "\n ]" for k, v in logs.items())
    (records / "losses.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main(
    work: Annotated[Path, typer.Option(help="corpus, tokens and checkpoints")] = Path("~/.cache/specker/zoo"),
    out: Annotated[Path | None, typer.Option(help="folder of the export; default WORK/export")] = None,
    records: Annotated[Path | None, typer.Option(help="folder of corpus.json and losses.json; default OUT")] = None,
    preset: Annotated[str, typer.Option(help=" or ".join(PRESETS))] = "base",
    device: str = "cpu",
    seed: int = 0,
    target_tokens: Annotated[int, typer.Option(help="0: the preset's; fewer on resume start the decay early")] = 0,
    draft_tokens: Annotated[int, typer.Option(help="likewise")] = 0,
    deep_tokens: Annotated[int, typer.Option(help="likewise")] = 0,
    diffusion_tokens: Annotated[int, typer.Option(help="likewise")] = 0,
    draft_layers: Annotated[int, typer.Option(help="0: the preset's")] = 0,
    draft_hidden: Annotated[int, typer.Option(help="0: the preset's; the ffn is three times as wide")] = 0,
    compile: Annotated[bool | None, typer.Option(help="default: where CUDA or a C++ compiler is found")] = None,
    workers: Annotated[int, typer.Option(help="threads; more than one is not bit-reproducible")] = 1,
    compute: Annotated[str, typer.Option(help="bfloat16 suits AMX, AVX512-BF16 and CUDA; else float32")] = "bfloat16",
    start: Annotated[
        Path | None, typer.Option(help="an export whose target and tokenizer training goes on from")
    ] = None,
    stop_after: Annotated[int | None, typer.Option(help="leave after this many steps of a model")] = None,
    until: Annotated[str, typer.Option(help="last stage: " + ", ".join(STAGES))] = "export",
) -> None:
    """Train the bundled family; after a kill, the same command resumes."""
    if preset not in PRESETS or until not in STAGES:
        raise typer.BadParameter(f"expected a preset of {', '.join(PRESETS)} and a stage of {', '.join(STAGES)}")
    p = PRESETS[preset]
    chosen = (target_tokens, draft_tokens, deep_tokens, diffusion_tokens)
    p = replace(p, tokens=tuple(a or b for a, b in zip(chosen, p.tokens, strict=True)))
    if draft_layers:
        p = replace(p, draft=replace(p.draft, layers=draft_layers))
    if draft_hidden:
        p = replace(p, draft=replace(p.draft, hidden=draft_hidden, ffn=3 * draft_hidden))
    compiled = compile if compile is not None else preset != "tiny" and (device != "cpu" or bool(shutil.which("g++")))
    if workers > 1:
        torch.set_num_threads(1)  # per worker: an OpenMP team waits at every op for a core that others use too
    work = work.expanduser()
    work.mkdir(parents=True, exist_ok=True)
    kind = torch.float32 if preset == "tiny" else getattr(torch, compute)
    run = Run(p, work, device, compiled, seed, stop_after, workers, kind, start)
    out = out or work / "export"
    for stage in STAGES[: STAGES.index(until) + 1]:
        if not do(run, stage, out, records or out):
            print(f"stopped within {stage}; the same command goes on from here")
            return
        print(f"{stage}: done", flush=True)


if __name__ == "__main__":
    typer.run(main)
