"""Load our checkpoint folders: the modules that their configs describe, with their weights."""
from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch

from checkpoint.folder import ADVICE, CONFIG, HEADS, WEIGHTS, check_config, class_of, read_config
from checkpoint.weights import Stored, bytes_of, check_shapes, listed, opened
from common.errors import InputError
from common.schema import named
from head import Head, HeadArgs
from kernels.quantized import Scheme, replace_all
from kernels.tp import Ranks, Share, deal
from model import Linear, ModelArgs, Transformer, blank

CASTABLE = {torch.float32, torch.bfloat16, torch.float16}


def build_module(config: dict, share: Share | None = None) -> Transformer | Head:
    """Return the module that a config.json describes, on the meta device, where it takes no memory.

    share: the part of one of several ranks. Raises Wrong, a ValueError, on a bad config.
    """
    args = check_config(config)
    own = share.args(args) if share else args
    with blank():
        module = class_of(config)(own)
        if share and module.lm_head is not None:
            module.lm_head = Linear(args.hidden_size, share.tokens.count, bias=False)
        if "quantization" in config:
            replace_all(module, Scheme.read(config["quantization"]))
    return module


def load_model(
    folder: str | Path, device="cpu", dtype: torch.dtype | None = None, ranks: Ranks | None = None
) -> tuple[Transformer, dict]:
    """Load a converted target -> (model, its config.json). `dtype` None keeps the stored one.

    ranks: read this rank's part of it only, and let it compute with the others. Raises InputError on
    anything that is missing, damaged or of another kind, or cannot be dealt.
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

    Raises InputError if it is missing, damaged, not of the kind `kind`, or does not fit the target.
    """
    config = read_config(folder, kind)
    if config["kind"] not in HEADS:
        raise InputError(f"{folder}: is of kind {config['kind']}, expected a draft head; name another folder")
    check_head_fits(check_config(config), target.args, str(folder))
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
    path = folder / WEIGHTS
    module = described(folder, config, listed(path, ADVICE))
    if share:
        module = build_module(config, share)
    state = {}
    for name, meta in module.state_dict().items():
        # A tensor is a view of the mapped file. Each has a mapping of its own, so that its memory is free
        # as soon as it has been packed, not when all have.
        with opened(path, ADVICE, device) as file:
            tensor = share.take(name, file) if share else file.get_tensor(name)
        # Quantised weights and their scales are never cast.
        fixed = name.endswith(".scale") or not {tensor.dtype, meta.dtype} <= CASTABLE
        if fixed and tensor.dtype != meta.dtype:
            raise InputError(f"{path}: tensor {name} is {tensor.dtype}, {CONFIG} says {meta.dtype}; quantise"
                             " again")
        state[name] = tensor if fixed or dtype is None else tensor.to(dtype)
    ids, ours = state.get("draft_ids"), range(module.args.vocab_size)
    if ids is not None and not (int(ids.min()) in ours and int(ids.max()) in ours):
        raise InputError(f"{path}: draft_ids are not those of this vocabulary; {ADVICE}")
    module.load_state_dict(state, assign=True)
    module.inv_freq = module.args.inverse_frequencies().to(device)  # float32 whatever the model's dtype
    return module.requires_grad_(False).eval()


def described(folder: Path, config: dict, stored: dict[str, Stored]) -> Transformer | Head:
    """Return the module that a folder's config describes, without numbers. stored: its weights by name.

    Raises InputError if the weights are not those of the config.
    """
    with named(folder / CONFIG, ADVICE):
        module = build_module(config)
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    check_shapes({name: s.shape for name, s in stored.items()}, shapes, str(folder / WEIGHTS))
    return module


def check_head_fits(head: HeadArgs, target: ModelArgs, where: str) -> None:
    """Raise InputError unless a head fits this target: vocabulary, hidden size, aux layers."""
    sizes = [
        ("vocabulary", head.vocab_size, target.vocab_size),
        ("target hidden size", head.target_hidden_size, target.hidden_size)]
    if not (head.own_embedding and (head.own_lm_head or head.tie_embeddings)):
        sizes += [("width", head.hidden_size, target.hidden_size)]
    for what, found, size in sizes:
        if found != size:
            raise InputError(f"{where}: the head was made for another target: {what} {found}, this target"
                             f" has {size}")
    if (last := max(head.aux_layers)) > target.num_layers:
        raise InputError(f"{where}: the head reads layer {last}, the target has {target.num_layers} layers")


def identity(model: torch.nn.Module) -> str:
    """Return a digest of the dtype and a thousand values of every weight: fine-tunes differ in it, too."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        some = p.detach().flatten()[:: max(1, p.numel() // 1024)]
        digest.update(f"{name} {some.dtype}".encode() + some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def shares_of(config: dict, count: int) -> list[Share]:
    """Return what each of `count` ranks has of the target, or the head, that a config.json describes.

    Raises InputError, with the numbers, if `count` ranks cannot share it; every rank raises the same.
    """
    args = check_config(config)
    scheme = Scheme.read(config["quantization"]) if "quantization" in config else None
    tokens = config.get("draft_vocab_size")
    return [Share.of(args, scheme, rank, count, tokens) for rank in range(count)]


def weigh(folder: Path, dtype: torch.dtype | None, shares: list[Share]) -> tuple[int, int, int]:
    """Return the bytes of a target's weights in this dtype (None: as stored).

    In all, of the rank that holds most, and of what every rank holds. Only the file's header is read. Raises
    InputError if there is no such file, or it is damaged.
    """
    held, whole, total = [0] * len(shares), 0, 0
    for name, stored in listed(folder / WEIGHTS, ADVICE).items():
        size, shape = bytes_of(name, stored, dtype), stored.shape
        total += math.prod(shape) * size
        whole += math.prod(shape) * size if shares[0].cut(name, shape) is None else 0
        for rank, share in enumerate(shares):
            held[rank] += math.prod(share.shape(name, shape)) * size
    return total, max(held), whole
