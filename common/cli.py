"""What all commands share: options and their rules, notes, errors, exit statuses.

A rule stands beside the flag that it is about: `Options.refuse` takes a test and the words of the error.
"""
from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.dtypes import KV_DTYPES, short_dtype
from common.errors import InputError

MOST_THREADS = 1024
JUST_NOW = 3.0  # seconds after Ctrl-C in which an error is taken to be its work


def note(line: str) -> None:
    """Print a line to stderr. Everything but the answer goes there."""
    print(line, file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """The message of an error on one line."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.filename or 'the output'}: no space left on the device; make room and try again"
    return " ".join(str(error).split()) or type(error).__name__


def run_command(
    action: Callable[[], int | None], *expected: type[Exception],
    say: Callable[[str], None] = note, interrupted: str = "interrupted",
) -> int:
    """Run a command and return its exit status.

    The status is what `action` returns (None is 0); 1 after an InputError or one of `expected`, printed as
    one line; 130 after Ctrl-C; 141 when nobody reads the output any more.
    """
    with _interrupts() as seen:
        try:
            return action() or 0
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except (Exception, KeyboardInterrupt) as e:
            if isinstance(e, KeyboardInterrupt) or (seen and time.monotonic() - seen[-1] < JUST_NOW):
                say(interrupted)
                return 130
            if not isinstance(e, (InputError, *expected)):
                raise
            say(f"error: {one_line(e)}")
            return 1


@contextlib.contextmanager
def _interrupts() -> Iterator[list[float]]:
    """A context whose value holds the times of each Ctrl-C, which raises KeyboardInterrupt as ever.

    Compiled code that is imported just then may raise another error instead.
    """
    seen: list[float] = []
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return

    def interrupt(number: int, frame: object) -> None:
        seen.append(time.monotonic())
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Options(argparse.ArgumentParser):
    """A parser that also holds the rules of its options."""

    def __init__(self, description: str | None):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._rules: list[tuple[Callable, Callable[[argparse.Namespace], str]]] = []

    def refuse(
        self, test: Callable[[argparse.Namespace], object], words: Callable[[argparse.Namespace], str]
    ) -> None:
        """Add a rule: options for which `test` is true are refused with these words."""
        self._rules.append((test, words))

    def within(self, flag: str, low: float, high: float) -> None:
        """Add a rule: the number that `flag` takes is None or between low and high, both included."""
        name = flag.removeprefix("--").replace("-", "_")

        def outside(o: argparse.Namespace) -> bool:
            value = getattr(o, name)
            return value is not None and not low <= value <= high

        span = f"at least {low:,}" if high == float("inf") else f"{low:,} to {high:,}"
        self.refuse(outside, lambda o: f"{flag} {getattr(o, name)}: must be {span}")

    def read(self, argv: list[str] | None = None) -> argparse.Namespace:
        """The options of a command line. Raises InputError on the first rule that they break."""
        o = self.parse_args(argv)
        self.check(o)
        return o

    def check(self, o: argparse.Namespace) -> None:
        """Raise InputError if options break a rule."""
        for test, words in self._rules:
            if test(o):
                raise InputError(words(o))

    def add_runtime(self):
        """Add the options of `engine.runtime.Runtime`: where and how a model runs. Returns their group."""
        group = self.add_argument_group("where and how it runs")
        add, on_off = group.add_argument, argparse.BooleanOptionalAction
        add("--device", help="default: cuda if there is one, else cpu")
        add("--dtype", type=dtype, help="bf16, fp16, fp32, or PyTorch's names; default: as stored")
        add("--threads", type=int,
            help="CPU threads, no more than the processors that it may use (default: PyTorch's)")
        self.within("--threads", 1, MOST_THREADS)
        add("--compile", action=on_off, default=True, help="torch.compile prefill and step")
        add("--kernels", action=on_off, default=True,
            help="on a CPU, when compiling: our own products (see kernels/)")
        add("--isa", metavar="NAME",
            help="instruction set of the kernels, such as avx2 (default: EAGLE_ISA, or the best one)")
        self.refuse(lambda o: o.isa and not (o.compile and o.kernels),
                    lambda o: f"--isa {o.isa}: is for the kernels; leave out --no-kernels and --no-compile")
        add("--kv", choices=KV_DTYPES, default="auto",
            help="the target's keys and values: auto, in its dtype (default), or int8, on the kernels")
        self.refuse(lambda o: o.kv == "int8" and not (o.compile and o.kernels),
                    lambda o: "--kv int8: is for the kernels; leave out --no-kernels and --no-compile")
        return group


def positive(value: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not value.isdecimal() or not 1 <= int(value) < 2**63:
        raise argparse.ArgumentTypeError(f"{value!r} is no whole number of at least 1 (and below 2^63)")
    return int(value)


def count(value: str) -> int:
    """An argparse type: a whole number of at least 0."""
    return 0 if value == "0" else positive(value)


def bias(value: str) -> tuple[int, float]:
    """An argparse type: a token id and what is added to its logit, as ID=X."""
    token, found, number = value.partition("=")
    try:
        if not found:
            raise ValueError
        return count(token), float(number)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{value!r} is no ID=X, such as 50=-100") from None


def dtype(value: str) -> str:
    """An argparse type: the short name of a dtype."""
    try:
        return short_dtype(value)
    except InputError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def check_writable(flag: str, file: str) -> None:
    """Raise InputError unless a file of this name can be written."""
    folder = Path(file).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(file).is_dir():
        raise InputError(f"{flag} {file}: not a file that can be written")
