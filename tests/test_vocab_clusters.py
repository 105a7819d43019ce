"""Draft steps that read clusters of the head's rows: the clusters, their file, and that no token depends on them."""

import cases
import pytest
import torch
from make_checkpoint import make
from pairs import perturbed

import specker
from specker.cli import calibrate
from specker.runtime.strategies.vocabtrim import clusters as vocab_clusters
from specker.runtime.strategies.vocabtrim.clusters import VocabClusters, clustered, fitted, read, usual_count

pytestmark = pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
PROMPTS = ([5, 9, 40], list(range(3, 90)))
COUNT = 16


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """(target, draft, file of 16 clusters of 8 ids of the draft's head)."""
    folder = tmp_path_factory.mktemp("clusters")
    target = make(folder / "target", layers=2, max_context=192)
    draft, path = perturbed(target, folder / "draft"), folder / "clusters.safetensors"
    assert calibrate.main(["--draft", str(draft), "--clusters", str(path), "--cluster-count", "16"]) == 0
    return str(target), str(draft), str(path)


def load(family, **options):
    target, draft, path = family
    how = {"strategy": "vocabtrim", "vocab_clusters": path, "vocab_chosen": 5, "device": "cpu", "page_size": 16}
    return specker.load(target, draft, **how | {"dtype": "float64"} | options)


def test_clusters_are_of_equal_size_and_rows_are_near_their_centroids():
    """Rows around 6 far centres, of which one has three times as many rows as a cluster has places."""
    g = torch.Generator().manual_seed(0)
    sizes = [48, 16, 8, 8, 8, 8]
    of = torch.arange(6).repeat_interleave(torch.tensor(sizes))[torch.randperm(96, generator=g)]
    head = 10 * torch.randn(6, 32, generator=g)[of] + 0.1 * torch.randn(96, 32, generator=g)
    found = clustered(head, 6)
    assert found.ids.shape == (6, 16) and found.ids.flatten().sort().values.tolist() == list(range(96))
    torch.testing.assert_close(found.centroids, head[found.ids].mean(1))
    pure = [len(set(of[ids].tolist())) == 1 for ids in found.ids]
    assert sum(pure) >= 3, "the large group fills several clusters"
    assert torch.equal(clustered(head, 6).ids, found.ids)


def test_an_early_end_of_the_exchanges_still_fills_every_place(monkeypatch):
    monkeypatch.setattr(vocab_clusters, "EXCHANGES", 1)
    head = torch.randn(60, 8)
    assert clustered(head, 12).ids.flatten().sort().values.tolist() == list(range(60))


def test_the_default_number_of_clusters():
    assert usual_count(262_144) == 2048 and usual_count(151_936) == 2374 and usual_count(8192) == 512
    with pytest.raises(ValueError, match="32003 rows do not divide into about 1012 clusters"):
        usual_count(32_003)
    with pytest.raises(ValueError, match="7 clusters do not divide the 24 rows of the head; 8 would"):
        clustered(torch.randn(24, 4), 7)
    with pytest.raises(ValueError, match="rows that are not finite"):
        clustered(torch.full((8, 4), torch.nan), 2)


def test_centroids_fitted_to_hidden_rows_choose_better():
    """Each cluster holds rows around a direction that no hidden row has, and one row that some hidden rows want."""
    g = torch.Generator().manual_seed(0)
    head, wanted = torch.randn(64, 16, generator=g), 6 * torch.randn(8, 16, generator=g)
    head[::8] = wanted
    found = VocabClusters(torch.arange(64).view(8, 8), head.view(8, 8, 16).mean(1), head[:8])
    hidden = wanted[torch.randint(8, (400,), generator=g)] / 4 + torch.randn(400, 16, generator=g)
    best = (hidden @ head.T).argmax(1) // 8

    def right(clusters):
        return float(((hidden @ clusters.centroids.T).argmax(1) == best).float().mean())

    assert right(fitted(found, head, hidden)) > max(0.9, right(found) + 0.02)


