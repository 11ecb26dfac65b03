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
from ddtree.kernels.backend import usable
from ddtree.target import LlamaTarget, Target
from ddtree.training.config import TargetPart
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

    def __init__(self, target: LlamaTarget, text: Text, batch: int, length: int) -> None:
        """batch: prompts at once; length: tokens of prompt and answer."""
        self.target: Target = target
        self.text, self._decoder = text, Decoder(target, batch, length)

    def __call__(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Answered:
        """See Answers."""
        if not prompts:
            return []
        seed = zlib.crc32(",".join(str(p.seed) for p in params).encode())
        limits = [p.max_tokens or 0 for p in params]
        with standing_on(self.target.spec.device):
            found = self._decoder.answer(prompts, limits, [p.temperature for p in params], seed)
        return [(ids, self.text.decode(ids)) for ids in found]


def load_answers(target: TargetPart, max_length: int, batch: int) -> Answers:
    """On a GPU the decoder, where the target is one that it can run; else the engine. Raises as Engine.load."""
    device = choose_device(target.device)
    if device.type == "cuda":
        with standing_on(device):
            found = load_pair(EngineConfig(target.model, "none", Speculation("ar"), target.device, target.dtype))
        if isinstance(found.target, LlamaTarget):
            log.info("answers: %d at once by CUDA graphs on %s", batch, device)
            return BatchAnswers(found.target, Text(found.folder), batch, max_length)
        log.warning("answers: by the engine, which is slower: %s has no decoder of many rows", target.model)
    return EngineAnswers(load_engine(target, max_length, batch))


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
