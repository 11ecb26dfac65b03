"""`ddtree train pair`: a low-rank head that says what follows each candidate, fitted to a frozen drafter."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ddtree.config import PAIRWISE
from ddtree.drafter import PairwiseHead, choose_vocabulary, fingerprint
from ddtree.drafter.pairwise import weighed
from ddtree.engine.device import standing_on
from ddtree.errors import InvalidOption
from ddtree.target import Target
from ddtree.training import batches
from ddtree.training.checkpoint import Run
from ddtree.training.config import TrainConfig, as_dict
from ddtree.training.data import need_any
from ddtree.training.evaluate import drafter_folder, load_drafter
from ddtree.training.frozen import Frozen, Rows
from ddtree.training.loss import depth_weights
from ddtree.training.schedule import ahead, go_on, learning_rate
from ddtree.training.shards import read_all, read_manifest
from ddtree.training.teacher import load_target

CHECKPOINT = "pairwise"  # its name in the run's folder


def fit_pairwise(
    config: TrainConfig,
    drafter: str = "best",
    output: Path | None = None,
    target: Target | None = None,
    max_minutes: float | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Fit a head for a drafter, or go on at the last checkpoint, and write it (`PAIRWISE`) into the folder `output`.

    drafter: best or last, the run's checkpoints; else a z-lab folder, a name or a hub id. output: None is the run's own
    folder. target: instead of the one that the configuration names. max_minutes: end after so many, with a checkpoint.
    Returns what was reached. Raises DDTreeError, before anything is fitted.
    """
    output, target = output or Path(config.folder), target or load_target(config.target)
    with standing_on(target.spec.device):
        trainer = PairwiseTrainer(config, drafter, target, quiet)
        _check_folder(output)
        return trainer.run(output, max_minutes)


class Factors(nn.Module):
    """What is fitted: a head whose factors are a product of the target's embedding, and a table of each token's own.

    By the embedding a token learns from those that are like it; written down, a head has one table of both.
    """

    def __init__(self, embedding: Tensor, rank: int, gated: bool) -> None:
        """embedding: [W, H] of the listed tokens. A new head changes nothing: V is 0."""
        super().__init__()
        count, hidden = embedding.shape
        self.embedding: Tensor
        self.register_buffer("embedding", embedding / embedding.float().norm(dim=1).mean(), persistent=False)
        generator = torch.Generator().manual_seed(0)
        self.project = nn.Parameter(torch.randn(hidden, rank, generator=generator) * rank**-0.5)
        self.project_behind = nn.Parameter(torch.zeros(hidden, rank))
        self.before, self.behind = (nn.Parameter(torch.zeros(count, rank)) for _ in range(2))
        self.rest = nn.Parameter(torch.zeros(rank))
        self.gate = nn.Parameter(torch.zeros(rank, hidden)) if gated else None

    def factors(self) -> tuple[Tensor, Tensor]:
        """U and V [W, r], float32."""
        e = self.embedding
        return ((e @ self.project.to(e.dtype)).float() + self.before,
                (e @ self.project_behind.to(e.dtype)).float() + self.behind)  # fmt: skip


def losses(head: PairwiseHead, rows: Rows, counts: tuple[int, ...]) -> Tensor:
    """The mean cross-entropy of candidates and rest, float32: [2, len(counts)], with the head and of the marginals."""
    moved, rest = head.moved(rows.hidden, rows.previous, rows.tokens)
    found = []
    for moves, others in ((moved, rest), (torch.zeros_like(moved), torch.zeros_like(rest))):
        for index, count in enumerate(counts):
            scores, outside, norm = weighed(rows.log_q[:, :count], moves[..., :count], others)
            inside = scores[:, 0].gather(1, rows.place.clamp(max=count - 1).unsqueeze(1))
            chosen = torch.where(rows.place.unsqueeze(1) < count, inside, outside)
            weights = rows.weights[:, index]
            found.append(((norm - chosen)[:, 0] * weights).sum() / weights.sum().clamp(min=1e-9))
    return torch.stack(found).view(2, len(counts))


