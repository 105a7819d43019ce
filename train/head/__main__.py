"""Train a head that reads a target's hidden states, in four stages:

    python -m train.head --target DIR --out FOLDER                 # an EAGLE-3 head
    python -m train.head --target DIR --out FOLDER --kind dflash   # a DFlash drafter of blocks; or dspark, domino
    python -m train.head --target DIR --out FOLDER --kind assistant   # an assistant that reads the target's K/V
    python -m train.head --target DIR --out FOLDER --stages answers taps   # the text alone
    python -m train.head --target DIR --out FOLDER --stages export --layout speculators

* answers: the target writes conversations (train/corpus.py) into FOLDER/answers until they hold --tokens tokens of
  answers. It writes the questions itself, and every second one comes from --prompts if there are some; a target
  without a chat template continues --prompts. Spec-Bench is the test, so its questions are left out.
* taps: one pass of the target over these texts keeps its hidden rows in FOLDER/taps (taps.py says how large).
* train: --visits positions (fit.py) of a head of eagle.py or blocks.py. FOLDER/log.jsonl has a line every 50 steps,
  with the held-out agreement at each token of a draft; FOLDER/best.pt is the best judged head.
* export: FOLDER/head, for `--strategy eagle --draft FOLDER/head`; FOLDER/head-speculators with --layout speculators.

A drafter of blocks learns from the same answers and taps, and is in FOLDER/dflash (or dspark, domino), for `--strategy
dflash`. An assistant learns from the same answers and from other rows, FOLDER/assistant/taps, and is in
FOLDER/assistant, for `--strategy mtp`. Every stage goes on where it was stopped, and does nothing if it is done. More
--tokens or --visits continue a finished one. Heads are for Llama-like targets with SwiGLU; biases and q/k norms of the
target's layers are left out.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser

import specker
from specker.checkpoints.buffers import served
from specker.checkpoints.checkpoint import Opened, opened
from specker.checkpoints.checkpoint import read as read_checkpoint
from specker.command.exits import run_cli
from train import corpus
from train.head import taps
from train.head.assistant import Reader, source_of
from train.head.blocks import Blocks
from train.head.chained import HEADS
from train.head.eagle import MOST, Head
from train.head.export import LAYOUTS, default_taps, export, export_blocks, export_reader
from train.head.fit import Recipe, Training, kept_ids, put_weights
from train.head.net import Net

BLOCKS = ("dflash", *HEADS)  # kinds of drafters of blocks
KINDS = ("eagle3", *BLOCKS, "assistant")
LONGEST = 64  # rows of a block
STAGES = ("answers", "taps", "train", "export")


@dataclass
class Args:
    target: str = field(metadata={"help": "checkpoint of the target: a folder, a GGUF file or a hub id"})
    out: str = field(metadata={"help": "folder of all that is written"})
    stages: list[str] = field(default_factory=lambda: [*STAGES], metadata={"help": f"of {', '.join(STAGES)}"})
    kind: str = field(default=KINDS[0], metadata={"help": f"of head: {', '.join(KINDS)}"})
    prompts: str = field(default="", metadata={"help": "JSON lines with `prompt` or `turns`: questions to answer"})
    tokens: int = field(default=2_000_000, metadata={"help": "tokens of answers to write"})
    visits: int = field(default=8_000_000, metadata={"help": "positions to train on, over all epochs"})
    taps: list[int] = field(
        default_factory=list, metadata={"help": "depths of the target that the head reads (default: 2, n / 2, n - 3)"}
    )
    rows: int = field(default=8192, metadata={"help": "rows of an EAGLE-3 head's LM head; an assistant's in training"})
    layout: str = field(default="flat", metadata={"help": f"of the exported folder: {' or '.join(LAYOUTS)}"})
    batch: int = field(default=1024, metadata={"help": "positions of a training step"})
    length: int = field(default=512, metadata={"help": "positions of a window"})
    steps: int = field(default=3, metadata={"help": "unrolled steps of an EAGLE-3 head or an assistant"})
    block: int = field(default=8, metadata={"help": "one more than the tokens that a block drafts"})
    layers: int = field(default=2, metadata={"help": "layers of a drafter of blocks or an assistant"})
    rank: int = field(default=64, metadata={"help": "of a DSpark drafter's Markov head or a Domino drafter's GRU"})
    lr: float = field(default=3e-3, metadata={"help": "learning rate of the norms and tables"})
    muon: float = field(default=6e-3, metadata={"help": "learning rate of the matrices"})
    bfloat16: bool = field(
        default=False, metadata={"help": "train in bfloat16 (for CPUs with AVX-512's or AMX's bfloat16)"}
    )
    max_new_tokens: int = field(default=256, metadata={"help": "longest answer"})
    max_context: int = field(default=2048, metadata={"help": "longest conversation"})
    batch_size: int = field(default=16, metadata={"help": "conversations written at once"})
    device: str = field(default="cpu", metadata={"help": "cpu, or cuda for all stages on a GPU"})
    threads: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for stage in self.stages:
            if stage not in STAGES:
                raise ValueError(f"--stages must be of {', '.join(STAGES)}, got {stage!r}")
        if self.device != "cpu" and not (self.device == "cuda" and torch.cuda.is_available()):
            raise ValueError(f"--device must be cpu, or cuda where torch finds a GPU; got {self.device!r}")
        if self.kind not in KINDS:
            raise ValueError(f"--kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.kind != "eagle3" and self.layout != LAYOUTS[0]:
            raise ValueError(f"--layout {self.layout} is for --kind eagle3: other kinds have one layout each")
        if self.kind == "assistant" and self.taps:
            raise ValueError("--taps does not apply to --kind assistant, which reads one layer's K and V")
        if self.layout not in LAYOUTS:
            raise ValueError(f"--layout must be {' or '.join(LAYOUTS)}, got {self.layout!r}")
        for name in ("tokens", "visits", "rows", "batch", "length", "steps", "layers", "rank", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.steps > MOST:
            raise ValueError(f"--steps must be at most {MOST}, got {self.steps}")
        if not 2 <= self.block <= LONGEST:
            raise ValueError(f"--block must be between 2 and {LONGEST}, got {self.block}")

    @property
    def folder(self) -> Path:
        return Path(self.out)

    @property
    def own(self) -> Path:
        """The folder of the head, its training and its log."""
        return self.folder if self.kind == "eagle3" else self.folder / self.kind

    @property
    def rows_in(self) -> Path:
        """The folder of the target's rows. An assistant reads others than heads do."""
        return (self.own if self.kind == "assistant" else self.folder) / "taps"

    @property
    def shards(self) -> list[Path]:
        """The texts. Raises ValueError if there are none."""
        if not (found := sorted((self.folder / "answers").glob("*.npz"))):
            raise ValueError(f"{self.folder / 'answers'} has no texts: run the stage answers first")
        return found


