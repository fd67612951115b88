"""Train a draft head for a converted target, from nothing but the target.

    python train.py --checkpoint checkpoints/smollm2-135m --synthesize 2000 --out runs/my-head
    python train.py --checkpoint DIR --prompts prompts.jsonl --conversations sharegpt.json --out runs/my-head
    torchrun --nproc-per-node 8 train.py --checkpoint DIR --prompts prompts.jsonl --out runs/my-head

1. Text. The target answers the prompts of a file (--prompts), its own user turns (--synthesize), or conversations are taken
   as they are (--conversations); all may be given. Shards go to WORK/data, and only the answers are learnt.
2. Training. EAGLE-3 by training-time test over the most frequent answer tokens (arXiv 2503.01840); with --kind eagle EAGLE-1/2
   by feature regression (arXiv 2401.15077); with --kind medusa or hydra those, distilled over the same tokens. After every
   epoch the real decoder drafts for held-out prompts.
3. --out is a Hugging Face folder with a model card that convert_checkpoint.py, SGLang and vLLM read.

Every part goes on where it stopped, also after a kill. The same run on one process or many has the same
gradients.
"""
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from checkpoint.export import LAYOUTS
from common.cli import count, note, positive
from common.errors import InputError
from engine.runtime import check_compiler, check_device
from training.processes import Processes
from training.session import check_out, run
from training.trainer import SHORT
from tree import PAPER_TREE, TreeShape


def tree(value: str) -> TreeShape:
    """An argparse type: nodes,depth,width."""
    try:
        return TreeShape.parse(value)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{value!r} is no tree of nodes,depth,width ({e})") from None


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", required=True, help="converted target")
    p.add_argument("--out", required=True, help="folder for the head, in Hugging Face layout")
    p.add_argument("--work", help="text, state, log and curves (default: OUT-work)")
    p.add_argument(
        "--kind", choices=("eagle3", "eagle", "medusa", "hydra"), default="eagle3",
        help="EAGLE-3 (default), EAGLE-1/2, Medusa, Hydra"
    )
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16",
        help="of the target; the head's weights are float32"
    )
    p.add_argument("--seed", type=count, default=0)

    g = p.add_argument_group("text")
    g.add_argument(
        "--prompts", metavar="FILE", help="user turns for the target to answer: JSON lines, see dataset.py"
    )
    g.add_argument("--limit", type=positive, metavar="N", help="only N of them, drawn with --seed")
    g.add_argument(
        "--synthesize", type=count, default=0, metavar="N",
        help="N conversations of which the target writes both parts"
    )
    g.add_argument(
        "--turns", type=positive, default=1, metavar="N", help="user turns in each of them (default 1)"
    )
    g.add_argument(
        "--openings", metavar="FILE", help="their first user turns begin with these lines, in turns"
    )
    g.add_argument(
        "--conversations", metavar="FILE",
        help="conversations to take as they are: ShareGPT or OpenAI messages"
    )
    g.add_argument(
        "--shards", action="append", default=[], metavar="FOLDER",
        help="text of an earlier run for this target (its WORK/data)"
    )
    g.add_argument("--temperature", type=float, default=0.7, help="of the answers; 0 is greedy (default 0.7)")
    g.add_argument("--max-new-tokens", type=positive, default=256, help="per answer")
    g.add_argument("--max-prompt-tokens", type=positive, default=256, help="longer prompts are left out")
    g.add_argument("--max-len", type=positive, default=1024, help="conversations are cut to this many tokens")
    g.add_argument("--decode-batch", type=positive, default=48, help="answers decoded together")
    g.add_argument("--collect-only", action="store_true", help="stop when the text is written")

    g = p.add_argument_group("head")
    g.add_argument(
        "--draft-vocab", type=positive, default=8192,
        help="ids it drafts from, the most frequent (default 8192; EAGLE-1: all)"
    )
    g.add_argument(
        "--guesses", type=positive, metavar="K", help="Medusa, Hydra: tokens guessed ahead (default 4)"
    )
    g.add_argument(
        "--blocks", type=positive, metavar="N",
        help="Medusa, Hydra: residual blocks of each guess (default 1)"
    )
    g.add_argument(
        "--prefix", action=argparse.BooleanOptionalAction,
        help="Hydra: with a layer of its own, Hydra++ (default)"
    )
    for name, what in (
        ("hidden-size", "width"), ("intermediate-size", "width of its MLP"), ("heads", "query heads"),
        ("kv-heads", "key/value heads"),
        ("head-dim", "size of a head"),
    ):
        g.add_argument(f"--{name}", type=positive, metavar="N", help=f"{what} (default: the target's)")

    g = p.add_argument_group("training")
    g.add_argument("--steps", type=positive, default=7, help="EAGLE-3: unrolled draft steps (default 7)")
    g.add_argument(
        "--noise", type=float, default=0.1,
        help="EAGLE-1: half-width of the noise on features, by their size (default 0.1)"
    )
    g.add_argument("--epochs", type=positive, default=4)
    g.add_argument(
        "--short-epochs", type=count, default=0,
        help=f"how many of them, the first, unroll {SHORT} steps only (faster)"
    )
    g.add_argument("--lr", type=float, default=1e-3)
    g.add_argument(
        "--schedule", choices=("cosine", "linear", "constant"), default="cosine", help="down to a tenth"
    )
    g.add_argument("--warmup", type=float, default=0.03, help="share of the run (default 0.03)")
    g.add_argument("--clip", type=float, default=0.5, help="norm of the gradient (default 0.5)")
    g.add_argument("--weight-decay", type=float, default=0.01)
    g.add_argument(
        "--ema", type=float, default=0.0, metavar="KEEP",
        help="train an average of the weights, 0.999 say (default 0: none)"
    )
    g.add_argument(
        "--batch-tokens", type=positive, default=1024,
        help="padded tokens per optimizer step, over all processes"
    )
    g.add_argument(
        "--micro-tokens", type=positive,
        help="most of them computed at once; gradients are accumulated (default: all)"
    )
    g.add_argument("--cache-features", nargs="?", const="", metavar="FOLDER",
                   help="compute the target's features once, to disk (default WORK/features); later runs on the same text find them")
    g.add_argument(
        "--feature-memory", type=float, default=6, metavar="GB",
        help="else keep so much of them in memory (default 6)"
    )
    g.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True,
        help="compile the decoder of the answers"
    )
    g.add_argument(
        "--compile-loss", action=argparse.BooleanOptionalAction,
        help="compile the loss too (default: on CUDA)"
    )
    g.add_argument(
        "--log-every", type=positive, default=10, help="optimizer steps between entries of WORK/log.jsonl"
    )
    g.add_argument("--save-seconds", type=float, default=300)

    g = p.add_argument_group("validation and export")
    g.add_argument(
        "--validate-prompts", type=count, default=16,
        help="held-out prompts decoded after every epoch (default 16)"
    )
    g.add_argument("--validate-tokens", type=positive, default=64, help="new tokens of each")
    g.add_argument(
        "--tree", type=tree, default=PAPER_TREE, metavar="T,D,K", help="of the validation (default 60,7,10)"
    )
    g.add_argument(
        "--layout", choices=(*LAYOUTS, "both"), default="sglang",
        help="of --out; both: speculators in OUT/speculators"
    )
    return p


