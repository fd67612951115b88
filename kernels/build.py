"""Compiling the CPU kernels (`csrc/`) for this machine, and keeping what was compiled."""
from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common.errors import InputError
from common.files import atomic_path

SOURCE = Path(__file__).resolve().with_name("csrc")
# Beside what torch.compile keeps, if that has a place of its own.
CACHE = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or SOURCE.parent.parent / ".cache") / "kernels"
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++20", "-fopenmp", "-shared", "-fPIC")


def build_library(say: Callable[[str], None], meanwhile: Callable[[], None]) -> Path:
    """The compiled library of this source, torch, compiler and processor, made now if it is not there.

    `say` is told when compiling starts and ends; `meanwhile` is called while the compiler is at work.
    Raises InputError, one line, if there is no C++ compiler or it fails.
    """
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        raise InputError(
            f"no C++ compiler: the kernels need {name}; install it, set CXX, or pass --no-kernels"
        )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    texts = [(path.name, path.read_bytes()) for path in sources()]
    key = (texts, torch.__version__, version, " ".join(FLAGS), processor())
    name = f"cpu-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.so"
    folder = _folder()
    if (folder / name).is_file():
        return folder / name
    say("compiling the kernels ...")
    began = time.perf_counter()
    root = Path(torch.__file__).parent
    command = [
        compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", str(SOURCE / "operators.cpp"),
        f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10",
    ]
    # Another process may be doing the same; and a pipe for the errors would fill up.
    with atomic_path(folder / name) as part, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([*command, "-o", str(part)], stdout=subprocess.DEVNULL, stderr=errors)
        try:
            meanwhile()
            if process.wait():
                errors.seek(0)
                lines = [line for line in errors if "error" in line] or [f"status {process.returncode}"]
                reason = lines[0].strip()
                raise InputError(f"{compiler} could not compile the kernels ({reason}); pass --no-kernels")
        finally:
            process.kill()
            process.wait()
    say(f"compiling the kernels took {time.perf_counter() - began:.1f} s")
    return folder / name


def _folder() -> Path:
    """Where libraries are kept: `CACHE`, or a temporary folder of our own if the checkout is read-only."""
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        if os.access(CACHE, os.W_OK):
            return CACHE
    except OSError:
        pass
    folder = Path(tempfile.gettempdir()) / f"eagle-kernels-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():  # someone else's code is not to be loaded
        raise InputError(f"{folder}: belongs to another user; remove it, or pass --no-kernels")
    return folder


def sources() -> list[Path]:
    """The files that the library is compiled from."""
    return sorted(path for path in SOURCE.iterdir() if path.suffix in (".h", ".cpp"))


def processor() -> str:
    """What -march=native depends on."""
    try:
        with open("/proc/cpuinfo") as lines:
            flags = (line for line in lines if line.startswith(("flags", "Features")))
            return next(flags, platform.machine())
    except OSError:
        return platform.machine() + platform.processor()
