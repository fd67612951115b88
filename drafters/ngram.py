"""N-gram drafters: find earlier occurrences of the last tokens and draft what followed them. No network.

    python generate.py --checkpoint checkpoints/mine --speculate lookup --prompt "..."
    python -m drafters.ngram --checkpoint checkpoints/mine --out tokens.bin texts.jsonl more.txt
    python generate.py --checkpoint checkpoints/mine --speculate rest --datastore tokens.bin --prompt "..."

Methods differ in what they search:

lookup  the request's own tokens: prompt lookup (github.com/apoorvumang/prompt-lookup-decoding)
suffix  these and the last HISTORY_TOKENS tokens of finished requests (suffix decoding, arXiv 2411.04975)
rest    these and a datastore: a file of int32 token ids, SEPARATOR after each text (REST, arXiv 2311.08252)

Longer matches win. On a tie, the request's own tokens win over the history, the history over the datastore,
and later positions over earlier ones. Each distinct next token gets one chain. A datastore is searched at up
to MAX_HITS occurrences of the longest indexed n-gram that ends the request. Everything runs on the device
with static shapes. On CPU, the cost model skips drafting if no match is likely to be accepted. On GPU,
verifying the tree is nearly free and a check for a match would cost a synchronization, so it always drafts.
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
from common.errors import InputError, check_file, counted, read_text
from common.writing import atomic_path
from drafters.static import StaticDrafter, chain_tree, register_constants
from engine.drafting import DrafterSetup
from engine.state import State
from engine.step import Step
from tokens.dataset import read_rows, row_texts
from tokens.tokenizer import Tokenizer
from tree import Tree

CHAIN_LENGTHS = (7, 3, 1)  # tokens of each chain, best match first: 12 nodes with the root
MAX_MATCH_TOKENS = 4  # length of the matched n-gram, which ends with the root
# Acceptance probability by match length: of the first token after the match, and of each later token given
# that its parent was accepted. Measured with SmolLM2-135M on greedy answers to 1,200 conversations (script in
# git history). Entries 0 and 1 are guesses.
FIRST_ACCEPTANCE = (0.05, 0.15, 0.34, 0.43, 0.74)
LATER_ACCEPTANCE = (0.50, 0.60, 0.70, 0.74, 0.90)
SAMPLED_SCORE_FACTOR = 1.8  # multiplies log-probabilities of drafts at temperature 1: fewer are accepted
HISTORY_TOKENS = 32_768
SEPARATOR = -1
INDEXED_LENGTHS = (8, 4, 2)  # n of the n-grams indexed in a datastore
MAX_HITS = 64  # occurrences per request that are searched in a datastore


def ngram_hashes(tokens: Tensor, count: int) -> Tensor:
    """Hash every n-gram of `count` tokens: [..., S] -> [..., S - count + 1] non-negative int32."""
    grams, key = tokens.unfold(-1, count, 1), 0
    for i in range(count):
        key = (key * 0x21F0AAAD + grams[..., i].long()) & 0x7FFFFFFF
    return key.int()


class TokenFile(nn.Module):
    """Index a datastore (token ids [M]): n-gram keys, sorted, with their positions, per indexed n."""

    def __init__(self, tokens: Tensor):
        super().__init__()
        sample = tokens[:: max(1, len(tokens) // 4096)].cpu().numpy().tobytes()
        self.fingerprint = f"{len(tokens)} {hashlib.sha256(sample).hexdigest()[:16]}"
        register_constants(self, tokens=tokens)
        for n in INDEXED_LENGTHS:
            keys, starts = ngram_hashes(tokens, n).sort(stable=True)
            register_constants(self, **{f"keys{n}": keys, f"starts{n}": starts.int()})

    def occurrences(self, sequences: Tensor, length: Tensor, num_next: int) -> Tensor:
        """Find occurrences of the n-gram that ends each of sequences [B, S] at index `length` [B].

        Returns [B, MAX_HITS * (INDEXED_LENGTHS[0] + num_next + 1)]: per occurrence the context, `num_next`
        tokens after it and a SEPARATOR. Longer n-grams go first. If there are more than MAX_HITS, an evenly
        spaced sample. Sorted by agreement with the other continuations, most frequent last: later matches win
        ties.
        """
        hit, size = torch.arange(MAX_HITS, device=sequences.device), INDEXED_LENGTHS[0]
        back = torch.arange(1 - size, 1, device=sequences.device)
        context = sequences.gather(1, (length[:, None] + back).clamp(min=0))
        ends = hit.new_full((len(sequences), MAX_HITS), -1)  # index of each hit's last token; -1: unused
        for n in INDEXED_LENGTHS:
            keys, starts = getattr(self, f"keys{n}"), getattr(self, f"starts{n}")
            key = ngram_hashes(context[:, -n:], n)
            first, after = torch.searchsorted(keys, key), torch.searchsorted(keys, key, right=True)
            count = torch.where(n <= length[:, None] + 1, after - first, 0)
            entry = first + hit * count // count.clamp(1, MAX_HITS)
            hit_ends = starts[entry.clamp(max=len(starts) - 1)].long() + n - 1
            ends = torch.where((ends < 0) & (hit < count), hit_ends, ends)
        index = ends[..., None] + torch.arange(1 - size, num_next + 1, device=sequences.device)
        inside = (index >= 0) & (index < len(self.tokens)) & (ends >= 0)[..., None]
        tokens = self.tokens[index.clamp(0, len(self.tokens) - 1)].long()
        tokens = torch.where(inside, tokens, SEPARATOR)  # [B, MAX_HITS, size + num_next]
        following = tokens[..., size:]
        agreement = (following[:, None] == following[:, :, None]).cumprod(-1).sum((-1, -2))
        order = torch.where(ends < 0, -1, agreement).argsort(stable=True)
        ordered = tokens.gather(1, order[..., None].expand_as(tokens))
        return F.pad(ordered, (0, 1), value=SEPARATOR).flatten(1)


class NGram(StaticDrafter):
    """Draft the continuations of earlier occurrences of the last `min_match` to `max_match` tokens.

    lengths: depth of each chain of the static tree, best match first. history: number of tokens of finished
    requests to keep. file: datastore.
    """

    sampled_score_factor = SAMPLED_SCORE_FACTOR

    def __init__(
        self, lengths: tuple[int, ...] = CHAIN_LENGTHS, min_match: int = 2,
        max_match: int = MAX_MATCH_TOKENS, *, history: int = 0, file: TokenFile | None = None,
    ):
        shape = chain_tree(tuple(lengths))
        super().__init__(shape)
        self.lengths, self.min_match, self.max_match = tuple(lengths), min_match, max_match
        self.file, self.fingerprint = file, file.fingerprint if file else ""
        register_constants(self, history=torch.full((1, history), SEPARATOR))
        # Of each drafted node: the index of its chain and its depth (1: first token after the match).
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
        """Return (tokens to search [B, S], index of the root [B], S - 1: number of positions to match)."""
        count, sources = slots.shape[0], []
        if self.file is not None:
            sources.append(self.file.occurrences(state.tokens, state.length, max(self.lengths)))
        if self.history.shape[1]:
            sources.append(self.history.expand(len(state.tokens), -1))
        if not sources:
            return state.tokens, state.length, count
        tokens = torch.cat((*sources, state.tokens[:, : count + 1]), 1)
        offset = tokens.shape[1] - count - 1
        return tokens, state.length + offset, count + offset

    def propose(
        self, step: Step, state: State, slots: Tensor, noise: Tensor | None, costs=None
    ) -> Tree:
        lookup = getattr(step, "lookup", NGram.lookup)  # a kernel, if the step has one
        return self.static.with_tokens(*lookup(self, *self.sources(state, slots)))

    def matches(self, tokens: Tensor, length: Tensor, count: int) -> Tensor:
        """Return the match length at each of the first `count` positions [B, count].

        The match length at position i is the number of tokens ending at i that equal the tokens ending at the
        root (index `length` [B]), at most `max_match`. It is 0 at and after the root, and where no token
        follows.
        """
        searched, next_tokens = tokens[:, :count], tokens[:, 1 : count + 1]
        matched = torch.zeros_like(searched)
        equal = (torch.arange(count, device=tokens.device) < length[:, None]) & (next_tokens >= 0)
        for back in range(self.max_match):  # compare the tokens `back` positions before
            query = tokens.gather(1, (length[:, None] - back).clamp(min=0))
            shifted = searched.roll(back, 1)
            shifted[:, :back] = SEPARATOR
            equal = equal & (shifted == query) & (query >= 0)
            matched = matched + equal
        return matched

    def lookup(self, tokens: Tensor, length: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of the tree [B, T] and their log-probabilities given the parent [B, T].

        The arguments are the result of `sources`. Chains without a match repeat the root token with
        log-probability -inf.
        """
        length = length[:, None]
        root, next_tokens = tokens.gather(1, length), tokens[:, 1 : count + 1]
        matched, index = self.matches(tokens, length[:, 0], count), torch.arange(count, device=tokens.device)
        # The longest match; ties go to the latest.
        score = torch.where(matched >= self.min_match, matched * count + index, -1)
        starts, valid = [], []
        for _ in self.lengths:
            best, start = score.max(1, keepdim=True)
            starts.append(start)
            valid.append(best >= 0)
            score = torch.where(next_tokens == next_tokens.gather(1, start), -1, score)  # distinct tokens
        starts, valid = torch.cat(starts, 1)[:, self.chain], torch.cat(valid, 1)[:, self.chain]  # [B, T-1]
        # If the continuation reaches the root, the text is periodic: wrap around to continue the repetition.
        period = (length - starts).clamp(min=1)
        drafted = tokens.gather(1, starts + 1 + (self.ahead - 1) % period)
        valid, matched = valid & (drafted >= 0), matched.gather(1, starts)
        scores = torch.where(self.ahead == 1, self.first_scores[matched], self.later_scores[matched])
        scores = torch.where(valid, scores, float("-inf"))
        tree = torch.cat((root, torch.where(valid, drafted, root)), 1)
        return tree, torch.cat((torch.zeros_like(scores[:, :1]), scores), 1)


