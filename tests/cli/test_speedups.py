"""What --check says about speed: the ratio, its spread, and when it proves nothing."""

from types import SimpleNamespace

import pytest

from specker.cli.report import Result, halves, speedups, verdict
from specker.cli.screen import Screen
from specker.runtime.control.stats import Stats


def stats(*rounds: tuple[int, float], prefill: float = 0.0, drafted: int = 9) -> Stats:
    """Of a text whose rounds emit so many tokens, each in so many seconds."""
    out = Stats(wall=prefill, drafted=drafted)
    out.seconds["prefill"] = prefill
    for tokens, seconds in rounds:
        out.wall += seconds
        out.rounds, out.tokens = out.rounds + 1, out.tokens + tokens
        out.token_times += [out.wall] * tokens
    return out


def result(own: Stats, plain: Stats) -> Result:
    check = SimpleNamespace(identical=True, ok=True, ar=SimpleNamespace(stats=plain))
    return Result([], "", own, check)


def test_halves_part_between_two_rounds_and_share_the_prefill() -> None:
    """The second round ends nearest to the middle of ten tokens, at the sixth."""
    own = stats((3, 4.0), (3, 1.0), (3, 3.0), (1, 1.0), prefill=2.0)
    plain = stats(*[(1, 3.0)] * 6, *[(1, 1.0)] * 4, prefill=6.0)
    assert halves(own, plain) == [(3.0 + 18.0) / (1.0 + 5.0), (3.0 + 4.0) / (1.0 + 4.0)]
    assert speedups([result(own, plain)]) == halves(own, plain)
    assert halves(stats((10, 2.0)), plain) == halves(Stats(), plain) == []


def test_halves_of_texts_that_differ_in_length_compare_the_same_tokens() -> None:
    own, plain = stats((2, 1.0), (2, 1.0), (2, 50.0)), stats(*[(1, 3.0)] * 4)
    assert halves(own, plain) == [6.0, 6.0]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            [result(stats((200, 4.0), (200, 6.0)), stats((200, 6.0), (200, 6.0)))],
            "1.20x of ar on one text of 400 tokens (1.50 and 1.00 in its halves)",
        ),
        (
            [result(stats((32, 2.0), (32, 1.0)), stats((32, 2.0), (32, 2.0)))],
            "1.33x of ar on one text of 64 tokens (1.00 and 2.00 in its halves): too short to judge",
        ),
        (
            [result(stats((200, 2.0)), stats((200, 3.0))), result(stats((200, 1.0)), stats((200, 3.0)))],
            "2.00x of ar (1.50 to 3.00 over 2 texts, 400 tokens in all)",
        ),
        (
            [result(stats((9, 2.0)), stats((9, 1.0))), result(stats((9, 1.0)), stats((9, 1.5)))],
            "0.83x of ar (0.50 to 1.50 over 2 texts, 18 tokens in all): too short to judge",
        ),
        (
            [result(stats((200, 2.0)), stats((200, 1.0))), result(stats((200, 2.0)), stats((200, 2.0)))],
            "0.75x of ar (0.50 to 1.00 over 2 texts, 400 tokens in all): plain decoding was faster here, try "
            "--strategy ar",
        ),
        (
            [result(stats((400, 1.0), drafted=0), stats((400, 1.16)))],
            "no drafts: the 1.16x between the two runs is chance, or the cost of a drafter that did not draft",
        ),
    ],
)
def test_the_sentence_on_speed(capsys: pytest.CaptureFixture[str], texts: list[Result], said: str) -> None:
    """Below the table, in which a run without drafts has no speedup."""
    assert verdict(texts) == said
    engine = SimpleNamespace(strategy="draft", title="t", speculates=True, trim_report=lambda stats: {})
    Screen(json_to_stdout=False).table(engine, texts)
    lines = capsys.readouterr().err.splitlines()
    if not texts[0].stats.drafted:
        assert lines.pop() == "drafting: no, because no round asked for a draft"
    [cell] = [line.split("│")[1].strip() for line in lines if line.startswith(" speedup")]
    assert lines[-1] == said and cell == said.split(" of ar")[0].split(":")[0]
