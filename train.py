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

Every part goes on where it stopped, also after a kill. The same run on one process or many has the same gradients.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import torch

from checkpoint import identity, load_target
from dataset import read_chats, read_conversations
from decoder import Decoder
from errors import CheckpointError
from export import ARCHITECTURES, LAYOUTS, PARTS, export
from model import Transformer
from text import DTYPES, check_compiler, check_device
from tokenizer import Tokenizer
from training import corpus
from training.card import write_card
from training.collect import Collector
from training.features import Features, StoredFeatures
from training.new_head import Shape, head_args, new_guesser, new_head
from training.objective import Eagle1Objective, Eagle3Objective, GuessObjective
from training.processes import Processes
from training.trainer import SHORT, Plan, Trainer
from training.validate import Validator, decoding_copy
from tree import PAPER_TREE, TreeShape


def positive(value: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not value.isdecimal() or not 1 <= int(value) < 2**63:
        raise argparse.ArgumentTypeError(f"{value!r} is no whole number of at least 1 (and below 2^63)")
    return int(value)


def count(value: str) -> int:
    """An argparse type: a whole number of at least 0."""
    return 0 if value == "0" else positive(value)


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
        "--kind", choices=("eagle3", "eagle", "medusa", "hydra"), default="eagle3", help="EAGLE-3 (default), EAGLE-1/2, Medusa, Hydra"
    )
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the target; the head's weights are float32")
    p.add_argument("--seed", type=count, default=0)

    g = p.add_argument_group("text")
    g.add_argument("--prompts", metavar="FILE", help="user turns for the target to answer: JSON lines, see dataset.py")
    g.add_argument("--limit", type=positive, metavar="N", help="only N of them, drawn with --seed")
    g.add_argument("--synthesize", type=count, default=0, metavar="N", help="N conversations of which the target writes both parts")
    g.add_argument("--turns", type=positive, default=1, metavar="N", help="user turns in each of them (default 1)")
    g.add_argument("--openings", metavar="FILE", help="their first user turns begin with these lines, in turns")
    g.add_argument("--conversations", metavar="FILE", help="conversations to take as they are: ShareGPT or OpenAI messages")
    g.add_argument("--shards", action="append", default=[], metavar="FOLDER", help="text of an earlier run for this target (its WORK/data)")
    g.add_argument("--temperature", type=float, default=0.7, help="of the answers; 0 is greedy (default 0.7)")
    g.add_argument("--max-new-tokens", type=positive, default=256, help="per answer")
    g.add_argument("--max-prompt-tokens", type=positive, default=256, help="longer prompts are left out")
    g.add_argument("--max-len", type=positive, default=1024, help="conversations are cut to this many tokens")
    g.add_argument("--decode-batch", type=positive, default=48, help="answers decoded together")
    g.add_argument("--collect-only", action="store_true", help="stop when the text is written")

    g = p.add_argument_group("head")
    g.add_argument("--draft-vocab", type=positive, default=8192, help="ids it drafts from, the most frequent (default 8192; EAGLE-1: all)")
    g.add_argument("--guesses", type=positive, metavar="K", help="Medusa, Hydra: tokens guessed ahead (default 4)")
    g.add_argument("--blocks", type=positive, metavar="N", help="Medusa, Hydra: residual blocks of each guess (default 1)")
    g.add_argument("--prefix", action=argparse.BooleanOptionalAction, help="Hydra: with a layer of its own, Hydra++ (default)")
    for name, what in (
        ("hidden-size", "width"), ("intermediate-size", "width of its MLP"), ("heads", "query heads"), ("kv-heads", "key/value heads"),
        ("head-dim", "size of a head"),
    ):
        g.add_argument(f"--{name}", type=positive, metavar="N", help=f"{what} (default: the target's)")

    g = p.add_argument_group("training")
    g.add_argument("--steps", type=positive, default=7, help="EAGLE-3: unrolled draft steps (default 7)")
    g.add_argument("--noise", type=float, default=0.1, help="EAGLE-1: half-width of the noise on features, by their size (default 0.1)")
    g.add_argument("--epochs", type=positive, default=4)
    g.add_argument("--short-epochs", type=count, default=0, help=f"how many of them, the first, unroll {SHORT} steps only (faster)")
    g.add_argument("--lr", type=float, default=1e-3)
    g.add_argument("--schedule", choices=("cosine", "linear", "constant"), default="cosine", help="down to a tenth")
    g.add_argument("--warmup", type=float, default=0.03, help="share of the run (default 0.03)")
    g.add_argument("--clip", type=float, default=0.5, help="norm of the gradient (default 0.5)")
    g.add_argument("--weight-decay", type=float, default=0.01)
    g.add_argument("--ema", type=float, default=0.0, metavar="KEEP", help="train an average of the weights, 0.999 say (default 0: none)")
    g.add_argument("--batch-tokens", type=positive, default=1024, help="padded tokens per optimizer step, over all processes")
    g.add_argument("--micro-tokens", type=positive, help="most of them computed at once; gradients are accumulated (default: all)")
    g.add_argument("--cache-features", nargs="?", const="", metavar="FOLDER",
                   help="compute the target's features once, to disk (default WORK/features); later runs on the same text find them")
    g.add_argument("--feature-memory", type=float, default=6, metavar="GB", help="else keep so much of them in memory (default 6)")
    g.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="compile the decoder of the answers")
    g.add_argument("--compile-loss", action=argparse.BooleanOptionalAction, help="compile the loss too (default: on CUDA)")
    g.add_argument("--log-every", type=positive, default=10, help="optimizer steps between entries of WORK/log.jsonl")
    g.add_argument("--save-seconds", type=float, default=300)

    g = p.add_argument_group("validation and export")
    g.add_argument("--validate-prompts", type=count, default=16, help="held-out prompts decoded after every epoch (default 16)")
    g.add_argument("--validate-tokens", type=positive, default=64, help="new tokens of each")
    g.add_argument("--tree", type=tree, default=PAPER_TREE, metavar="T,D,K", help="of the validation (default 60,7,10)")
    g.add_argument("--layout", choices=(*LAYOUTS, "both"), default="sglang", help="of --out; both: speculators in OUT/speculators")
    return p


