"""Launching every step and prefill pass once, so that later requests compile and capture nothing."""
from __future__ import annotations

from engine.engine import Engine
from sampling.options import Modes


def launch_all(engine: Engine, modes: Modes, every_length: bool) -> None:
    """Launch a step of every kind for every number of sequences, which changes nothing."""
    passes = engine.passes
    needs = range(1, passes.slots + 1, 64) if every_length and passes.captured else (1,)
    spans = {span.shape[0]: span for span in map(passes.span, needs)}
    kinds = dict.fromkeys((*engine.scheduler.drafters, *((passes.plain,) if every_length else ())))
    rare = Modes.every(modes.noisy)
    with passes.still():
        for number, span in enumerate(spans.values()):
            for count in engine.step_counts:
                rows = passes.rows(0, count)
                for drafter in kinds:
                    passes.step(rows, span, drafter, modes)
                    if every_length:
                        passes.step(rows, span, drafter, rare)
                        passes.step(rows, span, drafter, rare, {})
                for unread in passes.chunks if every_length and passes.unread else ():
                    passes.read_behind(rows, span, min(unread, passes.unread))
            # Prompts are read in each slot alone, and in all of them together.
            slots = {(slot, 1) for slot in range(1 if number else engine.batch)}
            for size in passes.chunks if every_length else ():
                for first, count in sorted(slots | {(0, engine.batch)}):
                    if size <= span.shape[0]:
                        x = passes.prefill(passes.rows(first, count), span, size, rare)
                        if (first, count) == (0, 1):  # as `score_prompt`
                            passes.logits(x)
