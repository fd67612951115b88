"""Every script runs on a small model and writes what its table shows. Speeds are not tested."""
import argparse
import asyncio
import subprocess
import sys

import batches
import bench
import charts
import floor
import peers
import products
import pytest
import serving
import soak
import startup
import step
import tau
from bench import Decoded
from helpers import ROOT
from processes import Reply

from common.errors import InputError

pytestmark = pytest.mark.compile


def run(script, *argv) -> None:
    """Run a script's command line, which must succeed."""
    assert script.main([*map(str, argv), "--threads", "1"]) == 0


def test_step(calibrated, record, capsys):
    how = ("--tree", "1,0,0", "8,2,4", "--repeat", 1)
    run(step, "--checkpoint", calibrated, *how, "--context", 32, 5000, "--batch", 1, 2)
    rows = record("step")["rows"]
    assert [(r["batch"], r["context"], r["tree"]) for r in rows] == [
        (batch, 32, tree) for batch in (1, 2) for tree in ("1/0/0", "8/2/4")
    ]
    for row in rows:
        assert row["step"] > 0 and row["roof"] > 0 and row["verify"] > 0
    assert "| none | 2 | 32 | 8/2/4 | 8 |" in (said := capsys.readouterr()).out
    assert "left out: contexts beyond" in said.err


def test_step_of_a_shape_beside_llama_bench(tmp_path, record):
    """llama-bench is a program that says that it is fast, if it finds a GGUF file."""
    program = tmp_path / "llama-bench"
    program.write_text("#!/bin/sh\ntest \"$(head -c 4 \"$2\")\" = GGUF && echo '[{\"avg_ts\": 100.0}]'\n")
    program.chmod(0o755)
    how = ("--tree", "1,0,0", "4,2,1", "--repeat", 1, "--context", 8, "--llama-bench", program)
    run(step, "--shape", "tiny", "--modes", "none", "w4a8", *how)
    found = record("step")
    assert [row["mode"] for row in found["rows"]] == ["none"] * 2 + ["w4a8"] * 2
    assert found["llama.cpp"] == {"token": 10.0, "8 rows": 80.0}


def test_products(golden, record):
    run(products, "--checkpoint", golden, "--rows", 1, 3, "--repeat", 1)
    found = record("products")["milliseconds"]
    isa = record("products")["isa"]
    assert [*found] == ["PyTorch whole", "PyTorch int8pack", f"{isa} whole", f"{isa} int8", f"{isa} w8a8"]
    assert all(ms > 0 for row in found.values() for ms in row)


def test_tau(golden, questions, record):
    how = ("--questions", questions, "--max-new-tokens", 12, "--max-seq-len", 400, "--temperature", 0, 1)
    run(tau, "--checkpoint", golden, *how, "--tree", "8,2,4", "2,0,1", "--draft-window", 0, 16)
    rows = record("tau")["rows"]
    assert len(rows) == 8 and rows[0]["q"] == rows[0]["mean"] > rows[4]["q"] >= 1  # a larger tree


def test_floor(calibrated, questions, record):
    how = ("--questions", questions.parent, "--max-new-tokens", 12, "--context", 0, 60)
    run(floor, "--checkpoint", calibrated, *how)
    cells = record("floor")["cells"]
    assert [(c["context"], c["temperature"]) for c in cells] == [(0, 0), (0, 1), (60, 0), (60, 1)]
    assert all(c["texts_equal"] == c["of"] == 2 and c["speedup"] > 0 and c["trees"] for c in cells)


def test_batches(golden, questions, record, capsys):
    pytest.importorskip("transformers")
    how = ("--batch", 1, 3, "--least", 2, "--rounds", 2, "--max-new-tokens", 12, "--tree", "4,1,2")
    run(batches, "--checkpoint", golden, "--questions", questions, *how, "--transformers", golden)
    cells = record("batches")["cells"]
    assert [c["who"] for c in cells if c["round"] == 0] == [
        "plain", "drafted", "transformers", "drafted", "transformers", "plain"
    ]
    first, second = (batches.summarise(cells, batch) for batch in (1, 3))
    assert first["texts equal"] == "4/4" and second["texts equal"] == "12/12" and first["τ"] > 1
    assert second["÷ peer"] > 0 and "| 3 |" in capsys.readouterr().out


def test_batches_ask_others_in_each_round():
    o = argparse.Namespace(each=2, least=6, batch=[1, 4], max_new_tokens=96, temperature=0.0)
    rounds, questions = ((0, 1), (0, 4), (1, 4)), [[i] for i in range(30)]
    few, many, later = (batches.asked(o, questions, *of) for of in rounds)
    assert len(few[0]) == 6 and few[0] == many[0][:6] and not any(q in many[0] for q in later[0])
    lengths = [sampling.max_new_tokens for sampling in many[1]]
    assert len(set(lengths)) == 8 and 48 <= min(lengths) and max(lengths) <= 96


def test_peers(calibrated, questions, record, results, capsys):
    pytest.importorskip("transformers")
    how = ("--questions", questions, "--transformers", "--max-new-tokens", 12)
    run(peers, "--checkpoint", calibrated, *how)
    summary = record("peers")["summary"]
    assert [*summary] == ["ours plain", "ours EAGLE-3", "transformers", "transformers, prompt lookup"]
    assert summary["ours EAGLE-3"]["equal"] == 2 and summary["ours EAGLE-3"]["x transformers"] > 0
    assert "| ours EAGLE-3 |" in capsys.readouterr().out
    assert (results / "peers.png").stat().st_size > 5000


