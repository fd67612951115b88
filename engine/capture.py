"""CUDA graphs: calls over static buffers, captured once and replayed."""
from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch


def capture(call: Callable, pool: tuple | None = None) -> tuple[torch.cuda.CUDAGraph, object]:
    """A call over static buffers as a graph of the current GPU, and what the call returns.

    It is called twice before, for whatever is compiled, tuned or allocated the first time.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = call()
    return graph, result


class CapturedCalls:
    """Calls over static buffers as CUDA graphs: captured when first needed, then replayed.

    One memory pool serves them all; what a call returns is overwritten by the next. `still` gives a context
    in which a call changes nothing of meaning. device: the GPU that the buffers are on.
    """

    def __init__(self, device: torch.device, still: Callable[[], contextlib.AbstractContextManager]):
        self.device, self.still, self.graphs = device, still, {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, key: tuple, call: Callable):
        """What `call` returns; `key` tells calls of different shapes apart."""
        with torch.cuda.device(self.device):
            if key not in self.graphs:
                with self.still():
                    self.graphs[key] = capture(call, self.pool)
            graph, result = self.graphs[key]
            graph.replay()
        return result
