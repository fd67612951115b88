"""Prompt lookup: the text itself drafts. The tokens that followed its last ones before are proposed again.

PLD (Saxena, github.com/apoorvumang/prompt-lookup-decoding) takes the earliest match of the longest n-gram and
proposes one chain; Spec-Bench's copy passes over matches with fewer than ten tokens after them, and proposes
the id 100 where there are none. Here every match competes, longer ones first and of those the latest, and the
best few with different continuations make a small tree. It runs on the device in static shapes: one
comparison per n-gram position. On a CPU a step without any match is a plain step; on a GPU the rows cost next
to nothing, and looking would cost a synchronisation.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from drafters.base import Drafter, Setup, constants
from tree import Tree, chains

CHAINS = (7, 3, 1)  # lengths of the continuations proposed, best match first: 12 nodes with the root
LONGEST = 4  # tokens of context that are compared, the root included
# By length of the match, how often its first token is right, and each further one if those before it were.
# Measured in greedy answers of about 1,200 conversations with SmolLM2-135M (script in git history),
# guessed for lengths below 2, which are not the default.
FIRST = (0.05, 0.15, 0.34, 0.43, 0.74)
FURTHER = (0.50, 0.60, 0.70, 0.74, 0.90)
SAMPLED = 1.8  # factor of the logarithms of these shares at temperature 1
WORTH = math.log(0.2)  # of the first token of a guess that is worth the rows of its tree on a CPU


class Lookup(Drafter):
    """Proposes what followed the last n-gram earlier in prompt and output. shortest: least tokens of a match.
    """

    may_pass = True
    sampled = SAMPLED

    def __init__(self, lengths: tuple[int, ...] = CHAINS, shortest: int = 2, longest: int = LONGEST):
        shape = chains(tuple(lengths))
        super().__init__(shape)
        self.lengths, self.shortest, self.longest = tuple(lengths), shortest, longest
        # The chain of each drafted node, and its distance from the match.
        constants(self, chain=[p[0] for p in shape.paths], ahead=[len(p) for p in shape.paths])
        for name, table in (("first", FIRST), ("further", FURTHER)):
            shares = [table[min(n, len(table) - 1)] for n in range(longest + 1)]
            constants(self, **{name: torch.tensor(shares).log()})

    def matches(self, state, slots: Tensor) -> Tensor:
        """Count the tokens up to each slot that equal those up to the root [B, n], at most `longest`.

        From the root on it is 0.
        """
        tokens, length = state.tokens[:, : slots.shape[0]], state.length[:, None]
        matched = torch.zeros_like(tokens)
        equal = slots < length
        for back in range(self.longest):
            wanted = state.tokens.gather(1, (length - back).clamp(min=0))
            before = tokens.roll(back, 1)  # the token `back` places before each slot
            equal = equal & (before == wanted) & (slots >= back) & (length >= back)
            matched = matched + equal
        return matched

    def has_guess(self, state, slots: Tensor) -> bool:
        """Return whether any sequence that still moves has a match that is worth a tree."""
        _, likely = state.backend.follow(self, state, slots)
        of_texts = zip(likely[:, 1].tolist(), state.temperature.tolist(), state.done.tolist())
        return any(
            first * (1 + (SAMPLED - 1) * min(temperature, 1)) > WORTH and not done
            for first, temperature, done in of_texts
        )

    def propose(self, state, slots: Tensor, noise: Tensor | None) -> Tree:
        return self.static.of(*state.backend.follow(self, state, slots))

    def follow(self, state, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tree's tokens [B, T] and the log-probability of each after its parent [B, T].

        Chains without a match repeat the root, with likelihood 0: a guess as bad as any, and never a wrong
        text.
        """
        n = slots.shape[0]
        root, length = state.root, state.length[:, None]
        matched = self.matches(state, slots)
        # The longest, of those the latest.
        score = torch.where(matched >= self.shortest, matched * n + slots, -1)
        follows = state.tokens[:, 1 : n + 1]
        starts, live = [], []
        for _ in self.lengths:
            best, at = score.max(1, keepdim=True)
            starts.append(at)
            live.append(best >= 0)
            # The next chain begins otherwise.
            score = torch.where(follows == follows.gather(1, at), -1, score)
        starts, live = torch.cat(starts, 1)[:, self.chain], torch.cat(live, 1)[:, self.chain]  # [B, T-1]
        # A match near the end of the text goes on into itself: what is repeated is taken to be repeated
        # again.
        period = (length - starts).clamp(min=1)
        place = starts + 1 + (self.ahead - 1) % period
        drafted = torch.where(live, state.tokens.gather(1, place), root)
        long = matched.gather(1, starts)
        likely = torch.where(self.ahead == 1, self.first[long], self.further[long])
        likely = torch.where(live, likely, float("-inf"))
        return torch.cat((root, drafted), 1), torch.cat((torch.zeros_like(likely[:, :1]), likely), 1)


def build(setup: Setup) -> Lookup:
    """Build the drafter, which needs nothing."""
    return Lookup()
