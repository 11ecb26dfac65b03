"""What an engine does before its first request: for which rounds it prepares, and that it leaves nothing behind."""

from types import SimpleNamespace

import pytest
import torch

from ddtree.config import MODES, SamplingParams, Speculation
from ddtree.engine.context import SequenceContext
from ddtree.engine.observer import WAYS, StageTimer, Unobserved
from ddtree.engine.round import Lane
from ddtree.engine.runner import DeviceRunner
from ddtree.engine.sampling import RowSampler
from ddtree.engine.shapes import Shape, buckets, prepared_shapes
from ddtree.engine.static import MOST_OTHERS, StaticBatches
from ddtree.errors import InvalidOption
from ddtree.server.metrics import Metrics
from scripted import CPU, HASHED_VOCAB, engine_for

PARAMS = SamplingParams(max_tokens=30, seed=5, ignore_eos=True)


def lane(speculation: Speculation, **params) -> Lane:
    sampler = RowSampler(SamplingParams(**params), 0, (), HASHED_VOCAB, CPU)
    return Lane(speculation, sampler, engine_for(1, block=16).drafter)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [2, 1]), (3, [4, 2, 1]), (8, [8, 4, 2, 1]), (9, [16, 8, 4, 2, 1])]
)
def test_batches_are_padded_to_powers_of_two(most, sizes):
    assert buckets(most) == sizes


@pytest.mark.parametrize("mode", MODES)
def test_every_batch_of_the_engine_s_own_speculation_finds_its_round(mode):
    own = lane(Speculation(mode, 31, 16))
    shapes = prepared_shapes(own, 6)
    assert [shape.batch for shape in shapes] == [8, 4, 2, 1]
    sampled = lane(Speculation(mode, 31, 16), temperature=0.7, stop_token_ids=(1, 2))
    for size in range(1, 7):
        assert Shape.of([own, *[sampled] * (size - 1)], size, ends=3) in shapes


def test_the_shapes_are_those_of_the_modes():
    def shape(*speculation, most: int = 1) -> Shape:
        return prepared_shapes(lane(Speculation(*speculation)), most)[0]

    assert shape("ar", most=3) == Shape(batch=4, width=1, depth=0, ranks=1, shadows=False, ends=8)
    assert shape("linear") == Shape(batch=1, width=16, depth=15, ranks=1, shadows=False, ends=8)
    assert shape("tree", 31, 16) == Shape(batch=1, width=32, depth=15, ranks=16, shadows=False, ends=8)
    assert shape("tree", 7, 16) == Shape(batch=1, width=8, depth=7, ranks=7, shadows=False, ends=8)
    assert shape("shadow-linear", 31, 16) == Shape(batch=1, width=47, depth=15, ranks=16, shadows=True, ends=8)
    assert [Shape.of([lane(Speculation("ar"))], 1, ends=ends).ends for ends in (9, 12, 16, 17)] == [16, 16, 16, 32]


def test_rounds_with_a_text_are_shapes_of_their_own():
    plain = lane(Speculation("tree", 31, 16))
    own = Lane(plain.speculation, plain.sampler, engine_for(1, block=16).drafter, SequenceContext("mix", []))
    assert all(shape.context for shape in prepared_shapes(own, 2))
    assert Shape.of([plain, own], 2) in prepared_shapes(own, 2)
    assert not any(shape.context for shape in prepared_shapes(plain, 2))


def test_rounds_beyond_the_kernels_are_not_prepared():
    assert prepared_shapes(lane(Speculation("tree", 255, 32)), 2)
    assert prepared_shapes(lane(Speculation("tree", 256, 32)), 2) == []
    assert prepared_shapes(lane(Speculation("tree", 63, 33)), 2) == []


def test_shapes_that_requests_choose_do_not_add_up():
    """A prepared one stays; of the others the one that was not used for longest goes."""

    def shape(width: int) -> Shape:
        return Shape(batch=1, width=width, depth=3, ranks=2, shadows=False, ends=8)

    made: list[Shape] = []
    batch = SimpleNamespace(ends=torch.zeros(1))
    kept = StaticBatches(lambda shape: made.append(shape) or SimpleNamespace(shape=shape, stays=False, batch=batch))
    own = kept.get(shape(1), stays=True)
    for width in range(2, MOST_OTHERS + 2):
        kept.get(shape(width))
    assert kept.get(shape(2)).shape == shape(2)
    assert len(kept.all()) == len(made) == 1 + MOST_OTHERS
    kept.get(shape(200))
    assert len(kept.all()) == 1 + MOST_OTHERS
    assert kept.get(shape(1)) is own
    made.clear()
    for width in (2, *range(4, MOST_OTHERS + 2), 200):
        kept.get(shape(width))
    assert not made
    kept.get(shape(3))
    assert made == [shape(3)]


