"""What the tests of the benchmarks share."""
import bench
import pytest


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """The folder that result files go to."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def questions(tmp_path):
    """A file of two questions."""
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["what is 3?"]}\n{"turns": ["and 4 and 5?"]}\n')
    return path


@pytest.fixture(scope="session")
def int8(golden, tmp_path_factory):
    """The golden target quantised to int8, its EAGLE-3 head too."""
    from quantize import main as quantize

    folder = tmp_path_factory.mktemp("quantised") / "int8"
    assert quantize(["--checkpoint", str(golden), "--mode", "int8", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def refused(capsys):
    """refused(main, *argv, words=...): the command ends with status 1 and one line that holds these words."""

    def check(main, *argv, words: str) -> None:
        capsys.readouterr()
        assert main([str(arg) for arg in argv]) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and words in lines[0], lines

    return check
