"""Files that a user names: what is read, and what has no end and is refused."""
import os
import socket
import subprocess
import sys
import threading

import pytest
from helpers import ROOT
from helpers.refusals import refused

from common.texts import LONGEST_LINE, MOST, check_readable, read_lines, read_text


def test_a_text_is_read_as_it_is(tmp_path):
    file = tmp_path / "text"
    for data, text in (
        (b"", ""), (b"a\r\nb\rc\n", "a\nb\nc\n"), ("\ufeffüñ\u2028x".encode(), "üñ\u2028x"), (b"\0", "\0"),
    ):
        file.write_bytes(data)
        assert read_text(file) == text
        assert list(read_lines(file)) == data.decode("utf-8-sig").removesuffix("\n").split("\n") * bool(data)


@pytest.mark.parametrize("device", ("/dev/zero", "/dev/null", "/dev/urandom", "/dev/full"))
def test_devices_are_refused(device, tmp_path):
    (tmp_path / "link").symlink_to(device)
    for path in (device, tmp_path / "link"):
        for read in (read_text, lambda p: list(read_lines(p)), lambda p: check_readable("", p)):
            with refused(f"{path}: is a device; expected a file"):
                read(path)


def test_pipes_with_a_name_and_sockets_are_refused(tmp_path):
    """Whether somebody writes into them or not."""
    os.mkfifo(tmp_path / "pipe")
    with refused(f"--openings {tmp_path / 'pipe'}: is a pipe; expected a file"):
        read_text(tmp_path / "pipe", what="--openings")
    writer = threading.Thread(target=lambda: os.close(os.open(tmp_path / "pipe", os.O_RDWR)))
    writer.start()
    with refused(f"{tmp_path / 'pipe'}: is a pipe; expected a file"):
        read_text(tmp_path / "pipe")
    writer.join()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with refused(f"{tmp_path / 'socket'}: is a socket; expected a file"):
            read_text(tmp_path / "socket")


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="needs the right to read it")
def test_a_file_of_the_kernel_that_waits_is_refused():
    with refused("/proc/kmsg: cannot be read"):
        for _ in range(1000):  # what is there already is read
            read_text("/proc/kmsg", most=1 << 30)


def test_sizes_are_told(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with refused(f"{tmp_path / 'sparse'}: is 1,099,511,627,776 bytes; expected at most {MOST:,}"):
        read_text(tmp_path / "sparse")
    with refused(f"{tmp_path / 'sparse'}: line 1 has more than {LONGEST_LINE:,} bytes"):
        list(read_lines(tmp_path / "sparse"))
    (tmp_path / "text").write_bytes(b"ok\n\xff")
    with refused(f"{tmp_path / 'text'}: cannot be read, line 2 is no UTF-8 (byte 0)"):
        list(read_lines(tmp_path / "text"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, why in (
        ("loop", "cannot be read ("), ("nowhere", "no such file"), (".", "is a folder; expected a file"),
    ):
        with refused(f"{tmp_path / name}: {why}"):
            read_text(tmp_path / name)


READ = "import sys; from common.texts import read_text; print(len(read_text('/dev/stdin', 1 << 20)))"


@pytest.mark.parametrize("source, said", [
    ("printf 'four'", "4\n"), ("true", "0\n"),
    ("(sleep 0.3; printf 'four'; sleep 0.3; printf 'four')", "8\n"),
    ("yes", "/dev/stdin: goes on after 1,048,576 bytes"), ("cat /dev/zero", "/dev/stdin: goes on after"),
])
def test_standard_input_may_be_a_pipe(source, said):
    command = f"{source} | {sys.executable} -c \"{READ}\" 2>&1 | tail -n 1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert said in done.stdout, done.stdout


def test_what_a_shell_hands_over_is_read():
    read = READ.replace("'/dev/stdin'", "sys.argv[1]")
    command = f"{sys.executable} -c \"{read}\" <(printf four)"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "4\n", done.stderr
