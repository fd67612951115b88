"""A decoder that speaks text: prompts in, pieces of text and results out."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import InputError
from engine.body import Score
from engine.decoder import Decoder
from engine.run import Run
from sampling.options import Sampling
from tokens.stops import StopStream
from tokens.tokenizer import Tokenizer, TooLong

Prompt = str | list[int] | list[dict]  # text, token ids, or chat messages


@dataclass(frozen=True)
class Piece:
    """What one sequence gained in one pass.

    `text` is completed by the token ids `ids`, the first `drafted` of which were drafted.
    The last id is the target's own, unless the text was cut before it. `scores`: those of the ids, if they
    were asked for.
    """

    sequence: int
    ids: list[int]
    text: str
    drafted: int
    scores: tuple[Score, ...] = ()


@dataclass(frozen=True)
class Result:
    """One decoded prompt. `ids` are the new tokens, a stop id included; `text` leaves control tokens out, and
    ends before a stop text.

    `seconds` is decoding after the first token, `prefill_seconds` the time to that token; both are those of
    the whole batch it was decoded in. `accept_lengths`: tokens emitted by each step. `finish`: see
    `engine.run.Output`.
    """

    prompt: str | None
    prompt_ids: list[int]
    text: str
    ids: list[int]
    finish: str
    seconds: float
    prefill_seconds: float
    accept_lengths: list[int]
    trees: dict[str, int]  # steps of its batch by tree, see `Decoder.trees_taken`
    seed: int
    scores: list[Score]  # of each of `ids`, if they were asked for
    stop: str | None  # the text that ended it, if one of `Sampling.stop` did

    @property
    def tau(self) -> float:
        """Acceptance length: mean tokens emitted per step (1 for plain decoding); 0 if no step was made."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one over `seconds`."""
        return (len(self.ids) - 1) / self.seconds if self.seconds > 0 and len(self.ids) > 1 else 0.0


def encode(
    tokenizer: Tokenizer | None, prompt: Prompt, *, raw: bool = False, system: str | None = None,
    room: int | None = None, name: str = "the prompt", variables: dict | None = None,
) -> list[int]:
    """A prompt as token ids.

    Chat messages and (unless `raw`) text go through the chat template, with `variables`; ids stay as they
    are. Raises InputError if text is given without a tokenizer, or a system message without a chat template;
    TooLong, with the numbers and without the work, if it certainly does not fit in a cache of `room` tokens.
    name: what to call the prompt then.
    """
    try:
        most = None if room is None else room - 1
        return _encode(tokenizer, prompt, raw, system, most, variables or {})
    except TooLong as e:
        raise TooLong(
            f"{name} {e} and needs room for one more,"
            f" the cache holds {room}: shorten it or raise --max-seq-len"
        ) from None


def _encode(
    tokenizer: Tokenizer | None, prompt: Prompt, raw: bool, system: str | None, most: int | None,
    variables: dict,
) -> list[int]:
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
        return prompt
    if tokenizer is None:
        raise InputError("this checkpoint has no tokenizer: give token ids (--prompt-ids)")
    if system is not None and (raw or not tokenizer.has_template):
        raise InputError(
            "a system message (--system) needs the chat template, which is left out by --raw or missing here"
        )
    if isinstance(prompt, str):
        if raw or not tokenizer.has_template:
            return tokenizer.encode(prompt, at_most=most)
        prompt = [{"role": "user", "content": prompt}]
    if system is not None:
        prompt = [{"role": "system", "content": system}, *prompt]
    return tokenizer.chat(prompt, at_most=most, **variables)


