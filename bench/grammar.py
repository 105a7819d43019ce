"""Acceptance under a JSON schema: what the grammar's forced tokens add to a draft.

`python bench/grammar.py`: SmolLM2-135M-Instruct answers `--tasks` questions in JSON that is valid for a schema, with
each strategy and drafts of a fixed length. `cut`: the draft ends before the first token that the grammar refuses, and
nothing else. `forced`: tokens that the grammar leaves no choice about join the draft (runtime/round/constrain.py). Both
write the text of plain decoding, which every run checks. The table counts tokens and rounds, not seconds. White space
is free, or that of one line of `json.dumps`. `--target code-target`: the bundled code model, which continues the
questions as comments.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from rich.console import Console
from rich.table import Table
from transformers import HfArgumentParser

import specker
from specker import grammar
from specker.runtime.control.stats import Stats
from specker.runtime.round.grammars import Guide
from specker.zoo import real

TEXT, NUMBER = {"type": "string", "maxLength": 40}, {"type": "integer", "minimum": 0, "maximum": 100000}


def objects(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TASKS = {
    "Describe a person who works in a bakery.": objects(name=TEXT, age=NUMBER, occupation=TEXT, city=TEXT),
    "Describe a book about the sea.": objects(
        title=TEXT, author=TEXT, year=NUMBER, pages=NUMBER, in_print={"type": "boolean"}
    ),
    "What is the weather like in Oslo in January?": objects(
        city=TEXT,
        temperature_celsius={"type": "integer"},
        condition={"enum": ["sunny", "cloudy", "rain", "snow"]},
        comment=TEXT,
    ),
    "Order two pizzas.": objects(
        customer=TEXT,
        items={"type": "array", "minItems": 1, "maxItems": 2, "items": objects(product=TEXT, quantity=NUMBER)},
    ),
    "Is this review positive: the film was far too long?": objects(
        sentiment={"enum": ["positive", "negative", "neutral"]}, confidence=NUMBER, explanation=TEXT
    ),
    "Call the function that adds two numbers.": objects(
        function={"const": "add_numbers"}, arguments=objects(first_number=NUMBER, second_number=NUMBER)
    ),
}


@dataclass
class Args:
    target: str = field(default="smollm2", metadata={"help": "smollm2 or code-target"})
    strategies: str = "lookup"
    draft_tokens: int = 4
    tasks: int = len(TASKS)
    max_new_tokens: int = 128


def fixed(strategy: str, tokens: int) -> dict[str, object]:
    """Drafts of one length in every round."""
    policy = {} if strategy.endswith("+lookup") else {"policy": "fixed"}
    alone = {"lookup_share": "off"} if "lookup" in strategy.split("+") else {}
    return {"draft_tokens": tokens, **policy, **alone}


@contextmanager
def cut_only() -> Iterator[None]:
    constrain = Guide.constrain
    with (
        patch.object(Guide, "forced", False),
        patch.object(Guide, "constrain", lambda self, tokens, most, _: constrain(self, tokens, most, False)),
    ):
        yield


def main(args: Args) -> None:
    chat = args.target == "smollm2"
    folder = str(real.at_hand()) if chat else None
    asked = "Answer in JSON with the fields {}. {}" if chat else "# Answer in JSON with the fields {}: {}\nanswer = "
    table = Table("strategy", "white space", "T", "tokens", "tokens a round: cut", "forced", "of the tokens forced")
    for strategy in args.strategies.split(","):
        engine = specker.load(folder, strategy=strategy, device="cpu", **fixed(strategy, args.draft_tokens))
        for space, separators in (("free", None), ("one line", (", ", ": "))):
            for temperature in (0.0, 0.7):
                sums = {"cut": Stats(), "forced": Stats()}
                for task, schema in [*TASKS.items()][: args.tasks]:
                    prompt = asked.format(", ".join(schema["properties"]), task)
                    ids = engine.encode_chat([{"role": "user", "content": prompt}]) if chat else prompt
                    how = {"temperature": temperature, "grammar": grammar.json_schema(schema, separators)}
                    plain = engine.generate_ar(ids, args.max_new_tokens, **how)
                    outs = {"forced": engine.generate(ids, args.max_new_tokens, **how)}
                    with cut_only():
                        outs["cut"] = engine.generate(ids, args.max_new_tokens, **how)
                    for name, out in outs.items():
                        assert out.tokens == plain.tokens, (task, out.text, plain.text)
                        sums[name] += out.stats
                    if plain.finished == "stop":
                        json.loads(plain.text)
                cut, forced = sums["cut"], sums["forced"]
                row = [f"{s.tokens / s.rounds:.2f}" for s in (cut, forced)]
                share = f"{forced.forced / forced.tokens:.0%}"
                table.add_row(strategy, space, f"{temperature:g}", str(cut.tokens), *row, share)
    Console().print(table)


if __name__ == "__main__":
    main(*HfArgumentParser(Args).parse_args_into_dataclasses())
