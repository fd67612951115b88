"""Compile the CPU kernels (`csrc/`) for this machine, and cache the libraries."""
from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common.errors import InputError
from kernels.isa import InstructionSet, vendor

SOURCE = Path(__file__).resolve().with_name("csrc")
ROOT = SOURCE.parent.parent
# Compiled code is executed, so it is never read from a checkpoint.
CACHE_ROOT = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or ROOT / ".cache")
CACHE = CACHE_ROOT / "kernels"
FLAGS = ("-O3", "-ffp-contract=off", "-std=c++20", "-pthread", "-fPIC", "-fvisibility=hidden", "-pipe")


class NoKernels(InputError):
    """The kernels cannot be compiled or loaded on this machine."""


def build_library(isa: InstructionSet, log: Callable[[str], None]) -> Path:
    """Return the library for an instruction set, compiled for this PyTorch and compiler unless cached.

    Its operators are in the namespace `namespace(isa)`. Without a compiler, a cached library of any compiler
    is used. Raises NoKernels if there is none, or the compiler fails; OSError if no folder is writable.
    """
    cxx = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    command = [shutil.which(cxx[0]), *cxx[1:]]
    contents = [(path.name, path.read_bytes()) for path in sources()]
    flags = (*FLAGS, *isa.flags, f"-DVENDOR_{vendor()}", f"-DNAMESPACE={namespace(isa)}")
    stem = f"{isa.name}-{_digest(repr((contents, torch.__version__, flags, platform.machine())).encode())}"
    compiler = _digest(repr(command[1:]).encode() + _version(command)) if command[0] else ""
    for folder in (CACHE, writable_folder(CACHE)):
        if libraries := sorted(folder.glob(f"{stem}-{compiler}*.so")):
            return libraries[0]
    if not command[0]:
        raise NoKernels(f"no C++ compiler: the kernels need {cxx[0]}; install it or set CXX")
    log(f"compiling the kernels for {isa.name} ...")
    start = time.perf_counter()
    root = Path(torch.__file__).parent
    link = (f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10")
    with tempfile.TemporaryDirectory() as build:
        objects = {path: f"{build}/{path.stem}.o" for path in sources() if path.suffix == ".cpp"}
        _run([[*command, *flags, f"-I{root}/include", "-c", str(p), "-o", o] for p, o in objects.items()])
        _run([[*command, "-shared", "-pthread", *objects.values(), *link, "-o", f"{build}/kernels.so"]])
        if not (shared := Path(build, "kernels.so")).exists():
            raise NoKernels(f"{command[0]} did not write a library; set CXX to another compiler")
        library = folder / f"{stem}-{compiler}.so"
        from common.writing import atomic_path

        with atomic_path(library) as part:  # other processes may write the same file
            shutil.copyfile(shared, part)
    log(f"compiling the kernels took {time.perf_counter() - start:.1f} s")
    return library


def _version(command: list[str]) -> bytes:
    """Return the compiler's version text."""
    return subprocess.run([*command, "--version"], capture_output=True).stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _run(commands: list[list[str]]) -> None:
    """Run compiler commands in parallel. Raises NoKernels if one fails."""
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # a pipe could fill up
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append((process, errors))
        for process, errors in processes:
            if process.wait():
                errors.seek(0)
                reason = next((line.strip() for line in errors if "rror" in line), "no error message")
                raise NoKernels(f"{commands[0][0]} cannot compile the kernels ({reason}); set another CXX")


def namespace(isa: InstructionSet) -> str:
    """Return the namespace in torch.ops of the operators of an instruction set."""
    return f"eagle_{isa.name}"


def writable_folder(folder: Path) -> Path:
    """Create and return a folder for compiled code, or a private temporary one if it is not writable.

    Raises OSError, and NoKernels if the temporary one belongs to another user.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    private = Path(tempfile.gettempdir()) / f"eagle-{folder.name.lstrip('.')}-{os.getuid()}"
    private.mkdir(exist_ok=True, mode=0o700)
    if private.lstat().st_uid != os.getuid():  # never load another user's code
        raise NoKernels(f"{private}: belongs to another user; remove it")
    return private


def compiled_folder() -> Path:
    """Return the cache folder of torch.compile. Raises as `writable_folder`."""
    return writable_folder(CACHE_ROOT)


def sources() -> list[Path]:
    """Return the source files of the library."""
    return sorted(path for path in SOURCE.iterdir() if path.suffix in (".h", ".cpp"))
