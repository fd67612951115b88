"""Generate text from a converted checkpoint, plainly or with EAGLE speculative decoding.

    python generate.py --checkpoint checkpoints/smollm2-135m --speculate eagle3 --prompt "Why is the sky blue?" --compare
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from drafters import METHODS, add_flags, given_flags
from errors import CheckpointError  # nothing here imports torch before it is needed: --help and mistakes answer at once

STARTED = time.perf_counter()


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    p = argparse.ArgumentParser(description="Generate text, losslessly faster with a draft head.")
    add = p.add_argument
    add("--checkpoint", required=True, help="converted folder; a Hugging Face folder, hub id or .gguf is converted first")
    how = "; ".join(f"{name}, {method.what}" for name, method in METHODS.items() if method)
    add("--speculate", choices=METHODS, default="none", metavar="METHOD", help=f"how to draft: none, not at all (default); {how}")
    add("--draft", help="folder of the head (default CHECKPOINT/eagle for eagle and eagle2, CHECKPOINT/eagle3) or of the draft model")
    add_flags(p)
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated: decoded as one batch")
    add("--prompt-ids", action="append", default=[], metavar="1,2,3", help="a prompt as token ids, used as they are")
    add("--prompt-file", action="append", default=[], metavar="FILE", help="one prompt; a .jsonl file has one per line")
    add("--raw", action="store_true", help="no chat template")
    add("--system", help="system message for the chat template")
    add("--interactive", action="store_true", help="chat; /reset starts over, /exit or end of input leaves")
    add("--max-new-tokens", type=int, default=256)
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0, help="0 is off (default)")
    add("--seed", type=int, default=0, help="same seed, same text, with and without speculation")
    add("--num-samples", type=int, default=1, help="samples per prompt, with seeds SEED, SEED+1, ...")
    add("--tree", metavar="SPEC", help="auto (measured, then kept), paper (60/7/10), T,D,K, or a JSON file of paths: a static tree")
    add("--tree-nodes", type=int, help="nodes of the draft tree, root included (default 12 on CPU, 8 if quantised, 60 on CUDA)")
    add("--tree-depth", type=int, help="expansions after the first level (default 3 on CPU, 2 if quantised, 7 on CUDA)")
    add("--tree-width", type=int, help="nodes expanded per level (default 4 on CPU, 10 on CUDA)")
    add("--accept", choices=("equal", "typical", "residual"), default="equal",
        help="sampling: equal (default) gives plain decoding's text; typical is Medusa's and LOSSY; residual, for draft-model, draws anew")
    add("--coupled", action=argparse.BooleanOptionalAction, default=True, help="draft with the target's sampling noise")
    add(
        "--draft-int8", action=argparse.BooleanOptionalAction, default=True,
        help="on a CPU, quantise a bf16 head while loading it: drafts need no more, and the text never depends on them",
    )
    add("--batch-size", type=int, help="prompts decoded together (default all, at most 16)")
    add("--max-seq-len", type=int, help="prompt and output together (default 2048, or the model's maximum)")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="default: as stored")
    add("--device", help="default: cuda if there is one, else cpu")
    add("--threads", type=int, help="CPU threads (default: PyTorch's)")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile prefill and step")
    add("--autotune", action="store_true",
        help="let torch.compile time several kernels for every product and reduction and keep the fastest: slow the first time; for a GPU")
    add("--kernels", action=argparse.BooleanOptionalAction, default=True, help="on a CPU, when compiling: our own products (see kernels/)")
    add("--compare", action="store_true", help="decode plainly too: speedup, and whether the texts are equal")
    add("--json", action="store_true", help="one JSON object per line on stdout, nothing else")
    add("--trace", metavar="FILE", help="write every drafted tree and accepted path (safetensors); one prompt only")
    return p


def note(line: str) -> None:
    """Everything that is not the answer goes to stderr."""
    print(line, file=sys.stderr, flush=True)


def gather_prompts(o) -> list:
    """All prompts of the command line: text or lists of token ids. Raises CheckpointError on an unreadable one."""
    prompts: list = list(o.prompt)
    for ids in o.prompt_ids:
        try:
            prompts.append([int(i) for i in ids.replace(" ", "").split(",")])
        except ValueError:
            raise CheckpointError(f"--prompt-ids {ids!r}: expected numbers separated by commas") from None
    for path in o.prompt_file:
        if path.endswith(".jsonl"):
            from dataset import read_prompts

            prompts += read_prompts(path)
            continue
        try:
            prompts.append(Path(path).read_text(encoding="utf-8-sig").removesuffix("\n"))  # editors end every file with one
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"--prompt-file {path}: cannot be read ({e})") from None
    return prompts


def check_options(o, prompts: list) -> None:
    """Raise CheckpointError on options that contradict each other, before anything slow is done."""
    if o.interactive and (prompts or o.json or o.compare or o.trace or o.num_samples != 1 or o.raw):
        raise CheckpointError(
            "--interactive reads its prompts from you and uses the chat template:"
            " leave out --prompt*, --json, --compare, --trace, --num-samples, --raw"
        )
    if o.interactive and sys.stdin is None:
        raise CheckpointError("--interactive reads its prompts from standard input, which is closed")
    if not o.interactive and not prompts:
        raise CheckpointError("no prompt: give --prompt, --prompt-ids, --prompt-file or --interactive")
    if not 1 <= o.num_samples <= 100_000:
        raise CheckpointError(f"--num-samples {o.num_samples}: must be 1 to 100,000")
    if o.threads is not None and not 1 <= o.threads <= 1024:
        raise CheckpointError(f"--threads {o.threads}: must be 1 to 1024")
    given_flags(o, [o.speculate])
    if o.draft and o.speculate == "none":
        raise CheckpointError(f"--draft {o.draft}: plain decoding uses no head; add --speculate eagle3")
    if o.batch_size is not None and o.batch_size < 1:
        raise CheckpointError(f"--batch-size {o.batch_size}: must be at least 1")
    if o.tree and (o.tree_nodes, o.tree_depth, o.tree_width) != (None, None, None):
        raise CheckpointError(f"--tree {o.tree}: leave out --tree-nodes, --tree-depth and --tree-width")
    if o.tree and o.speculate == "none":
        raise CheckpointError(f"--tree {o.tree}: plain decoding drafts no tree; add --speculate")
    if o.trace and len(prompts) * o.num_samples != 1:
        raise CheckpointError("--trace records one sequence: give one prompt and one sample")
    if o.trace:
        folder = Path(o.trace).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(o.trace).is_dir():
            raise CheckpointError(f"--trace {o.trace}: not a file that can be written")


def converted(checkpoint: str) -> str:
    """The converted folder of any source: itself, or checkpoints/NAME, converted now unless that is up to date.

    Raises CheckpointError if another source of the same name has been converted there.
    """
    from checkpoint import CONFIG, WEIGHTS, read_config

    try:
        read_config(checkpoint)
        return checkpoint
    except CheckpointError:
        config = Path(checkpoint, CONFIG)
        if config.is_file() and '"format"' in config.read_text(errors="replace"):
            raise  # ours, but of another version or damaged
    from convert_checkpoint import convert, default_folder, origin

    out, source = default_folder(checkpoint), Path(checkpoint)
    stale = False
    if out.is_dir():
        held = read_config(out).get("source")
        if held != origin(checkpoint):
            raise CheckpointError(
                f"{out}: was converted from {held}; convert {checkpoint} with convert_checkpoint.py --out DIR and use DIR"
            )
        files = [source] if source.is_file() else [f for f in source.iterdir() if f.is_file()] if source.is_dir() else []
        stale = any(f.stat().st_mtime > (out / WEIGHTS).stat().st_mtime for f in files)
    if stale or not out.is_dir():
        note(f"converting {checkpoint} into {out}")
        with redirect_stdout(sys.stderr):  # stdout is for the answer
            convert(checkpoint, out, force=stale)
    return str(out)


def asked_tree(o, usual):
    """The tree the options ask for: a TreeShape or PathTree, "auto", or None for the method's own default.

    Raises CheckpointError on a --tree that is nothing of all this, ValueError on an impossible tree.
    """
    from text import read_tree
    from tree import TreeShape

    numbers = (o.tree_nodes, o.tree_depth, o.tree_width)
    if numbers != (None, None, None):
        return TreeShape(*(u if a is None else a for a, u in zip(numbers, (usual.nodes, usual.depth, usual.width))))
    return read_tree(o.tree)


def load_model(o, batch: int, prompts: list):
    """Load the checkpoint and its head -> (TextDecoder, Sampling). Nothing is compiled yet."""
    import torch

    from checkpoint import read_config
    from decoder import Sampling
    from text import check_device, default_tree, load, read_tree

    if o.threads:
        torch.set_num_threads(o.threads)
    device = o.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    sampling = Sampling(o.max_new_tokens, o.temperature, o.top_p, o.top_k, o.seed)
    read_tree(o.tree)  # a mistake shows before a conversion
    checkpoint = converted(o.checkpoint)
    shape = asked_tree(o, default_tree(device, "quantization" in read_config(checkpoint, "target")))
    began = time.perf_counter()
    model = load(
        checkpoint, o.speculate, draft=o.draft, tree=shape, coupled=o.coupled, draft_int8=o.draft_int8, device=device, dtype=o.dtype,
        batch=batch, max_seq_len=o.max_seq_len, compile=o.compile, kernels=o.kernels, autotune=o.autotune,
        tune_on=[p for p in prompts if isinstance(p, list)], say=note, flags=given_flags(o, [o.speculate])[o.speculate], accept=o.accept,
    )
    decoder = model.decoder
    note(
        f"loaded {checkpoint} in {time.perf_counter() - began:.1f} s; caches of {decoder.batch} x {decoder.slots} slots:"
        f" {decoder.cache_bytes / 1e9:.2f} GB"
    )
    return model, sampling


@contextmanager
def compile_errors():
    """A failing compiler gets one line, not its traceback."""
    import torch

    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as e:
        lines = [line for line in str(e).splitlines() if line.strip()]
        raise CheckpointError(f"torch.compile failed ({lines[0] if lines else type(e).__name__}); try --no-compile") from e


def is_terminal(stream) -> bool:
    return stream is not None and stream.isatty()


def colours(model) -> bool:
    """Whether accepted drafts are to be coloured: on a terminal, if anything is drafted."""
    return is_terminal(sys.stdout) and model.decoder.drafter.shape.nodes > 1


def as_text(result, model) -> str:
    """A result for people: its text, or its token ids where there is no tokenizer."""
    return result.text if model.tokenizer else ",".join(map(str, result.ids))


def show(job, model, label: bool) -> None:
    """Print a job's text as it comes. Several sequences would mix: each is printed whole when all are done."""
    from report import coloured

    if label:
        try:
            for _ in job:
                pass
        finally:  # after Ctrl-C too: what there is
            for i, result in enumerate(job.results()):
                print(f"--- {i + 1}, seed {result.seed} ---\n{as_text(result, model)}")
        return
    colour = colours(model)
    twin = model.tokenizer.stream() if model.tokenizer else None  # decodes the drafted part of a piece alone
    before = ""
    for piece in job:
        text = piece.text
        if model.tokenizer is None:
            text, before = before + ",".join(map(str, piece.ids)), ","
        elif colour:
            text = coloured(piece, twin.push)
            twin.push(piece.ids[piece.drafted :])
        print(text, end="", flush=True)
    print()


