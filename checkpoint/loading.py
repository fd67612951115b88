"""Reading our checkpoint folders: the modules that their configs describe, with their weights."""
from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from checkpoint.folder import CONFIG, HEAD_KINDS, WEIGHTS, check_shapes, read_config
from checkpoint.shards import shares_of
from common.errors import InputError
from kernels.parallel import Share, deal
from kernels.quantized import Scheme, replace_all
from kernels.ranks import Ranks
from model import Linear, ModelArgs, Transformer, blank, inverse_frequencies
from networks.block import BlockHead
from networks.eagle import Eagle1Head, Eagle3Head, PEagleHead
from networks.head import Head
from networks.hydra import HydraHeads
from networks.medusa import MedusaHeads

# Kind: its class.
CLASSES = Eagle1Head, Eagle3Head, PEagleHead, MedusaHeads, HydraHeads, BlockHead, BlockHead
HEADS = dict(zip(HEAD_KINDS, CLASSES, strict=True))
CASTABLE = {torch.float32, torch.bfloat16, torch.float16}


def build_module(config: dict, share: Share | None = None) -> Transformer | Head:
    """The module that a config.json describes, on the meta device, where it takes no memory.

    share: what one of several ranks has of it. Raises InputError on a bad config.
    """
    kind = config["kind"]
    if kind != "target" and kind not in HEADS:
        raise InputError(f"config: unknown kind {kind!r}")
    try:
        with blank():
            if kind == "target":
                make, args = Transformer, ModelArgs.from_config(config)
            else:
                make, aux_layers = HEADS[kind], tuple(config.get("aux_layers", ()))
                args = make.Args.from_config({**config, "aux_layers": aux_layers})
            module = make(share.args(args) if share else args)
            if share and module.lm_head is not None:
                module.lm_head = Linear(args.hidden_size, share.tokens.count, bias=False)
            if "quantization" in config:
                replace_all(module, Scheme.read(config["quantization"]))
            return module
    except (ValueError, TypeError) as e:
        raise InputError(str(e)) from None


def state_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a module's file has to hold."""
    return {name: tuple(t.shape) for name, t in module.state_dict().items()}


def load_model(
    folder: str | Path, device="cpu", dtype: torch.dtype | None = None, ranks: Ranks | None = None
) -> tuple[Transformer, dict]:
    """Load a converted target -> (model, its config.json). `dtype` None keeps the stored one.

    ranks: read this rank's part of it only, and let it compute with the others. Raises InputError with a
    one-line message on anything that is missing, damaged or of another kind, or cannot be dealt.
    """
    config = read_config(folder, "target")
    if ranks is None:
        return _load(Path(folder), config, device, dtype), config
    shares = shares_of(config, ranks.count)
    model = _load(Path(folder), config, device, dtype, shares[ranks.rank])
    deal(model, shares, ranks)
    return model, config


def load_head(folder: str | Path, target: Transformer, kind: str | None = None) -> Head:
    """Load a converted head in its target's dtype and on its device, and tie it to that target.

    Raises InputError if it is missing, damaged, not of this kind (if one is asked for) or does not fit.
    """
    config = read_config(folder, kind)
    if config["kind"] not in HEADS:
        raise InputError(f"{folder}: holds a {config['kind']} checkpoint where a draft head was expected")
    check_head_fits(config, target.args, str(folder))
    where = target.embed.weight.device, target.embed.weight.dtype
    if target.ranks and (ranks := target.ranks.of_heads):
        shares = shares_of(config, ranks.count)
        head = _load(Path(folder), config, *where, shares[ranks.rank])
        deal(head, shares, ranks)
    else:
        head = _load(Path(folder), config, *where)
    head.use_target(target)
    return head


def _load(
    folder: Path, config: dict, device: torch.device | str, dtype: torch.dtype | None,
    share: Share | None = None,
):
    module = build_module(config, share)
    path = folder / WEIGHTS
    state = {}
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        check_shapes(shapes, state_shapes(build_module(config) if share else module), str(path))
        for name, meta in module.state_dict().items():
            # A tensor is a view of the mapped file. Each has a mapping of its own, so that its memory is free
            # as soon as it has been packed, not when all have.
            with safe_open(path, framework="pt", device=str(device)) as file:
                tensor = share.take(name, file) if share else file.get_tensor(name)
            # Quantised weights and their scales are never cast.
            fixed = name.endswith(".scale") or not {tensor.dtype, meta.dtype} <= CASTABLE
            if fixed and tensor.dtype != meta.dtype:
                raise InputError(
                    f"{path}: tensor {name} is {tensor.dtype}, {CONFIG} says {meta.dtype}; quantise again"
                )
            state[name] = tensor if fixed or dtype is None else tensor.to(dtype)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; convert the checkpoint again") from None
    except (SafetensorError, OSError) as e:
        raise InputError(f"{path}: damaged ({e}); convert the checkpoint again") from None
    module.load_state_dict(state, assign=True)
    module.inv_freq = inverse_frequencies(module.args).to(device)  # float32 whatever the model's dtype
    return module.requires_grad_(False).eval()


def check_head_fits(config: dict, target: ModelArgs, where: str) -> None:
    """Raise InputError unless a head's config.json fits this target: vocabulary, hidden size, aux layers."""
    sizes = (
        ("vocabulary", "vocab_size", target.vocab_size),
        ("target hidden size", "target_hidden_size", target.hidden_size),
    )
    for what, key, size in sizes:
        if config.get(key) != size:
            raise InputError(
                f"{where}: the head was made for another target: {what} {config.get(key)}, this target has"
                f" {size}"
            )
    width = config["hidden_size"]
    own = {
        "embedding": config.get("own_embedding"),
        "lm_head": config.get("own_lm_head", True) or config.get("tie_embeddings"),
    }
    for matrix, has_own in own.items():
        if not has_own and width != target.hidden_size:
            raise InputError(
                f"{where}: the head's width {width} differs from the target's {target.hidden_size}"
                f" and it carries no {matrix} of its own"
            )
    last = max(config["aux_layers"])
    if min(config["aux_layers"]) < 0 or last > target.num_layers:
        raise InputError(f"{where}: the head reads layer {last}, the target has {target.num_layers} layers")


def identity(model: torch.nn.Module) -> str:
    """A digest that tells models apart, also fine-tunes of one another.

    It covers the dtype and a thousand values of every weight.
    """
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        values = p.detach().flatten()[:: max(1, p.numel() // 1024)].float().cpu()
        digest.update(f"{name} {p.dtype}".encode() + values.numpy().tobytes())
    return digest.hexdigest()