def questions(path: str) -> list[dict[str, Any]]:
    """The prompts of a file as objects with `turns`, without those of bench/spec_bench.jsonl. Raises ValueError."""
    if not path:
        return []
    tests = {turn for line in corpus.HELD_OUT.read_text("utf-8").splitlines() for turn in json.loads(line)["turns"]}
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            first = row["turns"][0] if "turns" in row else row["prompt"]
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{path} line {number}: expected a JSON object with `prompt` or `turns`") from None
        if first not in tests:
            found.append({"turns": [first]})
    return found


def write_answers(args: Args) -> None:
    engine = specker.load(
        args.target, strategy="ar", device=args.device, batch_size=args.batch_size, max_context=args.max_context
    )
    how = {name: getattr(args, name) for name in ("target", "tokens", "max_new_tokens", "batch_size", "max_context")}
    corpus.write(engine, questions(args.prompts), corpus.Args(out=str(args.folder / "answers"), **how))


def depths(args: Args, target: Opened) -> tuple[int, ...]:
    """The depths that the head reads. Raises ValueError."""
    total = target.config.num_layers
    if args.kind == "assistant":
        return (source_of(target.config),)
    found = tuple(args.taps) or default_taps(total)
    if list(found) != sorted(set(found)) or not 1 <= found[0] <= found[-1] <= total:
        raise ValueError(
            f"--taps must ascend within 1 to {total}, the target's layers, got {' '.join(map(str, found))}"
        )
    return found


