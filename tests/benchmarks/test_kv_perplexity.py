"""What caches cost in quality, on the tiny target."""
import json

import kv_perplexity


def test_fp8_is_measured_on_pytorch(golden, tmp_path, results):
    """Two lines: the model's own caches, and those in fp8, which differ a little."""
    text = tmp_path / "text"
    text.write_text("The tide comes in and the tide goes out. " * 8)
    options = ["--checkpoint", str(golden), "--text", str(text), "--threads", "1"]
    assert kv_perplexity.main([*options, "--kv", "fp8", "--window", "128", "--windows", "2"]) == 0
    usual, fp8 = json.loads((results / "kv_perplexity.json").read_text())["rows"]
    assert (usual["isa"], usual["kv"], usual["same"]) == ("PyTorch", "auto", 1.0) and abs(usual["kl"]) < 1e-6
    assert fp8["kv"] == "fp8" and 1e-6 < fp8["kl"] < 1 and 0.5 < fp8["same"] <= 1
