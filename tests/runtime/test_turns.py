"""Several threads on one engine: they decode one after another, and every text is its own."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from make_checkpoint import make

import specker


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = make(folder / "target", layers=2, tokenizer=True)
    return specker.load(target, make(folder / "draft", layers=1, tokenizer=True, seed=2), strategy="draft")


def test_four_threads_have_the_texts_of_one(engine):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
    want = [engine.generate(p, 40, temperature=1.0, seed=3).tokens for p in prompts]
    started = threading.Barrier(4)

    def work(n):
        started.wait()
        found = []
        for turn in range(3):
            if (n + turn) % 2:
                found.append(engine.generate(prompts[n], 40, temperature=1.0, seed=3).tokens)
            else:
                chunks = engine.stream(prompts[n], 40, temperature=1.0, seed=3)
                found.append([token for chunk in chunks for token in chunk.tokens])
        return found

    with ThreadPoolExecutor(4) as pool:
        for n, found in enumerate(pool.map(work, range(4))):
            assert found == [want[n]] * 3


def test_a_stream_that_its_thread_has_left_blocks_nobody(engine):
    left = []

    def begin():
        left.append(engine.stream([1, 2, 3], 40))
        next(left[0])

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    want = engine.generate([4], 20).tokens
    assert len(want) == 20
    with pytest.raises(RuntimeError, match="this stream ended when another request began"):
        next(left[0])
    assert engine.generate([4], 20).tokens == want


def test_a_trace_cannot_begin_a_request(engine):
    engine.trace = lambda row: engine.generate([1], 2)
    try:
        with pytest.raises(RuntimeError, match="began another request"):
            engine.generate([1, 2], 5)
    finally:
        engine.trace = None
    assert len(engine.generate([1, 2], 5).tokens) == 5
