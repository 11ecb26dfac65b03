"""`ddtree train eval`: a drafter measured on held-out chats, on the bench suite, or on prompts the user names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ddtree import models
from ddtree.bench.suite import load_prompts
from ddtree.config import PAIRWISE, SamplingParams
from ddtree.drafter import DrafterConfig, PairwiseHead, fingerprint
from ddtree.engine.device import standing_on
from ddtree.errors import InvalidOption
from ddtree.layers.fields import read_config
from ddtree.target import Target
from ddtree.training.answers import load_engine
from ddtree.training.checkpoint import Run, weights_of
from ddtree.training.config import TrainConfig
from ddtree.training.data import need_any
from ddtree.training.measure import Measures, measure
from ddtree.training.model import DraftModel
from ddtree.training.prompts import Prompt, read_prompts
from ddtree.training.schedule import precision
from ddtree.training.shards import Chat, read_all
from ddtree.training.teacher import Teacher, load_target

BATCH = 8  # answers generated at once


def drafter_folder(config: TrainConfig, drafter: str) -> Path | None:
    """Of a z-lab folder, a name or a hub id; None for last and best, the run's checkpoints."""
    if drafter in ("last", "best"):
        return None
    folder = models.resolve_drafter(drafter, config.target.model)
    if folder is None:
        raise InvalidOption(f"--drafter {drafter!r} names no drafter: give last, best or a folder")
    return folder


def load_drafter(config: TrainConfig, drafter: str) -> DraftModel:
    """drafter: last or best, the run's checkpoints; else a z-lab folder, a name or a hub id."""
    folder = drafter_folder(config, drafter)
    if folder is not None:
        return DraftModel.read(DrafterConfig.read(read_config(folder)), folder)
    state = Run(Path(config.folder)).need(drafter)
    model = DraftModel(DrafterConfig.read(json.loads(state["raw"])))
    model.load_state_dict(weights_of(state))
    return model


def evaluate(
    config: TrainConfig,
    drafter: str = "best",
    prompts: str = "heldout",
    quiet: bool = False,
    pairwise: str = "auto",
) -> dict[str, Any]:
    """Acceptance lengths of chain and trees by category, ranks by depth, calibration.

    prompts: heldout, suite, or a JSONL file; answers to the latter two are generated first, by the target alone.
    pairwise: auto, off, or a folder: see `find_pairwise`. With a head, lengths are told with it and without, from the
    same marginals. A round counts when the answer has a whole block behind its root, so that no end cuts it.
    """
    model, c = load_drafter(config, drafter), config.eval
    pair = find_pairwise(config, drafter, pairwise, model)
    if prompts == "heldout":
        target = load_target(config.target)
        chats, skipped = [chat for chat in read_all(config.data_folder) if chat.heldout][: c.sequences], 0
    else:
        target, chats, skipped = _answers(config, _prompts(prompts)[: c.sequences])
    need_any(chats, "held-out chats")
    spec, shape = target.spec, model.config
    shape.check_fits(spec.vocab_size, spec.hidden_size, spec.num_layers)
    if pair is not None:
        pair.check_fits(spec.vocab_size, spec.hidden_size, fingerprint(model.norm.weight))
        pair = pair.to(spec.device)
    with standing_on(spec.device):
        teacher = Teacher(target, shape.target_layer_ids, max(len(chat.ids) for chat in chats))
        head = teacher.head(precision(config.fit.precision, spec.device))
        found = Measures(shape.depths, c.budgets, pair is not None)
        bar = tqdm(chats, unit="answer", disable=quiet)
        measure(model.to(spec.device), teacher, head, bar, found, top_k=c.top_k, anchors=c.anchors,
                pairwise=pair)  # fmt: skip
    return {"model": config.target.model, "drafter": drafter, "prompts": prompts, "skipped": skipped,
            "pairwise": pair is not None, "precision": str(head.dtype).removeprefix("torch."),
            **found.report()}  # fmt: skip


def find_pairwise(config: TrainConfig, drafter: str, pairwise: str, model: DraftModel) -> PairwiseHead | None:
    """The head that a drafter is measured with.

    pairwise: off; a folder that holds a head; or auto: that of the drafter's folder, else the run's own, if it was
    fitted to this drafter. Raises ModelNotFound or DamagedFile.
    """
    if pairwise == "off":
        return None
    if pairwise != "auto":
        return PairwiseHead.read(Path(pairwise) / PAIRWISE)
    folder = drafter_folder(config, drafter)
    if folder is not None and (folder / PAIRWISE).exists():
        return PairwiseHead.read(folder / PAIRWISE)
    own = Path(config.folder) / PAIRWISE
    head = PairwiseHead.read(own) if own.exists() else None
    return head if head is not None and head.drafter == fingerprint(model.norm.weight) else None


def _prompts(name: str) -> list[Prompt]:
    if name == "suite":
        return [Prompt(prompt.category, prompt.prompt) for prompt in load_prompts()]
    return read_prompts(name)


def _answers(config: TrainConfig, prompts: list[Prompt]) -> tuple[Target, list[Chat], int]:
    """The target, its answers to every turn, and how many turns were too long for eval.max_length."""
    c, chats, skipped = config.eval, list[Chat](), 0
    engine = load_engine(config.target, c.max_length, BATCH)
    talks = [(p, [{"role": "user", "content": p.text or ""}]) for p in prompts]
    while talks:
        asked = [(p, talk, engine.text.chat(talk)) for p, talk in talks]
        fits = [(p, talk, ids) for p, talk, ids in asked if len(ids) + c.max_tokens <= c.max_length]
        skipped += len(asked) - len(fits)
        if not fits:
            break
        params = [SamplingParams(c.max_tokens, c.temperature, seed=number) for number in range(len(fits))]
        talks = []
        for (p, talk, ids), a in zip(fits, engine.generate([ids for _, _, ids in fits], params), strict=True):
            whole = np.array([*ids, *a.token_ids], np.int32)
            chats.append(Chat(whole, len(ids), p.kind, not c.temperature, heldout=True))
            later = p.later[len(talk) // 2 :][:1]
            talks += [(p, [*talk, {"role": "assistant", "content": a.text}, {"role": "user", "content": text}])
                      for text in later]  # fmt: skip
    if not chats:
        raise InvalidOption(f"no prompt fits eval.max_length {c.max_length} with {c.max_tokens} tokens: raise it")
    return engine.target, chats, skipped
