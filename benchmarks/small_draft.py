"""Make a small draft model for a target without a smaller sibling, to measure `--speculate draft-model`.

    python benchmarks/small_draft.py --checkpoint checkpoints/smollm2-135m --shards runs/mine-work/data \\
        --out checkpoints/smollm2-draft

It is the target without most of its layers. It learns the target's distribution (cross-entropy) on the text
of an earlier `train.py` run; the embedding and the lm_head stay the target's. The result is a converted
folder.
"""
from __future__ import annotations

import math
import sys
from pathlib import Path

import bench  # noqa: F401  (first: it makes the modules below importable)
import torch
import torch.nn.functional as F
from tqdm import tqdm

from checkpoint.folder import check_exact, check_out
from checkpoint.loading import build_module, identity, load_model
from checkpoint.source import Entry
from checkpoint.writer import Planned, fill, staging
from common.cli import Options, run_command
from common.errors import InputError
from model import Transformer
from tokens.tokenizer import copy_files
from training import corpus
from training.batches import Batch, batches
from training.features import Features, StoredFeatures
from training.loss import DraftLoss
from training.processes import Processes

LONGEST = 1024  # rows are cut to so many tokens
WARM_UP = 30  # steps until the learning rate is full


def cut(target: Transformer, config: dict, layers: list[int]) -> tuple[Transformer, dict]:
    """The target with only these of its layers, in float32, and its config.json."""
    name = f"{config['name']}, layers {','.join(map(str, layers))}"
    config = {**config, "num_layers": len(layers), "name": name}
    state = {name: p.float() for name, p in target.state_dict().items() if not name.startswith("layers.")}
    for new, old in enumerate(layers):
        state |= {f"layers.{new}.{name}": p.float() for name, p in target.layers[old].state_dict().items()}
    draft = build_module(config)
    draft.load_state_dict(state, assign=True)
    draft.inv_freq = target.inv_freq
    return draft.requires_grad_(False), config


def train(draft: Transformer, target: Transformer, features: Features, rows: list[dict], o) -> None:
    """One epoch of cross-entropy with the target's distribution, at every token of the answers.

    Raises InputError if the loss is not finite.
    """
    learnt = [p for module in (draft.layers, draft.norm) for p in module.requires_grad_(True).parameters()]
    optimizer = torch.optim.AdamW(learnt, lr=o.lr, betas=(0.9, 0.95), weight_decay=0.01)
    plan = batches(rows, o.batch_tokens, torch.Generator().manual_seed(o.seed))
    every_token = torch.ones(target.args.vocab_size, dtype=torch.bool)
    lm_rows = target.lm_rows
    bar, mean = tqdm(plan, desc="training", unit="batch", mininterval=5), math.nan
    for step, places in enumerate(bar):
        batch_rows = [rows[p] for p in places]
        batch = Batch(batch_rows, 1, every_token, lm_rows.device)
        decay = 0.55 + 0.45 * math.cos(math.pi * step / len(plan))
        for group in optimizer.param_groups:
            group["lr"] = o.lr * min(1, (step + 1) / WARM_UP) * decay
        # A batch is made for heads, which read up to two tokens before the one they predict. A model reads up
        # to the one before.
        teacher = batch.after(features.read(batch_rows).normed)[batch.index]
        with torch.autocast(lm_rows.device.type, torch.bfloat16):
            x = draft.norm(batch.after(draft.causal(batch.tokens)[0]))[batch.index]
        weight = torch.full((len(x),), 1 / max(1, len(x)), device=x.device)
        each = torch.arange(len(x), device=x.device)
        loss, *_ = DraftLoss.apply(x, draft.lm_rows, F.linear(teacher, lm_rows), each, weight)
        if not math.isfinite(loss.item()):
            raise InputError(f"the loss is {loss.item()} at batch {step}: use a smaller --lr")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 0.5)
        optimizer.step()
        mean = loss.item() if math.isnan(mean) else 0.98 * mean + 0.02 * loss.item()
        bar.set_postfix_str(f"loss {mean:.3f}", refresh=False)


def write(draft: Transformer, config: dict, source: Path, out: Path) -> None:
    """Write the draft model in bfloat16, with the target's tokenizer. Raises InputError if that fails."""
    plan = []
    for name, p in draft.state_dict().items():
        tensor = p.to(torch.bfloat16)
        entry = Entry.of(tensor.shape, tensor.dtype, lambda tensor=tensor: tensor)
        plan.append(Planned(name, entry.shape, tensor.dtype, [entry]))
    with staging(out, sum(t.nbytes for t in plan)) as folder:
        copy_files(source, folder)
        fill(folder, config, plan, quiet=True)


def run(o) -> None:
    """Cut, train, write. Raises InputError and OSError on bad input."""
    target, config = load_model(o.checkpoint, o.device, torch.bfloat16)
    check_exact(o.checkpoint, config)
    n = target.args.num_layers
    if not all(0 <= layer < n for layer in o.layers):
        raise InputError(f"--layers {o.layers}: the target has layers 0 to {n - 1}")
    check_out(Path(o.out), "target", force=False)
    shards = [path for folder in o.shards for path in corpus.shards_in(Path(folder))]
    rows, _, _ = corpus.load_shards(shards, LONGEST, target.args.vocab_size, identity(target))
    rows = corpus.hold_out(rows)[1][: o.limit]
    if not rows:
        raise InputError("--shards: hold no usable answers")
    features = Features(target, ())
    if o.cache_features:
        features = StoredFeatures(target, (), Path(o.cache_features), Processes())
        features.fill(rows, 8192)
    draft, config = cut(target, config, o.layers)
    train(draft, target, features, rows, o)
    write(draft, config, Path(o.checkpoint), Path(o.out))
    command = f"generate.py --checkpoint {o.checkpoint} --speculate draft-model --draft {o.out} --compare"
    print(f"wrote {o.out}; next: python {command}")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = Options(__doc__)
    add = p.add_argument
    add("--checkpoint", required=True, help="converted target")
    shards = "text of a train.py run for this target (its WORK/data)"
    add("--shards", action="append", required=True, help=shards)
    add("--out", required=True)
    add(
        "--layers", type=lambda s: [int(x) for x in s.split(",")], default=[0, 1, 29],
        help="the layers that stay (default 0,1,29)",
    )
    add("--limit", type=int, help="only this many rows")
    add("--lr", type=float, default=1e-3)
    add("--batch-tokens", type=int, default=1024)
    add("--cache-features", metavar="FOLDER", help="as for train.py")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    o = p.parse_args(argv)
    return run_command(lambda: run(o), OSError, ValueError)


if __name__ == "__main__":
    sys.exit(main())
