"""The training loop: a fixed plan of batches, exact state, any number of processes."""
from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from pathlib import Path

import torch

from checkpoint.loading import identity
from common.errors import InputError
from networks.head import Head
from sampling.noise import seed_of
from training.batches import batches
from training.curves import draw_curves
from training.features import Features
from training.log import TrainingLog
from training.objective import Objective
from training.optimizer import make_optimizers
from training.out import STATE
from training.plan import Plan
from training.processes import Processes
from training.state import load_state, save_state
from training.validate import Validator

SAMPLE = 16  # rows that the scale of the features is learnt from


class Trainer:
    """Trains `objective.head` on rows.

    micro_tokens: most padded tokens that are computed at once. Neither it nor the number of processes changes
    the batches or their gradients, which are sums over all of an optimizer step. name: identity of the
    target, if this process has a part of it only.
    """

    def __init__(
        self, objective: Objective, features: Features, rows: list[dict], held_out: list[dict], plan: Plan,
        work: Path, *, processes: Processes | None = None, micro_tokens: int | None = None,
        validator: Validator | None = None, log_every: int = 10, save_seconds: float = 300,
        name: str | None = None,
    ):
        self.objective, self.head, self.features = objective, objective.head, features
        self.rows, self.held_out, self.plan, self.work = rows, held_out, plan, work
        self.processes = processes or Processes()
        self.micro_tokens = micro_tokens or plan.batch_tokens
        self.name = name or identity(objective.target)
        self.validator, self.log_every, self.save_seconds = validator, log_every, save_seconds
        self.parameters = {name: p for name, p in self.head.named_parameters() if p.requires_grad}
        self.optimizers = make_optimizers(plan.optimizer, self.parameters, plan.lr, plan.weight_decay)
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()} if plan.ema else {}
        generator = torch.Generator().manual_seed(plan.seed)
        self.batches = [batches(rows, plan.batch_tokens, generator) for _ in range(plan.epochs)]
        self.total = sum(map(len, self.batches))
        self.step = self.epoch = self.in_epoch = 0
        self.lr = 0.0  # of the last update
        self.seconds = 0.0  # that the steps have taken, see `_count_time`
        self.updating = False
        self.saved = time.time()
        self._learn_scale()

    @torch.no_grad()
    def _learn_scale(self) -> None:
        """Set the objective's scale from a few rows, the same ones in any order of the rows."""
        def digest(row: dict) -> str:
            return hashlib.sha256(str(row["ids"]).encode()).hexdigest()

        sample, device = sorted(self.rows, key=digest)[:SAMPLE], self.objective.device
        states = self.features.read(sample)
        lengths = torch.tensor([len(row["ids"]) for row in sample], device=device)
        positions = torch.arange(states.normed.shape[1], device=device)
        self.objective.learn_scale(states, positions < lengths[:, None])

    # -- one optimizer step ----------------------------------------------------------------------------------

    def micro_batches(self, places: list[int]) -> list[list[int]]:
        """This process's share of a batch, cut to `micro_tokens`."""
        mine = [p for i, p in enumerate(places) if self.processes.mine(i)]
        if not mine:
            return []
        return [[mine[i] for i in part] for part in batches([self.rows[p] for p in mine], self.micro_tokens)]

    def gradients(self, places: list[int], steps: int) -> tuple[float, list[float]]:
        """Set the gradients of one batch (rows at `places`), summed over the processes.

        Returns (loss, accuracy of each step).
        """
        objective = self.objective
        complete = objective.batch([self.rows[p] for p in places], steps, self._seeds(places))
        loss, hits = torch.zeros((), device=objective.device), torch.zeros(steps, device=objective.device)
        if self.processes.team_size > 1:  # a pass of the target is a pass of all who share it
            numbered = [(i, self.rows[p]) for i, p in enumerate(places) if self.processes.ours(i)]
            self.features.hold([(row, self.processes.mine(i)) for i, row in numbered])
        for micro in self.micro_batches(places):
            rows = [self.rows[p] for p in micro]
            seeds = self._seeds(micro)
            batch = complete if micro == places else objective.batch(rows, steps, seeds)
            micro_loss, micro_hits = objective.loss(batch, self.features.read(rows), complete.scored, seeds)
            micro_loss.backward()
            loss, hits = loss + micro_loss.detach(), hits + micro_hits
        for p in self.parameters.values():
            if p.grad is None:  # a process without rows in this batch
                p.grad = torch.zeros_like(p)
        self.processes.sum([loss, hits, *(p.grad for p in self.parameters.values())])
        return float(loss), (hits.cpu() / torch.tensor(complete.valid).clamp(min=1)).tolist()

    def _seeds(self, places: list[int]) -> list[int]:
        """Seeds of what is drawn for rows in this epoch: noise, chains."""
        return [seed_of(self.plan.seed, self.epoch, p) for p in places]

    def clip(self) -> float:
        """Clip the gradients. Returns their norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.plan.clip))

    def update(self) -> None:
        """Update the weights by the gradients, then their average."""
        self.lr = self.plan.rate(self._progress(), self.total)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr
            optimizer.step()
            optimizer.zero_grad()
        # A short average at first, or it would never forget the start.
        keep = min(self.plan.ema, (1 + self.step) / (10 + self.step))
        for name, mean in self.average.items():
            mean.lerp_(self.parameters[name].detach(), 1 - keep)

    def _progress(self) -> float:
        """Steps of `total` that the plan counts as done."""
        return self.plan.progress(self.step, self.total, self.seconds)

    def _count_time(self, since: float) -> float:
        """Count the seconds since then on the clock of the first process: all processes end at one step.

        Returns the time now.
        """
        now = time.monotonic()
        took = torch.tensor((now - since) * self.processes.first, device=self.objective.device)
        self.processes.sum([took])
        self.seconds += float(took)
        return now

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> list[dict]:
        """Train to the end of the plan. Returns the entries of the log, [] but in the first process.

        Raises InputError if the loss is not finite; the last good state stays.
        """
        log = TrainingLog(self.work, self.step, self.total) if self.processes.first else None
        self.saved = time.time()
        try:
            if self.epoch and not self.in_epoch:  # killed between the end of an epoch and its validation
                self._validate(log)
            while self.epoch < len(self.batches) and (self.in_epoch or self._progress() < self.total):
                self._run_epoch(log)
                self.epoch, self.in_epoch = self.epoch + 1, 0
                self.save()  # first: whatever goes wrong in validation, the epoch is not lost
                self._validate(log)
        except KeyboardInterrupt:
            if not self.updating:
                self.save()
            raise
        finally:
            if log:
                log.close()
        return log.entries if log else []

    def _run_epoch(self, log: TrainingLog | None) -> None:
        """The rest of the current epoch."""
        epoch, steps = self.batches[self.epoch], self.plan.unrolled(self.epoch, self.objective.steps)
        counted = time.monotonic()
        while self.in_epoch < len(epoch) and self._progress() < self.total:
            places = epoch[self.in_epoch]
            loss, accuracy = self.gradients(places, steps)
            counted = self._count_time(counted)
            norm = self.clip()
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._stop(loss, norm, places)
            self.updating = True
            self.update()
            self.step, self.in_epoch = self.step + 1, self.in_epoch + 1
            self.updating = False
            if log:
                entry = {
                    "step": self.step, "loss": loss, "accuracy": [round(a, 4) for a in accuracy],
                    "norm": norm, "lr": self.lr,
                }
                tokens = sum(len(self.rows[p]["ids"]) for p in places)
                progress = self._progress()
                write = self.step % self.log_every == 0 or progress >= self.total
                log.step(entry, tokens, write, progress)
            if time.time() - self.saved > self.save_seconds and self.in_epoch < len(epoch):
                self.save()

    def _stop(self, loss: float, norm: float, places: list[int]) -> None:
        """Raise InputError with the numbers and the rows of a batch whose loss or gradient is not finite.

        The weights before this batch are saved if they are finite.
        """
        if all(bool(p.isfinite().all()) for p in self.parameters.values()):
            self.save()
        starts = "; ".join(str(self.rows[p]["ids"][self.rows[p]["answers"][0][0] :][:6]) for p in places[:3])
        state, last_state = self.work / STATE, ""
        if state.exists():
            last_state = f" The last good state is in {state}, but going on from there leads here again."
        raise InputError(
            f"the loss is {loss}, the norm of its gradient {norm} at step {self.step} (epoch"
            f" {self.epoch + 1}, batch {self.in_epoch}, rows whose answers begin with the ids {starts})."
            f"{last_state}"
            " Train with a smaller --lr or --clip in another --work, or leave these rows out"
        )

    # -- validation ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _validate(self, log: TrainingLog | None) -> None:
        """Validate the epochs so far in the first team, while the others wait for it."""
        due = log is not None and not any(entry.get("epoch") == self.epoch for entry in log.entries)
        if self.processes.first_says(due) and self.processes.team == 0:
            head, accuracy = self.trained(), self._held_out_accuracy()
            entry = {"step": self.step, "epoch": self.epoch, "held_out": accuracy}
            if self.validator and (tau := self.validator.tau(head)):
                entry |= {"tau": tau, "tree": self.validator.tree_name}
            if log:
                log.validation(entry)
        if log:  # also if that was done: the run may have been killed before it came to this
            draw_curves(log.entries, self.work / "curves.png")
        self.processes.wait()

    def _held_out_accuracy(self) -> list[float]:
        """How often the head's first choice is the target's on held-out text, by draft step."""
        steps = self.objective.steps
        hits = valid = torch.zeros(steps, dtype=torch.float64)
        with self.averaged():
            for places in batches(self.held_out, self.micro_tokens):
                rows = [self.held_out[p] for p in places]
                batch, seeds = self.objective.batch(rows, steps), [0] * len(rows)
                _, batch_hits = self.objective.loss(batch, self.features.read(rows), batch.scored, seeds)
                hits, valid = hits + batch_hits.cpu(), valid + torch.tensor(batch.valid)
        return (hits / valid.clamp(min=1)).tolist()

    def trained(self) -> Head:
        """The head as it is to be used: with the average if there is one, reading unscaled features."""
        with self.averaged():
            return self.objective.trained()

    @contextlib.contextmanager
    def averaged(self):
        """A context in which the head has the averaged weights, if there is an average."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, mean in self.average.items():
            p = self.parameters[name]
            p.data, mean.data = mean.data, p.data

    # -- state -----------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict:
        """What defines a run, settings and data; a resumed run must have the same."""
        data = json.dumps([row["ids"] for row in self.held_out + self.rows]).encode()
        shapes = [(name, list(p.shape)) for name, p in self.parameters.items()]
        reader = self.features.reader
        return {
            **vars(self.plan), "minutes": self.plan.minutes or None,
            **self.objective.settings(), "shapes": str(shapes),
            "data": hashlib.sha256(data).hexdigest(), "target": self.name,
            "reader": reader.name if reader else None,
        }

    def save(self) -> None:
        """Save everything that an exact resume needs, in the first process."""
        if self.processes.first:
            save_state(self.work, {
                "head": {name: p.detach() for name, p in self.parameters.items()}, "average": self.average,
                "optimizers": [one.state_dict() for one in self.optimizers], "scale": self.objective.scale,
                "at": (self.step, self.epoch, self.in_epoch), "seconds": self.seconds,
                "options": self.fingerprint(),
            })
        self.saved = time.time()

    def resume(self) -> bool:
        """Go on from the saved state if there is one.

        Raises InputError if it is damaged, or was made with other settings or data.
        """
        state = load_state(self.work, self.fingerprint(), self.objective.device)
        if state is None:
            return False
        try:
            for tensors, saved in ((self.parameters, state["head"]), (self.average, state["average"])):
                for name, tensor in tensors.items():
                    tensor.data.copy_(saved[name])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.objective.scale = state["scale"]
            self.step, self.epoch, self.in_epoch = map(int, state["at"])
            self.seconds = float(state.get("seconds", 0.0))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            # Its options are those of this run: whoever wrote the rest was no train.py.
            raise InputError(
                f"{self.work / STATE}: holds no state of this head; delete it to start again"
            ) from None
        return True
