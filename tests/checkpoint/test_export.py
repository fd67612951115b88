"""Heads go out to a layout and come back with nothing lost; what cannot go out is refused."""
import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from helpers import edit
from helpers.blocks import LABELS, published
from helpers.drafters import guessing_heads
from helpers.heads import write_head

from checkpoint.convert import convert
from checkpoint.export import main
from checkpoint.folder import read_config
from checkpoint.heads import export
from checkpoint.loading import load_head
from common.errors import InputError
from networks.head import Head

LAYOUTS = ("sglang", "speculators")
THERE_AND_BACK = [
    *((label, layout) for label in ("eagle3", *LABELS) for layout in LAYOUTS),
    *((label, "sglang") for label in ("eagle", "medusa", "hydra", "hydra++")),
]


def head_of(label: str, golden: Path, models, folder: Path, draft: int | None = None) -> Head:
    """A head whose weights bfloat16 holds; a block head as it was published and converted, in FOLDER/ours."""
    target, head = models
    if label in LABELS:
        write_head(folder / "published", *published(label, target, draft=draft))
        ours = convert(folder / "published", folder / "ours", golden, quiet=True, dtype="fp32")
        head = load_head(ours, target)
    elif label not in ("eagle", "eagle3"):
        ids = torch.arange(20, 220)
        head = guessing_heads(target, label.rstrip("+"), ids, 3, 2, label.endswith("++"), seed=0)
    return head.twin(target, torch.bfloat16).twin(target, torch.float32)


@pytest.mark.parametrize("label, layout", THERE_AND_BACK)
def test_what_is_exported_comes_back(golden, models, models1, tmp_path, label, layout):
    """Bit for bit. The layout of the speculators library has draft vocabularies."""
    draft = 90 if (label, layout) == ("p-eagle", "speculators") else None
    head = head_of(label, golden, models1 if label == "eagle" else models, tmp_path, draft)
    export(head, tmp_path / "out", layout, read_config(golden))
    folder = convert(tmp_path / "out", tmp_path / "again", golden, quiet=True, dtype="fp32")
    back = load_head(folder, models[0])
    if label in LABELS:
        assert read_config(folder)["kind"] == read_config(tmp_path / "ours")["kind"]
    assert back.args == head.args
    torch.testing.assert_close(back.own_state(), head.own_state(), rtol=0, atol=0)


CHANGES = (  # of an EAGLE-3 head; files say the ids of inputs or of outputs, and most do not say which
    *({"aux_layers": layers} for layers in ((3, 5, 7), (1, 2, 4), (2, 4, 8), (3, 5, 8))),
    {"windows": (9,), "activation": "gelu_tanh"}, {"norm_before_residual": True}, {"recycle_normed": True},
    {"feature_norm": "each"}, {"feature_norm": "all"},
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_settings_of_a_head_come_back(golden, models, tmp_path, layout, changes):
    """Or have no place in the layout, which is said."""
    head = copy.copy(models[1])
    head.args = dataclasses.replace(head.args, **changes)
    if layout == "sglang" and not changes.keys() & {"aux_layers", "windows"}:
        with pytest.raises(InputError, match="no place in"):
            export(own_norms(head), tmp_path / "out", layout)
        return
    export(own_norms(head), tmp_path / "out", layout, read_config(golden))
    back = load_head(convert(tmp_path / "out", tmp_path / "back", golden, quiet=True), models[0])
    assert {name: getattr(back.args, name) for name in changes} == changes
    for one, other in zip(back.fc_norms, head.fc_norms, strict=True):
        assert torch.equal(one.weight, other.weight.bfloat16().float())


def own_norms(head: Head) -> Head:
    """Give a copy of a head random norms before fc, as its arguments say."""
    norms = type(head)(head.args).fc_norms
    for norm in norms:
        nn.init.normal_(norm.weight)
    head._modules = head._modules | {"fc_norms": norms}  # not the original's
    return head


def test_the_command(golden, tmp_path):
    command = ["--head", str(golden / "eagle3"), "--checkpoint", str(golden), "--out", str(tmp_path / "out")]
    assert main(command) == 0 and (tmp_path / "out" / "model.safetensors").is_file()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["eagle_config"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # SGLang counts outputs of layers
    assert main([*command, "--force", "--layout", "speculators"]) == 0


def test_deepspecs_eagle3_heads_read_a_normed_last_layer(golden, models, tmp_path):
    """So they are refused; heads that we write say the same ids under the usual key, too."""
    export(models[1], tmp_path / "out", "sglang", read_config(golden))
    edit(tmp_path / "out", "eagle_config", target_layer_ids=[1, 3, 7])
    with pytest.raises(InputError, match=r"target_layer_ids \[1, 3, 7\]: .* is normed where"):
        convert(tmp_path / "out", tmp_path / "back", golden, quiet=True)
    edit(tmp_path / "out", target_layer_ids=[1, 3, 6])
    back = convert(tmp_path / "out", tmp_path / "back", golden, quiet=True)
    assert read_config(back)["aux_layers"] == [2, 4, 7]
