"""N-gram drafters: find earlier occurrences of the last tokens and draft what followed them. No network.

    python generate.py --checkpoint checkpoints/mine --speculate lookup --prompt "..."
    python -m drafters.ngram --checkpoint checkpoints/mine --out tokens.bin texts.jsonl more.txt
    python generate.py --checkpoint checkpoints/mine --speculate rest --datastore tokens.bin --prompt "..."

Methods differ in what they search, last source first:

lookup  the request's own tokens: prompt lookup (github.com/apoorvumang/prompt-lookup-decoding)
suffix  also the last HISTORY_TOKENS of finished requests (suffix decoding, arXiv 2411.04975)
rest    also a token file, int32 ids with SEPARATOR between texts (REST, arXiv 2311.08252)

The longest matches are drafted, then the latest, with one chain per distinct continuation. A token file is
searched at MAX_HITS occurrences of its longest indexed n-gram. All of it runs on the device with static
shapes. On a CPU a step without a likely match does not draft. On a GPU verifying the tree is nearly free, and
testing for a match would cost a synchronization.
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
from drafters.static import StaticDrafter, chain_tree, register_constants
from engine.drafting import DrafterSetup
from engine.state import State
from engine.step import Step
from tokens.dataset import read_rows, row_texts
from tokens.tokenizer import Tokenizer
from tree import Tree

CHAIN_LENGTHS = (7, 3, 1)  # tokens of each chain, best match first: 12 nodes with the root
MAX_MATCH_TOKENS = 4  # root included
# Acceptance probability of the first token after a match, and of each later one given the ones before, by
# tokens of the match. Measured on greedy answers of 1,200 conversations with SmolLM2-135M (script in git
# history); entries below 2 tokens are not measured.
FIRST_ACCEPTANCE = (0.05, 0.15, 0.34, 0.43, 0.74)
LATER_ACCEPTANCE = (0.50, 0.60, 0.70, 0.74, 0.90)
SAMPLED_SCORE_FACTOR = 1.8  # of log-probabilities at temperature 1
HISTORY_TOKENS = 32_768
SEPARATOR = -1
INDEXED_LENGTHS = (8, 4, 2)  # tokens of the indexed n-grams of a token file
MAX_HITS = 64


def hashes(tokens: Tensor, count: int) -> Tensor:
    """Hash every n-gram of `count` tokens: [..., S] -> [..., S - count + 1] int32, at least 0."""
    grams, found = tokens.unfold(-1, count, 1), 0
    for i in range(count):
        found = (found * 0x21F0AAAD + grams[..., i].long()) & 0x7FFFFFFF
    return found.int()


class TokenFile(nn.Module):
    """An index of the n-grams of a token file [M] by hash, for each of INDEXED_LENGTHS."""

    def __init__(self, tokens: Tensor):
        super().__init__()
        sample = tokens[:: max(1, len(tokens) // 4096)].cpu().numpy().tobytes()
        self.identity = f"{len(tokens)} {hashlib.sha256(sample).hexdigest()[:16]}"
        register_constants(self, tokens=tokens)
        for n in INDEXED_LENGTHS:
            keys, starts = hashes(tokens, n).sort(stable=True)
            register_constants(self, **{f"keys{n}": keys, f"starts{n}": starts.int()})

    def occurrences(self, texts: Tensor, length: Tensor, ahead: int) -> Tensor:
        """Find the n-grams that end texts [B, S] at `length` [B] in the file.

        Returns at most MAX_HITS occurrences, each with the `ahead` tokens after it, concatenated: [B,
        MAX_HITS * (INDEXED_LENGTHS[0] + ahead + 1)]. Those of the longest n-gram are evenly spread over the
        file. The most frequent continuations are last.
        """
        hit, size = torch.arange(MAX_HITS, device=texts.device), INDEXED_LENGTHS[0]
        back = torch.arange(1 - size, 1, device=texts.device)
        context = texts.gather(1, (length[:, None] + back).clamp(min=0))
        ends = hit.new_full((len(texts), MAX_HITS), -1)  # index of the occurrence's last token; -1: none
        for n in INDEXED_LENGTHS:
            keys, starts = getattr(self, f"keys{n}"), getattr(self, f"starts{n}")
            key = hashes(context[:, -n:], n)
            first, after = torch.searchsorted(keys, key), torch.searchsorted(keys, key, right=True)
            count = torch.where(n <= length[:, None] + 1, after - first, 0)
            at = first + hit * count // count.clamp(1, MAX_HITS)
            found = starts[at.clamp(max=len(starts) - 1)].long() + n - 1
            ends = torch.where((ends < 0) & (hit < count), found, ends)
        index = ends[..., None] + torch.arange(1 - size, ahead + 1, device=texts.device)
        inside = (index >= 0) & (index < len(self.tokens)) & (ends >= 0)[..., None]
        tokens = self.tokens[index.clamp(0, len(self.tokens) - 1)].long()
        tokens = torch.where(inside, tokens, SEPARATOR)  # [B, MAX_HITS, size + ahead]
        follows = tokens[..., size:]
        agreement = (follows[:, None] == follows[:, :, None]).cumprod(-1).sum((-1, -2))
        order = torch.where(ends < 0, -1, agreement).argsort(stable=True)
        ordered = tokens.gather(1, order[..., None].expand_as(tokens))
        return F.pad(ordered, (0, 1), value=SEPARATOR).flatten(1)


class NGram(StaticDrafter):
    """Draft continuations of the last n-gram, of `min_match` to `max_match` tokens.

    lengths: tokens of each chain of the tree. history: number of tokens of finished requests to keep.
    """

    sampled_score_factor = SAMPLED_SCORE_FACTOR

    def __init__(
        self, lengths: tuple[int, ...] = CHAIN_LENGTHS, min_match: int = 2,
        max_match: int = MAX_MATCH_TOKENS, *, history: int = 0, file: TokenFile | None = None,
    ):
        shape = chain_tree(tuple(lengths))
        super().__init__(shape)
        self.lengths, self.min_match, self.max_match = tuple(lengths), min_match, max_match
        self.file, self.fingerprint = file, file.identity if file else ""
        register_constants(self, history=torch.full((1, history), SEPARATOR))
        # The chain of each drafted node, and its distance from the match.
        register_constants(self, chain=[p[0] for p in shape.paths], ahead=[len(p) for p in shape.paths])
        for name, table in (("first_scores", FIRST_ACCEPTANCE), ("later_scores", LATER_ACCEPTANCE)):
            probabilities = [table[min(n, len(table) - 1)] for n in range(max_match + 1)]
            register_constants(self, **{name: torch.tensor(probabilities).log()})

    def memory(self, batch: int, slots: int, dtype: torch.dtype) -> int:
        return self.history.nbytes

    def finish(self, tokens: list[int]) -> None:
        size = self.history.shape[1]
        if size:
            new = torch.tensor([[*tokens, SEPARATOR]], device=self.history.device)
            self.history.copy_(torch.cat((self.history, new), 1)[:, -size:])

    def sources(self, state: State, slots: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the tokens to search [B, S], the root's index [B], and the number of tokens before it."""
        count, found = slots.shape[0], []
        if self.file is not None:
            found.append(self.file.occurrences(state.tokens, state.length, max(self.lengths)))
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
        lookup = getattr(step, "lookup", NGram.lookup)  # a kernel, if the step has one
        return self.static.with_tokens(*lookup(self, *self.sources(state, slots)))

    def matches(self, tokens: Tensor, length: Tensor, count: int) -> Tensor:
        """Return the match length at each of the first `count` tokens [B, count].

        It is the number of tokens up to there that equal the last ones up to `length` [B], at most
        `max_match`. It is 0 from `length` on, and where no token follows.
        """
        searched, follows = tokens[:, :count], tokens[:, 1 : count + 1]
        matched = torch.zeros_like(searched)
        equal = (torch.arange(count, device=tokens.device) < length[:, None]) & (follows >= 0)
        for back in range(self.max_match):
            wanted = tokens.gather(1, (length[:, None] - back).clamp(min=0))
            before = searched.roll(back, 1)
            before[:, :back] = SEPARATOR
            equal = equal & (before == wanted) & (wanted >= 0)
            matched = matched + equal
        return matched

    def lookup(self, tokens: Tensor, length: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the tree's tokens [B, T] and their log-probabilities given the parent [B, T].

        The arguments are those that `sources` returns. Nodes without a match repeat the root, with
        probability 0.
        """
        length = length[:, None]
        root, follows = tokens.gather(1, length), tokens[:, 1 : count + 1]
        matched, index = self.matches(tokens, length[:, 0], count), torch.arange(count, device=tokens.device)
        # The longest match; ties go to the latest.
        score = torch.where(matched >= self.min_match, matched * count + index, -1)
        starts, live = [], []
        for _ in self.lengths:
            best, at = score.max(1, keepdim=True)
            starts.append(at)
            live.append(best >= 0)
            score = torch.where(follows == follows.gather(1, at), -1, score)  # distinct first tokens
        starts, live = torch.cat(starts, 1)[:, self.chain], torch.cat(live, 1)[:, self.chain]  # [B, T-1]
        # A match that overlaps its continuation: the repetition is continued.
        period = (length - starts).clamp(min=1)
        drafted = tokens.gather(1, starts + 1 + (self.ahead - 1) % period)
        live, matched = live & (drafted >= 0), matched.gather(1, starts)
        scores = torch.where(self.ahead == 1, self.first_scores[matched], self.later_scores[matched])
        scores = torch.where(live, scores, float("-inf"))
        tree = torch.cat((root, torch.where(live, drafted, root)), 1)
        return tree, torch.cat((torch.zeros_like(scores[:, :1]), scores), 1)


def build(setup: DrafterSetup) -> NGram:
    """Build the drafter of a method. Raises InputError if --datastore is not a token file of this target."""
    if setup.method == "lookup":
        return NGram()
    if setup.method == "suffix":
        return NGram(history=HISTORY_TOKENS)
    target = setup.target
    tokens = open_tokens(Path(setup.options.flags["datastore"]), target.args.vocab_size)
    file = TokenFile(tokens.to(target.embed.device))
    return NGram(max_match=INDEXED_LENGTHS[0], history=HISTORY_TOKENS, file=file)


# -- token files ----------------------------------------------------------------------------------


def open_tokens(path: Path, vocab_size: int) -> Tensor:
    """Map a token file into memory [M]. Raises InputError if it is invalid, or of another vocabulary."""
    count, rest = divmod(check_file(path), torch.int32.itemsize)
    if rest or not INDEXED_LENGTHS[0] <= count < 2**31:
        raise InputError(f"--datastore {path}: is not a file of {INDEXED_LENGTHS[0]} to 2^31 int32 token"
                         " ids; write one with python -m drafters.ngram")
    tokens = torch.from_file(str(path), shared=False, size=count, dtype=torch.int32)
    low, high = map(int, tokens.aminmax())
    if low < SEPARATOR or high >= vocab_size:
        raise InputError(f"--datastore {path}: has the id {high if high >= vocab_size else low}, the target"
                         f" has 0 to {vocab_size - 1}; write the file with this target's tokenizer")
    return tokens


def read_ids(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the token ids of every text of a file.

    The file is one text, or JSON lines: conversations, prompts, "text", or token "ids".
    """
    if path.suffix.lower() not in (".jsonl", ".json"):
        yield tokenizer.encode(read_text(path))
        return
    for where, row in read_rows(path):
        if isinstance(row.get("ids"), list):
            if not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in row["ids"]):
                raise InputError(f"{where}: ids outside the vocabulary 0..{tokenizer.vocab_size - 1}")
            yield row["ids"]
        elif row.keys() != {"left_out"}:  # training shards count rows without text
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
    """Write the token file. Raises InputError and OSError on bad input."""
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
            raise InputError(f"{', '.join(o.files)}: no text")
    print(f"wrote {o.out}: {counted(count, 'token')}")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
