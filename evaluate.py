"""Measure speedup and acceptance length per question set, and check losslessness: the papers' table.

    python evaluate.py --checkpoint checkpoints/smollm2-135m --out runs/eval --speculate eagle3
    python evaluate.py --checkpoint DIR --out FOLDER --speculate eagle3,eagle2 --questions data/ --limit 40 \\
        --temperature 0,1

Plain decoding and every method answer all questions in turns, in one process: batch 1, prompts timed apart,
everything compiled before the first answer. Questions are FastChat's question.jsonl (EAGLE's and Spec-Bench's
too), a file or a folder of them; without --questions a small set of our own. The same command goes on with a
run that was stopped.

FOLDER/table.md, table.json, table.csv   the table, printed too, also after Ctrl-C
FOLDER/answers/SET/METHOD-tT.jsonl       answers in FastChat's format, for EAGLE's and Spec-Bench's scripts
FOLDER/differences.json                  where a text is not the plain one, scored again in float32
FOLDER/*.png                             acceptance by depth and rank, lengths, calibration, bars, a tree

The exit status is 1 if any text differs from the plain one by more than rounding explains.
"""
from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

# Nothing here imports torch before it is needed: --help and mistakes answer at once.
from checkpoint.folder import known_config, read_config
from common.cli import Options, check_folder, command, run_command, seed
from common.errors import InputError
from common.files import check_readable
from common.torchrun import command_in_words, one_voice, several
from drafters import METHODS, add_flags, add_window, check_numbers, grows, known, read_flags
from drafters.early import judge_method
from evaluation.answers import check_options, check_out
from evaluation.sets import read_sets
from evaluation.settings import read_settings
from kernels.isa import choose
from sampling.options import Sampling

ERRORS = OSError, ValueError, RuntimeError  # torch raises RuntimeError when memory runs out


def parser() -> Options:
    """The options of the command line, each with its rules."""
    p = Options(__doc__)
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target")
    add("--out", required=True, help="folder for answers, tables and pictures")

    g = p.add_argument_group("methods")
    add = g.add_argument
    add(
        "--speculate", default="eagle3", metavar="METHOD[,METHOD]",
        help=f"of {', '.join(METHODS)}; plain decoding always runs",
    )
    for flag, value, what in (
        ("--draft", "DIR", "head or draft model"), ("--tree", "SPEC", "as for generate.py"),
        ("--accept", "RULE", "equal or residual"),
    ):
        metavar = f"[METHOD=]{value}"
        add(flag, action="append", default=[], metavar=metavar, help=f"{what}; may be repeated")
    add_flags(g)
    check_numbers(p)
    p.judge(lambda o: read_flags(o, [known(name) for name in o.speculate.split(",")]))
    add_window(g, p, lambda o: o.speculate.split(","))

    g = p.add_argument_group("questions")
    add = g.add_argument
    add("--questions", metavar="FILE_OR_FOLDER", help="FastChat questions (default: our own)")
    add("--limit", type=int, help="only the first so many of every set")
    p.within("--limit", 1, float("inf"))
    add("--calibrate", action="store_true",
        help="measure first, on these questions, what an EAGLE head's trees are accepted for, and keep that")
    p.refuse(lambda o: o.calibrate and not any(map(grows, o.speculate.split(","))),
             lambda o: f"--calibrate: {o.speculate} has no head that grows trees; add --speculate eagle3")
    add("--temperature", default="0", metavar="T[,T]", help="0 is greedy (default 0)")
    add("--max-new-tokens", type=int, default=512, help="per turn (default 512)")
    add("--max-seq-len", type=int, help="prompt and output together (default 2048, or the model's maximum)")
    add("--seed", type=seed, default=0, help="64 bits count, so that -1 is 2^64 - 1 (default 0)")
    p.judge(lambda o: read_temperatures(o.temperature))
    p.within("--max-new-tokens", 1, float("inf"))
    p.within("--max-seq-len", 2, float("inf"))

    p.add_runtime()
    p.refuse(lambda o: several() and o.calibrate,
             lambda o: "--calibrate: trees are measured by one process; start it without torchrun")

    g = p.add_argument_group("pictures of drafted trees")
    add = g.add_argument
    add(
        "--observe", type=int, default=4, metavar="N",
        help="questions per set answered again, untimed, for the pictures (default 4; 0: none)",
    )
    p.within("--observe", 0, float("inf"))
    add(
        "--show-tree", action="store_true",
        help="draw the tree with most accepted nodes, here and as tree.png",
    )
    return p


def read_temperatures(text: str) -> list[float]:
    """Parse --temperature, each value once. Raises InputError."""
    try:
        temperatures = [Sampling(temperature=float(part)).temperature for part in text.split(",")]
    except ValueError as e:
        raise InputError(f"--temperature {text}: {e}") from None
    return list(dict.fromkeys(value + 0.0 for value in temperatures))  # -0 is 0


class Asked(NamedTuple):
    """What the options ask for."""

    methods: list[str]
    temperatures: list[float]
    flags: dict[str, dict]  # of each method its own
    sets: dict[str, list[dict]]


