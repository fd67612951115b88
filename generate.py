"""Generate text from a converted checkpoint, plainly or with speculative decoding.

    python generate.py --checkpoint checkpoints/smollm2-135m --speculate eagle3 --prompt "Why is it blue?"
"""
from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from typing import NamedTuple

# Nothing here imports torch before it is needed: --help and mistakes answer at once.
from checkpoint.early import check_checkpoint, check_head, check_ids
from common.cli import Options, bias, check_writable, command, note, seed
from common.errors import InputError
from common.gpus import check_gpu
from common.torchrun import command_in_words, one_voice, several
from common.tree_shapes import TreeShape
from console.prompts import gather_prompts
from drafters import METHODS, add_flags, add_window, check_numbers, method_name, read_flags
from drafters.early import judge_method
from drafters.tree_spec import MOST_NODES, TreeSpec, default_tree, read_tree, with_numbers, within_limits
from sampling.options import RULES, Sampling
from tokens.guard import GUARD
from tokens.schema import ANY_OBJECT, read_schema

STARTED = time.perf_counter()


def parser() -> Options:
    """The options of the command line, each with its rules."""
    p = Options("Generate text, losslessly faster with a draft head.")
    add, refuse, on_off = p.add_argument, p.refuse, argparse.BooleanOptionalAction
    add("--checkpoint", required=True,
        help="converted folder; a Hugging Face folder, hub id or .gguf is converted first")
    add("--verify", action="store_true", help="check first that weights have the sha256 of their config.json")

    add = p.add_argument_group("prompts").add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be repeated: decoded as one batch")
    add("--prompt-ids", action="append", default=[], metavar="1,2,3", help="a prompt as token ids")
    add("--prompt-file", action="append", default=[], metavar="FILE",
        help="one prompt; a .jsonl file has one per line")
    add("--raw", action="store_true", help="no chat template")
    add("--system", metavar="TEXT", help="system message for the chat template")
    add("--interactive", action="store_true", help="chat; /reset starts over, /exit or end of input leaves")
    add("--batch-size", type=int, help="prompts decoded together (default all, at most 16)")
    add("--max-seq-len", type=int, help="prompt and output together (default 2048, or the model's maximum)")

    def prompts(o) -> list:
        return o.prompt + o.prompt_ids + o.prompt_file

    refuse(lambda o: o.interactive and (
               prompts(o) or o.json or o.compare or o.trace or o.num_samples != 1 or o.raw),
           lambda o: "--interactive reads its prompts from you and uses the chat template: leave out"
                     " --prompt*, --json, --compare, --trace, --num-samples, --raw")
    refuse(lambda o: o.interactive and sys.stdin is None,
           lambda o: "--interactive reads its prompts from standard input, which is closed")
    refuse(lambda o: o.system and o.raw,
           lambda o: "--system: is written by the chat template, which --raw leaves out; choose one")
    refuse(lambda o: not (o.interactive or prompts(o)),
           lambda o: "no prompt: give --prompt, --prompt-ids, --prompt-file or --interactive")
    p.within("--batch-size", 1, float("inf"))
    p.within("--max-seq-len", 2, float("inf"))

    add = p.add_argument_group("sampling").add_argument
    add("--max-new-tokens", type=int, default=256)
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0, help="0 is off (default)")
    add("--min-p", type=float, default=0.0,
        help="leave out what is less than so many times as likely as the likeliest; 0 is off (default)")
    add("--presence-penalty", type=float, default=0.0, metavar="X",
        help="taken from the logits of tokens that the output holds (-2 to 2; default 0)")
    add("--frequency-penalty", type=float, default=0.0, metavar="X",
        help="the same, once for each time (-2 to 2; default 0)")
    add("--repetition-penalty", type=float, default=1.0, metavar="X",
        help="tokens of prompt and output become so many times less likely to repeat; 1 is off (default)")
    add("--logit-bias", action="append", default=[], type=bias, metavar="ID=X",
        help="added to a token's logit (-100 to 100); may be repeated")
    add("--stop", action="append", default=[], metavar="TEXT",
        help="ends the output, of which it is no part; may be repeated")
    add("--json-object", action="store_true", help="the output is a JSON object")
    add("--json-schema", metavar="FILE", help="the output is JSON that fits this schema")
    add("--logprobs", type=int, metavar="N",
        help="with --json: of each token and of the N likeliest (0 to 20), by the target alone")
    add("--seed", type=seed, default=0,
        help="same seed, same text, with and without speculation; 64 bits count, so that -1 is 2^64 - 1")
    add("--num-samples", type=int, default=1, help="samples per prompt, with seeds SEED, SEED+1, ...")
    p.within("--max-new-tokens", 1, float("inf"))
    p.within("--temperature", 0, 1_000_000)
    refuse(lambda o: not 0 < o.top_p <= 1, lambda o: f"--top-p {o.top_p}: must be above 0 and at most 1")
    p.within("--top-k", 0, 2**31 - 1)
    p.within("--num-samples", 1, 100_000)
    p.within("--min-p", 0, 1)
    p.within("--presence-penalty", -2, 2)
    p.within("--frequency-penalty", -2, 2)
    p.within("--repetition-penalty", 0.01, 100)
    p.within("--logprobs", 0, 20)
    p.judge(lambda o: Sampling(stop=tuple(o.stop)))
    refuse(lambda o: o.json_object and o.json_schema,
           lambda o: f"--json-schema {o.json_schema}: leave out --json-object")
    refuse(lambda o: o.logprobs is not None and not o.json,
           lambda o: f"--logprobs {o.logprobs}: log-probabilities are printed with --json; add it")

    group = p.add_argument_group("drafting")
    add = group.add_argument
    how = "; ".join(f"{name}, {method.what}" for name, method in METHODS.items() if method)
    add("--speculate", type=method_name, default="none", metavar="METHOD",
        help=f"none: not at all (default); {how}. Two with a plus, such as lookup+eagle3, draft one tree")
    add("--draft", help="folder of the head (default CHECKPOINT/KIND, eagle for EAGLE-2 too) or draft model")
    add("--tree", metavar="SPEC",
        help="auto (by measurement; the default of EAGLE-2 and 3 on a CPU), paper, T,D,K, or a JSON file of"
             " paths: a static tree")
    add("--tree-nodes", type=int, help="nodes of the draft tree, root included")
    add("--tree-depth", type=int, help="expansions after the first level")
    add("--tree-width", type=int, help="nodes expanded per level")
    rules = "; ".join(f"{rule} {what}" for rule, what in RULES.items())
    add("--accept", choices=RULES, default="equal",
        help=f"how drafts are accepted at temperature > 0: {rules}")
    add("--coupled", action=on_off, default=True, help="draft with the target's sampling noise")
    add("--draft-int8", action=on_off, default=True, help="on our kernels, quantise a 16-bit head at loading")
    add("--shard-head", action="store_true",
        help="with torchrun: deal the head, or the draft model, among the ranks too; else each has it whole")
    add_flags(group)
    check_numbers(p)
    p.judge(lambda o: read_flags(o, [o.speculate]))
    add_window(group, p, lambda o: [o.speculate])
    refuse(lambda o: o.accept != "equal" and o.speculate == "none",
           lambda o: f"--accept {o.accept}: plain decoding drafts nothing to accept")
    refuse(lambda o: o.accept == "residual" and o.speculate != "draft-model",
           lambda o: "--accept residual: is for --speculate draft-model, which can draw its proposals at"
                     " random")
    refuse(lambda o: o.shard_head and not (several() and o.speculate != "none"),
           lambda o: "--shard-head: deals what drafts among ranks; add --speculate, and start with torchrun")
    refuse(lambda o: o.draft and o.speculate == "none",
           lambda o: f"--draft {o.draft}: plain decoding uses no head; add --speculate eagle3")
    numbers = "tree_nodes", "tree_depth", "tree_width"

    def first_number(o) -> str:
        """The first of the three that is given, as it was; nothing if none is."""
        given = ((name, getattr(o, name)) for name in numbers)
        return next((f"--{name} {n}".replace("_", "-") for name, n in given if n is not None), "")

    refuse(lambda o: o.tree and first_number(o),
           lambda o: f"--tree {o.tree}: leave out --tree-nodes, --tree-depth and --tree-width")
    refuse(lambda o: first_number(o) and o.speculate == "none",
           lambda o: f"{first_number(o)}: plain decoding drafts no tree; add --speculate")
    refuse(lambda o: o.tree and o.speculate == "none",
           lambda o: f"--tree {o.tree}: plain decoding drafts no tree; add --speculate")
    p.within("--tree-nodes", 2, MOST_NODES)
    p.within("--tree-depth", 0, MOST_NODES)
    p.within("--tree-width", 1, MOST_NODES)
    # Where one is left out it depends on the machine.
    p.judge(lambda o: None in (n := [getattr(o, name) for name in numbers]) or within_limits(TreeShape(*n)))

    add = p.add_runtime().add_argument
    add("--autotune", action="store_true", help="torch.compile times several kernels per product; for a GPU")

    add = p.add_argument_group("output").add_argument
    add("--compare", action="store_true", help="decode plainly too: speedup, and whether the texts are equal")
    add("--json", action="store_true", help="one JSON object per line on stdout, nothing else")
    add("--trace", metavar="FILE",
        help="write every drafted tree and accepted path (safetensors); one prompt only")
    return p


