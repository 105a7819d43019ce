"""`--draft auto` and `specker drafts`: what is known for a target, which draft is chosen, and what is refused."""

import json
from itertools import groupby
from pathlib import Path

import pytest
from make_checkpoint import make
from make_head import make_head

import specker
from specker import zoo
from specker.checkpoints.files import HUB
from specker.checkpoints.gguf.convert import READ
from specker.cli import drafts, run
from specker.runtime import strategies
from specker.zoo import catalogue
from specker.zoo.catalogue import ASSISTANT, BLOCKS, HEAD3, KINDS, KNOWN, MTP, SMALL, Known, choose, drafts_for

ROOT = Path(__file__).parents[2]
HUB_CACHE = "hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218"


@pytest.mark.parametrize(
    ("target", "known"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("someone/Qwen3-8B-FP8", "Qwen/Qwen3-8B"),
        ("RedHatAI/Qwen3-8B-quantized.w4a16", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-GPTQ-Int4", "Qwen/Qwen3-8B"),
        ("models/Qwen3-8B-Q4_K_M.gguf", "Qwen/Qwen3-8B"),
        ("Qwen3-8B.IQ3_XXS.gguf", "Qwen/Qwen3-8B"),
        ("unsloth/Qwen3.6-27B-GGUF/Qwen3.6-27B-UD-Q4_K_XL.gguf", "Qwen/Qwen3.6-27B"),
        ("gemma-4-E4B-it-qat-UD-Q4_K_XL.gguf", "google/gemma-4-E4B-it-qat-q4_0-gguf"),
        ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("unsloth/Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B-Base"),
        ("gpt-oss-20b-mxfp4.gguf", "openai/gpt-oss-20b"),
        ("someone/gemma-4-26B-A4B-it-GGUF", "google/gemma-4-26B-A4B-it"),
        (None, "code-target"),
    ],
)
def test_a_target_is_recognised_by_its_name(target: str | None, known: str) -> None:
    found = drafts_for(target)
    assert found and {entry.target for entry in found} == {known}
    every = [entry for entry in KNOWN if entry.target == known]
    in_gguf = target is not None and target.lower().endswith("gguf")
    first = [entry for entry in every if entry.gguf == in_gguf]
    assert [*found] == first + [entry for entry in every if entry not in first]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8", "me/Qwen3-8B-poems", "Qwen/Qwen3-80B", "Qwen3", "vicuna-7b-v1.5"])
def test_another_model_is_not_taken_for_it(name: str) -> None:
    assert drafts_for(name) == ()


def test_a_folder_is_recognised_by_its_name_its_config_and_its_place(tmp_path: Path) -> None:
    for path, config in {
        "Qwen3-8B": {},
        "mine": {"_name_or_path": "Qwen/Qwen3-8B"},
        HUB_CACHE: {},
    }.items():
        folder = tmp_path / path
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        assert drafts_for(folder) == drafts_for("Qwen/Qwen3-8B") != (), path
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "qwen3-8b-q8_0.gguf").touch()
    assert choose(tmp_path / "file").target == "Qwen/Qwen3-8B"
    (tmp_path / "mine" / "config.json").write_text("[1")
    assert drafts_for(tmp_path / "mine") == ()


def test_a_bundled_target_is_recognised_by_its_sizes(tmp_path: Path) -> None:
    sizes = dict(zoo.CODE.sizes)
    raw = {"num_hidden_layers": sizes.pop("num_layers"), "num_attention_heads": sizes.pop("num_heads"), **sizes}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert choose(tmp_path).draft == "code-draft"
    assert choose(tmp_path, "diffuspec").draft == "code-draft"  # it stands for those of all strategies
    (tmp_path / "config.json").write_text(json.dumps({**raw, "vocab_size": 7}))
    assert drafts_for(tmp_path) == ()


def usual(target: str, draft: str, options: dict[str, str]) -> str:
    return str(strategies.usual(target, draft, options)["strategy"])


