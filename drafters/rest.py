"""Retrieval (REST: He et al., arXiv 2311.08252): what followed the same words in a collection of texts.

    python -m drafters.rest build --checkpoint checkpoints/mine --out runs/store texts.jsonl more.txt
    python generate.py --checkpoint checkpoints/mine --speculate rest --datastore runs/store --prompt "..."

A store is the texts' tokens and their suffix array, mapped into memory: STORE/tokens.bin and
STORE/suffixes.bin (int32, or int64 from 2^31 tokens on), STORE/store.json. Any vocabulary fits (the published
format holds ids in 16 bits).

The search finds the longest run of last tokens that occurs in the store, all lengths at once, by probing 15
places a round instead of one. The suffixes of its places stand side by side, in order, so that equal
continuations are neighbours: the length of a run of neighbours is the count of a beginning, and the most
frequent beginnings are the tree. All of it in static shapes.

At most `hits` places are counted, evenly spread (published: the first 5,000). Without a match nothing is
drafted (published: one token, id 100, whatever it stands for). On a CPU the store stays mapped; a GPU copies
it into its memory.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import math
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
from common.cli import Options, check_replaceable, command
from common.errors import InputError, counted
from common.files import check_file, read_json, read_text, staging
from common.schema import Schema, Sha256, whole
from drafters.base import Drafter, Setup, constants
from tokens.dataset import read_rows, row_texts
from tokens.tokenizer import Tokenizer
from tree import AnyTree, Tree, link

ABOUT = "store.json"
STORE = Schema(TypedDict("Store", {  # of ABOUT
    "vocab_size": whole(1), "tokenizer": Sha256, "tokens": whole(1, 2**48),
    "suffixes": Literal["int32", "int64"],
}))
ARRAYS = "tokens.bin", "suffixes.bin"
AGAIN = "build the store again"
PIVOTS = 15  # places probed in a round: the range shrinks to a sixteenth


class Rest(Drafter):
    """tokens [M] int32 and suffixes [M] of a store; ids of `vocab_size` and above separate texts.

    nodes: of the tree, root included. longest, shortest: tokens of context that are looked for. depth: tokens
    of a continuation. hits: most places whose continuations are counted, evenly spread.
    """

    may_pass = True

    def __init__(
        self, tokens: Tensor, suffixes: Tensor, vocab_size: int, nodes: int = 64, longest: int = 16,
        shortest: int = 2, depth: int = 10, hits: int = 1024,
    ):
        super().__init__(AnyTree(nodes, depth))
        self.vocab_size, self.depth, self.hits = vocab_size, depth, hits
        self.longest, self.shortest = longest, shortest
        sample = tokens[:: max(1, len(tokens) // 4096)].numpy().tobytes()
        self.made_of = f"{len(tokens)} {hashlib.sha256(sample).hexdigest()[:16]}"
        self.rounds = max(1, math.ceil(math.log(len(tokens) + 1, PIVOTS + 1))) + 1
        self.device = tokens.device  # where it will be used
        constants(self, tokens=tokens, suffixes=suffixes)

    def memory(self, batch: int, slots: int, dtype: torch.dtype) -> int:
        if self.device.type == "cpu":  # the store stays mapped
            return 0
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.suffixes))

    def follow(self, at: Tensor, count: int) -> Tensor:
        """The `count` tokens from places at [...] -> [..., count]; -1 outside the store."""
        place = at[..., None] + torch.arange(count, device=at.device)
        last = self.tokens.shape[0] - 1
        tokens = self.tokens[place.clamp(0, last)].long()
        return torch.where((place >= 0) & (place <= last), tokens, -1)

    def search(self, state) -> tuple[Tensor, Tensor]:
        """Return the begin and end of the last `longest`, ..., `shortest` tokens in the suffix array.

        Both are [B, S], S lengths.
        """
        length, device, last = state.length, state.length.device, self.tokens.shape[0] - 1
        sizes = torch.arange(self.longest, self.shortest - 1, -1, device=device)  # [S]
        place = torch.arange(self.longest, device=device)
        context = state.tokens.gather(1, (length[:, None] - self.longest + 1 + place).clamp(min=0))
        # [B, S, 1, 1, longest]: each context's last tokens, moved to the left.
        context = context[:, (place - sizes[:, None]) % self.longest][:, :, None, None]
        counts = (place < sizes[:, None])[:, None, None]
        # Two bounds [B, S, 2] are searched for: the first suffix not below the context, the first above it.
        low = torch.zeros(length.shape[0], len(sizes), 2, dtype=torch.int64, device=device)
        high = torch.full_like(low, last + 1)
        equal_is_below = torch.arange(2, device=device)[:, None] > 0
        steps = torch.arange(1, PIVOTS + 1, device=device)
        for _ in range(self.rounds):
            pivots = low[..., None] + (high - low)[..., None] * steps // (PIVOTS + 1)  # [B, S, 2, P]
            probed = self.follow(self.suffixes[pivots.clamp(max=last)].long(), self.longest)
            differs = (probed != context) & counts
            first = differs.long().argmax(-1, keepdim=True)
            less = (probed.gather(-1, first) < context.expand_as(probed).gather(-1, first))[..., 0]
            moving = low < high
            below = torch.where(~differs.any(-1), equal_is_below, less) & moving[..., None]
            n = below.sum(-1, keepdim=True)
            raised = pivots.gather(-1, (n - 1).clamp(min=0))[..., 0] + 1
            lowered = pivots.gather(-1, n.clamp(max=PIVOTS - 1))[..., 0]
            n = n[..., 0]
            low = torch.where(moving & (n > 0), raised, low)
            high = torch.where(moving & (n < PIVOTS), lowered, high)
        fits = sizes <= length[:, None] + 1
        return torch.where(fits, low[..., 0], 0), torch.where(fits, low[..., 1], 0)

    def has_guess(self, state, slots: Tensor) -> bool:
        begin, end = self.search(state)
        return bool(((end > begin) & ~state.done[:, None]).any())

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        root, T, D = state.root, self.shape.nodes, self.depth
        begin, end = self.search(state)
        best = (end > begin).long().argmax(-1, keepdim=True)  # the longest is the first
        begin, total = begin.gather(1, best), (end - begin).gather(1, best)
        live = total.clamp(max=self.hits)  # [B, 1]
        row = torch.arange(self.hits, device=root.device)
        chosen = begin + row * total // live.clamp(min=1)
        places = self.suffixes[chosen.clamp(max=self.tokens.shape[0] - 1)].long() + self.longest - best
        after = self.follow(places, D)  # [B, R, D]
        real = ((after >= 0) & (after < self.vocab_size)).cumprod(-1).bool() & (row < live)[..., None]

        # Row r begins a new run of first l tokens where it differs from its neighbour above within them.
        alike = (after[:, 1:] == after[:, :-1]).cumprod(-1).bool() & real[:, 1:] & real[:, :-1]
        starts = torch.cat((torch.ones_like(alike[:, :1]), ~alike), 1)  # [B, R, D]
        bounds = torch.where(starts, row[:, None], self.hits)
        ahead = bounds.flip(1).cummin(1).values.flip(1)
        behind = torch.cat((ahead[:, 1:], torch.full_like(ahead[:, :1], self.hits)), 1)
        count = torch.minimum(behind, live[..., None]) - row[:, None]
        # A beginning is at least as frequent as what goes on from it; of equals it comes first.
        score = torch.where(starts & real, count * (D + 1) + torch.arange(D, 0, -1, device=root.device), -1)
        top, key = score.flatten(1).topk(T - 1)  # [B, T-1], key = row * D + l - 1
        real_node = top > 0
        group = torch.where(starts, row[:, None], 0).cummax(1).values  # the row that begins each row's run
        level = key % D
        shorter = (key - 1).clamp(min=0)  # the same row, one token less
        above = torch.where(level > 0, group.flatten(1).gather(1, shorter) * D + level - 1, -1)
        is_parent = (key[:, None] == above[..., None]) & real_node[:, None]
        parent = torch.where(real_node & (level > 0), is_parent.long().argmax(-1) + 1, 0)
        # A node that is not real repeats the root: a guess as bad as any.
        token = torch.where(real_node, after.flatten(1).gather(1, key), root)
        share = torch.where(real_node, (top // (D + 1)).float() / live, 0.0).log()
        zero = torch.zeros_like(root)
        tokens, parents = torch.cat((root, token), 1), torch.cat((zero, parent), 1)
        return Tree(tokens, parents, *link(parents, D), torch.cat((zero.float(), share), 1))


def build(setup: Setup) -> Rest:
    """Open the store that --datastore names.

    Raises InputError if there is none, or it is of another vocabulary.
    """
    flags, vocab_size = setup.drafting.flags, setup.target.args.vocab_size
    arrays = open_store(Path(flags["datastore"]), vocab_size, setup.tokenizer)
    drafter = Rest(*arrays, vocab_size, nodes=flags["draft-tokens"])
    drafter.device = setup.target.embed.weight.device
    return drafter


# -- stores ---------------------------------------------------------------------------------------


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
        text = read_text(path)
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
    place = out.resolve()  # "new/.." names something else once "new" is there
    store = (place / ABOUT).is_file()
    if place.exists() and not (store and force):
        advice = "replace it with --force or choose" if store else "choose"
        raise InputError(f"{out}: exists{'' if store else ' and is no store'}; {advice} another --out")
    for file in files:
        check_file(file)
    vocab_size, tokenizer = read_config(checkpoint, "target")["vocab_size"], Tokenizer.load(checkpoint)
    if tokenizer is None:
        raise InputError(f"{checkpoint}: has no tokenizer")
    with staging(out) as folder:  # fails before everything is sorted where it cannot write
        return _fill(folder, files, tokenizer, vocab_size, divsufsort)


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
    add = p.add_argument
    add("what", choices=("build",), help="make a store of texts")
    p.add_checkpoint("converted target whose tokenizer is used")
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
