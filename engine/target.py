"""Loaded targets, and the engines that are made of them."""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import extensions
from checkpoint.load import check_length, is_converted, load_model, read_config
from common.errors import InputError
from drafters import AUTO, Drafting, build_drafter, default_tree, methods_of
from engine.draft import Drafter, HeadDrafter
from engine.engine import Engine
from engine.memory import free_memory
from engine.request import Guide
from engine.runtime import Runtime
from engine.scheduler import Scheduler
from engine.step import TORCH, Step, step_of
from head import Head
from kernels.choose import choose_backend
from kernels.quantized import Scheme, quantize_linears
from model import Transformer
from schedulers.cost_model import LIMITS, AskingScheduler, CostScheduler, Tuner
from tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kernels.tp import Ranks

COMFORTABLE = 0.25  # share of the free memory that caches take by default, at most


def load_target(
    checkpoint: str | Path, runtime: Runtime = Runtime(), say: Callable[[str], None] | None = None,
    ranks: Ranks | None = None,
) -> Target:
    """Load a converted target. say: called with one line when something slow starts or ends.

    If our kernels cannot be compiled or loaded, it runs without `Runtime.compile`, and `say` gets the reason.
    ranks: deal it among these processes, which all call this. Raises InputError, one line, if anything is
    missing, damaged or too large.
    """
    checkpoint, say = Path(checkpoint), say or (lambda line: None)
    runtime.prepare()
    if ranks is not None:
        check_ranks(checkpoint, runtime, say, ranks)
    on_cpu = torch.device(runtime.device_name).type == "cpu"
    if not on_cpu and read_config(checkpoint, "target").get("delta_layers"):
        raise InputError(f"{checkpoint}: gated delta nets run on CPUs only yet; give --device cpu")
    model, config = load_model(checkpoint, runtime.device_name, runtime.torch_dtype, ranks)
    backend = choose_backend(
        runtime.device_name, runtime.compile and runtime.kernels, runtime.isa, say, runtime.kv == "int8"
    )
    target = Target(checkpoint, runtime, model, config, Tokenizer.load(checkpoint), say, backend)
    target.put_on_kernels(model)
    if not model.whole and (runtime.on_kernels or (ranks is not None and on_cpu)):  # PyTorch does the rest
        target = replace(target, runtime=replace(runtime, compile=False))
    if runtime.kv == "int8" and not model.whole:
        raise InputError(
            f"--kv int8: {checkpoint} does not run on our CPU kernels as a whole (fp16, fp8, odd sizes);"
            " leave it out"
        )
    if runtime.kv != "auto":
        model.Caches = backend.caches.get(runtime.kv) or extensions.load(extensions.CACHES[runtime.kv])
    return target


def check_ranks(checkpoint: Path, runtime: Runtime, say: Callable[[str], None], ranks: Ranks) -> None:
    """Print what each rank will hold, before weights are read.

    Raises InputError, with the numbers, if the ranks differ, or the target cannot be dealt or does not fit.
    """
    if runtime.autotune:
        raise InputError("--autotune: ranks would choose different kernels by time; leave it out")
    config, device = read_config(checkpoint, "target"), torch.device(runtime.device_name)
    ranks.agree(
        f"torch {torch.__version__}, {device.type}, kernels for {runtime.isa_name},"
        f" {torch.get_num_threads()} threads, {config.get('name')}", device
    )
    from checkpoint.sharded import shares_of, weigh

    shares = shares_of(config, ranks.count)
    total, most, whole = weigh(checkpoint, runtime.torch_dtype, shares)
    attending = config["num_layers"] - sum(config.get("delta_layers", ()))
    cached = 2 * attending * max(share.keys.count for share in shares)
    line = (
        f"{ranks.count} ranks: each holds at most {most / 1e9:.2f} GB of the target's {total / 1e9:.2f} GB"
        f" ({whole / 1e9:.2f} GB are whole on each), and caches {cached:,} numbers a token"
    )
    free, sharing = free_memory(device), ranks_sharing(device)
    if free is not None and most * sharing > free:
        raise InputError(
            f"{line}; {free / 1e9:.2f} GB are free for {sharing} of them here: take more ranks or"
            " machines, or quantise"
        )
    say(line)


