"""P-EAGLE, DFlash and DSpark: their formulas on published tensors, their layouts, their trees, their text."""
import pytest
import torch
from helpers.blocks import LABELS, Reference, published, sharpened
from helpers.decoding import watched
from helpers.heads import write_head
from helpers.states import paths

from checkpoint.convert import convert
from checkpoint.loading import load_head
from common.errors import InputError
from drafters.block import BlockDrafter, PEagle
from engine.engine import Engine
from networks.eagle import PEagleHead
from sampling.noise import gumbel, seed_keys
from sampling.options import Sampling
from tree import TreeShape

PROMPT = [256, *range(97, 120)]


def converted(label: str, golden, target, folder, sharp: bool = False, **more):
    """(Published tensors, config, the head after conversion)."""
    tensors, config = published(label, target, **more)
    tensors = sharpened(tensors) if sharp else tensors
    write_head(folder / "published", tensors, config)
    out = convert(folder / "published", folder / "ours", golden, quiet=True, dtype="fp32")
    return tensors, config, load_head(out, target)


def drafter_of(head, shape: TreeShape) -> BlockDrafter:
    return (PEagle if isinstance(head, PEagleHead) else BlockDrafter)(head, shape)


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("label,draft", (*((label, None) for label in LABELS), ("p-eagle", 90)))
def test_trees_are_those_of_the_papers(golden, models, tmp_path, label, draft, temperature):
    """Node for node, at every step, so that what is kept of earlier steps counts too. At temperature 1 with
    the target's noise at the place of each level.
    """
    target, _ = models
    tensors, config, head = converted(label, golden, target, tmp_path, sharp=True, draft=draft)
    reference, nodes, levels = Reference(tensors, config, target), 12, head.args.drafts
    drafter = drafter_of(head, TreeShape(nodes, levels - 1, nodes - 1))
    engine = Engine(target, drafter, max_seq_len=200, chunks=(8,), compile=False)
    steps, noise, deep = watched(engine, PROMPT, Sampling(16, temperature, seed=7)), None, 0
    for text, drawn in steps:
        if temperature:
            places = torch.arange(len(text), len(text) + levels)[None]
            noise = temperature * gumbel(seed_keys([7]), places, target.args.vocab_size)[0]
        _, *found = paths(drawn.tokens, drawn.parent)
        assert set(found) == reference.tree(text, nodes, levels, noise)
        deep += max(map(len, found)) > 1
    assert len(steps) > 5 and deep > 1


@pytest.mark.parametrize("label,changes,words", (
    ("dflash", {"architectures": ["DFlash2DraftModel"]}, "path selector"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": []}}, "target_layer_ids"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 7]}}, "last layer"),
    ("dflash", {"num_target_layers": 9}, "num_target_layers is 9; expected 8"),
    ("dflash", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}, "sliding win"),
    ("dspark", {"markov_head_type": "rnn"}, "'rnn' is not supported"),
    ("p-eagle", {"ptd_token_id": None}, "mask token"),
))
def test_what_cannot_be_run_is_refused(golden, models, tmp_path, label, changes, words):
    tensors, config = published(label, models[0])
    write_head(tmp_path / "published", tensors, config | changes)
    with pytest.raises(InputError, match=words) as refused:
        convert(tmp_path / "published", tmp_path / "out", golden, quiet=True)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()
