"""The parts of a round that touch SGLang's own types, one by one."""

import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddtree.tree import RoundState, Rows

WIDTH, VOCABULARY = 4, 10


@pytest.fixture(scope="module", autouse=True)
def _import_sglang() -> None:
    """Once, with its warnings, which are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("ddtree.sglang.worker")


class Sampler:
    """Takes the second best, and remembers what it was asked."""

    def __call__(self, output: Any, info: Any, *rest: Any) -> torch.Tensor:
        self.info, self.positions = info, rest[-1]
        return output.next_token_logits.topk(2).indices[:, 1].to(torch.int32)


def info(**fields: Any) -> Any:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    usual = {
        "temperatures": torch.tensor([[0.5], [1.0]]),
        "top_ps": torch.tensor([0.9, 1.0]),
        "top_ks": torch.tensor([3, 1]),
        "min_ps": torch.tensor([0.0, 0.1]),
        "is_all_greedy": False,
        "is_any_greedy": True,
        "need_top_p_sampling": True,
        "need_top_k_sampling": True,
        "need_min_p_sampling": True,
        "vocab_size": VOCABULARY,
        "device": "cpu",
    }
    return SamplingBatchInfo(**{**usual, **fields})


def test_greedy_rows() -> None:
    from ddtree.sglang.choose import choose

    logits = torch.randn(2 * WIDTH, VOCABULARY)
    own = choose(logits, info(is_all_greedy=True), torch.zeros(2, WIDTH), None, None)
    assert torch.equal(own, logits.argmax(-1).view(2, WIDTH))


@pytest.mark.parametrize(
    ("asked", "top_ks", "argmax"),
    [
        ({}, [1, 1], True),
        ({"is_all_greedy": False}, [1, 50], False),
        ({"is_all_greedy": False}, [1, 1], True),  # a sampled request has left
        ({"has_custom_logit_processor": True}, [1, 1], False),
        ({"acc_additive_penalties": torch.zeros(2, VOCABULARY)}, [1, 1], False),
        ({"logit_bias": torch.zeros(2, VOCABULARY)}, [1, 1], False),
    ],
)
def test_what_graphs_may_accept(asked: dict[str, Any], top_ks: list[int], argmax: bool) -> None:
    from ddtree.sglang.choose import takes_argmax

    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(top_k=top_k)) for top_k in top_ks]
    batch = SimpleNamespace(has_grammar=False, sampling_info=info(**{"is_all_greedy": True, **asked}), reqs=reqs)
    assert takes_argmax(batch) == argmax
    assert not takes_argmax(SimpleNamespace(has_grammar=True, sampling_info=batch.sampling_info, reqs=reqs))
    assert takes_argmax(SimpleNamespace(has_grammar=False, sampling_info=None))


def test_every_row_is_drawn_by_its_request_and_place() -> None:
    from ddtree.sglang.choose import choose

    logits, positions, sampler = torch.randn(2 * WIDTH, VOCABULARY), torch.arange(2 * WIDTH).view(2, WIDTH), Sampler()
    own = choose(logits, info(), positions, sampler, SimpleNamespace(world_size=1))
    assert torch.equal(own, logits.topk(2).indices[:, 1].view(2, WIDTH))
    assert own.dtype == torch.int64
    assert sampler.info.top_ks.tolist() == [3] * WIDTH + [1] * WIDTH
    assert sampler.info.temperatures.tolist() == [[0.5]] * WIDTH + [[1.0]] * WIDTH
    assert sampler.info.sampling_seed is None
    assert sampler.positions.tolist() == list(range(2 * WIDTH))


def test_ranks_take_what_the_first_drew() -> None:
    from ddtree.sglang.choose import choose

    group = SimpleNamespace(world_size=2, broadcast=lambda own, src: own.fill_(7))
    own = choose(torch.randn(2 * WIDTH, VOCABULARY), info(), torch.zeros(2, WIDTH), Sampler(), group)
    assert (own == 7).all()


def test_adjustments_reach_all_rows_of_their_request() -> None:
    from ddtree.sglang.choose import adjust

    bias = torch.zeros(2, VOCABULARY)
    bias[1, 2] = 5.0
    state = RoundState.allocate(2, WIDTH, 1, torch.device("cpu"))
    rows = Rows(state.tokens, state.parents, state.depths, state.ancestors)
    seen = []
    penalties = SimpleNamespace(apply=lambda logits, rows: seen.append(rows) or logits[:WIDTH, 1].fill_(1.0))
    logits = torch.full((2 * WIDTH, VOCABULARY), 4.0)
    mask = SimpleNamespace(apply=lambda logits: logits[:, 9].fill_(-torch.inf))
    own = torch.full((2, VOCABULARY), -9.0)  # what SGLang accumulates itself, which counts elsewhere
    adjust(logits, info(acc_additive_penalties=own, logit_bias=bias), rows, mask, penalties)
    assert seen == [rows]
    assert (logits[:WIDTH, 1] == 1.0).all()
    assert (logits[WIDTH:, 1] == 4.0).all()
    assert (logits[WIDTH:, 2] == 9.0).all()
    assert (logits[WIDTH:, 3:9] == 4.0).all()
    assert (logits[:WIDTH, 2:9] == 4.0).all()
    assert (logits[:, 9] == -torch.inf).all()


def test_the_mask_goes_into_the_graphs_own_buffer() -> None:
    from ddtree.sglang.room import MaskRoom

    graph = SimpleNamespace(buffer=torch.zeros(500, dtype=torch.bool), fits=lambda batch: batch <= 2)
    room = MaskRoom(SimpleNamespace(verify_mask=graph), context=20, width=WIDTH, prefix=False)
    buffer, carried = room.take(torch.tensor([5, 6]), 11)
    assert buffer.data_ptr() == carried.data_ptr() == graph.buffer.data_ptr()
    assert (buffer.dtype, carried.numel()) == (torch.uint8, 1)

    buffer, carried = room.take(torch.tensor([5, 6, 7]), 18)  # beyond the graphs
    assert buffer.data_ptr() == carried.data_ptr() != graph.buffer.data_ptr()
    assert carried.numel() >= WIDTH * (18 + 3 * WIDTH)
    assert room.take(torch.tensor([6, 7, 8]), 21)[0].data_ptr() == buffer.data_ptr()  # with room to grow
    assert room.take(torch.tensor([19, 19, 19]), 57)[1].numel() >= WIDTH * (57 + 3 * WIDTH)


def test_backends_that_read_the_prefix_get_a_whole_mask() -> None:
    from ddtree.sglang.room import MaskRoom

    room = MaskRoom(SimpleNamespace(), context=20, width=WIDTH, prefix=True)
    buffer, carried = room.take(torch.tensor([5, 6]), 11)
    assert carried.dtype == torch.bool
    assert carried.numel() == WIDTH * (11 + 2 * WIDTH)
    assert buffer.data_ptr() == carried.data_ptr()


def test_a_verify_input_is_a_tree_to_sglang() -> None:
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    from ddtree.sglang.verify import TreeVerifyInput

    tree = TreeVerifyInput.of(16, 7, None)
    assert isinstance(tree, EagleVerifyInput)
    assert (tree.max_tree_depth, tree.tree_topk, tree.draft_token_num, tree.num_tokens_per_req) == (8, -1, 16, 16)
    assert tree.is_verify_input()
    assert tree.topk > 1


@pytest.mark.parametrize(("dtype", "refused"), [("float16", True), ("bfloat16", False)])
def test_recurrent_states_have_the_type_of_the_model(
    dtype: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.configs import hybrid_arch

    from ddtree.errors import InvalidOption
    from ddtree.sglang import algorithm
    from ddtree.sglang.algorithm import _check_recurrent

    monkeypatch.delenv("SGLANG_MAMBA_CONV_DTYPE", raising=False)
    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda model: model.hf_config)
    model = SimpleNamespace(dtype=getattr(torch, dtype), hf_config=SimpleNamespace())
    monkeypatch.setattr(algorithm, "adapter", lambda: SimpleNamespace(model_config=lambda server_args: model))
    if refused:
        with pytest.raises(InvalidOption, match="set SGLANG_MAMBA_CONV_DTYPE=float16"):
            _check_recurrent(None)
        monkeypatch.setenv("SGLANG_MAMBA_CONV_DTYPE", dtype)
    _check_recurrent(None)


@pytest.mark.parametrize("tails", [True, False])
def test_what_is_captured_into_the_draft_graph(tails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from ddtree.sglang.tails import Growth
    from ddtree.sglang.worker import DDTreeWorker

    sampler = SimpleNamespace(out=torch.zeros(2 * 7))  # of two requests
    monkeypatch.setattr(DFlashWorkerV2, "_maybe_build_draft_sampler", lambda self: sampler)
    monkeypatch.setattr(DDTreeWorker, "_make_head", lambda self, batch: ("head", batch))
    monkeypatch.setattr(DDTreeWorker, "graph_room", lambda self: "room")
    worker = object.__new__(DDTreeWorker)
    worker.depth, worker.pairs, worker._keeping = 7, object(), object() if tails else None
    found = worker._maybe_build_draft_sampler()
    assert found == (Growth(("head", 2), "room", worker.pairs) if tails else ("head", 2))


def test_a_refused_request_has_the_servers_plan() -> None:
    """With overlap it has one more round, in which an error would end the scheduler."""
    from ddtree.sglang.options import Options
    from ddtree.sglang.worker import DDTreeWorker

    worker = object.__new__(DDTreeWorker)
    worker.options, worker.block_size = Options("tree", 31), 16
    worker.usual = worker.options.plan(None, 16)
    for refused in ({"ddtree_budget": 99}, {"ddtree_mode": "bush", "__req__": object()}, ["ddtree_budget"]):
        assert worker._plan_of(refused) == worker.usual
    assert worker._plan_of({"ddtree_budget": 5, "__req__": object()}).budget == 5
    assert worker._plan_of(None) is worker.usual


def test_custom_logit_processors_change_the_rows_of_their_own_requests() -> None:
    """Those that take the line of a request by its number too, as SGLang's thinking budgets do."""
    from ddtree.sglang.choose import adjust

    class ByNumber:
        def __call__(self, logits: torch.Tensor, params: list[Any]) -> torch.Tensor:
            assert len(logits) == len(params) == 2
            for at, param in enumerate(params):
                logits[at, param["token"]] = 50.0
            return logits

    asks = torch.tensor([True, False, True])
    found = info(
        has_custom_logit_processor=True,
        custom_logit_processor={1: (ByNumber(), asks)},
        custom_params=[{"token": 1}, None, {"token": 3}],
    )
    logits = torch.zeros(3 * WIDTH, VOCABULARY)
    rows = Rows(*(torch.zeros(3, WIDTH, dtype=torch.int64) for _ in range(3)), torch.zeros(3, WIDTH, 1))
    adjust(logits, found, rows, None, None)
    expected = torch.zeros(3, WIDTH, VOCABULARY)
    expected[0, :, 1] = expected[2, :, 3] = 50.0
    assert torch.equal(logits.view(3, WIDTH, -1), expected)


