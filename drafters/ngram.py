"""N-gram matching: what followed the last tokens before is drafted again. No network is needed.

    python generate.py --checkpoint checkpoints/mine --speculate lookup --prompt "..."
    python -m drafters.ngram --checkpoint checkpoints/mine --out tokens.bin texts.jsonl more.txt
    python generate.py --checkpoint checkpoints/mine --speculate rest --datastore tokens.bin --prompt "..."

Methods differ in what they search, last source first:

lookup  the request's own tokens: prompt lookup (github.com/apoorvumang/prompt-lookup-decoding)
suffix  also the last HISTORY_TOKENS of finished requests (suffix decoding, arXiv 2411.04975)
rest    also a token file, int32 ids with SEPARATOR between texts (REST, arXiv 2311.08252)

Every match competes, longer ones first and of those the latest. The best few with different continuations
are the tree. Of a token file, HITS occurrences of its longest indexed n-gram are searched. All of it runs on
the device in static shapes. On a CPU a step without a likely match is a plain step. On a GPU verifying the
tree is nearly free, and asking for a match would cost a synchronization.
"""
from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoint.load import read_config
from common.cli import Options, command
from common.errors import InputError, counted
from common.files import check_file, read_text
from common.writing import atomic_path
from drafters.static import StaticDrafter, chains, constants
from engine.drafting import Setup
from engine.state import State
from engine.step import Step
from tokens.dataset import read_rows, row_texts
from tokens.tokenizer import Tokenizer
from tree import Tree

CHAINS = (7, 3, 1)  # lengths of the continuations, best match first: 12 nodes with the root
MAX_MATCH = 4  # tokens of context that are compared, the root included
# Probability that the first token after a match is accepted, and each later one if those before it are, by
# tokens of the match. Measured in greedy answers of about 1,200 conversations with SmolLM2-135M (script in
# git history); not measured below 2 tokens, which is not the default.
FIRST = (0.05, 0.15, 0.34, 0.43, 0.74)
FURTHER = (0.50, 0.60, 0.70, 0.74, 0.90)
SAMPLED = 1.8  # factor of their logarithms at temperature 1
HISTORY_TOKENS = 32_768
SEPARATOR = -1
INDEXED = (8, 4, 2)  # tokens of the n-grams of a token file that are indexed
HITS = 64


def hashes(tokens: Tensor, count: int) -> Tensor:
    """Hash every n-gram of `count` tokens: [..., S] -> [..., S - count + 1] int32, at least 0."""
    grams, found = tokens.unfold(-1, count, 1), 0
    for i in range(count):
        found = (found * 0x21F0AAAD + grams[..., i].long()) & 0x7FFFFFFF
    return found.int()


