"""generate.py --compare: alternate runs with and without drafting, and compare speed and output."""
from __future__ import annotations

import statistics
from collections.abc import Callable

from common.cli import log_stderr
from engine.request import Request
from engine.sampling import Sampling
from llm import LLM, joint_speed

RUNS = 3
MIN_GAIN = 1.1  # below this speedup, `line` explains what limits it


class Comparison:
    """Decode the prompts RUNS times. runs: (requests with drafting, requests without) of each run."""

    def __init__(self, llm: LLM, samplings: list[Sampling]):
        self.engine, self.samplings = llm.engine, samplings
        self.plain = llm.target.engine(batch=llm.engine.batch, max_seq_len=llm.engine.max_seq_len)
        self.plain.warm_up(samplings[0])
        self.runs: list[tuple[list[Request], list[Request]]] = []

    def decode(self, ids: list[list[int]], requests: list[Request]) -> None:
        """Do all runs. requests: finished requests of the first run with drafting."""
        log_stderr(f"comparing with plain decoding, {RUNS} alternating runs ...")
        for run in range(RUNS):
            drafted = self.engine.generate(ids, self.samplings) if run else requests
            self.runs.append((drafted, self.plain.generate(ids, self.samplings)))

    def row(self, i: int, as_json: Callable[[Request], dict]) -> dict:
        """Return what --compare adds to the --json object of prompt i; empty before `decode`.

        as_json: format a request. A speedup is None if an answer has only one token.
        """
        runs = [(requests[i], plain[i]) for requests, plain in self.runs]
        if not runs:
            return {}
        pairs = [(request.tokens_per_second, plain.tokens_per_second) for request, plain in runs]
        ratios = [fast / plain if fast and plain else None for fast, plain in pairs]
        return {
            "plain": as_json(runs[0][1]),
            "speedup": None if None in ratios else statistics.median(ratios), "speedups": ratios,
            "equal": all(request.ids == plain.ids for request, plain in runs),
        }

    def line(self) -> str:
        """Format speeds and speedup of the median run, and whether outputs are identical."""
        pairs = [pair for requests, plain in self.runs for pair in zip(requests, plain)]
        equal = sum(a.ids == b.ids for a, b in pairs)
        docs = "see docs/how-it-works.md#exactness"
        identical = "yes" if equal == len(pairs) else f"{equal} of {len(pairs)}, {docs}"
        speeds = [(joint_speed(requests)[1], joint_speed(plain)[1]) for requests, plain in self.runs]
        if not all(fast and plain for fast, plain in speeds):
            return f"the answer is too short to compare speeds; identical output: {identical}"
        costs = self.engine.scheduler.describe(self.samplings[0].temperature > 0) or "costs were not timed"
        if not any(request.step_times["drafted"] for request, _ in pairs):
            reason = ("no n-gram match was likely to be accepted" if self.engine.drafter.network is None
                   else f"the cost model predicted no gain; {costs}")
            return f"nothing was drafted, so there is no speedup: {reason}; identical output: {identical}"
        ratios = sorted((fast / plain, fast, plain) for fast, plain in speeds)
        ratio, fast, plain = ratios[len(ratios) // 2]
        limits, lengths = "", [n for request, _ in pairs for n in request.accept_lengths]
        if ratio < MIN_GAIN and lengths:
            limits = f"\nlimiting factors: acceptance length {statistics.mean(lengths):.2f}; {costs}"
            limits += "; use --speculate none for such requests" * (ratio < 1)
        return (
            f"{fast:.1f} tok/s, plain: {plain:.1f} tok/s; speedup {ratio:.2f}x (median of {len(ratios)}"
            f" runs, {ratios[0][0]:.2f}x to {ratios[-1][0]:.2f}x); identical output: {identical}{limits}"
        )