def trained(args: Args, target: Opened) -> tuple[Net, taps.Lessons]:
    """The head as it starts, and its lessons. Raises ValueError if the target's rows are not there."""
    folder, shards = args.rows_in, args.shards
    if missing := [path.stem for path in shards if not (folder / f"{path.stem}.rows.npy").exists()]:
        raise ValueError(f"{folder} lacks the target's rows of {missing[0]}: run the stage taps first")
    read = depths(args, target)
    taps.check(folder, target, read)
    beyond = args.block - 1 if args.kind in BLOCKS else args.steps
    lessons = taps.Lessons(shards, folder, args.length, beyond)
    dense = read_checkpoint(target, dtype=torch.float32, device="cpu", quantize="none", pack=False)
    counts = lessons.counts(target.config.vocab_size)
    if args.kind in BLOCKS:
        return Blocks(dense, read, int(counts.argmin()), beyond, args.layers, args.kind, args.rank), lessons
    ids = kept_ids(args.own / "state.pt", counts, args.rows)
    if args.kind == "assistant":
        return Reader(dense, ids, args.steps, args.layers), lessons
    return Head(dense, read, ids, args.steps), lessons


def run(args: Args) -> int:
    """Run the stages. Raises ValueError with a sentence for the user."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.own.mkdir(parents=True, exist_ok=True)
    if "answers" in args.stages:
        write_answers(args)
    target = opened(args.target, max_context=args.max_context)
    if "taps" in args.stages:
        dtype = torch.bfloat16 if args.device == "cuda" or served(target.config) else torch.float32
        taps.write(args.shards, args.rows_in, target, depths(args, target), dtype, args.device)
    if not {"train", "export"} & {*args.stages}:
        return 0
    head, lessons = trained(args, target)
    if "train" in args.stages:
        size = sum(p.numel() for p in head.parameters())
        print(f"{size:,} parameters, {lessons.tokens:,} tokens of text", flush=True)
        own = ("visits", "batch", "length", "lr", "muon", "bfloat16", "seed")
        Training(head, lessons, Recipe(**{name: getattr(args, name) for name in own}), args.own, args.device).fit()
    if "export" in args.stages:
        best = args.own / "best.pt"
        if not best.exists():
            raise ValueError(f"{args.own} has no trained head: run the stage train first")
        put_weights(head.cpu(), torch.load(best, map_location="cpu", weights_only=True), best)
        out = args.own / ("head" if args.layout == "flat" else f"head-{args.layout}")
        if isinstance(head, Head):
            export(head, target.folder, out, args.layout, args.target)
        elif isinstance(head, Reader):
            how = {"dtype": torch.float32, "device": "cpu", "quantize": "none", "pack": False, "layers": False}
            whole = read_checkpoint(target, **how).weights.head  # type: ignore[arg-type]
            assert isinstance(whole, torch.Tensor)
            export_reader(head, target.folder, whole, out)
        else:
            assert isinstance(head, Blocks)
            export_blocks(head, target.folder, out)
        print(f"the head is in {out}", flush=True)
    return 0


def main() -> int:
    return run_cli(lambda: run(HfArgumentParser(Args).parse_args_into_dataclasses()[0]))


if __name__ == "__main__":
    sys.exit(main())
