"""The output of generate.py: text as it comes, figures for people, JSON for programs, the trace file."""
from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save

from common.errors import InputError, counted
from common.files import atomic_path
from engine.engine import Engine
from engine.memory import peak_memory
from engine.request import Event, Request
from tokens.tokenizer import Tokenizer
from tree import AnyTree, PathTree, TreeShape, link

DRAFTED, RESET = "\033[36m", "\033[0m"


def is_terminal(stream) -> bool:
    """Return whether a person reads or writes this stream; it may be None, closed."""
    return stream is not None and stream.isatty()


def coloured(event: Event, decode: Callable[[list[int]], str]) -> str:
    """Colour the part of an event's text that came from accepted drafts.

    decode: turns token ids into the text that they complete.
    """
    head = decode(event.ids[: event.drafted])
    begins = head and event.text.startswith(head)  # else a stop text holds some of it back, or cuts it off
    return f"{DRAFTED}{head}{RESET}{event.text[len(head) :]}" if begins else event.text


def show(events: Iterable[Event], tokenizer: Tokenizer | None) -> None:
    """Print the text of one request as it comes, drafted tokens coloured on a terminal."""
    colour = is_terminal(sys.stdout)
    drafted = tokenizer.stream() if tokenizer else None  # decodes the drafted part of an event alone
    before = ""
    try:
        for event in events:
            text = event.text
            if tokenizer is None:
                text, before = before + ",".join(map(str, event.ids)), ","
            elif colour:
                text = coloured(event, drafted.push)
                drafted.push(event.ids[event.drafted :])
            print(text, end="", flush=True)
    finally:  # after Ctrl-C too
        print(flush=True)


SHOWN = 5  # kinds of trees that are named


def as_text(request: Request, tokenizer: Tokenizer | None) -> str:
    """Return the text of a request, or its token ids where there is no tokenizer."""
    return request.text if tokenizer else ",".join(map(str, request.ids))


def as_json(request: Request, prompt: str | list[int], ranks: int = 1) -> dict:
    """Return the object that `--json` prints.

    ranks: number of processes that the target was dealt among.
    """
    row = {
        "prompt": prompt, "text": request.text, "output_ids": request.ids, "tokens": len(request.ids),
        "seconds": request.seconds, "prefill_seconds": request.prefill_seconds,
        "tokens_per_second": request.tokens_per_second, "tau": request.tau,
        "accept_lengths": request.accept_lengths, "trees": dict(request.trees.most_common()),
        "step_seconds": request.step_seconds, "seed": request.sampling.seed,
        "finish": request.finish or "interrupted", "ranks": ranks,
    }
    if request.stop is not None:
        row["stop"] = request.stop
    if request.scores:
        row["logprobs"] = [{"logprob": score.logprob, "top": score.top} for score in request.scores]
    return row


def compared(turns: list[tuple[Request, Request]], row: dict) -> dict:
    """Return what --compare adds to a row of `--json`; nothing without turns.

    turns: the request, and the same prompt decoded plainly, each time that both were decoded. A speedup is
    the ratio of tokens per second, None when one of the two has no second token to time.
    """
    if not turns:
        return {}
    pairs = [(request.tokens_per_second, plain.tokens_per_second) for request, plain in turns]
    ratios = [fast / slow if fast and slow else None for fast, slow in pairs]
    return {
        "plain": as_json(turns[0][1], row["prompt"], ranks=row["ranks"]),
        "speedup": None if None in ratios else statistics.median(ratios), "speedups": ratios,
        "equal": all(request.ids == plain.ids for request, plain in turns),
    }


def together(requests: list[Request]) -> tuple[float, float]:
    """Return the seconds from the first token of all requests to the last one, and tokens per second."""
    times = [(r.first, r.last) for r in requests if r.first]
    seconds = max(last for _, last in times) - min(first for first, _ in times) if times else 0.0
    return seconds, sum(max(len(r.ids) - 1, 0) for r in requests) / seconds if seconds else 0.0


