"""A run of `train.py`: generate the data, train a head on it, write the head.

The same command resumes an interrupted run. Files in WORK, which is OUT-work: data/ has the training data,
state.pt the training state, log.jsonl the metrics, seconds the time used so far.
"""
from __future__ import annotations

import argparse
import copy
import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import torch

from checkpoint.convert import converted_folder
from checkpoint.folder import weights_fingerprint
from checkpoint.load import CONFIG, FORMAT, WEIGHTS, load_head, load_model, read_config
from checkpoint.source import Entry, resolve_source
from checkpoint.writer import Planned, write_checkpoint
from common.cli import log_stderr
from common.errors import InputError, counted, read_text
from common.names import program
from common.writing import staging, write_text
from drafters.estimate import describe, measured_flops, min_minutes, phase_hours, state_bytes
from engine.engine import Engine
from engine.step import TORCH_BACKEND
from head import Head
from kernels.choose import choose_backend
from networks.weights import own_state
from tokens.dataset import read_chats, read_openings
from tokens.tokenizer import Tokenizer
from training import data
from training.collector import Collector
from training.features import Features, training_copy, without_layers
from training.heads import HEAD_OPTIONS, TRAINED, HeadShape, head_args, new_head, own_weights
from training.processes import ProcessGroup
from training.report import write_card
from training.trainer import STATE, Plan, Trainer, check_same, read_state, state_errors
from training.validate import MAX_ANSWER_TOKENS, acceptance_length

MAX_DATA_FRACTION = 0.5  # of the time left when a run with --minutes starts, for data generation
LK_WEIGHT = 0.5  # of the acceptance loss with --loss lk, see `training.losses`
DRAFT_VOCAB = 8192  # default size of the draft vocabulary
SECONDS = "seconds"  # file in WORK: seconds used by all runs, which count toward --minutes
LOW_TAU = 1.8  # acceptance length below which a warning is printed
OUTPUT_FILES = CONFIG, WEIGHTS, "README.md"


