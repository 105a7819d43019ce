"""Greedy decoding beside the engines that people use on a CPU: `make peers`, or `python bench/peers.py --help`.

    python bench/peers.py                   # SmolLM2-135M on Spec-Bench questions, beside five other engines
    python bench/peers.py --model coder     # Qwen2.5-Coder 1.5B with a draft of 0.5B, beside llama.cpp's speculation

Models come from specker/zoo/real.py. The coder pair completes functions, edits code and chats (coder_prompts.jsonl),
with a row for each of these. Every engine has a process and an environment of its own (bench/peer.py; what it is given:
bench/peer_settings.py) and gets the same prompts as token ids, the same number of threads and stop ids. The engines
take turns at every prompt, and only one computes at a time. No engine keeps a prompt.

Reported for each engine: tokens/s of whole requests; tokens/s after the first token, from the difference to a request
of one token; milliseconds to the first token, and prompt tokens/s until then; the median ratio, over requests, to a
base (transformers' float32 `generate`, or plain llama.cpp); and in how many prompts its tokens are those of plain
decoding here. Rows also hold the acceptance length, and the rates that specker and llama-server report themselves. An
engine that cannot be installed or run has a row with the reason. llama.cpp is built from its source for this machine.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import harness
from bench.peer_settings import HERE, MODELS, PACKAGES, Model, installed, last_line
from bench.processes import Ended, Process
from specker.checkpoints.checkpoint import read_config, read_tokenizer


@dataclass(frozen=True)
class Args:
    model: str = field(default="smollm2", metadata={"help": f"one of {', '.join(MODELS)}"})
    questions: int | None = field(
        default=None,
        metadata={"help": "number of questions, the first of each category in turn; default: 8, of coder 24"},
    )
    categories: str = field(default="", metadata={"help": "comma-separated: only questions of these categories"})
    max_new_tokens: int | None = field(default=None, metadata={"help": "default: 64, of coder 96"})
    max_context: int = 2048
    rounds: int = 3
    threads: int = 2
    only: str = field(default="", metadata={"help": "comma-separated parts of names: only these engines"})
    save: bool = harness.save_flag()


@dataclass(eq=False)
class Peer:
    """A running engine."""

    name: str
    process: Process | None
    version: str = ""
    whole: list[float] = field(default_factory=list)  # seconds of each request, round by round
    first: list[float] = field(default_factory=list)  # seconds of the same requests with one token
    tokens: list[list[int]] = field(default_factory=list)  # of each prompt, from the last round
    reports: list[dict[str, float]] = field(default_factory=list)  # what the engine says of each request in `whole`
    reason: str = ""  # why it does not run

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request; {} if the engine ends, with the end of its log as the reason."""
        assert self.process is not None
        try:
            return self.process.ask(request or None)
        except Ended as error:
            self.reason = str(error)
            return {}

    def on(self, prompts: Sequence[int]) -> "Peer":
        """The same engine with the requests of some prompts."""
        count = len(self.tokens)
        at = [n for n in range(len(self.whole)) if n % count in prompts]
        chosen = {name: [getattr(self, name)[n] for n in at] for name in ("whole", "first", "reports")}
        return replace(self, tokens=[self.tokens[n] for n in prompts if n < count], **chosen)

    def end(self) -> None:
        if self.process is not None:
            self.process.end()


