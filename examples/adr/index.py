"""Retrieval of records by their context: BM25, or vectors of a sentence-transformers model."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from numpy.typing import NDArray

from examples.adr.records import Record, as_rows, trigrams, words

VERSION = 1
NEAR = 0.5  # of two texts' trigrams. Revisions of one decision share more, two decisions on one subject under 0.2


@dataclass
class Index:
    records: list[Record]
    dense: str | None  # the sentence-transformers model; None: BM25
    vectors: NDArray[np.float32]  # [records, D] of length 1; [0, 0] for BM25

    def __post_init__(self) -> None:
        self._grams = [trigrams(record.text) for record in self.records]
        self._model: Any = None
        self._bm25 = None
        if self.dense is None:
            self._bm25 = bm25s.BM25()
            self._bm25.index([_terms(_key(record)) for record in self.records], show_progress=False)

    @classmethod
    def build(cls, records: list[Record], dense: str | None = None) -> "Index":
        """`dense`: a sentence-transformers model, a folder or hub id. Raises ValueError if it cannot be loaded."""
        vectors = np.zeros((0, 0), np.float32)
        if dense is not None:
            vectors = _encoded(_encoder(dense), [_key(record) for record in records])
        return cls(records, dense, vectors)

    def save(self, path: Path) -> None:
        """Write one file, by way of a temporary one beside it."""
        head = json.dumps({"version": VERSION, "dense": self.dense, "records": as_rows(self.records)})
        part = path.with_name(path.name + ".part")
        try:
            with part.open("wb") as file:
                np.savez_compressed(file, head=np.array(head), vectors=self.vectors)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "Index":
        """Raises ValueError for a file that `save` of this version did not write."""
        if not path.is_file():
            raise ValueError(f"{path}: no such index; make one with `python -m examples.adr index DIR --out {path}`")
        try:
            with np.load(path, allow_pickle=False) as file:
                head, vectors = json.loads(str(file["head"])), file["vectors"]
            if head["version"] == VERSION:
                return cls([Record(**row) for row in head["records"]], head["dense"], vectors)
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            raise ValueError(f"{path}: not an index of decision records") from None
        raise ValueError(f"{path}: an index of version {head['version']}, not {VERSION}: make it again")

    def search(
        self, query: str, count: int, without: Record | None = None, among: set[str] | None = None
    ) -> list[Record]:
        """The `count` records whose title and context match the query best, the best first, ties by path. Left out are
        `without` and everything like it (`alike`), and records whose path is not `among` these."""
        scores = self._scores(query)
        order = sorted(range(len(self.records)), key=lambda n: (-scores[n], self.records[n].path))
        grams = None if without is None else trigrams(without.text)
        found: list[Record] = []
        for n in order:
            record = self.records[n]
            if len(found) == count or (among is not None and record.path not in among):
                continue
            if without is None or grams is None or not self._alike(n, without, grams):
                found.append(record)
        return found

    def alike(self, record: Record) -> list[Record]:
        """The records that are `record`, nearly so, or share its title in its repository."""
        grams = trigrams(record.text)
        return [other for n, other in enumerate(self.records) if self._alike(n, record, grams)]

    def _alike(self, n: int, record: Record, grams: set[tuple[str, ...]]) -> bool:
        other, own = self.records[n], self._grams[n]
        if other.path == record.path:
            return True
        if (other.repository, words(other.title)) == (record.repository, words(record.title)):
            return True
        return len(grams & own) >= NEAR * len(grams | own)

    def _scores(self, query: str) -> NDArray[np.float32]:
        if self._bm25 is not None:
            known = [term for term in _terms(query) if term in self._bm25.vocab_dict]
            return self._bm25.get_scores(known) if known else np.zeros(len(self.records), np.float32)
        assert self.dense is not None
        self._model = self._model or _encoder(self.dense)
        return self.vectors @ _encoded(self._model, [query])[0]


def _key(record: Record) -> str:
    """What a record is found by. Not its decision: a new context has none."""
    return f"{record.title}\n{record.context}"


def _terms(text: str) -> list[str]:
    """Lower-case words without English stop words. No stemming: product names and their plurals differ in meaning, and
    it would be one more dependency."""
    tokens = bm25s.tokenize([text], stopwords="en", return_ids=False, show_progress=False)
    return list(tokens[0])


def _encoder(name: str) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise ValueError("--dense needs sentence-transformers: pip install '.[adr-dense]'") from None
    try:
        return SentenceTransformer(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--dense {name}: {str(error).splitlines()[0]}") from None


def _encoded(model: Any, texts: list[str]) -> NDArray[np.float32]:
    return np.asarray(model.encode(texts, normalize_embeddings=True), np.float32)
