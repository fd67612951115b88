"""Ours against its peers on the same weights, prompts, threads and stop rules, in turns, in one run.

    python benchmarks/peers.py --checkpoint DIR --questions question.jsonl --gguf MODEL.gguf --transformers
    python benchmarks/peers.py --checkpoint DIR --int8 DIR-int8 --gpt-fast DIR --gpt-fast-checkpoint model.pth
    python benchmarks/peers.py --shape llama-3.1-8b --transformers --torch-compile

ours          plain and EAGLE-3, as stored and (--int8 DIR, --w8a8 DIR) quantised; --ladder: without our
              kernels, and without torch.compile; --no-ours: none of these
transformers  `generate`, plain and with prompt lookup (--transformers); on CUDA also with a static cache, for
              which it compiles the model, unless that fails
torch.compile our model's pass over one row in mode "reduce-overhead", in a plain loop (--torch-compile)
llama.cpp     bf16 and Q8_0 (--gguf: a file of the same model, for its metadata; the weights are ours), by
              llama-cpp-python or by llama-server (--llama-server); the latter also Q8_0 with EAGLE-3,
              drafting chains (--llama-head: our head as GGUF)
OpenVINO      OpenVINO GenAI, plain and with EAGLE-3, drafting chains or trees (--openvino: a Python that has
              it; --openvino-target, --openvino-head: our weights as optimum-cli exports them)
gpt-fast      on CUDA, its own generate.py from a path you give, on its own prompt: not in turns

--shape: random weights and prompts; next to no draft is accepted, so EAGLE-3 shows what a step costs, not
what it gains. docs/benchmarks.md says how to build the peers. Speeds are tokens after the first over the
time after the first, greedy, one sequence: medians over the questions, and medians of the ratios of each
question. llama-server and OpenVINO are loaded once, in processes of their own that keep that time
themselves. "its plain" is plain decoding of the same kind and precision; a speculative contender's text is
compared with it. tau is over all steps of all questions. On our kernels a 16-bit target's head is int8, the
default of generate.py (on a CPU a bf16 one's).
Raw figures go to benchmarks/results/NAME.json, with a table (NAME.md) and a chart (NAME.png).
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import bench  # first: it makes the modules below importable
import torch
from bench import Contender, Decoded, describe, write
from shapes import random_models, shape_of
from speeds import chart, summarise, table
from step import models_for

from checkpoint.folder import read_config
from common.cli import note, positive
from common.errors import InputError, first_line
from drafters.eagle import Eagle
from engine.api import Drafting, load_target
from engine.calibrating import PROMPTS
from engine.decoder import Decoder
from engine.runtime import Runtime
from engine.text_decoder import TextDecoder, encode
from model import Transformer
from tokens.dataset import read_prompts
from tokens.tokenizer import Tokenizer
from tree import PAPER_TREE, TreeShape

UNCOMPILED = Runtime(compile=False)  # the target's modules keep their plain weights
SEED = 0  # of random weights and prompts


class Entry(NamedTuple):
    """What decodes, and the name of the contender whose text it must write if it is speculative."""

    decode: Contender
    plain: str | None = None


def check(o) -> None:
    """Raise InputError or ValueError if something that the options name is missing or of another kind."""
    for name, path in (
        ("--gpt-fast", o.gpt_fast), ("--gpt-fast-checkpoint", o.gpt_fast_checkpoint),
        ("--llama-head", o.llama_head),
    ):
        if path and not Path(path).exists():
            raise InputError(f"{name} {path}: is not there")
    for name, program in (("--llama-server", o.llama_server), ("--openvino", o.openvino)):
        if program and not shutil.which(program):
            raise InputError(f"{name} {program}: is not there, or cannot be run; see docs/benchmarks.md")
    for name, model in (("--openvino-target", o.openvino_target), ("--openvino-head", o.openvino_head)):
        if model and not (Path(model) / "openvino_model.xml").is_file():
            raise InputError(f"{name} {model}: holds no openvino_model.xml; see optimum-cli export openvino")
    for spec in o.openvino_trees:
        TreeShape.parse(spec)
    for mode, checkpoint in (("int8", o.int8), ("w8a8", o.w8a8)):
        if checkpoint and read_config(checkpoint, "target").get("quantization", {}).get("mode") != mode:
            raise InputError(f"--{mode} {checkpoint}: is not quantised so; see quantize.py --mode {mode}")
    for name in ("int8", "w8a8", "questions", "ladder", "gguf", "openvino"):
        if o.shape and vars(o)[name]:
            raise InputError(f"--{name}: needs --checkpoint; --shape has random weights")
    plain = o.transformers or o.torch_compile or o.gguf
    if plain and o.checkpoint and "quantization" in read_config(o.checkpoint, "target"):
        raise InputError(f"{o.checkpoint}: is quantised; name the unquantised one, and this with --int8")
    if o.transformers and not find_spec("transformers"):
        raise InputError("--transformers: is not installed (pip install transformers)")
    if o.gguf and not o.llama_server:
        try:
            import llama_cpp  # noqa: F401
        except ImportError:
            message = "--gguf: llama-cpp-python is not installed (pip install llama-cpp-python)"
            raise InputError(f"{message}; or name --llama-server") from None


def load_contenders(o, slots: int, started: contextlib.ExitStack) -> dict[str, Entry]:
    """Everything that is asked for, by name.

    slots: tokens of the longest prompt and its answer. started: ends the peers' processes and removes their
    files.
    """
    load = functools.cache(lambda checkpoint, runtime: load_target(checkpoint, runtime, note))
    contenders: dict[str, Entry] = {}
    if o.ours:
        contenders = _ours_at_random(o, slots) if o.shape else _ours(o, load)
    stop_ids = [] if o.shape else read_config(o.checkpoint, "target")["stop_ids"]

    @functools.cache
    def model() -> Transformer:
        """The same weights in plain modules, for others."""
        if o.checkpoint:
            return load(o.checkpoint, UNCOMPILED).model
        torch.manual_seed(SEED)
        return random_models(o.shape, torch.bfloat16, Runtime().device_name, None)[0]

    if o.transformers:
        contenders |= _transformers(model(), stop_ids, slots)
    if o.torch_compile:
        from compiled_peer import CompiledLoop

        contenders["torch.compile"] = Entry(CompiledLoop(model(), stop_ids, slots).decode)
    if o.gguf:
        contenders |= _llama_cpp(o, model(), stop_ids, started)
    if o.openvino:
        contenders |= _openvino(o, stop_ids, started)
    return contenders


def _transformers(model: Transformer, stop_ids: list[int], slots: int) -> dict[str, Entry]:
    from hugging_face import HuggingFace, as_llama

    llama = as_llama(model)
    contenders = {"transformers": Entry(HuggingFace(llama, stop_ids).decode)}
    lookup = HuggingFace(llama, stop_ids, prompt_lookup_num_tokens=10)
    contenders["transformers, prompt lookup"] = Entry(lookup.decode, "transformers")
    if model.embed.weight.is_cuda:
        static = HuggingFace(llama, stop_ids, slots).decode
        try:
            static([0] * 8, 8)
            contenders["transformers, static cache"] = Entry(static)
        except Exception as e:  # whatever a compiler that is not ours raises
            note(f"transformers with a static cache: left out ({first_line(e)})")
    return contenders


def _ours_at_random(o, slots: int) -> dict[str, Entry]:
    torch.manual_seed(SEED)
    asked = argparse.Namespace(**vars(o) | {"device": Runtime().device_name, "dtype": "bf16"})
    bench.use(asked.device, o.compile)
    target, head = models_for(asked, "none", None)

    def contender(drafter: Eagle | None = None) -> Contender:
        options = {"max_seq_len": slots, "compile": o.compile, "chunks": (64,), "say": note}
        return bench.contender_of(TextDecoder(Decoder(target, drafter, **options), None))

    plain = "ours plain"
    return {plain: Entry(contender()), "ours EAGLE-3": Entry(contender(Eagle(head, PAPER_TREE)), plain)}


def _ours(o, load) -> dict[str, Entry]:
    as_asked = Runtime(compile=o.compile)
    kinds = [(o.checkpoint, as_asked, ""), (o.int8, as_asked, " int8"), (o.w8a8, as_asked, " w8a8")]
    if o.ladder:
        kinds.append((o.checkpoint, UNCOMPILED, ", uncompiled PyTorch"))
        if o.compile:
            kinds.append((o.checkpoint, Runtime(kernels=False), ", torch.compile only"))
    contenders = {}
    for checkpoint, runtime, suffix in kinds:
        if checkpoint:
            target, plain = load(checkpoint, runtime), f"ours plain{suffix}"
            decoders = [bench.contender_of(target.decoder(Drafting(method))) for method in ("none", "eagle3")]
            contenders |= {plain: Entry(decoders[0]), f"ours EAGLE-3{suffix}": Entry(decoders[1], plain)}
    return contenders


def _llama_cpp(o, model: Transformer, stop_ids: list[int], started: contextlib.ExitStack) -> dict[str, Entry]:
    from gguf_copy import write_gguf
    from llama_peer import LlamaCpp, LlamaServer

    folder = Path(started.enter_context(tempfile.TemporaryDirectory()))
    contenders = {}
    for kind, name in (("BF16", "llama.cpp bf16"), ("Q8_0", "llama.cpp Q8_0")):
        note(f"writing the weights as {kind} ...")
        file = write_gguf(Path(o.gguf), model, folder / f"{kind}.gguf", kind)
        if not o.llama_server:
            contenders[name] = Entry(LlamaCpp(file, o.threads, stop_ids).decode)
            continue
        start = functools.partial(LlamaServer, o.llama_server, file, o.threads, stop_ids)
        contenders[name] = Entry(started.enter_context(start()).decode)
    if o.llama_head:  # `start` is that of Q8_0
        for chain in o.llama_chains:
            server = started.enter_context(start(o.llama_head, chain))
            contenders[f"llama.cpp EAGLE-3 Q8_0, chain of {chain}"] = Entry(server.decode, "llama.cpp Q8_0")
    return contenders


def _openvino(o, stop_ids: list[int], started: contextlib.ExitStack) -> dict[str, Entry]:
    from openvino_peer import OpenVino, as_chain, as_tree

    properties = dict(setting.split("=", 1) for setting in o.openvino_set)
    peer = OpenVino(o.openvino, o.openvino_target, o.openvino_head, o.threads, stop_ids, properties)
    started.enter_context(peer)
    contenders = {"OpenVINO": Entry(peer.contender())}
    if o.openvino_head:
        draftings = {f"chain of {n}": as_chain(n) for n in o.openvino_chains}
        draftings |= {f"tree {spec}": as_tree(TreeShape.parse(spec)) for spec in o.openvino_trees}
        for name, drafting in draftings.items():
            contenders[f"OpenVINO EAGLE-3, {name}"] = Entry(peer.contender(**drafting), "OpenVINO")
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
    if o.autotune:
        bench.use_autotune()
    prompts = prompts_of(o)
    slots = max(map(len, prompts)) + max(o.max_new_tokens, bench.WARM_UP)
    with contextlib.ExitStack() as started:
        entries = load_contenders(o, slots, started)
        decoders = {name: entry.decode for name, entry in entries.items()}
        answers = bench.time_in_turns(decoders, prompts, o.max_new_tokens)
    plain = {name: entry.plain for name, entry in entries.items() if entry.plain}
    rows = [_row(row, plain) for row in answers]
    summary = summarise(rows, plain)
    report(o, rows, summary)
    if o.gpt_fast:  # what is measured is written by now, should it fail
        summary["gpt-fast"] = {"rate": gpt_fast(o)}
        report(o, rows, summary)


def report(o, rows: list[dict], summary: dict) -> None:
    """Write the raw figures, the table and the chart; print the table."""
    asked = Path(o.questions).name if o.questions else "random" if o.shape else "own"
    record = describe(o.threads) | {
        "model": o.shape or Path(o.checkpoint).name, "questions": asked, "max_new_tokens": o.max_new_tokens,
        "rows": rows, "summary": summary,
    }
    write(o.name, record)
    lines = table(summary, len(rows), record)
    print(lines)
    (bench.RESULTS / f"{o.name}.md").write_text(lines + "\n")
    if find_spec("matplotlib"):
        chart(summary, record, bench.RESULTS / f"{o.name}.png")


def prompts_of(o) -> list[list[int]]:
    """The questions as token ids; for a shape, random ids."""
    if o.shape:
        draw = torch.Generator().manual_seed(SEED)
        ids = torch.randint(shape_of(o.shape)[0].vocab_size, (len(PROMPTS), 128), generator=draw)
        return ids[: o.limit].tolist()
    questions = read_prompts(o.questions) if o.questions else list(PROMPTS)
    tokenizer = Tokenizer.load(o.checkpoint)
    return [encode(tokenizer, question) for question in questions[: o.limit]]


def _row(answers: dict[str, Decoded], plain: dict[str, str]) -> dict:
    """The raw figures of one question. plain: see `Entry`."""
    return {
        "rates": {name: answer.tokens_per_second for name, answer in answers.items()},
        "equal": {name: answers[name].ids == answers[base].ids for name, base in plain.items()},
        "tokens": {name: len(answers[name].ids) for name in plain},
        "steps": {name: answers[name].steps or len(answers[name].accept_lengths) for name in plain},
        "accept_lengths": {name: answers[name].accept_lengths for name in plain},
    }


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "peers", threads=os.cpu_count() or 1)
    add = p.add_argument
    bench.add_model(p)
    add("--int8", metavar="DIR", help="the same, quantised by quantize.py")
    add("--w8a8", metavar="DIR", help="the same, quantised by quantize.py --mode w8a8")
    add("--questions", help="JSON lines; their first turns are asked (default: eight of our own)")
    add("--limit", type=int)
    p.within("--limit", 1, float("inf"))
    add("--max-new-tokens", type=int, default=128)
    add("--ladder", action="store_true", help="also ours without our kernels, and without torch.compile")
    add("--ours", action=argparse.BooleanOptionalAction, default=True)
    add("--transformers", action="store_true")
    add("--torch-compile", action="store_true")
    add("--gguf", metavar="FILE", help="compare llama.cpp; FILE is any GGUF of this model")
    add("--llama-server", metavar="FILE", help="llama.cpp's llama-server, instead of llama-cpp-python")
    add("--llama-head", metavar="FILE", help="the EAGLE-3 head as GGUF, for llama-server")
    add("--llama-chains", type=positive, nargs="+", default=[2], metavar="N", help="lengths (default 2)")
    add("--openvino", metavar="PYTHON", help="compare OpenVINO GenAI; an interpreter that can import it")
    add("--openvino-target", metavar="DIR", help="the target as optimum-cli exports it")
    add("--openvino-head", metavar="DIR", help="its EAGLE-3 head, exported so")
    add("--openvino-chains", type=positive, nargs="*", default=[3], metavar="N", help="lengths (default 3)")
    add("--openvino-trees", nargs="+", default=[], metavar="T,D,K", help="also trees: nodes,depth,width")
    add("--openvino-set", nargs="+", default=[], metavar="NAME=VALUE", help="properties of its CPU plugin")
    add("--gpt-fast", metavar="DIR", help="its repository; CUDA")
    add("--gpt-fast-checkpoint", metavar="FILE", help="the model in its format")
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    add("--autotune", action="store_true", help="torch.compile times several kernels for every product")
    contenders = "ours", "transformers", "torch_compile", "gguf", "openvino"
    p.refuse(
        lambda o: not any(vars(o)[name] for name in contenders), lambda o: "--no-ours: name somebody else"
    )
    p.refuse(
        lambda o: any("=" not in setting for setting in o.openvino_set),
        lambda o: f"--openvino-set {' '.join(o.openvino_set)}: must be NAME=VALUE",
    )
    for one, other in (("gpt_fast", "gpt_fast_checkpoint"), ("openvino", "openvino_target")):
        p.refuse(
            lambda o, one=one, other=other: bool(getattr(o, one)) != bool(getattr(o, other)),
            lambda o, words=f"--{one} and --{other} go together".replace("_", "-"): words,
        )
    for flag, other in (
        ("llama_server", "gguf"), ("llama_head", "llama_server"), ("openvino_head", "openvino_target")
    ):
        p.refuse(
            lambda o, flag=flag, other=other: getattr(o, flag) and not getattr(o, other),
            lambda o, words=f"--{flag} needs --{other}".replace("_", "-"): words,
        )
    return bench.run(p, run, argv)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no peer's process is left behind
    sys.exit(main())
