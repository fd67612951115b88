"""The demo model with its trained head.

Skipped until `make fetch` (or `make demo`) has downloaded it into checkpoints/; CI does that first.
"""
import json

import pytest
from helpers import ROOT
from helpers.decoding import load

from tree import TreeShape

FOLDER = ROOT / "checkpoints" / "smollm2-135m"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="the demo checkpoint is not there: run `make fetch`"),
]


def test_demo_model_and_head():
    """Stop ids, chat template and context length; speculative output equals plain output, with τ > 1.3."""
    config = json.loads((FOLDER / "config.json").read_text())
    assert set(config["stop_ids"]) == {0, 2} and config["max_seq_len"] == 8192
    plain = load(FOLDER, dtype="fp32", compile=False)
    assert plain.tokenizer.decode(plain.encode("Hi")).startswith("system\nYou are a helpful AI assistant")
    assert plain.generate("What is the capital of France?", max_new_tokens=30).finish == "stop"
    fast = load(FOLDER, "eagle3", tree=TreeShape(16, 3, 4), dtype="fp32", compile=False)
    taus = []
    for seed, prompt in enumerate(("Write a short poem about the sea.", "def fibonacci(n):")):
        settings = {"max_new_tokens": 20, "temperature": seed, "seed": seed}
        a, b = plain.generate(prompt, **settings), fast.generate(prompt, **settings)
        assert a.ids == b.ids
        taus.append(b.tau)
    assert sum(taus) / 2 > 1.3, taus
