"""Checkpoints to convert: resolve the name, list the tensors, read them one at a time.

Opening a source reads names, shapes and configs. Tensors are read when the converter needs them and are not
kept, so memory does not grow with the model.
"""
from __future__ import annotations

import contextlib
import fnmatch
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import TypedDict

import extensions
from checkpoint.load import CONFIG, is_ours, open_safetensors, stored_tensors
from common.errors import InputError, check_file, library_errors, read_json
from common.schema import Flag, Schema, number, whole
from tokens.files import TOKENIZER_FILES, encoder_of

STORED_DTYPES = {  # safetensors' names
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}
# Weights of a Hugging Face folder, best first: safetensors before pickles, one file before shards.
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "*_lm_head.safetensors", "*_lm_head.pt", "model-00001-of-*.safetensors", "pytorch_model-00001-of-*.bin",
)
PROJECTION_FILE = "warp_model.bin"  # of a PARD-2 draft model, see `checkpoint.pard2`
MASK_FILE = "mask_embedding.pt"  # of a DFlash head: the mask token's embedding, or a dict with it
# Files that describe the quantization if config.json does not, and their methods.
QUANTIZATION_FILES = {
    "quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
SMALL_FILES = (
    CONFIG, "generation_config.json", PROJECTION_FILE, MASK_FILE, *QUANTIZATION_FILES, *TOKENIZER_FILES)
# Files of other formats by suffix: their reader, and the function that describes a file's contents.
SOURCE_FILES = {".gguf": "checkpoint.gguf:open_file"}
FILE_KINDS = "checkpoint.gguf:kind_of_file"
DEQUANTIZE = "checkpoint.published:dequantized"  # for folders with a `quantization_config`
QUANTIZATION = "quantization_config", "compression_config", *QUANTIZATION_FILES  # keys of a config
DAMAGED = "truncated? Download it again"


class Grouped(NamedTuple):
    """A matrix as its file stores it, see `kernels.stored`.

    kind: its `Kind`. read(to): return its integers, scales and codes in the layout of another `Kind`. order:
    of columns, if permuted.
    """

    kind: Any
    read: Callable[[Any], tuple[Tensor, Tensor, Tensor | None]]
    order: Tensor | None = None


@dataclass(frozen=True)
class Entry:
    """One tensor of a source, read by `read()`.

    dtype: to convert to; `read` may return float32. None: stored in an unknown type. quantized: name of the
    type that `read` dequantizes. grouped: its quantized form; None if no `Kind` represents it exactly.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    read: Callable[[], Tensor]
    quantized: str = ""
    grouped: Grouped | None = None

    def changed(self, change: Callable[[Tensor], Tensor], shape: tuple[int, ...] | None = None) -> Entry:
        """Return this entry with `change` applied when it is read. shape: the new shape, if different."""
        return Entry(shape or self.shape, self.dtype, lambda: change(self.read()), self.quantized)

    def rows(self, index: Tensor) -> Entry:
        """Select rows, also of the quantized form."""
        selected = self.changed(lambda x: x[index], (len(index), *self.shape[1:]))
        grouped = self.grouped and self.grouped._replace(
            read=lambda to: tuple(x if x is None else x[index] for x in self.grouped.read(to)))
        return replace(selected, grouped=grouped)

    def columns(self, index: Tensor) -> Entry:
        """Permute columns; the quantized form keeps its order and records the permutation."""
        grouped = self.grouped and self.grouped._replace(
            kind=self.grouped.kind._replace(ordered=True), order=index.argsort())
        return replace(self.changed(lambda x: x[:, index]), grouped=grouped)


@dataclass(frozen=True)
class Source:
    """An open checkpoint. config: with the keys of Hugging Face's config.json for every file format."""

    path: Path
    architecture: str | None  # class in transformers or model type; for other formats see their module
    config: dict
    tensors: dict[str, Entry]
    stop_ids: list[int]  # from the config; the tokenizer may add more
    bos_id: int | None
    # Write the tokenizer files into a folder; False if there are none. added: the chat template to add.
    tokenizer: Callable[[Path, str | None], bool] | None


def unique_ids(*groups: int | list[int] | None) -> list[int]:
    """Flatten token ids and lists of them into one list in order of appearance, without repetitions."""
    flat = [i for group in groups for i in (group if isinstance(group, list) else [group])]
    return list(dict.fromkeys(i for i in flat if isinstance(i, int) and i >= 0))


def resolve_source(checkpoint: str | Path) -> Path:
    """Return the local path of a checkpoint: a folder, a file, or a download of the hub's `org/name`.

    Local paths come first. Raises InputError on any other name, or if the download fails.
    """
    path = Path(checkpoint)
    if path.is_dir() and not (path / CONFIG).exists():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SOURCE_FILES)
        kinds = [f"{file.name} is {extensions.load(FILE_KINDS)(file)}" for file in files]
        raise InputError(f"{path}: has no {CONFIG}; pass " + (
            f"one of its files: {', '.join(kinds)}" if kinds else "the folder of a checkpoint"))
    if path.is_dir() or (path.is_file() and path.suffix.lower() in SOURCE_FILES):
        return path
    if path.exists():
        raise InputError(f"{path}: not a folder (nor a {' or '.join(SOURCE_FILES)} file)")
    if path.parent.is_dir() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(checkpoint)):
        raise InputError(f"{path}: no such file or folder; pass a converted folder, a Hugging Face folder, a"
                         f" {' or '.join(SOURCE_FILES)} file or a hub id (org/name)")
    with library_errors(f"{path}: no such folder, and the download from the hub failed"):
        return _download(str(checkpoint))


