"""Hugging Face folders as a `Source`: safetensors or pickles, one file or shards."""
from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint.folder import CONFIG
from checkpoint.source import DTYPES, Entry, Source, _ids
from common.errors import InputError
from common.files import read_json

# In the order of preference: safetensors before pickles, one file before shards.
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)
# Tokens that end a turn or a text, whoever trained the model. A GGUF stores one eos id and some repositories
# declare only one, yet a chat model may also emit the base model's end of text: miss it, and the text never
# stops.
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
MODEL_TYPES = {  # for configs without `architectures`
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
}


# Hugging Face folders


def _open_folder(path: Path) -> Source:
    config = read_json(path / CONFIG)
    if "format" in config and "kind" in config:
        raise InputError(f"{path}: is already converted")
    name = next((name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if name is None:
        raise InputError(f"{path}: no weights (looked for {', '.join(WEIGHT_FILES)})")
    tensors = _sharded(path / name) if name.endswith(".json") else _one_file(path / name, {})
    generation = path / "generation_config.json"
    generation = read_json(generation) if generation.is_file() else {}
    stop_ids = generation.get("eos_token_id", config.get("eos_token_id"))
    bos_id = config.get("bos_token_id", generation.get("bos_token_id"))
    eos_token, special = _special_tokens(path)
    names = [eos_token, *END_TOKENS]

    def tokenizer(folder: Path) -> bool:
        from tokens.tokenizer import copy_files

        return copy_files(path, folder)

    return Source(
        path, _architecture(config), config, tensors,
        stop_ids=_ids(stop_ids, *(special.get(name) for name in names)),
        bos_id=bos_id if isinstance(bos_id, int) else None, tokenizer=tokenizer,
    )


def _architecture(config: dict) -> str | None:
    names = config.get("architectures") or [MODEL_TYPES.get(str(config.get("model_type")))]
    if not isinstance(names, list) or not isinstance(names[0], str | None):
        raise InputError(f"config: architectures is not a list of names: {names!r}")
    return names[0]


def _special_tokens(path: Path) -> tuple[str | None, dict[str, int]]:
    """The tokenizer's own end token, and the ids of all its special tokens and of that one."""
    file = path / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(
        i.isdecimal() and isinstance(token, dict) for i, token in listed.items()
    ):
        raise InputError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder does not map ids to tokens")
    added = [{"id": int(i), **token} for i, token in listed.items()]
    file = path / "tokenizer.json"
    if file.is_file():
        tokenizer = read_json(file)
        added += tokenizer.get("added_tokens") or []
        vocab = (tokenizer.get("model") or {}).get("vocab")
        if isinstance(vocab, dict) and eos in vocab:
            added.append({"content": eos, "id": vocab[eos]})
    return eos, {t["content"]: t["id"] for t in added if t.get("special") or t["content"] == eos}


def _shards(index: Path) -> dict[str, str]:
    """Tensor name -> file name of an index. Shard names follow no pattern one could rely on."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{index}: {file!r} is not the name of a file beside it")
    return weight_map


def _sharded(index: Path) -> dict[str, Entry]:
    weight_map = _shards(index)
    tensors: dict[str, Entry] = {}
    open_pickle: dict[Path, dict] = {}
    for file in dict.fromkeys(weight_map.values()):
        path = index.parent / file
        if not path.is_file():
            raise InputError(f"{path}: missing, though {index.name} lists it")
        found = _one_file(path, open_pickle)
        for name in (n for n, f in weight_map.items() if f == file):
            if name not in found:
                raise InputError(f"{path}: has no tensor {name}, though {index.name} says so")
        # A tensor the index does not list is kept too, so that the converter can name it as unexpected.
        tensors.update({n: entry for n, entry in found.items() if weight_map.get(n, file) == file})
    return tensors


def _one_file(path: Path, open_pickle: dict[Path, dict]) -> dict[str, Entry]:
    return _safetensors(path) if path.suffix == ".safetensors" else _pickle(path, open_pickle)


def _safetensors(path: Path) -> dict[str, Entry]:
    def blocks(name: str) -> Iterator[Tensor]:
        # Opened for each tensor: an open file stays mapped, and its pages would count as ours until the last
        # tensor.
        try:
            with safe_open(path, framework="pt") as file:
                yield file.get_tensor(name)
        except SafetensorError as e:
            raise InputError(f"{path}: damaged ({e})") from None

    def entry(file, name: str) -> Entry:
        view = file.get_slice(name)
        return Entry(tuple(view.get_shape()), DTYPES.get(view.get_dtype()), lambda: blocks(name))

    try:
        with safe_open(path, framework="pt") as file:
            return {name: entry(file, name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (SafetensorError, OSError) as e:
        raise InputError(f"{path}: truncated or damaged ({e})") from None


def _pickle(path: Path, cache: dict[Path, dict]) -> dict[str, Entry]:
    """`cache` holds the file that was read last, so that a shard is opened once and not once per tensor."""

    def load() -> dict[str, Tensor]:
        if path not in cache:
            cache.clear()
            cache[path] = _load_pickle(path)
        return cache[path]

    def entry(name: str, tensor: Tensor) -> Entry:
        dtype = tensor.dtype if tensor.dtype in DTYPES.values() else None
        return Entry(tuple(tensor.shape), dtype, lambda: iter((load()[name],)))

    return {name: entry(name, tensor) for name, tensor in load().items()}


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is wrong with the file is said once, below
            # Files from before torch 1.6 are no zip archives and cannot be mapped: those are read whole.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as e:
        found = re.search(r"unsupported [^\n]*", str(e), re.IGNORECASE)  # the class or function it asks for
        reason = found[0].partition(". ")[0].rstrip(".") if found else "not a pickle of tensors"
        raise InputError(f"{path}: unsafe pickle or damaged file, not loaded ({reason})") from None
    except (
        RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError, TypeError
    ) as e:
        reason = str(e).strip().partition("\n")[0] or type(e).__name__
        raise InputError(f"{path}: truncated or damaged ({reason})") from None
    dense = isinstance(state, dict) and all(
        isinstance(n, str) and isinstance(t, Tensor) and t.layout == torch.strided for n, t in state.items()
    )
    if not dense:
        raise InputError(f"{path}: is not a state dict of tensors")
    return state
