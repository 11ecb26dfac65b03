"""The engine's thread: clients that leave, and a stop."""

import asyncio
import http.client
import json
import threading

import pytest

from ddtree.config import SamplingParams
from ddtree.server.worker import EngineStopped, EngineWorker

LONG = ["word "] * 2000


def send(live, stream: bool, content: str = "Hi") -> http.client.HTTPConnection:
    """A request on a connection of its own, the answer not read."""
    connection = http.client.HTTPConnection(live.url.removeprefix("http://"), timeout=20)
    body = json.dumps({"messages": [{"role": "user", "content": content}], "stream": stream})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_the_engine(live, engine, eventually, stream):
    engine.pieces, engine.round_seconds = LONG, 0.01
    connection = send(live, stream)
    eventually(lambda: engine.rounds_begun > 3)
    if stream:
        answer = connection.getresponse()
        assert answer.read(10)
        answer.close()
    connection.close()
    eventually(lambda: engine.active == 0)
    assert engine.rounds_begun < 300
    assert engine.closed == 1
    engine.pieces = ["next"]
    answer = live.openai().chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == "next"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_round_is_over(live, engine, eventually, stream):
    engine.hold = threading.Event()
    connection = send(live, stream)
    assert engine.started.wait(10)
    connection.close()
    live.openai().models.list()  # by now the server has read that the connection is closed
    eventually(lambda: live.server._worker._running.cancelled)
    engine.hold.set()
    eventually(lambda: engine.closed == 1)
    assert engine.rounds_begun == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_queued_request_whose_client_left_is_dropped(live, engine, eventually, stream):
    engine.hold = threading.Event()
    first = send(live, False, "first")
    assert engine.started.wait(10)
    second = send(live, stream, "second")
    eventually(lambda: len(live.server._worker._waiting) == 1)
    third = send(live, stream, "third")
    eventually(lambda: len(live.server._worker._waiting) == 2)
    second.close()
    eventually(lambda: live.server._worker._waiting[0].cancelled)
    engine.hold.set()
    for connection in (first, third):
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
        connection.close()
    assert engine.prompts == ["<user>first", "<user>third"]


@pytest.mark.anyio
async def test_stop_refuses_what_waits_and_lets_the_running_request_end(engine):
    engine.hold = threading.Event()
    worker = EngineWorker(engine)
    running, waiting = worker.submit([65], SamplingParams()), worker.submit([66], SamplingParams())
    await asyncio.to_thread(engine.started.wait, 10)
    stopping = asyncio.ensure_future(worker.stop(10))
    with pytest.raises(EngineStopped):
        await asyncio.wait_for(waiting.whole(), 5)
    with pytest.raises(EngineStopped):
        worker.submit([67], SamplingParams())
    engine.hold.set()
    assert (await running.whole()).text == "Hello, wörld 🌍!"
    await stopping
    assert engine.prompts == ["A"]
    assert not worker.busy
    await worker.stop(10)  # a second time does no harm


@pytest.mark.anyio
async def test_stop_cuts_a_request_that_takes_too_long(engine):
    engine.pieces, engine.round_seconds = LONG, 0.01
    worker = EngineWorker(engine)
    answer = worker.submit([65], SamplingParams())
    await answer.next()
    await asyncio.wait_for(worker.stop(0.05), 5)
    with pytest.raises(EngineStopped, match="cut"):
        await answer.whole()
    assert not worker.busy
    assert engine.closed == 1


def test_an_answer_nobody_can_read_any_more_is_given_up(engine, eventually):
    """The event loop may be gone before the engine's thread is."""
    engine.pieces, engine.round_seconds = LONG, 0.01
    worker = EngineWorker(engine)

    async def leave():
        worker.submit([65], SamplingParams())

    asyncio.run(leave())
    eventually(lambda: engine.closed == 1)
    assert engine.rounds_begun < 100
    asyncio.run(worker.stop(1))
