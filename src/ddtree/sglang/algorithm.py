"""DDTREE as SGLang's registry wants it, and how it settles the server's arguments."""

import logging
from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from ddtree.errors import InvalidOption
from ddtree.sglang import tails
from ddtree.sglang.adapters import adapter
from ddtree.sglang.options import Options

NAME = "DDTREE"
MASKING_BACKENDS = {"triton", "flashinfer"}  # attention backends that verify a tree by its mask; tests add theirs
DEFAULT_BLOCK = 16
NOT_WITH_TREES = (  # rounds return no such things, and are whole batches on one stream
    "enable_return_routed_experts",
    "enable_return_indexer_topk",
    "enable_two_batch_overlap",
    "enable_pdmux",
)

logger = logging.getLogger(__name__)


class DDTreeAlgorithm(CustomSpecAlgo):  # type: ignore[misc]
    """A member of the DFLASH family whose target verifies a tree instead of the drafter's block."""

    def is_dflash(self) -> bool:
        """SGLang captures the target's hidden states and reserves slots as it does for DFLASH."""
        return True

    def is_dflash_family(self) -> bool:
        """See is_dflash."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The drafter's block goes through a verify forward."""
        return True

    def supports_grammar_overlap(self) -> bool:
        """The worker advances grammars by the scheduler's barrier, while the target computes."""
        return True

    # The scheduler calls these three, which SGLang's own base class lacks.

    def need_topk(self) -> bool:
        """No candidates travel between rounds."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Nor do hidden states."""
        return False

    def create_future_map(
        self, device: Any, pool: Any, needs_cpu_seq_lens: bool = True, *rest: Any, **named: Any
    ) -> Any:
        """What carries a round's outcome to the next one under overlap."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, pool, needs_cpu_seq_lens, *rest, **named)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows of one request: the drafter's block, or what the target verifies."""
        if not is_draft_worker:
            return num_draft_tokens
        from sglang.srt.runtime_context import get_spec

        return int(get_spec().speculative_dflash_block_size)

    def handle_server_args(self, server_args: Any) -> None:
        """Settle the block as SGLang does for DFLASH; then make room for the rows of the mode.

        Afterwards speculative_dflash_block_size is the drafter's block, speculative_num_draft_tokens the target's rows.
        Raises InvalidOption (a ValueError is what SGLang raises for its own arguments) for what cannot be combined.
        """
        from sglang.srt.arg_groups import speculative_hook

        options = Options.read()
        block = server_args.speculative_dflash_block_size
        if block and server_args.speculative_num_draft_tokens == options.rows(int(block)):
            server_args.speculative_num_draft_tokens = int(block)  # handled already, in another process
            server_args.speculative_eagle_topk = 1
        speculative_hook._handle_dflash(adapter().record(server_args))
        block = int(server_args.speculative_num_draft_tokens or DEFAULT_BLOCK)
        server_args.speculative_dflash_block_size = block
        server_args.speculative_num_draft_tokens = options.rows(block)
        if options.mode == "linear":
            _check_chain(server_args)
        else:
            tails.wanted()  # or its variable is refused now, before anything loads
            _check(server_args)
            server_args.speculative_eagle_topk = 2  # above 1, recurrent layers keep a state for every row of a tree
        logger.info(
            "DDTREE: mode %s, %d rows a request, block %d, budget %d, top-k %d, pairwise %s",
            options.mode,
            server_args.speculative_num_draft_tokens,
            block,
            options.budget,
            options.top_k,
            options.pairwise,
        )


def _check_chain(server_args: Any) -> None:
    """What SGLang refuses of DFLASH by that name, which ours is not."""
    from sglang.srt.configs.hybrid_arch import kimi_linear_config

    lazy = server_args.mamba_radix_cache_strategy == "extra_buffer_lazy"
    if lazy and not adapter().lazy_chain:
        raise InvalidOption(
            "DDTREE's linear mode is SGLang's DFLASH worker, which does not keep states by "
            "--mamba-radix-cache-strategy extra_buffer_lazy: take extra_buffer"
        )
    if server_args.enable_linear_replayssm_spec and kimi_linear_config(adapter().model_config(server_args)) is None:
        raise InvalidOption(
            "DDTREE's linear mode is SGLang's DFLASH worker, which takes --enable-linear-replayssm-spec with KDA "
            "models (Kimi Linear) alone: drop it"
        )


