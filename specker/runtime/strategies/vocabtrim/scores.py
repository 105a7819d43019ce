"""Token frequencies of a vocabulary, and the choice of rows that a trimmed LM head keeps (VocabTrim, arXiv 2506.22694).

specker's own format is a safetensors file with `ids` and `counts`, most frequent first, and one metadata entry with the
version, the vocabulary's size, a hash of the tokenizer, the source of the text and its totals. A safetensors file with
EAGLE-3's kept ids can be read, too: d2t [K] holds OFFSETS, row i is id i + d2t[i], ids ascending; t2d [V], which may be
left out, is a boolean mask of the kept ids.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specker.options import VocabKeep

FORMAT, VERSION = "specker-vocab-scores", 1
SOURCES = ("target", "draft", "text")


@dataclass(frozen=True)
class VocabScores:
    """A ranking of token ids. `counts` is None if the file has none."""

    ids: Tensor  # [n] int64, most frequent first, ties by id; without ids that never occurred
    counts: Tensor | None  # [n] int64
    vocab_size: int | None = None
    tokenizer: str | None = None  # `tokenizer_hash`
    source: str = "text"  # who wrote the text: target, draft or text (files)
    totals: dict[str, int] = field(default_factory=dict)  # such as texts and tokens
    held_out: Tensor | None = None
    """[m + 2] int64, from a tenth of the text: entry i <= m counts its tokens among the first i ids of a ranking by the
    other nine tenths, which has m ids; the last entry counts all its tokens."""

    @classmethod
    def from_counts(cls, counts: Tensor, held: Tensor | None = None, **about: Any) -> "VocabScores":
        """Rank ids by counts [V] int64. `held` [V] int64: the part of the counts that is held-out text."""
        ids = _order(counts)
        curve = None
        if held is not None and 0 < held.sum() < counts.sum():
            covered = held[_order(counts - held)].cumsum(0)
            curve = torch.cat((covered.new_zeros(1), covered, held.sum().view(1)))
        return cls(ids, counts[ids], vocab_size=len(counts), held_out=curve, **about)

    @property
    def tokens(self) -> int:
        return 0 if self.counts is None else int(self.counts.sum())

    def coverage(self, rows: int) -> float:
        """The share of the counted tokens covered by the `rows` most frequent ids. It is in-sample: other text has more
        rare tokens. Raises ValueError without counts."""
        return float(self._counts()[:rows].sum()) / max(1, self.tokens)

    def held_out_coverage(self, rows: int) -> float | None:
        """The share of held-out tokens covered by the `rows` most frequent ids; None if no text was held out."""
        if self.held_out is None:
            return None
        return float(self.held_out[min(rows, len(self.held_out) - 2)]) / float(self.held_out[-1])

    def kept(self, keep: VocabKeep, always: Iterable[int], vocab_size: int) -> Tensor:
        """Ids [K] int64 to keep, ascending: first `always`, then the most frequent ids, then the lowest ids for further
        rows. A coverage is that of held-out text if the file has it. Raises ValueError for a coverage without
        counts."""
        first = torch.tensor(sorted({i for i in always if 0 <= i < vocab_size}), dtype=torch.int64, device="cpu")
        chosen = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
        chosen[first] = True
        if keep.coverage is not None:
            mass = self._counts().cumsum(0) if self.held_out is None else self.held_out[1:-1]
            total = self.tokens if self.held_out is None else int(self.held_out[-1])
            ids = self.ids[: int((mass < keep.coverage * total).sum()) + 1]
            chosen[ids[ids < vocab_size]] = True
            return chosen.nonzero()[:, 0]
        rows = keep.rows if keep.fraction is None else max(1, round(keep.fraction * vocab_size))
        assert rows is not None
        for ids in (self.ids[self.ids < vocab_size], torch.arange(vocab_size, dtype=torch.int64, device="cpu")):
            chosen[ids[~chosen[ids]][: max(0, rows - int(chosen.sum()))]] = True
        return chosen.nonzero()[:, 0]

    def ranked(self, ids: Tensor) -> Tensor:
        """Sort ids [K] by this ranking; ids that never occurred come last, by id."""
        ids = ids.sort().values
        size = 1 + max(int(x.max()) if len(x) else 0 for x in (ids, self.ids))
        place = torch.full((size,), len(self.ids), dtype=torch.int64, device="cpu")
        place[self.ids] = torch.arange(len(self.ids), dtype=torch.int64, device="cpu")
        return ids[place[ids].sort(stable=True).indices]

    def check(self, vocab_size: int, tokenizer: str | None, path: object) -> None:
        """Raise ValueError if the file shows that the ranking has another vocabulary. `path` is for the message. With
        one tokenizer the sizes may differ: models of a family pad their vocabularies differently."""
        known = self.tokenizer is not None and tokenizer is not None
        if known and self.tokenizer != tokenizer:
            raise ValueError(f"{path} was counted with another tokenizer than the target's")
        if not known and self.vocab_size is not None and self.vocab_size != vocab_size:
            raise ValueError(f"{path} ranks a vocabulary of {self.vocab_size} ids, the target's has {vocab_size}")
        top = int(self.ids.max()) if len(self.ids) else -1
        if top >= vocab_size:
            raise ValueError(f"{path} has the id {top}, but the target's vocabulary ends at {vocab_size - 1}")

    def to_bytes(self) -> bytes:
        """Serialise to specker's own format; equal scores give equal bytes."""
        from safetensors.torch import save

        about = {"format": FORMAT, "version": VERSION, "vocab_size": self.vocab_size, "tokenizer": self.tokenizer}
        about |= {"source": self.source, "totals": self.totals}
        tensors = {"ids": self.ids.contiguous(), "counts": self._counts().contiguous()}
        if self.held_out is not None:
            tensors["held_out"] = self.held_out.contiguous()
        return save(tensors, {"specker": json.dumps(about, sort_keys=True)})

    def _counts(self) -> Tensor:
        if self.counts is None:
            raise ValueError("the scores have no counts, only an order: keep a number or a fraction, not a coverage")
        return self.counts


