"""The prompt of a completion with a `suffix`: fill in the middle, for models whose tokenizer has tokens for it."""

from dataclasses import dataclass

from specker.checkpoints.tokenizer import Tokens
from specker.serve.api import Completion

MARKS = (  # before the prefix, before the suffix and before the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder (arXiv 2409.12186), CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder (arXiv 2305.06161), Granite Code
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder (arXiv 2401.14196)
)
ENDS = "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<file_sep>"


@dataclass(frozen=True)
class Infill:
    """Attributes:
    marks: one of MARKS.
    stops, stop_ids: where the middle ends. A special token has no text, and so is an id.
    """

    marks: tuple[str, str, str]
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokens: Tokens) -> "Infill | None":
        """The form of a model; None if it has no tokens for it."""
        special, added = tokens.special, tokens.spelling.added
        marks = next((marks for marks in MARKS if {*marks} <= {*added}), None)
        if marks is None:
            return None
        ends = [mark for mark in (*marks, *ENDS) if mark in added]
        texts = tuple(mark for mark in ends if mark not in special)
        return cls(marks, texts, tuple(special[mark] for mark in ends if mark in special))

    def prompted(self, asked: Completion) -> Completion:
        """The request with prompts that the model continues with the text between prompt and suffix."""
        before, behind, middle = self.marks
        stops = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        return asked.model_copy(
            update={
                "prompt": [f"{before}{prompt}{behind}{asked.suffix}{middle}" for prompt in asked.prompts],
                "stop": [*stops, *self.stops],
                "stop_token_ids": [*(asked.stop_token_ids or ()), *self.stop_ids],
            }
        )
