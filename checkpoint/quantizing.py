"""Quantize a converted checkpoint, and compare its perplexity with the original. Command: `quantize.py`.

Tensors are read, quantized and written one at a time. GPTQ is the exception: it calibrates all layers first,
block by block, and keeps the quantized layers in memory.
"""
from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint.folder import check_unquantized
from checkpoint.load import (
    ADVICE,
    CONFIG,
    WEIGHTS,
    build_checked_module,
    build_module,
    load_model,
    open_safetensors,
    read_config,
    stored_tensors,
)
from checkpoint.source import STORED_DTYPES, Entry
from checkpoint.writer import Planned, check_finite, write_checkpoint
from common.errors import InputError, counted
from common.progress import progress_bar
from common.schema import named
from families.mixed import causal
from kernels.gptq import gptq
from kernels.quantized import MXFP4, Quantized, QuantizedLinear, linear_names, split_rows
from kernels.scheme import Scheme
from kernels.stored import Kind
from model import PassInputs
from tokens.tokenizer import Tokenizer

ERROR_TOKENS = 128  # calibration tokens that the output error is measured on
ERROR_STRIDE = 8  # measure the weight error on every 8th block of rows


@dataclass(frozen=True)
class QuantizationPlan:
    """Config and (meta-device) module of a converted folder, and of its quantized result."""

    source: Path
    source_config: dict
    config: dict
    source_module: nn.Module
    module: nn.Module

    @classmethod
    def from_folder(cls, source: Path, scheme: Scheme, kind: str | None = None) -> QuantizationPlan:
        """Check the converted folder `source` and plan its quantization. kind: target or head; None: any.

        Raises InputError if it is not such a folder, is already quantized, its weights do not match the
        config, or the group size does not divide the inputs of a layer.
        """
        source_config = read_config(source, kind)
        check_unquantized(source, source_config)
        stored = stored_tensors(source / WEIGHTS, ADVICE)
        source_module = build_checked_module(source, source_config, stored)
        experts = source_config.get("quantization", {}).get("experts")  # MXFP4 experts are copied
        config = dict(source_config)
        if config["kind"] == "target" and config.get("tie_embeddings") and scheme.lm_head:
            config["tie_embeddings"] = False  # quantizing lm_head unties it from the embedding
        with named(source / CONFIG, "choose another --group"):
            scheme = replace(scheme, experts=experts).with_kinds(source_module)
            config["quantization"] = scheme.to_config()
            return cls(source, source_config, config, source_module, build_module(config))


@dataclass
class _LayerWriter:
    """Quantize one layer on demand: the writer asks for its scales and weight in any order.

    read_original: read the unquantized weight. where: file and tensor name, for errors. layer: the quantized
    module, on the meta device.
    """

    read_original: Callable[[], Tensor]
    where: str
    layer: Quantized
    scales: tuple[Tensor, ...] = ()  # see `Quantized.fit`
    error: float = 0.0  # relative error of the quantized weight, set by `read_weight`

    def read_scales(self, index: int) -> Tensor:
        if not self.scales:
            original = self.read_original()
            check_finite(self.where, original)
            self.scales = self.layer.fit(original)
        return self.scales[index]

    def read_weight(self) -> Tensor:
        self.read_scales(0)
        original = self.read_original()
        weight = self.layer.round(original, *self.scales)
        errors = norms = 0.0
        for rows, *stored in split_rows(original, weight, *self.scales)[::ERROR_STRIDE]:
            rows = rows.float()
            norms += float(rows.norm()) ** 2
            errors += float(self.layer.numbers(*stored).sub_(rows).norm()) ** 2
        self.error = (errors / max(norms, 1e-60)) ** 0.5
        return weight


def read_tensor(path: Path, name: str) -> Tensor:
    """Return one tensor of a safetensors file, memory-mapped."""
    with open_safetensors(path, ADVICE) as file:
        return file.get_tensor(name)


