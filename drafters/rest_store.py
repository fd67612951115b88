"""The data store of REST: texts' tokens and their suffix array, and how one is built."""
from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm
from typing_extensions import TypedDict

from common.errors import InputError
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


def find_store(flags: dict, vocab_size: int | None) -> tuple[Path, dict]:
    """The store that --datastore names -> (its folder, what its store.json says).

    flags: of the method. vocab_size: the target's, None if that is not known. Raises InputError if there is
    no store, if its files are not of the size that store.json says, or if it is of another vocabulary.
    """
    if not flags["datastore"]:
        raise InputError(
            "--speculate rest: name a store with --datastore; python -m drafters.rest build makes one"
        )
    folder = Path(flags["datastore"])
    file = folder / ABOUT
    if not file.exists():
        raise InputError(
            f"--datastore {folder}: no store, it holds no {ABOUT}; python -m drafters.rest build makes one"
        )
    about = STORE.require(read_json(file), file, AGAIN)
    if vocab_size not in (None, own := about["vocab_size"]):
        raise InputError(f"{folder}: made for a vocabulary of {own}, the target has {vocab_size}")
    for name, dtype in zip(ARRAYS, ("int32", about["suffixes"])):
        path, size = folder / name, about["tokens"] * np.dtype(dtype).itemsize
        if (found := check_file(path)) != size:
            raise InputError(f"{path}: is {found:,} bytes; expected {size:,}, as {ABOUT} says; {AGAIN}")
    return folder, about


def fingerprint(tokenizer: Tokenizer) -> str:
    """Tells tokenizers apart by the bytes their ids stand for."""
    digest = hashlib.sha256()
    for i in range(tokenizer.vocab_size):
        digest.update(tokenizer.piece(i) + b"\0")
    return digest.hexdigest()


def texts(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The token ids of every text of a file.

    The file holds JSON lines (conversations, prompts, "text", or "ids" as they are) or one text.
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


def make(checkpoint: Path, files: list[Path], out: Path, force: bool = False) -> dict:
    """Write a store of these files. Returns what store.json says.

    Raises InputError, and leaves what was there, if it cannot.
    """
    try:
        from pydivsufsort import divsufsort
    except ImportError:
        raise InputError(
            "building a store needs the suffix arrays of pydivsufsort: pip install pydivsufsort"
        ) from None
    from checkpoint.folder import read_config  # imports torch: mistakes answer sooner
    from checkpoint.writer import staging

    vocab_size, tokenizer = read_config(checkpoint, "target")["vocab_size"], Tokenizer.load(checkpoint)
    if tokenizer is None:
        raise InputError(f"{checkpoint}: has no tokenizer")
    check_out(out, force)
    with staging(out, 0) as folder:  # better now than when everything is sorted
        about = _fill(folder, files, tokenizer, vocab_size, divsufsort)
        check_out(out, force)  # somebody else may have made it in the meantime
    return about


def check_out(out: Path, force: bool) -> None:
    """Raise InputError unless `out` is free or, with `force`, a store."""
    place = out.resolve()  # "new/.." names something else once "new" is there
    if place.exists():
        store = (place / ABOUT).is_file()
        if not (store and force):
            advice = "replace it with --force or choose" if store else "choose"
            raise InputError(f"{out}: exists{'' if store else ' and is no store'}; {advice} another --out")


def _fill(
    folder: Path, files: list[Path], tokenizer: Tokenizer, vocab_size: int, divsufsort: Callable
) -> dict:
    parts, count = [], 0
    with tqdm(unit="token", unit_scale=True, desc="reading") as bar:
        for path in files:
            for ids in texts(path, tokenizer):
                if ids:
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
        (folder / name).write_bytes(array)  # not `tofile`, which does not say that the disk is full
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    return about