def check_options(o) -> None:
    """Raise InputError on options that cannot work, before anything slow is done."""
    check_out(Path(o.out), o.kind, Path(o.work))
    if Path(o.work).resolve().is_relative_to(Path(o.out).resolve()):
        raise InputError(f"--work {o.work}: is --out or lies in it; they need a folder each")
    if o.validate_tokens < 2:
        raise InputError(
            f"--validate-tokens {o.validate_tokens}: must be at least 2, the first token is never drafted"
        )
    for folder in (o.out, o.work):
        place = Path(folder).absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise InputError(f"{folder}: not a folder that can be written to")
    if o.cache_features and Path(o.cache_features).exists() and not Path(o.cache_features).is_dir():
        raise InputError(f"--cache-features {o.cache_features}: is no folder")
    if not (o.prompts or o.synthesize or o.conversations or o.shards):
        raise InputError(
            "nothing to train on: give --prompts FILE, --synthesize N, --conversations FILE, --shards FOLDER or several"
        )
    for name, low, high in (
        ("temperature", 0, 1e6), ("warmup", 0, 0.9), ("ema", 0, 0.99999), ("noise", 0, 1e3),
        ("weight_decay", 0, 1)
    ):
        if not low <= getattr(o, name) <= high:
            raise InputError(f"--{name.replace('_', '-')} {getattr(o, name)}: must be {low} to {high:g}")
    for name in ("lr", "clip"):
        if not 0 < getattr(o, name) < 1e6:
            raise InputError(f"--{name} {getattr(o, name)}: must be above 0")
    if o.kind != "eagle3" and o.layout != "sglang":
        raise InputError(f"--layout {o.layout}: is for EAGLE-3 heads only")
    if o.kind in ("medusa", "hydra") and any(
        (o.hidden_size, o.intermediate_size, o.heads, o.kv_heads, o.head_dim)
    ):
        raise InputError(f"--kind {o.kind}: has the target's width; leave out --hidden-size and the like")
    idle = [
        ("limit", o.limit and not o.prompts, "--prompts"),
        ("turns", o.turns != 1 and not o.synthesize, "--synthesize")
    ]
    idle += [("openings", o.openings and not o.synthesize, "--synthesize")]
    idle += [("prefix", o.prefix is not None and o.kind != "hydra", "--kind hydra")]
    idle += [
        (name, getattr(o, name) and o.kind not in ("medusa", "hydra"), "--kind medusa and hydra")
        for name in ("guesses", "blocks")
    ]
    for name, useless, belongs in idle:
        if useless:
            raise InputError(f"--{name}: belongs to {belongs}; leave it out")
    if o.short_epochs > o.epochs:
        raise InputError(f"--short-epochs {o.short_epochs}: there are {o.epochs} epochs")
    check_device(o.device)
    on_cpu = torch.device(o.device).type == "cpu"
    if o.compile_loss is None:
        # On a CPU the products are nearly all of the time, and compiling takes minutes.
        o.compile_loss = not on_cpu
    if on_cpu and (o.compile or o.compile_loss):
        check_compiler()


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 1 with a one-line error, 130 when interrupted."""
    command = sys.argv[1:] if argv is None else argv
    o = parser().parse_args(argv)
    o.work = o.work or o.out.rstrip("/") + "-work"
    processes = Processes()
    try:
        check_options(o)
        processes = Processes.from_environment(o.device)
        if processes.count > 1 and o.device == "cuda":
            o.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
            torch.cuda.set_device(o.device)
        run(o, processes, command)
    # Torch raises RuntimeError when memory runs out.
    except (InputError, OSError, ValueError, RuntimeError) as e:
        note(f"error: {' '.join(str(e).split())}")
        return 1
    except KeyboardInterrupt:
        note("\nstopped; run the same command to go on")
        return 130
    finally:
        processes.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
