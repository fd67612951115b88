"""P-EAGLE, DFlash and DSpark: their formulas on published tensors, their layouts, their trees, their text."""
import copy

import pytest
import torch
from helpers.blocks import LABELS, Reference, published, sharpened
from helpers.decoding import drafts, watched
from helpers.heads import write_head
from helpers.states import paths

from checkpoint.convert import convert
from checkpoint.folder import read_config
from checkpoint.loading import load_head
from common.errors import InputError
from drafters.block import BlockDrafter, PEagle
from engine.engine import Engine
from kernels.choose import choose_backend
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


@pytest.mark.kernels
@pytest.mark.parametrize("label", ("jetspec", "dspark"))
def test_windows_of_a_head(golden, models, tmp_path, label):
    """One that the text never fills changes nothing in a causal head; all layers have it unless the config
    names them. Drafts are the same on the kernels.
    """
    target, drafted = copy.deepcopy(models[0]), {}
    tensors, config = published(label, target)
    for window in (None, 300, 7):
        write_head(tmp_path / f"{window} in", sharpened(tensors), config | {"sliding_window": window})
        out = convert(tmp_path / f"{window} in", tmp_path / f"{window}", golden, quiet=True, dtype="fp32")
        assert read_config(out).get("windows") == (window and [window] * 2)
        drafter = drafter_of(load_head(out, target), TreeShape(8, 2, 3))
        drafted[window] = same_on_kernels(target, drafter)
    assert (drafted[None] == drafted[300]) == (label == "jetspec")
    assert drafted[7] != drafted[300]


@pytest.mark.kernels
@pytest.mark.parametrize("reach", (0, 12))
def test_p_eagle_on_the_kernels(golden, models, tmp_path, reach):
    """With all of the text, and with the last tokens of it."""
    *_, head = converted("p-eagle", golden, models[0], tmp_path, sharp=True)
    same_on_kernels(copy.deepcopy(models[0]), PEagle(head, TreeShape(8, 2, 3), reach=reach))


def same_on_kernels(target, drafter: BlockDrafter) -> list:
    """Return the trees of a text, after comparing those of PyTorch with those of our kernels."""
    found = []
    for backend in ("torch", "cpu"):
        model, own = copy.deepcopy((target, drafter))
        own.head.use_target(model)
        if backend == "cpu":
            assert choose_backend("cpu").prepare(model, own.head)
        engine = Engine(model, own, max_seq_len=200, chunks=(8,), compile=False)
        found.append([draft[:3] for draft in drafts(engine, PROMPT, Sampling(30))])
    assert found[0] == found[1] and len(found[0]) > 5
    return found[0]


@pytest.mark.parametrize("label,changes,words", (
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": []}}, "target_layer_ids"),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 7]}}, "last layer"),
    ("dflash", {"num_target_layers": 9}, "num_target_layers is 9, the target has 8"),
    ("dflash-windows", {"is_causal": False}, "must be causal"),
    ("dflash-windows", {"sliding_window_non_causal": True}, "must be causal"),
    ("dspark", {"markov_head_type": "rnn"}, "'rnn' is not supported"),
    ("p-eagle", {"ptd_token_id": None}, "mask_id"),
))
def test_what_cannot_be_run_is_refused(golden, models, tmp_path, label, changes, words):
    tensors, config = published(label, models[0])
    write_head(tmp_path / "published", tensors, config | changes)
    with pytest.raises(InputError, match=words) as refused:
        convert(tmp_path / "published", tmp_path / "out", golden, quiet=True)
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()
