"""Where releases differ, as far as that needs no SGLang; tests/sglang_server has the rest."""

from types import SimpleNamespace
from typing import Any

import pytest

from ddtree.errors import InvalidOption, UnsupportedModel
from ddtree.sglang import adapters, compat, plugin
from ddtree.sglang.adapters import ADAPTERS, Release0523
from ddtree.sglang.signatures import RELEASES


class Arguments:
    """Those of 0.5.17."""

    rows = 32

    def override(self, source: str, **fields: Any) -> None:
        vars(self).update(fields)


def test_the_draft_side_of_0_5_17_has_arguments_of_its_own() -> None:
    arguments = Arguments()
    with ADAPTERS["0.5.17"].draft_arguments(arguments, 8) as own:
        assert vars(own) == {"speculative_num_draft_tokens": 8, "speculative_eagle_topk": 1}
    assert own is not arguments
    assert vars(arguments) == {}


def worker(**fields: Any) -> Any:
    plain = {"selector": None, "lilicorr": None, "_is_domino": False, "_target_logits_processor": None}
    return SimpleNamespace(**{**plain, **fields})


@pytest.mark.parametrize("field", ["selector", "lilicorr", "_is_domino"])
def test_drafters_with_heads_of_their_own_are_refused(field: str) -> None:
    with pytest.raises(UnsupportedModel, match="head: use --speculative-ddtree-mode linear"):
        Release0523().started(worker(**{field: True}))


def test_logits_come_whole() -> None:
    processor = SimpleNamespace(defer_verify_gather=True)
    Release0523().started(worker(_target_logits_processor=processor))
    assert not processor.defer_verify_gather
    Release0523().started(worker())


def test_hooks_that_moved_are_hooks() -> None:
    targets = {plugin.SRT + target for target, _, _ in plugin.HOOKS}
    assert ADAPTERS.keys() == RELEASES.keys()
    assert all(release.moved.keys() <= targets for release in ADAPTERS.values())


def test_no_adapter_for_a_release_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_chosen", [])
    monkeypatch.setattr(compat, "installed", lambda: lambda module: None)
    with pytest.raises(InvalidOption, match="this SGLang \\(of unknown version\\) is not as the plug-in knows it"):
        adapters.adapter()
    assert adapters.use("0.5.23") is adapters.adapter() is ADAPTERS["0.5.23"]
