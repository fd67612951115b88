"""Train a draft head for a converted target on text that the target generates.

    python train.py --checkpoint checkpoints/smollm2-135m --synthesize 2000 --out runs/my-head
    python train.py --checkpoint DIR --prompts prompts.jsonl --out runs/my-head
    torchrun --nproc-per-node 8 train.py --checkpoint DIR --prompts prompts.jsonl --out runs/my-head

1. Data: the target answers the prompts of a file (--prompts), or user turns that it generates (--synthesize).
   The data is in OUT-work/data. The loss is on answer tokens only.
2. Training: EAGLE-3 with training-time test (arXiv 2503.01840). --kind selects P-EAGLE (2602.01469), DFlash
   (2602.06036), DSpark (2607.05147) or EAGLE-1/2 (2401.15077). After each epoch, held-out prompts are decoded
   to measure the acceptance length τ.
3. Result: OUT, a converted head with a model card. Use it with --draft OUT, or copy it to CHECKPOINT/eagle3.
   `python -m checkpoint.export` exports EAGLE heads to SGLang, vLLM and llama.cpp.

The same command resumes an interrupted run, with any number of processes.
"""
from __future__ import annotations

import argparse
import sys
import time

# torch takes seconds to import: `parser` imports it.
from common.cli import Options, command, count, is_distributed, log_stderr, positive, seed, within
from common.progress import announced
from common.writing import check_replaceable

MEASUREMENT_SECONDS = 10  # of --estimate


def parser() -> Options:
    """Return the parser of the command line."""
    from drafters.estimate import CONVERSATIONS, MAX_ANSWER_TOKENS
    from training.data import MIN_ANSWER_TOKENS
    from training.heads import BLOCK_DRAFTS, MARKOV_RANK, TRAINED
    from training.session import DRAFT_VOCAB

    p = Options(__doc__, usage="%(prog)s -m CHECKPOINT --out OUT [options]")
    add = p.add_argument
    p.add_checkpoint("target: a folder, hub id or .gguf")
    add("--out", help="folder for the head (required, except with --estimate); OUT-work holds data,"
        " training state and log")
    add("--kind", choices=TRAINED, default="eagle3", help="kind of head (default eagle3); eagle: EAGLE-1/2")
    add("--device", metavar="NAME", help="device (default: cuda if available, else cpu)")
    add("--seed", type=seed, default=0, metavar="N", help="random seed (default 0)")

    add = p.add_argument_group("data").add_argument
    add("--prompts", metavar="FILE",
        help="JSON lines with prompt, turns, messages or conversations: the target answers their user turns")
    add("--synthesize", type=count, default=0, metavar="N",
        help="generate N conversations, user turns included, with the target")
    add("--openings", metavar="FILE", help="with --synthesize: prefixes of the user turns, one per line")
    add("--shards", action="append", default=[], metavar="FOLDER",
        help="data of an earlier run for this target (its OUT-work/data); may be repeated")
    add("--temperature", type=within(0, 1e6, float), default=0.7, metavar="X",
        help="sampling temperature of the answers; 0: greedy (default 0.7)")
    add("-n", "--max-new-tokens", type=within(MIN_ANSWER_TOKENS), default=MAX_ANSWER_TOKENS, metavar="N",
        help="maximum number of tokens of an answer (default 256)")
    add("--max-prompt-tokens", type=positive, default=256, metavar="N",
        help="skip prompts of more than N tokens (default 256)")
    add("--max-len", type=within(MIN_ANSWER_TOKENS + 1), default=1024, metavar="N",
        help="truncate conversations to N tokens (default 1024)")
    add("--decode-batch", type=positive, default=48, metavar="N",
        help="batch size of data generation (default 48)")
    add("--estimate", action="store_true",
        help="print the estimated duration on this machine and exit (default data: --synthesize"
        f" {CONVERSATIONS})")
    add("--collect-only", action="store_true", help="generate the data, then exit")

    add = p.add_argument_group("head").add_argument
    add("--start", metavar="HEAD",
        help="initialize from this head, of the same kind (p-eagle: or EAGLE-3)")
    add("--draft-vocab", type=positive, metavar="N",
        help=f"draft vocabulary size: the N most frequent answer tokens (default {DRAFT_VOCAB}, or --start's;"
        " EAGLE-1: all)")
    add("--layers", type=positive, metavar="N",
        help="P-EAGLE, DFlash, DSpark: decoder layers (default 1)")
    add("--drafts", type=positive, metavar="N",
        help=f"P-EAGLE, DFlash, DSpark: tokens drafted per pass (default {BLOCK_DRAFTS})")
    add("--states", type=positive, metavar="N",
        help="target layers whose hidden states the head reads (default 3; DFlash, DSpark: 5)")
    add("--markov-rank", type=count, metavar="R",
        help=f"P-EAGLE, DSpark: rank of the Markov head; 0: none (default {MARKOV_RANK} for DSpark, else 0)")

    add_training(p)
    add_rules(p)
    return p


