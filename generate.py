"""Generate text from a converted checkpoint, plainly or with speculative decoding.

    python generate.py --checkpoint checkpoints/smollm2-135m --speculate eagle3 --prompt "Why is it blue?"
"""
from __future__ import annotations

import json
import sys
import time
from dataclasses import fields, replace

from common import STARTED
from common.cli import Options, check_writable, command, note, positive, within
from common.errors import InputError
from common.files import read_json, read_text
from common.torchrun import several
from drafters import MOST, Drafting, add_drafting, default_tree, with_numbers
from sampling.options import Sampling, add_sampling
from tokens.dataset import read_prompts
from tokens.grammar import ANY_OBJECT, grammar_of

Prompts = list[str | list[int]]
TURNS = 3  # of --compare


def parser() -> Options:
    """Declare the options, each with its rules."""
    p = Options("Generate text, plainly or with speculative decoding.")
    add, refuse = p.add_argument, p.refuse
    p.add_checkpoint("converted folder; a Hugging Face folder, hub id or .gguf is converted first")
    add("--verify", action="store_true", help="check first that weights have the sha256 of their config.json")

    add = p.add_argument_group("prompts").add_argument
    add("-p", "--prompt", action="append", default=[], metavar="TEXT",
        help="may be repeated: decoded as one batch; - is standard input")
    add("--prompt-ids", action="append", default=[], type=ids, metavar="1,2,3", help="a prompt as token ids")
    add("-f", "--prompt-file", action="append", default=[], metavar="FILE",
        help="one prompt; a .jsonl file has one per line; - is standard input")
    add("--raw", action="store_true", help="no chat template; control tokens spelled out count as such")
    add("--no-parse-special", action="store_false", dest="parse_special",
        help="with --raw: control tokens spelled out stay text")
    add("--system", metavar="TEXT", help="system message for the chat template")
    add("--interactive", action="store_true", help="chat; /help lists its commands")
    add("--batch-size", type=positive, help="prompts decoded together (default all, at most 16)")

    def prompts(o) -> list:
        return o.prompt + o.prompt_ids + o.prompt_file

    refuse(lambda o: o.interactive and (
               prompts(o) or o.json or o.compare or o.trace or o.num_samples != 1 or o.raw or several()),
           lambda o: "--interactive reads its prompts from you and uses the chat template: leave out"
                     " --prompt*, --json, --compare, --trace, --num-samples, --raw and torchrun")
    refuse(lambda o: not (o.raw or o.parse_special),
           lambda o: "--no-parse-special: is for prompts without the chat template; add --raw")
    refuse(lambda o: not (o.interactive or prompts(o)),
           lambda o: "no prompt: give --prompt TEXT (-p - reads standard input), --prompt-file, --prompt-ids"
                     " or --interactive")

    group = add_sampling(p)
    add, either = group.add_argument, group.add_mutually_exclusive_group().add_argument
    either("--json-object", action="store_true", help="the output is a JSON object")
    either("--json-schema", metavar="FILE", help="the output is JSON that fits this schema")
    add("--logprobs", type=int, metavar="N",
        help="with --json: of each token and of the N likeliest (0 to 20), by the target alone")
    add("--num-samples", type=within(1, 100_000), default=1,
        help="samples per prompt, with seeds SEED, SEED+1, ...")
    refuse(lambda o: o.logprobs is not None and not o.json,
           lambda o: f"--logprobs {o.logprobs}: log-probabilities are printed with --json; add it")

    add = add_drafting(p).add_argument
    add("--tree-nodes", type=within(2, MOST), help="nodes of the draft tree, root included")
    add("--tree-depth", type=within(0, MOST), help="expansions after the first level")
    add("--tree-width", type=within(1, MOST), help="nodes expanded per level")
    refuse(lambda o: o.tree and tree_numbers(o) != [None] * 3,
           lambda o: f"--tree {o.tree}: leave out --tree-nodes, --tree-depth and --tree-width")

    add = p.add_runtime().add_argument
    add("--autotune", action="store_true", help="torch.compile times several kernels per product; for a GPU")

    add = p.add_argument_group("output").add_argument
    add("--compare", action="store_true",
        help=f"decode {TURNS} times in turns with plain decoding: speedups, and whether the texts are equal")
    add("--stats", action="store_true", help="print more figures: steps, trees, memory")
    refuse(lambda o: o.compare and o.speculate == "none",
           lambda o: "--compare: plain decoding would be compared with itself; add --speculate")
    add("--json", action="store_true", help="one JSON object per line on stdout, nothing else")
    add("--trace", metavar="FILE",
        help="write every drafted tree and accepted path (safetensors); one prompt only")
    return p


def tree_numbers(o) -> list[int | None]:
    """Return nodes, depth and width of the tree, None if not given."""
    return [o.tree_nodes, o.tree_depth, o.tree_width]


def ids(text: str) -> list[int]:
    """An argparse type: token ids with commas between them."""
    return [int(i) for i in text.split(",")]


def text_of(path: str) -> str:
    """Return the text of a file, or of standard input ("-"), without the line end that editors write."""
    return read_text("/dev/stdin" if path == "-" else path, "--prompt-file").removesuffix("\n")


