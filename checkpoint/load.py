"""Load our checkpoint folders: check a config.json, build its module, read the weights.

    DIR/config.json         format, kind ("target" or one of `extensions.HEADS`), the fields of ModelArgs or
                            HeadArgs; `name`, `source`, `sha256` of the weights; for a target also `stop_ids`
                            (of its config and tokenizer) and `bos_id` (or null)
    DIR/model.safetensors   the state dict of `Transformer` or of a head, q/k/v and gate/up fused
                            (with `quantization` in the config, its linear layers are `QuantizedLinear`)
    DIR/tokenizer.*         tokenizer.json or tokenizer.model, tokenizer_config.json, chat_template.jinja
    DIR/KIND/               heads of that target in the same format, one folder per kind (EAGLE-1 and
                            EAGLE-2 share one)
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

import extensions
from common.errors import InputError, check_file, first_line, read_json
from common.schema import ABSENT, InvalidValue, Schema, Sha256, Text, named, schema_of, whole
from head import Head, HeadArgs
from model import LLAMA3_ROPE_FIELDS, Linear, ModelArgs, Transformer, meta_modules

Shapes = dict[str, tuple[int, ...]]
FORMAT = 2
CONFIG, WEIGHTS = "config.json", "model.safetensors"
CASTABLE = {torch.float32, torch.bfloat16, torch.float16}
ADVICE = "convert the checkpoint again"
# Keys of our config.json files besides the fields of `ModelArgs` or `HeadArgs`.
CONFIG_SCHEMA = Schema(TypedDict("Config", {
    "kind": Literal[("target", *extensions.HEADS)], "format": NotRequired[whole(1, 1000)],
    "name": NotRequired[Text], "source": NotRequired[Text], "sha256": NotRequired[Sha256],
    "stop_ids": NotRequired[list[whole()]], "bos_id": NotRequired[whole() | None],
    "quantization": NotRequired[dict],
}))

ROPE_TYPES = "default", "linear", "llama3", "yarn", "divisors"  # divisors: longrope, or llama3 of a GGUF


def rope_fields(rope_type: str) -> dict:
    """Return the fields of `rope_scaling` of this type, one of `ROPE_TYPES`."""
    if entry := extensions.ROPE.get(rope_type):
        return extensions.load(entry).FIELDS[rope_type]
    return LLAMA3_ROPE_FIELDS if rope_type == "llama3" else {}


def check_rope(scaling: dict, key: str = "rope_scaling") -> None:
    """Raise InvalidValue unless these are the parameters of a supported RoPE scaling."""
    type_key = "rope_type" if "rope_type" in scaling else "type"
    rope_type = scaling.get(type_key, ABSENT)
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise InvalidValue(f"{key}.{type_key}", rope_type, f"one of {', '.join(ROPE_TYPES)}")
    Schema(TypedDict(f"Rope_{rope_type}", rope_fields(rope_type))).check(scaling, key)


def check_args(args: ModelArgs) -> None:
    """Raise InvalidValue if a field of a model's shape is out of range or contradicts another one."""
    schema_of(type(args)).check(asdict(args))
    for key, fits, expected in args.constraints():
        if not fits:
            raise InvalidValue(key, getattr(args, key), expected)


def class_of(config: dict) -> type[Transformer | Head]:
    """Return the class of the module that a config.json describes."""
    kind = config["kind"]
    table = extensions.CLASS_FIELDS.get(kind, {})
    default = extensions.HEADS.get(kind, "model:Transformer")
    return extensions.load(next((entry for field, entry in table.items() if config.get(field)), default))


def check_config(config: dict) -> ModelArgs:
    """Check a config.json and return its `ModelArgs`. Raises InvalidValue for the first invalid key."""
    CONFIG_SCHEMA.check(config)
    network = class_of(config)
    if isinstance(scaling := config.get("rope_scaling"), dict):
        check_rope(scaling)
    schema_of(network.Args).check(config)
    args = network.Args.from_config(config)
    for field in extensions.TARGETS:
        if config.get(field) and not hasattr(args, field):
            raise InvalidValue(field, config[field], f"no value: {network.__name__} does not support {field}")
    check_args(args)
    if "quantization" in config:
        from kernels.scheme import Scheme

        Scheme.from_config(config["quantization"])
    return args


def is_ours(config: dict) -> bool:
    """Return whether a config.json is of a converted checkpoint, in any format version."""
    return {"format", "kind"} <= config.keys()


