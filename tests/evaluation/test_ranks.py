"""evaluate.py on two ranks: the answers of one process, one table, and a run that goes on."""
import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT

import evaluate
from evaluation.answers import Answer

QUESTIONS = """{"question_id": 81, "category": "c", "turns": ["what is 3?", "and 4?"]}
{"turns": ["say 5"]}
"""


def answers_in(folder) -> dict[tuple, list]:
    lines = (folder / "answers.jsonl").read_bytes().splitlines()
    read = [Answer.read(line, "answers.jsonl") for line in lines]
    return {answer.key: [turn.ids for turn in answer.turns] for answer in read}


@pytest.mark.slow
def test_two_ranks_answer_as_one_process_does(golden, tmp_path):
    (tmp_path / "one.jsonl").write_text(QUESTIONS)

    def options(out: str) -> list[str]:
        return [
            "--checkpoint", str(golden), "--out", str(tmp_path / out), "--questions",
            str(tmp_path / "one.jsonl"), "--no-compile", "--threads", "1", "--max-new-tokens", "16",
            "--temperature", "0,1", "--dtype", "fp32", "--speculate", "eagle3", "--tree", "8,2,3",
            "--observe", "1",
        ]

    def together() -> subprocess.CompletedProcess:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return subprocess.run(
            [*launch, "evaluate.py", *options("two")], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=300,
        )

    assert evaluate.main(options("alone")) == 0
    run = together()
    assert run.returncode == 0, run.stderr[-3000:]
    assert answers_in(tmp_path / "two") == answers_in(tmp_path / "alone") and run.stdout.count("| mean") > 0
    alone, two = ((tmp_path / name / "table.json").read_text() for name in ("alone", "two"))
    for a, b in zip(json.loads(alone), json.loads(two), strict=True):
        assert a["tau"] == b["tau"] and a["method"] == b["method"]
    assert (tmp_path / "two" / "acceptance.png").exists()
    assert json.loads((tmp_path / "two" / "options.json").read_text())["ranks"] == 2
    before = (tmp_path / "two" / "answers.jsonl").read_text()
    assert together().returncode == 0  # nothing is left to ask
    assert (tmp_path / "two" / "answers.jsonl").read_text() == before
