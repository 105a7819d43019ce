"""bench/peers.py: engines in processes of their own take turns, and one that fails has a row with the reason."""

import json
import shlex
import sys
import textwrap
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from make_checkpoint import make

from bench import contexts, peer_settings, peers, plot, tables
from bench.peer_settings import Model
from bench.peers import Args, Peer
from specker import zoo
from specker.checkpoints.checkpoint import read_config, read_tokenizer
from specker.checkpoints.gguf.cache import converted


def toy(ways, base, **more):
    """The toy in several configurations."""
    return Model(str(zoo.path("code-target")), "toy", ways, base, base, **more)


def test_engines_take_turns_and_a_failing_one_gives_its_reason(tmp_path):
    args = Args(rounds=2, threads=1, max_context=256)
    ways = {name: {"engine": "specker", "dtype": "float32", "options": {"strategy": name}} for name in ("ar", "lookup")}
    ways["absent"] = {"engine": "llama_server", "program": "/bin/false", "flags": []}
    model = toy(ways, "ar", questions=tmp_path, asked=0, new_tokens=0)
    started = peers.settings_of(model, args)
    running = [peers.started(name, made, tmp_path, args) for name, made in started.items()]
    try:
        plain, lookup, absent = running
        assert plain.version and not plain.reason and "ended with exit code 1" in absent.reason
        peers.measure(running, [[1, 2, 3], [4, 5, 6, 7]], 6, args)
    finally:
        for peer in running:
            peer.end()
    assert len(plain.whole) == len(plain.first) == len(lookup.whole) == 4 and not absent.whole
    assert [len(tokens) for tokens in plain.tokens] == [6, 6] and lookup.tokens == plain.tokens
    row = peers.row_of(lookup, plain, plain, {"bench": "peers", "prompt_tokens": [3, 4]})
    assert row["acceptance_length"] >= 1 == peers.row_of(plain, plain, plain, row)["acceptance_length"]
    assert row["equal_texts"] == row["texts"] == 2 and row["tokens_per_second"] > 0
    assert "reason" in peers.row_of(absent, plain, plain, {})


def test_a_row_compares_requests_with_those_of_the_base():
    base = Peer("base", None, whole=[2.0, 4.0], first=[1.0, 1.0], tokens=[[1, 2, 3, 4]], reports=[{}, {}])
    fast = Peer("fast", None, whole=[1.0, 1.0], first=[0.4, 0.4], tokens=[[1, 2, 3, 5]])
    fast.reports = [{"acceptance_length": 2.0}, {"acceptance_length": 3.0}]
    row = peers.row_of(fast, base, base, {"prompt_tokens": [20]})
    assert row["prefill_tokens_per_second"] == pytest.approx(50) and row["acceptance_length"] == 2.5
    assert "acceptance_length" not in peers.row_of(base, base, base, {"prompt_tokens": [20]})
    assert row["over_base"]["median"] == pytest.approx(3.0)  # 2 and 4 times as fast
    assert row["tokens_per_second"] == pytest.approx(4.0) and row["first_token_ms"] == pytest.approx(400)
    assert row["decode_tokens_per_second"] == pytest.approx(3 / 0.6)
    assert row["equal_texts"] == 0


