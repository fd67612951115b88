"""Kernels against their definitions, as a GPU checks itself; and that this check sees what is wrong."""
import pkgutil
import re
import sys
from functools import partial
from itertools import count

import pytest
import torch
from helpers.ahead_of_time import dear

from engine import check as steps
from engine import compile as compiling
from engine.check import STEPS
from engine.runtime import Runtime
from engine.target import load_target
from families.experts import Experts, Mixture, MixtureArgs
from kernels.backend import TORCH
from kernels.gpu import attention, check, products, sampling
from kernels.gpu.backend import CudaBackend
from kernels.gpu.cache import LayerCaches
from kernels.gpu.cases import PARTS, Sizes
from kernels.quantized import QuantizedLinear, Scheme, quantize_linears
from model import KVCaches, ModelArgs, Transformer
from tree import TreeShape

ROWS, LENGTHS = (1, 10), (0, 63, 64, 65, 150)


@pytest.fixture
def sizes(device, monkeypatch) -> Sizes:
    monkeypatch.setattr(attention, "programs_at_once", lambda device: 16)  # so that keys are split
    monkeypatch.setattr(sampling, "SORTED", 128)  # so that there are several chunks
    layers = ("int8", 0, 40, 256), ("int4", 64, 40, 256)
    mixtures = ("16 bits", 0, 4, 2, 96, 64, True), ("mxfp4", 32, 8, 3, 64, 96, False)
    return Sizes(
        device, "float32", (4, 2, 16), True, 40, False, 200, layers, (12, 3, 4), ROWS, LENGTHS, 3, mixtures
    )


def failed(sizes: Sizes, *names: str) -> dict[str, str]:
    """The errors of parts by name."""
    found = zip(names, check.errors(sizes, PARTS | STEPS, names, {}), strict=True)
    return {part: error for part, error in found if error}


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_right(sizes, part):
    assert not failed(sizes, part)


@pytest.mark.parametrize("part", ("attend", "move"))
def test_caches_in_float8(sizes, part):
    """Heads of a size that is no power of two are moved."""
    assert not failed(sizes._replace(float8=True, heads=(4, 2, 20 if part == "move" else 16)), part)


def outside(where: int):
    """A fault of `growing.accept`: it writes before its results, or after them."""
    def wrong(right, *arguments):
        path, count = right(*arguments)
        offset = path.numel() if where > 0 else -1
        torch.as_strided(path, (1,), (1,), path.storage_offset() + offset).zero_()
        return path, count

    return wrong


calls = count()
FAULTS = {  # the part, its kernel, a wrong one and the error
    "at one length": (
        "attend", "kernels.gpu.cache.attend",
        lambda right, *a: right(*a) + 0.1 * (a[8] == 64).any(),
        r"1 x 1 rows of 1 after \(64,\) tokens: 64 of 64 numbers differ, by up to 0\.1"),
    "reads a slot that nobody may see": (
        "attend", "kernels.gpu.cache.attend",
        lambda right, *a: right(*a) + 0 * a[6][a[7], 1, 0, 0, a[8].max() + a[9].shape[2], 0],
        ".* 64 of 64 numbers differ, by up to nan$"),
    "writes before": ("accept", "kernels.gpu.growing.accept", outside(-1), ".* writes outside its results"),
    "writes after": ("accept", "kernels.gpu.growing.accept", outside(1), ".* writes outside its results"),
    "not the same each time": (
        "linear", "kernels.gpu.products.linear", lambda right, *a: right(*a) + (next(calls) == 2) * 1e-6,
        "int8 40 x 256, 1 rows, tiles of 64 x 64: repeated, it gives other numbers"),
}


@pytest.mark.parametrize("part, kernel, wrong, error", FAULTS.values(), ids=FAULTS)
def test_a_kernel_that_is_wrong(sizes, monkeypatch, part, kernel, wrong, error):
    right = pkgutil.resolve_name(kernel)
    monkeypatch.setattr(kernel, partial(wrong, right))
    found = failed(sizes, part, "emit")
    assert list(found) == [part] and re.match(error, found[part])


@pytest.fixture
def small(sizes, monkeypatch) -> Sizes:
    monkeypatch.setattr(steps, "VOCABULARY", 100)
    monkeypatch.setattr(attention, "programs_at_once", lambda device: 1)
    monkeypatch.setattr(steps, "TREE", TreeShape(6, 2, 3))
    monkeypatch.setattr(steps, "REPLAYS", 2)  # and instead of compilers:
    monkeypatch.setattr(compiling, "make_graph", lambda function, args, path, say: function)
    monkeypatch.setattr(compiling, "find_graph", lambda path, say: None)
    return sizes


@pytest.mark.parametrize("step", ("captured step", *dear("compiled step")))
def test_steps_are_right(small, monkeypatch, step):
    """Each has a product of ours in it, the head's."""
    right, calls = products.linear, []
    monkeypatch.setattr(products, "linear", lambda *a: calls.append(a) or right(*a))
    assert not failed(small, step) and calls


def test_a_replay_that_reads_memory_given_away(small, monkeypatch):
    """It is right at first."""
    results, prepared = {}, steps._prepared

    def prepare(*given):
        passes = prepared(*given)
        passes.captured = replay
        return passes

    def replay(key, call, still):
        if key in results and key[0] == "step":
            results[key][0].scores.fill_(float("nan"))
            return results[key]
        return results.setdefault(key, call())

    monkeypatch.setattr(steps, "_prepared", prepare)
    found = failed(small, "captured step", "accept")
    assert list(found) == ["captured step"] and "numbers differ, by up to nan" in found["captured step"]


