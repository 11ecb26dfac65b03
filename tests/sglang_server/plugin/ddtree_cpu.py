"""What a machine without a GPU needs to run SGLang's DFLASH family, for tests alone. Stock has CUDA code there.

And a drafter that follows a script, since random weights are never right.
"""

import json
import os
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

GRAPHS = os.environ.get("DDTREE_TEST_GRAPHS") == "1"
GRAPH_SIZES = (1, 4)  # requests of the stand-ins for graphs
MENDED = Path(__file__).parents[2] / "mended_interpreter.py"  # no path to its folder, whose names others might find


def register():
    """SGLang's entry point. Loaded beside ddtree's own plug-in."""
    import sglang.srt.speculative.draft_worker_common as common
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ddtree.sglang import algorithm
    from ddtree.sglang.adapters import adapter

    runpy.run_path(str(MENDED))["mend"](setattr)
    algorithm.MASKING_BACKENDS.add("torch_native")
    if hasattr(common, "_SUPPORTED_DRAFT_BACKENDS"):  # 0.5.17
        common._SUPPORTED_DRAFT_BACKENDS += ("torch_native",)
    else:
        common.DRAFT_ATTENTION_BACKEND_CHOICES.append("torch_native")
        HookRegistry.register("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", murmur, HookType.AROUND)
    torch.Tensor.record_stream = lambda self, stream: None
    around = {
        "arg_groups.speculative_hook._handle_dflash": settle_arguments,
        "layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend": attend,
        "speculative.dflash_worker_v2.assign_extend_cache_locs_func": slots_of_block,
        "speculative.dflash_info.DFlashVerifyInput.prepare_for_verify": verify,
        "sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": seed,
        "sampling.sampling_batch_info.SamplingBatchInfo.filter_batch": leave,
        "distributed.parallel_state.GroupCoordinator.all_gather_into_tensor": gather,
        "layers.quantization.fp8.Fp8Config.get_supported_act_dtypes": types_quantised,
        "layers.quantization.fp8.Fp8LinearMethod.process_weights_after_loading": quantise,
        "layers.quantization.fp8.Fp8LinearMethod.apply": multiply_quantised,
    }
    for target, hook in around.items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)
    ours = {"propose": propose}
    if GRAPHS and adapter().tails:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        TorchNativeAttnBackend.verify_mask = SimpleNamespace(
            buffer=torch.ones(1 << 20, dtype=torch.uint8), fits=lambda size: size <= GRAPH_SIZES[-1]
        )
        ours |= {"propose": grow, "_room_for": room, "_verify": verify_and_keep, "captured": captured}
    for name, hook in ours.items():
        HookRegistry.register(f"ddtree.sglang.worker.DDTreeWorker.{name}", hook, HookType.AROUND)


def settle_arguments(original, server_args):
    """Stock refuses the CPU; here is what it settles besides."""
    from sglang.srt.arg_groups import overrides

    settled = {"speculative_num_steps": 1, "speculative_eagle_topk": 1}
    settled["speculative_draft_attention_backend"] = "torch_native"
    if hasattr(overrides, "record_foreign_defaults"):  # 0.5.23, whose arguments are not written
        overrides.declare_resolution(server_args, "ddtree_cpu", **settled)
        return
    for name, value in settled.items():
        setattr(server_args, name, value)


def slots_of_block(original, *, req_pool_indices, req_to_token, start_offset, end_offset, draft_token_num, **_):
    """What stock's CUDA kernel looks up."""
    at = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], at].flatten().to(torch.int64)


