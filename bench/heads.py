"""The acceptance length of a trained EAGLE-3 head in specker, vLLM and llama.cpp, on the same prompts:

    python bench/heads.py --head OUT/head --questions 12

The target is SmolLM2-135M-Instruct, everything is in float32 and greedy, and drafts are chains of --draft-tokens. The
head is the flat layout of `python -m train.head`; llama.cpp gets it as GGUF. Questions are those of Spec-Bench whose
answers do not end within --tokens. Acceptance lengths are tokens per verify pass, the prompt's pass left out. vLLM and
llama.cpp are installed into .venv/peers on first use; --engines leaves some out.
"""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

import specker
from bench import llama_server, peer
from bench.peer_settings import HERE, gguf_of, installed
from bench.processes import Process
from specker.zoo import real
from train.head import gguf as head_file


@dataclass
class Args:
    head: str
    questions: int = 12
    tokens: int = 64
    draft_tokens: int = 3
    engines: list[str] = field(default_factory=lambda: ["vllm", "llama.cpp"])


def ours(args: Args, target: str) -> tuple[list[list[int]], list[list[int]], float]:
    """(prompts, their tokens, acceptance length)."""
    how: dict[str, Any] = {"policy": "fixed", "draft_tokens": args.draft_tokens, "dtype": "float32"}
    engine = specker.load(target, args.head, "eagle", device="cpu", max_context=1024, **how)
    prompts, tokens, accepted = [], [], 0
    for line in (HERE / "spec_bench.jsonl").read_text("utf-8").splitlines():
        prompt = engine.encode_chat([{"role": "user", "content": json.loads(line)["turns"][0]}])
        if len(prompt) > 512:
            continue
        out = engine.generate(prompt, args.tokens)
        if out.finished != "length":
            continue
        prompts.append(prompt)
        tokens.append(out.tokens)
        accepted += out.stats.accepted
        if len(prompts) == args.questions:
            break
    return prompts, tokens, length_of(sum(map(len, tokens)) - len(tokens), accepted)


def length_of(decoded: int, accepted: int) -> float:
    return decoded / (decoded - accepted)


def vllm(args: Args, target: str, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    speculative = {"method": "eagle3", "model": args.head, "num_speculative_tokens": args.draft_tokens}
    options = {"model": target, "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 1, "enforce_eager": True}
    tokens, accepted = [], 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "options.json"
        file.write_text(json.dumps({"options": {**options, "speculative_config": speculative}}))
        process = Process([installed("vllm"), HERE / "vllm_engine.py", file], VLLM_CPU_KVCACHE_SPACE="1")
        process.ask()  # ready
        for prompt in prompts:
            answer = process.ask({"prompts": [prompt], "count": args.tokens})
            tokens += answer["tokens"]
            accepted += sum(answer["accepted"])
        process.end()
    return tokens, length_of(sum(map(len, tokens)) - len(tokens), accepted)


def llama_cpp(args: Args, target: str, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    source = real.file()
    tokens, decoded, accepted = [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder) / "head.gguf"
        head_file.write(Path(args.head), source, head, "F32")
        flags = ["--model", str(gguf_of(source, target, "F32")), "--model-draft", str(head)]
        flags += ["--spec-type", "draft-eagle3", "--spec-draft-n-max", str(args.draft_tokens)]
        server = peer.LlamaServer(
            {"program": str(llama_server.server()), "flags": flags, "threads": 2, "context": 1024}
        )
        for prompt in prompts:
            done = server.complete(prompt=prompt, n_predict=args.tokens)
            tokens.append(done["tokens"])
            decoded += done["timings"]["predicted_n"] - 1
            accepted += done["timings"].get("draft_n_accepted", 0)
        server.end()
    return tokens, length_of(decoded, accepted)


def main() -> None:
    (args,) = HfArgumentParser(Args).parse_args_into_dataclasses()
    target = str(real.fetch())
    prompts, want, own = ours(args, target)
    print(f"{len(prompts)} prompts, {args.tokens} tokens each, chains of {args.draft_tokens}")
    print(f"specker    {own:.3f}")
    for name, run in (("vllm", vllm), ("llama.cpp", llama_cpp)):
        if name in args.engines:
            tokens, length = run(args, target, prompts)
            same = sum(a == b for a, b in zip(tokens, want, strict=True))
            print(f"{name:10} {length:.3f}, {same} of {len(want)} answers as specker's")


if __name__ == "__main__":
    main()
