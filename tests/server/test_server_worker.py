"""The engine's thread: many at once, clients that leave, failures, and a stop."""

import asyncio
import http.client
import json
import random
import threading

import pytest

from ddtree.config import SamplingParams, Speculation
from ddtree.errors import ContextLengthExceeded, InvalidOption
from ddtree.server import answer as answer_module
from ddtree.server.worker import EngineFailed, EngineStopped, EngineWorker, QueueFull
from scripted import engine_for

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
    eventually(lambda: live.server._worker.unfinished == 0)
    engine.hold.set()
    eventually(lambda: engine.closed == 1)
    assert engine.rounds_begun == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_queued_request_whose_client_left_is_dropped(live, engine, eventually, stream):
    engine.hold, engine.max_running = threading.Event(), 1
    worker = live.server._worker
    first = send(live, False, "first")
    assert engine.started.wait(10)
    second = send(live, stream, "second")
    eventually(lambda: worker.unfinished == 2)
    third = send(live, stream, "third")
    eventually(lambda: worker.unfinished == 3)
    second.close()
    eventually(lambda: worker.unfinished == 2)
    engine.hold.set()
    for connection in (first, third):
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
        connection.close()
    assert engine.prompts == ["<user>first", "<user>third"]


@pytest.mark.anyio
async def test_stop_refuses_what_waits_and_lets_the_running_request_end(engine):
    engine.hold, engine.max_running = threading.Event(), 1
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


async def drain(worker: EngineWorker) -> None:
    """Waits until nothing is inside, and checks that nothing was left behind."""
    for _ in range(500):
        if not worker.unfinished and not worker.busy and not worker._orders:
            break
        await asyncio.sleep(0.01)
    assert worker.unfinished == worker.busy == worker.waiting == 0
    assert not worker._answers
    assert not worker._engine.scheduler.has_work


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(3))
async def test_many_at_once_with_random_leavers(engine, seed):
    """64 requests of 64 tasks: each that stays gets its own text, each that leaves frees its slot."""
    engine.answers = {f"<{n}>": [f"{n}-{piece};" for piece in range(5 + n % 7)] for n in range(64)}
    engine.round_seconds = 0.001
    worker, chance = EngineWorker(engine), random.Random(seed)
    plans = [(n, chance.random() * 0.05, chance.choice([None, None, 0, 1, 3])) for n in range(64)]

    async def one(number: int, delay: float, leave_after: int | None) -> str:
        await asyncio.sleep(delay)
        answer = worker.submit(engine.text.encode(f"<{number}>"), SamplingParams())
        text = ""
        while leave_after is None or leave_after > 0:
            chunk = await asyncio.wait_for(answer.next(), 10)
            text += chunk.text
            if chunk.generation is not None:
                assert chunk.generation.text == text
                return text
            leave_after = leave_after and leave_after - 1
        answer.cancel()
        return text

    texts = await asyncio.gather(*(one(*plan) for plan in plans))
    for (number, _, leave_after), text in zip(plans, texts, strict=True):
        whole = [f"{number}-{piece};" for piece in range(5 + number % 7)]
        assert text == "".join(whole[:leave_after])
    await drain(worker)
    assert engine.most_active == engine.max_running
    await worker.stop(1)


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(2))
async def test_the_real_scheduler_under_leavers(seed):
    """Whoever stays gets what the same request gets alone, whatever the neighbours do."""
    chance = random.Random(seed)
    engine, alone = (engine_for(3, config={"max_running_requests": 4}, mode="tree") for _ in range(2))
    worker = EngineWorker(engine)
    plans = []
    for number in range(48):
        prompt = [chance.randrange(3) for _ in range(1 + chance.randrange(40))]
        params = SamplingParams(
            max_tokens=1 + chance.randrange(30), temperature=chance.choice([0, 0.8]), seed=number, ignore_eos=True
        )
        speculation = chance.choice([None, Speculation("ar"), Speculation("linear"), Speculation("tree", 3)])
        plans.append((prompt, params, speculation, chance.choice([None, None, 0, 1, 2])))

    async def one(prompt, params, speculation, leave_after):
        await asyncio.sleep(chance.random() * 0.3)
        answer = worker.submit(prompt, params, speculation)
        ids = []
        for _ in range(1000 if leave_after is None else leave_after):
            chunk = await asyncio.wait_for(answer.next(), 20)
            ids += chunk.token_ids
            if chunk.generation is not None:
                assert chunk.generation.token_ids == ids
                return ids
        answer.cancel()
        return ids

    results = await asyncio.gather(*(one(*plan) for plan in plans))
    for (prompt, params, speculation, leave_after), ids in zip(plans, results, strict=True):
        (expected,) = alone.generate([prompt], [params], speculation)
        assert ids == expected.token_ids[: len(ids)]
        assert leave_after is not None or len(ids) == len(expected.token_ids)
    await drain(worker)
    assert engine.scheduler.stats().running == 0
    await worker.stop(1)


