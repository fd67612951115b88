"""Quantize a converted checkpoint to int8, int4 or fp8 weights.

    python quantize.py --checkpoint checkpoints/mine --mode w8a8            # to checkpoints/mine-w8a8
    python quantize.py --checkpoint checkpoints/mine --mode w4a8 --group 64 --text sample.txt

Heads in the target's folder are quantized too; a head's folder can also be quantized alone. Heads and lm_head
get int8 with --mode int4, and w8a8 with --mode w4a8. 4-bit weights of a target are calibrated with GPTQ on
text that the target generates, or on --calibrate FILE. Tensors are quantized one at a time.

Prints the relative error of each kind of layer; with --text also perplexity and top-1 agreement of both
models.
"""
from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.convert import converted_folder, default_folder, next_steps
from checkpoint.folder import check_out, check_unquantized
from checkpoint.load import CONFIG, WEIGHTS, is_converted, load_model, read_config
from checkpoint.quantizing import QuantizationPlan, compare, quantize_folder, text_ids
from common.cli import Options, command, log_stderr
from common.errors import InputError, counted, read_text
from common.machine import use_threads
from common.progress import progress_bar
from common.writing import check_replaceable, staging
from engine.engine import Engine
from engine.request import encode
from engine.sampling import Sampling
from extensions import HEADS
from kernels.choose import choose_backend
from kernels.cpu import CpuBackend
from kernels.packed import PackedLinear
from kernels.quantized import QuantizedLinear
from kernels.scheme import GROUPS, INT4_MODES, LM_HEAD_MODES, MODES, Scheme, quantize_linears
from tokens.tokenizer import Tokenizer

PROMPTS = (  # the target's answers are the default calibration text
    "Explain how rain forms, step by step.",
    "Write a short story about a lighthouse keeper and a lost dog.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 60 miles in 90 minutes. What is its average speed in miles per hour?",
    "Summarize the causes of the French Revolution in three sentences.",
    "Give me five tips for learning a new language.",
    "Translate to French: The weather is nice today and we are going to the park.",
    "What are the differences between a virus and a bacterium?",
)

DEFAULT_GROUP = 32
CALIBRATION_LENGTH = 256  # tokens per sequence of --calibrate
SEQUENCES, MAX_NEW_TOKENS = 16, 224  # generated calibration text: number of sequences, new tokens of each


def parser() -> Options:
    """Return the parser of the command line."""
    p = Options(__doc__, usage="%(prog)s -m CHECKPOINT [options]")
    add, reject_if = p.add_argument, p.reject_if
    p.add_checkpoint("converted target or head; a Hugging Face folder, hub id or .gguf is converted first")
    add("--out", metavar="DIR", help="output folder (default: CHECKPOINT-MODE)")
    add("--mode", choices=MODES, default="int8",
        help="mode of the linear layers (default: int8). Fastest on CPUs: w8a8, or w4a8 from 1B weights on;"
             " fp8: for GPUs")
    add("--group", type=int, choices=GROUPS,
        help=f"int4, w4a8: group size, inputs that share a scale (default {DEFAULT_GROUP})")
    add("--method", choices=("gptq", "nearest"),
        help="int4, w4a8: gptq (default for targets; calibrated), or nearest (round to nearest)")
    add("--calibrate", metavar="FILE",
        help="gptq: calibration text (default: the target generates it); must differ from --text")
    add_exclusive = p.add_mutually_exclusive_group().add_argument
    add_exclusive("--lm-head", choices=("int8", "w8a8", "int4", "w4a8"),
                  help="mode of the lm_head (default: int8 with --mode int4, w8a8 with w4a8, else --mode)")
    add_exclusive("--keep-lm-head", action="store_true", help="do not quantize the lm_head")
    add("--text", metavar="FILE",
        help="print perplexity and top-1 agreement of both models on this text")
    add("--force", action="store_true", help="replace an existing output folder")
    reject_if(lambda args: args.group and not {args.mode, args.lm_head} & {*INT4_MODES},
           lambda args: f"--group {args.group}: only for int4 and w4a8; --mode {args.mode} has no groups")
    reject_if(lambda args: (args.calibrate or args.method == "gptq") and (
               args.mode not in INT4_MODES or args.method == "nearest"),
           lambda args: "--calibrate and --method gptq: only for --mode int4 or w4a8 with gptq")
    reject_if(lambda args: args.calibrate and args.text and (
               Path(args.calibrate).resolve() == Path(args.text).resolve()),
           lambda args: "--calibrate and --text: perplexity on calibration text is too low; pass two files")
    return p


def schemes(args):
    """Return the schemes of the checkpoint and of the heads in its folder."""
    head_mode = LM_HEAD_MODES.get(args.mode, args.mode)
    lm_head = None if args.keep_lm_head else args.lm_head or head_mode
    group = (args.group or DEFAULT_GROUP) if {args.mode, lm_head} & {*INT4_MODES} else 0
    return Scheme(args.mode, group, lm_head), Scheme(head_mode, 0, None if args.keep_lm_head else head_mode)


