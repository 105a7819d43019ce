"""Which part of a model a tensor-parallel rank holds: heads, inner columns and rows of the vocabulary.

qkv and gate-up are split by their outputs, o and down by their inputs, whose partial sums meet in one reduction each;
the LM head is split by ids. A rank's part is a smaller model of the same width; embedding and norms are whole on all.
"""

from dataclasses import dataclass, replace

from specker.runtime.model.config import CheckpointError, ModelConfig


@dataclass(frozen=True)
class Part:
    rank: int = 0
    size: int = 1

    def check(self, c: ModelConfig) -> None:
        """Raise CheckpointError where the model cannot be split over so many ranks."""
        for what, count in (("num_attention_heads", c.num_heads), ("intermediate_size", c.intermediate_size)):
            if count % self.size:
                raise CheckpointError(f"--tp {self.size} does not divide the target's {what}, {count}")
        if c.num_kv_heads % self.size and self.size % c.num_kv_heads:
            raise CheckpointError(
                f"--tp {self.size} neither divides the target's num_key_value_heads, {c.num_kv_heads}, nor is a "
                "multiple of them, so that each could stand on as many ranks"
            )

    def heads(self, c: ModelConfig) -> tuple[int, int]:
        """(first, count) of the query heads."""
        return self._share(c.num_heads)

    def kv_heads(self, c: ModelConfig) -> tuple[int, int]:
        """Of the KV heads; where there are fewer than ranks, neighbours hold the same one."""
        if c.num_kv_heads < self.size:
            return self.rank * c.num_kv_heads // self.size, 1
        return self._share(c.num_kv_heads)

    def inner(self, c: ModelConfig) -> tuple[int, int]:
        """Of the feed-forward's columns."""
        return self._share(c.intermediate_size)

    def vocabulary(self, c: ModelConfig) -> tuple[int, int]:
        """Of the LM head's rows; the last rank may have fewer."""
        each = -(-c.vocab_size // self.size)
        first = min(self.rank * each, c.vocab_size)
        return first, min(each, c.vocab_size - first)

    def config(self, c: ModelConfig) -> ModelConfig:
        """The part as a model of its own; the vocabulary is that of the tokens, whole."""
        if self.size == 1:
            return c
        heads, kv_heads, inner = (share(c)[1] for share in (self.heads, self.kv_heads, self.inner))
        return replace(c, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner)

    def _share(self, count: int) -> tuple[int, int]:
        each = count // self.size
        return self.rank * each, each
