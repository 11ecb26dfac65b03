"""The engine's public face: load once, then generate or stream."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ddtree.config import EngineConfig, SamplingParams, Speculation, Unset
from ddtree.drafter import Drafter
from ddtree.engine.about import describe, rounds_of
from ddtree.engine.context import SequenceContext
from ddtree.engine.loading import load_pair
from ddtree.engine.memory import Planner, device_memory
from ddtree.engine.observer import Observer, StageTimer, Unobserved
from ddtree.engine.output import RequestOutput
from ddtree.engine.prompts import DevicePrompts, Prompts
from ddtree.engine.request import Request, draw_seed
from ddtree.engine.result import Chunk, Generation
from ddtree.engine.round import Lane
from ddtree.engine.runner import DeviceRunner, HostRunner
from ddtree.engine.sampling import RowSampler, check_token_ids
from ddtree.engine.scheduler import Scheduler
from ddtree.engine.slots import SlotStore
from ddtree.engine.text import Text
from ddtree.errors import ContextLengthExceeded, DDTreeError, InvalidOption
from ddtree.kernels.backend import usable
from ddtree.plan import Load, fit
from ddtree.target import Target

if TYPE_CHECKING:
    from ddtree.engine.grammar import GrammarCompiler, GrammarMatcher

CPU_PREFILL_CHUNK = 128  # about two rounds of eight sequences: what a prompt may hold running answers up by
GPU_PREFILL_CHUNK = 1024


class Engine:
    """A target, its drafter and its tokenizer, ready to generate. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        text: Text,
        config: EngineConfig,
        names: tuple[str, str | None] | None = None,
        store: SlotStore | None = None,
    ) -> None:
        """names: what info() calls the target and the drafter; those of config when None. store: another engine's
        caches, shared with it.

        Raises InvalidOption where the mode needs a drafter and there is none, the context is longer than the model's,
        or the planned memory does not fit.
        """
        self.target, self.drafter, self.text, self.config = target, drafter, text, config
        self.names = names or (config.model, config.drafter if drafter else None)
        self.speculation = self.settled(config.speculation)
        self.max_model_len = config.max_model_len or target.spec.max_position
        if self.max_model_len > target.spec.max_position:
            raise InvalidOption(
                f"max_model_len {self.max_model_len} is more than the model's {target.spec.max_position}: lower it",
                param="max_model_len",
            )
        self._check_speculation(self.speculation)
        if drafter:
            target.tap(drafter.config.target_layer_ids)
        chunk = config.prefill_chunk or (CPU_PREFILL_CHUNK if target.spec.device.type == "cpu" else GPU_PREFILL_CHUNK)
        self._store = store or self._make_store(chunk)
        self.scheduler = Scheduler(
            target, drafter, self._store, self._request, chunk, config.prefix_caching, *self._make_runners()
        )

    @classmethod
    def load(cls, config: EngineConfig) -> "Engine":
        """Resolve the names and load everything. Raises DDTreeError for whatever a user can mend."""
        found = load_pair(config)
        return cls(found.target, found.drafter, Text(found.folder), config, found.names)

    def warm_up(self) -> None:
        """Compile kernels, and capture the rounds of the engine's own speculation for batches of every size.

        Before the first request: then none waits for that. Other rounds are captured when they are first needed. There
        is nothing to do on a CPU. Raises InvalidOption where the memory does not suffice.
        """
        spec = self.target.spec
        if spec.device.type != "cuda":
            return
        sampler = RowSampler(SamplingParams(), 0, (), spec.vocab_size, spec.device)
        try:
            text = SequenceContext.of(self.speculation, [])
            self.scheduler.warm_up(Lane(self.speculation, sampler, self.drafter, text))
        except torch.OutOfMemoryError as error:
            raise InvalidOption(
                f"the memory of {spec.device} does not suffice for the first rounds ({error}): lower"
                " max_running_requests, max_model_len or max_tree_budget",
                param="max_running_requests",
            ) from error

    def without_drafter(self) -> "Engine":
        """The same target decoding plainly, as it does where no drafter was loaded: the baseline of a comparison.

        Both share their caches' slots, so they may take turns, also within an answer.
        """
        plain = replace(self.config, speculation=replace(self.speculation, mode="ar"))
        return Engine(self.target, None, self.text, plain, (self.names[0], None), self._store)

    def info(self) -> dict[str, Any]:
        """What is loaded and what runs it, as plain values."""
        return describe(
            self.config, self.target, self.drafter, self.names, self.speculation, self._store, self.max_model_len
        )

    def settled(self, speculation: Speculation) -> Speculation:
        """With the numbers that rounds take: what was not chosen follows the device. See Speculation.settled."""
        return speculation.settled(self.target.spec.device.type, self.config.largest_budget)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        speculation: Speculation | None = None,
        observer: Observer | None = None,
    ) -> list[Generation]:
        """Decode prompts together, each with its own parameters; each answer is what it would be alone."""
        if len(prompts) != len(params) or not prompts:
            raise InvalidOption(f"{len(prompts)} prompts and {len(params)} parameters: give one each, at least one")
        speculation = speculation or self.speculation
        for prompt, sampling in zip(prompts, params, strict=True):
            self.check(prompt, sampling, speculation)
        requests = [self.scheduler.add(p, s, speculation) for p, s in zip(prompts, params, strict=True)]
        try:
            return [self._finish(request, observer) for request in requests]
        finally:
            for request in requests:
                self.scheduler.abort(request)

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        speculation: Speculation | None = None,
        observer: Observer | None = None,
    ) -> Iterator[Chunk]:
        """Decode one prompt and yield what each round adds. Closing the generator frees everything.

        What is wrong with the request is raised here; the generator itself only decodes. Several streams may be open:
        they share rounds, whichever is read.
        """
        speculation = speculation or self.speculation
        self.check(prompt, params, speculation)
        return self._stream(prompt, params, speculation, observer)

    def check(self, prompt: Sequence[int], params: SamplingParams, speculation: Speculation | None = None) -> None:
        """Raises the DDTreeError that a request would meet. Safe to call from another thread.

        It makes the matcher of the request's grammar, so the request itself finds the grammar compiled.
        """
        self._check_speculation(self.settled(speculation or self.speculation))
        self.remaining(prompt, params)
        check_token_ids(params, self.target.spec.vocab_size)
        self._matcher(params)

    def remaining(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Tokens a request may generate. Raises for an empty prompt, and for one that does not fit the context."""
        limit, size, vocab = self.max_model_len, len(prompt), self.target.spec.vocab_size
        if not size:
            raise InvalidOption("the prompt is empty: give at least one token of text", param="prompt")
        if not all(0 <= token < vocab for token in prompt):
            raise InvalidOption(f"token ids must be from 0 to {vocab - 1}", param="prompt")
        if size >= limit:
            wider = " or serve with a larger --max-model-len" if limit < self.target.spec.max_position else ""
            raise ContextLengthExceeded(
                f"the prompt has {size} tokens, and the context holds {limit} with the answer: shorten the prompt"
                + wider,
                param="prompt",
            )
        if params.max_tokens is not None and size + params.max_tokens > limit:
            raise ContextLengthExceeded(
                f"the prompt's {size} tokens and max_tokens {params.max_tokens} exceed the context of {limit}:"
                f" ask for at most {limit - size}",
                param="max_tokens",
            )
        return limit - size if params.max_tokens is None else params.max_tokens

    @cached_property
    def _grammars(self) -> "GrammarCompiler":
        """Made with the first request that has a grammar: it reads the whole vocabulary."""
        from ddtree.engine.grammar import GrammarCompiler

        return GrammarCompiler(self.text, self.target.spec.vocab_size, self.target.spec.end_ids)

    def _matcher(self, params: SamplingParams) -> "GrammarMatcher | None":
        """At the beginning of an answer. Raises InvalidOption for a grammar that cannot be used."""
        return None if params.grammar is None else self._grammars.matcher(params.grammar)

    def _make_runners(self) -> tuple[HostRunner | DeviceRunner, Prompts]:
        """Of rounds and of prompts: on the device where its kernels can be used, else laid by the host."""
        parts, graphs = (self.target, self.drafter, self._store), rounds_of(self.config, self.target) == "graphs"
        if usable(self.target.spec.device):
            return DeviceRunner(*parts, graphs, self.max_model_len), DevicePrompts(*parts, graphs)
        return HostRunner(*parts), Prompts(*parts)

    def _make_store(self, chunk: int) -> SlotStore:
        """Caches for every slot, if they and everything else fit the device's memory."""
        config = self.config
        captured = self.speculation if rounds_of(self.config, self.target) == "graphs" else None
        planner = Planner(self.target, self.drafter, chunk, captured)
        load = Load(config.max_running_requests, self.max_model_len, config.largest_budget)
        least = 1 if isinstance(config.speculation.tree_budget, Unset) else config.speculation.tree_budget
        plan = fit(planner, load, device_memory(self.target.spec.device), least)
        return SlotStore(self.target, self.drafter, load.requests, planner.length(load), plan)

    def _request(self, prompt: Sequence[int], params: SamplingParams, speculation: Speculation) -> Request:
        """Turn a request into what the scheduler runs. Raises as `check`, which may have been called or not."""
        speculation = self.settled(speculation)
        self._check_speculation(speculation)
        spec, prompt, remaining = self.target.spec, list(prompt), self.remaining(prompt, params)
        stops = frozenset(params.stop_token_ids)
        ends = stops | (frozenset() if params.ignore_eos else frozenset(spec.end_ids))
        sampler = RowSampler(
            params, draw_seed(params), prompt, spec.vocab_size, spec.device,
            matcher=self._matcher(params), end_ids=spec.end_ids,
        )  # fmt: skip
        text = SequenceContext.of(speculation, prompt, self.max_model_len)
        return Request(
            prompt=prompt,
            params=params,
            lane=Lane(speculation, sampler, self.drafter, text),
            output=RequestOutput(self.text.stream(), params.stop, ends, stops, params.min_tokens),
            remaining=remaining,
        )

    def _stream(
        self, prompt: Sequence[int], params: SamplingParams, speculation: Speculation, observer: Observer | None
    ) -> Iterator[Chunk]:
        request = self.scheduler.add(prompt, params, speculation)
        try:
            while True:
                chunk = self._next(request, observer)
                yield chunk
                if chunk.last:
                    return
        finally:
            self.scheduler.abort(request)

    def _finish(self, request: Request, observer: Observer | None) -> Generation:
        while (generation := self._next(request, observer).generation) is None:
            pass
        return generation

    def _next(self, request: Request, observer: Observer | None) -> Chunk:
        """The next chunk of a request; chunks of other requests that come on the way are kept for their readers."""
        while not request.pending:
            if not self.scheduler.has_work:
                raise DDTreeError(
                    "this answer was dropped: a step failed that the reader of another one took; ask again"
                )
            self.scheduler.observer = observer or Unobserved()
            try:
                news = self.scheduler.step()
            except BaseException:
                self.scheduler.reset()
                raise
            for other, chunk in news:
                other.pending.append(chunk)
        chunk = request.pending.pop(0)
        if chunk.error is not None:
            raise chunk.error
        if chunk.generation is not None and isinstance(observer, StageTimer):
            return replace(chunk, generation=replace(chunk.generation, stages=dict(observer.seconds)))
        return chunk

    def _check_speculation(self, speculation: Speculation) -> None:
        if speculation.mode != "ar" and self.drafter is None:
            raise InvalidOption(
                f"mode {speculation.mode} needs a drafter: load one with --drafter, or use mode ar", param="mode"
            )
        if speculation.tree_budget > self.config.largest_budget:
            raise InvalidOption(
                f"tree_budget {speculation.tree_budget} is more than the {self.config.largest_budget} planned for: ask"
                " for less, or start with a larger --max-tree-budget",
                param="tree_budget",
            )
