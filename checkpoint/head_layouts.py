"""The layouts of draft heads: whose they are, how they name things, and what only their contents tell.

EAGLE-1/2 (SafeAILab), EAGLE-3 (SafeAILab, SpecForge/SGLang, speculators/vLLM); Medusa and Hydra are in
`guess_layouts`. Where sources contradict each other the file decides; where it cannot, the user is asked for
a flag: see `Answers`.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from checkpoint.medusa_layouts import medusa_kind, read_medusa_layout
from checkpoint.source import Entry, Source
from checkpoint.target_families import ATTENTION, DENSE, model_fields
from common.errors import InputError
from model import ModelArgs
from networks.eagle import eagle3_aux_layers

LAYER = ATTENTION | DENSE
COMMON = {
    "embed.weight": ["embed_tokens.weight"],
    "lm_head.weight": ["lm_head.weight"],
    "fc.weight": ["fc.weight"],
    "fc.bias": ["fc.bias"],
    **{f"layer.{ours}": [f"layers.0.{x}" for x in theirs] for ours, theirs in LAYER.items()},
}
EAGLE1 = COMMON
EAGLE3 = COMMON | {
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


@dataclass(frozen=True)
class Layout:
    """A head as found: the config of ours it becomes, the name table, and its tensors under the names of that
    table.
    """

    config: dict
    names: dict[str, list[str]]
    tensors: dict[str, Entry]


def kind_of(source: Source) -> str | None:
    """The kind of a head (a key of `checkpoint.HEADS`), None for a target. Raises InputError for heads of
    another kind.
    """
    return medusa_kind(source) or _kind(source, _renamed(source))


def _kind(source: Source, names) -> str | None:
    config = source.config
    given = config.get("speculators_model_type")
    if given is not None and given != "eagle3":
        raise InputError(
            f"{source.path}: a speculators head of type {given!r} is not supported (only eagle3)"
        )
    if given or config.get("draft_vocab_size") or "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    return "eagle" if "fc.weight" in names else None


def read_layout(source: Source, target: ModelArgs, answers: Answers) -> Layout:
    """Everything about a head but its embedding, lm_head and vocabulary map, which need the target's weights
    to judge.
    """
    if medusa_kind(source):
        return Layout(*read_medusa_layout(source, target))
    tensors = _renamed(source)
    kind = _kind(source, tensors)
    given = _flat_config(source.config)
    query, heads = tensors.get("layers.0.self_attn.q_proj.weight"), given.get("num_attention_heads")
    if query and query.shape and isinstance(heads, int) and heads > 0:
        # Configs are wrong about it (5120 / 64 for some Qwen heads) or silent; the file is not.
        given["head_dim"] = query.shape[0] // heads
    fields = model_fields(source.path, given)
    fields |= {
        "kind": kind,
        "fc_bias": "fc.bias" in tensors,  # a config without `bias` means yes to one loader and no to another
        "qkv_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in tensors,
        "tie_embeddings": bool(given.get("tie_word_embeddings")) and "lm_head.weight" not in tensors,
        "target_hidden_size": given.get("target_hidden_size") or target.hidden_size,
    }
    layout = _eagle1(source.path, fields, tensors, target) if kind == "eagle" else _eagle3(
        source, given, fields, tensors, target, answers
    )
    if not any(name.startswith("midlayer.") for name in source.tensors):
        return layout

    def as_in_file(name: str) -> str:  # so that errors name tensors as the user knows them
        return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name

    names = {ours: [as_in_file(n) for n in theirs] for ours, theirs in layout.names.items()}
    return Layout(layout.config, names, {as_in_file(n): entry for n, entry in layout.tensors.items()})


def _renamed(source: Source) -> dict[str, Entry]:
    """The tensors under one set of names: no `model.` in front (vLLM), `layers.0.` for `midlayer.`
    (SafeAILab), and speculators' names for the norms before fc (SGLang's are others).
    """
    sglang = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}

    def rename(name: str) -> str:
        first, dot, rest = name.partition(".")
        return {"midlayer": "layers.0", **sglang}.get(first, first) + dot + rest

    is_head = any(re.match(r"(model\.)?(fc\.weight|midlayer\.)", n) for n in source.tensors)
    return {rename(n.removeprefix("model.") if is_head else n): entry for n, entry in source.tensors.items()}


def _of_speculators(config: dict) -> bool:
    """Whether a head comes from the speculators library, whichever key says so."""
    named = any(str(name).endswith("Speculator") for name in config.get("architectures") or ())
    return named or "speculators_model_type" in config or "transformer_layer_config" in config


def _flat_config(config: dict) -> dict:
    """One flat config: speculators nests the layer's shape, old vLLM copies of EAGLE-1 nest everything."""
    inner = config.get("transformer_layer_config") or config.get("model") or {}
    inner = inner if isinstance(inner, dict) else {}
    outer = {k: v for k, v in config.items() if k not in ("transformer_layer_config", "model")}
    merged = {k: v for k, v in (inner | outer).items() if v is not None}
    if inner:
        # The target's; outside it may be the draft's.
        merged["vocab_size"] = inner.get("vocab_size", merged.get("vocab_size"))
    return merged


