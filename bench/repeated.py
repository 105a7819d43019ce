"""Requests that repeat what was said before, as agents send them: `python bench/repeated.py --help`.

    python bench/repeated.py                                   # Qwen2.5-Coder 0.5B, ten edits of one file, asked twice
    python bench/repeated.py --model smollm2 --traffic questions --count 8

Each engine has a process of its own (bench/peer.py) that keeps what it learns from request to request; they take turns
at every request, and only one computes at a time. The first pass asks everything once, the second the same again:

* `edits`: ten changes of one file, each answered with the whole file;
* `tools`: the output of a failed test run, with five questions, two of them twice;
* `questions`: Spec-Bench; `coder`: bench/coder_prompts.jsonl. No two of these are alike.

`private` is `--lookup-share off`: its drafts copy from the request alone. llama.cpp's ngram-simple copies from the
request, too, and ngram-mod from all requests of its server. Reported for each pass: tokens/s of decoding, as the engine
says; the same over `private`; tokens a round; seconds of whole requests; and how many answers are those of `private`.

The limit is arithmetic: on two cores, a pass over 17 rows of the 0.5B takes three times as long as one over one row, so
that copies which are all right decode at most 6 times as fast as plain steps.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

from bench import llama_server
from bench.peer_settings import HERE, SPECULATION, last_line
from bench.processes import Ended, Process
from specker.checkpoints.checkpoint import read_config, read_tokenizer
from specker.zoo import real

MODELS = {"coder-0.5b": "draft", "coder-1.5b": "target", "smollm2": ""}  # of real.CODER
TRAFFIC = "edits", "tools", "questions", "coder"
FILE = '''\
"""A small store of notes on disk."""

import json
import os
import time


class Note:
    """A note with a title, a text and tags."""

    def __init__(self, title, text, tags=None):
        self.title = title
        self.text = text
        self.tags = tags or []
        self.created = time.time()

    def to_dict(self):
        return {"title": self.title, "text": self.text, "tags": self.tags, "created": self.created}


class Store:
    """All notes of a folder, one file each."""

    def __init__(self, folder):
        self.folder = folder
        os.makedirs(folder, exist_ok=True)

    def path(self, title):
        return os.path.join(self.folder, title + ".json")

    def save(self, note):
        with open(self.path(note.title), "w") as f:
            json.dump(note.to_dict(), f)

    def load(self, title):
        with open(self.path(title)) as f:
            data = json.load(f)
        note = Note(data["title"], data["text"], data["tags"])
        note.created = data["created"]
        return note

    def titles(self):
        names = [name for name in os.listdir(self.folder) if name.endswith(".json")]
        return sorted(name[:-5] for name in names)

    def search(self, word):
        found = []
        for title in self.titles():
            note = self.load(title)
            if word in note.text or word in note.title:
                found.append(note)
        return found

    def delete(self, title):
        os.remove(self.path(title))
'''
EDITS = (
    "Rename the method `titles` of Store to `all_titles`.",
    "Add a method `exists(title)` to Store.",
    "Make `search` ignore upper and lower case.",
    "Let `delete` return False if there is no such note, and True otherwise.",
    "Write JSON with an indent of 2.",
    "Add a method `with_tag(tag)` to Store that returns the notes with this tag.",
    "Add docstrings to `save` and `load`.",
    "Replace os.path.join by pathlib.",
    "Add a method `count` to Store that returns the number of notes.",
    "Open all files with encoding utf-8.",
)
OUTPUT = """\
$ pytest -q
FAILED tests/test_store.py::test_save - PermissionError: [Errno 13] Permission denied: '/var/notes/a.json'
FAILED tests/test_store.py::test_search_case - AssertionError: assert [] == ['Shopping list']
FAILED tests/test_store.py::test_delete_missing - FileNotFoundError: [Errno 2] No such file or directory: 'none.json'
3 failed, 14 passed in 0.82s
"""
ASKED = (
    "List each failing test with its file and its error.",
    "Write a JSON array with an object for each failure: test, file, error, message.",
    "Which tests fail, and why? Quote the lines.",
    "Write the failures as a Markdown table with the columns test, error and message.",
    "List each failing test with its file and its error, the last one first.",
)


@dataclass(frozen=True)
class Args:
    model: str = field(default="coder-0.5b", metadata={"help": f"one of {', '.join(MODELS)}"})
    traffic: str = field(default="edits", metadata={"help": f"one of {', '.join(TRAFFIC)}"})
    count: int = field(default=10, metadata={"help": "the first so many requests"})
    passes: int = field(default=2, metadata={"help": "how often they are asked"})
    max_new_tokens: int = field(default=0, metadata={"help": "default: 768 for edits, otherwise 192"})
    max_context: int = 2048
    threads: int = 2
    only: str = field(default="", metadata={"help": "comma-separated parts of names: only these, and private"})
    draft: bool = field(default=False, metadata={"help": "of coder-1.5b: strategies with the 0.5B as a draft"})


def chats(traffic: str) -> list[str]:
    """What the user asks."""
    if traffic == "edits":
        return [f"{edit} Answer with the whole code and nothing else.\n\n```python\n{FILE}```" for edit in EDITS]
    if traffic == "tools":
        return [f"{asked}\n\n```\n{OUTPUT}```" for asked in (*ASKED, *ASKED[:2])]
    file = "spec_bench.jsonl" if traffic == "questions" else "coder_prompts.jsonl"
    rows = [json.loads(line) for line in (HERE / file).read_text(encoding="utf-8").splitlines()]
    return [
        row["turns"][0] if "turns" in row else row["prompt"] for row in rows[:: 10 if traffic == "questions" else 1]
    ]


def settings(args: Args, target: str, draft: str | None) -> dict[str, dict[str, Any]]:
    """For each engine, what bench/peer.py is given. Raises CalledProcessError if llama-server cannot be built."""
    shared = {"target": target, "threads": args.threads, "context": args.max_context}
    strategy: dict[str, Any] = (
        {"strategy": "vocabtrim+lookup", "draft": draft} if args.draft else {"strategy": "lookup"}
    )
    strategy["prefix_cache"] = "off"  # llama.cpp computes every prompt, too
    found: dict[str, dict[str, Any]] = {"private": {"options": {**strategy, "lookup_share": "off"}}}
    found |= {"shared": {"options": strategy}, "ar": {"options": {"strategy": "ar", "prefix_cache": "off"}}}
    found = {name: {**shared, "engine": "specker", **own} for name, own in found.items()}
    for name in ("plain", "ngram-simple", "ngram-mod"):
        found[f"llama.cpp {name}"] = {**shared, "engine": "llama_server", "fresh": False}
    parts = [part for part in args.only.split(",") if part]
    found = {n: own for n, own in found.items() if n == "private" or not parts or any(part in n for part in parts)}
    for name, own in found.items():
        if own["engine"] == "llama_server":
            flags = ["--model", target, *SPECULATION[name.removeprefix("llama.cpp ")]]
            own |= {"program": str(llama_server.server()), "version": llama_server.VERSION, "flags": flags}
    return found


def measure(args: Args, ways: dict[str, dict[str, Any]], prompts: list[list[int]]) -> None:
    count = args.max_new_tokens or (768 if args.traffic == "edits" else 192)
    with tempfile.TemporaryDirectory() as folder:
        running: dict[str, Process] = {}
        try:
            for name, own in ways.items():
                file = Path(folder) / f"{name}.json"
                file.write_text(json.dumps(own))
                command, log = [sys.executable, HERE / "peer.py", file], Path(folder) / f"{name}.log"
                running[name] = Process(command, log, OMP_NUM_THREADS=str(args.threads))
                print(f"{name}: {running[name].ask()['ready']}", flush=True)
                running[name].ask({"ids": prompts[0][:32], "count": 4})  # warm up
            order = list(running)
            for n in range(args.passes):
                answers: dict[str, list[dict[str, Any]]] = {name: [] for name in running}
                for ids in prompts:
                    for name in order:
                        answers[name].append(running[name].ask({"ids": ids, "count": count}))
                    order = order[1:] + order[:1]
                show(f"{args.model}, {len(prompts)} {args.traffic}, pass {n + 1}", answers)
        except Ended as error:
            sys.exit(f"bench: an engine ends: {error}")
        finally:
            for process in running.values():
                process.end()


def show(title: str, answers: dict[str, list[dict[str, Any]]]) -> None:
    table = Table(title=title)
    for column in ("engine", "tokens/s", "over private", "tokens a round", "seconds", "answers of private"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    private = answers["private"]
    base = decoding(private)
    for name, each in answers.items():
        speed = decoding(each)
        lengths = [(len(a["tokens"]), a["report"]["acceptance_length"]) for a in each]
        a_round = sum(n for n, _ in lengths) / sum(n / length for n, length in lengths)
        whole = sum(a["seconds"] for a in each)
        equal = sum(a["tokens"] == b["tokens"] for a, b in zip(each, private, strict=True))
        numbers = f"{speed:.1f}", f"{speed / base:.2f}", f"{a_round:.2f}", f"{whole:.2f}"
        table.add_row(name, *numbers, f"{equal} of {len(each)}")
    Console(width=100).print(table)


def decoding(answers: list[dict[str, Any]]) -> float:
    """Tokens/s after the prompts."""
    counts = [len(answer["tokens"]) for answer in answers]
    seconds = [n / a["report"]["own_decode_tokens_per_second"] for n, a in zip(counts, answers, strict=True)]
    return sum(counts) / sum(seconds)


def main() -> None:
    args = HfArgumentParser(Args).parse_args_into_dataclasses()[0]
    if args.model not in MODELS or args.traffic not in TRAFFIC:
        sys.exit(f"bench: --model is one of {', '.join(MODELS)}, --traffic one of {', '.join(TRAFFIC)}")
    try:
        kind = MODELS[args.model]
        target = str(real.fetched((real.CODER[kind],))[0]) if kind else str(real.file())
        draft = str(real.fetched((real.CODER["draft"],))[0]) if args.draft else None
        ways = settings(args, target, draft)
    except subprocess.CalledProcessError as error:
        sys.exit(f"bench: llama-server cannot be built: {last_line(error)}")
    except (ValueError, OSError) as error:
        sys.exit(f"bench: {error}")
    eos, tokenizer = sorted(read_config(target).eos_ids), read_tokenizer(target)
    for own in ways.values():
        own["eos"] = eos
    prompts = []
    for text in chats(args.traffic)[: args.count]:
        chat = [{"role": "user", "content": text}]
        prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"][:1200])
    measure(args, ways, prompts)


if __name__ == "__main__":
    main()
