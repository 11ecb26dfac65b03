"""Every row's own token, by SGLang's penalties, biases, grammar masks and sampler."""

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from torch import Tensor

from ddtree.sglang.penalties import RoundPenalties
from ddtree.tree import Rows

PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


def takes_argmax(batch: Any) -> bool:
    """Whether the tokens of all of SGLang's requests are the argmax of the target's own logits."""
    info = batch.sampling_info
    if batch.has_grammar or info is None:
        return not batch.has_grammar
    asked = info.has_custom_logit_processor, info.acc_additive_penalties is not None, info.logit_bias is not None
    # SGLang's own flag stays False behind a sampled request until the batch is empty.
    greedy = info.is_all_greedy or all(request.sampling_params.top_k <= 1 for request in batch.reqs)
    return bool(greedy) and not any(asked)


def adjust(logits: Tensor, info: Any, rows: Rows, grammar_mask: Any, penalties: RoundPenalties | None) -> None:
    """Apply what a request asks of its logits to all its rows, in place. logits: [B * N, V]; rows: [B, N].

    SGLang's own accumulated penalties, which `info` has, stay out: `penalties` counts in their place.
    """
    width = rows.tokens.shape[1]
    if info is not None:
        if info.has_custom_logit_processor:
            _process(logits.view(*rows.tokens.shape, -1), info)
        if penalties is not None:
            penalties.apply(logits, rows)
        if info.logit_bias is not None:
            logits.add_(info.logit_bias.repeat_interleave(width, 0))
    if grammar_mask is not None:
        grammar_mask.apply(logits)


def _process(logits: Tensor, info: Any) -> None:
    """Custom logit processors, in place, row after row of the requests that have them. logits: [B, N, V].

    SGLang calls them with a line of logits for each request; some take the line of a request by its number, so that all
    rows at once (as stock DFLASH calls them) would have the first rows of the first request alone changed.
    """
    for processor, asks in info.custom_logit_processor.values():
        requests = asks.nonzero(as_tuple=True)[0]
        params = [info.custom_params[at] for at in requests.tolist()]
        for row in range(logits.shape[1]):
            logits[requests, row] = processor(logits[requests, row], params)


def choose(logits: Tensor, info: Any, positions: Tensor, sampler: Any, group: Any) -> Tensor:
    """The token that follows each row: [B, N] int64.

    Args:
        logits: [B * N, V], adjusted; overwritten where anything is sampled.
        positions: [B, N] of the rows, which seeded sampling draws by.
        sampler: SGLang's; it draws for every row as plain decoding would at that place, so a path that follows what
            was drawn has the target's own distribution.
        group: the tensor-parallel group; what rank 0 drew counts.
    """
    batch, width = positions.shape
    if info is None or info.is_all_greedy:
        return logits.argmax(-1).view(batch, width)
    wide = {name: getattr(info, name) for name in PER_REQUEST}
    wide = {name: value.repeat_interleave(width, 0) for name, value in wide.items() if value is not None}
    info = replace(info, **wide, has_custom_logit_processor=False, return_sampling_masks=None)
    own = sampler(LogitsProcessorOutput(next_token_logits=logits), info, False, [], [], positions.flatten())
    own = own.to(torch.int64)
    if group.world_size > 1:
        group.broadcast(own, src=0)
    return own.view(batch, width)
