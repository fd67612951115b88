"""Train a draft head for a converted target, from nothing but the target.

    python train.py --checkpoint checkpoints/smollm2-135m --synthesize 2000 --out runs/my-head
    python train.py --checkpoint DIR --prompts prompts.jsonl --conversations sharegpt.json --out runs/my-head
    torchrun --nproc-per-node 8 train.py --checkpoint DIR --prompts prompts.jsonl --out runs/my-head

1. Text. The target answers the prompts of a file (--prompts) or user turns that it writes itself
   (--synthesize), or conversations are taken as they are (--conversations). All may be given. Shards go to
   WORK/data, and only the answers are learnt.
2. Training. EAGLE-3 by training-time test over the most frequent answer tokens (arXiv 2503.01840). With
   --kind p-eagle, dflash or dspark, heads that draft a block in one pass (arXiv 2602.01469, 2602.06036,
   2607.05147). With --kind eagle, EAGLE-1/2 by feature regression (arXiv 2401.15077). With --kind medusa or
   hydra, those by distillation. After every epoch the real decoder drafts for held-out prompts.
3. Export. OUT is a Hugging Face folder with a model card, which convert_checkpoint.py, SGLang and vLLM read.

Every step goes on where it stopped, also after a kill. The same run on one process or on several has the same
gradients.
"""
from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

# Nothing here imports torch before it is needed: --help and mistakes answer at once.
from checkpoint.folder import check_exact, read_config
from checkpoint.heads import LAYOUTS
from common.cli import Options, check_folder, check_replaceable, command, count, dtype, positive, seed
from common.errors import InputError
from common.schema import Wrong
from common.torchrun import one_voice, several
from common.tree_shapes import PAPER_TREE, TreeShape
from drafters.tree_spec import within_limits
from tokens.dataset import check_dataset, read_chats, read_conversations, read_openings
from training.choices import (
    BLOCK_KINDS,
    DRAFT_VOCAB,
    KINDS,
    LOSSES,
    MULTI_TOKEN,
    OPTIMIZERS,
    SHORTEST,
    check_start,
)
from training.corpus import check_shards
from training.layouts import layout_of
from training.out import check_out
from training.plan import SHORT
from training.shapes import head_sizes, shape_of


def tree(value: str) -> TreeShape:
    """An argparse type: nodes,depth,width."""
    try:
        return within_limits(TreeShape.parse(value))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{value!r} is no tree of nodes,depth,width ({e})") from None


def work_of(o: argparse.Namespace) -> str:
    """The folder of --work, or the one used without it."""
    return o.work or o.out.rstrip("/") + "-work"


