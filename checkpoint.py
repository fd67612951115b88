"""Our checkpoint folder: what is in it, how it is read, how it is written.

    DIR/config.json         format, kind ("target" or one of HEADS), the fields of ModelArgs/HeadArgs, and for a target
                            `stop_ids` (all of them), `bos_id` (or null), `name`, `source`
    DIR/model.safetensors   the state dict of `Transformer` or of a head, q/k/v and gate/up fused
                            (`quantization` in the config: its linear layers are `QuantizedLinear`)
    DIR/tokenizer.*         tokenizer.json or tokenizer.model, and tokenizer_config.json / chat_template.jinja
    DIR/eagle3/, DIR/eagle/, DIR/medusa/, DIR/hydra/  heads of that target (EAGLE-2 shares EAGLE-1's), same layout
"""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from errors import CheckpointError
from guessers import HydraHeads, MedusaHeads
from model import Eagle1Head, Eagle3Head, Head, ModelArgs, Transformer, inverse_frequencies
from quantized import replace_all

FORMAT = 2
HEADS = {"eagle": Eagle1Head, "eagle3": Eagle3Head, "medusa": MedusaHeads, "hydra": HydraHeads}  # kind -> what it is built as
CONFIG, WEIGHTS = "config.json", "model.safetensors"
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


def read_json(path: Path) -> dict:
    """Parse a JSON object. Raises CheckpointError if it is missing, unreadable or not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as e:
        raise CheckpointError(f"{path}: cannot be read as JSON ({e})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def read_config(folder: str | Path, kind: str | None = None) -> dict:
    """The parsed config.json of one of our folders, checked to be ours and, if given, of this kind.

    Raises CheckpointError otherwise.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder; convert a checkpoint into it with convert_checkpoint.py first")
    config = read_json(folder / CONFIG)
    if "kind" not in config or "format" not in config:
        raise CheckpointError(f"{folder}: not converted yet; run python convert_checkpoint.py --checkpoint {folder} --out DIR")
    if config["format"] != FORMAT:
        raise CheckpointError(f"{folder}: format {config['format']} is not the {FORMAT} this version reads; convert it again")
    if kind and config["kind"] != kind:
        raise CheckpointError(f"{folder}: holds a {config['kind']} checkpoint where a {kind} was expected")
    return config


def build(config: dict) -> Transformer | Head:
    """The module a config.json describes, on the meta device (no memory). Raises CheckpointError on a bad config."""
    if config["kind"] != "target" and config["kind"] not in HEADS:
        raise CheckpointError(f"config: unknown kind {config['kind']!r}")
    try:
        with torch.device("meta"):
            if config["kind"] == "target":
                module = Transformer(ModelArgs.from_config(config))
            else:
                config = {**config, "aux_layers": tuple(config.get("aux_layers", ()))}
                head = HEADS[config["kind"]]
                module = head(head.Args.from_config(config))
            if "quantization" in config:
                replace_all(module, **config["quantization"])
            return module
    except (ValueError, TypeError) as e:
        raise CheckpointError(str(e)) from None


def check_keys(found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]], where: str) -> None:
    """Compare tensor names and shapes both ways. Raises CheckpointError naming the first difference."""
    for name, shape in wanted.items():
        if name not in found:
            raise CheckpointError(f"{where}: tensor {name} {list(shape)} is missing")
        if tuple(found[name]) != tuple(shape):
            raise CheckpointError(f"{where}: tensor {name} has shape {list(found[name])}, expected {list(shape)}")
    for name in found:
        if name not in wanted:
            raise CheckpointError(f"{where}: unexpected tensor {name} {list(found[name])}")


def _load(folder: Path, config: dict, device: torch.device | str, dtype: torch.dtype | None):
    module = build(config)
    made = module.state_dict()
    wanted = {name: tuple(t.shape) for name, t in made.items()}
    path = folder / WEIGHTS
    state = {}
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            names = file.keys()
            check_keys({k: tuple(file.get_slice(k).get_shape()) for k in names}, wanted, str(path))
            for name in wanted:
                tensor = file.get_tensor(name)
                # What belongs to quantised weights stays as it is.
                stored = name.endswith(".scale") or not {tensor.dtype, made[name].dtype} <= set(CASTABLE)
                if stored and tensor.dtype != made[name].dtype:
                    raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype}, {CONFIG} says {made[name].dtype}; quantise again")
                state[name] = tensor if stored or dtype is None else tensor.to(dtype)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; convert the checkpoint again") from None
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{path}: damaged ({e}); convert the checkpoint again") from None
    module.load_state_dict(state, assign=True)
    module.inv_freq = inverse_frequencies(module.args).to(device)  # float32 whatever the model's dtype
    return module.requires_grad_(False).eval()


def identity(model: torch.nn.Module) -> str:
    """A digest that tells models apart, also fine-tunes of one another: of the dtypes and of a thousand values of every weight."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        some = p.detach().flatten()[:: max(1, p.numel() // 1024)].float().cpu()
        digest.update(f"{name} {p.dtype}".encode() + some.numpy().tobytes())
    return digest.hexdigest()


def load_target(folder: str | Path, device="cpu", dtype: torch.dtype | None = None) -> tuple[Transformer, dict]:
    """Load a converted target -> (model, its config.json). `dtype` None keeps the stored one.

    Raises CheckpointError with a one-line message on anything that is missing, damaged or of another kind.
    """
    config = read_config(folder, "target")
    return _load(Path(folder), config, device, dtype), config


def load_head(folder: str | Path, target: Transformer, kind: str | None = None) -> Head:
    """Load a converted head, of this kind if given, in its target's dtype, on its device, and tie it to that target.

    Raises CheckpointError if it is missing, damaged, of another kind or does not fit.
    """
    config = read_config(folder, kind)
    if config["kind"] not in HEADS:
        raise CheckpointError(f"{folder}: holds a {config['kind']} checkpoint where a draft head was expected")
    check_head_fits(config, target.args, str(folder))
    head = _load(Path(folder), config, target.embed.weight.device, target.embed.weight.dtype)
    head.use_target(target)
    return head


def check_head_fits(config: dict, target: ModelArgs, where: str) -> None:
    """Raise CheckpointError unless a head's config.json fits this target: vocabulary, hidden size, aux layers."""
    pairs = (("vocabulary", "vocab_size", target.vocab_size), ("target hidden size", "target_hidden_size", target.hidden_size))
    for what, key, want in pairs:
        if config.get(key) != want:
            raise CheckpointError(f"{where}: the head was made for another target: {what} {config.get(key)}, this target has {want}")
    if not config.get("own_embedding") and config["hidden_size"] != target.hidden_size:
        raise CheckpointError(
            f"{where}: the head's width {config['hidden_size']} differs from the target's {target.hidden_size}"
            " and it carries no embedding of its own"
        )
    if not config.get("own_lm_head", True) and not config.get("tie_embeddings") and config["hidden_size"] != target.hidden_size:
        raise CheckpointError(
            f"{where}: the head's width {config['hidden_size']} differs from the target's {target.hidden_size}"
            " and it carries no lm_head of its own"
        )
    last = max(config["aux_layers"])
    if min(config["aux_layers"]) < 0 or last > target.num_layers:
        raise CheckpointError(f"{where}: the head reads layer {last}, the target has {target.num_layers} layers")
