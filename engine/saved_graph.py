"""Compiled graphs saved to disk, and called without torch.compile.

torch's own `aot_compile` needs the guards of every module to be serialised and checks them at each call; here
the caller promises that modules and buffers stay what they are (docs/how-it-works.md has the comparison).
"""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor
from torch._guards import TracingContext

from common.files import atomic_path
from kernels.cpu import processor

ROOT = Path(__file__).resolve().parent.parent
# Cache folders that are read and not written: of checkpoints that cannot be written.
READ_ONLY: list[Path] = []


class SavedGraph:
    """A compiled graph: which tensors of the arguments it takes, and what of its outputs the function
    returned.

    inputs: for each input a path into the arguments and, where the input is the size of a tensor, the
    dimension, else None. result: the function's, with the number of a graph's output in the place of each
    tensor; see `_numbered`.
    """

    def __init__(self, graph: Callable, inputs: list[tuple[tuple[int, str], int | None]], result):
        self.graph, self.inputs, self.result = graph, inputs, result
        self.values: list | None = None  # of the inputs, known from the first call on
        # The inputs that may be another tensor at the next call.
        self.varying: list[tuple[int, int, int | None]] = []

    def __call__(self, args: tuple):
        if self.values is None:
            tensors = _tensors(args)
            self.values = [tensors[path] if size is None else None for path, size in self.inputs]
            self.varying = [(i, path[0], size) for i, (path, size) in enumerate(self.inputs) if not path[1]]
        values = self.values.copy()
        for i, arg, size in self.varying:
            values[i] = args[arg] if size is None else args[arg].shape[size]
        return _filled(self.result, self.graph(*values))

    @classmethod
    def make(
        cls, function: Callable, args: tuple, path: Path, compile_graph: Callable
    ) -> tuple[SavedGraph, object]:
        """Trace, compile and call `function` with these arguments, and save the graph at `path`.

        Returns the graph and what the function returned.
        """
        seen: dict = {}

        def backend(graph, examples):
            holes = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
            seen["graph"], seen["holes"], seen["examples"] = torch._inductor.standalone_compile(
                graph, holes, dynamic_shapes="from_tracing_context"  # there may be no output to tell
            ), holes, examples
            seen["sources"] = _sources(args)

            def run(*inputs):
                seen["outputs"] = seen["graph"](*inputs)
                return seen["outputs"]

            return run

        result = compile_graph(function, backend=backend)(*args)
        paths: dict[int, tuple[int, str]] = {}
        for where, tensor in _tensors(args).items():
            paths.setdefault(id(tensor), where)
        pairs, inputs = list(zip(seen["holes"], seen["examples"])), []
        for hole, example in pairs:
            if isinstance(hole, Tensor):
                inputs.append((paths[id(example)], None))
            else:  # a number: the size of some tensor
                inputs.append(next(
                    (paths[id(tensor)], i) for shape, tensor in pairs if isinstance(shape, Tensor)
                    for i, size in enumerate(shape.shape)
                    if isinstance(size, torch.SymInt) and size.node.expr == hole.node.expr
                ))
        graph = cls(
            seen["graph"], inputs, _numbered(result, {id(t): i for i, t in enumerate(seen["outputs"])})
        )
        graph.save(path, {str(file.relative_to(ROOT)): _digest(file) for file in seen["sources"]})
        return graph, result

    def save(self, path: Path, sources: dict[str, str]) -> None:
        """Write the graph beside `path`, then PATH.pickle, which names it and the sources it was traced from.

        Where that cannot be, the next process compiles again.
        """
        name = f"{path.name}-{hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:8]}.graph"
        with contextlib.suppress(OSError, RuntimeError):  # the second: torch cannot serialise it
            path.parent.mkdir(parents=True, exist_ok=True)
            self.graph.save(path=str(path.with_name(name)))
            with atomic_path(f"{path}.pickle") as part:
                part.write_bytes(pickle.dumps((sources, name, self.inputs, self.result)))
            for old in path.parent.glob(f"{path.name}-*.graph"):
                if old.name != name:  # of sources that have changed
                    old.unlink()

    @classmethod
    def find(cls, path: Path) -> SavedGraph | None:
        """What `save` wrote for this path, or None if there is nothing, or nothing that can be used any more.
        """
        try:
            sources, name, *rest = pickle.loads(Path(f"{path}.pickle").read_bytes())
            if any(_digest(ROOT / file) != digest for file, digest in sources.items()):
                return None
            return cls(torch._inductor.CompiledArtifact.load(path=str(path.with_name(name))), *rest)
        except FileNotFoundError:
            return None
        except Exception:  # damaged in whatever way: it is a cache, and made again
            return None


