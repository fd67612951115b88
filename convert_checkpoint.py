"""Convert a checkpoint to our folder format (see checkpoint/load.py), once: a target or a draft head.

    python convert_checkpoint.py --checkpoint SOURCE --out DIR         a target
    python convert_checkpoint.py --checkpoint SOURCE --target DIR      a head of the converted target DIR

SOURCE is a Hugging Face folder, a hub repository id (org/name) or a .gguf file. Heads: EAGLE-1/2/3, P-EAGLE,
DFlash, DSpark, Medusa, Hydra. Every tensor is accounted for before the first byte is written. Then one tensor
at a time is read, cast and appended: memory does not grow with the model.
"""
from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from checkpoint.convert import convert
from checkpoint.dense import HeadOptions
from checkpoint.load import read_config
from common.cli import DTYPES, Options, command, count
from common.errors import library_errors
from common.machine import use_threads
from common.names import program


def layer_numbers(value: str) -> tuple[int, ...]:
    """An argparse type: layer numbers with commas between them."""
    return tuple(map(count, value.split(",")))


def parser() -> Options:
    """The options of the command line."""
    p = Options(__doc__)
    add = p.add_argument
    p.add_checkpoint("SOURCE: a folder, org/name on the hub, or .gguf")
    add("--out", metavar="DIR",
        help="default: checkpoints/NAME; for a head TARGET/KIND, such as TARGET/eagle3")
    add("--target", metavar="DIR", help="for a head: the converted target it belongs to")
    add("--dtype", choices=("keep", *DTYPES), default="keep",
        help="dtype of the stored tensors (default keep: as in the source)")
    add("--aux-layers", type=layer_numbers, metavar="I,J,K",
        help="head: target layers whose inputs it reads, such as 2,15,27")
    add("--norm-before-residual", action=argparse.BooleanOptionalAction,
        help="EAGLE-3 head whose config lacks it: does its residual stream start from the normed feature?")
    add("--recycle", choices=("normed", "raw"),
        help="EAGLE-3 head with norm_output: the next draft step reads the normed or raw hidden state")
    add("--template", default="auto", metavar="WHICH",
        help="chat template: vicuna, llama2, a jinja FILE (replaces the source's), none; auto (default): by"
             " model name, if the source has none")
    add("--force", action="store_true", help="replace a converted folder; heads inside it are kept")
    add("--allow-nonfinite", action="store_true", help="take weights that are nan or infinite as they are")
    return p


def run(o) -> None:
    """Do what the options say. Raises InputError on bad input."""
    use_threads()
    options = HeadOptions(o.aux_layers, o.norm_before_residual, o.recycle)
    # A checkpoint can be malformed in more ways than anyone can list.
    with library_errors(f"{o.checkpoint}: malformed in a way this program does not know"):
        out = convert(o.checkpoint, o.out, o.target, dtype=o.dtype, options=options, template=o.template,
                force=o.force, allow_nonfinite=o.allow_nonfinite)
    print(next_steps(out, o.target))


def next_steps(out: Path, target: str | None) -> str:
    """Return the commands that use a converted folder on this machine. target: of a head."""
    import torch

    model, draft = shlex.quote(str(target or out)), "--speculate auto"
    if target and out.parent.resolve() != Path(target).resolve():
        draft = f"--draft {shlex.quote(str(out))}"
    lines = [f"next: {program('generate')} -m {model} {draft} 'Why is the sky blue?'"]
    if not (target or torch.cuda.is_available() or "quantization" in read_config(out)):
        lines.append(f"or first, for more speed on this CPU: {program('quantize')} -m {model} --mode w8a8")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