def attend(original, self, q, k, v, layer, forward, save_kv_cache=True):
    """Verify forwards, with the mask that the verify input carries; stock's torch backend knows neither."""
    if not forward.forward_mode.is_target_verify():
        return original(self, q, k, v, layer, forward, save_kv_cache)
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = self.token_to_kv_pool
    if save_kv_cache:
        pool.set_kv_buffer(layer, KVWriteLoc(forward.out_cache_loc, self.swa_out_cache_loc), k, v)
    batch, mask, start, out = forward.batch_size, getattr(forward.spec_info, "custom_mask", None), 0, []
    if mask is not None and mask.numel() == 1:
        mask = self.verify_mask.buffer
    rows = q.shape[0] // batch
    queries = q.view(batch, rows, layer.tp_q_head_num, layer.qk_head_dim)
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    for b, length in enumerate(forward.seq_lens.tolist()):
        slots = self.req_to_token_pool.req_to_token[forward.req_pool_indices[b], : length + rows].long()
        seen = torch.ones(rows, length + rows, dtype=torch.bool)
        if mask is not None:
            size = rows * (length + rows)
            seen[:, length:] = mask[start : start + size].view(rows, length + rows)[:, length:].bool()
            start += size
        elif layer.attn_type.value != "encoder_only":
            seen[:, length:] = torch.ones(rows, rows, dtype=torch.bool).tril()
        head = F.scaled_dot_product_attention(
            queries[b].transpose(0, 1)[None],
            keys[slots].transpose(0, 1)[None].to(q.dtype),
            values[slots].transpose(0, 1)[None].to(q.dtype),
            attn_mask=seen[None, None],
            scale=layer.scaling,
            enable_gqa=True,
        )
        out.append(head[0].transpose(0, 1).reshape(rows, -1))
    return torch.cat(out)


def gather(original, self, output, part):
    """Between processes without a GPU; stock registers it as an operation of GPUs alone."""
    self._all_gather_into_tensor(output, part)


def seed(original, cls, batch, vocab_size):
    """Seeded sampling, which SGLang has for deterministic inference alone: the same tokens in every mode."""
    info = original(cls, batch, vocab_size)
    seeds = [
        42 if req.sampling_params.sampling_seed is None else req.sampling_params.sampling_seed for req in batch.reqs
    ]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
    return info


def leave(original, self, *kept):
    """Who leaves a batch takes along what only it asked for.

    In stock the rest is filtered from then on, which by a seed gives other tokens: it numbers them by rank, not by id.
    And whoever has just ended may still be in the batch that the next request comes into.
    """
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    original(self, *kept)
    self.is_all_greedy, self.is_any_greedy = bool((self.top_ks <= 1).all()), bool((self.top_ks <= 1).any())
    self.need_top_k_sampling = bool((self.top_ks != TOP_K_ALL).any())
    self.need_top_p_sampling = bool((self.top_ps != 1.0).any())
    self.need_min_p_sampling = bool((self.min_ps > 0).any())


def types_quantised(original, cls):
    """In float32 too, where equal tokens can be asked for."""
    return [*original(cls), torch.float32]