def test_one_tensor_parallel_rank_counts_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.sglang import hooks

    counted: list[Any] = []
    monkeypatch.setattr(hooks.metrics, "count", lambda *numbers: counted.append(numbers))
    scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(name="DDTREE"))
    for enabled, first in ((True, True), (True, False), (False, True)):
        reporter = SimpleNamespace(enable_metrics=enabled, is_stats_logging_rank=first, scheduler=scheduler)
        hooks.count_rounds(None, reporter, 2, 5, num_cap_tokens=9)
    assert counted == [(2, 5, 9)]


def test_a_mask_has_room_for_the_round_behind_a_contexts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    from ddtree.sglang import hooks

    for algorithm, room in (("DDTREE", 108), ("EAGLE", 100)):
        spec = SimpleNamespace(speculative_algorithm=algorithm, speculative_dflash_block_size=8)
        monkeypatch.setattr(runtime_context, "get_spec", lambda spec=spec: spec)
        assert hooks.mask_headroom(lambda **named: named, max_context_len=100, max_bs=2) == {
            "max_context_len": room,
            "max_bs": 2,
        }


REFUSED = [  # argument, its value, what is said
    ("attention_backend", "fa3", "not fa3: add --attention-backend triton"),
    ("page_size", 16, "the page size is 16: add --page-size 1"),
    ("disaggregation_mode", "decode", "--dcp-size and --disaggregation-mode, or"),
    ("dcp_size", 2, "whole cache in one server"),
    ("enable_return_routed_experts", True, "do not go with --enable-return-routed-experts: drop it"),
    ("enable_return_indexer_topk", True, "do not go with --enable-return-indexer-topk: drop it"),
    ("enable_two_batch_overlap", True, "do not go with --enable-two-batch-overlap: drop it"),
    ("enable_pdmux", True, "do not go with --enable-pdmux: drop it"),
    ("speculative_accept_threshold_single", 0.5, "know no --speculative-accept-threshold-single: drop it"),
    ("speculative_accept_threshold_acc", 0.5, "know no --speculative-accept-threshold-acc: drop it"),
    ("linear_attn_verify_backend", "flashinfer", "by SGLang's Triton kernels alone"),
    ("enable_linear_replayssm_spec", True, "by SGLang's Triton kernels alone"),
    ("speculative_draft_window_size", 64, "know no --speculative-draft-window-size"),
]


