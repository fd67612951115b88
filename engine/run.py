"""One request from start to end, with the books kept."""
from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from sampling.options import Sampling


class Output(NamedTuple):
    """One decoded sequence.

    `finish` is "stop" (a stop id, which is the last of `ids`), "length" (max_new_tokens), "cache" (full) or
    "interrupted" (the run was left before its end).
    """

    ids: list[int]
    finish: str
    accept_lengths: list[int]  # tokens emitted by each step; their mean is the acceptance length tau
    prefill_seconds: float
    seconds: float  # decoding after the first token


class Run:
    """One request: `start` and `steps` of a `Decoder`, with the books. Iterate it, then ask for `outputs`.

    It may be left early (Ctrl-C): `outputs` then describes what was decoded so far.
    """

    def __init__(
        self, decoder, prompts: list[list[int]], sampling: Sampling | list[Sampling], reuse: bool = False
    ):
        self.decoder = decoder
        self.began = time.perf_counter()
        decoder.start(prompts, sampling, reuse)
        self.prompts = prompts
        self.ids: list[list[int]] = [[] for _ in prompts]
        self.accept_lengths: list[list[int]] = [[] for _ in prompts]
        self.done = [False] * len(prompts)
        self.first = self.ended = None

    def __iter__(self) -> Iterator[list[list[int]]]:
        for emitted in self.decoder.steps():
            now = time.perf_counter()
            for ids, lengths, new in zip(self.ids, self.accept_lengths, emitted):
                if new and ids:  # the first token is the prefill's
                    lengths.append(len(new))
                ids += new
            if self.first is None and all(self.ids):
                self.first = now
            self.ended, self.done = now, self.decoder.done
            yield emitted

    def outputs(self) -> list[Output]:
        """What each sequence has become so far."""
        decoder, stop_ids = self.decoder, set(self.decoder.state.stop_ids.tolist())
        ended = self.ended or time.perf_counter()
        first = self.first or ended
        result = []
        for ids, lengths, prompt, done in zip(self.ids, self.accept_lengths, self.prompts, self.done):
            finish = "length" if done else "interrupted"
            if ids and ids[-1] in stop_ids:
                finish = "stop"
            elif len(prompt) + len(ids) >= decoder.max_seq_len:
                finish = "cache"
            result.append(Output(ids, finish, lengths, first - self.began, ended - first))
        return result
