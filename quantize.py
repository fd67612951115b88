"""Quantize a converted checkpoint, once: int8, int4 or fp8 weights.

    python quantize.py --checkpoint checkpoints/mine --mode int8            # into checkpoints/mine-int8
    python quantize.py --checkpoint checkpoints/mine --mode int4 --group 64 --text sample.txt

The heads inside a target's folder are quantized too; a head's own folder works as well. With int4, heads
and the lm_head become int8, with w4a8 w8a8. The 4-bit weights of a target are calibrated (GPTQ) on a text
that it writes itself, or on one of yours. Memory holds one tensor at a time or, when calibrating, one layer
and what is ready.

The error of the layers is reported and, with --text, how often the quantized model's next token is the
original's, and both perplexities. `generate.py` reads the result like any other checkpoint.
"""
from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.convert import converted_folder, default_folder
from checkpoint.folder import check_exact, check_out
from checkpoint.load import CONFIG, WEIGHTS, is_converted, load_model, read_config
from checkpoint.quantizing import QuantizationPlan, compare, quantize_folder, text_ids
from common.cli import Options, command, note
from common.errors import InputError, counted
from common.files import read_text
from common.machine import use_threads
from common.progress import progress_bar
from common.writing import check_replaceable, staging
from engine.engine import Engine
from engine.prompt import encode
from extensions import HEADS
from kernels.choose import choose_backend
from kernels.quantized import FOUR_BITS, GROUPS, LM_HEAD_MODES, MODES, Scheme, quantize_linears
from sampling.options import Sampling
from tokens.tokenizer import Tokenizer

PROMPTS = (  # whose answers are the text to calibrate on
    "Explain how rain forms, step by step.",
    "Write a short story about a lighthouse keeper and a lost dog.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 60 miles in 90 minutes. What is its average speed in miles per hour?",
    "Summarize the causes of the French Revolution in three sentences.",
    "Give me five tips for learning a new language.",
    "Translate to French: The weather is nice today and we are going to the park.",
    "What are the differences between a virus and a bacterium?",
)

GROUP = 32
PIECE = 256  # tokens of a --calibrate text that are read together
ROWS, MAX_WRITTEN = 32, 224  # texts that a target writes itself, and new tokens of each


def parser() -> Options:
    """The options of the command line."""
    p = Options(__doc__)
    add, refuse = p.add_argument, p.refuse
    p.add_checkpoint("converted target or head; a Hugging Face folder, hub id or .gguf is converted first")
    add("--out", metavar="DIR", help="default: CHECKPOINT-MODE")
    add("--mode", choices=MODES, default="int8")
    add("--group", type=int, choices=GROUPS,
        help=f"int4, w4a8: inputs that share a scale (default {GROUP})")
    add("--method", choices=("gptq", "nearest"),
        help="int4, w4a8: gptq, calibrated (default for a target), or each weight to the nearest value")
    add("--calibrate", metavar="FILE",
        help="gptq: a text to calibrate on (default: one that the target writes); never that of --text")
    either = p.add_mutually_exclusive_group().add_argument
    either("--lm-head", choices=("int8", "w8a8", "int4", "w4a8"),
           help="the lm_head's mode (default: --mode's; int8 for int4, w8a8 for w4a8)")
    either("--keep-lm-head", action="store_true", help="leave the lm_head in 16 bits")
    add("--text", metavar="FILE",
        help="compare with the original on this text: perplexity, next-token agreement")
    add("--force", action="store_true", help="replace an existing output folder")
    add("--allow-nonfinite", action="store_true", help="take weights that are nan or infinite as they are")
    refuse(lambda o: o.group and not {o.mode, o.lm_head} & {*FOUR_BITS},
           lambda o: f"--group {o.group}: is for int4 and w4a8; --mode {o.mode} has no groups, leave it out")
    refuse(lambda o: (o.calibrate or o.method == "gptq") and (
               o.mode not in FOUR_BITS or o.method == "nearest"),
           lambda o: "--calibrate and --method gptq: only for --mode int4 or w4a8 with gptq")
    refuse(lambda o: o.calibrate and o.text and Path(o.calibrate).resolve() == Path(o.text).resolve(),
           lambda o: "--calibrate and --text: a model reads the text that it was calibrated on better than"
                     " others; name two files")
    return p


def schemes(o):
    """Return the schemes of the checkpoint itself and of the heads inside it."""
    beside = LM_HEAD_MODES.get(o.mode, o.mode)
    lm_head = None if o.keep_lm_head else o.lm_head or beside
    group = (o.group or GROUP) if {o.mode, lm_head} & {*FOUR_BITS} else 0
    return Scheme(o.mode, group, lm_head), Scheme(beside, 0, None if o.keep_lm_head else beside)


