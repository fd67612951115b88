"""Every script runs on a small model and writes what its table shows. Speeds are not tested."""
import json
import shutil

import batches
import bench
import charts
import floor
import hugging_face
import peers
import products
import pytest
import record as recording
import serving
import soak
import startup
import step
import tau
import torch
from processes import Reply

from checkpoint.calibration import TEMPERATURES, Calibration
from checkpoint.loading import load_model
from tree import TreeShape

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """The folder of result files. The memory is not measured."""
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench, "bandwidth", lambda device: 1e10)
    return tmp_path / "results"


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
    Calibration({t: {TreeShape(3, 1, 1): 1.8} for t in TEMPERATURES}, (1.0,)).write(folder / "eagle3")
    return folder


def run(script, *argv) -> dict:
    """Return what a script's command line, which must succeed, writes to its result file."""
    assert script.main([*map(str, argv), "--threads", "1"]) == 0
    return json.loads((bench.RESULTS / f"{script.__name__}.json").read_text())


def test_step(calibrated, capsys):
    how = ("--tree", "1,0,0", "8,2,4", "--repeat", 1)
    rows = run(step, "--checkpoint", calibrated, *how, "--context", 32, 5000, "--batch", 1, 2)["rows"]
    assert [(r["batch"], r["context"], r["tree"]) for r in rows] == [
        (batch, 32, tree) for batch in (1, 2) for tree in ("1/0/0", "8/2/4")
    ]
    assert all(row["step"] > 0 and row["roof"] > 0 and row["verify"] > 0 for row in rows)
    assert "| none | 2 | 32 | 8/2/4 | 8 |" in (said := capsys.readouterr()).out
    assert "left out: contexts beyond" in said.err
    alone, tree = run(step, "--shape", "tiny-mixture/2", *how, "--context", 8)["rows"]
    assert alone["gigabytes"] < tree["gigabytes"]  # more rows choose more experts
    rows = run(step, "--shape", "tiny", "--modes", "none", "w4a8", *how, "--context", 8)["rows"]
    assert [row["mode"] for row in rows] == ["none"] * 2 + ["w4a8"] * 2


def test_products(golden):
    record = run(products, "--checkpoint", golden, "--rows", 1, 3, "--repeat", 1)
    found, isa = record["milliseconds"], record["isa"]
    assert [*found] == ["PyTorch whole", "PyTorch int8pack", f"{isa} whole", f"{isa} int8", f"{isa} w8a8"]
    assert all(ms > 0 for row in found.values() for ms in row)


def test_tau(golden, questions):
    how = ("--questions", questions, "--max-new-tokens", 12, "--max-seq-len", 400, "--temperature", 0, 1)
    rows = run(tau, "--checkpoint", golden, *how, "--tree", "8,2,4", "2,0,1", "--draft-window", 0, 16)["rows"]
    assert len(rows) == 8 and rows[0]["q"] == rows[0]["mean"] > rows[4]["q"] >= 1  # a larger tree


def test_floor(calibrated, questions):
    how = ("--questions", questions.parent, "--max-new-tokens", 12, "--context", 0, 60)
    cells = run(floor, "--checkpoint", calibrated, *how)["cells"]
    assert [(c["context"], c["temperature"]) for c in cells] == [(0, 0), (0, 1), (60, 0), (60, 1)]
    assert all(c["texts_equal"] == c["of"] == 2 and c["speedup"] > 0 and c["trees"] for c in cells)


def test_batches(golden, questions, capsys):
    pytest.importorskip("transformers")
    how = ("--batch", 1, 3, "--least", 2, "--rounds", 2, "--max-new-tokens", 12, "--tree", "4,1,2")
    what = ("--checkpoint", golden, "--questions", questions, "--transformers", golden)
    cells = run(batches, *what, *how)["cells"]
    assert [c["who"] for c in cells if c["round"] == 0] == [
        "plain", "drafted", "transformers", "drafted", "transformers", "plain"
    ]
    first, second = (batches.summarise(cells, batch) for batch in (1, 3))
    assert first["texts equal"] == "4/4" and second["texts equal"] == "12/12" and first["τ"] > 1
    assert second["÷ peer"] > 0 and "| 3 |" in capsys.readouterr().out


