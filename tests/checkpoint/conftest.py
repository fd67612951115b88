"""A small converted target."""
from pathlib import Path

import pytest
from helpers.sources import target_state, write_source

from checkpoint.convert import convert


@pytest.fixture
def target(tmp_path) -> Path:
    """The target of `helpers.sources`, converted; its source folder is `target-source` next to it."""
    return convert(write_source(tmp_path / "target-source", target_state()), tmp_path / "target", quiet=True)
