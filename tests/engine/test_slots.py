"""Which slot a prompt gets, and what of it is reused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.engine.slots import SlotStore
from ddtree.errors import InvalidOption
from scripted import ScriptedDrafter, ScriptedTarget, history, write

TARGET = ScriptedTarget(lambda seen: [0.0] * 10, 10)
DRAFTER = ScriptedDrafter(lambda seen: [[0.0] * 10] * 3, 4)


def new(count: int = 3, drafter: ScriptedDrafter | None = DRAFTER) -> SlotStore:
    return SlotStore(TARGET, drafter, count, 64)


def fill(store: SlotStore, tokens: list[int], drafts: bool = True, reuse: bool = True):
    """A request that leaves `tokens` behind: its slot, and how much of it was reused."""
    found = store.acquire(tokens, reuse=reuse, drafts=drafts)
    assert found is not None
    slot, shared = found
    for cache in (store.cache, store.drafter_cache if drafts else None):
        if cache is not None:
            write(cache.view([slot.index]), [torch.tensor(tokens[shared:])], [shared])
            assert history(cache.view([slot.index]), 0, range(len(tokens))) == tuple(tokens)
    slot.held = len(tokens)
    slot.drafted = len(tokens) if drafts else 0
    return slot, shared


def test_a_next_turn_goes_on_in_place():
    store = new()
    slot, shared = fill(store, [1, 2, 3, 4])
    assert shared == 0
    store.release(slot)
    again, shared = fill(store, [1, 2, 3, 4, 5, 6])
    assert (again.index, shared) == (slot.index, 4)


def test_the_last_token_of_a_prompt_is_always_computed():
    store = new()
    store.release(fill(store, [1, 2, 3, 4])[0])
    assert fill(store, [1, 2, 3, 4])[1] == 3


def test_a_prefix_of_a_running_sequence_is_copied():
    store = new()
    running, _ = fill(store, [1, 2, 3, 4, 5])
    other, shared = fill(store, [1, 2, 3, 9])
    assert other.index != running.index
    assert shared == 3
    assert history(store.cache, running.index, range(5)) == (1, 2, 3, 4, 5)


def test_a_short_common_prefix_does_not_destroy_a_long_context():
    store = new()
    long = [1, 2, *range(3, 10)] * 3
    slot, _ = fill(store, long)
    store.release(slot)
    other, shared = fill(store, [1, 2, 0, 0])
    assert other.index != slot.index
    assert shared == 2
    store.release(other)
    assert fill(store, [*long, 5])[1] == len(long)


def test_the_least_recently_used_slot_goes_first():
    store = new(2)
    one, two = fill(store, [1, 1, 1])[0], fill(store, [2, 2, 2])[0]
    store.release(two)
    store.release(one)
    assert fill(store, [3, 3, 3])[0].index == one.index


def test_when_all_are_busy_there_is_none():
    store = new(1)
    slot, _ = fill(store, [1, 2])
    assert store.acquire([1, 2], reuse=True, drafts=True) is None
    store.release(slot)
    assert store.acquire([1, 2], reuse=True, drafts=True) is not None


def test_what_the_drafter_has_not_seen_is_not_reused():
    """A context without drafter features would accept less, silently (atlas#693, vllm#47930)."""
    store = new()
    store.release(fill(store, [1, 2, 3, 4], drafts=False)[0])
    assert fill(store, [1, 2, 3, 4, 5], drafts=True)[1] == 0
    store = new()
    store.release(fill(store, [1, 2, 3, 4], drafts=False)[0])
    assert fill(store, [1, 2, 3, 4, 5], drafts=False)[1] == 4
    store = new(1)
    store.release(fill(store, [1, 2, 3, 4])[0])
    store.release(fill(store, [1, 2, 3, 4, 5, 6], drafts=False)[0])
    assert fill(store, [1, 2, 3, 4, 5, 6, 7])[1] == 0, "the drafter's context has a hole behind the first four"


def test_without_reuse_nothing_is_reused():
    store = new()
    store.release(fill(store, [1, 2, 3])[0])
    assert fill(store, [1, 2, 3, 4], reuse=False)[1] == 0


def test_after_a_failure_nothing_is_trusted():
    store = new()
    fill(store, [1, 2, 3])
    store.forget()
    assert store.tokens_held == 0
    assert fill(store, [1, 2, 3, 4])[1] == 0


def test_what_idle_slots_keep_can_be_dropped():
    store = new()
    running, idle = fill(store, [1, 2, 3, 4])[0], fill(store, [5, 6, 7, 8])[0]
    store.release(idle)
    store.drop_idle()
    assert (store.tokens_held, running.held, running.busy) == (4, 4, True)
    slot, shared = fill(store, [5, 6, 7, 8, 9])
    assert shared == 0
    store.release(slot)
    assert fill(store, [1, 2, 3, 9])[1] == 3, "what a running sequence holds is still there to be copied"


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=25),
    keep=st.lists(st.booleans(), min_size=25, max_size=25),
    drafts=st.lists(st.booleans(), min_size=25, max_size=25),
)
def test_a_slot_always_holds_what_it_says(prompts, keep, drafts):
    store, busy = new(4), []
    for prompt, stays, draft in zip(prompts, keep, drafts, strict=False):
        if len(busy) == 4:
            store.release(busy.pop(0))
        slot, shared = fill(store, prompt, drafts=draft)
        assert shared < len(prompt)
        busy.append(slot)
        if not stays:
            store.release(busy.pop())
        for other in store.slots:
            assert history(store.cache, other.index, range(other.held)) == tuple(other.tokens[: other.held])
            assert history(store.drafter_cache, other.index, range(other.drafted)) == tuple(
                other.tokens[: other.drafted]
            )


def test_memory_that_is_not_there_is_refused_with_the_sizes(monkeypatch):
    def no_memory(slots, length):
        raise MemoryError("cannot take it")

    monkeypatch.setattr(TARGET, "allocate", no_memory)
    with pytest.raises(InvalidOption, match=r"3 requests of 64 positions.*lower max_model_len"):
        new()
