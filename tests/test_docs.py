"""The documents keep their promises: linked files exist, named results are there, commands and options are real."""

import json
import re
from pathlib import Path

import pytest
from typer.main import get_command

from ddtree.cli.app import app
from ddtree.server.schemas import ChatRequest, CompletionRequest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))
# Options of others: pip's, and those of vLLM that docs/server.md translates.
FOREIGN = {
    "--extra-index-url",
    "--speculative-config",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--enable-prefix-caching",
    "--enable-auto-tool-choice",
}


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
    assert named == {path.name for path in RESULTS}


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.name)
def test_results_hold_something(result: Path) -> None:
    text = result.read_text(encoding="utf-8")
    assert text.strip(), "the file is empty: run its command of benchmarks/README.md again"
    assert json.loads(text)


def test_commands_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = {
        command.callback.__name__ for command in app.registered_commands if command.callback and not command.hidden
    }
    assert set(re.findall(r"`ddtree ([a-z]+)", text)) >= commands
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", text)) <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_heading_that_is_linked_exists(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^):#]*)#([^)]+)\)", document.read_text(encoding="utf-8")):
        text = (document.parent / target if target else document).read_text(encoding="utf-8")
        assert anchor in {h.lower().replace(" ", "-") for h in re.findall(r"^##+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("name", ["README.md", "docs/server.md"])
def test_options_exist(name: str) -> None:
    commands = get_command(app).commands.values()
    known = {option for command in commands for p in command.params for option in (*p.opts, *p.secondary_opts)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / name).read_text(encoding="utf-8")))
    assert named <= known | FOREIGN | {"--help"}


@pytest.mark.parametrize("name", ["README.md", "docs/server.md"])
def test_samples_can_be_read(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for sample in re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        json.loads(sample)
    for sample in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        compile(sample, name, "exec")
    for body in re.findall(r"-d '(.*?)'", text, re.DOTALL):
        ChatRequest.model_validate_json(body)


def test_every_field_of_a_request_is_explained() -> None:
    text = (ROOT / "docs/server.md").read_text(encoding="utf-8")
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields} - {"messages", "prompt"}
    assert {field for field in fields if f"`{field}`" not in text} == set()
