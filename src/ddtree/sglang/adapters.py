"""Where the releases of SGLang differ in what the plug-in asks of them: one adapter for each that is known.

What they share is called where it is used. Nothing is imported from SGLang before it is asked for something.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ddtree.errors import InvalidOption, UnsupportedModel
from ddtree.sglang import compat

DEFAULT_BACKEND = "sglang.srt.server_args.ServerArgs._handle_attention_backend_compatibility"


class Release0517:
    """The arguments are one object, which each process settles for itself; the draft side is given a copy."""

    moved: Mapping[str, str] = MappingProxyType({})  # where a hook's target went since 0.5.17
    warning: str | None = None
    tails = True  # whether SGLang's graphs are captured with the ends of our rounds
    lazy_chain = False  # whether DFLASH keeps recurrent states by the strategy extra_buffer_lazy

    # --- arguments, while they are settled

    def record(self, server_args: Any) -> Any:
        """What SGLang's own functions settle, of what a registered algorithm is given."""
        return server_args

    def model_config(self, server_args: Any) -> Any:
        """The target's configuration."""
        return server_args.get_model_config()

    def settled(self, server_args: Any) -> Any:
        """What reads the arguments as they are settled so far."""
        return server_args

    def name_attention(self, server_args: Any, backend: str) -> None:
        """Choose the attention backend, where the user named none."""
        server_args.attention_backend = backend

    def data_parallel_attention(self, server_args: Any) -> bool:
        """Whether requests are spread over ranks that attend alone; stock DFLASH refuses that itself in 0.5.17."""
        return False

    # --- arguments, in a running server

    def setting(self, server_args: Any, name: str) -> Any:
        """One argument."""
        return getattr(server_args, name)

    def attention_backends(self, runner: Any) -> tuple[str, str]:
        """Those of prefill and of decoding."""
        prefill, decode = runner.server_args.get_attention_backends()
        return prefill, decode

    # --- the worker

    @contextmanager
    def draft_arguments(self, server_args: Any, block: int) -> Iterator[Any]:
        """The arguments for the draft side, which drafts one block, in a chain."""
        own = deepcopy(server_args)
        own.override("ddtree.draft", speculative_num_draft_tokens=block, speculative_eagle_topk=1)
        yield own

    def draft_side(self, block: int) -> AbstractContextManager[Any]:
        """Around what builds the draft side's pools, backends and graphs."""
        return nullcontext()

    def started(self, worker: Any) -> None:
        """After the worker's own start. Raises UnsupportedModel for drafters that trees cannot be grown from."""

    def embed(self, worker: Any, ids: Tensor) -> Tensor:
        """The embeddings of a block, [B, block, H], that the drafter takes. ids: [B, block]."""
        embeds: Tensor = worker.model_runner.model.get_input_embeddings()(ids)
        return embeds

    def draft(self, worker: Any, batch: Any, forward: Any, block: int) -> Any:
        """Run the draft model over a block."""
        return worker.draft_model_runner.forward(forward)

    def reserved(self, draft_input: Any) -> tuple[Tensor | None, int | None]:
        """The lengths that the host reserved for each request, and their sum; None where it did not."""
        return draft_input.reserved_seq_lens_cpu, draft_input.reserved_seq_lens_sum


