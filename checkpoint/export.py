"""Write a draft head of ours as a Hugging Face folder that other programs read.

    python -m checkpoint.export --head checkpoints/mine/eagle3 --checkpoint checkpoints/mine --out DIR

--layout sglang (default) writes
    EAGLE-3 and EAGLE-1 heads as the EAGLE repository publishes them. SGLang reads both. vLLM reads EAGLE-3,
    and EAGLE-1 if `architectures` in config.json is changed to LlamaForCausalLM;
    P-EAGLE heads as vLLM reads them, with a Markov head in a layout of our own;
    Medusa heads as vLLM reads them; Hydra, DFlash and DSpark heads as their authors publish them.
--layout speculators writes EAGLE-3, P-EAGLE, DFlash and DSpark heads as the speculators library does. vLLM
reads them.
"""
from __future__ import annotations

import sys
from pathlib import Path

from checkpoint.folder import WEIGHTS, check_exact, is_converted, read_config
from checkpoint.heads import LAYOUTS, export
from checkpoint.loading import load_head, load_model
from common.cli import Options, command
from common.errors import InputError
from common.files import check_replaceable


def parser() -> Options:
    """The options of the command line."""
    p = Options(__doc__, prog="python -m checkpoint.export")
    add = p.add_argument
    add("--head", required=True, help="converted head")
    p.add_checkpoint("the converted target it belongs to")
    add("--layout", choices=LAYOUTS, default="sglang")
    add("--out", required=True)
    add("--force", action="store_true", help="replace the weights of an existing folder")
    p.refuse(lambda o: (Path(o.out).resolve() / WEIGHTS).exists() and not o.force,
             lambda o: f"{o.out}: holds a {WEIGHTS}; replace it with --force or choose another --out")
    p.judge(lambda o: check_replaceable("--out", o.out))
    return p


def run(o) -> None:
    """Do what the options say. Raises InputError and OSError on bad input."""
    if is_converted(o.out):
        raise InputError(f"--out {o.out}: holds a converted checkpoint; choose another folder")
    head = read_config(o.head, what="--head")
    if head["kind"] == "target":
        raise InputError(f"--head {o.head}: holds a target, no draft head")
    check_exact(o.head, head)
    target, target_config = load_model(o.checkpoint)
    print(f"wrote {export(load_head(o.head, target), o.out, o.layout, target_config)}")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
