"""Several choices of one chat, and what rides along: usage, ids, log-probabilities, metrics."""

import json
import threading
from dataclasses import dataclass

import httpx
import pytest

from ddtree.config import MAX_SEED
from ddtree.errors import InvalidOption
from ddtree.server.schemas.responses import ChatCompletion

pytestmark = pytest.mark.anyio
PIECES = [("Hé", [b"H", b"\xc3", b"\xa9"]), "", ("llo", [b"l", b"lo"]), "!"]


def events(answer: httpx.Response) -> list[dict]:
    assert answer.status_code == 200, answer.text
    *frames, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def folded(bodies: list[dict]) -> list[dict]:
    """The choices that a stream's chunks add up to."""
    found: dict[int, dict] = {}
    for body in bodies:
        for choice in body["choices"]:
            whole = found.setdefault(choice["index"], {"content": "", "logprobs": [], "ids": [], "reason": None})
            whole["content"] += choice["delta"].get("content") or ""
            whole["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            whole["ids"] += choice.get("token_ids") or []
            assert whole["reason"] is None, "nothing comes after a choice's end"
            whole["reason"] = choice["finish_reason"]
            whole["stop_reason"] = choice.get("stop_reason")
    return [found[index] for index in sorted(found)]


ALL = {"n": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
async def test_streamed_equals_not_streamed(chat, engine, limit):
    engine.pieces, engine.stop_reason, engine.cached_tokens, engine.shadow = PIECES, "x", 2, FakeShadow()
    whole = (await chat(**ALL, max_tokens=limit, speculative={"metrics": True})).json()
    ChatCompletion.model_validate(whole)  # what the OpenAPI document tells
    bodies = events(await chat(**ALL, max_tokens=limit, stream=True, stream_options={"include_usage": True}))
    assert bodies[-1]["usage"] == whole["usage"]
    assert bodies[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert folded(bodies) == [
        {
            "content": choice["message"]["content"],
            "logprobs": choice["logprobs"]["content"],
            "ids": choice["token_ids"],
            "reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
        }
        for choice in whole["choices"]
    ]
    for choice in whole["choices"]:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        assert choice["stop_reason"] == ("x" if limit == 4 else None)
    # The prompt counts once, and so does what was reused of it.
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    assert whole["usage"]["prompt_tokens"] == len("<user>Hi")
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_seeds_of_choices(chat, engine):
    await chat(n=3, seed=7)
    await chat(n=2, seed=MAX_SEED)
    await chat(n=2)
    assert [params.seed for params in engine.params] == [7, 8, 9, MAX_SEED, -MAX_SEED - 1, None, None]


async def test_chunks_of_choices_interleave(chat, engine):
    bodies = events(await chat(n=2, stream=True))
    told = [choice["index"] for body in bodies for choice in body["choices"] if choice["delta"].get("content")]
    assert told == [0, 1] * 5
    assert [body["choices"][0]["delta"]["role"] for body in bodies[:2]] == ["assistant"] * 2
    blocks = [body["choices"][0]["ddtree"] for body in bodies if body["choices"][0]["finish_reason"]]
    assert [block["mode"] for block in blocks] == ["tree", "tree"]
    assert not any("ddtree" in body for body in bodies)


async def test_more_choices_than_slots(chat, engine):
    engine.max_running = 2
    answer = (await chat(n=5)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(5))
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"Hello, wörld 🌍!"}
    assert engine.most_active == 2


@pytest.mark.parametrize("error", [RuntimeError("x"), InvalidOption("no", code="odd")])
async def test_a_choice_that_fails_ends_the_request(chat, engine, eventually, error):
    engine.error, engine.error_at = error, 2
    *chunks, last = events(await chat(n=3, stream=True))
    assert last["error"]["code"] in ("engine_error", "odd")
    assert all("choices" in chunk for chunk in chunks)
    engine.error = error
    assert (await chat(n=3)).status_code in (400, 500)
    engine.error = None
    assert (await chat()).status_code == 200


def test_a_client_that_leaves_frees_all_choices(live, engine, eventually):
    engine.pieces, engine.round_seconds, engine.max_running = ["word "] * 2000, 0.01, 2
    with live.openai().chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "Hi"}], n=4, stream=True
    ) as stream:
        for _ in range(6):
            next(iter(stream))
    eventually(lambda: not engine.scheduler.has_work)
    assert engine.rounds_begun < 500


