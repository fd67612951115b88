"""Measure speedup and acceptance length per question set, and check losslessness.

    python evaluate.py --checkpoint checkpoints/smollm2-135m --out runs/eval --speculate eagle3
    python evaluate.py --checkpoint DIR --out FOLDER --speculate eagle3,eagle2 --questions data/ --limit 40 \\
        --temperature 0,1

After warmup, plain decoding and the methods alternate per question, one request at a time. Prefill time is
excluded. Questions are in FastChat's format, which EAGLE and Spec-Bench share; the default is a small
built-in set. The same command resumes an interrupted run.

FOLDER/table.md, table.json   the table, also after Ctrl-C
FOLDER/answers.jsonl          all answers: text, token ids, times, tokens emitted by each step
FOLDER/differences.json       outputs that differ from plain decoding, rescored in float32

The exit status is 1 if an output differs from plain decoding by more than rounding.
"""
from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

# torch is imported only after the options have been parsed, so that --help is fast.
from common.cli import Options, command, is_main_rank, positive, seed, within
from common.writing import check_writable
from engine.drafting import add_method_flags
from extensions import METHODS


def parser() -> Options:
    """Return the parser of the command line."""
    p = Options(__doc__, usage="%(prog)s -m CHECKPOINT --out OUT [options]")
    p.add_checkpoint("target: a folder, hub id or .gguf")
    p.add_argument("--out", required=True, help="folder for tables and answers")

    group = p.add_argument_group("methods")
    methods = ", ".join(name for name in METHODS if name != "none")
    group.add_argument("--speculate", default="eagle3", metavar="METHOD[,METHOD]",
                       help=f"methods compared with plain decoding (default eagle3): {methods}")
    for flag, value, what in (
        ("--draft", "DIR", "draft head or draft model (default: as in generate.py)"),
        ("--tree", "SPEC", "tree of a method, as in generate.py"),
    ):
        metavar = f"[METHOD=]{value}"
        what += "; may be repeated"
        group.add_argument(flag, action="append", default=[], metavar=metavar, help=what)
    add_method_flags(group)

    add = p.add_argument_group("questions").add_argument
    add("--questions", metavar="FILE_OR_FOLDER",
        help="question.jsonl or a folder of such files (default: built-in questions)")
    add("--sets", metavar="NAME[,NAME]", help="only these question sets (default: all)")
    add("--limit", type=positive, metavar="N", help="only the first N questions of each set (default: all)")
    add("--temperature", type=temperatures, default="0", metavar="T[,T]",
        help="sampling temperatures; 0 (default): greedy")
    add("-n", "--max-new-tokens", type=positive, default=512, metavar="N",
        help="maximum number of new tokens per turn (default 512)")
    add("--seed", type=seed, default=0, metavar="N", help="random seed, modulo 2^64 (default 0)")
    p.add_runtime()
    return p


def temperatures(text: str) -> list[float]:
    """Parse comma-separated temperatures without duplicates (argparse type)."""
    return list(dict.fromkeys(map(within(0, 1e6, float), text.split(","))))


def log(line: str) -> None:
    """Print a line to stderr, above the progress bar."""
    tqdm.write(line, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status, see `common.cli.run_command`; 1 also on differences."""
    # torch raises RuntimeError when memory runs out.
    return command(parser(), argv, run, OSError, ValueError, RuntimeError,
                   interrupted="interrupted; run the same command to resume")


def run(args) -> int:
    """Run the evaluation. Returns the exit status. When interrupted, prints the table so far.

    Raises InputError, ValueError, OSError or RuntimeError.
    """
    methods = [*dict.fromkeys(args.speculate.split(","))]
    from engine.target import open_runtime
    from evaluation.answers import check_evaluation, read_sets
    from evaluation.methods import read_draftings
    from evaluation.session import Evaluation

    draftings = read_draftings(args, methods)
    sets = read_sets(args.questions, args.limit, args.sets, log)
    check_writable("--out", args.out)
    check_evaluation(Path(args.out))
    trees = [drafting.tree for drafting in draftings.values()]
    with tempfile.TemporaryDirectory() as folder:
        if not is_main_rank():  # all ranks run the evaluation; only rank 0 keeps its folder
            if Path(args.out).is_dir():
                shutil.copytree(args.out, folder, dirs_exist_ok=True)
            args.out = folder
        with open_runtime(args, trees, sets) as (runtime, ranks):
            evaluation = Evaluation(args, runtime, draftings, sets, log, ranks)
            try:
                evaluation.answer()
            except BaseException:  # Ctrl-C, or out of memory
                if ranks is None:  # scoring needs all ranks
                    log("results so far:")
                    evaluation.report()
                raise
            return int(evaluation.report() > 0)


if __name__ == "__main__":
    sys.exit(main())
