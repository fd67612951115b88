"""Generate text from a converted checkpoint, with or without speculative decoding.

    python generate.py --checkpoint checkpoints/smollm2-135m --speculate eagle3 --prompt "Hello!"
"""
from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

# torch is imported only after the options have been parsed, so that --help is fast.
from common.cli import STARTED, Options, command, is_distributed, log_stderr, positive, seed, within
from common.errors import InputError, read_text
from engine.drafting import DraftOptions, add_drafting

if TYPE_CHECKING:
    from engine.request import Request
    from engine.sampling import Sampling
    from llm import LLM

Prompts = list[str | list[int]]
DRAFTED, RESET = "\033[36m", "\033[0m"  # colors on a terminal


def parser() -> Options:
    """Return the parser of the command line."""
    p = Options(__doc__, usage="%(prog)s -m CHECKPOINT [options] [PROMPT ...]")
    p.add_checkpoint("converted folder; a Hugging Face folder, hub id or .gguf is converted first")
    p.add_argument("--verify", action="store_true",
        help="check weights against the sha256 in config.json before loading")
    add_prompts(p)
    add_sampling(p)
    add_drafting(p)
    add_output(p)
    p.add_runtime().add_argument("--autotune", action="store_true",
        help="let torch.compile autotune matrix products, for GPUs")
    return p


def add_prompts(p: Options) -> None:
    """Add the prompt options."""
    add = p.add_argument_group("prompts").add_argument
    add("prompt_words", nargs="*", metavar="PROMPT", help="prompt; several words are joined by spaces")
    add("-p", "--prompt", action="append", default=[], metavar="TEXT",
        help="prompt; may be repeated, for a batch; - reads standard input")
    add("--prompt-ids", action="append", default=[], type=token_ids, metavar="1,2,3",
        help="prompt as token ids; may be repeated")
    add("-f", "--prompt-file", action="append", default=[], metavar="FILE",
        help="file with one prompt; .jsonl: one prompt per line; - reads standard input")
    add("--raw", action="store_true", help="no chat template; parse special tokens in the prompt")
    add("--no-parse-special", action="store_false", dest="parse_special",
        help="with --raw: encode special tokens in the prompt as text")
    add("--system", metavar="TEXT", help="system message for the chat template")
    add("--interactive", action="store_true", help="chat in the terminal")
    add("--batch-size", type=positive, metavar="N",
        help="maximum batch size (default: number of prompts, at most 16)")
    p.reject_if(lambda args: args.interactive and (
                 args.prompt_words or args.prompt or args.prompt_ids or args.prompt_file or args.json or
                 args.compare or args.trace or args.num_samples != 1 or args.raw or is_distributed()),
             lambda args: "--interactive reads its prompts from stdin and applies the chat template: leave"
                          " out --prompt*, --json, --compare, --trace, --num-samples, --raw and torchrun")
    p.reject_if(lambda args: not (args.raw or args.parse_special),
             lambda args: "--no-parse-special: needs --raw; with the chat template, special tokens in prompts"
                          " are always encoded as text")


def add_sampling(p: Options) -> None:
    """Add the sampling options, fields of `Sampling`."""
    group = p.add_argument_group("sampling")
    add, add_constraint = group.add_argument, group.add_mutually_exclusive_group().add_argument
    add("-n", "--max-new-tokens", type=positive, default=256, metavar="N",
        help="maximum number of new tokens (default 256)")
    add("--temperature", type=float, default=0.0, metavar="X",
        help="sampling temperature; 0 (default): greedy")
    add("--top-p", type=within(1e-9, 1, float), default=1.0, metavar="X",
        help="nucleus sampling: keep the most probable tokens up to this total probability; 1 (default): off")
    add("--top-k", type=int, default=0, metavar="N", help="keep the N most probable tokens; 0 (default): off")
    add("--min-p", type=float, default=0.0, metavar="X",
        help="drop tokens less than X times as probable as the top-1 token; 0 (default): off")
    add("--presence-penalty", type=float, default=0.0, metavar="X",
        help="subtract from the logits of tokens already in the output (-2 to 2; default 0)")
    add("--frequency-penalty", type=float, default=0.0, metavar="X",
        help="subtract once per occurrence in the output (-2 to 2; default 0)")
    add("--repetition-penalty", type=float, default=1.0, metavar="X",
        help="divide positive and multiply negative logits of tokens in prompt or output; 1 (default): off")
    add("--logit-bias", action="append", default=[], type=logit_bias, metavar="ID=X",
        help="add X to the logit of token ID (-100 to 100); may be repeated")
    add("--stop", action="append", default=[], metavar="TEXT",
        help="stop string, not printed; may be repeated")
    add("--seed", type=seed, default=0, metavar="N",
        help="random seed, modulo 2^64 (default 0); same output with and without drafting")
    add_constraint("--json-object", action="store_true", help="constrain the output to a JSON object")
    add_constraint("--json-schema", metavar="SCHEMA",
        help="constrain the output to a JSON schema: a file or inline")
    add("--logprobs", type=int, metavar="N",
        help="with --json: log-probabilities of the output and top N tokens (0 to 20), before penalties")
    add("--num-samples", type=within(1, 100_000), default=1, metavar="N",
        help="samples per prompt, with seeds SEED, SEED+1, ... (default 1)")
    p.reject_if(lambda args: args.logprobs is not None and not args.json,
             lambda args: f"--logprobs {args.logprobs}: log-probabilities are printed with --json only;"
                          " add --json")


