"""Runtime options: device, dtype, compiler. Load a target model; build its drafter and its engine."""
from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path

import torch

import extensions
from checkpoint.load import check_length, class_of, load_model, read_config, read_config_if_converted
from common.cli import dtype_name, is_distributed, log_stderr
from common.errors import InputError, first_line
from common.machine import free_memory, use_threads
from common.schema import Flag, schema_of
from engine.draft import Drafter
from engine.drafting import DraftOptions, build_drafter
from engine.engine import Engine
from engine.step import TORCH_BACKEND, Backend, step_of
from model import Transformer
from tokens.tokenizer import Tokenizer

MAX_CACHE_FRACTION = 0.25  # of the free memory, for caches, unless --max-seq-len is given
DEVICE = re.compile(r"cpu(:0)?|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class Runtime:
    """Runtime of a target and its drafter.

    Without `compile` no C++ compiler is needed. In 16 bits, only our CPU kernels guarantee that output with
    drafting equals output without it.
    """

    device: str | None = None  # None: cuda if there is one, else cpu
    dtype: str | None = None  # a name of `common.cli.DTYPES`; None: as stored
    compile: Flag = True  # run through torch.compile
    kernels: Flag = True  # when compiling: our own kernels, see kernels/
    autotune: Flag = False  # torch.compile times several kernels for each matrix product; process-wide
    isa: str | None = None  # of the kernels, a name of `kernels.isa`; None: EAGLE_ISA, or the best
    # Keys and values of the target: "auto", in its dtype; "int8", on our CPU kernels; "fp8", everywhere else.
    kv: str = "auto"

    def __post_init__(self):
        values = vars(self)
        if type(self.device) is int:  # as in transformers
            values["device"] = "cpu" if self.device < 0 else f"cuda:{self.device}"
        for name, value in values.items():
            if isinstance(value, (torch.device, torch.dtype)):
                values[name] = str(value).removeprefix("torch.")

    @classmethod
    def from_options(cls, args) -> Runtime:
        """Return the runtime options of a command line, see `common.cli.Options.add_runtime`."""
        options = vars(args)
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})

    @property
    def device_name(self) -> str:
        """The device; by default cuda if available, else cpu."""
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype of torch; None: as stored. Raises InputError on an unknown name."""
        return None if self.dtype is None else getattr(torch, dtype_name(self.dtype))

    @property
    def on_cpu_kernels(self) -> bool:
        """True if the modules that our CPU kernels support run on them."""
        return self.compile and self.kernels and torch.device(self.device_name).type == "cpu"

    @property
    def isa_name(self) -> str | None:
        """The CPU kernels' instruction set, None without them. Raises InputError as `kernels.isa.choose`."""
        return extensions.load(extensions.ISA)(self.isa).name if self.on_cpu_kernels else None

    def prepare(self) -> None:
        """Check the options and set PyTorch's state for this process: threads, GPU, precision, compile cache.

        Raises InputError if an option is invalid or something is missing.
        """
        schema_of(Runtime).check(vars(self))
        use_threads()
        check_device(self.device_name)
        device = torch.device(self.device_name)
        if device.index is not None and device.type == "cuda":
            torch.cuda.set_device(device)
        # Disable cuDNN attention, PyTorch's first choice with a mask: it builds a plan for every shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # Otherwise cuBLAS may accumulate in 16 bits.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        _ = self.torch_dtype, self.isa_name  # both raise InputError on an unknown name
        if self.kv != "auto":
            extensions.load(extensions.CHECK_KV)(self.kv, self.on_cpu_kernels)
        if self.compile and not self.on_cpu_kernels:  # with our CPU kernels nothing is compiled
            extensions.load(extensions.CONFIGURE_COMPILER)(self.autotune)


def open_runtime(args, *contents: object) -> contextlib.AbstractContextManager[tuple]:
    """Return a context with the runtime of a command line, and the `kernels.tp.Ranks` that torchrun has
    started, or None.

    contents: of files that must be equal on all ranks, like the options. Raises InputError, before a
    checkpoint is converted, on invalid options.
    """
    use_threads(args.threads, log_stderr)
    if is_distributed():
        return extensions.load(extensions.JOIN_RANKS)(args, *contents)
    runtime = Runtime.from_options(args)
    runtime.prepare()
    read_config_if_converted(args.checkpoint, args.max_seq_len)
    return contextlib.nullcontext((runtime, None))


def check_device(device: str) -> None:
    """Raise InputError unless torch can use this device, and models run on it."""
    if not DEVICE.fullmatch(device):
        raise InputError(f"--device {device}: models run on cpu, cuda and cuda:N; use one of these")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        raise InputError(f"--device {device}: not available ({first_line(e)}); use --device cpu") from None


def load_target(
    checkpoint: str | Path, runtime: Runtime = Runtime(), log: Callable[[str], None] | None = None,
    ranks=None,
) -> Target:
    """Load a converted target. log: called with one line when something slow starts or ends.

    If our kernels cannot be compiled or loaded, it runs without `Runtime.compile`, and `log` gets the reason.
    ranks: a `kernels.tp.Ranks`, to shard it over processes, which all call this. Raises InputError, one line,
    if anything is missing, damaged or too large.
    """
    checkpoint = Path(checkpoint)
    log = log or (lambda line: None)
    runtime.prepare()
    if ranks is not None:
        extensions.load(extensions.CHECK_RANKS)(checkpoint, runtime, log, ranks)
    on_cpu = torch.device(runtime.device_name).type == "cpu"
    if not on_cpu and (what := class_of(read_config(checkpoint, "target")).cpu_only_part):
        raise InputError(f"{checkpoint}: {what} run only on CPUs so far; use --device cpu")
    model, config = load_model(checkpoint, runtime.device_name, runtime.torch_dtype, ranks)
    if model.embed.dtype == torch.float16 and model.args.qkv_bias:
        log("--dtype fp16: Qwen2's activations overflow fp16 and the output is wrong; use bf16 or fp32")
    target = Target(checkpoint, runtime, model, config, Tokenizer.load(checkpoint), log)
    in_torch = on_cpu and ranks is None and runtime.kv == "auto" and not runtime.on_cpu_kernels
    return target if in_torch else extensions.load(extensions.ON_BACKEND)(target, ranks)