def build(setup: DrafterSetup) -> NGram:
    """Build the n-gram drafter of `setup.method`. Raises InputError on an invalid --datastore."""
    if setup.method == "lookup":
        return NGram()
    if setup.method == "suffix":
        return NGram(history=HISTORY_TOKENS)
    target = setup.target
    tokens = open_datastore(Path(setup.options.flags["datastore"]), target.args.vocab_size)
    file = TokenFile(tokens.to(target.embed.device))
    return NGram(max_match=INDEXED_LENGTHS[0], history=HISTORY_TOKENS, file=file)


# -- datastores -----------------------------------------------------------------------------------


def open_datastore(path: Path, vocab_size: int) -> Tensor:
    """Memory-map a datastore: [M] int32. Raises InputError if an id is beyond `vocab_size`."""
    count, remainder = divmod(check_file(path), torch.int32.itemsize)
    if remainder or not INDEXED_LENGTHS[0] <= count < 2**31:
        raise InputError(f"--datastore {path}: is not a file of {INDEXED_LENGTHS[0]} to 2^31 - 1 int32 token"
                         " ids; write one with python -m drafters.ngram")
    tokens = torch.from_file(str(path), shared=False, size=count, dtype=torch.int32)
    low, high = map(int, tokens.aminmax())
    if low < SEPARATOR or high >= vocab_size:
        raise InputError(f"--datastore {path}: token id {high if high >= vocab_size else low} is outside the"
                         f" target's vocabulary 0..{vocab_size - 1}; write the file with this target's"
                         " tokenizer")
    return tokens


