"""Ours against its peers on the same weights, prompts, threads and stop rules, in turns, in one run.

    python benchmarks/peers.py --checkpoint checkpoints/smollm2-135m --questions question.jsonl --gguf MODEL.gguf --transformers
    python benchmarks/peers.py --checkpoint DIR --int8 DIR-int8 --gpt-fast /path/to/gpt-fast --gpt-fast-checkpoint model.pth

ours          plain and EAGLE-3, as stored and, with --int8 DIR and --w8a8 DIR, quantised; --ladder: what each part of it brings
transformers  `generate`, plain and with prompt lookup (--transformers)
llama.cpp     llama-cpp-python, bf16 and Q8_0 (--gguf: a file of the same model, for its metadata; the weights are ours)
gpt-fast      on CUDA, its own generate.py from a path you give, on its own prompt: not in turns

Speeds are tokens after the first over the time after the first, greedy, one sequence; medians over the
questions, and medians of the ratios of each question; "its plain" is plain decoding of the same kind and
precision. On a CPU a bf16 target's head is int8, as generate.py has it by default. Raw figures go to
benchmarks/results/NAME.json, with a table (NAME.md) and a chart (NAME.png).
"""
from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import bench
import torch
from bench import describe, write  # first: it makes the modules below importable
from first_turns import Transformers
from gguf_copy import write_gguf

from checkpoint.folder import read_config
from checkpoint.loading import load_model
from common.cli import run_command
from common.errors import InputError
from common.plots import picture
from engine.api import Drafting, load_target
from engine.runtime import Runtime
from engine.tuning import PROMPTS
from sampling.options import Sampling
from tokens.dataset import read_prompts

BASES = ("ours plain", "llama.cpp bf16", "transformers")  # what ratios are given to, where it is measured


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Ours:
    """One of our decoders, compiled and warm."""

    def __init__(self, checkpoint: str, speculate: str, tokens: int, compiled: bool, kernels: bool = True):
        self.model = load_target(
            checkpoint, Runtime(compile=compiled, kernels=kernels), say
        ).decoder(Drafting(speculate))
        self.model.warm_up(Sampling(tokens))

    def rate(self, ids: list[int], tokens: int) -> tuple[float, dict]:
        """Tokens per second, and what else is worth keeping."""
        result = self.model.generate(ids, max_new_tokens=tokens)
        return result.tokens_per_second, {"ids": result.ids, "tau": result.tau}


class HuggingFace:
    """`generate` of transformers; the clock starts when the first tokens are there."""

    def __init__(self, model, stop: list[int], **options):
        self.model, self.stop, self.options = model, stop, options

    @torch.no_grad()
    def rate(self, ids: list[int], tokens: int) -> tuple[float, dict]:
        from transformers import StoppingCriteriaList

        marks: list[tuple[float, int]] = []

        def mark(input_ids, scores, **_) -> torch.Tensor:
            marks.append((time.perf_counter(), input_ids.shape[1]))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

        prompt = torch.tensor([ids], device=self.model.device)
        out = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False,
            eos_token_id=self.stop,
            pad_token_id=self.stop[0], stopping_criteria=StoppingCriteriaList([mark]), **self.options,
        )
        began, first = marks[0]
        seconds = time.perf_counter() - began
        return (out.shape[1] - first) / seconds if out.shape[1] > first else 0.0, {
            "ids": out[0, len(ids) :].tolist()
        }


class LlamaCpp:
    """llama.cpp through its C interface, one token after the other, the largest logit each time."""

    def __init__(self, file: Path, threads: int, context: int, stop: list[int]):
        import llama_cpp

        self.api, self.stop = llama_cpp, set(stop)
        # All layers on the GPU where llama.cpp was built for one.
        self.llama = llama_cpp.Llama(
            str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, n_gpu_layers=-1,
            verbose=False
        )

    def _next(self, ids: list[int]) -> int:
        import numpy as np

        self.llama.eval(ids)
        logits = self.api.llama_get_logits_ith(self.llama.ctx, -1)
        return int(np.ctypeslib.as_array(logits, (self.llama.n_vocab(),)).argmax())

    def rate(self, ids: list[int], tokens: int) -> tuple[float, dict]:
        self.llama.reset()
        new = [self._next(ids)]
        began = time.perf_counter()
        while len(new) < tokens and new[-1] not in self.stop:
            new.append(self._next(new[-1:]))
        seconds = time.perf_counter() - began
        return (len(new) - 1) / seconds if len(new) > 1 else 0.0, {"ids": new}


