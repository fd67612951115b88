"""Advice for a target without a head: published heads, a draft model, training a head."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from common.names import program
from drafters import estimate
from engine.target import Runtime

# heads: ids on the Hugging Face hub, by layers, hidden size and vocabulary of their target. Several models
# may share a shape. siblings: part of a target's name -> small model of its family and its number of weights;
# the first match wins.
TABLES = json.loads(Path(__file__).with_suffix(".json").read_text())
# For `auto`: maximum of (bytes of weights read per token by the draft model) / (by the target). A 0.5B with
# lookup made a 1.5B faster at 0.32 (w8a8) and at 0.29 (w4a8, lm_head too): docs/benchmarks.md.
MAX_DRAFT_SIZE = 1 / 3
OPENINGS = Path(__file__).parents[1] / "heads" / "openings.txt"


def advice(checkpoint: Path, config: dict) -> Iterator[str]:
    """Yield lines that suggest drafters for a target. config: its config.json."""
    shape = " ".join(str(config[key]) for key in ("num_layers", "hidden_size", "vocab_size"))
    if names := TABLES["heads"].get(shape):
        yield "  a published head for this shape, if it was trained for this model:"
        yield from (f"    {program('convert')} --checkpoint {head} --target {quote(str(checkpoint))}"
                    for head in names)
    else:
        yield "  a published head: none known for this shape"
    name, size = str(config.get("name", checkpoint.name)).lower(), estimate.active_weights(config, 0)[0]
    small = next((model for part, model in TABLES["siblings"].items() if part in name), None)
    if small and small[1] <= MAX_DRAFT_SIZE * size:
        yield f"  a draft model of the same family: --draft {small[0]}"
    else:
        yield ("  a draft model: none known of at most a third of its size;"
               " --draft takes any model with the same vocabulary")
    openings = OPENINGS.relative_to(Path.cwd()) if OPENINGS.is_relative_to(Path.cwd()) else OPENINGS
    flops = estimate.measured_flops(Runtime().device_name)
    run = estimate.CONVERSATIONS, estimate.MAX_ANSWER_TOKENS, estimate.EPOCHS
    hours = sum(estimate.phase_hours(config, *run, flops).values())
    yield (f"  train a head, about {hours:.1f} hours on this machine: {program('train')}"
           f" --checkpoint {quote(str(checkpoint))} --synthesize {estimate.CONVERSATIONS}"
           f" --openings {quote(str(openings))} --out {quote(f'runs/{checkpoint.name}')}")
