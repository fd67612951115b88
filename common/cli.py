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

STARTED = time.perf_counter()  # start time: commands import this file before anything slow
VERSION = "0.1"
MAX_THREADS = 1024
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # short name -> PyTorch's
DTYPES |= {name: name for name in DTYPES.values()}
NO_MEMORY = re.compile("MemoryError|out of memory|can.?.t allocate memory|not enough memory")
Rule = Callable[[argparse.Namespace], object]
KV_DTYPES = ("auto", "int8", "fp8")  # of the target's KV cache; auto: the model's dtype


def dtype_name(name: str) -> str:
    """Return PyTorch's name of a dtype. Raises InputError on an unknown one."""
    if name not in DTYPES:
        raise InputError(f"dtype {name!r}: unknown; choose from {', '.join(DTYPES)}")
    return DTYPES[name]


def log_stderr(line: str) -> None:
    """Print a line to stderr; stdout has only the output of the command."""
    print(line, file=sys.stderr, flush=True)


def is_distributed() -> bool:
    """Return whether torchrun has started several processes."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_main_rank() -> bool:
    """Return whether this is the only process, or the first of several."""
    return not is_distributed() or os.environ.get("RANK", "0") == "0"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or PyTorch is an out-of-memory error."""
    return isinstance(error, (MemoryError, RuntimeError)) and bool(NO_MEMORY.search(repr(error)))


def run_command(
    action: Callable[[], int | None], *expected: type[Exception], interrupted: str = "interrupted",
    errors: TextIO | None = None,
) -> int:
    """Run a command and return its exit status.

    0, or the value of `action`. 1 after InputError, an `expected` error or out of memory, which are printed
    as one line to `errors` (default stderr). 130 after Ctrl-C, which logs `interrupted`. 141 if stdout is
    closed.
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
    """Parse a command line and call `run` with its options. Only rank 0 prints anything but errors.

    Other arguments and exit status: see `run_command`; 2 if parsing fails.
    """
    errors = sys.stderr  # not muted: any rank may fail
    codecs.register_error("warn", _warn_and_replace)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="warn")
    with contextlib.nullcontext() if is_main_rank() else import_module("common.torchrun").muted():
        return run_command(lambda: run(options.read(argv)), *expected, interrupted=interrupted, errors=errors)


def _warn_and_replace(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that stdout cannot encode, with a warning the first time."""
    codecs.register_error("warn", codecs.replace_errors)
    log_stderr(f"stdout is {error.encoding}: other characters are printed as ?; set PYTHONIOENCODING=utf-8")
    return codecs.replace_errors(error)


class Options(argparse.ArgumentParser):
    """An argument parser with rules, and option groups that several commands share."""

    def __init__(self, description: str | None = None, **more):
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **more)
        self.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
        self._rules: list[Rule] = []

    def add_rule(self, rule: Rule) -> None:
        """Add a rule: a function that raises InputError on invalid options."""
        self._rules.append(rule)

    def reject_if(self, test: Rule, message: Rule) -> None:
        """Add a rule: raise InputError(message(options)) if test(options)."""
        def rule(args: argparse.Namespace) -> None:
            if test(args):
                raise InputError(message(args))

        self.add_rule(rule)

    def error(self, message: str):
        """Print the error on one line and exit with status 2."""
        if unknown := message.partition("unrecognized arguments: ")[2].split():
            message += did_you_mean(unknown[0], self._option_string_actions)
        if choices := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += did_you_mean(choices[1], choices[2].replace("'", "").split(", "))
        self.exit(2, f"{self.prog}: error: {one_line(message)}; see --help\n")

    def read(self, argv: list[str] | None = None) -> argparse.Namespace:
        """Parse a command line and check the rules. Raises InputError on the first violation."""
        if others := {"-hf", "-ngl", "-np"}.intersection(argv or sys.argv):  # argparse would read -h or -n
            self.error(f"unrecognized arguments: {others.pop()}")
        args, rest = self.parse_known_args(argv)
        if vars(args).get("checkpoint", "") is None:
            if not rest or rest[0].startswith("-"):
                self.error("-m is missing: pass a model: a folder, .gguf file or hub id")
            args.checkpoint = rest.pop(0)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        for rule in self._rules:
            rule(args)
        return args

    def add_checkpoint(self, help: str) -> None:
        """Add --checkpoint, alias --model. `read` also accepts it as a positional argument."""
        self.add_argument("-m", "--model", "--checkpoint", dest="checkpoint", help=help)

    def add_runtime(self):
        """Add the options of `engine.target.Runtime`: device, dtype, kernels. Returns their group."""
        group = self.add_argument_group("runtime")
        add, on_off = group.add_argument, argparse.BooleanOptionalAction
        add("--device", help="cpu, cuda or cuda:N (default: cuda if available, else cpu)")
        add("--dtype", choices=DTYPES, help="dtype of weights and activations (default: as stored)")
        add("-c", "--max-seq-len", type=within(2),
            help="maximum number of tokens, prompt and output (default: the model's maximum, or less to fit"
                 " memory)")
        add("-t", "--threads", type=within(1, MAX_THREADS),
            help="CPU threads, at most the available processors (default: torch.get_num_threads())")
        add("--compile", action=on_off, default=True,
            help="default; --no-compile: eager PyTorch, without our kernels and without torch.compile")
        add("--kernels", action=on_off, default=True,
            help="use our C++ and Triton kernels (default); --no-kernels: use torch.compile instead")
        add("--isa", metavar="NAME",
            help="instruction set of the CPU kernels, such as avx2 (default: environment variable"
                 " EAGLE_ISA, or the best available)")
        add("--kv", choices=KV_DTYPES, default="auto",
            help="dtype of the target's KV cache: auto (default): the model's; int8: needs our CPU kernels;"
                 " fp8: needs a GPU or PyTorch without our kernels")
        self.reject_if(lambda args: args.isa and not (args.compile and args.kernels),
                    lambda args: f"--isa {args.isa}: needs our kernels; leave out --no-kernels, --no-compile")
        return group


def within(low: float, high: float = 2**31 - 1, number_type: type = int) -> Callable[[str], float]:
    """Return an argparse type: a number of this type from `low` to `high`, both included."""
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= (value := number_type(text)) <= high:
                return value
        expected = "an integer" if number_type is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected} from {low:,} to {high:,}")

    return parse


positive, count = within(1), within(0)


def seed(text: str) -> int:
    """Parse a 64-bit seed (argparse type). Negative ones are taken modulo 2^64."""
    return within(-(2**63), 2**64 - 1)(text) % 2**64
