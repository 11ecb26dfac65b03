"""What stands around the API: health, facts, keys, request ids, logs, and what happens at the limits."""

import asyncio
import http.client
import io
import json
import logging
import re
import threading
from contextlib import contextmanager

import httpx
import openai
import pytest

from ddtree.config import Speculation
from ddtree.errors import InvalidOption
from ddtree.server.context import current
from ddtree.server.logs import Lines, RoundLog, log_to_stderr
from ddtree.server.options import ServerOptions

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_while_all_is_well(http, method):
    answer = await http.request(method, "/health")
    assert answer.status_code == 200
    assert answer.text == ("" if method == "HEAD" else '{"status":"ok"}')


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_while_it_stops(http, method):
    await http.app.state.worker.stop(0)
    answer = await http.request(method, "/health")
    assert answer.status_code == 503
    assert answer.headers["connection"] == "close"
    assert int(answer.headers["retry-after"]) > 0
    if method == "GET":
        assert answer.json()["error"]["code"] == "server_stopping"


@pytest.mark.anyio
async def test_server_info(http, engine):
    info = (await http.get("/server_info")).json()
    assert info["served_model_names"] == ["scripted"]
    assert info["model"] == "scripted"
    assert info["drafter"] == "scripted-drafter"
    assert info["device"] == "cpu"
    assert info["dtype"] == "float32"
    tree = {"tree_budget": 5, "tree_top_k": 8, "tree_spine": 0, "tree_context": Speculation().tree_context}
    assert info["speculation"] == {"mode": "tree", **tree}
    assert info["limits"]["max_running_requests"] == 8
    assert info["limits"]["max_queue"] == 256
    assert info["limits"]["max_body_bytes"] == 4 * 2**20
    assert info["limits"]["max_model_len"] == 200
    assert info["capabilities"]["modes"] == ["ar", "linear", "shadow-linear", "tree"]
    assert info["capabilities"]["tool_call_parser"] == "hermes"
    assert info["capabilities"]["api_key"] is False
    assert info["uptime_seconds"] >= 0
    assert "ddtree" in info["versions"]


class TestKeys:
    """--api-key"""

    KEY = "sk-first"

    @pytest.fixture
    def options(self):
        return ServerOptions(("scripted",), api_keys=(self.KEY, "sk-second"))

    @pytest.mark.anyio
    @pytest.mark.parametrize(
        "header",
        [None, "", "Bearer", "Bearer ", "Bearer sk-firs", "Bearer sk-first2", "Basic sk-first", "sk-first",
         "Bearer sk-first sk-second", b"Bearer sch\xf6n"],
    )  # fmt: skip
    @pytest.mark.parametrize(
        ("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/nothing"), ("POST", "/v1/completions")]
    )
    async def test_wrong_ones(self, http, engine, header, method, path):
        answer = await http.request(method, path, headers={} if header is None else {"Authorization": header})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-request-id"]
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == "invalid_api_key"
        assert "sk-" not in answer.text
        assert not engine.prompts

    @pytest.mark.anyio
    @pytest.mark.parametrize("header", ["Bearer sk-first", "bearer sk-second", "BEARER  sk-first "])
    async def test_right_ones(self, http, header):
        headers = {"Authorization": header}
        assert (await http.post(CHAT, json=HI, headers=headers)).status_code == 200
        assert (await http.get("/v1/models", headers=headers)).status_code == 200

    @pytest.mark.anyio
    @pytest.mark.parametrize("path", ["/health", "/metrics", "/server_info", "/openapi.json"])
    async def test_what_needs_none_and_tells_none(self, http, path):
        answer = await http.get(path)
        assert answer.status_code == 200
        assert "sk-" not in answer.text

    @pytest.mark.anyio
    async def test_server_info_says_that_one_is_needed(self, http):
        assert (await http.get("/server_info")).json()["capabilities"]["api_key"] is True

    @pytest.mark.parametrize("path", ["//v1/models", "/V1/models", "/v1%2Fmodels", "/./v1/models", "/v1/../v1/models"])
    def test_no_spelling_of_a_path_gets_around(self, live, path):
        """Sent as it is, which httpx would not do."""
        connection = http.client.HTTPConnection(live.url.removeprefix("http://"), timeout=10)
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status in (401, 404)
        assert b'"scripted"' not in answer.read()
        connection.close()

    def test_the_openai_client(self, live):
        with pytest.raises(openai.AuthenticationError) as caught:
            live.openai("wrong").models.list()
        assert caught.value.code == "invalid_api_key"
        assert [model.id for model in live.openai(self.KEY).models.list()] == ["scripted"]


@pytest.mark.parametrize("key", ["", " ", "a b ", "schön", "a\nb", "\x00"])
def test_keys_that_no_header_could_carry(key):
    with pytest.raises(InvalidOption) as caught:
        ServerOptions(("m",), api_keys=(key,))
    assert caught.value.param == "api_key"
    assert not key.strip() or key not in str(caught.value), "it is a secret all the same"


