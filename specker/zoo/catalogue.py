"""Heads and drafts that are known for public targets (drafts.tsv), and the choice of `--draft auto`.

It takes what stands beside a target's GGUF file, or else the first known draft in the target's format, or else the
first one.
"""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specker import zoo
from specker.fields import option

AUTO = "auto"  # as --draft
# Kinds of drafts, as `specker drafts` lists them:
HEAD3 = "EAGLE-3 head"
HEAD1 = "EAGLE head"
BLOCKS = "DFlash drafter"
ASSISTANT = "assistant"
MTP = "MTP head"
SMALL = "small model"
PARALLEL = "PARD model"
KINDS = HEAD3, HEAD1, BLOCKS, ASSISTANT, MTP, SMALL, PARALLEL
STRATEGIES = {BLOCKS: "dflash", ASSISTANT: "mtp", MTP: "mtp", SMALL: "draft", PARALLEL: "draft"}  # the others' is eagle
# What GGUF files with a draft for the file beside them begin with, as llama.cpp's converter and downloads name them. In
# this order, because a head that was trained with its target is sure to fit.
BESIDE = {"mtp-": MTP, "eagle3-": HEAD3, "dflash-": BLOCKS, "dspark-": BLOCKS}


@dataclass(frozen=True)
class Known:
    """A draft for a target."""

    target: str  # hub id, or the name of a bundled target
    draft: str  # hub id, perhaps with a GGUF file behind it, or the name of a bundled draft
    kind: str  # of KINDS
    source: str  # the page or file that names the pair; "": the draft stands beside the target's file
    tried: bool = False  # this project ran the pair

    @property
    def bundled(self) -> bool:
        return self.draft in zoo.NAMES

    @property
    def gguf(self) -> bool:
        return self.draft.endswith(".gguf")

    @property
    def strategy(self) -> str:
        """The strategy that drafts with it."""
        return STRATEGIES.get(self.kind, "eagle")

    def serves(self, strategy: str | None) -> bool:
        """Whether `strategy` (None: any) drafts with it. A bundled small model stands for the bundled drafts of all
        strategies."""
        if (family := zoo.target_of(self.target)) is not None:
            return strategy is None or strategy in family.drafts
        return strategy in (None, self.strategy) or (strategy == "easyspec" and self.kind == SMALL)


TABLE = Path(__file__).with_name("drafts.tsv")


def read(path: Path = TABLE) -> tuple[Known, ...]:
    """The drafts of a table. The first one for a target is the choice of --draft auto. Heads stand before small models,
    because a head computes one layer for a token. Heads in speculators' layout stand first: their config.json states
    what others leave to convention."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file, delimiter="\t")]
    return tuple(Known(**row | {"tried": row["tried"] == "yes"}) for row in rows)  # type: ignore[arg-type]


KNOWN = read()

# What names of quantised copies end with: Qwen3-8B-FP8, -AWQ, -GPTQ-Int4, -bnb-4bit, -GGUF; .Q4_K_M, -iq3_xxs, -f16.
QUANTISED = re.compile(
    r"[-._](gguf|ud|awq|fp8([-_](dynamic|block|static))?|gptq([-_]int\d)?|int[48]|bnb-4bit|unsloth|[456]bit|mlx|mxfp4"
    r"|(quantized\.)?w\d+a\d+|i?q\d(_\w+)?|b?f(16|32))$"
)


def drafts_for(target: str | Path | None) -> tuple[Known, ...]:
    """What stands beside a target (`beside`), and then what is known for it, in order of preference, those in its
    format first; () if nothing is. `target`: a hub id, a local folder or a
    GGUF file, which need not exist; None: the bundled target. It is recognised by its name: the last part of the id,
    the name of the folder or the file, or the name in a folder's config.json, without what names the form of its
    weights. Bundled targets are recognised by their sizes."""
    if target is None:
        return tuple(known for known in KNOWN if known.target == "code-target")
    names = {_plain(name) for name in _names(target)}
    family = zoo.family_of(_sizes(_config(Path(target).expanduser())))
    found = [known for known in KNOWN if _plain(known.target) in names]
    if not found and family is not None:
        found = [known for known in KNOWN if zoo.target_of(known.target) is family]
    in_gguf = _in_gguf(target)
    return beside(target) + tuple(sorted(found, key=lambda known: known.gguf != in_gguf))


def beside(target: str | Path) -> tuple[Known, ...]:
    """The drafts in GGUF files beside a target's GGUF file, by their names, in order of preference: `BESIDE`, the
    target's name, and the form of their weights. Of several forms the last one by name."""
    path = Path(target).expanduser()
    if path.suffix != ".gguf" or not path.is_file():
        return ()
    own, found = _plain(path.stem).removesuffix("-qat"), {}
    for file in sorted(path.parent.glob("*.gguf")):
        start = next((start for start in BESIDE if file.name.startswith(start)), None)
        if start and _plain(file.stem.removeprefix(start)).removesuffix("-qat") == own:
            found[start] = Known(path.name, str(file), BESIDE[start], "")
    return tuple(found[start] for start in BESIDE if start in found)