def parser() -> Options:
    """The options of the command line, each with its rules."""
    p = Options(__doc__)
    add, refuse, within, on_off = p.add_argument, p.refuse, p.within, argparse.BooleanOptionalAction

    def above_zero(flag: str) -> None:
        refuse(lambda o: not 0 < getattr(o, flag) < 1e6,
               lambda o: f"--{flag} {getattr(o, flag)}: must be above 0 and below 1,000,000")

    def belongs(flag: str, to: str, test) -> None:
        refuse(test, lambda o: f"{flag}: belongs to {to}; leave it out")

    add("--checkpoint", required=True, help="converted target")
    add("--out", required=True, help="folder for the head, in Hugging Face layout")
    add("--work", help="text, state, log and curves (default: OUT-work)")
    refuse(lambda o: Path(work_of(o)).resolve().is_relative_to(Path(o.out).resolve()),
           lambda o: f"--out {o.out}: --work {work_of(o)} is the same or lies in it; they need a folder each")
    p.judge(lambda o: check_replaceable("--out", o.out))
    p.judge(lambda o: check_folder("--work", work_of(o)))
    add("--kind", choices=KINDS, default="eagle3",
        help="EAGLE-3 (default), P-EAGLE, DFlash, DSpark, EAGLE-1/2, Medusa, Hydra")
    add("--device", help="default: cuda if there is one, else cpu")
    p.judge_device()
    add("--dtype", type=dtype, choices=("bf16", "fp32"), default="bf16",
        help="of the target, also by PyTorch's names; the head's weights are float32")
    add("--seed", type=seed, default=0, help="64 bits count, so that -1 is 2^64 - 1 (default 0)")

    add = p.add_argument_group("text").add_argument
    add("--prompts", metavar="FILE",
        help="user turns for the target to answer: JSON lines, see tokens/dataset.py")
    add("--limit", type=positive, metavar="N", help="only N of them, drawn with --seed")
    belongs("--limit", "--prompts", lambda o: o.limit and not o.prompts)
    add("--synthesize", type=count, default=0, metavar="N",
        help="N conversations of which the target writes both parts")
    add("--turns", type=positive, default=1, metavar="N", help="user turns in each of them (default 1)")
    within("--turns", 1, 1000)
    belongs("--turns", "--synthesize", lambda o: o.turns != 1 and not o.synthesize)
    add("--openings", metavar="FILE", help="their first user turns begin with these lines, in turns")
    belongs("--openings", "--synthesize", lambda o: o.openings and not o.synthesize)
    add("--conversations", metavar="FILE",
        help="conversations to take as they are: ShareGPT or OpenAI messages")
    add("--shards", action="append", default=[], metavar="FOLDER",
        help="text of an earlier run for this target (its WORK/data)")
    refuse(lambda o: not (o.prompts or o.synthesize or o.conversations or o.shards),
           lambda o: "nothing to train on: give --prompts FILE, --synthesize N, --conversations FILE,"
           " --shards FOLDER or several")
    add("--temperature", type=float, default=0.7, help="of the answers; 0 is greedy (default 0.7)")
    within("--temperature", 0, 1_000_000)
    add("--max-new-tokens", type=positive, default=256, help=f"per answer ({SHORTEST} or more)")
    within("--max-new-tokens", SHORTEST, float("inf"))
    add("--max-prompt-tokens", type=positive, default=256, help="longer prompts are left out")
    add("--max-len", type=positive, default=1024, help="conversations are cut to this many tokens")
    within("--max-len", SHORTEST + 1, float("inf"))  # a prompt and an answer
    add("--decode-batch", type=positive, default=48, help="answers decoded together")
    within("--decode-batch", 1, 4096)
    add("--writer", metavar="CHECKPOINT",
        help="a quantised copy of the target that writes the text: nearly the same text, sooner")
    add("--queue", choices=("torchrun", "ray"), default="torchrun",
        help="who takes shards of text to write: torchrun's processes (default), or actors of Ray Data, which"
        " needs the package ray[data]")
    refuse(lambda o: o.queue == "ray" and several(),
           lambda o: "--queue ray: Ray starts the processes; leave out torchrun")
    add("--actors", type=positive, metavar="N", help="with --queue ray: how many write (default 1)")
    belongs("--actors", "--queue ray", lambda o: o.actors and o.queue != "ray")
    add("--collect-only", action="store_true", help="stop when the text is written")

    add = p.add_argument_group("head").add_argument
    add("--start", metavar="HEAD",
        help="a converted head to begin with, EAGLE-3, P-EAGLE, DFlash or DSpark: its sizes and its"
        " weights; a P-EAGLE head may begin as an EAGLE-3 head")
    refuse(lambda o: o.start and o.kind not in ("eagle3", *BLOCK_KINDS),
           lambda o: f"--start {o.start}: not for --kind {o.kind}; leave it out")
    own = "states", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim"
    refuse(lambda o: o.start and any(getattr(o, name) for name in own),
           lambda o: f"--start {o.start}: its sizes and states are taken; leave out"
           " --states, --hidden-size and the like")
    add("--draft-vocab", type=positive,
        help="ids it drafts from, the most frequent (default 8192, or those of --start; EAGLE-1: all)")
    add("--guesses", type=positive, metavar="K", help="Medusa, Hydra: tokens guessed ahead (default 4)")
    add("--blocks", type=positive, metavar="N",
        help="Medusa, Hydra: residual blocks of each guess (default 1)")
    within("--guesses", 1, 64)
    within("--blocks", 1, 64)
    belongs("--guesses", "--kind medusa and hydra", lambda o: o.guesses and o.kind not in MULTI_TOKEN)
    belongs("--blocks", "--kind medusa and hydra", lambda o: o.blocks and o.kind not in MULTI_TOKEN)
    add("--prefix", action=on_off, help="Hydra: with a layer of its own, Hydra++ (default)")
    belongs("--prefix", "--kind hydra", lambda o: o.prefix is not None and o.kind != "hydra")
    block = "--kind p-eagle, dflash and dspark"
    add("--layers", type=positive, metavar="N", help="P-EAGLE, DFlash, DSpark: layers (default 1)")
    belongs("--layers", block, lambda o: o.layers and o.kind not in BLOCK_KINDS)
    add("--drafts", type=positive, metavar="N",
        help="P-EAGLE, DFlash, DSpark: tokens that are drafted in a pass (default 7)")
    p.within("--drafts", 1, 64)
    belongs("--drafts", block, lambda o: o.drafts and o.kind not in BLOCK_KINDS)
    add("--states", type=positive, metavar="N",
        help="states of the target that it reads (default 5, EAGLE-3 and P-EAGLE 3)")
    belongs("--states", "other kinds", lambda o: o.states and o.kind in ("eagle", *MULTI_TOKEN))
    add("--markov-rank", type=count, metavar="R",
        help="of the Markov head; 0 is none (default 128 for DSpark, else 0)")
    p.within("--markov-rank", 0, 4096)
    belongs("--markov-rank", block, lambda o: o.markov_rank and o.kind not in BLOCK_KINDS)
    refuse(lambda o: o.markov_rank and o.kind == "dflash",
           lambda o: f"--markov-rank {o.markov_rank}: a DFlash head with a Markov head is one of DSpark; take"
                     " --kind dspark")
    add("--confidence", action=on_off,
        help="a head that says how often a draft is accepted (default: with a Markov head)")
    belongs("--confidence", block, lambda o: o.confidence is not None and o.kind not in BLOCK_KINDS)
    for flag, what in (
        ("--hidden-size", "width"), ("--intermediate-size", "width of its MLP"), ("--heads", "query heads"),
        ("--kv-heads", "key/value heads"), ("--head-dim", "size of a head"),
    ):
        add(flag, type=positive, metavar="N", help=f"{what} (default: the target's)")
    refuse(lambda o: o.kind in MULTI_TOKEN
           and any((o.hidden_size, o.intermediate_size, o.heads, o.kv_heads, o.head_dim)),
           lambda o: f"--kind {o.kind}: has the target's width; leave out --hidden-size and the like")

    add = p.add_argument_group("training").add_argument
    add("--steps", type=positive, default=7, help="EAGLE-3: unrolled draft steps (default 7)")
    within("--steps", 1, 64)
    belongs("--steps", "--kind eagle3", lambda o: o.steps != 7 and o.kind != "eagle3")
    add("--loss", choices=LOSSES, default="ce",
        help="ce: cross-entropy with the target's distribution (default). lk: how often a draft is accepted"
        " by rejection. coupled: how often by the rule of this decoder, where both draw with one noise")
    add("--ce-share", type=float, default=0.1,
        help="what cross-entropy counts beside lk or coupled (default 0.1)")
    within("--ce-share", 0, 1)
    belongs("--ce-share", "--loss lk and coupled", lambda o: o.ce_share != 0.1 and o.loss == "ce")
    refuse(lambda o: o.loss != "ce" and o.kind == "eagle",
           lambda o: f"--loss {o.loss}: EAGLE-1 learns the target's features; leave it out")
    add("--learn", choices=("answers", "text"), default="answers",
        help="answers: what the target says of its answers (default). text: also of the user's words, for"
        " which its states are computed anyway")
    add("--anchors", type=float, default=0.5, metavar="SHARE",
        help="P-EAGLE, DFlash, DSpark: share of the positions of an answer that blocks are drafted from,"
        " drawn anew in every epoch (default 0.5)")
    within("--anchors", 0.001, 1)
    belongs("--anchors", block, lambda o: o.anchors != 0.5 and o.kind not in BLOCK_KINDS)
    add("--keep", type=float, default=0.7, metavar="SHARE",
        help="P-EAGLE: share of the chains of a draft step that go on to the next (default 0.7)")
    within("--keep", 0.01, 1)
    belongs("--keep", "--kind p-eagle", lambda o: o.keep != 0.7 and o.kind != "p-eagle")
    add("--noise", type=float, default=0.1,
        help="EAGLE-1: half-width of the noise on features, by their size (default 0.1)")
    within("--noise", 0, 1000)
    add("--epochs", type=positive, default=4)
    add("--minutes", type=float, default=0.0, metavar="M",
        help="end after M minutes of training, if the epochs take longer (0: they are all done)")
    within("--minutes", 0, 1_000_000)
    add("--short-epochs", type=count, default=0,
        help=f"how many of them, the first, unroll {SHORT} steps only (faster)")
    refuse(lambda o: o.short_epochs > o.epochs,
           lambda o: f"--short-epochs {o.short_epochs}: there are {o.epochs} epochs")
    add("--optimizer", choices=OPTIMIZERS, default="adamw",
        help="adamw (default), or muon: orthogonal steps for the matrices between hidden states, AdamW for"
        " the rest")
    add("--lr", type=float, default=1e-3)
    above_zero("lr")
    add("--schedule", choices=("cosine", "linear", "constant"), default="cosine", help="down to a tenth")
    add("--warmup", type=float, default=0.03, help="share of the run (default 0.03)")
    within("--warmup", 0, 0.9)
    add("--clip", type=float, default=0.5, help="norm of the gradient (default 0.5)")
    above_zero("clip")
    add("--weight-decay", type=float, default=0.01)
    within("--weight-decay", 0, 1)
    add("--ema", type=float, default=0.0, metavar="KEEP",
        help="train an average of the weights, 0.999 say (default 0: none)")
    within("--ema", 0, 0.99999)
    add("--batch-tokens", type=positive, default=1024,
        help="padded tokens per optimizer step, over all processes")
    add("--micro-tokens", type=positive,
        help="most of them computed at once; gradients are accumulated (default: all)")
    add("--checkpoint-gradients", action="store_true",
        help="EAGLE-3: keep of each unrolled step its output only and compute it again for the gradient: less"
        " memory, more time")
    belongs("--checkpoint-gradients", "--kind eagle3",
            lambda o: o.checkpoint_gradients and o.kind != "eagle3")
    refuse(lambda o: o.checkpoint_gradients and o.compile_loss,
           lambda o: "--checkpoint-gradients: runs without --compile-loss; leave one out")
    add("--cache-features", nargs="?", const="", metavar="FOLDER",
        help="compute the target's features once, to disk (default WORK/features); later runs on the same"
        " text find them")
    p.judge(lambda o: o.cache_features and check_folder("--cache-features", o.cache_features))
    add("--reader", metavar="CHECKPOINT",
        help="a quantised copy of the target that computes them: nearly the same, sooner")
    add("--feature-memory", type=float, default=6, metavar="GB",
        help="else keep so much of them in memory (default 6)")
    add("--target-ranks", type=positive, default=1, metavar="N",
        help="with torchrun: each N processes that follow each other hold one target together, every layer"
        " dealt among them; the head is whole in each (default 1: the target too)")
    refuse(lambda o: o.target_ranks > 1 and "WORLD_SIZE" not in os.environ,
           lambda o: f"--target-ranks {o.target_ranks}: needs several processes; start with torchrun"
           f" --nproc-per-node {o.target_ranks}")
    add("--compile", action=on_off, default=True, help="compile the decoder of the answers")
    add("--compile-loss", action=on_off, help="compile the loss too (default: on CUDA)")
    add("--log-every", type=positive, default=10, help="optimizer steps between entries of WORK/log.jsonl")
    add("--save-seconds", type=float, default=300)
    within("--feature-memory", 0, 1_000_000)
    within("--save-seconds", 0, 1_000_000)

    add = p.add_argument_group("validation and export").add_argument
    add("--validate-prompts", type=count, default=16,
        help="held-out prompts decoded after every epoch (default 16)")
    add("--validate-tokens", type=positive, default=64,
        help="new tokens of each, 2 or more: the first is never drafted (default 64)")
    within("--validate-tokens", 2, float("inf"))
    add("--tree", type=tree, default=PAPER_TREE, metavar="T,D,K", help="of the validation (default 60,7,10)")
    add("--layout", choices=(*LAYOUTS, "both"),
        help="of --out (default sglang; for DFlash and DSpark speculators, which alone has a place for draft"
        " vocabularies of theirs); both: sglang, and speculators in OUT/speculators")
    refuse(lambda o: o.kind not in ("eagle3", *BLOCK_KINDS) and o.layout not in (None, "sglang"),
           lambda o: f"--layout {o.layout}: has no place for a head of --kind {o.kind}")
    return p


