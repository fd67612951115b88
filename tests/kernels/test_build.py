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
