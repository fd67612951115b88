"""P-EAGLE, DFlash and DSpark: their formulas on published tensors, their layouts, their trees, their text."""
import copy
import dataclasses

import pytest
import torch
from helpers.blocks import LABELS, Reference, published
from helpers.decoding import drafts, watched
from helpers.heads import write_head
from helpers.states import paths

from checkpoint.convert import convert
from checkpoint.load import load_head
from common.errors import InputError
from drafters.block import block_drafter
from engine.engine import Engine
from engine.sampling import Sampling, gumbel, seed_keys
from kernels.choose import choose_backend
from tree import TreeShape

PROMPT = [256, *range(97, 120)]
WINDOW = {"sliding_window": 7}


def converted(label: str, golden, target, folder, changes: dict, draft: int | None = None):
    """(Published tensors, config, the head after conversion)."""
    tensors, config = published(label, target, draft=draft)
    config |= changes
    write_head(folder / "published", tensors, config)
    out = convert(folder / "published", folder / "ours", golden, quiet=True, dtype="fp32")
    return tensors, config, load_head(out, target)


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("label,changes,draft", (
    *((label, {}, None) for label in LABELS), ("p-eagle", {}, 90), ("jetspec", WINDOW, None),
    ("dspark", WINDOW, None),
))
def test_trees_are_those_of_the_papers(golden, models, tmp_path, label, changes, draft, temperature):
    """Node for node, at every step, so that what is kept of earlier steps counts too. At temperature 1 with
    the target's noise at the place of each level. All layers have a window unless the config names them.
    """
    target, _ = models
    tensors, config, head = converted(label, golden, target, tmp_path, changes, draft)
    reference, nodes, levels = Reference(tensors, config, target), 12, head.args.drafts
    drafter = block_drafter(head)(head, TreeShape(nodes, levels - 1, nodes - 1))
    engine = Engine(target, drafter, max_seq_len=200, chunks=(8,), compile=False)
    steps, noise, deep = watched(engine, PROMPT, Sampling(16, temperature, seed=7)), None, 0
    for text, drawn in steps:
        if temperature:
            places = torch.arange(len(text), len(text) + levels)[None]
            noise = temperature * gumbel(seed_keys([7]), places, target.args.vocab_size)[0]
        _, *found = paths(drawn.tokens, drawn.parent)
        assert set(found) == reference.tree(text, nodes, noise)
        deep += max(map(len, found)) > 1
    assert len(steps) > 5 and deep > 1


def test_the_layout_of_speculators(golden, models, tmp_path):
    """Its config nests the shape of the layers, counts inputs of layers, and has a draft vocabulary."""
    tensors, config, head = converted("dflash", golden, models[0], tmp_path, {})
    reads = config.pop("dflash_config")
    theirs = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "draft_vocab_size": 90,
        "aux_hidden_state_layer_ids": [i + 1 for i in reads["target_layer_ids"]],
        "block_size": config.pop("block_size"), "mask_token_id": reads["mask_token_id"],
        "sample_from_anchor": False, "transformer_layer_config": config,
    }
    ids = torch.arange(0, 270, 3)
    tensors |= {"lm_head.weight": models[0].lm_head_weight[ids].clone(), "d2t": ids - torch.arange(90)}
    write_head(tmp_path / "theirs", tensors, theirs)
    folder = convert(tmp_path / "theirs", tmp_path / "again", golden, quiet=True, dtype="fp32")
    again = load_head(folder, models[0])
    assert again.args == dataclasses.replace(head.args, draft_vocab_size=90, own_lm_head=True)
    assert torch.equal(again.draft_ids, ids) and torch.equal(again.fc.weight, head.fc.weight)


@pytest.mark.kernels
@pytest.mark.parametrize("label,changes,window", (
    ("p-eagle", {}, 0), ("p-eagle", {}, 12), ("jetspec", WINDOW, 0), ("dspark", WINDOW, 0),
))
def test_drafts_are_the_same_on_the_kernels(golden, models, tmp_path, label, changes, window):
    *_, head = converted(label, golden, models[0], tmp_path, changes)
    if window:
        head.set_sliding_window(window)
    drafter, found = block_drafter(head)(head, TreeShape(8, 2, 3)), []
    for prepare in (lambda *_: True, choose_backend("cpu").prepare):
        target, own = copy.deepcopy((models[0], drafter))
        own.head.use_target(target)
        assert prepare(target, own.head)
        engine = Engine(target, own, max_seq_len=200, chunks=(8,), compile=False)
        found.append([draft[:3] for draft in drafts(engine, PROMPT, Sampling(30))])
    assert found[0] == found[1] and len(found[0]) > 5


@pytest.mark.parametrize("label,changes,words", (
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 7]}}, "last layer"),
    ("dflash", {"num_target_layers": 9}, "num_target_layers is 9, the target has 8"),
    ("dspark", {"markov_head_type": "rnn"}, "'rnn' is not supported"),
    ("p-eagle", {"ptd_token_id": None}, "mask_id"),
))
def test_what_cannot_be_run_is_refused(golden, models, tmp_path, label, changes, words):
    with pytest.raises(InputError, match=words) as refused:
        converted(label, golden, models[0], tmp_path, changes)
    assert "\n" not in str(refused.value) and not (tmp_path / "ours").exists()