def decode_all(o, model, plain, prompts: list, samplings: list, batch: int) -> int:
    """Decode everything, batch by batch; returns the exit code."""
    from report import Trace, as_json, statistics

    trace = Trace(model.decoder) if o.trace else None
    for i in range(0, len(prompts), batch):
        group, samples = prompts[i : i + batch], samplings[i : i + batch]
        options = {"raw": o.raw, "system": o.system}
        job = model.job(group, samples, **options)
        others, interrupted = [None] * len(group), False
        try:
            pieces = trace.watch(job) if trace else job
            if o.json:
                for _ in pieces:
                    pass
            else:
                show(pieces, model, len(group) > 1)
            if plain:
                other = plain.job(group, samples, **options)
                for _ in other:
                    pass
                others = other.results()
        except KeyboardInterrupt:
            interrupted = True
            note("\n(interrupted)")
        results = job.results()
        if o.json:
            for result, twin in zip(results, others):
                print(json.dumps(as_json(result, model.decoder.drafter.rule if o.temperature else "equal", twin)), flush=True)
        else:
            note(statistics(results, model.decoder))
            if others[0]:
                note(comparison(results, others, o.accept if o.temperature > 0 else "equal"))
        if trace:
            trace.save(o.trace, results[0])
        if interrupted:
            return 130
    return 0


