"""OpenAI's `prediction`: drafts are copied from it, and `usage` counts its tokens."""

import pytest
from make_checkpoint import make
from serving import serving, streamed

import specker

TALK = [{"role": "user", "content": "ab cd"}]
REFUSED = {
    "a text": "ab",
    "no content": {"type": "content"},
    "another type": {"type": "text", "content": "ab"},
    "an image": {"type": "content", "content": [{"type": "image_url", "image_url": {}}]},
    "a number": {"type": "content", "content": 7},
    "more": {"type": "content", "content": "ab", "n": 1},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    target = make(tmp_path_factory.mktemp("models"), "qwen2", layers=1, max_context=400, tokenizer=True)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (target / "chat_template.jinja").write_text(template)
    return target


@pytest.fixture(scope="module")
def engine(target):
    how = {"dtype": "float64", "device": "cpu", "batch_size": 2, "draft_tokens": 4, "lookup_share": "off"}
    return specker.load(target, strategy="lookup", **how)


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine, name="tiny") as client:
        yield client


def counts(body):
    found = body["usage"]["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def test_the_answer_stays_and_its_tokens_are_counted(engine, client):
    want = engine.generate("ab cd", 20)
    asked = {"prompt": "ab cd", "max_tokens": 20}
    for content in (want.text, [{"type": "text", "text": want.text}]):
        prediction = {"type": "content", "content": content}
        body = client.post("/v1/completions", json=asked | {"prediction": prediction}).json()
        stats = engine.generate("ab cd", 20, prediction=prediction).stats
        assert body["choices"][0]["text"] == want.text
        assert counts(body) == (stats.predicted_right, stats.predicted - stats.predicted_right)
        assert stats.predicted_right > 0
    wrong = {"type": "content", "content": "zz zz"}
    assert counts(client.post("/v1/completions", json=asked | {"prediction": wrong}).json())[0] == 0


def test_a_chat_takes_it_streamed_and_whole(engine, client):
    want = engine.generate(engine.encode_chat(TALK), 20).text
    asked = {"messages": TALK, "max_tokens": 20, "prediction": {"type": "content", "content": want}}
    body = client.post("/v1/chat/completions", json=asked).json()
    assert body["choices"][0]["message"]["content"] == want and counts(body)[0] > 0
    more = {"stream_options": {"include_usage": True}}
    *chunks, last = streamed(client, "/v1/chat/completions", **asked, **more)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == want
    assert counts(last) == counts(body)


@pytest.mark.parametrize("wrong", REFUSED)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_another_form_is_refused(client, path, wrong):
    asked = {"messages": TALK} if "chat" in path else {"prompt": "ab"}
    answer = client.post(path, json=asked | {"prediction": REFUSED[wrong]})
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("prediction")


def test_a_prediction_that_can_never_fit_is_refused(client):
    asked = {"prompt": "ab", "prediction": {"type": "content", "content": "ab " * 9999}}
    answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 413 and "the prediction has 29997 characters" in answer.json()["error"]["message"]
    asked["prediction"]["content"] = "a b " * 250
    answer = client.post("/v1/completions", json=asked)
    assert answer.status_code == 400 and "but the context of tiny is 400" in answer.json()["error"]["message"]


def test_a_server_without_lookup_refuses_it(target):
    engine = specker.load(target, strategy="ar", dtype="float64", device="cpu")
    with serving(engine, name="tiny") as client:
        asked = {"prompt": "ab", "max_tokens": 4, "prediction": {"type": "content", "content": "ab"}}
        answer = client.post("/v1/completions", json=asked)
        assert answer.status_code == 400
        said = "prediction needs strategy lookup, alone or joined, such as draft+lookup"
        assert answer.json()["error"]["message"] == said
        assert client.post("/v1/completions", json=asked | {"speculation": "off"}).status_code == 200
