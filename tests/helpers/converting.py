"""What the tests of conversion share."""
from convert_checkpoint import main


def run(capsys, *argv) -> tuple[int, list[str]]:
    """(Exit status, lines on stderr) of convert_checkpoint.py."""
    code = main([str(a) for a in argv])
    return code, capsys.readouterr().err.splitlines()
