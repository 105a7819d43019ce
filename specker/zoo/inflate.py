"""Write the bundled family in the shape of a real model: `python -m specker.zoo.inflate --shape 1b --out DIR`.

A toy of 256 columns takes a millisecond a step, and there the host's work decides which strategy wins. Inflated, it
computes the same function, with the same tokens, acceptance and confidences, and takes a real model's time:

* Width: the residual holds a copy of the toy's hidden row in each of its `ratio` parts, so its mean square, and with it
  every RMSNorm, is the toy's. The norms' weights keep the first copy alone. What reads a normed row has the toy's
  matrix in its first columns and random numbers in the rest; what writes to the residual writes every copy.
* Heads, channels: those beyond the toy's are random, and nothing of them reaches the residual.
* Depth: the toy's layers stand evenly among layers that add zero.

A drafter of blocks that was trained for code-target (`python -m train.head`) grows with it, if its folder is named.

All bytes are read, and no number is scaled: in float64 the tokens are the toy's, in other dtypes up to the order of
sums.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specker import zoo
from specker.checkpoints.parse import read_json
from specker.command.exits import run_cli
from specker.command.parser import Parser

MEMBERS = ("code-target", "code-draft", "code-draft-deep", "code-diffusion", "hybrid-target")
NOISE = 0.02  # standard deviation of the random numbers, as in a fresh model
SHARD = 2 << 30  # bytes of a file, about
WHOLE = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")  # copied
EVEN = 32  # intermediate sizes are multiples of it


@dataclass(frozen=True)
class Shape:
    """The sizes that code-target gets; the others grow in proportion. Heads have the toy's 64 columns."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


_TARGET = Shape(256, 704, 12, 4, 2)  # code-target
SHAPES = {
    "0.5b": Shape(1024, 4864, 24, 16, 2),  # Qwen2.5 0.5B
    "1b": Shape(2048, 8192, 16, 32, 8),  # Llama 3.2 1B
    "3b": Shape(3072, 8192, 28, 48, 16),  # Llama 3.2 3B
    "8b": Shape(4096, 14336, 32, 64, 16),  # Llama 3.1 8B
}


@dataclass(frozen=True)
class Axis:
    """An axis of a wide tensor: its size, and for each index of the toy's tensor the indices that repeat it."""

    size: int
    places: Tensor  # [copies, n] int64


def _indices(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.int64, device="cpu")


def prefix(size: int, n: int) -> Axis:
    return Axis(size, _indices(n)[None])


def copies(size: int, n: int) -> Axis:
    return Axis(size, _indices(size).view(-1, n))


def joined(*axes: Axis) -> Axis:
    """The axes one after another."""
    ends = [0]
    for axis in axes:
        ends.append(ends[-1] + axis.size)
    return Axis(ends[-1], torch.cat([axis.places + start for axis, start in zip(axes, ends, strict=False)], 1))


