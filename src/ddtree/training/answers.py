"""Who answers prompts for data: the engine, or on a GPU a decoder of many rows at once."""

import logging
import zlib
from collections.abc import Sequence
from typing import Protocol

from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.engine import Engine
from ddtree.engine.device import choose_device, choose_dtype, standing_on
from ddtree.engine.loading import HALVES, load_pair
from ddtree.engine.text import Text
from ddtree.errors import InvalidOption
from ddtree.kernels.backend import usable
from ddtree.target import LlamaTarget, Target
from ddtree.training.config import DataPart, TargetPart
from ddtree.training.decode import Decoder

log = logging.getLogger("ddtree.training")

Answered = list[tuple[list[int], str]]  # token ids with the end id, and their text


class Answers(Protocol):
    """A target with its tokenizer."""

    target: Target
    text: Text

    def __call__(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Answered:
        """Answers, each by its own max_tokens, temperature and seed."""


class EngineAnswers:
    """By the engine: every answer is what it would be alone."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.target, self.text = engine, engine.target, engine.text

    def __call__(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Answered:
        """See Answers."""
        return [(g.token_ids, g.text) for g in self.engine.generate(prompts, params)] if prompts else []


class BatchAnswers:
    """By `Decoder`: greedy answers are the engine's but for near-ties; drawn ones have one seed together."""

    def __init__(self, target: LlamaTarget, text: Text, batch: int, length: int, graphs: bool = False) -> None:
        """batch: prompts at once; length: tokens of prompt and answer; graphs: see Decoder."""
        self.target: Target = target
        self.text, self._decoder = text, Decoder(target, batch, length, graphs)

    def __call__(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Answered:
        """See Answers."""
        if not prompts:
            return []
        seed = zlib.crc32(",".join(str(p.seed) for p in params).encode())
        limits = [p.max_tokens or 0 for p in params]
        with standing_on(self.target.spec.device):
            found = self._decoder.answer(prompts, limits, [p.temperature for p in params], seed)
        ends = self.target.spec.end_ids
        return [(ids, self.text.decode(ids[:-1] if ids[-1] in ends else ids)) for ids in found]


def load_answers(target: TargetPart, data: DataPart) -> Answers:
    """As data.decoder says; auto: by CUDA graphs on a GPU, for a target that `Decoder` can run, else by the engine.

    Raises as Engine.load, and InvalidOption where what was asked for cannot be had.
    """
    device, how = choose_device(target.device), data.decoder
    if how == "graphs" and device.type != "cuda":
        raise InvalidOption(
            f"data.decoder graphs needs a GPU, and this is {device}: use auto or plain", param="decoder"
        )
    if how in ("graphs", "plain") or (how == "auto" and device.type == "cuda"):
        with standing_on(device):
            found = load_pair(EngineConfig(target.model, "none", Speculation("ar"), target.device, target.dtype))
        if isinstance(found.target, LlamaTarget):
            graphs = device.type == "cuda" and how != "plain"
            log.info(
                "answers: %d at once on %s, %s", data.batch, device, "by CUDA graphs" if graphs else "without graphs"
            )
            return BatchAnswers(found.target, Text(found.folder), data.batch, data.max_length, graphs)
        if how != "auto":
            raise InvalidOption(f"data.decoder {how} cannot run {target.model}: use engine", param="decoder")
        log.warning("answers: by the engine, which is slower: no decoder of many rows can run %s", target.model)
    return EngineAnswers(load_engine(target, data.max_length, data.batch))


def load_engine(target: TargetPart, max_length: int, batch: int) -> Engine:
    """The target alone, decoding plainly; for many rows at once, so what is fastest for them is taken on a GPU.

    Raises as Engine.load.
    """
    device = choose_device(target.device)
    free = usable(device) and choose_dtype(target.dtype, device) in HALVES  # whether there is a choice of numerics
    config = EngineConfig(
        target.model, "none", Speculation("ar"), target.device, target.dtype, max_length,
        max_running_requests=batch,
        max_tree_budget=1,  # no trees are laid: no memory for them
        prefix_caching=False,
        numerics="fast" if free else "auto",
    )  # fmt: skip
    return Engine.load(config)
