"""The drafter's pairwise head in SGLang: where it lies, whether it fits, and what it says of candidates."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree import kernels
from ddtree.drafter import PairwiseHead
from ddtree.errors import InvalidOption
from ddtree.kernels import Lines, Plan
from ddtree.sglang.head import Drafted
from ddtree.sglang.options import told

FILE = PairwiseHead.FILE
logger = logging.getLogger(__name__)


class Pairs:
    """Scores of candidates behind candidates, in a captured graph or outside: every rank has the whole head.

    With tensor parallelism all ranks must grow the same trees, to the last node. Candidates are the same everywhere,
    since they are gathered; what the gate makes of the drafter's states is taken from the first rank, so that no bit of
    those states needs to be.
    """

    def __init__(self, head: PairwiseHead, weight: Tensor, group: Any) -> None:
        """weight: the target's lm_head, whose device and dtype drafts have; group: SGLang's tensor-parallel group."""
        self.factors, self.group = head.to(weight.device).factors(weight.dtype), group
        self._gate: Tensor | None = None
        if group.world_size > 1 and self.factors.gate is not None:
            self._gate = self.factors.gate
            self.factors = replace(self.factors, gate=torch.eye(head.rank, device=weight.device))

    def lines(self, drafted: Drafted, plan: Plan) -> Lines:
        """One launch, and one product before it where the head has a gate. plan: of the requests."""
        states = drafted.states
        if self._gate is not None:
            states = self._of_first_rank(F.linear(states, self._gate).float())
        return kernels.pair(self.factors, states, drafted, plan).lines

    def _of_first_rank(self, gated: Tensor) -> Tensor:
        gated = gated.contiguous()
        whole = gated.new_empty((self.group.world_size * gated.shape[0], *gated.shape[1:]))
        self.group.all_gather_into_tensor(whole, gated)
        return whole[: gated.shape[0]]


def load(wanted: str, drafter: Any, vocab_size: int, cache: str | None) -> PairwiseHead | None:
    """The head that trees go by; None for none, and the log says why.

    Args:
        wanted: auto, on or off.
        drafter: SGLang's ModelConfig of it; vocab_size: of the target.
        cache: where SGLang keeps what it downloads; None: where huggingface_hub does.
    Raises InvalidOption where one is asked for in vain, DamagedFile or DrafterMismatch.
    """
    if wanted == "off":
        logger.info("DDTREE: no pairwise head, as %s says", told("pairwise"))
        return None
    folder = _folder(wanted, drafter.model_path, drafter.revision, cache)
    head = None if folder is None else PairwiseHead.of_drafter(folder, int(vocab_size), int(drafter.hidden_size))
    if head is not None:
        logger.info(
            "DDTREE: trees go by the pairwise head in %s (%d tokens, rank %d)", folder, len(head.token_ids), head.rank
        )
    elif wanted == "on":
        raise InvalidOption(
            f"{told('pairwise')} on needs a pairwise head, and {folder} has no {FILE}: make one with `ddtree train"
            " pair`, or leave it at auto"
        )
    elif folder is not None:
        logger.info("DDTREE: no pairwise head, %s has no %s", folder, FILE)
    return head


def _folder(wanted: str, name: str, revision: str | None, cache: str | None) -> Path | None:
    """Of a drafter that SGLang has loaded. A hub id: its snapshot, with the head, which SGLang leaves out."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    def fetched(*patterns: str) -> Path:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, allow_patterns=list(patterns)))

    try:
        folder = fetched(FILE)
        return fetched(FILE, "*.safetensors") if (folder / FILE).exists() else folder
    except Exception as error:  # the hub's transport, and so its errors, differ between releases
        said = f"whether {name} has a {FILE} could not be found out ({type(error).__name__}: {error})"
        if wanted == "on":
            raise InvalidOption(f"{told('pairwise')} on: {said}: name the drafter's folder") from error
        logger.warning("DDTREE: no pairwise head: %s; name the drafter's folder", said)
        return None
