"""A small draft model for a target that has no smaller sibling, so that `--speculate draft-model` (SpS) can
be measured on it.

    python benchmarks/small_draft.py --checkpoint checkpoints/smollm2-135m --shards runs/mine-work/data --out checkpoints/smollm2-draft

It is the target without most of its layers, trained to say what the target says (cross-entropy with its
distribution) in the text of an earlier `train.py` run; the embedding and the lm_head stay the target's. What
comes out is a converted folder.
"""
from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from bench import ROOT  # noqa: F401  (puts the project on the path)
from tqdm import tqdm

from checkpoint.loading import build_module, identity, load_model
from checkpoint.source import Entry
from checkpoint.writer import Planned, check_out, write_folder
from common.cli import run_command
from common.errors import InputError
from model import Transformer
from tokens.tokenizer import copy_files
from training import corpus
from training.batches import Batch, batches
from training.features import Features, StoredFeatures
from training.objective import SoftCrossEntropy
from training.processes import Processes
from tree import pick


def cut(target: Transformer, config: dict, layers: list[int]) -> tuple[Transformer, dict]:
    """The target with these of its layers only, in float32, and its config.json."""
    config = {
        **config, "num_layers": len(layers), "name": f"{config['name']}, layers {','.join(map(str, layers))}"
    }
    state = {name: p.float() for name, p in target.state_dict().items() if not name.startswith("layers.")}
    for new, old in enumerate(layers):
        state |= {f"layers.{new}.{name}": p.float() for name, p in target.layers[old].state_dict().items()}
    draft = build_module(config)
    draft.load_state_dict(state, assign=True)
    draft.inv_freq = target.inv_freq
    return draft.requires_grad_(False), config


def train(draft: Transformer, target: Transformer, features: Features, rows: list[dict], o) -> None:
    """One epoch of cross-entropy with the target's distribution over its whole vocabulary, at every answer
    token.
    """
    learnt = [p for module in (draft.layers, draft.norm) for p in module.requires_grad_(True).parameters()]
    optimizer = torch.optim.AdamW(learnt, lr=o.lr, betas=(0.9, 0.95), weight_decay=0.01)
    plan = batches(rows, o.batch_tokens, torch.Generator().manual_seed(o.seed))
    everything = torch.ones(target.args.vocab_size, dtype=torch.bool)
    lm_rows = target.lm_rows
    bar, mean = tqdm(plan, desc="training", unit="batch", mininterval=5), math.nan
    for step, places in enumerate(bar):
        part = [rows[p] for p in places]
        batch = Batch(part, 1, everything, lm_rows.device)
        for group in optimizer.param_groups:
            group["lr"] = o.lr * min(1, (step + 1) / 30) * (
                0.55 + 0.45 * math.cos(math.pi * step / len(plan))
            )
        # A head reads two tokens behind what it predicts, a model one.
        at = (batch.at + 1).clamp(max=batch.tokens.shape[1] - 1)
        said = pick(features.read(part)[1], at).flatten(0, 1)[batch.index]
        with torch.autocast(lm_rows.device.type, torch.bfloat16):
            x = draft.norm(pick(draft.causal(batch.tokens)[0], at)).flatten(0, 1)[batch.index]
        weight = torch.full((len(x),), 1 / max(1, len(x)), device=x.device)
        loss, _ = SoftCrossEntropy.apply(
            x, draft.lm_rows, F.linear(said, lm_rows), torch.arange(len(x), device=x.device), weight
        )
        if not math.isfinite(loss.item()):
            raise InputError(f"the loss is {loss.item()} at batch {step}: use a smaller --lr")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 0.5)
        optimizer.step()
        mean = loss.item() if math.isnan(mean) else 0.98 * mean + 0.02 * loss.item()
        bar.set_postfix_str(f"loss {mean:.3f}", refresh=False)


def write(draft: Transformer, config: dict, source: Path, out: Path) -> None:
    """The folder, with the target's tokenizer. Raises InputError if it cannot be written."""
    plan = []
    for name, p in draft.state_dict().items():
        kept = p.to(torch.bfloat16)
        plan.append(
            Planned(
                name, tuple(p.shape), kept.dtype,
                [Entry(tuple(p.shape), kept.dtype, lambda kept=kept: iter((kept,)))]
            )
        )
    write_folder(out, config, plan, lambda folder: copy_files(source, folder), quiet=True)


def run(o) -> None:
    """Cut, train, write. Raises InputError and OSError on bad input."""
    target, config = load_model(o.checkpoint, o.device, torch.bfloat16)
    if "quantization" in config:
        raise InputError(f"{o.checkpoint}: is quantised; name the checkpoint before quantisation")
    n = target.args.num_layers
    if not all(0 <= layer < n for layer in o.layers):
        raise InputError(f"--layers {o.layers}: the target has layers 0 to {n - 1}")
    check_out(Path(o.out), "target", force=False)
    shards = [path for folder in o.shards for path in corpus.shards_in(Path(folder))]
    rows, _, _ = corpus.load_shards(shards, 1024, target.args.vocab_size, identity(target))
    rows = corpus.hold_out(rows)[1][: o.limit]
    if not rows:
        raise InputError("--shards: hold no usable answers")
    if o.cache_features:
        features = StoredFeatures(target, (), Path(o.cache_features), Processes())
        features.fill(rows, 8192)
    else:
        features = Features(target, ())
    draft, config = cut(target, config, o.layers)
    train(draft, target, features, rows, o)
    write(draft, config, Path(o.checkpoint), Path(o.out))
    print(
        f"wrote {o.out}; next: python generate.py --checkpoint {o.checkpoint} --speculate draft-model --draft {o.out} --compare"
    )


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", required=True, help="converted target")
    p.add_argument(
        "--shards", action="append", required=True,
        help="text of a train.py run for this target (its WORK/data)"
    )
    p.add_argument("--out", required=True)
    p.add_argument(
        "--layers", type=lambda s: [int(x) for x in s.split(",")], default=[0, 1, 29],
        help="which to keep (default 0,1,29)"
    )
    p.add_argument("--limit", type=int, help="only this many rows")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--batch-tokens", type=int, default=1024)
    p.add_argument("--cache-features", metavar="FOLDER", help="as of train.py")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--seed", type=int, default=0)
    o = p.parse_args(argv)
    return run_command(lambda: run(o))


if __name__ == "__main__":
    sys.exit(main())
