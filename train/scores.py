"""Count the tokens of the answers that a chat model wrote (train/corpus.py).

    python -m train.scores --target DIR --corpus corpus --out models/specker_models/smollm2

writes OUT-vocab_scores.safetensors for strategy vocabtrim and OUT-ngram.safetensors for diffuspec's path search. Every
tenth conversation is held out of the ranking, to measure its coverage.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import HfArgumentParser

from specker.checkpoints.checkpoint import read_config, read_tokenizer
from specker.cli.calibrate import HELD_OUT, show
from specker.paths import write_file
from specker.runtime.strategies.blocks.ngram import NGram, NGramCounts
from specker.runtime.strategies.vocabtrim.scores import VocabScores, tokenizer_hash


@dataclass
class Args:
    target: str = field(metadata={"help": "checkpoint folder of the chat model"})
    corpus: str = field(metadata={"help": "folder of train/corpus.py"})
    out: str = field(metadata={"help": "beginning of the names of the files to write"})
    ngram_least: int = field(default=6, metadata={"help": "drop n-grams seen fewer times"})


def answers(corpus: Path) -> list[np.ndarray]:
    """The token ids of each answer."""
    found = []
    for path in sorted(corpus.glob("*.npz")):
        with np.load(path) as shard:
            texts = np.split(shard["ids"].astype(np.int64), shard["ends"][:-1])
            found += [text[start:] for text, start in zip(texts, shard["answers"], strict=True)]
    return found


def main() -> None:
    (args,) = HfArgumentParser(Args).parse_args_into_dataclasses()
    texts, vocab = answers(Path(args.corpus)), read_config(args.target).vocab_size
    if not texts:
        raise SystemExit(f"{args.corpus} has no shards: write some with train/corpus.py")
    counts, held = torch.zeros(2, vocab, dtype=torch.int64)
    trigrams = NGramCounts(vocab)
    for n, text in enumerate(texts):
        found = torch.bincount(torch.from_numpy(text), minlength=vocab)
        counts += found
        if n % HELD_OUT == HELD_OUT - 1:
            held += found
        trigrams.add(text.tolist())
    totals = {"texts": len(texts), "tokens": int(counts.sum())}
    digest = tokenizer_hash(read_tokenizer(args.target))
    scores = VocabScores.from_counts(counts, held, tokenizer=digest, source="target", totals=totals)
    ngram = NGram.fit(trigrams, args.ngram_least, tokenizer=digest, totals=totals)
    write_file(f"{args.out}-vocab_scores.safetensors", scores.to_bytes())
    write_file(f"{args.out}-ngram.safetensors", ngram.to_bytes())
    show(scores)


if __name__ == "__main__":
    main()