@dataclass(frozen=True)
class Inflated:
    """One member of the family and the shape that it gets."""

    source: Path
    shape: Shape

    @cached_property
    def toy(self) -> dict[str, Any]:
        return json.loads((self.source / "config.json").read_text(encoding="utf-8"))

    @cached_property
    def ratio(self) -> int:
        return self.shape.hidden // _TARGET.hidden

    @cached_property
    def predicts(self) -> bool:
        """Whether it is Qwen3.5, with a gate in q_proj, norms whose weights lack 1, and a head for multi-token
        prediction, which norms the final norm's rows once more: they keep every copy, and the LM head reads one."""
        return self.toy["model_type"] == "qwen3_5_text"

    @cached_property
    def guesses(self) -> bool:
        """Whether it is a drafter of blocks, which reads rows of code-target and has its embedding and LM head."""
        return "block_size" in self.toy

    @cached_property
    def layers(self) -> int:
        return round(self.toy["num_hidden_layers"] * self.shape.layers / _TARGET.layers)

    @cached_property
    def places(self) -> dict[int, int]:
        """{layer: the toy's layer that stands there}."""
        narrow = self.toy["num_hidden_layers"]
        return {place(i, narrow, self.layers): i for i in range(narrow)}

    @cached_property
    def config(self) -> dict[str, Any]:
        toy, shape = self.toy, self.shape
        made = toy | {
            "hidden_size": toy["hidden_size"] * self.ratio,
            "intermediate_size": _scaled(toy["intermediate_size"], shape.intermediate, _TARGET.intermediate, EVEN),
            "num_hidden_layers": self.layers,
            "num_attention_heads": _scaled(toy["num_attention_heads"], shape.heads, _TARGET.heads),
            "num_key_value_heads": _scaled(toy["num_key_value_heads"], shape.kv_heads, _TARGET.kv_heads),
        }
        if self.predicts:
            made["tie_word_embeddings"] = False
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            if name in toy:
                made[name] = toy[name] * self.ratio
        if self.guesses:
            made |= {"num_target_layers": self.shape.layers, **self._taps(toy)}
            if inner := toy.get("dflash_config"):
                made["dflash_config"] = inner | self._taps(inner)
        if kinds := toy.get("layer_types"):
            made["layer_types"] = [kinds[self.before(n)] for n in range(self.layers)]
        return made

    def _taps(self, fields: dict[str, Any]) -> dict[str, list[int]]:
        """The layers of the wide target whose outputs the drafter reads, if `fields` name the toy's."""
        ids = fields.get("target_layer_ids")
        return {} if ids is None else {"target_layer_ids": [place(i, _TARGET.layers, self.shape.layers) for i in ids]}

    @cached_property
    def inputs(self) -> int:
        """Rows that `fc` reads side by side: a token's and the target's, or those of a drafter's taps."""
        return len((self.toy | self.toy.get("dflash_config", {}))["target_layer_ids"]) if self.guesses else 2

    def before(self, layer: int) -> int:
        """The toy's layer at `layer`, or the last one before it."""
        return max(i for place, i in self.places.items() if place <= layer)

    @cached_property
    def axes(self) -> dict[str, Axis]:
        """Every axis that a tensor may have."""
        toy, wide = self.toy, self.config
        H, h = wide["hidden_size"], toy["hidden_size"]
        q, kv = self.heads("num_attention_heads", "num_key_value_heads", toy["head_dim"])
        found = {
            "vocab": prefix(toy["vocab_size"], toy["vocab_size"]),
            "read": prefix(H, h),
            "written": copies(H, h),
            "mlp": prefix(wide["intermediate_size"], toy["intermediate_size"]),
            "q": q,
            "kv": kv,
            "q, gate": self.heads("num_attention_heads", "num_key_value_heads", 2 * toy["head_dim"])[0],
        }
        found["inputs"] = joined(*[found["read"]] * self.inputs)
        if gru := toy.get("dflash_config", {}).get("gru_hidden_dim"):
            found["read, state"] = joined(found["read"], prefix(gru, gru))
        if "linear_num_value_heads" in toy:
            names = "linear_num_value_heads", "linear_num_key_heads"
            found["value"] = self.heads(*names, toy["linear_value_head_dim"])[0]
            found["value heads"] = self.heads(*names, 1)[0]
            key = self.heads(*names, toy["linear_key_head_dim"])[1]
            found["channels"] = joined(key, key, found["value"])
        return found

    def heads(self, name: str, groups: str, dim: int) -> tuple[Axis, Axis]:
        """The rows of heads of `dim` rows each, and of the KV heads (a delta net's key heads) that groups of them read.
        A head keeps its KV head. name, groups: the fields of config.json with their numbers."""
        (n, kv), (wide, wide_kv) = ((c[name], c[groups]) for c in (self.toy, self.config))
        group, wider = n // kv, wide // wide_kv
        if wider < group or wide_kv < kv:
            raise ValueError(f"{wide} heads on {wide_kv} KV heads cannot hold {n} on {kv}")
        index = _indices(n)
        which = index // group * wider + index % group
        rows = which[:, None] * dim + _indices(dim)
        return Axis(wide * dim, rows.view(1, -1)), prefix(wide_kv * dim, kv * dim)

    def kinds(self, name: str) -> tuple[str, ...]:
        """The axes of a tensor; none for one that keeps its size, and "" for an axis that does."""
        part = name.removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]
        return {
            "embed_tokens": ("vocab", "written"),
            "lm_head": ("vocab", "read"),
            "q_proj": ("q, gate" if self.predicts else "q", "read"),
            "k_proj": ("kv", "read"),
            "v_proj": ("kv", "read"),
            "o_proj": ("written", "q"),
            "gate_proj": ("mlp", "read"),
            "up_proj": ("mlp", "read"),
            "down_proj": ("written", "mlp"),
            "in_proj_qkv": ("channels", "read"),
            "conv1d": ("channels",),
            "in_proj_z": ("value", "read"),
            "in_proj_a": ("value heads", "read"),
            "in_proj_b": ("value heads", "read"),
            "A_log": ("value heads",),
            "dt_bias": ("value heads",),
            "out_proj": ("written", "value"),
            "fc": ("written", "inputs"),
            "markov_w1": (),  # of drafters of blocks, as the rest
            "markov_w2": (),
            "weight_ih_l0": ("", "read"),
            "weight_hh_l0": (),
            "0": ("", "read, state"),
            "2": (),
            "q_norm": (),
            "k_norm": (),
            "norm": () if "linear_attn" in name else ("written" if self.predicts else "read",),
        }.get(part, ("read",))  # the other norms

    def tensors(self, device: str) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the wide checkpoint, in the dtype that the toy's has."""
        random = torch.Generator(device).manual_seed(0)
        with safe_open(self.source / "model.safetensors", "pt", device) as file:
            names = list(file.keys())
            start = "layers." if self.guesses else "model.layers."
            for name in (n for n in names if not n.startswith(start)):
                yield name, self.widened(name, file.get_tensor(name), random)
            if self.predicts:
                name = "lm_head.weight"
                yield name, self.widened(name, file.get_tensor("model.embed_tokens.weight"), random)
            for layer in range(self.layers):
                toy = self.before(layer)
                for name in (n for n in names if n.startswith(f"{start}{toy}.")):
                    small = file.get_tensor(name)
                    if layer not in self.places and "written" in self.kinds(name):
                        small = torch.zeros_like(small)
                    own = f"{start}{layer}{name.removeprefix(f'{start}{toy}')}"
                    yield own, self.widened(name, small, random)

    def widened(self, name: str, small: Tensor, random: torch.Generator) -> Tensor:
        """One tensor: the toy's numbers at their places, elsewhere random ones, or zeros for what would reach the
        residual or read another copy."""
        axes = self.kinds(name)[: small.dim()]
        if not axes:
            return small.clone()
        rows, *columns = (self.axes[kind] if kind else prefix(n, n) for kind, n in zip(axes, small.shape, strict=False))
        wide = small.new_empty(rows.size, *(axis.size for axis in columns), *small.shape[len(axes) :])
        if axes == ("read",):  # a norm
            wide.fill_(-1.0 if self.predicts else 0.0)
        elif axes[0] in ("written", "vocab", ""):
            wide.zero_()
        else:
            wide.normal_(0, NOISE, generator=random)
        for placed in rows.places.to(wide.device):
            if not columns:
                wide[placed] = small
            for across in columns[0].places.to(wide.device) if columns else ():
                wide[placed[:, None], across] = small
        return wide


