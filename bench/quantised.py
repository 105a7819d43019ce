"""Eight and four bits on a CPU: products with few rows beside torch's own, and what rounding costs in perplexity.

`python bench/quantised.py --what products`: the linears of models with 135 million, 0.5 and 1 billion weights at 1 to
16 rows. Each way has several copies of its weight, of 256 MB together, and takes them in turn, as decoding reads a
model: no cache holds them. The limit of a product is one read of the weight, at the bandwidth that `torch.sum` of
float32 reaches in the same run. Rows give the median over rounds; ways take turns.

`python bench/quantised.py --what perplexity`: exp of the mean negative log-likelihood of SmolLM2-135M on the first
turns of Spec-Bench's questions, windows of `--window` tokens, each predicted from the tokens before it in its window.
The checkpoint is itself a Q4_1 file: float32 holds its values, int4 is nearly them again, and Q4_1 is the file as it
is.

`python bench/quantised.py --what passes --targets A.gguf,B.gguf`: a pass over 1 to 16 rows of each checkpoint after 64
tokens, its layers and its LM head apart; numbers of rows take turns. The limit is one read of the weights.

`python bench/quantised.py --what activations --targets A.gguf,B.gguf --windows 16`: what rounding the activations of
products with quantised weights costs: KL divergence to the distributions with float32 activations, the share of equal
most probable tokens, perplexity; on the same windows.

`python bench/quantised.py --what kv --lengths 512,4096 --windows 4`: the same for K/V in fewer bits (`--kv-dtype`)
beside K/V in float32, in windows of each length. Each number is of the last 256 tokens of its windows, which see the
most columns. Products round activations to `--activations`: int8, the default of a run, adds its own noise, which the
row of float32 K/V does not show; float32 leaves K/V's alone.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

import specker
from bench import harness
from bench.peer_settings import gguf_of
from specker import cpu
from specker.cpu import one_torch_thread
from specker.cpu.packed import Packed, of_quantised
from specker.cpu.pages import allocated
from specker.kernels import quant
from specker.kernels.row_linear import row_linear
from specker.model.config import layer_elements
from specker.model.decoder import Final, forward
from specker.model.prefill import prefill
from specker.options import KV_DTYPES
from specker.zoo import real

SHAPES = {  # E, O of each linear: qkv, o, gate_up, down, head
    "135M": ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)),
    "0.5B": ((896, 1152), (896, 896), (896, 9728), (4864, 896), (896, 151936)),
    "1B": ((2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048), (2048, 128256)),
}
NAMES = "qkv", "o", "gate_up", "down", "head"
COLD = 1 << 28  # bytes of all copies of a weight
IDLE = 0.01  # seconds before a way's turn: torch's threads spin for some milliseconds
TEXT = 64  # tokens before a pass
TURN = 8  # products in a turn: the first one wakes the threads
KINDS = (None, "int8", "fp8", "int4")
ROUNDED = ("float32", "bfloat16", "int8")
LAST = 256  # tokens of a window whose distributions `kv` compares
FILES = ("Q8_0", "Q4_0", "Q4_1")


@dataclass(frozen=True)
class Args:
    what: str = field(default="products", metadata={"help": "products, perplexity, passes, activations or kv"})
    targets: str = field(
        default="", metadata={"help": "of passes, activations and kv: comma-separated GGUF files; default SmolLM2"}
    )
    models: str = field(default=",".join(SHAPES), metadata={"help": "comma-separated"})
    rows: str = field(default="1,2,5,8,16", metadata={"help": "comma-separated: rows of x"})
    rounds: int = 15
    threads: int = 2
    window: int = 256
    windows: int = 40
    lengths: str = field(default="512,4096", metadata={"help": "of kv: comma-separated: tokens of a window"})
    activations: str = field(default="float32", metadata={"help": "of kv: to what products round activations"})
    huge_pages: str = field(default="on", metadata={"help": "of passes: on or off"})
    save: bool = harness.save_flag()


def ways_of(E: int, O: int) -> dict[str, tuple[int, Callable[[], Any], Callable[[Tensor, Any], Tensor]]]:
    """For each way: bytes of a weight, a function that makes one, and one that multiplies x [T, E] float32 by it."""
    w = torch.randn(O, E) / E**0.5

    def rows_of(w8: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, *w8)

    def int8pack() -> tuple[Tensor, Tensor]:
        eight = quant.quantised(w, "int8")
        return eight.q, eight.scale[:, 0].bfloat16()

    def int4pack() -> tuple[Tensor, Tensor]:
        four = quant.quantised(w, "int4", 32)
        codes = quant.unpacked(four.q).int()
        assert four.shift is not None
        # torch's form: (q - 8) * scale + zero, pairs [E / group, O, 2] in bfloat16
        zero = four.shift.float() + 8 * four.scale.float()
        pairs = torch.stack((four.scale.float(), zero), -1).transpose(0, 1).contiguous().bfloat16()
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), pairs

    def ours(weight: Any, activations: str = "int8") -> tuple[int, Callable[[], Any], Callable[[Tensor, Any], Tensor]]:
        if isinstance(weight, Tensor):
            return weight.nbytes, weight.clone, row_linear
        packed = of_quantised(weight)
        assert packed is not None

        def copied() -> Packed:
            return replace(packed, runs=tuple(run._replace(data=run.data.clone()) for run in packed.runs))

        return packed.nbytes, copied, lambda x, w: cpu.product(x, w, activations)

    return {
        "specker float32": ours(w),
        "specker bfloat16": ours(w.bfloat16()),
        "specker int8": ours(quant.quantised(w, "int8")),
        "specker int8, groups of 32": ours(quant.quantised(w, "int8", 32)),
        "specker fp8": ours(quant.quantised(w, "fp8")),
        "specker int4, groups of 32": ours(quant.quantised(w, "int4", 32)),
        "specker int4, float32 activations": ours(quant.quantised(w, "int4", 32), "float32"),
        "specker int4, groups of 64": ours(quant.quantised(w, "int4", 64)) if E % 64 == 0 else ours(w),
        "torch float32": (w.nbytes, w.clone, F.linear),
        "torch bfloat16": (w.nbytes // 2, w.bfloat16, lambda x, w: F.linear(x.bfloat16(), w)),
        "torch _weight_int8pack_mm": (w.numel(), int8pack, lambda x, w: rows_of(w, x.bfloat16())),
        "torch _weight_int4pack_mm_for_cpu, groups of 32": (
            w.numel() * 5 // 8,
            int4pack,
            lambda x, w: torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), w[0], 32, w[1]),
        ),
    }


def products(args: Args) -> list[dict[str, Any]]:
    rows = []
    big = torch.ones(COLD // 4)
    for model in args.models.split(","):
        for name, (E, O) in zip(NAMES, SHAPES[model], strict=True):
            ways = ways_of(E, O)
            weights = {way: [make() for _ in range(max(1, COLD // size))] for way, (size, make, _) in ways.items()}
            for T in map(int, args.rows.split(",")):
                x = torch.randn(T, E)
                seconds: dict[str, list[float]] = {way: [] for way in ways}
                reads = []
                for n in range(-1, args.rounds):
                    start = time.perf_counter()
                    big.sum()
                    reads.append(time.perf_counter() - start)
                    for way, (_, _, run) in ways.items():
                        some = [weights[way][(TURN * n + i) % len(weights[way])] for i in range(TURN)]
                        time.sleep(IDLE)
                        start = time.perf_counter()
                        for w in some:
                            run(x, w)
                        if n >= 0:
                            seconds[way].append((time.perf_counter() - start) / len(some))
                bandwidth = COLD / statistics.median(reads)
                for way, (size, _, _) in ways.items():
                    middle = statistics.median(seconds[way])
                    rows.append(
                        {"bench": "quantised", "model": model, "linear": name, "E": E, "O": O, "T": T, "way": way}
                        | {"us": 1e6 * middle, "share": size / bandwidth / middle, "bandwidth": bandwidth}
                        | {"threads": args.threads}
                    )
            print(model, name, flush=True)
    return rows


def show_products(rows: list[dict[str, Any]], args: Args) -> None:
    """Microseconds of a layer's linears and the head, a column for each number of rows."""
    for model in args.models.split(","):
        table = Table(title=f"{model}: us of a layer's four linears / of the head")
        counts = list(map(int, args.rows.split(",")))
        for column in ("way", *(f"T {T}" for T in counts)):
            table.add_column(column, justify="right" if column != "way" else "left")
        for way in dict.fromkeys(row["way"] for row in rows):
            cells = []
            for T in counts:
                own = [r for r in rows if (r["model"], r["way"], r["T"]) == (model, way, T)]
                layer = sum(r["us"] for r in own if r["linear"] != "head")
                cells.append(f"{layer:.0f} / {sum(r['us'] for r in own if r['linear'] == 'head'):.0f}")
            table.add_row(way, *cells)
        Console(width=150).print(table)


