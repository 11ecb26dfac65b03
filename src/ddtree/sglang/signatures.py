# ruff: noqa: E501 (a signature is one string)
"""The functions and fields of SGLang that the plug-in calls, hooks or overrides, by release."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Release:
    """One release of SGLang. Places are written module:name, modules without `sglang.srt.`."""

    signatures: Mapping[str, str] = field(default_factory=dict)  # parameters with defaults, without types
    fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names that a class must have
    imports: Mapping[str, tuple[str, ...]] = field(
        default_factory=dict
    )  # names that a module must import, to be hooked

    def changed(self, signatures: Mapping[str, str | None], fields: Mapping[str, tuple[str, ...] | None]) -> "Release":
        """A later release: what differs in it. None: the place is not there any more, or not relied on."""
        return replace(
            self,
            signatures=_without_none({**self.signatures, **signatures}),
            fields=_without_none({**self.fields, **fields}),
        )


def _without_none(places: Mapping[str, T | None]) -> dict[str, T]:
    return {place: value for place, value in places.items() if value is not None}


_0_5_17 = Release(
    signatures={
        "plugins.hook_registry:HookRegistry.register": "(cls, target, hook, hook_type=HookType.AFTER, *, source=None)",
        "speculative.spec_info:SpeculativeAlgorithm.register": "(cls, name, *, supports_overlap=False, validate_server_args=None, spec_class=CustomSpecAlgo)",
        "speculative.spec_registry:CustomSpecAlgo.get_num_tokens_per_req_for_target_verify": "(self, num_draft_tokens, is_draft_worker)",
        "speculative.spec_registry:CustomSpecAlgo.handle_server_args": "(self, server_args)",
        "speculative.spec_registry:get_spec": "(name)",
        "managers.overlap_utils:FutureMap.__init__": "(self, device, spec_algo, req_to_token_pool, needs_cpu_seq_lens=True, needs_confidence_relay=False)",
        "server_args:ServerArgs.add_cli_args": "(parser)",
        "server_args:ServerArgs._handle_attention_backend_compatibility": "(self)",
        "server_args:ServerArgs.override": "(self, source, **fields)",
        "server_args:ServerArgs.get_attention_backends": "(self)",
        "server_args:ServerArgs.get_model_config": "(self)",
        "configs.hybrid_arch:mambaish_config": "(model_config)",
        "configs.mamba_utils:mamba2_state_dtype": "(config=None)",
        "arg_groups.speculative_hook:_handle_dflash": "(server_args)",
        "arg_groups.overrides:attention_backends_of": "(cfg)",
        "arg_groups.overrides:resolved_view": "(server_args)",
        "model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.get_spec_info": "(self, num_tokens)",
        "speculative.spec_info:create_dummy_verify_input": "(spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker)",
        "mem_cache.allocation_sizing:get_req_to_token_extra_context_len": "(server_args)",
        "speculative.spec_utils:spec_need_hidden_states": "(server_args=None)",
        "speculative.dflash_utils:validate_dflash_request": "(req, enable_overlap)",
        "model_executor.model_runner:ModelRunner._extend_forward_kwargs": "(self, forward_batch, pp_proxy_tensors)",
        "speculative.dflash_worker_v2:DFlashWorkerV2.__init__": "(self, server_args, gpu_id, ps, nccl_port, target_worker)",
        "speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation": "(self, batch, on_publish=None, grammar_barrier=None)",
        "speculative.dflash_worker_v2:DFlashWorkerV2._maybe_build_draft_sampler": "(self)",
        "speculative.dflash_worker_v2:DFlashWorkerV2._validate_phase1_sampling_support": "(self, batch)",
        "speculative.dflash_worker_v2:DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc": "(self, *, target_hidden, cache_loc, positions, cache_loc_2d=None, commit_lens=None)",
        "speculative.dflash_worker_v2:DFlashWorkerV2._make_next_draft_input_decode": "(self, *, bonus_tokens, new_seq_lens)",
        "speculative.dflash_worker_v2:_DflashDraftSampler.__call__": "(self, hidden_states, input_ids=None)",
        "speculative.draft_worker_common:make_draft_sampler_capture_hook": "(draft_sampler)",
        "speculative.dflash_info:DFlashVerifyInput.prepare_for_verify": "(self, batch, target_worker)",
        "speculative.spec_utils:GrammarTree.from_device": "(cls, retrieve_next_token, retrieve_next_sibling, draft_token)",
        "speculative.spec_utils:build_grammar_vocab_mask": "(*, reqs, tree, sampling_info, device, barrier)",
        "speculative.spec_utils:commit_mamba_states_after_verify": "(target_worker, batch, accept_lens, accept_index, draft_token_num)",
        "speculative.spec_utils:prepare_mamba_track_for_verify": "(batch)",
        "layers.sampler:Sampler.forward": "(self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)",
        "layers.sampler:apply_custom_logit_processor": "(logits, sampling_batch_info, num_tokens_in_batch=1)",
        "managers.scheduler:Scheduler.get_internal_state": "(self, recv_req)",
        "managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter.update_spec_metrics": "(self, bs, num_correct_drafts, num_block_accept_tokens=0, num_cap_tokens=0)",
        "managers.tp_worker:TpModelWorker.forward_batch_generation": "(self, batch, forward_batch=None, pp_proxy_tensors=None, is_verify=False, skip_attn_backend_init=None, *, capture_hidden_mode=None)",
        "mem_cache.memory_pool:MHATokenToKVPool.move_kv_cache": "(self, tgt_loc, src_loc)",
        "runtime_context:get_exec": "()",
        "layers.attention.verify_mask:VerifyMask.fits": "(self, bs)",
        "distributed.parallel_state:GroupCoordinator.all_gather_into_tensor": "(self, output, input)",
        "distributed.parallel_state:GroupCoordinator.broadcast": "(self, input_, src=0)",
    },
    fields={
        "speculative.dflash_worker_v2:DFlashWorkerV2": (
            "block_size",
            "model_runner",
            "draft_model_runner",
            "_draft_sampler",
            "_draft_block_spec_info",
            "_fused_kv_helper",
            "_mask_token_id",
            "_need_mamba_verify_commit",
            "device",
        ),
        "model_executor.model_runner:ModelRunner": ("capture_tail_hooks",),
        "speculative.dflash_info_v2:DFlashDraftInputV2": (
            "bonus_tokens",
            "reserved_seq_lens_cpu",
            "reserved_seq_lens_sum",
        ),
        "speculative.eagle_info:EagleVerifyInput": (
            "draft_token",
            "custom_mask",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "retrieve_cum_len",
            "spec_steps",
            "topk",
            "draft_token_num",
            "capture_hidden_mode",
            "seq_lens_sum",
            "seq_lens_cpu",
            "max_tree_depth",
            "tree_topk",
        ),
        "managers.utils:GenerationBatchResult": (
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "cap_lens",
            "can_run_cuda_graph",
            "next_draft_input",
            "speculative_num_draft_tokens",
            "new_seq_lens",
            "extra_keep_alive_refs",
        ),
        "model_executor.forward_batch_info:ForwardBatch": (
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "out_cache_loc",
            "seq_lens_sum",
            "seq_lens_cpu",
            "positions",
            "input_embeds",
            "spec_algorithm",
            "spec_info",
            "capture_hidden_mode",
        ),
        "sampling.sampling_batch_info:SamplingBatchInfo": (
            "temperatures",
            "top_ps",
            "top_ks",
            "min_ps",
            "sampling_seed",
            "is_all_greedy",
            "has_custom_logit_processor",
            "return_sampling_masks",
            "acc_additive_penalties",
            "logit_bias",
            "vocab_size",
        ),
        "server_args:ServerArgs": (
            "attention_backend",
            "prefill_attention_backend",
            "decode_attention_backend",
            "speculative_algorithm",
            "speculative_num_draft_tokens",
            "speculative_dflash_block_size",
            "speculative_eagle_topk",
            "speculative_draft_window_size",
            "speculative_attention_mode",
            "linear_attn_verify_backend",
            "enable_linear_replayssm_spec",
            "page_size",
            "enable_metrics",
            "disaggregation_mode",
            "dcp_size",
            "enable_return_routed_experts",
            "enable_return_indexer_topk",
            "download_dir",
        ),
        "sampling.sampling_params:SamplingParams": (
            "custom_params",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "min_new_tokens",
            "stop_token_ids",
        ),
        "managers.scheduler:Scheduler": ("spec_algorithm", "draft_worker"),
        "managers.io_struct:GetInternalStateReqOutput": ("internal_state",),
        "configs.model_config:ModelConfig": ("model_path", "revision", "vocab_size", "hidden_size"),
        "managers.schedule_batch:Req": ("sampling_params", "output_ids", "origin_input_ids", "tokenizer"),
        "layers.attention.verify_mask:VerifyMask": ("buffer",),
        "model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner": ("bs", "captured_req_width", "buffers"),
        "managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter": ("enable_metrics", "scheduler"),
    },
    imports={
        "model_executor.runner.base_runner": ("create_dummy_verify_input",),
        "mem_cache.kv_cache_configurator": ("get_req_to_token_extra_context_len",),
        "managers.scheduler": ("validate_dflash_request",),
    },
)

# 0.5.23 keeps the settled arguments in namespaces of each process, plans slots once a round, and has other names for
# some of what 0.5.17 has.
_0_5_23 = _0_5_17.changed(
    signatures={
        "server_args:ServerArgs._handle_attention_backend_compatibility": None,
        "server_args:ServerArgs.override": None,
        "server_args:ServerArgs.get_attention_backends": None,
        "server_args:ServerArgs.get_model_config": None,
        "arg_groups.overrides:attention_backends_of": None,
        "arg_groups.overrides:resolved_view": None,
        "arg_groups.model_override_base:attention_backends_of": "(cfg)",
        "arg_groups.model_override_base:resolved_view": "(server_args)",
        "arg_groups.model_override_base:resolving_view": "(server_args)",
        "arg_groups.model_override_base:record_of": "(view)",
        "arg_groups.model_override_base:model_config_of": "(server_args)",
        "arg_groups.overrides:record_foreign_defaults": "(server_args, source, resolve)",
        "arg_groups.overrides:_ForeignDefaults.__init__": "(self, server_args)",
        "arg_groups.overrides:declare_resolution": "(server_args, source, **fields)",
        "arg_groups.attention_hook:handle_attention_backend_compatibility": "(server_args)",
        "runtime_context:attention_backends": "()",
        "runtime_context:attn_dp_enabled_of": "(cfg)",
        "runtime_context:RuntimeContext.config_leaf": "(self, name)",
        "runtime_context:_ConfigBag.override": "(self, **kwargs)",
        "speculative.spec_info:create_dummy_verify_input": "(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)",
        "mem_cache.allocation_sizing:get_req_to_token_extra_context_len": "()",
        "mem_cache.kv_index_translator:KVIndexTranslator.plan": "(self, *, req_pool_indices, seq_lens, seq_lens_cpu, write_virtual, read_extent=0, write_slots=None, translated_writes=None)",
        "mem_cache.kv_loc_plan:KVLocPlan.bind": "(self, batch, reader, *, cols=None)",
        "model_executor.forward_batch_info:enable_num_token_non_padded": "()",
        "speculative.spec_utils:spec_need_hidden_states": "()",
        "speculative.spec_utils:draft_tp_context": "(layout)",
        "speculative.dflash_worker_v2:_resolve_dflash_embedding_module": "(draft_model, target_model)",
        "speculative.dflash_worker_v2:DFlashWorkerV2.__init__": "(self, server_args, gpu_id, nccl_port, target_worker)",
        "speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation": "(self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None)",
        "speculative.dflash_worker_v2:DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc": "(self, *, target_hidden, cache_loc, positions, cache_loc_2d=None, commit_lens=None, extend_lens=None)",
        "speculative.dflash_info:DFlashVerifyInput.prepare_for_verify": "(self, batch, target_worker, *, defer_metadata_init=False)",
        "speculative.spec_utils:commit_mamba_states_after_verify": "(target_worker, batch, accept_lens, accept_index, draft_token_num, prepared_step_indices=None)",
        "layers.sampler:Sampler.forward": "(self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, *, logprob_logits=None)",
        "lora.layers:unwrap_lora_layer": "(module)",
        "managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter.update_spec_metrics": "(self, bs, num_correct_drafts, num_accept_tokens, num_block_accept_tokens=0, num_cap_tokens=0)",
        "managers.tp_worker:TpModelWorker.forward_batch_generation": "(self, batch, forward_batch=None, pp_proxy_tensors=None, is_verify=False, skip_attn_backend_init=None, *, capture_hidden_mode=None, return_kv_loc_plan=False)",
    },
    fields={
        "server_args:ServerArgs": None,
        "arg_groups.overrides:_ForeignDefaults": ("_cfg",),
        "arg_groups.fields.exec_:ExecKernel": (
            "attention_backend",
            "prefill_attention_backend",
            "decode_attention_backend",
        ),
        "arg_groups.fields.exec_:ExecMamba": ("linear_attn_verify_backend", "enable_linear_replayssm_spec"),
        "arg_groups.fields.spec:Spec": (
            "speculative_algorithm",
            "speculative_num_draft_tokens",
            "speculative_dflash_block_size",
            "speculative_eagle_topk",
            "speculative_draft_window_size",
            "speculative_attention_mode",
        ),
        "arg_groups.fields.disagg:Disagg": ("disaggregation_mode",),
        "arg_groups.fields.model:Model": ("download_dir",),
        "arg_groups.fields.parallel:Parallel": ("dcp_size",),
        "arg_groups.fields.exec_:ExecFeatures": ("enable_return_routed_experts", "enable_return_indexer_topk"),
        "arg_groups.fields.schedule:Schedule": ("page_size",),
        "arg_groups.fields.observability:Observability": ("enable_metrics",),
        "model_executor.forward_batch_info:ForwardBatch": (
            *_0_5_17.fields["model_executor.forward_batch_info:ForwardBatch"],
            "can_run_decode_cuda_graph",
            "global_num_token_non_padded_cpu",
            "num_token_non_padded",
        ),
        "layers.logits_processor:LogitsProcessor": ("defer_verify_gather",),
        "speculative.dflash_info_v2:DFlashDraftInputV2": ("bonus_tokens", "nxt_kv_lens_cpu", "nxt_kv_lens_sum"),
        "speculative.dflash_worker_v2:DFlashWorkerV2": (
            *_0_5_17.fields["speculative.dflash_worker_v2:DFlashWorkerV2"],
            "draft_model",
            "draft_parallel_layout",
            "selector",
            "lilicorr",
            "_is_domino",
            "_noise_embed_scale",
            "_target_logits_processor",
        ),
    },
)

RELEASES: Mapping[str, Release] = {"0.5.17": _0_5_17, "0.5.23": _0_5_23}  # the first is the one to install
