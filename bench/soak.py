"""Does `specker serve` survive an hour of clients that misbehave? `python bench/soak.py --minutes 60`.

A server of the bundled model (or `--target`) gets requests of eight clients: whole and streamed answers, several texts,
greedy and sampled, with JSON schemas, with a salt, so that `lookup` keeps their texts, and without; clients that leave
while their request waits, is prefilled or decoded; readers that pause; bodies that are no JSON, too large or refused.
It fails (exit code 1) if a request is lost, if the same request gets another text, if an answer is another error than
expected, if a K/V page is held at the end, or if memory grew by more than `--growth` percent in the second half of the
time: a leak goes on, while pools fill up once. A row holds the counts, the memory and how much of it texts of `lookup`
take.
"""

import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import psutil

from bench import harness

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
PROMPTS = ("def add(a, b):", "import os\n\nfor name in ", "class Stack:\n", "x = [", "# sort a list\n", "return ")


@dataclass(frozen=True)
class Args:
    minutes: float = 60.0
    clients: int = 8
    target: str = field(default="", metadata={"help": "default: the bundled model"})
    strategy: str = field(default="", metadata={"help": "default: the server's"})
    batch_size: int = 4
    growth: float = field(default=1.0, metadata={"help": "percent that memory may grow by in the second half"})
    seed: int = 0
    save: bool = harness.save_flag()


class Soak:
    def __init__(self, url: str):
        self.url, self.counts, self.texts = url, Counter[str](), dict[str, Any]()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def client(self, seed: int, end: float) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.url, timeout=3600) as http:
            while time.monotonic() < end and len(self.wrong) < 20:
                kind = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
                try:
                    outcome = KINDS[kind][1](self, http, rng)
                except Exception as error:
                    outcome = ""
                    self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
                with self._lock:
                    self.counts[f"{kind}{outcome and ': '}{outcome}"] += 1

    def body(self, rng: random.Random, **more: Any) -> dict[str, Any]:
        n, prompt = rng.choice([1, 1, 1, 3]), rng.choice(PROMPTS) * rng.choice([1, 1, 20])
        temperature = rng.choice([0.0, 0.8])
        return {
            "prompt": prompt,
            "max_tokens": rng.choice([1, 8, 60]),
            "temperature": temperature,
            "seed": rng.randrange(3),
            "cache_salt": rng.choice([None, "a", "b"]),
            "n": n,
            **more,
        }

    def same(self, body: dict[str, Any], texts: list[str]) -> None:
        """Whether the request's texts are those of the first time."""
        with self._lock:
            if self.texts.setdefault(json.dumps(body), texts) != texts:
                self.wrong.append(f"another text: {body}")

    def whole(self, http: httpx.Client, rng: random.Random) -> str:
        body = self.body(rng)
        answer = http.post("/v1/completions", json=body)
        if answer.status_code == 429:
            time.sleep(0.05)
            return "429"
        self.expect(answer, 200)
        self.same(body, [choice["text"] for choice in answer.json()["choices"]])
        return ""

    def streamed(self, http: httpx.Client, rng: random.Random, pause: float = 0.0, least: int | None = None) -> str:
        """`least`: leave after so many chunks."""
        body = self.body(rng)
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status_code == 429:
                return "429"
            self.expect(answer, 200)
            texts, done = [""] * body["n"], False
            for count, line in enumerate(line for line in answer.iter_lines() if line):
                if least is not None and count >= least:
                    return ""
                if done := line == "data: [DONE]":
                    break
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
                time.sleep(pause)
            if not done:
                self.wrong.append(f"a stream without its end: {body}")
            else:
                self.same(body, texts)
        return ""

    def schema(self, http: httpx.Client, rng: random.Random) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
        body = self.body(rng, response_format=form, max_tokens=60)
        answer = http.post("/v1/completions", json=body)
        if answer.status_code == 429:
            return "429"
        self.expect(answer, 200)
        choices = answer.json()["choices"]
        self.same(body, [choice["text"] for choice in choices])
        for choice in choices:
            if choice["finish_reason"] == "stop" and set(json.loads(choice["text"])) != {"name", "size"}:
                self.wrong.append(f"a text beside its schema: {choice['text']}")
        return ""

    def leaves(self, http: httpx.Client, rng: random.Random) -> str:
        """Goes away without an answer, at a random time."""
        try:
            with httpx.Client(base_url=self.url, timeout=rng.choice([0.001, 0.02, 0.1, 0.4])) as own:
                own.post("/v1/completions", json=self.body(rng, max_tokens=400))
        except httpx.TimeoutException:
            return ""
        return "answered"

    def refused(self, http: httpx.Client, rng: random.Random) -> str:
        status, body = rng.choice(
            [
                (400, b'{"prompt": '),
                (400, json.dumps({"prompt": "a", "temperature": -1}).encode()),
                (400, json.dumps({"prompt": "a", "unknown": 1}).encode()),
                (404, json.dumps({"prompt": "a", "model": "other"}).encode()),
                (400, json.dumps({"prompt": [None] * 100_000}).encode()),
                (400, json.dumps({str(n): n for n in range(100_000)}).encode()),
                (413, json.dumps({"prompt": [1] * 100_000}).encode()),
                (413, b" " * (9 << 20)),
            ]
        )
        answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        if answer.status_code == 429:  # the queue was full, so the body was not looked at
            return "429"
        self.expect(answer, status)
        return str(status)

    def looks(self, http: httpx.Client, rng: random.Random) -> str:
        self.expect(http.get(rng.choice(["/health", "/metrics", "/v1/models", "/view", "/view/data"])), 200)
        return ""

    def expect(self, answer: httpx.Response, status: int) -> None:
        if answer.status_code != status:
            self.wrong.append(f"{answer.status_code} instead of {status}: {answer.read()[:200]!r}")


