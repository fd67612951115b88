"""Our model in a plain loop writes the text of plain decoding. It is not compiled here."""
import compiled_peer
import peers
import pytest
import torch
from shapes import random_models

from engine.decoder import Decoder
from sampling.options import Sampling


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    monkeypatch.setattr(compiled_peer, "compile_graph", lambda function, **_: function)


def test_it_writes_plain_text():
    torch.manual_seed(0)
    target, _ = random_models("tiny", torch.float32, "cpu", None)
    prompt, tokens = [5, 17, 3, 200], 12
    plain = Decoder(target, None, compile=False, max_seq_len=100).generate([prompt], Sampling(tokens))[0].ids
    loop = compiled_peer.CompiledLoop(target, [], len(prompt) + tokens)
    for _ in range(2):  # a text leaves nothing behind for the next
        found = loop.decode(prompt, tokens)
        assert found.ids == plain and found.tokens_per_second > 0
    stop = plain[4]
    found = compiled_peer.CompiledLoop(target, [stop], len(prompt) + tokens).decode(prompt, tokens)
    assert found.ids == plain[: plain.index(stop) + 1]


def test_the_warm_up_fits_in_its_cache(results):
    """Texts of fewer tokens than the warm-up decodes."""
    options = ["--shape", "tiny", "--no-ours", "--torch-compile", "--limit", "1", "--max-new-tokens", "4"]
    assert peers.main([*options, "--threads", "1"]) == 0
    assert "torch.compile" in (results / "peers.md").read_text()
