"""Runtime of a model: device, dtype, compiler, and the `Backend` that runs its modules."""
from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, fields

import torch
import torch.nn as nn

import extensions
from checkpoint.load import read_config_if_converted
from common.cli import dtype_name, is_distributed, log_stderr
from common.errors import InputError, first_line
from common.machine import use_threads
from common.schema import Flag, schema_of
from engine.step import Step
from model import KVCaches, Transformer
from tree import TreeShape

DEVICE = re.compile(r"cpu(:0)?|cuda(:\d{1,3})?")
MAX_GPU_TOKENS = 192  # tokens of a pass that a large GPU verifies in about the time of one
GPU_TREES = tuple(TreeShape(*sizes) for sizes in ((16, 4, 5), (12, 3, 4), (8, 2, 4), (4, 2, 2)))


class Backend:
    """How models run on a device: modules, KV caches, threads and the `Step`. This base class uses PyTorch.

    - name: for logs
    - step: what a decoding step computes, with the operations of this backend
    - caches: KV cache classes by the names of `--kv`
    - quantized_at_load: by dtype, the mode that makes a 16-bit head faster here
    - self_check: the entry (`extensions.load`) of a check that runs before the first warmup
    """

    name = "torch"
    step = Step()
    caches: dict[str, type[KVCaches]] = {"auto": KVCaches}
    quantized_at_load: dict[torch.dtype, str] = {}
    self_check: str | None = None

    def __deepcopy__(self, memo: dict) -> Backend:
        return self  # copies of a model run on the same backend

    def prepare(self, *models: nn.Module) -> bool:
        """Replace modules of the models by those of this backend, in place.

        Models may share modules, as a head shares its target's lm_head. Returns True if all layers of all
        targets in `models` run on this backend. Other layers stay unchanged.
        """
        for model in models:
            model.backend = self
        return True

    def threads(self) -> contextlib.AbstractContextManager:
        """Return a context for passes, with the number of threads that they need."""
        return contextlib.nullcontext()

    def default_tree(self, device: torch.device, quantized: bool, batch: int) -> TreeShape:
        """Return the default tree for up to `batch` requests.

        A GPU takes the largest of GPU_TREES with which all requests together verify at most MAX_GPU_TOKENS.
        On a CPU time grows with the nodes, sooner for quantized weights, and each level costs a head pass.
        """
        if device.type == "cuda":
            return next((tree for tree in GPU_TREES if batch * tree.nodes <= MAX_GPU_TOKENS), GPU_TREES[-1])
        return TreeShape(8, 2, 4) if quantized else TreeShape(12, 3, 4)


TORCH_BACKEND = Backend()


def step_of(target: Transformer) -> Step:
    """Return the step of a target's backend, PyTorch's if a layer runs only there; sharded with ranks."""
    step = backend_of(target).step
    return target.make_sharded_step(step, target) if target.make_sharded_step else step


def backend_of(target: Transformer) -> Backend:
    """Return the backend that runs all layers of a target: PyTorch if a layer runs only there."""
    return target.backend if target.runs_on_backend else TORCH_BACKEND


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
        given = vars(self)
        if type(self.device) is int:  # as in transformers
            given["device"] = "cpu" if self.device < 0 else f"cuda:{self.device}"
        for name, value in given.items():
            if isinstance(value, (torch.device, torch.dtype)):
                given[name] = str(value).removeprefix("torch.")

    @classmethod
    def from_options(cls, o) -> Runtime:
        """Return the runtime that a command's options ask for, see `common.cli.Options.add_runtime`."""
        return cls(**{field.name: getattr(o, field.name) for field in fields(cls) if hasattr(o, field.name)})

    @property
    def device_name(self) -> str:
        """The device, chosen if none was named."""
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


def open_runtime(o, *contents: object) -> contextlib.AbstractContextManager[tuple]:
    """Return a context with the runtime that a command's options ask for, and the `kernels.tp.Ranks` that
    torchrun has started, or None.

    contents: of files that must be equal on all ranks, like the options. Raises InputError, before a
    checkpoint is converted, on invalid options.
    """
    use_threads(o.threads, log_stderr)
    if is_distributed():
        return extensions.load(extensions.JOIN_RANKS)(o, *contents)
    runtime = Runtime.from_options(o)
    runtime.prepare()
    read_config_if_converted(o.checkpoint, o.max_seq_len)
    return contextlib.nullcontext((runtime, None))


def check_device(device: str) -> None:
    """Raise InputError unless torch can use this device, and models run on it."""
    if not DEVICE.fullmatch(device):
        raise InputError(f"--device {device}: models run on cpu, cuda and cuda:N; name one of these")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        raise InputError(f"--device {device}: {first_line(e)}") from None
