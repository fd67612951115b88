"""Decoding what a command line asks for, batch after batch, and printing it."""
from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.cli import note
from common.errors import InputError, first_line
from console.show import show
from console.statistics import as_json, comparison, statistics
from console.trace import Trace
from engine.text_decoder import Prompt, TextDecoder
from sampling.options import Sampling


@contextmanager
def compile_errors() -> Iterator[None]:
    """Turn the traceback of a failing compiler into an InputError."""
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as e:
        raise InputError(f"torch.compile failed ({first_line(e)}); try --no-compile") from e


def decode_all(
    o, model: TextDecoder, plain: TextDecoder | None, samples: list[tuple[Prompt, Sampling]]
) -> int:
    """Decode all samples, batch by batch, as the options say. Returns the exit status: 130 when interrupted.

    plain: the decoder to compare with.
    """
    batch, options = model.decoder.batch, {"raw": o.raw, "system": o.system}
    ranks = model.decoder.target.ranks
    first, count = ranks is None or ranks.rank == 0, 1 if ranks is None else ranks.count
    for i in range(0, len(samples), batch):
        prompts, samplings = zip(*samples[i : i + batch])
        job = model.job(list(prompts), list(samplings), **options)
        trace = Trace(model.decoder) if o.trace else None
        plain_results, interrupted = [None] * len(prompts), False
        try:
            pieces = trace.watch(job) if trace else job
            if o.json:
                for _ in pieces:
                    pass
            else:
                show(pieces, job, label=len(prompts) > 1)
            if plain:
                plain_job = plain.job(list(prompts), list(samplings), **options)
                plain_job.finish()
                plain_results = plain_job.results()
        except KeyboardInterrupt:
            interrupted = True
            note("\n(interrupted)")
        results = job.results()
        rule = model.decoder.drafter.rule if o.temperature > 0 else "equal"
        if o.json:
            for result, other in zip(results, plain_results):
                row = as_json(result, rule, other, count)
                print(json.dumps(row), flush=True)
        else:
            note(statistics(results, model.decoder))
            if plain_results[0]:
                note(comparison(results, plain_results, rule))
        if trace and first:
            trace.save(o.trace, results[0])
        if interrupted:
            return 130
    return 0
