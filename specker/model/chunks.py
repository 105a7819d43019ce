"""Where the chunks of a prompt begin: at columns that depend neither on the prompt's length nor on other requests.

On a GPU, and with torch's operators, the last bits of a row depend on how many rows are computed beside it. So a text's
columns have the same bits in every request only if chunks begin at the same columns in each.
"""

from typing import NamedTuple

from specker.model.config import ModelConfig

SHORT = 512  # rows; takes about as long as three rounds of an 8B model on a GPU
LONG = 2048  # rows: 512 of an 8B model make 64 to 96 tiles of a product, for an H100's 132 SMs (counted)
LONG_FROM = 2048  # the first column of a long chunk: short prompts, and what requests share of them, keep to fine steps


class Chunks(NamedTuple):
    """The rows of a model's chunks."""

    short: int  # of those before column LONG_FROM
    long: int  # of the others

    @classmethod
    def of(cls, config: ModelConfig) -> "Chunks":
        """A mixture of experts has long chunks only, because each reads nearly all experts. Short chunks only: rings
        hold no more columns, recurrent states are saved between chunks, and rows that are not causal see their whole
        chunk."""
        layer = config.layer
        if layer.experts is not None:
            return cls(LONG, LONG)
        fine = any(layer.sliding_windows) or layer.recurrent is not None or not config.causal
        return cls(SHORT, SHORT if fine else LONG)

    def whole(self, columns: int) -> int:
        """How many of a text's first `columns` stand in chunks that end among them."""
        return columns - columns % (self.short if columns < LONG_FROM else self.long)

    def rows(self, column: int) -> int:
        """The rows from `column` to the end of its chunk."""
        return self.whole(column) + (self.short if column < LONG_FROM else self.long) - column


def slices(rows: int) -> int:
    """In how many slices of the layers a chunk runs: each takes about as long as a chunk of SHORT rows."""
    return -(-rows // SHORT)