class TextDecoder:
    """A `Decoder` that speaks text. Without a tokenizer it takes and gives token ids only."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer | None):
        self.decoder, self.tokenizer = decoder, tokenizer

    def encode(
        self, prompt: Prompt, *, raw: bool = False, system: str | None = None, name: str = "the prompt"
    ) -> list[int]:
        """A prompt as token ids, as `encode` does with this checkpoint's tokenizer and this cache."""
        return encode(
            self.tokenizer, prompt, raw=raw, system=system, room=self.decoder.max_seq_len, name=name
        )

    def warm_up(self, sampling: Sampling = Sampling(), every_length: bool = False) -> None:
        """Compile (and on CUDA capture) what a request with this sampling runs."""
        self.decoder.warm_up(sampling, every_length)

    def generate(self, prompt: Prompt, *, raw: bool = False, system: str | None = None, **sampling) -> Result:
        """Decode one prompt to the end. Keyword arguments are those of `Sampling`."""
        job = self.job([prompt], [Sampling(**sampling)], raw=raw, system=system)
        job.finish()
        return job.results()[0]

    def stream(
        self, prompt: Prompt, *, raw: bool = False, system: str | None = None, **sampling
    ) -> Iterator[Piece]:
        """Decode one prompt, yielding text and token ids as they are accepted. Arguments of `generate`.

        One text at a time: after another one is started, going on with this one raises RuntimeError.
        """
        yield from self.job([prompt], [Sampling(**sampling)], raw=raw, system=system)

    def job(
        self, prompts: list[Prompt], sampling: list[Sampling], *, raw: bool = False,
        system: str | None = None,
        reuse: bool = False,
    ) -> Job:
        """Up to `batch` prompts decoded together: iterate it for `Piece`s, then ask it for `results`.

        reuse: read only what the caches do not hold of the text before (see `Decoder.start`). Raises
        ValueError (empty or too long prompts, with the numbers) and InputError before anything is decoded.
        """
        if self.tokenizer is None and any(s.stop for s in sampling):
            raise InputError("this checkpoint has no tokenizer: leave out stop texts (--stop)")
        names = [f"prompt {i + 1}" if len(prompts) > 1 else "the prompt" for i in range(len(prompts))]
        ids = [self.encode(p, raw=raw, system=system, name=name) for p, name in zip(prompts, names)]
        return Job(self.tokenizer, prompts, Run(self.decoder, ids, sampling, reuse), sampling)


class Job:
    """One batch being decoded. It may be left early: `results` then describes what there is so far."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompts: list[Prompt], run: Run, sampling: list[Sampling]
    ):
        self.tokenizer, self.prompts, self.run, self.sampling = tokenizer, prompts, run, sampling
        self.streams = [StopStream(tokenizer.stream(), s.stop) if tokenizer else None for s in sampling]
        self.stops: list[str | None] = [None] * len(prompts)

    def __iter__(self) -> Iterator[Piece]:
        for emitted in self.run:
            for i, ids in enumerate(emitted):
                if ids:
                    yield self._piece(i, ids)
        for i, stream in enumerate(self.streams):
            if stream and self.stops[i] is None and (rest := stream.flush()):
                yield Piece(i, [], rest, 0)

    def _piece(self, i: int, ids: list[int]) -> Piece:
        """What these ids, the latest of sequence i, give; it may end it."""
        drafted, text = self.run.decoder.drafted[i], ""
        if self.streams[i]:
            text, kept, self.stops[i] = self.streams[i].push(ids)
            if self.stops[i] is not None:
                self.run.stop(i, len(ids) - kept)
                ids = ids[:kept]
        scores = tuple(self.run.scores[i][-len(ids) :]) if self.run.scores[i] else ()
        return Piece(i, ids, text, min(drafted, len(ids)), scores)

    def finish(self) -> None:
        """Decode to the end."""
        for _ in self:
            pass

    def results(self) -> list[Result]:
        """One `Result` per prompt, in order."""
        rows = zip(self.prompts, self.run.prompts, self.run.outputs(), self.sampling, self.stops)
        return [
            Result(
                prompt=prompt if isinstance(prompt, str) else None, prompt_ids=prompt_ids,
                text=self._text(o.ids, stop), ids=o.ids, finish=o.finish, seconds=o.seconds,
                prefill_seconds=o.prefill_seconds,
                accept_lengths=o.accept_lengths, trees=self.run.decoder.trees_taken(), seed=sampling.seed,
                scores=o.scores, stop=stop,
            )
            for prompt, prompt_ids, o, sampling, stop in rows
        ]

    def _text(self, ids: list[int], stop: str | None) -> str:
        text = self.tokenizer.decode(ids) if self.tokenizer else ""
        return text if stop is None else text[: text.index(stop)]
