"""A tiny target, and chats of its own, made once."""

from pathlib import Path

import pytest
import torch

from ddtree.training.config import TrainConfig, read
from ddtree.training.data import generate_data
from tiny_run import run_file, save_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def made(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run whose data are there; its own folder must not be fitted in."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    config = read(run_file(tmp_path_factory.mktemp("made") / "run.toml", tiny_target))
    generate_data(config, quiet=True)
    torch.set_num_threads(threads)
    return config


@pytest.fixture
def fresh(made: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The same data in a folder of the test's own."""
    from dataclasses import replace
    from shutil import copytree

    copytree(made.data_folder, tmp_path / "run" / "data")
    return replace(made, folder=str(tmp_path / "run"))
