"""Tests that may be skipped on this machine. In CI any other skip is a failure.

This is a pytest plugin; `tests/conftest.py` loads it.
"""
import os
import platform
import re
import shutil
import sys

import pytest


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def no_avx512bf16() -> bool:
    from kernels import isa

    return "avx512bf16" not in isa.available()


X86 = platform.machine() == "x86_64"
# A pattern of the reason, and whether (or when) this machine has it.
EXPECTED = (
    (r"no GPU", no_gpu),
    (r"this GPU does not multiply fp8", lambda: not no_gpu()),
    (r"there is a GPU: the tests run there", lambda: not no_gpu()),
    (r"Triton is not installed", lambda: not (X86 and sys.platform == "linux")),
    (r"could not import 'transformers'", lambda: sys.version_info < (3, 11)),
    (r"names an x86 processor", lambda: not X86),
    (r"no /proc here|needs Linux' high-water mark", lambda: not os.access("/proc/self/clear_refs", os.W_OK)),
    (r"no /dev/full here", lambda: sys.platform != "linux"),
    (r"aarch64 needs ", lambda: not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64"))),
    (r"could not import 'playwright|Chromium is not installed", lambda: True),  # not for CI
    (r"clang\+\+ is not installed", lambda: not shutil.which("clang++")),
    (r"tiles in software need AVX512-BF16", no_avx512bf16),
    (r"a registry cannot be reached|npm is not installed", lambda: True),
)


def expected(reason: str) -> bool:
    """Whether a test may be skipped for this reason in CI, on this machine."""
    return any(re.match(pattern, reason) and here() for pattern, here in EXPECTED)


def refuse_unexpected(report) -> None:
    """Make a report of a skipped test or module a failure, if we are in CI and its reason is not expected."""
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    if not in_ci or not report.skipped or hasattr(report, "wasxfail"):
        return
    file, line, reason = report.longrepr
    if not expected(reason.removeprefix("Skipped: ")):
        report.outcome = "failed"
        report.longrepr = f"{file}:{line}: a skip that tests/helpers/skips.py does not expect here: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    refuse_unexpected(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector):
    report = yield
    refuse_unexpected(report)
    return report
