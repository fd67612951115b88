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

import json
import shutil
import time
from pathlib import Path

import torch

from checkpoint.export import ARCHITECTURES, PARTS, export
from checkpoint.loading import identity, load_model
from common.cli import note
from common.errors import InputError
from engine.decoder import Decoder
from engine.runtime import Runtime
from model import Transformer
from tokens.dataset import read_chats, read_conversations
from tokens.tokenizer import Tokenizer
from training import corpus
from training.card import write_card
from training.collect import Collector
from training.features import Features, StoredFeatures
from training.new_head import Shape, head_args, new_head, new_multi_token_heads
from training.objective import Eagle1Objective, Eagle3Objective, MultiTokenObjective
from training.processes import Processes
from training.trainer import Plan, Trainer
from training.validate import Validator, decoding_copy


def check_out(out: Path, kind: str, work: Path) -> None:
    """Raise InputError unless `out` is free, holds what a cut off export left, or a head of this kind that
    was trained in `work`.
    """
    if not out.is_dir() or all(path.name in PARTS for path in out.iterdir()):
        return
    try:
        found = json.loads((out / "config.json").read_text())["architectures"][0]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        found = None
    if found not in ARCHITECTURES[kind]:
        raise InputError(
            f"--out {out}: holds something else than a trained head of this kind; choose another folder"
        )
    if not (work / "state.pt").exists():
        raise InputError(
            f"--out {out}: holds a head that was not trained in --work {work}; choose another folder or delete it"
        )


def read_openings(path: str) -> tuple[str, ...]:
    """The lines of a text file that are not empty. Raises InputError if there are none."""
    try:
        lines = tuple(
            line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines() if line.strip()
        )
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"--openings {path}: cannot be read ({e})") from None
    if not lines:
        raise InputError(f"--openings {path}: holds no lines")
    return lines