def contenders(o, folder: Path) -> dict[str, Callable]:
    """Everything asked for that is there, by name; what is missing is an error, not a smaller table."""
    found = {}
    for option, checkpoint in (("int8", o.int8), ("w8a8", o.w8a8)):
        if checkpoint and read_config(checkpoint, "target").get("quantization", {}).get("mode") != option:
            raise InputError(f"--{option} {checkpoint}: is not quantised so; see quantize.py --mode {option}")
    for checkpoint, suffix in ((o.checkpoint, ""), (o.int8, " int8"), (o.w8a8, " w8a8")):
        if checkpoint:
            for name, speculate in (("plain", "none"), ("EAGLE-3", "eagle3")):
                found[f"ours {name}{suffix}"] = Ours(checkpoint, speculate, o.max_new_tokens, o.compile)
    if o.ladder:
        found["ours plain, uncompiled PyTorch"] = Ours(o.checkpoint, "none", o.max_new_tokens, False)
        found["ours EAGLE-3, uncompiled PyTorch"] = Ours(o.checkpoint, "eagle3", o.max_new_tokens, False)
        if o.compile:
            found["ours plain, torch.compile only"] = Ours(
                o.checkpoint, "none", o.max_new_tokens, True, False
            )
            found["ours EAGLE-3, torch.compile only"] = Ours(
                o.checkpoint, "eagle3", o.max_new_tokens, True, False
            )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, config = load_model(o.checkpoint, device)
    if "quantization" in config and (o.transformers or o.gguf):
        raise InputError(f"{o.checkpoint}: is quantised; name the whole one, and this with --int8")
    if o.transformers:
        model = Transformers(target, config).model
        found["transformers"] = HuggingFace(model, config["stop_ids"])
        found["transformers, prompt lookup"] = HuggingFace(
            model, config["stop_ids"], prompt_lookup_num_tokens=10
        )
    if o.gguf:
        try:
            import llama_cpp  # noqa: F401
        except ImportError:
            raise InputError(
                "--gguf: llama-cpp-python is not installed (pip install llama-cpp-python)"
            ) from None
        for name in ("BF16", "Q8_0"):
            say(f"writing the weights as {name} ...")
            file = write_gguf(Path(o.gguf), target, folder / f"{name}.gguf", name)
            found[f"llama.cpp {name.replace('BF', 'bf')}"] = LlamaCpp(
                file, o.threads, 4096, config["stop_ids"]
            )
    return {name: peer.rate for name, peer in found.items()}


def gpt_fast(o) -> float:
    """Average tokens per second that gpt-fast's own generate.py reports."""
    command = [
        sys.executable, "generate.py", "--compile", "--checkpoint_path",
        os.path.abspath(o.gpt_fast_checkpoint)
    ]
    command += ["--max_new_tokens", str(o.max_new_tokens), "--num_samples", "5", "--prompt", PROMPTS[0]]
    done = subprocess.run(command, cwd=o.gpt_fast, capture_output=True, text=True)
    match = re.search(r"Average tokens/sec: ([\d.]+)", done.stdout)
    if not match:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise InputError(f"--gpt-fast {o.gpt_fast}: its generate.py gave no figure ({last})")
    return float(match[1])


def run(o) -> None:
    """All questions, every contender in turns; the table, the chart, the raw figures."""
    for name, path in (("--gpt-fast", o.gpt_fast), ("--gpt-fast-checkpoint", o.gpt_fast_checkpoint)):
        if path and not Path(path).exists():
            raise InputError(f"{name} {path}: is not there")
    prompts = (read_prompts(o.questions) if o.questions else list(PROMPTS))[: o.limit]
    with tempfile.TemporaryDirectory() as folder:
        peers = contenders(o, Path(folder))
        encode = load_target(o.checkpoint, Runtime(compile=False)).decoder().encode
        for rate in peers.values():
            rate(encode(PROMPTS[0]), 16)  # warm
        rows = []
        for i, prompt in enumerate(prompts):
            ids, first = encode(prompt), i % len(peers)
            order = [*peers][first:] + [*peers][:first]  # whoever begins changes with every question
            found = {name: peers[name](ids, o.max_new_tokens) for name in order}
            if all(rate for rate, _ in found.values()):  # an answer of one token has no speed
                rows.append({
                    "rates": {name: found[name][0] for name in peers},
                    "tau": {name: kept["tau"] for name, (_, kept) in found.items() if "EAGLE" in name},
                    "equal": {
                        name: kept["ids"] == found[name.replace("EAGLE-3", "plain")][1]["ids"]
                        for name, (_, kept) in found.items() if "EAGLE" in name
                    },
                })
            say(f"  {i + 1}/{len(prompts)} " + ", ".join(f"{name} {found[name][0]:.0f}" for name in peers))
    if not rows:
        raise InputError("no question has an answer of more than one token: nothing to time")
    questions = Path(o.questions).name if o.questions else "own"
    record = describe(o.threads) | {"questions": questions, "max_new_tokens": o.max_new_tokens, "rows": rows}
    summary = summarise(rows)
    if o.gpt_fast:
        summary["gpt-fast"] = {"rate": gpt_fast(o)}
    record["summary"] = summary
    write(o.name, record)
    lines = table(summary, len(rows), record)
    print(lines)
    (bench.RESULTS / f"{o.name}.md").write_text(lines + "\n")
    chart(summary, record, bench.RESULTS / f"{o.name}.png")


