"""What `generate.py` prints about a run: statistics for people, JSON for programs, the trace file."""
from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from accepting import LOSSY
from decoder import Decoder
from errors import CheckpointError
from files import in_place_of
from text import Job, Piece, Result
from tree import Tree

DRAFTED, PLAIN = "\033[36m", "\033[0m"


def coloured(piece: Piece, decode) -> str:
    """A piece's text with the part that came from accepted drafts in colour. `decode`: token ids -> the text they complete."""
    head = decode(piece.ids[: piece.drafted])
    tail = piece.text[len(head) :] if piece.text.startswith(head) else ""
    return f"{DRAFTED}{head}{PLAIN}{tail}" if head and tail + head else piece.text


def as_json(result: Result, rule: str = "equal", plain: Result | None = None) -> dict:
    """The object printed by `--json`, of text accepted by this rule; with `plain` (the same prompt decoded plainly) also the
    comparison."""
    row = {
        "prompt": result.prompt if result.prompt is not None else result.prompt_ids,
        "text": result.text,
        "output_ids": result.ids,
        "tokens": len(result.ids),
        "seconds": result.seconds,
        "prefill_seconds": result.prefill_seconds,
        "tokens_per_second": result.tokens_per_second,
        "tau": result.tau,
        "accept_lengths": result.accept_lengths,
        "seed": result.seed,
        "finish": result.finish,
        "accept": rule,
        "lossy": rule in LOSSY,
    }
    if plain is not None:
        row |= {"plain": as_json(plain), "speedup": speedup(result, plain), "equal": result.ids == plain.ids}
    return row


def speedup(result: Result, plain: Result) -> float | None:
    """Ratio of tokens per second, None when one of them has no second token to time."""
    return result.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second and result.tokens_per_second else None


def bytes_per_step(decoder: Decoder) -> int:
    """Weight bytes one step reads: the target once, the drafter once per pass; embedding tables are looked up, not read."""
    def size(module) -> int:
        skip = () if module.lm_head is None else ("embed.",)  # tied, the table is the lm_head
        return sum(p.numel() * p.element_size() for n, p in module.named_parameters() if not n.startswith(skip))

    drafter = decoder.drafter
    drafts = getattr(drafter, "head", None) or getattr(drafter, "model", None)
    return size(decoder.target) + (drafter.passes * size(drafts) if drafts is not None else 0)


def peak_memory(device: torch.device) -> int:
    """Most bytes used so far: of the device's allocator on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def statistics(results: list[Result], decoder: Decoder) -> str:
    """A few lines about one decoded batch."""
    tokens = sum(len(r.ids) for r in results)
    seconds, prefill = results[0].seconds, results[0].prefill_seconds
    lengths = [n for r in results for n in r.accept_lengths]
    lines = [
        f"{tokens} tokens, {sum(len(r.prompt_ids) for r in results)} of prompt; prefill {prefill * 1e3:.0f} ms,"
        f" then {max(tokens - len(results), 0) / seconds if seconds else 0:.1f} tok/s ({seconds:.2f} s)"
    ]
    lines[0] += f"; {', '.join(sorted({r.finish for r in results}))}"
    if decoder.drafter.rule in LOSSY and bool((decoder.state.temperature > 0).any()):
        lines.append(f"{decoder.drafter.rule} acceptance: LOSSY, this text is not distributed as the target's")
    memory = f"peak memory {peak_memory(decoder.device) / 1e9:.2f} GB"
    if not lengths:
        lines.append(f"no step was needed; {memory}")
    else:
        steps = max(len(r.accept_lengths) for r in results)
        rate = bytes_per_step(decoder) * steps / seconds / 1e9 if seconds else 0.0
        lines.append(
            f"{steps} steps, tau {sum(lengths) / len(lengths):.2f} tokens per step; {rate:.1f} GB/s of weights read;"
            f" {memory}"
        )
        if decoder.drafter.shape.nodes > 1:
            counts = Counter(lengths)
            for n in range(1, decoder.drafter.shape.window + 1):
                share = counts[n] / len(lengths)
                lines.append(f"  {n:2d} tokens {counts[n]:5d} steps {share:6.1%} {'#' * round(40 * share)}")
    return "\n".join(lines)


class Trace:
    """Records every step of one sequence: the tree that was drafted and the path that was accepted.

    Keys per step NNN: `input_ids` [N+1] committed tokens and the root, `draft_tokens` [T], `parent` [T] (the root's is 0),
    `tree_mask` [T, T] bool, `depth` [T], `accepted` [count] node indices, root first; and for all, `prompt` [P] and
    `output_ids` [P + new].
    """

    def __init__(self, decoder: Decoder):
        self.decoder, self.tensors, self.steps, self.pending = decoder, {}, 0, None
        decoder.lag, decoder.observer = 0, self._see  # the host must know where each step began

    def watch(self, job: Job) -> Iterator[Piece]:
        """The job's pieces, every step recorded as it passes."""
        known = list(job.run.prompts[0])
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
            "input_ids": torch.tensor(known), "draft_tokens": tokens, "parent": parent, "tree_mask": ancestors, "depth": depth,
            "accepted": path[:emitted],
        }
        self.tensors |= {f"{self.steps:03d}.{k}": v.contiguous() for k, v in step.items()}
        self.steps += 1

    def save(self, path: str | Path, result: Result) -> None:
        """Write the safetensors file, under a temporary name first. Raises CheckpointError."""
        shape = self.decoder.drafter.shape
        meta = {"total_token": str(shape.nodes), "depth": str(max(0, shape.window - 2))}  # of passes of a head, as EAGLE counts
        if hasattr(shape, "width"):
            meta["top_k"] = str(shape.width)
        ends = {"prompt": torch.tensor(result.prompt_ids), "output_ids": torch.tensor(result.prompt_ids + result.ids)}
        try:
            with in_place_of(path) as part:
                part.write_bytes(save(self.tensors | ends, metadata=meta))
        except OSError as e:
            raise CheckpointError(f"--trace {path}: cannot be written ({e})") from None