def test_peers(calibrated, questions, results, capsys):
    pytest.importorskip("transformers")
    how = ("--questions", questions, "--transformers", "--max-new-tokens", 12)
    summary = run(peers, "--checkpoint", calibrated, *how)["summary"]
    assert [*summary] == ["ours plain", "ours EAGLE-3", "transformers", "transformers, prompt lookup"]
    assert summary["ours EAGLE-3"]["equal"] == 2 and summary["ours EAGLE-3"]["x transformers"] > 0
    assert "| ours EAGLE-3 |" in capsys.readouterr().out
    assert (results / "peers.png").stat().st_size > 5000


def test_a_hugging_face_copy_is_the_target(golden, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    argv = ["--checkpoint", str(golden), "--out", str(tmp_path / "copy"), "--threads", "1"]
    assert hugging_face.main(argv) == 0
    target, config = load_model(golden)
    copy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto")
    for name, tensor in hugging_face.as_llama(target).state_dict().items():
        assert torch.equal(copy.state_dict()[name], tensor), name
    assert copy.generation_config.eos_token_id == config["stop_ids"]
    assert hugging_face.main(argv) == 1 and "exists" in capsys.readouterr().err


@pytest.mark.dear
def test_startup(golden):
    """Cold starts compile the kernels."""
    (cold,) = run(startup, "--checkpoint", golden, "--repeat", 1, "--prompt", "x")["eagle3"]["cold"]
    assert cold["first token"] > cold["load"] > 0 and cold["import"] > 0


@pytest.mark.slow
def test_serving(calibrated, questions, capsys):
    how = ("--questions", questions, "--clients", 1, 2, "--each", 1, "--rounds", 1, "--max-new-tokens", 12)
    rounds = run(serving, "--checkpoint", calibrated, *how)["rounds"]
    found = [(r["clients"], r["server"], r["tokens/s"] > 0) for r in rounds]
    assert found == [(n, f"ours {kind}", True) for n in (1, 2) for kind in ("plain", "EAGLE-3")]
    assert "| 2 | ours EAGLE-3 | 1.00 |" in capsys.readouterr().out


@pytest.mark.slow
def test_soak(golden, questions):
    """Same seed, same text under load; and what the ledger enters as wrong."""
    serve = "--speculate eagle3 --tree 8,2,4 --no-compile --slots 2 --max-seq-len 900"
    how = ("--questions", questions, "--clients", 3, "--minutes", 0.05, "--requests", 10, "--serve", serve)
    found = run(soak, "--checkpoint", golden, *how)
    assert found["right"] > 0 and not found["wrong"] and found["memory"][-1] > 1e7
    ledger, alone = soak.Ledger(), Reply("a text", "stop", 3, 0.1, 0.2)
    for reply in (alone, alone._replace(text="a", finish=None), alone._replace(tokens=2)):
        ledger.enter({}, reply, alone)
    ledger.enter({}, alone._replace(text="b", finish=None), alone)
    assert (ledger.right, ledger.left, len(ledger.wrong)) == (1, 2, 2)


def test_record(calibrated, results):
    """Plain and drafted text are drawn whole, the latter with its drafted tokens in their colour."""
    how = ("--checkpoint", calibrated, "--prompt", "what is 3?", "--max-new-tokens", 24)
    found, first = run(recording, *how), (results / "record.svg").read_text()
    run(recording, *how, "--redraw")
    assert (results / "record.svg").read_text() == first and "the same text" in first
    plain, drafted = (found["answers"][name] for name in ("none", "eagle3"))
    assert plain["ids"] == drafted["ids"] and not any(by_head for *_, by_head in plain["pieces"])
    assert recording.places("ab\nc") == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_charts(results, monkeypatch):
    """They are drawn from the result files of the repository."""
    monkeypatch.setattr(charts, "RESULTS", results)
    results.mkdir()
    charts.drafters()
    assert sorted(path.name for path in results.iterdir()) == ["drafters.csv", "drafters.png"]
