"""Prompts and shards: what comes in, what stays out, and that a killed run goes on where it was."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree.bench.suite import load_prompts
from ddtree.errors import DamagedFile, InvalidOption, ModelNotFound
from ddtree.training.answers import EngineAnswers, load_engine
from ddtree.training.chats import ChatMaker
from ddtree.training.config import DataPart, TrainConfig, read
from ddtree.training.data import check_data, generate_data
from ddtree.training.prompts import Banned, Source, read_prompts, templates
from ddtree.training.shards import Chat, read_all, read_shard, shard_path, write_shard
from tiny_run import END, run_file

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = {"code", "json", "formats", "maths", "extraction", "rewriting", "summaries", "chat", "lists", "stories"}


def same(one: list[Chat], other: list[Chat]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.ids, b.ids) and replace(a, ids=b.ids) == b for a, b in zip(one, other, strict=True)
    )


def test_templates_fill_every_slot_and_have_every_kind() -> None:
    source = Source(DataPart(own=0.0))
    prompts = [source(number) for number in range(3000)]
    assert {p.kind for p in prompts if p} >= KINDS
    assert not [p for p in prompts if p and (p.text is None or "{" in p.text or "}" in p.text or not p.text.strip())]
    assert len({p.text for p in prompts if p}) > 2000


def test_every_slot_is_named_by_some_template() -> None:
    text = json.dumps(templates())
    assert [name for name in templates()["slots"] if f"{{{name}}}" not in text] == []


def test_the_same_number_gives_the_same_prompt() -> None:
    one, other = Source(DataPart()), Source(DataPart())
    assert [one(n) for n in range(50)] == [other(n) for n in reversed(range(50))][::-1]
    assert [one(n) for n in range(50)] != [Source(DataPart(seed=1))(n) for n in range(50)]


def test_evaluation_prompts_stay_out(tmp_path: Path) -> None:
    suite = [p.prompt for p in load_prompts()]
    other = "Count the red boats in the harbour and tell me how many of them have a white sail"
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": other}))
    banned = Banned.of(DataPart(exclude=(str(tmp_path / "x.jsonl"),)))
    for text in [*suite, other]:
        assert text in banned
        assert text.upper() + "!" in banned
        if len(text.split()) > 14:
            assert f"Please: {text} Thank you." in banned
    assert "Count the red boats in the harbour." not in banned
    lines = [{"prompt": suite[0]}, {"prompt": "Something else."}]
    (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = Source(DataPart(templates=0, own=0, files=1, paths=(str(tmp_path / "f.jsonl"),)))
    assert {p.text if p else None for p in map(source, range(6))} == {None, "Something else."}


def test_files_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]
    path.write_text('{"prompt": "one", "category": "c"}\n\n' + json.dumps({"messages": messages}))
    with path.open("a") as file:
        file.write('\n{"turns": ["three", "four"], "kind": "k"}')
    assert [(p.kind, p.text) for p in read_prompts(str(path))] == [("c", "one"), ("mine", "two"), ("k", "three")]
    assert [p.later for p in read_prompts(str(path))] == [(), (), ("four",)]
    assert "FOUR" in Banned.of(DataPart(exclude=(str(path),)))
    for line in (
        "[1]",
        "{",
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"messages": []}',
        '{"turns": []}',
        '{"text": "x"}',
        "3",
    ):
        path.write_text('{"prompt": "one"}\n' + line)
        with pytest.raises(DamagedFile, match="line 2"):
            read_prompts(str(path))
    with pytest.raises(ModelNotFound, match="nothing"):
        read_prompts("nothing.jsonl")


def test_answers_are_the_targets_own(made: TrainConfig) -> None:
    engine = load_engine(made.target, made.data.max_length, 1)
    chats = list(read_all(made.data_folder))
    assert {chat.greedy for chat in chats} == {chat.heldout for chat in chats} == {True, False}
    for chat in [chat for chat in chats if chat.greedy][:3]:
        from ddtree.config import SamplingParams

        (alone,) = engine.generate([chat.ids[: chat.prompt].tolist()], [SamplingParams(chat.answer)])
        assert alone.token_ids == chat.ids[chat.prompt :].tolist()
    for chat in chats:
        assert len(chat.ids) <= made.data.max_length
        assert chat.answer <= made.data.max_tokens
        assert chat.ids[chat.prompt - 1] != END


def test_a_killed_run_goes_on_and_gives_the_same_shards(made: TrainConfig, fresh: TrainConfig) -> None:
    first, second = (shard_path(fresh.data_folder, n) for n in (0, 1))
    before, untouched = list(read_all(fresh.data_folder)), os.stat(first).st_mtime_ns
    second.rename(second.with_suffix(".part"))  # as a kill in the midst of writing leaves it
    assert generate_data(fresh, quiet=True)["written"] == 1
    assert os.stat(first).st_mtime_ns == untouched
    assert same(list(read_all(fresh.data_folder)), before)


def test_time_that_is_up_leaves_the_rest(fresh: TrainConfig) -> None:
    more = replace(fresh, data=replace(fresh.data, chats=24))
    found = generate_data(more, max_minutes=1e-9, quiet=True)
    assert (found["shards"], found["left"], found["written"]) == (2, 1, 0)


def test_workers_share_the_shards(made: TrainConfig, tmp_path: Path) -> None:
    """Two of them make what one makes, in a folder apart from the run's; the check reads it all."""
    elsewhere = replace(made, data=replace(made.data, folder=str(tmp_path / "shared")))
    first = generate_data(elsewhere, quiet=True, worker=(1, 2))
    assert (first["shards"], first["left"], first["written"]) == (1, 1, 1)
    assert not shard_path(elsewhere.data_folder, 0).exists()
    assert check_data(elsewhere)["left"] == 1
    assert generate_data(elsewhere, quiet=True, worker=(0, 2))["left"] == 0
    assert same(list(read_all(elsewhere.data_folder)), list(read_all(made.data_folder)))
    found = check_data(elsewhere)
    assert (found["shards"], found["left"], found["answers"]) == (2, 0, sum(found["kinds"].values()))
    assert found["tokens"] == sum(len(chat.ids) for chat in read_all(made.data_folder))
    shard_path(elsewhere.data_folder, 0).write_bytes(b"12345678 nonsense")
    with pytest.raises(DamagedFile, match="no whole shard"):
        check_data(elsewhere)


