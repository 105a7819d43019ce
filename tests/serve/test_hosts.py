"""A page of another website reads nothing from a server without an API key, whatever name its domain gives it."""

import json

import pytest
from make_checkpoint import make
from serving import serving

import specker
from specker.serve.hosts import Hosts
from specker.serve.settings import Serving

OWN = ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.8.9.1", "[::1]:8000", "[::1]", "a.localhost", "localhost.")
FOREIGN = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "evillocalhost", "127.0.0.1.evil.example"),
    *("", "192.168.1.2:8000", "0.0.0.0:8000", "[::2]", "[::1", "localhost@evil.example", "127.0.0.1:80:80", "\xff"),
)
SCHEMES = ("http://", "https://", "tauri://")
NAMELESS = ("null", "file://", "localhost", "http:localhost", "")  # origins


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("SPECKER_API_KEY", raising=False)


def refused(header, value, **settings):
    return Hosts(Serving(**settings)).refusal([(header, value.encode("latin-1"))])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_names_of_this_machine_are_its_own_and_no_others(host):
    for name in OWN:
        assert refused(b"host", name, host=host) is None
        assert all(refused(b"origin", scheme + name, host=host) is None for scheme in SCHEMES)
    for name in FOREIGN:
        said = refused(b"host", name, host=host)
        assert said == f"the Host {name[:60]!r} is not allowed: start the server with --allow-host to add it"
        assert all(refused(b"origin", scheme + name, host=host) for scheme in SCHEMES)
    for origin in NAMELESS:
        assert refused(b"origin", origin, host=host).startswith(f"the Origin {origin!r} is not allowed")
    assert refused(b"cookie", "evil.example", host=host) is None


def test_every_header_of_a_name_is_looked_at():
    hosts = Hosts(Serving())
    assert hosts.refusal([(b"origin", b"http://evil.example"), (b"origin", b"http://localhost")])
    assert hosts.refusal([]) is None  # HTTP/1.0, which no browser speaks


def test_what_flags_allow():
    names = {"allow_host": ("gpu.lan", "[::2]"), "allow_origin": ("https://a.example", "null")}
    for name in ("GPU.lan:8000", "gpu.lan.", "[::2]:80"):
        assert refused(b"host", name, **names) is None and refused(b"origin", f"http://{name}", **names) is None
    assert refused(b"origin", "https://a.example", **names) is None and refused(b"origin", "null", **names) is None
    assert refused(b"host", "a.example", **names) and refused(b"origin", "http://a.example", **names)
    assert refused(b"origin", "http://evil.example", allow_origin=("*",)) is None


def test_where_names_are_looked_at():
    assert refused(b"host", "evil.example", api_key="secret") is None  # which no page knows
    assert refused(b"host", "evil.example", host="0.0.0.0") is None  # a network, in which the server has any name
    for more in ({"api_key": "secret"}, {"host": "0.0.0.0"}):
        assert refused(b"host", "evil.example", allow_host=("gpu.lan",), **more)
        assert refused(b"host", "gpu.lan", allow_host=("gpu.lan",), **more) is None


def test_a_rebound_name_reads_no_page_and_no_answer(tmp_path):
    target = make(tmp_path / "target", "qwen2", layers=1, max_context=100, tokenizer=True)
    engine = specker.load(target, strategy="ar", device="cpu")
    with serving(engine, view=True) as client:
        for header in ({"host": "evil.example:8000"}, {"origin": "http://evil.example"}, {"origin": "null"}):
            for path in ("/", "/health", "/view", "/view/data", "/v1/models", "/metrics", "/nothing"):
                answer = client.get(path, headers=header)
                assert answer.status_code == 403 and " is not allowed: start the server" in answer.text
            body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
            # A text is what pages may send without asking first.
            answer = client.post(
                "/v1/messages", headers=header | {"content-type": "text/plain"}, content=json.dumps(body)
            )
            assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error"
        assert client.app.state.server.worker.metrics.finished == {}
        page = client.get("/view", headers={"host": "localhost:1", "origin": "http://localhost:1"})
        assert page.headers["content-security-policy"].endswith("; frame-ancestors 'none'")


@pytest.mark.parametrize("name", ["http://gpu.lan", "gpu.lan:8000", "", "a b"])
def test_a_name_has_no_scheme_and_no_port(name):
    with pytest.raises(ValueError, match=r"^--allow-host takes names without a port, such as gpu.lan, got "):
        Serving(allow_host=(name,))
