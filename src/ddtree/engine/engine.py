"""The engine's public face: load once, then generate or stream."""

import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch

from ddtree import __version__, models
from ddtree.config import EngineConfig, SamplingParams, Speculation
from ddtree.drafter import DFlashDrafter, Drafter
from ddtree.engine.device import choose_device, choose_dtype
from ddtree.engine.observer import Observer, StageTimer, Unobserved
from ddtree.engine.output import RequestOutput
from ddtree.engine.session import CachePool, Counts, Session
from ddtree.engine.text import Text
from ddtree.errors import ContextLengthExceeded, InvalidOption
from ddtree.layers import packs
from ddtree.target import LlamaTarget, Target


@dataclass(frozen=True)
class Shadow:
    """What shadow-linear saw of the tree, from the roots that linear visited (a real tree run visits others)."""

    linear_acceptance_length: float | None
    tree_acceptance_length: float | None
    agree: bool | None  # the tree's tokens are those committed later; None without a round
    overhead: float | None = None  # round time over linear's: `ddtree bench` measures it, a single run cannot


@dataclass(frozen=True)
class Generation:
    """One finished request."""

    text: str
    token_ids: list[int]  # the end-of-sequence token included, where one ended it
    finish_reason: str  # "stop": end token or stop string; "length": max_tokens or the context
    mode: str  # the mode that ran
    rounds: int  # verify forwards, prefill excluded
    acceptance_length: float | None  # (accepted + 1) / rounds, before cuts; None without a round
    prompt_tokens: int
    seconds: float  # the whole request
    prefill_seconds: float
    decode_seconds: float
    stages: dict[str, float] = field(default_factory=dict)  # seconds by stage, where a StageTimer looked on
    shadow: Shadow | None = None

    @property
    def tok_s(self) -> float:
        """Generated tokens per second of the whole request."""
        return len(self.token_ids) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Chunk:
    """What one round adds to a stream. The last chunk has finish_reason and generation."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    generation: Generation | None = None


class Engine:
    """A target, its drafter and its tokenizer, ready to generate. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        text: Text,
        config: EngineConfig,
        names: tuple[str, str | None] | None = None,
    ) -> None:
        """names: what info() calls the target and the drafter; those of config when None.

        Raises InvalidOption where the mode needs a drafter and there is none, or max_model_len is too long.
        """
        self.target, self.drafter, self.text, self.config = target, drafter, text, config
        self.names = names or (config.model, config.drafter if drafter else None)
        self.speculation = config.speculation
        self.max_model_len = config.max_model_len or target.spec.max_position
        if self.max_model_len > target.spec.max_position:
            raise InvalidOption(
                f"max_model_len {self.max_model_len} is more than the model's {target.spec.max_position}: lower it",
                param="max_model_len",
            )
        self._check_drafter(self.speculation)
        if drafter:
            target.tap(drafter.config.target_layer_ids)
        self._pool = CachePool(target, drafter)

    @classmethod
    def load(cls, config: EngineConfig) -> "Engine":
        """Resolve the names and load everything. Raises DDTreeError for whatever a user can mend."""
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        folder = models.resolve_model(config.model)
        drafter_name = "none" if config.speculation.mode == "ar" and config.drafter == "auto" else config.drafter
        drafter_folder = None if drafter_name == "none" else models.resolve_drafter(drafter_name, config.model)
        target = LlamaTarget.load(folder, dtype, device)
        drafter = None
        if drafter_folder is not None:
            sizes = (target.spec.vocab_size, target.spec.hidden_size, target.spec.num_layers)
            drafter = DFlashDrafter.load(drafter_folder, target.embed, target.head, sizes, dtype, device)
        names = (config.model, drafter_folder.name if drafter_folder else None)
        return cls(target, drafter, Text(folder), config, names)

    def without_drafter(self) -> "Engine":
        """The same target decoding plainly, as it does where no drafter was loaded: the baseline of a comparison."""
        plain = replace(self.config, speculation=replace(self.speculation, mode="ar"))
        return Engine(self.target, None, self.text, plain, (self.names[0], None))

    def info(self) -> dict[str, Any]:
        """What is loaded and what runs it, as plain values."""
        spec = self.target.spec
        return {
            "model": self.names[0],
            "drafter": self.names[1],
            "device": str(spec.device),
            "dtype": str(spec.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "linear": "packed" if packs(spec.device.type, spec.dtype) else "plain",
            "max_model_len": self.max_model_len,
            "versions": {
                "ddtree": __version__,
                "torch": torch.__version__,
                "transformers": version("transformers"),
                "python": platform.python_version(),
            },
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        speculation: Speculation | None = None,
        observer: Observer | None = None,
    ) -> list[Generation]:
        """Decode prompts as one batch, each with its own parameters; each answer is what it would be alone."""
        run = _Run(self, prompts, params, speculation or self.speculation, observer)
        try:
            for _ in run.rounds():
                pass
        finally:
            run.session.close()
        return [run.generation(index) for index in range(len(prompts))]

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        speculation: Speculation | None = None,
        observer: Observer | None = None,
    ) -> Iterator[Chunk]:
        """Decode one prompt and yield what each round adds. Closing the generator frees everything.

        What is wrong with the request is raised here; the generator itself only decodes.
        """
        speculation = speculation or self.speculation
        self._check_drafter(speculation)
        self.remaining(prompt, params)
        return self._chunks(prompt, params, speculation, observer)

    def _chunks(
        self, prompt: Sequence[int], params: SamplingParams, speculation: Speculation, observer: Observer | None
    ) -> Iterator[Chunk]:
        run = _Run(self, [prompt], [params], speculation, observer)
        output = run.outputs[0]
        try:
            for ((text, ids),) in run.rounds():
                if output.finish_reason:
                    yield Chunk(text, ids, output.finish_reason, run.generation(0))
                else:
                    yield Chunk(text, ids)
        finally:
            run.session.close()

    def remaining(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Tokens a request may generate. Raises for an empty prompt, and for one that does not fit the context."""
        limit, size, vocab = self.max_model_len, len(prompt), self.target.spec.vocab_size
        if not size:
            raise InvalidOption("the prompt is empty: give at least one token of text", param="prompt")
        if not all(0 <= token < vocab for token in prompt):
            raise InvalidOption(f"token ids must be from 0 to {vocab - 1}", param="prompt")
        if size >= limit:
            raise ContextLengthExceeded(
                f"the prompt has {size} tokens, and the context holds {limit} with the answer: shorten the prompt"
                " or raise max_model_len",
                param="prompt",
            )
        if params.max_tokens is not None and size + params.max_tokens > limit:
            raise ContextLengthExceeded(
                f"the prompt's {size} tokens and max_tokens {params.max_tokens} exceed the context of {limit}:"
                f" ask for at most {limit - size} tokens",
                param="max_tokens",
            )
        return limit - size if params.max_tokens is None else params.max_tokens

    def _check_drafter(self, speculation: Speculation) -> None:
        if speculation.mode != "ar" and self.drafter is None:
            raise InvalidOption(
                f"mode {speculation.mode} needs a drafter: load one with --drafter, or use mode ar", param="mode"
            )


class _Run:
    """One batch of requests on its way: session, texts, times."""

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        speculation: Speculation,
        observer: Observer | None,
    ) -> None:
        if len(prompts) != len(params) or not prompts:
            raise InvalidOption(f"{len(prompts)} prompts and {len(params)} parameters: give one each, at least one")
        engine._check_drafter(speculation)
        remaining = [engine.remaining(p, s) for p, s in zip(prompts, params, strict=True)]
        self.mode, self.observer, self.prompts = speculation.mode, observer, prompts
        self.started = time.perf_counter()
        self.prefilled = self.started
        self.ended = [self.started] * len(prompts)
        self.session = Session(engine._pool, speculation, prompts, params, remaining, observer or Unobserved())
        ends = frozenset(engine.target.spec.end_ids)
        self.outputs = [
            RequestOutput(engine.text.stream(), p.stop, frozenset() if p.ignore_eos else ends) for p in params
        ]

    def rounds(self) -> Iterator[list[tuple[str, list[int]]]]:
        """Per round, every sequence's new text and token ids; prefill counts as the first."""
        yield self._take(self.session.prefill())
        while self.session.running:
            yield self._take(self.session.step())

    def _take(self, tokens: list[list[int]]) -> list[tuple[str, list[int]]]:
        now = time.perf_counter()
        if self.prefilled == self.started:
            self.prefilled = now
        done = self.session.batch.state.done.tolist()
        news: list[tuple[str, list[int]]] = []
        for index, (output, new) in enumerate(zip(self.outputs, tokens, strict=True)):
            news.append(("", []) if output.finished else self._push(index, output, new, done[index]))
        return news

    def _push(self, index: int, output: RequestOutput, new: list[int], last: bool) -> tuple[str, list[int]]:
        before = len(output.token_ids)
        text = output.push(new)
        if last:
            text += output.finish("length")
        if output.finished:
            self.session.finish(index)
            self.ended[index] = time.perf_counter()
        return text, output.token_ids[before:]

    def generation(self, index: int) -> Generation:
        """The finished request."""
        output, counts = self.outputs[index], self.session.counts[index]
        return Generation(
            text=output.text,
            token_ids=list(output.token_ids),
            finish_reason=output.finish_reason or "length",
            mode=self.mode,
            rounds=counts.rounds,
            acceptance_length=counts.acceptance_length,
            prompt_tokens=len(self.prompts[index]),
            seconds=self.ended[index] - self.started,
            prefill_seconds=self.prefilled - self.started,
            decode_seconds=max(self.ended[index] - self.prefilled, 0.0),
            stages=dict(self.observer.seconds) if isinstance(self.observer, StageTimer) else {},
            shadow=_shadow(counts) if self.mode == "shadow-linear" else None,
        )


def _shadow(counts: Counts) -> Shadow:
    return Shadow(
        linear_acceptance_length=counts.acceptance_length,
        tree_acceptance_length=counts.tree_acceptance_length,
        agree=counts.agree if counts.rounds else None,
    )
