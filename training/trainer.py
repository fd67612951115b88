"""The training loop: deterministic batches, exact resume, data parallelism."""
from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
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

STATE = "state.pt"  # in the work folder
SCALE_ROWS = 16  # rows that the scale of the features is estimated on
TIMED_SCALE_ROWS, TIMED_SCALE_TOKENS = 4, 64  # with --minutes: rows, and tokens of each
WARMUP_FRACTION = 0.03  # fraction of steps with linear learning-rate warmup
MAX_GRADIENT_NORM = 0.5
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01  # of AdamW
MICRO_BATCH_TOKENS = 8192  # padded tokens per forward pass (gradient accumulation)
TIMED_BATCH_TOKENS = 256  # of the first step's micro-batches with --minutes: time is checked between them
SAVE_INTERVAL_SECONDS = 300
VALIDATION_FRACTION = 0.1  # fraction of --minutes reserved for the last validation


@dataclass(frozen=True)
class Plan:
    """Hyperparameters of the training loop. A resumed run may only change `minutes`."""

    epochs: int = 4
    minutes: float = 0.0  # time limit, 0: none; the learning-rate schedule is fitted to it
    lr: float = 1e-3
    batch_tokens: int = 1024  # padded tokens per optimizer step
    seed: int = 0
    head: dict = field(default_factory=dict)  # options of the head and its loss, as given

    def options(self) -> dict:
        """Return the options that a resumed run must repeat, and `minutes`."""
        options = asdict(self)
        return options | {f"--{name.replace('_', '-')}": value for name, value in options.pop("head").items()}

    def learning_rate(self, step: float, total: int) -> float:
        """Return the learning rate of a step: linear warmup, then cosine decay to a tenth."""
        warmup = max(1, round(total * WARMUP_FRACTION))
        if step < warmup:
            return self.lr * min(step + 1, warmup) / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return self.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)


def save_state(folder: Path, state: dict) -> None:
    """Write FOLDER/state.pt atomically. Raises InputError if it cannot be written."""
    path = folder / STATE
    with library_errors(f"{path}: cannot be written; free disk space, then rerun the command to resume"):
        with atomic_path(path) as part, open(part, "wb") as file:
            torch.save(state, file)


def state_errors(folder: Path):
    """Return a context that turns errors of reading FOLDER/state.pt into InputError."""
    return library_errors(f"{folder / STATE}: cannot be read; if it is damaged, delete it to start over")


def read_state(folder: Path, device: str | torch.device = "cpu") -> dict | None:
    """Load FOLDER/state.pt, or return None if there is none. Raises InputError if it is damaged."""
    path = folder / STATE
    if not path.exists():
        return None
    with state_errors(folder):
        return torch.load(path, map_location=device, weights_only=True, mmap=True)


def check_same(folder: Path, options: dict, state: dict) -> None:
    """Raise InputError if an option of a saved state differs, except --minutes."""
    with state_errors(folder):
        saved = options | state["options"]
        if differs := sorted(n for n in options.keys() - {"minutes"} if options[n] != saved[n]):
            raise InputError(f"{folder / STATE} was made with other settings or data ({', '.join(differs)});"
                             " use another --out, or delete it and the file seconds next to it")


