"""The heads that training starts from."""
import dataclasses

import pytest
import torch

from checkpoint.convert import convert
from checkpoint.heads import export
from checkpoint.loading import load_head
from drafters.eagle import Eagle
from engine.decoder import Decoder
from sampling.options import Sampling
from training.new_head import head_args, new_head
from training.shapes import Shape
from tree import TreeShape

PROMPT = list(b"u:question 3\na:")


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_new_heads_start_from_the_target(models, kind):
    target, _ = models
    draft_ids = torch.arange(0, 128, 2) if kind == "eagle3" else torch.arange(target.args.vocab_size)
    head = new_head(target, kind, draft_ids, Shape(), 0)
    names = {name for name, p in head.named_parameters() if p.requires_grad}
    assert not any(name.startswith("embed") for name in names)
    assert ("lm_head.weight" in names) == (kind == "eagle3")
    if kind == "eagle3":
        assert torch.equal(head.lm_head.weight, target.lm_head.weight[0:128:2])


def test_shapes_that_cannot_be(models):
    target, _ = models
    args, shallow = target.args, dataclasses.replace(target.args, num_layers=3)
    with pytest.raises(ValueError, match="EAGLE-1"):
        new_head(target, "eagle", torch.arange(args.vocab_size), Shape(hidden_size=args.hidden_size // 2), 0)
    with pytest.raises(ValueError, match="num_kv_heads is 3; expected a divisor of num_heads, 4"):
        new_head(target, "eagle3", torch.arange(64), Shape(num_heads=4, num_kv_heads=3), 0)
    with pytest.raises(ValueError, match="which has 3 layers: use --kind eagle"):
        head_args(shallow, "eagle3", 64, Shape())
    assert head_args(shallow, "eagle", args.vocab_size, Shape()).aux_layers == (3,)


@pytest.mark.slow
def test_heads_of_other_shapes(models, golden, tmp_path):
    """Narrower and wider than the target: embedding and lm_head of its own, spanned by the target's; written
    and read back.
    """
    target, _ = models
    hidden = target.args.hidden_size
    for shape in (Shape(hidden // 2, 48, 2, 1, 8), Shape(hidden + 16, 40, 4, 4, 8)):
        head = new_head(target, "eagle3", torch.arange(64), shape, 0)
        assert head.embed is not target.embed and head.embed.weight.requires_grad
        for layout in ("sglang", "speculators"):
            out = tmp_path / f"{shape.hidden_size}-{layout}"
            export(head, out, layout)
            again = load_head(convert(out, out / "back", target=golden, quiet=True), target)
            assert again.args == head.args
            ids = []
            for drafter in (Eagle(again, TreeShape(8, 2, 4)), None):
                decoder = Decoder(target, drafter, compile=False, max_seq_len=128)
                ids.append(decoder.generate([PROMPT], Sampling(30))[0].ids)
            assert ids[0] == ids[1]