# The options that choose the sizes of a head.
FLAGS = {
    "hidden_size": "--hidden-size", "intermediate_size": "--intermediate-size", "num_heads": "--heads",
    "num_kv_heads": "--kv-heads", "head_dim": "--head-dim", "num_layers": "--layers",
}


def judge(o: argparse.Namespace) -> None:
    """Judge what the options name, all that needs no torch. Raises InputError, ValueError on a shape."""
    config = read_config(o.checkpoint, "target")
    check_out(Path(o.out), o.kind, Path(work_of(o)))
    check_exact(o.checkpoint, config)
    for flag, folder in (("--writer", o.writer), ("--reader", o.reader)):
        if folder:
            check_copy(f"{flag} {folder}", read_config(folder, "target", flag), o.checkpoint, config)
    start = read_config(o.start, what="--start") if o.start else {}
    if start:
        check_start(start["kind"], o.kind)
        judge_start(o, start)
    elif o.kind not in MULTI_TOKEN:
        judge_shape(o, config)
    if o.draft_vocab and o.draft_vocab > config["vocab_size"]:
        raise InputError(f"--draft-vocab {o.draft_vocab}: the target has {config['vocab_size']} token ids")
    begins = start.get("draft_vocab_size")  # which is judged when the head is read
    begins = begins if isinstance(begins, int) else min(DRAFT_VOCAB, config["vocab_size"])
    size = o.draft_vocab or begins
    layout_of(o.layout, o.kind, {**start, "draft_vocab_size": size}, config["vocab_size"])
    room, longest = o.max_prompt_tokens + o.max_new_tokens, config["max_seq_len"]
    if (o.prompts or o.synthesize) and room > longest:
        raise InputError(
            f"--max-prompt-tokens {o.max_prompt_tokens} and --max-new-tokens {o.max_new_tokens} are {room}"
            f" together, the target's context is {longest}"
        )
    for flag, read in (
        ("--prompts", read_chats), ("--openings", read_openings), ("--conversations", read_conversations)
    ):
        if path := getattr(o, flag.removeprefix("--")):
            check_dataset(flag, path, read)
    if o.queue == "ray" and find_spec("ray") is None:
        raise InputError('--queue ray: the package ray is not installed; pip install "ray[data]", or leave it'
                         " out and start with torchrun")
    for folder in o.shards:
        if not Path(folder).is_dir():
            raise InputError(f"--shards {folder}: not a folder")
        check_shards(Path(folder), config["vocab_size"])


