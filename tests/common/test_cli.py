"""Exit statuses, error messages, and validation of options."""
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


@pytest.mark.parametrize("outcome, status, line", [
    (None, 0, ""), (3, 3, ""), (KeyboardInterrupt(), 130, "stopped"),
    (InputError("--tree\n 9:  no such  file"), 1, "error: --tree 9: no such file"),
    (RuntimeError("CUDA out of memory. Tried 2 GiB"), 1, "error: not enough memory (CUDA out"),
    (OSError("\x1b[2J\x1b[1;1Hall is well"), 1, r"error: \x1b[2J\x1b[1;1Hall is well"),
], ids=range(6))
def test_exit_status_and_error_line(outcome, status, line, capsys, monkeypatch):
    """On failure, one printable line."""
    def action() -> int | None:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(InputError, "in_command", False)  # as before the first command of a process
    assert run_command(action, OSError, interrupted="stopped") == status
    stderr = capsys.readouterr().err
    assert stderr.startswith(line) and stderr.count("\n") == bool(line) and stderr.strip("\n").isprintable()


@pytest.mark.parametrize("option_type, text, value", [
    (positive, "2147483647", 2**31 - 1), (count, "0", 0), (positive, "0", None), (positive, "1.5", None),
    (positive, "2147483648", None), (within(0, 9, float), "0.5", 0.5), (within(0, 9, float), "nan", None),
    (logit_bias, "50=-100", (50, -100.0)), (logit_bias, "1", None),
    (seed, "-1", 2**64 - 1), (seed, "9" * 30, None),
])
def test_types_of_options(option_type, text, value):
    try:
        assert option_type(text) == value
    except (argparse.ArgumentTypeError, ValueError):
        assert value is None


def test_rules_are_checked_in_order(capsys):
    p = Options("", prog="x.py")
    p.add_argument("-n", type=int, default=5)
    p.add_checkpoint("a folder")
    p.reject_if(lambda o: o.n < 2, lambda o: f"{o.n} is below 2")
    p.reject_if(lambda o: o.n < 3, lambda o: "below 3")
    for number, error in (("1", "1 is below 2"), ("2", "below 3")):
        with refused(error):
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
def test_common_is_imported_first(command):
    """common.cli records the start time, which must be before slow imports."""
    code = f"import sys; before = {{*sys.modules}}; import {command}; print(*(name for name in sys.modules"
    code += " if name not in before and name.split('.')[0] not in sys.stdlib_module_names))"
    assert run(sys.executable, "-c", code).split()[0] == "common"


@pytest.mark.parametrize("encoding, expected", (("utf-8", "é 猫😀"), ("latin-1", "é ??"), ("ascii", "? ??")))
def test_unencodable_output_is_replaced_with_one_warning(encoding, expected, monkeypatch, capsys):
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", out)
    assert command(Options(), [], lambda o: print("é ", "猫", "😀", sep="", end="")) == 0
    assert out.buffer.getvalue().decode(encoding) == expected
    assert capsys.readouterr().err.count("PYTHONIOENCODING") == (encoding != "utf-8")


def test_eagle_runs_every_command(capsys, monkeypatch):
    """The installed command itself is tested in tests/test_installed.py."""
    monkeypatch.setattr(sys, "argv", [])  # which eagle.main changes
    for name in eagle.COMMANDS:
        with pytest.raises(SystemExit) as exit_info:
            eagle.main([name, "--help"])
        assert exit_info.value.code == 0 and "usage: " in capsys.readouterr().out
    assert program("convert") == "eagle convert"
    assert eagle.main([]) == 0 and "eagle COMMAND" in capsys.readouterr().out
    assert eagle.main(["--version"]) == 0 and VERSION in capsys.readouterr().out
    assert eagle.main(["genrate"]) == 2 and "did you mean generate?" in capsys.readouterr().err
