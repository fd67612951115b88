"""The training loop: a fixed plan of batches, exact state, any number of processes."""
from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint.loading import identity
from common.errors import InputError
from common.files import atomic_path
from networks.head import Head
from sampling.noise import seed_of
from training.batches import batches
from training.features import Features
from training.log import Record, draw
from training.objective import Objective
from training.processes import Processes
from training.validate import Validator

# Unrolled steps of the short epochs: what later steps need is mostly learnt in the first ones, at a quarter
# of the time.
SHORT = 3


@dataclass(frozen=True)
class Plan:
    """How long and how fast to learn. Everything here changes the result."""

    epochs: int = 4
    short_epochs: int = 0
    lr: float = 1e-3
    schedule: str = "cosine"  # cosine | linear | constant, after the warm-up
    warmup: float = 0.03  # share of the steps
    clip: float = 0.5
    weight_decay: float = 0.01
    ema: float = 0.0  # share of the average that stays at every step; 0: no average
    batch_tokens: int = 1024  # padded tokens per optimizer step
    seed: int = 0

    def rate(self, step: int, total: int) -> float:
        """Learning rate of a step: linear warm-up, then down to a tenth."""
        warm = max(1, round(total * self.warmup))
        if step < warm:
            return self.lr * (step + 1) / warm
        done = (step - warm) / max(1, total - warm)
        left = {
            "cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0
        }[self.schedule]
        return self.lr * (0.1 + 0.9 * left)


