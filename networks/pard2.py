"""PARD-2 draft models (arXiv 2605.08632): the target's features are added to the embeddings."""
from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from common.schema import number, whole
from model import KVCaches, Linear, ModelArgs, PassInputs, Transformer


@dataclass(frozen=True)
class Pard2Args(ModelArgs):
    """The shape of a draft model and of the features that it reads."""

    feature_layers: tuple[whole(-10_000, 10_000), ...] = ()  # ascending, by inputs; -1: the normed output
    feature_size: whole(0, 2**22) = 0  # of all features of a token
    feature_scale: number(above=0, high=1e6) = 1.0

    shardable = False


class Pard2(Transformer):
    """A draft model that reads features of its target. Without features it is a PARD model."""

    Args = Pard2Args

    def __init__(self, args: Pard2Args):
        super().__init__(args)
        self.w_features = Linear(args.feature_size, args.hidden_size, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible, caches: KVCaches,
        aux_layers: tuple[int, ...] = (), features: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `Transformer.forward`. features [B, T, F]: the target's, of the token before each."""
        if features is None:
            return super().forward(tokens, positions, slots, visible, caches, aux_layers)
        shared = PassInputs(self.args, self.inv_freq, positions, slots, visible)
        x = self.embed(tokens) + self.args.feature_scale * self.w_features(features)
        for layer, cache in zip(self.layers, caches):
            x = layer(x, cache, shared)
        return x, None
