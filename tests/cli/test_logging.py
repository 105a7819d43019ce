"""What specker has to say goes to the logger `specker`; the application decides whether it is seen."""

import json
import logging
from pathlib import Path

import torch

import specker
from specker.cli import run
from specker.cli.screen import Screen
from specker.integrations.drafts import Drafts
from specker.runtime.engine import Engine
from specker.runtime.strategies.vocabtrim.scores import VocabScores

LOGGER = logging.getLogger("specker")


def test_the_library_adds_a_null_handler_alone():
    assert [type(handler) for handler in LOGGER.handlers] == [logging.NullHandler]
    assert LOGGER.level == logging.NOTSET and LOGGER.propagate


def test_an_engines_remarks_are_logged_when_it_is_made(pair, caplog, capsys):
    engine = specker.load(*pair, device="cpu", load="dummy")
    assert engine.remarks.keys() == {"sizing", "cpu"}  # heads of 16 are not compiled
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == list(engine.remarks.values())
    caplog.clear()
    quiet = specker.load(*pair, device="cpu").remarks
    assert [record.getMessage() for record in caplog.records] == [quiet["cpu"]] == [*quiet.values()]
    caplog.clear()
    quiet = specker.load(*pair, device="cpu", draft_quantize="int8")
    assert quiet.remarks.keys() - quiet.warnings.keys() == {"draft_weights"}
    assert [record.getMessage() for record in caplog.records] == [quiet.remarks["cpu"]] == [*quiet.warnings.values()]
    assert capsys.readouterr() == ("", "")


def few(folder: Path) -> dict[str, str]:
    """Options of a head with more rows than a score file counts."""
    path, counts = folder / "scores.safetensors", torch.zeros(320, dtype=torch.int64)
    counts[:3] = 5
    path.write_bytes(VocabScores.from_counts(counts).to_bytes())
    return {"strategy": "vocabtrim", "vocab_scores": str(path), "vocab_keep": "20"}


def test_the_warnings_on_a_drafter_for_another_engine_are_logged(pair, caplog, tmp_path):
    Drafts(pair[0], pair[1], device="cpu", draft_quantize="int8", **few(tmp_path))
    (record,) = caplog.records
    assert record.getMessage().startswith("the score file counts only 3 ids, so the draft head also has ")
    assert record.getMessage().endswith(" rows of ids that it never counted: vocab_keep=3 leaves them out")


def test_what_asks_nothing_of_its_reader_is_in_json_alone(pair, caplog, capsys, tmp_path):
    """The format of weights, and rows beyond those that a score file counted unless the user named their number."""
    out, flags = tmp_path / "o.json", few(tmp_path)
    argv = ["--target", pair[0], "--draft", pair[1], "--device", "cpu", "--prompt", "x", "--max-new-tokens", "2"]
    argv += ["--draft-quantize", "int8", "--strategy", flags["strategy"], "--vocab-scores", flags["vocab_scores"]]
    for more, warned in (([], False), (["--vocab-keep", "20"], True)):
        assert run.main([*argv, "--json", str(out), *more]) == 0
        told, said = json.loads(out.read_text()), capsys.readouterr().err
        assert told["draft_weights"] == "the draft's matrices are in int8" and told["vocab_keep"].startswith(
            "the score"
        )
        assert (told["vocab_keep"] in said) == warned == ("--vocab-keep 3 leaves them out" in told["vocab_keep"])
        logged = [record.getMessage() for record in caplog.records]
        assert "matrices" not in said and (told["vocab_keep"] in logged) == warned


def test_a_screen_prints_warnings_while_it_listens(capsys):
    screen = Screen(json_to_stdout=False)
    with screen.log_notes():
        LOGGER.getChild("runtime").warning("a graph could not be captured (%s)", "a")
        LOGGER.info("not for the user")
    LOGGER.warning("later")
    assert capsys.readouterr() == ("", "a graph could not be captured (a)\n")


def test_the_command_prints_what_warming_up_and_decoding_log(pair, capsys, monkeypatch):
    def warmup(self: Engine, tell: object) -> None:
        LOGGER.warning("while warming up")

    monkeypatch.setattr(Engine, "warmup", warmup)
    argv = ["--target", pair[0], "--draft", pair[1], "--device", "cpu", "--prompt", "x", "--max-new-tokens", "2"]
    assert run.main([*argv, "--check"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said.count("while warming up") == 1
    assert sum("decoding is slow" in line for line in said) == 1  # although it is logged, too
    assert [type(handler) for handler in LOGGER.handlers] == [logging.NullHandler]
