"""Our checkpoint folder: what is in it, and how its config is read.

    DIR/config.json         format, kind ("target" or one of HEADS), the fields of ModelArgs or HeadArgs;
                            `name`, `source`, `sha256` of the weights, for a target also `stop_ids` (all of
                            them) and `bos_id` (or null)
    DIR/model.safetensors   the state dict of `Transformer` or of a head, q/k/v and gate/up fused
                            (with `quantization` in the config, its linear layers are `QuantizedLinear`)
    DIR/tokenizer.*         tokenizer.json or tokenizer.model, tokenizer_config.json, chat_template.jinja
    DIR/KIND/               heads of that target in the same format, a folder for each of HEADS (EAGLE-1 and
                            EAGLE-2 share one)
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Literal

from typing_extensions import NotRequired, TypedDict

import extensions
from common.errors import InputError
from common.files import check_file, read_json
from common.schema import ABSENT, Schema, Sha256, Text, Wrong, named, schema_of, whole
from extensions import HEADS
from head import Head
from kernels.quantized import Scheme
from model import LLAMA3, ModelArgs, Transformer

FORMAT = 2
CONFIG, WEIGHTS = "config.json", "model.safetensors"
ADVICE = "convert the checkpoint again"
# Keys of every config.json of ours, beside the fields of `ModelArgs` or `HeadArgs`.
FOLDER = Schema(TypedDict("Folder", {
    "kind": Literal[("target", *HEADS)], "format": NotRequired[whole(1, 1000)],
    "name": NotRequired[Text], "source": NotRequired[Text], "sha256": NotRequired[Sha256],
    "stop_ids": NotRequired[list[whole()]], "bos_id": NotRequired[whole() | None],
    "quantization": NotRequired[dict],
}))

ROPE = "default", "linear", "llama3", "yarn", "divisors"  # types of RoPE scaling


def rope_fields(kind: str) -> dict:
    """Return the fields of `rope_scaling` of this type, one of `ROPE`."""
    if entry := extensions.ROPE.get(kind):
        return extensions.load(entry).FIELDS[kind]
    return LLAMA3 if kind == "llama3" else {}


def check_rope(scaling: dict, key: str = "rope_scaling") -> None:
    """Raise Wrong unless these are the parameters of a rope scaling that we compute."""
    place = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.get(place, ABSENT)
    if not isinstance(kind, str) or kind not in ROPE:
        raise Wrong(f"{key}.{place}", kind, f"one that is supported: {', '.join(ROPE)}")
    Schema(TypedDict(f"Rope_{kind}", rope_fields(kind))).check(scaling, key)


def check_args(args: ModelArgs) -> None:
    """Raise Wrong if a field of a model's shape is out of its range, or if fields contradict each other."""
    schema_of(type(args)).check(asdict(args))
    for key, fits, expected in args.relations():
        if not fits:
            raise Wrong(key, getattr(args, key), expected)


def class_of(config: dict) -> type[Transformer | Head]:
    """Return the class of the module that a config.json describes."""
    kind = config["kind"]
    table = extensions.TARGETS if kind == "target" else extensions.HEAD_OPTIONS.get(kind, {})
    found = next((entry for field, entry in table.items() if config.get(field)), HEADS.get(kind))
    return extensions.load(found) if found else Transformer


