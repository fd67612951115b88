"""A file is there whole or not at all, whoever else writes it."""
import os
import threading

import pytest

from common.errors import InputError
from common.files import atomic_path, check_file, read_bytes, read_json, read_text


def test_whole_or_not_at_all(tmp_path):
    path = tmp_path / "it"
    path.write_text("before")
    with pytest.raises(RuntimeError), atomic_path(path) as part:
        part.write_text("half")
        assert path.read_text() == "before"
        raise RuntimeError
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["it"]
    with atomic_path(str(path)) as part:
        part.write_text("after")
    assert path.read_text() == "after" and os.listdir(tmp_path) == ["it"]


def test_two_writers(tmp_path):
    """Each has a file of its own until it is whole; the last one stays."""
    both = threading.Barrier(2)

    def write(text: str) -> None:
        with atomic_path(tmp_path / "it") as part:
            part.write_text(text)
            both.wait()

    threads = [threading.Thread(target=write, args=(c * 1000,)) for c in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "it").read_text() in ("a" * 1000, "b" * 1000) and os.listdir(tmp_path) == ["it"]


def test_links_and_devices_stay_what_they_are(tmp_path):
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with atomic_path(tmp_path / "link") as part:
        part.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "new"
    with atomic_path(os.devnull) as part:
        part.write_text("nothing")
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize("content, words", [
    (None, "no such file"), (b"{", "cannot be read as JSON"), (b"\xff\xfe", "cannot be read as JSON"),
    (b"[" * 200_000, "cannot be read as JSON"), (b"[1]", "expected a JSON object, found list"),
    (b"null", "expected a JSON object, found NoneType"),
], ids=["missing", "broken", "not UTF-8", "too deep", "a list", "null"])
def test_json_that_cannot_be_read(tmp_path, content, words):
    if content is not None:
        (tmp_path / "it.json").write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        read_json(tmp_path / "it.json")
    assert str(error.value).startswith(str(tmp_path / "it.json"))


def test_texts(tmp_path):
    path = tmp_path / "it"
    path.write_bytes("\ufeffa\r\nb\rc\n".encode())
    assert read_text(path) == "a\nb\nc\n"
    assert check_file(path) == len(read_bytes(path))
    path.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"is no UTF-8 \(byte 3\)"):
        read_text(path)
