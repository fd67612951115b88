"""Mixture-of-experts targets: Mixtral, Qwen3-MoE; DeepSeek-V3 routing for other families."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch import Tensor

from common.schema import Flag, number, whole
from families.norms import invariant, ordered_sum
from model import MLP, Linear, ModelArgs, TargetBlock, Transformer, gated_activation


@dataclass(frozen=True)
class MixtureArgs(ModelArgs):
    """The shape of a target with experts; `intermediate_size` is that of one expert."""

    num_experts: whole(0, 10_000) = 0  # E; 0: one dense MLP
    experts_per_token: whole(0, 10_000) = 0  # A
    renormalise_experts: Flag = True  # scale the weights of the A chosen experts to sum to 1
    dense_size: whole(0, 2**22) = 0  # intermediate size of dense MLPs
    biases: Flag = False  # the router and the experts have biases (gpt-oss)

    def constraints(self) -> list[tuple[str, bool, str]]:
        fits = not self.num_experts or 1 <= self.experts_per_token <= self.num_experts
        return [*super().constraints(), ("experts_per_token", fits, f"1 to num_experts, {self.num_experts}")]


class Experts(nn.Module):
    """A mixture of E experts, A per token. All shapes are static.

    fused: computes `mix` in a backend's kernels. own_routing: a subclass overrides `route`.
    """

    is_mixture, own_routing = True, False  # backends test these without importing this module
    fused: Callable | None = None

    def __init__(self, args: MixtureArgs):
        super().__init__()
        E, H, size = args.num_experts, args.hidden_size, args.intermediate_size
        self.top_k, self.renormalize = args.experts_per_token, args.renormalise_experts
        self.activation, self.gate = args.activation, gated_activation(args.activation)
        self.router = Linear(H, E, bias=args.biases)
        self.w_gate_up = nn.Parameter(torch.empty(E, 2 * size, H))
        self.w_down = nn.Parameter(torch.empty(E, H, size))
        self.gate_up_bias = nn.Parameter(torch.empty(E, 2 * size)) if args.biases else None
        self.down_bias = nn.Parameter(torch.empty(E, H)) if args.biases else None

    def _product(
        self, x: Tensor, stack: nn.Module | Tensor, bias: Tensor | None, chosen: Tensor | None
    ) -> Tensor:
        """Multiply x by a stack of matrices [E, N, K], possibly quantized, and add its bias [E, N].

        With chosen [R, A]: x [R, K] or [R, A, K] by the matrices of each token's experts -> [R, A, N].
        Without: x [R, K] or [E, R, K] by all matrices -> [E, R, N].
        """
        if isinstance(stack, nn.Module):
            x, matrices = stack.round_inputs(x), stack.dequantize(x.dtype, chosen)
        else:
            matrices = stack if chosen is None else stack[chosen]
        if chosen is None:
            y = x @ matrices.transpose(1, 2)
            return y if bias is None else y + bias[:, None]
        y = torch.einsum("rk,rank->ran" if x.ndim == 2 else "rak,rank->ran", x, matrices)
        return y if bias is None else y + bias[chosen]

    def forward(self, x: Tensor, residual: Tensor | None, router_input: Tensor | None = None) -> Tensor:
        """See `MLP.forward`. router_input [B, T, H]: what the router reads, if not x."""
        weight, chosen = self.route((x if router_input is None else router_input).flatten(0, -2))
        tokens = x.flatten(0, -2)  # [R, H]
        out = (self.fused or Experts.mix)(self, tokens, weight.to(x.dtype), chosen).view_as(x)
        return out if residual is None else residual + out

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens [R, H]: float32 weights and indices [R, A]."""
        weight, chosen = self.router(tokens).float().softmax(-1).topk(self.top_k, dim=-1)
        return weight / weight.sum(-1, keepdim=True) if self.renormalize else weight, chosen

    def mix(self, tokens: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        """Sum the outputs of experts `chosen` [R, A] for tokens [R, H] by weight [R, A] -> [R, H]."""
        # With few tokens, read only the weights of their experts. Many tokens choose nearly all experts, so
        # every expert computes every token.
        by_token = chosen.numel() < self.router.out_features
        experts = chosen if by_token else None
        gate_up = self._product(tokens, self.w_gate_up, self.gate_up_bias, experts)
        out = self._product(self.gate(*gate_up.chunk(2, dim=-1)), self.w_down, self.down_bias, experts)
        if by_token:
            return (out * weight[..., None]).sum(1)
        weights = weight.new_zeros(tokens.shape[0], out.shape[0]).scatter(1, chosen, weight)
        return torch.einsum("erh,re->rh", out, weights)


@dataclass(frozen=True)
class SigmoidArgs(MixtureArgs):
    """The shape of a target with sigmoid routing."""

    dense_layers: whole(0, 10_000) = 0  # the first layers, with an MLP of `dense_size` in place of experts
    router_factor: number(above=0, high=1e6) = 1.0  # multiplies the weights of experts


class SigmoidExperts(Experts):
    """Experts with independent scores; a bias changes which are chosen, but not their weights.

    eps: added to the sum of the chosen scores.
    """

    own_routing, eps = True, 1e-6

    def __init__(self, args: SigmoidArgs):
        super().__init__(args)
        self.factor, self.score_bias = args.router_factor, nn.Parameter(torch.zeros(args.num_experts))

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = invariant(torch.sigmoid, self.router(tokens).float())
        chosen = (scores + self.score_bias.float()).topk(self.top_k, dim=-1).indices
        weight = scores.gather(-1, chosen)
        if self.renormalize:
            weight = weight / (ordered_sum(weight) + self.eps)[:, None]
        return weight * self.factor, chosen


class SigmoidBlock(TargetBlock):
    """A layer with sigmoid-routed experts, or with a dense MLP."""

    def __init__(self, args: SigmoidArgs, layer: int = 0):
        if layer < args.dense_layers:
            args = replace(args, num_experts=0, intermediate_size=args.dense_size)
        super().__init__(args, layer)
        self.standard = not args.num_experts

    def make_mlp(self, args: SigmoidArgs) -> nn.Module:
        return SigmoidExperts(args) if args.num_experts else MLP(args)


class MixtureBlock(TargetBlock):
    """A layer with experts, or with a dense MLP if `num_experts` is 0."""

    def make_mlp(self, args: MixtureArgs) -> nn.Module:
        return Experts(args) if args.num_experts else MLP(args)


class Mixture(Transformer):
    """A target with experts."""

    Args, Layer = MixtureArgs, MixtureBlock
