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
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from common.errors import InputError
from common.files import check_file, read_json
from common.schema import ABSENT, Flag, Schema, Sha256, Text, Wrong, named, number, schema_of, whole
from kernels.quantized import Scheme
from model import ModelArgs
from networks.block import BlockHead, DSparkHead
from networks.eagle import Eagle1Head, Eagle3Head, MtpHead, PEagleHead
from networks.medusa import HydraHeads, MedusaHeads

FORMAT = 2
CONFIG, WEIGHTS = "config.json", "model.safetensors"
ADVICE = "convert the checkpoint again"
# The network of each kind of draft head. Their layouts in other programs' files are in `checkpoint.heads`.
HEADS = {
    "eagle": Eagle1Head, "eagle3": Eagle3Head, "p-eagle": PEagleHead, "medusa": MedusaHeads,
    "hydra": HydraHeads, "dflash": BlockHead, "dspark": DSparkHead, "mtp": MtpHead,
}

# Keys of every config.json of ours, beside the fields of `ModelArgs` or `HeadArgs`.
FOLDER = Schema(TypedDict("Folder", {
    "kind": Literal[("target", *HEADS)], "format": NotRequired[whole(1, 1000)],
    "name": NotRequired[Text], "source": NotRequired[Text], "sha256": NotRequired[Sha256],
    "stop_ids": NotRequired[list[whole()]], "bos_id": NotRequired[whole() | None],
    "quantization": NotRequired[dict],
}))

Factor, Length = number(1e-3, 1e6), number(1, 2**31)
Divisors = Annotated[list[Factor], Field(min_length=1, max_length=2**15)]
# The fields of `rope_scaling` by its type, see `model.inverse_frequencies`.
ROPE = {
    "default": {},
    "linear": {"factor": Factor},
    "llama3": {
        "factor": Factor, "low_freq_factor": Factor, "high_freq_factor": Factor,
        "original_max_position_embeddings": Length,
    },
    "yarn": {
        "factor": Factor, "original_max_position_embeddings": Length,
        **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), NotRequired[Factor | None]),
        **dict.fromkeys(("mscale", "mscale_all_dim"), NotRequired[number(0, 1e6) | None]),
        "truncate": NotRequired[Flag | None],
    },
    "divisors": {
        "divisors": Divisors, "attention_factor": NotRequired[Factor | None],
        # longrope's, for texts that are longer than the original length.
        "long_divisors": NotRequired[Divisors], "original_max_position_embeddings": NotRequired[Length],
    },
}
ROPE_SCHEMAS = {kind: Schema(TypedDict(f"Rope_{kind}", keys)) for kind, keys in ROPE.items()}


def check_rope(scaling: dict, key: str = "rope_scaling") -> None:
    """Raise Wrong unless these are the parameters of a rope scaling that we compute."""
    place = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.get(place, ABSENT)
    if not isinstance(kind, str) or kind not in ROPE:
        raise Wrong(f"{key}.{place}", kind, f"one that is supported: {', '.join(ROPE)}")
    ROPE_SCHEMAS[kind].check(scaling, key)


def check_args(args: ModelArgs) -> None:
    """Raise Wrong if a field of a model's shape is out of its range, or if fields contradict each other."""
    schema_of(type(args)).check(asdict(args))
    _check_relations(args)


def _check_relations(a: ModelArgs) -> None:
    scaling = a.rope_scaling or {}
    divisors = [scaling[key] for key in ("divisors", "long_divisors") if key in scaling]
    kind = scaling.get("rope_type", scaling.get("type"))
    if a.rope_scaling is not None:
        check_rope(a.rope_scaling)
    rules = [
        ("num_kv_heads", a.num_heads % a.num_kv_heads == 0, f"a divisor of num_heads, {a.num_heads}"),
        ("head_dim", a.head_dim % 2 == 0, "an even number: rotary embedding needs pairs"),
        ("experts_per_token", not a.num_experts or 1 <= a.experts_per_token <= a.num_experts,
         f"1 to num_experts, {a.num_experts}"),
        ("rope_scaling", all(len(each) == a.head_dim // 2 for each in divisors),
         f"{a.head_dim // 2} divisors, half of head_dim"),
        ("local_rope_base", a.local_rope_base is None or kind not in ("yarn", "divisors"),
         "null: rope_scaling has a factor of cos and sin"),
    ]
    has = vars(a).get
    if (aux := has("aux_layers")) is not None:
        rules += [
            ("draft_vocab_size", a.draft_vocab_size <= a.vocab_size, f"at most vocab_size, {a.vocab_size}"),
            ("aux_layers", all(low < high for low, high in pairwise(aux)), "ascending layers"),
        ]
    if has("mask_id") is not None:
        rules += [("mask_id", a.mask_id < a.vocab_size, f"an id below vocab_size, {a.vocab_size}")]
    for key, fits, expected in rules:
        if not fits:
            raise Wrong(key, getattr(a, key), expected)


def check_config(config: dict) -> ModelArgs:
    """Return the model's shape in a config.json. Raises Wrong on the first key that is not right."""
    FOLDER.check(config)
    kind = config["kind"]
    shape = ModelArgs if kind == "target" else HEADS[kind].Args
    schema_of(shape).check(config)
    args = shape.from_config(config)
    _check_relations(args)
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