def own_text(checkpoint: Path) -> Tensor:
    """Return `ROWS` texts of token ids that the target samples at temperature 1 after `PROMPTS`.

    It writes in w8a8, on our kernels: several times faster. After the end of an answer it goes on with turns
    of its own. Raises InputError without a tokenizer of this model, or if the caches do not fit.
    """
    (model, _), tokenizer = load_model(checkpoint), Tokenizer.load(checkpoint)
    if tokenizer is None:
        raise InputError(f"{checkpoint}: writing a text to calibrate on needs a tokenizer")
    quantize_linears(model, Scheme("w8a8", 0, "w8a8"))
    choose_backend("cpu", log=note).prepare(model)
    prompts = [encode(tokenizer, PROMPTS[i % len(PROMPTS)]) for i in range(ROWS)]
    length = max(map(len, prompts)) + MAX_WRITTEN
    samplings = [Sampling(length, temperature=1.0, seed=i) for i in range(ROWS)]
    try:
        engine, requests = Engine(model, batch=ROWS, max_seq_len=length, compile=False), []
        written = sum(length - len(prompt) for prompt in prompts)
        with progress_bar(total=written, desc="text to calibrate on", unit="token") as bar:
            for event in engine.run(prompts, samplings, requests):
                bar.update(len(event.ids))
        return torch.tensor([request.tokens[:length] for request in requests])
    except ValueError as e:  # the caches do not fit, or the tokenizer is another model's
        raise InputError(f"{checkpoint}: {e}") from None


def calibration_text(o, text: str | None, source: Path):
    """Token ids [B, T] to calibrate on: of the text that --calibrate names, or of one that the target writes.

    Raises InputError if they cannot be had.
    """
    if text is not None:
        ids = text_ids(source, f"--calibrate {o.calibrate}", text, 2048, 8192)
        return ids[: len(ids) // PIECE * PIECE].view(-1, PIECE)
    try:
        return own_text(source)
    except InputError as e:
        raise InputError(f"{e}; see also --calibrate FILE and --method nearest") from None


def report(source: Path, out: Path, errors: dict[str, tuple[str, float]]) -> None:
    """Print the sizes, and the errors: all layers of a kind in one line."""
    before, after = ((folder / WEIGHTS).stat().st_size for folder in (source, out))
    print(f"{out}: {before:,} -> {after:,} bytes ({after / before:.0%})")
    kinds = defaultdict(list)
    for name, (what, error) in sorted(errors.items()):
        kinds[name.split(".")[-1], what].append((error, name))
    for (kind, what), layers in kinds.items():
        mean = sum(error for error, _ in layers) / len(layers)
        worst, layer = max(layers)
        print(f"  {kind:10s} {counted(len(layers), 'layer'):10s} relative error {what} {mean:.2%}"
              f" (worst {worst:.2%}, {layer})")


def judge(o, source: Path, out: Path) -> dict[str, QuantizationPlan]:
    """Return what is quantized by its subfolder of `out`: "" is the source itself, others its heads.

    Raises InputError, before anything is loaded, on options that do not fit the source.
    """
    kind = read_config(source)["kind"]
    is_target = kind == "target"
    if out.resolve() == source.resolve():
        raise InputError(f"--out {out}: is the checkpoint itself; choose another folder")
    for_targets = {"--text": o.text, "--calibrate": o.calibrate, "--method gptq": o.method == "gptq"}
    for flag, given in for_targets.items():
        if given and not is_target:
            raise InputError(f"{flag} is for targets; {source} is a head")
    heads = [kind for kind in sorted(HEADS) if is_target and (source / kind / CONFIG).is_file()]
    stale = [kind for kind in HEADS if is_target and kind not in heads and (out / kind).exists()]
    if stale:
        raise InputError(f"{out}: holds heads that {source} has not ({', '.join(stale)}); delete them or"
                         " choose another --out")
    for name in ("", *heads):
        check_out(out / name, name or kind, o.force)
    scheme, of_heads = schemes(o)
    return {name: QuantizationPlan.of(source / name, of_heads if name else scheme, name or kind)
            for name in ("", *heads)}


def run(o) -> None:
    """Do what the options say. Raises InputError and OSError on bad input."""
    compared, calibrate = (read_text(file, what=flag) if file else None
                           for flag, file in (("--text", o.text), ("--calibrate", o.calibrate)))
    ready = is_converted(o.checkpoint)
    folder = o.checkpoint.rstrip("/") if ready else default_folder(o.checkpoint)
    out = Path(o.out or f"{folder}-{o.mode}")
    check_replaceable("--out", str(out))
    if not ready:  # a target, which takes long to convert
        check_out(out, "target", o.force)
        check_exact(o.checkpoint)
    source = Path(converted_folder(o.checkpoint, note))
    parts = judge(o, source, out)
    use_threads()
    ids = None if compared is None else text_ids(source, f"--text {o.text}", compared, 16, 16384)
    calibrated = parts[""].before["kind"] == "target" and o.mode in FOUR_BITS and o.method != "nearest"
    text, errors = calibration_text(o, calibrate, source) if calibrated else None, {}
    # The target and its heads are there together, or not at all.
    with staging(out) as folder:
        for name, plan in parts.items():
            errors[name] = quantize_folder(plan, folder / name, None if name else text, o.allow_nonfinite)
    for name in parts:
        report(source / name, out / name, errors[name])
    if ids is not None:
        result = compare(source, out, ids, choose_backend("cpu", log=note).prepare)
        print(f"on {result['tokens']:,} tokens of {o.text}: perplexity {result['perplexity']:.3f} ->"
              f" {result['quantized_perplexity']:.3f}, same next token {result['agreement']:.1%}")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
