"""Launch every step and prefill pass once, so that later requests compile and capture nothing."""
from __future__ import annotations

from engine.engine import Engine
from engine.prompt_scores import chunk_logits
from engine.runner import SLOT_STEP
from engine.sampling import Modes, Sampling


def launch_all(engine: Engine, sampling: Sampling, exhaustive: bool) -> None:
    """Launch each step that requests with `sampling` need, at each batch size, with all sequences frozen.

    exhaustive: also at each context length, with each drafter and every mode, and each prefill pass.
    """
    runner, deferred = engine.runner, engine.slots.deferred
    modes = Modes.of_requests([sampling], compiled=True)
    lengths = range(1, runner.cache_slots + 1, SLOT_STEP) if exhaustive and runner.captured else (1,)
    sizes = {live_slots.shape[0]: live_slots for live_slots in map(runner.live_slots, lengths)}
    drafters = [*dict.fromkeys(engine.scheduler.drafters)]
    if exhaustive and runner.plain not in drafters:
        drafters.append(runner.plain)
    all_modes = Modes.all_modes(modes.sampled)
    with runner.frozen():
        for index, live_slots in enumerate(sizes.values()):
            for count in engine.batch_sizes:
                group = runner.slot_range(0, count)
                for drafter in drafters:
                    runner.step(group, live_slots, drafter, modes)
                    if exhaustive:
                        runner.step(group, live_slots, drafter, all_modes)
                        runner.step(group, live_slots, drafter, all_modes, {})
                for unread in runner.chunks if exhaustive and deferred else ():
                    deferred.prefill(group, live_slots, min(unread, runner.max_unread))
            # Prompts are read in each slot alone, and in all of them together. Slots above 0 are never
            # captured: one size is enough for them.
            slots = {(slot, 1) for slot in range(1 if index else engine.batch)}
            for size in runner.chunks if exhaustive else ():
                for first, count in sorted(slots | {(0, engine.batch)}):
                    if size <= live_slots.shape[0]:
                        x = runner.prefill(runner.slot_range(first, count), live_slots, size, all_modes)
                        if (first, count) == (0, 1):  # as `score_prompt`
                            chunk_logits(runner, x)
