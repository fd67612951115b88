"""Fixtures of the benchmarks' tests: a calibrated small checkpoint, questions, the folder of results."""
import json
import shutil

import bench
import pytest

from checkpoint.calibration import TEMPERATURES, Calibration
from tree import TreeShape

SHAPE = TreeShape(3, 1, 1)


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """The folder of result files. The memory is not measured."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench, "bandwidth", lambda device: 1e10)
    return tmp_path / "results"


@pytest.fixture
def record(results):
    """record(name): the content of a result file."""
    return lambda name: json.loads((results / f"{name}.json").read_text())


@pytest.fixture
def questions(tmp_path):
    """A file of two questions, alone in its folder."""
    path = tmp_path / "questions" / "q.jsonl"
    path.parent.mkdir()
    path.write_text('{"turns": ["what is 3?"]}\n{"turns": ["and 4 and 5?"]}\n')
    return path


@pytest.fixture(scope="session")
def calibrated(golden, tmp_path_factory):
    """A copy of the golden target whose head has a calibration of one tree."""
    folder = shutil.copytree(golden, tmp_path_factory.mktemp("benchmarks") / "target", dirs_exist_ok=True)
    Calibration({t: {SHAPE: 1.8} for t in TEMPERATURES}, (1.0,)).write(folder / "eagle3")
    return folder
