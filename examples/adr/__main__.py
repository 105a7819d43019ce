"""`python -m examples.adr --help`. Exit codes: 0; 2 for an error that the user can correct; 130 after Ctrl-C."""

import sys
from collections.abc import Callable
from datetime import date
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Draft architecture decision records from those of a repository."
)


def told(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose ValueError and OSError are one line and exit code 2."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None

    return run


INDEX = Path("adr-index.npz")


@app.command()
@told
def index(
    folder: Annotated[Path, typer.Argument(help="Records in Markdown, at any depth.")],
    out: Annotated[Path, typer.Option(help="The index file to write.")] = INDEX,
    dense: Annotated[str | None, typer.Option(help="A sentence-transformers model instead of BM25.")] = None,
) -> None:
    """Read a folder of records and make them searchable."""
    from examples.adr import records
    from examples.adr.index import Index

    found, skipped = records.read(folder)
    for why in skipped:
        print(f"skipped {why}", file=sys.stderr)
    Index.build(found, dense).save(out)
    for repository, count in sorted(records.counts(found).items()):
        print(f"{count:5} {repository}")
    print(f"{len(found)} records of {len(found) + len(skipped)} Markdown files in {out}")


@app.command()
@told
def draft(
    context: Annotated[str, typer.Option(help="The context to decide on, a file that holds it, or - for stdin.")],
    title: Annotated[str, typer.Option(help="Default: from the decision.")] = "",
    index: Annotated[Path, typer.Option(help="What `index` wrote.")] = INDEX,
    out: Annotated[
        Path | None, typer.Option(help="Folder of records: write the next one. Default: print only.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Model: folder or hub id. Default: SmolLM2-135M-Instruct.")] = None,
    draft: Annotated[str | None, typer.Option(help="Model that drafts, for strategies that need one.")] = None,
    strategy: Annotated[
        str, typer.Option(help="See `specker --list-strategies`: ar, lookup, vocabtrim, ...")
    ] = "lookup",
    examples: Annotated[int, typer.Option(min=0, help="Records to retrieve for the prompt.")] = 2,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 400,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or float64.")] = None,
    quantize: Annotated[str | None, typer.Option(help="int8, int4 or fp8 weights.")] = None,
) -> None:
    """Write the decision for a new context."""
    from examples.adr import drafting
    from examples.adr.index import Index

    text = asked(context)
    searched = Index.load(index)
    options = {name: value for name, value in {"quantize": quantize}.items() if value is not None}
    engine = loaded(target, draft=draft, strategy=strategy, dtype=dtype, **options)

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    done = drafting.draft(
        engine, searched, text, title, examples, max_new_tokens, show, temperature=temperature, seed=seed
    )
    print()
    s = done.stats
    print(f"{s.tokens_per_second:.0f} tokens/s, acceptance length {s.acceptance_length:.2f}", file=sys.stderr)
    for record in done.examples:
        print(f"example: {record.path}: {record.title}", file=sys.stderr)
    if done.finished == "length":
        print(f"the decision was cut off after {max_new_tokens} tokens", file=sys.stderr)
    if out is not None:
        if not done.decision:
            raise ValueError("the model wrote nothing: no record was written")
        path = drafting.write(out, title or drafting.title_of(done.decision), text, done.decision, date.today())
        print(f"wrote {path}", file=sys.stderr)


@app.command()
@told
def finetune(
    target: Annotated[str, typer.Option(help="Model to tune: folder or hub id, in Hugging Face format.")],
    out: Annotated[Path, typer.Option(help="Folder for the tuned checkpoint; its state is in OUT.part until then.")],
    index: Annotated[Path, typer.Option(help="What `index` wrote.")] = INDEX,
    examples: Annotated[int, typer.Option(min=0, help="Retrieved records in each prompt; 2 for DRAFT.")] = 0,
    epochs: Annotated[int, typer.Option(min=1)] = 2,
    rank: Annotated[int, typer.Option(min=1, help="Of the LoRA matrices.")] = 16,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 2e-4,
    max_length: Annotated[int, typer.Option(min=16, help="Tokens of a prompt with its decision.")] = 1024,
    batch: Annotated[int, typer.Option(min=1, help="Records in a step.")] = 4,
    held_out: Annotated[str, typer.Option(help="A repository, or a share of the records.")] = "0.2",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Tune a model on the records; run it again to resume it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from examples.adr.finetune import Settings
    from examples.adr.finetune import finetune as tune
    from examples.adr.index import Index

    settings = Settings(examples, epochs, rank, rate, max_length, batch, held_out, seed)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"), TimeRemainingColumn()
    with Progress("step", *columns) as bar:
        task = bar.add_task("", total=None, loss="")

        def tell(step: int, steps: int, loss: float) -> None:
            bar.update(task, completed=step, total=steps, loss=f"{loss:.3f}")

        split = tune(Index.load(index), target, out, settings, tell)
    print(f"{len(split.training)} records to train on, {len(split.held_out)} held out: {out}")


@app.command()
@told
def evaluate(
    target: Annotated[str | None, typer.Option(help="The model before tuning.")] = None,
    finetuned: Annotated[str | None, typer.Option(help="A checkpoint of `finetune --examples 0`.")] = None,
    tuned: Annotated[str | None, typer.Option(help="A checkpoint of `finetune --examples 2`.")] = None,
    index: Annotated[Path, typer.Option(help="What `index` wrote.")] = INDEX,
    strategy: Annotated[str, typer.Option(help="As in `draft`.")] = "lookup",
    examples: Annotated[int, typer.Option(min=1)] = 2,
    count: Annotated[int, typer.Option(min=0, help="Held-out records to write; 0: all.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 200,
    held_out: Annotated[str, typer.Option(help="Without a tuned checkpoint: as in `finetune`.")] = "0.2",
    seed: Annotated[int, typer.Option()] = 0,
    dtype: Annotated[str | None, typer.Option()] = None,
    bertscore: Annotated[str | None, typer.Option(help="A local model for BERTScore.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write a JSON line for each approach, with its texts.")] = None,
) -> None:
    """Compare zero-shot, few-shot, retrieval, fine-tuning and DRAFT on held-out records."""
    from rich.console import Console
    from rich.table import Table

    from examples.adr import evaluate as module
    from examples.adr.index import Index

    searched = Index.load(index)
    base = target or fetched()
    split = module.split_of(searched, [finetuned, tuned], held_out, seed)
    chosen = module.approaches(base, finetuned, tuned)
    table = Table(title=f"{min(count or len(split.held_out), len(split.held_out))} held-out records")
    for name in ("approach", "ROUGE-1", "ROUGE-L", "95%", "BLEU", "tokens/s", "acceptance length"):
        table.add_column(name, justify="left" if name == "approach" else "right")
    if bertscore:
        table.add_column("BERTScore", justify="right")
    rows = []

    def tell(name: str, done: int, of: int) -> None:
        print(f"\r{name}: {done} of {of}", end="" if done < of else "\n", file=sys.stderr, flush=True)

    def load(name: str) -> Any:
        return loaded(name, strategy=strategy, dtype=dtype)

    args = examples, max_new_tokens, count, seed, bertscore, tell
    for row in module.evaluate(searched, split, chosen, load, *args):
        rows.append(row | {"strategy": strategy})
        low, high = row["rougeL_interval"]
        cells = [f"{row[key]:.1f}" for key in ("rouge1", "rougeL")] + [f"{low:.1f}-{high:.1f}", f"{row['bleu']:.1f}"]
        cells += [f"{row['tokens_per_second']:.0f}", f"{row['acceptance_length']:.2f}"]
        table.add_row(row["approach"], *cells, *([f"{row['bertscore']:.1f}"] if bertscore else []))
        if json is not None:
            module.save(json, rows)
    Console().print(table)


@app.command()
@told
def prompts(
    out: Annotated[Path, typer.Argument(help="File of JSON lines with `messages`.")],
    index: Annotated[Path, typer.Option(help="What `index` wrote.")] = INDEX,
    examples: Annotated[int, typer.Option(min=0)] = 2,
) -> None:
    """Write every record's prompt, with examples other than itself: for bench/e2e.py --questions."""
    import json
    import os

    from examples.adr.index import Index
    from examples.adr.prompts import messages

    searched = Index.load(index)
    lines = []
    for record in searched.records:
        found = searched.search(f"{record.title}\n{record.context}", examples, without=record)
        said = messages(record.context, found, record.title)
        lines.append(json.dumps({"category": record.repository, "messages": said}, ensure_ascii=False) + "\n")
    part = out.with_name(out.name + ".part")
    part.write_text("".join(lines), encoding="utf-8")
    os.replace(part, out)
    print(f"{len(lines)} prompts in {out}")


def asked(context: str) -> str:
    """The text that --context names."""
    if context == "-":
        text, where = sys.stdin.buffer.read(), "stdin"
    elif len(context) < 256 and "\n" not in context and Path(context).is_file():
        text, where = Path(context).read_bytes(), context
    else:
        text, where = context.encode(), "--context"
    try:
        decoded = text.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 at byte {error.start}") from None
    if not decoded:
        raise ValueError(f"{where}: the context is empty")
    return decoded


def loaded(target: str | None, **options: Any) -> Any:
    """specker's engine; without `target` the small model that `python -m specker.zoo.real` fetches."""
    import specker

    return specker.load(target or fetched(), **options)


def fetched() -> str:
    from specker.zoo import real

    return str(real.fetch())


if __name__ == "__main__":
    app()
