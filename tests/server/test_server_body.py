"""Bodies that are too large or too slow, and chats too long to look at."""

import http.client
import json
import socket

import httpx
import pytest

from ddtree.server import body
from ddtree.server.choices import MAX_CHARACTERS_PER_TOKEN
from ddtree.server.options import ServerOptions

MAX_BODY_BYTES = ServerOptions(("scripted",)).max_body_bytes
URL = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def request(size: int) -> bytes:
    """A good request of that many bytes."""
    text = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    return text + b" " * (size - len(text))


def check_too_large(answer: httpx.Response, size: str) -> None:
    assert answer.status_code == 413
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "request_too_large"
    assert size in error["message"]
    assert str(MAX_BODY_BYTES) in error["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_the_limit_of_a_body(live, engine, chunked):
    def post(size: int) -> httpx.Response:
        whole = request(size)
        content = (whole[at : at + 65536] for at in range(0, size, 65536)) if chunked else whole
        return client.post(URL, content=content, headers=JSON)

    with httpx.Client(base_url=live.url, timeout=20) as client:
        assert post(MAX_BODY_BYTES).status_code == 200
        check_too_large(post(MAX_BODY_BYTES + 1), str(MAX_BODY_BYTES + 1))
        check_too_large(post(3 * MAX_BODY_BYTES), "at least" if chunked else str(3 * MAX_BODY_BYTES))
        assert post(100).status_code == 200
    assert len(engine.prompts) == 2


@pytest.mark.parametrize("size", [str(10**12), "9" * 20])
def test_a_large_body_is_refused_by_its_announcement(live, size):
    """Nothing of it is sent."""
    connection = http.client.HTTPConnection(live.url.removeprefix("http://"), timeout=10)
    connection.request("POST", URL, headers={**JSON, "Content-Length": size})
    answer = connection.getresponse()
    assert json.loads(answer.read())["error"]["code"] == "request_too_large"
    connection.close()


def test_a_body_that_does_not_end(live, monkeypatch):
    monkeypatch.setattr(body, "BODY_SECONDS", 0.3)
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{"
        sock.sendall(head.encode())
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        assert answer.status == 408
        error = json.loads(answer.read())["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "request_timeout"
        assert sock.recv(1) == b""  # and the connection is closed


@pytest.mark.anyio
@pytest.mark.parametrize("parts", [1, 2])
async def test_a_text_that_cannot_fit_is_not_tokenized(http, engine, monkeypatch, parts):
    asked = []
    templated = engine.text.chat
    monkeypatch.setattr(engine.text, "chat", lambda messages: asked.append(messages) or templated(messages))
    most = engine.max_model_len * MAX_CHARACTERS_PER_TOKEN
    for characters, reached in ((most, True), (most + parts, False)):
        messages = [{"role": "user", "content": "x" * (characters // parts)}] * parts
        error = (await http.post(URL, json={"messages": messages})).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert bool(asked) is reached
        assert (str(characters) in error["message"]) is not reached
        asked.clear()


@pytest.mark.anyio
async def test_too_many_messages_are_not_tokenized(http, engine, monkeypatch):
    monkeypatch.setattr(engine, "text", None)
    messages = [{"role": "user", "content": ""}] * (engine.max_model_len + 1)
    answer = await http.post(URL, json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
