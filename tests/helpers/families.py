"""Tiny random models of every family, saved by transformers, and heads for them."""
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.convert import convert
from helpers import edit

DATA = json.loads(Path(__file__).with_suffix(".json").read_text())


def like(table: dict[str, dict], changes: dict) -> dict:
    """Return the changes, merged into the changes of the table's entry that they inherit from ("like")."""
    changes = dict(changes)
    return like(table, table[changes.pop("like")]) | changes if "like" in changes else changes


# name: (transformers' class, config fields that differ from SIZES)
GROUPS = "bases", "variants", "targets", "hybrids"
_CHANGES = {name: changes for group in GROUPS for name, (_, changes) in DATA[group].items()}
BASES, VARIANTS, TARGETS, HYBRIDS = (
    {name: (kind, like(_CHANGES, changes)) for name, (kind, changes) in DATA[group].items()}
    for group in GROUPS)
TARGETS = VARIANTS | TARGETS  # HYBRIDS have Gated DeltaNet
SIZES, EARS = DATA["sizes"], DATA["ears"]
EYES = {kind: like(DATA["eyes"], config) for kind, config in DATA["eyes"].items()}  # vision configs, by class
WIDE = DATA["wide"]  # sizes that are multiples of 32, for quantization groups
V, H, LAYERS = (SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers"))
WINDOW = 24  # sliding window


def to_mxfp4(folder: Path, reference) -> None:
    """Replace the experts of a gpt-oss file, and of the model, by random ones in MXFP4."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    file = folder / "model.safetensors"
    state = load_file(file)
    for name in [name for name in state if name.endswith("_proj") and "experts" in name]:
        count, inputs, outputs = state.pop(name).shape
        blocks = torch.randint(256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(122, 126, blocks.shape[:3], dtype=torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        weight = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
        reference.get_parameter(name).data = weight
    save_file(state, file)
    edit(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def as_thinker(folder: Path) -> None:
    """Wrap a Qwen3-Omni thinker into the complete model's layout."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    state = {f"thinker.{name}": tensor for name, tensor in load_file(file).items()}
    save_file(state | {"talker.model.norm.weight": torch.ones(2)}, file)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": config}))


GLM_MTP = {"fc": "eh_proj.weight", "pre_fc_norm_embedding": "enorm.weight",
           "pre_fc_norm_hidden": "hnorm.weight", "norm": "shared_head.norm.weight"}


def add_mtp_layer(file: Path, prefix: str) -> None:
    """Add a random MTP layer whose attention and MLP have the shapes of a hybrid's fourth layer."""
    g, state, source = torch.Generator().manual_seed(1), load_file(file), f"{prefix}layers.3."
    layer = {f"mtp.layers.0.{n.removeprefix(source)}": t + 0.05 * torch.randn(t.shape, generator=g)
             for n, t in state.items() if n.startswith(source)}
    width = len(layer["mtp.layers.0.input_layernorm.weight"])
    norms = dict.fromkeys(("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), (width,))
    layer |= {f"mtp.{n}.weight": 0.2 * torch.randn(shape, generator=g)
              for n, shape in ({"fc": (width, 2 * width)} | norms).items()}
    save_file(state | layer, file, metadata={"format": "pt"})


def make_target(folder: Path, name: str, mtp: bool = False, **other):
    """Write a tiny model of this family as published; return the transformers model.

    mtp: with an MTP layer. other: fields of its config.
    """
    transformers = pytest.importorskip("transformers")
    group = HYBRIDS if name in HYBRIDS else TARGETS
    kind, changes = group[name]
    sizes = {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, **changes, **other}
    if kind in EYES:
        sizes = {"text_config": sizes, "vision_config": EYES[kind], "tie_word_embeddings": False}
    if kind == "Qwen3_5MoeText":  # whose config has none
        del sizes["intermediate_size"]
    if "Omni" in kind:
        sizes["audio_config"] = EARS
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(sorted(group).index(name))
    make = getattr(transformers, f"{kind}ForConditionalGeneration") if kind in EYES else (
        transformers.AutoModelForCausalLM.from_config)
    reference = make(config).float().eval()
    with torch.no_grad():
        for n, p in reference.state_dict().items():  # norms and biases too: ones and zeros would hide a swap
            one = n.endswith("layer_scalar") or (n.endswith("norm.weight") and "Gemma" not in kind)
            if group is HYBRIDS:  # states decay slowly, so that a wrong state changes the output
                one = {"norm.weight": 1, "A_log": -3}.get(n.partition("linear_attn.")[2], 0)
            p.normal_(int(one), 0.2)
    reference.save_pretrained(folder)
    if "Omni" in kind:
        as_thinker(folder)
    if "GLM-4.7" in name:  # published with an MTP layer after its layers, and copies of two matrices
        add_mtp_layer(file := folder / "model.safetensors", "model.")
        state, mtp = load_file(file), f"model.layers.{reference.config.num_hidden_layers}."
        for theirs, ours in GLM_MTP.items():
            state[mtp + ours] = state.pop(f"mtp.{theirs}.weight")
        state = {n.replace("mtp.layers.0.", mtp): t for n, t in state.items()}
        state |= {f"{mtp}embed_tokens.weight": state["model.embed_tokens.weight"].clone(),
                  f"{mtp}shared_head.head.weight": state["lm_head.weight"].clone()}
        save_file(state, file)
    if "MXFP4" in name:
        to_mxfp4(folder, reference)
    if mtp:
        add_mtp_layer(folder / "model.safetensors", "model." + "language_model." * (kind in EYES))
    return reference


def converted(folder: Path, name: str, dtype: str = "keep", **other) -> tuple[torch.nn.Module, Path]:
    """Return (the transformers model, the converted folder) of a named model; see `make_target`."""
    reference = make_target(folder / "in", name, **other)
    return reference, convert(folder / "in", folder / "out", dtype=dtype, quiet=True)


def top_tokens(reference, prompt: list[int], output: list[int]) -> list[int]:
    """Return the argmax of a transformers model after the prompt and after each token of `output[:-1]`.

    It equals `output` if and only if the model generates `output` greedily.
    """
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + output[:-1]])).logits
    return logits[0, len(prompt) - 1 :].argmax(-1).tolist()
