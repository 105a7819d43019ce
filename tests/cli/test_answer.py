"""An answer on a terminal: what it shows is Markdown, however the text arrives, and nothing of the text is lost."""

import io
import itertools
import random
import re

import pytest
from rich.console import Console

from specker.cli.answer import Answer

CODE = """def f(x):
\tif x:
        return "a line that is longer than the terminal is wide, and is copied in one piece" + x

    # done"""
TEXT = f"""# A title
Some *text* with **bold** words, `code`, <think>html</think>, [a link](http://x.y/z?a=b) and words that go on.
second line
third line

1. one

   more of one
2. two

- a
  ```python
  x = 1
  ```

<div>
kept
</div>

| a | b |
|---|---|
| 1 | 2 |

```python
{CODE}
```
[1]: http://ref
![alt](http://img)

Last 2 * 3 = 6, snake_case_name,\tand **not closed
"""


def screen(raw: str, height: int) -> str:
    """What a terminal shows after the output `raw`, with the lines that have left it at the top."""
    lines, row = [""], 0
    for text, up, erase, other in re.findall(r"([^\x1b\r\n]+)|\x1b\[(\d+)A|(\x1b\[2K)|(\x1b\[\?\d+[hl]|\r|\n)", raw):
        if text:
            assert lines[row] == "", "nothing is written over a line that was not erased"
            lines[row] = text
        elif up:
            row -= int(up)
            assert row >= len(lines) - height, "a line that has left the screen cannot be erased"
        elif erase:
            lines[row] = ""
        elif other == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
    return "\n".join(lines)


def shown(pieces: list[str], width: int = 50, height: int = 10) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=height, legacy_windows=False
    )
    answer = Answer(console)
    for piece in pieces:
        answer.add([(piece, len(piece) % 2 == 0)])
    answer.end()
    assert isinstance(console.file, io.StringIO)
    return screen(console.file.getvalue(), height)


def cut(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    ends = sorted({0, len(text), *(draw.randrange(len(text)) for _ in range(len(text) // 4))})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("seed", range(3))
def test_the_screen_does_not_depend_on_how_the_text_arrives(seed: int) -> None:
    """In blocks taller than the screen, too."""
    whole = shown([TEXT])
    assert shown(cut(TEXT, seed)).rstrip() == whole.rstrip()


def test_nothing_of_the_text_is_lost() -> None:
    said = shown(cut(TEXT, 5))
    for word in re.findall(r"\w+", TEXT.replace("```python", "")):
        assert word in said, word
    for line in ("second line\nthird line", "<think>html</think>", "</div>", "http://x.y/z?a=b", "http://ref"):
        assert line in said
    assert CODE.expandtabs(4) in said, "code is as it was written"
    assert not re.search(r"[ \t]$", said, re.MULTILINE), "no spaces at the ends of lines"
    assert "**bold" not in said and "```" not in said and "**not" in said


def test_words_are_not_broken_at_the_edge() -> None:
    text = " ".join(f"word{n}" for n in range(100))
    for line in shown(cut(text, 1), width=37).splitlines():
        assert len(line) <= 37 and all(re.fullmatch(r"word\d+", word) for word in line.split())
    assert shown(cut(text, 1), width=37).split() == text.split()
