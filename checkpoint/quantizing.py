"""Quantise a converted checkpoint, once: int8, int4 or fp8 weights.

    python quantize.py --checkpoint checkpoints/smollm2-135m --mode int8            # into checkpoints/smollm2-135m-int8
    python quantize.py --checkpoint checkpoints/smollm2-135m --mode int4 --group 64 --text sample.txt

A target takes its heads along, each quantised the same way; a head's own folder works too. One tensor is in
memory at a time. Every layer's relative error is reported and, with --text, how often the quantised model's
next token is the original's, and both perplexities. `generate.py` reads the result like any other checkpoint.
"""
from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from checkpoint.folder import CONFIG, WEIGHTS, check_keys, read_config
from checkpoint.loading import build_module, load_model
from checkpoint.source import Entry
from checkpoint.writer import WRITTEN_DTYPES, Planned, check_out, write_folder
from common.errors import InputError
from kernels.quantized import QuantizedLinear, QuantizedStack, scales, stored, whole
from tokens.tokenizer import Tokenizer


def entry(read: Callable[[], Tensor], like: Tensor, dtype: torch.dtype) -> Entry:
    """A tensor to write, read when its turn comes."""
    def blocks() -> Iterator[Tensor]:
        yield read()

    return Entry(tuple(like.shape), dtype, blocks)


def check_source(folder: Path) -> dict:
    """The config of a folder that can be quantised. Raises InputError unless it is ours, not quantised yet,
    and its weights are there, whole, and what the config says.
    """
    config, path = read_config(folder), folder / WEIGHTS
    if "quantization" in config:
        raise InputError(f"{folder}: is quantised already")
    try:
        with safe_open(path, framework="pt") as file:
            found = {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()}  # noqa: SIM118
            odd = next(
                (k for k in found if file.get_slice(k).get_dtype() not in WRITTEN_DTYPES.values()), None
            )
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; convert the checkpoint again") from None
    except (SafetensorError, OSError) as e:
        raise InputError(f"{path}: damaged ({e}); convert the checkpoint again") from None
    if odd:
        raise InputError(
            f"{path}: tensor {odd} is of a type that is not written here; convert the checkpoint again"
        )
    check_keys(
        found, {name: tuple(t.shape) for name, t in build_module(config).state_dict().items()}, str(path)
    )
    return config


def planned(config: dict, source: Path, mode: str, group: int, lm_head: bool) -> tuple[dict, torch.nn.Module]:
    """(the config.json of a folder once it is quantised, the module it describes). Raises InputError if it
    cannot be.
    """
    tied = config["kind"] == "target" and config.get("tie_embeddings", False)
    config = {
        **config, "quantization": {"mode": mode, "group": group if mode == "int4" else 0, "lm_head": lm_head}
    }
    if tied and lm_head:
        config["tie_embeddings"] = False
    try:
        return config, build_module(config)
    except InputError as e:
        raise InputError(f"{source}: {e}; choose another --group") from None


def quantize(
    source: Path, out: Path, mode: str, group: int = 64, lm_head: bool = True, force: bool = False
) -> list[tuple[str, float]]:
    """Write `source`, one of our folders, quantised to `out`. Returns the relative error of every quantised
    layer.

    A target's tied lm_head becomes a quantised matrix of its own beside the table. Raises InputError on a
    folder that is not ours, damaged, quantised already, or whose layers the group does not divide.
    """
    config = check_source(source)
    check_out(out, config["kind"], force)
    plain_names = {name: tuple(t.shape) for name, t in build_module(config).state_dict().items()}
    config, module = planned(config, source, mode, group, lm_head)
    errors: dict[str, float] = {}
    found_scales: dict[str, Tensor] = {}  # the writer asks for them before it asks for the weights
    with safe_open(source / WEIGHTS, framework="pt") as file:
        def entry_of(name: str, tensor: Tensor) -> Planned:
            layer, _, leaf = name.rpartition(".")
            owner = module.get_submodule(layer)
            if not isinstance(owner, (QuantizedLinear, QuantizedStack)) or leaf == "bias":
                dtype = next(
                    d for d, known in WRITTEN_DTYPES.items() if known == file.get_slice(name).get_dtype()
                )
                return Planned(
                    name, tuple(tensor.shape), dtype, [entry(lambda: file.get_tensor(name), tensor, dtype)]
                )
            # A linear layer, a stack of experts, or the tied lm_head, which the file has as the embedding.
            given = next(n for n in (f"{layer}.weight", layer, "embed.weight") if n in plain_names)

            def scale() -> Tensor:
                found_scales[layer] = scales(file.get_tensor(given), mode, owner.group)
                return found_scales[layer]

            def weight() -> Tensor:
                exact = file.get_tensor(given)
                if not bool(exact.isfinite().all()):
                    raise InputError(f"{source / WEIGHTS}: tensor {given} holds values that are not finite")
                kept = stored(exact, found_scales[layer], mode)
                error = whole(kept, found_scales[layer], torch.float32) - exact.float()
                errors[layer] = float(error.norm() / exact.float().norm().clamp(min=1e-30))
                return kept

            read = weight if leaf == "weight" else scale
            return Planned(name, tuple(tensor.shape), tensor.dtype, [entry(read, tensor, tensor.dtype)])

        def others(folder: Path) -> bool:
            """Everything else of the folder: tokenizer, template."""
            for item in source.iterdir():
                if item.is_file() and item.name not in (CONFIG, WEIGHTS, "tree.json"):
                    shutil.copy2(item, folder / item.name)
            return True

        plan = [entry_of(name, tensor) for name, tensor in module.state_dict().items()]
        write_folder(out, config, plan, others, quiet=False)
    return sorted(errors.items())


def text_ids(source: Path, text: Path, tokens: int = 16384) -> Tensor:
    """The first `tokens` tokens of a text. Raises InputError if it is unreadable or too short, or there is no
    tokenizer.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"--text {text}: cannot be read ({e})") from None
    tokenizer = Tokenizer.load(source)
    if tokenizer is None:
        raise InputError(f"{source}: comparing on a text needs a tokenizer")
    ids = torch.tensor(tokenizer.encode(content[: 16 * tokens])[:tokens])
    if len(ids) < 16:
        raise InputError(f"--text {text}: {len(ids)} tokens are too few to compare on")
    return ids


@torch.no_grad()
def compare(source: Path, out: Path, ids: Tensor, length: int = 512) -> dict:
    """How the quantised target reads a text, against the original: perplexity of both, next-token agreement.

    The tokens `ids` [N] of a text, in pieces of `length`.
    """
    models = [load_model(folder)[0] for folder in (source, out)]
    loss, same, count = [0.0, 0.0], 0, 0
    for piece in tqdm(ids.split(length), desc="comparing", disable=not sys.stderr.isatty()):
        if len(piece) < 2:
            continue
        logits = [model.logits(model.causal(piece[None])[0])[0, :-1] for model in models]
        for i, l in enumerate(logits):  # noqa: E741
            loss[i] += float(F.cross_entropy(l, piece[1:], reduction="sum"))
        same += int((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
        count += len(piece) - 1
    return {
        "tokens": count, "agreement": same / count,
        "perplexity": math.exp(loss[0] / count), "quantised_perplexity": math.exp(loss[1] / count),
    }