@pytest.mark.parametrize(("name", "value", "said"), [("", None, ""), *REFUSED])
def test_what_trees_cannot_be_combined_with(name: str, value: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.errors import InvalidOption
    from ddtree.sglang import algorithm

    monkeypatch.setattr(algorithm, "_check_recurrent", lambda server_args: None)
    arguments = SimpleNamespace(**{name: None for name, _, _ in REFUSED})
    arguments.attention_backend, arguments.prefill_attention_backend, arguments.decode_attention_backend = (
        "triton",
        None,
        None,
    )
    arguments.speculative_attention_mode, arguments.attn_dp_size, arguments.ep_join_mode = "prefill", 1, None
    if not name:
        algorithm._check(arguments)
        assert arguments.linear_attn_verify_backend == "triton"
        return
    setattr(arguments, name, value)
    with pytest.raises(InvalidOption, match=said):
        algorithm._check(arguments)


def test_trees_simulate_no_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.errors import InvalidOption
    from ddtree.sglang.algorithm import _check_acceptance

    arguments = SimpleNamespace(speculative_accept_threshold_single=1.0, speculative_accept_threshold_acc=1.0)
    _check_acceptance(arguments)
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(InvalidOption, match="unset SGLANG_SIMULATE_ACC_LEN"):
        _check_acceptance(arguments)


@pytest.mark.parametrize("lazy", [True, False])
def test_linear_refuses_what_sglang_refuses_of_dflash_by_its_name(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.17 asks by the name whether states can be kept lazily; both releases whether ReplaySSM fits the model."""
    from sglang.srt.configs import hybrid_arch

    from ddtree.errors import InvalidOption
    from ddtree.sglang import algorithm

    monkeypatch.setattr(hybrid_arch, "kimi_linear_config", lambda model: None)
    release = SimpleNamespace(lazy_chain=lazy, model_config=lambda server_args: "Qwen3-Next's")
    monkeypatch.setattr(algorithm, "adapter", lambda: release)
    arguments = SimpleNamespace(mamba_radix_cache_strategy="extra_buffer", enable_linear_replayssm_spec=False)
    algorithm._check_chain(arguments)
    arguments.mamba_radix_cache_strategy = "extra_buffer_lazy"
    if not lazy:
        with pytest.raises(InvalidOption, match="extra_buffer_lazy: take extra_buffer"):
            algorithm._check_chain(arguments)
        return
    algorithm._check_chain(arguments)
    arguments.enable_linear_replayssm_spec = True
    with pytest.raises(InvalidOption, match=r"with KDA models \(Kimi Linear\) alone: drop it"):
        algorithm._check_chain(arguments)


@pytest.mark.parametrize("asked", ["return_logprob", "return_sampling_mask", "return_hidden_states"])
def test_what_a_tree_does_not_give_is_refused(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    from ddtree.sglang import hooks

    spec = SimpleNamespace(speculative_algorithm="DDTREE", speculative_dflash_block_size=8)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    req = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=None), **{asked: True})
    monkeypatch.setenv("DDTREE_SGLANG_MODE", "tree")
    refusal = hooks.refuse_request(lambda req, overlap: None, req, True)
    assert refusal is not None
    assert refusal.endswith(f"ask without {asked}, or of a linear server")
    assert hooks.refuse_request(lambda req, overlap: "stock's own", req, True) == "stock's own"
    monkeypatch.setenv("DDTREE_SGLANG_MODE", "linear")
    assert hooks.refuse_request(lambda req, overlap: None, req, True) is None


def test_arguments_of_a_server_are_settled() -> None:
    """By SGLang's own way for registered algorithms, which differs from release to release."""
    from sglang.srt.server_args import ServerArgs

    from ddtree.sglang.adapters import adapter

    arguments = ServerArgs(model_path="dummy")
    adapter().name_attention(arguments, "triton")
    assert adapter().settled(arguments).attention_backend == "triton"
    assert adapter().record(arguments) is arguments