class PairwiseTrainer:
    """One fit: the frozen pair, the head and its optimiser."""

    def __init__(self, config: TrainConfig, drafter: str, target: Target, quiet: bool = False) -> None:
        """Raises DDTreeError where something does not fit together."""
        p, spec, fit = config.pairwise, target.spec, config.fit
        self.config, self.part, self.quiet, self.drafter, self.device = config, p, quiet, drafter, spec.device
        self.run_files, self.vocab_size = Run(Path(config.folder)), spec.vocab_size
        self.as_fit = replace(fit, steps=p.steps, minutes=p.minutes, lr=p.lr, final_lr=p.final_lr, warmup=p.warmup)
        longest = self._read_chats()
        model = load_drafter(config, drafter)
        model.config.check_fits(spec.vocab_size, spec.hidden_size, spec.num_layers)
        if model.config.depths < 2:
            raise InvalidOption(f"drafter {drafter!r} proposes one depth alone: a pairwise head needs two")
        self.by_depth, self.mark = depth_weights(model.config.depths, fit.gamma), fingerprint(model.norm.weight)
        listed = choose_vocabulary(
            p.vocabulary, drafter_folder(config, drafter) or Path(config.folder), spec.vocab_size
        )
        ids = (torch.arange(spec.vocab_size) if listed is None else listed).to(spec.device)
        self.frozen = Frozen(config, target, model.to(spec.device).eval(), longest, ids)
        embedding = self.frozen.teacher.embed(ids).to(self.frozen.precision)
        self.factors = Factors(embedding, p.rank, p.gate == "state").to(spec.device)
        self.optimizer = torch.optim.AdamW(
            self.factors.parameters(), p.lr, betas=(0.9, p.beta2), weight_decay=p.weight_decay,
            fused=spec.device.type == "cuda",
        )  # fmt: skip
        self.step, self.seconds = 0, 0.0
        self.sound = torch.ones((), dtype=torch.bool, device=spec.device)  # whether every loss so far was a number
        self._resume()

    def _read_chats(self) -> int:
        """Those to train on, and those held out. Returns: tokens of the longest."""
        folder, p = self.config.data_folder, self.part
        made_with = read_manifest(folder)["vocab_size"]
        if made_with != self.vocab_size:
            raise InvalidOption(
                f"{folder} was made by a model of {made_with} tokens, the target has {self.vocab_size}: make the data"
                " with this target"
            )
        chats = batches.trainable(list(read_all(folder)))
        self.chats = [chat for chat in chats if not chat.heldout]
        self.heldout = [chat for chat in chats if chat.heldout][: p.eval_sequences]
        need_any(self.chats, "chats to train on")
        need_any(self.heldout, "held-out chats")
        return max(len(chat.ids) for chat in chats)

    def head(self) -> PairwiseHead:
        """As it is now; gradients go through it."""
        f = self.factors
        return PairwiseHead.of(self.frozen.ids, self.vocab_size, f.factors(), f.rest, f.gate, self.mark)

    def run(self, output: Path, max_minutes: float | None = None) -> dict[str, Any]:
        """To the end of the schedule, or of the minutes; then the head is written."""
        began, before, p = time.monotonic(), self.seconds, self.part
        if self.frozen.why_not:
            self._say(f"attention: sdpa; flex attention is not used: {self.frozen.why_not}")
        line: dict[str, Any] = {"step": self.step, **self._measure()}
        self._say(_shown(line))
        with (
            tqdm(total=p.steps, initial=self.step, unit="step", disable=self.quiet) as bar,
            ahead(self.device) as maker,
        ):
            ready, late = maker.submit(self._batch, self.step), self._over()
            while self.step < p.steps and not late:
                batch = ready.result().to(self.device)
                ready = maker.submit(self._batch, self.step + 1)
                self._one_step(batch)
                now = time.monotonic() - began
                self.seconds = before + now
                late = self._over() or (max_minutes is not None and now > max_minutes * 60)
                if self.step % p.eval_every == 0 or self.step == p.steps or late:
                    self._check_sound()
                    line = {"step": self.step, **self._measure(), "seconds": self.seconds}
                    self._say(_shown(line))
                    self.run_files.save(CHECKPOINT, self._state())
                bar.update(1)
        return {**line, **self._write(output / PAIRWISE, line), "attention": "flex" if self.frozen.flex else "sdpa"}

    def _write(self, path: Path, line: dict[str, Any]) -> dict[str, Any]:
        """The head, which is read back before it counts as done."""
        about = {"candidates": list(self.frozen.counts)}
        about |= {name: line[name] for name in ("step", "heldout", "marginal")}
        self.head().write(path, about)
        return {"file": str(path), "bytes": path.stat().st_size, "rank": PairwiseHead.read(path).rank}

    def _batch(self, step: int) -> batches.Batch:
        """What step `step` (from 0) trains on."""
        p, seed = self.part, self.config.fit.seed
        names = batches.order(len(self.chats), step, p.batch, seed)
        return batches.make([self.chats[name] for name in names], self.by_depth, p.anchors, seed, step * p.batch)

    def _one_step(self, batch: batches.Batch) -> None:
        """The host does not wait for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.as_fit, self.step, self.seconds)
        rows = self.frozen.rows(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss = losses(self.head(), rows, self.frozen.counts)[0].mean()
        loss.backward()
        self.sound &= loss.detach().isfinite()
        self.optimizer.step()
        self.step += 1

    @torch.no_grad()
    def _measure(self) -> dict[str, Any]:
        """Cross-entropy on held-out chats, by the number of candidates."""
        p, head, parts = self.part, self.head(), []
        for first in range(0, len(self.heldout), p.batch):
            batch = batches.make(self.heldout[first : first + p.batch], self.by_depth, p.anchors, 1, first)
            parts.append(losses(head, self.frozen.rows(batch.to(self.device)), self.frozen.counts))
        with_head, without = torch.stack(parts).mean(0).tolist()
        return {"heldout": with_head, "marginal": without}

    def _over(self) -> bool:
        """Whether the schedule's time is up."""
        return 0 < self.part.minutes * 60 <= self.seconds

    def _check_sound(self) -> None:
        if not bool(self.sound):
            raise InvalidOption(
                f"the loss is no number at step {self.step} or shortly before: lower pairwise.lr and run again; the"
                " last checkpoint is sound"
            )

    def _say(self, text: str) -> None:
        """To standard error, also where no bar is shown."""
        tqdm.write(text, file=sys.stderr)

    def _state(self) -> dict[str, Any]:
        return {"step": self.step, "seconds": self.seconds, "optimizer": self.optimizer.state_dict(),
                "factors": self.factors.state_dict(), "drafter": self.mark, "token_ids": self.frozen.ids,
                "config": json.dumps(as_dict(self.part))}  # fmt: skip

    def _resume(self) -> None:
        """Where a checkpoint is. Raises InvalidOption where it is of another head."""
        last = self.run_files.load(CHECKPOINT)
        if last is None:
            return
        before = json.loads(last["config"])
        changed = [name for name in ("rank", "gate") if before[name] != getattr(self.part, name)]
        changed += ["vocabulary"] if not torch.equal(last["token_ids"], self.frozen.ids.cpu()) else []
        if changed or last["drafter"] != self.mark:
            what = f"pairwise.{changed[0]}" if changed else f"drafter {self.drafter!r}"
            raise InvalidOption(
                f"{self.run_files.folder / CHECKPOINT}.pt was begun with another {what}: set it back, delete the file,"
                " or choose another folder"
            )
        self.factors.load_state_dict(last["factors"])
        go_on(self.optimizer, last["optimizer"])
        self.step, self.seconds = last["step"], last["seconds"]


def _check_folder(folder: Path) -> None:
    """Now, not when the fit is over."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = None if os.access(folder, os.W_OK) else "nothing can be written there"
    except OSError as error:
        problem = str(error)
    if problem is not None:
        raise InvalidOption(f"{folder} cannot hold the head ({problem}): name another --output", param="output")


def _shown(line: dict[str, Any]) -> str:
    pairs = " ".join(f"{a:.4f}/{b:.4f}" for a, b in zip(line["heldout"], line["marginal"], strict=True))
    seconds = f", {line['seconds']:.0f} s" if "seconds" in line else ""
    return f"step {line['step']}: held-out cross-entropy with the head / of the marginals {pairs}{seconds}"
