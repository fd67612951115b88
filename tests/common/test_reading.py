"""Only files that end are read, and JSON only if it fits; what a killed process left is removed."""
import os
import threading

import pytest

from common.errors import InputError
from common.files import atomic_path, check_file, left_behind, parse_json, read_bytes, read_json, read_text


def test_a_file_is_read(tmp_path):
    (tmp_path / "it").write_bytes(b"Gr\xc3\xb6\xc3\x9fe")
    assert check_file(tmp_path / "it") == 7 and read_text(tmp_path / "it") == "Größe"
    assert read_bytes(tmp_path / "it", most=7) == b"Gr\xc3\xb6\xc3\x9fe"
    with pytest.raises(InputError, match=r"it: is 7 bytes; expected at most 6$"):
        read_bytes(tmp_path / "it", most=6)
    (tmp_path / "it").write_bytes(b"\xff")
    with pytest.raises(InputError, match="it: cannot be read as text"):
        read_text(tmp_path / "it")
    assert read_bytes("/proc/self/status", most=1 << 20)  # whose size is 0


@pytest.mark.parametrize("name, words", [
    ("pipe", "is a pipe; expected a file"), ("zero", "is a device; expected a file"),
    (".", "is a folder; expected a file"), ("nothing", "no such file"), ("a\0b", "cannot be read"),
    ("loop", "cannot be read"),
])
def test_what_is_no_file_is_not_opened(tmp_path, name, words):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    for read in (read_bytes, read_json, read_text, check_file):
        with pytest.raises(InputError, match=words) as error:
            read(str(tmp_path / name))
        assert str(error.value).startswith(str(tmp_path))


def test_a_file_that_does_not_end():
    if not os.path.exists("/proc/self/mem"):
        pytest.skip("no /proc here")
    with pytest.raises(InputError, match=r"cannot be read|goes on after"):
        read_bytes("/proc/self/mem", most=100)
    with pytest.raises(InputError, match="/proc/self/maps: goes on after 10 bytes; expected no more"):
        read_bytes("/proc/self/maps", most=10)


def test_numbers_that_python_does_not_read():
    for content, words in (
        (b'{"a": {"b": ' + b"9" * 4301, None), (b'{"a": {"b": ' + b"9" * 4301 + b"}}",
        "b holds a number of 4,301"),
        (b'{"b": [-' + b"9" * 5000 + b"]}", "b holds a number of 5,000"), (b"9" * 5000,
        "it holds a number of 5,000"),
    ):
        with pytest.raises(InputError, match=words or "cannot be read as JSON|b holds a number") as error:
            parse_json(content, "there")
        assert str(error.value).startswith("there: ")
    assert parse_json(b'{"a": ' + b"9" * 4300 + b"}", "there")["a"] > 10**4000


def test_what_a_killed_process_left_is_removed(tmp_path):
    """And what a living one is writing stays."""
    (tmp_path / ".it.99.1.partial").write_text("half")
    (tmp_path / ".other.99.1.partial").write_text("of something else")
    inside, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with atomic_path(tmp_path / "it") as part:
            part.write_text("theirs")
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    assert not list(left_behind(tmp_path, ".it.", ".partial"))
    with atomic_path(tmp_path / "it") as part:
        part.write_text("ours")
    go_on.set()
    thread.join()
    assert sorted(os.listdir(tmp_path)) == [".other.99.1.partial", "it"]
    assert (tmp_path / "it").read_text() == "theirs"
