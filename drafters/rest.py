"""The stores of --speculate rest (`drafters.retrieval`): texts' tokens and their suffix array.

    python -m drafters.rest build --checkpoint checkpoints/mine --out runs/store texts.jsonl more.txt
"""
from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from typing_extensions import TypedDict

from checkpoint.folder import read_config
from checkpoint.writer import staging
from common.cli import Options, check_replaceable, command
from common.errors import InputError, counted
from common.files import MOST_OF_DATA, check_file, read_json, read_text
from common.schema import Schema, Sha256, whole
from tokens.dataset import read_rows, row_texts
from tokens.tokenizer import Tokenizer

ABOUT = "store.json"
STORE = Schema(TypedDict("Store", {  # of ABOUT
    "vocab_size": whole(1), "tokenizer": Sha256, "tokens": whole(1, 2**48),
    "suffixes": Literal["int32", "int64"],
}))
ARRAYS = "tokens.bin", "suffixes.bin"
AGAIN = "build the store again"


def open_store(folder: Path, vocab_size: int, tokenizer: Tokenizer | None) -> list[Tensor]:
    """Map a store into memory: its tokens [M] and suffixes [M].

    vocab_size, tokenizer: the target's. Raises InputError if there is no store, if its files are not of the
    size that store.json gives, or if it is of another vocabulary.
    """
    file = folder / ABOUT
    if not file.exists():
        raise InputError(f"--datastore {folder}: no store, it holds no {ABOUT}; see python -m drafters.rest"
                         " build --help")
    about = STORE.require(read_json(file), file, AGAIN)
    if vocab_size != (own := about["vocab_size"]):
        raise InputError(f"{folder}: made for a vocabulary of {own}, the target has {vocab_size}")
    if tokenizer and about["tokenizer"] != fingerprint(tokenizer):
        raise InputError(f"{folder}: made with another tokenizer than this target's; {AGAIN}")
    arrays, count = [], about["tokens"]
    for name, dtype in zip(ARRAYS, (torch.int32, getattr(torch, about["suffixes"]))):
        path, size = folder / name, count * dtype.itemsize
        if (found := check_file(path)) != size:
            raise InputError(f"{path}: is {found:,} bytes; expected {size:,}, as {ABOUT} says; {AGAIN}")
        arrays.append(torch.from_file(str(path), shared=False, size=count, dtype=dtype))
    return arrays


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a digest of the bytes that the ids of a tokenizer stand for."""
    digest = hashlib.sha256()
    for i in range(tokenizer.vocab_size):
        digest.update(tokenizer.piece(i) + b"\0")
    return digest.hexdigest()


def read_ids(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the token ids of every text of a file.

    The file holds JSON lines (conversations, prompts, "text", or token "ids") or one text.
    """
    if path.suffix.lower() not in (".jsonl", ".json"):
        text = read_text(path, MOST_OF_DATA)
        if text.strip():
            yield tokenizer.encode(text)
        return
    for where, row in read_rows(path):
        if isinstance(row.get("ids"), list):
            if not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in row["ids"]):
                raise InputError(f"{where}: ids outside the vocabulary 0..{tokenizer.vocab_size - 1}")
            yield row["ids"]
        elif row.keys() != {"left_out"}:  # training shards count what has no text
            yield from (tokenizer.encode(text) for text in row_texts(where, row) if text.strip())


def make_store(checkpoint: Path, files: list[Path], out: Path, force: bool = False) -> dict:
    """Write a store of these files. Returns what store.json holds.

    Raises InputError or OSError, and leaves what was there, if it cannot.
    """
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        raise InputError("building a store needs the suffix arrays of pydivsufsort: pip install"
                         " pydivsufsort") from None
    check_replaceable("--out", str(out))
    _check_free(out, force)
    for file in files:
        check_file(file)
    vocab_size, tokenizer = read_config(checkpoint, "target")["vocab_size"], Tokenizer.load(checkpoint)
    if tokenizer is None:
        raise InputError(f"{checkpoint}: has no tokenizer")
    with staging(out, 0) as folder:  # fails before everything is sorted where it cannot write
        about = _fill(folder, files, tokenizer, vocab_size, divsufsort)
        _check_free(out, force)  # another process may have made it in the meantime
    return about


def _check_free(out: Path, force: bool) -> None:
    """Raise InputError unless `out` is free or, with `force`, a store."""
    place = out.resolve()  # "new/.." names something else once "new" is there
    store = (place / ABOUT).is_file()
    if place.exists() and not (store and force):
        advice = "replace it with --force or choose" if store else "choose"
        raise InputError(f"{out}: exists{'' if store else ' and is no store'}; {advice} another --out")


def _fill(
    folder: Path, files: list[Path], tokenizer: Tokenizer, vocab_size: int, divsufsort: Callable
) -> dict:
    parts, count = [], 0
    with tqdm(unit="token", unit_scale=True, desc="reading") as bar:
        for path in files:
            for ids in filter(None, read_ids(path, tokenizer)):
                parts.append(np.array([*ids, vocab_size], dtype=np.int32))  # the last id separates texts
                count += len(ids)
                bar.update(len(ids))
    if not count:
        raise InputError(f"{', '.join(map(str, files))}: no text in there; a store needs some")
    tokens = np.concatenate(parts)
    print(f"sorting {len(tokens):,} suffixes ...", file=sys.stderr, flush=True)
    suffixes = divsufsort(tokens, force64=len(tokens) >= 2**29)  # the library sorts four bytes a token
    suffixes = suffixes.astype(np.int64 if len(tokens) >= 2**31 else np.int32)
    about = {
        "vocab_size": vocab_size, "tokenizer": fingerprint(tokenizer), "tokens": len(tokens),
        "suffixes": str(suffixes.dtype)
    }
    for name, array in zip(ARRAYS, (tokens, suffixes)):
        (folder / name).write_bytes(array)  # not `tofile`, which does not report that the disk is full
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    return about


def parser() -> Options:
    """Declare the options."""
    p = Options(__doc__, prog="python -m drafters.rest")
    commands = p.add_subparsers(dest="what", required=True)
    build = commands.add_parser("build", help="make a store of texts")
    add = build.add_argument
    build.add_checkpoint("converted target whose tokenizer is used")
    add("--out", required=True, help="folder of the store")
    add("--force", action="store_true", help="replace a store")
    add("files", nargs="+",
        help='text, or JSON lines: conversations, prompts, "text", or "ids" (training shards)')
    return p


def run(o: argparse.Namespace) -> None:
    """Do what the options say. Raises InputError and OSError on bad input."""
    about = make_store(Path(o.checkpoint), [Path(f) for f in o.files], Path(o.out), o.force)
    print(f"wrote {o.out}: {counted(about['tokens'], 'token')}")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
