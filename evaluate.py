"""The papers' table on your machine: speedup and acceptance length per question set, losslessness checked, in
one run.

    python evaluate.py --checkpoint checkpoints/smollm2-135m --out runs/eval --speculate eagle3
    python evaluate.py --checkpoint DIR --out FOLDER --speculate eagle3,eagle2 --questions data/ --limit 40 --temperature 0,1

Every question is answered by plain decoding and by each method, in turns, in one process: batch 1, prompts
timed apart, everything compiled before the first answer. Questions are FastChat's question.jsonl (EAGLE's and
Spec-Bench's too), a file or a folder of them; without --questions a small set of our own. A run that is
stopped goes on where it was.

FOLDER/table.md, table.json, table.csv   the table, printed too: also after Ctrl-C
FOLDER/answers/SET/METHOD-tT.jsonl       answers in FastChat's format, read by EAGLE's and Spec-Bench's scripts
FOLDER/differences.json                  where a text is not the plain one, scored again in float32
FOLDER/*.png                             acceptance by depth and rank, lengths, calibration, bars, a tree

The exit status is 1 if any text differs from the plain one by more than rounding explains.
"""
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from common.errors import InputError
from drafters import METHODS, add_flags, known
from evaluation.methods import load_methods, say, temperatures_of
from evaluation.runs import Book, read_sets
from evaluation.session import Evaluation
from evaluation.table import PLAIN
from sampling.options import Sampling


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", required=True, help="converted target")
    p.add_argument("--out", required=True, help="folder for answers, tables and pictures")
    all_methods = ", ".join(METHODS)
    p.add_argument(
        "--speculate", default="eagle3", metavar="METHOD[,METHOD]",
        help=f"of {all_methods}; plain decoding always runs"
    )
    p.add_argument(
        "--draft", action="append", default=[], metavar="[METHOD=]DIR",
        help="head or draft model; may be repeated"
    )
    p.add_argument(
        "--tree", action="append", default=[], metavar="[METHOD=]SPEC",
        help="as for generate.py; may be repeated"
    )
    p.add_argument(
        "--accept", action="append", default=[], metavar="[METHOD=]RULE",
        help="equal, typical or residual; may be repeated"
    )
    add_flags(p)
    p.add_argument("--questions", metavar="FILE_OR_FOLDER", help="FastChat questions (default: our own)")
    p.add_argument("--limit", type=int, help="only the first so many of every set")
    p.add_argument("--temperature", default="0", metavar="T[,T]", help="0 is greedy (default 0)")
    p.add_argument("--max-new-tokens", type=int, default=512, help="per turn (default 512)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device")
    p.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="default: as stored")
    p.add_argument("--max-seq-len", type=int)
    p.add_argument("--threads", type=int)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--kernels", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument(
        "--observe", type=int, default=4, metavar="N",
        help="questions per set answered again, untimed, for the pictures"
    )
    p.add_argument(
        "--show-tree", action="store_true",
        help="draw the drafted tree that had most accepted, here and as tree.png"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, 1 with an error or a text that differs, 130 when
    interrupted.
    """
    o = parser().parse_args(argv)
    evaluation = None
    try:
        methods = list(dict.fromkeys(o.speculate.split(",")))
        for name in methods:
            known(name)
        if o.observe < 0:
            raise InputError(f"--observe {o.observe}: must be at least 0")
        if o.limit is not None and o.limit < 1:
            raise InputError(f"--limit {o.limit}: must be at least 1")
        temperatures_of(o.temperature)  # mistakes show before anything is loaded
        Sampling(o.max_new_tokens)
        if o.threads is not None:
            if not 1 <= o.threads <= 1024:
                raise InputError(f"--threads {o.threads}: must be 1 to 1024")
            torch.set_num_threads(o.threads)
        sets = read_sets(o.questions, o.limit)
        models = load_methods(o, methods)
        options = {
            "checkpoint": os.path.abspath(o.checkpoint), "max_new_tokens": o.max_new_tokens, "seed": o.seed,
            "dtype": o.dtype,
            "threads": torch.get_num_threads(), "torch": torch.__version__,
            "device": str(models[PLAIN].decoder.device),
            "max_seq_len": models[PLAIN].decoder.max_seq_len, "compile": o.compile, "kernels": o.kernels,
        }
        evaluation = Evaluation(o, models, sets, Book(Path(o.out), options))
        evaluation.run()
        errors = evaluation.report()
        if o.observe or o.show_tree:
            evaluation.observe()
        return int(errors > 0)
    # Torch raises RuntimeError when memory runs out.
    except (InputError, OSError, ValueError, RuntimeError) as e:
        say("error: " + " ".join(str(e).split()))
        so_far(evaluation)
        return 1
    except KeyboardInterrupt:
        say(
            "stopped before the first question" if evaluation is None
            else "stopped (the same command goes on)"
        )
        so_far(evaluation)
        return 130


def so_far(evaluation: Evaluation | None) -> None:
    """The table of a run that did not end."""
    if evaluation is None:
        return
    say("the table so far:")
    try:
        evaluation.report()
    except KeyboardInterrupt:
        say("stopped again: no table")
    except (InputError, OSError, ValueError, RuntimeError) as e:
        say("error: no table: " + " ".join(str(e).split()))


if __name__ == "__main__":
    sys.exit(main())
