"""What `ddtree models` says of the bundled drafter."""

import shutil
from pathlib import Path

import pytest

from ddtree.config import DRAFT_VOCABULARY
from ddtree.drafter import write_vocabulary
from ddtree.models import list_models, listing
from ddtree.models.names import BUNDLED_DRAFTER, bundled_drafter


def test_a_list_of_draft_tokens_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(bundled_drafter() / "config.json", tmp_path)
    monkeypatch.setattr(listing, "bundled_drafter", lambda: tmp_path)

    def said() -> str:
        return next(entry.source for entry in list_models() if entry.name == BUNDLED_DRAFTER)

    assert "drafts of" not in said()
    write_vocabulary(tmp_path / DRAFT_VOCABULARY, range(300), 200)
    assert said().endswith("; drafts of the 200 most frequent tokens")
