"""The models that the papers are measured with: the bundled family in a real model's shape, and a pair of real ones.

`python -m bench.papers.models 8b 1b --device cuda` makes the family in these shapes beforehand. `8b/12` is the shape of
8b with 12 layers, which compiles the same kernels.
"""

import argparse
import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.decoding import Given, prompts_of
from specker import zoo
from specker.paths import cache_root
from specker.runtime import load, strategies
from specker.runtime.engine import Engine
from specker.runtime.recipe import device_of, resolve
from specker.zoo import inflate, real
from specker.zoo.inflate import SHAPES, Inflated, Shape

MEMBERS = ("code-target", "code-draft", "code-draft-deep", "code-diffusion")
HYBRID = "hybrid-target"
AS_LARGE = "code-draft-as-large"  # the deep draft with as many parameters in its layers as the diffusion drafter
QUICK = Shape(256, 704, 14, 4, 2)  # of --quick: two more layers
CODER_PROMPTS = Path(__file__).parents[1] / "coder_prompts.jsonl"


@dataclass(frozen=True)
class Pair(Given):
    """A target with its drafts. Its engines share one copy of the target's weights, since they decode in turn."""

    about: str = "the bundled family"
    large_draft: str | None = None  # an autoregressive draft of the diffusion drafter's size
    ngram: str | None = None  # the n-gram model of --cps
    dtype: str = ""  # as the command's default

    @cached_property
    def _checkpoint(self) -> Any:
        return load.read_target(self._recipe({"strategy": "ar"}))

    def _recipe(self, options: dict[str, Any], draft: Any = None) -> Any:
        how: dict[str, Any] = {"prefix_cache": "off", "max_context": self.max_context}
        if self.quantize:
            how["quantize"] = self.quantize
        asked = strategies.options(**how | options)
        return resolve(asked, self.source, draft, device_of(self.device), self.dtype or None)

    def load(self, strategy: str, draft: Any = None, **options: Any) -> Engine:
        """An engine with these options. `draft`: another one than the strategy's own."""
        options["strategy"] = strategy
        if "vocabtrim" in strategy and self.scores is not None:
            options.setdefault("vocab_scores", str(self.scores))
        if "lookup" in strategy.split("+"):
            options.setdefault("lookup_share", "off")  # the same prompts are decoded several times
        searches = "as_published" in options or options.get("cps") in ("chain", "tree")
        if strategy == "diffuspec" and searches and self.ngram is not None:
            options.setdefault("ngram", self.ngram)
        return load.engine_of(self._recipe(options, draft or self.draft_of(strategy)), self._checkpoint)

    @cached_property
    def texts(self) -> list[list[int]]:
        """Token ids of the prompts."""
        plain = self.load("ar")
        if self.questions is not None:
            return prompts_of(self, plain)
        return [plain.encode(row["prompt"]) for row in zoo.heldout()[: self.prompts]]

    @property
    def weights(self) -> str:
        """How rows name the target's weights."""
        return f"{self.quantize or self.dtype} weights" if self.quantize or self.dtype else "weights as stored"


def family(given: Given, shape: str, members: Sequence[str] = (*MEMBERS, AS_LARGE)) -> Pair:
    """The bundled family in a real model's shape, or the models of `--target`. A target of HYBRID is that one in a real
    model's shape. `members`: what to make."""
    how = {name: getattr(given, name) for name in Given.__dataclass_fields__}
    if given.target not in (None, HYBRID):
        return Pair(**how, about=given.name)
    if not given.quantize and given.device == "cpu":
        how["quantize"] = "int8"
    if given.target == HYBRID:
        return Pair(**how | {"target": str(inflated(shape, given.device, (HYBRID,)) / HYBRID)}, about=HYBRID)
    folder = inflated(shape, given.device, members)
    how |= {"target": str(folder / "code-target"), "draft": str(folder / "code-draft")}
    how |= {"deep_draft": str(folder / "code-draft-deep"), "diffusion_draft": str(folder / "code-diffusion")}
    how |= {"vocab_scores": str(zoo.CODE.vocab_scores)}
    about = f"the bundled family, inflated to the shape of {shape}"
    return Pair(**how, about=about, large_draft=str(folder / AS_LARGE), ngram=str(zoo.CODE.ngram))


def small(pair: Pair) -> Pair:
    """The bundled family as it is, for counts that need many runs. Another target stands for itself."""
    if pair.large_draft is None:
        return pair
    most = min(48, pair.max_new_tokens)
    return Pair(prompts=pair.prompts, max_new_tokens=most, device=pair.device, vocab_scores=pair.vocab_scores)


def coder(given: Given) -> Pair | None:
    """Qwen2.5-Coder-Instruct 1.5B drafted by 0.5B, if `python -m specker.zoo.real coder` has fetched them."""
    paths = [real.CODER[name].at_hand() for name in ("target", "draft")]
    if None in paths:
        return None
    target, draft = map(str, paths)
    how = {"prompts": given.prompts, "max_new_tokens": min(64, given.max_new_tokens), "device": given.device}
    about = "Qwen2.5-Coder-Instruct, 1.5B drafted by 0.5B, both Q4_K_M"
    return Pair(**how, target=target, draft=draft, max_context=1024, questions=str(CODER_PROMPTS), about=about)


def inflated(name: str, device: str, members: Sequence[str]) -> Path:
    """The folder with members of the family in the shape `name`. They are made once, and anew after a change of the
    bundled weights or of what inflates them."""
    shape, name = shape_of(name), name.replace("/", ".")
    digest = hashlib.sha256(repr((shape, large_shape(shape))).encode())
    for path in (Path(inflate.__file__), *(zoo.path(member) / "model.safetensors" for member in MEMBERS)):
        digest.update(path.read_bytes())
    folder = cache_root() / f"inflated-{name}-{digest.hexdigest()[:16]}"
    for old in folder.parent.glob(f"inflated-{name}-*"):
        if old != folder:
            shutil.rmtree(old)
    for made in members:
        member, own = ("code-draft-deep", large_shape(shape)) if made == AS_LARGE else (made, shape)
        if not (folder / made).exists():
            print(f"bench: making {folder / made}, once", flush=True)
            inflate.inflate(zoo.path(member), own, folder / made, device)
    return folder


def shape_of(name: str) -> Shape:
    """Raises ValueError for an unknown name."""
    base, _, layers = name.partition("/")
    shape = QUICK if base == "quick" else SHAPES.get(base)
    if shape is None or (layers and not layers.isdigit()):
        raise ValueError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}, and 8b/12 for 12 layers of 8b")
    return replace(shape, layers=int(layers)) if layers else shape


def large_shape(shape: Shape) -> Shape:
    """`shape` with the intermediate size at which the deep draft's layers have the diffusion drafter's parameters."""
    deep = Inflated(zoo.path("code-draft-deep"), shape)
    wanted, own = _elements(Inflated(zoo.path("code-diffusion"), shape).config), deep.config
    more = (wanted - _elements(own)) / (3 * own["hidden_size"] * own["num_hidden_layers"])
    return replace(shape, intermediate=round(shape.intermediate * (1 + more / own["intermediate_size"])))


def _elements(config: dict[str, Any]) -> int:
    """Elements of the layers' matrices."""
    heads = 2 * (config["num_attention_heads"] + config["num_key_value_heads"]) * config["head_dim"]
    return config["num_hidden_layers"] * config["hidden_size"] * (heads + 3 * config["intermediate_size"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", nargs="+")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for name in args.shape:
        inflated(name, args.device, (*MEMBERS, HYBRID))
