"""What all commands share: options and their rules, notes, errors, exit statuses.

A rule stands beside the flag that it is about: `Options.refuse` takes a test and the words of the error.
"""
from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.dtypes import KV_DTYPES, NO_FP8, short_dtype
from common.errors import InputError, escaped, is_panic, not_utf8
from common.files import is_device
from common.gpus import why_no_gpu
from common.torchrun import several

MOST_THREADS = 1024
LEAST_OFFLOADED = 3  # layers, see `kernels.offload`
PROBE = 1 << 16  # bytes that are written to see whether there is room
MOST_SHOWN = 1500  # characters of an error
DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
# What PyTorch puts behind its words: where in its own code they were said.
FRAMES = re.compile(r"\n?(Exception raised from |frame #\d+: |C\+\+ CapturedTraceback)")
JUST_NOW = 3.0  # seconds after Ctrl-C in which an error is taken to be its work


def note(line: str) -> None:
    """Print a line to stderr. Everything but the answer goes there."""
    print(line, file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """The message of an error on one line that a terminal shows as it is (see `on_one_line`)."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "the output"
        return on_one_line(f"{where}: no space left on the device; make room and try again")
    return on_one_line(FRAMES.split(str(error), maxsplit=1)[0]) or type(error).__name__


def on_one_line(text: str) -> str:
    """A text on one line, escaped (`common.errors.escaped`). Of one that is very long the middle is left out.
    """
    line = " ".join(text.split())
    if len(line) > MOST_SHOWN:
        line = f"{line[: MOST_SHOWN * 2 // 3]} ... {line[-MOST_SHOWN // 3 :]}"
    return escaped(line)


def no_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, as Python or as PyTorch does."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def run_command(
    action: Callable[[], int | None], *expected: type[Exception],
    say: Callable[[str], None] = note, interrupted: str = "interrupted",
    say_stopped: Callable[[str], None] | None = None,
) -> int:
    """Run a command and return its exit status.

    The status is what `action` returns (None is 0); 1 after an InputError or one of `expected`, printed as
    one line; 130 after Ctrl-C, where `interrupted` is printed, by `say_stopped` if that is given; 141 when
    nobody reads the output any more. Where memory runs out, or native code of a library panics, one line says
    so, too.
    """
    with _interrupts() as seen:
        try:
            return action() or 0
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except BaseException as e:
            if not isinstance(e, (Exception, KeyboardInterrupt)) and not is_panic(e):
                raise
            if isinstance(e, KeyboardInterrupt) or (seen and time.monotonic() - seen[-1] < JUST_NOW):
                (say_stopped or say)(interrupted)
                return 130
            if no_memory(e):
                say(f"error: not enough memory ({one_line(e)}); give it less at a time, or a smaller model")
            elif is_panic(e) or isinstance(e, (InputError, *expected)):
                say(f"error: {one_line(e)}")
            else:
                raise
            _drop_output()
            return 1


def _drop_output() -> None:
    """Where the output's disk is full, Python would say so once more at its end, on several lines."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command(
    options: Options, argv: list[str] | None, run: Callable[[argparse.Namespace], int | None],
    *expected: type[Exception], **how,
) -> int:
    """Parse a command line, check its rules, and run it with its options: the frame of every command.

    The other arguments and the exit status are those of `run_command`; 2 where it cannot be parsed.
    """
    o = options.parse_args(argv)

    def checked() -> int | None:
        options.check(o)
        return run(o)

    return run_command(checked, *expected, **how)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[float]]:
    """A context whose value holds the times of each Ctrl-C, which raises KeyboardInterrupt as ever.

    Compiled code that is imported just then may raise another error instead. Of several processes each heeds
    the first one only: it comes from the terminal and from torchrun.
    """
    seen: list[float] = []
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return

    def interrupt(number: int, frame: object) -> None:
        seen.append(time.monotonic())
        if several():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        if not (seen and several()):
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Options(argparse.ArgumentParser):
    """A parser that also holds the rules of its options."""

    def __init__(self, description: str | None = None, **more):
        how = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=how, **more)
        self._rules: list[tuple[Callable, Callable[[argparse.Namespace], str]]] = []

    def refuse(
        self, test: Callable[[argparse.Namespace], object], words: Callable[[argparse.Namespace], str]
    ) -> None:
        """Add a rule: options for which `test` is true are refused with these words."""
        self._rules.append((test, words))

    def judge(self, action: Callable[[argparse.Namespace], object]) -> None:
        """Add a rule: options for which `action` raises an InputError or a ValueError are refused with it."""
        def words(o: argparse.Namespace) -> str:
            try:
                action(o)
            except (InputError, ValueError) as e:
                return str(e)
            return ""

        self.refuse(words, words)

    def error(self, message: str):
        """Say on one line what cannot be parsed, and end with exit status 2."""
        note(f"{self.prog}: error: {on_one_line(message)}; see --help")
        sys.exit(2)

    def parse_args(self, args=None, namespace=None):
        """As argparse does, but for texts that no file and no answer can hold, and for values that are empty,
        as a shell's variable that is not set: only what is called a TEXT may be.
        """
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            if not_utf8(word):
                self.error(f"argument {word}: is no UTF-8")
        o = super().parse_args(words, namespace)
        for action in self._actions:
            value = getattr(o, action.dest, None)
            empty = value == "" or (isinstance(value, list) and "" in value)
            if empty and action.nargs is None and action.metavar != "TEXT":
                name = "/".join(action.option_strings) or action.dest
                self.error(f"argument {name}: is empty; give a value")
        return o

    def within(self, flag: str, low: float, high: float) -> None:
        """Add a rule: the number that `flag` takes is None or between low and high, both included.

        Where there is no other bound, it is below 2^31.
        """
        name = flag.removeprefix("--").replace("-", "_")
        most = 2**31 - 1 if high == float("inf") else high

        def outside(o: argparse.Namespace) -> bool:
            value = getattr(o, name)
            return value is not None and not low <= value <= most

        span = f"at least {low:,} and below 2^31" if most < high else f"{low:,} to {high:,}"
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

    def judge_device(self) -> None:
        """Add a rule: --device, if given, is of a kind that models run on here."""
        self.refuse(lambda o: o.device and not DEVICE.fullmatch(o.device),
                    lambda o: f"--device {o.device}: models run on cpu, cuda and cuda:N; name one of these")

    def add_runtime(self):
        """Add the options of `engine.runtime.Runtime`: where and how a model runs. Returns their group."""
        group = self.add_argument_group("where and how it runs")
        add, on_off = group.add_argument, argparse.BooleanOptionalAction
        add("--device", help="default: cuda if there is one, else cpu")
        add("--dtype", type=dtype, help="bf16, fp16, fp32, or PyTorch's names; default: as stored")
        add("--threads", type=int,
            help="CPU threads, no more than the processors that it may use (default: PyTorch's)")
        self.within("--threads", 1, MOST_THREADS)
        self.judge_device()
        add("--compile", action=on_off, default=True, help="torch.compile prefill and step")
        add("--kernels", action=on_off, default=True,
            help="on a CPU, when compiling: our own products (see kernels/)")
        add("--isa", metavar="NAME",
            help="instruction set of the kernels, such as avx2 (default: EAGLE_ISA, or the best one)")
        self.refuse(lambda o: o.isa and not (o.compile and o.kernels),
                    lambda o: f"--isa {o.isa}: is for the kernels; leave out --no-kernels and --no-compile")
        add("--kv", choices=KV_DTYPES, default="auto",
            help="the target's keys and values: auto, in its dtype (default); int8, on a CPU's kernels; fp8,"
                 " on GPUs and in PyTorch")
        self.refuse(lambda o: o.kv == "int8" and not (o.compile and o.kernels),
                    lambda o: "--kv int8: is for the kernels; leave out --no-kernels and --no-compile")
        self.refuse(lambda o: o.kv == "fp8" and o.compile and o.kernels
                    and (o.device == "cpu" or (o.device is None and why_no_gpu())),
                    lambda o: NO_FP8)
        add("--offload", type=layers, metavar="N",
            help="the target's last N layers stay in the host's memory and come to the GPU in every pass;"
                 " auto: as many as do not fit there")
        self.refuse(lambda o: o.offload and (several() or not (o.device or "cuda").startswith("cuda")),
                    lambda o: f"--offload {o.offload}: " + (
                        "with torchrun, layers are dealt among devices instead; leave it out" if several()
                        else f"keeps weights in the host's memory, where --device {o.device} has them anyway;"
                             " leave it out"))
        return group


