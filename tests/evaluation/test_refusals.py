"""What evaluate.py refuses, on one line each."""
import shutil
from pathlib import Path

import pytest

import evaluate

BAD_INPUT = {  # id: what the error says, and the option that is changed
    "unknown method": ("unknown; choose from", "--speculate", "eagle9"),
    "checkpoint that is not there": ("not a folder", "--checkpoint", "{folder}/nothing"),
    "temperature in words": ("--temperature", "--temperature", "hot"),
    "temperature below 0": ("temperature must be", "--temperature", "0,-1"),
    "limit 0": ("--limit", "--limit", "0"),
    "observe -1": ("--observe", "--observe", "-1"),
    "no threads": ("--threads", "--threads", "0"),
    "no new tokens": ("--max-new-tokens", "--max-new-tokens", "0"),
    "questions that are not there": ("no such file", "--questions", "{folder}/none.jsonl"),
    "folder without questions": ("holds no question files", "--questions", "{folder}/empty"),
    "unknown tree": ("none of auto, paper", "--tree", "bush"),
    "head that is not there": ("there is no draft head or model", "--draft", "{folder}/no"),
    "calibrating a head that is none": ("no head that grows trees", "--speculate", "lookup --calibrate"),
    "no chat template": ("need a tokenizer and a chat template", "--checkpoint", "{folder}/mute"),
}


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory) -> Path:
    """An empty folder and a target without a tokenizer, in `empty` and `mute`."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty").mkdir()
    shutil.copytree(golden, folder / "mute", ignore=shutil.ignore_patterns("*token*"))
    return folder


@pytest.mark.parametrize("words, flag, value", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line(golden, folder, tmp_path, capsys, words, flag, value):
    given = {"--checkpoint": golden, "--out": tmp_path / "out", "--limit": 1}
    given[flag] = value.format(folder=folder)
    argv = [word for pair in given.items() for text in pair for word in str(text).split()]
    assert evaluate.main(["--no-compile", *argv]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and words in lines[0], lines
