"""Launching every step and prefill pass once, so that later requests compile and capture nothing."""
from __future__ import annotations

from engine.engine import Engine
from engine.sampling import Modes


def launch_all(engine: Engine, modes: Modes, every_length: bool) -> None:
    """Launch a step of every kind for every number of sequences, which changes nothing."""
    runner = engine.runner
    needs = range(1, runner.slots + 1, 64) if every_length and runner.captured else (1,)
    spans = {span.shape[0]: span for span in map(runner.span, needs)}
    kinds = dict.fromkeys((*engine.scheduler.drafters, *((runner.plain,) if every_length else ())))
    rare = Modes.every(modes.noisy)
    with runner.frozen():
        for number, span in enumerate(spans.values()):
            for count in engine.batch_sizes:
                group = runner.slot_range(0, count)
                for drafter in kinds:
                    runner.step(group, span, drafter, modes)
                    if every_length:
                        runner.step(group, span, drafter, rare)
                        runner.step(group, span, drafter, rare, {})
                for unread in runner.chunks if every_length and runner.unread else ():
                    runner.prefill_unread(group, span, min(unread, runner.unread))
            # Prompts are read in each slot alone, and in all of them together.
            slots = {(slot, 1) for slot in range(1 if number else engine.batch)}
            for size in runner.chunks if every_length else ():
                for first, count in sorted(slots | {(0, engine.batch)}):
                    if size <= span.shape[0]:
                        x = runner.prefill(runner.slot_range(first, count), span, size, rare)
                        if (first, count) == (0, 1):  # as `score_prompt`
                            runner.logits(x)
