"""The benchmark scripts run and say what they measured; speeds themselves are nobody's test."""
import json

import bench
import peers
import products
import pytest
import small_draft
import step
import tau
import torch
from gguf_copy import write_gguf
from helpers.sources import CONFIG, target_state
from helpers.sources import write_gguf as write_original
from shapes import random_models

import generate
import train
from checkpoint.convert import convert
from checkpoint.loading import load_model
from common.errors import InputError
from drafters.eagle import Eagle
from engine.decoder import Decoder
from kernels.packed import pack
from quantize import main as quantize
from sampling.options import Sampling
from tree import TreeShape


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_our_weights_in_a_gguf_are_our_weights(tmp_path):
    """Ours -> GGUF -> ours; the other file lends its metadata only."""
    ours = convert(
        write_original(tmp_path / "a.gguf", target_state(), kind="F32"), tmp_path / "ours", dtype="bf16",
        quiet=True
    )
    lender = write_original(tmp_path / "b.gguf", {n: t * 0 for n, t in target_state().items()}, kind="Q8_0")
    target, config = load_model(ours)
    back, again = load_model(
        convert(write_gguf(lender, target, tmp_path / "c.gguf", "BF16"), tmp_path / "back", quiet=True)
    )
    assert again["stop_ids"] == config["stop_ids"] and back.args == target.args
    for name, tensor in target.state_dict().items():
        assert torch.equal(back.state_dict()[name].bfloat16(), tensor), name
    rounded, _ = load_model(
        convert(write_gguf(lender, target, tmp_path / "d.gguf", "Q8_0"), tmp_path / "q8", quiet=True)
    )
    assert (rounded.embed.weight - target.embed.weight).abs().max() < target.embed.weight.abs().max() / 100
    other = write_original(tmp_path / "e.gguf", target_state(), {**CONFIG, "num_hidden_layers": 7})
    (tmp_path / "f.gguf").write_text("no GGUF")
    for bad, words in ((other, "is no GGUF of this LLaMA"), (tmp_path / "f.gguf", "cannot be read as GGUF")):
        with pytest.raises(InputError, match=words):
            write_gguf(bad, target, tmp_path / "g.gguf", "BF16")


@pytest.mark.parametrize("mode", [None, "int8", "int4"])
def test_models_of_a_shape_decode(mode):
    """Random weights, quantised or not: speculative text is plain text, as with any others."""
    target, head = random_models("tiny", torch.float32, "cpu", mode, 32)
    fast, plain = (
        Decoder(target, d, compile=False, max_seq_len=100) for d in (Eagle(head, TreeShape(8, 2, 4)), None)
    )
    assert fast.generate([[1, 2, 3]], Sampling(20))[0].ids == plain.generate([[1, 2, 3]], Sampling(20))[0].ids
    assert pack(target, head)


