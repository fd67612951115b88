"""How commands exit, and how options are checked."""
import argparse
import io
import sys

import pytest
from helpers import refused
from helpers.launching import run

import eagle
from common.cli import VERSION, Options, command, count, positive, run_command, seed, within
from common.errors import InputError
from common.names import program
from generate import logit_bias


@pytest.mark.parametrize("end, status, line", [
    (None, 0, ""), (3, 3, ""), (KeyboardInterrupt(), 130, "stopped"),
    (InputError("--tree\n 9:  no such  file"), 1, "error: --tree 9: no such file"),
    (RuntimeError("CUDA out of memory. Tried 2 GiB"), 1, "error: not enough memory (CUDA out"),
    (OSError("\x1b[2J\x1b[1;1Hall is well"), 1, r"error: \x1b[2J\x1b[1;1Hall is well"),
], ids=range(6))
def test_exit_status_and_error_line(end, status, line, capsys, monkeypatch):
    """With an exit status and, on failure, one printable line."""
    def action() -> int | None:
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(InputError, "in_command", False)  # as before the first command of a process
    assert run_command(action, OSError, interrupted="stopped") == status
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == bool(line) and said.strip("\n").isprintable()


@pytest.mark.parametrize("kind, value, number", [
    (positive, "2147483647", 2**31 - 1), (count, "0", 0), (positive, "0", None), (positive, "1.5", None),
    (positive, "2147483648", None), (within(0, 9, float), "0.5", 0.5), (within(0, 9, float), "nan", None),
    (logit_bias, "50=-100", (50, -100.0)), (logit_bias, "1", None),
    (seed, "-1", 2**64 - 1), (seed, "9" * 30, None),
])
def test_types_of_options(kind, value, number):
    try:
        assert kind(value) == number
    except (argparse.ArgumentTypeError, ValueError):
        assert number is None


def test_options_are_parsed_and_then_judged_in_order(capsys):
    p = Options("", prog="x.py")
    p.add_argument("-n", type=int, default=5)
    p.add_checkpoint("a folder")
    p.reject_if(lambda o: o.n < 2, lambda o: f"{o.n} is below 2")
    p.reject_if(lambda o: o.n < 3, lambda o: "below 3")
    for number, words in (("1", "1 is below 2"), ("2", "below 3")):
        with refused(words):
            p.read(["--model", "x", "-n", number])
    assert p.read(["-n", "3", "x"]).checkpoint == p.read(["-m", "x"]).checkpoint == "x"
    for option, printed in (
        ("-n=\x1b[31m\nline", r"x.py: error: argument -n: invalid int value: '\x1b[31m\nline'; see --help"),
        ("--version", f"x.py {VERSION}"),
    ):
        with pytest.raises(SystemExit):
            p.read([option])
        assert "".join(capsys.readouterr()) == f"{printed}\n"


@pytest.mark.parametrize("command", ("generate", "serve"))
def test_the_time_until_a_command_is_ready_counts_its_imports(command):
    """`common` records the start time, so it is imported before anything slow."""
    code = f"import sys; before = {{*sys.modules}}; import {command}; print(*(name for name in sys.modules"
    code += " if name not in before and name.split('.')[0] not in sys.stdlib_module_names))"
    assert run(sys.executable, "-c", code).split()[0] == "common"


@pytest.mark.parametrize("encoding, found", (("utf-8", "é 猫😀"), ("latin-1", "é ??"), ("ascii", "? ??")))
def test_what_stdout_cannot_encode_is_replaced_with_one_warning(encoding, found, monkeypatch, capsys):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", out)
    assert command(Options(), [], lambda o: print("é ", "猫", "😀", sep="", end="")) == 0
    assert out.buffer.getvalue().decode(encoding) == found
    assert capsys.readouterr().err.count("PYTHONIOENCODING") == (encoding != "utf-8")


def test_the_command_eagle_has_every_program(capsys, monkeypatch):
    """The installed command itself is tested in tests/test_installed.py."""
    monkeypatch.setattr(sys, "argv", [])  # restored at the end
    for name in eagle.COMMANDS:
        with pytest.raises(SystemExit) as end:
            eagle.main([name, "--help"])
        assert end.value.code == 0 and "usage: " in capsys.readouterr().out
    assert program("convert") == "eagle convert"
    assert eagle.main([]) == 0 and "eagle COMMAND" in capsys.readouterr().out
    assert eagle.main(["--version"]) == 0 and VERSION in capsys.readouterr().out
    assert eagle.main(["genrate"]) == 2 and "did you mean generate?" in capsys.readouterr().err