class Session:
    """A run with the options `args` of `train.py`. Times are in `time.monotonic`.

    - command: the command line, for the model card
    - started: when the command started
    - start_time: `started` minus the seconds used by earlier runs; --minutes counts from it
    - data_deadline: when data generation must end
    - seconds_after_data: rest of --minutes after the deadline
    - min_minutes: estimated minimum of --minutes
    - rows, held_out: training and validation set (see `training.data`), set by `collect`
    - draft_ids: draft vocabulary, set by `collect`
    """

    def __init__(self, args: argparse.Namespace, command: list[str], started: float):
        """Check the options and their files without loading a model. Raises InputError."""
        self.args, self.command = args, command
        self.out, self.work = Path(args.out), Path(args.out.rstrip("/") + "-work")
        if self.out.is_dir() and any(self.out.iterdir()) and not (self.work / STATE).exists():
            raise InputError(f"--out {args.out}: holds files, but {self.work} has no state of a run; choose"
                             " another folder or delete them")
        args.head = {name: getattr(args, name) for name in HEAD_OPTIONS}
        self.plan = Plan(**{field.name: getattr(args, field.name) for field in fields(Plan)})
        state, earlier = read_state(self.work), 0.0
        self.resumed = state is not None
        if state:
            check_same(self.work, self.plan.options(), state)
            # A killed run wrote no SECONDS file: use the time in the last saved state.
            with state_errors(self.work):
                earlier = state["before"] + state["seconds"]
        if (path := self.work / SECONDS).exists():
            if not re.fullmatch(r"\d+(\.\d*)?\n?", text := read_text(path)):
                raise InputError(f"{path}: is {text[:40]!r}, not a number of seconds; delete it")
            earlier = max(earlier, float(text))
        self.start_time = started - earlier
        remaining = 60 * args.minutes - earlier if args.minutes else math.inf
        self.data_deadline = started + remaining * MAX_DATA_FRACTION
        self.seconds_after_data = remaining * (1 - MAX_DATA_FRACTION)
        self.min_minutes = 1
        prompts = read_chats(args.prompts, log_stderr) if args.prompts else []
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(args.seed)).tolist()
        self.prompts = [prompts[i] for i in order]  # a run cut short uses prompts from all parts of the file
        self.openings = read_openings(args.openings) if args.openings else ()
        self.shards = [path for folder in args.shards for path in data.shards_in(Path(folder))]
        if args.start:
            resolve_source(args.start)
        args.checkpoint = converted_folder(args.checkpoint, log_stderr)
        args.start = args.start and converted_folder(args.start, log_stderr, args.checkpoint)
        self.config = read_config(args.checkpoint, "target")
        self.max_seq_len = args.max_prompt_tokens + args.max_new_tokens
        if self.max_seq_len > (limit := self.config["max_seq_len"]) and (args.prompts or args.synthesize):
            raise InputError(f"--max-prompt-tokens plus --max-new-tokens is {self.max_seq_len} tokens; the"
                             f" target's maximum is {limit}")
        self.shape = HeadShape(args.layers, args.states, args.drafts, args.markov_rank)

    def run(self, processes: ProcessGroup, device: str) -> None:
        """Load the target, generate data, train, write the head. Raises InputError and OSError."""
        self.processes, self.device = processes, device
        try:
            self._run()
        finally:
            if self.args.minutes and processes.is_main and self.work.is_dir():
                write_text(self.work / SECONDS, f"{time.monotonic() - self.start_time:.1f}\n")

    def _run(self) -> None:
        args, processes, device = self.args, self.processes, self.device
        log_stderr(f"loading {args.checkpoint}")
        if count := args.synthesize + len(self.prompts):
            flops = measured_flops(device)
            workload = self.config, count, args.max_new_tokens, args.epochs, flops
            hours = phase_hours(*workload)
            self.training_seconds = 3600 * (hours["features"] + hours["training"])
            if not args.minutes:
                log_stderr(describe(*workload))
            self.min_minutes = min_minutes(self.config, args.max_new_tokens, flops)
            if args.minutes and args.minutes < self.min_minutes:
                raise InputError(f"--minutes {args.minutes:g}: this model needs at least {self.min_minutes}"
                                 " on this machine")
        self.load()
        if time.monotonic() > self.data_deadline and not self.resumed:
            raise InputError(f"--minutes {args.minutes:g}: half of it went to loading;"
                             f" {self._raise_minutes()}")
        self.work.mkdir(parents=True, exist_ok=True)
        self.collect()
        if args.collect_only:
            return
        trainer = self.prepare()
        log = trainer.run()
        if processes.is_main:
            self.write(trainer, trainer.objective.trained(), log)

    def _raise_minutes(self) -> str:
        """Return advice: four times the time used so far, of which at most half was for data."""
        used = (time.monotonic() - self.start_time) / 60
        return f"raise --minutes to {math.ceil(4 * used) + self.min_minutes}"

    def load(self) -> None:
        """Load the target and --start, and the kernels. Raises InputError and OSError on bad input."""
        args, ranks, device = self.args, self.processes.target_ranks, self.device
        self.target, _ = load_model(args.checkpoint, "cpu" if ranks else device)
        if self.target.embed.dtype == torch.float16:
            self.target, _ = load_model(args.checkpoint, "cpu" if ranks else device, torch.bfloat16)
        vocab_size = self.target.args.vocab_size
        self.start = load_head(args.start, self.target) if args.start else None
        # Reject an invalid shape before anything slow.
        head_args(self.target.args, args.kind, args.draft_vocab or vocab_size, self.shape, self.start)
        on_cpu = torch.device(device).type == "cpu"
        backend = choose_backend("cpu", log=log_stderr) if on_cpu else TORCH_BACKEND
        self.compiled = not on_cpu or backend is not TORCH_BACKEND
        # Training needs unpacked weights. Features of a quantized target are computed by its kernels instead.
        self.identity, self.decoding = weights_fingerprint(self.target), self.target
        self.separate = ranks is not None or bool(self.config.get("quantization", {}).get("mode"))
        if ranks:
            self.decoding, _ = load_model(args.checkpoint, device, self.target.embed.dtype, ranks)
        if self.separate:
            self.target = without_layers(self.target).to(device)
        elif backend is not TORCH_BACKEND:
            self.decoding = copy.deepcopy(self.target)
        backend.prepare(self.decoding)

    # -- data ------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Generate and read the data, split it, and choose the draft vocabulary."""
        args, vocab_size = self.args, self.target.args.vocab_size
        self.held_out, self.rows = data.hold_out(self._rows())
        if not self.rows:
            raise InputError("fewer than two different prompts with usable answers: one is held out, none"
                             f" is left to train on; {self._raise_minutes() if args.minutes else 'add data'}")
        if self.start and not args.draft_vocab:
            self.draft_ids = self.start.draft_ids.cpu()
        elif "draft_vocab" in TRAINED[args.kind].options:
            size = args.draft_vocab or min(DRAFT_VOCAB, vocab_size)
            self.draft_ids = data.draft_vocabulary(self.rows, size, vocab_size)
        else:
            self.draft_ids = torch.arange(vocab_size)
        sources = ", ".join(f"{name} {n:,}" for name, n in Counter(r["source"] for r in self.rows).items())
        tokens = sum(end - begin for row in self.rows for begin, end in row["answers"])
        self.report = (f"{len(self.rows):,} conversations ({sources}) with {tokens:,} answer tokens,"
                       f" {len(self.held_out)} more held out")
        log_stderr(self.report)

    def _rows(self) -> list[dict]:
        """Generate missing conversations and read all. Raises InputError if there are no usable answers."""
        args, target = self.args, self.target.args
        lines = data.read_shards(self.shards, target.vocab_size, self.identity)
        if self.prompts or args.synthesize:
            collector = self._collector()
            collector.from_prompts(self.prompts)
            collector.synthesize(args.synthesize, self.openings)
            num_planned = len(collector.planned)
            training_seconds = min(self.training_seconds, self.seconds_after_data)
            collector.write(0.0 if self.resumed else self.data_deadline, training_seconds)
            if self.resumed and (num_finished := len(collector.planned)) < num_planned:
                if not num_finished:
                    raise InputError(f"{self.work / STATE} was made with other data or another target; use"
                                     " another --out, or delete it and the file seconds next to it")
                log_stderr(f"resuming with {num_finished:,} finished conversations of {num_planned:,}")
            lines += collector.read(target.vocab_size)
        rows, skipped = data.training_rows(lines, min(args.max_len, target.max_seq_len))
        for reason, count in skipped.most_common(9):  # a template may give a different reason each time
            log_stderr(f"skipped {counted(count, 'conversation')}: {reason}")
        if not rows:
            too_short = f", or --minutes {args.minutes:g} ended before they were generated:"
            too_short += f" {self._raise_minutes()}"
            raise InputError(f"no usable answers: all have fewer than {data.MIN_ANSWER_TOKENS} tokens or are"
                             f" beyond --max-len {args.max_len}{too_short if args.minutes else ''}")
        return rows

    def _collector(self) -> Collector:
        """Return the collector that generates conversations with the target."""
        args, stop_ids, target = self.args, self.config["stop_ids"], self.decoding
        tokenizer = Tokenizer.load(args.checkpoint)
        if tokenizer is None or not tokenizer.has_template:
            raise InputError(f"{args.checkpoint}: generating data needs a tokenizer with a chat template")
        batch, max_seq_len = args.decode_batch, min(self.max_seq_len, target.args.max_seq_len)
        engine = Engine(
            target, batch=batch, max_seq_len=max_seq_len, stop_ids=stop_ids, compile=self.compiled,
            log=log_stderr,
            # Capture graphs for this batch size only.
            batch_sizes=(batch,) if target.embed.device.type == "cuda" else None,
        )
        return Collector(
            engine, tokenizer, self.work / "data", stop_ids=stop_ids, seed=args.seed,
            target=self.identity, max_new_tokens=args.max_new_tokens,
            temperature=args.temperature, max_prompt_tokens=args.max_prompt_tokens, processes=self.processes,
        )

    # -- train -----------------------------------------------------------------------------------------------

    def prepare(self) -> Trainer:
        """Return the trainer of a new head, with the state of an earlier run restored if there is one."""
        log_stderr("initializing the head; computing target features")
        args, target = self.args, training_copy(self.target)
        max_length = max(len(row["ids"]) for row in self.rows)
        mask_id = data.rarest_id(self.rows + self.held_out, target.args.vocab_size)
        shape = replace(self.shape, mask_id=mask_id, max_length=max_length)
        head = new_head(target, args.kind, self.draft_ids, shape, args.seed, self.start)
        # On a CPU, matrix products dominate and compiling takes minutes.
        compiled, lk = torch.device(self.device).type != "cpu", LK_WEIGHT if args.loss == "lk" else 0.0
        objective = TRAINED[args.kind].objective(
            target, head, args.steps, lk=lk, compiled=compiled, start=self.start
        )
        features = Features(
            self.decoding if self.separate else target, objective.aux_layers,
            cache_bytes=state_bytes() // self.processes.world_size, dtype=self.target.embed.dtype,
            read_dtype=target.embed.dtype, identity=self.identity if self.processes.target_ranks else "",
        )
        trainer = Trainer(
            objective, features, self.rows, self.held_out, self.plan, self.work, processes=self.processes,
            tau=self._tau(),
        )
        if self.resumed:
            log_stderr(f"resumed at step {trainer.step} of {trainer.total}")
        seconds = time.monotonic() - self.start_time - trainer.seconds if self.processes.is_main else 0.0
        before = torch.tensor(seconds, device=objective.device)
        self.processes.all_reduce([before])  # rank 0's value on all ranks, so that they stop at the same step
        trainer.before = float(before)
        return trainer

    def _tau(self) -> Callable[[float, Head], float | None] | None:
        """Return `acceptance_length` bound to the held-out prompts that fit, None if none does."""
        prompts = dict.fromkeys(tuple(row["ids"][: row["answers"][0][0]]) for row in self.held_out)
        prompts = [list(ids) for ids in prompts][: self.args.validate_prompts]
        prompts = [ids for ids in prompts if len(ids) + MAX_ANSWER_TOKENS <= self.target.args.max_seq_len]
        stop_ids = self.config["stop_ids"]
        return partial(acceptance_length, self.decoding, prompts, stop_ids) if prompts else None

    # -- result ----------------------------------------------------------------------------------------------

    def write(self, trainer: Trainer, head: Head, log: list[dict]) -> None:
        """Write the head in bfloat16 and its model card to OUT, a converted folder."""
        args, kind, plan = self.args, TRAINED[self.args.kind], []
        for name, tensor in own_state(head).items():
            dtype = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
            entry = Entry(tensor.shape, tensor.dtype, tensor.cpu)
            plan.append(Planned(name, tuple(tensor.shape), dtype, [entry]))
        weights = sum(t.numel() for t in own_weights(head).values())
        facts = [
            f"{weights / 1e6:.1f} million parameters, draft vocabulary {head.args.draft_vocab_size:,}",
            self.report,
            f"{counted(trainer.objective.steps, 'draft step')}, {counted(trainer.step, 'optimizer step')}"
            f" in {trainer.seconds / 60:.0f} minutes",
        ]
        tau = next((entry["tau"] for entry in reversed(log) if "tau" in entry), 0)
        if tau < LOW_TAU:
            measured = f"is {tau:.2f}" if tau else "was not measured"
            log_stderr(f"warning: acceptance length {measured}; below {LOW_TAU} drafting rarely reduces"
                       " latency. Train longer, on more data")
        with staging(self.out, kept=lambda old: old.name not in OUTPUT_FILES) as folder:
            config = {"format": FORMAT, "kind": args.kind} | asdict(head.args)
            write_checkpoint(folder, config, plan, quiet=True)
            name = self.config.get("name", Path(args.checkpoint).name)
            write_card(folder, title=f"{kind.title} for {name}", facts=facts, log=log,
                       command=shlex.join(["python", "train.py", *self.command]))
        folders = f"--checkpoint {shlex.quote(args.checkpoint)} --draft {shlex.quote(args.out)}"
        print(f"wrote {args.out}; next:\n{program('generate')} {folders} --compare --prompt \"Hello!\"")