def test_the_strategy_decides_between_a_head_and_a_small_model() -> None:
    assert choose("Qwen/Qwen3-8B") is choose("Qwen/Qwen3-8B", "eagle")
    assert choose("Qwen/Qwen3-8B").kind == HEAD3
    assert choose("Qwen/Qwen3.5-9B").strategy == choose("Qwen/Qwen3.5-9B", "dflash").strategy == "dflash"
    assert choose("google/gemma-4-E4B-it").strategy == usual("google/gemma-4-E4B-it", "auto", {}) == "mtp"
    small = choose("Qwen/Qwen3-8B", "draft")
    assert small.draft == "Qwen/Qwen3-0.6B" and choose("Qwen/Qwen3-8B", "easyspec") is small
    pard = choose("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")
    assert pard.draft == "amd/PARD-DeepSeek-R1-Distill-Qwen-1.5B" and pard.strategy == "draft"
    assert not pard.serves("easyspec") and pard.serves("draft")
    assert "because strategy 'draft' drafts with it" in catalogue.reason(small, "draft")
    assert usual("Qwen/Qwen3-8B", "auto", {}) == "eagle"
    assert usual("Qwen/Qwen3-8B-Base", "auto", {}) == usual("a", "b", {}) == "vocabtrim+lookup"


@pytest.mark.parametrize("target", ["Qwen3.6-27B-Q4_K_M.gguf", "org/Qwen3.6-27B-GGUF/Qwen3.6-27B-UD-IQ4_XS.gguf"])
def test_a_gguf_file_gets_a_gguf_file(target: str) -> None:
    found = choose(target)
    assert found.gguf and found.kind == BLOCKS and not choose("Qwen/Qwen3.6-27B").gguf
    assert "because it is the first of the known ones in GGUF files, as the target is" in catalogue.reason(
        found, "dflash"
    )
    head = choose(target, "mtp")
    assert head.kind == MTP and head.draft == "ggml-org/Qwen3.6-27B-GGUF/mtp-Qwen3.6-27B-Q8_0.gguf"
    assert choose("Qwen3-32B-Q4_K_M.gguf").kind == HEAD3  # none is known in a GGUF file