KINDS = {  # what a client does, and how often
    "whole": (6, Soak.whole),
    "streamed": (6, Soak.streamed),
    "a slow reader": (1, lambda soak, http, rng: soak.streamed(http, rng, pause=0.05)),
    "leaves a stream": (3, lambda soak, http, rng: soak.streamed(http, rng, least=rng.randrange(4))),
    "leaves": (3, Soak.leaves),
    "schema": (2, Soak.schema),
    "refused": (2, Soak.refused),
    "looks": (1, Soak.looks),
}


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] not in "#")}


def memory(pid: int) -> float:
    """Resident MiB of a process and of those that it started."""
    process = psutil.Process(pid)
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True))) / 2**20


def drained(log: Any) -> None:
    """Read a process's log, so that it never waits for a reader."""
    with suppress(ValueError):  # it was closed
        for _ in log:
            pass


def main() -> int:
    args = harness.arguments(Args)
    command = [sys.executable, "-m", "specker", "serve", "--port", "0", "--view", "--batch-size", str(args.batch_size)]
    command += ["--target", args.target] if args.target else []
    command += ["--strategy", args.strategy] if args.strategy else []
    server = subprocess.Popen([*command, "--queue", "12", "--seconds", "7200"], stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while not (found := re.search(r"(http://[\d.:]+)/v1", said)):
            if not (line := server.stderr.readline()):
                sys.exit(f"the server ended: {said}")
            said += line
        threading.Thread(target=drained, args=(server.stderr,), daemon=True).start()
        soak, seconds = Soak(found[1]), 60 * args.minutes
        end = time.monotonic() + seconds
        clients = [threading.Thread(target=soak.client, args=(args.seed + n, end)) for n in range(args.clients)]
        for client in clients:
            client.start()
        sizes, copied = [], []
        while time.monotonic() < end and server.poll() is None and len(soak.wrong) < 20:
            sizes.append(memory(server.pid))
            copied.append(metrics(found[1]).get("specker_lookup_bytes", 0.0) / 2**20)
            count = sum(soak.counts.values())
            wrong = f"{len(soak.wrong)} wrong"
            print(f"{count:,} requests, {sizes[-1]:.0f} MiB, texts of lookup {copied[-1]:.1f}, {wrong}", flush=True)
            time.sleep(seconds / 60)
        for client in clients:
            client.join()
        time.sleep(2)
        last = metrics(found[1])
        held = {name: n for name, n in last.items() if re.search("running|waiting|pages_used", name) and n}
        growth = 100 * (max(sizes[len(sizes) // 2 :]) / sizes[len(sizes) // 2] - 1)
        print(json.dumps(dict(sorted(soak.counts.items())), indent=1))
        print(f"grew by {growth:.1f}% in the second half; held at the end: {held or 'nothing'}")
        print("\n".join(soak.wrong[:20]))
        row = {"minutes": args.minutes, "counts": soak.counts, "mib": sizes, "lookup_mib": copied, "growth": growth}
        row |= {"held": held, "tokens": last["specker_tokens_total"], "wrong": soak.wrong, "args": asdict(args)}
        if args.save:
            harness.save("soak", [row | harness.where_from()])
        return int(bool(soak.wrong or held or growth > args.growth))
    finally:
        server.terminate()
        server.communicate()


if __name__ == "__main__":
    sys.exit(main())