class Asked(NamedTuple):
    """What the options and the files that they name ask for."""

    prompts: list[str | list[int]]
    sampling: Sampling
    tree: TreeSpec


def judge(o) -> Asked:
    """Read what the options name, all that needs no torch. Raises InputError or ValueError."""
    from kernels.isa import choose

    config = check_checkpoint(o.checkpoint, o.max_seq_len, o.offload)
    check_gpu(o.device, o.offload)
    check_head("--draft", o.draft)
    tree = read_tree(o.tree)
    shaped = tree or (o.tree_nodes, o.tree_depth, o.tree_width) != (None, None, None)
    flags = read_flags(o, [o.speculate])[o.speculate]
    judge_method(o.checkpoint, config, o.speculate, o.draft, shaped, flags)
    check_ids("--logit-bias", (token for token, _ in o.logit_bias), config)
    if o.isa:
        choose(o.isa)
    prompts = gather_prompts(o)
    check_ids("--prompt-ids", (i for prompt in prompts if isinstance(prompt, list) for i in prompt), config)
    if o.trace and len(prompts) * o.num_samples != 1:
        raise InputError("--trace records one sequence: give one prompt and one sample")
    if o.trace:
        check_writable("--trace", o.trace)
    schema = asked_schema(o.json_schema) if o.json_schema else ANY_OBJECT if o.json_object else None
    sampling = Sampling(
        o.max_new_tokens, o.temperature, o.top_p, o.top_k, o.seed, o.min_p, o.presence_penalty,
        o.frequency_penalty, o.repetition_penalty, tuple(o.logit_bias), tuple(o.stop), o.logprobs, schema,
    )
    GUARD.begin()  # while torch is imported
    return Asked(prompts, sampling, tree)


