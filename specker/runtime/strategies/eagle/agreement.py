"""How often a head's first guess is the target's own token, over a short text, measured when the head is loaded.

A head that reads the wrong hidden states, or that was trained for another finetune of the target, makes no error: it
only drafts badly. So both models read a short text once, and the share of its positions at which they agree is
reported. Where config.json can be read in two ways, this share decides between them. What a head feeds back to itself
shows in its second guess alone.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specker.checkpoints.checkpoint import Checkpoint
from specker.model.cache import KVCache
from specker.model.decoder import Final, Model
from specker.model.heads import DraftHead, HeadSpec
from specker.model.prefill import prefill
from specker.model.sampling import Draws
from specker.options import Sampling
from specker.runtime.notes import Notes
from specker.runtime.round.lm_head import LMHead
from specker.runtime.text import encode, encode_chat

ROWS = 256  # most tokens of the text, its prompt included: one chunk of a prompt
LEAST = 32  # fewer positions say too little
LOGITS = 64  # rows of logits to hold at once
SECONDS = 128  # most positions with a second guess, each of which is a pass of its own
IMPLAUSIBLE = 0.15
"""A share below this is called implausible. Of published heads, the target accepts the first draft token in half of the
rounds or more; of one that read the wrong hidden states it accepted 4% (vLLM's pull request 50170)."""
MARGIN = 0.05
"""The documented reading is taken unless the other one is better by more: two deviations of a share of 250 positions
are 0.03 to 0.06."""

QUESTION = "Why do leaves change colour in autumn? Explain it, and then write a Python function that counts words."
ANSWER = """\
Leaves look green in summer because they are full of chlorophyll, the pigment that captures sunlight. In autumn the \
days become shorter and the nights become colder. The tree stops making chlorophyll, and the green colour fades. \
Other pigments, which were there all the time, can now be seen: carotenoids are yellow and orange. Some trees also \
make anthocyanins, which are red. Finally, the tree closes the veins between the leaf and the branch, and the leaf \
falls to the ground.

Here is a Python function that counts how often each word occurs in a text:

```python
def count_words(text):
    \"\"\"Return a dictionary with the number of times each word occurs.\"\"\"
    counts = {}
    for word in text.lower().split():
        if word in counts:
            counts[word] += 1
        else:
            counts[word] = 1
    return counts
```

The function first converts the text to lower case, so that the same word is counted once, and then splits it at the \
spaces. For example, `count_words("the cat and the dog")` returns a dictionary in which "the" has the value 2.
"""


class Text(NamedTuple):
    tokens: list[int]
    first: int  # the first token of the answer


def text_of(target: Checkpoint) -> Text | None:
    """The question and its answer in the target's tokens, with its chat template if it has one. None if the target has
    no tokenizer, or its context no room for LEAST tokens of the answer."""
    if target.tokenizer_or_none is None:
        return None
    answer = list(target.tokenizer(ANSWER, add_special_tokens=False)["input_ids"])
    prompt = encode(target, f"{QUESTION}\n\n")
    if getattr(target.tokenizer, "chat_template", None):
        with suppress(ValueError):  # a template that needs more than a question
            prompt = encode_chat(target, "the target", [{"role": "user", "content": QUESTION}])
    most = min(ROWS, target.config.max_context)
    text = Text((prompt + answer)[:most], len(prompt))
    whole = text.tokens and max(text.tokens) < target.config.vocab_size
    return text if whole and len(text.tokens) - text.first >= LEAST else None


def chosen(
    target: Checkpoint,
    model: Model,
    head: DraftHead,
    lm_head: LMHead,
    notes: Notes,
    made: Callable[[HeadSpec], DraftHead] | None = None,
) -> DraftHead:
    """The head with the reading of its config that agrees with the target more often. `lm_head`: what it drafts with.
    `made`: the head of another spec. Adds a remark to `notes` unless the target has no tokenizer."""
    spec = head.spec
    if (text := text_of(target)) is None:
        return head
    readings = [spec.aux_layers, spec.other] if spec.other else [spec.aux_layers]
    found = shares(model, head, lm_head, text, readings)
    best = int(len(found) > 1 and found[1] > found[0] + MARGIN)
    count = len(text.tokens) - max(1, text.first - 1)
    said = f"the head's first guess is the target's own token at {found[best]:.0%} of {count} positions of a test text"
    if spec.other:
        depths, others = (", ".join(map(str, readings[n])) for n in (best, 1 - best))
        said += (
            f", reading the inputs of layers {depths}; the layer ids of its config.json can also mean {others}, which "
            f"gave {found[1 - best]:.0%}"
        )
    if found[best] < IMPLAUSIBLE:
        said += "; that is implausibly rare, so it may belong to another model or read the wrong hidden states"
    head.spec = replace(spec, aux_layers=readings[best], other=())
    if spec.unsure and spec.mask is None and made is not None:
        head, more = _fed_back(model, head, lm_head, made, text)
        said += f"; {more}"
    if found[best] < IMPLAUSIBLE:
        notes["head"] = said
    else:
        notes.fact("head", said)
    return head


def _fed_back(
    model: Model, head: DraftHead, lm_head: LMHead, made: Callable[[HeadSpec], DraftHead], text: Text
) -> tuple[DraftHead, str]:
    """The head that feeds back its rows after its final norm, as it does, or before it if its second guesses are better
    then; and a remark."""
    heads, names = (head, made(replace(head.spec, output=False))), ("after", "before")
    rows, own = _target(model, text.tokens, head.spec.aux_layers)
    found = [second_share(each, lm_head, text, rows, own) for each in heads]
    best = int(found[1] > found[0] + MARGIN)
    return heads[best], (
        f"its second guess is at {found[best]:.0%}, feeding back its rows {names[best]} the final norm; norm_output in "
        f"its config.json can also mean those {names[1 - best]} it, which gave {found[1 - best]:.0%}"
    )


@torch.inference_mode()
def second_share(head: DraftHead, lm_head: LMHead, text: Text, rows: Tensor, own: Tensor) -> float:
    """The share of at most SECONDS positions of the answer, evenly spread, at which the head's second guess is the
    target's token, if the first one was right: its pair has the head's own output and the text's token. rows, own: the
    target's, as `_target` returns them."""
    tokens, first = text
    T = len(tokens) - 1
    cache = KVCache(head.model.config, T, dtype=head.model.dtype, device=head.model.device)
    embedded = head.model.embed_tokens(torch.tensor(tokens[1:], dtype=torch.int64, device=head.model.device))
    placed, features = cache.after([0], [T]), head.features(rows[:-1])
    fed, _ = head.forward(cache, placed, head.pairs(features, embedded, placed.positions))
    fed, columns = fed.clone(), range(max(0, first - 2), T - 1)  # compiled layers reuse their memory
    greedy, right = Draws.one(Sampling()), 0
    columns = columns[:: -(-len(columns) // SECONDS)]
    # From the last to the first: the pair after column t takes the place of the text's own, which no earlier t reads.
    for t in reversed(columns):
        one = cache.after([t + 1], [1])
        _, final = head.forward(cache, one, head.pairs(fed[t : t + 1], embedded[t + 1 : t + 2], one.positions))
        right += int(lm_head.best(final, greedy, one.positions)) == int(own[t + 2])
    return right / len(columns)


@torch.inference_mode()
def shares(
    model: Model, head: DraftHead, lm_head: LMHead, text: Text, readings: Sequence[tuple[int, ...]]
) -> list[float]:
    """For each reading of the head's config, which is a tuple of the target's depths, the share of the answer's tokens
    that the head would guess as the target does, if it knew all tokens before and the target's true hidden states."""
    tokens, first = text
    every = tuple(sorted(set().union(*readings)))
    rows, own = _target(model, tokens, every)
    found = [_guesses(head, lm_head, tokens, rows[:, [every.index(depth) for depth in depths]]) for depths in readings]
    # The pair of column t guesses the token of column t + 2, and so does the target's row t + 1.
    return [float((guesses == own[1:])[max(0, first - 2) :].float().mean()) for guesses in found]


@torch.inference_mode()
def _target(model: Model, tokens: list[int], depths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's rows at each depth [T, A, Ht], and its own token after each row, [T] int64."""
    top = model.config.num_layers
    cache = KVCache(model.config, len(tokens), dtype=model.dtype, device=model.device)
    rows = prefill(model, cache, tokens, tuple(sorted({top, *depths})), len(tokens))
    parts = zip(rows[top].split(LOGITS), model.positions[: len(tokens)].split(LOGITS), strict=True)
    greedy = Draws.one(Sampling())
    own = torch.cat([model.draw(greedy, model.logits(Final(part)), positions) for part, positions in parts])
    return torch.stack([rows[depth] for depth in depths], 1), own


def _guesses(head: DraftHead, lm_head: LMHead, tokens: list[int], hidden: Tensor) -> Tensor:
    """The head's first guess after each pair of the text's columns, [T - 1] int64. hidden: [T, A, Ht]."""
    model, T = head.model, len(tokens) - 1
    cache = KVCache(model.config, T, dtype=model.dtype, device=model.device)
    embedded = model.embed_tokens(torch.tensor(tokens[1:], dtype=torch.int64, device=model.device))
    rows = cache.after([0], [T])
    _, final = head.forward(cache, rows, head.pairs(head.features(hidden[:-1]), embedded, rows.positions))
    greedy = Draws.one(Sampling())
    parts = [slice(n, n + LOGITS) for n in range(0, T, LOGITS)]
    return torch.cat([lm_head.best(final.at(part), greedy, rows.positions[part]) for part in parts])