SHAPES = {
    "chain": {"draft_tokens": 5},
    "tree": {"tree": "3x4"},
    "auto": {},
    "batch": {"batch_size": 2, "draft_tokens": 3},
    "lookup": {"strategy": "vocabtrim+lookup"},
    "easyspec": {"strategy": "easyspec+vocabtrim", "draft_tokens": 3, "layer_parallel": 2},
    "compiled chain": {"dtype": "float32", "draft_tokens": 5},
    "compiled tree": {"dtype": "float32", "tree": "3x4"},
    "bfloat16": {"dtype": "bfloat16", "draft_tokens": 5},
    "int8": {"dtype": "float32", "draft_quantize": "int8", "draft_tokens": 5},
    "int8 tree": {"dtype": "float32", "draft_quantize": "int8", "tree": "3x4"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_plain_decoding(family, shape):
    engine, accepted = load(family, **SHAPES[shape]), 0
    for temperature in (0.0, 0.7):
        for got, prompt in zip(engine.generate(PROMPTS, COUNT, temperature=temperature, seed=3), PROMPTS, strict=True):
            if SHAPES[shape].get("dtype", "float64") == "float64":
                assert got.tokens == cases.plain(family[0], prompt, COUNT, temperature=temperature, seed=3)
            else:
                assert engine.check(prompt, got, COUNT, temperature=temperature, seed=3).identical
            accepted += got.stats.accepted
    assert accepted > 5


def test_all_clusters_draft_what_the_whole_head_drafts(family):
    """Chains in one call of the compiled library, and trees."""
    for shape in ({"draft_tokens": 4}, {"tree": "3x4"}):
        seen = []
        for how in ({"vocab_chosen": 16}, {"strategy": "draft", "vocab_clusters": None, "vocab_chosen": None}):
            engine, drafts = load(family, dtype="float32", policy="fixed", **how | shape), []
            engine.trace = drafts.append
            engine.generate(PROMPTS[1], 24, temperature=0.7, seed=1)
            seen.append([row["draft"] for row in drafts])
        assert seen[0] == seen[1] and sum(map(len, seen[0])) > 20


def test_the_report_counts_the_rows_that_a_step_reads(family):
    engine = load(family, dtype="float32", draft_tokens=3)
    stats = engine.generate(PROMPTS[0], COUNT).stats
    report, E = engine.trim_report(stats), engine.draft.config.hidden_size
    assert (report["kept_rows"], report["text_rows"], report["coverage"]) == (40, 0, 1.0)
    assert report["head_bytes_per_draft_step"] == 4 * E * (16 + 40) and report["mbsu"] > 0
    assert report["ranking"] == "5 of 16 clusters for each token (clusters.safetensors)"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "draft", "vocab_chosen": None}, "vocab_clusters is for strategy vocabtrim"),
        ({"vocab_clusters": None}, "vocab_chosen=5 needs vocab_clusters FILE"),
        ({"vocab_chosen": 17}, "vocab_chosen=17 is more than the 16 clusters allow"),
        ({"vocab_chosen": 0}, "vocab_chosen must be at least 1, got 0"),
        ({"vocab_keep": "16"}, "vocab_clusters keeps all rows: leave out vocab_keep"),
        ({"vocab_text": 9}, "vocab_clusters keeps all rows: leave out vocab_text"),
        ({"vocab_clusters": "/nowhere"}, "/nowhere: no such file of vocabulary clusters"),
        ({"tree": "9x2", "vocab_chosen": 1}, "tree='9x2' is wider than the 8 rows that vocab_chosen=1 reads"),
    ],
)
def test_refuses(family, options, words):
    with pytest.raises(ValueError, match=words):
        load(family, **options)


def test_files_of_other_models_and_other_files_are_refused(family, pair, tmp_path):
    with pytest.raises(ValueError, match=r"has clusters of 128 rows of \d+ numbers, but the draft's head is \[320, "):
        load((*map(str, pair), family[2]))
    found, bad = read(family[2]), tmp_path / "bad.safetensors"
    for path, words in (
        (found.to_bytes()[:-9], "is corrupt or truncated"),
        (VocabClusters(found.ids, found.centroids, -found.rows).to_bytes(), "of another model's rows"),
        (VocabClusters(found.ids * 0, found.centroids, found.rows).to_bytes(), "expected every id once"),
    ):
        bad.write_bytes(path)
        with pytest.raises(ValueError, match=words):
            load((*family[:2], str(bad)))
    from safetensors.torch import save_file

    save_file({"ids": found.ids}, bad)
    with pytest.raises(ValueError, match="is no file of vocabulary clusters"):
        load((*family[:2], str(bad)))


def test_calibrate_refuses(capsys, family):
    for flags, words in (
        (["--cluster-count", "4"], "--cluster-count needs --clusters FILE"),
        (["--clusters", "a.pt"], "--clusters a.pt: expected a file ending in .safetensors"),
        (["--clusters", "a.safetensors", "--prompts", "f"], "--clusters goes with --text alone"),
        (
            ["--clusters", "a.safetensors", "--draft", family[1], "--cluster-count", "7"],
            "7 clusters do not divide the 128 rows of the head; 8 would",
        ),
    ):
        assert calibrate.main(flags) == 2
        assert words in capsys.readouterr().err


def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    """The bundled pair, whose draft's head has 8,192 rows; the centroids are fitted to a little text."""
    from specker.cli import run

    path, text = tmp_path / "clusters.safetensors", tmp_path / "text.py"
    text.write_text("def f(x):\n    return x\n" * 40)
    monkeypatch.setattr(vocab_clusters, "STEPS", 20)
    assert calibrate.main(["--clusters", str(path), "--text", str(text), "--device", "cpu"]) == 0
    assert "512 clusters of 16 rows of 96 numbers in clusters.safetensors" in capsys.readouterr().err
    argv = ["--strategy", "vocabtrim", "--prompt", "def f(", "--max-new-tokens", "20", "--device", "cpu", "--check"]
    assert run.main([*argv, "--vocab-clusters", str(path)]) == 0
    assert "512 of 8192" in capsys.readouterr().err
