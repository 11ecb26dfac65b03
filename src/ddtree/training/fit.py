"""`ddtree train fit`: the drafter learns to say what the target says, many blocks of a sequence at once."""

import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ddtree.engine.device import standing_on
from ddtree.errors import InvalidOption
from ddtree.target import Target
from ddtree.training import batches, shape
from ddtree.training.attention import Blocks, flex_works
from ddtree.training.checkpoint import Run
from ddtree.training.config import TrainConfig, as_dict
from ddtree.training.data import FREE, need_any
from ddtree.training.loss import depth_weights, weighted_loss
from ddtree.training.measure import Measures, measure
from ddtree.training.schedule import ahead, go_on, learning_rate, optimizer, precision
from ddtree.training.shards import Chat, read_all, read_manifest
from ddtree.training.teacher import Teacher, load_target

KEPT = ("data", "drafter")  # parts that a run keeps from its first step to its last
FREE_TOO = {("data", name) for name in FREE}  # but for these
Say = Callable[[str], None]


def fit(
    config: TrainConfig,
    target: Target | None = None,
    stop_at: int | None = None,
    max_minutes: float | None = None,
    quiet: bool = False,
    ends_at: float | None = None,
) -> dict[str, Any]:
    """Train, or go on where the last checkpoint is.

    target: instead of the one that the configuration names. stop_at: end at this step, with a checkpoint; the schedule
    stays that of fit.steps. max_minutes: the same by the clock. ends_at: seconds as time.time() counts them, in
    fit.minutes' stead: what comes before the first step is in it then. Returns the last line of the log.
    """
    target = target or load_target(config.target)
    with standing_on(target.spec.device):
        trainer = Trainer(config, target, quiet)
        if ends_at is not None:
            minutes = (trainer.seconds + max(ends_at - time.time(), 1.0)) / 60
            trainer.part = replace(trainer.part, minutes=minutes)
        return trainer.run(stop_at, max_minutes)


