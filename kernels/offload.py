"""Layers whose weights stay in the host's memory and come to the device for every pass.

The device has two rooms of one layer's size, which the layers take in turns: while one is computed, a second
stream copies the next one's weights into the other room. Two events a room keep the order: what is copied
waits until the layer before it in this room has been computed, and computing waits until all has arrived. A
pass is always the same copies between the same addresses, so a CUDA graph holds them as it holds kernels.

For torch.compile `fetch` and `arrive` are operators that change a room's tensors: what reads these stays on
its side of them, and a step is one graph.
"""
from __future__ import annotations

import copy
import mmap
import weakref
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn as nn
from torch import Tensor

from model import TargetBlock, Transformer

ROOMS = 2  # so that less than `common.cli.LEAST_OFFLOADED` layers would save nothing
ALIGNED = 256  # bytes


class Streams(Protocol):
    """What computes on a device, and what copies to it at the same time: two queues, each in order."""

    def event(self) -> object:
        """Something that can be recorded in one queue and waited for in the other."""

    def record(self, event: object, copying: bool) -> None:
        """Let `event` be the end of what has been put into a queue so far."""

    def wait(self, event: object, copying: bool) -> None:
        """Let what is put into a queue from now on wait for `event` as it was recorded last."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy from pinned memory of the host, in the queue that copies."""

    def pinned(self, size: int) -> Tensor:
        """So many bytes of the host's memory [size] uint8, from which the device copies by itself."""


class CudaStreams:
    """`Streams` of a GPU: its current stream, whichever that is, and one of its own."""

    def __init__(self, device: torch.device):
        self.device, self.copies = device, torch.cuda.Stream(device)
        self._pinned: list[Tensor] = []
        weakref.finalize(self, _unpin, self._pinned).atexit = False

    def _queue(self, copying: bool) -> torch.cuda.Stream:
        return self.copies if copying else torch.cuda.current_stream(self.device)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def record(self, event: torch.cuda.Event, copying: bool) -> None:
        event.record(self._queue(copying))

    def wait(self, event: torch.cuda.Event, copying: bool) -> None:
        self._queue(copying).wait_event(event)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.copies):
            target.copy_(source, non_blocking=True)

    def pinned(self, size: int) -> Tensor:
        # PyTorch's pinned memory comes in powers of two: up to twice what is needed. Whole pages are.
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)))
        self._pinned.append(memory)
        return memory


def _unpin(pinned: list[Tensor]) -> None:
    """Give pieces of memory back as they were; until then they are not freed."""
    for memory in pinned:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    pinned.clear()


class Room:
    """Room for the weights of one layer on the device, and the module that computes with them.

    hosts: the weights of all layers that come here, by their number among the offloaded ones.
    """

    def __init__(self, block: TargetBlock, hosts: dict[int, list[Tensor]], streams: Streams):
        self.block, self.hosts, self.streams = block, hosts, streams
        self.tensors = list(block.parameters())
        self.left, self.arrived = streams.event(), streams.event()

    def fetch(self, layer: int) -> None:
        """Let a layer's weights come, once what was put into the device's queue so far has been computed."""
        self.streams.record(self.left, copying=False)
        self.streams.wait(self.left, copying=True)
        for target, source in zip(self.tensors, self.hosts[layer]):
            self.streams.copy(target, source)
        self.streams.record(self.arrived, copying=True)

    def arrive(self) -> None:
        """Let what is computed from now on wait for the weights that were fetched last."""
        self.streams.wait(self.arrived, copying=False)


_rooms: WeakValueDictionary[int, Room] = WeakValueDictionary()  # by the address of their first tensor


def _room(tensors: list[Tensor]) -> Room:
    """The room of these tensors. Raises RuntimeError if a compiler has put others in their place."""
    room = _rooms.get(tensors[0].data_ptr())
    if room is None or any(a.data_ptr() != b.data_ptr() for a, b in zip(room.tensors, tensors, strict=True)):
        raise RuntimeError("offloaded weights: the compiler has moved the room that they are to come to")
    return room


# `turn`, which nobody reads, keeps these operators in their order. `after` keeps one behind what gives it:
# else the compiler may put what reads a room behind the operator that changes it, and copy the room before.
@torch.library.custom_op("eagle_offload::fetch", mutates_args=("room", "turn"))
def fetch(room: list[Tensor], turn: Tensor, layer: int, after: Tensor | None) -> None:
    """`Room.fetch` of the room that has these tensors."""
    _room(room).fetch(layer)


@torch.library.custom_op("eagle_offload::arrive", mutates_args=("room", "turn"))
def arrive(room: list[Tensor], turn: Tensor, after: Tensor) -> None:
    """`Room.arrive` of the room that has these tensors."""
    _room(room).arrive()


@dataclass(eq=False)
class Offloaded:
    """The last `count` layers of a target, which are in the host's memory. bytes: of one of them."""

    count: int
    bytes: int
    rooms: list[Room] = field(repr=False)
    turn: Tensor = field(repr=False)

    def begin(self) -> None:
        """Let the first of them come."""
        for layer, room in enumerate(self.rooms):
            fetch(room.tensors, self.turn, layer, None)

    def layer(self, number: int, after: Tensor) -> TargetBlock:
        """The module that has the weights of one of them for a while; `after` is what the layer before gave.

        That one's room is free now, and the next layer's weights come to it.
        """
        coming = number + ROOMS - 1
        if ROOMS <= coming < self.count:
            fetch(self.rooms[coming % ROOMS].tensors, self.turn, coming, after)
        room = self.rooms[number % ROOMS]
        arrive(room.tensors, self.turn, after)
        return room.block


def offload(target: Transformer, count: int, streams: Streams | None = None) -> None:
    """Let the last `count` layers of a target stay in the host's memory, in place, wherever they are now.

    streams: those of the target's GPU, if not given. Raises ValueError if there are not so many layers, or
    too few to save anything.
    """
    if not ROOMS < count <= len(target.layers):
        raise ValueError(f"{count} layers cannot be offloaded: {ROOMS + 1} to {len(target.layers)} can")
    device = target.embed.weight.device
    streams = streams or CudaStreams(device)
    layers = target.layers[-count:]
    flat = [_pin(layer, streams) for layer in layers]
    rooms = []
    for first in range(ROOMS):
        own = {id(p): _like(p, device) for p in layers[first].parameters()}
        block = copy.deepcopy(layers[first], own)
        hosts = {i: [p.data for p in layers[i].parameters()] for i in range(first, count, ROOMS)}
        rooms.append(Room(block, hosts, streams))
        _rooms[rooms[-1].tensors[0].data_ptr()] = rooms[-1]
    turn = torch.zeros(1, dtype=torch.uint8, device=device)
    target.offloaded = Offloaded(count, flat[0].numel(), rooms, turn)


def _like(p: nn.Parameter, device: torch.device) -> nn.Parameter:
    """A parameter of the same shape on the device."""
    return nn.Parameter(torch.empty_like(p, device=device), requires_grad=False)


def _pin(layer: TargetBlock, streams: Streams) -> Tensor:
    """Move a layer's weights into one piece of pinned memory, which is returned."""
    parameters = list(layer.parameters())
    sizes = [-(-p.nbytes // ALIGNED) * ALIGNED for p in parameters]
    memory = streams.pinned(sum(sizes))
    for p, part in zip(parameters, memory.split(sizes)):
        place = part[: p.nbytes].view(p.dtype).view(p.shape)
        place.copy_(p.data)
        p.data = place
    return memory
