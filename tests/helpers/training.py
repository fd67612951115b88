"""Training rows, and `train.py` command lines for the golden target."""
import json
from pathlib import Path

import torch
from torch import Tensor

from head import Head
from networks.weights import own_state
from training.batches import Batch
from training.features import Features, TargetStates
from training.losses import Objective


def row(seed: int, n: int, answers: list[list[int]]) -> dict:
    """Return a row of n random byte tokens."""
    ids = torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(seed)).tolist()
    return {"ids": ids, "answers": answers, "source": "test"}


ROWS = [row(1, 14, [[5, 14]]), row(2, 9, [[2, 9]]), row(3, 11, [[8, 11]]), row(4, 24, [[4, 10], [15, 24]])]


def loss_on(
    objective: Objective, states: TargetStates | None = None, rows: list[dict] = ROWS
) -> tuple[Tensor, Tensor, Batch, TargetStates]:
    """Return the loss on rows, the correct argmax predictions by step, the batch and the target's states."""
    states = states or Features(objective.target, objective.aux_layers).read(rows)
    batch = objective.batch(rows, objective.steps)
    return *objective.loss(batch, states, batch.scored, [0] * len(rows)), batch, states


@torch.no_grad()
def perturb_weights(head: Head) -> Head:
    """Add noise to all of a head's own weights, so that zero-initialized parts have an effect."""
    torch.manual_seed(5)
    for p in own_state(head).values():  # without the weights shared with the target
        if p.is_floating_point():
            p.add_(0.05 * torch.randn_like(p))
    return head


def user_messages(*turns: str) -> list[dict]:
    """Return user messages without answers."""
    return [{"role": "user", "content": turn} for turn in turns]


def options(golden: Path, prompts: Path | None, folder: Path, **changes) -> list[str]:
    """Return the command line of a short run that writes to FOLDER/head.

    changes: options to add or change; None drops an option.
    """
    values = {
        "checkpoint": golden, "prompts": prompts, "out": folder / "head", "max-new-tokens": 40,
        "decode-batch": 12, "draft-vocab": 64, "epochs": 2, "steps": 3, "batch-tokens": 512, "synthesize": 4,
        "seed": 1, "validate-prompts": 2,
    }
    pairs = ((f"--{flag}", str(value)) for flag, value in (values | changes).items() if value is not None)
    return [word for pair in pairs for word in pair]


def log_of(folder: Path) -> list[dict]:
    """Return the log entries of a run that writes to FOLDER/head."""
    return [json.loads(line) for line in (folder / "head-work" / "log.jsonl").read_text().splitlines()]
