"""The flags of the command `specker`, which decodes prompts; other commands share some of them."""

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields

import specker
from specker import zoo
from specker.cli import COMMANDS
from specker.cli.prompts import piped
from specker.command.parser import SHELLS, Parser, completion
from specker.fields import check_fields, make, opt
from specker.options import DTYPES, TEMPERATURE, Common, Options, Sampling, stop_strings
from specker.runtime import strategies

MODEL = "DIR|HUB_ID|FILE.gguf"
MEANT = {"chat": "--chat", "help": "--help", "run": "specker PROMPT", "version": "--version"}  # commands elsewhere


@dataclass(frozen=True)
class Job:
    """What to decode, on which device, and where to write the results."""

    target: str | None = opt(
        None, "the model to decode (default: the bundled code-target; hybrid-target is bundled, too)", MODEL
    )
    draft: str | None = opt(
        None,
        "the model or head that drafts; auto chooses a known one for the target (default without --target: the bundled "
        "one); see specker drafts",
        f"{MODEL}|auto",
    )
    prompt: str | None = opt(None, "one prompt; - reads it from stdin, without its last newline", "TEXT|-")
    prompts: str | None = opt(
        None,
        "JSON lines with `prompt`, with Spec-Bench's `turns` (one conversation with --chat, else separate prompts) or, "
        "with --chat, `messages`",
        "FILE|-",
    )
    chat: bool = opt(
        False, "wrap prompts in the target's chat template; in a terminal, without a prompt: a conversation"
    )
    max_new_tokens: int | None = opt(
        None,
        "tokens to decode for each prompt (default: 128; 1024 in a conversation)",
        least=1,
    )
    stop: tuple[str, ...] = opt((), "end each text before the first of these strings", "STRING")
    stop_ids: tuple[int, ...] = opt((), "end each text after the first of these token ids", "ID")
    ignore_eos: bool = opt(False, "the checkpoint's own stop ids do not end a text")
    min_tokens: int = opt(0, "tokens before which no stop id and no --stop ends a text", least=0)
    json_schema: str | None = opt(None, "each text is JSON that is valid for this JSON schema", "FILE")
    grammar: str | None = opt(None, "each text matches this Lark grammar, or another one of llguidance", "FILE")
    prediction: str | None = opt(None, "what each text will probably be: lookup drafts from this file first", "FILE")
    samples: int = opt(1, "independent draws of each prompt, with seeds --seed, --seed + 1, ...", least=1)
    dtype: str | None = opt(
        None,
        "of weights and, on a GPU, K/V (default: bfloat16; on a CPU without kernels for it float32)",
        choices=DTYPES,
    )
    device: str | None = opt(None, "where to run (default: cuda if available)", offers=("cpu", "cuda"))
    check: bool = opt(False, "also decode with ar, compare the tokens and print both speeds")
    trace: str | None = opt(
        None, "write JSON lines: each round's draft and the target's tokens, for specker view", "FILE"
    )
    view: str | None = opt(
        None,
        "write the trace as an HTML page and open it (default: a new file beside --trace, else trace.html)",
        "FILE",
        bare="",
    )
    json: str | None = opt(None, "write the results as one JSON object; with -, stdout holds nothing else", "FILE|-")

    def __post_init__(self) -> None:
        if self.prompt is not None and self.prompts is not None:
            raise ValueError("--prompt and --prompts exclude each other")
        if self.json_schema is not None and self.grammar is not None:
            raise ValueError("--json-schema and --grammar exclude each other")
        if self.ignore_eos and (self.json_schema is not None or self.grammar is not None):
            raise ValueError("--ignore-eos and a grammar exclude each other: a text ends where its grammar does")
        check_fields(self)
        stop_strings(self.stop)

    @property
    def bundled(self) -> bool:
        """Whether a toy model is to decode."""
        return self.target is None or zoo.target_of(self.target) is not None

    @property
    def built_in(self) -> bool:
        """Whether the toy model continues its own prompts."""
        return self.bundled and self.prompt is None and self.prompts is None and not self.chat