def _download(repo: str) -> Path:
    """Download the necessary files of a hub repository into the hub's cache; return the local folder.

    Interrupted downloads resume. Without a connection, an earlier download is used.
    """
    import huggingface_hub as hub

    try:  # one request with a timeout; listing files page by page would retry for half a minute
        files = [file.rfilename for file in hub.HfApi().model_info(repo, timeout=20).siblings or ()]
    except Exception:
        with contextlib.suppress(Exception):
            return Path(hub.snapshot_download(repo, local_files_only=True))
        raise
    weights = _weight_file(files)
    if weights is None or CONFIG not in files:
        raise InputError(f"{repo}: the hub repository lacks {CONFIG} or weights ({', '.join(WEIGHT_FILES)})")
    wanted = [*(name for name in SMALL_FILES if name in files), weights]
    folder = Path(hub.snapshot_download(repo, allow_patterns=wanted))
    if weights.endswith(".json"):
        folder = Path(hub.snapshot_download(repo, allow_patterns=[*wanted, *_shards(folder / weights)[0]]))
    return folder


def _weight_file(names: Iterable[str]) -> str | None:
    found = (name for pattern in WEIGHT_FILES for name in fnmatch.filter(names, pattern))
    return next(found, None)


def _shards(first: Path) -> tuple[list[str], dict[str, str]]:
    """Return the files of the shards, and the index: tensor -> file. first: the index, or the first shard."""
    if first.suffix != ".json":
        pattern = first.name.replace("-00001-of-", "-*-of-")
        return sorted(file.name for file in first.parent.glob(pattern)), {}
    named = read_json(first).get("weight_map")
    if not isinstance(named, dict) or any(Path(str(file)).name != file for file in named.values()):
        raise InputError(f"{first}: has no weight_map (the file of each tensor); download it again")
    return [*dict.fromkeys(named.values())], named


def _of_shards(first: Path, load: Callable[[Path], dict]) -> dict[str, Entry]:
    """Read each tensor from the file that the index lists: other files may hold stale copies."""
    (files, index), tensors, stale = _shards(first), {}, {}
    for file in files:
        for name, entry in _one_file(first.with_name(file), load).items():
            ambiguous = name in tensors and name not in index
            if ambiguous and not torch.equal(tensors[name].read(), entry.read()):
                raise InputError(f"{first}: does not list {name}, of which {file} and another file have"
                                 " different copies")
            (tensors if index.get(name, file) == file else stale)[name] = entry
    for name in stale.keys() - tensors.keys():
        raise InputError(f"{first}: lists {name} in {index[name]}, but another file has it;"
                         " download all files again")
    return tensors


def open_source(path: Path) -> Source:
    """Open a checkpoint at a path of `resolve_source`. Raises InputError if a file is missing or damaged."""
    if path.is_dir():
        return _open_folder(path)
    return extensions.load(SOURCE_FILES[path.suffix.lower()])(path)