def _order(counts: Tensor) -> Tensor:
    """The ids that occur, most frequent first, ties by id."""
    return torch.sort(counts, descending=True, stable=True).indices[: int((counts > 0).sum())]


def special_ids(tokenizer: Any) -> set[int]:
    """Ids that a chat template or the tokenizer inserts; text statistics underestimate them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}


def tokenizer_hash(tokenizer: Any) -> str:
    """A SHA-256 of every token with its id."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]), ensure_ascii=True)
    return hashlib.sha256(tokens.encode()).hexdigest()


# --- files


def read(path: str | Path) -> VocabScores:
    """Read a file in either format. Raises ValueError if it is missing, corrupt or something else."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such vocabulary score file")
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: expected .safetensors, with specker's scores or EAGLE-3's d2t")
    scores = _read(path)
    if not len(scores.ids):
        raise ValueError(f"{path} ranks no ids")
    return scores


def tokenizer_of(path: Path) -> str | None:
    """The tokenizer's hash in a file of specker's own format, without reading the scores; None if there is no such file
    or hash."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found = json.loads((file.metadata() or {})["specker"])["tokenizer"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _read(path: Path) -> VocabScores:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = (file.metadata() or {}).get("specker")
            names = ("ids", "counts", "held_out", "d2t", "t2d")
            tensors = {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt or truncated ({error})") from error
    if "d2t" in tensors:
        return _offsets(tensors["d2t"], tensors.get("t2d"), path)
    try:
        facts = json.loads(about or "")
    except json.JSONDecodeError:
        facts = None
    if facts is None or not {"ids", "counts"} <= set(tensors):
        raise ValueError(f"{path} holds neither vocabulary scores nor EAGLE-3's d2t")
    if facts.get("format") != FORMAT or facts.get("version") != VERSION:
        is_ = f"{facts.get('format')} version {facts.get('version')}"
        raise ValueError(f"{path} is {is_}; this reads {FORMAT} version {VERSION}")
    known = {name: facts[name] for name in ("vocab_size", "tokenizer", "source", "totals")}
    ids, counts = distinct(tensors["ids"], path), tensors["counts"]
    if counts.shape != ids.shape or bool((counts[1:] > counts[:-1]).any()) or bool((counts < 1).any()):
        raise ValueError(f"{path}: expected one count per id, positive and descending")
    held_out = tensors.get("held_out")
    if held_out is not None and (len(held_out) < 3 or bool((held_out.diff() < 0).any()) or not held_out[-1]):
        raise ValueError(f"{path}: expected held-out counts that never decrease")
    return VocabScores(ids, counts, held_out=held_out, **known)


def distinct(ids: Tensor, path: object) -> Tensor:
    """A file's ids as int64. Raises ValueError unless they are a vector [n] of integers from 0, each once."""
    ids = _vector(ids, path)
    if len(ids) and int(ids.min()) < 0:
        raise ValueError(f"{path} has the id {int(ids.min())}; ids start at 0")
    seen, times = ids.unique(return_counts=True)
    if len(seen) < len(ids):
        raise ValueError(f"{path} has the id {int(seen[times > 1][0])} {int(times.max())} times")
    return ids


def _vector(ids: Tensor, path: object) -> Tensor:
    if ids.dim() != 1 or (len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool)):
        raise ValueError(f"{path} must be a vector of integers, got {tuple(ids.shape)} {ids.dtype}")
    return ids.long()


def _offsets(d2t: Tensor, t2d: Tensor | None, path: Path) -> VocabScores:
    """Row i is id i + d2t[i]. Ids ascend, so d2t never decreases, and it is constant over adjacent kept ids."""
    d2t = _vector(d2t, path)
    ids = torch.arange(len(d2t), dtype=torch.int64, device="cpu") + d2t
    rising = d2t[1:] > d2t[:-1]
    if len(d2t) and (int(d2t[0]) < 0 or bool((d2t[1:] < d2t[:-1]).any()) or (len(d2t) > 8 and bool(rising.all()))):
        raise ValueError(f"{path}: d2t must hold offsets (id = row + d2t[row]), but these look like absolute ids")
    if t2d is None:
        return VocabScores(ids, None)
    if not torch.equal(t2d.bool().nonzero()[:, 0], ids):
        raise ValueError(f"{path}: d2t and t2d keep different ids; are d2t's entries offsets (id = row + d2t[row])?")
    return VocabScores(ids, None, vocab_size=len(t2d))