def is_converted(folder: str | Path) -> bool:
    """Return whether a folder holds a converted checkpoint, in any format version. Raises InputError."""
    return (file := Path(folder) / CONFIG).is_file() and is_ours(read_json(file))


def read_config(folder: str | Path, kind: str | None = None, what: str = "") -> dict:
    """Return the config.json of one of our folders.

    kind: the expected kind; None: any. what: the option that the folder was passed to, for errors. Raises
    InputError if the folder is not ours or not of this kind, or if a key is missing, out of range, or
    contradicts another.
    """
    folder, name = Path(folder), f"{what} {folder}".strip()
    if not folder.is_dir():
        raise InputError(f"{name}: not a folder; convert a checkpoint into it with convert_checkpoint.py")
    config = read_json(folder / CONFIG)
    if not is_ours(config):
        how = extensions.load(extensions.HOW_TO_CONVERT)(folder, kind)
        raise InputError(f"{name}: not converted yet; {how}")
    if config["format"] != FORMAT:
        raise InputError(f"{name}: checkpoint format {config['format']!r}, this version reads {FORMAT};"
                         " convert it again")
    with named(folder / CONFIG, ADVICE):
        check_config(config)
        if config["kind"] == "target" and "stop_ids" not in config:
            raise InvalidValue("stop_ids", ABSENT, "a list")
    if kind and config["kind"] != kind:
        methods = [method for method, known in extensions.METHODS.items() if known.draft == config["kind"]]
        other = f" or use --speculate {' or '.join(methods)}" if kind in extensions.HEADS else ""
        raise InputError(f"{name}: is of kind {config['kind']}, expected {kind}; pass another folder{other}")
    return config


def read_config_if_converted(checkpoint: str, max_seq_len: int | None = None) -> dict:
    """Return the config.json of the converted target passed as --checkpoint; {} if it is not converted yet.

    max_seq_len: checked against the model's maximum. Raises InputError.
    """
    if not is_converted(checkpoint):
        return {}
    config = read_config(checkpoint, "target")
    if max_seq_len is not None:
        check_length(max_seq_len, config["max_seq_len"])
    return config


def check_length(max_seq_len: int, model_max_len: int) -> None:
    """Raise InputError if the model does not support sequences of this length, in tokens."""
    if not 2 <= max_seq_len <= model_max_len:
        raise InputError(f"--max-seq-len {max_seq_len}: must be 2 to {model_max_len}, the model's maximum")


def build_module(
    config: dict, args: ModelArgs | None = None, lm_head_size: int | None = None
) -> Transformer | Head:
    """Return the module that a config.json describes, on the meta device, where it takes no memory.

    args: overrides the shape. lm_head_size: overrides the lm_head's output size. Raises InvalidValue, a
    ValueError, on a bad config.
    """
    args = args or check_config(config)
    with meta_modules():
        module = class_of(config)(args)
        if lm_head_size and module.lm_head is not None:
            module.lm_head = Linear(args.hidden_size, lm_head_size, bias=False)
        if "quantization" in config:
            from kernels.scheme import Scheme, replace_linears

            replace_linears(module, Scheme.from_config(config["quantization"]))
    return module


def load_model(
    folder: str | Path, device="cpu", dtype: torch.dtype | None = None, ranks=None
) -> tuple[Transformer, dict]:
    """Load a converted target and return it with its config.json. dtype: None: as stored.

    ranks: load only this rank's shard (`checkpoint.sharded`). Raises InputError on anything that is missing,
    damaged or of another kind, or cannot be sharded.
    """
    config = read_config(folder, "target")
    return _load(Path(folder), config, device, dtype, ranks), config


def load_head(folder: str | Path, target: Transformer, kind: str | None = None) -> Head:
    """Load a converted head in its target's dtype and on its device; share the weights that it lacks.

    Raises InputError if it is missing, damaged, not of the kind `kind`, or does not fit the target.
    """
    config = read_config(folder, kind)
    if config["kind"] not in extensions.HEADS:
        raise InputError(f"{folder}: is of kind {config['kind']}; pass the folder of a draft head")
    check_head_fits(check_config(config), target.args, folder)
    ranks = target.ranks and target.ranks.for_heads
    head = _load(Path(folder), config, target.embed.device, target.embed.dtype, ranks)
    head.use_target(target)
    return head


