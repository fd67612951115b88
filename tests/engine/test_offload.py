"""Layers whose weights come from the host's memory: the text of the target that is on its device whole.

On a CPU, with streams whose copies run as late or as early as their events allow; see `helpers.streams`.
"""
import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from helpers.families import make_target
from helpers.ranked import calls
from helpers.streams import Early, Late
from shapes import random_models

import checkpoint.loading as loading
import generate
from checkpoint.convert import convert
from checkpoint.loading import layer_of, load_head, load_model
from checkpoint.quantizing import quantize_folder
from common.errors import InputError
from console.statistics import as_json
from drafters.eagle import Eagle
from engine.api import Drafting, load_target
from engine.compiling import compile_graph
from engine.decoder import Decoder
from engine.fitting import Needs, settle
from engine.memory import bytes_per_step
from engine.runtime import Runtime
from engine.text_decoder import Result
from kernels.offload import offload
from kernels.quantized import Scheme
from sampling.options import Sampling
from tree import TreeShape

PROMPTS, TREE = [[5, 9, 60, 7], [11] * 20], TreeShape(8, 2, 4)
ORDERS = Late, Early
# name: (a family, or None for the golden target; dtype; mode)
TARGETS = {
    "fp32": (None, torch.float32, None), "bf16": (None, torch.bfloat16, None),
    "int8": (None, torch.float32, "int8"), "int4": (None, torch.bfloat16, "int4"),
    "qwen2": ("Qwen2.5 tied", torch.float32, None), "qwen3": ("Qwen3", torch.float32, "int8"),
    "experts": ("Qwen3-MoE", torch.float32, None), "experts int8": ("Mixtral", torch.bfloat16, "int8"),
}


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    """A function: the converted folder of one of TARGETS."""
    work = tmp_path_factory.mktemp("offload")

    @functools.cache
    def made(name: str):
        family, _, mode = TARGETS[name]
        whole = golden
        if family:
            make_target(work / f"{name} source", family)
            whole = convert(work / f"{name} source", work / name, quiet=True)
        if mode:
            whole, source = work / f"{name} quantised", whole
            quantize_folder(source, whole, Scheme(mode, 32 if mode == "int4" else 0, None))
        return whole

    return made


def ready(target, count: int, streams):
    """The target with its last layers offloaded; streams that look ahead have seen a pass."""
    offload(target, count, streams)
    if isinstance(streams, Early):
        streams.learn(lambda: a_pass(target))
    return target


def a_pass(target) -> None:
    """What a pass asks of the streams, without computing anything."""
    target.begin()
    for i in range(len(target.layers)):
        target.layer(i, torch.zeros(1))


def text(target, drafter=None, **options) -> list[list[int]]:
    decoder = Decoder(target, drafter, batch=2, max_seq_len=120, compile=False, **options)
    return [output.ids for output in decoder.generate(PROMPTS, Sampling(10))]


def rows(target) -> torch.Tensor:
    """The last states of a pass over some tokens."""
    tokens = torch.tensor([PROMPTS[0]])
    own = torch.arange(tokens.shape[1])[None]
    seen = torch.ones(1, len(own[0]), len(own[0]), dtype=torch.bool).tril()
    with torch.no_grad():
        return target(tokens, own, own, seen, target.caches(1, 8))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_the_text_is_that_of_the_resident_target(folder, name):
    dtype, states = TARGETS[name][1], []
    resident, _ = load_model(folder(name), dtype=dtype)
    expected = text(resident)
    for order in ORDERS:
        target, _ = load_model(folder(name), dtype=dtype)
        assert text(ready(target, 5, order())) == expected
        states.append(rows(target))
    assert all(torch.equal(state, rows(resident)) for state in states)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_drafted_text(folder, golden, name, order):
    """The copies begin before the draft; those of a step are as many as those of a pass."""
    found = []
    for count in (0, 3, 8):
        streams = order()
        target, _ = load_model(folder(name), dtype=TARGETS[name][1])
        ready(target, count, streams) if count else None
        drafter = Eagle(load_head(golden / "eagle3", target, "eagle3"), TREE)
        found.append(text(target, drafter))
        tensors = len(list(target.layers[0].parameters()))
        assert streams.copies % tensors == 0 and bool(streams.copies) == bool(count)
    assert found[0] == found[1] == found[2]


class NotHeld(Early):
    """What is copied does not wait until its room has been left."""

    def wait(self, event, copying):
        if not copying:
            super().wait(event, copying)


