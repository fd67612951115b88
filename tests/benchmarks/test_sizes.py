"""The same random weights in our format and in llama.cpp's, and what is measured with them."""
import json

import gguf
import numpy as np
import pytest
import shapes
import sizes
import torch
from gguf_copy import q6_k

from checkpoint.loading import load_model
from model import ModelArgs


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A shape that Q6_K divides, written."""
    args = ModelArgs(512, 256, 512, 6, 4, 2, 64, 1e-5, 5e5, shapes.LLAMA3, max_seq_len=4096)
    monkeypatch.setitem(shapes.SHAPES, "small", (args, 256, 512))
    assert sizes.main(["--shape", "small", "--folder", str(tmp_path), "--write"]) == 0
    return tmp_path


def test_both_files_hold_the_same_weights(small):
    target, config = load_model(small / "small-int4")
    assert config["quantization"] == {"mode": "int4", "group": 64, "lm_head": "int8"}
    theirs = {}
    for tensor in gguf.GGUFReader(small / "small.gguf").tensors:
        theirs[tensor.name] = tensor.tensor_type.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    layer = target.layers[3]
    gate, up = layer.mlp.w_gate_up.dequantize(torch.float32).chunk(2)
    value = layer.wqkv.dequantize(torch.float32)[-128:]
    for name, kind, weight in (
        ("token_embd", "Q6_K", target.embed.weight.float()),
        ("output", "Q6_K", target.lm_head.dequantize(torch.float32)), ("blk.3.attn_v", "Q4_0", value),
        ("blk.3.attn_output", "Q4_0", layer.wo.dequantize(torch.float32)), ("blk.3.ffn_gate", "Q4_0", gate),
        ("blk.3.ffn_up", "Q4_0", up), ("blk.3.ffn_down", "Q4_0", layer.mlp.w_down.dequantize(torch.float32)),
    ):
        assert theirs[f"{name}.weight"][0] == kind
        assert np.array_equal(theirs[f"{name}.weight"][1], weight.numpy()), name
    assert theirs["rope_freqs.weight"][1].max() == 8.0


def test_q6_k_rounds_to_the_nearest():
    rows = np.random.default_rng(0).standard_normal((5, 512)).astype(np.float32)
    rows[2, :256] = 0
    back = gguf.quants.dequantize(q6_k(rows), gguf.GGMLQuantizationType.Q6_K)
    step = np.abs(rows.reshape(-1, 256)).max(1, keepdims=True) / 32
    assert (np.abs(back - rows).reshape(-1, 256) <= step * 1.01).all() and (back[2, :256] == 0).all()


@pytest.mark.compile
@pytest.mark.parametrize("mode", ("int4", "w4a8"))
def test_measuring(small, results, capsys, mode):
    """llama-bench is a program that says that it is fast."""
    program = small / "llama-bench"
    program.write_text('#!/bin/sh\necho \'[{"avg_ts": 1000000.0}]\'\n')
    program.chmod(0o755)
    options = ["--shape", "small", "--folder", str(small), "--mode", mode, "--turns", "1", "--repeat", "1"]
    assert sizes.main([*options, "--llama-bench", str(program), "--peak", "--tokens", "4"]) == 0
    printed = capsys.readouterr().out
    assert f"small {mode} " in printed and "x llama.cpp's 1000000.0" in printed
    record = json.loads((results / "sizes.json").read_text())
    assert record["peak"] > record["bytes"] > (small / "small-int4/model.safetensors").stat().st_size
    assert record["of_llama"] < 1 and record["step_of_8"] > 0
    assert record["computed"]["GSM8K"] == pytest.approx(5.14e3 / record["step_of_8"])


def test_refusals(small, refused):
    folder = ["--shape", "small", "--folder", small]
    refused(sizes.main, "--shape", "huge", "--folder", small, words="--shape huge: unknown")
    refused(sizes.main, "--shape", "tiny", "--folder", small, words="tiny-int4")
    refused(sizes.main, *folder, "--turns", 0, words="must be at least 1")
