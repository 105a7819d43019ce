"""Count the tokens of text, for a trimmed LM head and for a path search: `specker calibrate --help`.

--draft makes the target faster and does not change the text. One run can write both --out and --ngram. OUT.part holds
the counts while the command runs; after a kill, the same command resumes from it and writes the same files. One block
of text in ten is held out. The command prints the in-sample coverage of all text, and the held-out coverage of those
blocks with a ranking by the other text.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from specker.cli.flags import MODEL
from specker.cli.prompts import encode, read_conversations
from specker.command.exits import run_cli
from specker.command.parser import SHELLS, Parser, completion
from specker.fields import check_fields, make, opt
from specker.options import DTYPES, MAX_BATCH, Sampling
from specker.paths import probe, write_file

SAVE_EVERY = 5.0  # seconds
BLOCK = 4096  # tokens of a file that are counted or held out together; a text that a model writes is one block
HELD_OUT = 10  # one block in this many is held out
ROWS = tuple(1 << n for n in range(10, 17))  # 1k..64k


@dataclass(frozen=True)
class Calibration:
    target: str | None = opt(None, "model whose vocabulary to count (default: the bundled code-target)", MODEL)
    draft: str | None = opt(None, "model that writes with --source draft; else it speeds up the target", MODEL)
    prompts: str | None = opt(None, "JSON lines with `prompt`, `turns` or `messages`; a model continues them", "FILE|-")
    text: tuple[str, ...] = opt((), "count these files, without a model", "FILE")
    source: str = opt("target", "the model that continues the prompts: target or draft", choices=("target", "draft"))
    max_new_tokens: int = opt(128, "tokens to write after each prompt", least=1)
    batch_size: int = opt(1, "prompts to continue at once; the text does not depend on it", least=1, most=MAX_BATCH)
    chat: bool = opt(False, "wrap prompts in the target's chat template")
    out: str | None = opt(None, "the score file to write, .safetensors", "FILE")
    ngram: str | None = opt(None, "the n-gram model to write, .safetensors (for --strategy diffuspec)", "FILE")
    ngram_least: int = opt(2, "with --ngram: drop n-grams seen fewer times", least=1)
    scores: str | None = opt(None, "show this score file instead of counting", "FILE")
    dtype: str | None = opt(None, "of weights and K/V (default: as of specker)", choices=DTYPES)
    device: str | None = opt(None, "where to run (default: cuda if available)", offers=("cpu", "cuda"))

    def __post_init__(self) -> None:
        sources = [name for name in ("prompts", "text", "scores") if getattr(self, name)]
        if len(sources) != 1:
            raise ValueError("give one of --prompts FILE, --text FILE... and --scores FILE")
        if self.scores and (self.out or self.ngram):
            raise ValueError("--scores excludes --out and --ngram")
        written = [name for name in (self.out, self.ngram) if name is not None]
        if not self.scores and (not written or any(Path(name).suffix != ".safetensors" for name in written)):
            raise ValueError(
                "--out must name the score file to write, --ngram the n-gram model, ending in .safetensors"
            )
        if len({Path(name).resolve() for name in written}) < len(written):
            raise ValueError(f"--out and --ngram are both {self.out}: name two files")
        check_fields(self)


GROUPS = {
    "text to count: one of --prompts, --text and --scores": (
        "prompts",
        "chat",
        "max_new_tokens",
        "batch_size",
        "text",
        "scores",
    ),
    "models": ("target", "draft", "source", "device", "dtype"),
    "output": ("out", "ngram", "ngram_least"),
    "sampling of the text that a model writes; prompt n uses the seed SEED + n": (
        *("temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "logit_bias"),
    ),
}
EPILOG = """\
examples:
  specker-calibrate --prompts questions.jsonl --out scores.safetensors
  specker-calibrate --prompts questions.jsonl --source draft --out scores.safetensors
  specker-calibrate --text corpus.txt --out scores.safetensors
  specker-calibrate --prompts questions.jsonl --ngram ngram.safetensors
  specker-calibrate --scores scores.safetensors
  source <(specker-calibrate --print-completion bash)  # completion in this shell