def add_output(p: Options) -> None:
    """Add the output options."""
    add = p.add_argument_group("output").add_argument
    add("--compare", action="store_true",
        help="also decode without drafting, 3 runs each; print speedup and whether outputs are equal")
    add("--stats", action="store_true", help="print steps, tree sizes, tokens per step and peak memory")
    add("--json", action="store_true", help="print only JSON to stdout, one object per output")
    add("--trace", metavar="FILE",
        help="write the draft tree and accepted path of each step (safetensors); one prompt only")
    p.reject_if(lambda args: args.compare and args.speculate == "none",
             lambda args: "--compare: plain decoding would be compared with itself; add --speculate")


def token_ids(text: str) -> list[int]:
    """Parse comma-separated token ids (argparse type)."""
    with contextlib.suppress(ValueError):
        return [int(i) for i in text.split(",")]
    raise argparse.ArgumentTypeError(f"{text!r}: expected token ids, such as 1,2,3")


def logit_bias(value: str) -> tuple[int, float]:
    """Parse ID=X, a token id and its logit bias (argparse type)."""
    token, _, number = value.partition("=")
    with contextlib.suppress(ValueError):
        return int(token), float(number)
    raise argparse.ArgumentTypeError(f"{value!r} is not ID=X, a token id and a number")


def read_prompt_file(path: str) -> str:
    """Read a prompt file ("-": standard input) without its final newline."""
    return read_text("/dev/stdin" if path == "-" else path, "--prompt-file").removesuffix("\n")


def read_options(args) -> tuple[Prompts, list[Sampling]]:
    """Read prompts and sampling options, one pair for each output, and check --trace.

    Replaces --json-schema by its content. Raises InputError or ValueError.
    """
    texts = ([" ".join(args.prompt_words)] if args.prompt_words else []) + args.prompt
    prompts = [read_prompt_file("-") if text == "-" else text for text in texts] + args.prompt_ids
    for path in args.prompt_file:
        if path.endswith(".jsonl"):
            from tokens.dataset import read_prompts

            prompts += read_prompts(path)
        else:
            prompts.append(read_prompt_file(path))
    if not (prompts or args.interactive or os.isatty(0)):
        prompts = [read_prompt_file("-")]
    if not all(prompts or [args.interactive]):  # an empty prompt, or none without --interactive
        raise InputError("no prompt, or an empty one: pass --prompt TEXT, --prompt-file, --prompt-ids,"
                         " standard input or --interactive")
    from engine.sampling import Sampling

    if args.trace:
        from console import trace

        trace.check(args.trace, len(prompts) * args.num_samples)
    if args.json_schema or args.json_object:
        from tokens.grammar import read_schema

        args.json_schema = read_schema(args.json_schema)
    sampling = Sampling(**{field.name: getattr(args, field.name, None) for field in fields(Sampling)})
    samplings = [replace(sampling, seed=(args.seed + i) % 2**64) for i in range(args.num_samples)]
    return [p for p in prompts for _ in samplings], samplings * (len(prompts) or 1)


def decode(args, prompts: Prompts, samplings: list[Sampling], runtime, ranks=None) -> int:
    """Load the model and decode the prompts, alone or as one of several ranks. Returns the exit status."""
    from llm import LLM

    start_time = time.perf_counter()
    batch = min(len(prompts) or 1, args.batch_size or 16)
    llm = LLM(args.checkpoint, DraftOptions.from_options(args), batch_size=batch,
              max_seq_len=args.max_seq_len, log=log_stderr, ranks=ranks, verify=args.verify, **vars(runtime))
    engine = llm.engine
    log_stderr(f"loaded {llm.target.checkpoint} in {time.perf_counter() - start_time:.1f} s; KV cache of"
               f" {engine.batch} x {engine.runner.cache_slots} tokens, up to"
               f" {engine.runner.cache_bytes / 1e9:.2f} GB")
    encoding = {"raw": args.raw, "system": args.system, "parse_special": args.parse_special}
    ids = []
    for i, prompt in enumerate(prompts):
        name = f"prompt {i + 1}" if prompts[1:] else "the prompt"
        ids.append(llm.encode(prompt, name=name, **encoding))
        engine.check(ids[-1], samplings[i], name)
    engine.warm_up(samplings[0])
    if args.stats and (line := engine.scheduler.describe(args.temperature > 0)):
        log_stderr(line)
    log_stderr(f"ready after {time.perf_counter() - STARTED:.1f} s")
    if args.interactive:
        from console.chat import chat

        return chat(engine, samplings[0], args.system, args.stats, show)
    return answer(args, llm, prompts, ids, samplings)


