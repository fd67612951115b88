"""Heads in the layouts of others come back as they were: ours -> Hugging Face -> ours."""
import dataclasses

import pytest
import torch

from checkpoint.convert import convert
from checkpoint.heads import export
from checkpoint.loading import load_head
from common.errors import InputError
from drafters.eagle import Eagle
from engine.decoder import Decoder
from sampling.options import Sampling
from tree import TreeShape

PROMPT = list(b"u:question 3\na:")


def trees(target, head) -> list:
    """The trees that a head drafts."""
    decoder = Decoder(target, Eagle(head, TreeShape(24, 4, 5)), compile=False, max_seq_len=200)
    drafted = []
    with decoder.observe(lambda tree, path: drafted.append((tree.tokens.tolist(), tree.parent.tolist()))):
        decoder.generate([PROMPT], Sampling(40))
    return drafted


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_written_heads_come_back(models, golden, tmp_path, layout):
    """Writing rounds to bfloat16 and changes nothing else; the trees are the same."""
    target, head = models
    export(head, tmp_path / "hf", layout, {"name": "golden"})
    (tmp_path / "file").touch()
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mode == (tmp_path / "file").stat().st_mode
    again = load_head(convert(tmp_path / "hf", tmp_path / "back", target=golden, quiet=True), target)
    assert again.args == head.args
    before, after = head.own_state(), again.own_state()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        expected = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(expected, after[name]), name
    rounded = head.twin(target, torch.bfloat16).twin(target, torch.float32)
    assert trees(target, rounded) == trees(target, again)


def test_a_written_eagle1_head_comes_back(models1, golden, tmp_path):
    target, head = models1
    export(head, tmp_path / "hf")
    again = load_head(convert(tmp_path / "hf", tmp_path / "back", target=golden, quiet=True), target)
    rounded = head.twin(target, torch.bfloat16).twin(target, torch.float32)
    assert again.args.own_embedding is False and trees(target, rounded) == trees(target, again)
    with pytest.raises(InputError, match="no place for EAGLE-1"):
        export(head, tmp_path / "no", "speculators")


def test_weights_without_a_place_are_refused(models, tmp_path):
    _, head = models
    other = type(head)(dataclasses.replace(head.args, feature_norm="each"))
    with pytest.raises(InputError, match="no layout"):
        export(other, tmp_path / "x")
    assert not (tmp_path / "x").exists()
