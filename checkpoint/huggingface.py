"""Hugging Face folders as a `Source`: safetensors or pickles, one file or shards."""
from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from checkpoint.folder import CONFIG, is_ours
from checkpoint.source import WEIGHT_FILES, Entry, Source, shards, unique_ids
from checkpoint.weights import listed, opened
from common.cli import library_errors
from common.errors import InputError
from common.files import check_file, read_json
from common.schema import Flag, Ids, Layers, Many, Schema, Text, Whole, Width, number, whole
from model import Length
from tokens.convert import copy_files

READABLE_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8,
}
AGAIN = "truncated? Download it again"  # what to do about weights that are damaged
Token = whole(-1, 2**24) | list[whole(-1, 2**24)] | None  # -1: none
LayerIds = list[whole(-1, 10_000)]


def optional(name: str, kinds: dict) -> TypedDict:
    """Return the type of an object whose keys may be absent; null is as if a key was absent."""
    return TypedDict(name, {key: NotRequired[kind | None] for key, kind in kinds.items()})


# config.json of a target (transformers) or of a head, by type: the keys that we read.
CONFIG_KEYS = {key: kind for kind, keys in {
    list[Text | None]: "architectures layer_types",
    Text: "model_type hidden_act hidden_activation speculators_model_type markov_head_type _name_or_path",
    Ids: "vocab_size draft_vocab_size",
    Width: "hidden_size intermediate_size moe_intermediate_size target_hidden_size"
           " shared_expert_intermediate_size",
    Layers: "num_hidden_layers num_target_layers",
    Many: "num_attention_heads num_key_value_heads head_dim linear_num_value_heads linear_num_key_heads"
          " linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim full_attention_interval",
    number(above=0, high=1): "rms_norm_eps", number(above=1, high=1e15): "rope_theta rope_local_base_freq",
    number(above=0, high=1e6): "query_pre_attn_scalar swiglu_limit swiglu_alpha",
    dict: "rope_scaling rope_parameters", number(0, 1): "partial_rotary_factor",
    whole(1): "max_position_embeddings sliding_window_pattern", Length: "original_max_position_embeddings",
    Flag: "tie_word_embeddings use_sliding_window attention_bias mlp_bias norm_topk_prob use_aux_hidden_state"
          " norm_before_residual norm_output fc_norm norm_before_fc causal causal_head sample_from_anchor"
          " confidence_head_with_markov attn_output_gate mtp_use_dedicated_embeddings is_causal"
          " sliding_window_non_causal",
    Whole: "sliding_window max_window_layers decoder_sparse_step block_size mask_token_id num_draft_steps"
           " k_train draft_window",
    whole(0, 10_000): "num_experts num_local_experts num_experts_per_tok",
    list[Whole]: "mlp_only_layers", Token: "pard_token ptd_token_id eos_token_id bos_token_id",
    LayerIds: "eagle_aux_hidden_state_layer_ids target_layer_ids aux_hidden_state_layer_ids",
}.items() for key in keys.split()}
NESTED = dict.fromkeys(
    ("eagle_config", "dflash_config", "transformer_layer_config", "model", "text_config"),
    optional("Nested", CONFIG_KEYS),
)
PUBLISHED = Schema(optional("Published", CONFIG_KEYS | NESTED))
GENERATION = Schema(optional("Generation", {"eos_token_id": Token, "bos_token_id": Token}))


def open_folder(path: Path) -> Source:
    """Open a Hugging Face folder. Raises InputError if anything in it is missing, damaged or unsafe."""
    config = read_json(path / CONFIG)
    if is_ours(config):
        raise InputError(f"{path}: is already converted")
    PUBLISHED.require(config, path / CONFIG)
    name = next((name for name in WEIGHT_FILES if (path / name).exists()), None)
    if name is None:
        raise InputError(f"{path}: no weights (looked for {', '.join(WEIGHT_FILES)})")
    load = lru_cache(maxsize=1)(_load_pickle)  # one pickle at a time is mapped
    files = dict.fromkeys(shards(path / name).values()) if name.endswith(".json") else [name]
    tensors = {name: entry for file in files for name, entry in _one_file(path / file, load).items()}
    if text := config.get("text_config"):
        config = text | {key: value for key, value in config.items() if value is not None}
        tensors = _text_part(tensors)
    file = path / "generation_config.json"
    generation = GENERATION.require(read_json(file), file) if file.exists() else {}
    generation = {key: value for key, value in generation.items() if value is not None}
    stop_ids = generation.get("eos_token_id", config.get("eos_token_id"))
    bos_id = config.get("bos_token_id", generation.get("bos_token_id"))
    family = (config.get("architectures") or [config.get("model_type")])[0]
    return Source(
        path, family, config, tensors,
        stop_ids=unique_ids(stop_ids), bos_id=bos_id if isinstance(bos_id, int) and bos_id >= 0 else None,
        tokenizer=lambda folder, added: copy_files(path, folder))


def _text_part(tensors: dict[str, Entry]) -> dict[str, Entry]:
    """Return the tensors of a model that sees images too: those for text, named as a text model's."""
    def renamed(name: str) -> str:
        name = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name)
        return name.replace("model.lm_head.", "lm_head.")

    others = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|visual)\.")
    return {renamed(name): entry for name, entry in tensors.items() if not others.match(name)}


def _one_file(path: Path, load: Callable[[Path], dict]) -> dict[str, Entry]:
    def read(name: str) -> Tensor:
        # The file is opened for each tensor. An open file stays mapped, and its pages would count as this
        # process's memory until the last tensor.
        with opened(path, AGAIN) as file:
            return file.get_tensor(name)

    if path.suffix == ".safetensors":
        return {name: Entry.of(stored.shape, READABLE_DTYPES.get(stored.dtype), partial(read, name))
                for name, stored in listed(path, AGAIN).items()}
    known = READABLE_DTYPES.values()
    return {name: Entry.of(tensor.shape, tensor.dtype if tensor.dtype in known else None,
                           lambda name=name: load(path)[name]) for name, tensor in load(path).items()}


def _load_pickle(path: Path) -> dict[str, Tensor]:
    size = check_file(path)
    with library_errors(f"{path}: damaged, or more than a pickle of tensors"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong with the file is reported once, here
        # Files from before torch 1.6 are no zip archives and cannot be mapped: they are read into memory.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    dense = isinstance(state, dict) and all(
        isinstance(t, Tensor) and t.layout == torch.strided for t in state.values())
    if not dense:
        raise InputError(f"{path}: is not a state dict of tensors")
    for name, tensor in state.items():
        if tensor.nbytes > size:  # one number, said to be a matrix
            raise InputError(f"{path}: tensor {name!r} {list(tensor.shape)} is {tensor.nbytes:,} bytes;"
                             f" expected at most {size:,}, the size of the file")
    return state
