"""What a captured step must be, checked without a GPU: no synchronization, and sequences can be frozen."""
import pytest
import torch
from helpers.decoding import ids, prompts
from helpers.drafters import cases, make_drafter, small_models
from shapes import random_models
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.draft import HeadDrafter
from engine.engine import Engine
from engine.sampling import Modes, Sampling
from tree import TreeShape

aten = torch.ops.aten
# What brings a number to the host, or has a result whose size only the device knows.
WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default, aten._unique2.default, aten.unique_dim.default, aten.bincount.default,
    aten.repeat_interleave.Tensor, aten.lift_fresh.default, aten.lift_fresh_copy.default,
}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
MODES = {"greedy": Modes(), "everything": Modes(True, True, True, True, True)}


class Watched(TorchDispatchMode):
    """Collects the operators that a step on a device may not call if it is to be captured."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.seen = device, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator in WAITS:
            self.seen.append(str(operator))
        if operator in INDEXED and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.seen.append(f"{operator} by a mask")
        result = operator(*args, **kwargs or {})
        for x in tree_leaves((args, result)):
            if isinstance(x, torch.Tensor) and x.device.type != self.device and x.ndim:
                self.seen.append(f"{operator} takes or gives a tensor on {x.device}")
        return result


class Uploads(TorchFunctionMode):
    """Collects what becomes a tensor of numbers of the host: copied from there, not computed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        index = args[1] if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else ()
        if function in (torch.tensor, torch.as_tensor, torch.from_numpy) or any(
            isinstance(i, list) for i in (index if isinstance(index, tuple) else (index,))
        ):
            self.seen.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", cases())
def test_a_step_waits_for_nothing(name, modes):
    """On the meta device, where nothing has a value: an operator that asks for one fails, if `Watched` does
    not see it first.
    """
    target, head = random_models("tiny", torch.bfloat16, "cpu", None)
    drafter = make_drafter(name, target, head, head, lambda heads: None).to("meta")
    engine = Engine(target.to("meta"), drafter, batch=2, max_seq_len=300, compile=False)
    runner = engine.runner
    group, live_slots = runner.slot_range(0, 2), runner.live_slots(64)
    for run in (
        lambda: runner.step(group, live_slots, drafter, modes),
        lambda: runner.prefill(group, live_slots, 64, modes),
    ):
        with torch.no_grad(), Watched("meta") as watched, Uploads() as uploads:
            run()
        assert not watched.seen + uploads.seen


@pytest.mark.parametrize("name", cases())
def test_frozen_sequences_do_not_change(name):
    """A step captured in the middle of a text changes neither the state nor the drafter."""
    target, head = small_models(128, layers=4)
    drafter = make_drafter(name, target, head, head, lambda heads: None)
    engine = Engine(target, drafter, batch=3, max_seq_len=300, compile=False)
    texts, samplings = prompts(3, longest=60), [Sampling(12), Sampling(12, 1.0, seed=1), Sampling(12)]
    alone = ids(engine, texts, samplings)
    requests, runner, held = [], engine.runner, 0
    for event in engine.run(texts, samplings, requests):
        if len(event.request.accept_lengths) not in (1, 2, 3) or len(engine.requests) < 3:
            continue
        kept = {
            name: buffer.clone()
            for name, buffer in (*engine.state.named_buffers(), *drafter.named_buffers())
            if "caches" not in name and name != "out"  # drafted rows of caches are overwritten
        }
        with runner.frozen(), torch.no_grad():
            for one in (drafter, runner.plain):
                runner.step(runner.slot_range(0, 3), runner.live_slots(120), one, Modes(noisy=True))
        now = dict([*engine.state.named_buffers(), *drafter.named_buffers()])
        changed = [name for name, before in kept.items() if not torch.equal(before, now[name])]
        assert kept and not changed
        held += 1
    assert held and [r.ids for r in requests] == alone


def test_launches_and_exchanges_upload_nothing(models):
    """A Python list as an index, or a tensor of one, would wait for the step before on a GPU."""
    target, head = models
    engine = Engine(target, HeadDrafter(head, TreeShape(6, 2, 2)), batch=3, max_seq_len=100, compile=False)
    engine.runner.captured = lambda key, call, still: call()
    for i in range(3):
        engine.admit([5, 6 + i], Sampling(40))
    while engine.slots.decoding < 3:
        engine.step()
    with torch.no_grad(), Uploads() as uploads:
        engine._launch(engine.requests), engine.slots.swap(0, 2)
    assert not uploads.seen
