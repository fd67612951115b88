"""One run of `train.py`: collect the text, train a head on it, export the head.

Each step goes on where an earlier run of the same command stopped, also after a kill. WORK/data holds the
text, WORK/state.pt the state of the training, WORK/log.jsonl its log; OUT is written at the end.
"""
from __future__ import annotations

import argparse
import json
import shlex
import shutil
import time
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.folder import CALIBRATION, CONFIG, WEIGHTS, check_config
from checkpoint.heads import write_head
from checkpoint.loading import identity, identity_of, load_model
from checkpoint.writer import staging
from common.cli import note
from common.errors import InputError
from common.files import write_text
from engine.calibration import Calibration
from engine.dealing import prepare
from engine.runtime import Runtime, check_compiler, check_device
from kernels.cpu import try_kernels
from kernels.parallel import learnt_from
from networks.head import Head
from training import corpus, figures
from training.batches import Draw
from training.begun_head import begun_args, begun_head, load_start
from training.card import write_card
from training.chains import eagle3_outputs
from training.choices import BLOCK_KINDS, DRAFT_VOCAB, MULTI_TOKEN
from training.collect import Collector
from training.copies import load_copy
from training.features import Features, Reader, StoredFeatures
from training.layouts import layout_of
from training.new_head import head_args, new_head, new_multi_token_heads
from training.objective import (
    BlockObjective,
    Eagle1Objective,
    Eagle3Objective,
    MultiTokenObjective,
    Objective,
)
from training.plan import Plan
from training.precision import training_copy
from training.processes import Processes
from training.shapes import shape_of
from training.text import collect_text
from training.trainer import Trainer
from training.validate import Validator, decoding_copy

CURVES, CARD, SPECULATORS = "curves.png", "README.md", "speculators"
WRITTEN = CONFIG, WEIGHTS, CURVES, CARD, SPECULATORS, CALIBRATION  # to OUT


def check_machine(o: argparse.Namespace) -> None:
    """Raise InputError unless the device and the compiler can be used. Nothing slow is done."""
    check_device(o.device)
    if torch.device(o.device).type == "cpu" and o.compile_loss:
        check_compiler()


@dataclass(frozen=True)
class Text:
    """What a head learns from: rows (see `training.corpus`), and the ids that it drafts from and reads."""

    rows: list[dict]
    held_out: list[dict]
    figures: dict  # see `training.figures.describe`
    draft_ids: Tensor
    covered: float  # share of the answer tokens that are draft ids
    unused: int  # an id that the text does not hold: the mask of block heads