def layers(value: str) -> int | str:
    """An argparse type: how many layers are offloaded, or auto."""
    if value == "auto":
        return value
    if not value.isdecimal() or len(value) > 10 or not LEAST_OFFLOADED <= int(value) < 2**31:
        raise argparse.ArgumentTypeError(
            f"{value!r} is neither auto nor a whole number of at least {LEAST_OFFLOADED}: two layers have"
            " room on the GPU in any case"
        )
    return int(value)


def positive(value: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not value.isdecimal() or len(value) > 10 or not 1 <= int(value) < 2**31:
        raise argparse.ArgumentTypeError(f"{value!r} is no whole number of at least 1 (and below 2^31)")
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
        found = count(token), float(number)
        if not abs(found[1]) <= 100:
            raise ValueError
        return found
    except (ValueError, argparse.ArgumentTypeError):
        words = f"{value!r} is no ID=X, such as 50=-100, with X from -100 to 100"
        raise argparse.ArgumentTypeError(words) from None


def dtype(value: str) -> str:
    """An argparse type: the short name of a dtype."""
    try:
        return short_dtype(value)
    except InputError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def seed(value: str) -> int:
    """An argparse type: a whole number from 0 to 2^64 - 1, of which 64 bits are given: -1 is 2^64 - 1, and no
    random one.
    """
    if not re.fullmatch(r"-?[0-9]{1,20}", value) or not -(2**63) <= int(value) < 2**64:
        raise argparse.ArgumentTypeError(f"{value!r} is no whole number from -2^63 to 2^64 - 1")
    return int(value) % 2**64


def check_writable(flag: str, file: str) -> None:
    """Raise InputError unless a file of this name can be written, and a little more fits on its disk."""
    path = Path(os.path.realpath(file))
    folder = path.parent
    try:
        if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
            raise InputError(f"{flag} {file}: not a file that can be written")
        if is_device(path, f"{flag} {file}"):  # is written directly, see common/files.py
            with open(path, "ab", buffering=0) as device:
                device.write(b"" if device.isatty() else b"\0")
            return
        _try_out(folder)
    except OSError as e:
        raise InputError(f"{flag} {file}: cannot be written ({_reason(e)})") from None


def check_folder(flag: str, folder: str) -> None:
    """Raise InputError unless a folder, or the one that it would be made in, takes files, and has room."""
    _check_place(f"{flag} {folder}", Path(folder).absolute())


def check_replaceable(flag: str, folder: str) -> None:
    """Raise InputError unless a folder can be made, or replaced by another one, which is made beside it."""
    place = Path(folder).resolve()
    try:
        if place.exists() and not place.is_dir():
            raise InputError(f"{flag} {folder}: not a folder that can be written to")
    except OSError as e:  # a name may be too long
        raise InputError(f"{flag} {folder}: cannot be written to ({_reason(e)})") from None
    if os.path.ismount(place):
        raise InputError(f"{flag} {folder}: is mounted, and cannot be replaced; name a folder in it")
    _check_place(f"{flag} {folder}", place.parent)


def _check_place(what: str, place: Path) -> None:
    try:
        while not place.exists() and not place.is_symlink():
            place = place.parent
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise InputError(f"{what}: not a folder that can be written to")
        _try_out(place)
    except OSError as e:
        raise InputError(f"{what}: cannot be written to ({_reason(e)})") from None


def _reason(error: OSError) -> str:
    """Why something cannot be written, without the names of our own that an error may have."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return one_line(error) if full or not error.strerror else error.strerror


def _try_out(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(bytes(PROBE))
        probe.flush()
        os.fsync(probe.fileno())