@pytest.mark.anyio
async def test_answers_of_several_event_loops(engine):
    engine.round_seconds = 0.001
    worker = EngineWorker(engine)

    async def ask() -> list[str]:
        answers = [worker.submit([65], SamplingParams()) for _ in range(8)]
        return [(await asyncio.wait_for(answer.whole(), 10)).text for answer in answers]

    texts = await asyncio.gather(*(asyncio.to_thread(asyncio.run, ask()) for _ in range(4)))
    assert texts == [["Hello, wörld 🌍!"] * 8] * 4
    await drain(worker)
    await worker.stop(1)


@pytest.mark.anyio
async def test_one_wake_up_a_step(engine, monkeypatch):
    """However many requests share it."""
    engine.hold, engine.pieces = threading.Event(), ["x"] * 20
    worker, loop = EngineWorker(engine), asyncio.get_running_loop()
    answers = [worker.submit([65], SamplingParams()) for _ in range(8)]
    await asyncio.to_thread(engine.started.wait, 10)
    calls, before = [], loop.call_soon_threadsafe

    def counted(callback, *args, **kwargs):
        if callback is answer_module._deliver:
            calls.append(callback)
        return before(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    engine.hold.set()
    for answer in answers:
        await answer.whole()
    assert len(calls) <= engine.rounds_begun <= 21  # the first may have begun before the last was there
    await worker.stop(1)


@pytest.mark.anyio
async def test_the_queue_has_an_end(engine):
    engine.hold, engine.max_running = threading.Event(), 2
    worker = EngineWorker(engine, max_queue=3)
    running = [worker.submit([65], SamplingParams()) for _ in range(5)]
    with pytest.raises(QueueFull, match="3 requests are waiting") as caught:
        worker.submit([65], SamplingParams())
    assert 1 <= caught.value.retry_after <= 60
    with pytest.raises(InvalidOption, match="at most 5"):
        worker.submit_all([65], [SamplingParams()] * 6)
    running.pop().cancel()
    with pytest.raises(QueueFull):  # all of several, or none
        worker.submit_all([65], [SamplingParams()] * 2)
    assert worker.unfinished == 4
    running.append(worker.submit([65], SamplingParams()))
    engine.hold.set()
    for answer in running:
        await asyncio.wait_for(answer.whole(), 5)
    assert worker.rejected == 2
    await drain(worker)
    await worker.stop(1)


@pytest.mark.anyio
async def test_a_bad_request_does_not_wait_for_a_slot(engine):
    engine.round_seconds, engine.pieces, engine.max_running = 0.01, LONG, 1
    worker = EngineWorker(engine)
    running = worker.submit([65], SamplingParams())
    await running.next()
    waiting = worker.submit([65], SamplingParams())
    with pytest.raises(ContextLengthExceeded):
        await asyncio.wait_for(worker.submit([65] * 999, SamplingParams()).whole(), 5)
    running.cancel()
    waiting.cancel()
    await drain(worker)
    await worker.stop(1)


@pytest.mark.anyio
async def test_an_error_of_one_request_is_its_own(engine):
    engine.error, engine.error_at = InvalidOption("not this one", param="grammar"), 2
    worker = EngineWorker(engine)
    answers = [worker.submit([65], SamplingParams()) for _ in range(4)]
    results = await asyncio.gather(*(answer.whole() for answer in answers), return_exceptions=True)
    assert sum(isinstance(result, InvalidOption) for result in results) == 1
    assert sum(getattr(result, "text", "") == "Hello, wörld 🌍!" for result in results) == 3
    assert engine.scheduler.resets == 0
    await drain(worker)
    await worker.stop(1)


@pytest.mark.anyio
async def test_a_failed_step_is_told_and_those_who_waited_go_on(engine, caplog):
    engine.max_running, engine.error, engine.error_at = 2, RuntimeError("odd"), 3
    engine.hold = threading.Event()
    worker = EngineWorker(engine)
    answers = [worker.submit([65 + n], SamplingParams()) for n in range(5)]
    await asyncio.to_thread(engine.started.wait, 10)
    engine.hold.set()
    results = await asyncio.gather(*(answer.whole() for answer in answers), return_exceptions=True)
    failed = [isinstance(result, EngineFailed) for result in results]
    assert failed == [True, True, False, False, False] or failed == [True, False, False, False, False]
    assert engine.scheduler.resets == 1
    assert "odd" in caplog.text
    worker.check()
    await drain(worker)
    await worker.stop(1)


@pytest.mark.anyio
async def test_the_real_scheduler_after_a_failed_step(monkeypatch):
    """Its caches are trusted no more, and what comes later is right."""
    engine, alone = (engine_for(3, config={"max_running_requests": 2}, mode="tree") for _ in range(2))
    worker, calls, verify = EngineWorker(engine), [], engine.target.verify

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("odd")
        return verify(*arguments)

    monkeypatch.setattr(engine.target, "verify", failing)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[0, 1, 2], [1, 2], [0, 1, 2], [2, 1], [0, 1, 2]]
    answers = [worker.submit(prompt, params) for prompt in prompts]
    results = await asyncio.gather(*(answer.whole() for answer in answers), return_exceptions=True)
    failed = [isinstance(result, EngineFailed) for result in results]
    assert failed[0]
    assert not any(failed[2:])
    for prompt, result in list(zip(prompts, results, strict=True))[2:]:
        (expected,) = alone.generate([prompt], [params])
        assert result.token_ids == expected.token_ids
    await drain(worker)
    await worker.stop(1)