def check_config(config: dict) -> ModelArgs:
    """Return the model's shape in a config.json. Raises Wrong on the first key that is not right."""
    FOLDER.check(config)
    shape = class_of(config).Args
    if isinstance(scaling := config.get("rope_scaling"), dict):
        check_rope(scaling)
    schema_of(shape).check(config)
    args = shape.from_config(config)
    for field in extensions.TARGETS:
        if config.get(field) and not hasattr(args, field):
            raise Wrong(field, config[field], f"nothing: {class_of(config).__name__} has no such part")
    check_args(args)
    if "quantization" in config:
        Scheme.read(config["quantization"])
    return args


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file."""
    return path.suffix.lower() == ".gguf"


def is_ours(config: dict) -> bool:
    """Return whether a config.json is that of a converted checkpoint, of any version."""
    return {"format", "kind"} <= config.keys()


def is_converted(folder: str | Path) -> bool:
    """Return whether a folder holds a converted checkpoint, of any version. Raises InputError."""
    return (Path(folder) / CONFIG).is_file() and is_ours(read_json(Path(folder) / CONFIG))


def read_config(folder: str | Path, kind: str | None = None, what: str = "") -> dict:
    """Return the config.json of one of our folders.

    kind: that it has to be of. what: the option that names the folder, for errors. Raises InputError if the
    folder is not ours, not of this kind, or if a key is missing, out of its range, or contradicts another.
    """
    folder, name = Path(folder), f"{what} {folder}".strip()
    if not folder.is_dir():
        raise InputError(f"{name}: not a folder; convert a checkpoint into it with convert_checkpoint.py")
    config = read_json(folder / CONFIG)
    if not is_ours(config):
        raise InputError(f"{name}: not converted yet; {_conversion(folder, kind)}")
    if config["format"] != FORMAT:
        raise InputError(f"{name}: format {config['format']!r} is not the {FORMAT} this version reads;"
                         " convert it again")
    with named(folder / CONFIG, ADVICE):
        check_config(config)
        if config["kind"] == "target" and "stop_ids" not in config:
            raise Wrong("stop_ids", ABSENT, "a list")
    if kind and config["kind"] != kind:
        raise InputError(f"{name}: is of kind {config['kind']}, expected {kind}; name another folder")
    return config


def _conversion(folder: Path, kind: str | None) -> str:
    """Return how to convert a folder: a command to run, if all of it is known."""
    source, command = quote(str(folder)), "python convert_checkpoint.py --checkpoint"
    if is_converted(folder.parent):  # a head, where its conversion will be
        aside, target = quote(f"{folder}-source"), quote(str(folder.parent))
        return f"run mv {source} {aside} && {command} {aside} --target {target} --out {source}"
    if kind in HEADS:
        return "convert it with convert_checkpoint.py and --target, the converted model that it is for"
    out = quote(f"{folder}-converted")
    return f"run {command} {source} --out {out}; then name {out}"


def known_config(checkpoint: str, max_seq_len: int | None = None) -> dict:
    """Return the config.json of a converted target that --checkpoint names; {} if it is not converted yet.

    max_seq_len: of the texts, checked against the model's maximum. Raises InputError.
    """
    if not is_converted(checkpoint):
        return {}
    config = read_config(checkpoint, "target")
    if max_seq_len is not None:
        check_length(max_seq_len, config["max_seq_len"])
    return config


def check_length(max_seq_len: int, longest: int) -> None:
    """Raise InputError unless texts may have this length. longest: the model's maximum."""
    if not 2 <= max_seq_len <= longest:
        raise InputError(f"--max-seq-len {max_seq_len}: must be 2 to {longest}, the model's maximum")


def check_exact(folder: str | Path, config: dict) -> None:
    """Raise InputError if a folder of this config.json is quantised. Experts may be, as their files are."""
    if config.get("quantization", {}).get("mode"):
        raise InputError(f"{folder}: is quantised already; name the checkpoint before quantisation")


def check_out(out: Path, kind: str, force: bool) -> None:
    """Raise InputError unless `out` is free or, with `force`, one of our folders of the same kind."""
    place = out.resolve()  # "new/.." names something else once "new" is there
    if not place.exists() and not out.is_symlink():
        return
    try:
        old = read_json(place / CONFIG)
    except InputError:
        old = {}
    if not is_ours(old):  # of any version: --force replaces old ones too
        raise InputError(f"{out}: exists and is not one of our checkpoint folders; choose another --out")
    if old["kind"] != kind:
        raise InputError(f"{out}: is of kind {old['kind']!r}, which {kind} may not replace; choose another"
                         " --out")
    if not force:
        raise InputError(f"{out}: exists; replace it with --force or choose another --out")


def verify_weights(
    checkpoint: str | Path, draft: str | Path | None, must: bool, say: Callable[[str], None]
) -> None:
    """Compare the weights of a target, of the heads inside its folder and of `draft` with their sha256.

    must: refuse a folder without one, which older versions wrote; else name it. say: prints a line. Raises
    InputError if weights are not those that were written.
    """
    heads = [Path(checkpoint, kind) for kind in HEADS if Path(checkpoint, kind, CONFIG).exists()]
    for folder in [Path(checkpoint), *heads, *([Path(draft)] if draft else [])]:
        expected, path = read_config(folder).get("sha256"), folder / WEIGHTS
        if expected is None:
            words = f"{folder / CONFIG}: has no sha256 to verify the weights with; {ADVICE} to have one"
            if must:
                raise InputError(words)
            say(words)
            continue
        check_file(path)
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if (found := digest.hexdigest()) != expected:
            raise InputError(f"{path}: its sha256 is {found}; expected {expected}: it is damaged, or was"
                             f" changed; {ADVICE}")
    say(f"verified the weights of {checkpoint}")