# Value types in Hugging Face's config.json. Families check the values.
HUB_CONFIG = Schema(TypedDict("HubConfig", {
    **dict.fromkeys(("thinker_config", "text_config", "rope_scaling", "rope_parameters"), dict | None),
    "layer_types": list[str] | None, "no_rope_layers": list[int] | None,
    "num_hidden_layers": whole(1, 10_000) | None, "sliding_window": whole() | None,
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
                     "max_position_embeddings", "sliding_window_pattern"), whole(1) | None),
    **dict.fromkeys(("rope_theta", "rms_norm_eps", "partial_rotary_factor"), number() | None),
    **dict.fromkeys(("use_sliding_window", "tie_word_embeddings", "attention_bias", "norm_topk_prob"),
                    Flag | None),
}, total=False))


def _open_folder(path: Path) -> Source:
    config = HUB_CONFIG.require(read_json(path / CONFIG), path / CONFIG)
    if is_ours(config):
        raise InputError(f"{path}: is already converted")
    name = _weight_file(sorted(file.name for file in path.iterdir()))
    if name is None:
        raise InputError(f"{path}: no weights (looked for {', '.join(WEIGHT_FILES)})")
    load = lru_cache(maxsize=1)(_load_pickle)  # keep one pickle mapped at a time
    tensors = (_of_shards if name.endswith(".json") or "-of-" in name else _one_file)(path / name, load)
    for more in (PROJECTION_FILE, MASK_FILE):
        if (path / more).is_file():
            tensors |= _one_file(path / more, load)
    if encoder := encoder_of(path):
        check_file(path / encoder)
    if text := config.get("thinker_config", config).get("text_config"):  # of a multimodal model
        config = text | {k: v for k, v in config.items() if v is not None} | {"text_config": text}
        HUB_CONFIG.require(config, path / CONFIG)
    for name, method in QUANTIZATION_FILES.items():
        if (file := path / name).exists() and not any(map(config.get, QUANTIZATION)):
            quantization = read_json(file)
            quantization = quantization.get("quantization", quantization)
            is_dict = isinstance(quantization, dict)
            config[name] = {"quant_method": method, **quantization} if is_dict else quantization
    if any(map(config.get, QUANTIZATION)):
        config, tensors = extensions.load(DEQUANTIZE)(path, config, tensors)
    file = path / "generation_config.json"
    generation = {k: v for k, v in read_json(file).items() if v is not None} if file.exists() else {}
    stop_ids = generation.get("eos_token_id", config.get("eos_token_id"))
    bos_id = config.get("bos_token_id", generation.get("bos_token_id"))
    return Source(
        path, (config.get("architectures") or [config.get("model_type")])[0], config, tensors,
        stop_ids=unique_ids(stop_ids), bos_id=next(iter(unique_ids(bos_id)), None),
        tokenizer=partial(_copy_tokenizer, path) if encoder else None)


def _copy_tokenizer(source: Path, folder: Path, added: str | None) -> bool:
    from tokens.convert import copy_files

    return copy_files(source, folder)


def _one_file(path: Path, load: Callable[[Path], dict]) -> dict[str, Entry]:
    check_file(path)

    def read(name: str) -> Tensor:
        # Reopen the file for each tensor: pages of a mapped file count as this process's memory.
        with open_safetensors(path, DAMAGED) as file:
            return file.get_tensor(name)

    if path.suffix == ".safetensors":
        return {name: Entry(stored.shape, STORED_DTYPES.get(stored.dtype), partial(read, name))
                for name, stored in stored_tensors(path, DAMAGED).items()}
    return {name: Entry(tensor.shape, tensor.dtype, lambda name=name: load(path)[name])
            for name, tensor in load(path).items()}


def _load_pickle(path: Path) -> dict[str, Tensor]:
    with library_errors(f"{path}: damaged, or holds objects other than tensors"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # errors are reported by `library_errors`
        # Files from before torch 1.6 are not zip archives, cannot be mapped, and are read into memory.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if path.name == MASK_FILE:
        values = state.values() if isinstance(state, dict) else (state,)
        vectors = [value.flatten() for value in values if isinstance(value, Tensor)]
        state = {"mask_embedding": vectors[0]} if len(vectors) == 1 else None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise InputError(f"{path}: is not a state dict of tensors")
    return state
