"""Quantising a converted checkpoint: the folder that is written, and what it is worth on a text.

One tensor is in memory at a time. `quantize.py` is the command.
"""
from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint.folder import CONFIG, WEIGHTS, check_shapes, read_config
from checkpoint.loading import build_module, load_model, state_shapes
from checkpoint.source import Entry
from checkpoint.writer import WRITTEN_DTYPES, Planned, check_out, write_folder
from common.errors import InputError
from kernels.quantized import QuantizedLinear, QuantizedStack, dequantize, scales, to_stored
from tokens.tokenizer import Tokenizer


def check_source(folder: Path) -> dict:
    """The config of a folder that can be quantised.

    Raises InputError unless the folder is ours, not quantised yet, and its weights are complete and what the
    config says.
    """
    config, path = read_config(folder), folder / WEIGHTS
    if "quantization" in config:
        raise InputError(f"{folder}: is quantised already")
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
            odd = [n for n, tensor in slices.items() if tensor.get_dtype() not in WRITTEN_DTYPES.values()]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; convert the checkpoint again") from None
    except (SafetensorError, OSError) as e:
        raise InputError(f"{path}: damaged ({e}); convert the checkpoint again") from None
    if odd:
        raise InputError(
            f"{path}: tensor {odd[0]} is of a type that is not written here; convert the checkpoint again"
        )
    check_shapes(shapes, state_shapes(build_module(config)), str(path))
    return config


def quantized_module(
    config: dict, source: Path, mode: str, group: int, lm_head: bool
) -> tuple[dict, nn.Module]:
    """(The config.json of a folder once it is quantised, the module that it describes).

    Raises InputError if a group does not divide a layer.
    """
    group = group if mode == "int4" else 0
    config = {**config, "quantization": {"mode": mode, "group": group, "lm_head": lm_head}}
    if config["kind"] == "target" and config.get("tie_embeddings") and lm_head:
        config["tie_embeddings"] = False  # the lm_head becomes a quantised matrix beside the embedding
    try:
        return config, build_module(config)
    except InputError as e:
        raise InputError(f"{source}: {e}; choose another --group") from None


@dataclass
class _LayerWriter:
    """Quantises one layer when the writer asks for it: first for the scales, then for the weight.

    read_exact: reads the unquantised weight. where: the file and the tensor that it is, for errors.
    """

    read_exact: Callable[[], Tensor]
    where: str
    mode: str
    group: int
    scale: Tensor | None = None
    error: float = 0.0  # relative, of the quantised weight

    def read_scale(self) -> Tensor:
        self.scale = scales(self.read_exact(), self.mode, self.group)
        return self.scale

    def read_weight(self) -> Tensor:
        exact = self.read_exact()
        if not bool(exact.isfinite().all()):
            raise InputError(f"{self.where} holds values that are not finite")
        weight = to_stored(exact, self.scale, self.mode)
        error = dequantize(weight, self.scale, torch.float32) - exact.float()
        self.error = float(error.norm() / exact.float().norm().clamp(min=1e-30))
        return weight


def quantize_folder(
    source: Path, out: Path, mode: str, group: int = 64, lm_head: bool = True, force: bool = False
) -> list[tuple[str, float]]:
    """Write `source`, one of our folders, quantised to `out` -> (name, relative error) of every such layer.

    A target's tied lm_head becomes a quantised matrix of its own beside the table. Raises InputError on a
    folder that is not ours, damaged, quantised already, or whose layers the group does not divide.
    """
    config = check_source(source)
    check_out(out, config["kind"], force)
    names = state_shapes(build_module(config)).keys()
    config, module = quantized_module(config, source, mode, group, lm_head)
    layers: dict[str, _LayerWriter] = {}
    dtypes = {name: dtype for dtype, name in WRITTEN_DTYPES.items()}

    def others(folder: Path) -> bool:
        """Copy everything else in the folder: tokenizer, template."""
        for item in source.iterdir():
            if item.is_file() and item.name not in (CONFIG, WEIGHTS, "costs.json"):
                shutil.copy2(item, folder / item.name)
        return True

    with safe_open(source / WEIGHTS, framework="pt") as file:

        def planned(name: str, tensor: Tensor) -> Planned:
            layer, _, leaf = name.rpartition(".")
            owner = module.get_submodule(layer)
            if not isinstance(owner, (QuantizedLinear, QuantizedStack)) or leaf == "bias":
                dtype, read = dtypes[file.get_slice(name).get_dtype()], lambda: file.get_tensor(name)
            else:
                if layer not in layers:
                    # A linear layer, a stack of experts, or the tied lm_head, whose weight is the embedding.
                    exact = next(n for n in (f"{layer}.weight", layer, "embed.weight") if n in names)
                    where = f"{source / WEIGHTS}: tensor {exact}"
                    layers[layer] = _LayerWriter(lambda: file.get_tensor(exact), where, mode, owner.group)
                dtype = tensor.dtype
                read = layers[layer].read_weight if leaf == "weight" else layers[layer].read_scale
            return Planned(name, tuple(tensor.shape), dtype, [Entry.of(tensor.shape, dtype, read)])

        plan = [planned(name, tensor) for name, tensor in module.state_dict().items()]
        write_folder(out, config, plan, others, quiet=False)
    return sorted((name, layer.error) for name, layer in layers.items())


def text_ids(source: Path, text: Path, tokens: int = 16384) -> Tensor:
    """The first `tokens` tokens of a text, [N] int64.

    Raises InputError if the text is unreadable or too short, or if there is no tokenizer.
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

    The tokens `ids` [N] of the text are read in pieces of `length`.
    """
    models = [load_model(folder)[0] for folder in (source, out)]
    loss, same, count = [0.0, 0.0], 0, 0
    for piece in tqdm(ids.split(length), desc="comparing", disable=not sys.stderr.isatty()):
        if len(piece) < 2:
            continue
        exact, quantised = (model.logits(model.causal(piece[None])[0])[0, :-1] for model in models)
        for i, logits in enumerate((exact, quantised)):
            loss[i] += float(F.cross_entropy(logits, piece[1:], reduction="sum"))
        same += int((exact.argmax(-1) == quantised.argmax(-1)).sum())
        count += len(piece) - 1
    return {
        "tokens": count, "agreement": same / count,
        "perplexity": math.exp(loss[0] / count), "quantised_perplexity": math.exp(loss[1] / count),
    }
