"""How functions over static buffers are compiled, kept and called again: whole graphs on any device, captured ones on CUDA.

A compiled step is called thousands of times with the same modules and buffers. What torch.compile does at every call, looking
up, guarding, unpacking hundreds of tensors, takes as long as a layer; and tracing takes seconds in every process. `Whole`
does each once: it keeps what was compiled, on disk too, with the list of the tensors it takes, and calls it with those.
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor

from files import in_place_of
from kernels import processor

ROOT = Path(__file__).resolve().parent
READ_ONLY: list[Path] = []  # cache folders that may hold what is looked for, but take nothing: of checkpoints that cannot be written


def compile_whole(function: Callable, **options) -> Callable:
    """torch.compile as one graph, or not at all."""
    # Dynamo passes over a well-known package named "tree", and with it our tree.py, unless told otherwise.
    traced = torch._dynamo.dont_skip_tracing(function)

    def whole(*args):
        return traced(*args)

    # What is compiled is kept per code object, and guards are checked entry by entry: each of us gets one of its own.
    whole.__code__ = whole.__code__.replace(co_name=function.__name__)
    return torch.compile(whole, fullgraph=True, **options)


def prepare() -> None:
    """Do what the first compilation on a CPU begins with, on something small: imports, probing the compiler, the headers."""
    with contextlib.suppress(Exception):  # what fails here fails again, where it is handled
        torch.compile(lambda x: x + 1)(torch.zeros(64))


def unguarded():
    """A context in which compiled functions run what is there unquestioned.

    The guards look at modules, buffers and shapes, half a millisecond's worth; where the caller knows that none has changed
    since the call that compiled, only those that tell several compiled versions apart are needed.
    """
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)


class Whole:
    """`function` as one compiled graph, for callers whose modules and buffers stay what and where they are.

    Arguments are those modules, tensors (of one shape, but for dimensions marked dynamic) and constants; each combination of
    shapes and constants is compiled by its first call, which is announced through `say`. direct: later calls pass
    torch.compile by, and what was compiled is kept in its cache folder, for the next process that has the same code, torch,
    processor, threads, modules and shapes.
    """

    def __init__(self, function: Callable, what: str, say: Callable[[str], None], direct: bool):
        self.function, self.what, self.say, self.direct = function, what, say, direct
        self.compiled = None if direct else compile_whole(function)
        self.variants: dict[tuple, Kept | None] = {}

    def __call__(self, *args):
        key = tuple(_form(x) for x in args if not isinstance(x, nn.Module))
        if key in self.variants:
            if kept := self.variants[key]:
                return kept(args)
            with unguarded():
                return self.compiled(*args)
        path = place(self.function, args) if self.direct else None
        places = (path, *(folder / "whole" / path.name for folder in READ_ONLY)) if path else ()
        if kept := next(filter(None, map(Kept.find, places)), None):
            self.variants[key] = kept
            return kept(args)
        self.say(f"compiling the {self.what} ...")
        began = time.perf_counter()
        if self.direct:
            self.variants[key], result = whatever_it_takes(lambda: Kept.make(self.function, args, path))
        else:
            self.variants[key], result = None, whatever_it_takes(lambda: self.compiled(*args))
        self.say(f"compiling the {self.what} took {time.perf_counter() - began:.1f} s")
        return result


def whatever_it_takes(compile: Callable):
    """Compile. A library that a killed compiler or copy has left half written is deleted and made again, rather than fatal until
    somebody finds it."""
    while True:
        try:
            return compile()
        except Exception as e:  # torch wraps what it meets
            broken = re.search(r"(/[^\s:'\"]+\.so)\b[^\n]*(?:invalid ELF|file too short|cannot read file data)", _chain(e))
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


class Kept:
    """A compiled graph: which tensors of the arguments it takes, and what of its outputs the function returned.

    inputs: for each input a path into the arguments and, where the input is the size of a tensor, the dimension, else None.
    result: the function's, with the number of a graph's output in the place of each tensor; see `_numbered`.
    """

    def __init__(self, graph: Callable, inputs: list[tuple[tuple[int, str], int | None]], result):
        self.graph, self.inputs, self.result = graph, inputs, result
        self.given: list | None = None  # the inputs, all of them once the first call is known
        self.varying: list[tuple[int, int, int | None]] = []  # of those: which stem from an argument that may be another tensor

    def __call__(self, args: tuple):
        if self.given is None:
            known = _tensors(args)
            self.given = [known[path] if size is None else None for path, size in self.inputs]
            self.varying = [(i, path[0], size) for i, (path, size) in enumerate(self.inputs) if not path[1]]
        given = self.given.copy()
        for i, arg, size in self.varying:
            given[i] = args[arg] if size is None else args[arg].shape[size]
        return _filled(self.result, self.graph(*given))

    @classmethod
    def make(cls, function: Callable, args: tuple, path: Path) -> tuple[Kept, object]:
        """Trace and compile `function` for these arguments, call it, and save it at `path`. Returns also what it returned."""
        seen: dict = {}

        def backend(graph, examples):
            holes = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
            seen["graph"], seen["holes"], seen["examples"] = torch._inductor.standalone_compile(
                graph, holes, dynamic_shapes="from_tracing_context"  # there may be no output to tell
            ), holes, examples

            def run(*given):
                seen["found"] = seen["graph"](*given)
                return seen["found"]

            return run

        result = compile_whole(function, backend=backend)(*args)
        paths: dict[int, tuple[int, str]] = {}
        for where, tensor in _tensors(args).items():
            paths.setdefault(id(tensor), where)
        inputs = []
        for hole, example in zip(seen["holes"], seen["examples"]):
            if isinstance(hole, Tensor):
                inputs.append((paths[id(example)], None))
            else:
                inputs.append(next(
                    (paths[id(tensor)], i) for shape, tensor in zip(seen["holes"], seen["examples"]) if isinstance(shape, Tensor)
                    for i, size in enumerate(shape.shape) if isinstance(size, torch.SymInt) and size.node.expr == hole.node.expr
                ))
        kept = cls(seen["graph"], inputs, _numbered(result, {id(tensor): i for i, tensor in enumerate(seen["found"])}))
        kept.save(path)
        return kept, result

    def save(self, path: Path) -> None:
        """Write PATH.graph and then PATH.pickle, each whole or not at all; where that cannot be, the next process compiles again."""
        with contextlib.suppress(OSError, RuntimeError):  # the second: torch cannot serialise it
            path.parent.mkdir(parents=True, exist_ok=True)
            self.graph.save(path=f"{path}.graph")
            with in_place_of(f"{path}.pickle") as part:
                part.write_bytes(pickle.dumps((self.inputs, self.result)))

    @classmethod
    def find(cls, path: Path) -> Kept | None:
        """What `save` wrote, or None where nothing is, or nothing that can be used any more."""
        try:
            rest = pickle.loads(Path(f"{path}.pickle").read_bytes())
            return cls(torch._inductor.CompiledArtifact.load(path=f"{path}.graph"), *rest)
        except FileNotFoundError:
            return None
        except Exception:  # damaged in whatever way: it is a cache, and made again
            return None


def _numbered(value, numbers: dict[int, int]):
    """A tensor's number; None as it is; a tuple, named or not, as its class and its parts."""
    if isinstance(value, tuple):
        return type(value), [_numbered(part, numbers) for part in value]
    return None if value is None else numbers[id(value)]


