"""Where checkpoints come from: a Hugging Face folder, a hub repository, a GGUF file. One face for all: `Source`.

Opening a source reads names, shapes and metadata only. The numbers are read one tensor at a time, when the converter
asks for them, and nothing is kept: a model larger than the memory converts.
"""
from __future__ import annotations

import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint import CONFIG, CheckpointError, read_json

# In the order of preference: safetensors before pickles, one file before shards.
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)
SMALL_FILES = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json",
)
# Tokens that end a turn or a text, whoever trained the model. A GGUF stores one eos id and some repositories declare
# only one, yet a chat model may also emit the base model's end of text: miss it, and the text never stops.
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "BOOL": torch.bool}
MODEL_TYPES = {  # for configs without `architectures`
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
}
BLOCK_BYTES = 64 << 20  # of float32, per dequantised block


@dataclass(frozen=True)
class Entry:
    """One tensor of a source. `blocks()` reads it as consecutive blocks of rows; `dtype` None is one we do not know."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    blocks: Callable[[], Iterator[Tensor]]

    def read(self) -> Tensor:
        """The whole tensor at once."""
        return torch.cat(list(self.blocks()))


@dataclass(frozen=True)
class Source:
    """An opened source: what it says about itself and where its tensors are."""

    path: Path
    family: str | None  # an `architectures` entry, or "gguf:ARCH"
    config: dict  # in the vocabulary of Hugging Face's config.json, whatever the container
    tensors: dict[str, Entry]
    stop_ids: list[int]
    bos_id: int | None
    tokenizer: Callable[[Path], bool]  # writes the tokenizer files into a folder; False if there are none


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix.lower() == ".gguf"


def resolve_source(checkpoint: str | Path) -> Path:
    """A local folder or .gguf file as it is; `org/name`, where no such path exists, downloaded from the hub.

    Raises CheckpointError if it is neither, or if the hub does not deliver.
    """
    path = Path(checkpoint)
    if path.is_dir() or (is_gguf(path) and path.is_file()):
        return path
    if path.exists():
        raise CheckpointError(f"{path}: not a folder (nor a .gguf file)")
    name = str(checkpoint)
    if is_gguf(path) or name.startswith(".") or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CheckpointError(f"{path}: no such file or folder")
    return _download(name)


def _download(repo: str) -> Path:
    """Fetch the files we need of a hub repository into its cache (interrupted downloads resume) -> the local folder."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    def fetch(*names: str) -> Path:
        return Path(hub.snapshot_download(repo, allow_patterns=list(names)))

    try:
        try:
            # One request with a limit; listing the files page by page retries for half a minute without a network.
            listed = [file.rfilename for file in hub.HfApi().model_info(repo, timeout=20).siblings or ()]
        except (errors.RepositoryNotFoundError, errors.HFValidationError):
            raise
        except Exception as no_network:
            try:  # what an earlier download left may be all that is needed
                return Path(hub.snapshot_download(repo, local_files_only=True))
            except Exception:
                raise no_network from None
        weights = next((name for name in WEIGHT_FILES if name in listed), None)
        if weights is None or CONFIG not in listed:
            lacks = CONFIG if weights else "weights we read (" + ", ".join(WEIGHT_FILES) + ")"
            raise CheckpointError(f"{repo}: the hub repository has no {lacks}")
        small = [name for name in SMALL_FILES if name in listed]
        folder = fetch(*small, weights)
        if not weights.endswith(".json"):
            return folder
        return fetch(*small, weights, *dict.fromkeys(_shards(folder / weights).values()))
    except CheckpointError:
        raise
    except errors.GatedRepoError:  # a kind of RepositoryNotFoundError, hence first
        raise CheckpointError(f"{repo}: gated; accept its licence on the hub, then run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(f"{repo}: no such folder, and no such public repository on the hub") from None
    except Exception as e:  # the hub client raises its own, its HTTP library's and the system's errors
        reason = str(e).strip().partition("\n")[0] or type(e).__name__
        raise CheckpointError(f"{repo}: no such folder, and the hub did not deliver it ({reason})") from None


def open_source(path: Path) -> Source:
    """Open what `resolve_source` returned. Raises CheckpointError if anything in it is missing or damaged."""
    return _open_gguf(path) if is_gguf(path) else _open_folder(path)


# Hugging Face folders


def _open_folder(path: Path) -> Source:
    config = read_json(path / CONFIG)
    if "format" in config and "kind" in config:
        raise CheckpointError(f"{path}: is already converted")
    name = next((name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if name is None:
        raise CheckpointError(f"{path}: no weights (looked for {', '.join(WEIGHT_FILES)})")
    tensors = _sharded(path / name) if name.endswith(".json") else _one_file(path / name, {})
    generation = path / "generation_config.json"
    generation = read_json(generation) if generation.is_file() else {}
    stop_ids = generation.get("eos_token_id", config.get("eos_token_id"))
    bos_id = config.get("bos_token_id", generation.get("bos_token_id"))
    eos_token, special = _special_tokens(path)
    names = [eos_token, *END_TOKENS]

    def tokenizer(folder: Path) -> bool:
        from tokenizer import copy_files

        return copy_files(path, folder)

    return Source(
        path, _architecture(config), config, tensors,
        stop_ids=_ids(stop_ids, *(special.get(name) for name in names)),
        bos_id=bos_id if isinstance(bos_id, int) else None, tokenizer=tokenizer,
    )


def _architecture(config: dict) -> str | None:
    names = config.get("architectures") or [MODEL_TYPES.get(str(config.get("model_type")))]
    if not isinstance(names, list) or not isinstance(names[0], str | None):
        raise CheckpointError(f"config: architectures is not a list of names: {names!r}")
    return names[0]


def _special_tokens(path: Path) -> tuple[str | None, dict[str, int]]:
    """The tokenizer's own end token, and the ids of all its special tokens and of that one."""
    file = path / "tokenizer_config.json"
    config = read_json(file) if file.is_file() else {}
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(i.isdecimal() and isinstance(token, dict) for i, token in listed.items()):
        raise CheckpointError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder does not map ids to tokens")
    added = [{"id": int(i), **token} for i, token in listed.items()]
    file = path / "tokenizer.json"
    if file.is_file():
        tokenizer = read_json(file)
        added += tokenizer.get("added_tokens") or []
        vocab = (tokenizer.get("model") or {}).get("vocab")
        if isinstance(vocab, dict) and eos in vocab:
            added.append({"content": eos, "id": vocab[eos]})
    return eos, {t["content"]: t["id"] for t in added if t.get("special") or t["content"] == eos}


def _ids(*groups: int | list[int] | None) -> list[int]:
    """Flatten ids and lists of ids into one list, first come first, each once."""
    flat = [i for group in groups for i in (group if isinstance(group, list) else [group])]
    return list(dict.fromkeys(i for i in flat if isinstance(i, int) and i >= 0))


def _shards(index: Path) -> dict[str, str]:
    """Tensor name -> file name of an index. Shard names follow no pattern one could rely on."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {file!r} is not the name of a file beside it")
    return weight_map


def _sharded(index: Path) -> dict[str, Entry]:
    weight_map = _shards(index)
    tensors: dict[str, Entry] = {}
    open_pickle: dict[Path, dict] = {}
    for file in dict.fromkeys(weight_map.values()):
        path = index.parent / file
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though {index.name} lists it")
        found = _one_file(path, open_pickle)
        for name in (n for n, f in weight_map.items() if f == file):
            if name not in found:
                raise CheckpointError(f"{path}: has no tensor {name}, though {index.name} says so")
        # A tensor the index does not list is kept too, so that the converter can name it as unexpected.
        tensors.update({n: entry for n, entry in found.items() if weight_map.get(n, file) == file})
    return tensors


def _one_file(path: Path, open_pickle: dict[Path, dict]) -> dict[str, Entry]:
    return _safetensors(path) if path.suffix == ".safetensors" else _pickle(path, open_pickle)


def _safetensors(path: Path) -> dict[str, Entry]:
    def blocks(name: str) -> Iterator[Tensor]:
        # Opened for each tensor: an open file stays mapped, and its pages would count as ours until the last tensor.
        try:
            with safe_open(path, framework="pt") as file:
                yield file.get_tensor(name)
        except SafetensorError as e:
            raise CheckpointError(f"{path}: damaged ({e})") from None

    def entry(file, name: str) -> Entry:
        view = file.get_slice(name)
        return Entry(tuple(view.get_shape()), DTYPES.get(view.get_dtype()), lambda: blocks(name))

    try:
        with safe_open(path, framework="pt") as file:
            return {name: entry(file, name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path}: truncated or damaged ({e})") from None


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
        raise CheckpointError(f"{path}: unsafe pickle or damaged file, not loaded ({reason})") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as e:
        reason = str(e).strip().partition("\n")[0] or type(e).__name__
        raise CheckpointError(f"{path}: truncated or damaged ({reason})") from None
    dense = isinstance(state, dict) and all(
        isinstance(n, str) and isinstance(t, Tensor) and t.layout == torch.strided for n, t in state.items()
    )
    if not dense:
        raise CheckpointError(f"{path}: is not a state dict of tensors")
    return state


# GGUF


def _open_gguf(path: Path) -> Source:
    """Raises CheckpointError also for what a GGUF can say and we cannot run. Keys: gguf/constants.py."""
    reader, fields = _gguf_reader(path)
    arch = fields.get("general.architecture")
    if fields.get("split.count", 1) > 1:
        raise CheckpointError(f"{path}: is one part of a split GGUF; merge the parts with llama-gguf-split first")
    stored = {t.name: t for t in reader.tensors}
    freqs = stored.pop("rope_freqs.weight", None)
    config = _gguf_config(path, arch, fields, stored, freqs)
    # llama.cpp rotates neighbouring pairs, so its converter interleaves the two halves of every q and k head.
    # The number of heads does not matter for undoing it, only their size.
    permuted = re.compile(r"blk\.\d+\.attn_[qk]\.weight") if arch == "llama" else re.compile("$^")
    tensors = {}
    for name, tensor in stored.items():
        if len(tensor.shape) == 3:
            tensors |= {f"{name}[{e}]": _gguf_entry(path, tensor, None, e) for e in range(int(tensor.shape[2]))}
        else:
            tensors[name] = _gguf_entry(path, tensor, config["head_dim"] if permuted.fullmatch(name) else None)

    ids = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, types = fields.get("tokenizer.ggml.tokens") or [], fields.get("tokenizer.ggml.token_type") or []
    control = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == 3}

    def tokenizer(folder: Path) -> bool:
        if not tokens:
            return False
        from gguf_tokenizer import from_gguf

        from_gguf(fields, folder)
        return True

    family = f"gguf:{arch}" + ("+experts" if config["num_experts"] else "")
    return Source(
        path, family, config, tensors, stop_ids=_ids(*ids, *(control.get(name) for name in END_TOKENS)),
        bos_id=fields.get("tokenizer.ggml.bos_token_id"), tokenizer=tokenizer,
    )


def _gguf_reader(path: Path):
    """-> (GGUFReader, {key: value}). The reader trusts every length in the file, hence its many ways of failing."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError(f"{path}: reading a GGUF needs the package gguf (pip install gguf)") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overflows on the way to the exception below
            reader = gguf.GGUFReader(path)
            fields = {key: field.contents() for key, field in reader.fields.items()}
        size = path.stat().st_size
        for tensor in reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size or not tensor.n_elements:
                raise ValueError(f"tensor {tensor.name} ends after the file does")
        for tensor in {t.tensor_type: t for t in reader.tensors}.values():
            gguf.quants.dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError:
        raise CheckpointError(f"{path}: tensors of type {tensor.tensor_type.name} cannot be dequantised") from None
    except Exception as e:
        reason = str(e).partition("\n")[0]
        raise CheckpointError(f"{path}: truncated, damaged or not a GGUF file ({reason})") from None
    return reader, fields


def _gguf_config(path: Path, arch: str, fields: dict, tensors: dict, freqs) -> dict:
    """The metadata in Hugging Face's vocabulary. Sizes a writer may leave out are read off the tensors."""

    def get(key: str, default=None):
        value = fields.get(f"{arch}.{key}", default)
        if isinstance(value, list):
            raise CheckpointError(f"{path}: {arch}.{key} differs from layer to layer, which is not supported")
        return value

    hidden, heads, rotary = get("embedding_length"), get("attention.head_count"), get("rope.dimension_count")
    head_dim = get("attention.key_length") or rotary or (hidden // heads if hidden and heads else None)
    if (rotary or head_dim) != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{path}: heads whose keys, values and rotary part differ in size are not supported")
    embed = tensors.get("token_embd.weight")
    eps = get("attention.layer_norm_rms_epsilon")
    return {
        "vocab_size": int(embed.shape[-1]) if embed is not None else get("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": get("expert_feed_forward_length") or get("feed_forward_length"),
        "num_experts": get("expert_count", 0),
        "num_experts_per_tok": get("expert_used_count", 0),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": None if eps is None else _short(eps),
        "rope_theta": get("rope.freq_base"),
        "rope_scaling": _gguf_scaling(path, get, freqs),
        "tie_word_embeddings": "output.weight" not in tensors,
        "max_position_embeddings": get("context_length"),
        "sliding_window": get("attention.sliding_window"),
    }


def _short(value: float) -> float:
    """The shortest decimal that rounds to this float32: 1e-05 is stored as 9.999999747378752e-06."""
    return float(str(torch.tensor(value, dtype=torch.float32).numpy()))


def _gguf_scaling(path: Path, get: Callable, freqs) -> dict | None:
    kind = get("rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn") or (kind != "none" and freqs is not None):
        raise CheckpointError(f"{path}: rope scaling of type {kind!r} is not supported")
    if kind == "yarn":
        keys = {
            "factor": "factor", "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow",
        }
        scaling = {ours: value for ours, key in keys.items() if (value := get(f"rope.scaling.{key}")) is not None}
        if extra := get("rope.scaling.attn_factor"):  # llama.cpp multiplies the usual factor by it
            scaling["attention_factor"] = extra * (0.1 * math.log(scaling["factor"]) + 1)
        return {"rope_type": "yarn", **scaling}
    if freqs is not None:  # llama3 scaling arrives as one divisor per frequency
        return {"rope_type": "divisors", "divisors": [float(x) for x in freqs.data]}
    return {"rope_type": "linear", "factor": get("rope.scaling.factor")} if kind == "linear" else None


def _gguf_entry(path: Path, tensor, permuted_head: int | None, expert: int | None = None) -> Entry:
    """`permuted_head`: the head size, if the rows of each head are interleaved and have to be put back in halves.
    `expert`: which matrix of a stack."""
    import gguf

    shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
    data = tensor.data
    if expert is not None:
        shape, data = shape[1:], data[expert]
    kinds = {"F32": torch.float32, "F16": torch.float16}  # everything else becomes bf16, which holds it as well as any
    unit = permuted_head or 1
    if shape[0] % unit:
        raise CheckpointError(f"{path}: tensor {tensor.name} {list(shape)} has no whole number of heads of {unit} rows")
    rows = max(BLOCK_BYTES // (4 * math.prod(shape[1:])) // unit, 1) * unit

    def blocks() -> Iterator[Tensor]:
        for start in range(0, shape[0], rows):
            block = torch.tensor(gguf.quants.dequantize(data[start : start + rows], tensor.tensor_type))
            if permuted_head:  # [heads, hd/2, 2, in] -> [heads, 2, hd/2, in]
                block = block.unflatten(0, (-1, permuted_head // 2, 2)).transpose(1, 2).flatten(0, 2)
            yield block

    return Entry(shape, kinds.get(tensor.tensor_type.name, torch.bfloat16), blocks)