class TokenFile(nn.Module):
    """An index of the n-grams of a token file [M] by their hashes, for matches from `INDEXED` tokens on."""

    def __init__(self, tokens: Tensor):
        super().__init__()
        sample = tokens[:: max(1, len(tokens) // 4096)].cpu().numpy().tobytes()
        self.identity = f"{len(tokens)} {hashlib.sha256(sample).hexdigest()[:16]}"
        constants(self, tokens=tokens)
        for n in INDEXED:
            keys, starts = hashes(tokens, n).sort(stable=True)
            constants(self, **{f"keys{n}": keys, f"starts{n}": starts.int()})

    def windows(self, texts: Tensor, length: Tensor, ahead: int) -> Tensor:
        """Return occurrences of the n-grams that end texts [B, S] at `length` [B], each with the `ahead`
        tokens after it, one after the other [B, HITS * (INDEXED[0] + ahead + 1)].

        There are at most HITS: those of the longest n-gram, evenly spread, then those of shorter ones. The
        occurrences whose continuations agree with most others are last.
        """
        hit, size = torch.arange(HITS, device=texts.device), INDEXED[0]
        back = torch.arange(1 - size, 1, device=texts.device)
        context = texts.gather(1, (length[:, None] + back).clamp(min=0))
        ends = hit.new_full((len(texts), HITS), -1)  # place of the occurrence's last token; -1: none
        for n in INDEXED:
            keys, starts = getattr(self, f"keys{n}"), getattr(self, f"starts{n}")
            key = hashes(context[:, -n:], n)
            first, after = torch.searchsorted(keys, key), torch.searchsorted(keys, key, right=True)
            count = torch.where(n <= length[:, None] + 1, after - first, 0)
            at = first + hit * count // count.clamp(1, HITS)
            found = starts[at.clamp(max=len(starts) - 1)].long() + n - 1
            ends = torch.where((ends < 0) & (hit < count), found, ends)
        places = ends[..., None] + torch.arange(1 - size, ahead + 1, device=texts.device)
        inside = (places >= 0) & (places < len(self.tokens)) & (ends >= 0)[..., None]
        tokens = self.tokens[places.clamp(0, len(self.tokens) - 1)].long()
        tokens = torch.where(inside, tokens, SEPARATOR)  # [B, HITS, size + ahead]
        follows = tokens[..., size:]
        alike = (follows[:, None] == follows[:, :, None]).cumprod(-1).sum((-1, -2))
        order = torch.where(ends < 0, -1, alike).argsort(stable=True)
        ordered = tokens.gather(1, order[..., None].expand_as(tokens))
        return F.pad(ordered, (0, 1), value=SEPARATOR).flatten(1)


class NGram(StaticDrafter):
    """Drafts continuations of the last n-gram, of `shortest` to `longest` tokens.

    lengths: tokens of each chain of the tree. history: tokens of finished requests that are kept.
    """

    sampled = SAMPLED

    def __init__(
        self, lengths: tuple[int, ...] = CHAINS, shortest: int = 2, longest: int = MAX_MATCH, *,
        history: int = 0, file: TokenFile | None = None,
    ):
        shape = chains(tuple(lengths))
        super().__init__(shape)
        self.lengths, self.shortest, self.longest = tuple(lengths), shortest, longest
        self.file, self.fingerprint = file, file.identity if file else ""
        constants(self, history=torch.full((1, history), SEPARATOR))
        # The chain of each drafted node, and its distance from the match.
        constants(self, chain=[p[0] for p in shape.paths], ahead=[len(p) for p in shape.paths])
        for name, table in (("first", FIRST), ("further", FURTHER)):
            probabilities = [table[min(n, len(table) - 1)] for n in range(longest + 1)]
            constants(self, **{name: torch.tensor(probabilities).log()})

    def memory(self, batch: int, slots: int, dtype: torch.dtype) -> int:
        return self.history.nbytes

    def finish(self, tokens: list[int]) -> None:
        size = self.history.shape[1]
        if size:
            new = torch.tensor([[*tokens, SEPARATOR]], device=self.history.device)
            self.history.copy_(torch.cat((self.history, new), 1)[:, -size:])

    def sources(self, state: State, slots: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the tokens to search [B, S], the root's place in them [B], and how many may match."""
        count, found = slots.shape[0], []
        if self.file is not None:
            found.append(self.file.windows(state.tokens, state.length, max(self.lengths)))
        if self.history.shape[1]:
            found.append(self.history.expand(len(state.tokens), -1))
        if not found:
            return state.tokens, state.length, count
        tokens = torch.cat((*found, state.tokens[:, : count + 1]), 1)
        before = tokens.shape[1] - count - 1
        return tokens, state.length + before, count + before

    def propose(
        self, step: Step, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> Tree:
        return self.static.of(*step.dispatch(NGram.follow, self, *self.sources(state, slots)))

    def matches(self, tokens: Tensor, length: Tensor, count: int) -> Tensor:
        """Count the tokens up to each of the first `count` places that equal those up to `length` [B].

        At most `longest`; 0 from `length` on, and where no token of a text follows.
        """
        searched, follows = tokens[:, :count], tokens[:, 1 : count + 1]
        matched = torch.zeros_like(searched)
        equal = (torch.arange(count, device=tokens.device) < length[:, None]) & (follows >= 0)
        for back in range(self.longest):
            wanted = tokens.gather(1, (length[:, None] - back).clamp(min=0))
            before = searched.roll(back, 1)
            before[:, :back] = SEPARATOR
            equal = equal & (before == wanted) & (wanted >= 0)
            matched = matched + equal
        return matched

    def follow(self, tokens: Tensor, length: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the tree's tokens [B, T] and the log-probability of each after its parent [B, T].

        The arguments are what `sources` returns. Nodes without a match repeat the root, with probability 0.
        """
        length = length[:, None]
        root, follows = tokens.gather(1, length), tokens[:, 1 : count + 1]
        matched, places = self.matches(tokens, length[:, 0], count), torch.arange(count, device=tokens.device)
        # The longest, of those the latest.
        score = torch.where(matched >= self.shortest, matched * count + places, -1)
        starts, live = [], []
        for _ in self.lengths:
            best, at = score.max(1, keepdim=True)
            starts.append(at)
            live.append(best >= 0)
            score = torch.where(follows == follows.gather(1, at), -1, score)  # the next differs
        starts, live = torch.cat(starts, 1)[:, self.chain], torch.cat(live, 1)[:, self.chain]  # [B, T-1]
        # A match near the end continues into itself: repetition is taken to go on.
        period = (length - starts).clamp(min=1)
        drafted = tokens.gather(1, starts + 1 + (self.ahead - 1) % period)
        live, matched = live & (drafted >= 0), matched.gather(1, starts)
        likely = torch.where(self.ahead == 1, self.first[matched], self.further[matched])
        likely = torch.where(live, likely, float("-inf"))
        tree = torch.cat((root, torch.where(live, drafted, root)), 1)
        return tree, torch.cat((torch.zeros_like(likely[:, :1]), likely), 1)


def build(setup: Setup) -> NGram:
    """Build the drafter of a method. Raises InputError if --datastore names no token file of this target."""
    if setup.method == "lookup":
        return NGram()
    if setup.method == "suffix":
        return NGram(history=HISTORY_TOKENS)
    target = setup.target
    tokens = open_tokens(Path(setup.drafting.flags["datastore"]), target.args.vocab_size)
    file = TokenFile(tokens.to(target.embed.weight.device))
    return NGram(longest=INDEXED[0], history=HISTORY_TOKENS, file=file)


# -- token files ----------------------------------------------------------------------------------


def open_tokens(path: Path, vocab_size: int) -> Tensor:
    """Map a token file into memory [M]. Raises InputError if it is none, or not of this vocabulary."""
    count, rest = divmod(check_file(path), torch.int32.itemsize)
    if rest or not INDEXED[0] <= count < 2**31:
        raise InputError(f"--datastore {path}: is no file of {INDEXED[0]} to 2^31 token ids, 4 bytes each;"
                         " make one with python -m drafters.ngram")
    tokens = torch.from_file(str(path), shared=False, size=count, dtype=torch.int32)
    low, high = map(int, tokens.aminmax())
    if low < SEPARATOR or high >= vocab_size:
        raise InputError(f"--datastore {path}: holds the id {high if high >= vocab_size else low}, the target"
                         f" knows 0 to {vocab_size - 1}; make the file with this target's tokenizer")
    return tokens


def read_ids(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the token ids of every text of a file.

    The file holds one text, or JSON lines: conversations, prompts, "text", or token "ids".
    """
    if path.suffix.lower() not in (".jsonl", ".json"):
        yield tokenizer.encode(read_text(path))
        return
    for where, row in read_rows(path):
        if isinstance(row.get("ids"), list):
            if not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in row["ids"]):
                raise InputError(f"{where}: ids outside the vocabulary 0..{tokenizer.vocab_size - 1}")
            yield row["ids"]
        elif row.keys() != {"left_out"}:  # training shards count what has no text
            yield from map(tokenizer.encode, row_texts(where, row))


def parser() -> Options:
    """Declare the options."""
    p = Options("Write the tokens of texts to a file for --speculate rest --datastore FILE.",
                prog="python -m drafters.ngram")
    p.add_checkpoint("converted target whose tokenizer is used")
    p.add_argument("--out", required=True, metavar="FILE", help="token file, which is replaced")
    p.add_argument("files", nargs="+",
                   help='text, or JSON lines: conversations, prompts, "text", or "ids" (training shards)')
    return p


def run(o: argparse.Namespace) -> None:
    """Do what the options say. Raises InputError and OSError on bad input."""
    read_config(o.checkpoint, "target")
    tokenizer, count = Tokenizer.load(o.checkpoint), 0
    if tokenizer is None:
        raise InputError(f"{o.checkpoint}: has no tokenizer")
    with atomic_path(o.out) as part, open(part, "wb") as out:
        for path in o.files:
            for ids in filter(None, read_ids(Path(path), tokenizer)):
                out.write(torch.tensor([*ids, SEPARATOR], dtype=torch.int32).numpy().tobytes())
                count += len(ids)
        if not count:
            raise InputError(f"{', '.join(o.files)}: no text in there")
    print(f"wrote {o.out}: {counted(count, 'token')}")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
