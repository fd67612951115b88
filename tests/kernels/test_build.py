"""Building and loading the library of the CPU kernels: what goes wrong is one line and leaves nothing."""
import os
import shutil
from pathlib import Path

import pytest

from common.errors import InputError
from kernels import build
from kernels.isa import choose


@pytest.fixture(scope="module")
def built():
    """A library for this machine."""
    return build.build_library(choose(), lambda line: None)


@pytest.fixture
def cached(built, tmp_path, monkeypatch):
    """The same in a cache of its own."""
    monkeypatch.setattr(build, "CACHE", tmp_path)
    return Path(shutil.copy(built, tmp_path))


@pytest.mark.kernels
def test_a_library_is_used_without_its_compiler(cached, monkeypatch):
    monkeypatch.setenv("CXX", "no-such compiler")
    assert build.build_library(choose(), pytest.fail) == cached
    cached.unlink()
    with pytest.raises(build.NoKernels, match="the kernels need no-such; install it"):
        build.build_library(choose(), pytest.fail)


@pytest.mark.kernels
@pytest.mark.parametrize("content", (b"\x7fELF", "half"), ids=("a header", "half"))
def test_a_damaged_library_is_made_again(cached, monkeypatch, content):
    """It is not loaded: a part of one ends the process."""
    whole, lines = cached.read_bytes(), []
    cached.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    monkeypatch.setattr(build, "_run", lambda commands: Path(commands[-1][-1]).write_bytes(whole))
    assert build.build_library(choose(), lines.append) == cached and cached.read_bytes() == whole
    assert lines[0] == f"{cached}: damaged, not used" and lines[1].startswith("compiling") and len(lines) == 3


def test_libraries_of_other_users_are_not_loaded(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "CACHE", tmp_path / "file" / "kernels")  # as in a read-only checkout
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"eagle-kernels-{os.getuid()}"
    assert build.writable_folder(build.CACHE) == folder and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    (tmp_path / f"eagle-kernels-{os.getuid()}").mkdir()
    with pytest.raises(InputError, match="belongs to another user"):
        build.writable_folder(build.CACHE)