def _sources(args: tuple) -> list[Path]:
    """Our source files that the graph at hand was traced from: of the code that was run, of the arguments'
    classes.
    """
    files = {code.co_filename for code in TracingContext.get_traced_code() or ()}
    modules = {
        type(module).__module__ for arg in args if isinstance(arg, nn.Module) for module in arg.modules()
    }
    files |= {getattr(sys.modules[name], "__file__", None) or "" for name in modules}
    paths = {Path(file).resolve() for file in files if file}
    return sorted(
        path for path in paths if path.is_relative_to(ROOT) and ".venv" not in path.parts and path.is_file()
    )


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _numbered(value, numbers: dict[int, int]):
    """A tensor's number; None as it is; a tuple, named or not, as its class and its parts."""
    if isinstance(value, tuple):
        return type(value), [_numbered(part, numbers) for part in value]
    return None if value is None else numbers[id(value)]


def _filled(plan, outputs: list[Tensor]):
    """The inverse of `_numbered`."""
    if isinstance(plan, tuple):
        kind, parts = plan
        parts = [_filled(part, outputs) for part in parts]
        return kind(parts) if kind is tuple else kind(*parts)
    return None if plan is None else outputs[plan]


def saved_places(function: Callable, args: tuple) -> tuple[Path, ...]:
    """Where a graph of `function`, compiled for these arguments, may be saved: the first place is the one to
    write to.

    The name holds everything that the graph depends on beside our sources, whose digests `SavedGraph.find`
    compares.
    """
    # Imported here: it takes seconds, which those who compile nothing save.
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    settings = torch._inductor.config.get_hash().hex()
    machine = torch.__version__, processor(), os.environ.get("CXX"), torch.get_num_threads()
    made_by = function.__qualname__, machine, settings, list(_described(args))
    name = hashlib.sha256(repr(made_by).encode()).hexdigest()[:24]
    return tuple(folder / "graphs" / name for folder in (Path(cache_dir()), *READ_ONLY))


def _tensors(args: tuple) -> dict[tuple[int, str], Tensor]:
    """All tensors of the arguments by argument and name in it, "" for a tensor itself.

    A tensor with several names is there under each.
    """
    tensors: dict[tuple[int, str], Tensor] = {}
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor):
            tensors[i, ""] = arg
        elif isinstance(arg, nn.Module):
            for name, tensor in (
                *arg.named_parameters(remove_duplicate=False), *arg.named_buffers(remove_duplicate=False)
            ):
                tensors[i, name] = tensor
    return tensors


def _described(args: tuple) -> Iterator[tuple]:
    """Everything of the arguments that tracing may look at: classes, settings, shapes, which tensors are one.
    """
    ordinary = set(vars(nn.Module()))
    for arg in args:
        if isinstance(arg, nn.Module):
            for name, module in arg.named_modules(remove_duplicate=False):
                yield name, type(module).__qualname__, [
                    (k, _stable(v)) for k, v in sorted(vars(module).items()) if k not in ordinary
                ]
        else:
            yield variant_of(arg)
    first: dict[int, tuple] = {}
    for path, tensor in _tensors(args).items():
        yield path, first.setdefault(
            id(tensor), path
        ), variant_of(tensor), tensor.device.type, path[1] and tensor.stride()


def variant_of(arg) -> object:
    """What tells one compiled version from another: a tensor's dtype and shape (None: dynamic), a constant
    itself.
    """
    if not isinstance(arg, Tensor):
        return arg
    dynamic = getattr(arg, "_dynamo_dynamic_indices", ())
    return arg.dtype, tuple(None if i in dynamic else n for i, n in enumerate(arg.shape))


def _stable(value) -> object:
    """A value in words that another process would choose too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, [
            (f.name, _stable(getattr(value, f.name))) for f in dataclasses.fields(value)
        ]
    if isinstance(value, (list, tuple)):
        return [_stable(x) for x in value]
    if isinstance(value, dict):
        return [(_stable(k), _stable(v)) for k, v in value.items()]
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)