def answer(args, llm: LLM, prompts: Prompts, ids: list[list[int]], samplings: list[Sampling]) -> int:
    """Decode all prompts and print the outputs. Returns the exit status, 130 after Ctrl-C.

    ids: the tokens of each prompt. Raises ValueError if a request fails.
    """
    from llm import summary

    engine, ranks = llm.engine, llm.target.model.ranks
    requests, printed, status, streamed = [], 0, 0, not args.json and len(ids) == 1
    comparison = import_module("console.compare").Comparison(llm, samplings) if args.compare else None
    trace = import_module("console.trace").Trace(ids[0], engine.drafter.shape) if args.trace else None

    def print_output(i: int) -> None:
        if args.json:
            to_json = partial(as_json, prompt=prompts[i], ranks=ranks.count if ranks else 1)
            more = comparison.row(i, to_json) if comparison else {}
            print(json.dumps(to_json(requests[i]) | more), flush=True)
        elif len(ids) > 1:
            text = requests[i].text if engine.tokenizer else ",".join(map(str, requests[i].ids))
            print(f"--- {i + 1}, seed {samplings[i].seed} ---\n{text}", flush=True)

    events = engine.run(ids, samplings, requests, watch=bool(trace))
    events = trace.watch(events) if trace else events
    try:
        if streamed:
            show(events, engine.tokenizer)
        for _ in () if streamed else events:
            while printed < len(requests) and requests[printed].finish and not (comparison and args.json):
                print_output(printed)
                printed += 1
        if comparison:
            comparison.decode(ids, requests)
    except KeyboardInterrupt:
        status = 130
        log_stderr("\n(interrupted)")
    for i in range(printed, len(requests)):
        print_output(i)
    if requests and not args.json:
        log_stderr(summary(requests, engine.drafter.shape.nodes > 1, not comparison))
        if args.stats:
            log_stderr(import_module("console.stats").format_stats(requests, engine))
        if comparison and comparison.runs:
            log_stderr(comparison.line())
    if trace and requests and (ranks is None or ranks.rank == 0):
        trace.save(args.trace, requests[0])
    for request in requests:
        if request.error:
            raise ValueError(request.error)
    return status


def as_json(request: Request, prompt: str | list[int], ranks: int = 1) -> dict:
    """Return the object that `--json` prints. ranks: number of processes that the target is sharded over."""
    row = {
        "prompt": prompt, "text": request.text, "output_ids": request.ids, "tokens": len(request.ids),
        "seconds": request.seconds, "prefill_seconds": request.prefill_seconds,
        "tokens_per_second": request.tokens_per_second, "tau": request.tau,
        "accept_lengths": request.accept_lengths, "trees": dict(request.trees.most_common()),
        "step_seconds": request.step_seconds, "seed": request.sampling.seed,
        "finish": request.finish or "interrupted", "ranks": ranks,
    }
    row |= {"stop": request.stop} if request.stop is not None else {}
    if request.scores:
        row["logprobs"] = [{"logprob": score.logprob, "top": score.top} for score in request.scores]
    return row


def show(events: Iterable, tokenizer) -> None:
    """Print the text of one request as it arrives, or its token ids without a tokenizer.

    Accepted draft tokens are colored on a terminal.
    """
    color, separator = bool(sys.stdout) and sys.stdout.isatty(), ""
    draft_stream = tokenizer.stream() if tokenizer else None  # a second decoder, for accepted draft tokens
    try:
        for event in events:
            text = event.text
            if tokenizer is None:
                text, separator = separator + ",".join(map(str, event.ids)), ","
            elif color:
                drafted_text = draft_stream.push(event.ids[: event.drafted])
                draft_stream.push(event.ids[event.drafted :])
                # False if the text is held back for a stop string, or cut by one.
                if drafted_text and text.startswith(drafted_text):
                    text = f"{DRAFTED}{drafted_text}{RESET}{text[len(drafted_text) :]}"
            print(text, end="", flush=True)
    finally:  # after Ctrl-C too
        print(flush=True)


def run(args) -> int:
    """Run the command with parsed options. Returns the exit status.

    Raises InputError, ValueError and OSError on bad input.
    """
    prompts, samplings = read_options(args)
    from engine.target import open_runtime

    with open_runtime(args, prompts, samplings) as (runtime, ranks):
        return decode(args, prompts, samplings, runtime, ranks)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main())
