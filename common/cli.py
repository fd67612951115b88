"""The frame of every command: options with their rules beside them, notes, one-line errors, exit statuses."""
from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from common import VERSION
from common.dtypes import KV_DTYPES, short_dtype
from common.errors import ELSEWHERE, InputError, did_you_mean, escaped, is_panic, not_utf8
from common.torchrun import one_voice, several

MOST_THREADS = 1024
MOST_SHOWN = 1500  # characters of an error
MOST_USED = {
    "--checkpoint", "--prompt", "--prompt-file", "--interactive", "--system", "--speculate", "--draft",
    "--max-new-tokens", "--temperature", "--seed", "--compare", "--json", "--out", "--host", "--port",
    "--api-key", "--slots", "--questions", "--limit", "--kind", "--prompts", "--synthesize",
    "--conversations", "--epochs", "--mode", "--target", "--force",
}
# PyTorch appends to its messages where in its own code they come from.
FRAMES = re.compile(r"\n?(Exception raised from |frame #\d+: |C\+\+ CapturedTraceback)")


def note(line: str) -> None:
    """Print a line to stderr. Everything but the answer goes there."""
    print(line, file=sys.stderr, flush=True)


def one_line(error: BaseException) -> str:
    """Return the message of an error on one escaped line (see `on_one_line`)."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = error.filename or "the output"
        return on_one_line(f"{where}: no space left on the device; make room and try again")
    return on_one_line(FRAMES.split(str(error), maxsplit=1)[0]) or type(error).__name__


def on_one_line(text: str) -> str:
    """Return a text on one line, escaped (`common.errors.escaped`), without the middle of a very long one."""
    line = " ".join(text.split())
    if len(line) > MOST_SHOWN:
        line = f"{line[: MOST_SHOWN * 2 // 3]} ... {line[-MOST_SHOWN // 3 :]}"
    return escaped(line)


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn any error of a library, a panic of Rust code too, into an InputError that starts with `what`."""
    try:
        yield
    except BaseException as e:  # a panic is no Exception
        if isinstance(e, InputError) or not (isinstance(e, Exception) or is_panic(e)):
            raise
        raise InputError(f"{what} ({one_line(e)})") from None


def no_memory(error: BaseException) -> bool:
    """Return whether an error, of Python or of PyTorch, means that memory ran out."""
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def run_command(
    action: Callable[[], int | None], *expected: type[Exception], say: Callable[[str], None] = note,
    interrupted: str = "interrupted", last: Callable[[str], None] | None = None,
) -> int:
    """Run a command and return its exit status.

    The status is the value of `action` (None is 0); 1 after an InputError or one of `expected`, printed as
    one line, and where memory runs out or native code panics; 130 after Ctrl-C, where `interrupted` is
    printed; 141 when the reader of the output has left. last: prints an error in place of `say`.
    """
    try:
        return action() or 0
    except KeyboardInterrupt:
        if several():  # the terminal and torchrun both send it
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        say(interrupted)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except BaseException as e:
        words = one_line(e)
        if no_memory(e):
            words = f"not enough memory ({words}); give it less at a time, or a smaller model"
        elif not (is_panic(e) or isinstance(e, (InputError, *expected))):
            raise
        (last or say)(f"error: {words}")
        try:
            sys.stdout.flush()
        except (OSError, ValueError, AttributeError):  # a full disk: Python would print it again at its end
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def command(
    options: Options, argv: list[str] | None, run: Callable[[argparse.Namespace], int | None],
    *expected: type[Exception], **how,
) -> int:
    """Read a command line and run it with its options; of several processes one speaks.

    The other arguments and the exit status are those of `run_command`; 2 where it cannot be parsed.
    """
    with one_voice() as voice:
        return run_command(lambda: run(options.read(argv)), *expected, last=voice, **how)


