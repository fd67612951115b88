"""The training loop: a fixed plan of batches, exact state, any number of processes."""
from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import torch

from common.cli import log_stderr
from common.errors import InputError, library_errors
from common.hashes import seed_of
from common.progress import progress_bar
from common.writing import atomic_path, digest
from head import Head
from training.batches import batches
from training.features import Features
from training.losses import Objective
from training.processes import ProcessGroup
from training.report import TrainingLog

STATE = "state.pt"  # in WORK
SCALE_ROWS = 16  # rows that the scale of the features is computed from
TIMED_SCALE = 4, 64  # rows, and tokens of each, with --minutes: reading takes time
WARMUP = 0.03  # fraction of the run in which the learning rate rises
MAX_GRADIENT_NORM = 0.5
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01  # of AdamW
MICRO_BATCH_TOKENS = 8192  # padded tokens of a forward pass; gradients are accumulated
TIMED_BATCH_TOKENS = 256  # of the first step with --minutes, which may end after any forward pass
SAVE_INTERVAL = 300  # seconds
VALIDATION = 0.1  # of --minutes, for the last validation


@dataclass(frozen=True)
class Plan:
    """The settings of the training loop. A resumed run must have the same, except for `minutes`."""

    epochs: int = 4
    # End then, with the learning rate down as after all epochs; 0: never. Resuming may change it.
    minutes: float = 0.0
    lr: float = 1e-3
    batch_tokens: int = 1024  # padded tokens per optimizer step
    seed: int = 0

    def rate(self, step: float, total: int) -> float:
        """Return the learning rate of a step: linear warm-up, then along a cosine down to a tenth."""
        warm = max(1, round(total * WARMUP))
        if step < warm:
            return self.lr * min(step + 1, warm) / warm
        done = min(1.0, (step - warm) / max(1, total - warm))
        return self.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def save_state(folder: Path, state: dict) -> None:
    """Write FOLDER/state.pt, all of it or nothing. Raises InputError if it cannot be written."""
    path = folder / STATE
    with library_errors(f"{path}: cannot be written; make room there, then run the command to go on"):
        with atomic_path(path) as part, open(part, "wb") as file:
            torch.save(state, file)


def readable(folder: Path):
    """Return a context that turns errors of reading FOLDER/state.pt into InputError."""
    return library_errors(f"{folder / STATE}: cannot be restored; if it is damaged, delete it to start again")


def read_state(folder: Path, device: str | torch.device = "cpu") -> dict | None:
    """Return what `save_state` wrote, None without it. Raises InputError if it is damaged."""
    path = folder / STATE
    if not path.exists():
        return None
    with readable(folder):
        return torch.load(path, map_location=device, weights_only=True, mmap=True)


def check_same(folder: Path, options: dict, state: dict) -> None:
    """Raise InputError if a saved state was made with other options. --minutes may change."""
    with readable(folder):
        saved = state["options"]
        if differs := sorted(n for n in options.keys() - {"minutes"} if options[n] != saved.get(n)):
            raise InputError(f"{folder / STATE} was made with other settings or data ({', '.join(differs)});"
                             " use another --out, or delete it")


