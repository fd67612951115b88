"""step.py, the random models it measures, products.py and attention.py. Speeds themselves are not tested."""
import json

import attention
import products
import pytest
import step
import torch
from shapes import random_models

from drafters.eagle import Eagle
from engine.decoder import Decoder
from kernels import isa
from kernels.choose import choose_backend
from sampling.options import Sampling
from tree import TreeShape

TINY = ("--shape", "tiny", "--threads", "1", "--repeat", "1", "--no-compile", "--device", "cpu")


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
def test_models_of_a_shape_decode(mode):
    """Random weights, quantised or not: speculative text is plain text, as with any others."""
    target, head = random_models("tiny", torch.float32, "cpu", mode, 32)
    fast, plain = (
        Decoder(target, d, compile=False, max_seq_len=100) for d in (Eagle(head, TreeShape(8, 2, 4)), None)
    )
    assert fast.generate([[1, 2, 3]], Sampling(20))[0].ids == plain.generate([[1, 2, 3]], Sampling(20))[0].ids


@pytest.mark.compile
@pytest.mark.parametrize("mode", [None, "int8", "int4"])
def test_models_of_a_shape_go_on_the_kernels(mode):
    target, head = random_models("tiny", torch.float32, "cpu", mode, 32)
    assert choose_backend("cpu").prepare(target, head)
    decoder = Decoder(target, Eagle(head, TreeShape(8, 2, 4)), compile=False, max_seq_len=100)
    assert len(decoder.generate([[1, 2, 3]], Sampling(20))[0].ids) == 20


@pytest.mark.slow
def test_step_measures_every_part(results, capsys):
    argv = ["--rows", "1", "8", "--context", "32", "200", "--batch", "1", "2", "--modes", "none", "int8"]
    assert step.main([*TINY, *argv, "--repeat", "2"]) == 0
    record = json.loads((results / "step.json").read_text())
    assert {(r["mode"], r["batch"], r["context"], r["rows"]) for r in record["rows"]} == {
        (m, b, n, t) for m in ("none", "int8") for b in (1, 2) for n in (32, 200) for t in (1, 8)
    }
    for row in record["rows"]:
        assert row["step"] > 0 and row["verify"] > 0 and 0 < row["roof"]
        assert ("draft" in row) == (row["rows"] > 1)
    few, many = (next(r for r in record["rows"] if r["context"] == n)["gigabytes"] for n in (32, 200))
    assert many > few and record["gigabytes_per_second"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 16


def test_a_step_is_held_at_its_context():
    """What is timed is a step at n tokens, every time, whatever it commits."""
    target, head = random_models("tiny", torch.float32, "cpu", None)
    held = step.HeldStep(target, head, step.TREES[8], 2, 200, False)
    parts = held.parts(100)
    for _ in range(3):
        for part in parts.values():
            with torch.no_grad():
                part()
        assert held.decoder.state.length.tolist() == [100, 100] and held.span.shape[0] == 128


REFUSED = {  # id: what the error says, and the command line
    "neither checkpoint nor shape": ("give --checkpoint DIR or --shape NAME", ()),
    "both checkpoint and shape": ("give --checkpoint DIR or --shape NAME", (*TINY, "--checkpoint", "x")),
    "unknown shape": ("--shape nothing: unknown; choose from llama-3.1-8b", ("--shape", "nothing")),
    "batch 0": ("--context, --batch and --repeat must be at least 1", (*TINY, "--batch", "1", "0")),
    "no threads": ("--threads 0: must be 1 to", (*TINY, "--threads", "0")),
    "unknown device": ("--device nowhere", (*TINY, "--device", "nowhere")),
    "quantised twice": ("is quantised already (int8)", ("--checkpoint", "{int8}", "--modes", "int8")),
    "context too long": ("nothing left to measure, the model reads 4096", (*TINY, "--context", "4000")),
}


@pytest.mark.parametrize("words, argv", REFUSED.values(), ids=REFUSED)
def test_what_step_refuses(int8, refused, monkeypatch, words, argv):
    monkeypatch.setattr(step, "bandwidth", lambda device: 1e9)
    refused(step.main, *(word.format(int8=int8) for word in argv), words=words)


def test_contexts_that_do_not_fit_are_left_out(results, capsys):
    """With caches in fp8, which PyTorch has and the kernels have not."""
    options = [*TINY, "--rows", "1", "--kv", "fp8", "--dtype", "bf16"]
    assert step.main([*options, "--context", "32", "4000"]) == 0
    assert "longer than the model's 4096 tokens: --context 4000" in capsys.readouterr().err
    assert {row["context"] for row in json.loads((results / "step.json").read_text())["rows"]} == {32}
    assert json.loads((results / "step.json").read_text())["kv"] == "fp8"
    assert step.main([*options, "--context", "32", "--compile"]) == 1
    assert "error: --kv fp8: our CPU kernels have int8 caches" in capsys.readouterr().err


@pytest.mark.compile
def test_products_are_timed(golden, results):
    best, slowest = isa.available()[0], isa.available()[-1]
    argv = ["--checkpoint", str(golden), "--rows", "1", "3", "--repeat", "1", "--threads", "1", "--isa", best]
    assert products.main([*argv, slowest, "--device", "cpu"]) == 0
    milliseconds = json.loads((results / "products.json").read_text())["milliseconds"]
    assert {"PyTorch whole", f"{best} whole", f"{best} int8", f"{slowest} w8a8"} <= set(milliseconds)
    assert all(ms > 0 for row in milliseconds.values() for ms in row)


@pytest.mark.compile
def test_passes_over_context_are_timed(golden, results, refused):
    """Every size, with each instruction set; and what is refused."""
    argv = ["--checkpoint", str(golden), "--threads", "1", "--repeat", "1", "--isa", "portable"]
    assert attention.main([*argv, "--rows", "1", "5", "--context", "3", "200"]) == 0
    rows = json.loads((results / "attention.json").read_text())["rows"]
    assert [(row["isa"], row["rows"], row["context"]) for row in rows] == [
        ("portable", rows, context) for rows in (1, 5) for context in (3, 200)
    ]
    assert all(row["ms"] > 0 for row in rows)
    refused(attention.main, *argv, "--context", "0", words="--context and --repeat must be at least 1")


def test_what_products_refuse(golden, int8, refused):
    cpu = ("--threads", "1", "--device", "cpu", "--checkpoint")
    refused(products.main, *cpu, int8, words="is quantised; name the checkpoint before quantisation")
    refused(products.main, *cpu, golden, "--rows", "1", "0", words="--rows and --repeat must be at least 1")
    refused(products.main, *cpu, golden, "--isa", "sse9", words="--isa sse9: unknown; choose from")
    refused(products.main, *cpu, golden, "--repeat", "0", words="--rows and --repeat must be at least 1")