def check_options(o) -> None:
    """Raise CheckpointError on options that cannot work, before anything slow is done."""
    check_out(Path(o.out), o.kind, Path(o.work))
    if Path(o.work).resolve().is_relative_to(Path(o.out).resolve()):
        raise CheckpointError(f"--work {o.work}: is --out or lies in it; they need a folder each")
    if o.validate_tokens < 2:
        raise CheckpointError(f"--validate-tokens {o.validate_tokens}: must be at least 2, the first token is never drafted")
    for folder in (o.out, o.work):
        place = Path(folder).absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise CheckpointError(f"{folder}: not a folder that can be written to")
    if o.cache_features and Path(o.cache_features).exists() and not Path(o.cache_features).is_dir():
        raise CheckpointError(f"--cache-features {o.cache_features}: is no folder")
    if not (o.prompts or o.synthesize or o.conversations or o.shards):
        raise CheckpointError("nothing to train on: give --prompts FILE, --synthesize N, --conversations FILE, --shards FOLDER or several")
    for name, low, high in (("temperature", 0, 1e6), ("warmup", 0, 0.9), ("ema", 0, 0.99999), ("noise", 0, 1e3), ("weight_decay", 0, 1)):
        if not low <= getattr(o, name) <= high:
            raise CheckpointError(f"--{name.replace('_', '-')} {getattr(o, name)}: must be {low} to {high:g}")
    for name in ("lr", "clip"):
        if not 0 < getattr(o, name) < 1e6:
            raise CheckpointError(f"--{name} {getattr(o, name)}: must be above 0")
    if o.kind != "eagle3" and o.layout != "sglang":
        raise CheckpointError(f"--layout {o.layout}: is for EAGLE-3 heads only")
    if o.kind in ("medusa", "hydra") and any((o.hidden_size, o.intermediate_size, o.heads, o.kv_heads, o.head_dim)):
        raise CheckpointError(f"--kind {o.kind}: has the target's width; leave out --hidden-size and the like")
    idle = [("limit", o.limit and not o.prompts, "--prompts"), ("turns", o.turns != 1 and not o.synthesize, "--synthesize")]
    idle += [("openings", o.openings and not o.synthesize, "--synthesize")]
    idle += [("prefix", o.prefix is not None and o.kind != "hydra", "--kind hydra")]
    idle += [(name, getattr(o, name) and o.kind not in ("medusa", "hydra"), "--kind medusa and hydra") for name in ("guesses", "blocks")]
    for name, useless, belongs in idle:
        if useless:
            raise CheckpointError(f"--{name}: belongs to {belongs}; leave it out")
    if o.short_epochs > o.epochs:
        raise CheckpointError(f"--short-epochs {o.short_epochs}: there are {o.epochs} epochs")
    check_device(o.device)
    on_cpu = torch.device(o.device).type == "cpu"
    if o.compile_loss is None:
        o.compile_loss = not on_cpu  # on a CPU the products are nearly all of the time, and compiling takes minutes
    if on_cpu and (o.compile or o.compile_loss):
        check_compiler()


def check_out(out: Path, kind: str, work: Path) -> None:
    """Raise CheckpointError unless `out` is free, holds what a cut off export left, or a head of this kind that was trained in `work`."""
    if not out.is_dir() or all(path.name in PARTS for path in out.iterdir()):
        return
    try:
        found = json.loads((out / "config.json").read_text())["architectures"][0]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        found = None
    if found not in ARCHITECTURES[kind]:
        raise CheckpointError(f"--out {out}: holds something else than a trained head of this kind; choose another folder")
    if not (work / "state.pt").exists():
        raise CheckpointError(f"--out {out}: holds a head that was not trained in --work {work}; choose another folder or delete it")


