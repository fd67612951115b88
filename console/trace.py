"""The trace file: every drafted tree and accepted path of one sequence."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from common.errors import InputError
from common.files import atomic_path
from engine.decoder import Decoder
from engine.text_decoder import Job, Piece, Result
from tree import Tree


class Trace:
    """Records every step of one sequence: the tree that was drafted and the path that was accepted.

    Keys per step NNN: `input_ids` [N+1] committed tokens and the root, `draft_tokens` [T], `parent` [T] (the
    root's is 0), `tree_mask` [T, T] bool, `depth` [T], `accepted` [count] node indices, root first; and for
    all, `prompt` [P] and `output_ids` [P + new].
    """

    def __init__(self, decoder: Decoder):
        self.decoder, self.tensors, self.steps, self.pending = decoder, {}, 0, None

    def watch(self, job: Job) -> Iterator[Piece]:
        """The job's pieces, every step recorded as it passes."""
        known = list(job.run.prompts[0])
        with self.decoder.observe(self._see):
            for piece in job:
                self.add(known, len(piece.ids))
                known += piece.ids
                yield piece

    def _see(self, tree: Tree, path: Tensor) -> None:
        self.pending = [t[0].cpu().clone() for t in tree[:4]], path[0].cpu().clone()

    def add(self, known: list[int], emitted: int) -> None:
        """Record the step that followed `known` (prompt and output so far) and emitted so many tokens."""
        if self.pending is None:
            return  # a prefill pass
        (tokens, parent, depth, ancestors), path = self.pending
        self.pending = None
        step = {
            "input_ids": torch.tensor(known), "draft_tokens": tokens, "parent": parent,
            "tree_mask": ancestors,
            "depth": depth, "accepted": path[:emitted],
        }
        self.tensors |= {f"{self.steps:03d}.{k}": v.contiguous() for k, v in step.items()}
        self.steps += 1

    def save(self, path: str | Path, result: Result) -> None:
        """Write the safetensors file, under a temporary name first. Raises InputError."""
        shape = self.decoder.drafter.shape
        # Of passes of a head, as EAGLE counts.
        meta = {"total_token": str(shape.nodes), "depth": str(max(0, shape.window - 2))}
        if shape.width is not None:
            meta["top_k"] = str(shape.width)
        ends = {
            "prompt": torch.tensor(result.prompt_ids),
            "output_ids": torch.tensor(result.prompt_ids + result.ids)
        }
        try:
            with atomic_path(path) as part:
                part.write_bytes(save(self.tensors | ends, metadata=meta))
        except OSError as e:
            raise InputError(f"--trace {path}: cannot be written ({e})") from None
