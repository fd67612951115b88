"""Compiled functions over static buffers, and calls captured as CUDA graphs.

Compiled code is kept on disk by torch: inductor's FX graph cache and the AOTAutograd cache. Each process
traces anew.
"""
from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from unittest.mock import patch

import torch

import extensions
from common.errors import InputError, first_line

GPU_WORKSPACE = 320 << 20  # bytes: cuBLAS takes 32 MB for each of two streams, inductor's benchmarks 256 MB
NAMES = {"draft_and_verify": "step", "accept_and_commit": "commit"}  # function: its name in the log


def configure(autotune: bool) -> None:
    """Set torch.compile's options. Raises InputError if no folder for its cache is writable."""
    if autotune:
        import torch._inductor.config as settings

        settings.max_autotune_gemm = settings.coordinate_descent_tuning = True
    # torch.compile's cache lies beside our compiled kernels, never inside a checkpoint folder.
    try:
        folder = extensions.load("kernels.build:compiled_folder")()
    except OSError as e:
        raise InputError(f"no writable folder for compiled code ({e}); set TORCHINDUCTOR_CACHE_DIR") from None
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.absolute())


def compile_passes(runner, log: Callable[[str], None]) -> None:
    """Replace the passes of an `engine.runner.ModelRunner` by compiled ones; capture them on CUDA."""
    for function in runner.passes if runner.compiled else ():
        name = function.__name__
        if name != "prefill" or not runner.on_cuda:  # on CUDA it would gain little and slow down startup
            runner.passes[function] = CompiledFunction(function, NAMES.get(name, name), log, runner.fell_back)
    if runner.on_cuda:
        runner.captured = CapturedCalls(runner.device, runner.fell_back)


def pass_bytes(runner, drafters: list) -> int:
    """Return an upper bound on the GPU memory that passes take besides the caches, in bytes.

    For each logit of a tree 24 bytes: raw, penalized and restricted logits, sort order, probability mass.
    Captured graphs keep logits and noise per batch size. Then activations of the longest chunk.
    """
    args, shapes = runner.target.args, [drafter.shape for drafter in drafters]
    logits = 24 * runner.batch * max(shape.nodes for shape in shapes)
    graph_values = 2 * runner.batch * sum(2 * s.nodes + s.max_commit for s in shapes)
    activations = runner.batch * runner.chunks[-1] * (2 * args.intermediate_size + args.hidden_size)
    return (logits + 4 * graph_values) * args.vocab_size + 4 * activations + GPU_WORKSPACE


def copy_to_host(parts: tuple[torch.Tensor, ...]) -> Callable[[], list[list]]:
    """Start copying tensors to pinned memory. Returns a function that waits for them and returns lists."""
    host = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in parts)
    for x, pinned in zip(parts, host):
        pinned.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(parts[0].device))

    def read() -> list[list]:
        copied.synchronize()
        return [x.tolist() for x in host]

    return read


def materialize(x: torch.Tensor) -> torch.Tensor:
    """Make torch.compile compute x once, not again in every kernel that reads it.

    `as_strided` forces x into memory, from storage offset 0. Otherwise an angle or a mask is recomputed in
    every layer.
    """
    return x.as_strided(x.shape, x.stride())


def compile_graph(function: Callable, **options) -> Callable:
    """Compile a function as one graph. Raise on graph breaks."""
    # Make floats of a model, such as the eps of its norms, constants. As graph inputs they would prevent a
    # nested region from being compiled only once for all layers.
    torch._dynamo.config.specialize_float = True
    # Dynamo skips a well-known package named "tree", and with it our tree.py, unless told otherwise.
    traced = torch._dynamo.dont_skip_tracing(function)

    def graph(*args):
        return traced(*args)

    # torch.compile keeps its results per code object: each function gets its own.
    name = getattr(function, "func", function).__name__  # a partial has no name
    graph.__code__ = graph.__code__.replace(co_name=name)
    return torch.compile(graph, fullgraph=True, **options)


class CompiledFunction:
    """`function`, compiled once per key, by the first call with that key. Key None: uncompiled.

    Calls with the same key may differ only in the values of tensors, the sizes of dimensions marked dynamic,
    and the batch slots that their views show. So graphs need no guards: checking hundreds of tensors at every
    call takes as long as a layer.
    If compiling fails, `on_failure` is called with a line about the reason, and the function runs uncompiled.
    """

    def __init__(
        self, function: Callable, name: str, log: Callable[[str], None], on_failure: Callable[[str], None]
    ):
        self.function, self.name, self.log, self.on_failure = function, name, log, on_failure
        self.graphs: dict[Hashable, Callable] = {None: function}

    def __call__(self, key: Hashable, *args):
        if key in self.graphs:
            return self.graphs[key](*args)
        from torch._inductor.exc import OperatorIssue

        self.log(f"compiling the {self.name} ...")
        start_time = time.perf_counter()
        no_guards = {"guard_filter_fn": lambda guards: [False] * len(guards)}
        graph = compile_graph(self.function, options=no_guards)
        # Torch 2.11 formats the whole input graph of a custom operator for a log: minutes for a tree.
        name_only = patch.object(OperatorIssue, "operator_str", staticmethod(lambda target, *_: str(target)))
        try:
            with name_only:
                result = graph(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # torch's compilers raise various errors
            self.on_failure(f"the {self.name} cannot be compiled and runs eagerly ({first_line(e)})")
            graph, result = self.function, self.function(*args)
        else:
            self.log(f"compiling the {self.name} took {time.perf_counter() - start_time:.1f} s")
        self.graphs[key] = graph
        return result


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in this context: freeing GPU memory would invalidate a capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of a device that calls are captured on: cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)


class CapturedCalls:
    """Calls over static buffers as CUDA graphs: captured when first needed, then replayed.

    All graphs share one memory pool and one stream; the result of a call is overwritten by the next one.
    device: the GPU of the buffers. If capturing fails, `on_failure` is called with a line about the reason,
    and the call is launched eagerly each time.
    """

    def __init__(self, device: torch.device, on_failure: Callable[[str], None]):
        self.device, self.on_failure = device, on_failure
        self.graphs: dict[tuple, tuple[Callable, Callable]] = {}
        self.pool, self.stream = torch.cuda.graph_pool_handle(), _stream(device)

    def __call__(self, key: tuple, call: Callable, frozen: Callable[[], contextlib.AbstractContextManager]):
        """Capture `call` at the first use of `key`, then replay it. Return its result.

        frozen: gives a context that keeps a call from changing any sequence.
        """
        with torch.cuda.device(self.device):
            if key not in self.graphs:
                with frozen():
                    self.graphs[key] = self._capture(call, str(key[0]))
            return self.graphs[key][0]()

    def _capture(self, call: Callable, name: str) -> tuple[Callable, Callable]:
        """Return (replay, call). Keeping `call` keeps the tensors that a replay reads.

        `call` first runs twice: for compilation, autotuning and allocation.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph, caller_stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with _without_garbage_collection(), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                result = call()
        except RuntimeError as e:
            # A failed capture leaves its stream current and its pool recording.
            torch.cuda.set_stream(caller_stream)
            self.pool = torch.cuda.graph_pool_handle()
            if isinstance(e, torch.OutOfMemoryError):
                raise
            self.on_failure(f"the {name} cannot be captured and runs eagerly ({first_line(e)})")
            return call, call

        def replay():
            graph.replay()
            return result

        return replay, call
