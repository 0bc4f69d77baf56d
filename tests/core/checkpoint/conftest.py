"""A small checkpoint that is sound, and a copy of it to damage."""

import shutil
from pathlib import Path

import pytest
from checkpoint_files import small_checkpoint


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint of the same tensors, to swap files with and to compare with."""
    return small_checkpoint(tmp_path_factory.mktemp("sound") / "step-00000010")


@pytest.fixture
def folder(tmp_path: Path, sound: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run" / "checkpoints" / "step-00000010"))
