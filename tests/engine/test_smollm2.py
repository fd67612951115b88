"""The real demo model against transformers, and lossless with its real head. Skipped until `make fetch` (or
`make demo`) has put it into checkpoints/; CI does that first.
"""
import json

import pytest
import torch
from helpers import ROOT
from helpers.decoding import load
from helpers.drafters import guessing_heads

from checkpoint.loading import load_model
from drafters.draft_model import DraftModel
from drafters.hydra import Hydra
from drafters.lookahead import Lookahead
from drafters.lookup import Lookup
from drafters.medusa import Medusa
from engine.engine import Engine
from sampling.options import Sampling
from tree import TreeShape, likely_tree

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


def test_stop_ids_template_and_context():
    config = json.loads((FOLDER / "config.json").read_text())
    assert set(config["stop_ids"]) == {0, 2} and config["max_seq_len"] == 8192
    model = load(FOLDER, compile=False)
    assert model.tokenizer.decode(model.encode("Hi")).startswith("system\nYou are a helpful AI assistant")
    assert model.generate("What is the capital of France?", max_new_tokens=60).finish == "stop"


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


def drafters(target) -> dict:
    """One of every kind that needs no training, the heads random; sizes for a CPU."""
    ids = torch.arange(4096)
    tree = likely_tree(12, 3)
    return {
        "lookup": Lookup(), "lookahead": Lookahead(target.args.vocab_size, 3, 3, 3),
        "draft-model": DraftModel(target, TreeShape(4, 2, 1)),
        "medusa": Medusa(guessing_heads(target, "medusa", ids, 3, 1, False, 0), tree),
        "hydra": Hydra(guessing_heads(target, "hydra", ids, 3, 1, True, 0), tree),
    }


@pytest.mark.dear
def test_every_drafters_text_is_plain_text():
    """At temperature 1: what is sampled alike is alike greedily."""
    target, _ = load_model(FOLDER, dtype=torch.float32)
    prompt = load(FOLDER, compile=False).encode(
        "def fibonacci(n):\n    return fibonacci(n - 1) + fibonacci(n"
    )
    sampling = Sampling(24, 1.0, seed=5)
    plain = Engine(target, max_seq_len=160, compile=False).generate([prompt], sampling)[0].ids
    for name, drafter in drafters(target).items():
        fast = Engine(target, drafter, max_seq_len=160, compile=False).generate([prompt], sampling)[0]
        assert fast.ids == plain, name
        assert name != "draft-model" or set(fast.accept_lengths[:-1]) == {4}
