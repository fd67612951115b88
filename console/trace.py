"""generate.py --trace: write the draft tree and accepted path of every step to a safetensors file."""
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save

from common.errors import InputError
from common.writing import atomic_path
from engine.request import Event, Request
from tree import TreeShape, depth_and_ancestors


def check(path: str, sequences: int) -> None:
    """Raise InputError unless one sequence is decoded and the file can be written."""
    if sequences != 1:
        raise InputError("--trace records one sequence: pass one prompt and one sample")
    if os.path.isdir(path) or not os.access(Path(path).resolve().parent, os.W_OK):
        raise InputError(f"--trace {path}: is not a writable file")


class Trace:
    """Records the draft tree and the accepted path of every step of one request.

    Tensors of step NNN, named NNN.name:
    input_ids [N+1]: committed tokens and the root. draft_tokens [T]: tokens of the nodes, root first.
    parent [T]: parent indices, 0 for the root. tree_mask [T, T] bool: ancestors of each node. depth [T].
    accepted [A]: indices of the accepted nodes, root first.
    Tensors of the request: prompt [P], output_ids [P + new]: prompt and answer.
    """

    def __init__(self, prompt: list[int], shape: TreeShape):
        self.shape, self.tensors, self.steps, self.tokens = shape, {}, 0, list(prompt)

    def watch(self, events: Iterable[Event]) -> Iterator[Event]:
        """Record the steps of a request (with `watch=True`) and pass its events through."""
        for event in events:
            if event.draft:
                parent = torch.tensor([event.draft.parent])
                depth, ancestors = depth_and_ancestors(parent, parent.shape[1])
                step = {
                    "input_ids": torch.tensor(self.tokens), "draft_tokens": torch.tensor(event.draft.tokens),
                    "parent": parent[0], "tree_mask": ancestors[0], "depth": depth[0],
                    "accepted": torch.tensor(event.draft.path[: len(event.ids)]),
                }
                self.tensors |= {f"{self.steps:03d}.{name}": x.contiguous() for name, x in step.items()}
                self.steps += 1
            self.tokens += event.ids
            yield event

    def save(self, path: str, request: Request) -> None:
        """Write the safetensors file. Raises InputError."""
        # EAGLE's `depth` is the number of the head's passes after the first.
        meta = {"total_token": str(self.shape.nodes), "depth": str(max(0, self.shape.max_commit - 2))}
        if self.shape.width is not None:
            meta["top_k"] = str(self.shape.width)
        sequences = {"prompt": torch.tensor(request.prompt), "output_ids": torch.tensor(request.tokens)}
        try:
            with atomic_path(path) as part:
                part.write_bytes(save(self.tensors | sequences, metadata=meta))
        except OSError as e:
            raise InputError(f"--trace {path}: cannot be written ({e})") from None
