"""`ddtree generate`: what it prints, its JSON contract, and how it refuses."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import ANSWER, Command, FakeEngine

from ddtree.engine import Engine, StageTimer
from ddtree.errors import DamagedFile

JSON_KEYS = {"text", "token_ids", "finish_reason", "mode", "rounds", "acceptance_length", "seconds", "tok_s"}


def test_prints_the_text_and_nothing_else(ddtree: Command, engines: list[FakeEngine]) -> None:
    ran = ddtree("generate", "Hi")
    assert (ran.code, ran.out, ran.err) == (0, ANSWER + "\n", "")
    prompt, params, speculation, observer = engines[0].calls[0]
    assert engines[0].text.decode(prompt) == "<user>Hi"
    assert (params.max_tokens, params.temperature, params.seed) == (256, 0.0, None)
    assert speculation == engines[0].config.speculation
    assert engines[0].config.max_running_requests == 1, "memory is planned for one answer"
    assert observer is None, "nothing is timed unless asked for"


def test_text_comes_in_pieces_each_flushed(
    ddtree: Command, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    original = FakeEngine.stream

    def watched(self: FakeEngine, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for chunk in original(self, *args, **kwargs):
            yield chunk
            seen.append(chunk.text)
            assert flushed[-1] == "flush", "a piece waits in the buffer while the next is computed"

    flushed: list[str] = []

    class Screen:
        def write(self, text: str) -> int:
            flushed.append(text)
            return len(text)

        def flush(self) -> None:
            flushed.append("flush")

    monkeypatch.setattr(FakeEngine, "stream", watched)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Screen())
        ran = ddtree("generate", "Hi")
    assert ran.code == 0
    assert "".join(seen) == ANSWER
    assert len(seen) > 10


def test_json_contract(ddtree: Command, engines: list[FakeEngine]) -> None:
    ran = ddtree("generate", "Hi", "--json", "--max-tokens", "9")
    assert (ran.code, ran.err) == (0, "")
    result = json.loads(ran.out)
    assert set(result) == JSON_KEYS
    assert result["text"] == ANSWER[:9]
    assert result["token_ids"] == [ord(character) for character in ANSWER[:9]]
    assert result["finish_reason"] == "length"
    assert result["mode"] == engines[0].config.speculation.mode
    assert isinstance(result["rounds"], int)
    assert all(isinstance(result[key], float) for key in ("acceptance_length", "seconds", "tok_s"))


def test_json_of_shadow_linear(ddtree: Command, engines: list[FakeEngine]) -> None:
    result = json.loads(ddtree("generate", "Hi", "--json", "--mode", "shadow-linear").out)
    assert set(result) == JSON_KEYS | {"shadow"}
    assert result["shadow"] == {
        "linear_acceptance_length": 2.0, "tree_acceptance_length": 2.5, "overhead": None, "agree": True,
    }  # fmt: skip


def test_stats_go_to_stderr_with_stage_times(ddtree: Command, engines: list[FakeEngine]) -> None:
    ran = ddtree("generate", "Hi", "--stats", "--mode", "shadow-linear")
    assert ran.out == ANSWER + "\n"
    for word in ("mode shadow-linear", "rounds", "acceptance length 2.00", "tok/s", "agree True", "stages: ", "verify"):
        assert word in ran.err
    assert isinstance(engines[0].calls[0][3], StageTimer)


def test_json_and_stats_together_keep_stdout_one_object(ddtree: Command, engines: list[FakeEngine]) -> None:
    ran = ddtree("generate", "Hi", "--stats", "--json")
    json.loads(ran.out)
    assert "tok/s" in ran.err


def test_dash_reads_standard_input(ddtree: Command, engines: list[FakeEngine]) -> None:
    assert ddtree("generate", "-", stdin="Grüße\n".encode()).code == 0
    assert engines[0].text.decode(engines[0].calls[0][0]) == "<user>Grüße"


def test_raw_takes_the_prompt_as_it_is(ddtree: Command, engines: list[FakeEngine]) -> None:
    assert ddtree("generate", "-", "--raw", stdin=b"Once upon\n").code == 0
    assert engines[0].text.decode(engines[0].calls[0][0]) == "Once upon\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["Hi", "--mode", "magic"], ["--mode 'magic'", "shadow-linear"]),
        (["Hi", "--tree-budget", "0"], ["--tree-budget", "from 1 to 1024", "not 0"]),
        (["Hi", "--tree-budget", "10000"], ["--tree-budget", "from 1 to 1024", "not 10000"]),
        (["Hi", "--tree-top-k", "0"], ["--tree-top-k", "not 0"]),
        (["Hi", "--tree-spine", "-1"], ["--tree-spine", "not -1"]),
        (["Hi", "--max-tokens", "0"], ["--max-tokens", "at least 1"]),
        (["Hi", "--temperature", "-0.5"], ["--temperature", "from 0", "not -0.5"]),
        (["Hi", "--temperature", "nan"], ["--temperature", "nan"]),
        (["Hi", "--dtype", "int4"], ["--dtype 'int4'", "bfloat16"]),
        (["Hi", "--max-model-len", "1"], ["--max-model-len", "at least 2"]),
        (["Hi", "--seed", str(2**70)], ["--seed", str(2**70)]),
        ([""], ["PROMPT is empty"]),
        (["  \n"], ["PROMPT is empty"]),
        (["-"], ["PROMPT is empty"]),
        (["\udcff"], ["PROMPT is not UTF-8"]),
    ],
)
def test_bad_values_are_one_clear_line(
    ddtree: Command, engines: list[FakeEngine], args: list[str], words: list[str]
) -> None:
    ran = ddtree("generate", *args)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert all(word in ran.err for word in words), ran.err
    assert not engines, "refused before a model is loaded"


def test_bytes_on_standard_input_that_are_no_text(ddtree: Command, engines: list[FakeEngine]) -> None:
    ran = ddtree("generate", "-", stdin=b"caf\xe9")
    assert ran.code == 1
    assert "UTF-8" in ran.err


def test_an_engine_error_is_one_line_without_traceback(ddtree: Command, engines: list[FakeEngine]) -> None:
    ran = ddtree("generate", "a long prompt", "--max-model-len", "4")
    assert (ran.code, ran.err) == (1, "error: the prompt has 19 tokens, the context 4: raise --max-model-len\n")


def test_an_error_of_loading(ddtree: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: object) -> Engine:
        raise DamagedFile("model.safetensors is damaged: fetch it again")

    monkeypatch.setattr(Engine, "load", load)
    ran = ddtree("generate", "Hi")
    assert (ran.code, ran.err) == (1, "error: model.safetensors is damaged: fetch it again\n")


def test_ctrl_c_ends_quietly(ddtree: Command, engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: FakeEngine, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from ()
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEngine, "stream", interrupted)
    ran = ddtree("generate", "Hi")
    assert (ran.code, ran.err) == (130, "")


@pytest.mark.parametrize(
    ("mode", "option", "value"),
    [
        ("linear", "--tree-budget", "7"),
        ("ar", "--tree-top-k", "3"),
        ("linear", "--tree-spine", "2"),
        ("ar", "--tree-context", "mix"),
    ],
)
def test_an_option_that_the_mode_does_not_read_is_refused(
    ddtree: Command, engines: list[FakeEngine], mode: str, option: str, value: str
) -> None:
    ran = ddtree("generate", "Hi", "--mode", mode, option, value)
    assert ran.code == 1
    assert f"{option} means nothing in mode {mode}" in ran.err
    assert not engines
    assert ddtree("generate", "Hi", "--mode", "shadow-linear", option, value).code == 0