def read_options(o) -> tuple[Prompts, list[Sampling]]:
    """Return a prompt and its sampling for each text. Raises InputError or ValueError."""
    prompts: Prompts = [text_of("-") if text == "-" else text for text in o.prompt] + o.prompt_ids
    for path in o.prompt_file:
        prompts += read_prompts(path) if path.endswith(".jsonl") else [text_of(path)]
    if "" in prompts:
        raise InputError("a prompt is empty (--prompt, --prompt-file or standard input); give a text")
    if o.trace and len(prompts) * o.num_samples != 1:
        raise InputError("--trace records one sequence: give one prompt and one sample")
    if o.trace:
        check_writable("--trace", o.trace)
    if o.json_schema:
        o.json_schema = json.dumps(read_json(o.json_schema))
    elif o.json_object:
        o.json_schema = ANY_OBJECT
    if o.json_schema:
        grammar_of(o.json_schema)  # judged before anything is loaded
    sampling = Sampling(**{field.name: getattr(o, field.name) for field in fields(Sampling)})
    samplings = [replace(sampling, seed=(o.seed + i) % 2**64) for i in range(o.num_samples)]
    return [p for p in prompts for _ in samplings], samplings * len(prompts) or samplings


def decode(o, prompts: Prompts, samplings: list[Sampling], runtime, ranks=None) -> int:
    """Load the model and decode the prompts, alone or as one of several ranks. Returns the exit status."""
    from checkpoint.folder import known_config
    from console.chat import chat
    from llm import LLM

    began, batch = time.perf_counter(), min(max(1, len(prompts)), o.batch_size or 16)
    drafting = Drafting.of(o)
    if tree_numbers(o) != [None] * 3:
        quantised = "quantization" in known_config(o.checkpoint)
        usual = default_tree(runtime.device_name, quantised, runtime.isa_name, batch)
        drafting = replace(drafting, tree=with_numbers(*tree_numbers(o), usual))
    llm = LLM(o.checkpoint, drafting, batch_size=batch, max_seq_len=o.max_seq_len, say=note, ranks=ranks,
              verify=o.verify, **vars(runtime))
    engine, plain = llm.engine, None
    note(f"loaded {llm.target.checkpoint} in {time.perf_counter() - began:.1f} s; caches of {engine.batch} x"
         f" {engine.slots} slots: up to {engine.cache_bytes / 1e9:.2f} GB")
    encoding, ids = {"raw": o.raw, "system": o.system, "parse_special": o.parse_special}, []
    for i, prompt in enumerate(prompts):
        name = f"prompt {i + 1}" if len(prompts) > 1 else "the prompt"
        ids.append(llm.encode(prompt, name=name, **encoding))
        engine.check(ids[-1], samplings[i], name)
    engine.warm_up(samplings[0])
    if line := engine.explain(o.temperature > 0):
        note(line)
    if o.compare:
        plain = llm.target.engine(batch=engine.batch, max_seq_len=engine.max_seq_len)
        plain.warm_up(samplings[0])
    note(f"ready {time.perf_counter() - STARTED:.1f} s after the start")
    if o.interactive:
        return chat(engine, samplings[0], o.system, o.stats)
    return answer(o, engine, plain, prompts, ids, samplings)


def answer(o, engine, plain, prompts: Prompts, ids: list, samplings: list[Sampling]) -> int:
    """Decode and print. plain: the engine to compare with. Returns the exit status: 130 when interrupted."""
    from console.output import Trace, as_json, as_text, compared, comparison, figures, show

    tokenizer, ranks = engine.tokenizer, engine.target.ranks
    trace = Trace(ids[0], engine.drafter.shape) if o.trace else None
    requests, turns, printed, interrupted = [], [], 0, False

    def print_one(i: int) -> None:
        if o.json:
            row = as_json(requests[i], prompts[i], ranks.count if ranks else 1)
            print(json.dumps(row | compared([(a[i], b[i]) for a, b in turns], row)), flush=True)
        elif len(ids) > 1:
            text = as_text(requests[i], tokenizer)
            print(f"--- {i + 1}, seed {samplings[i].seed} ---\n{text}", flush=True)

    events = engine.run(ids, samplings, requests, watch=bool(trace))
    if trace:
        events = trace.watch(events)
    try:
        if o.json or len(ids) > 1:
            for _ in events:  # in order, as they end
                while printed < len(requests) and requests[printed].finish and not (plain and o.json):
                    print_one(printed)
                    printed += 1
        else:
            show(events, tokenizer)
        if plain:
            note(f"comparing with plain decoding, {TURNS} turns ...")
        for turn in range(TURNS if plain else 0):
            again = engine.generate(ids, samplings) if turn else requests
            turns.append((again, plain.generate(ids, samplings)))
    except KeyboardInterrupt:
        interrupted = True
        note("\n(interrupted)")
    for i in range(printed, len(requests)):
        print_one(i)
    if requests and not o.json:
        note(figures(requests, engine, o.stats or o.compare))
        if turns:
            note(comparison(turns))
    if trace and requests and (ranks is None or ranks.rank == 0):
        trace.save(o.trace, requests[0])
    for request in requests:
        if request.error:
            raise ValueError(request.error)
    return 130 if interrupted else 0


def run(o) -> int:
    """Do what the options say. Returns the exit status.

    Raises InputError, ValueError and OSError on bad input.
    """
    prompts, samplings = read_options(o)
    from llm import started

    with started(o, prompts, samplings) as (runtime, ranks):
        return decode(o, prompts, samplings, runtime, ranks)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, ValueError, OSError)


if __name__ == "__main__":
    sys.exit(main())
