"""What is compiled once is found again: by the next call, by the next object, by the next process."""
import contextlib
import gc
import os
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from helpers.compiling import Adder, add, check, span

from checkpoint.loading import load_head, load_model
from drafters.eagle import Eagle
from drafters.lookahead import Lookahead
from drafters.retrieval import Rest
from engine.compile import CapturedCalls, CompiledFunction, SavedGraph, saved_places
from engine.engine import Engine
from engine.runtime import keep_compiled
from engine.state import State
from sampling.options import Sampling
from tree import TreeShape

pytestmark = [pytest.mark.compile, pytest.mark.slow]


class Compiling(Exception):
    """Something is about to be compiled that is to be found, or that need not be waited for."""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_compiled_once_and_found_again(cache):
    said: list[str] = []
    check(CompiledFunction(add, "sum", said.append), Adder())
    assert [line for line in said if "took" not in line] == ["compiling the sum ..."] * 2  # twice or not
    again: list[str] = []
    whole = CompiledFunction(add, "sum", again.append)
    check(whole, Adder())
    assert not again
    other = Adder(by=5)  # a constant that is compiled in
    check(CompiledFunction(add, "sum", again.append), other, (7,))
    assert len(again) == 4


def test_another_process_finds_it(cache):
    """And what it finds is right; a damaged file is made again."""
    script = (
        "from helpers.compiling import *; lines = [];"
        "check(CompiledFunction(add, 'sum', lines.append), Adder()); print(len(lines))"
    )

    def said() -> int:
        command = [sys.executable, "-c", script]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}/tests:{ROOT}", "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        return int(result.stdout)

    assert said() == 4
    assert said() == 0
    for damaged in (cache / "graphs").glob("*.graph"):
        damaged.write_bytes(damaged.read_bytes()[:20])
    for library in cache.rglob("*.main.so"):  # as a killed compiler leaves them
        library.write_bytes(library.read_bytes()[:20])
    assert said() == 4


def test_compiled_code_is_kept_with_the_kernels_unless_a_place_is_given(tmp_path, monkeypatch):
    """And never in a checkpoint: it is loaded as code."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    place = tmp_path / "kept"
    monkeypatch.setattr("engine.runtime.COMPILED", place)
    for there, chosen in ((None, place), (default_cache_dir(), place), ("/elsewhere", Path("/elsewhere"))):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if there:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", there)
        for _ in range(2):
            keep_compiled()
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(chosen)


def test_a_cache_that_can_only_be_read(cache, monkeypatch):
    """As in somebody else's checkout: what is in it is found, what is new goes to a folder of our own."""
    kept = cache / "kept"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    check(CompiledFunction(add, "sum", print), Adder())
    before = sorted(kept.rglob("*"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr("engine.runtime.READ_ONLY", found := [])
    monkeypatch.setattr("engine.compile.READ_ONLY", found)
    monkeypatch.setattr("engine.runtime.COMPILED", kept)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(cache))
    with monkeypatch.context() as m:
        m.setattr("os.access", lambda path, mode: False)
        keep_compiled()
        keep_compiled()
    own = cache / f"eagle-kept-{os.getuid()}"
    assert found == [kept] and os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own)
    said: list[str] = []
    check(CompiledFunction(add, "sum", said.append), Adder())
    assert not said
    check(CompiledFunction(add, "sum", said.append), Adder(by=5))
    assert said and sorted(kept.rglob("*")) == before


def test_the_place_depends_on_all_that_is_compiled_in(cache, monkeypatch):
    def where(adder=None, n=7, twice=False, function=add):
        return saved_places(function, (adder or Adder(), span(n), twice))[0]

    same = where()
    assert same == where(n=20)  # the length is dynamic
    wider, tied = Adder(), Adder()
    wider.total = torch.zeros(4)
    tied.total = tied.weight
    others = [
        where(Adder(3)), where(Adder(dtype=torch.float64)), where(wider), where(tied), where(twice=True),
        where(function=check)
    ]
    with monkeypatch.context() as m:
        m.setattr(torch, "get_num_threads", lambda: 77)
        others.append(where())
    with monkeypatch.context() as m:
        m.setattr("engine.compile.features", lambda: frozenset({"another"}))
        others.append(where())
    with monkeypatch.context() as m:
        m.setattr("engine.compile._gpu", lambda args: ("another",))
        others.append(where())
    assert len({same, *others}) == len(others) + 1
    assert same == where()


def times_compiled(function) -> int:
    """How often a function that doubles its input was compiled when a new process would first call it."""
    said: list[str] = []
    compiled = CompiledFunction(function, "double", said.append)
    assert compiled(Adder(), torch.ones(3)).tolist() == [4.0] * 3
    return len(said) // 2


