"""A low-rank term that makes a drafter's marginals conditional: what a token says of the token behind it.

A block drafter scores every depth by itself. Behind a candidate that is not the best one, its next depth still says
what would follow the best. The head moves the score of token t behind token p by z . V[t], z = U[p] * (1 + G h), where
h is the drafter's last hidden state of t's depth. Only candidates are scored, and what is left of the mass is one class
more, so a draft costs no further product with the vocabulary.

The file is one of safetensors, but not called so, since loaders of Hugging Face folders take every .safetensors file in
there for weights.
"""

import json
import os
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddtree.config import PAIRWISE
from ddtree.errors import DamagedFile, DrafterMismatch, ModelNotFound
from ddtree.kernels import PairFactors
from ddtree.layers.weights import open_weights

KIND = "ddtree-pairwise-1"  # of the file, in its metadata
_LEAST = 1e-6  # the part of the mass that candidates never hold: a certain depth has no logarithm of 0 in it


@dataclass(frozen=True)
class PairwiseHead:
    """Factors of W tokens and rank r, in float32. Tokens that it does not know have zero rows, and change nothing."""

    FILE: ClassVar[str] = PAIRWISE  # its name in a drafter's folder

    token_ids: Tensor  # [W] int64, ascending
    before: Tensor  # U [W + 1, r]: of the token before; the last row is 0
    behind: Tensor  # V [W + 1, r]: of the token that is scored; the last row is 0
    rest: Tensor  # [r]: the same of everything that is no candidate
    gate: Tensor | None  # G [r, H]; None: the drafter's state has no say
    places: Tensor  # [vocab] int64: row of each of the target's tokens, W where it has none
    drafter: str  # `fingerprint` of the drafter that it was made with

    @classmethod
    def of(
        cls,
        token_ids: Tensor,
        vocab_size: int,
        factors: tuple[Tensor, Tensor],
        rest: Tensor,
        gate: Tensor | None,
        drafter: str,
    ) -> "PairwiseHead":
        """factors: U and V of the listed tokens alone, [W, r] each; all on one device. Differentiable in them."""
        before, behind = (F.pad(rows, (0, 0, 0, 1)) for rows in factors)
        return cls(token_ids, before, behind, rest, gate, _places(token_ids, vocab_size), drafter)

    @property
    def rank(self) -> int:
        """r."""
        return self.before.shape[1]

    def to(self, device: torch.device) -> "PairwiseHead":
        """The same on a device."""
        moved: dict[str, Any] = {
            f.name: value.to(device) for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    @classmethod
    def of_drafter(cls, folder: Path, vocab_size: int, hidden: int) -> "PairwiseHead | None":
        """That of a drafter's folder; None where it has none. vocab_size: of the target; hidden: of both.

        Raises DamagedFile or DrafterMismatch.
        """
        path = folder / PAIRWISE
        if not path.exists():
            return None
        head = cls.read(path)
        with open_weights(folder, torch.bfloat16, torch.device("cpu")) as weights:
            head.check_fits(vocab_size, hidden, fingerprint(weights("norm.weight", hidden)))
        return head

    def moved(self, hidden: Tensor, previous: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """By how much candidates are moved, before they are normalised.

        Args:
            hidden: [..., H], the drafter's last hidden states (what the target's head reads) of some depths.
            previous: [..., I] int64, tokens that may stand before.
            tokens: [..., J] int64, the depth's candidates.
        Returns: float32 [..., I, J], and of the rest [..., I].
        """
        z = F.embedding(self.places[previous], self.before, padding_idx=len(self.token_ids))  # [..., I, r]
        if self.gate is not None:
            z = z * (1 + F.linear(hidden.float(), self.gate)).unsqueeze(-2)
        behind = F.embedding(self.places[tokens], self.behind, padding_idx=len(self.token_ids))  # [..., J, r]
        return z @ behind.transpose(-1, -2), z @ self.rest

    def pair(self, hidden: Tensor, tokens: Tensor, log_q: Tensor) -> Tensor:
        """Scores of every candidate behind every candidate of the depth before.

        Args:
            hidden: [B, D, H]; tokens: [B, D, K] int64 and log_q: [B, D, K] float32 as in ddtree.tree.Proposal.
        Returns: float32 [B, D - 1, K, K], at most 0: [b, d, i, j] is the log-probability of candidate j of depth d + 1
            behind candidate i of depth d (both from 0). -inf where a rank is missing.
        """
        return normalised(log_q[:, 1:], *self.moved(hidden[:, 1:], tokens[:, :-1], tokens[:, 1:]))

    def factors(self, dtype: torch.dtype) -> PairFactors:
        """The same memory as ddtree.kernels.pair reads it; dtype: of the drafter's hidden states."""
        gate = None if self.gate is None else self.gate.to(dtype).contiguous()
        return PairFactors(self.before, self.behind, self.rest, gate, self.places)

    def check_fits(self, vocab_size: int, hidden: int, drafter: str) -> None:
        """Raises DrafterMismatch unless the head was made for such a target and this drafter."""
        problem = None
        if len(self.places) != vocab_size:
            problem = f"a vocabulary of {len(self.places)} tokens, the target has {vocab_size}"
        elif self.gate is not None and self.gate.shape[1] != hidden:
            problem = f"hidden_size {self.gate.shape[1]}, the drafter's is {hidden}"
        elif self.drafter != drafter:
            problem = "another drafter's mark: it was fitted to other weights"
        if problem:
            raise DrafterMismatch(f"the pairwise head does not fit: it has {problem}; fit it anew, or leave it out")

    def write(self, path: Path, about: dict[str, Any] | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
        """Whole or not at all; the folder is made. about: for people, kept in the metadata."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            "token_ids": self.token_ids.int().cpu(),
            "before": self.before[:-1].detach().to(dtype).cpu().contiguous(),
            "behind": self.behind[:-1].detach().to(dtype).cpu().contiguous(),
            "rest": self.rest.detach().float().cpu(),
        }
        if self.gate is not None:
            tensors["gate"] = self.gate.detach().to(dtype).cpu().contiguous()
        facts = {"kind": KIND, "vocab_size": str(len(self.places)), "drafter": self.drafter,
                 "about": json.dumps(about or {})}  # fmt: skip
        part = path.with_suffix(".part")
        save_file(tensors, part, metadata=facts)
        os.replace(part, path)

    @classmethod
    def read(cls, path: Path) -> "PairwiseHead":
        """Raises ModelNotFound or DamagedFile, naming the file and what is wrong."""
        if not path.is_file():
            raise ModelNotFound(f"{path} does not exist: name a file that `ddtree train pair` has written")
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            if facts.get("kind") != KIND:
                raise DamagedFile(f"{path} is of kind {facts.get('kind')!r}, not {KIND!r}: write it anew")
            ids, size = tensors["token_ids"].long(), int(facts["vocab_size"])
            before, behind, rest = (tensors[name].float() for name in ("before", "behind", "rest"))
            drafter = facts["drafter"]
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise DamagedFile(f"{path} is no whole pairwise head ({error}): write it anew") from error
        gate = tensors["gate"].float() if "gate" in tensors else None
        if not _sound(ids, size, before, behind, rest, gate):
            raise DamagedFile(f"{path} holds tensors that do not belong together: write it anew")
        return cls.of(ids, size, (before, behind), rest, gate, drafter)


def normalised(log_q: Tensor, moved: Tensor, rest: Tensor) -> Tensor:
    """The candidates' log-probabilities when each was moved, and so was the mass outside of them.

    log_q: [..., J], at most 0, -inf and NaN where a rank is missing; moved: [..., I, J]; rest: [..., I] -> [..., I, J],
    float32, at most 0.
    """
    scores, _, norm = weighed(log_q, moved, rest)
    # Rounding may lift a near-certain token above probability 1; a child would then outscore its parent.
    return (scores - norm.unsqueeze(-1)).clamp(max=0.0)


def weighed(log_q: Tensor, moved: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Before the norm is taken off: scores of the candidates [..., I, J], of the rest and their norm [..., I]."""
    known = log_q.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    outside = torch.log1p(-known.exp().sum(-1).clamp(max=1 - _LEAST)).unsqueeze(-1) + rest  # [..., I]
    scores = known.unsqueeze(-2) + moved
    return scores, outside, torch.logaddexp(scores.logsumexp(-1), outside)


def fingerprint(norm: Tensor) -> str:
    """What tells a drafter from another: its last norm's weights [H], as bfloat16, which any fit changes."""
    return sha256(norm.detach().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()).hexdigest()[:16]


def _sound(ids: Tensor, vocab_size: int, before: Tensor, behind: Tensor, rest: Tensor, gate: Tensor | None) -> bool:
    """Whether a file's tensors belong together."""
    if before.dim() != 2 or behind.shape != before.shape or ids.shape != before.shape[:1] or not len(ids):
        return False
    rank = before.shape[1]
    if rest.shape != (rank,) or (gate is not None and (gate.dim() != 2 or len(gate) != rank)):
        return False
    listed = bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size
    tensors = (before, behind, rest, *([] if gate is None else [gate]))
    return listed and all(bool(tensor.isfinite().all()) for tensor in tensors)


def _places(token_ids: Tensor, vocab_size: int) -> Tensor:
    places = torch.full((vocab_size,), len(token_ids), dtype=torch.int64, device=token_ids.device)
    places[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
    return places
