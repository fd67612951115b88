"""OpenVINO GenAI as a peer. It has an environment of its own; openvino_worker.py runs there."""
from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bench import Contender, Decoded  # first: it makes the modules below importable
from peer_process import PeerProcess

from tree import TreeShape

WORKER = Path(__file__).with_name("openvino_worker.py")


class OpenVino(PeerProcess):
    """OpenVINO GenAI with a target and, unless it is None, its EAGLE-3 head: folders of optimum-cli.

    python: the interpreter of an environment with openvino-genai. properties: of its plugin for a CPU.
    """

    def __init__(
        self, python: str, target: str, head: str | None, threads: int, stop_ids: list[int],
        properties: dict[str, str] | None = None,
    ):
        # Activations in float32: bf16, its default where the processor has it, was no faster on int8 weights.
        given = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", **(properties or {})}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        super().__init__("--openvino", [python, str(WORKER), target, head or "", json.dumps(given)], **pipes)
        self.stop_ids = stop_ids

    def come_up(self) -> None:
        """Wait for its first line."""
        self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise self.failed("ended")
        return json.loads(line)

    def contender(self, **drafting: int) -> Contender:
        """A contender that decodes with these fields of GenerationConfig; without any, plainly.

        The clock runs in the process, from the first token to the last.
        """
        def decode(ids: list[int], tokens: int) -> Decoded:
            request = {"ids": ids, "tokens": tokens, "stop_ids": self.stop_ids, "drafting": drafting}
            try:
                print(json.dumps(request), file=self.process.stdin, flush=True)
            except BrokenPipeError:
                raise self.failed("ended") from None
            answer = self._answer()
            lengths = [len(step) for step in answer["steps"][1:]]
            new = [token for step in answer["steps"] for token in step]
            return Decoded(new, sum(lengths) / answer["seconds"] if lengths else 0.0, lengths)

        return decode


def as_chain(length: int) -> dict[str, int]:
    """GenerationConfig's fields for a chain of drafted tokens."""
    return {"num_assistant_tokens": length}


def as_tree(shape: TreeShape) -> dict[str, int]:
    """GenerationConfig's fields for a tree: there the root is no node, and the first level is a depth."""
    nodes, depth = shape.nodes - 1, shape.depth + 1
    return {"num_assistant_tokens": nodes, "tree_depth": depth, "branching_factor": shape.width}
