"""The paper's five approaches side by side, on held-out records."""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from examples.adr.finetune import Split
from examples.adr.index import Index
from examples.adr.prompts import fit
from examples.adr.records import Record

RESAMPLES = 1000  # of the records, for an interval


@dataclass(frozen=True)
class Approach:
    name: str
    target: str
    examples: str  # "none", "fixed" or "retrieved"


def approaches(base: str, finetuned: str | None, tuned: str | None) -> list[Approach]:
    """`finetuned`: a checkpoint tuned without examples; `tuned`: with retrieved ones (DRAFT)."""
    out = [Approach("zero-shot", base, "none"), Approach("few-shot", base, "fixed")]
    out.append(Approach("retrieval few-shot", base, "retrieved"))
    if finetuned is not None:
        out.append(Approach("fine-tuned", finetuned, "none"))
    if tuned is not None:
        out.append(Approach("DRAFT", tuned, "retrieved"))
    return out


def split_of(index: Index, folders: list[str | None], held_out: str, seed: int) -> Split:
    """The split that the checkpoints were trained with; without checkpoints a new one. Raises ValueError if they
    differ, or belong to other records."""
    splits = []
    for folder in filter(None, folders):
        try:
            row = json.loads((Path(folder) / "split.json").read_text())
            splits.append(Split(row["training"], row["held_out"]))
        except (OSError, ValueError, KeyError):
            raise ValueError(f"{folder}: no checkpoint of `finetune`, which writes split.json") from None
    if not splits:
        return Split.of(index, held_out, seed)
    if any(split != splits[0] for split in splits):
        raise ValueError("the two checkpoints were trained on different records")
    if not set(splits[0].training + splits[0].held_out) <= {record.path for record in index.records}:
        raise ValueError("the checkpoints were trained on records that the index lacks")
    return splits[0]


def prompts(
    approach: Approach, tokenizer: Any, index: Index, split: Split, held: list[Record], count: int, room: int, seed: int
) -> Iterator[list[int]]:
    """A prompt for each held-out record. Examples come from the training records alone."""
    among = set(split.training)
    training = [r for r in index.records if r.path in among]
    fixed = random.Random(seed).sample(training, min(count, len(training)))
    for record in held:
        found = {
            "none": lambda record: [],
            "fixed": lambda record: fixed,
            "retrieved": lambda r: index.search(f"{r.title}\n{r.context}", count, without=r, among=among),
        }[approach.examples](record)
        yield fit(tokenizer, record.context, found, room, record.title)[0]


def decode(
    engine: Any, ids: list[list[int]], max_new_tokens: int, tell: Callable[[int], None]
) -> tuple[list[str], dict[str, float]]:
    """The decisions, greedily, and tokens/s and acceptance length over all of them."""
    texts, tokens, rounds = [], 0, 0
    start = time.perf_counter()
    for n, prompt in enumerate(ids, 1):
        done = engine.generate(prompt, max_new_tokens)
        texts.append(done.text.strip())
        tokens, rounds = tokens + len(done.tokens), rounds + done.stats.rounds
        tell(n)
    seconds = time.perf_counter() - start
    return texts, {"tokens_per_second": tokens / seconds, "acceptance_length": tokens / max(1, rounds)}


def scores(texts: list[str], wanted: list[str], seed: int = 0) -> dict[str, Any]:
    """ROUGE-1 and ROUGE-L (F1, stemmed), the 95% interval of ROUGE-L's mean over resampled records, and corpus BLEU;
    all of 100."""
    scorer = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    each = [scorer.score(want, text) for text, want in zip(texts, wanted, strict=True)]
    one, longest = (np.array([100 * s[name].fmeasure for s in each]) for name in ("rouge1", "rougeL"))
    draws = np.random.default_rng(seed).integers(0, len(longest), (RESAMPLES, len(longest)))
    low, high = np.percentile(longest[draws].mean(1), [2.5, 97.5])
    return {
        "rouge1": float(one.mean()),
        "rougeL": float(longest.mean()),
        "rougeL_interval": [float(low), float(high)],
        "bleu": sacrebleu.corpus_bleu(texts, [wanted]).score,
        "each": [{"rouge1": float(a), "rougeL": float(b)} for a, b in zip(one, longest, strict=True)],
    }


def bertscore(texts: list[str], wanted: list[str], model: str) -> float:
    """The mean F1 of BERTScore with a local model, of 100. Raises ValueError without the package."""
    try:
        from bert_score import score
    except ImportError:
        raise ValueError("--bertscore needs bert-score: pip install bert-score") from None
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    return float(100 * score(texts, wanted, model_type=model, num_layers=layers)[2].mean())


def evaluate(
    index: Index,
    split: Split,
    chosen: list[Approach],
    load: Callable[[str], Any],
    examples: int,
    max_new_tokens: int,
    count: int = 0,
    seed: int = 0,
    bert: str | None = None,
    tell: Callable[[str, int, int], None] = lambda name, done, of: None,
) -> Iterator[dict[str, Any]]:
    """A row for each approach: its scores, its speed and, for each record, the text. `load(target)` gives specker's
    engine. `count`: the first so many held-out records; 0: all."""
    by_path = {record.path: record for record in index.records}
    held = [by_path[path] for path in split.held_out][: count or None]
    if not held:
        raise ValueError("no record is held out")
    wanted = [record.decision for record in held]
    for approach in chosen:
        engine = load(approach.target)
        room = engine.target.config.max_context - max_new_tokens
        ids = list(prompts(approach, engine.tokenizer, index, split, held, examples, room, seed))
        texts, speed = decode(engine, ids, max_new_tokens, lambda n, a=approach: tell(a.name, n, len(held)))
        row = {"approach": approach.name, "target": approach.target, "records": len(held), **speed}
        found = scores(texts, wanted, seed)
        each = [
            {"path": record.path, **one, "text": text}
            for record, one, text in zip(held, found.pop("each"), texts, strict=True)
        ]
        row |= found | ({"bertscore": bertscore(texts, wanted, bert)} if bert else {})
        yield row | {"each": each}


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines, by way of a temporary file."""
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(part, path)
