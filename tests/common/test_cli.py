"""How a command ends, and how its options are checked."""
import argparse

import pytest
from helpers.refusals import refused

from common import VERSION
from common.cli import Options, bias, count, positive, run_command, seed, within
from common.errors import InputError


def raising(error: BaseException):
    def action():
        raise error

    return action


@pytest.mark.parametrize("action, status, line", [
    (lambda: None, 0, ""), (lambda: 3, 3, ""), (raising(KeyboardInterrupt()), 130, "stopped"),
    (raising(InputError("no\n such  file")), 1, "error: no such file"),
    (raising(OSError()), 1, "error: OSError"),
    (raising(RuntimeError("CUDA out of memory. Tried 2 GiB")), 1, "error: not enough memory (CUDA out"),
    # Messages of libraries and names of files, as a terminal may show them.
    (raising(OSError("\x1b[2J\x1b[1;1Hall is well")), 1, r"error: \x1b[2J\x1b[1;1Hall is well"),
    (raising(OSError("x" * 5000)), 1, "error: " + "x" * 1500 + "..."),
], ids=range(8))
def test_how_a_command_ends(action, status, line, capsys):
    """With its status and, if it fails, one line that a terminal shows as it is."""
    assert run_command(action, OSError, interrupted="stopped") == status
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == bool(line) and said.strip("\n").isprintable()


@pytest.mark.parametrize("kind, value, number", [
    (positive, "1", 1), (positive, "2147483647", 2**31 - 1), (count, "0", 0), (positive, "0", None),
    (positive, "1.5", None), (positive, "2147483648", None), (count, "-1", None),
    (within(0, 9, float), "0.5", 0.5), (within(0, 9, float), "nan", None), (within(2, 9), "10", None),
    (bias, "50=-100", (50, -100.0)), (bias, "1", None), (seed, "-1", 2**64 - 1), (seed, "9" * 30, None),
])
def test_types_of_options(kind, value, number):
    if number is not None:
        assert kind(value) == number
        return
    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        kind(value)


def test_options_are_parsed_and_then_judged_in_order(capsys):
    p = Options("", prog="x.py")
    p.add_argument("-n", "--max-new-tokens", type=int, default=5)
    p.add_checkpoint("a folder")
    p.refuse(lambda o: o.max_new_tokens < 2, lambda o: f"{o.max_new_tokens} is below 2")
    p.refuse(lambda o: o.max_new_tokens < 3, lambda o: "below 3")
    with pytest.raises(SystemExit) as stop:
        p.read(["-n", "\x1b[31mred\nline"])
    assert stop.value.code == 2 and capsys.readouterr().err == (
        r"x.py: error: argument -n/--max-new-tokens: invalid int value: '\x1b[31mred\nline'; see --help" "\n"
    )
    for flag in "-m", "--model", "--checkpoint":
        assert p.read([flag, "half"]).checkpoint == "half"
    for number, words in ((1, "1 is below 2"), (2, "below 3")):
        with refused(words):
            p.read(["-m", "x", f"-n{number}"])
    with pytest.raises(SystemExit) as stop:
        p.read(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"x.py {VERSION}\n"
