"""How the layers of a module are quantized: `quantization` in config.json."""
from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Literal

import torch.nn as nn
from torch import Tensor

from common.schema import Flag, InvalidValue, schema_of
from kernels.quantized import (
    EMBED,
    MXFP4,
    Quantized,
    QuantizedLinear,
    linear_names,
    owner,
    quantize_layers,
)
from kernels.stored import Kind, int4_kind

MODES = ("int8", "w8a8", "int4", "w4a8", "fp8")
INT4_MODES = ("int4", "w4a8")
AS_STORED = "stored"  # mode of a `Scheme` with a `Kind` per layer, see `kernels.stored`
# Modes of lm_head and draft heads by the layers' mode, if different: they are more sensitive.
LM_HEAD_MODES = {"int4": "int8", "w4a8": "w8a8", MXFP4: "w8a8"}
GROUPS = (32, 64, 128)


@dataclass(frozen=True)
class Scheme:
    """How the layers of a module are quantized: `quantization` in config.json.

    mode: of linear layers; None if only experts are quantized. group: group size of int4 and w4a8, else 0.
    lm_head: its mode, None if not quantized. experts: mode of the experts, if it differs. kinds: with mode
    "stored", layer name -> `Kind` as text; other layers are not quantized.
    """

    mode: Literal[(*MODES, AS_STORED)] | None
    group: Literal[(0, *GROUPS)]
    lm_head: Literal[MODES] | Flag | None
    experts: Literal[MXFP4] | None = None
    kinds: dict[str, str] | None = None

    @classmethod
    def from_config(cls, quantization: dict) -> Scheme:
        """Parse `quantization` of a config.json. Raises InvalidValue (a ValueError).

        Older folders have a bool as lm_head: true means the mode of the layers.
        """
        schema_of(cls).check(quantization, "quantization")
        mode, group, lm_head, experts, kinds = (quantization.get(f.name) for f in fields(cls))
        for name, kind in (kinds or {}).items():
            try:
                Kind.parse(kind)
            except (ValueError, TypeError):
                raise InvalidValue(f"quantization.kinds.{name}", kind, "a kind like q4-32-row-min") from None
        if isinstance(lm_head, bool):
            lm_head = mode if lm_head else None
        if mode is None and (lm_head or not experts):
            raise InvalidValue("quantization.mode", mode, f"one of {', '.join(MODES)}")
        if bool({mode, lm_head} & {*INT4_MODES}) != bool(group):
            groups, names = (" or ".join(map(str, values)) for values in (GROUPS, INT4_MODES))
            expected = f"{'0' if group else groups}: only {names} has a group size"
            raise InvalidValue("quantization.group", group, expected)
        return cls(mode, group, lm_head, experts, kinds)

    def to_config(self) -> dict:
        """Return the value of `quantization` in config.json; inverse of `from_config`."""
        return {name: value for name, value in asdict(self).items()
                if value is not None or name not in ("experts", "kinds")}

    def mode_of(self, name: str, is_experts: bool = False) -> str | Kind | None:
        """Return the mode or `Kind` of a layer, None if it is not quantized."""
        if self.kinds and name in self.kinds:
            return Kind.parse(self.kinds[name])
        if is_experts and self.experts:
            return self.experts
        mode = self.lm_head if name == "lm_head" else None if name == EMBED else self.mode
        if mode in INT4_MODES:  # older folders have no `kinds`
            return Kind("q4", self.group)
        return None if mode == AS_STORED else mode

    def with_kinds(self, module: nn.Module) -> Scheme:
        """Return the scheme with a `Kind` for every 4-bit layer of a module (`kernels.stored.int4_kind`).

        Raises InvalidValue if the group does not divide a layer's inputs.
        """
        inputs = {}
        if self.mode in INT4_MODES:
            inputs = {name: module.get_submodule(name).in_features for name in linear_names(module)
                      if name != "lm_head"}
            stacks = {name: p.shape[-1] for name, p in module.named_parameters() if p.ndim == 3}
            inputs |= {} if self.experts else stacks
        if self.lm_head in INT4_MODES:
            inputs["lm_head"] = module.embed.weight.shape[-1]
        for name, count in inputs.items():
            if count % self.group:
                expected = f"a divisor of the {count} inputs of {name}"
                raise InvalidValue("quantization.group", self.group, expected)
        kinds = dict.fromkeys(inputs, str(int4_kind(self.group)))
        if not kinds:
            return self
        mode = AS_STORED if self.mode in INT4_MODES else self.mode
        lm_head = None if "lm_head" in kinds else self.lm_head
        return Scheme(mode, 0, lm_head, self.experts, kinds)


class QuantizedEmbedding(QuantizedLinear):
    """A quantized embedding table [V, H], also the lm_head if they are tied.

    like: an unquantized module with the dtype of the embeddings.
    """

    dtype, device = property(attrgetter("like.weight.dtype")), property(attrgetter("weight.device"))

    def __init__(self, like: nn.Module, *layer):
        super().__init__(*layer)
        object.__setattr__(self, "like", like)  # do not register it as a submodule

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., H] of tokens [...]."""
        return self.dequantize(self.dtype, tokens)


class QuantizedStack(Quantized):
    """Stacked weights of E experts [E, N, K]. fp8 is weight-only here."""


def replace_linears(module: nn.Module, scheme: Scheme) -> None:
    """Replace linear layers and stacked experts with uninitialized quantized modules, before loading weights.

    Raises ValueError if a group does not divide a layer's inputs.
    """
    stacks, kinds = [name for name, p in module.named_parameters() if p.ndim == 3], scheme.kinds or {}
    names = [*linear_names(module), *stacks, EMBED]
    if unknown := [name for name in kinds if name not in names]:
        raise InvalidValue(f"quantization.kinds.{unknown[0]}", kinds[unknown[0]], "the name of a layer")
    for name in names:
        if not (mode := scheme.mode_of(name, name in stacks)):
            continue
        parent, attribute = owner(module, name)
        old = getattr(parent, attribute)
        try:
            if name in stacks:
                new: nn.Module = QuantizedStack(tuple(old.shape), mode)
            elif name == EMBED:
                new = QuantizedEmbedding(module.norm, *old.weight.shape[::-1], False, mode)
            else:
                new = QuantizedLinear(old.in_features, old.out_features, old.bias is not None, mode)
        except InvalidValue as e:
            raise InvalidValue(f"quantization.{e.key}", e.found, f"{e.expected}, of {name}") from None
        if name in stacks:
            delattr(parent, attribute)
        setattr(parent, attribute, new)


def quantize_linears(module: nn.Module, scheme: Scheme) -> None:
    """Quantize a loaded module in place, see `quantize_layers`."""
    quantize_layers(module, scheme.with_kinds(module).mode_of)
