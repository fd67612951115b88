"""Functions over static buffers, compiled whole and called again without ceremony.

A compiled step is called thousands of times with the same modules and buffers. What torch.compile does at
every call (looking up, guarding, unpacking hundreds of tensors) takes as long as a layer, and tracing takes
seconds in every process. `CompiledFunction` does each once: it saves what was compiled (see `saved_graph`)
and calls that.
"""
from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn as nn

from common.errors import InputError, first_line
from engine.saved_graph import SavedGraph, saved_places, variant_of

# Numbers of a model, such as the eps of its norms, are constants. Where one process compiles models that
# differ in one, Dynamo would make it an input, which a region that is compiled once for all layers cannot
# have.
torch._dynamo.config.specialize_float = True


def compile_graph(function: Callable, **options) -> Callable:
    """torch.compile as one graph, or not at all."""
    # Dynamo passes over a well-known package named "tree", and with it our tree.py, unless told otherwise.
    traced = torch._dynamo.dont_skip_tracing(function)

    def graph(*args):
        return traced(*args)

    # torch.compile keeps its results per code object and checks their guards one by one: each function gets a
    # code object of its own.
    name = getattr(function, "func", function).__name__  # a partial has none of its own
    graph.__code__ = graph.__code__.replace(co_name=name)
    return torch.compile(graph, fullgraph=True, **options)


def unguarded():
    """A context in which compiled functions run without their guards.

    The guards look at modules, buffers and shapes, which takes half a millisecond. The caller knows that none
    has changed since the call that compiled; only the guards that tell several compiled versions apart are
    needed.
    """
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)


class CompiledFunction:
    """`function` as one compiled graph, for callers whose modules and buffers stay what and where they are.

    Arguments are those modules, tensors (of one shape, but for dimensions marked dynamic) and constants. Each
    combination of modules, shapes and constants is compiled by its first call, which `say` announces. Later
    calls pass torch.compile by, and the graph is saved in torch.compile's cache folder for the next process.
    """

    def __init__(self, function: Callable, what: str, say: Callable[[str], None]):
        self.function, self.what, self.say = function, what, say
        self.variants: dict[tuple, SavedGraph] = {}

    def __call__(self, *args):
        key = tuple(id(x) if isinstance(x, nn.Module) else variant_of(x) for x in args)
        if key in self.variants:
            return self.variants[key](args)
        places = saved_places(self.function, args)
        if graph := next(filter(None, map(SavedGraph.find, places)), None):
            self.variants[key] = graph
            return graph(args)
        self.say(f"compiling the {self.what} ...")
        began = time.perf_counter()
        graph = retry_broken_library(lambda: SavedGraph.make(self.function, args, places[0]))
        self.variants[key], result = graph, graph(args)
        self.say(f"compiling the {self.what} took {time.perf_counter() - began:.1f} s")
        return result


def retry_broken_library(compile: Callable):
    """Call `compile`. A library that a killed compiler left half written is deleted and made again."""
    while True:
        try:
            return compile()
        except Exception as e:  # torch wraps what it meets
            broken = re.search(
                r"(/[^\s:'\"]+\.so)\b[^\n]*(?:invalid ELF|file too short|cannot read file data)", _chain(e)
            )
            if not broken or not Path(broken[1]).is_file():
                raise
            Path(broken[1]).unlink()
            torch._dynamo.reset()


def _chain(error: BaseException | None) -> str:
    """The messages of an error and of those that led to it."""
    lines = []
    while error is not None:
        lines.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(lines)


@contextlib.contextmanager
def compile_errors() -> Iterator[None]:
    """Turn the traceback of a failing compiler into an InputError."""
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as e:
        raise InputError(f"torch.compile failed ({first_line(e)}); try --no-compile") from e