class Trainer:
    """Trains `objective.head` on rows. `micro_tokens`: most padded tokens computed at once; it and the number
    of processes change neither batches nor gradients, which are sums over all of an optimizer step.
    """

    def __init__(
        self, objective: Objective, features: Features, rows: list[dict], held_out: list[dict], plan: Plan,
        work: Path, *,
        processes: Processes | None = None, micro_tokens: int | None = None,
        validator: Validator | None = None,
        log_every: int = 10, save_seconds: float = 300,
    ):
        self.objective, self.head, self.features = objective, objective.head, features
        self.rows, self.held_out, self.plan, self.work = rows, held_out, plan, work
        self.processes = processes or Processes()
        self.micro_tokens = micro_tokens or plan.batch_tokens
        self.validator, self.log_every, self.save_seconds = validator, log_every, save_seconds
        self.parameters = {name: p for name, p in self.head.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=plan.weight_decay,
            fused=objective.device.type == "cuda",
        )
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()} if plan.ema else {}
        generator = torch.Generator().manual_seed(plan.seed)
        self.batches = [batches(rows, plan.batch_tokens, generator) for _ in range(plan.epochs)]
        self.total = sum(map(len, self.batches))
        self.step = self.epoch = self.in_epoch = 0
        self.whole = True  # not in the middle of an update
        with torch.no_grad():
            sample = sorted(rows, key=lambda row: hashlib.sha256(str(row["ids"]).encode()).hexdigest())[:16]
            features, state, _ = self.features.read(sample)
            lengths = torch.tensor([len(row["ids"]) for row in sample], device=objective.device)
            objective.learn_scale(
                features, state, torch.arange(state.shape[1], device=objective.device) < lengths[:, None]
            )

    # -- one optimizer step ------------------------------------------------------------------------------------------

    def micro_batches(self, places: list[int]) -> list[list[int]]:
        """This process's share of a batch, cut to `micro_tokens`."""
        mine = [p for i, p in enumerate(places) if self.processes.mine(i)]
        return [
            [mine[i] for i in part] for part in batches([self.rows[p] for p in mine], self.micro_tokens)
        ] if mine else []

    def gradients(self, places: list[int], steps: int) -> tuple[float, list[float]]:
        """Set the gradients of one batch (rows at `places`), summed over the processes -> (loss, accuracy of
        each step).
        """
        objective = self.objective
        whole = objective.batch([self.rows[p] for p in places], steps)
        loss, hits = torch.zeros((), device=objective.device), torch.zeros(steps, device=objective.device)
        for micro in self.micro_batches(places):
            rows = [self.rows[p] for p in micro]
            seeds = [seed_of(self.plan.seed, self.epoch, p) for p in micro]
            batch = whole if micro == places else objective.batch(rows, steps)
            part, right = objective.loss(batch, self.features.read(rows), whole.scored, seeds)
            part.backward()
            loss, hits = loss + part.detach(), hits + right
        for p in self.parameters.values():
            if p.grad is None:  # a process without rows in this batch
                p.grad = torch.zeros_like(p)
        self.processes.sum([loss, hits, *(p.grad for p in self.parameters.values())])
        return float(loss), (hits.cpu() / torch.tensor(whole.valid).clamp(min=1)).tolist()

    def clip(self) -> float:
        """Clip the gradients; returns their norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.plan.clip))

    def update(self) -> None:
        """Step, average."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate(self.step, self.total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Short at first, or the start would never be forgotten.
        keep = min(self.plan.ema, (1 + self.step) / (10 + self.step))
        for name, mean in self.average.items():
            mean.lerp_(self.parameters[name].detach(), 1 - keep)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> list[dict]:
        """Train to the end of the plan -> the log. Raises InputError if the loss is not finite; the last
        state stays.
        """
        record = Record(self.work, self.step, self.total) if self.processes.first else None
        try:
            if self.epoch and not self.in_epoch:  # killed between an epoch's end and its validation
                self._validate(record)
            self._run(record)
        except KeyboardInterrupt:
            if self.whole:
                self.save()
            raise
        finally:
            if record:
                record.close()
        return record.entries if record else []

    def _run(self, record: Record | None) -> None:
        began, tokens, saved = time.time(), 0, time.time()
        while self.epoch < len(self.batches):
            plan = self.batches[self.epoch]
            steps = min(
                SHORT, self.objective.steps
            ) if self.epoch < self.plan.short_epochs else self.objective.steps
            while self.in_epoch < len(plan):
                places = plan[self.in_epoch]
                loss, accuracy = self.gradients(places, steps)
                norm = self.clip()
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    self._stop(loss, norm, places)
                self.whole = False
                self.update()
                self.step, self.in_epoch = self.step + 1, self.in_epoch + 1
                self.whole = True
                tokens += sum(len(self.rows[p]["ids"]) for p in places)
                if record:
                    rate = self.optimizer.param_groups[0]["lr"]
                    entry = {
                        "step": self.step, "loss": loss, "accuracy": [round(a, 4) for a in accuracy],
                        "norm": norm, "lr": rate
                    }
                    record.step(
                        entry, tokens / (time.time() - began),
                        self.step % self.log_every == 0 or self.step == self.total
                    )
                if time.time() - saved > self.save_seconds and self.in_epoch < len(plan):
                    self.save()
                    saved = time.time()
            self.epoch, self.in_epoch = self.epoch + 1, 0
            self.save()  # first: whatever goes wrong in validation, the epoch is not lost
            saved = time.time()
            self._validate(record)

    def _stop(self, loss: float, norm: float, places: list[int]) -> None:
        """Save the weights from before this batch if they are finite, and raise InputError: what is not
        finite, where, in which rows.
        """
        if all(bool(p.isfinite().all()) for p in self.parameters.values()):
            self.save()
        state = self.work / "state.pt"
        starts = "; ".join(str(self.rows[p]["ids"][self.rows[p]["answers"][0][0] :][:6]) for p in places[:3])
        raise InputError(
            f"the loss is {loss}, the norm of its gradient {norm} at step {self.step} (epoch {self.epoch + 1}, batch {self.in_epoch},"
            f" rows whose answers begin with the ids {starts})."
            + (
                f" The last good state is in {state}, but going on from there leads here again."
                if state.exists() else ""
            )
            + " Train with a smaller --lr or --clip in another --work, or leave these rows out"
        )

    @torch.no_grad()
    def _validate(self, record: Record | None) -> None:
        """By the first process, while the others wait for it."""
        if record and not any(entry.get("epoch") == self.epoch for entry in record.entries):
            head = self.trained()
            hits = valid = torch.zeros(self.objective.steps, dtype=torch.float64)
            with self.averaged():
                for places in batches(self.held_out, self.micro_tokens):
                    rows = [self.held_out[p] for p in places]
                    batch = self.objective.batch(rows, self.objective.steps)
                    right = self.objective.loss(
                        batch, self.features.read(rows), batch.scored, [0] * len(rows)
                    )[1]
                    hits, valid = hits + right.cpu(), valid + torch.tensor(batch.valid)
            entry = {"step": self.step, "epoch": self.epoch, "held_out": (hits / valid.clamp(min=1)).tolist()}
            if self.validator and (tau := self.validator.tau(head)):
                entry |= {"tau": tau, "tree": self.validator.tree_name}
            record.validation(entry)
            draw(record.entries, self.work / "curves.png")
        self.processes.wait()

    def trained(self) -> Head:
        """The head as it is to be used: of the average if there is one, reading raw features."""
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

    # -- state -------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict:
        """What defines a run, settings and data; a resumed run must have the same."""
        data = json.dumps([row["ids"] for row in self.held_out + self.rows]).encode()
        shapes = [(name, list(p.shape)) for name, p in self.parameters.items()]
        return {
            **vars(self.plan), **self.objective.settings(), "shapes": str(shapes),
            "data": hashlib.sha256(data).hexdigest(),
            "target": identity(self.objective.target),
        }

    def save(self) -> None:
        """Everything an exact resume needs, under a temporary name first; by the first process."""
        if not self.processes.first:
            return
        state = {
            "head": {name: p.detach() for name, p in self.parameters.items()}, "average": self.average,
            "optimizer": self.optimizer.state_dict(), "scale": self.objective.scale,
            "at": (self.step, self.epoch, self.in_epoch),
            "options": self.fingerprint(),
        }
        path = self.work / "state.pt"
        try:
            with atomic_path(path) as part:
                torch.save(state, part)
        except (OSError, RuntimeError) as e:  # torch.save raises RuntimeError where the disk is full
            raise InputError(
                f"{path}: the state cannot be written ({str(e).splitlines()[0]}); is the disk full?"
            ) from None

    def resume(self) -> bool:
        """Go on from WORK/state.pt if it is there. Raises InputError if it was made with other settings or
        data.
        """
        path = self.work / "state.pt"
        if not path.exists():
            return False
        try:
            state = torch.load(path, map_location=self.objective.device, weights_only=True)
            options = state["options"]
        except Exception as e:  # torch raises what the damage leads to
            raise InputError(f"{path}: damaged ({type(e).__name__}); delete it to start again") from None
        mine = self.fingerprint()
        differs = sorted(name for name in mine.keys() | options.keys() if mine.get(name) != options.get(name))
        if differs:
            what = ", ".join(differs)
            raise InputError(
                f"{path} was made with other settings or data ({what}); use another --work folder or delete it"
            )
        for into, from_ in ((self.parameters, state["head"]), (self.average, state["average"])):
            for name, p in into.items():
                p.data.copy_(from_[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.objective.scale = state["scale"]
        self.step, self.epoch, self.in_epoch = state["at"]
        return True