SERVER = """
    import json, os, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    asked = 0
    class Handler(BaseHTTPRequestHandler):
        def answer(self, body, code=200):
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())
        def do_GET(self):
            self.answer({})
        def do_POST(self):
            global asked
            asked += 1
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert request["temperature"] == 0 and request["top_k"] == 1 and not request["cache_prompt"]
            times = {"prompt_per_second": 7, "predicted_ms": 1200, "predicted_n": 7, "draft_n_accepted": 4}
            tokens = [len(request["prompt"]), request["n_predict"], asked]
            self.answer({"tokens": tokens, "timings": times})
    flags = sys.argv[1:]
    assert flags[flags.index("--threads") + 1] == "3" and flags[flags.index("--ctx-size") + 1] == "99"
    open(flags[0], "a").write(f"{os.getpid()}\\n")
    HTTPServer(("127.0.0.1", int(flags[flags.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path):
    """Starts an engine whose program answers as llama-server does: [length of the prompt, count, its how manieth
    request]."""
    program = tmp_path / "server"
    program.write_text(f"#!{sys.executable}\n{textwrap.dedent(SERVER)}")
    program.chmod(0o755)
    running = []

    def start(**changes):
        own = {"engine": "llama_server", "program": str(program), "flags": [str(tmp_path / "pids")], "fresh": False}
        own["version"] = "b1"
        own |= {"threads": 3, "context": 99, "eos": [], **changes}
        running.append(peers.started("llama.cpp", lambda: own, tmp_path, Args()))
        return running[-1]

    yield start
    for peer in running:
        peer.end()


def pids(tmp_path):
    return list(map(int, (tmp_path / "pids").read_text().split()))


def ends(pid):
    """Whether the process ends within a minute; a killed one may take a moment."""
    until = time.monotonic() + 60
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(pid)


def alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_the_server_is_asked_over_http_and_ends_with_its_peer(server, tmp_path):
    peer = server()
    assert peer.version == "b1"
    answers = [peer.ask(ids=[1, 2], count=5), peer.ask(ids=[1, 2, 3, 4, 5, 6], count=9)]
    assert [answer["tokens"] for answer in answers] == [[2, 5, 1], [6, 9, 2]]
    rates = {"own_prefill_tokens_per_second": 7, "own_decode_tokens_per_second": 5}
    assert answers[0]["report"] == {**rates, "acceptance_length": 3.0} and answers[0]["seconds"] > 0
    (pid,) = pids(tmp_path)
    assert alive(pid)
    peer.end()
    assert ends(pid)


def test_a_fresh_server_knows_no_earlier_request(server, tmp_path):
    peer = server(fresh=True)
    answers = [peer.ask(ids=[1, 2, 3, 4, 5, 6], count=9)["tokens"] for _ in range(2)]
    assert answers == [[6, 9, 2], [6, 9, 2]]  # after a short one that warms up
    first, second, third = pids(tmp_path)
    assert ends(first) and ends(second) and alive(third)


class Instant(Peer):
    """An engine that answers at once, and says that each token of the prompt took a second."""

    def ask(self, ids, count):
        return {"tokens": [sum(ids)] * count, "seconds": float(len(ids)), "report": {"acceptance_length": 1.0}}


def test_rows_are_apart_for_each_kind_of_question(tmp_path, results, monkeypatch, command_line, capsys):
    """The whole bench."""
    target = zoo.path("code-target")
    questions = tmp_path / "questions.jsonl"
    kinds = "complete", "chat", "complete", "edit"
    rows = [{"category": kind, "prompt": "def f" + "(" * n} for n, kind in enumerate(kinds, 1)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ways = {name: {"engine": "specker", "options": {"strategy": name}} for name in ("ar", "lookup", "del")}
    model = toy(ways, "ar", questions=questions, asked=3, new_tokens=5, apart=True)
    monkeypatch.setattr(peers, "MODELS", {"toy": lambda: model, "smollm2": pytest.fail})
    monkeypatch.setattr(peers, "started", lambda name, settings, folder, args: Instant(name, None))
    asked = peers.prompts_of(model, Args())
    ids = [read_tokenizer(target)(row["prompt"])["input_ids"] for row in rows]
    assert asked == {"complete": [ids[0]], "chat": [ids[1]], "edit": [ids[3]]}  # the first of each
    assert list(peers.prompts_of(model, Args(categories="complete"))["complete"]) == [ids[0], ids[2]]
    line = "bench/peers.py --model toy --rounds 1 --max_context 64 --only lookup --save"
    command_line(line.split())
    peers.main()
    found = results()
    assert [(r["categories"], r["way"]) for r in found] == [
        (kind, way) for kind in ("complete", "chat", "edit") for way in ("ar", "lookup")
    ]
    assert all(r["prompts"] == r["equal_texts"] == 1 and r["max_new_tokens"] == 5 for r in found)
    assert all(r["prefill_tokens_per_second"] == 1 for r in found), "a row has the times of other prompts"
    assert {(r["target"], r["base"], r["reference"]) for r in found} == {("toy", "ar", "ar")}
    assert "over ar" in capsys.readouterr().out
    command_line(["bench/peers.py", "--model", "llama"])
    with pytest.raises(SystemExit, match=r"^bench: --model is llama; there are toy, smollm2$"):
        peers.main()


def test_gguf_files_hold_the_matrices_of_the_checkpoint(tmp_path, monkeypatch):
    import gguf
    import numpy as np
    from make_gguf import write
    from safetensors import safe_open

    monkeypatch.setenv("SPECKER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(peer_settings, "CACHE", tmp_path / "peers")
    source = write(tmp_path / "tiny.gguf", make(tmp_path / "made"), "Q4_1")
    target = converted(source, dense=True)
    reader = gguf.GGUFReader(peer_settings.gguf_of(source, str(target), "F32"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(target / "model.safetensors", "np") as state:
        down = state.get_tensor("model.layers.2.mlp.down_proj.weight")
    assert np.array_equal(
        gguf.dequantize(tensors["blk.2.ffn_down.weight"].data, tensors["blk.2.ffn_down.weight"].tensor_type), down
    )
    assert reader.fields["general.file_type"].contents() == 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_reads_one_row_of_an_embedding_beside_an_lm_head(tmp_path, tied):
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "qwen2")
    sizes = {"token_embd.weight": 96, "blk.0.attn_q.weight": 8} | ({} if tied else {"output.weight": 96})
    for name, rows in sizes.items():
        writer.add_tensor(name, np.zeros((rows, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert contexts.weights(str(path)) == 4 * 4 * (8 + 96)


def test_speeds_over_the_length_of_the_prompt(tmp_path, results, monkeypatch, command_line, capsys):
    """The whole bench, its table and its figure, with specker alone."""
    target = zoo.path("code-target")
    monkeypatch.setattr(contexts.real, "fetched", lambda sources: [target])
    monkeypatch.setattr(contexts, "bandwidth", lambda threads: 1e9)
    monkeypatch.setattr(contexts, "weights", lambda path: 1_000_000)
    line = "bench/contexts.py --lengths 96,24 --kv int8 --llama_kv '' --max_new_tokens 3 --threads 1 --save"
    command_line(shlex.split(line))
    contexts.main()
    assert "limit by bytes" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/contexts.jsonl")
    rows = plot.read(path.parent)
    assert [(r["way"], r["prompt_tokens"]) for r in rows] == [("specker int8", 24), ("specker int8", 96)]
    assert all(r["prefill_tokens_per_second"] > 0 < r["decode_tokens_per_second"] for r in rows)
    config = read_config(target)
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert rows[1]["bytes"] - rows[0]["bytes"] == 72 * kv * contexts.KV_BYTES["int8"]
    (name,) = plot.contexts(rows)
    table = tables.fill(f"<!-- results {name} -->\n<!-- end -->", tables.tables([path.parent]))
    assert "| prompt tokens | specker int8 |" in table and "| 96 |" in table
    plot.save(plot.draw_contexts(rows, dark=True), tmp_path / "figure")
    assert (tmp_path / "figure.svg").stat().st_size > 5000
    command_line(["bench/contexts.py", "--kv", "int4"])
    with pytest.raises(SystemExit, match=r"^bench: --lengths and --kv: got 512,2048,8192 and int4$"):
        contexts.main()