def started(name: str, settings: Any, folder: Path, args: Args) -> Peer:
    """Start an engine and wait until it has loaded the model. One that fails has a reason."""
    try:
        own = settings()
        python = installed(own["engine"]) if own["engine"] in PACKAGES else Path(sys.executable)
    except subprocess.CalledProcessError as error:
        return Peer(name, None, reason=f"not installed or not converted: {last_line(error)}")
    file = folder / f"{name}.json"
    file.write_text(json.dumps(own))
    env = {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
    peer = Peer(name, Process([python, HERE / "peer.py", file], folder / f"{name}.log", **env))
    peer.version = peer.ask().get("ready", "")
    return peer


def settings_of(model: Model, args: Args) -> dict[str, Any]:
    """For each configuration that `args` asks for, a function that makes peer.py's settings."""
    shared = {"target": model.target, "threads": args.threads, "context": args.max_context}
    shared["eos"] = sorted(read_config(model.target).eos_ids)
    parts = [part for part in args.only.split(",") if part]
    always = model.base, model.reference
    kept = {n: w for n, w in model.ways.items() if n in always or not parts or any(part in n for part in parts)}
    return {n: (lambda w=w: {**shared, **(w() if callable(w) else w)}) for n, w in kept.items()}


def prompts_of(model: Model, args: Args) -> dict[str, list[list[int]]]:
    """Token ids of the questions by category: the first of every category, then the second, and so on."""
    rows = [json.loads(line) for line in model.questions.read_text(encoding="utf-8").splitlines()]
    if args.categories:
        rows = [row for row in rows if row["category"] in args.categories.split(",")]
    seen: dict[str, int] = {}
    for row in rows:
        row["place"] = seen[row["category"]] = seen.get(row["category"], 0) + 1
    rows = sorted(rows, key=lambda row: row["place"])[: args.questions or model.asked]
    tokenizer = read_tokenizer(model.target)
    room = args.max_context - (args.max_new_tokens or model.new_tokens) - 16
    found: dict[str, list[list[int]]] = {}
    for row in rows:
        if "prompt" in row:
            ids = tokenizer(row["prompt"])["input_ids"]
        else:
            chat = [{"role": "user", "content": row["turns"][0]}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        found.setdefault(row["category"] if model.apart else args.categories, []).append(ids[-room:])
    return found


def measure(peers: list[Peer], prompts: list[list[int]], count: int, args: Args) -> None:
    """All requests, each for one token and for `count`. The engines take turns at every prompt; the order rotates."""
    order = [peer for peer in peers if not peer.reason]
    for n in range(-1, args.rounds):  # the first round warms up, with one prompt
        for at, ids in enumerate(prompts if n >= 0 else prompts[:1]):
            for peer in order:
                both = [peer.ask(ids=ids, count=new) for new in (1, count) if not peer.reason]
                if n < 0 or peer.reason:
                    continue
                peer.first.append(both[0]["seconds"])
                peer.whole.append(both[1]["seconds"])
                peer.tokens[at : at + 1] = [both[1]["tokens"]]
                peer.reports.append(both[1].get("report", {}))
            order = [peer for peer in order[1:] + order[:1] if not peer.reason]
        print(f"round {n + 1} of {args.rounds}", flush=True)


def row_of(peer: Peer, base: Peer, reference: Peer, about: dict[str, Any]) -> dict[str, Any]:
    row = about | {"way": peer.name, "version": peer.version}
    if peer.reason:
        return row | {"reason": peer.reason}
    rounds = len(peer.whole) // len(peer.tokens)
    prompts, counts = about["prompt_tokens"] * rounds, [len(t) for t in peer.tokens] * rounds
    speeds = [n / s for n, s in zip(counts, peer.whole, strict=True)]
    basis = [len(t) for t in base.tokens] * rounds
    ratios = [v / (n / s) for v, n, s in zip(speeds, basis, base.whole, strict=True)]
    later = [(n - 1) / (w - f) for n, w, f in zip(counts, peer.whole, peer.first, strict=True) if n > 1 and w > f]
    if later:  # with few tokens an interruption of the first one can hide all others
        row["decode_tokens_per_second"] = statistics.median(later)
    return row | {
        "tokens_per_second": statistics.median(speeds),
        "first_token_ms": 1000 * statistics.median(peer.first),
        "prefill_tokens_per_second": statistics.median(n / s for n, s in zip(prompts, peer.first, strict=True)),
        **{name: statistics.median(report[name] for report in peer.reports) for name in peer.reports[0]},
        "over_base": {
            "median": statistics.median(ratios),
            **{f"p{q}": harness.quantile(ratios, q / 100) for q in (20, 80)},
        },
        "equal_texts": sum(a == b for a, b in zip(peer.tokens, reference.tokens, strict=True)),
        "texts": len(peer.tokens),
    }


def show(rows: list[dict[str, Any]]) -> None:
    about = rows[0]
    table = Table(title=f"greedy, interleaved {about['categories']}")
    columns = ("tokens/s", "after the first", "first, ms", "prompt tokens/s", "acceptance length")
    for column in ("engine", "version", *columns, f"over {about['base']}", "equal texts"):
        table.add_column(column, justify="left" if column in ("engine", "version") else "right")
    for row in rows:
        if "reason" in row:
            table.add_row(row["way"], row["version"], row["reason"])
            continue
        decoding = row.get("decode_tokens_per_second")
        speeds = f"{row['tokens_per_second']:.1f}", "" if decoding is None else f"{decoding:.1f}"
        ratio = "{median:.2f} ({p20:.2f}-{p80:.2f})".format(**row["over_base"])
        prompt = f"{row['first_token_ms']:.0f}", f"{row['prefill_tokens_per_second']:.0f}"
        accepted = f"{row['acceptance_length']:.2f}" if "acceptance_length" in row else ""
        equal = f"{row['equal_texts']} of {row['texts']}"
        table.add_row(row["way"], row["version"], *speeds, *prompt, accepted, ratio, equal)
    Console(width=150).print(table)


def main() -> None:
    args = harness.arguments(Args)
    if args.model not in MODELS:
        sys.exit(f"bench: --model is {args.model}; there are {', '.join(MODELS)}")
    try:
        model = MODELS[args.model]()
    except subprocess.CalledProcessError as error:
        sys.exit(f"bench: llama-server cannot be built: {last_line(error)}")
    except (ValueError, OSError) as error:
        sys.exit(f"bench: {error}")
    count = args.max_new_tokens or model.new_tokens
    asked = prompts_of(model, args)
    with tempfile.TemporaryDirectory() as folder:
        peers: list[Peer] = []
        try:
            for name, settings in settings_of(model, args).items():
                peers.append(started(name, settings, Path(folder), args))
                print(name, peers[-1].version or peers[-1].reason, flush=True)
            measure(peers, [ids for prompts in asked.values() for ids in prompts], count, args)
        finally:
            for peer in peers:
                peer.end()
    named = {peer.name: peer for peer in peers}
    if failed := [name for name in (model.base, model.reference) if named[name].reason]:
        sys.exit(f"bench: {failed[0]} does not run: {named[failed[0]].reason}")
    start, rows = 0, []
    for categories, prompts in asked.items():
        about = {"bench": "peers", "target": model.name, "prompts": len(prompts), "max_new_tokens": count}
        about |= {"prompt_tokens": [len(p) for p in prompts], "threads": args.threads, "categories": categories}
        about |= {"base": model.base, "reference": model.reference}
        at = range(start, start := start + len(prompts))
        base, reference = named[model.base].on(at), named[model.reference].on(at)
        new = [row_of(peer if peer.reason else peer.on(at), base, reference, about) for peer in peers]
        show(new)
        rows += new
    if args.save:
        print(harness.save("peers", rows, "cpu"))


if __name__ == "__main__":
    main()
