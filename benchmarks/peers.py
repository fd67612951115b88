"""Ours against its peers on the same weights, prompts, threads and stop rules, in turns, in one run.

    python benchmarks/peers.py --checkpoint DIR --questions question.jsonl --gguf MODEL.gguf --transformers
    python benchmarks/peers.py --checkpoint DIR --int8 DIR-int8 --gpt-fast DIR --gpt-fast-checkpoint model.pth

ours          plain and EAGLE-3, as stored and (--int8 DIR, --w8a8 DIR) quantised; --ladder: without our
              kernels, and without torch.compile
transformers  `generate`, plain and with prompt lookup (--transformers)
llama.cpp     llama-cpp-python, bf16 and Q8_0 (--gguf: a file of the same model, for its metadata; the weights
              are ours)
gpt-fast      on CUDA, its own generate.py from a path you give, on its own prompt: not in turns

Speeds are tokens after the first over the time after the first, greedy, one sequence: medians over the
questions, and medians of the ratios of each question. "its plain" is plain decoding of the same kind and
precision. tau is over all steps of all questions. On a CPU a bf16 target's head is int8, the default of
generate.py. Raw figures go to benchmarks/results/NAME.json, with a table (NAME.md) and a chart (NAME.png).
"""
from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench  # first: it makes the modules below importable
from bench import Contender, Decoded, describe, pooled_tau, write

from checkpoint.folder import read_config
from common.cli import note
from common.errors import InputError
from common.plots import picture
from engine.api import Drafting, encode, load_target
from engine.calibrating import PROMPTS
from engine.runtime import Runtime
from tokens.dataset import read_prompts
from tokens.tokenizer import Tokenizer

BASES = ("ours plain", "llama.cpp bf16", "transformers")  # what ratios are given to, if it is measured
UNCOMPILED = Runtime(compile=False)  # the target's modules keep their plain weights


class LlamaCpp:
    """llama.cpp through its C interface: one token after the other, the largest logit each time."""

    def __init__(self, file: Path, threads: int, context: int, stop_ids: list[int]):
        import llama_cpp

        self.api, self.stop_ids = llama_cpp, set(stop_ids)
        # All layers on the GPU if llama.cpp was built for one.
        self.llama = llama_cpp.Llama(
            str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, n_gpu_layers=-1,
            verbose=False,
        )

    def _next(self, ids: list[int]) -> int:
        import numpy as np

        self.llama.eval(ids)
        logits = self.api.llama_get_logits_ith(self.llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self.llama.n_vocab(),)).argmax())

    def decode(self, ids: list[int], tokens: int) -> Decoded:
        """Decode a prompt."""
        self.llama.reset()
        new = [self._next(ids)]
        began = time.perf_counter()
        while len(new) < tokens and new[-1] not in self.stop_ids:
            new.append(self._next(new[-1:]))
        seconds = time.perf_counter() - began
        return Decoded(new, (len(new) - 1) / seconds if len(new) > 1 else 0.0, [])


def check(o) -> None:
    """Raise InputError if something that the options name is missing or of another kind."""
    for name, path in (("--gpt-fast", o.gpt_fast), ("--gpt-fast-checkpoint", o.gpt_fast_checkpoint)):
        if path and not Path(path).exists():
            raise InputError(f"{name} {path}: is not there")
    for mode, checkpoint in (("int8", o.int8), ("w8a8", o.w8a8)):
        if checkpoint and read_config(checkpoint, "target").get("quantization", {}).get("mode") != mode:
            raise InputError(f"--{mode} {checkpoint}: is not quantised so; see quantize.py --mode {mode}")
    if (o.transformers or o.gguf) and "quantization" in read_config(o.checkpoint, "target"):
        raise InputError(f"{o.checkpoint}: is quantised; name the unquantised one, and this with --int8")
    if o.gguf:
        try:
            import llama_cpp  # noqa: F401
        except ImportError:
            message = "--gguf: llama-cpp-python is not installed (pip install llama-cpp-python)"
            raise InputError(message) from None


