"""`ddtree train data`: the target answers prompts of many kinds, and the token ids are kept in shards."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from ddtree.errors import InvalidOption
from ddtree.training.answers import Answers, load_answers
from ddtree.training.chats import ChatMaker
from ddtree.training.config import TrainConfig, as_dict
from ddtree.training.prompts import Source
from ddtree.training.shards import Chat, read_manifest, read_shard, shard_path, shard_paths, write_manifest, write_shard

log = logging.getLogger("ddtree.training")

FREE = ("chats", "batch", "folder", "decoder")  # fields that may change while a folder grows
Worker = tuple[int, int]  # this one's number from 0, and how many there are


def generate_data(
    config: TrainConfig,
    answers: Answers | None = None,
    max_minutes: float | None = None,
    quiet: bool = False,
    worker: Worker = (0, 1),
) -> dict[str, Any]:
    """Write the shards that are missing. answers: instead of those of the target that the configuration names.

    worker: of several that write into one folder at the same time, each takes the shards whose number modulo their
    count is its own. Returns what is there now: shards, chats, tokens. Raises InvalidOption where the folder holds
    other data.
    """
    c, began = config.data, time.monotonic()
    source = Source(c)
    answers = answers or load_answers(config.target, c)
    maker = ChatMaker(config, answers, source)
    write_manifest(config.data_folder, _facts(config, answers, source))
    shards = -(-c.chats // c.shard_chats)  # whole ones, so that more chats are more shards
    mine = range(worker[0], shards, worker[1])
    written, tokens = 0, 0
    with tqdm(total=len(mine) * c.shard_chats, unit="chat", disable=quiet) as bar:
        for shard in mine:
            path = shard_path(config.data_folder, shard)
            if not path.exists():
                if max_minutes is not None and time.monotonic() - began > max_minutes * 60:
                    break
                chats = maker.chats(range(shard * c.shard_chats, (shard + 1) * c.shard_chats))
                write_shard(path, chats, source.kinds)
                written, tokens = written + 1, tokens + sum(chat.answer for chat in chats)
                log.info("shard %d: %d answers, %d of their tokens so far in %.0f s", shard, len(chats), tokens,
                         time.monotonic() - began)  # fmt: skip
            bar.update(c.shard_chats)
            bar.set_postfix(answer_tokens=tokens, tokens_s=int(tokens / (time.monotonic() - began)))
    left = sum(not shard_path(config.data_folder, shard).exists() for shard in range(shards))
    return {"folder": str(config.data_folder), "shards": shards - left, "left": left, "written": written,
            "answer_tokens_written": tokens, "refused": maker.refused}  # fmt: skip


def check_data(config: TrainConfig) -> dict[str, Any]:
    """Read every shard and count. Raises DamagedFile for one that is not whole, ModelNotFound where there are none."""
    manifest = read_manifest(config.data_folder)
    shards = -(-config.data.chats // config.data.shard_chats)
    paths = shard_paths(config.data_folder)
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for path in paths:
        for chat in read_shard(path, manifest["kinds"]):
            kinds[chat.kind] += 1
            counts.update(answers=1, tokens=len(chat.ids), answer_tokens=chat.answer, greedy=chat.greedy,
                          heldout=chat.heldout)  # fmt: skip
    left = sum(not shard_path(config.data_folder, shard).exists() for shard in range(shards))
    return {"folder": str(config.data_folder), "model": manifest["model"], "shards": len(paths), "left": left,
            **counts, "kinds": dict(sorted(kinds.items()))}  # fmt: skip


def _facts(config: TrainConfig, answers: Answers, source: Source) -> dict[str, Any]:
    """What must not change while a folder grows; the number of chats may."""
    spec = answers.target.spec
    settings = {k: v for k, v in as_dict(config.data).items() if k not in FREE}
    special = sorted(i for i, token in answers.text.backend.get_added_tokens_decoder().items() if token.special)
    return {"model": config.target.model, "vocab_size": spec.vocab_size, "end_ids": list(spec.end_ids),
            "special_ids": special, "kinds": source.kinds, "settings": settings}  # fmt: skip


def need_any(chats: Sequence[Chat], what: str) -> None:
    """Raises InvalidOption where there are none."""
    if not chats:
        raise InvalidOption(f"the data hold no {what}: raise data.chats or data.heldout, and run `ddtree train data`")