def _load(folder: Path, config: dict, device, dtype: torch.dtype | None, ranks) -> Transformer | Head:
    module = build_checked_module(folder, config, stored_tensors(folder / WEIGHTS, ADVICE))
    if ranks:
        return extensions.load(extensions.SHARDED)(folder, config, device, dtype, ranks)
    return load_weights(module, folder / WEIGHTS, device, dtype)


def load_weights(
    module: Transformer | Head, path: Path, device: torch.device | str, dtype: torch.dtype | None,
    read_tensor: Callable[[str, Any], Tensor] = lambda name, file: file.get_tensor(name),
) -> Transformer | Head:
    """Fill a module of the meta device with the weights in a safetensors file, for inference.

    read_tensor(name, file): read a tensor of the open file. Raises InputError if a dtype does not match.
    """
    state = {}
    for name, meta in module.state_dict().items():
        # A tensor is a view of the mapped file. Each has its own mapping, so that its memory is freed as soon
        # as it has been packed.
        with open_safetensors(path, ADVICE, device) as file:
            tensor = read_tensor(name, file)
        # Quantized weights and their scales are never cast; older int4 folders have bfloat16 scales.
        castable = {tensor.dtype, meta.dtype} <= CASTABLE
        if not castable and tensor.dtype != meta.dtype:
            raise InputError(f"{path}: tensor {name} is {tensor.dtype}, {CONFIG} says {meta.dtype}; quantize"
                             " again")
        state[name] = tensor.to(dtype) if dtype and castable and not name.endswith(".scale") else tensor
    ids, valid = state.get("draft_ids"), range(module.args.vocab_size)
    if ids is not None and not (int(ids.min()) in valid and int(ids.max()) in valid):
        raise InputError(f"{path}: draft_ids must be in 0..{len(valid) - 1}; {ADVICE}")
    module.load_state_dict(state, assign=True)
    module.inv_freq = module.args.inverse_frequencies().to(device)  # float32 whatever the model's dtype
    return module.requires_grad_(False).eval()


def build_checked_module(folder: Path, config: dict, stored: dict[str, Stored]) -> Transformer | Head:
    """Build a config's module on the meta device and compare it with the stored tensors, by name and shape.

    Raises InputError if they do not match.
    """
    with named(folder / CONFIG, ADVICE):
        module = build_module(config)
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    check_shapes({name: s.shape for name, s in stored.items()}, shapes, str(folder / WEIGHTS))
    return module


def check_head_fits(head: HeadArgs, target: ModelArgs, where: object) -> None:
    """Raise InputError unless a head fits this target: vocabulary, hidden size, aux layers."""
    sizes = [
        ("vocabulary", head.vocab_size, target.vocab_size),
        ("target hidden size", head.target_hidden_size, target.hidden_size)]
    if not (head.own_embedding and (head.own_lm_head or head.tie_embeddings)):
        sizes += [("hidden size", head.hidden_size, target.hidden_size)]
    for what, found, size in sizes:
        if found != size:
            raise InputError(f"{where}: the head was made for another target: {what} {found}, this target"
                             f" has {size}")
    if (last := max(head.aux_layers)) > target.num_layers:
        raise InputError(f"{where}: the head reads layer {last}, the target has {target.num_layers} layers")


# -- safetensors files ------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A tensor as a file stores it. dtype: safetensors' name for it."""

    dtype: str
    shape: tuple[int, ...]


@contextlib.contextmanager
def open_safetensors(path: Path, advice: str, device: torch.device | str = "cpu") -> Iterator:
    """Context manager: open a file. Raises InputError, which ends with `advice`, if it is damaged."""
    check_file(path)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except SafetensorError as e:
        raise InputError(f"{path}: damaged ({first_line(e)}); {advice}") from None


def stored_tensors(path: Path, advice: str) -> dict[str, Stored]:
    """Return dtype and shape of each tensor in a file, by name. Raises InputError."""
    with open_safetensors(path, advice) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, `file` is not iterable
        return {name: Stored(s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}


def check_shapes(shapes: Shapes, expected: Shapes, where: str) -> None:
    """Compare tensor names and shapes both ways. Raises InputError naming the first difference."""
    for name, shape in expected.items():
        if name not in shapes:
            raise InputError(f"{where}: tensor {name} {list(shape)} is missing")
        if tuple(shapes[name]) != tuple(shape):
            raise InputError(f"{where}: tensor {name} has shape {list(shapes[name])}, expected {list(shape)}")
    for name in shapes:
        if name not in expected:
            raise InputError(f"{where}: unexpected tensor {name!r} {list(shapes[name])}")
