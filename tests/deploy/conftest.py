"""What the tests of `ddtree deploy` share."""

import pytest

from ddtree.deploy import doors, site


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake servers need no fifth of a second between two looks."""
    for room in (site, doors):
        monkeypatch.setattr(room, "POLL_S", 0.02)