def asked_schema(file: str) -> str:
    """The JSON schema in a file. Raises InputError if it cannot be used."""
    from tokens.grammar import grammar_of

    schema = read_schema(file)
    try:
        grammar_of(schema)
    except InputError as e:
        raise InputError(f"--json-schema {file}: {e}") from None
    return schema


def load(o, asked: Asked, batch: int, ranks=None):
    """Load the target -> (Target, Drafting). Nothing is compiled yet.

    batch: how many texts are decoded together. ranks: the `kernels.tp.Ranks` to deal it among, if any.
    """
    from checkpoint.convert import converted_folder
    from checkpoint.folder import read_config
    from engine.api import Drafting, check_prompts, load_target
    from engine.fitting import settle
    from engine.runtime import Runtime, check_device
    from kernels.tp import own_device

    runtime = Runtime(o.device, o.dtype, o.compile, o.kernels, o.autotune, o.isa, o.kv)
    if ranks:
        runtime = replace(runtime, device=own_device(runtime.device_name))
    check_device(runtime.device_name)
    if ranks:
        read_config(o.checkpoint, "target")  # ranks do not convert: they would all write one folder
    checkpoint, tree = converted_folder(o.checkpoint, note), asked.tree
    if o.verify:
        from checkpoint.verifying import verify

        verify(checkpoint, o.draft, True, note)
    # Before the weights are read: those of a large model take long.
    check_prompts(checkpoint, asked.prompts, o.max_seq_len, raw=o.raw, system=o.system)
    numbers = o.tree_nodes, o.tree_depth, o.tree_width
    if numbers != (None, None, None):
        quantised = "quantization" in read_config(checkpoint, "target")
        usual = default_tree(runtime.device_name, quantised, runtime.isa_name, batch)
        tree = with_numbers(*numbers, usual)
    flags = read_flags(o, [o.speculate])[o.speculate]
    ids = tuple(p for p in asked.prompts if isinstance(p, list))
    how = o.accept, o.coupled, o.draft_int8, flags, ids, o.draft_window
    drafting = Drafting(o.speculate, o.draft, tree, *how)
    decoders = (drafting, Drafting()) if o.compare else (drafting,)
    runtime = settle(o.offload, checkpoint, runtime, decoders, batch, o.max_seq_len, note)
    return load_target(checkpoint, runtime, note, ranks), drafting