def place(layer: int, narrow: int, wide: int) -> int:
    """Where a layer of the toy's `narrow` ones stands among `wide` ones."""
    return layer * wide // narrow


def _scaled(size: int, wide: int, narrow: int, multiple: int = 1) -> int:
    return max(size, round(size * wide / narrow / multiple) * multiple)


def inflate(source: Path, shape: Shape, out: Path, device: str = "cpu") -> int:
    """Write one checkpoint. Returns its number of parameters. It appears under its name when it is whole. Raises
    ValueError if something has that name."""
    if out.exists():
        raise ValueError(f"{out} exists: remove it, or give another folder")
    made, part = Inflated(source, shape), out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    held: dict[str, Tensor] = {}
    files: list[list[str]] = []
    total = parameters = size = 0

    def flush() -> None:
        save_file(held, part / f"model-{len(files):05}.safetensors", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in made.tensors(device):
        if held and size + tensor.nbytes > SHARD:
            flush()
            size = 0
        held[name] = tensor.cpu()
        size, total, parameters = size + tensor.nbytes, total + tensor.nbytes, parameters + tensor.numel()
    flush()
    index = {name: f"model-{n:05}.safetensors" for n, names in enumerate(files) for name in names}
    _write(part / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    _write(part / "config.json", made.config)
    for name in WHOLE:
        if (source / name).exists():
            shutil.copy(source / name, part / name)
    part.rename(out)
    return parameters


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def parser() -> Parser:
    usage = "python -m specker.zoo.inflate --shape SHAPE --out DIR [MODEL ...]"
    top = Parser("specker.zoo.inflate", usage, "Write the bundled family in the shape of a real model.", "")
    about = f"of {', '.join(MEMBERS)}, or the folder of a drafter of blocks for code-target (default: all of these)"
    top.add_argument("model", nargs="*", default=MEMBERS, metavar="MODEL", help=about)
    top.add_argument("--shape", required=True, choices=tuple(SHAPES), help="the real model's, by its parameters")
    top.add_argument("--out", required=True, type=Path, metavar="DIR", help="each model becomes a folder in it")
    top.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to draw numbers (default: cpu)")
    top.prints("help", "-h", "--help", help="show this help and exit", text=lambda _: top.format_help())
    return top


def run(argv: Sequence[str] | None) -> int:
    values = parser().parse_args(argv)
    sources = {name: zoo.path(name) if name in MEMBERS else Path(name) for name in values.model}
    for name, source in sources.items():
        if name not in MEMBERS and "block_size" not in read_json(source / "config.json", required=False):
            raise ValueError(f"expected models of {', '.join(MEMBERS)}, or a drafter of blocks' folder, got {name!r}")
    if values.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA GPU, and torch finds none: leave it out")
    for source in sources.values():
        out = values.out / source.name
        parameters = inflate(source, SHAPES[values.shape], out, values.device)
        print(f"{out}: {parameters / 1e6:,.0f}M parameters", flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