def test_a_silent_stream_is_freed_too(live, engine, eventually):
    """No chunk carries anything to send, so no failed send can tell that the client has left."""
    engine.pieces, engine.round_seconds = ["a", *[""] * 3000], 0.005
    with live.openai().chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "Hi"}], stream=True
    ) as stream:
        next(iter(stream))
    eventually(lambda: not engine.scheduler.has_work)
    assert engine.rounds_begun < 500


@pytest.mark.parametrize("gone", ["whole", "stream"])
def test_a_client_that_leaves_before_the_first_chunk(live, engine, eventually, gone):
    engine.hold = threading.Event()
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 3, "stream": gone == "stream"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=0.3)
    eventually(lambda: live.server._worker.unfinished == 0)
    engine.hold.set()
    eventually(lambda: not engine.scheduler.has_work)


async def test_usage_on_every_chunk(chat):
    options = {"include_usage": True, "continuous_usage_stats": True}
    bodies = events(await chat(n=2, stream=True, stream_options=options))
    counts = [body["usage"]["completion_tokens"] for body in bodies]
    assert counts == sorted(counts)
    assert counts[0] == 1  # the first chunk was awaited before the head was sent
    assert counts[-1] == 12
    assert bodies[-1]["choices"] == []


async def test_log_probabilities_of_a_chat(chat, engine):
    engine.pieces = PIECES
    content = (await chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[72], [195], [169], [], [108], [108, 111], [33]]
    assert content[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [{"token": "A", "logprob": -1.0, "bytes": [65]}],
    }
    alone = (await chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in alone)


async def test_impossible_tokens_have_a_number(chat, engine, monkeypatch):
    logprob = type(engine.scheduler)._logprob

    def worst(self, sequence, token):
        one = logprob(self, sequence, token)
        one.logprob, one.top = float("-inf"), ((65, float("-inf")),)
        return one

    monkeypatch.setattr(type(engine.scheduler), "_logprob", worst)
    entry = (await chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


@dataclass
class FakeShadow:
    linear_acceptance_length: float = 2.0
    tree_acceptance_length: float = 2.5
    agree: bool = True
    overhead: None = None


SUMMARY = {
    "mean_acceptance_length": 1 + 4 / 3,
    "draft_acceptance_rate": 4 / 15,
    "acceptance_histogram": [1, 1, 0, 1],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 15,
    "num_spec_tokens": 5,
}


async def test_metrics_where_they_are_asked_for(chat):
    asked = {"speculative": {"metrics": True}}
    assert (await chat(**asked)).json()["metrics"] == {"speculative_decoding": SUMMARY}
    assert "metrics" not in (await chat()).json()
    two = (await chat(**asked, n=2)).json()["metrics"]["speculative_decoding"]
    assert two["acceptance_histogram"] == [2, 2, 0, 2]
    assert two["num_spec_steps"] == 6
    assert two["mean_acceptance_length"] == SUMMARY["mean_acceptance_length"]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_metrics_come_with_the_last_chunk_of_a_stream(chat, n, usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    *bodies, last = events(await chat(stream=True, n=n, speculative={"metrics": True}, **options))
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 3 * n
    assert bool(last["choices"]) is not usage
    assert not any("metrics" in body for body in bodies)


async def test_without_a_draft_there_are_no_metrics(chat, engine, monkeypatch):
    made = engine.generation

    def plain(sequence):
        generation = made(sequence)
        generation.speculative.drafted = generation.speculative.accepted = 0
        return generation

    monkeypatch.setattr(engine, "generation", plain)
    answer = (await chat(speculative={"mode": "ar", "metrics": True})).json()
    assert answer["metrics"] == {"speculative_decoding": None}
    assert answer["ddtree"]["mode"] == "ar"