@dataclass(frozen=True)
class Target:
    """A loaded target. Several engines may share it; each has its own caches."""

    checkpoint: Path
    runtime: Runtime
    model: Transformer
    config: dict  # its config.json
    tokenizer: Tokenizer | None
    log: Callable[[str], None]
    backend: Backend = TORCH_BACKEND

    def engine(
        self, drafting: DraftOptions = DraftOptions(), *, batch: int = 1, max_seq_len: int | None = None,
        serves: bool = False,
    ) -> Engine:
        """Make an engine for up to `batch` concurrent requests. The larger the batch, the smaller the trees.

        max_seq_len: maximum number of tokens of prompt and output (default: `default_max_seq_len`). serves:
        for a server: allow `plain` requests, and compile steps for smaller batches too. Raises InputError if
        the head or draft model is missing, damaged or does not fit, or the caches do not fit in memory.
        """
        if max_seq_len is not None:
            check_length(max_seq_len, self.model.args.max_seq_len)
        drafting = drafting.resolve(self.checkpoint, self.log)
        max_seq_len = max_seq_len or self.default_max_seq_len(drafting, batch)
        drafter = self._build_drafter(drafting, max_seq_len, batch)
        scheduler = None
        # With our CPU kernels the choice of tree never changes the output; elsewhere it may, at near ties.
        batch_invariant = step_of(self.model).batch_invariant
        if drafter and (batch_invariant or drafting.tree == "auto" or drafter.network is None):
            schedule = extensions.load(extensions.SCHEDULER)
            drafter, scheduler = schedule(drafter, self.model, drafting.tree, self._compiles)
        return Engine(
            self.model, drafter, batch=batch, max_seq_len=max_seq_len, stop_ids=self.config["stop_ids"],
            compile=self.runtime.compile, log=self.log, scheduler=scheduler,
            batch_sizes=(batch,) if self._compiles and not serves else None,
            tokenizer=self.tokenizer, plain_requests=serves,
            guide=self.guide if self.tokenizer and self.config["stop_ids"] else None,
        )

    def default_max_seq_len(self, drafting: DraftOptions, batch: int) -> int:
        """Return the default `max_seq_len`: the maximum of the target and of a draft model, if memory allows.

        The caches of `batch` requests take at most `MAX_CACHE_FRACTION` of the free memory. A shorter length
        is a power of two, at least 2,048 tokens: compiled graphs are cached by the size of the caches.
        """
        device, args = self.model.embed.device, self.model.args
        longest = int(min(args.max_seq_len, args.short_length))
        if drafting.uses_draft_model and drafting.draft:
            longest = min(longest, read_config(drafting.draft, "target")["max_seq_len"])
        free = free_memory(device) or 0
        if self.model.ranks is not None:  # all ranks need one length
            free = extensions.load(extensions.RANKS_MEMORY)(self.model.ranks, device, free)
        max_fit = int(MAX_CACHE_FRACTION * free / self.model.cache_bytes(batch, 1024) * 1024)
        if max_fit >= longest:
            return longest
        power_of_two = 1 << (max(max_fit, 1).bit_length() - 1)  # the largest one up to `max_fit`
        return min(longest, max(power_of_two, 2048))

    @property
    def _compiles(self) -> bool:
        """True if steps go through torch.compile."""
        model = self.model
        return self.runtime.compile and not step_of(model).batch_invariant and model.can_compile

    @cached_property
    def _grammars(self):
        grammars = extensions.load(extensions.GRAMMARS)
        return grammars(self.tokenizer, self.model.args.vocab_size, self.config["stop_ids"])

    def guide(self, sampling):
        """Return the guide of sampling options. Raises InputError on an unsupported schema or grammar."""
        return self._grammars.guide_of(sampling)

    def prepare_models(self, *models: torch.nn.Module, quantize: bool = False) -> None:
        """Prepare models for the backend. quantize: first quantize 16-bit models where that is faster."""
        backend = self.backend
        mode = backend.quantized_at_load.get(self.model.embed.dtype)
        if quantize and mode:
            for model in models:
                extensions.load(extensions.QUANTIZE)(model, mode)
        if not backend.prepare(*models):
            self.log(
                "parts of this model run in PyTorch, not on our kernels (fp16, fp8, odd sizes): slower, and"
                " output with drafting may differ at near ties; load fp16 models with --dtype bf16"
            )

    def _build_drafter(self, drafting: DraftOptions, max_seq_len: int, batch: int) -> Drafter | None:
        device = self.model.embed.device
        default = self.backend.default_tree(device, "quantization" in self.config, batch)
        build = partial(
            build_drafter, checkpoint=self.checkpoint, max_seq_len=max_seq_len, target=self.model,
            tokenizer=self.tokenizer, default_tree=default,
            prepare=lambda *models: self.prepare_models(*models, quantize=drafting.int8),
        )
        try:
            return build(drafting)
        except InputError as e:
            if not drafting.optional:
                raise
            self.log(f"--speculate auto: {e}; falling back to prompt lookup")
            return build(DraftOptions("lookup"))