def read_ids(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the token ids of each text in a file.

    A .json or .jsonl file has one conversation, prompt, "text" or token "ids" per line. Any other file is one
    text.
    """
    if path.suffix.lower() not in (".jsonl", ".json"):
        yield tokenizer.encode(read_text(path))
        return
    for where, row in read_rows(path):
        if isinstance(row.get("ids"), list):
            if not all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in row["ids"]):
                raise InputError(f"{where}: ids outside the vocabulary 0..{tokenizer.vocab_size - 1}")
            yield row["ids"]
        elif row.keys() != {"left_out"}:  # {"left_out": n} in a training shard: n rows were skipped
            yield from map(tokenizer.encode, row_texts(where, row))


def parser() -> Options:
    """Build the argument parser."""
    p = Options("Write the tokens of texts to a file for --speculate rest --datastore FILE.",
                prog="python -m drafters.ngram")
    p.add_checkpoint("converted target whose tokenizer is used")
    p.add_argument("--out", required=True, metavar="FILE", help="output file (overwritten)")
    p.add_argument("files", nargs="+",
                   help='text, or JSON lines: conversations, prompts, "text", or "ids" (training shards)')
    return p


def run(args: argparse.Namespace) -> None:
    """Tokenize the files and write the datastore. Raises InputError and OSError."""
    read_config(args.checkpoint, "target")
    tokenizer, count = Tokenizer.load(args.checkpoint), 0
    if tokenizer is None:
        raise InputError(f"{args.checkpoint}: has no tokenizer; use a target that has one")
    with atomic_path(args.out) as part, open(part, "wb") as out:
        for path in args.files:
            for ids in filter(None, read_ids(Path(path), tokenizer)):
                out.write(torch.tensor([*ids, SEPARATOR], dtype=torch.int32).numpy().tobytes())
                count += len(ids)
        if not count:
            raise InputError(f"{', '.join(args.files)}: no text")
    print(f"wrote {args.out}: {counted(count, 'token')}")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status, see `common.cli.run_command`."""
    return command(parser(), argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
