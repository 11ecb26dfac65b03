"""The list of draft tokens, counted in a run's own data: see ddtree.drafter.vocabulary."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.config import DRAFT_VOCABULARY
from ddtree.drafter import by_frequency, write_vocabulary
from ddtree.errors import InvalidOption
from ddtree.training.shards import Chat, read_all, read_manifest


def count(chats: Iterable[Chat], vocab: int) -> tuple[Tensor, Tensor]:
    """How often each token occurs in answers and in prompts: [V] int64 each."""
    answers, prompts = (torch.zeros(vocab, dtype=torch.int64) for _ in range(2))
    for chat in chats:
        ids = torch.from_numpy(chat.ids).long()
        prompts += torch.bincount(ids[: chat.prompt], minlength=vocab)
        answers += torch.bincount(ids[chat.prompt :], minlength=vocab)
    return answers, prompts


def write_draft_vocabulary(data: Path, folder: Path, size: int) -> dict[str, Any]:
    """Lay the list beside a drafter's weights, counted in all chats but those that `fit` holds out.

    The list has the whole vocabulary in order, so that it can be cut anywhere.

    Args:
        data: the folder of shards.
        folder: the drafter's; a list that is there is replaced.
        size: tokens that are used where nobody asks for another number.
    Returns: what was counted. Raises ModelNotFound or DamagedFile for the data, InvalidOption for the size.
    """
    facts = read_manifest(data)
    vocab = facts["vocab_size"]
    if not 1 <= size <= vocab:
        raise InvalidOption(f"size must be from 1 to the vocabulary's {vocab}, not {size}", param="size")
    chats = [chat for chat in read_all(data) if not chat.heldout]
    answers, prompts = count(chats, vocab)
    about = {
        "model": Path(facts["model"]).name,  # the file travels: no path of whoever made it
        "settings": facts["settings"],
        "chats": len(chats),
        "answer_tokens": int(answers.sum()),
        "distinct_answer_tokens": int((answers > 0).sum()),
    }
    write_vocabulary(folder / DRAFT_VOCABULARY, by_frequency(answers, prompts, facts["end_ids"]), size, about)
    return about
