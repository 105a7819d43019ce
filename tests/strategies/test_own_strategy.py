"""A strategy from outside of specker: the smallest one, as docs/strategies.md shows it."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import warm
from make_checkpoint import make
from one_round import after_every_round

import specker
from specker.integrations.drafts import Drafts
from specker.options import Common
from specker.runtime.control.policy import Means
from specker.runtime.round.drafter import Drafter
from specker.runtime.strategies.base import DraftContext, Strategy
from specker.runtime.strategies.registry import GROUP

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8").split("## Your own")[1], re.DOTALL)
(CODE, ENTRY) = (next(text for language, text in BLOCKS if language == kind) for kind in ("python", "toml"))
MORE = """
from dataclasses import dataclass

from specker.fields import opt


@dataclass(frozen=True)
class Counted:
    repeat_most: int = opt(2, "tokens to repeat at most", least=1)


class RepeatSome(Repeat):
    name = "repeat-some"
    options = Counted
    policies = ("slow",)
"""


def repeat() -> Strategy:
    names: dict[str, Any] = {}
    exec(compile(CODE, str(PAGE), "exec"), names)
    return names["Repeat"]()


@pytest.mark.parametrize("joined", [False, True])
def test_the_smallest_strategy_drafts_and_changes_no_token(tmp_path: Path, joined: bool) -> None:
    target, own = make(tmp_path, "llama", layers=2), repeat()
    strategy = [own, "lookup"] if joined else own
    engine = specker.load(target, strategy=strategy, device="cpu", dtype="float64", policy="fixed", batch_size=2)
    assert engine.strategy == ("repeat+lookup" if joined else "repeat")
    prompts, drafted = [[5, 9], [7, 7, 7]], []
    engine.trace = lambda row: drafted.append((row["prompt"], row["draft"]))
    out = engine.generate(prompts, 24)
    assert [each.tokens for each in out] == [each.tokens for each in engine.generate_ar(prompts, 24)]
    assert ((0, [5] * 4) in drafted and (1, [7] * 4) in drafted) or joined
    assert engine.generate([8, 8], 24, temperature=0.7).tokens == engine.generate_ar([8, 8], 24, temperature=0.7).tokens


def test_it_joins_a_model_and_copied_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cheap: None) -> None:
    """Each of the three drafts, and no token changes."""
    target = make(tmp_path, "llama", layers=2, max_context=256)
    strategy, parts = [repeat(), "draft", "lookup"], set()
    engine = specker.load(target, target, strategy, device="cpu", dtype="float64", batch_size=2, page_size=16)
    assert engine.strategy == "repeat+draft+lookup" and [d.model is None for d in engine.drafters] == [
        False,
        True,
        True,
    ]
    policy = engine.policy()
    assert {shape.part for shape in policy.budgets()} == {0, 1}, "nothing to copy yet"
    for chosen in (0, 1, 2):  # the others' drafts promise nothing
        engine.loop.clear(forget=True)
        drafted = after_every_round(monkeypatch, lambda _, r: parts.add(r.draft.size and 1 + r.batch.budget.part))
        with monkeypatch.context() as patch, drafted:

            def promised(_, shape, c=chosen):
                return Means(99.0 if shape.part == c else 0.5, shape.depth, shape.depth)

            patch.setattr(type(policy), "means", promised)
            prompts = [[5, 9, 5, 9, 5, 9, 5], [7, 7, 7]]
            out = engine.generate(prompts, 24)
        assert [each.tokens for each in out] == [each.tokens for each in engine.generate_ar(prompts, 24)]
    assert {1, 2, 3} <= parts


class Reader(Strategy):
    name = "reader"

    def drafter(self, context: DraftContext) -> Drafter:
        drafter = Drafter()
        drafter.aux_layers = (1,)
        return drafter


def test_two_models_do_not_compose(tmp_path: Path) -> None:
    target = make(tmp_path, "llama", layers=2)
    with pytest.raises(ValueError, match="strategies draft and reader do not compose: reader runs a model, too"):
        specker.load(target, target, [Reader(), "draft"], device="cpu")


def test_it_drafts_for_another_engine(tmp_path: Path) -> None:
    drafts = Drafts(make(tmp_path, "llama", layers=2), strategy=repeat(), device="cpu", draft_tokens=3)
    assert drafts.draft([[5, 9]], 8) == [[5, 5, 5]]


class Nameless(Strategy):
    pass


class Taken(Strategy):
    name = "draft"


class Shadows(Strategy):
    name, options = "shadows", Common


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Nameless(), "Nameless needs a name of letters, digits, - and _, got None"),
        (Taken(), "Taken needs a name of its own: 'draft' is one of specker's strategies"),
        (Shadows(), "Shadows has an option 'activations', which is one of specker's own"),
        (Nameless, "strategy must be a name, a Strategy or a list of these, got <class"),
        ([], r"strategy must be a name, a Strategy or a list of these, got \[\]"),
        ([repeat(), "draft", "easyspec"], "strategies repeat and draft and easyspec do not compose: each one drafts"),
        ([repeat(), "vocabtrim"], "strategies repeat and vocabtrim do not compose: repeat runs no model"),
        ("repeat", "unknown strategy 'repeat'"),  # an object that is passed once is not installed
    ],
)
def test_what_cannot_be_a_strategy_is_refused(strategy: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        specker.load(strategy=strategy)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder on the path with the strategy as an installed package, and the environment that finds it."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "repeating.py").write_text(CODE + MORE, encoding="utf-8")
    points = tomllib.loads(ENTRY)["project"]["entry-points"][GROUP]
    points |= {"repeat-some": "repeating:RepeatSome", "renamed": "repeating:Repeat", "gone": "repeating:Gone"}
    info = folder / "repeating-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: repeating\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *(f"{k} = {v}" for k, v in points.items())]))
    return {"PYTHONPATH": str(folder)}


def test_an_installed_package_brings_a_strategy(package: dict[str, str]) -> None:
    """Its name and flags are on the command line, and in Python."""
    shown = warm.run("-m", "specker.run", "--list-strategies", env=package).stdout
    assert re.search(r"^repeat  .*drafts the token", shown, re.MULTILINE) and "--repeat-most" in shown
    command = ("--device", "cpu", "--max-new-tokens", "8", "--prompt", "ha ha", "--check")
    named = ("--strategy", "repeat-some+lookup", "--repeat-most", "3")
    done = warm.run("-m", "specker.run", *command, *named, env=package)
    assert done.returncode == 0, done.stderr
    assert "repeat-some+lookup" in done.stdout + done.stderr
    code = (
        "from specker.runtime import strategies\n"
        "made = strategies.options(strategy='repeat-some', repeat_most=3, policy='slow')\n"
        "print(made.base.name, made.own.repeat_most, made.policy)\n"
        "print('slow' in strategies.offers()['policy'], 'repeat+lookup' in strategies.offers()['strategy'])"
    )
    assert warm.run("-c", code, env=package).stdout == "repeat-some 3 slow\nTrue True\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [("gone", "has no attribute 'Gone'"), ("renamed", "its class has the name 'repeat'")],
)
def test_a_faulty_package_is_left_out_with_the_reason(package: dict[str, str], name: str, said: str) -> None:
    done = warm.run("-m", "specker.run", "--strategy", name, "--prompt", "a", env=package)
    assert done.returncode == 2 and f"strategy '{name}' of an installed package is left out: repeating:" in done.stderr
    assert said in done.stderr