PAGE = "https://chat.example"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


@pytest.mark.anyio
@pytest.mark.parametrize(("allowed", "shown"), [(("*",), "*"), ((PAGE,), PAGE), (("https://other.example",), None)])
async def test_pages_that_may_call_from_a_browser(engine, allowed, shown):
    """Also where a key is needed: a browser asks beforehand, without one."""
    from ddtree.server import create_app

    app = create_app(engine, ServerOptions(("scripted",), api_keys=("secret",), allowed_origins=allowed))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        asked = await client.options(CHAT, headers=PREFLIGHT)
        assert asked.status_code == (400 if shown is None else 200)
        for header in ({}, {"Authorization": "Bearer secret"}):
            answer = await client.post(CHAT, json=HI, headers={"Origin": PAGE, **header})
            assert answer.status_code == (200 if header else 401)
            assert answer.headers.get("access-control-allow-origin") == shown, (
                "a page must be able to read refusals too"
            )
    await app.state.worker.stop(0)


@pytest.mark.anyio
async def test_the_operator_may_want_acceptance_figures_in_every_answer(engine):
    from ddtree.server import create_app

    app = create_app(engine, ServerOptions(("scripted",), spec_decode_metrics="summary"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        chat = (await client.post(CHAT, json=HI)).json()
        completion = (await client.post("/v1/completions", json={"prompt": "Hi"})).json()
    assert chat["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert completion["metrics"] == chat["metrics"]
    await app.state.worker.stop(0)
    with pytest.raises(InvalidOption, match="per_request_spec_decode_metrics 'detailed' is unknown"):
        ServerOptions(("scripted",), spec_decode_metrics="detailed")


@pytest.mark.anyio
async def test_several_names(engine):
    from ddtree.server import create_app

    app = create_app(engine, ServerOptions(("first", "second")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["first", "second"]
        for name in ("first", "second"):
            answer = await client.post(CHAT, json={**HI, "model": name})
            assert answer.json()["model"] == "first"
        assert (await client.post(CHAT, json={**HI, "model": "third"})).status_code == 404
    await app.state.worker.stop(0)


@pytest.mark.anyio
@pytest.mark.parametrize("sent", ["abc-123", "x" * 128, "a/b:c=d,e"])
async def test_a_request_id_comes_back(http, sent):
    for method, path in (("GET", "/health"), ("POST", CHAT), ("GET", "/nowhere")):
        answer = await http.request(method, path, headers={"X-Request-Id": sent})
        assert answer.headers["x-request-id"] == sent


@pytest.mark.anyio
@pytest.mark.parametrize("sent", [None, "", "x" * 129, "a b", b"\xff\xfe", "tab\there"])
async def test_other_request_ids_are_replaced(http, sent):
    headers = {} if sent is None else {"X-Request-Id": sent}
    first, second = [(await http.get("/health", headers=headers)).headers["x-request-id"] for _ in range(2)]
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != second


@contextmanager
def lines_of(level: str):
    """What the server's loggers write, as `serve` sets them up."""
    logger, stream = logging.getLogger("ddtree"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Lines())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.mark.anyio
async def test_the_access_log(http, chat):
    with lines_of("INFO") as stream:
        await http.post(CHAT, json=HI, headers={"X-Request-Id": "mine"})
        await http.get("/server_info?token=secret")
        await http.get("/no%0Awhere/ä")
        await chat(max_tokens=2, n=2, stream=True)
    first, info, nowhere, two = stream.getvalue().splitlines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(stamp + r" INFO \[mine\] POST /v1/chat/completions 200 \d\.\d{3} s 8\+6 tokens", first)
    assert re.fullmatch(stamp + r" INFO \[[0-9a-f]{32}\] GET /server_info 200 \d\.\d{3} s", info)
    assert "GET /no%0Awhere/%C3%A4 404" in nowhere
    assert two.endswith(" 8+4 tokens")


class TestNoAccessLog:
    """--no-access-log"""

    @pytest.fixture
    def options(self):
        return ServerOptions(("scripted",), access_log=False)

    @pytest.mark.anyio
    async def test_silence(self, http):
        with lines_of("INFO") as stream:
            await http.post(CHAT, json=HI)
        assert stream.getvalue() == ""


def test_who_left_is_in_the_log(live, engine, eventually):
    """Before the answer began: 499; within it: told so."""
    engine.pieces, engine.round_seconds = ["word "] * 2000, 0.01
    with lines_of("INFO") as stream:
        for streamed in (False, True):
            connection = http.client.HTTPConnection(live.url.removeprefix("http://"), timeout=20)
            body = json.dumps({**HI, "stream": streamed})
            connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
            if streamed:
                answer = connection.getresponse()
                answer.read(10)
                answer.close()
            else:
                assert engine.started.wait(10)
            connection.close()
            eventually(lambda: engine.active == 0)
        eventually(lambda: stream.getvalue().count("\n") == 2)
    whole, streamed = stream.getvalue().splitlines()
    assert " 499 " in whole
    assert " 200 " in streamed
    assert streamed.endswith("(the client left)")


@pytest.mark.anyio
async def test_errors_are_logged_under_the_request_s_id(http, engine):
    engine.error = RuntimeError("odd")
    with lines_of("INFO") as stream:
        answer = await http.post(CHAT, json=HI, headers={"X-Request-Id": "failed-one"})
    assert answer.status_code == 500
    assert "failed-one" in next(line for line in stream.getvalue().splitlines() if "the engine failed" in line)


@pytest.mark.anyio
async def test_a_bug_is_an_answer_with_an_id(http, engine):
    engine.text = None
    with lines_of("INFO") as stream:
        answer = await http.post(CHAT, json=HI, headers={"X-Request-Id": "buggy"})
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "buggy"
    assert answer.json()["error"]["code"] == "internal_error"
    assert "Traceback" in stream.getvalue()
    assert "[buggy]" in stream.getvalue()


class TestRoundLog:
    """--log-level debug"""

    @pytest.fixture
    def options(self):
        return ServerOptions(("scripted",), log_level="debug", access_log=False)

    @pytest.mark.anyio
    async def test_a_line_of_json_for_each_round(self, http, engine):
        assert isinstance(engine.scheduler.observer, RoundLog)
        with lines_of("DEBUG") as stream:
            await http.post(CHAT, json=HI)
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert len(lines) == 6
        for line in lines:
            assert line["event"] == "round"
            assert line["sequences"] == 1
            assert line["drafted"] == 5
            assert line["accepted"] == [1]
            assert line["depths"] == [3]
            assert line["modes"] == ["tree"]
            assert set(line["stages"]) == {"verify"}
        assert "ddtree_rounds_total 6.0" in (await http.get("/metrics")).text

    @pytest.mark.anyio
    async def test_not_at_other_levels(self, http):
        with lines_of("INFO") as stream:
            await http.post(CHAT, json=HI)
        assert stream.getvalue() == ""


def test_logging_is_set_up_once(capsys):
    log_to_stderr("warning")
    log_to_stderr("info")
    logging.getLogger("ddtree.server").info("once")
    logging.getLogger("ddtree.server").debug("never")
    assert capsys.readouterr().err.endswith(" INFO [-] once\n")


class TestFullQueue:
    """--max-queue"""

    @pytest.fixture
    def options(self):
        return ServerOptions(("scripted",), max_queue=1)

    @pytest.mark.anyio
    @pytest.mark.parametrize("stream", [False, True])
    async def test_429(self, http, chat, engine, stream):
        engine.hold, engine.max_running = threading.Event(), 1
        http.app.state.worker._stats.slots = 1
        taken = [asyncio.ensure_future(chat()) for _ in range(2)]
        await asyncio.to_thread(engine.started.wait, 10)
        await asyncio.sleep(0.05)
        answer = await chat(stream=stream)
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "waiting" in error["message"]
        assert (await http.get("/health")).status_code == 200  # full is not ill
        assert "ddtree_requests_rejected_total 1.0" in (await http.get("/metrics")).text
        engine.hold.set()
        assert [one.status_code for one in await asyncio.gather(*taken)] == [200, 200]
        assert (await chat()).status_code == 200


class TestSmallBodies:
    """--max-body-mib"""

    @pytest.fixture
    def options(self):
        return ServerOptions(("scripted",), max_body_mib=0.001)

    @pytest.mark.anyio
    async def test_413(self, http, chat):
        assert (await chat("x" * 100)).status_code == 200
        answer = await chat("x" * 1100)
        assert answer.status_code == 413
        assert "1048" in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_new_requests_while_it_stops(http, chat, engine):
    engine.hold = threading.Event()
    running = asyncio.ensure_future(chat())
    await asyncio.to_thread(engine.started.wait, 10)
    stopping = asyncio.ensure_future(http.app.state.worker.stop(10))
    await asyncio.sleep(0.05)
    refused = await chat()
    assert refused.status_code == 503
    assert refused.headers["connection"] == "close"
    assert int(refused.headers["retry-after"]) > 0
    assert refused.json()["error"]["code"] == "server_stopping"
    assert (await http.get("/metrics")).status_code == 200
    engine.hold.set()
    assert (await running).json()["choices"][0]["message"]["content"] == "Hello, wörld 🌍!"
    await stopping


@pytest.mark.anyio
async def test_nothing_of_a_request_is_left_in_the_context(http, chat):
    await chat()
    assert current.get() is None
