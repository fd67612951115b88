"""Quantise a converted checkpoint, once: int8, int4 or fp8 weights.

    python quantize.py --checkpoint checkpoints/smollm2-135m --mode int8            # into checkpoints/smollm2-135m-int8
    python quantize.py --checkpoint checkpoints/smollm2-135m --mode int4 --group 64 --text sample.txt

A target takes its heads along, each quantised the same way; a head's own folder works too. One tensor is in
memory at a time. Every layer's relative error is reported and, with --text, how often the quantised model's
next token is the original's, and both perplexities. `generate.py` reads the result like any other checkpoint.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from checkpoint.folder import CONFIG, WEIGHTS, read_config
from checkpoint.loading import HEADS
from checkpoint.quantizing import check_source, compare, planned, quantize, text_ids
from common.cli import run_command
from common.errors import InputError
from kernels.quantized import GROUPS, MODES


def report(name: str, source: Path, out: Path, errors: list[tuple[str, float]]) -> None:
    """Sizes, and the errors: all layers of a kind in one line."""
    before, after = ((folder / WEIGHTS).stat().st_size for folder in (source, out))
    print(f"{name}: {before:,} -> {after:,} bytes ({after / before:.0%})")
    kinds: dict[str, list[float]] = {}
    for layer, error in errors:
        kinds.setdefault(layer.split(".")[-1], []).append(error)
    for kind, values in kinds.items():
        name = max((error, layer) for layer, error in errors if layer.split(".")[-1] == kind)[1]
        print(
            f"  {kind:10s} {len(values):3d} layers, relative error {sum(values) / len(values):.2%} (worst {max(values):.2%}, {name})"
        )


def run(o) -> None:
    """Do what the parsed options say. Raises InputError and OSError on bad input."""
    source = Path(o.checkpoint)
    out = Path(o.out or f"{str(source).rstrip('/')}-{o.mode}")
    config = read_config(source)
    if out.resolve() == source.resolve():
        raise InputError(f"--out {out}: is the checkpoint itself; choose another folder")
    if o.text and config["kind"] != "target":
        raise InputError(f"--text compares targets; {source} is a head")
    heads = [
        d for d in sorted(source.iterdir()) if d.name in HEADS and (d / CONFIG).is_file()
    ] if config["kind"] == "target" else []
    ids = text_ids(source, Path(o.text)) if o.text else None
    for folder in (source, *heads):  # a mistake shows before anything is written
        planned(check_source(folder), folder, o.mode, o.group, not o.keep_lm_head)
    stale = [
        d.name for d in out.iterdir() if d.name in HEADS and d.name not in [h.name for h in heads]
    ] if out.is_dir() else []
    if stale and config["kind"] == "target":
        raise InputError(
            f"{out}: holds heads that {source} has not ({', '.join(stale)}); delete them or choose another --out"
        )
    for folder, into in [(source, out), *((head, out / head.name) for head in heads)]:
        errors = quantize(folder, into, o.mode, o.group, not o.keep_lm_head, o.force)
        report(str(into), folder, into, errors)
    if ids is not None:
        found = compare(source, out, ids)
        print(f"on {found['tokens']:,} tokens of {o.text}: perplexity {found['perplexity']:.3f} -> "
              f"{found['quantised_perplexity']:.3f}, same next token {found['agreement']:.1%}")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0, 1 with a one-line error, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a converted target or head")
    parser.add_argument("--out", metavar="DIR", help="default: DIR-MODE")
    parser.add_argument("--mode", choices=MODES, default="int8")
    parser.add_argument(
        "--group", type=int, choices=GROUPS, default=64, help="int4: inputs that share a scale (default 64)"
    )
    parser.add_argument("--keep-lm-head", action="store_true", help="leave the lm_head in 16 bits")
    parser.add_argument(
        "--text", metavar="FILE",
        help="compare with the original on this text: perplexity, next-token agreement"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing output folder")
    o = parser.parse_args(argv)
    return run_command(lambda: run(o), OSError)


if __name__ == "__main__":
    sys.exit(main())