def test_a_graph_is_made_again_when_its_own_sources_change_and_no_others(cache, tmp_path, monkeypatch):
    """Its own are the files that were traced and those of the constants they import; others cost nothing."""
    monkeypatch.setattr("engine.compile.ROOT", tmp_path)
    monkeypatch.setattr("engine.compile.IMPORTED", float("inf"))  # the files below are younger than that
    (tmp_path / "traced_here.py").write_text(
        "from only_constants import FACTOR\n\ndef function(adder, x):\n    return x * FACTOR + adder.by\n"
    )
    (tmp_path / "only_constants.py").write_text("FACTOR = 2\n")
    (tmp_path / "never_traced.py").write_text("def function(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import never_traced  # noqa: F401
    import traced_here

    assert times_compiled(traced_here.function) == 1 and times_compiled(traced_here.function) == 0
    (tmp_path / "never_traced.py").write_text("changed = True\n")
    assert times_compiled(traced_here.function) == 0
    for name in ("traced_here", "only_constants"):
        file = tmp_path / f"{name}.py"
        file.write_text(file.read_text() + "# changed\n")
        assert times_compiled(traced_here.function) == 1 and times_compiled(traced_here.function) == 0
    assert len(list((cache / "graphs").glob("*.graph"))) == 1, "the graph of the old sources is replaced"


def test_code_that_cannot_be_recognised_later_is_not_saved(cache, tmp_path, monkeypatch):
    """A file that changed since it was imported, and code of another project: the one is not saved, the other
    is compared by its own file.
    """
    (tmp_path / "of_a_user.py").write_text("def function(adder, x):\n    return x * 2 + adder.by\n")
    monkeypatch.syspath_prepend(tmp_path)
    import of_a_user

    assert times_compiled(of_a_user.function) == times_compiled(of_a_user.function) == 1
    assert not list((cache / "graphs").glob("*"))
    monkeypatch.setattr("engine.compile.IMPORTED", float("inf"))
    assert times_compiled(of_a_user.function) == 1 and times_compiled(of_a_user.function) == 0
    (tmp_path / "of_a_user.py").write_text("# another text\n")
    assert times_compiled(of_a_user.function) == 1


@pytest.mark.parametrize("drafter", ["eagle", "lookahead", "rest"])
def test_a_decoder_that_finds_its_step(cache, golden, drafter):
    """Same texts, same trees for the observer, nothing compiled; another tree is another step."""
    target, _ = load_model(golden)
    head = load_head(golden / "eagle3", target, "eagle3")
    eager = Engine(target, max_seq_len=100, compile=False).generate([[256, 72, 101]], Sampling(20))[0].ids
    store = torch.tensor([256, *range(90, 120)] * 2, dtype=torch.int32)
    order = torch.tensor(sorted(range(len(store)), key=lambda i: store[i:].tolist()), dtype=torch.int32)

    def decode(shape, say):
        made = {
            "eagle": Eagle(head, shape), "lookahead": Lookahead(target.args.vocab_size, 2, 3, 2),
            "rest": Rest(store, order, target.args.vocab_size, 6, 3, 2, 2, 8),
        }[drafter]
        engine, requests = Engine(target, made, max_seq_len=100, say=say), []
        events = [*engine.run([[256, 72, 101]], [Sampling(20)], requests, watch=True)]
        return requests[0].ids, [event.draft for event in events if event.draft]

    def stop(line: str) -> None:
        raise Compiling(line)

    said = []
    ids, trees = decode(TreeShape(4, 1, 2), said.append)
    again, same = decode(TreeShape(4, 1, 2), stop)
    assert any("compiling the step" in line for line in said)
    assert ids == again
    assert trees == same and ids == eager
    if drafter == "eagle":
        with pytest.raises(Compiling, match="compiling the "):
            decode(TreeShape(5, 1, 2), stop)


@pytest.mark.parametrize("vocabulary, same", ((16, True), (5, False)))
def test_places_of_another_alignment_have_another_graph(cache, vocabulary, same):
    """Reading 16 bytes from the middle of them is an error on a GPU."""
    state = State(3, 40, 4, 0, [], torch.float32, "cpu", vocabulary=vocabulary)
    one, other = (saved_places(add, (state.rows(place, 1),)) for place in (0, 1))
    assert (one == other) == same


def test_a_saved_graph_that_fails_is_made_again(cache, monkeypatch):
    """One line says so; the next process finds the new one."""
    said: list[str] = []
    check(CompiledFunction(add, "sum", said.append), Adder())

    class Broken:
        def __call__(self, args):
            raise RuntimeError("of another machine")

    find = SavedGraph.find.__func__
    with monkeypatch.context() as patch:
        patch.setattr(SavedGraph, "find", classmethod(lambda cls, path: find(cls, path) and Broken()))
        again: list[str] = []
        check(CompiledFunction(add, "sum", again.append), Adder())
    assert "of another machine" in again[0] and again[1].startswith("compiling")
    found: list[str] = []
    check(CompiledFunction(add, "sum", found.append), Adder())
    assert not found


def test_nothing_is_collected_while_a_call_is_captured(monkeypatch):
    """It would invalidate the capture. The call, and with it what it reads, lives with its graph."""
    seen = []

    class Graph(SimpleNamespace):
        def replay(self):
            seen.append("replayed")

    @contextlib.contextmanager
    def recording(graph, pool, stream):
        assert not gc.isenabled() and stream is calls.stream
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "graph_pool_handle": lambda: (0, 1), "Stream": lambda device: stream, "CUDAGraph": Graph,
        "current_stream": lambda: stream, "stream": lambda s: contextlib.nullcontext(), "graph": recording,
        "device": lambda device: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    calls = CapturedCalls(torch.device("cuda"), contextlib.nullcontext)

    def call(x):
        seen.append(gc.isenabled())
        return x

    read = torch.ones(1)
    kept = weakref.ref(read)
    calls("key", partial(call, read))
    del read
    assert seen == [True, True, False, "replayed"] and gc.isenabled() and kept() is not None

    def fails():
        if not gc.isenabled():
            raise RuntimeError("cannot be captured")

    with pytest.raises(RuntimeError, match="cannot be captured"):
        calls("other", fails)
    assert gc.isenabled() and "other" not in calls.graphs
