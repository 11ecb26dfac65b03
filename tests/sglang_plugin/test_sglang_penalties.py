"""Penalties of every row against a count by hand of what is committed and what lies on its path."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddtree.sglang.penalties import Penalties, RoundPenalties
from ddtree.tree import RoundState, Rows, accept

VOCABULARY, PROMPT = 12, [1, 2, 3, 4]
INFO = SimpleNamespace(acc_additive_penalties=torch.zeros(1), vocab_size=VOCABULARY)
NONE = SimpleNamespace(acc_additive_penalties=None, vocab_size=VOCABULARY)
PARENTS = [-1, 0, 1, 1, 2, 0]
TOKENS = [[5, 6, 5, 7, 6, 5], [7, 7, 7, 8, 7, 9], [3, 2, 1, 0, 2, 4]]


class Req:
    """As much of SGLang's request as is read."""

    def __init__(self, said: list[int], **params: Any) -> None:
        usual = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
        self.sampling_params = SimpleNamespace(**usual | {"stop_token_ids": {11}} | params)
        self.origin_input_ids, self.output_ids = PROMPT, said
        self.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=0)
        self.ended = False

    def finished(self) -> bool:
        return self.ended


def tree(device: torch.device) -> Rows:
    """The same shape for three requests."""
    state = RoundState.allocate(len(TOKENS), len(PARENTS), 3, device)
    for row, parent in enumerate(PARENTS):
        state.tokens[:, row] = torch.tensor([tokens[row] for tokens in TOKENS], device=device)
        state.parents[:, row], state.depths[:, row] = parent, 0 if parent < 0 else int(state.depths[0, parent]) + 1
        state.ancestors[:, row] = (0 if parent < 0 else state.ancestors[:, parent]) | 1 << row
    return Rows(state.tokens, state.parents, state.depths, state.ancestors)


def by_hand(logits: Tensor, req: Req, said: list[int]) -> Tensor:
    """Penalties of one place behind `said`, as plain decoding applies them."""
    found, params = logits.clone(), req.sampling_params
    for token in set(said):
        found[token] -= params.frequency_penalty * said.count(token) + params.presence_penalty
        found[token] *= params.repetition_penalty if found[token] < 0 else 1 / params.repetition_penalty
    if len(said) < params.min_new_tokens:
        found[[0, 11]] = -torch.inf
    return found


def said_at(row: int, tokens: list[int]) -> list[int]:
    """The path to a row, without the root."""
    return [] if row == 0 else [*said_at(PARENTS[row], tokens), tokens[row]]


def requests() -> list[Req]:
    return [
        Req([9, 5, 9], frequency_penalty=0.5, presence_penalty=0.25, min_new_tokens=6),
        Req([], repetition_penalty=1.5, presence_penalty=-0.5),
        Req([8, 8]),
    ]


def check(found: RoundPenalties, reqs: list[Req], said: list[list[int]], device: torch.device) -> None:
    rows, size = tree(device), len(TOKENS) * len(PARENTS)
    before = torch.randn(size, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(device)
    after = before.clone()
    found.apply(after, rows)
    for b, req in enumerate(reqs):
        for row in range(len(PARENTS)):
            at = b * len(PARENTS) + row
            wanted = by_hand(before[at], req, said[b] + said_at(row, TOKENS[b]))
            torch.testing.assert_close(after[at], wanted, msg=f"request {b}, row {row}")


@pytest.mark.parametrize("known", [True, False], ids=["prefilled here", "prefilled elsewhere"])
def test_every_row_has_its_own(device: torch.device, known: bool) -> None:
    penalties, reqs = Penalties(device), requests()
    roots = torch.tensor([tokens[0] for tokens in TOKENS], device=device)
    said = [[*req.output_ids, tokens[0]] for req, tokens in zip(reqs, TOKENS, strict=True)]
    if known:
        penalties.begin(reqs, INFO)
    for req, tokens in zip(reqs, TOKENS, strict=True):
        req.output_ids = [*req.output_ids, tokens[0]]  # the prefill's token, which overlap may not know yet
    lengths = torch.tensor([len(PROMPT) + len(own) - 1 for own in said], device=device)
    found = penalties.of(reqs, INFO, roots, lengths)
    assert found is not None
    check(found, reqs, said, device)

    own = torch.tensor([[6, 5, 6, 1, 1, 1], [7, 7, 7, 1, 9, 1], [0, 1, 1, 1, 1, 1]], device=device)
    accepted = accept(tree(device), own, 3)
    assert accepted.count.tolist() == [3, 3, 0]
    found.keep(accepted)
    roots = torch.tensor([1, 9, 0], device=device)
    bonus = [[6, 5, 6, 1], [7, 7, 7, 9], [0]]
    said = [[*old, *new] for old, new in zip(said, bonus, strict=True)]
    lengths += torch.tensor([len(new) for new in bonus], device=device)
    found = penalties.of(reqs, INFO, roots, lengths)  # the host has not heard of any of this
    assert found is not None
    check(found, reqs, said, device)


def test_requests_that_leave_and_come_back(device: torch.device) -> None:
    """Rows are reused, a retraction starts the count anew, and nobody gets another's."""
    penalties, first = Penalties(device), Req([5], frequency_penalty=1.0)
    root = torch.tensor([6], device=device)
    for index in range(40):  # each leaves behind what it said
        other = Req([index % VOCABULARY] * 3, frequency_penalty=2.0)
        penalties.begin([other], INFO)
        del other
    assert penalties._counts is not None
    assert len(penalties._counts) == 8
    penalties.begin([first], INFO)
    for _ in range(2):
        found = penalties.of([first], INFO, root, root)
        assert found is not None
    first.output_ids = [5, 6, 6, 7]
    many = [Req([index % VOCABULARY], presence_penalty=1.0) for index in range(20)]
    penalties.begin([first, *many], INFO)
    found = penalties.of([*many, first], INFO, torch.full((21,), 3, device=device), torch.arange(21, device=device))
    assert found is not None
    said = found.table[found.index].cpu()
    assert said[20].nonzero().flatten().tolist() == [3, 5, 6, 7]
    assert said[20, 6] == 2
    for index in range(20):
        assert said[index, index % VOCABULARY] >= 1
        assert said[index].sum() == 2


def test_nothing_is_counted_where_nobody_asks(device: torch.device) -> None:
    penalties, reqs = Penalties(device), [Req([5])]
    root = torch.tensor([6], device=device)
    penalties.begin(reqs, NONE)
    assert penalties.of(reqs, NONE, root, root) is None
    assert penalties.of(reqs, None, root, root) is None
    assert penalties._counts is None


def test_finished_requests_give_their_rows_up_while_somebody_holds_them(device: torch.device) -> None:
    """SGLang's own custom_params hold a request in a circle, which is freed when Python looks for circles."""
    penalties, held = Penalties(device), []
    for index in range(40):
        held.append(Req([index % VOCABULARY] * 3, frequency_penalty=2.0))
        penalties.begin(held[-1:], INFO)
        if index:
            held[-2].ended = True
    assert penalties._counts is not None
    assert len(penalties._counts) == 8
    found = penalties.of(held[-1:], INFO, torch.tensor([3], device=device), torch.tensor([4], device=device))
    assert found is not None
    assert found.table[found.index].cpu().flatten().nonzero().flatten().tolist() == [3]
    assert int(found.table[found.index].sum()) == 4
