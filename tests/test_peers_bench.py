"""bench/peers.py: engines in processes of their own take turns, and one that fails has a row with the reason."""

import pytest

from bench import peers
from bench.peers import Args, Peer
from specker import zoo


def settings(**options):
    own = {"engine": "specker", "target": str(zoo.path("code-target")), "dtype": "float32", "context": 256}
    return lambda: {**own, "threads": 1, "eos": [], "options": {"strategy": "ar"}, **options}


def test_engines_take_turns_and_a_failing_one_gives_its_reason(tmp_path):
    args = Args(rounds=2, max_new_tokens=6, threads=1)
    ways = {
        "plain": settings(),
        "lookup": settings(options={"strategy": "lookup"}),
        "absent": settings(target=str(tmp_path / "no model")),
    }
    running = [peers.started(name, made, tmp_path, args) for name, made in ways.items()]
    try:
        plain, lookup, absent = running
        assert plain.version and not plain.reason and "no folder" in absent.reason
        peers.measure(running, [[1, 2, 3], [4, 5, 6, 7]], args)
    finally:
        for peer in running:
            peer.process.kill()
    assert len(plain.whole) == len(plain.first) == len(lookup.whole) == 4 and not absent.whole
    assert [len(tokens) for tokens in plain.tokens] == [6, 6] and lookup.tokens == plain.tokens
    row = peers.row_of(lookup, plain, plain, {"bench": "peers"})
    assert row["equal_texts"] == row["texts"] == 2 and row["tokens_per_second"] > 0
    assert "reason" in peers.row_of(absent, plain, plain, {})


def test_a_row_compares_requests_with_those_of_the_base():
    base = Peer("base", None, None, whole=[2.0, 4.0], first=[1.0, 1.0], tokens=[[1, 2, 3, 4]])
    fast = Peer("fast", None, None, whole=[1.0, 1.0], first=[0.4, 0.4], tokens=[[1, 2, 3, 5]])
    row = peers.row_of(fast, base, base, {})
    assert row["over_base"]["median"] == pytest.approx(3.0)  # 2 and 4 times as fast
    assert row["tokens_per_second"] == pytest.approx(4.0) and row["first_token_ms"] == pytest.approx(400)
    assert row["decode_tokens_per_second"] == pytest.approx(3 / 0.6)
    assert row["equal_texts"] == 0


@pytest.mark.real
def test_gguf_files_hold_the_matrices_of_the_checkpoint(tmp_path, monkeypatch):
    import gguf
    import numpy as np
    from safetensors import safe_open

    from specker.zoo import real

    target = real.at_hand()
    if target is None:
        pytest.skip("SmolLM2-135M is not at hand: run make real")
    monkeypatch.setattr(peers, "CACHE", tmp_path)
    reader = gguf.GGUFReader(peers.gguf_of(real.file(), str(target), "F32"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(target / "model.safetensors", "np") as state:
        down = state.get_tensor("model.layers.3.mlp.down_proj.weight")
    assert np.array_equal(
        gguf.dequantize(tensors["blk.3.ffn_down.weight"].data, tensors["blk.3.ffn_down.weight"].tensor_type), down
    )
    assert reader.fields["general.file_type"].contents() == 0