def run(o) -> int:
    """Do what the options say. Returns the exit status.

    Raises InputError, ValueError and OSError on bad input.
    """
    asked = judge(o)
    if not several():
        return decode(o, asked)
    if o.interactive:
        raise InputError("--interactive: ranks have one terminal together; start it without torchrun")
    from engine.runtime import Runtime
    from kernels.tp import joined, own_device

    device = Runtime(o.device).device_name
    with joined(device, o.shard_head) as ranks:
        ranks.agree_on(command_in_words(o, asked), own_device(device))
        return decode(o, asked, ranks)


def decode(o, asked: Asked, ranks=None) -> int:
    """Decode the prompts, alone or as one of several ranks. Returns and raises what `run` does."""
    prompts, sampling = asked.prompts, asked.sampling

    from common.threads import use_threads
    from console.chat import chat
    from console.decoding import compile_errors, decode_all

    use_threads(o.threads, note)
    count = max(1, len(prompts) * o.num_samples)
    size = {"batch": min(count, o.batch_size or 16), "max_seq_len": o.max_seq_len}
    began = time.perf_counter()
    target, drafting = load(o, asked, size["batch"], ranks)
    model = target.decoder(drafting, **size)
    decoder = model.decoder
    note(
        f"loaded {target.checkpoint} in {time.perf_counter() - began:.1f} s; caches of {decoder.batch} x"
        f" {decoder.slots} slots: {decoder.cache_bytes / 1e9:.2f} GB"
    )
    with compile_errors():
        model.warm_up(sampling)
        plain = target.decoder(**size) if o.compare else None
        if plain:
            plain.warm_up(sampling)
        note(f"ready {time.perf_counter() - STARTED:.1f} s after the start")
        if o.interactive:
            return chat(model, sampling, o.system)
        samples = [(p, replace(sampling, seed=o.seed + i)) for p in prompts for i in range(o.num_samples)]
        return decode_all(o, model, plain, samples)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    with one_voice() as voices:
        return command(parser(), argv, run, ValueError, OSError, **voices)


if __name__ == "__main__":
    sys.exit(main())
