"""Output of generate.py: one or several prompts, --json, --compare, --trace and --stats."""
from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from common.cli import log_stderr
from common.errors import counted
from engine.engine import Engine
from engine.request import Request
from engine.sampling import Sampling
from llm import LLM, joint_speed, summary
from tokens.tokenizer import Tokenizer

MAX_LISTED_TREES = 5  # tree shapes listed by --stats, most frequent first


def answer(
    o, llm: LLM, prompts: list[str | list[int]], ids: list[list[int]], samplings: list[Sampling],
    show: Callable,
) -> int:
    """Decode and print all prompts. Returns the exit status, 130 after Ctrl-C.

    o: options of generate.py. ids: encoded prompts. show: print the events of a request.
    Raises ValueError if a request fails.
    """
    engine, ranks = llm.engine, llm.target.model.ranks
    requests, printed, status, in_order = [], 0, 0, o.json or len(ids) > 1
    comparison = import_module("console.compare").Comparison(llm, samplings) if o.compare else None
    trace = import_module("console.trace").Trace(ids[0], engine.drafter.shape) if o.trace else None

    def print_one(i: int) -> None:
        if o.json:
            to_json = partial(as_json, prompt=prompts[i], ranks=ranks.count if ranks else 1)
            more = comparison.row(i, to_json) if comparison else {}
            print(json.dumps(to_json(requests[i]) | more), flush=True)
        elif len(ids) > 1:
            text = as_text(requests[i], engine.tokenizer)
            print(f"--- {i + 1}, seed {samplings[i].seed} ---\n{text}", flush=True)

    events = engine.run(ids, samplings, requests, watch=bool(trace))
    events = trace.watch(events) if trace else events
    try:
        if not in_order:
            show(events, engine.tokenizer)
        for _ in events if in_order else ():
            while printed < len(requests) and requests[printed].finish and not (comparison and o.json):
                print_one(printed)
                printed += 1
        if comparison:
            comparison.decode(ids, requests)
    except KeyboardInterrupt:
        status = 130
        log_stderr("\n(interrupted)")
    for i in range(printed, len(requests)):
        print_one(i)
    if requests and not o.json:
        log_stderr(format_stats(requests, engine, o.stats, not comparison))
        if comparison and comparison.runs:
            log_stderr(comparison.line())
    if trace and requests and (ranks is None or ranks.rank == 0):
        trace.save(o.trace, requests[0])
    for request in requests:
        if request.error:
            raise ValueError(request.error)
    return status


def as_json(request: Request, prompt: str | list[int], ranks: int = 1) -> dict:
    """Return the object that `--json` prints. ranks: processes that the target is sharded over."""
    row = {
        "prompt": prompt, "text": request.text, "output_ids": request.ids, "tokens": len(request.ids),
        "seconds": request.seconds, "prefill_seconds": request.prefill_seconds,
        "tokens_per_second": request.tokens_per_second, "tau": request.tau,
        "accept_lengths": request.accept_lengths, "trees": dict(request.trees.most_common()),
        "step_seconds": request.step_seconds, "seed": request.sampling.seed,
        "finish": request.finish or "interrupted", "ranks": ranks,
    }
    row |= {"stop": request.stop} if request.stop is not None else {}
    if request.scores:
        row["logprobs"] = [{"logprob": score.logprob, "top": score.top} for score in request.scores]
    return row


def as_text(request: Request, tokenizer: Tokenizer | None) -> str:
    """Return the text of a request, or its comma-separated token ids without a tokenizer."""
    return request.text if tokenizer else ",".join(map(str, request.ids))


def format_stats(requests: list[Request], engine: Engine, full: bool, estimate: bool = True) -> str:
    """Format statistics of requests of one batch: `llm.summary`, and more lines if `full`.

    estimate: see `llm.summary`.
    """
    seconds, _ = joint_speed(requests)
    lengths = [n for r in requests for n in r.accept_lengths]
    drafts = bool(lengths) and engine.drafter.shape.nodes > 1
    line = summary(requests, drafts, estimate)
    if not full:
        return line
    used = sum((r.trees for r in requests), Counter())
    common = dict(used.most_common(MAX_LISTED_TREES))
    if others := used.total() - sum(common.values()):
        common["others"] = others
    trees = ", ".join(f"{n} x {name}" for name, n in common.items())
    prompt, prefill = sum(len(r.prompt) for r in requests), max(r.prefill_seconds for r in requests)
    lines = [line, f"{counted(prompt, 'token')} in the prompt, prefill {prefill * 1e3:.0f} ms;"
                   f" {counted(len(lengths), 'step')} ({trees or 'none'}) in {seconds:.2f} s;"
                   f" peak memory {peak_memory(engine.device) / 1e9:.2f} GB", *engine.runner.fallbacks]
    counts = Counter(lengths if drafts else ())
    for n in range(1, max(counts, default=0) + 1):
        share = counts[n] / len(lengths)
        tokens, steps = counted(n, "token"), counted(counts[n], "step")
        lines.append(f"  {tokens:>9s} {steps:>11s} {share:6.1%} {'#' * round(40 * share)}")
    return "\n".join(lines)


def peak_memory(device: torch.device) -> int:
    """Return peak memory in bytes: of the CUDA allocator, or the resident set size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