class Session:
    """A run with the options `o` of `train.py`, in one of several processes."""

    def __init__(self, o: argparse.Namespace, processes: Processes):
        """Load the target, or this process's part of it. Raises InputError or ValueError if no head can be
        trained for it.
        """
        self.o, self.processes, self.work, self.out = o, processes, Path(o.work), Path(o.out)
        runtime, ranks = Runtime(o.device, o.dtype), processes.ranks
        if ranks:
            prepare(Path(o.checkpoint), runtime, self.say, ranks)
        loaded, self.config = load_model(o.checkpoint, o.device, runtime.torch_dtype, ranks)
        self.target = learnt_from(loaded, check_config(self.config)) if ranks else loaded
        self.shape = shape_of(o)
        self.start = load_start(o.start, self.target) if o.start else None
        if self.start:  # what cannot be shows before anything slow is done
            begun_args(self.start, o.kind, len(self.start.head.draft_ids), self.shape)
        elif o.kind not in MULTI_TOKEN:  # a shape that cannot be shows before anything slow is done
            head_args(self.target.args, o.kind, self.target.args.vocab_size, self.shape)
        self.work.mkdir(parents=True, exist_ok=True)
        if o.compile and torch.device(o.device).type == "cpu":
            o.compile = try_kernels(note)
        self.decoding = decoding_copy(loaded) if o.compile else loaded
        self.packed = self.decoding is not loaded
        if ranks and self.decoding.embed.weight.device.type == "cpu":
            o.compile = o.compile and self.decoding.on_kernels  # torch.compile is not for ranks on CPUs
        self.reader = Reader(*load_copy(o, "--reader", o.reader, loaded, ranks)) if o.reader else None
        self.learning = training_copy(self.target, self.work, processes.first_says)
        if ranks:  # a part of the target has another identity than all of it
            casts = runtime.torch_dtype, self.learning.embed.weight.dtype
            self.name = identity_of(o.checkpoint, casts[0])
            self.learning_name = identity_of(o.checkpoint, *casts)
        else:
            self.name, self.learning_name = identity(self.target), identity(self.learning)

    def run(self, command: list[str]) -> None:
        """Collect, train, export. command: the arguments of the command line, for the model card.

        Raises InputError and OSError on bad input.
        """
        text = self.collect()
        if self.o.collect_only:
            return
        trainer = self.prepare(text)
        complete, began = trainer.step == 0, time.time()
        log = trainer.run()
        seconds, head = time.time() - began if complete else None, trainer.trained()
        if not all(bool(p.isfinite().all()) for p in head.parameters()):
            raise InputError(
                "the last update left weights that are not finite: use a smaller --lr or --clip, not with"
                f" --work {self.work}"
            )
        calibration = self.calibrate(trainer, head)
        if self.processes.first:
            self.export(text, trainer, head, calibration, log, seconds, command)

    def say(self, line: str) -> None:
        """Print a line, in the first process."""
        if self.processes.first:
            note(line)

    # -- collect ---------------------------------------------------------------------------------------------

    def collect(self) -> Text:
        """The text, a part of it held out, and the draft vocabulary that it asks for."""
        o, vocab_size = self.o, self.target.args.vocab_size
        write = Collector.write
        if o.queue == "ray":
            from training.ray_queue import write_on_ray

            write = partial(write_on_ray, o)
        rows = collect_text(
            o, self.decoding, self.name, self.config["stop_ids"], self.processes, write
        )
        held_out, rows = corpus.hold_out(rows)
        if not rows:
            raise InputError(
                "fewer than two different prompts with usable answers: one is held out,"
                " none is left to train on"
            )
        described = figures.describe(rows, vocab_size)
        draft_ids, covered = torch.arange(vocab_size), 1.0
        if self.start and not o.draft_vocab:
            draft_ids = self.start.head.draft_ids.cpu()
            covered = figures.covered(figures.counts_of(rows), draft_ids.tolist())
        elif o.kind != "eagle":
            size = o.draft_vocab or min(DRAFT_VOCAB, vocab_size)
            draft_ids, covered = figures.draft_vocabulary(figures.counts_of(rows), size, vocab_size)
        if o.learn == "text":
            rows = list(map(corpus.whole, rows))
        if self.processes.first:
            write_text(self.work / "data.json", json.dumps(described, indent=1) + "\n")
        self.say(figures.report(described))
        self.say(f"{len(held_out)} more conversations are held out; {len(draft_ids):,} draft ids cover"
                 f" {covered:.2%}")
        mask = figures.unused(rows + held_out, vocab_size)
        return Text(rows, held_out, described, draft_ids, covered, mask)

    # -- train -----------------------------------------------------------------------------------------------

    def prepare(self, text: Text) -> Trainer:
        """The training of a new head on this text, or the one that an earlier run has begun."""
        o, objective, dtype = self.o, self._objective(text), self.target.embed.weight.dtype
        if o.cache_features is None:
            room = o.feature_memory * 2**30
            features = Features(self.learning, objective.aux_layers, room, dtype, self.reader)
        else:
            folder = Path(o.cache_features or self.work / "features")
            features = StoredFeatures(
                self.learning, objective.aux_layers, folder, self.processes, dtype, self.name, self.reader
            )
            features.fill(text.rows + text.held_out, max(8192, o.batch_tokens))
        trainer = Trainer(
            objective, features, text.rows, text.held_out,
            Plan(**{field.name: getattr(o, field.name) for field in fields(Plan)}), self.work,
            processes=self.processes, micro_tokens=o.micro_tokens, validator=self._validator(text.held_out),
            log_every=o.log_every, save_seconds=o.save_seconds, name=self.learning_name,
        )
        if trainer.resume():
            self.say(f"resumed at step {trainer.step} of {trainer.total}")
        return trainer

    def _objective(self, text: Text) -> Objective:
        """A new head and its loss."""
        o, compiled, draft_ids = self.o, self.o.compile_loss, text.draft_ids
        losses = ((o.loss, 1.0),) if o.loss == "ce" else (("ce", o.ce_share), (o.loss, 1 - o.ce_share))
        if compiled is None:
            # On a CPU the products are nearly all of the time, and compiling takes minutes.
            compiled = torch.device(o.device).type != "cpu"
        if o.kind in MULTI_TOKEN:
            prefix = o.kind == "hydra" and o.prefix is not False
            heads = new_multi_token_heads(
                self.learning, o.kind, draft_ids, o.guesses or 4, o.blocks or 1, prefix, o.seed
            )
            return MultiTokenObjective(self.learning, heads, compiled, losses)
        shape, taken = replace(self.shape, mask_id=text.unused), set()
        if self.start:
            head, taken = begun_head(self.learning, o.kind, self.start, draft_ids, shape, o.seed)
            self.say(f"{len(taken)} tensors begin as those of {o.start}")
        else:
            head = new_head(self.learning, o.kind, draft_ids, shape, o.seed)
        if o.kind == "eagle":
            return Eagle1Objective(self.learning, head, compiled, o.noise)
        if o.kind in BLOCK_KINDS:
            draw = Draw(o.anchors, o.keep if o.kind == "p-eagle" else 1.0)
            made = BlockObjective(self.learning, head, compiled, losses, draw)
        else:
            outputs = partial(eagle3_outputs, again=o.checkpoint_gradients)
            compiled = compiled and not o.checkpoint_gradients
            made = Eagle3Objective(self.learning, head, o.steps, compiled, losses, outputs)
        if self.start:
            made.start, made.taken = identity(self.start.head), taken
        return made

    def _validator(self, held_out: list[dict]) -> Validator | None:
        """What decodes the first held-out prompts that leave room for an answer; None if there are none."""
        o, longest = self.o, self.target.args.max_seq_len
        prompts = dict.fromkeys(tuple(row["ids"][: row["answers"][0][0]]) for row in held_out)
        prompts = [list(ids) for ids in prompts][: o.validate_prompts]
        prompts = [ids for ids in prompts if len(ids) + o.validate_tokens <= longest]
        if not prompts:
            if o.validate_prompts:
                self.say(f"no held-out prompt leaves room for --validate-tokens {o.validate_tokens}:"
                         " tau is not measured")
            return None
        return Validator(
            self.decoding, prompts, self.config["stop_ids"], o.tree, o.validate_tokens,
            packed=self.packed,
        )

    # -- export ----------------------------------------------------------------------------------------------

    def calibrate(self, trainer: Trainer, head: Head) -> Calibration | None:
        """What the trees of a head are accepted for, measured by the first team; None if it cannot be."""
        if self.processes.team or not trainer.validator or self.o.kind in MULTI_TOKEN:
            return None
        try:
            return trainer.validator.calibration(head, self.say)
        except InputError as e:
            self.say(f"{self.out}: gets no {CALIBRATION} ({e})")
            return None

    def export(
        self, text: Text, trainer: Trainer, head: Head, calibration: Calibration | None, log: list[dict],
        seconds: float | None, command: list[str],
    ) -> None:
        """Write the head, its calibration, its model card and its curves to OUT. seconds: None if the run was
        interrupted.
        """
        o, out = self.o, self.out
        accuracy = next((e["held_out"][0] for e in reversed(log) if e.get("held_out")), None)
        if accuracy is not None and accuracy < 0.01:
            note(f"warning: the head guesses {accuracy:.1%} of the target's choices in held-out text:"
                 " it has learnt nothing; try a smaller --lr")
        both = o.layout == "both"
        layout = layout_of(o.layout, o.kind, vars(head.args), self.config["vocab_size"])
        launch = ["python"]
        if self.processes.count > 1:
            launch = ["torchrun", "--nproc-per-node", str(self.processes.count)]
        size = 2 * sum(t.numel() for t in head.own_state().values()) * (1 + both)
        with staging(out, size, kept=lambda old: old.name not in WRITTEN) as folder:
            write_head(head, folder, layout, self.config)
            write_card(
                folder, command=shlex.join([*launch, "train.py", *command]), head=head, kind=o.kind,
                target=self.config.get("name", Path(o.checkpoint).name), figures=text.figures,
                covered=text.covered, plan=trainer.plan,
                steps=trainer.objective.steps, log=log, seconds=seconds,
            )
            if (self.work / CURVES).exists():
                shutil.copyfile(self.work / CURVES, folder / CURVES)
            if calibration:
                calibration.write(folder)
            if both:
                speculators = folder / SPECULATORS
                write_head(head, speculators, "speculators", self.config)
                for name in (CARD, CURVES, CALIBRATION):
                    if (folder / name).exists():
                        shutil.copyfile(folder / name, speculators / name)
        force = " --force" if (Path(o.checkpoint) / o.kind).exists() else ""
        print(f"wrote {o.out}; next: python convert_checkpoint.py --checkpoint {o.out}"
              f" --target {o.checkpoint}{force}")
