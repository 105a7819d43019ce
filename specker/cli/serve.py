"""Serve one model over the OpenAI API: `specker serve --help`."""

import logging
import socket
from collections.abc import Sequence
from dataclasses import fields

from specker.cli import start
from specker.cli.flags import MORE, USUAL, Job
from specker.cli.screen import Screen
from specker.command.exits import run_cli
from specker.command.parser import Parser
from specker.extras import install
from specker.fields import make
from specker.options import RECOMMENDED, Common, Options, Sampling
from specker.runtime import strategies
from specker.serve.settings import Serving
from specker.torchrun import world_size

GROUPS = {
    "models": ("target", "draft", "strategy"),
    "server": tuple(f.name for f in fields(Serving)),
    "sampling, of requests that do not say": (
        *("temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ),
    **{title: names for title, names in MORE.items() if not {"json", "top_p", "tp"} & {*names}},
}
EPILOG = """\
examples:
  specker serve --target Qwen/Qwen3-1.7B --draft Qwen/Qwen3-0.6B
  specker serve --target model.gguf --batch-size 8 --port 8080 --api-key secret
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'

POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,
/tokenize; GET /v1/models, /health, /metrics, /view

Ctrl-C or SIGTERM: no new requests, and the server ends after the running ones;
a second one ends it at once
"""
BATCH = 4  # requests decoded at once, unless --batch-size says otherwise


def parser() -> Parser:
    about = "Serve one model over the OpenAI API."
    top = Parser("specker serve", "specker serve [flags]", about, EPILOG)
    words, offers = strategies.words(), strategies.offers()
    recommended = "what the checkpoint recommends"
    usual = {"batch_size": str(BATCH)} | dict.fromkeys(RECOMMENDED, recommended) | {"temperature": USUAL}
    top.arrange(GROUPS, Job, Common, Serving, Sampling, offers=offers, usual=usual, **words)
    for cls, title, about, names in strategies.flag_groups():
        top.add(cls, title, about, only=names)
    top.prints("more help", "-h", "--help", help="show every flag", text=lambda _: top.format_help())
    return top


def parse(argv: Sequence[str] | None = None) -> tuple[Job, Options, Serving, dict[str, float]]:
    """Parse a command line; the last are the sampling settings that it names. Raises ValueError with a sentence for
    the user."""
    values = vars(parser().parse_args(argv))
    job = make(Job, {name: values[name] for name in ("target", "draft", "device", "dtype") if name in values})
    serving = make(Serving, values)
    make(Sampling, values)  # checks them
    if "strategy" not in values:
        values |= strategies.usual(job.target, job.draft, values)
    values.setdefault("batch_size", BATCH)
    others = {f.name for cls in (Job, Sampling, Serving) for f in fields(cls)}
    sampling = {f.name: values[f.name] for f in fields(Sampling) if f.name in values}
    return job, strategies.options(**{n: v for n, v in values.items() if n not in others}), serving, sampling


def run(job: Job, options: Options, serving: Serving, sampling: dict[str, float]) -> int:
    if world_size() > 1:
        raise ValueError(
            "the server runs in one process: leave out torchrun (vLLM serves several GPUs: docs/engines.md)"
        )
    start.share_arenas()
    try:
        from specker.serve import connections
        from specker.serve.app import application
    except ModuleNotFoundError as error:
        raise ValueError(f"the server needs {error.name}: {install('serve')}") from None
    screen = Screen(json_to_stdout=True)
    engine = start.load(job, options, screen)
    if not engine.has_tokenizer:
        raise ValueError(f"{engine.target_name} has no tokenizer, so its text cannot be served")
    screen.remarks(engine)
    if not getattr(engine.target.tokenizer, "chat_template", None):
        screen.note(f"{engine.target_name} has no chat template: ask it at /v1/completions", "yellow")
    with screen.log_notes(), screen.progress("warming up") as on_progress:
        engine.warmup(on_progress)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")  # of the server, from here on
    http = connections.config(application(engine, serving, sampling), serving)
    family = socket.AF_INET6 if ":" in serving.host else socket.AF_INET
    with socket.create_server((serving.host, serving.port), family=family) as listening:
        host = f"[{serving.host}]" if ":" in serving.host else serving.host
        screen.note(f"{engine.title}: http://{host}:{listening.getsockname()[1]}/v1")
        connections.Server(http, serving).run([listening])
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_cli(lambda: run(*parse(argv)))