class Options(argparse.ArgumentParser):
    """A parser that also holds the rules of its options, and the groups that several commands share."""

    def __init__(self, description: str | None = None, **more):
        how = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=how, **more)
        self.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
        self._words: list[str] = []  # of the command line
        self._rules: list[Callable[[argparse.Namespace], object]] = []

    def judge(self, rule: Callable[[argparse.Namespace], object]) -> None:
        """Add a rule, which raises InputError if options break it."""
        self._rules.append(rule)

    def refuse(
        self, test: Callable[[argparse.Namespace], object], words: Callable[[argparse.Namespace], str]
    ) -> None:
        """Add a rule: refuse options with these words if `test` is true."""
        def rule(o: argparse.Namespace) -> None:
            if test(o):
                raise InputError(words(o))

        self.judge(rule)

    def error(self, message: str):
        """Print on one line what cannot be parsed, and end with exit status 2.

        An unknown option comes first: it is often the one that is missed.
        """
        flags = self._option_string_actions
        for name in (word.partition("=")[0] for word in self._words):
            known = any(flag.startswith(name) for flag in flags) or (name[1:2] != "-" and name[:2] in flags)
            if re.fullmatch("--?[a-zA-Z][^ ]*", name) and (name in ELSEWHERE or not known):
                message = f"unrecognized arguments: {name}{did_you_mean(name, flags)}"
                break
        else:
            if "required" in message and self._words and self._words[0][0] != "-":
                message += f" (write -m {self._words[0]})"
        note(f"{self.prog}: error: {on_one_line(message)}; see --help")
        sys.exit(2)

    def format_help(self) -> str:
        """Like argparse, but name only required options in the usage, and list `MOST_USED` before others."""
        first = [action for action in self._actions if MOST_USED & {*action.option_strings}]
        groups = [(group.title, group.description, group._group_actions) for group in self._action_groups]
        text = self._get_formatter()
        needed = ((*a.option_strings[-1:], a.dest.upper()) for a in self._actions if a.required)
        text.add_usage(" ".join(["%(prog)s", *map(" ".join, needed), "[option ...]"]), [], [])
        text.add_text(self.description)
        for title, description, actions in (("most used", None, first), *groups):
            text.start_section(title)
            text.add_text(description)
            text.add_arguments([a for a in actions if actions is first or a not in first])
            text.end_section()
        return text.format_help()

    def _check_value(self, action, value):
        """Like argparse, but guess which of the choices is meant."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as e:
            e.message += did_you_mean(str(value), map(str, action.choices))
            raise

    def parse_args(self, args=None, namespace=None):
        """Like argparse, but reject values that are not UTF-8, or empty where the metavar is not TEXT."""
        self._words = sys.argv[1:] if args is None else list(args)
        for word in self._words:
            if not_utf8(word):
                self.error(f"argument {word}: is no UTF-8")
        if any(word in ELSEWHERE and word[0] == "-" for word in self._words):
            self.error("")  # argparse would take -hf for -h
        o, unknown = self.parse_known_args(self._words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)} (quote texts with spaces)")
        for action in self._actions:
            value = getattr(o, action.dest, None)
            empty = value == "" or (isinstance(value, list) and "" in value)
            if empty and action.nargs is None and action.metavar != "TEXT":
                name = "/".join(action.option_strings) or action.dest
                self.error(f"argument {name}: is empty; give a value")
        return o

    def read(self, argv: list[str] | None = None) -> argparse.Namespace:
        """Return the options of a command line. Raises InputError on the first rule that they break."""
        o = self.parse_args(argv)
        for rule in self._rules:
            rule(o)
        return o

    def add_checkpoint(self, help: str) -> None:
        """Add --checkpoint, which other programs call --model."""
        self.add_argument("-m", "--model", "--checkpoint", dest="checkpoint", required=True, help=help)

    def add_runtime(self):
        """Add the options of `engine.runtime.Runtime`: where and how a model runs. Returns their group."""
        group = self.add_argument_group("where and how it runs")
        add, on_off = group.add_argument, argparse.BooleanOptionalAction
        add("--device", help="default: cuda if there is one, else cpu")
        add("--dtype", type=dtype, help="bf16, fp16, fp32, or PyTorch's names; default: as stored")
        add("-c", "--max-seq-len", type=within(2),
            help="prompt and output together (default: what suits the model and the memory)")
        add("-t", "--threads", type=within(1, MOST_THREADS),
            help="CPU threads, no more than the processors that it may use (default: PyTorch's)")
        add("--compile", action=on_off, default=True, help="torch.compile prefill and step")
        add("--kernels", action=on_off, default=True,
            help="on a CPU, when compiling: our own products (see kernels/)")
        add("--isa", metavar="NAME",
            help="instruction set of the kernels, such as avx2 (default: EAGLE_ISA, or the best one)")
        add("--kv", choices=KV_DTYPES, default="auto",
            help="the target's keys and values: auto, in its dtype (default); int8, on a CPU's kernels; fp8,"
                 " on GPUs and in PyTorch")
        self.refuse(lambda o: o.isa and not (o.compile and o.kernels),
                    lambda o: f"--isa {o.isa}: is for the kernels; leave out --no-kernels and --no-compile")
        return group

    def add_sampling(self):
        """Add the options of `sampling.options.Sampling`. Returns their group."""
        group = self.add_argument_group("sampling")
        add = group.add_argument
        add("-n", "--max-new-tokens", type=int, default=256, help="the output ends there (default 256)")
        add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
        add("--top-p", type=float, default=1.0,
            help="leave out unlikely tokens beyond this total probability; 1 is off (default)")
        add("--top-k", type=int, default=0, help="0 is off (default)")
        add("--min-p", type=float, default=0.0,
            help="leave out tokens below this share of the likeliest one's probability; 0 is off (default)")
        add("--presence-penalty", type=float, default=0.0, metavar="X",
            help="subtracted from the logits of tokens in the output (-2 to 2; default 0)")
        add("--frequency-penalty", type=float, default=0.0, metavar="X",
            help="the same, once for each occurrence (-2 to 2; default 0)")
        add("--repetition-penalty", type=float, default=1.0, metavar="X",
            help="divides the odds of tokens in prompt and output; 1 is off (default)")
        add("--logit-bias", action="append", default=[], type=bias, metavar="ID=X",
            help="added to a token's logit (-100 to 100); may be repeated")
        add("--stop", action="append", default=[], metavar="TEXT",
            help="ends the output, of which it is no part; may be repeated")
        add("--seed", type=seed, default=0,
            help="same seed, same text, with and without speculation; 64 bits count, so that -1 is 2^64 - 1")
        return group


def within(low: float, high: float = 2**31 - 1, kind: type = int) -> Callable[[str], float]:
    """Return an argparse type: a number of this kind from `low` to `high`, both included."""
    what = "a whole number" if kind is int else "a number"
    span = f"of at least {low:,} (and below 2^31)" if high == 2**31 - 1 else f"from {low:,} to {high:,}"

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} {span}")

    return read


positive, count = within(1), within(0)


def seed(text: str) -> int:
    """An argparse type: a whole number of 64 bits, as 0 to 2^64 - 1: -1 is 2^64 - 1."""
    return within(-(2**63), 2**64 - 1)(text) % 2**64


def bias(value: str) -> tuple[int, float]:
    """An argparse type: a token id and what is added to its logit, as ID=X."""
    token, _, number = value.partition("=")
    try:
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
    path = Path(os.path.realpath(file))
    place = path if path.exists() and not path.is_file() else path.parent  # a device is written directly
    if path.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"{flag} {file}: not a file that can be written")


def check_folder(flag: str, folder: str) -> None:
    """Raise InputError unless a folder, or the one that it would be made in, takes files."""
    place = Path(folder).absolute()
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"{flag} {folder}: not a folder that can be written to")


def check_replaceable(flag: str, folder: str) -> None:
    """Raise InputError unless a folder can be made, or replaced by another one, which is made beside it."""
    place = Path(folder).resolve()
    if os.path.ismount(place):
        raise InputError(f"{flag} {folder}: is mounted, and cannot be replaced; name a folder in it")
    if os.path.exists(place) and not place.is_dir():
        raise InputError(f"{flag} {folder}: not a folder that can be written to")
    check_folder(flag, str(place.parent))
