"""Building and loading the library of the CPU kernels: what goes wrong is one line and leaves nothing."""
import os
import subprocess

import pytest

from common.errors import InputError
from kernels import build, cpu
from kernels.isa import choose


def test_a_failing_compiler_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu, "_loaded", {})
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build, "FLAGS", ("-Wno-such", "-march=no-such-machine"))
    with pytest.raises(InputError, match=r"could not compile the kernels.*name another --isa"):
        cpu.load_kernels()
    assert not list(tmp_path.glob("cache/*"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"no C\+\+ compiler.*no-such-compiler"):
        cpu.load_kernels()


def test_an_interrupted_build_leaves_nothing(monkeypatch, tmp_path):
    """Neither files nor compilers at work."""
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

        def wait(self, timeout=None):
            if len(started) > 1 and started[1] is not None:  # the version was asked for first
                started[1] = None
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(cpu, "_loaded", {})
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANOTHER"))
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        cpu.load_kernels()
    assert not list(tmp_path.glob("cache/*")) and len(started) > 2
    assert all(process.poll() is not None for process in started if process)


def test_a_library_that_cannot_be_loaded(monkeypatch, tmp_path):
    (tmp_path / "cpu.so").write_bytes(b"no library")
    monkeypatch.setattr(cpu, "_loaded", {})
    monkeypatch.setattr(cpu, "build_library", lambda isa, say: tmp_path / "cpu.so")
    with pytest.raises(InputError, match=r"cpu\.so: cannot be loaded .*delete it"):
        cpu.load_kernels()


@pytest.mark.compile
def test_a_library_in_a_read_only_checkout_is_used(monkeypatch):
    """Nothing is compiled, and no other place is looked for."""
    library = build.build_library(choose(), lambda line: None)
    monkeypatch.setattr(build, "_folder", lambda: pytest.fail("a place to write to"))
    monkeypatch.setattr(build, "CACHE", library.parent)
    assert build.build_library(choose(), pytest.fail) == library


def test_no_place_for_a_library(monkeypatch, tmp_path):
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "CACHE", tmp_path / "file" / "kernels")
    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    with pytest.raises(build.NoKernels, match=r"cannot be compiled \(No usable temporary directory"):
        build.build_library(choose(), pytest.fail)


def test_libraries_of_other_users_are_not_loaded(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(build, "CACHE", tmp_path / "file" / "kernels")  # as in a read-only checkout
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"eagle-kernels-{os.getuid()}"
    assert build._folder() == folder and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    (tmp_path / f"eagle-kernels-{os.getuid()}").mkdir()
    with pytest.raises(InputError, match="belongs to another user"):
        build._folder()
