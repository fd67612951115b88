"""The layouts of draft heads: how their files name tensors, and what only the contents of the files tell.

EAGLE-1/2 (SafeAILab), EAGLE-3 (SafeAILab, SpecForge/SGLang, speculators/vLLM, DeepSpec) and P-EAGLE are here,
DFlash and DSpark in `checkpoint.block_layouts`, Medusa and Hydra in `checkpoint.medusa_layouts`. Where
sources contradict each other the file decides. Where it cannot, the user is asked for a flag, see `Answers`.
"""
from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from checkpoint.block_layouts import MARKOV, block_kind, markov_fields, read_block_layout
from checkpoint.layout import Layout, NameTable
from checkpoint.medusa_layouts import medusa_kind, read_medusa_layout
from checkpoint.source import Entry, Source
from checkpoint.target_families import ATTENTION, DENSE, model_fields, with_prefix
from common.errors import InputError
from model import ModelArgs
from networks.read_states import eagle3_aux_layers

LAYER = ATTENTION | DENSE
EAGLE1: NameTable = {
    "embed.weight": ["embed_tokens.weight"],
    "lm_head.weight": ["lm_head.weight"],
    "fc.weight": ["fc.weight"],
    "fc.bias": ["fc.bias"],
    **with_prefix(LAYER, "layer.", "layers.0."),
}
EAGLE3: NameTable = EAGLE1 | {
    "layer.embed_norm.weight": ["layers.0.input_layernorm.weight"],
    "layer.feature_norm.weight": ["layers.0.hidden_norm.weight"],
    "norm.weight": ["norm.weight"],
}
AUX_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Answers:
    """What a user may have to say about a head whose files leave it open (flags of convert_checkpoint.py)."""

    aux_layers: tuple[int, ...] | None = None  # --aux-layers: target layers whose inputs feed the head
    norm_before_residual: bool | None = None  # --[no-]norm-before-residual
    recycle: str | None = None  # --recycle normed|raw


def kind_of(source: Source) -> str | None:
    """The kind of a head (one of `HEAD_KINDS`), None for a target. Raises InputError for unknown heads."""
    return medusa_kind(source) or block_kind(source) or _eagle_kind(source, _renamed(source))


def _eagle_kind(source: Source, tensors: dict[str, Entry]) -> str | None:
    speculator = source.config.get("speculators_model_type")
    if speculator is not None and speculator not in ("eagle3", "peagle"):
        raise InputError(
            f"{source.path}: a speculators head of type {speculator!r} is not supported (eagle3, peagle,"
            " dflash and dspark are)"
        )
    masked = any(source.config.get(key) is not None for key in ("pard_token", "ptd_token_id"))
    if speculator == "peagle" or masked or "mask_hidden" in tensors:
        return "p-eagle"
    if speculator or source.config.get("draft_vocab_size") or "layers.0.hidden_norm.weight" in tensors:
        return "eagle3"
    return "eagle" if "fc.weight" in tensors else None


def read_layout(source: Source, target: ModelArgs, answers: Answers) -> Layout:
    """Everything about a head but its embedding, lm_head and vocabulary map: those need the target's weights.

    Raises InputError if the head is a variant that we cannot run, if it was made for a target of another
    depth, or if it takes an answer that is missing.
    """
    depth = source.config.get("num_target_layers")
    if depth is not None and depth != target.num_layers:
        raise InputError(
            f"{source.path}: config: num_target_layers is {depth}; expected {target.num_layers}, as many"
            " layers as the converted target has; is the head another model's?"
        )
    if medusa_kind(source):
        return read_medusa_layout(source, target)
    if block_kind(source):
        return read_block_layout(source, target, _flat_config(source.config))
    tensors = _renamed(source)
    kind = _eagle_kind(source, tensors)
    config = _flat_config(source.config)
    query, heads = tensors.get("layers.0.self_attn.q_proj.weight"), config.get("num_attention_heads")
    if query and query.shape and heads:
        # Configs are wrong about it (5120 / 64 for some Qwen heads) or silent; the file is not.
        config["head_dim"] = query.shape[0] // heads
    fields = model_fields(source.path, config)
    fields |= {
        "kind": kind,
        "fc_bias": "fc.bias" in tensors,  # a config without `bias` means yes to one loader and no to another
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "tie_embeddings": bool(config.get("tie_word_embeddings")) and "lm_head.weight" not in tensors,
        "target_hidden_size": config.get("target_hidden_size") or target.hidden_size,
    }
    if kind == "eagle":
        layout = _eagle1(source.path, fields, tensors, target)
    else:
        layout = _eagle3(source, config, fields, tensors, target, answers)
    if not any(name.startswith("midlayer.") for name in source.tensors):
        return layout

    def as_in_file(name: str) -> str:  # so that errors name tensors as the user knows them
        return re.sub(r"^layers\.0\.", "midlayer.", name)

    names = {name: [as_in_file(s) for s in sources] for name, sources in layout.names.items()}
    return Layout(layout.config, names, {as_in_file(n): entry for n, entry in layout.tensors.items()})