def test_what_stands_beside_a_gguf_file_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["mtp-Tiny-Q4_0", "mtp-Tiny-Q8_0", "mtp-Tiny-XL-Q8_0", "dflash-Tiny-Q8_0", "mmproj-Tiny-Q8_0", "Tiny-Q8_0"]
    target = tmp_path / "Tiny-qat-UD-Q4_K_XL.gguf"
    for name in (*names, target.stem, "Other"):
        (tmp_path / f"{name}.gguf").touch()
    found = drafts_for(target)
    assert [(Path(known.draft).stem, known.kind) for known in found] == [
        ("mtp-Tiny-Q8_0", MTP),
        ("dflash-Tiny-Q8_0", BLOCKS),
    ]
    assert choose(target) == found[0] and choose(target, "dflash") == found[1]
    assert usual(str(target), "auto", {}) == "mtp"
    assert catalogue.reason(found[0], "mtp") == (
        f"drafting with mtp-Tiny-Q8_0.gguf, an MTP head, because it stands beside the target's file {target.name}"
    )
    assert drafts.main([str(target)]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == [target.name, found[0].draft] and second.endswith("beside the target")
    assert drafts_for(tmp_path / "Other.gguf") == drafts_for(tmp_path) == ()


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no draft is known for my/model: pass draft, or leave it out and strategy"):
        choose("my/model")
    with pytest.raises(ValueError, match=r"hybrid-target brings its own draft, for strategy mtp"):
        choose("hybrid-target")
    with pytest.raises(ValueError, match=r"strategy 'diffuspec' can use none of the drafts that are known for Qwen/Q"):
        choose("Qwen/Qwen3-8B", "diffuspec")
    with pytest.raises(ValueError, match="strategy 'ar' uses no draft checkpoint"):
        specker.load(draft="auto", strategy="ar")


def test_the_table_is_consistent() -> None:
    """Entries of a target stand together, heads before small models; every source is an address or a page."""
    assert len({(known.target, known.draft) for known in KNOWN}) == len(KNOWN)
    assert len([target for target, _ in groupby(KNOWN, lambda known: known.target)]) == len({k.target for k in KNOWN})
    for _, entries in groupby(KNOWN, lambda known: known.target):
        kinds = [KINDS.index(known.kind) for known in entries]
        assert kinds == sorted(kinds)
    for known in KNOWN:
        assert known.source.startswith("https://") or (ROOT / known.source).is_file()
        assert known.strategy in strategies.STRATEGIES and known.kind in KINDS
        assert known.bundled == ("/" not in known.draft)


def test_every_row_of_the_file_has_a_reader() -> None:
    """A strategy that takes a draft checkpoint reads each kind, by the module that opens it."""
    lines = catalogue.TABLE.read_text().splitlines()
    assert lines[0].split("\t") == ["target", "draft", "kind", "source", "tried"] and len(lines) == 1 + len(KNOWN)
    for line in lines[1:]:
        cells = line.split("\t")
        assert len(cells) == 5 and all(cell == cell.strip() != "" for cell in cells) and cells[4] in ("yes", "no"), line
    for known in KNOWN:
        strategy = strategies.known()[known.strategy]
        assert strategy.takes_draft and strategy.reads_target == (known.kind not in (SMALL, catalogue.PARALLEL)), known
        names = (known.target,) if known.gguf else (known.target, known.draft)
        assert known.bundled or all(name.count("/") == 1 for name in names), known
        if known.gguf:  # a file on the hub, of an architecture of llama.cpp that holds such a draft
            assert HUB.fullmatch(known.draft) and not ARCHITECTURES[known.kind] - {*READ}, known


ARCHITECTURES = {  # of GGUF files with such a draft
    HEAD3: {"eagle3"},
    BLOCKS: {"dflash"},
    ASSISTANT: {"gemma4-assistant"},
    MTP: {"qwen35", "qwen35moe", "qwen3next"},
}


FAMILIES = ("Qwen3.6-", "Qwen3.8-", "gemma-4-", "gpt-oss-", "Muse-Glimmer-", "Ling-3.0-", "GLM-5.")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_found_by_a_part_of_its_name(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert drafts.main([family.lower().removesuffix("-")]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert rows and all(family in row for row in rows)
    assert len(rows) == len([known for known in KNOWN if family in known.target])


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target, for which only a head and a small model in folders are known."""
    target = make(tmp_path / "Tiny-Chat", tokenizer=True, layers=8, max_context=256)
    raw = json.loads((target / "config.json").read_text())
    head = make_head(tmp_path / "head", raw)
    small = make(tmp_path / "small", tokenizer=True, layers=1, max_context=256)
    table = (
        Known("org/Tiny-Chat", str(head), HEAD3, "https://a"),
        Known("org/Tiny-Chat", str(small), SMALL, "https://b"),
    )
    monkeypatch.setattr(catalogue, "KNOWN", table)
    return target


def test_auto_loads_the_chosen_draft(private: Path) -> None:
    how = {"device": "cpu", "dtype": "float64"}
    engine = specker.load(private, "auto", **how)
    assert engine.options.strategy == "eagle" and engine.draft_name == "head"
    note = engine.remarks["draft_choice"]
    assert (
        "an EAGLE-3 head for org/Tiny-Chat, because a head computes one layer for a token, a small model many" in note
    )
    assert "named by https://a, not yet run with specker" in note and "lists all 2" in note
    plain = specker.load(private, strategy="ar", **how).generate([3, 5, 7], 24).tokens
    assert engine.generate([3, 5, 7], 24).tokens == plain
    other = specker.load(private, "auto", "draft", **how)
    assert other.draft_name == "small" and other.generate([3, 5, 7], 24).tokens == plain


def test_the_command_says_what_it_chose(private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = ["--target", str(private), "--draft", "auto", "--prompt", "a", "--max-new-tokens", "4", "--json", str(out)]
    assert run.main(argv) == 0
    written = json.loads(out.read_text())
    assert written["strategy"] == "eagle" and written["draft"] == "head"
    assert written["draft_choice"].startswith("drafting with ")
    assert "an EAGLE-3 head for org/Tiny-Chat" in "".join(capsys.readouterr())


def test_the_bundled_draft_is_named() -> None:
    engine = specker.load(draft="auto", strategy="easyspec", device="cpu")
    assert engine.draft_name == "code-draft-deep"
    assert engine.remarks["draft_choice"] == "drafting with code-draft-deep, which is bundled for code-target"


def test_drafts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert drafts.main(["someone/Qwen3-8B-AWQ"]) == 0
    title, first, *rest = capsys.readouterr().out.splitlines()
    assert title.split() == ["target", "draft", "kind", "strategy", "tried", "source"] and len(rest) > 3
    assert len(rest) == len(drafts_for("Qwen/Qwen3-8B")) - 1
    assert first.split()[:2] == ["Qwen/Qwen3-8B", choose("Qwen/Qwen3-8B").draft]
    assert drafts.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(KNOWN)
    assert drafts.main(["parD MODEL"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + sum(known.kind == "PARD model" for known in KNOWN)
    assert drafts.main(["my/model"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("specker: error: no draft is known for my/model: pass --draft") and not said.out
    with pytest.raises(SystemExit):
        drafts.main(["--help"])
    assert "specker drafts [TARGET|TEXT]" in capsys.readouterr().out