def perplexity(args: Args) -> list[dict[str, Any]]:
    target = str(real.fetch())
    windows = windows_of(AutoTokenizer.from_pretrained(target)(_text())["input_ids"], args)
    forms: dict[str, tuple[Any, str, str | None]] = {
        "float32": (target, "float32", None),
        "bfloat16": (target, "bfloat16", None),
        **{kind: (target, "float32", kind) for kind in KINDS if kind},
        **{f: (real.file() if f == "Q4_1" else gguf_of(real.file(), target, f), "float32", None) for f in FILES},
    }
    rows = []
    for form, (source, dtype, kind) in forms.items():
        engine = specker.load(source, strategy="ar", dtype=dtype, quantize=kind, max_context=args.window + 1)
        losses = [F.cross_entropy(_logits(engine, w), torch.tensor(w[1:])).item() for w in windows]
        weights = engine.target.layer_bytes + engine.target.weights.head.nbytes
        elements = layer_elements(engine.target.config) + engine.target.weights.head.numel()
        rows.append(
            {"bench": "perplexity", "target": Path(target).name.rsplit("-", 1)[0], "form": form}
            | {"perplexity": math.exp(statistics.fmean(losses)), "bits": 8 * weights / elements, "MB": weights / 1e6}
            | {"tokens": sum(len(w) - 1 for w in windows), "window": args.window}
        )
        print(rows[-1]["form"], rows[-1]["perplexity"], flush=True)
    return rows