def _renamed(source: Source) -> dict[str, Entry]:
    """The tensors under one set of names.

    No `model.` in front (vLLM), `layers.0.` for `midlayer.` (SafeAILab), and for the norms before fc the
    names of speculators (SGLang has others).
    """
    renamed = {
        "midlayer": "layers.0",
        "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2",
    }

    def rename(name: str) -> str:
        first, dot, rest = name.partition(".")
        return renamed.get(first, first) + dot + rest

    is_head = any(re.match(r"(model\.)?(fc\.weight|midlayer\.)", n) for n in source.tensors)
    return {rename(n.removeprefix("model.") if is_head else n): entry for n, entry in source.tensors.items()}


def _of_speculators(config: dict) -> bool:
    """Whether a head comes from the speculators library, whichever key says so."""
    by_class = any(str(name).endswith("Speculator") for name in config.get("architectures") or ())
    return by_class or "speculators_model_type" in config or "transformer_layer_config" in config


def _flat_config(config: dict) -> dict:
    """One flat config: speculators nests the layer's shape, old vLLM copies of EAGLE-1 nest everything."""
    inner = config.get("transformer_layer_config") or config.get("model") or {}
    outer = {k: v for k, v in config.items() if k not in ("transformer_layer_config", "model")}
    merged = {k: v for k, v in (inner | outer).items() if v is not None}
    if inner:  # the inner vocabulary is the target's; the outer one may be the draft's
        merged["vocab_size"] = inner.get("vocab_size", merged.get("vocab_size"))
    return merged


def _eagle1(path: Path, fields: dict, tensors: dict[str, Entry], target: ModelArgs) -> Layout:
    if fields["num_layers"] != 1:
        raise InputError(f"{path}: an EAGLE-1 head of {fields['num_layers']} layers is not supported")
    for norm in ("layers.0.input_layernorm", "embedding_layernorm", "hidden_states_layernorm"):
        name = f"{norm}.weight"
        if name in tensors:
            raise InputError(
                f"{path}: tensor {name}: EAGLE-1 has no such norm; this variant is not supported"
            )
    config = fields | {
        "draft_vocab_size": fields["vocab_size"], "aux_layers": [target.num_layers],
        "own_lm_head": "lm_head.weight" in tensors,
    }
    return Layout(config, EAGLE1, tensors)


def _eagle3(
    source: Source, head_config: dict, fields: dict, tensors: dict[str, Entry], target: ModelArgs,
    answers: Answers,
) -> Layout:
    path, nested = source.path, head_config.get("eagle_config") or {}
    lm_head = tensors.get("lm_head.weight")
    draft_vocab = head_config.get("draft_vocab_size") or (
        lm_head.shape[0] if lm_head and lm_head.shape else fields["vocab_size"]
    )
    if nested.get("use_aux_hidden_state") is False:
        raise InputError(f"{path}: an EAGLE-3 head with use_aux_hidden_state false is not supported")
    flags = head_config | nested
    each, together = "fc_norm.0.weight" in tensors, "input_norm.weight" in tensors
    if each and together:
        raise InputError(f"{path}: has both fc_norm and input_norm before fc; only one can be meant")
    if each or flags.get("fc_norm"):
        feature_norm = "each"
    else:
        feature_norm = "all" if together or flags.get("norm_before_fc") else ""
    aux_layers = answers.aux_layers or _aux_layers(path, head_config, nested, tensors, fields, target)
    if fields["kind"] == "p-eagle":
        fields = fields | _p_eagle(path, head_config, tensors)
    config = fields | {
        "draft_vocab_size": draft_vocab,
        "own_lm_head": "lm_head.weight" in tensors or draft_vocab != fields["vocab_size"],
        "aux_layers": list(aux_layers),
        "feature_norm": feature_norm,
        "norm_before_residual": _norm_before_residual(source, flags, answers),
        "recycle_normed": _recycle_normed(source, flags, answers),
    }
    if feature_norm == "all":
        norms = ["input_norm.weight"]
    else:
        norms = [f"fc_norm.{j}.weight" for j in range(len(aux_layers))]
    names = EAGLE3 | MARKOV | {"mask_hidden": ["mask_hidden"]}
    names |= {f"fc_norms.{j}.weight": [norm] for j, norm in enumerate(norms)}
    tensors = dict(tensors)
    if mask := tensors.get("mask_hidden"):  # published as [1, 1, F]
        tensors["mask_hidden"] = Entry.of(
            (math.prod(mask.shape),), mask.dtype, lambda: mask.read().flatten()
        )
    for k in range(1, fields["num_layers"]):
        layer, norm = f"layers.{k}.", "input_layernorm.weight"
        if layer + "hidden_norm.weight" in tensors:
            # SGLang builds its further layers from the first one's class. It norms their input by
            # `hidden_norm`, and never uses the other norm.
            norm = "hidden_norm.weight"
            tensors.pop(layer + "input_layernorm.weight", None)
        names |= with_prefix(LAYER | {"attn_norm.weight": [norm]}, f"more_layers.{k - 1}.", layer)
    return Layout(config, names, tensors)


