"""Convert a checkpoint to our folder format (see checkpoint.py), once: a target or a draft head (EAGLE,
Medusa, Hydra).

    python convert_checkpoint.py --checkpoint SOURCE --out DIR         a target
    python convert_checkpoint.py --checkpoint SOURCE --target DIR      a head of the converted target DIR

SOURCE is a Hugging Face folder, a hub repository id (org/name) or a .gguf file. Every tensor is accounted for
before the first byte is written. Then one tensor at a time is read, cast and appended: memory does not grow
with the model.
"""
from __future__ import annotations

import argparse
import re
import sys

from checkpoint.convert import OUTPUT_DTYPES, convert
from checkpoint.head_layouts import Answers
from common.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, 1 on bad input, 130 when interrupted (argparse exits with
    2).
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", required=True, metavar="SOURCE", help="a folder, org/name on the hub, or .gguf"
    )
    parser.add_argument(
        "--out", metavar="DIR",
        help="default: checkpoints/NAME, for a head TARGET/eagle3, /eagle, /medusa or /hydra"
    )
    parser.add_argument("--target", metavar="DIR", help="for a head: the converted target it belongs to")
    parser.add_argument(
        "--dtype", choices=("keep", *OUTPUT_DTYPES), default="keep", help="default: as stored"
    )
    parser.add_argument(
        "--aux-layers", metavar="I,J,K", help="for a head: the target layers whose inputs feed it"
    )
    parser.add_argument("--norm-before-residual", action=argparse.BooleanOptionalAction, default=None,
                        help="for an EAGLE-3 head whose config does not say")
    parser.add_argument(
        "--recycle", choices=("normed", "raw"),
        help="for an EAGLE-3 head with norm_output: what it is fed back"
    )
    parser.add_argument("--template", default="auto", metavar="WHICH",
                        help="chat template to add: vicuna, llama2, a jinja FILE, none; auto (default) goes by the name if there is none")
    parser.add_argument(
        "--force", action="store_true", help="replace a converted folder; heads inside it are kept"
    )
    args = parser.parse_args(argv)
    if args.aux_layers is not None and not re.fullmatch(r"\d+(,\d+)*", args.aux_layers):
        parser.error(f"--aux-layers takes layer numbers such as 2,15,27, got {args.aux_layers!r}")
    aux_layers = tuple(int(i) for i in args.aux_layers.split(",")) if args.aux_layers else None
    try:
        answers = Answers(aux_layers, args.norm_before_residual, args.recycle)
        convert(args.checkpoint, args.out, args.target, args.dtype, answers, args.template, args.force)
    except InputError as e:
        print("error:", " ".join(str(e).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    except Exception as e:  # a checkpoint can be malformed in more ways than anyone can list
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        print(
            f"error: {args.checkpoint}: malformed in a way this program does not know ({reason})",
            file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