def passes(args: Args) -> list[dict[str, Any]]:
    rows = []
    big = allocated(COLD).view(torch.float32).fill_(1.0)  # on huge pages, as weights are
    counts = list(map(int, args.rows.split(",")))
    for target in args.targets.split(",") if args.targets else [str(real.file())]:
        engine = specker.load(target, strategy="ar", max_context=TEXT + max(counts), huge_pages=args.huge_pages)
        engine.loop.pages.all()
        model, cache = engine.model, engine.cache
        cache.take(0, TEXT + max(counts))
        prefill(model, cache, list(range(TEXT)))

        def layers(T: int, model: Any = model, cache: Any = cache) -> Any:
            ids = torch.arange(T)
            return forward(model, cache, cache.after([TEXT], [T]), model.embed_tokens(ids)).final

        hidden = {T: layers(T) for T in counts}
        ways: dict[str, Callable[[], Any]] = {f"layers {T}": partial(layers, T) for T in counts}
        ways |= {f"head {T}": partial(model.logits, hidden[T]) for T in counts}
        bandwidth = COLD / harness.measure({"read": big.sum}, args.rounds)["read"].median
        with one_torch_thread():
            timings = harness.measure(ways, args.rounds)
        for T in counts:
            own, head = timings[f"layers {T}"].median, timings[f"head {T}"].median
            rows.append(
                {"bench": "passes", "target": Path(target).stem, "T": T, "layers_ms": 1e3 * own, "head_ms": 1e3 * head}
                | {"over_one_row": own / timings[f"layers {counts[0]}"].median, "MB": engine.target.layer_bytes / 1e6}
                | {"GB_per_second": engine.target.layer_bytes / own / 1e9, "read_GB_per_second": bandwidth / 1e9}
                | {"threads": args.threads, "huge_pages": args.huge_pages}
            )
            print({k: x if isinstance(x, str) else round(x, 2) for k, x in rows[-1].items()}, flush=True)
    return rows