def figures(requests: list[Request], engine: Engine, full: bool) -> str:
    """Return a line about requests that were decoded together, or several if `full`."""
    seconds, speed = together(requests)
    lengths = [n for r in requests for n in r.accept_lengths]
    drafts = bool(lengths) and engine.drafter.shape.nodes > 1
    tokens, prompt = sum(len(r.ids) for r in requests), sum(len(r.prompt) for r in requests)
    line = (
        f"{tokens} generated, {prompt} in the prompt; prefill"
        f" {max(r.prefill_seconds for r in requests) * 1e3:.0f} ms"
        + (f", then {speed:.1f} tok/s" if speed else "")
        + (f", tau {sum(lengths) / len(lengths):.2f} tokens per step" if drafts else "")
        + f"; {', '.join(sorted({r.finish or 'interrupted' for r in requests}))}"
    )
    if not full:
        return line
    used = sum((r.trees for r in requests), Counter())
    common = dict(used.most_common(SHOWN))
    if others := used.total() - sum(common.values()):
        common["others"] = others
    trees = ", ".join(f"{n} x {name}" for name, n in common.items())
    lines = [line, f"{counted(len(lengths), 'step')} ({trees or 'none'}) in {seconds:.2f} s;"
                   f" peak memory {peak_memory(engine.device) / 1e9:.2f} GB", *engine.passes.fallbacks]
    counts = Counter(lengths if drafts else ())
    for n in range(1, max(counts, default=0) + 1):
        share = counts[n] / len(lengths)
        tokens, steps = counted(n, "token"), counted(counts[n], "step")
        lines.append(f"  {tokens:>9s} {steps:>11s} {share:6.1%} {'#' * round(40 * share)}")
    return "\n".join(lines)


def comparison(turns: list[tuple[list[Request], list[Request]]]) -> str:
    """Return one line: the speeds and the speedup of the middle turn, and whether the texts are equal.

    turns: requests, and the same prompts decoded plainly, each time that both were decoded.
    """
    pairs = [pair for requests, plain in turns for pair in zip(requests, plain)]
    equal = sum(a.ids == b.ids for a, b in pairs)
    texts = "yes" if equal == len(pairs) else f"{equal} of {len(pairs)}, see docs/how-it-works.md#exactness"
    speeds = [(together(requests)[1], together(plain)[1]) for requests, plain in turns]
    if not all(fast and slow for fast, slow in speeds):
        return f"the answer is too short to compare speeds; texts equal: {texts}"
    ratios = sorted((fast / slow, fast, slow) for fast, slow in speeds)
    ratio, fast, slow = ratios[len(turns) // 2]
    return (
        f"{fast:.1f} tok/s, plain: {slow:.1f} tok/s; speedup {ratio:.2f}x (the middle one of {len(turns)}"
        f" turns, {ratios[0][0]:.2f} to {ratios[-1][0]:.2f}); texts equal: {texts}"
    )


class Trace:
    """Records every step of one request: the tree that was drafted and the path that was accepted.

    Keys per step NNN: `input_ids` [N+1] committed tokens and the root, `draft_tokens` [T], `parent` [T] (the
    root's is 0), `tree_mask` [T, T] bool, `depth` [T], `accepted` [count] node indices, root first; and for
    all, `prompt` [P] and `output_ids` [P + new].
    """

    def __init__(self, prompt: list[int], shape: TreeShape | PathTree | AnyTree):
        self.shape, self.tensors, self.steps, self.known = shape, {}, 0, list(prompt)

    def watch(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events of a request that is watched, and record each step."""
        for event in events:
            if event.draft:
                parent = torch.tensor([event.draft.parent])
                depth, ancestors = link(parent, parent.shape[1])
                step = {
                    "input_ids": torch.tensor(self.known), "draft_tokens": torch.tensor(event.draft.tokens),
                    "parent": parent[0], "tree_mask": ancestors[0], "depth": depth[0],
                    "accepted": torch.tensor(event.draft.path[: len(event.ids)]),
                }
                self.tensors |= {f"{self.steps:03d}.{name}": x.contiguous() for name, x in step.items()}
                self.steps += 1
            self.known += event.ids
            yield event

    def save(self, path: str | Path, request: Request) -> None:
        """Write the safetensors file, under a temporary name first. Raises InputError."""
        # Passes of a head, as EAGLE counts.
        meta = {"total_token": str(self.shape.nodes), "depth": str(max(0, self.shape.window - 2))}
        if self.shape.width is not None:
            meta["top_k"] = str(self.shape.width)
        ends = {"prompt": torch.tensor(request.prompt), "output_ids": torch.tensor(request.tokens)}
        try:
            with atomic_path(path) as part:
                part.write_bytes(save(self.tensors | ends, metadata=meta))
        except OSError as e:
            raise InputError(f"--trace {path}: cannot be written ({e})") from None
