"""The CPU kernels for every instruction set of this processor."""
import fcntl

import pytest
from helpers.kernels import EACH

from kernels import cpu


@pytest.fixture(scope="session", autouse=True)
def one_build_at_a_time(tmp_path_factory):
    """Let only one test worker compile at a time, so that the others find its library cached."""
    lock, build = tmp_path_factory.getbasetemp().parent / "kernels.lock", cpu.build_library

    def locked(*arguments):
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return build(*arguments)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(cpu, "build_library", locked)
        yield


@pytest.fixture(params=EACH)
def each_isa(request) -> cpu.CpuBackend:
    """The CPU backend of each instruction set."""
    return cpu.CpuBackend.load(request.param)