def activations(args: Args) -> list[dict[str, Any]]:
    """What rounding the activations costs: each checkpoint's next-token distributions with activations in int8 and
    bfloat16 beside those in float32, on the same text and weights."""
    rows = []
    for target in args.targets.split(",") if args.targets else [str(real.file())]:
        engines = [specker.load(target, strategy="ar", max_context=args.window + 1, activations=a) for a in ROUNDED]
        windows = windows_of(engines[0].encode(_text()), args)
        sums = {a: Sums() for a in ROUNDED}
        for window in windows:
            logs = [_logits(engine, window).log_softmax(-1) for engine in engines]
            for name, log in zip(ROUNDED, logs, strict=True):
                sums[name].add(logs[0], log, torch.tensor(window[1:]))
        for name, each in sums.items():
            rows.append(
                {"bench": "activations", "target": Path(target).stem, "activations": name}
                | each.means
                | {"window": args.window, "weights": engines[0].target.quantised}
            )
            print({k: rows[-1][k] for k in ("target", "activations", "kl", "top1", "perplexity", "tokens")}, flush=True)
        del engines
    return rows


def kv(args: Args) -> list[dict[str, Any]]:
    """What K/V in fewer bits costs: next-token distributions of the last `LAST` tokens of each window beside those with
    K/V in float32."""
    rows = []
    for target in args.targets.split(",") if args.targets else [str(real.file())]:
        for length in map(int, args.lengths.split(",")):
            how = {"strategy": "ar", "max_context": length + 1, "activations": args.activations}
            engines = [specker.load(target, kv_dtype=kept, **how) for kept in KV_DTYPES]
            windows = windows_of(engines[0].encode(_text()), replace(args, window=length))
            sums = {kept: Sums() for kept in KV_DTYPES}
            for window in windows:
                logs = [_logits(engine, window, LAST).log_softmax(-1) for engine in engines]
                right = torch.tensor(window[-LAST:])
                for kept, log in zip(KV_DTYPES, logs, strict=True):
                    sums[kept].add(logs[0], log, right)
            for kept, engine in zip(KV_DTYPES, engines, strict=True):
                size = sum(x[:, :1, :1].nbytes for x in engine.cache.kv)
                rows.append(
                    {"bench": "kv", "target": Path(target).stem, "kv_dtype": kept, "length": length}
                    | sums[kept].means
                    | {"activations": args.activations, "windows": len(windows), "bytes_per_token": size}
                )
                print({k: x for k, x in rows[-1].items() if k != "bench"}, flush=True)
            del engines
    return rows


@dataclass
class Sums:
    """Of distributions beside exact ones."""

    count: int = 0
    kl: float = 0.0
    same: float = 0.0
    loss: float = 0.0

    def add(self, exact: Tensor, log: Tensor, right: Tensor) -> None:
        """exact, log [n, V]: logarithms of probabilities; right [n]: the text's tokens."""
        self.count += len(right)
        self.kl += float((exact.exp() * (exact - log)).sum())
        self.same += float((exact.argmax(-1) == log.argmax(-1)).sum())
        self.loss -= float(log.gather(-1, right.unsqueeze(-1)).sum())

    @property
    def means(self) -> dict[str, float]:
        found = {"kl": self.kl / self.count, "top1": self.same / self.count}
        return found | {"perplexity": math.exp(self.loss / self.count), "tokens": self.count}


def _text() -> str:
    questions = (Path(__file__).parent / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()
    return "\n\n".join(json.loads(line)["turns"][0] for line in questions)


def windows_of(ids: list[int], args: Args) -> list[list[int]]:
    """Windows spread over the whole text."""
    step = max(args.window, len(ids) // args.windows)
    return [ids[i : i + args.window] for i in range(0, len(ids) - args.window, step)][: args.windows]


def _logits(engine: Any, window: list[int], last: int | None = None) -> Tensor:
    """After every token of a window but the last, [window - 1, V] float64; or after the `last` ones of these."""
    model, cache, count = engine.model, engine.cache, len(window) if last is None else last + 1
    cache.take(0, len(window))
    taps = prefill(model, cache, window, (model.config.num_layers,), count)
    cache.release(0)
    return model.logits(Final(taps[model.config.num_layers][:-1])).double()


def main() -> None:
    args = harness.arguments(Args)
    torch.set_num_threads(args.threads)
    what = {
        "products": products,
        "perplexity": perplexity,
        "passes": passes,
        "activations": activations,
        "kv": kv,
    }
    rows = what[args.what](args)
    if args.what == "products":
        show_products(rows, args)
    if args.save:
        print(harness.save("quantised", rows, "cpu"))


if __name__ == "__main__":
    main()
