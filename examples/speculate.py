"""What speculation is: a small model drafts a chain, the target verifies it in one pass, and what agrees stays.

    python examples/speculate.py "def fibonacci(n):"

Each model keeps the K/V of an exact prefix of the text in its cache, and first reads the tokens that it missed. Draft
and target draw with the same noise, so at any temperature the text is, token by token, that of plain decoding.
"""

import sys

import torch
from torch import Tensor

import specker
from specker.checkpoints.checkpoint import Checkpoint, read
from specker.kernels import accept_walk, sample_rows
from specker.model.cache import KVCache
from specker.model.decoder import Model, forward

DRAFT = 4  # tokens of a draft
NEW = 96  # tokens of the text
TEMPERATURE = 0.7
SEED = 0


class Reader:
    """A model with its cache."""

    def __init__(self, checkpoint: Checkpoint):
        self.model = Model(checkpoint)
        columns, dtype = self.model.config.max_context, self.model.dtype
        self.cache = KVCache(self.model.config, columns, dtype=dtype, device=self.model.device)

    def tokens_after(self, text: list[int], last: int) -> Tensor:
        """Read what the cache lacks of the text. The model's tokens after each of the last `last` tokens, [last]."""
        start = self.cache.exact_len[0]
        rows = self.cache.after([start], [len(text) - start])
        hidden = self.model.embed_tokens(torch.tensor(text[start:]))
        logits = self.model.logits(forward(self.model, self.cache, rows, hidden).final)
        self.cache.commit(list(range(len(text) - start)))
        return sample_rows(logits[-last:], TEMPERATURE, 0, 1.0, SEED, rows.positions[-last:])


@torch.inference_mode()
def speculate(target: Reader, draft: Reader, text: list[int], new: int) -> tuple[list[int], int]:
    """The text with at least `new` more tokens, and the number of target passes."""
    text, end, passes = list(text), len(text) + new, 0
    while len(text) < end:
        guesses: list[int] = []
        for _ in range(DRAFT):
            guesses.append(int(draft.tokens_after(text + guesses, 1)))
        own = target.tokens_after(text + guesses, DRAFT + 1)  # after the last token of the text and after each guess
        _, count, after = accept_walk(torch.tensor([guesses]), None, own.unsqueeze(0))
        text += guesses[: int(count) - 1] + [int(after)]
        for reader in (target, draft):  # forget the columns of refused guesses; the newest token is not read yet
            reader.cache.truncate(min(reader.cache.exact_len[0], len(text) - 1))
        passes += 1
    return text, passes


if __name__ == "__main__":
    folders = [specker.zoo.path(name) for name in ("code-target", "code-draft")]
    main, small = (read(folder, dtype=torch.float32, device="cpu") for folder in folders)
    prompt = main.tokenizer.encode(sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):\n")
    written, count = speculate(Reader(main), Reader(small), prompt, NEW)
    print(main.tokenizer.decode(written))
    print(f"{len(written) - len(prompt)} tokens in {count} passes of the target", file=sys.stderr)