CHILD = """
import ast, json, os, sys
sizes, failed = ast.literal_eval(sys.stdin.read())
print('"started"', flush=True)
for part in sys.argv[1:]:
    error = '"it has rank in it"' if part == 'step' and 'rank' not in failed else '""'
    %s
    print(error, flush=True)
"""
DEATHS = {
    "if part == 'rank': print('8 rows:', file=sys.stderr, flush=True); os.abort()":
        "8 rows: the process died of SIGABRT",
    "if part == 'rank': sys.exit('CUDA error: an illegal address')":
        "the process ended: CUDA error: an illegal address",
    "if part == 'rank': print('8 rows:', file=sys.stderr, flush=True); import time; time.sleep(60)":
        "8 rows: no end after 3 s",
    "if part == 'rank': error = '\"3 rows: wrong\"'": "3 rows: wrong",
}
OTHERS = {"triton.__version__": "0", "torch.__version__": "0", "kernels.gpu.check.code_digest": str}


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "COMPILED", tmp_path)
    monkeypatch.setattr(check, "SECONDS", 3)
    return tmp_path


@pytest.mark.parametrize("does, error", DEATHS.items())
def test_a_part_that_fails_or_ends_the_process(sizes, place, monkeypatch, does, error):
    """It is left out, the others are checked, the step without it. The result is kept, unless kernels or
    what compiles them are others.
    """
    lines: list[str] = []
    asked = partial(check.failures, sizes, lines.append, [["move", "rank", "draw"], ["emit"], ["step"]])
    found = asked((sys.executable, "-c", CHILD % does))
    assert found == {"rank": f"the GPU path does without 'rank', which is slower: {error}"}
    assert asked(("no-such-program",)) == found and lines[1:] == [found["rank"]] * 2
    for what, value in OTHERS.items():
        with monkeypatch.context() as m:
            m.setattr(what, value)
            assert not any(path.exists() for path in check.places_of(sizes)), what


def test_a_check_that_does_not_start(sizes, place):
    """All parts are left out, and checked again by the next process."""
    command = sys.executable, "-c", "import sys; sys.exit('no memory')"
    found = check.failures(sizes, lambda line: None, [["move"], ["rank"]], command)
    assert list(found) == ["move", "rank"] and not list(place.rglob("*.json"))
    assert "the check does not start (the process ended: no memory)" in found["move"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the tests run there")
def test_a_target_is_checked(place, monkeypatch):
    """In a real process: at the target's sizes, whatever can be computed here."""
    monkeypatch.setattr(check, "SECONDS", 300)
    monkeypatch.setattr(steps, "PARTS", ("extend", "unknown"))
    monkeypatch.setattr(steps, "STEPS", ("accept",))
    target, lines = Transformer(ModelArgs(32, 32, 48, 1, 2, 1, 16)), []
    backend = steps.checked(CudaBackend(), target, False, lines.append)
    assert list(backend.failures) == ["unknown"] and backend.name == "cuda without unknown"
    assert lines[1:] == ["the GPU path does without 'unknown', which is slower: 'unknown'"]
    sizes = Sizes.of(target, True)
    assert sizes.heads == (2, 1, 16) and sizes.dtype == "float32" and sizes.float8
    assert ("int8", 0, 96, 32) in sizes.layers and not sizes.mixtures


def test_a_target_on_a_gpu_is_checked_when_it_is_loaded(golden, monkeypatch):
    monkeypatch.setattr(steps, "checked", lambda backend, model, float8, say: 1 / 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(ZeroDivisionError):
        load_target(golden, Runtime("cpu"))


def test_ranks_leave_out_what_fails_on_any(monkeypatch):
    """In one order: some would capture exchanges that others launch."""
    fails = {"captured step": "one", "rank": "two"}, {"emit": "three"}, {}
    target = Transformer(ModelArgs(32, 32, 48, 1, 2, 1, 16))
    found, sent = [], []

    class Ranks:
        def every(self, x):
            sent.append(x)
            return torch.stack(sent)  # each rank's, once all have sent

    target.ranks = Ranks()
    for own in fails * 2:
        monkeypatch.setattr(steps, "failures", lambda *a, own=own: own)
        found.append(steps.checked(CudaBackend(), target, False, print))
    found = found[len(fails) :]
    assert [backend.name for backend in found] == ["cuda without rank, emit, captured step"] * 3
    assert found[0].failures["rank"] == "two" and "another rank" in found[2].failures["rank"]


@pytest.mark.parametrize("part", PARTS)
def test_a_backend_without_a_part(part):
    """It has the definition in place of the kernel, and another name: saved graphs are not shared."""
    backend = CudaBackend().without({part: "a line"})
    target = Mixture(MixtureArgs(32, 32, 48, 1, 2, 1, 16, num_experts=3, experts_per_token=1))
    quantize_linears(target, Scheme("int8", 0, None))
    backend.prepare(target)
    ours = {
        "attend": backend.reads_length, "move": target.Caches.move is LayerCaches.move,
        "linear": type(target.layers[0].wo) is not QuantizedLinear,
        "experts": type(target.layers[0].mlp) is not Experts,
    }
    ours |= {name: getattr(type(backend), name) is not getattr(type(TORCH), name) for name in PARTS
             if name not in ours}
    assert [name for name, kernel in ours.items() if not kernel] == [part]
    assert backend.name == f"cuda without {part}" and backend.failures == {part: "a line"}
    assert part != "move" or target.Caches.move is KVCaches.move
    assert CudaBackend().without({}).name == "cuda"
