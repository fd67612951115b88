"""Atomic writes, one-line errors of invalid files, cgroup CPU quotas."""
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from helpers import refused
from typing_extensions import NotRequired, TypedDict

from common import machine
from common.errors import InputError, read_json, read_text
from common.schema import Schema, number, text, whole
from common.writing import atomic_path
from evaluation.answers import Name
from tokens.dataset import read_rows


def test_atomic_writes(tmp_path):
    path = tmp_path / "it"
    path.write_text("before")
    with pytest.raises(RuntimeError), atomic_path(path) as part:
        part.write_text("half")
        assert path.read_text() == "before"
        raise RuntimeError
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["it"]
    both = threading.Barrier(2, timeout=60)

    def write(letter: str) -> None:  # concurrent writers use different temporary files
        with atomic_path(str(path)) as part:
            part.write_text(letter * 1000)
            both.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, "ab"))
    assert path.read_text() in ("a" * 1000, "b" * 1000) and os.listdir(tmp_path) == ["it"]
    (tmp_path / "link").symlink_to(path)  # links and devices are not replaced
    with atomic_path(tmp_path / "link") as part:
        part.write_text("new")
    assert (tmp_path / "link").is_symlink() and path.read_text() == "new"
    with atomic_path(os.devnull) as part:
        part.write_text("nothing")
    assert not os.path.isfile(os.devnull)


def test_invalid_files_are_one_line_errors(tmp_path):
    """U+2028 does not end a line."""
    file = tmp_path / "it"
    for read, content, error in (
        (read_json, None, "no such file"), (read_json, b"\xff", "cannot be read as JSON"),
        (read_json, b"[" * 200_000, "cannot be read as JSON"), (read_json, b"[1]", "expected a JSON object"),
        (read_text, b"caf\xe9", "cannot be read ('utf-8"), (read_rows, b"caf\xe9", "cannot be read ('utf-8"),
    ):
        if content is not None:
            file.write_bytes(content)
        with refused(f"{file}: {error}"):
            list(read(file))
    file.write_bytes('\ufeff{"a": "\u2028"}\r\n{"b": 1}\n'.encode())
    assert read_text(file) == '{"a": "\u2028"}\n{"b": 1}\n'
    assert [row for _, row in read_rows(file)] == [{"a": "\u2028"}, {"b": 1}]


@dataclass
class Shape:
    size: whole(1, 9)
    eps: number(above=0, high=1) = 0.5
    layers: tuple[whole(), ...] = ()


FILE = Schema(TypedDict("File", {
    "token": whole() | list[whole()] | None,
    "by rows": NotRequired[dict[text(pattern="^[0-9]{1,8}$"), number()]],
    "name": NotRequired[Name], "shape": NotRequired[Shape],
}))


@pytest.mark.parametrize("value, error", [
    ({}, "token is missing; expected a value"), ([], "the file is []; expected a valid dictionary"),
    ({"token": [1, True]}, "is True; expected a valid integer"),
    ({"token": 1, "by rows": {"1": float("inf")}}, "by rows.1 is inf; expected a finite number"),
    ({"token": 1, "name": "\x1b/../x"}, "name is '\\x1b/../x'; expected String should match pattern"),
    ({"token": 1, "shape": {"size": 1, "layers": [0, 10**400]}}, "shape.layers.1 is 1000"),
], ids=str)
def test_schema_errors_are_one_line(value, error):
    with pytest.raises(InputError) as e:
        FILE.require(value, "f.json", "delete it")
    message = str(e.value)
    assert message.startswith("f.json: ") and error in message
    assert message.endswith("; delete it") and len(message) < 300
    valid = {"token": [1], "others": object, "by rows": {"1": 2}, "shape": {"size": 9, "eps": 1, "more": 0}}
    assert FILE.require(valid, "f.json") is valid


# -- threads are limited to the usable processors ------------------------------------------------------------


@pytest.mark.parametrize("own, quotas, count", [
    ("0::/a/b", {"a/b": 3}, 3), ("0::/a/b", {"a": 2, "a/b": 3}, 2),
    ("0::/docker/1234", {".": 2}, 2),  # only the root cgroup is mounted
    ("0::/", {}, 8),
])
def test_threads_respect_cpu_quotas(monkeypatch, tmp_path, own, quotas, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    (tmp_path / "own").write_text(f"{own}\n")
    for group, processors in quotas.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(f"{processors}00000 100000\n")
    assert machine.processors(tmp_path, tmp_path / "own") == count
    threads = []
    monkeypatch.setattr(machine, "processors", lambda: count)
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    machine.use_threads(5), machine.use_threads()  # the second call keeps the number
    assert threads == [min(count, 5)]