def test_later_turns_by_template_or_by_the_target() -> None:
    source = Source(DataPart(templates=0.5, own=0.5))
    said = [source.followup(number, 1) for number in range(400)]
    assert 100 < sum(text is None for text in said) < 300
    assert not any(text and ("{" in text or "@" in text) for text in said)
    assert said != [source.followup(number, 2) for number in range(400)]
    assert {source.start(number) for number in range(400)} > {"", "def "}


def test_other_settings_in_the_same_folder_are_refused(fresh: TrainConfig) -> None:
    with pytest.raises(InvalidOption, match="another settings"):
        generate_data(replace(fresh, data=replace(fresh.data, seed=5)), quiet=True)


def test_own_prompts_and_later_turns(made: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target writes the user's words behind the template's own header, and the next turn has the whole chat."""
    config = replace(made, data=replace(made.data, templates=0.0, own=1.0, turns=2, sampled=0.0))
    engine = load_engine(config.target, 200, 4)
    source = Source(config.data)
    maker = ChatMaker(config, EngineAnswers(engine), source)
    asked: list[list[int]] = []
    real = maker._generate

    def answer(prompts: list[list[int]], params: list[Any]) -> Any:
        asked.extend(prompts)
        if prompts and prompts[0][-1] != engine.text.encode("<|assistant|>")[0]:
            return [([], f"What is the number {len(asked)}?") for _ in prompts]
        return [(tokens, "Well.") for tokens, _ in real(prompts, params)]

    monkeypatch.setattr(maker, "_generate", answer)
    chats = maker.chats(range(2))
    assert len(chats) == 4
    texts = [engine.text.decode(chat.ids[: chat.prompt].tolist()) for chat in chats]
    assert texts[0] in texts[2]
    assert "Well." in texts[2]
    user = engine.text.encode("<|user|>")
    assert asked[:2] == [user + engine.text.encode(source.start(number)) for number in range(2)]
    assert chats[0].heldout == chats[2].heldout


def test_shards_hold_what_was_put_in(tmp_path: Path) -> None:
    chats = [Chat(np.arange(n, dtype=np.int32), n // 2, "ab"[n % 2], n > 3, n > 4) for n in (2, 5, 9)]
    write_shard(tmp_path / "s.safetensors", chats, ["a", "b"])
    assert same(read_shard(tmp_path / "s.safetensors", ["a", "b"]), chats)
    large = [Chat(np.array([1, 70000, 128255], np.int32), 1, "a", True, False)]  # beyond 16 bits
    write_shard(tmp_path / "s.safetensors", large, ["a"])
    assert same(read_shard(tmp_path / "s.safetensors", ["a"]), large)
    write_shard(tmp_path / "s.safetensors", [], ["a"])
    assert read_shard(tmp_path / "s.safetensors", ["a"]) == []
    (tmp_path / "s.safetensors").write_bytes(b"12345678 nonsense")
    with pytest.raises(DamagedFile, match="no whole shard"):
        read_shard(tmp_path / "s.safetensors", ["a"])


def test_data_of_another_vocabulary_are_refused(fresh: TrainConfig, tmp_path: Path) -> None:
    manifest = fresh.data_folder / "data.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"vocab_size": 9}))
    from ddtree.training.fit import fit

    with pytest.raises(InvalidOption, match="9 tokens"):
        fit(fresh, quiet=True)


def test_the_whole_file_reaches_the_configuration(tmp_path: Path, tiny_target: Path) -> None:
    path = run_file(tmp_path / "run.toml", tiny_target)
    config = read(path, ["fit.steps=7", "fit.objective=kl", "eval.budgets=[3, 5]", "fit.lr=1"])
    assert (config.fit.steps, config.fit.objective, config.eval.budgets, config.fit.lr) == (7, "kl", (3, 5), 1.0)
    assert config.data.max_length == 200