def test_kept_shapes_go_where_memory_is_short():
    """One after another until there is enough; all of them where an allocation fails; never one that was prepared."""
    shapes = [Shape(batch=1, width=width, depth=3, ranks=2, shadows=False, ends=8) for width in range(1, 8)]
    batch, most = SimpleNamespace(ends=torch.zeros(1)), 9

    def make(shape: Shape) -> SimpleNamespace:
        if len(kept.all()) >= most:
            raise torch.OutOfMemoryError("tried to allocate 5 GiB")
        return SimpleNamespace(shape=shape, stays=False, batch=batch)

    kept = StaticBatches(make, lambda: len(kept.all()) >= 4)  # type: ignore[arg-type, return-value]
    kept.get(shapes[0], stays=True)
    for shape in shapes[1:6]:
        kept.get(shape)
    assert [made.shape for made in kept.all()] == [shapes[0], *shapes[3:6]]
    most = 2
    latest = kept.get(shapes[6])
    assert [made.shape for made in kept.all()] == [shapes[0], shapes[6]]
    assert kept.give_up(latest) == 0
    most = 1
    with pytest.raises(torch.OutOfMemoryError):
        kept.get(shapes[1])
    assert [made.shape for made in kept.all()] == [shapes[0]]


def test_on_a_cpu_there_is_nothing_to_do(monkeypatch):
    engine = engine_for(1)
    monkeypatch.setattr(engine.scheduler, "warm_up", lambda lane: pytest.fail("it was warmed up"))
    engine.warm_up()


def test_it_leaves_nothing_behind():
    engine, fresh = engine_for(4, mode="tree"), engine_for(4, mode="tree")
    prepared, engine.scheduler._runner.prepare = [], lambda *args: prepared.append(args)
    own = lane(Speculation("tree"))
    engine.scheduler.warm_up(own)
    assert prepared == [(own, 8)]
    store = engine._store
    written = (store.cache.data[0, :, 0, :, 0] != 0).any(1).nonzero().flatten().tolist()
    assert written == [store.spare]
    assert store.cache.data[0, store.spare, 0, :129, 0].count_nonzero() == 128, "the longest chunk"
    assert store.drafter_cache.data[0, : store.spare].count_nonzero() == 0
    assert not engine.scheduler.has_work
    assert engine.scheduler.stats().kv_tokens_used == 0
    for prompt in ([0], [0, 0, 0, 0], [1, 2] * 9):
        found, expected = (one.generate([prompt], [PARAMS])[0] for one in (engine, fresh))
        assert (found.token_ids, found.cached_tokens) == (expected.token_ids, expected.cached_tokens)


def test_a_short_context_has_no_room_for_all_of_it():
    engine = engine_for(1, config={"max_model_len": 2, "max_tree_budget": 5}, mode="tree")
    prefill, sizes = engine.target.prefill, []
    engine.target.prefill = lambda cache, ids, position: sizes.append(ids.shape[1]) or prefill(cache, ids, position)
    engine.scheduler.warm_up(lane(Speculation("tree")))
    assert sizes == [1, 2]


@pytest.mark.parametrize(
    ("graphs", "observer", "told", "ran"),
    [
        (True, Unobserved(), False, "graph"),
        (True, Metrics(), False, "graph"),
        (True, Unobserved(), True, "two graphs"),
        (True, Metrics(), True, "two graphs"),
        (True, StageTimer(), False, "launches"),
        (True, StageTimer(), True, "launches"),
        (False, Unobserved(), False, "launches"),
        (False, Unobserved(), True, "launches"),
    ],
)
def test_which_rounds_are_graphs(graphs, observer, told, ran, monkeypatch):
    """And which may be launched ahead: all but those that the host's part keeps in single launches."""
    runner, report = DeviceRunner(None, None, None, graphs, 64), torch.zeros(1, 5, dtype=torch.int64)  # type: ignore[arg-type]
    ops = {False: object(), True: object()}
    batch = SimpleNamespace(ops=ops[told], observer=observer, state=SimpleNamespace(path=None))
    whole = SimpleNamespace(logits=None, launch=lambda: SimpleNamespace(read=None))
    split = SimpleNamespace(logits=None, launch=lambda: None, settle=lambda batch: None, report=None)
    runner._current = SimpleNamespace(
        batch=batch, alone=ops[False], told=ops[True], whole=whole, split=split, starved=False
    )  # type: ignore[assignment]
    monkeypatch.setattr("ddtree.engine.runner.run_round", lambda batch: SimpleNamespace(logits=None, report=report))
    pending = runner.launch(batch)  # type: ignore[arg-type]
    assert pending.ran == ran
    assert pending.ran in WAYS
    assert pending.waits == (ran == "two graphs")
    assert runner.runs_ahead(batch) == (ran != "launches" or not told)  # type: ignore[arg-type]


def test_memory_that_does_not_suffice_is_told(monkeypatch):
    engine = engine_for(1)

    def lacks(lane):
        raise torch.OutOfMemoryError("tried to allocate 5 GiB")

    monkeypatch.setattr(engine.scheduler, "warm_up", lacks)
    monkeypatch.setattr(engine, "target", SimpleNamespace(
        spec=SimpleNamespace(device=SimpleNamespace(type="cuda"), vocab_size=4)
    ))  # fmt: skip
    monkeypatch.setattr("ddtree.engine.engine.RowSampler", lambda *args: SimpleNamespace())
    with pytest.raises(InvalidOption, match=r"does not suffice.*5 GiB.*lower max_running_requests"):
        engine.warm_up()
