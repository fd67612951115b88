"""Heads go out to a layout and come back with nothing lost; what cannot go out is refused."""
import dataclasses
import json

import pytest
import torch
import torch.nn as nn
from helpers.families import make_target
from helpers.models import model_of

from checkpoint.convert import convert
from checkpoint.export import export, main
from checkpoint.load import load_head, read_config
from common.errors import InputError
from head import Head
from networks.weights import own_state, twin

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "truncate": False}
CHANGES = (  # of an EAGLE-3 head; files say the ids of inputs or of outputs, and most do not say which
    *({"aux_layers": layers} for layers in ((3, 5, 7), (1, 2, 4), (2, 4, 8), (3, 5, 8))),
    {"windows": (9,), "activation": "gelu_tanh", "rope_scaling": YARN}, {"norm_before_residual": True},
    {"recycle_normed": True}, {"feature_norm": "each"}, {"feature_norm": "all"}, {"draft_window": 77},
)
THERE_AND_BACK = [
    ("eagle3", "sglang", {}), ("eagle3", "speculators", {}), ("eagle", "sglang", {}),
    *(("eagle3", layout, changes) for changes in CHANGES for layout in ("sglang", "speculators")),
]


def head_of(head: Head, target, changes: dict) -> Head:
    """A head whose weights bfloat16 holds, with changes of its shape."""
    if changes:
        state, head = own_state(head), model_of("eagle3", **dataclasses.asdict(head.args) | changes)
        new = {name for name, tensor in head.named_parameters() if name not in state}
        for name in new:
            nn.init.normal_(head.get_parameter(name))
        head.load_state_dict(state, strict=not new)
        head.use_target(target)
    return twin(twin(head, target, torch.bfloat16), target, torch.float32)


@pytest.mark.parametrize("kind, layout, changes", THERE_AND_BACK, ids=str)
def test_what_is_exported_comes_back(golden, models, models1, tmp_path, kind, layout, changes):
    """Bit for bit, or it has no place in the layout."""
    target, head = models1 if kind == "eagle" else models
    head = head_of(head, target, changes)
    if layout == "sglang" and any("norm" in name for name in changes):
        with pytest.raises(InputError, match="no place in"):
            export(head, kind, tmp_path / "out", layout, {})
        return
    export(head, kind, tmp_path / "out", layout, read_config(golden))
    folder = convert(tmp_path / "out", tmp_path / "again", golden, quiet=True, dtype="fp32")
    back = load_head(folder, target)
    assert back.args == head.args
    torch.testing.assert_close(own_state(back), own_state(head), rtol=0, atol=0)


@pytest.mark.parametrize("kind, layout", (("eagle", "speculators"), ("dspark", "speculators")))
def test_what_has_no_layout_is_refused(models, tmp_path, kind, layout):
    with pytest.raises(InputError, match=f"the {layout} layout has no place for {kind} heads"):
        export(models[1], kind, tmp_path / "out", layout, {})


@pytest.mark.parametrize("name, architecture", [
    ("Llama-3", "LlamaForCausalLM"), ("Mistral", "MistralForCausalLM"), ("Phi-3", "Phi3ForCausalLM")])
def test_speculators_configs_name_the_targets_architecture(models, tmp_path, name, architecture):
    make_target(tmp_path / "in", name)
    target = convert(tmp_path / "in", tmp_path / "target", quiet=True)
    export(models[1], "eagle3", tmp_path / "out", "speculators", read_config(target))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["architectures"] == [architecture]


def test_the_command(golden, tmp_path):
    command = ["--head", str(golden / "eagle3"), "--checkpoint", str(golden), "--out", str(tmp_path / "out")]
    assert main(command) == 0 and (tmp_path / "out" / "model.safetensors").is_file()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["eagle_config"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # SGLang counts outputs of layers
    assert main([*command, "--force", "--layout", "speculators"]) == 0