def comparison(results: list, others: list, rule: str) -> str:
    """One line: plain decoding's speed, the speedup over it, whether the texts are equal, or why they need not be."""
    from report import speedup

    equal = sum(a.ids == b.ids for a, b in zip(results, others))
    rate = [sum(len(r.ids) - 1 for r in rs) / max(rs[0].seconds, 1e-9) for rs in (results, others)]
    ratio = speedup(results[0], others[0]) if len(results) == 1 else rate[0] / max(rate[1], 1e-9)
    verdict = "yes" if equal == len(results) else f"{equal} of {len(results)}; "
    if equal < len(results) and rule != "equal":
        verdict += {"typical": "typical acceptance is LOSSY", "residual": "residual acceptance draws with other random numbers"}[rule]
    elif equal < len(results):
        verdict += first_difference(results, others)
    return f"plain: {rate[1]:.1f} tok/s; speedup {ratio or 0:.2f}x; texts equal: {verdict}"


def first_difference(results: list, others: list) -> str:
    """Where the first unequal pair of results parts, and what it means."""
    from decoder import common_prefix

    i, ids = next((i, (a.ids, b.ids)) for i, (a, b) in enumerate(zip(results, others)) if a.ids != b.ids)
    at = common_prefix(*ids)
    return (
        f"prompt {i + 1} parts at token {at + 1}: where our kernels do not compute (a GPU, fp16, fp8, experts, --no-kernels, --no-compile)"
        " a pass over many rows rounds differently from a pass over one, so near ties may fall either way; --dtype fp32 helps"
    )