def judge(o) -> Asked:
    """Read what the options name, all that needs no torch. Raises InputError or ValueError."""
    methods = [known(name) for name in dict.fromkeys(o.speculate.split(","))]
    temperatures = read_temperatures(o.temperature)
    Sampling(o.max_new_tokens)
    flags = read_flags(o, methods)
    read_config(o.checkpoint, "target")
    config = known_config(o.checkpoint, o.max_seq_len)
    drafts, trees, _ = read_settings(methods, o.draft, o.tree, o.accept)
    for draft in drafts.values():
        read_config(draft, what="--draft")
    for name in methods:
        judge_method(o.checkpoint, config, name, drafts.get(name), trees.get(name), flags[name])
    if o.isa:
        choose(o.isa)
    check_folder("--out", o.out)
    check_out(Path(o.out))
    if o.questions and not Path(o.questions).is_dir():
        check_readable("--questions", o.questions)
    sets = read_sets(o.questions, o.limit)
    check_options(Path(o.out), asked_options(o))
    return Asked(methods, temperatures, flags, sets)


def asked_options(o) -> dict:
    """Of what decides about answers that which is known before torch is there, as OUT/options.json has it."""
    return {
        "checkpoint": os.path.abspath(o.checkpoint), "max_new_tokens": o.max_new_tokens, "seed": o.seed,
        "dtype": o.dtype, "kernels": o.kernels, **({"max_seq_len": o.max_seq_len} if o.max_seq_len else {}),
    }


def load(o, asked: Asked, ranks=None):
    """Load the target and every method -> `evaluation.session.Evaluation`.

    ranks: the `kernels.tp.Ranks` to deal the target among, if any. Raises InputError, ValueError, OSError
    or RuntimeError if one of them cannot be.
    """
    import torch

    from common.threads import use_threads
    from engine.api import load_target
    from engine.runtime import Runtime
    from evaluation.answers import Book
    from evaluation.lossless import Judge
    from evaluation.methods import load_contenders, read_draftings
    from evaluation.session import Evaluation
    from evaluation.table import PLAIN
    from kernels.tp import own_device

    use_threads(o.threads, say)
    methods, temperatures, flags, sets = asked
    draftings = read_draftings(methods, o.draft, o.tree, o.accept, flags, o.draft_window)
    runtime = Runtime(o.device, o.dtype, o.compile, o.kernels, isa=o.isa, kv=o.kv)
    if ranks:
        runtime = replace(runtime, device=own_device(runtime.device_name))
    target = load_target(o.checkpoint, runtime, say, ranks)
    if o.calibrate:
        prompts = [question["turns"][0] for group in sets.values() for question in group]
        for drafting in (d for d in draftings.values() if grows(d.method)):
            say(f"wrote {target.calibrate(drafting, prompts, min(o.max_new_tokens, 128))}")
    contenders = load_contenders(target, draftings, o.max_seq_len)
    decoder, weight = contenders[PLAIN].model.decoder, target.model.embed.weight
    judge = Judge(o.checkpoint, weight.dtype, str(weight.device), decoder.backend.row_invariant, ranks, o.kv)
    book = Book(Path(o.out), {
        **asked_options(o), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "device": str(decoder.device), "max_seq_len": decoder.max_seq_len, "compile": target.runtime.compile,
        **({"kv": o.kv} if o.kv != "auto" else {}),
        **({"ranks": ranks.count} if ranks else {}),
    })
    if ranks:  # now nobody reads what another one writes, and all have the same left to ask
        ranks.agree(f"the answers so far, {sorted(map(repr, book.answers))}", weight.device)
    return Evaluation(contenders, sets, book, judge, temperatures, o.max_new_tokens, o.seed, say)


def say(line: str) -> None:
    """Print a line to stderr, above the live line. Everything but the table and the tree goes there."""
    tqdm.write(line, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`; 1 also if a text differs."""
    unreported: list = []
    with one_voice() as voices:
        status = command(
            parser(), argv, lambda o: run(o, unreported), *ERRORS,
            interrupted="stopped (the same command goes on)", **(voices if several() else {"say": say}),
        )
    for evaluation in unreported:
        say("the table so far:")
        run_command(evaluation.report, *ERRORS, say=say, interrupted="stopped again: no table")
    return status


def run(o, unreported: list) -> int:
    """Do what the options say. Returns the exit status.

    unreported: holds the `evaluation.session.Evaluation`, of one process, while it has answers of which there
    is no table yet. Raises InputError, ValueError, OSError or RuntimeError on bad input.
    """
    asked = judge(o)
    if several():
        return run_together(o, asked)
    evaluation = load(o, asked)
    unreported.append(evaluation)
    evaluation.answer()
    unreported.clear()
    return finish(o, evaluation)


def run_together(o, asked: Asked) -> int:
    """`run` on one of several ranks. All do the same; but the first their folders are thrown away."""
    from engine.runtime import Runtime
    from kernels.tp import joined, own_device

    with joined(Runtime(o.device).device_name) as ranks, tempfile.TemporaryDirectory() as folder:
        if ranks.rank:
            if Path(o.out).is_dir():
                shutil.copytree(o.out, folder, dirs_exist_ok=True)
            o.out = folder
        # Also a moment in which all have read the folder.
        ranks.agree_on(command_in_words(o, asked), own_device(Runtime(o.device).device_name))
        evaluation = load(o, asked, ranks)
        evaluation.answer()
        return finish(o, evaluation)


def finish(o, evaluation) -> int:
    """Write and print the table and the pictures. Returns the exit status."""
    errors = evaluation.report()
    if o.observe or o.show_tree:
        evaluation.observe(o.observe, o.show_tree)
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