def load_contenders(o, folder: Path) -> dict[str, Contender]:
    """Everything that is asked for, by name. folder: for copies of the weights."""
    as_asked = Runtime(compile=o.compile)
    kinds = [(o.checkpoint, as_asked, ""), (o.int8, as_asked, " int8"), (o.w8a8, as_asked, " w8a8")]
    if o.ladder:
        kinds.append((o.checkpoint, UNCOMPILED, ", uncompiled PyTorch"))
        if o.compile:
            kinds.append((o.checkpoint, Runtime(kernels=False), ", torch.compile only"))
    load = functools.cache(lambda checkpoint, runtime: load_target(checkpoint, runtime, note))
    contenders: dict[str, Contender] = {}
    for checkpoint, runtime, suffix in kinds:
        if checkpoint:
            target = load(checkpoint, runtime)
            for name, method in (("plain", "none"), ("EAGLE-3", "eagle3")):
                contenders[f"ours {name}{suffix}"] = bench.contender_of(target.decoder(Drafting(method)))
    if o.transformers:
        from hugging_face import HuggingFace, as_llama

        target = load(o.checkpoint, UNCOMPILED)
        model, stop_ids = as_llama(target.model), target.config["stop_ids"]
        lookup = HuggingFace(model, stop_ids, prompt_lookup_num_tokens=10)
        contenders["transformers"] = HuggingFace(model, stop_ids).decode
        contenders["transformers, prompt lookup"] = lookup.decode
    if o.gguf:
        from gguf_copy import write_gguf

        target = load(o.checkpoint, UNCOMPILED)
        for kind, name in (("BF16", "bf16"), ("Q8_0", "Q8_0")):
            note(f"writing the weights as {kind} ...")
            file = write_gguf(Path(o.gguf), target.model, folder / f"{kind}.gguf", kind)
            peer = LlamaCpp(file, o.threads, 4096, target.config["stop_ids"])
            contenders[f"llama.cpp {name}"] = peer.decode
    return contenders


def gpt_fast(o) -> float:
    """Average tokens per second that gpt-fast's own generate.py reports. Raises InputError if it fails."""
    checkpoint, tokens = os.path.abspath(o.gpt_fast_checkpoint), str(o.max_new_tokens)
    command = [sys.executable, "generate.py", "--compile", "--checkpoint_path", checkpoint]
    command += ["--max_new_tokens", tokens, "--num_samples", "5", "--prompt", PROMPTS[0]]
    done = subprocess.run(command, cwd=o.gpt_fast, capture_output=True, text=True)
    match = re.search(r"Average tokens/sec: ([\d.]+)", done.stdout)
    if not match:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise InputError(f"--gpt-fast {o.gpt_fast}: its generate.py gave no figure ({last})")
    return float(match[1])


def run(o) -> None:
    """All questions, every contender in turns; the table, the chart, the raw figures."""
    check(o)
    questions = read_prompts(o.questions) if o.questions else list(PROMPTS)
    tokenizer = Tokenizer.load(o.checkpoint)
    prompts = [encode(tokenizer, question) for question in questions[: o.limit]]
    with tempfile.TemporaryDirectory() as folder:
        answers = bench.time_in_turns(load_contenders(o, Path(folder)), prompts, o.max_new_tokens)
    rows = [_row(row) for row in answers]
    summary = summarise(rows)
    if o.gpt_fast:
        summary["gpt-fast"] = {"rate": gpt_fast(o)}
    record = describe(o.threads) | {
        "questions": Path(o.questions).name if o.questions else "own", "max_new_tokens": o.max_new_tokens,
        "rows": rows, "summary": summary,
    }
    write(o.name, record)
    lines = table(summary, len(rows), record)
    print(lines)
    (bench.RESULTS / f"{o.name}.md").write_text(lines + "\n")
    chart(summary, record, bench.RESULTS / f"{o.name}.png")


def plain_of(name: str) -> str:
    """The contender that decodes plainly what this one decodes with EAGLE-3."""
    return name.replace("EAGLE-3", "plain")