@pytest.mark.anyio
async def test_nobody_is_queued_again_for_ever(engine):
    """Every step of every request fails, but the probes do not."""
    worker = EngineWorker(engine)
    engine.max_running, step = 1, engine.scheduler.step

    def failing():
        chunks = step()
        if any(sequence.prompt == [66] for sequence, _ in chunks):
            raise RuntimeError("odd")
        return chunks

    engine.scheduler.step = failing
    answers = [worker.submit([66], SamplingParams()) for _ in range(6)]
    results = await asyncio.wait_for(asyncio.gather(*(a.whole() for a in answers), return_exceptions=True), 10)
    assert all(isinstance(result, EngineFailed) for result in results)
    assert (await worker.submit([67], SamplingParams()).whole()).text == "Hello, wörld 🌍!"
    await drain(worker)
    await worker.stop(1)


@pytest.mark.anyio
@pytest.mark.parametrize("error", [RuntimeError("lost"), SystemExit(1)])
async def test_a_lost_engine_tells_everyone(engine, error):
    engine.error, engine.error_once, engine.max_running = error, False, 2
    engine.hold = threading.Event()
    worker = EngineWorker(engine)
    answers = [worker.submit([65], SamplingParams()) for _ in range(6)]
    await asyncio.to_thread(engine.started.wait, 10)
    engine.hold.set()
    results = await asyncio.wait_for(asyncio.gather(*(a.whole() for a in answers), return_exceptions=True), 10)
    assert isinstance(results[0], EngineFailed)
    assert all(isinstance(result, (EngineFailed, EngineStopped)) for result in results)
    with pytest.raises(EngineStopped, match="died"):
        worker.check()
    with pytest.raises(EngineStopped, match="died"):
        worker.submit([65], SamplingParams())
    with pytest.raises(EngineStopped, match="died"):
        await worker.in_text_thread(lambda: 1)
    await worker.stop(1)


@pytest.mark.anyio
async def test_requests_that_come_while_it_stops(engine):
    """From other tasks, all the time: each gets an answer or is told."""
    engine.round_seconds, engine.max_running = 0.002, 2
    worker, told = EngineWorker(engine), []

    async def ask():
        while True:
            try:
                told.append((await worker.submit([65], SamplingParams()).whole()).text)
            except EngineStopped:
                return

    tasks = [asyncio.ensure_future(ask()) for _ in range(8)]
    await asyncio.sleep(0.1)
    await worker.stop(5)
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert set(told) == {"Hello, wörld 🌍!"}
    assert worker.busy == worker.unfinished == 0