def generate_calibration_ids(checkpoint: Path, backend) -> Tensor:
    """Return the ids [B, T] of `SEQUENCES` answers to `PROMPTS`, sampled from the target at temperature 1.

    The target runs in w8a8, which is several times faster than bf16. Sequences do not end at stop ids. Raises
    InputError without a matching tokenizer, or if the KV caches do not fit in memory.
    """
    (model, _), tokenizer = load_model(checkpoint), Tokenizer.load(checkpoint)
    if tokenizer is None:
        raise InputError(f"{checkpoint}: generating calibration text needs a tokenizer")
    quantize_linears(model, Scheme("w8a8", 0, "w8a8"))
    backend.prepare(model)
    prompts = [encode(tokenizer, PROMPTS[i % len(PROMPTS)]) for i in range(SEQUENCES)]
    length = max(map(len, prompts)) + MAX_NEW_TOKENS
    samplings = [Sampling(length, temperature=1.0, seed=i) for i in range(SEQUENCES)]
    try:
        engine, requests = Engine(model, batch=SEQUENCES, max_seq_len=length, compile=False), []
        total = sum(length - len(prompt) for prompt in prompts)
        with progress_bar(total=total, desc="generating calibration text", unit="token") as bar:
            for event in engine.run(prompts, samplings, requests):
                bar.update(len(event.ids))
        return torch.tensor([request.tokens[:length] for request in requests])
    except ValueError as e:  # KV caches do not fit, or the tokenizer does not match
        raise InputError(f"{checkpoint}: {e}") from None


def calibration_ids(args, text: str | None, source: Path, backend):
    """Return the ids [B, T] of the calibration text: `text`, from --calibrate, or generated by the target.

    Raises InputError if generating fails.
    """
    if text is not None:
        ids = text_ids(source, f"--calibrate {args.calibrate}", text, 2048, 8192)
        return ids[: len(ids) // CALIBRATION_LENGTH * CALIBRATION_LENGTH].view(-1, CALIBRATION_LENGTH)
    try:
        return generate_calibration_ids(source, backend)
    except InputError as e:
        raise InputError(f"{e}; see also --calibrate FILE and --method nearest") from None


def report(source: Path, out: Path, errors: dict[str, tuple[str, float]]) -> None:
    """Print file sizes, and the relative error of each type of layer.

    errors: layer -> ("of weights" or "of outputs", relative error).
    """
    before, after = ((folder / WEIGHTS).stat().st_size for folder in (source, out))
    print(f"{out}: {before:,} -> {after:,} bytes ({after / before:.0%})")
    by_type = defaultdict(list)
    for name, (what, error) in sorted(errors.items()):
        by_type[name.split(".")[-1], what].append((error, name))
    for (layer_type, what), layers in by_type.items():
        mean = sum(error for error, _ in layers) / len(layers)
        worst, layer = max(layers)
        print(f"  {layer_type:10s} {counted(len(layers), 'layer'):10s} relative error {what} {mean:.2%}"
              f" (worst {worst:.2%}, {layer})")


def make_plans(args, source: Path, out: Path) -> dict[str, QuantizationPlan]:
    """Return subfolder -> plan; "": the checkpoint itself.

    Raises InputError on options that do not fit the source.
    """
    kind = read_config(source)["kind"]
    is_target = kind == "target"
    if out.resolve() == source.resolve():
        raise InputError(f"--out {out}: is the checkpoint itself; choose another folder")
    target_flags = {"--text": args.text, "--calibrate": args.calibrate,
                    "--method gptq": args.method == "gptq"}
    for flag, is_set in target_flags.items():
        if is_set and not is_target:
            raise InputError(f"{flag} is for targets; {source} is a head")
    heads = [kind for kind in sorted(HEADS) if is_target and (source / kind / CONFIG).is_file()]
    stale_heads = [kind for kind in HEADS if is_target and kind not in heads and (out / kind).exists()]
    if stale_heads:
        raise InputError(f"{out}: has heads that {source} lacks ({', '.join(stale_heads)}); delete them"
                         " or choose another --out")
    for name in ("", *heads):
        check_out(out / name, name or kind, args.force)
    scheme, head_scheme = schemes(args)
    return {name: QuantizationPlan.from_folder(source / name, head_scheme if name else scheme, name or kind)
            for name in ("", *heads)}


def run(args) -> None:
    """Run the command with these parsed options. Raises InputError and OSError on bad input."""
    files = ("--text", args.text), ("--calibrate", args.calibrate)
    evaluation_text, calibration_text = (read_text(file, what=flag) if file else None for flag, file in files)
    source_is_converted = is_converted(args.checkpoint)
    folder = args.checkpoint.rstrip("/") if source_is_converted else default_folder(args.checkpoint)
    out = Path(args.out or f"{folder}-{args.mode}")
    check_replaceable("--out", str(out))
    if not source_is_converted:  # check before converting, which takes minutes
        check_out(out, "target", args.force)
        check_unquantized(args.checkpoint)
    source = Path(converted_folder(args.checkpoint, log_stderr))
    plans = make_plans(args, source, out)
    use_threads()
    backend = choose_backend("cpu", log=log_stderr)
    ids = None
    if evaluation_text is not None:
        ids = text_ids(source, f"--text {args.text}", evaluation_text, 16, 16384)
    is_target = plans[""].source_config["kind"] == "target"
    is_calibrated = is_target and args.mode in INT4_MODES and args.method != "nearest"
    inputs = calibration_ids(args, calibration_text, source, backend) if is_calibrated else None
    errors = {}

    def run_linear(layer: QuantizedLinear, x: Tensor) -> Tensor:
        with backend.threads():
            return PackedLinear(backend, layer, x.dtype)(x) if isinstance(backend, CpuBackend) else layer(x)

    # Target and heads are replaced together.
    with staging(out) as folder:
        for name, plan in plans.items():
            errors[name] = quantize_folder(plan, folder / name, None if name else inputs, run_linear)
    for name in plans:
        report(source / name, out / name, errors[name])
    if ids is not None:
        result = compare(source, out, ids, backend.prepare)
        print(f"on {result['tokens']:,} tokens of {args.text}: perplexity {result['perplexity']:.3f} ->"
              f" {result['quantized_perplexity']:.3f}, top-1 agreement {result['agreement']:.1%}")
    if is_target:
        print(next_steps(out))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
