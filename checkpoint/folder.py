"""Our checkpoint folder: what is in it, and how its config is read.

    DIR/config.json         format, kind ("target" or one of HEAD_KINDS), the fields of ModelArgs or HeadArgs;
                            for a target also `stop_ids` (all of them), `bos_id` (or null), `name`, `source`
    DIR/model.safetensors   the state dict of `Transformer` or of a head, q/k/v and gate/up fused
                            (with `quantization` in the config, its linear layers are `QuantizedLinear`)
    DIR/tokenizer.*         tokenizer.json or tokenizer.model, tokenizer_config.json, chat_template.jinja
    DIR/KIND/               heads of that target in the same format, a folder for each of HEAD_KINDS; EAGLE-1
                            and EAGLE-2 share one; also
                            calibration.json (`engine.calibration`) and costs.json (`engine.costs`)
"""
from __future__ import annotations

from pathlib import Path

from common.errors import InputError
from common.files import read_json

FORMAT = 2
HEAD_KINDS = ("eagle", "eagle3", "p-eagle", "medusa", "hydra", "dflash", "dspark")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
CALIBRATION = "calibration.json"  # beside a head's weights: what its trees are accepted for
Shapes = dict[str, tuple[int, ...]]


def read_config(folder: str | Path, kind: str | None = None) -> dict:
    """The parsed config.json of one of our folders.

    Raises InputError if the folder is not ours, or not of this kind (if a kind is asked for).
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"{folder}: not a folder; convert a checkpoint into it with convert_checkpoint.py first"
        )
    config = read_json(folder / CONFIG)
    if "kind" not in config or "format" not in config:
        raise InputError(
            f"{folder}: not converted yet; run python convert_checkpoint.py --checkpoint {folder} --out DIR"
        )
    if config["format"] != FORMAT:
        raise InputError(
            f"{folder}: format {config['format']} is not the {FORMAT} this version reads; convert it again"
        )
    if kind and config["kind"] != kind:
        raise InputError(f"{folder}: holds a {config['kind']} checkpoint where a {kind} was expected")
    return config


def check_shapes(shapes: Shapes, expected: Shapes, where: str) -> None:
    """Compare tensor names and shapes both ways. Raises InputError naming the first difference."""
    for name, shape in expected.items():
        if name not in shapes:
            raise InputError(f"{where}: tensor {name} {list(shape)} is missing")
        if tuple(shapes[name]) != tuple(shape):
            raise InputError(f"{where}: tensor {name} has shape {list(shapes[name])}, expected {list(shape)}")
    for name in shapes:
        if name not in expected:
            raise InputError(f"{where}: unexpected tensor {name} {list(shapes[name])}")
