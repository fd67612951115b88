"""Compiled functions over static buffers: traced once, kept on disk, captured as CUDA graphs.

A compiled step is called thousands of times with the same modules and buffers. At every call torch.compile
looks up, guards and unpacks hundreds of tensors, which takes as long as a layer; tracing takes seconds in
every process. `CompiledFunction` does each once: it saves the graph and calls that. On CUDA
`CapturedCalls` then replays the call.

Saved graphs are made and loaded by torch's `aot_compile`, without its guards: some of them cannot be saved,
and none looks at our source files. `saved_place` puts all that tracing depends on into a graph's name.
"""
from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import os
import pickle
import platform
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from common.errors import first_line
from common.files import atomic_path
from engine.step import Step
from kernels.build import code_digest
from kernels.isa import features


def _dynamo():
    """Return torch's tracer. Importing it takes a second, which those who compile nothing save.

    Numbers of a model, such as the eps of its norms, are constants. If one process compiles models that
    differ in one, Dynamo would make it an input, which a region that is compiled once for all layers cannot
    have.
    """
    torch._dynamo.config.specialize_float = True
    return torch._dynamo


def compile_graph(function: Callable, **options) -> Callable:
    """Compile a function as one graph. Raise where it cannot be one."""
    # Dynamo passes over a well-known package named "tree", and with it our tree.py, unless told otherwise.
    traced = _dynamo().dont_skip_tracing(function)

    def graph(*args):
        return traced(*args)

    # torch.compile keeps its results per code object and checks their guards one by one: each function gets a
    # code object of its own.
    name = getattr(function, "func", function).__name__  # a partial has no name
    graph.__code__ = graph.__code__.replace(co_name=name)
    return torch.compile(graph, fullgraph=True, **options)


class CompiledFunction:
    """`function` as one compiled graph, for callers whose modules and buffers stay what and where they are.

    Arguments are those modules, tensors (of one shape, except dimensions marked dynamic), tuples of them and
    constants. Each combination of modules, shapes and constants is compiled by its first call, which `say`
    announces. Later calls bypass torch.compile, and the graph is saved in torch.compile's cache folder for
    the next process. Modules that are alike, as the views of two places of a batch are, share one graph,
    which is loaded once.
    If compiling fails, `failed` is called with a line about the reason, and the function runs uncompiled.
    """

    def __init__(
        self, function: Callable, what: str, say: Callable[[str], None],
        failed: Callable[[str], None] | None = None,
    ):
        self.function, self.what, self.say, self.failed = function, what, say, failed or say
        self.variants: dict[tuple, Callable] = {}  # by modules, shapes and constants
        self.loaded: dict[Path, Callable] = {}

    def __call__(self, *args):
        key = tuple(id(x) if isinstance(x, nn.Module) else variant_of(x) for x in args)
        if key in self.variants:
            return self.variants[key](*args)
        place = saved_place(self.function, args)
        if graph := self.loaded.get(place) or find_graph(place, self.say):
            try:
                result = graph(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as e:  # made on a machine that seemed the same
                self.say(f"a saved graph of the {self.what} fails ({first_line(e)}) and is made again")
                graph = None
                with contextlib.suppress(OSError):
                    place.unlink()
        if not graph:
            graph = self._compiled(args, place)
            result = graph(*args)
        self.variants[key] = self.loaded[place] = graph
        return result

    def _compiled(self, args: tuple, place: Path) -> Callable:
        self.say(f"compiling the {self.what} ...")
        began = time.perf_counter()
        try:
            graph = make_graph(self.function, args, place, self.say)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # of any of torch's compilers
            self.failed(f"the {self.what} cannot be compiled and runs without ({first_line(e)})")
            return self.function
        self.say(f"compiling the {self.what} took {time.perf_counter() - began:.1f} s")
        return graph


# -- graphs on disk --------------------------------------------------------------------------------


def make_graph(function: Callable, args: tuple, path: Path, say: Callable[[str], None]) -> Callable:
    """Compile `function` for these arguments, and save the graph at `path`. The caller promises that the
    arguments of its calls fit.

    say: gets a line if it cannot be saved: the next process compiles again.
    """
    settings = _dynamo().config.patch(dont_skip_tracing=True, enable_aot_compile=True)
    no_guards = {"guard_filter_fn": lambda guards: [False] * len(guards)}
    # Torch 2.11 writes out all that an operator of ours is computed from, for its log: minutes for a tree.
    from torch._inductor.exc import OperatorIssue

    brief = patch.object(OperatorIssue, "operator_str", staticmethod(lambda target, *_: str(target)))
    with settings, brief:
        compiled = torch.compile(function, fullgraph=True, options=no_guards).aot_compile((args, {}))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as part:
            compiled.save_compiled_function(str(part))
    except (OSError, RuntimeError, AttributeError, TypeError, pickle.PicklingError) as e:
        say(f"the graph cannot be saved for the next process ({first_line(e)})")
    return compiled.fn  # not `compiled` itself, which would check the guards


def find_graph(path: Path, say: Callable[[str], None]) -> Callable | None:
    """Return the graph that `make_graph` saved; None if there is none.

    say: gets a line about one that is damaged.
    """
    try:
        with open(path, "rb") as file:
            return torch.compiler.load_compiled_function(file).fn
    except FileNotFoundError:
        return None
    except Exception as e:  # damaged in whatever way: it is a cache, and made again
        say(f"{path}: cannot be loaded ({first_line(e)})")
        return None


def saved_place(function: Callable, args: tuple) -> Path:
    """Return the file of a graph of `function` for these arguments, named by all that it depends on."""
    # Imported here: it takes seconds, which those who compile nothing save.
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    settings = torch._inductor.config.get_hash().hex()
    processor = platform.machine(), platform.processor(), sorted(features())
    machine = torch.__version__, processor, os.environ.get("CXX"), torch.get_num_threads()
    made_by = function.__qualname__, code_digest(), machine, _gpu(args), settings, list(_described(args))
    name = hashlib.sha256(repr(made_by).encode()).hexdigest()[:24]
    return Path(cache_dir()) / "graphs" / f"{name}.graph"


def _gpu(args: tuple) -> tuple:
    """Return what a graph on a GPU depends on: the GPU, and what compiled it."""
    devices = {tensor.device for tensor in _tensors(args).values() if tensor.is_cuda}
    if not devices:
        return ()
    gpus = sorted({torch.cuda.get_device_name(device) for device in devices})
    import triton  # its distribution may have another name

    return *gpus, torch.version.cuda, triton.__version__


def _tensors(args: tuple) -> dict[tuple[int, str], Tensor]:
    """All tensors of the arguments by argument and name in it, "" for a tensor itself.

    A tensor with several names is there under each.
    """
    tensors: dict[tuple[int, str], Tensor] = {}
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            tensors[i, ""] = arg
        elif isinstance(arg, nn.Module):
            for named in (arg.named_parameters, arg.named_buffers):
                tensors |= {(i, name): tensor for name, tensor in named(remove_duplicate=False)}
        elif isinstance(arg, tuple):
            given = enumerate(tree_leaves(arg))
            tensors |= {(i, str(number)): x for number, x in given if isinstance(x, Tensor)}
    return tensors


def _described(args: tuple) -> Iterator[tuple]:
    """All that tracing may look at: classes and settings of modules, shapes, which tensors are the same."""
    ordinary = set(vars(nn.Module()))
    for arg in args:
        if isinstance(arg, nn.Module):
            for name, module in arg.named_modules(remove_duplicate=False):
                settings = [(k, _stable(v)) for k, v in sorted(vars(module).items()) if k not in ordinary]
                yield name, _name(type(module)), settings
        else:
            yield variant_of(arg)
    first: dict[int, tuple] = {}
    for path, tensor in _tensors(args).items():
        same_as, strides = first.setdefault(id(tensor), path), path[1] and tensor.stride()
        # Compiled code reads 16 bytes at once where a tensor begins at a multiple of them.
        begins = tensor.data_ptr() % 16 if tensor.nbytes >= 16 else 0
        yield path, same_as, variant_of(tensor), str(tensor.device), strides, begins


def variant_of(arg) -> object:
    """Describe an argument: a tensor's dtype and shape (None: dynamic), a tuple of them, or a constant."""
    if isinstance(arg, tuple):
        return tuple(map(variant_of, arg))
    if not isinstance(arg, Tensor):
        return arg
    dynamic = getattr(arg, "_dynamo_dynamic_indices", ())
    return arg.dtype, tuple(None if i in dynamic else n for i, n in enumerate(arg.shape))


def _stable(value) -> object:
    """Describe a value, in the same words in every process."""
    if isinstance(value, Step):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, _stable(getattr(value, f.name))) for f in dataclasses.fields(value)]
        return _name(type(value)), fields
    if isinstance(value, (list, tuple)):
        return [_stable(x) for x in value]
    if isinstance(value, dict):
        return [(_stable(k), _stable(v)) for k, v in value.items()]
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    return _name(value if hasattr(value, "__qualname__") else type(value))