def _p_eagle(path: Path, config: dict, tensors: dict[str, Entry]) -> dict:
    """The fields that a P-EAGLE head has beside those of EAGLE-3. Raises InputError."""
    places = [(config.get("dflash_config") or {}).get("mask_token_id")]
    places += [config.get(key) for key in ("mask_token_id", "pard_token", "ptd_token_id")]
    mask_id = next((value for value in places if value is not None), None)
    if type(mask_id) is not int:
        raise InputError(
            f"{path}: config: a P-EAGLE head needs the id of its mask token, under mask_token_id,"
            f" ptd_token_id or pard_token; found {mask_id!r}"
        )
    if "mask_hidden" not in tensors:
        raise InputError(f"{path}: tensor mask_hidden is missing, which stands for features not known yet")
    said = (config.get(key) for key in ("num_draft_steps", "k_train"))
    drafts = next((value for value in said if value is not None), 8)
    return {"mask_id": mask_id, "drafts": drafts, **markov_fields(path, config, tensors)}


def _norm_before_residual(source: Source, flags: dict, answers: Answers) -> bool:
    """What the flag of that name says.

    speculators trains with true, its class defaults to false, and vLLM takes true for absent: an absent key
    says nothing.
    """
    if answers.norm_before_residual is not None:
        return answers.norm_before_residual
    if "norm_before_residual" in flags:
        return bool(flags["norm_before_residual"])
    if _of_speculators(source.config):
        raise InputError(
            f"{source.path}: config has no norm_before_residual and programs disagree on what that means:"
            " say --norm-before-residual or --no-norm-before-residual (try both, one drafts far better)"
        )
    return False


def _recycle_normed(source: Source, flags: dict, answers: Answers) -> bool:
    """Whether norm(h) is fed back.

    That is what `norm_output` means to speculators and SGLang. SpecForge means something else by it in
    training.
    """
    if answers.recycle is not None:
        return answers.recycle == "normed"
    if flags.get("norm_output") is None:
        return False
    if _of_speculators(source.config):
        return bool(flags["norm_output"])
    if not flags["norm_output"]:
        raise InputError(
            f"{source.path}: norm_output false: SGLang norms before the lm_head all the same, SpecForge then"
            " trains without: say --recycle raw if it is normed there; a head without that norm is not"
            " supported"
        )
    raise InputError(
        f"{source.path}: norm_output true: SGLang feeds the normed state back, SpecForge trains with the raw"
        " one: say --recycle normed or --recycle raw (try both, one drafts far better)"
    )


def _aux_layers(
    path: Path, head_config: dict, nested: dict, tensors: dict[str, Entry], fields: dict, target: ModelArgs
) -> tuple[int, ...]:
    """The target layers whose inputs feed the head.

    Files disagree on whether an id names a layer's output or its input. All of them start with the second
    layer's output, so the first id tells: 1 counts outputs (SGLang, SpecForge), 2 counts inputs (vLLM,
    speculators).
    """
    in_config = [nested.get(AUX_KEY), head_config.get(AUX_KEY)]
    if outputs := head_config.get("target_layer_ids"):  # DeepSpec's
        if max(outputs) + 1 == target.num_layers and not any(in_config):
            raise InputError(
                f"{path}: config: target_layer_ids {outputs}: the output of the target's last layer is normed"
                " where this head was trained, and not here; it is not supported"
            )
        return tuple(i + 1 for i in outputs)
    readings = {_as_inputs(path, ids, target) for ids in in_config if ids}
    if len(readings) > 1:
        options = " or ".join("--aux-layers " + ",".join(map(str, ids)) for ids in sorted(readings))
        inner, outer = in_config
        raise InputError(
            f"{path}: {AUX_KEY} is given twice and differently, {inner} and {outer}: say {options}"
        )
    if readings:
        return readings.pop()
    fc = tensors.get("fc.weight")
    states, rest = divmod(fc.shape[-1] if fc and fc.shape else 0, fields["target_hidden_size"])
    if states != 3 and not rest:  # a width that is no multiple is reported when the shapes are compared
        raise InputError(
            f"{path}: fc.weight takes {states} states of the target and the config does not say of which"
            " layers: say --aux-layers"
        )
    return eagle3_aux_layers(target.num_layers)


def _as_inputs(path: Path, ids: list[int], target: ModelArgs) -> tuple[int, ...]:
    """Layer ids of a config as the layers whose inputs are meant."""
    if ids[0] in (1, 2):
        return tuple(i + 2 - ids[0] for i in ids)
    if max(ids) == target.num_layers:  # no layer has that number, so nothing but its input can be meant
        return tuple(ids)
    inputs, outputs = (",".join(str(i + n) for i in ids) for n in (0, 1))
    raise InputError(
        f"{path}: does {AUX_KEY} {ids} count inputs or outputs of layers?"
        f" say --aux-layers {inputs} if inputs, {outputs} if outputs"
    )