def test_contenders_take_turns_and_answers_without_speed_are_left_out():
    order = []

    def contender(name: str):
        def decode(ids: list[int], tokens: int) -> Decoded:
            order.append(name)
            return Decoded([], float(ids[0]))

        return decode

    contenders = {name: contender(name) for name in "abc"}
    rows = bench.time_in_turns(contenders, [[1], [0], [3]], 9)
    assert "".join(order) == "abc" + "abcbcacab"  # the first three are the warm-up
    assert [[*row] for row in rows] == [["a", "b", "c"]] * 2 and rows[1]["a"].rate == 3
    with pytest.raises(InputError, match="nothing to time"):
        bench.time_in_turns(contenders, [[0]], 9)


NOTES = """compiling the kernels took 2.0 s
loaded x in 3.5 s; caches of 1 x 64 slots: 0.00 GB
compiling the step took 4.0 s
ready 9.0 s after the start
"""


def test_startup(record, tmp_path, monkeypatch, capsys):
    """A stand-in for generate.py prints the times that it would print."""
    script = tmp_path / "generate.py"
    script.write_text(f"import sys\nsys.stderr.write({NOTES!r})\nprint('text')")
    monkeypatch.setattr(startup, "ROOT", tmp_path)
    (tmp_path / "x").mkdir()
    argv = ("--checkpoint", tmp_path / "x", "--repeat", 1)
    run(startup, *argv)
    (cold,) = record("startup")["eagle3"]["cold"]
    assert cold.pop("first token") > 0
    assert cold == {"kernels": 2.0, "load": 1.5, "compile step": 4.0, "import": 1.5}
    script.write_text("raise SystemExit('note\\nerror: no such folder')")
    assert startup.main([*map(str, argv)]) == 1
    assert "generate.py --speculate none failed (error: no such folder)" in capsys.readouterr().err


@pytest.mark.slow
def test_serving(calibrated, questions, record, capsys):
    how = ("--questions", questions, "--clients", 1, 2, "--each", 1, "--rounds", 1, "--max-new-tokens", 12)
    run(serving, "--checkpoint", calibrated, *how)
    found = [(r["clients"], r["server"], r["tokens/s"] > 0) for r in record("serving")["rounds"]]
    assert found == [(n, f"ours {kind}", True) for n in (1, 2) for kind in ("plain", "EAGLE-3")]
    assert "| 2 | ours EAGLE-3 | 1.00 |" in capsys.readouterr().out


@pytest.mark.slow
def test_soak(golden, questions, record):
    serve = "--speculate eagle3 --tree 8,2,4 --no-compile --slots 2 --max-seq-len 900"
    how = ("--questions", questions, "--clients", 3, "--minutes", 0.05, "--requests", 10, "--serve", serve)
    run(soak, "--checkpoint", golden, *how)
    found = record("soak")
    assert found["right"] > 0 and not found["wrong"] and found["memory"][-1] > 1e7


def test_soak_enters_what_is_wrong():
    ledger, alone = soak.Ledger(), Reply("a text", "stop", 3, 0.1, 0.2)
    for reply in (alone, alone._replace(text="a", finish=None), alone._replace(tokens=2)):
        ledger.enter({}, reply, alone)
    ledger.enter({}, alone._replace(text="b", finish=None), alone)
    assert (ledger.right, ledger.left, len(ledger.wrong)) == (1, 2, 2)
    ledger.memory, ledger.files = [10**9] * 50 + [2 * 10**9] * 50, [5] * 50 + [9] * 50
    ledger.check_growth(clients=4)
    ledger.check_growth(clients=3)
    assert [line.split()[0] for line in ledger.wrong[2:]] == ["memory", "memory", "open"]
    assert len(soak.requests(["a", "b"], 30)) == 30


def test_charts(results, monkeypatch):
    """They are drawn from the result files of the repository."""
    read = charts.read
    with monkeypatch.context() as patched:
        patched.setattr(charts, "RESULTS", ROOT / "benchmarks" / "results")
        records = {name: read(name) for name in (charts.PEERS, "drafters")}
    monkeypatch.setattr(charts, "read", records.__getitem__)
    monkeypatch.setattr(charts, "RESULTS", results)
    results.mkdir()
    assert charts.main() == 0
    assert sorted(path.name for path in results.iterdir()) == ["drafters.csv", "drafters.png", "overview.png"]


def test_the_gpu_script_without_a_gpu():
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    script = ROOT / "benchmarks" / "gpu.sh"
    for argv, words in (("probe", "error: torch sees no GPU here"), ("bogus", "error: no stage bogus")):
        done = subprocess.run(["sh", script, argv], env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr


@pytest.mark.parametrize("script, argv, words", [
    (step, ("--shape", "huge"), "--shape huge: unknown; choose from llama-3.1-8b"),
    (step, ("--shape", "tiny", "--context", "9999"), "nothing could be measured"),
    (tau, ("--checkpoint", "{golden}", "--questions", "{questions}", "--max-seq-len", "130"), "fit in"),
    (floor, ("--checkpoint", "{golden}", "--questions", "{golden}"), "has no .jsonl files"),
    (peers, ("--checkpoint", "{golden}", "--questions", "{questions}", "--no-ours", "--llama-server", "no",
             "--gguf", "x.gguf"), "--llama-server no: cannot be started"),
])
def test_refusals(golden, questions, capsys, script, argv, words):
    argv = [word.format(golden=golden, questions=questions) for word in argv]
    assert script.main([*argv, "--threads", "1"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and words in lines[0]


def test_no_clients_answer_is_an_error():
    """A server that answers with one token has no speed."""
    class Server:
        name, url = "serve.py", "http://127.0.0.1:9"

    with pytest.raises(InputError, match="nothing to time"):
        asyncio.run(serving.load(Server(), [], 1, 4))
