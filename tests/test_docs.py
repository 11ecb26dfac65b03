"""The documents keep their promises: linked files exist, named results are there, commands and options are real."""

import re
from pathlib import Path

import pytest

from ddtree.cli.app import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert "@@" not in text, "a figure is missing"
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_results_named_by_the_benchmarks_are_there() -> None:
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\d{4}-\d{2}-\d{2}[\w.-]+\.json)`", text))
    assert named == {path.name for path in (ROOT / "benchmarks/results").glob("*.json")}


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"`ddtree ([a-z]+)", text)) >= commands
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", text)) <= targets


def test_every_heading_that_is_linked_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = {h.lower().replace(" ", "-") for h in re.findall(r"^## (.+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([a-z-]+)\)", text)) <= headings
