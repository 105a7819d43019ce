"""`make papers`: every paper runs end to end, the sweep of DEL is what decoding does, and the page comes from rows."""

import dataclasses

import pytest
import torch

from bench import harness
from bench.papers import __main__ as papers
from bench.papers import dynamic_exit, measure, models, page, picture, vocabtrim
from specker import zoo
from specker.zoo.inflate import SHAPES, Inflated

SHOWN = {  # what the tables of a trial must hold
    "easyspec": ("--strategy easyspec --as-published", "mismatch", "--draft-layout both", "cosine of the final rows"),
    "del": ("--strategy del --policy plus-minus-one --exit-layer", "tokens per loaded layer", "a full sweep"),
    "diffuspec": ("--strategy diffuspec --cps tree --draft-tokens 4", "autoregressive, chains of 4", "2.69"),
    "vocabtrim": ("--strategy vocabtrim --vocab-keep 0.25", "MBSU", "Python's standard library"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Where the inflated family is kept."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("paper", SHOWN)
def test_a_paper_runs_and_prints_its_tables(made, tmp_path, results, monkeypatch, command_line, capsys, paper):
    monkeypatch.setattr(models, "cache_root", lambda: made)
    monkeypatch.setattr(vocabtrim, "KEPT", vocabtrim.KEPT[:2])
    command_line(f"x --quick --threads 1 --temperatures 0 --papers {paper}".split())
    papers.main()
    shown = capsys.readouterr().out
    for text in (f"## {paper}", "The bundled family, inflated to the shape of quick**, T = 0", *SHOWN[paper]):
        assert text in shown
    assert "`python x --quick" in shown and "The default has " in shown
    assert not list(tmp_path.iterdir()), "nothing is saved"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--papers del,eagle", "bench: --papers has 'eagle'; there are easyspec, del"),
        ("--shape 2b", "bench: no shape is called '2b'; there are 0.5b"),
        ("--shape 1b/two", "bench: no shape is called '1b/two'; there are 0.5b"),
        ("--quick --save", "bench: --quick measures nothing that is worth keeping"),
        ("--device tpu", "bench: unknown device 'tpu': use cpu or cuda"),
    ],
)
def test_what_cannot_be_run_is_refused(command_line, flags, message):
    command_line(["x", *flags.split()])
    with pytest.raises(SystemExit, match=f"^{message}"):
        papers.main()


def test_rows_and_a_picture_are_saved(results, monkeypatch, command_line):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(papers, "measured", lambda args, paper: [row(paper, "fast", 1.5), row(paper, "slow", 0.5)])
    command_line(["x", "--save", "--papers", "del,diffuspec"])
    papers.main()
    found = [(row["paper"], row["way"]) for row in results()]
    assert found == [("del", "fast"), ("del", "slow"), ("diffuspec", "fast"), ("diffuspec", "slow")]
    assert "</svg>" in (harness.folder() / "papers.svg").read_text()


# --- DEL


def test_the_sweep_counts_what_decoding_does():
    temperature, count = 0.7, 16
    pair = models.Pair(dtype="float64", prompts=2, max_new_tokens=count)
    plain = pair.load("ar")
    texts = [plain.generate(ids, count, temperature=temperature).tokens for ids in pair.texts]
    right = [dynamic_exit.matches(plain, *both, temperature) for both in zip(pair.texts, texts, strict=True)]
    best = dynamic_exit.sweep(right, 12, lambda exit: [1 + g for g in range(18)])
    assert [row["exit"] for row in best] == list(range(1, 12))
    chosen = max(best, key=lambda row: row["acceptance_length"])
    how = {"exit_layer": chosen["exit"], "draft_tokens": chosen["g"]}
    engine = pair.load("del", policy="fixed", **how)
    done = [engine.generate(ids, count, temperature=temperature).stats for ids in pair.texts]
    stats = done[0] + done[1]
    several = dataclasses.replace(stats, exits={**stats.exits, 1: 1})  # so rounds are counted one by one
    for each in (stats, several):
        assert dynamic_exit.per_layer(engine, each, pair, temperature) == pytest.approx(chosen["per_layer"])
    assert chosen["acceptance_length"] == pytest.approx(2 * count / stats.rounds) and chosen["g"] > 0


def test_rounds_of_a_text_by_hand():
    right = [True, True, False, True, False, False]
    assert dynamic_exit.counted(right, 0) == (6, 6, 0)
    assert dynamic_exit.counted(right, 2) == (6, 3, 4)  # 3 tokens, then 2, then the last one, which needs no draft
    match = torch.tensor([right, [False] * 6, [False, True, False, True, True, False]])
    best = dynamic_exit.sweep([match], 4, lambda exit: [4 + exit * g / 8 for g in range(18)])
    assert [(row["exit"], row["g"], row["fast_g"]) for row in best] == [(1, 2, 2), (2, 0, 1), (3, 0, 2)]
    assert best[0]["per_layer"] == 6 / (3 * 4 + 4) and best[2]["by_seconds"] == pytest.approx(2 * 4 / 4.75)
    found = [(each.title, measure.flags(each.options)) for each in dynamic_exit.fixed(best)]
    assert found == [
        ("best fixed setting by seconds", "--strategy del --policy fixed --exit-layer 1 --draft-tokens 2"),
        ("second best, at another exit", "--strategy del --policy fixed --exit-layer 3 --draft-tokens 2"),
        ("plus-minus-one rule at the best exit", "--strategy del --policy plus-minus-one --exit-layer 1"),
    ]


