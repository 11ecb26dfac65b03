"""The few places where stock SGLang asks for the algorithm by another way than its registry."""

import logging
from dataclasses import asdict
from typing import Any

from ddtree.sglang import metrics
from ddtree.sglang.adapters import adapter
from ddtree.sglang.options import Options, add_flags

logger = logging.getLogger(__name__)
Original = Any  # what an AROUND hook wraps
NOT_GIVEN = (
    ("return_logprob", "log-probabilities"),
    ("return_sampling_mask", "sampling masks"),
    ("return_hidden_states", "hidden states"),
)


def flags(result: Any, parser: Any) -> None:
    """After ServerArgs.add_cli_args: the plug-in's own flags."""
    add_flags(parser)


def attention_default(server_args: Any) -> None:
    """Before SGLang chooses an attention backend: triton, where the user named none and trees are verified."""
    settled = adapter().settled(server_args)
    if not _is_ours(settled) or Options.read().mode == "linear":
        return
    named = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    if all(getattr(settled, name) is None for name in named):
        adapter().name_attention(server_args, "triton")
        logger.info("DDTREE: no --attention-backend was named; triton verifies trees")


def captured_spec_info(original: Original, runner: Any, num_tokens: int) -> Any:
    """Graph capture: a tree with a mask, where stock captures a DFLASH chain without one."""
    if not _verifies_trees(runner.model_runner):
        return original(runner, num_tokens)
    return _dummy(runner.captured_req_width, runner.buffers.custom_mask)


def dummy_verify_input(original: Original, spec_algorithm: Any, *rest: Any) -> Any:
    """As captured_spec_info, for the warm-up."""
    custom_mask, num_tokens_per_req, is_draft_worker = rest[-3:]  # behind the arguments, in 0.5.17
    if is_draft_worker or not _is_tree_algorithm(spec_algorithm):
        return original(spec_algorithm, *rest)
    return _dummy(num_tokens_per_req, custom_mask)


def row_headroom(original: Original, *server_args: Any) -> int:
    """Columns of req_to_token beyond the context: the scheduler reserves two rounds, stock's rows end before them."""
    from sglang.srt.runtime_context import get_spec

    extra = int(original(*server_args))
    settled = server_args[0] if server_args else get_spec()
    if not _is_ours(settled):
        return extra
    return max(extra, 2 * int(settled.speculative_num_draft_tokens) + 4)


def mask_headroom(original: Original, *, max_context_len: int, **named: Any) -> Any:
    """The mask that graphs read: with overlap a finished request's last round lies up to a block past the context."""
    from sglang.srt.runtime_context import get_spec

    settled = get_spec()
    extra = int(settled.speculative_dflash_block_size) if _is_ours(settled) else 0
    return original(max_context_len=max_context_len + extra, **named)


def relays_hidden_states(original: Original, *server_args: Any) -> bool:
    """Whether drafts want the target's hidden states by way of the scheduler: stock knows that of DFLASH by name."""
    from sglang.srt.runtime_context import get_spec

    return not _is_ours(get_spec()) and bool(original(*server_args))


def refuse_request(original: Original, req: Any, enable_overlap: bool) -> str | None:
    """Why a request cannot be served: what stock DFLASH refuses, and custom_params that this server cannot honour."""
    from sglang.srt.runtime_context import get_spec

    reason = original(req, enable_overlap)
    if reason is not None or not _is_ours(get_spec()):
        return None if reason is None else str(reason)
    if Options.read().mode != "linear":
        for asked, told in NOT_GIVEN:  # SGLang refuses some of them itself
            if getattr(req, asked, False):
                return f"DDTREE gives no {told} where trees are verified: ask without {asked}, or of a linear server"
    return Options.read().refusal(req.sampling_params.custom_params, int(get_spec().speculative_dflash_block_size))


def drafted_embeddings(result: Any, model_runner: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
    """After the arguments of a forward without a graph: stock makes a block's embeddings bfloat16 in every model."""
    if model_runner.is_draft_worker and _is_algorithm(model_runner.spec_algorithm) and "input_embeds" in result:
        result["input_embeds"] = forward_batch.input_embeds
    return result


def count_rounds(result: Any, reporter: Any, bs: int, num_correct_drafts: int, *rest: Any, **named: Any) -> None:
    """After SGLang has counted a batch's rounds: count them beside it."""
    told = reporter.enable_metrics and reporter.is_stats_logging_rank  # of tensor-parallel ranks, one
    if told and _is_algorithm(reporter.scheduler.spec_algorithm):
        metrics.count(bs, num_correct_drafts, int(named.get("num_cap_tokens", 0)))


def tell_state(result: Any, scheduler: Any, *rest: Any, **named: Any) -> None:
    """After the scheduler has told what /server_info shows: the options, and whether trees go by a pairwise head."""
    if _is_algorithm(scheduler.spec_algorithm):
        pairs = getattr(scheduler.draft_worker, "pairs", None)  # a linear server's worker is stock's
        options = asdict(Options.read()) | {"pairwise": "off" if pairs is None else "on"}
        result.internal_state["ddtree"] = options


def _dummy(width: int, mask: Any) -> Any:
    from ddtree.sglang.verify import TreeVerifyInput

    return TreeVerifyInput.dummy(width, mask)


def _verifies_trees(model_runner: Any) -> bool:
    return not model_runner.is_draft_worker and _is_tree_algorithm(model_runner.spec_algorithm)


def _is_tree_algorithm(algorithm: Any) -> bool:
    return _is_algorithm(algorithm) and Options.read().mode != "linear"


def _is_algorithm(algorithm: Any) -> bool:
    return getattr(algorithm, "name", None) == "DDTREE"


def _is_ours(settled: Any) -> bool:
    return str(settled.speculative_algorithm).upper() == "DDTREE"