exit codes: 0 success; 1 specker failed; 2 a mistake in the command or its files;
130 after Ctrl-C: the same command resumes; 141 if the reader of stdout closed it
"""


def parser() -> Parser:
    top = Parser(
        "specker-calibrate",
        "specker-calibrate [flags]",
        "Count the tokens of text, for a trimmed LM head and for a path search.",
        EPILOG,
    )
    top.arrange(GROUPS, Calibration, Sampling)
    more, about = "more help", "print a script that completes this command in a shell"
    top.prints(more, "-h", "--help", help="show every flag", text=lambda _: top.format_help())
    top.prints(more, "--print-completion", help=about, text=lambda shell: completion(parser(), shell), choices=SHELLS)
    return top


def parse(argv: Sequence[str] | None = None) -> tuple[Calibration, Sampling]:
    values = vars(parser().parse_args(argv))
    return make(Calibration, values), make(Sampling, values)


def run(job: Calibration, sampling: Sampling) -> int:
    from specker.runtime.strategies.vocabtrim import scores as vocab_scores

    if job.scores:
        show(vocab_scores.read(job.scores))
        return 0
    for name, flag in ((job.out, "--out"), (job.ngram, "--ngram")):
        if name is not None:
            probe(name, flag)
    scores, ngram = count(job, sampling)
    if job.out is not None:
        write_file(job.out, scores.to_bytes())
    if job.ngram is not None:
        write_file(job.ngram, ngram.to_bytes())
    _part(job).unlink(missing_ok=True)
    show(scores)
    if job.ngram is not None:
        print(f"{len(ngram.trigrams):,} trigrams and {len(ngram.bigrams):,} bigrams in {job.ngram}", file=sys.stderr)
    return 0


def count(job: Calibration, sampling: Sampling) -> tuple[Any, Any]:
    """Count the job's text: (VocabScores, NGram or None without --ngram). Resumes an earlier run of the same job."""
    import torch

    from specker.runtime.strategies.blocks.ngram import NGram
    from specker.runtime.strategies.vocabtrim import scores as vocab_scores

    texts, vocab_size, tokenizer, fingerprint = _texts(job, sampling)
    what = [fingerprint, asdict(sampling), job.max_new_tokens, job.chat, job.ngram is not None]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    part = _part(job)
    done, counts, held, trigrams = _resume(part, key, vocab_size)
    saved = time.monotonic()
    for n, ids in _progress(texts, done, len(fingerprint) - 1):
        for block, tokens in enumerate(torch.tensor(ids, dtype=torch.int64, device="cpu").split(BLOCK)):
            found = torch.bincount(tokens, minlength=vocab_size)[:vocab_size]
            counts += found
            if (n + block) % HELD_OUT == HELD_OUT - 1:
                held += found
        if job.ngram is not None:
            trigrams.add(ids)
        done = n + 1
        if time.monotonic() - saved > SAVE_EVERY:
            _save(part, key, done, counts, held, trigrams)
            saved = time.monotonic()
    _save(part, key, done, counts, held, trigrams)
    if not counts.sum():
        raise ValueError("the text has no tokens")
    totals = {"texts": done, "tokens": int(counts.sum())}
    source = "text" if job.text else job.source
    digest = vocab_scores.tokenizer_hash(tokenizer)
    scores = vocab_scores.VocabScores.from_counts(counts, held, tokenizer=digest, source=source, totals=totals)
    if job.ngram is None:
        return scores, None
    return scores, NGram.fit(trigrams, job.ngram_least, tokenizer=digest, totals=totals)


