"""Pack a folder into small parts, and join them elsewhere: a checkpoint for a machine that takes small files.

    python benchmarks/parts.py split checkpoints/smollm2-135m runs/carry   # part-00, part-01, ... and sums
    python benchmarks/parts.py join runs/carry checkpoints                 # checkpoints/smollm2-135m

Measured costs, which are of use on this machine only, stay behind. `sums` has the form of
sha256sum's; parts that do not fit it are refused.
"""
from __future__ import annotations

import hashlib
import lzma
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from bench import ROOT  # noqa: F401  first: it makes the modules below importable

from common.cli import Options, positive, run_command
from common.errors import InputError

LEFT = "costs.json",  # behind
SUMS = "sums"


def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A filter of `tarfile`: None for what is left behind."""
    return None if Path(entry.name).name in LEFT else entry


def split(folder: Path, out: Path, size: int) -> list[Path]:
    """Pack `folder` into files of at most `size` bytes in `out`, which is made anew. Returns the parts.

    Raises InputError if there is no folder, or `out` holds something else.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: is no folder")
    if out.exists() and not (out / SUMS).exists():
        raise InputError(f"{out}: is there, and holds no parts; choose another folder")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    parts, sums = [], []
    with tempfile.TemporaryFile(dir=out) as packed:
        with lzma.open(packed, "wb", preset=2) as stream:
            with tarfile.open(fileobj=stream, mode="w|", dereference=True) as archive:
                archive.add(folder, folder.resolve().name, filter=kept)
        packed.seek(0)
        while data := packed.read(size):
            part = out / f"part-{len(parts):02d}"
            part.write_bytes(data)
            parts.append(part)
            sums.append(f"{hashlib.sha256(data).hexdigest()}  {part.name}\n")
    (out / SUMS).write_text("".join(sums))
    return parts


def join(parts: Path, out: Path) -> Path:
    """Unpack the parts in the folder `parts` into `out`; returns the folder that was packed.

    Raises InputError if a part is missing or damaged, or the folder is there already.
    """
    if not (parts / SUMS).is_file():
        raise InputError(f"{parts / SUMS}: is not there; the parts come with it")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder, tempfile.TemporaryFile(dir=out) as packed:
        for line in (parts / SUMS).read_text().splitlines():
            digest, name = line.split()
            data = (parts / name).read_bytes() if (parts / name).is_file() else b""
            if hashlib.sha256(data).hexdigest() != digest:
                raise InputError(f"{parts / name}: is missing or damaged")
            packed.write(data)
        packed.seek(0)
        with lzma.open(packed) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        if (out / unpacked.name).exists():
            raise InputError(f"{out / unpacked.name}: is there already")
        return unpacked.rename(out / unpacked.name)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = Options(__doc__)
    p.add_argument("action", choices=("split", "join"))
    p.add_argument("source", type=Path, help="the folder, or that of its parts")
    p.add_argument("out", type=Path, help="where the parts, or the folder, go")
    p.add_argument("--size", type=positive, default=38, metavar="MB", help="of a part, at most (default 38)")
    o = p.parse_args(argv)

    def act() -> None:
        if o.action == "join":
            print(join(o.source, o.out))
        for part in split(o.source, o.out, o.size * 10**6) if o.action == "split" else ():
            print(part)

    return run_command(act, OSError)


if __name__ == "__main__":
    sys.exit(main())
