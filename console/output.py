"""Output of generate.py: one or several prompts, --json, --compare and --trace."""
from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module

from common.cli import log_stderr
from engine.request import Request
from engine.sampling import Sampling
from llm import LLM, summary
from tokens.tokenizer import Tokenizer


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
        log_stderr(summary(requests, engine.drafter.shape.nodes > 1, not comparison))
        if o.stats:
            log_stderr(import_module("console.stats").format_stats(requests, engine))
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
