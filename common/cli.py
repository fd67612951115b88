"""Command-line helpers: options and their rules, logging to stderr, one-line errors, exit statuses."""
from __future__ import annotations

import argparse
import codecs
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import TextIO

from common.errors import InputError, did_you_mean, one_line

STARTED = time.perf_counter()  # commands import this file first, before anything slow
VERSION = "0.1"
MAX_THREADS = 1024
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # short name: PyTorch's
DTYPES |= {name: name for name in DTYPES.values()}
NO_MEMORY = re.compile("MemoryError|out of memory|can.?.t allocate memory|not enough memory")
Rule = Callable[[argparse.Namespace], object]
KV_DTYPES = ("auto", "int8", "fp8")  # of the target's keys and values; auto: the model's own


def dtype_name(name: str) -> str:
    """Return PyTorch's name of a dtype. Raises InputError on an unknown one."""
    if name not in DTYPES:
        raise InputError(f"dtype {name!r}: unknown; choose from {', '.join(DTYPES)}")
    return DTYPES[name]


def log_stderr(line: str) -> None:
    """Print a line to stderr. Everything but the answer goes there."""
    print(line, file=sys.stderr, flush=True)


def is_distributed() -> bool:
    """Return whether torchrun has started several processes."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_main_rank() -> bool:
    """Return whether this is the only process, or the first of several."""
    return not is_distributed() or os.environ.get("RANK", "0") == "0"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, of Python or of PyTorch, means that memory ran out."""
    return isinstance(error, (MemoryError, RuntimeError)) and bool(NO_MEMORY.search(repr(error)))


def run_command(
    action: Callable[[], int | None], *expected: type[Exception], interrupted: str = "interrupted",
    errors: TextIO | None = None,
) -> int:
    """Run a command and return its exit status.

    The value of `action` (None: 0). 1 after InputError, `expected` or out of memory: the message goes to
    `errors` (default stderr), on one line. 130 after Ctrl-C: logs `interrupted`. 141 if stdout is closed.
    """
    InputError.in_command = True
    try:
        status = action() or 0
        if sys.stdout:
            sys.stdout.flush()  # raise BrokenPipeError here, not at exit
        return status
    except KeyboardInterrupt:
        if is_distributed():  # the terminal and torchrun both send SIGINT
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        log_stderr(interrupted)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as e:
        message = one_line(e)
        if is_out_of_memory(e):
            message = f"not enough memory ({message}); use a smaller batch, context or model"
        elif not isinstance(e, (InputError, *expected)):
            raise
        print(f"error: {message}", file=errors or sys.stderr, flush=True)
        return 1


def command(
    options: Options, argv: list[str] | None, run: Callable[[argparse.Namespace], int | None],
    *expected: type[Exception], interrupted: str = "interrupted",
) -> int:
    """Parse a command line and run it with its options. Mute all ranks but the first, except for errors.

    The other arguments and the exit status are those of `run_command`; 2 if parsing fails.
    """
    errors = sys.stderr  # any process may fail
    codecs.register_error("warn", _warn_and_replace)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="warn")
    with contextlib.nullcontext() if is_main_rank() else import_module("common.torchrun").muted():
        return run_command(lambda: run(options.read(argv)), *expected, interrupted=interrupted, errors=errors)


def _warn_and_replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace what stdout cannot encode. Log it the first time."""
    codecs.register_error("warn", codecs.replace_errors)
    log_stderr(f"stdout is {error.encoding}: characters that it lacks become ?; PYTHONIOENCODING=utf-8 keeps"
               " them")
    return codecs.replace_errors(error)


class Options(argparse.ArgumentParser):
    """An argument parser with rules, and option groups that several commands share."""

    def __init__(self, about: str | None = None, **more):
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter, **more)
        self.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
        self._rules: list[Rule] = []

    def add_rule(self, rule: Rule) -> None:
        """Add a rule, which raises InputError if options break it."""
        self._rules.append(rule)

    def reject_if(self, test: Rule, words: Rule) -> None:
        """Add a rule: raise InputError(words(options)) if test(options)."""
        def rule(o: argparse.Namespace) -> None:
            if test(o):
                raise InputError(words(o))

        self.add_rule(rule)

    def error(self, message: str):
        """Print the error on one line and exit with status 2."""
        if unknown := message.partition("unrecognized arguments: ")[2].split():
            message += did_you_mean(unknown[0], self._option_string_actions)
        if choices := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += did_you_mean(choices[1], choices[2].replace("'", "").split(", "))
        self.exit(2, f"{self.prog}: error: {one_line(message)}; see --help\n")

    def read(self, argv: list[str] | None = None) -> argparse.Namespace:
        """Return the options of a command line. Raises InputError on the first rule that they break."""
        if others := {"-hf", "-ngl", "-np"}.intersection(argv or sys.argv):  # argparse would read -h or -n
            self.error(f"unrecognized arguments: {others.pop()}")
        o, rest = self.parse_known_args(argv)
        if vars(o).get("checkpoint", "") is None:
            if not rest or rest[0].startswith("-"):
                self.error("-m is missing: name a model, by its folder, .gguf file or hub id")
            o.checkpoint = rest.pop(0)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        for rule in self._rules:
            rule(o)
        return o

    def add_checkpoint(self, help: str) -> None:
        """Add --checkpoint, which other programs call --model. `read` takes it without a flag, too."""
        self.add_argument("-m", "--model", "--checkpoint", dest="checkpoint", help=help)

    def add_runtime(self):
        """Add the options of `engine.target.Runtime`: device, dtype, kernels. Returns their group."""
        group = self.add_argument_group("runtime")
        add, on_off = group.add_argument, argparse.BooleanOptionalAction
        add("--device", help="device (default: cuda if available, else cpu)")
        add("--dtype", choices=DTYPES, help="dtype of weights and activations (default: as stored)")
        add("-c", "--max-seq-len", type=within(2),
            help="maximum number of tokens, prompt and output (default: the model's maximum, or less to fit"
                 " memory)")
        add("-t", "--threads", type=within(1, MAX_THREADS),
            help="CPU threads, at most the available processors (default: PyTorch's number)")
        add("--compile", action=on_off, default=True,
            help="run our kernels or torch.compile (default); --no-compile: eager PyTorch")
        add("--kernels", action=on_off, default=True,
            help="run our C++ and Triton kernels (default); --no-kernels: torch.compile")
        add("--isa", metavar="NAME",
            help="instruction set of the CPU kernels, such as avx2 (default: EAGLE_ISA, or the best)")
        add("--kv", choices=KV_DTYPES, default="auto",
            help="KV cache of the target: auto (default): the dtype of the model; int8: our CPU kernels only;"
                 " fp8: GPUs and PyTorch only")
        self.reject_if(lambda o: o.isa and not (o.compile and o.kernels),
                    lambda o: f"--isa {o.isa}: is for our kernels; leave out --no-kernels and --no-compile")
        return group


def within(low: float, high: float = 2**31 - 1, kind: type = int) -> Callable[[str], float]:
    """Return an argparse type: a number of this kind from `low` to `high`, both included."""
    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {low:,} to {high:,}")

    return read


positive, count = within(1), within(0)


def seed(text: str) -> int:
    """An argparse type: a 64-bit integer, modulo 2^64: -1 is 2^64 - 1."""
    return within(-(2**63), 2**64 - 1)(text) % 2**64