def add_training(p: Options) -> None:
    """Add the options of the training loop."""
    from drafters.estimate import TTT_STEPS
    from training.trainer import Plan

    plan, add = Plan(), p.add_argument_group("training").add_argument
    add("--steps", type=positive, metavar="N", help=f"EAGLE-3: unrolled draft steps (default {TTT_STEPS})")
    add("--loss", choices=("ce", "lk"),
        help="ce (default): cross-entropy with the target's distribution; lk: 0.5 * ce - 0.5 * log(acceptance"
        " rate)")
    add("--epochs", type=positive, default=plan.epochs, metavar="N", help="epochs (default 4)")
    add("--minutes", type=within(0, 1e6, float), default=plan.minutes, metavar="X",
        help="time limit of the run in minutes, at most half of it for data generation (default 0: none)")
    add("--lr", type=within(1e-12, 1e6, float), default=plan.lr, metavar="X",
        help="learning rate (default 1e-3)")
    add("--batch-tokens", type=positive, default=plan.batch_tokens, metavar="N",
        help="tokens per optimizer step, padding included, over all processes (default 1024)")
    add("--shard-target", action="store_true",
        help="with torchrun: shard a target that does not fit on one device (default: replicate)")
    add("--validate-prompts", type=count, default=16, metavar="N",
        help="held-out prompts decoded after every epoch (default 16)")


def add_rules(p: Options) -> None:
    """Add the rules of the options."""
    from drafters.estimate import CONVERSATIONS
    from training.heads import HEAD_OPTIONS, TRAINED

    reject_if = p.reject_if
    p.add_rule(lambda args: args.estimate and vars(args).update(
        out=args.out or "head", synthesize=args.synthesize or (not args.prompts and CONVERSATIONS)))
    reject_if(lambda args: not args.out, lambda args: "--out is missing: pass a folder for the head")
    p.add_rule(lambda args: check_replaceable("--out", args.out))
    reject_if(lambda args: not (args.prompts or args.synthesize or args.shards),
           lambda args: "no training data: pass --prompts FILE, --synthesize N or --shards FOLDER")
    reject_if(lambda args: args.openings and not args.synthesize,
           lambda args: "--openings: only with --synthesize; leave it out")
    reject_if(lambda args: args.states and args.start,
           lambda args: "--states: the head of --start sets it; leave one out")
    reject_if(lambda args: args.shard_target and not is_distributed(),
           lambda args: "--shard-target: shards the target over processes; start with torchrun")
    reject_if(lambda args: args.shard_target and args.minutes,
           lambda args: "--shard-target: not supported with --minutes; leave one out")
    for name in HEAD_OPTIONS[1:]:
        flag = f"--{name.replace('_', '-')}"
        reject_if(lambda args, name=name: getattr(args, name) is not None
                  and name not in TRAINED[args.kind].options,
                  lambda args, flag=flag: f"{flag}: not for --kind {args.kind}; leave it out")


def run(args: argparse.Namespace, argv: list[str], started: float) -> None:
    """Train with the options. argv: the command line. started: when it started, in `time.monotonic`.

    Raises InputError, ValueError, OSError and RuntimeError on bad input.
    """
    import torch

    from drafters.estimate import describe, measured_flops
    from engine.target import Runtime
    from kernels.tp import local_device, process_group
    from training.processes import RANK_TIMEOUT, ProcessGroup
    from training.session import Session

    # Denormals take a third of a step on Intel's processors. Threads that start later inherit the setting.
    torch.set_flush_denormal(argv == sys.argv[1:])  # not in a process that calls `main`
    runtime = Runtime(local_device(Runtime(args.device).device_name), compile=False)
    runtime.prepare()
    session = Session(args, argv, started)
    if args.estimate:
        count = args.synthesize + len(session.prompts)
        log_stderr(f"timing matrix products for {MEASUREMENT_SECONDS} seconds ...")
        flops = measured_flops(runtime.device, MEASUREMENT_SECONDS)
        print(describe(session.config, count, args.max_new_tokens, args.epochs, flops))
        return
    if not is_distributed():
        session.run(ProcessGroup(), runtime.device)
        return
    with process_group(runtime.device, reply_timeout=RANK_TIMEOUT) as ranks:
        target_ranks = ranks if args.shard_target else None
        session.run(ProcessGroup(ranks.rank, ranks.count, target_ranks), runtime.device)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return the exit status, see `common.cli.run_command`."""
    words, started = sys.argv[1:] if argv is None else argv, time.monotonic()
    with announced("importing PyTorch"):
        options = parser()
    # PyTorch raises RuntimeError when memory runs out.
    return command(options, argv, lambda args: run(args, words, started), OSError, ValueError, RuntimeError,
                   interrupted="\ninterrupted; run the same command to resume")


if __name__ == "__main__":
    sys.exit(main())
