"""The part of a model that a tensor-parallel rank holds: heads, feed-forward columns and rows of the LM head.

qkv and gate-up are split by output, o and down by input with one all-reduce each, and the LM head by id (Megatron-LM,
arXiv 1909.08053). Every expert of a mixture is split like an ordinary feed-forward. A rank's part is a smaller model
with the same hidden size; every rank has the whole embedding, the norms and the routers. A draft may be split so, too,
or only its feed-forwards (`--draft-layout`).
"""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from specker.cpu.communicator import Communicator
from specker.fields import option
from specker.model.config import CheckpointError, DeltaNet, Mixer, ModelConfig, ShortConv
from specker.model.sampling import Draws

BLOCK = 256  # columns that a GGUF file's K formats quantise together


def in_blocks(c: ModelConfig, ranks: int) -> bool:
    """Whether the ranks divide a feed-forward's columns by blocks, so that K formats are kept. Their shares may then be
    unequal, by a block."""
    blocks, rest = divmod(c.intermediate_size, BLOCK)
    return not rest and blocks >= 4 * ranks and c.layer.experts is None


@dataclass(frozen=True)
class Part:
    rank: int = 0
    size: int = 1
    whole_mixers: bool = False  # only feed-forwards are split: attention, or what stands in for it, is whole

    @property
    def mixer(self) -> "Part":
        """The part of attention, or of what stands in for it."""
        return WHOLE if self.whole_mixers else self

    def check(self, c: ModelConfig, model: str = "target") -> None:
        """Raise CheckpointError if the `model`, "target" or "draft", cannot be split over `size` ranks."""
        ranks, mixer = option("tp" if model == "target" else "draft_ranks", self.size), c.layer.recurrent
        if self.mixer.size > 1 and c.layer.qk_norm == "projection":
            raise CheckpointError(f"{ranks} cannot split the {model}: its norms of q and k are over all heads")
        if self.size > 1 and c.layer.kvs:
            raise CheckpointError(
                f"{ranks} cannot split the {model}: the layers of {c.architecture} have unlike heads, which is not "
                "supported yet"
            )
        if self.mixer.size > 1 and isinstance(mixer, DeltaNet) and mixer.tiled:
            raise CheckpointError(
                f"{ranks} cannot split the {model}: its GGUF file's out-projections have the value heads in another "
                "order; use a checkpoint in Hugging Face's format"
            )
        for what, count in (*([] if self.whole_mixers else _mixers(c)), *_feed_forwards(c, self.size)):
            if count % self.size:
                raise CheckpointError(f"{ranks} does not divide the {model}'s {what}, {count}")
        if c.num_kv_heads % self.mixer.size and self.size % c.num_kv_heads:
            heads = f"the {model}'s num_key_value_heads, {c.num_kv_heads}, nor is a multiple of them"
            raise CheckpointError(f"{ranks} neither divides {heads}")

    def share(self, count: int) -> range:
        """The part of so many heads, columns or channels that the rank holds."""
        each = count // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def columns(self, c: ModelConfig) -> range:
        """The part of a dense feed-forward's columns."""
        unit = BLOCK if in_blocks(c, self.size) else 1
        count = c.intermediate_size // unit
        return range(self.rank * count // self.size * unit, (self.rank + 1) * count // self.size * unit)

    def kv_heads(self, count: int) -> range:
        """The part of so many KV heads; if there are fewer heads than ranks, adjacent ranks hold the same head."""
        if count >= self.size:
            return self.share(count)
        first = self.rank * count // self.size
        return range(first, first + 1)

    def vocabulary(self, c: ModelConfig) -> tuple[int, int]:
        """(first, count) of the LM head's rows; the last ranks may have fewer."""
        each = -(-c.vocab_size // self.size)
        first = min(self.rank * each, c.vocab_size)
        return first, min(each, c.vocab_size - first)

    def config(self, c: ModelConfig) -> ModelConfig:
        """The part as a model config of its own; vocab_size stays that of the whole model."""
        if self.size == 1:
            return c
        layer, n, own = c.layer, self.size, self.mixer
        if (experts := layer.experts) is not None:
            experts = replace(experts, width=experts.width // n, shared=experts.shared // n)
        mixers = tuple(mixer and _mixer(mixer, own.size) for mixer in layer.mixers)
        layer = replace(layer, experts=experts, mixers=mixers)
        heads, kv_heads, inner = c.num_heads // own.size, len(own.kv_heads(c.num_kv_heads)), len(self.columns(c))
        return replace(c, layer=layer, num_heads=heads, num_kv_heads=kv_heads, intermediate_size=inner)


def _mixer(mixer: Mixer, ranks: int) -> Mixer:
    if isinstance(mixer, ShortConv):
        return replace(mixer, channels=mixer.channels // ranks)
    return replace(mixer, key_heads=mixer.key_heads // ranks, value_heads=mixer.value_heads // ranks)


def _mixers(c: ModelConfig) -> list[tuple[str, int]]:
    """The names and sizes of what the ranks must be able to divide of attention and of what stands in for it."""
    heads, mixer = [("num_attention_heads", c.num_heads)], c.layer.recurrent
    if mixer is None:
        return heads
    if isinstance(mixer, DeltaNet):
        return [*heads, ("linear_num_key_heads", mixer.key_heads)]
    return [*heads, ("hidden_size", mixer.channels)]


def _feed_forwards(c: ModelConfig, ranks: int) -> list[tuple[str, int]]:
    """The names and sizes of what the ranks must be able to divide of feed-forwards."""
    dense, experts = [] if in_blocks(c, ranks) else [("intermediate_size", c.intermediate_size)], c.layer.experts
    if experts is None:
        return dense
    shared = [("shared_expert_intermediate_size", experts.shared)] if experts.shared else []
    return [("experts' intermediate size", experts.width), *shared, *(dense if experts.dense else [])]


WHOLE = Part()


class OtherRanks(Protocol):
    """What a split model needs from the ranks that hold its other parts (runtime/ranks/dist.py)."""

    @property
    def communicator(self) -> Communicator | None:
        """What the compiled layers exchange through; None: they cannot run."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x."""
        ...

    def whole(self, logits: Tensor, vocab: int) -> Tensor:
        """This rank's columns of the logits [T, n] -> all ranks' [T, vocab]."""
        ...

    def draw(self, draws: Draws, logits: Tensor, positions: Tensor, vocab: int) -> Tensor:
        """The token after each row [T] int64, from this rank's columns of the logits [T, n] at `positions` [T]."""
        ...