def quantise(original, self, layer):
    """FP8 as SGLang quantises what it loads: a scale for each row of the weight; stock has kernels for it on GPUs."""
    weight = layer.weight.data.float()
    scale = weight.abs().amax(1, keepdim=True) / 448.0
    layer.weight = torch.nn.Parameter((weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
    layer.scale = scale
    print("FP8:", tuple(weight.shape), flush=True)


def multiply_quantised(original, self, layer, x, bias=None):
    """The product with what was quantised. x is not: one bit of it would flip from one size of a batch to another."""
    return F.linear(x, (layer.weight.float() * layer.scale).to(x.dtype), bias)


def murmur(original, seed, positions, columns):
    """SGLang's kernel, which Triton's interpreter runs; stock 0.5.23 wants one of its own package on a CPU."""
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel

    rows, count = len(seed), len(columns)
    hashed = torch.empty((rows, count), dtype=torch.uint32)
    murmur_hash32_kernel[rows, (count + 1023) // 1024](seed, positions, columns, hashed, rows, count, BLOCK_SIZE=1024)
    return hashed


def propose(original, self, batch, block):
    """The drafter's own candidates, written down; then the script's."""
    drafted = original(self, batch, block)
    write_down(batch, drafted.tokens[:, :, 0])
    log_q, tokens = scripted(batch, *drafted.tokens.shape[1:])
    return replace(drafted, log_q=log_q, tokens=tokens)


def padded(size):
    """Requests of the graph that `size` of them would run in; those that it has too many nobody may see."""
    return next(most for most in GRAPH_SIZES if size <= most)


def room(original, self, batch):
    """What graphs read and write is there before the first round."""
    if self._graphs is None:
        from ddtree.sglang.room import Room

        self._graphs = Room(self, GRAPH_SIZES[-1])
    return original(self, batch)


def grow(original, self, batch, block):
    """As `propose`; the tail of the draft graph then grows the rows, for as many requests as its graph would have."""
    from ddtree.sglang.tails import Growth

    drafted = propose(original, self, batch, block)
    if self._draft_sampler is None:
        self._draft_sampler = Growth(self._make_head(GRAPH_SIZES[-1]), self._graphs, self.pairs)
    head, (size, depths, _) = self._draft_sampler.head, drafted.log_q.shape
    for name in ("log_q", "tokens", "states"):
        getattr(head, name)[: size * depths] = getattr(drafted, name).flatten(0, 1)
    self._draft_sampler.last = padded(size)
    self._draft_sampler.grow(self._draft_sampler.last)


def verify_and_keep(original, self, batch, room, now, grown, barrier):
    """The target, then its graph's tail, padded with what must not matter."""
    from ddtree.sglang.rows import Kept

    assert grown
    output, _, forward, mask = original(self, batch, room, now, grown, barrier)
    size = padded(len(now.block.ids))
    extra = size - len(now.block.ids)
    logits, hidden = (
        torch.cat([part, torch.randn(extra * self.width, part.shape[1]).to(part.dtype)])
        for part in (output.next_token_logits, output.hidden_states)
    )
    lengths = torch.cat([batch.seq_lens, torch.ones(extra, dtype=batch.seq_lens.dtype)])
    kept = self._keeping.kept.setdefault(size, Kept.allocate(size, self.block_size, "cpu"))
    self._keeping.keep(room, logits, hidden, lengths, size)
    assert not kept.counts[len(now.block.ids) :].any()
    return output, True, forward, mask


def captured(original, self, runner):
    """Both stand-ins have the size of the last growth."""
    return self._draft_sampler.last


def verify(original, self, batch, target_worker, **named):
    """Stock's own chain, written down; then the script's best."""
    if type(self).__name__ == "DFlashVerifyInput":
        chain = self.draft_token.view(len(batch.reqs), -1)[:, 1:]
        write_down(batch, chain)
        chain.copy_(scripted(batch, chain.shape[1], 3)[1][:, :, 0])
    return original(self, batch, target_worker, **named)


def scripted(batch, depths, ranks):
    """A drafter that knows the answers: at rank 0, every third at rank 1, every seventh nowhere."""
    with open(os.environ["DDTREE_TEST_SCRIPT"]) as file:
        answers = json.load(file)
    log_q = torch.log_softmax(-0.7 * torch.arange(ranks).float(), 0).expand(len(batch.reqs), depths, ranks).clone()
    tokens = torch.empty(len(batch.reqs), depths, ranks, dtype=torch.int64)
    for b, req in enumerate(batch.reqs):
        known = list(req.origin_input_ids) + list(req.output_ids)
        answer = next((ids for ids in answers if ids[: len(known)] == known), known)
        for d in range(depths):
            place = int(batch.seq_lens[b]) + 1 + d
            right = answer[place] if place < len(answer) and place % 7 else -1
            others = [token for token in range(5 + place % 50, 500) if token != right][:ranks]
            tokens[b, d] = torch.tensor(others)  # no token twice: siblings of a tree differ
            if right >= 0:
                tokens[b, d, 0 if place % 3 else 1] = right
    return log_q, tokens


def write_down(batch, chain):
    """One line a greedy request: what it asked, how many tokens are in the cache, and the drafter's own chain.

    That is the same everywhere, since the tokens are; with overlap the host does not yet know those of the last round.
    Penalties are left out: stock DFLASH has none, and so says other tokens.
    """
    with open(os.environ["DDTREE_TEST_LOG"], "a") as file:
        for b, req in enumerate(batch.reqs):
            asked = req.sampling_params
            if asked.top_k == 1 and not (
                asked.frequency_penalty
                or asked.presence_penalty
                or asked.repetition_penalty != 1
                or asked.min_new_tokens
            ):
                key = [list(req.origin_input_ids), asked.logit_bias, asked.regex, int(batch.seq_lens[b])]
                file.write(json.dumps({"key": key, "chain": chain[b].tolist()}) + "\n")
