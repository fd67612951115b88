"""generate.py --compare: decode the prompts with and without drafting, in turns."""
from __future__ import annotations

import statistics
from collections.abc import Callable

from common.cli import note
from engine.request import Request
from llm import LLM, together
from sampling.options import Sampling

TURNS = 3
MIN_GAIN = 1.1  # speedup below which the line says what bounds it


class Comparison:
    """Decodes the prompts repeatedly. turns: (requests with drafting, requests without) of each turn."""

    def __init__(self, llm: LLM, samplings: list[Sampling]):
        self.engine, self.samplings = llm.engine, samplings
        self.plain = llm.target.engine(batch=llm.engine.batch, max_seq_len=llm.engine.max_seq_len)
        self.plain.warm_up(samplings[0])
        self.turns: list[tuple[list[Request], list[Request]]] = []

    def decode(self, ids: list[list[int]], requests: list[Request]) -> None:
        """Decode the prompts in all turns. requests: with drafting, of the first turn."""
        note(f"comparing with plain decoding, {TURNS} turns ...")
        for turn in range(TURNS):
            again = self.engine.generate(ids, self.samplings) if turn else requests
            self.turns.append((again, self.plain.generate(ids, self.samplings)))

    def row(self, i: int, as_json: Callable[[Request], dict]) -> dict:
        """Return additional keys for the row of prompt i in `--json`, none without turns.

        as_json: converts a request. A speedup is None if one of its two answers has a single token.
        """
        turns = [(requests[i], plain[i]) for requests, plain in self.turns]
        if not turns:
            return {}
        pairs = [(request.tokens_per_second, plain.tokens_per_second) for request, plain in turns]
        ratios = [fast / slow if fast and slow else None for fast, slow in pairs]
        return {
            "plain": as_json(turns[0][1]),
            "speedup": None if None in ratios else statistics.median(ratios), "speedups": ratios,
            "equal": all(request.ids == plain.ids for request, plain in turns),
        }

    def line(self) -> str:
        """Format the speeds and the speedup of the median turn, and whether the texts are equal."""
        pairs = [pair for requests, plain in self.turns for pair in zip(requests, plain)]
        equal = sum(a.ids == b.ids for a, b in pairs)
        docs = "see docs/how-it-works.md#exactness"
        texts = "yes" if equal == len(pairs) else f"{equal} of {len(pairs)}, {docs}"
        speeds = [(together(requests)[1], together(plain)[1]) for requests, plain in self.turns]
        if not all(fast and slow for fast, slow in speeds):
            return f"the answer is too short to compare speeds; texts equal: {texts}"
        ratios = sorted((fast / slow, fast, slow) for fast, slow in speeds)
        ratio, fast, slow = ratios[len(ratios) // 2]
        bound, lengths = "", [n for request, _ in pairs for n in request.accept_lengths]
        if ratio < MIN_GAIN and lengths:
            noisy = self.samplings[0].temperature > 0
            costs = self.engine.scheduler.describe(noisy) or "costs were not timed"
            bound = f"\nwhat bounds it: acceptance length {statistics.mean(lengths):.2f}; {costs}"
        return (
            f"{fast:.1f} tok/s, plain: {slow:.1f} tok/s; speedup {ratio:.2f}x (the middle one of"
            f" {len(ratios)} turns, {ratios[0][0]:.2f} to {ratios[-1][0]:.2f}); texts equal: {texts}{bound}"
        )
