"""The prompt suite and the plan made from options."""

import pytest

from ddtree.bench.suite import CATEGORIES, load_prompts, make_plan
from ddtree.config import SamplingParams, Speculation
from ddtree.errors import InvalidOption

BASE = Speculation(tree_budget=31, tree_top_k=4, tree_spine=2)


def test_suite_is_varied_and_complete() -> None:
    prompts = load_prompts()
    assert len(prompts) >= 24
    assert len({prompt.id for prompt in prompts}) == len({prompt.prompt for prompt in prompts}) == len(prompts)
    for category in CATEGORIES:
        assert sum(prompt.category == category for prompt in prompts) >= 3
    for prompt in prompts:
        assert prompt.id.startswith(prompt.category)
        assert len(prompt.prompt) < 900, "short enough for a small context"
        if prompt.category in ("summary", "rewriting", "extraction"):
            assert "\n\n" in prompt.prompt, "has a passage to work on"


def test_the_first_prompts_cover_every_category() -> None:
    assert [prompt.category for prompt in load_prompts(len(CATEGORIES))] == list(CATEGORIES)


def test_plan() -> None:
    sampling = SamplingParams(max_tokens=5, seed=3)
    plan = make_plan("ar, tree", "7,63", BASE, sampling, limit=2, repeat=3)
    assert plan.variants == {
        "ar": Speculation("ar", 31, 4, 2),
        "tree": Speculation("tree", 31, 4, 2),
        "tree@7": Speculation("tree", 7, 4, 2),
        "tree@63": Speculation("tree", 63, 4, 2),
    }
    assert (len(plan.prompts), plan.sampling, plan.repeat) == (2, sampling, 3)


@pytest.mark.parametrize("limit", [0, -1, 10_000])
def test_limit_out_of_range(limit: int) -> None:
    with pytest.raises(InvalidOption, match="limit must be from 1") as caught:
        load_prompts(limit)
    assert caught.value.param == "limit"
