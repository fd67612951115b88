"""How a command ends, and how its options are checked."""
import argparse
import os
import subprocess
import sys

import pytest
from helpers import ROOT
from helpers.refusals import refused

from common import VERSION
from common.cli import Options, bias, count, dtype, positive, run_command, seed, within
from common.dtypes import KV_DTYPES
from common.errors import InputError, counted, did_you_mean
from drafters import METHODS, add_drafting
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
    (raising(MemoryError()), 1, "error: not enough memory ("),
    (raising(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")), 1, "error: not enough memory ("),
    # Messages of libraries and names of files, as a terminal may show them.
    *((raising(OSError(words)), 1, f"error: {line}") for words, line in (
        ("\x1b[2J\x1b[1;1Hall is well", r"\x1b[2J\x1b[1;1Hall is well"),
        ("two\r\nlines\vand\u2028more", "two lines and more"),
        ("sizes differ\nframe #0: c10::Error + 0x5 (0x7f in libc10.so)\nframe #1: main", "sizes differ"),
        ("x" * 5000, "x" * 1000 + " ... " + "x" * 500),
    )),
)


@pytest.mark.parametrize("action, status, line", ENDS, ids=range(len(ENDS)))
def test_how_a_command_ends(action, status, line):
    """With its status and, if it fails, one line that a terminal shows as it is."""
    messages: list[str] = []
    assert run_command(action, OSError, say=messages.append, interrupted="stopped") == status
    if line is None:
        assert not messages
        return
    (message,) = messages
    assert message.isprintable() and (message.startswith(line) if line.endswith("(") else message == line)


def test_a_reader_that_leaves_is_no_error(monkeypatch, tmp_path):
    with open(tmp_path / "out", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        messages: list[str] = []
        assert run_command(raising(BrokenPipeError()), say=messages.append) == 141 and not messages
        assert os.readlink(f"/proc/self/fd/{file.fileno()}") == os.devnull


def test_rules_are_checked_in_their_order():
    p = Options("")
    p.add_argument("--low", type=int, default=0)
    p.add_argument("--high", type=int, default=9)
    p.refuse(lambda o: o.high < o.low, lambda o: f"{o.low} is above {o.high}")
    p.refuse(lambda o: o.low < 0, lambda o: "below 0")
    assert p.read(["--low", "1", "--high", "1000"]).high == 1000
    for argv, words in ((["--low", "10"], "10 is above 9"), (["--low=-1"], "below 0"), (
            ["--high=-2", "--low=-1"], "-1 is above -2")):
        with refused(words):
            p.read(argv)


@pytest.mark.parametrize("kind, value, number", [
    (positive, "1", 1), (positive, "2147483647", 2**31 - 1), (count, "0", 0), (count, "7", 7),
    (positive, "0", None), (positive, "-1", None), (positive, "1.5", None), (positive, "", None),
    (positive, "9223372036854775808", None), (count, "-1", None), (count, "x", None),
    (bias, "50=-100", (50, -100.0)), (seed, "-1", 2**64 - 1), (seed, "9" * 30, None), (dtype, "fp32", "fp32"),
    (bias, "1=a", None), (bias, "x", None), (dtype, "int8", None),
    (within(0, 9, float), "0.5", 0.5), (within(0, 9, float), "9", 9), (within(0, 9, float), "nan", None),
    (within(2, 9), "1", None), (within(2, 9), "10", None),
])
def test_types_of_options(kind, value, number):
    if number is not None:
        assert kind(value) == number
        return
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a (whole )?number|is no ID=X|unknown"):
        kind(value)


def test_what_cannot_be_parsed_is_one_line(capsys):
    p = Options("", prog="x.py")
    p.add_argument("--number", type=int)
    with pytest.raises(SystemExit) as stop:
        p.read(["--number", "\x1b[31mred\nline"])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith("x.py: error: argument --number")
    assert said.count("\n") == 1 and said.rstrip().isprintable()


def test_the_nearest_option_is_named_and_a_version(capsys):
    p = Options("", prog="x.py")
    p.add_argument("-n", "--max-new-tokens", type=int)
    p.add_checkpoint("a folder")
    for argv, words in (
        (["--max-tokens", "5"], "arguments: --max-tokens (did you mean --max-new-tokens?); see --help"),
        (["--chekpoint", "x"], "arguments: --chekpoint (did you mean --checkpoint?); see --help"),
        (["-hf", "x"], "arguments: -hf (did you mean --checkpoint?); see --help"),
        (["-m", "x", "a", "word"], "arguments: a word (quote texts with spaces); see --help"),
    ):
        with pytest.raises(SystemExit):
            p.read(argv)
        assert capsys.readouterr().err == f"x.py: error: unrecognized {words}\n"
    for flag in "-m", "--model", "--checkpoint":  # a value is no option
        assert p.read([flag, "half"]).checkpoint == "half"
        o = p.read([flag, "-1", "-n3"])
        assert (o.checkpoint, o.max_new_tokens) == ("-1", 3)
    with pytest.raises(SystemExit) as stop:
        p.read(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"x.py {VERSION}\n"


FLAGS = "--draft", "--checkpoint", "--interactive"


@pytest.mark.parametrize("word, known, meant", [
    ("EAGLE3", METHODS, "eagle3"), ("eagle-3", METHODS, "eagle3"), ("p_eagle", METHODS, "p-eagle"),
    ("ngram", METHODS, "lookup"), ("draft", METHODS, "draft-model"), ("magic", METHODS, None),
    ("q8_0", MODES, "w8a8"), ("Q4_K_M", MODES, "w4a8"), ("INT4", MODES, "int4"), ("q8_0", KV_DTYPES, "int8"),
    ("--draft_checkpoint_path", FLAGS, "--draft"), ("--checkpoint_path", FLAGS, "--checkpoint"),
    ("-i", FLAGS, "--interactive"), ("-i", ["--seed"], None),
])
def test_names_of_other_programs(word, known, meant):
    assert did_you_mean(word, known) == (f" (did you mean {meant}?)" if meant else "")


def test_one_is_singular():
    assert [counted(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]


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


def test_a_value_of_another_program(capsys):
    p = Options("", prog="x.py")
    p.add_argument("--mode", choices=("int8", "int4"))
    with pytest.raises(SystemExit):
        p.read(["--mode", "q8_0"])
    assert capsys.readouterr().err.endswith("(did you mean int8?); see --help\n")


def test_the_groups_that_commands_share():
    p = Options("")
    p.add_runtime(), p.add_sampling(), add_drafting(p)
    assert p.read(["--device", "cuda:1", "--top-p", "0.5", "--speculate", "eagle3", "--tree", "paper"])
    for argv, words in (
        (["--isa", "avx2", "--no-kernels"], "--isa avx2: is for the kernels"),
        (["--draft", "x"], "--speculate none: has no use for --draft"),
        (["--tree", "paper"], "--speculate none: has no use for --tree"),
        (["--shard-head"], "--shard-head: deals what drafts among ranks"),
    ):
        with refused(words):
            p.read(argv)


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
