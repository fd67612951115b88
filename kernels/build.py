"""Compiling the CPU kernels (`csrc/`) for this machine, and keeping what was compiled."""
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
from common.writing import atomic_path
from kernels.isa import InstructionSet, maker

SOURCE = Path(__file__).resolve().with_name("csrc")
ROOT = SOURCE.parent.parent
# Compiled code lies in this checkout or where the user wants it, never in a checkpoint: it is executed.
COMPILED = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or ROOT / ".cache")
CACHE = COMPILED / "kernels"
FLAGS = ("-O3", "-ffp-contract=off", "-std=c++20", "-pthread", "-fPIC", "-fvisibility=hidden", "-pipe")


class NoKernels(InputError):
    """The kernels cannot be had on this machine, for a reason that is not in the request."""


def build_library(isa: InstructionSet, log: Callable[[str], None]) -> Path:
    """Return the library of this source for an instruction set, torch and compiler; compile it if needed.

    Its operators are in the namespace `namespace(isa)`. Its name ends with a digest of it: a damaged library
    would end the process. Without a compiler, use one that exists.

    `log` is called when compiling starts and ends.
    Raises NoKernels, one line, if there is no C++ compiler or it fails; OSError if there is no place.
    """
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    command = [shutil.which(words[0]), *words[1:]]
    texts = [(path.name, path.read_bytes()) for path in sources()]
    flags = (*FLAGS, *isa.flags, f"-DMAKER_{maker()}", f"-DNAMESPACE={namespace(isa)}")
    stem = f"{isa.name}-{_digest(repr((texts, torch.__version__, flags, platform.machine())).encode())}"
    # Without a compiler, what any other has made will do.
    by = _digest(repr(command[1:]).encode() + _version(command)) if command[0] else "*"
    name = f"{stem}-{by}-*.so"
    library = _find(CACHE, name, log) or _find(folder := writable(CACHE), name, log)
    if library:
        return library
    if not command[0]:
        raise NoKernels(f"no C++ compiler: the kernels need {words[0]}; install it or set CXX")
    log(f"compiling the kernels for {isa.name} ...")
    began = time.perf_counter()
    root = Path(torch.__file__).parent
    link = (f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10")
    with tempfile.TemporaryDirectory() as made:
        compiled = {path: f"{made}/{path.stem}.o" for path in sources() if path.suffix == ".cpp"}
        _run([[*command, *flags, f"-I{root}/include", "-c", str(p), "-o", o] for p, o in compiled.items()])
        _run([[*command, "-shared", "-pthread", *compiled.values(), *link, "-o", f"{made}/kernels.so"]])
        if not (linked := Path(made, "kernels.so")).exists():
            raise NoKernels(f"{command[0]} made no library; set CXX to another one")
        library = folder / f"{stem}-{by}-{_digest(linked.read_bytes())}.so"
        with atomic_path(library) as part:  # another process may be doing the same
            shutil.copyfile(linked, part)
    log(f"compiling the kernels took {time.perf_counter() - began:.1f} s")
    return library


def _version(command: list[str]) -> bytes:
    """Return a compiler's version text."""
    return subprocess.run([*command, "--version"], capture_output=True).stdout


def _find(folder: Path, pattern: str, log: Callable[[str], None]) -> Path | None:
    """Return a library of this name whose content fits the digest in it. Remove others."""
    for library in sorted(folder.glob(pattern)):
        with contextlib.suppress(OSError):
            if library.stem.rpartition("-")[2] == _digest(library.read_bytes()):
                return library
            log(f"{library}: damaged, not used")
            library.unlink()
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _run(commands: list[list[str]]) -> None:
    """Run a compiler's commands side by side. Raises NoKernels if one fails."""
    with contextlib.ExitStack() as stack:
        started = []
        for command in commands:
            errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # a pipe would fill up
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append((process, errors))
        for process, errors in started:
            if process.wait():
                errors.seek(0)
                why = next((line.strip() for line in errors if "rror" in line), "it does not say why")
                raise NoKernels(f"{commands[0][0]} cannot compile the kernels ({why}); set another CXX")


def namespace(isa: InstructionSet) -> str:
    """Return the name under torch.ops of the operators of an instruction set."""
    return f"eagle_{isa.name}"


def writable(kept: Path) -> Path:
    """Return a folder for compiled code, or a temporary one of our own where that cannot be written.

    Raises OSError, and NoKernels if the temporary one belongs to another user.
    """
    try:
        kept.mkdir(parents=True, exist_ok=True)
        if os.access(kept, os.W_OK):
            return kept
    except OSError:
        pass
    folder = Path(tempfile.gettempdir()) / f"eagle-{kept.name.lstrip('.')}-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    if folder.lstat().st_uid != os.getuid():  # someone else's code, or a link to it, is not to be loaded
        raise NoKernels(f"{folder}: belongs to another user; remove it")
    return folder


def compiled_folder() -> Path:
    """Return the folder of torch.compile's results.

    Raises OSError as `writable`.
    """
    return writable(COMPILED)


def sources() -> list[Path]:
    """Return the files that the library is compiled from."""
    return sorted(path for path in SOURCE.iterdir() if path.suffix in (".h", ".cpp"))
