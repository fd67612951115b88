"""How a command ends, and how its options are checked."""
import argparse
import subprocess
import sys

import pytest
from helpers import ROOT
from helpers.refusals import refused

from common import VERSION
from common.cli import Options, bias, count, dtype, positive, run_command, seed, within
from common.dtypes import KV_DTYPES
from common.errors import InputError, did_you_mean
from drafters import METHODS
from kernels.modes import MODES


def raising(error: BaseException):
    def action():
        raise error

    return action


PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})  # as native code raises it
ENDS = (  # what a command does, its exit status, what it prints
    (lambda: None, 0, None), (lambda: 3, 3, None), (raising(KeyboardInterrupt()), 130, "stopped"),
    (raising(InputError("no\n such  file")), 1, "error: no such file"),
    (raising(PANIC("index out\nof bounds")), 1, "error: index out of bounds"),
    (raising(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")), 1, "error: not enough memory ("),
    # Messages of libraries and names of files, as a terminal may show them.
    *((raising(OSError(words)), 1, f"error: {line}") for words, line in (
        ("\x1b[2J\x1b[1;1Hall is well", r"\x1b[2J\x1b[1;1Hall is well"),
        ("sizes differ\nframe #0: c10::Error + 0x5 (0x7f in libc10.so)\nframe #1: main", "sizes differ"),
        ("x" * 5000, "x" * 1000 + " ... " + "x" * 500),
    )),
)


@pytest.mark.parametrize("action, status, line", ENDS, ids=range(len(ENDS)))
def test_how_a_command_ends(action, status, line):
    """With its status and, if it fails, one line that a terminal shows as it is."""
    messages: list[str] = []
    assert run_command(action, OSError, say=messages.append, interrupted="stopped") == status
    assert len(messages) == (line is not None)
    for message in messages:
        assert message.isprintable()
        assert message.startswith(line) if line.endswith("(") else message == line


@pytest.mark.parametrize("kind, value, number", [
    (positive, "1", 1), (positive, "2147483647", 2**31 - 1), (count, "0", 0), (positive, "0", None),
    (positive, "1.5", None), (positive, "", None), (positive, "2147483648", None), (count, "-1", None),
    (within(0, 9, float), "0.5", 0.5), (within(0, 9, float), "nan", None), (within(2, 9), "10", None),
    (bias, "50=-100", (50, -100.0)), (bias, "1=a", None), (bias, "x", None), (seed, "-1", 2**64 - 1),
    (seed, "9" * 30, None), (dtype, "fp32", "fp32"), (dtype, "int8", None),
])
def test_types_of_options(kind, value, number):
    if number is not None:
        assert kind(value) == number
        return
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a (whole )?number|is no ID=X|unknown"):
        kind(value)


def test_options_are_parsed_and_then_judged_in_order(capsys):
    """What cannot be parsed is one line with the nearest name, on a terminal too; rules come after it."""
    p = Options("", prog="x.py")
    p.add_argument("-n", "--max-new-tokens", type=int, default=5)
    p.add_argument("--mode", choices=("int8", "int4"))
    p.add_checkpoint("a folder")
    p.refuse(lambda o: o.max_new_tokens < 2, lambda o: f"{o.max_new_tokens} is below 2")
    p.refuse(lambda o: o.max_new_tokens < 3, lambda o: "below 3")
    for argv, words in (
        (["--max-tokens", "5"], "unrecognized arguments: --max-tokens (did you mean --max-new-tokens?)"),
        (["-hf", "x"], "unrecognized arguments: -hf (did you mean --checkpoint?)"),
        (["-m", "x", "a", "word"], "unrecognized arguments: a word (quote texts with spaces)"),
        (["-m", "x", "--mode", "q8_0"], "(did you mean int8?)"),
        (["-n", "\x1b[31mred\nline"], r"argument -n/--max-new-tokens: invalid int value: '\x1b[31mred\n"),
    ):
        with pytest.raises(SystemExit) as stop:
            p.read(argv)
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.startswith("x.py: error: ") and words in said
        assert said.endswith("; see --help\n") and said.rstrip().isprintable()
    for flag in "-m", "--model", "--checkpoint":  # a value is no option
        assert p.read([flag, "half"]).checkpoint == "half"
        o = p.read([flag, "-1", "-n3"])
        assert (o.checkpoint, o.max_new_tokens) == ("-1", 3)
    for number, words in ((1, "1 is below 2"), (2, "below 3")):
        with refused(words):
            p.read(["-m", "x", f"-n{number}"])
    with pytest.raises(SystemExit) as stop:
        p.read(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"x.py {VERSION}\n"


FLAGS = "--draft", "--checkpoint", "--interactive"


@pytest.mark.parametrize("word, known, meant", [
    ("eagle-3", METHODS, "eagle3"), ("p_eagle", METHODS, "p-eagle"), ("ngram", METHODS, "lookup"),
    ("magic", METHODS, None), ("Q4_K_M", MODES, "w4a8"), ("q8_0", MODES, "w8a8"), ("q8_0", KV_DTYPES, "int8"),
    ("--draft_checkpoint_path", FLAGS, "--draft"), ("-i", FLAGS, "--interactive"), ("-i", ["--seed"], None),
])
def test_names_of_other_programs(word, known, meant):
    assert did_you_mean(word, known) == (f" (did you mean {meant}?)" if meant else "")


def test_help_begins_with_what_is_used_most():
    p = Options("Does it.", prog="x.py")
    p.add_argument("--rare", choices=("int8", "fp8"), help="seldom")
    p.add_argument("--out", required=True)
    p.add_checkpoint("a folder")
    words = p.format_help()
    order = [words.index(part) for part in (
        "usage: x.py --out OUT --checkpoint CHECKPOINT [option ...]", "Does it.", "most used:",
        "  --out OUT", "-m CHECKPOINT", "options:", "-h, --help", "--rare", "seldom",
    )]
    assert order == sorted(order)


def test_a_full_disk_behind_the_output_is_one_line():
    """Nothing more at the end of the process."""
    code = (
        "import sys; from common.cli import run_command;"
        " sys.exit(run_command(lambda: print('x', flush=True), OSError))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert done.returncode == 1
    assert done.stderr == "error: the output: no space left on the device; make room and try again\n"