def _name(value) -> str:
    """The full name of a class or a function."""
    return f"{value.__module__}.{value.__qualname__}"


# -- CUDA graphs -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep garbage collection out of this context: what it frees on a GPU would invalidate a capture."""
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

    One memory pool and one stream serve them all; what a call returns is overwritten by the next. device: the
    GPU that the buffers are on. If capturing fails, `failed` is called with a line about the reason, and the
    call is made each time.
    """

    def __init__(self, device: torch.device, failed: Callable[[str], None]):
        self.device, self.failed = device, failed
        self.graphs: dict[tuple, tuple[Callable, Callable]] = {}
        self.pool, self.stream = torch.cuda.graph_pool_handle(), _stream(device)

    def __call__(self, key: tuple, call: Callable, still: Callable[[], contextlib.AbstractContextManager]):
        """Call or replay, and return the result of `call`; `key` tells calls of different shapes apart.

        still: gives a context that keeps a call from changing any sequence.
        """
        with torch.cuda.device(self.device):
            if key not in self.graphs:
                with still():
                    self.graphs[key] = self._capture(call, str(key[0]))
            return self.graphs[key][0]()

    def _capture(self, call: Callable, what: str) -> tuple[Callable, Callable]:
        """Return what replays a call, and the call, which keeps the tensors that a replay reads.

        It is called twice before, for whatever is compiled, tuned or allocated the first time.
        """
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(self.stream)
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with _no_collection(), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                result = call()
        except RuntimeError as e:
            # If it cannot be ended, its stream stays current, and its pool records for ever.
            torch.cuda.set_stream(before)
            self.pool = torch.cuda.graph_pool_handle()
            if isinstance(e, torch.OutOfMemoryError):
                raise
            self.failed(f"the {what} cannot be captured and is launched each time ({first_line(e)})")
            return call, call

        def replay():
            graph.replay()
            return result

        return replay, call
