"""What specker has to say goes to the logger `specker`; the application decides whether it is seen."""

import logging

import specker
from specker.cli import run
from specker.cli.screen import Screen
from specker.integrations.drafts import Drafts
from specker.runtime.engine import Engine

LOGGER = logging.getLogger("specker")


def test_the_library_adds_a_null_handler_alone():
    assert [type(handler) for handler in LOGGER.handlers] == [logging.NullHandler]
    assert LOGGER.level == logging.NOTSET and LOGGER.propagate


def test_an_engines_remarks_are_logged_when_it_is_made(pair, caplog, capsys):
    engine = specker.load(*pair, device="cpu", load="dummy", linear="cublas")
    assert engine.remarks.keys() == {"sizing", "linear", "cpu"}  # heads of 16 are not compiled
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == list(engine.remarks.values())
    caplog.clear()
    quiet = specker.load(*pair, device="cpu").remarks
    assert [record.getMessage() for record in caplog.records] == [quiet["cpu"]] == [*quiet.values()]
    assert capsys.readouterr() == ("", "")


def test_the_notes_of_a_drafter_for_another_engine_are_logged(pair, caplog):
    Drafts(pair[0], pair[1], device="cpu", draft_quantize="int8")
    assert [record.getMessage() for record in caplog.records] == ["the draft's matrices are in int8"]


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
    assert run.main([*argv, "--linear", "cublas", "--check"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said.count("while warming up") == 1
    assert sum("--linear cublas" in line for line in said) == 1  # although it is logged, too
    assert [type(handler) for handler in LOGGER.handlers] == [logging.NullHandler]
