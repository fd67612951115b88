"""Answers that an interrupted run has left: those that are whole are taken, whatever stands beside them."""
import os

import pytest

from common.errors import InputError
from training.journal import Journal

GOOD = '["key", [1, 2, 3], "stop"]'


@pytest.mark.parametrize("line", (
    "5", "null", "[[1], 2, 3]", '["k", [1], 3]', '["k", [1.5], "stop"]', '["k", [-1], "stop"]', "[" * 100_000,
    '["k", 3, "stop"]', '["k", [1], "st', "\xff", '{"a": 1, "b": 2, "c": 3}', '["k", [true], "stop"]',
))
def test_what_is_no_answer_is_left_out(tmp_path, line):
    (tmp_path / "shard.1-1.answers").write_text(f"{line}\n{GOOD}\n{line}", encoding="latin-1")
    assert Journal(tmp_path / "shard.jsonl").read() == {"key": ([1, 2, 3], "stop")}


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "shard.1-1.answers")
    with pytest.raises(InputError, match=r"shard\.1-1\.answers: is a pipe; expected a file"):
        Journal(tmp_path / "shard.jsonl").read()
