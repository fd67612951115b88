"""Run every benchmark script on a small model and check the result file it writes. Speed is not tested."""
import importlib
import json

import batches
import bench
import hugging_face
import models
import pytest
import torch

from checkpoint.load import load_model
from families.mixed import causal

pytestmark = pytest.mark.kernels
TEXTS = "--checkpoint TARGET --max-new-tokens 12 --questions SETS"


@pytest.fixture(autouse=True)
def place(golden, tmp_path, monkeypatch):
    """Return the scripts' working folder, with TARGET and two questions in SETS. Memory bandwidth is not
    measured.
    """
    (tmp_path / "TARGET").symlink_to(golden)
    (tmp_path / "SETS").mkdir()
    (tmp_path / "SETS/q.jsonl").write_text('{"turns": ["what is 3?"]}\n{"turns": ["and 4 and 5?"]}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "bandwidth", lambda device: 1e10)
    return tmp_path


def run(script: str, options: str, *more: str) -> dict:
    """Run a script, which must succeed, and return the contents of its result file."""
    assert importlib.import_module(script).main([*options.split(), *more, "--threads", "1"]) == 0
    return json.loads((bench.RESULTS / f"{script}.json").read_text())


def test_step(capsys):
    how = "--repeat 1 --tree 1,0,0 8,2,4 --context 32 5000"
    rows = run("step", f"--checkpoint TARGET --batch 1 2 {how}")["rows"]
    assert [(r["batch"], r["context"], r["tree"]) for r in rows] == [
        (batch, 32, tree) for batch in (1, 2) for tree in ("1/0/0", "8/2/4")
    ]
    assert all(row["step"] > 0 and row["roof"] > 0 and row["verify"] > 0 for row in rows)
    assert "skipped: contexts beyond" in capsys.readouterr().err
    alone, tree = run("step", f"--shape tiny-mixture/2 --modes w4a8 {how}")["rows"]
    assert alone["mode"] == "w4a8" and alone["gigabytes"] < tree["gigabytes"]  # more rows choose more experts


def test_products():
    record = run("products", "--checkpoint TARGET --rows 1 3 --repeat 1")
    assert len(record["milliseconds"]) == 6 and f"{record['isa']} w8a8" in record["milliseconds"]
    assert all(ms > 0 for row in record["milliseconds"].values() for ms in row)


def test_tau():
    how = "--max-seq-len 400 --temperature 0 1 --tree 8,2,4 2,0,1 --draft-window 0 16 --calibration"
    rows = run("tau", f"{TEXTS}/q.jsonl {how}")["rows"]
    assert len(rows) == 8 and rows[0]["q"] == rows[0]["mean"] > rows[4]["q"] >= 1  # a larger tree
    bins = rows[0]["calibration"]
    steps = sum(one["nodes"] for one in bins) / 7  # of 8 nodes each
    accepted = sum(one["nodes"] * one["accepted"] for one in bins)
    assert accepted / steps == pytest.approx(rows[0]["q"] - 1, abs=0.5)  # the last step may be cut
    assert bench.RESULTS.joinpath("tau.png").stat().st_size > 5000


def test_floor():
    cells = run("floor", f"{TEXTS} --context 0 60")["cells"]
    assert [(c["context"], c["temperature"]) for c in cells] == [(0, 0), (0, 1), (60, 0), (60, 1)]
    assert all(c["texts_equal"] == c["of"] == 2 and c["speedup"] > 0 and c["trees"] for c in cells)


def test_batches():
    pytest.importorskip("transformers")
    how = "--transformers TARGET --batch 1 3 --least 2 --rounds 2 --tree 4,1,2"
    cells = run("batches", f"{TEXTS}/q.jsonl {how}")["cells"]
    first, second = (batches.summarize(cells, batch) for batch in (1, 3))
    assert first["texts equal"] == "4/4" and second["texts equal"] == "12/12"
    assert first["τ"] > 1 and second["÷ peer"] > 0


def test_peers(place):
    pytest.importorskip("transformers")
    summary = run("peers", f"{TEXTS}/q.jsonl --transformers")["summary"]
    assert [*summary] == ["ours plain", "ours eagle3", "transformers", "transformers, prompt lookup"]
    assert summary["ours eagle3"]["equal"] == 2 and summary["ours eagle3"]["x transformers"] > 0
    assert (place / "peers.png").is_file()


def test_a_hugging_face_copy_is_the_target():
    transformers = pytest.importorskip("transformers")
    assert hugging_face.main(["--checkpoint", "TARGET", "--out", "copy"]) == 0
    target, config = load_model("TARGET")
    copy = transformers.AutoModelForCausalLM.from_pretrained("copy", dtype="auto")
    ids = torch.arange(40, 80)[None]
    torch.testing.assert_close(copy(ids).logits, target.logits(causal(target, ids)[0]), rtol=1e-4, atol=1e-4)
    assert copy.generation_config.eos_token_id == config["stop_ids"]


@pytest.mark.expensive
def test_startup():
    """Cold starts compile the kernels."""
    (cold,) = run("startup", "--checkpoint TARGET --repeat 1 --prompt x")["eagle3"]["cold"]
    assert cold["first token"] > cold["load"] > 0 and cold["other"] > 0


@pytest.mark.slow
def test_serving():
    rounds = run("serving", f"{TEXTS}/q.jsonl --clients 2 --answers 1 --rounds 1")["rounds"]
    assert [r["server"] for r in rounds] == ["ours plain", "ours EAGLE-3"]
    assert all(r["tokens/s"] > 0 for r in rounds)


@pytest.mark.slow
def test_soak():
    """Under load, the same seed gives the same text."""
    serve = "--speculate eagle3 --tree 8,2,4 --no-compile --slots 2 --max-seq-len 900"
    how = "--questions SETS/q.jsonl --clients 3 --minutes 0.05 --requests 10 --serve"
    found = run("soak", f"--checkpoint TARGET {how}", serve)
    assert found["right"] > 0 and not found["wrong"] and found["memory"][-1] > 1e7


def test_record(place):
    """Both plain and speculative output appear in the recording."""
    found = run("record", "--checkpoint TARGET --max-new-tokens 24 --prompt", "what is 3?")
    plain, drafted = (found["answers"][name] for name in ("none", "eagle3"))
    assert plain["ids"] == drafted["ids"] and not any(by_head for *_, by_head in plain["pieces"])
    assert ", identical output" in (place / "record.svg").read_text()


# -- real models, where `benchmarks/models.py fetch` has put them --------------------------------------------


@pytest.mark.network
@pytest.mark.expensive
@pytest.mark.parametrize("name", models.MODELS)
def test_tokens_and_greedy_text_are_those_of_transformers(name):
    pytest.importorskip("accelerate")
    file = models.CACHE / f"{name}.gguf"
    if not file.exists():
        pytest.skip(f"benchmarks/models.py fetch {name}")
    assert models.check(file) == 0