def _texts(job: Calibration, sampling: Sampling) -> tuple[Any, int, Any, list[str]]:
    """(n -> token ids of text n, vocabulary size, tokenizer, the models and texts that identify the job)."""
    from specker import zoo
    from specker.checkpoints.checkpoint import read_config, read_tokenizer
    from specker.runtime.load import load  # not specker.load: a folder `specker` here would hide the package

    target = zoo.source_of(job.target or zoo.path("code-target"))
    if job.text:
        config, tokenizer = read_config(target), read_tokenizer(target)
        files = [Path(name).read_bytes() for name in job.text]
        digests = [hashlib.sha256(data).hexdigest() for data in files]

        def raw(n: int) -> list[int]:
            return list(tokenizer(files[n].decode(errors="replace"), add_special_tokens=False)["input_ids"])

        return raw, config.vocab_size, tokenizer, [str(target), *digests]
    conversations = read_conversations(prompts=job.prompts, chat=job.chat)
    asked = [
        ([*each.before, {"role": "user", "content": turn}], each.where) for each in conversations for turn in each.turns
    ]
    how: dict[str, Any] = {"device": job.device, "dtype": job.dtype, "batch_size": job.batch_size}
    if job.source == "draft":
        if job.target is not None and job.draft is None:
            raise ValueError(f"--source draft needs --draft beside --target {job.target}")
        engine = load(job.draft or zoo.path("code-draft"), strategy="ar", **how)
    else:
        fast = job.draft is not None or job.target is None
        engine = load(job.target, job.draft, strategy="draft" if fast else "ar", **how)
    vocab_size = read_config(target).vocab_size

    prompts = [encode(engine, messages, where, job.chat) for messages, where in asked]
    ahead: dict[int, list[int]] = {}  # texts of the last batch that were not asked for yet

    def written(n: int) -> list[int]:
        if n not in ahead:
            numbers = range(n, min(n + job.batch_size, len(prompts)))
            options = {**asdict(sampling), "seed": [(sampling.seed + i) % 2**64 for i in numbers]}
            these: Any = [prompts[i] for i in numbers]
            done = engine.generate(these, job.max_new_tokens, **options)
            ahead.clear()
            ahead.update((i, text.tokens) for i, text in zip(numbers, done, strict=True))
        return ahead.pop(n)

    models = f"{target} {job.source} {engine.target_name} {engine.dtype}"
    return written, vocab_size, engine.tokenizer, [models, *(json.dumps(messages) for messages, _ in asked)]


def _progress(texts: Any, done: int, total: int) -> Iterator[tuple[int, list[int]]]:
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    columns = (*Progress.get_default_columns(), TextColumn("{task.completed} of {task.total} texts"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("counting", completed=done, total=total)
        for n in range(done, total):
            yield n, texts(n)
            bar.advance(task)


def _part(job: Calibration) -> Path:
    return Path(f"{job.out or job.ngram}.part")


def _save(part: Path, key: str, done: int, counts: Any, held: Any, trigrams: Any) -> None:
    import torch
    from safetensors.torch import save

    keys, times = (torch.from_numpy(x) for x in trigrams.counts())
    tensors = {"counts": counts, "held": held, "keys": keys, "times": times}
    write_file(part, save(tensors, {"job": json.dumps([key, done])}))


def _resume(part: Path, key: str, vocab_size: int) -> tuple[int, Any, Any, Any]:
    """Returns (texts counted, counts [V] int64, counts of held-out text [V] int64, trigram counts), from an earlier run
    of the same job or zeros."""
    import torch
    from safetensors import safe_open

    from specker.runtime.strategies.blocks.ngram import NGramCounts

    if not part.exists():
        counts, held = torch.zeros(2, vocab_size, dtype=torch.int64, device="cpu")
        return 0, counts, held, NGramCounts(vocab_size)
    try:
        with safe_open(part, framework="pt") as file:
            stored, done = json.loads((file.metadata() or {})["job"])
            counts, held, keys, times = (file.get_tensor(name) for name in ("counts", "held", "keys", "times"))
    except Exception as error:
        raise ValueError(f"{part} cannot be read ({error}); delete it to start again") from error
    if stored != key:
        raise ValueError(f"{part} is of another job (other models, texts or options); delete it to start again")
    return done, counts, held, NGramCounts(vocab_size, keys.numpy(), times.numpy())


def show(scores: Any) -> None:
    """Print the coverage of 1k..64k rows to stdout, in-sample and held-out."""
    from rich.console import Console
    from rich.table import Table

    if scores.counts is None:
        print(f"{len(scores.ids):,} ids in order, without counts")
        return
    totals = ", ".join(f"{value:,} {name}" for name, value in sorted(scores.totals.items(), reverse=True))
    print(f"{len(scores.ids):,} ids seen, source: {scores.source} ({totals})")
    table = Table()
    table.add_column("rows", justify="right")
    table.add_column("coverage, in-sample", justify="right")
    table.add_column("held-out", justify="right")
    size = scores.vocab_size or len(scores.ids)
    for rows in (*(n for n in ROWS if n < size), size):
        held_out = scores.held_out_coverage(rows)
        table.add_row(f"{rows:,}", f"{scores.coverage(rows):.2%}", "" if held_out is None else f"{held_out:.2%}")
    Console().print(table)
    if scores.held_out is None:
        print("no text was held out: expect less coverage of other text", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(lambda: run(*parse(argv)))


def cli() -> NoReturn:
    sys.exit(main())