class Release0523(Release0517):
    """The settled arguments lie in namespaces of the process, target and draft alike; slots are planned for a round."""

    moved = MappingProxyType(
        {DEFAULT_BACKEND: "sglang.srt.arg_groups.attention_hook.handle_attention_backend_compatibility"}
    )
    lazy_chain = True
    tails = False  # its graphs were read, but not run: what lies in them would be hard to see
    warning = "DDTREE was run in SGLang 0.5.23 on a CPU alone, never on a GPU: compare its answers with plain SGLang's"

    def record(self, server_args: Any) -> Any:
        from sglang.srt.arg_groups.overrides import record_of

        view = getattr(server_args, "_cfg", None)  # of the stand-in that takes a plug-in's assignments
        return server_args if view is None else record_of(view)

    def model_config(self, server_args: Any) -> Any:
        from sglang.srt.arg_groups.overrides import model_config_of

        return model_config_of(self.record(server_args))

    def settled(self, server_args: Any) -> Any:
        from sglang.srt.arg_groups.overrides import resolving_view

        return resolving_view(server_args)

    def name_attention(self, server_args: Any, backend: str) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, "ddtree", attention_backend=backend)

    def data_parallel_attention(self, server_args: Any) -> bool:
        from sglang.srt.runtime_context import attn_dp_enabled_of

        return bool(attn_dp_enabled_of(server_args))

    def setting(self, server_args: Any, name: str) -> Any:
        from sglang.srt.runtime_context import get_context

        return get_context().config_leaf(name)

    def attention_backends(self, runner: Any) -> tuple[str, str]:
        from sglang.srt.runtime_context import attention_backends

        prefill, decode = attention_backends()
        return prefill, decode

    @contextmanager
    def draft_arguments(self, server_args: Any, block: int) -> Iterator[Any]:
        with self.draft_side(block):
            yield server_args

    def draft_side(self, block: int) -> AbstractContextManager[Any]:
        from sglang.srt.runtime_context import get_spec

        own: AbstractContextManager[Any] = get_spec().override(
            speculative_num_draft_tokens=block, speculative_eagle_topk=1
        )
        return own

    def started(self, worker: Any) -> None:
        kinds = {"selector": worker.selector, "LiLiCorr": worker.lilicorr, "Domino": worker._is_domino}
        for kind, present in kinds.items():
            if present:
                raise UnsupportedModel(
                    f"DDTREE's trees need a DFlash drafter that proposes by the target's lm_head; this one has a "
                    f"{kind} head: use --speculative-ddtree-mode linear"
                )
        # With tensor parallelism stock leaves a chain's logits in parts, and gathers them itself.
        if worker._target_logits_processor is not None:
            worker._target_logits_processor.defer_verify_gather = False

    def embed(self, worker: Any, ids: Tensor) -> Tensor:
        from sglang.srt.lora.layers import unwrap_lora_layer
        from sglang.srt.speculative.dflash_worker_v2 import _resolve_dflash_embedding_module

        module = _resolve_dflash_embedding_module(worker.draft_model, worker.model_runner.model)
        embeds: Tensor = unwrap_lora_layer(module)(ids)
        scale = worker._noise_embed_scale
        return embeds if scale == 1.0 else embeds * scale

    def draft(self, worker: Any, batch: Any, forward: Any, block: int) -> Any:
        from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded
        from sglang.srt.speculative.spec_utils import draft_tp_context

        plan = worker.model_runner.kv_index_translator.plan(
            req_pool_indices=forward.req_pool_indices,
            seq_lens=forward.seq_lens,
            seq_lens_cpu=forward.seq_lens_cpu,
            write_virtual=forward.out_cache_loc,
            read_extent=block,
        )
        plan.bind(forward, worker.draft_model_runner.kv_index_translator)
        forward.can_run_decode_cuda_graph = batch.can_run_decode_cuda_graph
        forward.global_num_token_non_padded_cpu = rows = len(forward.input_ids)
        if enable_num_token_non_padded():
            forward.num_token_non_padded = torch.full((), rows, dtype=torch.int32, device=worker.device)
        with draft_tp_context(worker.draft_parallel_layout):
            return worker.draft_model_runner.forward(forward)

    def reserved(self, draft_input: Any) -> tuple[Tensor | None, int | None]:
        return draft_input.nxt_kv_lens_cpu, draft_input.nxt_kv_lens_sum


ADAPTERS: dict[str, Release0517] = {"0.5.17": Release0517(), "0.5.23": Release0523()}


_chosen: list[Release0517] = []


def adapter() -> Release0517:
    """That of the installed SGLang. Raises InvalidOption where it is none that the plug-in knows."""
    if not _chosen:
        read = compat.installed()
        name = compat.known(read)
        if name is None:
            raise InvalidOption(str(compat.problem(read)))
        use(name)
    return _chosen[0]


def use(name: str) -> Release0517:
    """Take the adapter of a release that has been found, so that nobody reads SGLang's source again."""
    _chosen[:] = [ADAPTERS[name]]
    return _chosen[0]
