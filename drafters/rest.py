"""Make a data store for --speculate rest: see `drafters.retrieval`.

    python -m drafters.rest build --checkpoint checkpoints/mine --out runs/store texts.jsonl more.txt
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from checkpoint.folder import read_config
from common.cli import Options, check_replaceable, command
from common.files import check_readable
from drafters.rest_store import check_out, make


def parser() -> Options:
    """The options of the command line, with their rules."""
    p = Options(__doc__, prog="python -m drafters.rest")
    commands = p.add_subparsers(dest="what", required=True)
    b = commands.add_parser("build", help="make a store of texts")
    b.add_argument("--checkpoint", required=True, help="converted target whose tokenizer is used")
    b.add_argument("--out", required=True, help="folder of the store")
    b.add_argument("--force", action="store_true", help="replace a store")
    b.add_argument(
        "files", nargs="+",
        help='text, or JSON lines: conversations, prompts, "text", or "ids" (training shards)'
    )
    p.judge(lambda o: read_config(o.checkpoint, "target"))
    p.judge(lambda o: check_replaceable("--out", o.out))
    p.judge(lambda o: check_out(Path(o.out), o.force))
    p.judge(lambda o: [check_readable("", file) for file in o.files])
    return p


def run(o: argparse.Namespace) -> None:
    """Do what the options say. Raises InputError and OSError on bad input."""
    about = make(Path(o.checkpoint), [Path(f) for f in o.files], Path(o.out), o.force)
    print(f"wrote {o.out}: {about['tokens']:,} tokens")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