def summarise(rows: list[dict]) -> dict[str, dict]:
    """Medians of speeds and of ratios; tau and equal texts of the speculative ones."""
    summary = {}
    for name in rows[0]["rates"]:
        found = {"rate": statistics.median(row["rates"][name] for row in rows)}
        for base in BASES:
            if base in rows[0]["rates"]:
                found[f"x {base}"] = statistics.median(
                    row["rates"][name] / row["rates"][base] for row in rows
                )
        if name in rows[0]["equal"]:
            own = name.replace("EAGLE-3", "plain")
            found["x its plain"] = statistics.median(row["rates"][name] / row["rates"][own] for row in rows)
            found["equal"] = sum(row["equal"][name] for row in rows)
            found["tau"] = statistics.mean(row["tau"][name] for row in rows)
        summary[name] = found
    return summary


def table(summary: dict, count: int, record: dict) -> str:
    """The summary as Markdown."""
    bases = ["x its plain", *(f"x {base}" for base in BASES if f"x {base}" in next(iter(summary.values())))]
    head = ["", "tokens/s", *bases, "τ", "texts equal plain"]
    lines = [
        f"{record['device']}, {record['threads']} threads, torch {record['torch']}, {record['date']}; {count} questions"
        f" ({record['questions']}), at most {record['max_new_tokens']} new tokens, greedy.", "",
        "| " + " | ".join(head) + " |", "|---" * len(head) + "|",
    ]
    for name, found in sorted(summary.items(), key=lambda item: -item[1]["rate"]):
        cells = [name, f"{found['rate']:.1f}", *(f"{found[b]:.2f}" if b in found else "" for b in bases)]
        cells += [
            f"{found['tau']:.2f}" if "tau" in found else "",
            f"{found['equal']}/{count}" if "equal" in found else ""
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chart(summary: dict, record: dict, path: Path) -> None:
    """Speeds as bars, ours in colour."""
    ranked = sorted(summary.items(), key=lambda item: item[1]["rate"])
    with picture(path, 8, 0.45 * len(ranked) + 1.2) as figure:
        axes = figure.add_subplot()
        colors = ["#2a6fbb" if name.startswith("ours") else "#b8b8b8" for name, _ in ranked]
        bars = axes.barh([name for name, _ in ranked], [found["rate"] for _, found in ranked], color=colors)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set(
            xlabel="tokens per second (median)", title=f"{record['device']}, {record['threads']} threads"
        )


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", required=True, help="converted target with its EAGLE-3 head")
    p.add_argument("--int8", metavar="DIR", help="the same, quantised by quantize.py")
    p.add_argument("--w8a8", metavar="DIR", help="the same checkpoint quantised so")
    p.add_argument("--questions", help="JSON lines; their first turns are asked (default: eight of our own)")
    p.add_argument("--limit", type=int)
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument(
        "--ladder", action="store_true", help="also ours without our kernels, and without torch.compile"
    )
    p.add_argument("--transformers", action="store_true")
    p.add_argument("--gguf", metavar="FILE", help="compare llama.cpp; FILE is any GGUF of this model")
    p.add_argument("--gpt-fast", metavar="DIR", help="its repository; CUDA")
    p.add_argument("--gpt-fast-checkpoint", metavar="FILE", help="the model in its format")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--name", default="peers", help="of the files under benchmarks/results")
    o = p.parse_args(argv)
    if bool(o.gpt_fast) != bool(o.gpt_fast_checkpoint):
        p.error("--gpt-fast and --gpt-fast-checkpoint go together")
    if not o.threads or o.threads < 1:
        p.error(f"--threads {o.threads}: must be at least 1")
    torch.set_num_threads(o.threads)
    return run_command(lambda: run(o), OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
