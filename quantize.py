"""Quantise a converted checkpoint, once: int8, int4 or fp8 weights.

    python quantize.py --checkpoint checkpoints/mine --mode int8            # into checkpoints/mine-int8
    python quantize.py --checkpoint checkpoints/mine --mode int4 --group 64 --text sample.txt

The heads inside a target's folder are quantised the same way; a head's own folder works too. One tensor is in
memory at a time. Every layer's relative error is reported and, with --text, how often the quantised model's
next token is the original's, and both perplexities. `generate.py` reads the result like any other checkpoint.
"""
from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from checkpoint.folder import CONFIG, HEAD_KINDS, WEIGHTS, read_config
from checkpoint.quantizing import check_source, compare, quantize_folder, quantized_module, text_ids
from common.cli import Options, run_command
from common.errors import InputError
from kernels.quantized import GROUPS, MODES


def parser() -> Options:
    """The options of the command line."""
    p = Options(__doc__)
    add = p.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a converted target or head")
    add("--out", metavar="DIR", help="default: DIR-MODE")
    add("--mode", choices=MODES, default="int8")
    add(
        "--group", type=int, choices=GROUPS, default=64,
        help="int4: inputs that share a scale (default 64)"
    )
    add("--keep-lm-head", action="store_true", help="leave the lm_head in 16 bits")
    add(
        "--text", metavar="FILE",
        help="compare with the original on this text: perplexity, next-token agreement"
    )
    add("--force", action="store_true", help="replace an existing output folder")
    return p


def report(source: Path, out: Path, errors: list[tuple[str, float]]) -> None:
    """Print the sizes, and the errors: all layers of a kind in one line."""
    before, after = ((folder / WEIGHTS).stat().st_size for folder in (source, out))
    print(f"{out}: {before:,} -> {after:,} bytes ({after / before:.0%})")
    kinds = defaultdict(list)
    for layer, error in errors:
        kinds[layer.split(".")[-1]].append((error, layer))
    for kind, layers in kinds.items():
        mean = sum(error for error, _ in layers) / len(layers)
        worst, layer = max(layers)
        print(
            f"  {kind:10s} {len(layers):3d} layers, relative error {mean:.2%} (worst {worst:.2%}, {layer})"
        )


def run(o) -> None:
    """Do what the options say. Raises InputError and OSError on bad input."""
    source = Path(o.checkpoint)
    out = Path(o.out or f"{str(source).rstrip('/')}-{o.mode}")
    is_target = read_config(source)["kind"] == "target"
    if out.resolve() == source.resolve():
        raise InputError(f"--out {out}: is the checkpoint itself; choose another folder")
    if o.text and not is_target:
        raise InputError(f"--text compares targets; {source} is a head")
    heads = [kind for kind in sorted(HEAD_KINDS) if is_target and (source / kind / CONFIG).is_file()]
    ids = text_ids(source, Path(o.text)) if o.text else None
    folders = [(source, out), *((source / kind, out / kind) for kind in heads)]
    for folder, _ in folders:  # a mistake shows before anything is written
        quantized_module(check_source(folder), folder, o.mode, o.group, not o.keep_lm_head)
    stale = [kind for kind in HEAD_KINDS if is_target and kind not in heads and (out / kind).exists()]
    if stale:
        raise InputError(
            f"{out}: holds heads that {source} has not ({', '.join(stale)}); delete them or choose another"
            " --out"
        )
    for folder, into in folders:
        report(folder, into, quantize_folder(folder, into, o.mode, o.group, not o.keep_lm_head, o.force))
    if ids is not None:
        result = compare(source, out, ids)
        print(
            f"on {result['tokens']:,} tokens of {o.text}: perplexity {result['perplexity']:.3f} ->"
            f" {result['quantised_perplexity']:.3f}, same next token {result['agreement']:.1%}"
        )


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    o = parser().parse_args(argv)
    return run_command(lambda: run(o), OSError)


if __name__ == "__main__":
    sys.exit(main())
