"""Prompts for the runs of train.py."""
from pathlib import Path

import pytest
from helpers.training import write_prompts


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory) -> Path:
    """A file of 24 prompts."""
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")
