"""A small function to compile, and a check that compiling changed nothing."""
from typing import NamedTuple

import torch
import torch.nn as nn

from engine.compile import CompiledFunction


class Sums(NamedTuple):
    total: torch.Tensor
    nothing: None
    shifted: torch.Tensor


class Adder(nn.Module):
    def __init__(self, by: int = 2, dtype=torch.float32):
        super().__init__()
        self.by = by
        self.register_buffer("total", torch.zeros(3, dtype=dtype), persistent=False)
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)


def add(adder: Adder, span: torch.Tensor, twice: bool) -> tuple[Sums, torch.Tensor]:
    """Changes a buffer, reads a constant of the module, and takes a tensor of any length."""
    adder.total.add_(adder.weight * span.sum() * (2 if twice else 1))
    return Sums(adder.total + adder.by, None, span + span.shape[0]), adder.total * 3


def span(n: int) -> torch.Tensor:
    """0, 1, ..., n - 1, of a length that is compiled as dynamic."""
    numbers = torch.arange(64)[:n]
    torch._dynamo.mark_dynamic(numbers, 0)
    return numbers


def check(compiled: CompiledFunction, adder: Adder, lengths=(7, 20, 33)) -> None:
    """A compiled `add` does what `add` does, to the adder too."""
    eager = Adder(adder.by, adder.total.dtype)
    eager.total.copy_(adder.total)
    for n in lengths:
        for twice in (False, True):
            sums, tripled = compiled(adder, span(n), twice)
            expected, expected_tripled = add(eager, span(n), twice)
            assert isinstance(sums, Sums) and sums.nothing is None and torch.equal(sums.total, expected.total)
            assert torch.equal(sums.shifted, expected.shifted) and torch.equal(tripled, expected_tripled)
            assert torch.equal(adder.total, eager.total)


class Replays:
    """Stands in for `CapturedCalls`: what was called first for a key runs for it ever after."""

    def __init__(self):
        self.calls = {}

    def __call__(self, key, call, still):
        return self.calls.setdefault(key, call)()