class Trainer:
    """Trains `objective.head` on rows.

    Batches and gradients, which are sums over an optimizer step, do not depend on MICRO_BATCH_TOKENS and the
    number of ranks.
    """

    def __init__(
        self, objective: Objective, features: Features, rows: list[dict], held_out: list[dict], plan: Plan,
        work: Path, *, processes: ProcessGroup, tau: Callable[[float, Head], float | None] | None = None,
    ):
        self.objective, self.head, self.features = objective, objective.head, features
        self.rows, self.held_out, self.plan, self.work = rows, held_out, plan, work
        self.processes, self.tau = processes, tau
        self.parameters = {name: p for name, p in self.head.named_parameters() if p.requires_grad}
        fused = any(p.is_cuda for p in self.parameters.values())
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=plan.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=fused
        )
        generator = torch.Generator().manual_seed(plan.seed)
        self.batches = [batches(rows, plan.batch_tokens, generator) for _ in range(plan.epochs)]
        self.total = sum(map(len, self.batches))
        self.step = self.epoch = self.in_epoch = 0
        self.seconds, self.before = 0.0, 0.0  # of training; of --minutes, before it
        self.longest_step, self.updating = 0.0, False  # in seconds
        self.log: TrainingLog | None = None  # on rank 0, during `run`
        if not self._resume():
            self._learn_scale()

    @torch.no_grad()
    def _learn_scale(self) -> None:
        """Set the objective's scale from a few rows, the same ones in any order of the rows."""
        sample = sorted(self.rows, key=lambda row: sha256(str(row["ids"]).encode()).digest())
        count, length = TIMED_SCALE if self.plan.minutes else (SCALE_ROWS, None)
        sample = [{"ids": row["ids"][:length]} for row in sample[:count]]
        states = self.features.read(progress_bar(sample, desc="target states", unit="row"))
        lengths = torch.tensor([len(row["ids"]) for row in sample])
        real = torch.arange(states.normed.shape[1]) < lengths[:, None]
        self.objective.learn_scale(states, real.to(self.objective.device))

    # -- one optimizer step ----------------------------------------------------------------------------------

    def micro_batches(self, indices: list[int]) -> list[list[int]]:
        """Return this rank's shard of a batch, split into parts of MICRO_BATCH_TOKENS tokens."""
        mine, untimed = self.processes.shard(indices), self.plan.minutes and not self.longest_step
        size = TIMED_BATCH_TOKENS if untimed else MICRO_BATCH_TOKENS
        return [[mine[i] for i in part] for part in batches([self.rows[p] for p in mine], size)]

    def gradients(self, indices: list[int], steps: int) -> tuple[float, list[float]]:
        """Set the gradients of one batch (rows at `indices`), summed over the ranks.

        Returns (loss, accuracy of each step).
        """
        objective = self.objective
        complete = objective.batch([self.rows[p] for p in indices], steps, self._seeds(indices))
        loss, hits = torch.zeros((), device=objective.device), torch.zeros(steps, device=objective.device)
        micros = self.micro_batches(indices)
        self.features.share(self.rows[p] for p in indices)
        for done, micro in enumerate(micros, 1):
            rows, seeds = [self.rows[p] for p in micro], self._seeds(micro)
            batch = complete if micro == indices else objective.batch(rows, steps, seeds)
            micro_loss, micro_hits = objective.loss(batch, self.features.read(rows), complete.scored, seeds)
            micro_loss.backward()
            loss, hits = loss + micro_loss.detach(), hits + micro_hits
            if self.log:
                self.log.advance(sum(len(row["ids"]) for row in rows), self._progress() + done / len(micros))
            if done < len(micros) and self._left(1 - VALIDATION) < 0:
                break
        for p in self.parameters.values():
            if p.grad is None:  # a rank without rows in this batch
                p.grad = torch.zeros_like(p)
        self.processes.all_reduce([loss, hits, *(p.grad for p in self.parameters.values())])
        return float(loss), (hits.cpu() / torch.tensor(complete.valid).clamp(min=1)).tolist()

    def _seeds(self, indices: list[int]) -> list[int]:
        """Return seeds of each row's noise and chains in this epoch."""
        return [seed_of(self.plan.seed, self.epoch, p) for p in indices]

    def update(self) -> float:
        """Run the optimizer. Return the learning rate."""
        lr = self.plan.rate(self._progress(), self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return lr

    def _progress(self) -> float:
        """Return the steps of `total` that count as done: by steps or by seconds, whichever is further.

        It is `total` or more when the steps are over, or the time that is left is less than the longest step.
        """
        left = 60 * self.plan.minutes * (1 - VALIDATION) - self.before - self.longest_step
        return max(self.step, self.total * self.seconds / max(left, 1.0)) if self.plan.minutes else self.step

    def _left(self, fraction: float = 1.0) -> float:
        """Return the seconds until this fraction of --minutes is over."""
        if not self.plan.minutes:
            return math.inf
        return 60 * self.plan.minutes * fraction - self.before - self.seconds - time.monotonic() + self.clock

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> list[dict]:
        """Train to the end of the plan. Return the entries of the log on rank 0, else [].

        Raises InputError if the loss is not finite.
        """
        self.log = TrainingLog(self.work, self.step, self.total) if self.processes.is_main else None
        self.saved, self.clock = time.time(), time.monotonic()
        if not self.step and self._left() < 0:
            raise InputError(f"--minutes {self.plan.minutes:g}: over before the first step; raise it (the"
                             " text is kept)")
        if self.plan.minutes and self.epoch < len(self.batches) and self._progress() >= self.total:
            log_stderr(f"--minutes {self.plan.minutes:g}: used up; raise it to train on")
        try:
            while self.epoch < len(self.batches) and self._progress() < self.total:
                self._run_epoch()
                self._validate(self.epoch + 1)
                if self.in_epoch == len(self.batches[self.epoch]):
                    self.epoch, self.in_epoch = self.epoch + 1, 0
                self.save()
        except KeyboardInterrupt:
            if self.in_epoch and not self.updating:
                self.save()
            raise
        finally:
            if self.log:
                self.log.bar.close()
        return self.log.entries if self.log else []

    def _run_epoch(self) -> None:
        """Run the rest of the current epoch."""
        epoch, steps = self.batches[self.epoch], self.objective.steps
        while self.in_epoch < len(epoch) and self._progress() < self.total:
            indices, began = epoch[self.in_epoch], time.monotonic()
            loss, accuracy = self.gradients(indices, steps)
            now = time.monotonic()
            # The clock of rank 0 counts: all ranks end at the same step.
            times = torch.tensor([now - self.clock, now - began], device=self.objective.device)
            self.processes.all_reduce([times.mul_(self.processes.is_main)])
            self.seconds, self.clock = self.seconds + float(times[0]), now
            self.longest_step = max(self.longest_step, float(times[1]))
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), MAX_GRADIENT_NORM))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise InputError(f"the loss is {loss}, the norm of its gradient {norm} at step {self.step};"
                                 " train with a smaller --lr and another --out")
            self.updating = True
            lr = self.update()
            self.step, self.in_epoch = self.step + 1, self.in_epoch + 1
            self.updating = False
            if self.log:
                accuracy = [round(a, 4) for a in accuracy]
                entry = {"step": self.step, "loss": loss, "accuracy": accuracy, "norm": norm, "lr": lr}
                self.log.add_step(entry)
            if time.time() - self.saved > SAVE_INTERVAL and self.in_epoch < len(epoch):
                self.save()

    # -- validation ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _validate(self, epochs: int) -> None:
        """Validate after `epochs` epochs on rank 0, or on all ranks if they share the target."""
        if self.log:
            self.log.bar.n = min(self._progress(), self.total)
            self.log.bar.set_description("validating")
        if self.log or self.processes.target_ranks:
            entry = {"step": self.step, "epoch": epochs, "held_out": self._held_out_accuracy()}
            seconds = min(self._left(), 60 * self.plan.minutes * VALIDATION / 2 or math.inf)
            if self.tau and seconds > 0 and (tau := self.tau(seconds, self.objective.trained())):
                entry["tau"] = tau
        if self.log:
            self.log.add_validation(entry)
        self.processes.barrier()

    def _held_out_accuracy(self) -> list[float]:
        """Return how often the head's first choice is the target's on held-out text, by draft step."""
        steps = self.objective.steps
        hits = valid = torch.zeros(steps, dtype=torch.float64)
        for indices in batches(self.held_out, min(MICRO_BATCH_TOKENS, self.plan.batch_tokens)):
            rows = [self.held_out[p] for p in indices]
            batch, seeds = self.objective.batch(rows, steps), [0] * len(rows)
            _, batch_hits = self.objective.loss(batch, self.features.read(rows), batch.scored, seeds)
            hits, valid = hits + batch_hits.cpu(), valid + torch.tensor(batch.valid)
            if self._left() < 0:
                break
        return (hits / valid.clamp(min=1)).tolist()

    # -- state -----------------------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> dict:
        """Settings and data of the run. A resumed run must have the same."""
        shapes = [(name, list(p.shape)) for name, p in self.parameters.items()]
        return {
            **vars(self.plan), **self.objective.settings(), "shapes": str(shapes),
            "data": digest([row["ids"] for row in self.held_out + self.rows]),
            "target": self.features.identity,
        }

    def save(self) -> None:
        """Save on rank 0 what an exact resume needs."""
        if self.processes.is_main:
            save_state(self.work, {
                "head": {name: p.detach() for name, p in self.parameters.items()},
                "optimizer": self.optimizer.state_dict(), "scale": self.objective.scale,
                "at": (self.step, self.epoch, self.in_epoch), "seconds": self.seconds, "before": self.before,
                "longest_step": self.longest_step,
                "options": self.fingerprint,
            })
        self.saved = time.time()

    def _resume(self) -> bool:
        """Go on from the saved state if there is one. Raises InputError as `read_state` does."""
        if not (state := read_state(self.work, self.objective.device)):
            return False
        check_same(self.work, self.fingerprint, state)
        with readable(self.work):
            for name, p in self.parameters.items():
                p.data.copy_(state["head"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.objective.scale, self.seconds = state["scale"], state["seconds"]
            self.before, self.longest_step = state["before"], state.get("longest_step", 0.0)
            self.step, self.epoch, self.in_epoch = state["at"]
        return True