def check_copy(what: str, copy: dict, checkpoint: str, config: dict) -> None:
    """Raise InputError if `copy` is not the config of a quantised copy of the target with `config`."""
    sizes = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"
    for key in (*sizes, "head_dim", "stop_ids"):
        if copy[key] != config[key]:
            raise InputError(
                f"{what}: no copy of {checkpoint}: its {key} is {copy[key]}; expected {config[key]}"
            )


def judge_start(o: argparse.Namespace, start: dict) -> None:
    """Raise InputError if an option takes away what the head of --start has. start: its config.json."""
    layers = start.get("num_layers")
    if o.layers and isinstance(layers, int) and o.layers < layers:
        raise InputError(f"--layers {o.layers}: the head of --start has {layers}, and keeps them")
    if o.markov_rank == 0 and start.get("markov_rank"):
        raise InputError("--markov-rank 0: the head of --start has a Markov head, and keeps it; leave it out")
    if o.confidence is False and start.get("confidence"):
        raise InputError("--no-confidence: the head of --start has a confidence head, and keeps it")


def judge_shape(o: argparse.Namespace, config: dict) -> None:
    """Raise ValueError if there can be no head of this shape for a target of this config.json."""
    try:
        head_sizes(config, o.kind, shape_of(o))
    except Wrong as e:
        raise ValueError(f"{FLAGS[e.key]}: {e}") from None