def _row(answers: dict[str, Decoded]) -> dict:
    """The raw figures of one question."""
    speculative = {name: answer for name, answer in answers.items() if plain_of(name) != name}
    return {
        "rates": {name: answer.tokens_per_second for name, answer in answers.items()},
        "tau": {name: pooled_tau([answer.accept_lengths]) for name, answer in speculative.items()},
        "equal": {name: answer.ids == answers[plain_of(name)].ids for name, answer in speculative.items()},
        "accept_lengths": {name: answer.accept_lengths for name, answer in speculative.items()},
    }


def summarise(rows: list[dict]) -> dict[str, dict]:
    """Medians of speeds and of ratios; tau and equal texts of the speculative contenders."""
    def ratio(name: str, base: str) -> float:
        return statistics.median(row["rates"][name] / row["rates"][base] for row in rows)

    summary = {}
    for name in rows[0]["rates"]:
        figures = {"rate": statistics.median(row["rates"][name] for row in rows)}
        figures |= {f"x {base}": ratio(name, base) for base in BASES if base in rows[0]["rates"]}
        if name in rows[0]["equal"]:
            figures |= {
                "x its plain": ratio(name, plain_of(name)), "equal": sum(row["equal"][name] for row in rows),
                "tau": pooled_tau(row["accept_lengths"][name] for row in rows),
            }
        summary[name] = figures
    return summary


def table(summary: dict, count: int, record: dict) -> str:
    """The summary as Markdown, the fastest first."""
    bases = ["x its plain", *(f"x {base}" for base in BASES if f"x {base}" in next(iter(summary.values())))]
    heads = ["", "tokens/s", *bases, "τ", "texts equal plain"]
    lines = [
        f"{record['device']}, {record['threads']} threads, torch {record['torch']}, {record['date']};"
        f" {count} questions ({record['questions']}), at most {record['max_new_tokens']} new tokens, greedy.",
        "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|",
    ]
    for name, figures in sorted(summary.items(), key=lambda item: -item[1]["rate"]):
        cells = [name, f"{figures['rate']:.1f}"]
        cells += [f"{figures[column]:.2f}" if column in figures else "" for column in (*bases, "tau")]
        cells.append(f"{figures['equal']}/{count}" if "equal" in figures else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def chart(summary: dict, record: dict, path: Path) -> None:
    """Speeds as bars, ours in colour."""
    names = sorted(summary, key=lambda name: summary[name]["rate"])
    with picture(path, 8, 0.45 * len(names) + 1.2) as figure:
        axes = figure.add_subplot()
        colors = ["#2a6fbb" if name.startswith("ours") else "#b8b8b8" for name in names]
        bars = axes.barh(names, [summary[name]["rate"] for name in names], color=colors)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        title = f"{record['device']}, {record['threads']} threads"
        axes.set(xlabel="tokens per second (median)", title=title)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "peers", threads=os.cpu_count() or 1)
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target with its EAGLE-3 head")
    add("--int8", metavar="DIR", help="the same, quantised by quantize.py")
    add("--w8a8", metavar="DIR", help="the same, quantised by quantize.py --mode w8a8")
    add("--questions", help="JSON lines; their first turns are asked (default: eight of our own)")
    add("--limit", type=int)
    p.within("--limit", 1, float("inf"))
    add("--max-new-tokens", type=int, default=128)
    add("--ladder", action="store_true", help="also ours without our kernels, and without torch.compile")
    add("--transformers", action="store_true")
    add("--gguf", metavar="FILE", help="compare llama.cpp; FILE is any GGUF of this model")
    add("--gpt-fast", metavar="DIR", help="its repository; CUDA")
    add("--gpt-fast-checkpoint", metavar="FILE", help="the model in its format")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.refuse(
        lambda o: bool(o.gpt_fast) != bool(o.gpt_fast_checkpoint),
        lambda o: "--gpt-fast and --gpt-fast-checkpoint go together",
    )
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
