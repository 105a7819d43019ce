"""Prefill and decoding over the length of the prompt, beside llama.cpp: `python bench/contexts.py --help`.

Qwen2.5-Coder 1.5B in its authors' Q4_K_M file (specker/zoo/real.py) continues Python source of each length, greedily
and without speculation. Each engine has a process of its own with a cache for the longest prompt; they take turns at
every length, and only one computes at a time. llama.cpp's server keeps K/V in float16 by default.

Reported for each engine and length, as the engine says: prompt tokens/s, and tokens/s after the prompt. `limit` is what
reading the weights and the K/V once for each token allows, at the bandwidth that torch.sum reaches here. A token
embedding beside a separate LM head does not count, since a token reads one row of it. Rows go to
bench/results/<machine>/contexts.jsonl; bench/plot.py draws them.
"""

import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import harness, llama_server
from bench.peer_settings import HERE, last_line
from bench.processes import Ended, Process
from specker.checkpoints.checkpoint import read_config, read_tokenizer
from specker.checkpoints.gguf.convert import read as read_gguf
from specker.zoo import real

KV_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.03125, "q8_0": 1.0625}  # with scales, D = 128


@dataclass(frozen=True)
class Args:
    lengths: str = field(default="512,2048,8192", metadata={"help": "tokens of the prompts, comma separated"})
    kv: str = field(default="float32,bfloat16,int8", metadata={"help": "specker's --kv-dtype, comma separated"})
    llama_kv: str = field(default="f16", metadata={"help": "llama-server's --cache-type-k and -v; empty: without it"})
    max_new_tokens: int = 32
    rounds: int = 1
    threads: int = 2
    save: bool = harness.save_flag()


def settings(args: Args, target: str, longest: int) -> dict[str, dict[str, Any]]:
    """For each engine, what bench/peer.py is given. Raises CalledProcessError if llama-server cannot be built."""
    shared = {"target": target, "threads": args.threads, "context": longest + args.max_new_tokens + 64}
    found: dict[str, dict[str, Any]] = {}
    for kind in filter(None, args.kv.split(",")):
        options = {"strategy": "ar", "kv_dtype": kind, "prefix_cache": "off"}
        found[f"specker {kind}"] = {**shared, "engine": "specker", "kv": kind, "options": options}
    names = {"f16": "float16", "bf16": "bfloat16", "q8_0": "q8_0"}
    for kind in filter(None, args.llama_kv.split(",")):
        flags = ["--model", target, "--cache-type-k", kind, "--cache-type-v", kind, "--flash-attn", "on"]
        own = {"program": str(llama_server.server()), "version": llama_server.VERSION, "flags": flags, "fresh": False}
        name = names.get(kind, kind)
        found[f"llama.cpp {name}"] = {**shared, **own, "engine": "llama_server", "kv": name}
    return found


def prompts(target: str, lengths: list[int]) -> dict[int, list[int]]:
    """Token ids of source files of the standard library, of each length."""
    tokenizer, ids = read_tokenizer(target), []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids += tokenizer.encode(path.read_text(encoding="utf-8"))
        if len(ids) >= max(lengths):
            break
    return {n: ids[:n] for n in lengths}


def bandwidth(threads: int) -> float:
    """Bytes/s at which torch.sum reads 512 MiB: the best of ten."""
    torch.set_num_threads(threads)
    x, best = torch.ones(1 << 27), 0.0
    for _ in range(10):
        start = time.perf_counter()
        x.sum()
        best = max(best, x.nbytes / (time.perf_counter() - start))
    return best


def weights(path: str) -> int:
    """Bytes of a GGUF file's tensors that decoding a token reads."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in read_gguf(Path(path)).tensors}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)


def measure(args: Args, ways: dict[str, dict[str, Any]], asked: dict[int, list[int]]) -> dict[tuple[str, int], Any]:
    """What each engine answers at each length, round by round. SystemExit if one ends."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        running: dict[str, Process] = {}
        try:
            for name, own in ways.items():
                file = Path(folder) / f"{name}.json"
                file.write_text(json.dumps(own))
                command, log = [sys.executable, HERE / "peer.py", file], Path(folder) / f"{name}.log"
                running[name] = Process(command, log, OMP_NUM_THREADS=str(args.threads))
                own["version"] = running[name].ask()["ready"]
                running[name].ask({"ids": next(iter(asked.values()))[:64], "count": 4})  # warm up
            for n in range(args.rounds):
                for length, ids in asked.items():
                    for name, process in running.items():
                        answer = process.ask({"ids": ids, "count": args.max_new_tokens})
                        found.setdefault((name, length), []).append(answer)
                        print(f"round {n + 1}, {length:,} tokens, {name}: {answer['seconds']:.1f} s", flush=True)
        except Ended as error:
            sys.exit(f"bench: {name} ends: {error}")
        finally:
            for process in running.values():
                process.end()
    return found


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="tokens/s, one text at a time")
    for column in ("prompt tokens", "engine", "prompt", "after it", "limit by bytes"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for row in rows:
        speeds = (row[name] for name in ("prefill_tokens_per_second", "decode_tokens_per_second", "limit"))
        table.add_row(f"{row['prompt_tokens']:,}", row["way"], *(f"{speed:.1f}" for speed in speeds))
    Console(width=110).print(table)


def main() -> None:
    args = harness.arguments(Args)
    try:
        lengths = sorted({int(n) for n in args.lengths.split(",")})
        if lengths[0] < 1 or unknown(args):
            raise ValueError(f"--lengths and --kv: got {args.lengths} and {args.kv}")
        target = str(real.fetched((real.CODER["target"],))[0])
        ways = settings(args, target, lengths[-1])
    except subprocess.CalledProcessError as error:
        sys.exit(f"bench: llama-server cannot be built: {last_line(error)}")
    except (ValueError, OSError) as error:
        sys.exit(f"bench: {error}")
    rate, config = bandwidth(args.threads), read_config(target)
    held = weights(target)
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim  # of K/V for each token
    rows = []
    for (name, length), answers in sorted(measure(args, ways, prompts(target, lengths)).items(), key=lambda x: x[0][1]):
        own = ways[name]
        read = held + numbers * KV_BYTES[own["kv"]] * length
        reports = [answer["report"] for answer in answers]
        row = {"bench": "contexts", "target": Path(target).stem, "way": name, "version": own["version"]}
        row |= {"prompt_tokens": length, "max_new_tokens": args.max_new_tokens, "rounds": args.rounds}
        row |= {"threads": args.threads, "kv": own["kv"], "bytes": read, "bandwidth": rate, "limit": rate / read}
        for kind in ("prefill", "decode"):
            row[f"{kind}_tokens_per_second"] = statistics.median(r[f"own_{kind}_tokens_per_second"] for r in reports)
        rows.append(row)
    show(rows)
    if args.save:
        print(harness.save("contexts", rows, "cpu"))


def unknown(args: Args) -> bool:
    return bool({*filter(None, args.kv.split(","))} - {"float32", "bfloat16", "float16", "int8"})


if __name__ == "__main__":
    main()
