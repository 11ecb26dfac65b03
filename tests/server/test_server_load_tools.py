"""What load tools and monitors ask for around a run: probes without a body, a reset between two cells, a quiet log."""

import asyncio
import http.client
import logging
import threading

import pytest

from ddtree.config import SamplingParams
from ddtree.server.options import ServerOptions
from ddtree.server.worker import EngineStopped, EngineWorker
from scripted import engine_for

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
RESET = "/reset_prefix_cache"


@pytest.mark.parametrize("path", ["/health", "/metrics", "/server_info", "/v1/models", "/v1/models/scripted"])
def test_head_is_get_without_a_body(live, path):
    """aiperf asks for HEAD /metrics before it scrapes. All on one connection, so a body would show in the next head."""
    connection = http.client.HTTPConnection(live.url.removeprefix("http://"), timeout=10)
    found = {}
    for method in ("HEAD", "GET", "HEAD"):
        connection.request(method, path)
        answer = connection.getresponse()
        found[method] = answer.status, answer.headers["content-type"], bool(answer.headers["x-request-id"])
        assert (answer.read() == b"") == (method == "HEAD")
    connection.close()
    assert found["HEAD"] == found["GET"]
    assert found["GET"][0] == 200


@pytest.mark.anyio
async def test_head_refuses_what_get_refuses(http):
    assert (await http.head("/v1/models/other")).status_code == 404
    assert (await http.head(CHAT)).status_code == 405
    document = (await http.get("/openapi.json")).json()
    assert not any("head" in methods for methods in document["paths"].values())


@pytest.mark.anyio
async def test_a_reset_comes_before_the_requests_behind_it(http, chat, engine):
    engine.hold = threading.Event()
    running = asyncio.ensure_future(chat())
    await asyncio.to_thread(engine.started.wait, 10)
    answer = await asyncio.wait_for(http.post(RESET), 5)  # waits for no round
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    behind = asyncio.ensure_future(chat())
    engine.hold.set()
    assert [one.status_code for one in await asyncio.gather(running, behind)] == [200, 200]
    assert engine.scheduler.drops == [1]


@pytest.mark.anyio
async def test_a_reset_before_the_first_request(http, chat, engine):
    for _ in range(3):
        assert (await http.post(RESET)).status_code == 200
    assert not http.app.state.worker._orders, "nothing is kept yet, and nobody would carry them out"
    assert (await chat()).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("more", ["reset_running_requests", "reset_external"])
async def test_what_a_reset_cannot_do(http, chat, engine, more):
    await chat()
    for value, status in (("true", 400), ("false", 200), ("perhaps", 400)):
        answer = await http.post(f"{RESET}?{more}={value}")
        assert answer.status_code == status, value
        if status == 400:
            assert answer.json()["error"]["param"] == more
    assert (await http.get(RESET)).status_code == 405


@pytest.mark.anyio
async def test_a_reset_while_it_stops(http):
    await http.app.state.worker.stop(0)
    answer = await http.post(RESET)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_stopping"


@pytest.mark.anyio
async def test_after_a_reset_a_prompt_is_computed_anew():
    engine, prompt = engine_for(7, mode="tree"), [0, 1, 2, 0, 1, 2]
    worker = EngineWorker(engine)

    async def ask():
        return await worker.submit(prompt, SamplingParams(max_tokens=5, ignore_eos=True)).whole()

    first, again = await ask(), await ask()
    worker.drop_prefixes()
    anew = await ask()
    assert [one.cached_tokens for one in (first, again, anew)] == [0, 5, 0]
    assert first.token_ids == again.token_ids == anew.token_ids
    await worker.stop(1)
    with pytest.raises(EngineStopped):
        worker.drop_prefixes()


class TestKeys:
    """--api-key"""

    @pytest.fixture
    def options(self):
        return ServerOptions(("scripted",), api_keys=("sk-first",))

    @pytest.mark.anyio
    async def test_a_reset_needs_one(self, http):
        assert (await http.post(RESET)).status_code == 401
        assert (await http.post(RESET, headers={"Authorization": "Bearer sk-first"})).status_code == 200

    @pytest.mark.anyio
    async def test_head_needs_what_get_needs(self, http):
        for path, status in (("/metrics", 200), ("/server_info", 200), ("/v1/models", 401)):
            assert (await http.head(path)).status_code == (await http.get(path)).status_code == status


@pytest.mark.anyio
async def test_polls_do_not_flood_the_access_log(http, caplog):
    caplog.set_level(logging.DEBUG, "ddtree.access")
    for method in ("GET", "HEAD"):
        for path in ("/health", "/metrics", "/health?deep=1"):
            assert (await http.request(method, path)).status_code == 200
    await http.get("/metrics/other")
    await http.post(CHAT, json=HI)
    await http.app.state.worker.stop(0)
    await http.get("/health")  # not well: worth a line
    lines = [(one.levelname, one.getMessage().partition(" 0.")[0]) for one in caplog.records]
    assert [line for level, line in lines if level == "INFO"] == [
        "GET /metrics/other 404",
        f"POST {CHAT} 200",
        "GET /health 503",
    ]
    assert [line for level, line in lines if level == "DEBUG"] == [
        f"{method} {path} 200" for method in ("GET", "HEAD") for path in ("/health", "/metrics", "/health")
    ]
