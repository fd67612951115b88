"""DSpark and EAGLE-3 heads whose layers are Gemma 4's global ones (deepseek-ai/DeepSpec).

`head_dim` and `num_kv_heads` are those of all layers.
"""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from families.activations import soft_cap
from families.gemma4 import Gemma4Args, Gemma4Block
from head import Eagle3Block, Eagle3Head, HeadArgs
from networks.block import BlockArgs, BlockLayer, DSparkHead


@dataclass(frozen=True, kw_only=True)
class Gemma4DSparkArgs(BlockArgs, Gemma4Args):
    """Shape of a DSpark head."""


class GlobalLayer:
    """Mixin of a head's layer whose inputs are already normed: its values and its output are Gemma 4's."""

    def project(self, x: Tensor) -> Tensor:
        return self.with_values(self.wqkv(x))

    def forward(self, *args) -> Tensor:
        return self.add_input(super().forward(*args), None)


class Gemma4DSparkLayer(GlobalLayer, BlockLayer, Gemma4Block):
    """A layer of a DSpark head."""


class Gemma4DSparkHead(DSparkHead):
    """A DSpark head, or, without a Markov head, DFlash."""

    Args, Layer = Gemma4DSparkArgs, Gemma4DSparkLayer


@dataclass(frozen=True, kw_only=True)
class Gemma4Eagle3Args(HeadArgs, Gemma4Args):
    """Shape of an EAGLE-3 head."""

    def constraints(self) -> list[tuple[str, bool, str]]:
        return [*super().constraints(), ("num_layers", self.num_layers == 1, "1")]


class Gemma4Eagle3Block(GlobalLayer, Eagle3Block, Gemma4Block):
    """The layer of an EAGLE-3 head."""

    def __init__(self, args: Gemma4Eagle3Args):
        super().__init__(args)
        del self.attn_norm  # `inputs` norms
        self.args = args

    def inputs(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        return super().inputs(embedded * self.args.embedding_scale(embedded.dtype), feature)


class Gemma4Eagle3Head(Eagle3Head):
    """An EAGLE-3 head of one layer."""

    Args, Layer = Gemma4Eagle3Args, Gemma4Eagle3Block

    def logits(self, feature: Tensor) -> Tensor:
        return soft_cap(super().logits(feature), self.args.logit_cap)
