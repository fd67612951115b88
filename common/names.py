"""Names of options and values in other programs, for "did you mean" suggestions."""
from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable

SCRIPTS = {"convert": "convert_checkpoint"}  # subcommands whose script has another name
ALIASES = {  # names in other programs
    "--max-new-tokens": "--n-predict --predict", "--max-seq-len": "--ctx-size --max-model-len",
    "--device": "-ngl --n-gpu-layers", "--slots": "-np --parallel --max-num-seqs", "--seed": "-s",
    "int8": "w8a16", "w8a8": "q8_0 q8 q8_k q6_k q5_k_m q5_k_s q5_0 q5_1 int8-w8a8",
    "int4": "q4_0 q4_1 q4 q4_k_m q4_k_s iq4_nl iq4_xs w4a16 awq gptq nf4 q3_k_m q2_k", "fp8": "float8",
    "--interactive": "--chat -i -cnv --conversation",
    "--model-name": "--alias --served-model-name", "--checkpoint": "-hf", "--kind": "--head",
    "lookup": "ngram prompt-lookup pld",
}


def program(name: str) -> str:
    """Return how to run a subcommand: `eagle NAME` if this process was started so, else the script."""
    return f"eagle {name}" if sys.argv[0].startswith("eagle ") else f"python {SCRIPTS.get(name, name)}.py"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" for an alias or a misspelled name, or an empty string."""
    known, word = {name.lstrip("-"): name for name in known}, word.lower()
    if "," in word and {*word.split(",")} <= known.keys():
        return f" (did you mean {word.replace(',', '+')}?)"
    matches = [ours for ours, names in ALIASES.items() if word in names.split() and ours in known.values()]
    word = word.lstrip("-")
    near = difflib.get_close_matches(word, known, 3, 0.8)
    # Prefer names of the same length: eagle4 is more likely eagle3 than eagle.
    near = sorted(near, key=lambda name: len(name) != len(word)) or difflib.get_close_matches(word, known, 1)
    matches += map(known.get, near)
    return f" (did you mean {matches[0]}?)" if matches else ""