def search(text: str) -> tuple[Known, ...]:
    """What has the text in the name of its target or draft, or in its kind, whatever the case."""
    return tuple(known for known in KNOWN if text.lower() in f"{known.target} {known.draft} {known.kind}".lower())


def choose(target: str | Path | None, strategy: str | None = None) -> Known:
    """The first of `drafts_for(target)` that `strategy` (None: any) drafts with. Raises ValueError."""
    every = drafts_for(target)
    for known in every:
        if known.serves(strategy):
            return known
    called = "the bundled target" if target is None else str(target)
    if every:
        raise ValueError(
            f"strategy {strategy!r} can use none of the drafts that are known for {called}: pass {option('draft')}, or "
            f"leave out {option('strategy')} for {every[0].draft}, {_a(every[0].kind)}"
        )
    if (family := zoo.target_of(target)) is not None and family.strategy is not None:
        raise ValueError(f"{called} brings its own draft, for strategy {family.strategy}: leave out {option('draft')}")
    raise ValueError(
        f"no draft is known for {called}: pass {option('draft')}, or leave it out and strategy lookup copies from the "
        "text; `specker drafts` lists the targets with known drafts"
    )


def reason(known: Known, strategy: str) -> str:
    """The sentence that says what `--draft auto` chose for `strategy`, and why."""
    if (family := zoo.target_of(known.target)) is not None:
        return f"drafting with {family.drafts[strategy].name}, which is bundled for {known.target}"
    if not known.source:
        name = Path(known.draft).name
        return f"drafting with {name}, {_a(known.kind)}, because it stands beside the target's file {known.target}"
    every = [other for other in KNOWN if other.target == known.target]
    if len(every) == 1:
        why = "no other draft is known"
    elif known.gguf and known is next(other for other in every if other.gguf):
        why = "it is the first of the known ones in GGUF files, as the target is"
    elif known is not every[0]:
        why = f"strategy {strategy!r} drafts with it"
    else:
        why = "it is the first of the known ones"
    if known.strategy != "draft" and any(other.strategy == "draft" for other in every):
        why = "a head computes one layer for a token, a small model many"
    tried = "this project has run the pair" if known.tried else f"named by {known.source}, not yet run with specker"
    more = f"; `specker drafts {known.target}` lists all {len(every)}" if len(every) > 1 else ""
    return f"drafting with {known.draft}, {_a(known.kind)} for {known.target}, because {why} ({tried}){more}"


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'AEIOU' or kind == MTP else 'a'} {kind}"


def _names(target: str | Path) -> Iterator[str]:
    """What the target may be called."""
    path = Path(target).expanduser()
    if path.suffix == ".gguf":
        yield path.stem
        return
    yield path.absolute().name if path.is_dir() else str(target)
    if path.is_dir():
        yield str(_config(path).get("_name_or_path") or "")
        yield from (file.stem for file in path.glob("*.gguf"))
        # the hub's cache: models--ORG--NAME/snapshots/COMMIT
        yield from (part.split("--")[-1] for part in path.absolute().parts if part.startswith("models--"))


def _in_gguf(target: str | Path) -> bool:
    """Whether the target is a GGUF file, a folder with one, or a hub id that says so."""
    path = Path(target).expanduser()
    return str(target).lower().endswith((".gguf", "-gguf")) or (path.is_dir() and any(path.glob("*.gguf")))


def _plain(name: str) -> str:
    """The last part of a name in lower case, without what names the form of its weights."""
    name = re.sub(r"^meta-(?=llama)", "", name.rstrip("/").split("/")[-1].lower())
    while (short := QUANTISED.sub("", name)) != name:
        name = short
    return name


def _config(folder: Path) -> dict[str, Any]:
    """The content of config.json; {} if there is none that can be read."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _sizes(raw: dict[str, Any]) -> SimpleNamespace:
    """The fields of config.json by which `zoo.family_of` recognises a target."""
    own = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    names = {name for family in zoo.FAMILIES for name in family.sizes}
    return SimpleNamespace(**{name: raw.get(own.get(name, name)) for name in names})