def _check(server_args: Any) -> None:
    """Refuse by name what a tree cannot be combined with; recurrent layers, if there are any, verify by Triton."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    view = resolved_view(server_args)
    prefill, decode = attention_backends_of(view)
    verifies = decode if server_args.speculative_attention_mode == "decode" else prefill
    if verifies not in MASKING_BACKENDS:
        raise InvalidOption(
            f"DDTREE needs an attention backend that takes a tree's mask ({', '.join(sorted(MASKING_BACKENDS))}), not "
            f"{verifies}: add --attention-backend triton, or --speculative-ddtree-mode linear"
        )
    if view.page_size not in (None, 1):
        raise InvalidOption(
            f"DDTREE moves single tokens of the cache, but the page size is {view.page_size}: add --page-size 1, or "
            "--speculative-ddtree-mode linear"
        )
    _check_placement(server_args)
    _check_acceptance(server_args)
    if server_args.linear_attn_verify_backend not in (None, "triton") or server_args.enable_linear_replayssm_spec:
        raise InvalidOption(
            "DDTREE's trees go through recurrent layers by SGLang's Triton kernels alone: drop "
            "--linear-attn-verify-backend and --enable-linear-replayssm-spec, or --speculative-ddtree-mode linear"
        )
    server_args.linear_attn_verify_backend = "triton"
    _check_recurrent(server_args)
    if server_args.speculative_draft_window_size is not None:
        raise InvalidOption(
            "DDTREE's trees know no --speculative-draft-window-size: drop it, or --speculative-ddtree-mode linear"
        )


def _check_placement(server_args: Any) -> None:
    """Requests and their caches that lie on several servers, or are cut up; and what rounds do not return."""
    parallel = adapter().data_parallel_attention(server_args) or (server_args.dcp_size or 1) > 1
    if parallel or server_args.disaggregation_mode not in (None, "null"):
        raise InvalidOption(
            "DDTREE's trees want a request's whole cache in one server: drop --enable-dp-attention (--attn-dp-size), "
            "--dcp-size and --disaggregation-mode, or --speculative-ddtree-mode linear"
        )
    for name in NOT_WITH_TREES:
        if getattr(server_args, name):
            raise InvalidOption(
                f"DDTREE's trees do not go with --{name.replace('_', '-')}: drop it, or add "
                "--speculative-ddtree-mode linear"
            )


def _check_acceptance(server_args: Any) -> None:
    """A tree's path is accepted by the tokens that were drawn, and by nothing else."""
    from sglang.srt.environ import envs

    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if getattr(server_args, name) not in (None, 1.0):
            raise InvalidOption(
                f"DDTREE's trees keep the target's own distribution, and know no --{name.replace('_', '-')}: drop it, "
                "or add --speculative-ddtree-mode linear"
            )
    if envs.SGLANG_SIMULATE_ACC_LEN.get() > 0:
        raise InvalidOption(
            "DDTREE's trees simulate no acceptance: unset SGLANG_SIMULATE_ACC_LEN, or add "
            "--speculative-ddtree-mode linear"
        )


def _check_recurrent(server_args: Any) -> None:
    """SGLang's convolution of a tree takes states of the model's own type alone; they are bfloat16 in any model."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.mamba_utils import mamba2_state_dtype

    model = adapter().model_config(server_args)
    recurrent = mambaish_config(model)
    if recurrent is None:
        return
    state, own = (str(one).removeprefix("torch.") for one in (mamba2_state_dtype(recurrent).conv, model.dtype))
    if state != own:
        raise InvalidOption(
            f"SGLang keeps the convolution states of recurrent layers in {state}, and its kernel for trees wants the "
            f"model's {own}: set SGLANG_MAMBA_CONV_DTYPE={own} in the environment, or --dtype {state}, or "
            "--speculative-ddtree-mode linear"
        )