def read_openings(path: str) -> tuple[str, ...]:
    """The lines of a text file that are not empty. Raises CheckpointError if there are none."""
    try:
        lines = tuple(line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"--openings {path}: cannot be read ({e})") from None
    if not lines:
        raise CheckpointError(f"--openings {path}: holds no lines")
    return lines


def collect(o, target: Transformer, name: str, config: dict, processes: Processes) -> list[dict]:
    """The text: what is missing is written by `target`, whose identity is `name`, then all shards are read back."""
    # Everything a user gave is read before anything is decoded: a mistake shows at once.
    shards = [path for folder in o.shards for path in corpus.shards_in(Path(folder))]
    tell = say if processes.first else None
    prompts = read_chats(o.prompts, tell) if o.prompts else []
    prompts = list({json.dumps(messages): messages for messages in prompts}.values())  # without repeats
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(o.seed)).tolist()
    prompts = [prompts[i] for i in order][: o.limit]
    openings = read_openings(o.openings) if o.openings else ()
    conversations = read_conversations(o.conversations, tell) if o.conversations else []
    refusal = ""
    longest, room = target.args.max_seq_len, o.max_prompt_tokens + o.max_new_tokens
    if room > longest and (prompts or o.synthesize):
        raise CheckpointError(
            f"--max-prompt-tokens {o.max_prompt_tokens} and --max-new-tokens {o.max_new_tokens} are {room} together,"
            f" the target's context is {longest}"
        )
    if prompts or conversations or o.synthesize:
        tokenizer = Tokenizer.load(o.checkpoint)
        if tokenizer is None or not tokenizer.has_template:
            raise CheckpointError(f"{o.checkpoint}: chats need a tokenizer and a chat template, this folder lacks them")
        batch = o.decode_batch if prompts or o.synthesize else 1
        try:
            decoder = Decoder(target, batch=batch, max_seq_len=min(room, longest), stop_ids=config["stop_ids"], compile=o.compile, say=tell)
        except ValueError as e:
            raise CheckpointError(f"--decode-batch {batch} answers of up to {min(room, longest)} tokens: {e}") from None
        collector = Collector(
            decoder, tokenizer, Path(o.work) / "data", target=name, seed=o.seed, max_new_tokens=o.max_new_tokens,
            temperature=o.temperature, max_prompt_tokens=o.max_prompt_tokens, processes=processes,
        )
        collector.from_prompts(prompts)
        collector.synthesized(o.synthesize, o.turns, openings)
        collector.from_conversations(conversations)
        processes.wait()
        shards += collector.shards
        refusal = f" ({collector.refusal})" if collector.refusal else ""
    rows, left_out, cut = corpus.load_shards(shards, min(o.max_len, longest), target.args.vocab_size, name)
    reasons = f"empty, longer than --max-prompt-tokens {o.max_prompt_tokens}, refused by the chat template{refusal}"
    reasons += ", or a user turn that did not end"
    if left_out and tell:
        say(f"{left_out} prompts or conversations were left out: {reasons}")
    if cut and tell:
        say(f"{cut} conversations are cut to {min(o.max_len, longest)} tokens (--max-len)")
    if not rows:
        raise CheckpointError(
            f"no usable answers: {left_out} prompts or conversations were left out ({reasons}), and all answers are shorter than"
            f" {corpus.SHORTEST} tokens or behind --max-len {o.max_len}"
        )
    return rows


def say(line: str) -> None:
    """Everything but the last line goes to stderr."""
    print(line, file=sys.stderr, flush=True)


def shape_of(o) -> Shape:
    """What the options say about an EAGLE head."""
    return Shape(o.hidden_size, o.intermediate_size, o.heads, o.kv_heads, o.head_dim)


def objective_for(o, target: Transformer, draft_ids: torch.Tensor):
    """The head to train and its loss."""
    try:
        if o.kind in ("medusa", "hydra"):
            prefix = o.kind == "hydra" and o.prefix is not False
            guesser = new_guesser(target, o.kind, draft_ids, o.guesses or 4, o.blocks or 1, prefix, o.seed)
            return GuessObjective(target, guesser, o.compile_loss)
        head = new_head(target, o.kind, draft_ids, shape_of(o), o.seed)
    except ValueError as e:
        raise CheckpointError(str(e)) from None
    if o.kind == "eagle":
        return Eagle1Objective(target, head, o.compile_loss, o.noise)
    return Eagle3Objective(target, head, o.steps, o.compile_loss)


