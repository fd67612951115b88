"""One request from start to end, with the books kept."""
from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from sampling.options import Sampling


class Output(NamedTuple):
    """One decoded sequence.

    `finish` is "stop" (a stop id, which is the last of `ids`, or `Run.stop`), "length" (max_new_tokens),
    "cache" (full) or "interrupted" (the run was left before its end).
    """

    ids: list[int]
    finish: str
    accept_lengths: list[int]  # tokens emitted by each step; their mean is the acceptance length tau
    scores: list  # `engine.decoder.Score` of each of `ids`, if they were asked for
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
        self.scores: list[list] = [[] for _ in prompts]
        self.done, self.stopped = [False] * len(prompts), [False] * len(prompts)
        self.first = self.ended = None

    def __iter__(self) -> Iterator[list[list[int]]]:
        for emitted in self.decoder.steps():
            now = time.perf_counter()
            emitted = [[] if stopped else new for new, stopped in zip(emitted, self.stopped)]
            rows = zip(self.ids, self.accept_lengths, self.scores, emitted, self.decoder.scores)
            for ids, lengths, scores, new, scored in rows:
                if new and ids:  # the first token is the prefill's
                    lengths.append(len(new))
                ids += new
                scores += scored[: len(new)]
            if self.first is None and all(self.ids):
                self.first = now
            self.ended, self.done = now, self.decoder.done
            yield emitted

    def stop(self, i: int, beyond: int = 0) -> None:
        """End sequence i here. beyond: how many of the tokens that it emitted last do not count."""
        if beyond:
            del self.ids[i][-beyond:], self.scores[i][-beyond:]
            if self.accept_lengths[i]:
                self.accept_lengths[i][-1] -= beyond
        self.stopped[i] = True
        self.decoder.stop(i)

    def outputs(self) -> list[Output]:
        """What each sequence has become so far."""
        decoder, stop_ids = self.decoder, set(self.decoder.state.stop_ids.tolist())
        ended = self.ended or time.perf_counter()
        first = self.first or ended
        result = []
        rows = zip(self.ids, self.accept_lengths, self.scores, self.prompts, self.done, self.stopped)
        for ids, lengths, scores, prompt, done, stopped in rows:
            finish = "length" if done else "interrupted"
            if stopped or (ids and ids[-1] in stop_ids):
                finish = "stop"
            elif len(prompt) + len(ids) >= decoder.max_seq_len:
                finish = "cache"
            result.append(Output(ids, finish, lengths, scores, first - self.began, ended - first))
        return result