def run(o: argparse.Namespace, words: list[str]) -> None:
    """Do what the options say. words: the command line.

    Raises InputError, ValueError, OSError and RuntimeError on bad input.
    """
    judge(o)

    from common.threads import use_threads
    from engine.runtime import Runtime
    from kernels.ranks import is_loss
    from training.processes import Processes
    from training.session import Session, check_machine

    use_threads()
    o.work, o.device = work_of(o), o.device or Runtime().device_name
    check_machine(o)
    processes = Processes.from_environment(o.device, o.target_ranks)
    o.device = processes.own_device(o.device)
    try:
        Session(o, processes).run(words)
    except RuntimeError as e:
        if processes.count == 1 or not is_loss(e):
            raise
        raise InputError(
            f"process {processes.rank} of {processes.count} has lost another one, so all end; run the same"
            " command again to go on"
        ) from None
    processes.leave()  # not after an error: others may wait for this one, and leaving would wait for them


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    words = sys.argv[1:] if argv is None else argv
    with one_voice() as voices:
        # PyTorch raises RuntimeError when memory runs out.
        return command(
            parser(), argv, lambda o: run(o, words), OSError, ValueError, RuntimeError,
            interrupted="\nstopped; run the same command to go on", **voices,
        )


if __name__ == "__main__":
    sys.exit(main())