class NotAwaited(Late):
    """What is computed does not wait for its weights."""

    def wait(self, event, copying):
        if copying:
            super().wait(event, copying)


class SaidTooSoon(Late):
    """The weights are said to have arrived when the first of them has."""

    def record(self, event, copying):
        super().record(event, copying)
        if copying:
            self.queue.pop()
            self.queue.insert(1, event)


@pytest.mark.parametrize("broken", [NotHeld, NotAwaited, SaidTooSoon])
def test_a_missing_event_shows(folder, broken):
    """So that the tests above mean something."""
    resident, _ = load_model(folder("fp32"))
    target, _ = load_model(folder("fp32"))
    assert not torch.equal(rows(ready(target, 5, broken())), rows(resident))


def test_without_a_cache_too(folder):
    resident, _ = load_model(folder("fp32"))
    for order in ORDERS:
        target, _ = load_model(folder("fp32"))
        ready(target, 4, order())
        a, b = (model.causal(torch.tensor([PROMPTS[0]]), (0, 5, 8)) for model in (resident, target))
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.slow
def test_a_step_is_one_graph_with_a_copy_for_each_layer(folder, golden):
    """As torch.compile traces it for GPUs; the first copies come before all that is drafted."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    class Traced(Decoder):
        def function(self, function, what):
            return compile_graph(function, backend=count)

    texts = []
    for kind, layers in ((Decoder, 0), (Traced, 5)):
        target, _ = load_model(folder("fp32"))
        if layers:
            ready(target, layers, Early())
        drafter = Eagle(load_head(golden / "eagle3", target, "eagle3"), TreeShape(4, 1, 2))
        decoder = kind(target, drafter, max_seq_len=80, compile=False, chunks=(32,))
        texts.append(decoder.generate([PROMPTS[0]], Sampling(8))[0].ids)
    assert texts[0] == texts[1] and len(graphs) == 2  # of prefill and of the step
    for graph in graphs:
        called = calls(graph)
        fetched, arrived = (called[f"eagle_offload.{name}.default"] for name in ("fetch", "arrive"))
        assert fetched == arrived == 5, called
    step = [str(node.target) for node in graphs[1].graph.nodes if node.op == "call_function"]
    copies = [i for i, name in enumerate(step) if name == "eagle_offload.fetch.default"]
    draft = next(i for i, name in enumerate(step) if "scaled_dot" in name)
    assert sum(i < draft for i in copies) == 2, step[: draft + 1]


@pytest.mark.compile
@pytest.mark.slow
def test_compiled_the_order_stays(tmp_path, monkeypatch):
    """The compiler leaves the rooms where they are and the calls in their order, which `Early` looks at."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    target, _ = random_models("tiny", torch.float32, "cpu", None)
    streams, x = Early(), torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))

    def states(x):
        target.begin()
        for i in range(len(target.layers)):
            layer = target.layer(i, x)
            x = x + layer.wo(layer.attn_norm(x))
        return x

    with torch.no_grad():
        expected = states(x)
        ready(target, 3, streams)
        found = compile_graph(states, dynamic=False)(x)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert streams.now == len(streams.calls)


def test_a_room_that_is_somewhere_else_is_not_taken(folder):
    target, _ = load_model(folder("fp32"))
    ready(target, 4, Late())
    room = target.offloaded.rooms[0]
    with pytest.raises(RuntimeError, match="the compiler has moved the room"):
        torch.ops.eagle_offload.fetch([t.clone() for t in room.tensors], target.offloaded.turn, 0, None)


def test_offloaded_layers_are_read_into_the_hosts_memory(golden, monkeypatch):
    """Tensor by tensor: which device each is opened for. The others' is no CPU."""
    devices = {}

    @contextlib.contextmanager
    def opened(path, advice, device="cpu"):
        with real(path, advice) as file:
            def get_tensor(name):
                devices[name] = str(device)
                return file.get_tensor(name)

            yield SimpleNamespace(get_tensor=get_tensor)

    real = loading.opened
    monkeypatch.setattr(loading, "opened", opened)
    load_model(golden, "meta", on_host=3)
    assert {layer_of(name) for name, device in devices.items() if device == "cpu"} == {5, 6, 7}
    assert {layer_of(name) for name, device in devices.items() if device == "meta"} == {-1, *range(5)}


