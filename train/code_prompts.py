"""Prompts for a model that writes code, to count the tokens of its answers (specker calibrate).

    python -m train.code_prompts --out prompts.jsonl
    python -m train.code_prompts --out beginnings.jsonl --plain --count 4000

Two thirds are requests about functions of Python's standard library: complete, edit, explain or test one, or write it
from its description. The others are general questions. Modules whose functions are in the bundled held-out prompts are
left out, and no question is one of bench/spec_bench.jsonl, so a bench on those measures other text. `--plain` prompts
are beginnings of functions and classes, which a model without a chat template continues. The order and the choice
depend on the Python version alone.
"""

import ast
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from transformers import HfArgumentParser

from specker.paths import write_file
from train.code_family.corpus import is_held_out, library_files, readable

LINES = range(8, 40)  # of a function
BEGINNING = range(5, 16)  # lines of a plain prompt
REQUESTS = (  # {code}: the function; {head}: its signature and docstring; {name}, {about}: its name, its docstring
    "Complete this Python function:\n\n```python\n{head}\n```",
    "Write a Python function `{name}`. {about}",
    "Explain step by step what this function does:\n\n```python\n{code}\n```",
    "Add type hints and clear error messages to this function:\n\n```python\n{code}\n```",
    "Write unit tests with pytest for this function:\n\n```python\n{code}\n```",
    "Rename the variables of this function so that it reads better, and change nothing else:\n\n```python\n{code}\n```",
    "Translate this function to JavaScript:\n\n```python\n{code}\n```",
)
QUESTIONS = (
    "What is {topic}, and why does it matter?",
    "Explain {topic} to a beginner, with an example.",
    "List the advantages and disadvantages of {topic}.",
    "Write a short article about {topic}.",
    "Summarise the history of {topic} in a few paragraphs.",
)
TOPICS = (
    *("binary search", "a hash table", "garbage collection", "database indexes", "public-key cryptography"),
    *("HTTP caching", "version control", "unit testing", "a message queue", "the TCP handshake", "SQL joins"),
    *("container images", "regular expressions", "floating-point numbers", "a load balancer", "recursion"),
    *("photosynthesis", "plate tectonics", "the water cycle", "vaccines", "black holes", "the periodic table"),
    *("compound interest", "supply and demand", "the printing press", "the Olympic Games", "jazz", "chess"),
    *("public transport", "renewable energy", "a balanced diet", "learning a language", "remote work", "architecture"),
)


@dataclass
class Args:
    out: str = field(metadata={"help": "JSON lines to write, one `prompt` each"})
    count: int = field(default=450, metadata={"help": "number of prompts"})
    plain: bool = field(default=False, metadata={"help": "beginnings of functions and classes alone"})
    seed: int = 0


def functions() -> Iterator[tuple[str, str, str, str]]:
    """(name, source, signature with docstring, docstring) of each documented function of the standard library."""
    _, _, files = library_files(only_stdlib=True)["python"]
    for rel, path in files:
        text = None if is_held_out(rel) else readable(rel, path)
        if text is None:
            continue
        lines = text.splitlines()
        for node in ast.parse(text).body:
            about = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if not isinstance(node, ast.FunctionDef) or about is None or len(node.body) < 2:
                continue
            first, last, body = node.lineno - 1, node.end_lineno or 0, node.body[1].lineno - 1
            if last - first in LINES and not node.name.startswith("_"):
                yield node.name, "\n".join(lines[first:last]), "\n".join(lines[first:body]), about


def prompts(count: int, seed: int) -> list[str]:
    """`count` prompts, every third of them a general question, while there are enough of each kind."""
    order = random.Random(seed)
    found = sorted(functions())
    order.shuffle(found)
    code = [
        REQUESTS[n % len(REQUESTS)].format(name=name, code=source, head=head, about=about)
        for n, (name, source, head, about) in enumerate(found)
    ]
    general = [question.format(topic=topic) for question in QUESTIONS for topic in TOPICS]
    order.shuffle(general)
    mixed = [text for n, text in enumerate(general) for text in (*code[2 * n : 2 * n + 2], text)]
    return mixed[:count]


def beginnings(count: int, seed: int) -> list[str]:
    """`count` beginnings of functions and classes of the standard library, in as many files as possible."""
    order = random.Random(seed)
    _, _, files = library_files(only_stdlib=True)["python"]
    found = []
    for rel, path in files:
        if (text := None if is_held_out(rel) else readable(rel, path)) is None:
            continue
        lines = text.splitlines()
        starts = [n for n, line in enumerate(lines) if re.match(r"\s*(async )?(def|class) \w", line)]
        order.shuffle(starts)
        sizes = [order.choice(BEGINNING) for _ in starts]
        own = ["\n".join(lines[n : n + size]).rstrip() for n, size in zip(starts, sizes, strict=True)]
        found += enumerate(own)  # a file's first choice, its second one ..
    order.shuffle(found)
    return list(dict.fromkeys(text for _, text in sorted(found, key=lambda pair: pair[0])))[:count]


def main() -> None:
    (args,) = HfArgumentParser(Args).parse_args_into_dataclasses()
    made = (beginnings if args.plain else prompts)(args.count, args.seed)
    write_file(args.out, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in made))
    print(f"{len(made)} prompts in {args.out}")


if __name__ == "__main__":
    main()
