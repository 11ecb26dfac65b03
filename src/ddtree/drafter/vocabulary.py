"""Which tokens a drafter drafts: a list by frequency beside its weights, of which drafts may use the first N alone.

A target's head is most of what a draft reads where the vocabulary is large and the drafter small. A token that is not
on the list is never drafted; the target chooses it all the same, so no answer changes. The file is JSON, since loaders
of Hugging Face folders take every .safetensors file for weights.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.config import DRAFT_VOCABULARY
from ddtree.errors import DamagedFile, InvalidOption, ModelNotFound
from ddtree.layers.fields import Fields, read_config

PARAM = "draft_vocab"


def by_frequency(answers: Tensor, prompts: Tensor, first: Sequence[int] = ()) -> list[int]:
    """All token ids, the most frequent first: those of `first`, then by their number in answers, in prompts, by id.

    answers, prompts: [V] int64, how often each token occurs in what the target wrote, and in what it was asked. Ties go
    to the lower id, which most tokenizers merged earlier, for it was more frequent. first: ids that every cut must
    hold, such as those that end an answer.
    """
    head = list(dict.fromkeys(first))
    # Stable sorts, the least important first.
    order = torch.argsort(prompts, descending=True, stable=True)
    order = order[torch.argsort(answers[order], descending=True, stable=True)]
    kept = set(head)
    return head + [token for token in order.tolist() if token not in kept]


def write_vocabulary(path: Path, ids: Sequence[int], size: int, about: dict[str, Any] | None = None) -> None:
    """A list beside a drafter's weights (`DRAFT_VOCABULARY` in its folder), whole or not at all.

    Args:
        ids: the most frequent first, each once.
        size: how many of them are used where nobody asks for another number.
        about: for people: what was counted.
    Raises ValueError for a size that the list does not have.
    """
    if not 1 <= size <= len(ids):
        raise ValueError(f"size {size} of a list of {len(ids)} tokens")
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"about": about or {}, "size": size, "token_ids": list(ids)}) + "\n", encoding="utf-8")
    os.replace(part, path)


def read_vocabulary(path: Path, vocab_size: int) -> tuple[list[int], int]:
    """A list and its own size, see `write_vocabulary`; vocab_size: tokens that the target has.

    Raises ModelNotFound or DamagedFile, naming the file and what is wrong.
    """
    if not os.path.isfile(path):  # false for what no file can be called, where Path raises
        raise ModelNotFound(f"{path} does not exist: name a file that is a list of draft tokens", param=PARAM)
    fields = Fields(read_config(path.parent, path.name), f"the list {path}")
    ids, size = list(fields.integers("token_ids")), fields.size("size")
    problem = None
    if size > len(ids):
        problem = f"size {size}, and {len(ids)} token_ids"
    elif len(set(ids)) < len(ids):
        problem = f"token {Counter(ids).most_common(1)[0][0]} more than once"
    elif any(not 0 <= token < vocab_size for token in ids):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        problem = f"token {wrong}, and the target's vocabulary has {vocab_size} tokens"
    if problem:
        raise DamagedFile(f"{path} has {problem}: make it anew for this target, or use draft_vocab full", param=PARAM)
    return ids, size


def choose_vocabulary(setting: str, folder: Path, vocab_size: int) -> Tensor | None:
    """The tokens that drafts are made of: [N] int64, ascending, so that ties go to the lowest id; None: all.

    setting: auto (what the drafter's `folder` says; all where it says nothing), full, a number (the first so many of
    the folder's list), or the path of another list.
    Raises InvalidOption, ModelNotFound or DamagedFile.
    """
    own = folder / DRAFT_VOCABULARY
    if setting == "full" or (setting == "auto" and not own.exists()):
        return None
    if re.fullmatch("[0-9]{1,18}", setting):
        if not own.exists():
            raise InvalidOption(
                f"draft_vocab {setting} needs a list by frequency, and {folder} holds no {DRAFT_VOCABULARY}: leave it"
                " at auto, or name a file",
                param=PARAM,
            )
        (ids, _), size = read_vocabulary(own, vocab_size), int(setting)
        if size > len(ids):
            raise InvalidOption(
                f"draft_vocab {size} is more than the {len(ids)} tokens of {own}: ask for fewer, or for full",
                param=PARAM,
            )
    else:
        ids, size = read_vocabulary(own if setting == "auto" else Path(setting), vocab_size)
    return torch.tensor(sorted(ids[:size]), dtype=torch.int64)
