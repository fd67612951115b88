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

PROMPTS = (  # their answers are the default calibration text
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
CALIBRATION_LENGTH = 256  # tokens per sequence of --calibrate
SEQUENCES, MAX_NEW_TOKENS = 16, 224  # sequences that the target generates, and new tokens of each


def parser() -> Options:
    """Return the parser of the command line."""
    p = Options(__doc__, usage="%(prog)s -m CHECKPOINT [options]")
    add, reject_if = p.add_argument, p.reject_if
    p.add_checkpoint("converted target or head; a Hugging Face folder, hub id or .gguf is converted first")
    add("--out", metavar="DIR", help="output folder (default: CHECKPOINT-MODE)")
    add("--mode", choices=MODES, default="int8",
        help="mode of the linear layers (default int8): on CPUs w8a8, or w4a8 from 1B weights; fp8 for GPUs")
    add("--group", type=int, choices=GROUPS,
        help=f"int4, w4a8: group size, inputs that share a scale (default {GROUP})")
    add("--method", choices=("gptq", "nearest"),
        help="int4, w4a8: gptq, with calibration (default for targets), or nearest, round to nearest")
    add("--calibrate", metavar="FILE",
        help="gptq: calibration text (default: the target generates it); must differ from --text")
    either = p.add_mutually_exclusive_group().add_argument
    either("--lm-head", choices=("int8", "w8a8", "int4", "w4a8"),
           help="mode of the lm_head (default: int8 with --mode int4, w8a8 with w4a8, else as --mode)")
    either("--keep-lm-head", action="store_true", help="do not quantize the lm_head")
    add("--text", metavar="FILE",
        help="print perplexity and top-1 agreement of both models on this text")
    add("--force", action="store_true", help="replace an existing output folder")
    reject_if(lambda o: o.group and not {o.mode, o.lm_head} & {*INT4_MODES},
           lambda o: f"--group {o.group}: only for int4 and w4a8; --mode {o.mode} has no groups")
    reject_if(lambda o: (o.calibrate or o.method == "gptq") and (
               o.mode not in INT4_MODES or o.method == "nearest"),
           lambda o: "--calibrate and --method gptq: only for --mode int4 or w4a8 with gptq")
    reject_if(lambda o: o.calibrate and o.text and Path(o.calibrate).resolve() == Path(o.text).resolve(),
           lambda o: "--calibrate and --text: perplexity on the calibration text is too low; name two files")
    return p


def schemes(o):
    """Return the schemes of the checkpoint itself and of the heads inside it."""
    beside = LM_HEAD_MODES.get(o.mode, o.mode)
    lm_head = None if o.keep_lm_head else o.lm_head or beside
    group = (o.group or GROUP) if {o.mode, lm_head} & {*INT4_MODES} else 0
    return Scheme(o.mode, group, lm_head), Scheme(beside, 0, None if o.keep_lm_head else beside)


def generate_text(checkpoint: Path, backend) -> Tensor:
    """Return `SEQUENCES` answers [B, T] to `PROMPTS`, sampled from the target at temperature 1.

    The target runs in w8a8 on our kernels, several times faster than in bf16. Stop ids are ignored. Raises
    InputError without a tokenizer of this model, or if the caches do not fit.
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
    except ValueError as e:  # the caches do not fit, or the tokenizer is another model's
        raise InputError(f"{checkpoint}: {e}") from None


def calibration_text(o, text: str | None, source: Path, backend):
    """Return calibration text [B, T]: --calibrate, whose content is `text`, or generated by the target.

    Raises InputError if there is none.
    """
    if text is not None:
        ids = text_ids(source, f"--calibrate {o.calibrate}", text, 2048, 8192)
        return ids[: len(ids) // CALIBRATION_LENGTH * CALIBRATION_LENGTH].view(-1, CALIBRATION_LENGTH)
    try:
        return generate_text(source, backend)
    except InputError as e:
        raise InputError(f"{e}; see also --calibrate FILE and --method nearest") from None


def report(source: Path, out: Path, errors: dict[str, tuple[str, float]]) -> None:
    """Print sizes, and the relative error of each kind of layer."""
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


def make_plans(o, source: Path, out: Path) -> dict[str, QuantizationPlan]:
    """Return the plan of each folder to quantize, by subfolder of `out`: "" is the source itself.

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
        raise InputError(f"{out}: has heads that {source} does not have ({', '.join(stale)}); delete them or"
                         " choose another --out")
    for name in ("", *heads):
        check_out(out / name, name or kind, o.force)
    scheme, of_heads = schemes(o)
    return {name: QuantizationPlan.from_folder(source / name, of_heads if name else scheme, name or kind)
            for name in ("", *heads)}


def run(o) -> None:
    """Run the command with these parsed options. Raises InputError and OSError on bad input."""
    compared, calibrate = (read_text(file, what=flag) if file else None
                           for flag, file in (("--text", o.text), ("--calibrate", o.calibrate)))
    ready = is_converted(o.checkpoint)
    folder = o.checkpoint.rstrip("/") if ready else default_folder(o.checkpoint)
    out = Path(o.out or f"{folder}-{o.mode}")
    check_replaceable("--out", str(out))
    if not ready:  # check first: converting takes long
        check_out(out, "target", o.force)
        check_unquantized(o.checkpoint)
    source = Path(converted_folder(o.checkpoint, log_stderr))
    plans = make_plans(o, source, out)
    use_threads()
    backend = choose_backend("cpu", log=log_stderr)
    ids = None if compared is None else text_ids(source, f"--text {o.text}", compared, 16, 16384)
    is_target = plans[""].source_config["kind"] == "target"
    calibrated = is_target and o.mode in INT4_MODES and o.method != "nearest"
    calibration_ids, errors = calibration_text(o, calibrate, source, backend) if calibrated else None, {}

    def run_linear(layer: QuantizedLinear, x: Tensor) -> Tensor:
        with backend.threads():
            return PackedLinear(backend, layer, x.dtype)(x) if isinstance(backend, CpuBackend) else layer(x)

    # Target and heads are replaced together.
    with staging(out) as folder:
        for name, plan in plans.items():
            errors[name] = quantize_folder(plan, folder / name, None if name else calibration_ids, run_linear)
    for name in plans:
        report(source / name, out / name, errors[name])
    if ids is not None:
        result = compare(source, out, ids, backend.prepare)
        print(f"on {result['tokens']:,} tokens of {o.text}: perplexity {result['perplexity']:.3f} ->"
              f" {result['quantized_perplexity']:.3f}, top-1 agreement {result['agreement']:.1%}")
    if is_target:
        print(next_steps(out))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
