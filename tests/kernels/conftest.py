"""The kernels for every instruction set that the processor has."""
import pytest

from kernels import cpu, isa


@pytest.fixture(params=isa.available())
def each_isa(request):
    yield cpu.load_kernels(isa=request.param)
    cpu.load_kernels()


@pytest.fixture(scope="module")
def kernels():
    cpu.load_kernels()