def _eagle1(path: Path, fields: dict, tensors: dict, target: ModelArgs) -> Layout:
    if fields["num_layers"] != 1:
        raise InputError(f"{path}: an EAGLE-1 head of {fields['num_layers']} layers is not supported")
    for name in (
        "layers.0.input_layernorm.weight", "embedding_layernorm.weight", "hidden_states_layernorm.weight"
    ):
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
    source: Source, given: dict, fields: dict, tensors: dict, target: ModelArgs, answers: Answers
) -> Layout:
    path, nested = source.path, given.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise InputError(f"{path}: config: eagle_config is not an object: {nested!r}")
    lm_head = tensors.get("lm_head.weight")
    draft_vocab = given.get("draft_vocab_size") or (
        lm_head.shape[0] if lm_head and lm_head.shape else fields["vocab_size"]
    )
    if not isinstance(draft_vocab, int):
        raise InputError(f"{path}: config: draft_vocab_size is not a number: {draft_vocab!r}")
    fc = tensors.get("fc.weight")
    states, rest = divmod(fc.shape[-1] if fc and fc.shape else 0, fields["target_hidden_size"])
    captured = 3 if rest else states  # a width that is no multiple is told of when tensors are compared
    if nested.get("use_aux_hidden_state") is False:
        raise InputError(f"{path}: an EAGLE-3 head with use_aux_hidden_state false is not supported")
    flags = given | nested
    each, together = "fc_norm.0.weight" in tensors, "input_norm.weight" in tensors
    if each and together:
        raise InputError(f"{path}: has both fc_norm and input_norm before fc; only one can be meant")
    aux = list(answers.aux_layers or _aux_layers(path, given, nested, captured, target))
    config = fields | {
        "draft_vocab_size": draft_vocab,
        "own_lm_head": "lm_head.weight" in tensors or draft_vocab != fields["vocab_size"],
        "aux_layers": aux,
        "feature_norm": "each" if each or flags.get("fc_norm") else "all" if together
        or flags.get("norm_before_fc") else "",
        "norm_before_residual": _norm_before_residual(source, flags, answers),
        "recycle_normed": _recycle_normed(source, flags, answers),
    }
    if config["feature_norm"] == "all":
        norms = ["input_norm.weight"]
    else:
        norms = [f"fc_norm.{j}.weight" for j in range(len(aux))]
    names = EAGLE3 | {f"fc_norms.{j}.weight": [norm] for j, norm in enumerate(norms)}
    tensors = dict(tensors)
    for k in range(1, fields["num_layers"]):
        layer = f"layers.{k}."
        names |= {f"more_layers.{k - 1}.{o}": [layer + t for t in ts] for o, ts in LAYER.items()}
        # SGLang builds its further layers from the first one's class and norms their input by `hidden_norm`.
        norm = layer + (
            "hidden_norm.weight" if layer + "hidden_norm.weight" in tensors else "input_layernorm.weight"
        )
        names[f"more_layers.{k - 1}.attn_norm.weight"] = [norm]
        if norm.endswith("hidden_norm.weight"):
            tensors.pop(layer + "input_layernorm.weight", None)  # there, never used
    return Layout(config, names, tensors)


def _norm_before_residual(source: Source, flags: dict, answers: Answers) -> bool:
    """speculators trains with true, its class defaults to false, vLLM takes true for absent: an absent key
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
    """Whether norm(h) is fed back. speculators and SGLang mean that by `norm_output`, SpecForge trains
    otherwise by it.
    """
    if answers.recycle is not None:
        return answers.recycle == "normed"
    if flags.get("norm_output") is None:
        return False
    if _of_speculators(source.config):
        return bool(flags["norm_output"])
    if not flags["norm_output"]:
        raise InputError(
            f"{source.path}: norm_output false: SGLang norms before the lm_head all the same, SpecForge then trains without:"
            " say --recycle raw if it is normed there; a head without that norm is not supported"
        )
    raise InputError(
        f"{source.path}: norm_output true: SGLang feeds the normed state back, SpecForge trains with the raw one:"
        " say --recycle normed or --recycle raw (try both, one drafts far better)"
    )


def _aux_layers(path: Path, given: dict, nested: dict, captured: int, target: ModelArgs) -> tuple[int, ...]:
    """The target layers whose inputs feed the head; `captured`: how many of them its fc is wide.

    Files disagree on whether an id names a layer's output or its input. All of them start with the second
    layer's output, so the first id tells: 1 counts outputs (SGLang, SpecForge), 2 counts inputs (vLLM,
    speculators).
    """
    inner, outer = nested.get(AUX_KEY), given.get(AUX_KEY)
    for ids in (inner, outer):
        if ids and (
            not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        ):
            raise InputError(f"{path}: {AUX_KEY} is not a list of layer numbers: {ids!r}")
    if not inner and not outer:
        if captured != 3:
            raise InputError(
                f"{path}: fc.weight takes {captured} states of the target and the config does not say of which layers: say --aux-layers"
            )
        return eagle3_aux_layers(target.num_layers)
    found = {_as_inputs(path, ids, target) for ids in (inner, outer) if ids}
    if len(found) > 1:
        options = " or ".join("--aux-layers " + ",".join(map(str, ids)) for ids in sorted(found))
        raise InputError(
            f"{path}: {AUX_KEY} is given twice and differently, {inner} and {outer}: say {options}"
        )
    return found.pop()


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