def ranks_sharing(device: torch.device) -> int:
    """Return how many ranks share a memory: those of a machine share its processors', GPUs have their own."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1


def check_draft(checkpoint: str | Path, drafting: Drafting) -> None:
    """Raise InputError if what drafts for a checkpoint, converted or not, is not there.

    For before a large target is converted. Its own MTP layer comes with it.
    """
    if is_converted(drafting.draft or checkpoint):
        return
    from checkpoint.convert import default_folder, resolve_source  # not needed to decode a converted folder

    if drafting.draft:
        resolve_source(drafting.draft)
    elif not {AUTO, "mtp"} & {*methods_of(drafting.method)}:
        if Path(checkpoint).parent.is_dir():  # a name on the hub has nothing here yet
            resolve_source(checkpoint)
        drafting.folders(default_folder(checkpoint))


def converted(
    checkpoint: str | Path, drafting: Drafting, say: Callable[[str], None]
) -> tuple[Path, Drafting]:
    """Return the folder of a target, and what drafts for it; what is not ours is converted.

    say: as for `load_target`. Raises InputError if one of them is missing or of another kind.
    """
    check_draft(checkpoint, drafting)
    folder = Path(_converted_folder(checkpoint, say))
    if drafting.draft:
        of = None if drafting.names_model else folder
        drafting = replace(drafting, draft=_converted_folder(drafting.draft, say, of))
    return folder, drafting.at(folder, say)


def _converted_folder(checkpoint: str | Path, say: Callable[[str], None], of: Path | None = None) -> str:
    if is_converted(checkpoint):
        read_config(checkpoint)
        return str(checkpoint)
    from checkpoint.convert import converted_folder

    return converted_folder(checkpoint, say, of)


@dataclass(frozen=True)
class Target:
    """A loaded target. Several engines may share it; each has caches of its own."""

    checkpoint: Path
    runtime: Runtime
    model: Transformer
    config: dict  # its config.json
    tokenizer: Tokenizer | None
    say: Callable[[str], None]
    backend: Step = TORCH

    def engine(
        self, drafting: Drafting = Drafting(), *, batch: int = 1, max_seq_len: int | None = None,
        serves: bool = False,
    ) -> Engine:
        """Make an engine for up to `batch` requests at a time, whose trees shrink as they become more.

        max_seq_len: most tokens of a text, prompt included (default: see `room`). serves: requests come and
        go, so that steps for few of them are worth compiling. Raises InputError, one line, if what drafts is
        missing, damaged or does not fit; ValueError, with the numbers, if the caches do not fit in memory.
        """
        if batch < 1:
            raise ValueError(f"batch {batch}: must be at least 1")
        if max_seq_len is not None:
            check_length(max_seq_len, self.model.args.max_seq_len)
        drafting = drafting.at(self.checkpoint, self.say)
        max_seq_len = max_seq_len or self.room(drafting, batch)
        drafter = self._drafter(drafting, max_seq_len, batch)
        scheduler = self._scheduler(drafter, drafting)
        if isinstance(scheduler, CostScheduler):
            drafter = drafter.with_tree(scheduler.tuner.shapes[0])
        engine = Engine(
            self.model, drafter, batch=batch, max_seq_len=max_seq_len, stop_ids=self.config["stop_ids"],
            compile=self.runtime.compile, say=self.say, scheduler=scheduler,
            counts=(batch,) if self._compiles and not serves else None,
            tokenizer=self.tokenizer,
            guide=self.guide if self.tokenizer and self.config["stop_ids"] else None,
        )
        if self.backend.name == "cuda":
            from engine.check import check  # imports Triton, which takes time

            engine.self_check = check
        return engine

    def room(self, drafting: Drafting, batch: int) -> int:
        """Return the default of the most tokens of a text: the maximum of the target and of a draft model.

        The caches of `batch` such texts take at most `COMFORTABLE` of the free memory. A shorter text has a
        power of two tokens, 2,048 or more: compiled graphs are kept by the size of the caches.
        """
        device, args = self.model.embed.weight.device, self.model.args
        longest = int(min(args.max_seq_len, args.short_length))
        if drafting.names_model and drafting.draft:
            longest = min(longest, read_config(drafting.draft, "target")["max_seq_len"])
        most = COMFORTABLE * (free_memory(device) or 0) / ranks_sharing(device)
        fits = int(most / self.model.cache_bytes(batch, 1024) * 1024)
        if self.model.ranks is not None:  # one length for all
            fits = int(self.model.ranks.every(torch.tensor([fits], device=device)).min())
        return longest if fits >= longest else min(longest, max(1 << fits.bit_length() >> 1, 2048))

    @property
    def _compiles(self) -> bool:
        """True if steps go through torch.compile."""
        model = self.model
        return self.runtime.compile and not step_of(model).batch_invariant and not model.keeps_state

    @cached_property
    def _grammars(self):
        grammar = extensions.load(extensions.JSON_SCHEMA)
        return grammar.Grammars(self.tokenizer, self.model.args.vocab_size, self.config["stop_ids"])

    def guide(self, schema: str) -> Guide:
        """Make the guide that keeps a text to a JSON schema. Raises InputError if the schema is none."""
        return self._grammars.guide(schema)

    def put_on_kernels(self, *models: torch.nn.Module, quantised: bool = False) -> None:
        """Put models on our kernels, if this target runs there. quantised: 16-bit ones first."""
        backend = self.backend
        mode = backend.quantised_at_load.get(self.model.embed.weight.dtype)
        for model in models if quantised and mode else ():
            own = not isinstance(model, Head) or model.args.own_lm_head
            quantize_linears(model, Scheme(mode, 0, mode if own else None))
        if not backend.prepare(*models):
            self.say(
                "parts of this model do not run on our kernels (fp16, fp8, odd sizes) but on PyTorch: slower,"
                " and speculative text may leave plain text at near ties; --dtype bf16 suits fp16 ones"
            )

    def _drafter(self, drafting: Drafting, max_seq_len: int, batch: int = 1) -> Drafter | None:
        usual = default_tree(
            self.runtime.device_name, "quantization" in self.config, self.runtime.isa_name, batch
        )
        build = partial(
            build_drafter, checkpoint=self.checkpoint, max_seq_len=max_seq_len, target=self.model,
            tokenizer=self.tokenizer, default_tree=usual,
            prepare=lambda *models: self.put_on_kernels(*models, quantised=drafting.int8),
        )
        try:
            return build(drafting)
        except InputError as e:
            if not drafting.chosen:
                raise
            self.say(f"--speculate auto: {e}; prompt lookup drafts alone")
            return build(Drafting("lookup"))

    def _scheduler(self, drafter: Drafter | None, drafting: Drafting) -> Scheduler | None:
        """Return the scheduler of steps; None: always the drafter's own tree.

        With --tree auto, and without --tree on a CPU where no step is compiled, it sizes trees by time.
        Several
        ranks draft one tree: each measures other times, and would choose another.
        """
        asks = drafter is not None and drafter.may_pass and not self.model.embed.weight.is_cuda
        asking = AskingScheduler() if asks else None
        free = not (self.model.embed.weight.is_cuda or self._compiles)
        if self.model.ranks is not None:
            if drafting.tree == "auto":
                raise InputError("--tree auto: several ranks cannot choose trees by time yet; give T,D,K")
            return asking
        wanted = drafting.tree == "auto" or (drafting.tree is None and free)
        grower = _grower(drafter)
        if not wanted or grower is None:
            return asking
        if not free:
            return CostScheduler(Tuner((grower.shape, grower.shape), cuts=False))
        deepest = LIMITS[0].depth if grower.deepest is None else grower.deepest
        shapes = tuple(replace(shape, depth=min(shape.depth, deepest)) for shape in LIMITS)
        return CostScheduler(Tuner(shapes))


def _grower(drafter: Drafter | None) -> HeadDrafter | None:
    """Return the drafter, maybe one of two, that grows trees with a head, as large ones as are tried."""
    grower = drafter and drafter.grown
    if grower is None or grower.head.args.draft_vocab_size < LIMITS[0].width:
        return None
    return grower if grower.deepest is None or grower.deepest >= 2 else None
