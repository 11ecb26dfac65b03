"""The round: draft a block, grow the tree, verify it under its mask, accept a path, commit it, feed the drafter."""

from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import (
    GrammarTree,
    build_grammar_vocab_mask,
    commit_mamba_states_after_verify,
    prepare_mamba_track_for_verify,
)
from torch import Tensor

from ddtree import kernels
from ddtree.kernels import PlanRow
from ddtree.sglang import limits, metrics, tails
from ddtree.sglang import rows as lay
from ddtree.sglang.adapters import adapter
from ddtree.sglang.choose import adjust, choose, takes_argmax
from ddtree.sglang.head import Drafted, TopKHead, plain_weight
from ddtree.sglang.options import Options
from ddtree.sglang.pairwise import Pairs, load
from ddtree.sglang.penalties import Penalties
from ddtree.sglang.room import Room, View, verifying
from ddtree.sglang.stages import StageClock
from ddtree.sglang.tails import Growth, Keeping
from ddtree.sglang.verify import TreeVerifyInput


class DDTreeWorker(DFlashWorkerV2):  # type: ignore[misc]
    """SGLang's DFLASH worker with a round of its own for decoding; prefill and start are SGLang's."""

    def __init__(self, server_args: Any, *rest: Any, **named: Any) -> None:
        self.options, self.sglang = Options.read(), adapter()
        block = int(self.sglang.setting(server_args, "speculative_dflash_block_size"))
        self.width, self.depth = self.options.rows(block), block - 1
        limits.check_rows(self.width, int(self.sglang.setting(server_args, "speculative_num_draft_tokens")))
        with self.sglang.draft_arguments(server_args, block) as draft_args:
            super().__init__(draft_args, *rest, **named)
        self.sglang.started(self)
        self.server_args = server_args
        self.group = get_tp_group()
        # What cannot be had is refused now.
        runner = self.model_runner
        limits.check_latent(verifying(self.sglang, runner), runner.use_mla_backend)
        limits.check_window(runner.sliding_window_size, runner.model_config.context_len, self.width)
        weight, _ = plain_weight(getattr(self.model_runner.model, "lm_head", None), self.group.world_size)
        cache = self.sglang.setting(server_args, "download_dir")
        drafter, vocab_size = self.draft_model_runner.model_config, self.model_runner.model_config.vocab_size
        paired = load(self.options.pairwise, drafter, vocab_size, cache)
        self.pairs = None if paired is None else Pairs(paired, weight, self.group)
        # One rank counts: SGLang adds up what all processes say.
        counted = self.sglang.setting(server_args, "enable_metrics") and self.group.rank_in_group == 0
        self.clock = StageClock(self.device, metrics.count_stage if counted else None)
        self._head: TopKHead | None = None
        self.usual = self.options.plan(None, block)
        self._shadowed = False  # whether a request of this round verifies a tree beside the chain that it commits
        self._room: Room | None = None  # for batches beyond the graphs
        self._graphs: Room | None = None  # what captured graphs read and write
        self._penalties = Penalties(self.device)
        self._keeping: Keeping | None = None
        if tails.wanted() and self.sglang.tails:
            self._keeping = Keeping(self, self.usual.tree and self.usual.chain)
            self.model_runner.capture_tail_hooks.append(self._keeping.capture)

    def alloc_memory_pool(self, *rest: Any, **named: Any) -> None:
        """The draft side's."""
        with self.sglang.draft_side(self.block_size):
            super().alloc_memory_pool(*rest, **named)

    def init_attention_backends(self) -> None:
        """The draft side's."""
        with self.sglang.draft_side(self.block_size):
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        """The draft side's."""
        with self.sglang.draft_side(self.block_size):
            super().init_cuda_graphs()

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Stock warns where its own sampling needs a GPU; ours is SGLang's sampler, which runs everywhere."""

    def _maybe_build_draft_sampler(self) -> TopKHead | Growth | None:
        """What SGLang captures into the draft graph."""
        stock = super()._maybe_build_draft_sampler()
        if stock is None:
            return None
        head = self._make_head(stock.out.shape[0] // self.depth)
        return head if self._keeping is None else Growth(head, self.graph_room(), self.pairs)

    def forward_batch_generation(self, batch: Any, *rest: Any, **named: Any) -> Any:
        """Stock for prefill and idle batches, else one round."""
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle() or batch.spec_info is None:
            if mode.is_extend():
                self._penalties.begin(batch.reqs, batch.sampling_info)
            return super().forward_batch_generation(batch, *rest, **named)
        named.pop("pp_proxy_tensors", None)  # 0.5.23 gives it, None; DFLASH knows no pipeline
        return self.round(batch, *rest, **named)

    def round(self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None) -> Any:
        """One round of all running requests."""
        clock, lengths, room = self.clock, batch.seq_lens, self._room_for(batch)
        size = len(lengths)
        now = room.view(size)
        clock.start()
        if lengths.is_cuda:  # it may come from another stream
            lengths.record_stream(torch.cuda.current_stream())
        # A DFLASH-family verify tells the scheduler that req_to_token may be reused as soon as its graph starts, so
        # every slot is looked up before it.
        table = self.model_runner.req_to_token_pool.req_to_token
        bonus, pool, mask_token = batch.spec_info.bonus_tokens, batch.req_pool_indices, int(self._mask_token_id)
        keeping = self._keeping if room is self._graphs and takes_argmax(batch) else None
        if keeping is not None and not keeping.ends(self._shadowed):
            keeping = None
        committed = 0 if keeping is None else size
        lay.stage(bonus, lengths, pool, table, room.state, now.block, mask_token, room.commits, committed)
        proposal = self.propose(batch, now.block)
        clock.mark("draft")
        if proposal is not None:
            tails.grow(proposal, self.pairs, room)
        output, graph, forward, mask = self._verify(batch, room, now, proposal is None, grammar_barrier)
        clock.mark("verify")
        if keeping is not None and graph:  # which has moved it all
            kept = keeping.read(self.captured(self.model_runner), size)
        else:
            kept = self._accept(batch, room, now, output.next_token_logits, mask)
        if on_publish is not None:
            on_publish(kept.lengths)
        clock.mark("accept")
        if self._need_mamba_verify_commit:
            commit_mamba_states_after_verify(self.target_worker, batch, kept.counts, kept.index, self.width)
        if keeping is None or not graph:
            self.move(kept, now.block, output.hidden_states)
        clock.mark("commit")
        output.hidden_states = None  # large; the scheduler would copy it to the host
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=kept.tokens,
            accept_lens=kept.counts,
            cap_lens=kept.tree_counts if self._shadowed else None,
            can_run_cuda_graph=graph,
            next_draft_input=self._make_next_draft_input_decode(bonus_tokens=kept.bonus, new_seq_lens=kept.lengths),
            speculative_num_draft_tokens=self.block_size,
            new_seq_lens=kept.lengths,
            extra_keep_alive_refs=[forward],
        )

    def propose(self, batch: Any, block: lay.Block) -> Drafted | None:
        """The drafter's candidates; None where the draft graph has already grown the rows from them."""
        size, embeds = len(block.ids), self.sglang.embed(self, block.ids)
        lengths, total = self._bounds(batch, self.block_size)
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            input_ids=block.ids.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=block.slots.view(-1),
            seq_lens_sum=total,
            seq_lens_cpu=lengths.to(torch.int32),
            positions=block.positions.view(-1),
            input_embeds=embeds.view(-1, embeds.shape[-1]),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with torch.inference_mode():
            out = self.sglang.draft(self, batch, forward, self.block_size)
            if self._draft_sampler is not None and out.can_run_graph:
                return None if isinstance(self._draft_sampler, Growth) else self._draft_sampler.read(size)
            if self._head is None or self._head.batch < size:
                self._head = self._make_head(size)
            self._head(out.logits_output.hidden_states)
            return self._head.read(size)

    def _verify(self, batch: Any, room: Room, now: View, grown: bool, barrier: Any) -> tuple[Any, bool, Any, Any]:
        """The target over the rows: its output, whether a graph ran, what must live on, the grammar's mask."""
        rows, links, lengths = now.rows, now.links, now.block.lengths
        host_lengths, total = self._bounds(batch, self.width)
        buffer, mask = room.mask.take(lengths, total)
        if not (grown and self._draft_sampler.has_laid(self.captured(self.draft_model_runner), buffer)):
            lay.lay(rows, lengths, buffer, links, prefix=room.mask.prefix)
        verify = TreeVerifyInput.of(
            self.width,
            self.depth,
            mask,
            draft_token=rows.tokens.view(-1),
            positions=links.positions.view(-1),
            retrieve_index=now.index,
            retrieve_next_token=links.first_child,
            retrieve_next_sibling=links.next_sibling,
        )
        batch.out_cache_loc = now.block.row_slots.view(-1)
        grammar = None
        if batch.has_grammar:
            grammar = GrammarTree.from_device(links.first_child, links.next_sibling, rows.tokens)
        if self._need_mamba_verify_commit:
            prepare_mamba_track_for_verify(batch)
        before = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = host_lengths, total
        forward, graph = DFlashVerifyInput.prepare_for_verify(verify, batch, self.target_worker)  # of any verify input
        batch.seq_lens_cpu, batch.seq_lens_sum = before
        self.clock.mark("build")
        out = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward, is_verify=True, skip_attn_backend_init=True
        )
        grammar_mask = None
        if grammar is not None:  # host work, while the target computes
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar,
                sampling_info=batch.sampling_info,
                device=lengths.device,
                barrier=barrier,
            )
        return out.logits_output, graph, forward, grammar_mask

    def _accept(self, batch: Any, room: Room, now: View, logits: Tensor, grammar_mask: Any) -> lay.Kept:
        """The path that the target's own tokens follow, and what it keeps. logits: [B * N, V], overwritten."""
        rows, info = now.rows, batch.sampling_info
        penalties = self._penalties.of(batch.reqs, info, rows.tokens[:, 0], now.block.lengths)
        adjust(logits, info, rows, grammar_mask, penalties)
        own = choose(logits, info, now.links.positions, self.model_runner.sampler, self.group)
        tree = None
        if self._shadowed:
            accepted = kernels.accept(rows, own, self.depth, now.member)
            tree = kernels.accept(rows, own, self.depth, now.tree).count, now.shadows
        else:
            accepted = kernels.accept(rows, own, self.depth)
        if penalties is not None:
            penalties.keep(accepted)
        kept = lay.Kept.allocate(len(own), self.block_size, own.device)
        lay.commit(accepted, now.block.lengths, now.block.row_slots, kept, tree)
        return kept

    def move(self, kept: lay.Kept, block: lay.Block, hidden: Tensor) -> None:
        """Commit a path's keys and values, and the drafter's context. hidden: [B * N, features] of the rows."""
        cache = self.model_runner.token_to_kv_pool_allocator.get_kvcache()
        cache.move_kv_cache(kept.to_slots.view(-1), kept.from_slots.view(-1))
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden[kept.features.view(-1)],
            cache_loc=kept.to_slots.view(-1),
            cache_loc_2d=kept.to_slots,
            positions=block.positions.view(-1),
            commit_lens=kept.counts,
        )

    def captured(self, runner: Any) -> int:
        """Requests of the graph that a runner replayed last."""
        return int(runner.decode_cuda_graph_runner.bs)

    def graph_room(self) -> Room:
        """What graphs read and write, of any number of requests that one is captured for."""
        if self._graphs is None:
            with torch.inference_mode(False):  # written later on, in that mode or out of it
                self._graphs = Room(self, max(get_exec().graph.cuda_graph_config.decode.bs))
        return self._graphs

    def _bounds(self, batch: Any, extra: int) -> tuple[Tensor, int]:
        """Lengths for the host's planning, which may be too large: with overlap the host does not know them."""
        reserved, total = self.sglang.reserved(batch.spec_info)
        if batch.seq_lens_cpu is not None:
            lengths = batch.seq_lens_cpu + extra
        elif reserved is not None and total is not None:
            return reserved, int(total)
        else:
            lengths = batch.seq_lens.cpu() + extra
        return lengths, int(lengths.sum())

    def _make_head(self, batch: int) -> TopKHead:
        head = getattr(self.model_runner.model, "lm_head", None)
        return TopKHead(head, self.group, self.block_size, self.options.top_k, batch)

    def _room_for(self, batch: Any) -> Room:
        """The tensors of a round, with the plan of these requests."""
        size, room = len(batch.seq_lens), self._graphs
        if room is None or room.size < size:
            if self._room is None or self._room.size < size:
                self._room = Room(self, size)
            room = self._room
        plans = [self._plan_of(req.sampling_params.custom_params) for req in batch.reqs]
        self._shadowed = room.tell(plans, self.width)
        return room

    def _plan_of(self, custom: dict[str, Any] | None) -> PlanRow:
        return self.options.granted(custom, self.block_size) if custom else self.usual