def collect(o, target: Transformer, name: str, config: dict, processes: Processes) -> list[dict]:
    """The text: what is missing is written by `target`, whose identity is `name`, then all shards are read
    back.
    """
    # Everything a user gave is read before anything is decoded: a mistake shows at once.
    shards = [path for folder in o.shards for path in corpus.shards_in(Path(folder))]
    tell = note if processes.first else None
    prompts = read_chats(o.prompts, tell) if o.prompts else []
    prompts = list({json.dumps(messages): messages for messages in prompts}.values())  # without repeats
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(o.seed)).tolist()
    prompts = [prompts[i] for i in order][: o.limit]
    openings = read_openings(o.openings) if o.openings else ()
    conversations = read_conversations(o.conversations, tell) if o.conversations else []
    refusal = ""
    longest, room = target.args.max_seq_len, o.max_prompt_tokens + o.max_new_tokens
    if room > longest and (prompts or o.synthesize):
        raise InputError(
            f"--max-prompt-tokens {o.max_prompt_tokens} and --max-new-tokens {o.max_new_tokens} are {room} together,"
            f" the target's context is {longest}"
        )
    if prompts or conversations or o.synthesize:
        tokenizer = Tokenizer.load(o.checkpoint)
        if tokenizer is None or not tokenizer.has_template:
            raise InputError(
                f"{o.checkpoint}: chats need a tokenizer and a chat template, this folder lacks them"
            )
        batch = o.decode_batch if prompts or o.synthesize else 1
        try:
            decoder = Decoder(
                target, batch=batch, max_seq_len=min(room, longest), stop_ids=config["stop_ids"],
                compile=o.compile, say=tell
            )
        except ValueError as e:
            raise InputError(
                f"--decode-batch {batch} answers of up to {min(room, longest)} tokens: {e}"
            ) from None
        collector = Collector(
            decoder, tokenizer, Path(o.work) / "data", target=name, seed=o.seed,
            max_new_tokens=o.max_new_tokens,
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
        note(f"{left_out} prompts or conversations were left out: {reasons}")
    if cut and tell:
        note(f"{cut} conversations are cut to {min(o.max_len, longest)} tokens (--max-len)")
    if not rows:
        raise InputError(
            f"no usable answers: {left_out} prompts or conversations were left out ({reasons}), and all answers are shorter than"
            f" {corpus.SHORTEST} tokens or behind --max-len {o.max_len}"
        )
    return rows


def shape_of(o) -> Shape:
    """What the options say about an EAGLE head."""
    return Shape(o.hidden_size, o.intermediate_size, o.heads, o.kv_heads, o.head_dim)


def objective_for(o, target: Transformer, draft_ids: torch.Tensor):
    """The head to train and its loss."""
    try:
        if o.kind in ("medusa", "hydra"):
            prefix = o.kind == "hydra" and o.prefix is not False
            guesser = new_multi_token_heads(
                target, o.kind, draft_ids, o.guesses or 4, o.blocks or 1, prefix, o.seed
            )
            return MultiTokenObjective(target, guesser, o.compile_loss)
        head = new_head(target, o.kind, draft_ids, shape_of(o), o.seed)
    except ValueError as e:
        raise InputError(str(e)) from None
    if o.kind == "eagle":
        return Eagle1Objective(target, head, o.compile_loss, o.noise)
    return Eagle3Objective(target, head, o.steps, o.compile_loss)


def run(o, processes: Processes, command: list[str]) -> None:
    """Collect, train, export. Raises InputError and OSError on bad input."""
    target, config = load_model(o.checkpoint, o.device, Runtime(dtype=o.dtype).torch_dtype)
    if "quantization" in config:
        raise InputError(
            f"{o.checkpoint}: a head is trained on the whole weights; name the checkpoint before quantisation"
        )
    if o.kind in ("eagle", "eagle3"):
        try:
            # Before anything slow is done.
            head_args(target.args, o.kind, target.args.vocab_size, shape_of(o))
        except ValueError as e:
            raise InputError(str(e)) from None
    work, out = Path(o.work), Path(o.out)
    work.mkdir(parents=True, exist_ok=True)
    decoding = decoding_copy(target, note) if o.compile else target
    held_out, rows = corpus.hold_out(collect(o, decoding, identity(target), config, processes))
    if not rows:
        raise InputError(
            "fewer than two different prompts with usable answers: one is held out, none is left to train on"
        )
    data = corpus.describe(rows, target.args.vocab_size)
    draft_ids, covered = torch.arange(target.args.vocab_size), 1.0
    if o.kind != "eagle":
        size = min(o.draft_vocab, target.args.vocab_size)
        draft_ids, covered = corpus.draft_vocabulary(corpus.counts_of(rows), size, target.args.vocab_size)
    if processes.first:
        note(
            corpus.report(data) + f"\n{len(held_out)} more conversations are held out; {len(draft_ids):,} draft ids cover {covered:.2%}"
        )
        (work / "data.json").write_text(json.dumps(data, indent=1) + "\n")
    if o.collect_only:
        return

    objective = objective_for(o, target, draft_ids)
    if o.cache_features is not None:
        features = StoredFeatures(
            target, objective.aux_layers, Path(o.cache_features or work / "features"), processes
        )
        features.fill(rows + held_out, max(8192, o.batch_tokens))
    else:
        features = Features(target, objective.aux_layers, o.feature_memory * 2**30)
    chats = [
        list(ids) for ids in dict.fromkeys(tuple(row["ids"][: row["answers"][0][0]]) for row in held_out)
    ][: o.validate_prompts]
    chats = [ids for ids in chats if len(ids) + o.validate_tokens <= target.args.max_seq_len]
    if o.validate_prompts and not chats and processes.first:
        note(f"no held-out prompt leaves room for --validate-tokens {o.validate_tokens}: tau is not measured")
    validator = Validator(
        decoding, chats, config["stop_ids"], o.tree, o.validate_tokens, decoding is not target
    ) if chats else None
    plan = Plan(**{name: getattr(o, name) for name in Plan.__dataclass_fields__})
    trainer = Trainer(
        objective, features, rows, held_out, plan, work, processes=processes, micro_tokens=o.micro_tokens,
        validator=validator,
        log_every=o.log_every, save_seconds=o.save_seconds,
    )
    if trainer.resume() and processes.first:
        note(f"resumed at step {trainer.step} of {trainer.total}")
    whole, began = trainer.step == 0, time.time()
    log = trainer.run()
    if not processes.first:
        return
    head = trainer.trained()
    if not all(bool(p.isfinite().all()) for p in head.parameters()):
        raise InputError(
            f"the last update left weights that are not finite: use a smaller --lr or --clip, not with --work {work}"
        )
    if (last := next((e["held_out"] for e in reversed(log) if "held_out" in e), None)) and last[0] < 0.01:
        note(
            f"warning: the head guesses {last[0]:.1%} of the target's choices in held-out text: it has learnt nothing; try a smaller --lr"
        )
    export(head, out, "sglang" if o.layout == "both" else o.layout, config)
    other = out / "speculators"
    if o.layout == "both":
        export(head, other, "speculators", config)
    elif other.is_dir():
        shutil.rmtree(other)  # of the head that was here before
    launch = f"torchrun --nproc-per-node {processes.count}" if processes.count > 1 else "python"
    write_card(
        out, launch=launch, head=head, kind=o.kind, target=config, data=data, covered=covered,
        command=command, plan=vars(plan),
        steps=objective.steps, log=log, seconds=time.time() - began if whole else None,
    )
    if (work / "curves.png").exists():
        shutil.copyfile(work / "curves.png", out / "curves.png")
    if o.layout == "both":
        for name in ("README.md", "curves.png"):
            if (out / name).exists():
                shutil.copyfile(out / name, other / name)
    force = " --force" if (Path(o.checkpoint) / o.kind).exists() else ""
    print(
        f"wrote {o.out}; next: python convert_checkpoint.py --checkpoint {o.out} --target {o.checkpoint}{force}"
    )
