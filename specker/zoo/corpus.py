"""The corpus: Python source under permissive licences from the standard library and an allow-list of distributions.

Order, selection and the held-out prompts are fixed by the constants here and by the versions installed, which
`corpus.json` records.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import random
import re
import sysconfig
from pathlib import Path

import numpy as np

EOS, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"  # ids 0, 1, 2

# distribution -> licence, checked against its metadata; what is absent on a machine is left out and so recorded
ALLOWED = {
    "annotated-types": "MIT", "anyio": "MIT", "click": "BSD-3-Clause", "contourpy": "BSD-3-Clause",
    "filelock": "MIT", "fonttools": "MIT", "fsspec": "BSD-3-Clause", "h11": "MIT", "httpcore2": "BSD-3-Clause",
    "httpx2": "BSD-3-Clause", "huggingface_hub": "Apache-2.0", "iniconfig": "MIT", "Jinja2": "BSD-3-Clause",
    "markdown-it-py": "MIT", "MarkupSafe": "BSD-3-Clause", "matplotlib": "PSF-2.0", "mpmath": "BSD-3-Clause",
    "mypy": "MIT", "networkx": "BSD-3-Clause", "numpy": "BSD-3-Clause", "packaging": "Apache-2.0 OR BSD-2-Clause",
    "pillow": "MIT-CMU", "pip": "MIT", "pluggy": "MIT", "pydantic": "MIT", "Pygments": "BSD-2-Clause",
    "pyparsing": "MIT", "pytest": "MIT", "pytest-benchmark": "BSD-2-Clause", "python-dateutil": "BSD-3-Clause",
    "PyYAML": "MIT", "regex": "Apache-2.0", "rich": "MIT", "safetensors": "Apache-2.0", "setuptools": "MIT",
    "sympy": "BSD-3-Clause", "tokenizers": "Apache-2.0", "torch": "BSD-3-Clause", "transformers": "Apache-2.0",
    "triton": "MIT", "truststore": "MIT", "typer": "MIT", "typing_extensions": "PSF-2.0", "typing-inspection": "MIT",
}  # fmt: skip
# never trained on: these modules, and every file that shares their last two path components (vendored copies)
HELD_OUT = (
    "argparse.py", "bisect.py", "calendar.py", "configparser.py", "csv.py", "difflib.py", "fractions.py", "gettext.py",
    "heapq.py", "json/decoder.py", "queue.py", "sched.py", "shlex.py", "statistics.py", "textwrap.py", "graphlib.py",
    "networkx/algorithms/shortest_paths/weighted.py", "networkx/algorithms/tree/mst.py", "networkx/utils/heaps.py",
    "sympy/ntheory/primetest.py", "sympy/geometry/polygon.py", "rich/table.py", "rich/progress.py",
    "numpy/lib/_polynomial_impl.py", "matplotlib/ticker.py", "torch/optim/adamax.py", "torch/utils/data/sampler.py",
    "transformers/generation/stopping_criteria.py", "setuptools/_path.py", "jinja2/lexer.py", "click/formatting.py",
    "packaging/version.py",
)  # fmt: skip
STDLIB_HELD_OUT = frozenset(p for p in HELD_OUT if p.count("/") == 0 or p.startswith("json/"))
CAP = 12_000_000  # bytes of one distribution
SKIP_PARTS = {"tests", "test", "testing", "_vendor", "_vendored_packages", "vendor", "idlelib", "lib2to3", "site-packages",
              "unicode_data", "turtledemo", "pydoc_data", "encodings", "mypyc", "typeshed", "__pycache__"}  # fmt: skip
SKIP_FILE = re.compile(r"(_mapping|_builtins|lextab|yacctab|sre_constants|_cm(_listed)?|_generated.*|generated_.*|unistring)\.py$|^test_|_pb2")


def is_held_out(rel: str) -> bool:
    """`rel`: path below the library root. Copies elsewhere (pip/_vendor/rich/table.py) are held out with the original."""
    if rel in HELD_OUT:
        return True
    return any(rel.endswith("/" + "/".join(p.split("/")[-2:])) for p in HELD_OUT if "/" in p)


def library_files(stdlib: bool = True) -> dict[str, tuple[str, str, list[tuple[str, Path]]]]:
    """name -> (version, licence, [(relative path, file)]) in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    if stdlib:
        files = sorted((p.relative_to(root).as_posix(), p) for p in root.rglob("*.py") if "site-packages" not in p.parts)
        found["python"] = (platform.python_version(), "PSF-2.0", files)
    for name in sorted(ALLOWED, key=str.lower):
        try:
            dist = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        files = sorted((str(f), Path(dist.locate_file(f))) for f in dist.files or [] if f.suffix == ".py")
        found[name] = (dist.version, ALLOWED[name], [(r, p) for r, p in files if p.is_file()])
    return found


def readable(rel: str, path: Path) -> str | None:
    """The text, or None for what teaches little: tests, vendored copies, generated tables, very long lines."""
    parts = rel.split("/")
    if SKIP_PARTS & set(parts[:-1]) or SKIP_FILE.search(parts[-1]) or not 200 < path.stat().st_size < 250_000:
        return None
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    lines = text.split("\n")
    digits = sum(ch.isdigit() for ch in text)
    head = text[:600].lower()
    if max(map(len, lines)) > 400 or digits > 0.12 * len(text) or "\t" in text or not text.isascii():
        return None
    if "generated by" in head or "automatically generated" in head or "do not edit" in head:
        return None
    return text


