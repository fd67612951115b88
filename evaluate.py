"""Measure speedup and acceptance length per question set, and check losslessness: the papers' table.

    python evaluate.py --checkpoint checkpoints/smollm2-135m --out runs/eval --speculate eagle3
    python evaluate.py --checkpoint DIR --out FOLDER --speculate eagle3,eagle2 --questions data/ --limit 40 \\
        --temperature 0,1

Plain decoding and every method answer all questions in turns, in one process: batch 1, prompts timed apart,
everything compiled before the first answer. Questions are FastChat's question.jsonl (EAGLE's and Spec-Bench's
too), a file or a folder of them; without --questions a small set of our own. A stopped run goes on with the
same command.

FOLDER/table.md, table.json   the table, also after Ctrl-C
FOLDER/answers.jsonl          all answers: texts, token ids, times, tokens of each step
FOLDER/differences.json       where a text is not the plain one, scored again in float32

The exit status is 1 if any text differs from the plain one by more than rounding explains.
"""
from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

# torch is imported by `run`, so that --help answers at once.
from common.cli import Options, command, is_main_rank, positive, seed, within
from common.writing import check_writable
from engine.drafting import add_method_flags
from extensions import METHODS


def parser() -> Options:
    """Declare the options of the command line."""
    p = Options(__doc__)
    p.add_checkpoint("target: a folder, hub id or .gguf")
    p.add_argument("--out", required=True, help="folder for answers and tables")

    g = p.add_argument_group("methods")
    g.add_argument("--speculate", default="eagle3", metavar="METHOD[,METHOD]",
                   help=f"of {', '.join(METHODS)}; plain decoding always runs")
    for flag, value, what in (
        ("--draft", "DIR", "head or draft model"), ("--tree", "SPEC", "as for generate.py")
    ):
        metavar = f"[METHOD=]{value}"
        g.add_argument(flag, action="append", default=[], metavar=metavar, help=f"{what}; may be repeated")
    add_method_flags(g)

    add = p.add_argument_group("questions").add_argument
    add("--questions", metavar="FILE_OR_FOLDER", help="FastChat questions (default: our own)")
    add("--sets", metavar="NAME[,NAME]", help="only these sets; mt_bench --limit 2 is a smoke test")
    add("--limit", type=positive, metavar="N", help="only the first N questions of each set")
    add("--temperature", type=temperatures, default="0", metavar="T[,T]", help="0 is greedy (default 0)")
    add("-n", "--max-new-tokens", type=positive, default=512, help="per turn (default 512)")
    add("--seed", type=seed, default=0, help="64 bits count, so that -1 is 2^64 - 1 (default 0)")
    p.add_runtime()
    return p


def temperatures(text: str) -> list[float]:
    """An argparse type: temperatures with commas between them, each once."""
    return list(dict.fromkeys(map(within(0, 1e6, float), text.split(","))))


def log(line: str) -> None:
    """Print a line to stderr, above the progress bar."""
    tqdm.write(line, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status, see `common.cli.run_command`; 1 also if a text differs.
    """
    # torch raises RuntimeError when memory runs out.
    return command(parser(), argv, run, OSError, ValueError, RuntimeError,
                   interrupted="stopped (the same command goes on)")


def run(o) -> int:
    """Run the evaluation. Returns the exit status. When interrupted, prints the table so far.

    Raises InputError, ValueError, OSError or RuntimeError.
    """
    methods = [*dict.fromkeys(o.speculate.split(","))]
    from engine.runtime import open_runtime
    from evaluation.answers import check_evaluation, read_sets
    from evaluation.methods import read_draftings
    from evaluation.session import Evaluation

    draftings = read_draftings(o, methods)
    sets = read_sets(o.questions, o.limit, o.sets, log)
    check_writable("--out", o.out)
    check_evaluation(Path(o.out))
    trees = [drafting.tree for drafting in draftings.values()]
    with tempfile.TemporaryDirectory() as folder:
        if not is_main_rank():  # all ranks do the same; only the folder of rank 0 stays
            if Path(o.out).is_dir():
                shutil.copytree(o.out, folder, dirs_exist_ok=True)
            o.out = folder
        with open_runtime(o, trees, sets) as (runtime, ranks):
            evaluation = Evaluation(o, runtime, draftings, sets, log, ranks)
            try:
                evaluation.answer()
            except BaseException:  # Ctrl-C, or no memory
                if ranks is None:  # scoring takes all ranks
                    log("the table so far:")
                    evaluation.report()
                raise
            return int(evaluation.report() > 0)


if __name__ == "__main__":
    sys.exit(main())