def quantize_folder(
    plan: QuantizationPlan, folder: Path, calibration_ids: Tensor | None = None,
    run_linear: Callable[[QuantizedLinear, Tensor], Tensor] = QuantizedLinear.__call__,
) -> dict[str, tuple[str, float]]:
    """Write the quantized folder. Returns layer name -> ("of weights" or, with GPTQ, "of outputs", error).

    Errors are relative. calibration_ids [B, T]: tokens to calibrate 4-bit layers on with GPTQ; None: round to
    nearest. run_linear: see `calibrated_layers`. Raises OSError, and InputError on NaN or infinite
    weights.
    """
    source, module, names = plan.source, plan.module, plan.source_module.state_dict()
    path, scheme = source / WEIGHTS, Scheme.from_config(plan.config["quantization"])
    calibrated = {} if calibration_ids is None else calibrated_layers(
        source, plan.source_config, scheme, calibration_ids, run_linear)
    layers: dict[str, _LayerWriter] = {}
    stored = stored_tensors(path, ADVICE)

    folder.mkdir(exist_ok=True)
    for item in source.iterdir():  # tokenizer, template, calibration
        if item.is_file() and item.name not in (CONFIG, WEIGHTS):
            shutil.copy2(item, folder / item.name)

    def planned(name: str, tensor: Tensor) -> Planned:
        layer, _, leaf = name.rpartition(".")
        owner = module.get_submodule(layer)
        if not isinstance(owner, Quantized) or leaf == "bias" or owner.mode == MXFP4:
            dtype, read = STORED_DTYPES[stored[name].dtype], partial(read_tensor, path, name)
        elif layer in calibrated:
            dtype, read = tensor.dtype, lambda: getattr(calibrated[layer], leaf)
        else:
            if layer not in layers:
                # In the source: a linear layer, stacked experts, or the embedding of a tied lm_head.
                weight = next(n for n in (f"{layer}.weight", layer, "embed.weight") if n in names)
                read_original, where = partial(read_tensor, path, weight), f"{path}: tensor {weight}"
                layers[layer] = _LayerWriter(read_original, where, owner)
            dtype = tensor.dtype
            writer = layers[layer]
            read = writer.read_weight if leaf == "weight" else partial(writer.read_scales, leaf == "codes")
        return Planned(name, tuple(tensor.shape), dtype, [Entry(tensor.shape, dtype, read)])

    tensors = [planned(name, tensor) for name, tensor in module.state_dict().items()]
    write_checkpoint(folder, plan.config, tensors, where=str(path))
    errors = {name: ("of weights", layer.error) for name, layer in layers.items()}
    return errors | {name: ("of outputs", layer.error) for name, layer in calibrated.items()}


class Calibrated(NamedTuple):
    """A GPTQ-quantized layer, and the relative error of its outputs on the calibration tokens."""

    weight: Tensor
    scale: Tensor
    codes: Tensor
    error: float


@torch.no_grad()
def calibrated_layers(
    source: Path, config: dict, scheme: Scheme, ids: Tensor,
    run_linear: Callable[[QuantizedLinear, Tensor], Tensor],
) -> dict[str, Calibrated]:
    """Quantize the linear layers of all blocks to 4 bits with GPTQ. Returns them by name.

    source: unquantized folder with this config. scheme: result of `with_kinds`. ids [B, T]: calibration
    tokens. run_linear(layer, x): return the outputs [R, N] of a quantized layer for x [R, K].

    Each layer is calibrated on the outputs of the quantized layers before it. One block at a time is in
    memory, in float32. Stacked experts are rounded to nearest for these outputs and not returned. Raises
    InputError on NaN or infinite weights.
    """
    model = build_module(config)
    args = model.args
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    visible = positions[:, None] <= positions[:, :, None]
    shared = PassInputs(args, args.inverse_frequencies(), positions, positions, visible)
    layers: dict[str, Calibrated] = {}
    ring = {"ring": ids.shape[1]} if model.is_recurrent else {}  # the default ring is too small
    caches = model.caches(*ids.shape, "cpu", **ring)
    with open_safetensors(source / WEIGHTS, ADVICE) as file:

        def read(name: str) -> Tensor:
            tensor = file.get_tensor(name)
            check_finite(f"{source / WEIGHTS}: tensor {name}", tensor)
            return tensor

        def apply(i: int, block: nn.Module, x: Tensor) -> Tensor:
            # Gemma 4: later layers that share a layer's KV cache still read its key norm.
            if i and not getattr(model.layers[i - 1], "produces", False):
                model.layers[i - 1].to("meta")
            bar.update()
            state = {name: read(f"layers.{i}.{name}") for name in block.state_dict()}
            state = {name: t.float() if t.is_floating_point() else t for name, t in state.items()}
            block.load_state_dict(state, assign=True)
            for name, p in block.named_parameters():
                if p.ndim == 3 and p.is_floating_point():  # stacked experts
                    kind = scheme.mode_of(f"layers.{i}.{name}")
                    scales = kind.fit(p)
                    p.data = kind.dequantize(kind.round(p, *scales), *scales)
            for name in linear_names(block):
                kind, layer = scheme.mode_of(f"layers.{i}.{name}"), block.get_submodule(name)
                store = partial(layers.__setitem__, f"layers.{i}.{name}")
                layer.forward = partial(_calibrate, layer, kind, store, run_linear)
            return block(x.float(), caches[i], shared)

        embeddings = (n for n in model.state_dict() if not n.startswith(("layers.", "norm.", "lm_head.")))
        model.load_state_dict({name: read(name) for name in embeddings}, strict=False, assign=True)
        with progress_bar(total=len(model.layers), desc="calibrating", unit="layer") as bar:
            model.run_layers(ids, (), apply)
    return layers