def chat(o, model, sampling) -> int:
    """The interactive loop: every turn keeps the conversation and what the caches hold of it."""
    from report import statistics

    if model.tokenizer is None or not model.tokenizer.has_template:
        raise CheckpointError("--interactive needs a tokenizer with a chat template; this checkpoint has none")
    system = [{"role": "system", "content": o.system}] if o.system is not None else []
    messages = list(system)
    while True:
        try:
            line = input("> " if is_terminal(sys.stdin) else "")
        except (EOFError, KeyboardInterrupt):
            note("")
            return 0
        if line.strip() == "/exit":
            return 0
        if line.strip() == "/reset":
            messages = list(system)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            job = model.job([messages], [sampling], reuse=True)
        except ValueError as e:
            note(f"error: {e} (/reset starts over)")
            messages.pop()
            continue
        try:
            show(job, model, False)
        except KeyboardInterrupt:
            print(flush=True)
        result = job.results()[0]
        messages.append({"role": "assistant", "content": result.text})
        note(statistics([result], model.decoder))


def run(o) -> int:
    """Do what the parsed options say. Returns the exit code; raises CheckpointError, ValueError, OSError on bad input."""
    prompts = gather_prompts(o)
    check_options(o, prompts)
    from dataclasses import replace

    count = max(1, len(prompts) * o.num_samples)
    batch = min(count, o.batch_size or 16)
    model, sampling = load_model(o, batch, prompts)
    spread = [p for p in prompts for _ in range(o.num_samples)]
    samplings = [replace(sampling, seed=o.seed + i) for _ in prompts for i in range(o.num_samples)]
    with compile_errors():
        for p in prompts:  # refuse before compiling
            model.decoder.check(model.encode(p, raw=o.raw, system=o.system))
        model.warm_up(sampling)
        plain = model.plain() if o.compare else None
        if plain:
            plain.warm_up(sampling)
        note(f"ready {time.perf_counter() - STARTED:.1f} s after the start")
        return chat(o, model, sampling) if o.interactive else decode_all(o, model, plain, spread, samplings, batch)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 1 with a one-line error, 130 when interrupted, 141 when nobody reads."""
    o = parser().parse_args(argv)
    try:
        return run(o)
    except BrokenPipeError:  # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CheckpointError, ValueError, OSError) as e:
        note(f"error: {e}")
        return 1
    except KeyboardInterrupt:
        note("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
