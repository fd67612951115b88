"""Prompts for runs of train.py, and one shared run per kind of head."""
import json
from pathlib import Path

import pytest
from helpers.training import options

KINDS = {  # options of each kind's run; together they cover all parts of the heads
    "eagle3": {"steps": 4},
    "p-eagle": {"steps": None, "drafts": 4, "markov-rank": 4},
    "dflash": {"steps": None, "drafts": 4, "layers": 2},
    "dspark": {"steps": None, "drafts": 4, "markov-rank": 8, "states": 3, "loss": "lk"},
    "eagle": {"steps": None, "draft-vocab": None},
}


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory) -> Path:
    """A file of 24 prompts."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    turns = [f"question {i}: what is {i} and {i * i}?" for i in range(24)]
    file.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    return file


@pytest.fixture(scope="session")
def trained(golden, prompt_file, tmp_path_factory):
    """Return a function that trains a head of a kind, once, and returns (command line, folder)."""
    import train

    runs = {}

    def run(kind: str) -> tuple[list[str], Path]:
        if kind not in runs:
            folder = tmp_path_factory.mktemp(kind)
            argv = options(golden, prompt_file, folder, kind=kind, epochs=6, **KINDS[kind])
            assert train.main(argv) == 0
            runs[kind] = argv, folder
        return runs[kind]

    return run