class Trainer:
    """One fit: module, optimiser, data and teacher."""

    def __init__(self, config: TrainConfig, target: Target, quiet: bool = False) -> None:
        """Raises DDTreeError where something does not fit together."""
        self.config, self.part, self.quiet = config, config.fit, quiet
        self.run_files = Run(Path(config.folder))
        manifest = read_manifest(config.data_folder)
        if manifest["vocab_size"] != target.spec.vocab_size:
            raise InvalidOption(
                f"{config.data_folder} was made by {manifest['model']!r} with {manifest['vocab_size']} tokens, the"
                f" target has {target.spec.vocab_size}: make the data with this target"
            )
        chats = batches.trainable(list(read_all(config.data_folder)))
        self.chats = [chat for chat in chats if not chat.heldout]
        self.heldout = [chat for chat in chats if chat.heldout][: self.part.eval_sequences]
        need_any(self.chats, "chats to train on")
        need_any(self.heldout, "held-out chats")
        self._build(target, manifest, chats)

    def _build(self, target: Target, manifest: dict[str, Any], chats: list[Chat]) -> None:
        c, spec = self.config, target.spec
        last = self.run_files.load("last")
        if last is None:
            self.raw, folder = shape.choose(c.drafter, c.target.model, spec)
            shape.choose_mask(self.raw, chats, manifest["special_ids"], spec)
        else:
            self._check_same(last)
            self.raw, folder = json.loads(last["raw"]), None
        model = shape.build(self.raw, folder, spec, self.part.seed)
        self.model = model.to(spec.device)
        self.optimizer = optimizer(self.model, self.part, spec.device)
        self.step, self.best, self.seconds = 0, 0.0, 0.0
        self.sound = torch.ones((), dtype=torch.bool, device=spec.device)  # whether every loss so far was a number
        if last is not None:
            self.model.load_state_dict(last["model"])
            go_on(self.optimizer, last["optimizer"])
            self.step, self.best, self.seconds = last["step"], last["best"], last["seconds"]
        self.precision = precision(self.part.precision, spec.device)
        longest = max(len(chat.ids) for chat in chats)
        self.length = batches.rounded(longest)
        kl = self.part.objective == "kl"
        self.teacher = Teacher(target, self.model.config.target_layer_ids, longest, kl, self.part.feature_cache_gib)
        self.head = self.teacher.head(self.precision)
        if last is None and folder is None:
            shape.calm(self.model, self.head)
        self.average = copy.deepcopy(self.model).requires_grad_(False) if self.part.ema else None
        if self.average is not None and last is not None and last["average"] is not None:
            self.average.load_state_dict(last["average"])
        self.flex = self._choose_attention(spec.device)
        self.by_depth = depth_weights(self.model.config.depths, self.part.gamma)

    def _check_same(self, last: dict[str, Any]) -> None:
        before = json.loads(last["config"])
        for name in KEPT:
            now = as_dict(getattr(self.config, name))
            for field, value in now.items():
                if before[name].get(field) != value and (name, field) not in FREE_TOO:
                    raise InvalidOption(
                        f"{name}.{field} is {value!r}, and {self.run_files.folder} was begun with"
                        f" {before[name].get(field)!r}: set it back, or choose another folder"
                    )

    def _choose_attention(self, device: torch.device) -> bool:
        if self.part.attention == "sdpa":
            return False
        why_not = flex_works(self.model.config, device, self.precision, self.length, self.part.anchors,
                             self.part.micro_batch)  # fmt: skip
        if why_not is None:
            return True
        if self.part.attention == "flex":
            raise InvalidOption(
                f"fit.attention flex does not work here ({why_not}): use auto or sdpa", param="attention"
            )
        self._say(f"attention: sdpa; flex attention is not used: {why_not}")
        return False

    def _say(self, text: str) -> None:
        """To standard error, also where no bar is shown."""
        tqdm.write(text, file=sys.stderr)

    def run(self, stop_at: int | None = None, max_minutes: float | None = None) -> dict[str, Any]:
        """To the end of the schedule, or to where it is told to stop."""
        began, before, p = time.monotonic(), self.seconds, self.part
        end = p.steps if stop_at is None else min(stop_at, p.steps)
        self.run_files.cut_log(self.step)
        line: dict[str, Any] = {"step": self.step, "steps": p.steps}
        with (
            tqdm(total=p.steps, initial=self.step, unit="step", disable=self.quiet) as bar,
            ahead(self.teacher.device) as maker,
        ):
            ready = maker.submit(self._parts, self.step)
            late = self._over()
            while self.step < end and not late:
                parts = ready.result()
                ready = maker.submit(self._parts, self.step + 1)
                loss, norm, rate = self._one_step(parts)
                now = time.monotonic() - began
                self.seconds = before + now
                late = self._over() or (max_minutes is not None and now > max_minutes * 60)
                last = self.step == end or late
                measured = self.step % p.eval_every == 0 or last
                if measured or self.step % p.log_every == 0 or self.step % p.checkpoint_every == 0:
                    self._check_sound()
                    line = {"step": self.step, "loss": float(loss), "lr": rate, "norm": float(norm)}
                    line |= self._measure() if measured else {}
                    line |= {"seconds": time.monotonic() - began, "attention": "flex" if self.flex else "sdpa"}
                    self._write(line, measured, last)
                    shown = {k: f"{line[k]:.3f}" for k in ("loss", "chain", "tree@16") if k in line}
                    bar.set_postfix(shown | ({"best": f"{self.best:.3f}"} if self.best else {}))
                bar.update(1)
        return line

    def _over(self) -> bool:
        """Whether the schedule's time is up."""
        return 0 < self.part.minutes * 60 <= self.seconds

    def _write(self, line: dict[str, Any], measured: bool, last: bool) -> None:
        """A line of the log, to standard error where something was measured, and a checkpoint where one is due."""
        p = self.part
        if measured:
            told = {k: v for k, v in line.items() if k not in ("step", "attention")}
            self._say(f"step {self.step}: " + ", ".join(f"{k} {v:.3g}" for k, v in told.items()))
        if self.step % p.log_every == 0 or measured:
            self.run_files.log(line)
        if self.step % p.checkpoint_every == 0 or last:
            self.run_files.save("last", self._state())

    def _check_sound(self) -> None:
        if not bool(self.sound):
            raise InvalidOption(
                f"the loss or its gradient is no number at step {self.step} or shortly before: lower fit.lr and run"
                " again; the last checkpoint is sound"
            )

    def _parts(self, step: int) -> list[batches.Batch]:
        """What step `step` (from 0) trains on."""
        p = self.part
        order, parts = batches.order(len(self.chats), step, p.batch, p.seed), []
        for first in range(0, p.batch, p.micro_batch):
            names = order[first : first + p.micro_batch]
            chats, number = [self.chats[name] for name in names], step * p.batch + first
            parts.append(batches.make(chats, self.by_depth, p.anchors, p.seed, number, names))
        return parts

    def _one_step(self, parts: list[batches.Batch]) -> tuple[Tensor, Tensor, float]:
        """Loss and norm of the gradient, on the device (the host does not wait for them), and the rate."""
        p, rate = self.part, learning_rate(self.part, self.step, self.seconds)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        weight = sum(float(part.weights.sum()) for part in parts)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.teacher.device)
        for part in parts:
            loss = self.loss(part.to(self.teacher.device)) / weight
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), p.clip)
        self.sound &= total.isfinite() & norm.isfinite()
        self.optimizer.step()
        self.step += 1
        if self.average is not None:
            decay = min(p.ema, (1 + self.step) / (10 + self.step))
            with torch.no_grad():
                torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)
        return total, norm, rate

    def loss(self, batch: batches.Batch) -> Tensor:
        """The sum of a batch's weighted losses."""
        config, teacher = self.model.config, self.teacher
        length = self.length if self.flex else batch.length  # flex attention is compiled for one shape
        features, hidden = teacher.features(batch.sequences, length, batch.names)
        embedded = teacher.embed(batch.block_ids(config.block_size, config.mask_token_id))
        blocks = Blocks(config, batch.anchors, length, self.flex)
        device = teacher.device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.precision is torch.bfloat16):
            drafted = self.model(embedded, features.to(self.precision), blocks)
            said = None if hidden is None else _said(hidden, batch)
            return weighted_loss(
                self.model, drafted.flatten(0, 2), batch.labels.flatten(), batch.weights.flatten(), self.head, said,
                self.part.loss_rows, batch.kept,
            )  # fmt: skip

    def _measure(self) -> dict[str, float]:
        """Acceptance lengths on held-out chats; the best chain so far is kept."""
        found, model = Measures(self.model.config.depths, (16,)), self.average or self.model
        measure(model, self.teacher, self.head, self.heldout, found, top_k=16, anchors=64)
        lengths = found.acceptance()
        if lengths["chain"] > self.best:
            self.best = lengths["chain"]
            self.run_files.save(
                "best", self._state() | {"model": model.state_dict(), "average": None, "optimizer": None}
            )
        return lengths

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "best": self.best,
            "seconds": self.seconds,
            "average": None if self.average is None else self.average.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "raw": json.dumps(self.raw),
            "config": json.dumps({name: as_dict(getattr(self.config, name)) for name in (*KEPT, "target", "fit")}),
        }


def _said(hidden: Tensor, batch: batches.Batch) -> Tensor:
    """The target's hidden states at the positions before each label. hidden [B, T, H] -> [B * A * D, H]."""
    depths = batch.labels.shape[2]
    before = batch.anchors.unsqueeze(2) + torch.arange(depths, device=hidden.device)
    before = before.clamp(max=hidden.shape[1] - 1).flatten(1)
    return torch.cat([rows[at] for rows, at in zip(hidden, before, strict=True)])