def without_licence(text: str) -> str:
    """Drops the licence comment at the head of a file: the same fifteen lines a thousand times over."""
    lines = text.split("\n")
    n = 0
    while n < len(lines) and (lines[n].startswith("#") or not lines[n].strip()):
        n += 1
    block = "\n".join(lines[:n])
    return "\n".join(lines[n:]) if re.search(r"licen[sc]e|copyright", block, re.I) else text


def without_repeats(text: str, seen: set[bytes], size: int = 12) -> str | None:
    """Drops runs of `size` lines seen before (copied modelling code); None when most of the file is one."""
    lines = text.split("\n")
    kept = []
    for i in range(0, len(lines), size):
        run = lines[i : i + size]
        key = hashlib.blake2b("\n".join(x.strip() for x in run).encode(), digest_size=8).digest()
        # compare at every offset of earlier files is dear; aligned windows of this file against all offsets of others is not
        if len(run) < size or key not in seen:
            kept.append((run, True))
        else:
            kept.append((run, False))
    if sum(k for _, k in kept) < 0.6 * len(kept):
        return None
    for i in range(0, max(0, len(lines) - size + 1)):
        seen.add(hashlib.blake2b("\n".join(x.strip() for x in lines[i : i + size]).encode(), digest_size=8).digest())
    return text


def collect(limit: int | None = None) -> tuple[list[str], list[tuple[str, str]], dict]:
    """(training texts in a seeded order, [(module, text)] held out, the record for corpus.json). `limit`: bytes in all."""
    texts, held, record, seen_files, seen_runs = [], [], [], set(), set()
    for name, (version, licence, files) in library_files().items():
        order = files[:]
        random.Random(f"specker {name}").shuffle(order)
        count = size = 0
        for rel, path in order:
            if rel in HELD_OUT and (name != "python") == (rel not in STDLIB_HELD_OUT):
                held.append((rel, path.read_text()))
                continue
            if is_held_out(rel) or size >= CAP:
                continue
            text = readable(rel, path)
            digest = hashlib.blake2b((text or "").encode()).digest()
            if text is None or digest in seen_files:
                continue
            seen_files.add(digest)
            text = without_repeats(without_licence(text), seen_runs)
            if text is None or len(text) < 200:
                continue
            texts.append(text.strip("\n") + "\n")
            count, size = count + 1, size + len(text)
        record.append({"name": name, "version": version, "licence": licence, "files": count, "bytes": size})
    random.Random("specker order").shuffle(texts)
    if limit:
        total, keep = 0, 0
        while keep < len(texts) and total < limit:
            total, keep = total + len(texts[keep]), keep + 1
        texts = texts[:keep]
    return texts, sorted(held), {"distributions": record, "held_out": list(HELD_OUT), "bytes": sum(map(len, texts))}


def train_tokenizer(texts: list[str], vocab: int):
    """Byte-level BPE of exactly `vocab` ids; runs of blanks and newline + indentation stay whole before the merges."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    # words with one leading blank, up to three digits, punctuation runs, newlines with the indentation behind them, blanks
    pattern = r" ?[A-Za-z]+| ?_+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9_]+|(?:\n[ ]*)+|[^\S\n]+(?=[^\s])|\s+"
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS, MASK, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=48,
    )
    tok.train_from_iterator(texts, trainer)
    if tok.get_vocab_size() != vocab:
        raise ValueError(f"expected a vocabulary of {vocab} ids, the corpus gave {tok.get_vocab_size()}")
    return tok


def encode(tok, texts: list[str]) -> np.ndarray:
    """All texts, each ended by <|endoftext|>, as one uint16 row."""
    rows = []
    for i in range(0, len(texts), 256):
        for e in tok.encode_batch(texts[i : i + 256], add_special_tokens=False):
            rows.append(np.asarray([*e.ids, 0], dtype=np.uint16))
    return np.concatenate(rows)


def prompts(held: list[tuple[str, str]], tok, count: int = 96, seed: int = 0) -> list[dict]:
    """`count` beginnings of functions and classes of the held-out modules, 64..160 tokens, cut inside the body."""
    rng, pool = random.Random(seed), []
    for module, text in held:
        lines = text.split("\n")
        starts = [i for i, x in enumerate(lines) if re.match(r"\s*(async )?(def|class) \w", x)]
        mine = []
        for i in starts:
            want, end = rng.randint(64, 160), i + 3
            while end < len(lines) and len(tok.encode("\n".join(lines[i:end])).ids) < want:
                end += 1
            prompt = "\n".join(lines[i:end])  # no newline at the end: it would split a newline + indentation token
            indent = len(lines[i]) - len(lines[i].lstrip())
            inside = any(x.strip() for x in lines[end : end + 3])
            if 64 <= len(tok.encode(prompt).ids) <= 176 and inside and not re.search(r"[^\x00-\x7f]", prompt):
                mine.append({"prompt": prompt, "source": f"{module}:{i + 1}", "indent": indent})
        rng.shuffle(mine)
        pool.append(mine)
    chosen = []
    while len(chosen) < count and any(pool):  # round robin: every module has its share
        for mine in pool:
            if mine and len(chosen) < count:
                row = mine.pop()
                chosen.append({"prompt": row["prompt"], "source": row["source"]})
    return chosen


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
