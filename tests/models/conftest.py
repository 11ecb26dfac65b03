"""Small model files."""

from pathlib import Path

import pytest
from tiny_gguf import tiny_llama, write_gguf


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """A small model folder: config.json, model.safetensors, tokenizer.json."""
    folder = tmp_path / "hf"
    tiny_llama().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    """A small GGUF file."""
    return write_gguf(tmp_path / "tiny model.gguf", tiny_llama())
