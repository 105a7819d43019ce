"""Text that a chat model writes itself, on which its drafts are trained.

    python train/corpus.py --target DIR --questions spec_bench_questions.jsonl --out corpus

Half of the conversations start from a question of the training split (`training`), the other half from a question that
the target wrote: given the chat template up to the user's turn, it continues with a plausible one (Magpie, arXiv
2406.08464). Without questions, the target writes all of them. A target without a chat template continues the questions,
and writes none. Answers are drawn at temperatures 0, 0.7 and 1 in turn.
Conversation k depends on k alone, so the script may be stopped at any time: it continues with the conversations that no
shard holds.

A shard is a .npz file: ids [n] of all its conversations, uint16 or, for a larger vocabulary, int32; ends [m] int64,
answers [m] int64 (index within the conversation at which the answer starts), index [m] int64 (k).
"""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import HfArgumentParser

import specker
from specker.options import Params
from specker.runtime.engine import Engine

HELD_OUT = Path(__file__).parents[1] / "bench" / "spec_bench.jsonl"
SHARD = 64  # conversations
TEMPERATURES = (0.0, 0.7, 1.0)
USER_TOKENS = 96  # longest question that the target writes


@dataclass
class Args:
    target: str = field(metadata={"help": "checkpoint of the chat model"})
    out: str = field(metadata={"help": "folder of the shards"})
    questions: str = field(
        default="", metadata={"help": "Spec-Bench's questions, one JSON object with `turns` a line; default: none"}
    )
    tokens: int = field(default=1_000_000, metadata={"help": "stop at this many answer tokens"})
    max_new_tokens: int = 256
    batch_size: int = 16
    max_context: int = 2048
    threads: int = 2


def training(questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The questions that are not held out: bench/spec_bench.jsonl has every fourth."""
    held = {json.loads(line)["question_id"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()}
    return [question for question in questions if question["question_id"] not in held]


@dataclass(eq=False)
class Writer:
    engine: Engine
    questions: list[dict[str, Any]]
    args: Args
    kept: dict[int, tuple[list[int], int]] = field(default_factory=dict)  # k -> (ids, start of the answer)
    starts: dict[Any, int] = field(default_factory=dict)  # request -> length of its prompt
    asks: set[Any] = field(default_factory=set)  # requests that write a question

    @property
    def chats(self) -> bool:
        return bool(getattr(self.engine.tokenizer, "chat_template", None))

    def chat(self, question: str) -> list[int]:
        return self.engine.encode_chat([{"role": "user", "content": question}])

    def before_question(self) -> list[int]:
        """The template's tokens up to the user's words."""
        ids = self.chat("\x00")
        text = self.engine.tokenizer.decode(ids).split("\x00")[0]
        return self.engine.encode(text)

    def request(self, k: int) -> Any:
        """The first request of conversation k."""
        if not self.chats:
            return self.answer(k, self.engine.encode(self.questions[k % len(self.questions)]["turns"][0]))
        n, of = divmod(k, 2)
        if of == 0 and n < 3 * len(self.questions):
            question = self.questions[n % len(self.questions)]["turns"][0]
            return self.answer(k, self.chat(question))
        request = self.made(k, self.before_question(), max_new_tokens=USER_TOKENS, temperature=1.0)
        self.asks.add(request)
        return request

    def answer(self, k: int, prompt: list[int]) -> Any:
        prompt = prompt[-(self.args.max_context - self.args.max_new_tokens) :]
        temperature = TEMPERATURES[(k // 2 + k // (2 * max(1, len(self.questions)))) % len(TEMPERATURES)]
        return self.made(k, prompt, max_new_tokens=self.args.max_new_tokens, temperature=temperature)

    def made(self, k: int, prompt: list[int], **options: Any) -> Any:
        return self.engine.session.request(prompt, Params.of(seed=k, **options), index=k, reads=False)

    def finish(self, request: Any) -> Any | None:
        """Keep a finished answer; after a finished question return the request for its answer."""
        k, ids = request.index, request.token_ids
        if request not in self.asks:
            self.kept[k] = ids, self.starts.pop(request)
            return None
        self.asks.discard(request)
        start = self.starts.pop(request)
        question = self.engine.decode(ids[start:]).strip()
        return self.answer(k, self.chat(question)) if len(question) > 8 else None


def save(out: Path, kept: dict[int, tuple[list[int], int]]) -> None:
    index = sorted(kept)
    ids = np.concatenate([np.array(kept[k][0], np.int32) for k in index])
    ids = ids.astype(np.uint16) if ids.max() < 1 << 16 else ids
    ends = np.cumsum([len(kept[k][0]) for k in index])
    path = out / f"{index[0]:07d}.npz"
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, ids=ids, ends=ends, answers=[kept[k][1] for k in index], index=index)
    part.rename(path)


def read(out: Path) -> list[tuple[int, list[int], int]]:
    """All conversations of the shards in `out`: (k, ids, start of the answer)."""
    found = []
    for path in sorted(out.glob("*.npz")):
        with np.load(path) as shard:
            each = np.split(shard["ids"], shard["ends"][:-1])
            for k, ids, start in zip(shard["index"], each, shard["answers"], strict=True):
                found.append((int(k), ids.tolist(), int(start)))
    return found


def write(engine: Engine, questions: list[dict[str, Any]], args: Args) -> None:
    """Write conversations until the shards in `args.out` hold `args.tokens` tokens of answers. `questions`: objects
    with `turns`, of which the first one is asked. Raises ValueError for a target without a chat template if there are
    none."""
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    done = read(out)
    seen = {k for k, _, _ in done}
    tokens = sum(len(ids) - start for _, ids, start in done)
    if tokens >= args.tokens:
        return
    writer = Writer(engine, questions, args)
    if not writer.chats and not questions:
        raise ValueError(f"{args.target} has no chat template, so it writes no questions: give some to continue")
    k = 0

    def more() -> Any:
        nonlocal k
        while k in seen:
            k += 1
        request = writer.request(k)
        k += 1
        return request

    stream = engine.session.stream()

    def push(request: Any) -> None:
        writer.starts[request] = len(request.token_ids)
        stream.submit(request)

    for _ in range(args.batch_size + 2):
        push(more())
    start, first = time.perf_counter(), tokens
    for event in stream:
        request = event.request
        if not request.finished:
            continue
        tokens += 0 if request in writer.asks else len(request.token_ids) - writer.starts[request]
        if (answer := writer.finish(request)) is not None:
            push(answer)
        elif tokens < args.tokens:
            push(more())
        if len(writer.kept) >= SHARD:
            save(out, writer.kept)
            writer.kept.clear()
            speed = (tokens - first) / (time.perf_counter() - start)
            print(f"{tokens:,} answer tokens, {speed:.0f} a second", flush=True)
    if writer.kept:
        save(out, writer.kept)


def main() -> None:
    (args,) = HfArgumentParser(Args).parse_args_into_dataclasses()
    torch.set_num_threads(args.threads)
    lines = Path(args.questions).read_text(encoding="utf-8").splitlines() if args.questions else []
    questions = training([json.loads(line) for line in lines])
    engine = specker.load(args.target, strategy="ar", batch_size=args.batch_size, max_context=args.max_context)
    write(engine, questions, args)


if __name__ == "__main__":
    main()
