"""Convert a target model or a draft head to the folder format that all commands read (docs/converting.md).

    python convert_checkpoint.py SOURCE --out DIR         a target
    python convert_checkpoint.py SOURCE --target DIR      a head of the converted target DIR

SOURCE is a Hugging Face folder, a hub id (org/name) or a .gguf file. Heads: EAGLE-1/2/3, P-EAGLE, DFlash,
DSpark, Medusa, Hydra, MTP. Missing and unexpected tensors are reported before anything is written. Tensors
are converted one at a time, so memory does not grow with the model.
"""
from __future__ import annotations

import argparse
import sys

from checkpoint.convert import convert, next_steps
from checkpoint.layouts import HeadOptions
from common.cli import DTYPES, Options, command, count
from common.errors import library_errors
from common.machine import use_threads


def layer_numbers(value: str) -> tuple[int, ...]:
    """Parse comma-separated layer numbers (argparse type)."""
    return tuple(map(count, value.split(",")))


def parser() -> Options:
    """Return the parser of the command line."""
    p = Options(__doc__, usage="%(prog)s -m SOURCE [options]")
    add = p.add_argument
    p.add_checkpoint("Hugging Face folder, hub id (org/name) or .gguf file")
    add("--out", metavar="DIR",
        help="output folder (default: checkpoints/NAME; for a head: TARGET/KIND, such as TARGET/eagle3)")
    add("--target", metavar="DIR", help="the source is a head of this converted target")
    add("--dtype", choices=("keep", *DTYPES), default="keep",
        help="dtype of the weights (default keep: as in the source)")
    add("--aux-layers", type=layer_numbers, metavar="I,J,K",
        help="head: target layers whose inputs are its features, such as 2,15,27 (default: from its config)")
    add("--norm-before-residual", action=argparse.BooleanOptionalAction,
        help="EAGLE-3 head: whether its residual stream starts at the feature after its norm (default: from"
             " its config)")
    add("--recycle", choices=("normed", "raw"),
        help="EAGLE-3 head with norm_output: feed the next draft step the hidden state after the final norm"
             " (normed) or before it (raw)")
    add("--template", default="auto", metavar="WHICH",
        help="chat template: vicuna, llama2 or a jinja file replaces the source's; auto (default): chosen by"
             " model name if the source has none; none: no template is added")
    add("--force", action="store_true", help="replace an existing output folder; keep the heads in it")
    return p


def run(args) -> None:
    """Run the command with these parsed options. Raises InputError on bad input."""
    use_threads()
    options = HeadOptions(args.aux_layers, args.norm_before_residual, args.recycle)
    # Readers of malformed files raise many types of errors.
    with library_errors(f"{args.checkpoint}: cannot be converted; it may be malformed"):
        out = convert(args.checkpoint, args.out, args.target, dtype=args.dtype, options=options,
                template=args.template, force=args.force)
    print(next_steps(out, args.target))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