def _filled(plan, found: list[Tensor]):
    """The inverse of `_numbered`."""
    if isinstance(plan, tuple):
        kind, parts = plan
        parts = [_filled(part, found) for part in parts]
        return kind(parts) if kind is tuple else kind(*parts)
    return None if plan is None else found[plan]


def place(function: Callable, args: tuple) -> Path:
    """Where `function`, compiled for these arguments, is kept: the name says everything that the code depends on."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # here: it takes seconds, which those who compile nothing save

    settings = torch._inductor.config.get_hash().hex()
    made_by = (function.__qualname__, _surroundings(), settings, torch.get_num_threads(), list(_described(args)))
    return Path(cache_dir()) / "whole" / hashlib.sha256(repr(made_by).encode()).hexdigest()[:24]


@cache
def _surroundings() -> tuple:
    """What compiled code depends on besides its arguments and the compiler's settings: our sources, torch, the processor."""
    folders = (ROOT, ROOT / "drafters", ROOT / "kernels")
    sources = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in (".py", ".cpp")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return digest, torch.__version__, processor(), os.environ.get("CXX")


def _tensors(args: tuple) -> dict[tuple[int, str], Tensor]:
    """All tensors of the arguments by argument and name in it ("" of a tensor itself), those under several names each time."""
    found: dict[tuple[int, str], Tensor] = {}
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            found[i, ""] = arg
        elif isinstance(arg, nn.Module):
            for name, tensor in (*arg.named_parameters(remove_duplicate=False), *arg.named_buffers(remove_duplicate=False)):
                found[i, name] = tensor
    return found


def _described(args: tuple) -> Iterator[tuple]:
    """Everything of the arguments that tracing may look at: classes, settings, shapes, which tensors are one."""
    ordinary = set(vars(nn.Module()))
    for arg in args:
        if isinstance(arg, nn.Module):
            for name, module in arg.named_modules(remove_duplicate=False):
                yield name, type(module).__qualname__, [(k, _stable(v)) for k, v in sorted(vars(module).items()) if k not in ordinary]
        else:
            yield _form(arg)
    first: dict[int, tuple] = {}
    for path, tensor in _tensors(args).items():
        yield path, first.setdefault(id(tensor), path), _form(tensor), tensor.device.type, path[1] and tensor.stride()


def _form(arg) -> object:
    """What tells one compiled version from another: a tensor's dtype and shape (None: dynamic), a constant itself."""
    if not isinstance(arg, Tensor):
        return arg
    dynamic = getattr(arg, "_dynamo_dynamic_indices", ())
    return arg.dtype, tuple(None if i in dynamic else n for i, n in enumerate(arg.shape))


def _stable(value) -> object:
    """A value in words that another process would choose too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, [(f.name, _stable(getattr(value, f.name))) for f in dataclasses.fields(value)]
    if isinstance(value, (list, tuple)):
        return [_stable(x) for x in value]
    if isinstance(value, dict):
        return [(_stable(k), _stable(v)) for k, v in value.items()]
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)


class Captured:
    """Calls over static buffers as CUDA graphs: captured when first needed, then replayed. One memory pool serves them all;
    what a call returns is overwritten by the next. `still` gives a context in which a call changes nothing of meaning."""

    def __init__(self, still: Callable[[], contextlib.AbstractContextManager]):
        self.still, self.graphs = still, {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, key: tuple, call: Callable):
        """What `call` returns; `key` tells calls of different shapes apart."""
        if key not in self.graphs:
            self.graphs[key] = self._capture(call)
        graph, result = self.graphs[key]
        graph.replay()
        return result

    def _capture(self, call: Callable):
        """Warm up (compile, let libraries allocate) and capture."""
        with self.still():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                result = call()
        return graph, result
