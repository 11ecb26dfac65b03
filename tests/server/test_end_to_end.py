"""The real thing: `ddtree serve` on the embedded model in a process of its own, and the `openai` client."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

CODE = [{"role": "user", "content": "Write a Python function that adds two numbers. Return only code."}]
STORY = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie heißt du? 日本語でも。 🌍"}]
READY_SECONDS = 120


@pytest.fixture(scope="module")
def url(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a running server, whose log is shown when it does not start."""
    log = tmp_path_factory.mktemp("serve") / "stderr"
    code = "import sys; from ddtree.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--dtype", "float32", "--mode", "tree"]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        watchdog = threading.Timer(READY_SECONDS, process.kill)
        watchdog.start()
        try:
            ready = re.search(
                r"ddtree ready: (http://127\.0\.0\.1:\d+)/v1 \(model \S+, mode tree, float32 on cpu\)",
                _until_ready(process),
            )
            watchdog.cancel()
            assert ready, log.read_text()
            yield ready[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert "Traceback" not in log.read_text()
        finally:
            watchdog.cancel()
            process.kill()


def _until_ready(process: subprocess.Popen[str]) -> str:
    for line in process.stdout:
        if "ready" in line:
            return line
    return ""


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def streamed(client: openai.OpenAI, **request):
    """Text, finish reason, usage and the `ddtree` block of a streamed answer."""
    text, reason, usage, block = "", None, None, None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        usage = chunk.usage or usage
        block = getattr(chunk, "ddtree", None) or block
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason, usage, block


@pytest.mark.parametrize("messages", [CODE, STORY], ids=["code", "unicode"])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "sampled"])
def test_streamed_equals_not_streamed(client, model, messages, options):
    request = {"model": model, "messages": messages, "max_tokens": 24, **options}
    whole = client.chat.completions.create(**request)
    text, reason, usage, block = streamed(client, **request)
    assert text == whole.choices[0].message.content
    assert text
    assert reason == whole.choices[0].finish_reason
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(usage, field) == getattr(whole.usage, field)
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, "the second time, only its last token"
    assert 0 < usage.completion_tokens <= 24
    assert block["mode"] == whole.ddtree["mode"] == "tree"
    assert block["rounds"] > 0
    assert block["acceptance_length"] >= 1


def test_the_limit_is_exact(client, model):
    for limit in (1, 2, 17):
        answer = client.chat.completions.create(model=model, messages=CODE, temperature=0, max_tokens=limit)
        assert answer.usage.completion_tokens == limit
        assert answer.choices[0].finish_reason == "length"


def test_stop_strings_end_the_text(client, model):
    request = {"model": model, "messages": CODE, "temperature": 0, "max_tokens": 32}
    text = client.chat.completions.create(**request).choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = client.chat.completions.create(**request, stop=["never in it", stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert streamed(client, **request, stop=[stop])[0] == text[: text.index(stop)]


def test_a_second_shorter_request_and_two_at_once(client, model):
    request = {"model": model, "temperature": 0, "max_tokens": 12}
    alone = client.chat.completions.create(messages=CODE, **request).choices[0].message.content
    client.chat.completions.create(messages=CODE * 4, **request)
    texts: list[str] = []

    def ask() -> None:
        texts.append(client.chat.completions.create(messages=CODE, **request).choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [alone, alone]


def test_refusals(client, model, url):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="store"):
        client.chat.completions.create(model=model, messages=CODE, store=True)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=CODE)
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


def test_a_stream_that_is_left_frees_the_engine(client, model):
    """Its rest would take minutes; the next request must not wait for it."""
    endless = {"temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(model=model, messages=CODE, **endless) as stream:
        next(iter(stream))
    with openai.OpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=20) as quick:
        assert quick.chat.completions.create(model=model, messages=CODE, max_tokens=1).usage.completion_tokens == 1
