"""Our weights in a GGUF file are our weights."""
import pytest
import torch
from gguf_copy import write_gguf
from helpers.sources import CONFIG, target_state
from helpers.sources import write_gguf as write_original

from checkpoint.convert import convert
from checkpoint.loading import load_model
from common.errors import InputError


@pytest.mark.slow
def test_our_weights_in_a_gguf_are_our_weights(tmp_path):
    """Ours -> GGUF -> ours; the other file lends its metadata only."""
    original = write_original(tmp_path / "a.gguf", target_state(), kind="F32")
    target, config = load_model(convert(original, tmp_path / "ours", dtype="bf16", quiet=True))
    lender = write_original(tmp_path / "b.gguf", {n: t * 0 for n, t in target_state().items()}, kind="Q8_0")
    copy = write_gguf(lender, target, tmp_path / "c.gguf", "BF16")
    back, back_config = load_model(convert(copy, tmp_path / "back", quiet=True))
    assert back_config["stop_ids"] == config["stop_ids"] and back.args == target.args
    for name, tensor in target.state_dict().items():
        assert torch.equal(back.state_dict()[name].bfloat16(), tensor), name
    copy = write_gguf(lender, target, tmp_path / "d.gguf", "Q8_0")
    rounded, _ = load_model(convert(copy, tmp_path / "q8", quiet=True))
    assert (rounded.embed.weight - target.embed.weight).abs().max() < target.embed.weight.abs().max() / 100
    other = write_original(tmp_path / "e.gguf", target_state(), {**CONFIG, "num_hidden_layers": 7})
    (tmp_path / "f.gguf").write_text("no GGUF")
    for bad, words in ((other, "is no GGUF of this LLaMA"), (tmp_path / "f.gguf", "cannot be read as GGUF")):
        with pytest.raises(InputError, match=words):
            write_gguf(bad, target, tmp_path / "g.gguf", "BF16")
