"""The text of a request depends on nothing but the request: random arrivals, cancellations, seeds and lengths, with
every strategy, give the texts of plain decoding."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from make_checkpoint import make
from make_dflash import make_dflash
from make_head import make_head
from make_mtp import make_mtp
from pairs import perturbed
from serving import chunks, free, serving, until

import specker

WAYS = {
    "ar": {"strategy": "ar"},
    "draft": {"strategy": "draft", "draft_tokens": 4},
    "draft+lookup": {"strategy": "draft+lookup"},
    "tree": {"strategy": "draft", "tree": "3x3"},
    "easyspec": {"strategy": "easyspec", "layer_parallel": "[[0],[1,2]]"},
    "vocabtrim": {"strategy": "vocabtrim", "vocab_keep": "40"},
    "del": {"strategy": "del"},
    "diffuspec": {"strategy": "diffuspec", "cps": "off", "adl": "2-4"},
    "eagle": {"strategy": "eagle", "draft_tokens": 3},
    "dflash": {"strategy": "dflash", "draft_tokens": 3},
    "mtp": {"strategy": "mtp", "draft_tokens": 3},
    "lookup": {"strategy": "lookup"},
}
QUICK = [("draft+lookup", 16), ("tree", 4), ("diffuspec", 4)]
ALL = [(way, concurrency) for way in WAYS for concurrency in (1, 4, 16)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = make(folder / "target", "qwen2", layers=3, max_context=400, tokenizer=True, eos=None)
    draft = perturbed(target, folder / "draft", amount=0.05)
    dream = make(folder / "dream", "dream", tokenizer=True)
    config = json.loads((target / "config.json").read_text())
    head = make_head(folder / "head", config, layout="nested", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    block = make_dflash(folder / "block", config, layout="dflash", layer_ids=[0, 1])
    heads = make_mtp(folder / "mtp", "mimo", arch="mimo", tokenizer=True, eos=None)  # a target of its own
    return {"target": target, "draft": draft, "diffuspec": dream, "eagle": head, "dflash": block, "mtp": heads}


def load(models, way, **more):
    options = {"dtype": "float64", "device": "cpu", "page_size": 16, "batch_size": 3, **WAYS[way]}
    alone = options["strategy"] in ("ar", "del", "lookup", "mtp")
    drafts = [] if alone else [models.get(options["strategy"], models["draft"])]
    return specker.load(models["mtp" if way == "mtp" else "target"], *drafts, **options)


@pytest.mark.usefixtures("cheap")  # drafts do not depend on the clock
@pytest.mark.parametrize(
    ("way", "concurrency", "count"),
    [(*each, 6) for each in QUICK] + [pytest.param(*each, 200, marks=pytest.mark.slow) for each in ALL],
)
def test_texts_depend_on_nothing_but_their_requests(models, way, concurrency, count):
    rng = random.Random(concurrency)
    jobs = []
    for _ in range(count):
        prompt = [rng.randrange(3, 60) for _ in range(rng.choice([1, 3, 40, 90]))]
        jobs.append((prompt, rng.randrange(1, 40), rng.choice([0.0, 0.9]), rng.randrange(99), rng.random() < 0.2))
    engine = load(models, way)
    want = [engine.generate_ar(p, n, temperature=t, seed=s).text for p, n, t, s, _ in jobs]
    with serving(engine) as client, ThreadPoolExecutor(concurrency) as pool:

        def ask(job):
            prompt, count, temperature, seed, leaves = job
            body = {"prompt": prompt, "max_tokens": count, "temperature": temperature, "seed": seed, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                got = chunks(answer.iter_lines())
                if leaves:
                    return next(got)["choices"][0]["text"]
                return "".join(choice["text"] for chunk in got for choice in chunk["choices"])

        for text, whole, job in zip(pool.map(ask, jobs), want, jobs, strict=True):
            assert text == whole or (job[-1] and whole.startswith(text)), job
        until(lambda: free(engine))
