"""The real demo model against transformers, and lossless with its real head. Skipped until `make fetch` (or
`make demo`) has put it into checkpoints/; CI does that first.
"""

import pytest
import torch
from helpers import ROOT
from helpers.decoding import load

from checkpoint.loading import load_model
from tree import TreeShape

FOLDER = ROOT / "checkpoints" / "smollm2-135m"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="the demo checkpoint is not there: run `make fetch`"),
]


def test_logits_agree_with_transformers_on_512_tokens():
    pytest.importorskip("transformers")
    from hugging_face import as_llama

    target, _ = load_model(FOLDER, dtype=torch.float32)
    peer = as_llama(target)
    tokens = torch.randint(0, 49152, (1, 512), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = target.logits(target.causal(tokens)[0]), peer(tokens).logits
    assert (ours - theirs).norm() / theirs.norm() < 1e-4
    assert (ours - theirs).abs().max() / theirs.abs().max() < 1e-4


def test_eagle3_text_is_plain_text():
    plain = load(FOLDER, dtype="fp32", compile=False)
    fast = load(FOLDER, "eagle3", tree=TreeShape(16, 3, 4), dtype="fp32", compile=False)
    taus = []
    for seed, prompt in enumerate(
        ("Write a short poem about the sea.", "What is 17 times 3?", "def fibonacci(n):")
    ):
        settings = {"max_new_tokens": 24, "temperature": seed / 2, "seed": seed}
        a, b = plain.generate(prompt, **settings), fast.generate(prompt, **settings)
        assert a.ids == b.ids
        taus.append(b.tau)
    assert sum(taus) / 3 > 1.3, "the head drafts next to nothing"
