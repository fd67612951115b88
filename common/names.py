"""Names of options and values, ours and those of other programs."""
from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

PROGRAMS = {"convert": "convert_checkpoint"}  # names of programs that differ from their subcommands
# Ours, and what other programs call it.
OTHERS = {
    "--max-new-tokens": "--n-predict --predict", "--max-seq-len": "--ctx-size --max-model-len",
    "--device": "-ngl --n-gpu-layers", "--slots": "-np --parallel --max-num-seqs",
    "int8": "q8_0 w8a16", "w8a8": "int8-w8a8", "int4": "q4_0 q4_k_m q4_k_s w4a16 awq gptq", "fp8": "float8",
    "--interactive": "--chat -i -cnv --conversation",
    "--model-name": "--alias --served-model-name", "--checkpoint": "-hf", "lookup": "ngram prompt-lookup pld",
}


def program(name: str) -> str:
    """Return how a program is started: as a subcommand if this one is (see `eagle.py`)."""
    return f"eagle {name}" if sys.argv[0].startswith("eagle ") else f"python {PROGRAMS.get(name, name)}.py"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a guess at what a misspelled or foreign word stands for, to be added to a message."""
    known = {name.lstrip("-"): name for name in known}
    near = [ours for ours, names in OTHERS.items() if word in names.split() and ours in known.values()]
    near += (known[name] for name in difflib.get_close_matches(word.lstrip("-"), known, 1))
    return f" (did you mean {near[0]}?)" if near else ""
