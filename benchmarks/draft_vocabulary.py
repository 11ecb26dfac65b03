"""The list of tokens that a drafter drafts, counted in what `ddtree train data` made; what of answers it covers.

    python benchmarks/draft_vocabulary.py training/data --size 16384 --write DRAFTER_FOLDER

Coverage is of the answers of one chat in `--every`, chosen by its prompt, with a list counted in the others. The list
that is written counts all chats but those that `fit` holds out: answers first, then prompts, then by id. It holds the
whole vocabulary in this order, so that `--draft-vocab N` can cut it anywhere; `--size` is what `auto` takes.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from common import finish, machine, parser
from ddtree.drafter import by_frequency
from ddtree.training.shards import Chat, read_all, read_manifest
from ddtree.training.vocabulary import count, write_draft_vocabulary

SIZES = "4096,8192,12288,16384,24576"


def coverage(order: Sequence[int], chats: Sequence[Chat], sizes: Sequence[int]) -> dict[str, Any]:
    """Part of the answers' tokens that are among the first N of a list: of all, of a middling answer, the worst kind.

    A model that has lost its way may repeat one rare token: that moves the first and the last, not the second.
    """
    rank = torch.empty(len(order), dtype=torch.int64)
    rank[torch.tensor(order)] = torch.arange(len(order))
    places: dict[str, list[Tensor]] = {}
    for chat in chats:
        places.setdefault(chat.kind, []).append(rank[torch.from_numpy(chat.ids[chat.prompt :]).long()])
    alone = [found for kind in places.values() for found in kind]
    by_kind = {kind: torch.cat(found) for kind, found in places.items()}
    pooled = torch.cat(list(by_kind.values()))

    def part(where: Tensor, size: int) -> float:
        return round((where < size).double().mean().item(), 5)

    found: dict[str, Any] = {}
    for size in sizes:
        worst = min(by_kind, key=lambda kind: part(by_kind[kind], size))
        middle = round(median(part(answer, size) for answer in alone), 5)
        found[str(size)] = {
            "answers": part(pooled, size),
            "median": middle,
            "worst_kind": {worst: part(by_kind[worst], size)},
        }
    return found


def apart(chats: Sequence[Chat], every: int) -> tuple[list[Chat], list[Chat]]:
    """Chats to count, and one of `every` to try; those of one prompt stay together."""
    tried = [zlib.crc32(chat.ids[: chat.prompt].tobytes()) % every == 0 for chat in chats]
    return (
        [chat for chat, out in zip(chats, tried, strict=True) if not out],
        [chat for chat, out in zip(chats, tried, strict=True) if out],
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("data", type=Path, help="the folder of shards that `ddtree train data` wrote")
    options.add_argument("--sizes", default=SIZES)
    options.add_argument("--every", type=int, default=5)
    options.add_argument("--size", type=int, default=16384, help="what `auto` takes of the list that is written")
    options.add_argument("--write", type=Path, help="a drafter's folder, which gets the list")
    args = options.parse_args()
    facts = read_manifest(args.data)
    vocab, ends = facts["vocab_size"], facts["end_ids"]
    chats = list(read_all(args.data))
    counted, tried = apart(chats, args.every)
    sizes = [int(size) for size in args.sizes.split(",")]
    report = machine() | {
        "chats": len(chats),
        "answer_tokens": sum(chat.answer for chat in chats),
        "tried_chats": len(tried),
        "tried_answer_tokens": sum(chat.answer for chat in tried),
        "coverage": coverage(by_frequency(*count(counted, vocab), ends), tried, sizes),
        "coverage_without_counting": coverage(range(vocab), tried, sizes),  # the tokenizer's own order
    }
    if args.write is not None:
        report["written"] = write_draft_vocabulary(args.data, args.write, args.size)
    finish(report, args.output)


if __name__ == "__main__":
    main()