def test_what_is_read_and_kept(folder):
    """Weights are counted once, wherever they are; the rooms are no weights."""
    resident, _ = load_model(folder("int4"))
    target, _ = load_model(folder("int4"))
    ready(target, 6, Late())
    drafter = Decoder(target, compile=False, max_seq_len=64).drafter
    assert bytes_per_step(target, drafter) == bytes_per_step(resident, drafter)
    assert loading.identity(target) == loading.identity(resident)
    own = sum(p.nbytes for p in resident.layers[0].parameters())
    assert own <= target.offloaded.bytes < own + 256 * len(list(resident.layers[0].parameters()))
    result = Result(None, [1], "", [2], "length", 1.0, 1.0, [1], {}, 0, [], None)
    assert as_json(result)["offload"] == 0
    assert as_json(result, offload=6, plain=result)["plain"]["offload"] == 6


def test_what_fits_is_known_beforehand(golden):
    """By the headers of the files: what the loaded models weigh, what the caches of a decoder take."""
    target, _ = load_model(golden)
    head = load_head(golden / "eagle3", target, "eagle3")
    needs = Needs.of(golden, None, (Drafting("eagle3"), Drafting()), 2, 300)
    assert needs.weights(0) == sum(p.nbytes for p in target.parameters())
    own = {id(p): p.nbytes for p in head.parameters()}
    assert needs.drafting >= sum(size for p, size in own.items() if p not in map(id, target.parameters()))
    decoders = [Decoder(target, drafter, batch=2, max_seq_len=300, chunks=(64, 512), compile=False)
                for drafter in (Eagle(head, TREE), None)]
    taken = sum(d.cache_bytes * (d.slots + 64) // d.slots for d in decoders)
    assert needs.caches == taken
    plain, in_fp8 = (Needs.of(golden, None, (Drafting(),), 2, 300, kv).caches for kv in ("auto", "fp8"))
    assert plain == 4 * in_fp8 > 0
    assert Needs.of(golden, torch.bfloat16, (), 1, 300).weights(0) * 2 == needs.weights(0)

    layer = needs.layers[0]
    assert set(needs.layers) == {layer} and needs.weights(8) == needs.rest + 2 * layer
    everything = needs.total(0)
    assert needs.least(everything) == 0
    # Of three layers two have room on the device: one is saved.
    assert needs.least(everything - 1) == needs.least(everything - layer) == 3
    assert needs.least(everything - layer - 1) == 4 and needs.least(needs.total(8)) == 8
    with pytest.raises(InputError, match=r"with 8 of 8 layers .* are still needed on the GPU"):
        needs.least(needs.total(8) - 1)


def test_what_is_decided_is_said(golden, monkeypatch):
    needs = Needs.of(golden, None, (Drafting("eagle3"),), 1, 300)
    free = {"cuda": needs.total(5), "cpu": 1 << 30}
    monkeypatch.setattr("engine.fitting.free_memory", lambda device: free[device.type])
    said, runtime = [], Runtime("cuda")
    arguments = golden, runtime, (Drafting("eagle3"),), 1, 300, said.append
    assert settle("auto", *arguments).offload == 5 and settle(7, *arguments).offload == 7
    assert settle(None, *arguments) is runtime
    assert len(said) == 2
    assert said[0].startswith("offload: 5 of 8 layers (0.00 GB) stay in the host's memory;")
    free["cuda"] = needs.total(0)
    assert settle("auto", *arguments).offload == 0 and "offload: 0 of 8 layers" in said[-1]
    with pytest.raises(InputError, match=r"--offload 9: .* has 8 layers"):
        settle(9, *arguments)
    free["cpu"] = 100
    with pytest.raises(InputError, match=r"of the host's memory 0\.00 GB are free"):
        settle(5, *arguments)


def test_a_cpu_has_nothing_to_offload_to(golden, monkeypatch):
    for asked in (lambda: load_target(golden, Runtime("cpu", offload=4)),
                  lambda: settle("auto", golden, Runtime("cpu"), (), 1, 100, print)):
        with pytest.raises(InputError, match="--offload: the weights are in the host's memory anyway"):
            asked()
    for count in (2, 9):
        with pytest.raises(ValueError, match=f"{count} layers cannot be offloaded: 3 to 8 can"):
            offload(load_model(golden)[0], count, Late())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--offload auto: with torchrun"):
        generate.parser().read(["--checkpoint", "x", "--prompt", "x", "--offload", "auto"])