def _calibrate(
    layer: nn.Linear, kind: Kind, store: Callable, run_linear: Callable, x: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """Quantize a layer with GPTQ, pass it to `store`, and return its outputs for x [B, T, K]."""
    original, inputs = layer.weight.data, x.flatten(0, -2)
    stored = gptq(original, inputs, kind)
    quantized = QuantizedLinear(*original.t().shape, False, kind)
    for parameter, tensor in zip((quantized.weight, *quantized.scales), stored):
        parameter.data = tensor
    y = run_linear(quantized, inputs)
    sample = slice(None, None, max(1, len(inputs) // ERROR_TOKENS))
    expected = inputs[sample] @ original.t()
    error = (y[sample] - expected).norm() / expected.norm().clamp(min=1e-30)
    store(Calibrated(*stored, float(error)))
    y = (y if layer.bias is None else y.add_(layer.bias)).view(*x.shape[:-1], -1)
    return y if residual is None else residual + y


def text_ids(source: Path, name: str, text: str, min_tokens: int, max_tokens: int) -> Tensor:
    """Tokenize a text with the tokenizer in `source`: the first `max_tokens` ids, [N] int64.

    name: option and file, for errors. Raises InputError if there are fewer than `min_tokens` tokens, no
    tokenizer, or ids outside the vocabulary.
    """
    tokenizer = Tokenizer.load(source)
    if tokenizer is None:
        raise InputError(f"{source}: {name} needs a tokenizer")
    ids = torch.tensor(tokenizer.encode(text[: 16 * max_tokens])[:max_tokens])
    if len(ids) < min_tokens:
        raise InputError(f"{name}: holds {counted(len(ids), 'token')}; at least {min_tokens:,} are needed")
    if (max_id := int(ids.max())) >= (size := read_config(source)["vocab_size"]):
        raise InputError(f"{name}: holds token id {max_id}, the vocabulary is 0..{size - 1}")
    return ids


@torch.no_grad()
def scores(folder: Path, ids: Tensor, prepare: Callable[[nn.Module], object]) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy and the top-1 prediction of each token of ids [N], both [N'].

    The text is scored in chunks of 512 tokens without context from earlier chunks; the first token of each
    chunk is not scored. prepare: move the target to a backend.
    """
    model, (losses, top) = load_model(folder)[0], ([], [])
    prepare(model)
    for chunk in progress_bar(ids.split(512), desc="scoring", unit="chunk"):
        logits = model.logits(causal(model, chunk[None])[0])[0, :-1]
        losses.append(F.cross_entropy(logits, chunk[1:], reduction="none"))
        top.append(logits.argmax(-1))
    return torch.cat(losses), torch.cat(top)


def compare(source: Path, out: Path, ids: Tensor, prepare: Callable[[nn.Module], object]) -> dict:
    """Return perplexity of both targets and their top-1 agreement on token ids [N]."""
    loss, top = scores(source, ids, prepare)
    quantized_loss, quantized_top = scores(out, ids, prepare)
    return {
        "tokens": len(loss), "agreement": float((top == quantized_top).float().mean()),
        "perplexity": float(loss.mean().exp()), "quantized_perplexity": float(quantized_loss.mean().exp()),
    }