# --- models


def test_the_family_is_made_once_and_anew_for_other_weights(tmp_path, monkeypatch):
    for member in models.MEMBERS:
        folder = tmp_path / "zoo" / member
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(member)
        (folder / "config.json").write_text((zoo.path(member) / "config.json").read_text())
    made = []

    def inflate(source, shape, out, device):
        out.mkdir(parents=True)
        made.append((out.name, device))

    monkeypatch.setattr(models.zoo, "path", lambda name: tmp_path / "zoo" / name)
    monkeypatch.setattr(models, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(models.inflate, "inflate", inflate)
    every = (*models.MEMBERS, models.AS_LARGE)
    first = models.inflated("1b", "cuda", every)
    assert models.inflated("1b", "cuda", every) == first and made == [(name, "cuda") for name in every]
    other = models.inflated("quick", "cpu", every)
    (tmp_path / "zoo" / "code-draft" / "model.safetensors").write_text("trained again")
    new = models.inflated("1b", "cuda", every)
    assert new != first and len(made) == 15
    assert {path.name for path in tmp_path.glob("inflated-*")} == {new.name, other.name}


def test_the_autoregressive_draft_is_as_large_as_the_diffusion_drafter():
    for shape in (*SHAPES.values(), models.QUICK):
        sizes = [
            models._elements(Inflated(zoo.path(name), own).config)
            for name, own in (("code-diffusion", shape), ("code-draft-deep", models.large_shape(shape)))
        ]
        assert sizes[1] / sizes[0] == pytest.approx(1, abs=0.02)


# --- the page


def row(paper, way, over, **more):
    spread = {"median": over, "p20": over - 0.1, "p80": over + 0.1}
    fields = {"bench": "papers", "paper": paper, "table": "speed", "model": "the family", "temperature": 0.0}
    fields |= {"way": way, "over_ar": over, "over_ar_texts": spread, "theirs": "2.5", "rested": 0.4, "device": "cpu"}
    flags = f"--strategy {paper}" + ("" if way == "slow" else " --policy fixed")
    origin = {"command": "python x", "commit": "abc", "date": "1", "machine": "a machine", "threads": 2}
    return fields | origin | {"flags": flags, "versions": {"torch": "2"}} | more


def test_a_page_shows_the_newest_run_of_each_model():
    assert page.of_paper("del", []) == page.of_paper("del", [row("easyspec", "fast", 1.5)]) == page.NOT_YET
    old = [row("del", "gone", 1.9), row("del", "slow", 0.5)]
    new = [row("del", way, over, commit="def", per_layer=0.125) for way, over in (("fast", 1.6), ("slow", 1.2))]
    real = [row("del", "fast", 1.1, model="real models")]
    lines = page.of_paper("del", [*old, *real, *new]).splitlines()
    assert "**The family**, T = 0:" in lines and "**Real models**, T = 0:" in lines
    assert "| fast | `--strategy del --policy fixed` | 1.60 | 1.50 to 1.70 |  | 0.1250 | 2.5 |" in lines
    said = "The default has 75% of the speed of the fastest of these, `--strategy del --policy fixed`."
    assert f"{said} It drafted nothing in 40% of its rounds." in lines
    assert (
        not any("gone" in line for line in lines) and "`python x`; a machine, 2 threads; torch 2; commit def." in lines
    )


def test_the_summary_has_a_line_for_each_paper_of_the_newest_run():
    assert page.summary([row("del", "fast", 1.5)]) == page.NOT_YET, "of a real model"
    model = "the family, inflated"
    old = [row("del", "fast", 9.0, model=model)]
    flags = ("--strategy del --as-published", "--strategy del", "--strategy del --policy fixed", "--strategy draft")
    new = [
        row("del", "", over, model=model, commit="def", flags=each, temperature=t)
        for t, speeds in ((0.7, (0.5, 1.0, 0.9, 4.0)), (0.0, (1.5, 1.2, 1.6, 4.0)))
        for each, over in zip(flags, speeds, strict=True)
    ]
    lines = page.summary([*old, *new, row("del", "fast", 1.1, model="real models")]).splitlines()
    assert lines[2] == "| [`del`](#del) | 1.50 | 0.50 | 1.20 | 1.00 | 1.60 | 1.00 |" and len(lines) == 5
    assert "commit def" in lines[4]


def test_other_tables():
    groups = [
        row("easyspec", "", 0, table="groups", width=4, layers=n, calibration=way, acceptance_length=n + len(way) / 10)
        for n, way in ((1, "every"), (2, "every"), (2, "never"))
    ]
    assert page.of_groups("easyspec", groups)[2:] == [["4", "every", "1.50", "2.50"], ["4", "never", "", "2.50"]]
    steps = [
        row("easyspec", "", 0, table="steps", layers=n, cosine=1 / n, draft_rows=[1, 12], step_ms=[4 / n, 8 / n])
        for n in (1, 2)
    ]
    assert page.of_steps("easyspec", steps)[3] == ["2", "0.500", "2.00", "2.00", "4.00", "2.00"]


def test_a_picture_is_of_one_model():
    pytest.importorskip("matplotlib")
    figure = picture.draw([row("del", "fast", 1.5), row("del", "fast", 1.1, model="real"), row("vocabtrim", "a", 2.0)])
    assert [len(axis.patches) for axis in figure.axes] == [1, 1] and figure.axes[0].patches[0].get_width() == 1.5