class Trainer:
    """Train `objective.head` on `rows` (see `training.data`) and validate on `held_out`.

    tau: measure the acceptance length of a head within a number of seconds; None: skip. Gradients are summed
    over the batch, so they do not depend on the micro-batch size or the number of ranks.
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
        rng = torch.Generator().manual_seed(plan.seed)
        self.batches = [batches(rows, plan.batch_tokens, rng) for _ in range(plan.epochs)]
        self.total = sum(map(len, self.batches))
        self.step = self.epoch = self.epoch_step = 0  # epoch_step: steps done in this epoch
        self.seconds = 0.0  # of training
        self.before = 0.0  # seconds before training, and of earlier runs, that count toward --minutes
        self.longest_step = 0.0  # seconds
        self.updating = False  # inside the optimizer step: the state is inconsistent, do not save it
        self.log: TrainingLog | None = None  # on rank 0, during `run`
        if not self._resume():
            self._learn_scale()

    @torch.no_grad()
    def _learn_scale(self) -> None:
        """Estimate the feature scale on a few rows, chosen by hash: independent of the order of the rows."""
        sample = sorted(self.rows, key=lambda row: sha256(str(row["ids"]).encode()).digest())
        timed = self.plan.minutes > 0
        count, length = (TIMED_SCALE_ROWS, TIMED_SCALE_TOKENS) if timed else (SCALE_ROWS, None)
        sample = [{"ids": row["ids"][:length]} for row in sample[:count]]
        states = self.features.read(progress_bar(sample, desc="target features", unit="row"))
        lengths = torch.tensor([len(row["ids"]) for row in sample])
        real = torch.arange(states.normed.shape[1]) < lengths[:, None]
        self.objective.learn_scale(states, real.to(self.objective.device))

    # -- one optimizer step ----------------------------------------------------------------------------------

    def micro_batches(self, indices: list[int]) -> list[list[int]]:
        """Split this rank's shard of a batch (row indices) into micro-batches."""
        shard, first_timed = self.processes.shard(indices), self.plan.minutes and not self.longest_step
        size = TIMED_BATCH_TOKENS if first_timed else MICRO_BATCH_TOKENS
        return [[shard[i] for i in part] for part in batches([self.rows[p] for p in shard], size)]

    def gradients(self, indices: list[int], steps: int) -> tuple[float, list[float]]:
        """Compute the gradients of one batch (rows at `indices`), all-reduced over the ranks.

        steps: draft steps to train. Returns (loss, accuracy by draft step). With --minutes, stops at a
        micro-batch when time is up.
        """
        objective = self.objective
        whole = objective.batch([self.rows[p] for p in indices], steps, self._seeds(indices))
        loss, hits = torch.zeros((), device=objective.device), torch.zeros(steps, device=objective.device)
        parts = self.micro_batches(indices)
        self.features.share(self.rows[p] for p in indices)
        for count, part in enumerate(parts, 1):
            rows, seeds = [self.rows[p] for p in part], self._seeds(part)
            batch = whole if part == indices else objective.batch(rows, steps, seeds)
            part_loss, part_hits = objective.loss(batch, self.features.read(rows), whole.scored, seeds)
            part_loss.backward()
            loss, hits = loss + part_loss.detach(), hits + part_hits
            if self.log:
                self.log.advance(sum(len(row["ids"]) for row in rows), self._progress() + count / len(parts))
            if count < len(parts) and self._seconds_left(1 - VALIDATION_FRACTION) < 0:
                break
        for p in self.parameters.values():
            if p.grad is None:  # a rank without rows in this batch
                p.grad = torch.zeros_like(p)
        self.processes.all_reduce([loss, hits, *(p.grad for p in self.parameters.values())])
        return float(loss), (hits.cpu() / torch.tensor(whole.valid).clamp(min=1)).tolist()

    def _seeds(self, indices: list[int]) -> list[int]:
        """Return one seed per row, for its noise and sampled chains in this epoch."""
        return [seed_of(self.plan.seed, self.epoch, p) for p in indices]

    def update(self) -> float:
        """Run the optimizer step. Returns the learning rate."""
        lr = self.plan.learning_rate(self._progress(), self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return lr

    def _progress(self) -> float:
        """Return the progress in steps, 0 to `total`: by steps or by used time, whichever is further.

        Training ends at `total`: all steps are done, or the time left is shorter than the longest step.
        """
        limit = 60 * self.plan.minutes * (1 - VALIDATION_FRACTION) - self.before - self.longest_step
        return max(self.step, self.total * self.seconds / max(limit, 1.0)) if self.plan.minutes else self.step

    def _seconds_left(self, fraction: float = 1.0) -> float:
        """Return the seconds until this fraction of --minutes is used up; inf without --minutes."""
        if not self.plan.minutes:
            return math.inf
        return 60 * self.plan.minutes * fraction - self.before - self.seconds - time.monotonic() + self.clock

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> list[dict]:
        """Train to the end. Returns the log entries on rank 0, [] on other ranks.

        Raises InputError if the loss is not finite.
        """
        self.log = TrainingLog(self.work, self.step, self.total) if self.processes.is_main else None
        self.save_time, self.clock = time.time(), time.monotonic()
        if not self.step and self._seconds_left() < 0:
            raise InputError(f"--minutes {self.plan.minutes:g}: used up before the first step; raise it"
                             " (the generated data is kept)")
        if self.log and self.step < self.total <= self._progress():
            log_stderr(f"--minutes {self.plan.minutes:g}: used up; raise it to continue training")
        try:
            while self.epoch < len(self.batches) and (self._epoch_is_done or self._progress() < self.total):
                self._run_epoch()
                self._validate(self.epoch + 1)
                if self._epoch_is_done:
                    self.epoch, self.epoch_step = self.epoch + 1, 0
                self.save()
        except KeyboardInterrupt:
            if self.epoch_step and not self.updating:
                self.save()
            raise
        finally:
            if self.log:
                self.log.bar.close()
        return self.log.entries if self.log else []

    @property
    def _epoch_is_done(self) -> bool:
        """True after the last step of an epoch, before its validation."""
        return self.epoch_step == len(self.batches[self.epoch])

    def _run_epoch(self) -> None:
        """Run the rest of the current epoch."""
        epoch, steps = self.batches[self.epoch], self.objective.steps
        while self.epoch_step < len(epoch) and self._progress() < self.total:
            indices, start_time = epoch[self.epoch_step], time.monotonic()
            loss, accuracy = self.gradients(indices, steps)
            now = time.monotonic()
            # Sum rank 0's times and zeros: with one clock, all ranks stop at the same step.
            times = torch.tensor([now - self.clock, now - start_time], device=self.objective.device)
            self.processes.all_reduce([times.mul_(self.processes.is_main)])
            self.seconds, self.clock = self.seconds + float(times[0]), now
            self.longest_step = max(self.longest_step, float(times[1]))
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), MAX_GRADIENT_NORM))
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise InputError(f"step {self.step}: loss {loss}, gradient norm {norm};"
                                 " train with a smaller --lr and another --out")
            self.updating = True
            lr = self.update()
            self.step, self.epoch_step = self.step + 1, self.epoch_step + 1
            self.updating = False
            if self.log:
                accuracy = [round(a, 4) for a in accuracy]
                entry = {"step": self.step, "loss": loss, "accuracy": accuracy, "norm": norm, "lr": lr}
                self.log.add_step(entry)
            if time.time() - self.save_time > SAVE_INTERVAL_SECONDS and self.epoch_step < len(epoch):
                self.save()

    # -- validation ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _validate(self, epochs: int) -> None:
        """Validate after `epochs` epochs on rank 0, or on all ranks if they share the target."""
        if self.log:
            self.log.bar.n = min(self._progress(), self.total)
            self.log.bar.set_description_str("validating")
        if self.log or self.processes.target_ranks:
            entry = {"step": self.step, "epoch": epochs, "held_out": self._held_out_accuracy()}
            seconds = min(self._seconds_left(), 60 * self.plan.minutes * VALIDATION_FRACTION / 2 or math.inf)
            if self.tau and seconds > 0 and (tau := self.tau(seconds, self.objective.trained())):
                entry["tau"] = tau
        if self.log:
            self.log.add_validation(entry)
        self.processes.barrier()

    def _held_out_accuracy(self) -> list[float]:
        """Return the top-1 accuracy against the target on the validation set, by draft step."""
        steps = self.objective.steps
        hits = valid = torch.zeros(steps, dtype=torch.float64)
        for indices in batches(self.held_out, min(MICRO_BATCH_TOKENS, self.plan.batch_tokens)):
            rows = [self.held_out[p] for p in indices]
            batch, seeds = self.objective.batch(rows, steps), [0] * len(rows)
            _, batch_hits = self.objective.loss(batch, self.features.read(rows), batch.scored, seeds)
            hits, valid = hits + batch_hits.cpu(), valid + torch.tensor(batch.valid)
            if self._seconds_left() < 0:
                break
        return (hits / valid.clamp(min=1)).tolist()

    # -- state -----------------------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> dict:
        """Settings and digests of the data and the target; a resumed run must match."""
        shapes = [(name, list(p.shape)) for name, p in self.parameters.items()]
        return {
            **self.plan.options(), **self.objective.settings(), "shapes": str(shapes),
            "data": digest([row["ids"] for row in self.held_out + self.rows]),
            "target": self.features.identity,
        }

    def save(self) -> None:
        """Save the training state on rank 0."""
        if self.processes.is_main:
            save_state(self.work, {
                "head": {name: p.detach() for name, p in self.parameters.items()},
                "optimizer": self.optimizer.state_dict(), "scale": self.objective.scale,
                "at": (self.step, self.epoch, self.epoch_step), "seconds": self.seconds,
                "before": self.before, "longest_step": self.longest_step,
                "options": self.fingerprint,
            })
        self.save_time = time.time()

    def _resume(self) -> bool:
        """Restore the saved state, False if there is none. Raises InputError if it is damaged or differs."""
        if not (state := read_state(self.work, self.objective.device)):
            return False
        check_same(self.work, self.fingerprint, state)
        with state_errors(self.work):
            for name, p in self.parameters.items():
                p.data.copy_(state["head"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.objective.scale, self.seconds = state["scale"], state["seconds"]
            self.before, self.longest_step = state["before"], state.get("longest_step", 0.0)
            self.step, self.epoch, self.epoch_step = state["at"]
        return True
