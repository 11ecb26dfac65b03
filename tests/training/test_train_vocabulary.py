"""The list of draft tokens that is counted in shards."""

from pathlib import Path

import numpy as np
import pytest

from ddtree.config import DRAFT_VOCABULARY
from ddtree.drafter import read_vocabulary
from ddtree.errors import InvalidOption, ModelNotFound
from ddtree.training.shards import Chat, shard_path, write_manifest, write_shard
from ddtree.training.vocabulary import write_draft_vocabulary


def chat(prompt: list[int], answer: list[int], heldout: bool = False) -> Chat:
    return Chat(np.array(prompt + answer, np.int32), len(prompt), "chat", True, heldout)


def test_answers_count_before_prompts_and_held_out_chats_not_at_all(tmp_path: Path) -> None:
    data, folder = tmp_path / "data", tmp_path / "drafter"
    folder.mkdir()
    facts = {"model": "tiny", "vocab_size": 9, "end_ids": [8], "kinds": ["chat"], "settings": {"seed": 3}}
    with pytest.raises(ModelNotFound, match="ddtree train data"):
        write_draft_vocabulary(data, folder, 4)
    write_manifest(data, facts)
    write_shard(shard_path(data, 0), [chat([1, 1, 1, 7], [5, 2, 5]), chat([4, 4], [4] * 9, heldout=True)], ["chat"])
    write_shard(shard_path(data, 1), [chat([7, 3, 1], [2, 2, 6])], ["chat"])
    about = write_draft_vocabulary(data, folder, 4)
    ids, size = read_vocabulary(folder / DRAFT_VOCABULARY, 9)
    # the end; 2 three times, 5 twice, 6 once; of prompts 1, 7, 3; the rest by id
    assert (ids, size) == ([8, 2, 5, 6, 1, 7, 3, 0, 4], 4)
    assert about == {
        "model": "tiny", "settings": {"seed": 3}, "chats": 2, "answer_tokens": 6, "distinct_answer_tokens": 3,
    }  # fmt: skip
    for wrong in (0, 10):
        with pytest.raises(InvalidOption, match=f"from 1 to the vocabulary's 9, not {wrong}"):
            write_draft_vocabulary(data, folder, wrong)
