"""The entry point that SGLang calls in each of its processes (group `sglang.srt.plugins`)."""

import logging
from typing import Any

from ddtree.sglang import adapters, compat, hooks

NAME = "DDTREE"
SRT = "sglang.srt."
logger = logging.getLogger(__name__)


def register() -> None:
    """Make `--speculative-algorithm DDTREE` known, if this release of SGLang is as the plug-in expects it.

    Otherwise says in the log what differs and which releases are known, and leaves SGLang as it is.
    """
    read = compat.installed()
    name = compat.known(read)
    if name is None:
        logger.error("%s", compat.problem(read))
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec(NAME) is not None:  # this process has done it
        return
    from ddtree.sglang.algorithm import DDTreeAlgorithm

    release = adapters.use(name)
    if release.warning:
        logger.warning("%s", release.warning)
    for target, hook, kind in HOOKS:
        HookRegistry.register(release.moved.get(SRT + target, SRT + target), hook, HookType[kind])
    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DDTreeAlgorithm)(worker_class)


HOOKS = (
    ("server_args.ServerArgs.add_cli_args", hooks.flags, "AFTER"),
    ("server_args.ServerArgs._handle_attention_backend_compatibility", hooks.attention_default, "BEFORE"),
    (
        "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        hooks.captured_spec_info,
        "AROUND",
    ),
    ("model_executor.runner.base_runner.create_dummy_verify_input", hooks.dummy_verify_input, "AROUND"),
    ("mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len", hooks.row_headroom, "AROUND"),
    ("layers.attention.verify_mask.maybe_create_verify_mask", hooks.mask_headroom, "AROUND"),
    ("speculative.spec_utils.spec_need_hidden_states", hooks.relays_hidden_states, "AROUND"),
    ("model_executor.model_runner.ModelRunner._extend_forward_kwargs", hooks.drafted_embeddings, "AFTER"),
    (
        "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.update_spec_metrics",
        hooks.count_rounds,
        "AFTER",
    ),
    ("managers.scheduler.validate_dflash_request", hooks.refuse_request, "AROUND"),
    ("managers.scheduler.Scheduler.get_internal_state", hooks.tell_state, "AFTER"),
)


def worker_class(server_args: Any) -> Any:
    """The worker that SGLang builds: in linear mode its own, of DFLASH."""
    from ddtree.sglang.options import Options

    if Options.read().mode == "linear":
        from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

        return DFlashWorkerV2
    from ddtree.sglang.worker import DDTreeWorker

    return DDTreeWorker