def test_step_measures_every_part(results, capsys):
    argv = [
        "--shape", "tiny", "--rows", "1", "8", "--context", "32", "200", "--batch", "1", "2", "--modes",
        "none", "int8"
    ]
    assert step.main([*argv, "--threads", "1", "--repeat", "2", "--no-compile", "--device", "cpu"]) == 0
    record = json.loads((results / "step.json").read_text())
    assert {(r["mode"], r["batch"], r["context"], r["rows"]) for r in record["rows"]} == {
        (m, b, n, t) for m in ("none", "int8") for b in (1, 2) for n in (32, 200) for t in (1, 8)
    }
    for row in record["rows"]:
        assert row["step"] > 0 and row["verify"] > 0 and ("draft" in row) == (
            row["rows"] > 1
        ) and 0 < row["roof"]
    few, many = (next(r for r in record["rows"] if r["context"] == n)["gigabytes"] for n in (32, 200))
    assert many > few and record["gigabytes_per_second"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 16
    assert step.main([]) == 1 and step.main(["--shape", "nothing"]) == 1


def test_a_step_is_held_at_its_context():
    """What is timed is a step at n tokens, every time, whatever it commits."""
    target, head = random_models("tiny", torch.float32, "cpu", None)
    subject = step.Subject(target, head, 8, 2, 200, False)
    parts = subject.parts(100)
    for _ in range(3):
        for call in parts.values():
            with torch.no_grad():
                call()
        assert subject.decoder.state.length.tolist() == [100, 100] and subject.span.shape[0] == 128


def test_peers_and_tau_on_a_small_model(golden, tmp_path, results, capsys):
    assert quantize(["--checkpoint", str(golden), "--mode", "int8", "--out", str(tmp_path / "int8")]) == 0
    (tmp_path / "q.jsonl").write_text('{"turns": ["what is 3?"]}\n{"turns": ["and 4 and 5?"]}\n')
    argv = [
        "--checkpoint", str(golden), "--questions", str(tmp_path / "q.jsonl"), "--threads", "1",
        "--max-new-tokens", "12"
    ]
    assert peers.main(
        [*argv, "--int8", str(tmp_path / "int8"), "--transformers", "--ladder", "--no-compile"]
    ) == 0
    record = json.loads((results / "peers.json").read_text())
    assert set(record["summary"]) == {
        "ours plain", "ours EAGLE-3", "ours plain int8", "ours EAGLE-3 int8", "transformers",
        "transformers, prompt lookup",
        "ours plain, uncompiled PyTorch", "ours EAGLE-3, uncompiled PyTorch",
    }
    assert record["summary"]["ours EAGLE-3"]["equal"] == 2 and record["summary"]["ours plain"]["x transformers"] > 0
    assert "| ours EAGLE-3 |" in (results / "peers.md").read_text() and (
        results / "peers.png"
    ).stat().st_size > 5000
    argv = [
        "--checkpoint", str(golden), "--questions", str(tmp_path / "q.jsonl"), "--max-new-tokens", "12",
        "--tree", "8,2,4"
    ]
    assert tau.main(argv) == 0
    record = json.loads((results / "tau.json").read_text())
    (found,) = record["heads"].values()
    assert found["q"]["tau"] >= 1 and found["q"]["prompts"] == 2 and f"{found['mean']['tau']:.3f}" in capsys.readouterr().out


def test_a_small_draft_of_the_target(golden, tmp_path, capsys):
    """Cut, trained, converted: it drafts for its target; and what cannot be is one line."""
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(24))
    )
    collect = [
        "--checkpoint", str(golden), "--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "x")
    ]
    assert train.main(
        [*collect, "--work", str(tmp_path / "w"), "--collect-only", "--no-compile", "--max-new-tokens", "24"]
    ) == 0
    argv = [
        "--checkpoint", str(golden), "--shards", str(tmp_path / "w" / "data"), "--out",
        str(tmp_path / "small"), "--device", "cpu"
    ]
    assert small_draft.main([*argv, "--layers", "0,2", "--batch-tokens", "256"]) == 0
    draft = [
        "--speculate", "draft-model", "--draft", str(tmp_path / "small"), "--tree", "4,2,1", "--no-compile",
        "--json", "--compare"
    ]
    capsys.readouterr()
    assert generate.main(
        ["--checkpoint", str(golden), "--prompt", "abc", "--max-new-tokens", "12", "--dtype", "fp32", *draft]
    ) == 0
    assert json.loads(capsys.readouterr().out)["equal"]
    assert small_draft.main([*argv, "--layers", "0,99"]) == 1 and "has layers 0 to" in capsys.readouterr().err
    assert small_draft.main([*argv, "--layers", "0"]) == 1 and "exists" in capsys.readouterr().err


def test_products_are_timed(golden, results, capsys):
    assert products.main(
        [
            "--checkpoint", str(golden), "--rows", "1", "3", "--repeat", "1", "--threads", "1", "--device",
            "cpu"
        ]
    ) == 0
    found = json.loads((results / "products.json").read_text())["milliseconds"]
    assert {"PyTorch whole", "ours whole", "ours int8"} <= set(found) and all(
        ms > 0 for row in found.values() for ms in row
    )
