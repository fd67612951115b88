"""Names in our checkpoint folder (`checkpoint.folder`), and what can be told of one before torch is there."""
from __future__ import annotations

from pathlib import Path

from common.errors import InputError
from common.files import read_json
from common.schema import in_words

FORMAT = 2
HEAD_KINDS = ("eagle", "eagle3", "p-eagle", "medusa", "hydra", "dflash", "dspark")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
CALIBRATION = "calibration.json"  # beside a head's weights: what its trees are accepted for
LAYOUTS = ("sglang", "speculators")  # that heads are written in, see `checkpoint.exporting`
# `architectures` of the heads that are exported, by kind, in each of LAYOUTS. For an EAGLE-1 head vLLM wants
# "LlamaForCausalLM" there, SGLang what we write; the EAGLE repository does not look.
ARCHITECTURES = {
    "eagle3": ("LlamaForCausalLMEagle3", "Eagle3Speculator"), "eagle": ("LlamaForCausalLMEagle",),
    "medusa": ("MedusaModel",), "hydra": ("HydraModel",),
    "p-eagle": ("LlamaForCausalLMEagle3", "PEagleDraftModel"),
    "dflash": ("DFlashDraftModel", "DFlashDraftModel"), "dspark": ("Qwen3DSparkModel", "DSparkDraftModel"),
}
ADVICE = "convert the checkpoint again"


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix.lower() == ".gguf"


def is_ours(config: dict) -> bool:
    """Whether a config.json is that of a converted checkpoint, of any version."""
    return {"format", "kind"} <= config.keys()


def glance(folder: str | Path, kind: str | None = None) -> dict:
    """The config.json of one of our folders, of which only the format is judged.

    Raises InputError if the folder is not ours, or not of this kind, if a kind is asked for.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"{folder}: not a folder; convert a checkpoint into it with convert_checkpoint.py first"
        )
    config = read_json(folder / CONFIG)
    if not is_ours(config):
        raise InputError(
            f"{folder}: not converted yet; run python convert_checkpoint.py --checkpoint {folder} --out DIR"
        )
    if config["format"] != FORMAT or isinstance(config["format"], float):
        raise InputError(
            f"{folder}: format {in_words(config['format'])} is not the {FORMAT} this version reads;"
            " convert it again"
        )
    if config["kind"] in ("target", *HEAD_KINDS):  # else it is damaged, and the key is what is to be named
        check_kind(folder, config, kind)
    return config


def check_kind(folder: str | Path, config: dict, kind: str | None) -> None:
    """Raise InputError if a kind is asked for and a folder's config is of another one."""
    if kind and config["kind"] != kind:
        raise InputError(f"{folder}: holds a {config['kind']} checkpoint where a {kind} was expected")