def run(o, processes: Processes, command: list[str]) -> None:
    """Collect, train, export. Raises CheckpointError and OSError on bad input."""
    target, config = load_target(o.checkpoint, o.device, DTYPES[o.dtype])
    if "quantization" in config:
        raise CheckpointError(f"{o.checkpoint}: a head is trained on the whole weights; name the checkpoint before quantisation")
    if o.kind in ("eagle", "eagle3"):
        try:
            head_args(target.args, o.kind, target.args.vocab_size, shape_of(o))  # before anything slow is done
        except ValueError as e:
            raise CheckpointError(str(e)) from None
    work, out = Path(o.work), Path(o.out)
    work.mkdir(parents=True, exist_ok=True)
    decoding = decoding_copy(target, say) if o.compile else target
    held_out, rows = corpus.hold_out(collect(o, decoding, identity(target), config, processes))
    if not rows:
        raise CheckpointError("fewer than two different prompts with usable answers: one is held out, none is left to train on")
    data = corpus.describe(rows, target.args.vocab_size)
    draft_ids, covered = torch.arange(target.args.vocab_size), 1.0
    if o.kind != "eagle":
        size = min(o.draft_vocab, target.args.vocab_size)
        draft_ids, covered = corpus.draft_vocabulary(corpus.counts_of(rows), size, target.args.vocab_size)
    if processes.first:
        say(corpus.report(data) + f"\n{len(held_out)} more conversations are held out; {len(draft_ids):,} draft ids cover {covered:.2%}")
        (work / "data.json").write_text(json.dumps(data, indent=1) + "\n")
    if o.collect_only:
        return

    objective = objective_for(o, target, draft_ids)
    if o.cache_features is not None:
        features = StoredFeatures(target, objective.aux_layers, Path(o.cache_features or work / "features"), processes)
        features.fill(rows + held_out, max(8192, o.batch_tokens))
    else:
        features = Features(target, objective.aux_layers, o.feature_memory * 2**30)
    chats = [list(ids) for ids in dict.fromkeys(tuple(row["ids"][: row["answers"][0][0]]) for row in held_out)][: o.validate_prompts]
    chats = [ids for ids in chats if len(ids) + o.validate_tokens <= target.args.max_seq_len]
    if o.validate_prompts and not chats and processes.first:
        say(f"no held-out prompt leaves room for --validate-tokens {o.validate_tokens}: tau is not measured")
    validator = Validator(decoding, chats, config["stop_ids"], o.tree, o.validate_tokens, decoding is not target) if chats else None
    plan = Plan(**{name: getattr(o, name) for name in Plan.__dataclass_fields__})
    trainer = Trainer(
        objective, features, rows, held_out, plan, work, processes=processes, micro_tokens=o.micro_tokens, validator=validator,
        log_every=o.log_every, save_seconds=o.save_seconds,
    )
    if trainer.resume() and processes.first:
        say(f"resumed at step {trainer.step} of {trainer.total}")
    whole, began = trainer.step == 0, time.time()
    log = trainer.run()
    if not processes.first:
        return
    head = trainer.trained()
    if not all(bool(p.isfinite().all()) for p in head.parameters()):
        raise CheckpointError(f"the last update left weights that are not finite: use a smaller --lr or --clip, not with --work {work}")
    if (last := next((e["held_out"] for e in reversed(log) if "held_out" in e), None)) and last[0] < 0.01:
        say(f"warning: the head guesses {last[0]:.1%} of the target's choices in held-out text: it has learnt nothing; try a smaller --lr")
    export(head, out, "sglang" if o.layout == "both" else o.layout, config)
    other = out / "speculators"
    if o.layout == "both":
        export(head, other, "speculators", config)
    elif other.is_dir():
        shutil.rmtree(other)  # of the head that was here before
    launch = f"torchrun --nproc-per-node {processes.count}" if processes.count > 1 else "python"
    write_card(
        out, launch=launch, head=head, kind=o.kind, target=config, data=data, covered=covered, command=command, plan=vars(plan),
        steps=objective.steps, log=log, seconds=time.time() - began if whole else None,
    )
    if (work / "curves.png").exists():
        shutil.copyfile(work / "curves.png", out / "curves.png")
    if o.layout == "both":
        for name in ("README.md", "curves.png"):
            if (out / name).exists():
                shutil.copyfile(out / name, other / name)
    force = " --force" if (Path(o.checkpoint) / o.kind).exists() else ""
    print(f"wrote {o.out}; next: python convert_checkpoint.py --checkpoint {o.out} --target {o.checkpoint}{force}")


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
    except (CheckpointError, OSError, ValueError, RuntimeError) as e:  # torch raises RuntimeError when memory runs out
        say(f"error: {' '.join(str(e).split())}")
        return 1
    except KeyboardInterrupt:
        say("\nstopped; run the same command to go on")
        return 130
    finally:
        processes.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