COMMON = {
    "common flags": (
        *("target", "draft", "strategy", "prompt", "prompts", "chat", "max_new_tokens", "temperature", "seed", "check"),
    )
}
MORE = {
    "sampling": (
        *("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
        *("samples", "stop", "stop_ids", "ignore_eos", "min_tokens", "json_schema", "grammar"),
    ),
    "drafts": ("draft_tokens", "tree", "policy", "as_published", "prediction"),
    "output": ("json", "trace", "view"),
    "batches and memory": ("batch_size", "kv_tokens", "max_context", "prefix_cache"),
    "device and precision": ("device", "dtype", "quantize", "draft_quantize", "kv_dtype", "huge_pages"),
    "several GPUs, in a torchrun job": ("tp", "dp", "draft_ranks", "draft_layout", "reduce"),
}
USUAL = f"what the checkpoint recommends, else {TEMPERATURE}"  # Engine.usual_sampling
EPILOG = """\
examples:
  specker --check                                            # built-in prompts
  specker "def fibonacci(n):"                                # or: cat FILE | specker
  specker --target Qwen/Qwen3-1.7B --chat                    # a conversation
  specker --target Qwen/Qwen3-1.7B --draft Qwen/Qwen3-0.6B --prompt "Hello" --chat
  specker --prompts questions.jsonl --batch-size 8 --json out.json
  specker --strategy easyspec+vocabtrim --temperature 0.8 --seed 7
  source <(specker --print-completion bash)                  # completion in this shell

in a pipe: a line such as ==> questions.jsonl line 2 <== before each of several
texts, none before a single one; --json - for programs

exit codes: 0 success; 1 --check, specker or the job failed; 2 a mistake in the
command or its files; 130 after Ctrl-C; 141 if the reader of stdout closed it
"""


def parser(full: bool = True) -> Parser:
    """The parser of the command line. `full` False: with the flags that --help shows."""
    usage = "specker [flags] [PROMPT]\n       specker COMMAND --help"
    top = Parser("specker", usage, "Speculative decoding that never changes the output.", EPILOG)
    words, offers = strategies.words(), strategies.offers()
    sampled = {"temperature": f"0; in a conversation {USUAL}"}
    top.arrange(COMMON, Job, Common, Sampling, offers=offers, usual=sampled, **words)
    (common,) = COMMON
    about = "one prompt, as --prompt; - or a pipe: read it from stdin"
    top.group(common).add_argument("text", nargs="?", metavar="PROMPT", help=about)
    more = "more help"
    top.prints(more, "-h", "--help", help="show the common flags", text=lambda _: parser(full=False).format_help())
    top.prints(more, "--help-all", help="show every flag", text=lambda _: parser().format_help())
    # A folder `specker` in the working directory may hide the package itself, but not its modules.
    version = f"specker {getattr(specker, '__version__', '(hidden by a folder of this name)')}\n"
    top.prints(more, "--version", help="show the version", text=lambda _: version)
    about = "show what each strategy needs, its paper and its own flags"
    top.prints(more, "--list-strategies", help=about, text=lambda _: strategies.table())
    about = "print a script that completes this command in a shell"
    top.prints(
        more,
        "--print-completion",
        help=about,
        text=lambda shell: completion(parser(), shell, commands()),
        choices=SHELLS,
    )
    top.group("commands", "\n".join(f"{name:<11}{about}" for name, about in COMMANDS.items()))
    if not full:
        top.group("strategies", strategies.summaries())
        return top
    top.arrange(MORE, Job, Common, Sampling, offers=offers, usual=sampled, **words)
    for cls, title, about, names in strategies.flag_groups():
        top.add(cls, title, about, only=names)
    return top


def commands() -> dict[str, Parser]:
    """The parsers of the commands of `COMMANDS`."""
    return {name: importlib.import_module(f"specker.cli.{name}").parser() for name in COMMANDS}


def _no_command(word: str) -> None:
    """ValueError if `word` is probably meant as a command. A flag or a prompt of several words never is."""
    near = [MEANT[word]] if word in MEANT else difflib.get_close_matches(word.lower(), COMMANDS, 1, cutoff=0.75)
    if near and word.isalpha():
        raise ValueError(f"there is no command {word!r}; did you mean {near[0]}? (--prompt {word} decodes it)")


def parse(argv: Sequence[str] | None = None) -> tuple[Job, Options, Sampling, frozenset[str]]:
    """Parse a command line into the three dataclasses, and the names of the sampling settings that it gives. Raises
    ValueError with a sentence for the user."""
    argv = sys.argv[1:] if argv is None else argv
    _no_command("".join(argv[:1]))  # `veiw FILE` is no prompt with a word too many
    values = vars(parser().parse_args(argv))
    text = values.pop("text", None)
    if text is not None:
        if "prompt" in values or "prompts" in values:
            raise ValueError(f"{text!r} is a prompt and excludes --prompt and --prompts")
        _no_command(text)
        values["prompt"] = text
    elif not {"prompt", "prompts"} & values.keys() and piped():
        values["prompt"] = "-"

    job = make(Job, values)
    named = frozenset(f.name for f in fields(Sampling) if f.name in values)
    if job.built_in and not named:
        values |= zoo.SAMPLING
    sampling = make(Sampling, values)
    if "strategy" not in values:
        values |= strategies.usual(job.target, job.draft, values)
    others = {f.name for cls in (Job, Sampling) for f in fields(cls)}
    return job, strategies.options(**{n: v for n, v in values.items() if n not in others}), sampling, named
