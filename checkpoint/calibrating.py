"""Running a text through a target layer by layer, to choose int4 weights by what they compute on it."""
from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from checkpoint.folder import ADVICE, WEIGHTS
from checkpoint.weights import count_nonfinite, opened
from common.errors import InputError
from kernels.gptq import gptq, output_error
from kernels.quantized import dequantize, linear_names, pack_nibbles, scales, to_stored
from model import KVCache, ModelArgs, Pass, TargetBlock, blank, inverse_frequencies


class Calibrated(NamedTuple):
    """A layer's weight and scales as files hold them, and the relative error of its outputs on the text."""

    weight: Tensor
    scale: Tensor
    error: float


@torch.no_grad()
def calibrate(source: Path, config: dict, group: int, ids: Tensor) -> dict[str, Calibrated]:
    """The linear layers of all blocks of a target, in int4 by GPTQ on a text, by their names.

    source: an unquantised folder with this config. ids [B, T]: the text. Each layer reads what the layers
    before it compute once they are quantised. One block is in memory at a time, in float32, beside what is
    returned. Stacks of experts are rounded to nearest on the way, and not returned. Raises InputError on
    weights that are not finite.
    """
    args = ModelArgs.from_config(config)
    if args.delta_layers:
        raise InputError(f"{source}: gated delta nets are not calibrated yet; give --method nearest")
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    visible = positions[:, None] <= positions[:, :, None]
    shared = Pass(args, inverse_frequencies(args), positions, positions, visible)
    layers: dict[str, Calibrated] = {}
    with opened(source / WEIGHTS, ADVICE) as file:

        def read(name: str) -> Tensor:
            tensor = file.get_tensor(name)
            if bad := count_nonfinite(tensor):
                raise InputError(
                    f"{source / WEIGHTS}: tensor {name} holds {bad:,} numbers that are not finite (nan or"
                    " infinite), which cannot be calibrated; --method nearest --allow-nonfinite takes them"
                )
            return tensor

        embed = read("embed.weight")
        x = embed[ids].float() * args.embedding_scale(embed.dtype)
        for i in tqdm(range(args.num_layers), desc="calibrating", disable=not sys.stderr.isatty()):
            with blank():
                block = TargetBlock(args, i)
            state = {name: read(f"layers.{i}.{name}").float() for name in block.state_dict()}
            block.load_state_dict(state, assign=True)
            for parameter in block.parameters():
                if parameter.ndim == 3:
                    scale = scales(parameter, "int4", group)
                    parameter.data = dequantize(to_stored(parameter, scale, "int4"), scale, torch.float32)
            for name in linear_names(block, lm_head=False):
                put = partial(layers.__setitem__, f"layers.{i}.{name}")
                block.get_submodule(name).register_forward_pre_hook(partial(_quantize, group=group, put=put))
            x = block(x, KVCache(*ids.shape, args, torch.float32, "cpu"), shared)
    return layers


def _quantize(layer: nn.Linear, inputs: tuple[Tensor, ...], group: int, put) -> None:
    """Quantise a layer that is about to read `inputs`; it goes on with the weight that is put down."""
    rows, weight = inputs[0].flatten(0, -2), layer.weight.data
    hessian = rows.t() @ rows
    q, scale = gptq(weight, hessian, group)
    layer.weight.data = dequantize(q, scale, torch.float32)
    put(Calibrated(pack_nibbles(q), scale, output_error(weight, layer.weight.data, hessian)))
