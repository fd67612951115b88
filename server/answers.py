"""What jobs gain, in OpenAI's form: whole answers, and the chunks of a stream."""
from __future__ import annotations

import time
import uuid

from engine.body import Score
from server.schemas import Request
from server.tools import Call, CallStream
from server.worker import Delta, Job
from tokens.tokenizer import Tokenizer


class Tokens:
    """Single tokens as text."""

    def __init__(self, tokenizer: Tokenizer):
        self._piece, self.stream = tokenizer.piece, tokenizer.stream
        self._control = {i: text for text, i in tokenizer.control.items()}

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for; a control token for its name."""
        return self._control[token].encode() if token in self._control else self._piece(token)

    def text(self, token: int) -> str:
        """The same as text, bytes that are no UTF-8 replaced."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def chat(self, ids: list[int], scores: tuple[Score, ...]) -> list[dict]:
        """Log-probabilities as chat completions give them."""
        def entry(token: int, logprob: float) -> dict:
            return {"token": self.text(token), "logprob": logprob, "bytes": list(self.bytes_of(token))}

        return [
            entry(token, score.logprob) | {"top_logprobs": [entry(*likely) for likely in score.top]}
            for token, score in zip(ids, scores)
        ]

    def plain(self, ids: list[int], scores: list[Score | None], offsets: list[int]) -> dict:
        """Log-probabilities as completions give them. offsets: where in the text each of these tokens begins.
        """
        return {
            "tokens": [self.text(token) for token in ids],
            "token_logprobs": [score and score.logprob for score in scores],
            "top_logprobs": [score and self._by_text(score) for score in scores], "text_offset": offsets,
        }

    def _by_text(self, score: Score) -> dict[str, float]:
        """The likeliest tokens; of several with one text the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in score.top:
            found.setdefault(self.text(token), logprob)
        return found


class Offsets:
    """Where tokens begin in a text, in characters; those that are no part of it where the next one does."""

    def __init__(self, tokens: Tokens, before: int):
        """before: characters that stand before the first token."""
        self._stream, self._at = tokens.stream(), before

    def push(self, ids: list[int]) -> list[int]:
        """Where each of the next tokens begins."""
        found = []
        for token in ids:
            found.append(self._at)
            self._at += len(self._stream.push([token]))
        return found


class Answer:
    """The answer to one request, of one or more jobs: `choices` per prompt."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, model: str, tokens: Tokens, jobs: list[Job], request: Request):
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.model, self.tokens, self.jobs = model, tokens, jobs
        self.told = bool(request.return_speculation)  # what was drafted, too
        self.prompted = jobs[:: request.n or 1]  # a job for each prompt, the first
        self.ids: list[list[int]] = [[] for _ in jobs]
        self.scores: list[list[Score]] = [[] for _ in jobs]
        self.texts, self.finishes = [""] * len(jobs), [None] * len(jobs)

    def take(self, i: int, delta: Delta) -> None:
        """What job i gained."""
        self.ids[i] += delta.ids
        self.scores[i] += delta.scores
        self.texts[i] += delta.text
        self.finishes[i] = delta.finish

    def usage(self) -> dict:
        """Tokens: read, once for all choices; written, of those drafted."""
        prompts = sum(len(job.prompt) for job in self.prompted)
        written = sum(job.tokens for job in self.jobs)
        return {
            "prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written,
            "prompt_tokens_details": {"cached_tokens": sum(job.cached for job in self.prompted)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(job.accepted for job in self.jobs),
                "rejected_prediction_tokens": sum(job.rejected for job in self.jobs),
            },
        }

    def head(self, kind: str) -> dict:
        """What stands in an answer and in each chunk."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def whole(self) -> dict:
        """The answer, after everything was taken."""
        choices = [self.choice(i) for i in range(len(self.jobs))]
        return self.head(self.kind) | {"choices": choices, "usage": self.usage()}

    def chunk(self, i: int, delta: Delta) -> list[dict]:
        """The chunks for what job i gained; often one, or none."""
        return [self.head(self.chunk_kind) | {"choices": [choice]} for choice in self.parts(i, delta)]

    def last_chunk(self) -> dict:
        """The chunk with the usage."""
        return self.head(self.chunk_kind) | {"choices": [], "usage": self.usage()}

    def choice(self, i: int) -> dict:
        raise NotImplementedError

    def parts(self, i: int, delta: Delta) -> list[dict]:
        """The choices of the chunks for what job i gained."""
        raise NotImplementedError

    def speculation(self, delta: Delta) -> dict:
        """What was drafted in a step: how many of the tokens, and the tree, by its nodes' texts."""
        found = {"drafted": delta.drafted, "tokens": len(delta.ids), "nodes": delta.nodes}
        found["text"] = "".join(self.tokens.text(token) for token in delta.ids[: delta.drafted])
        if delta.draft:
            tree = delta.draft
            found["tree"] = {
                "texts": [self.tokens.text(token) for token in tree.tokens], "parent": tree.parent,
                "path": tree.path[: delta.drafted + 1],
            }
        return found


class ChatAnswer(Answer):
    """A chat completion. form: of calls, see `server.tools.form_of`; None: there are none."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, *args, form: str | None = None, scored: bool = False):
        super().__init__(*args)
        self.scored = scored
        self.calls = [CallStream(form) for _ in self.jobs]
        self._begun = [False] * len(self.jobs)

    def choice(self, i: int) -> dict:
        stream = self.calls[i]
        text = stream.push(self.texts[i])
        rest, calls = stream.finish()
        message = {"role": "assistant", "content": (text + rest) or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = {"content": self.tokens.chat(self.ids[i], tuple(self.scores[i]))} if self.scored else None
        return {
            "index": i, "message": message, "logprobs": logprobs,
            "finish_reason": "tool_calls" if calls else self.finishes[i],
        }

    def parts(self, i: int, delta: Delta) -> list[dict]:
        found = []

        def part(content: dict, **more) -> None:
            found.append({"index": i, "delta": content, "logprobs": None, "finish_reason": None} | more)

        if not self._begun[i]:
            self._begun[i] = True
            part({"role": "assistant", "content": ""})
        text, calls = self.calls[i].push(delta.text), []
        if delta.finish:
            rest, calls = self.calls[i].finish()
            text += rest
        logprobs = {"content": self.tokens.chat(delta.ids, delta.scores)} if self.scored else None
        if text or delta.ids:
            more = {"speculation": self.speculation(delta)} if self.told else {}
            part({"content": text}, logprobs=logprobs, **more)
        if calls:
            part({"tool_calls": [{"index": n} | _call(call) for n, call in enumerate(calls)]})
        if delta.finish:
            part({}, finish_reason="tool_calls" if calls else delta.finish)
        return found


class TextAnswer(Answer):
    """A completion. prompts: the text of each job's prompt, if it is to be echoed."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, *args, prompts: list[str] | None = None, scored: bool = False, wanted: bool = True):
        """wanted: whether the output is, beside an echo."""
        super().__init__(*args)
        self.prompts, self.scored, self.wanted = prompts, scored, wanted
        self._offsets = [Offsets(self.tokens, len(prompt)) for prompt in prompts or [""] * len(self.jobs)]
        self._begun = [False] * len(self.jobs)

    def choice(self, i: int) -> dict:
        ids, scores, text = self.ids[i], [*self.scores[i]], self.texts[i]
        if not self.wanted:
            ids, scores, text = [], [], ""
        return {
            "index": i, "text": self._echo(i) + text, "logprobs": self._logprobs(i, ids, scores, True),
            "finish_reason": self.finishes[i],
        }

    def _echo(self, i: int) -> str:
        """What stands before the output."""
        return "" if self.prompts is None else self.prompts[i]

    def _logprobs(self, i: int, ids: list[int], scores: list, first: bool) -> dict | None:
        """Those of the next tokens of an output. first: nothing has been told of it yet."""
        if not self.scored:
            return None
        offsets = self._offsets[i].push(ids)
        if first and self.prompts is not None:
            prompt = self.jobs[i].prompt
            offsets = Offsets(self.tokens, 0).push(prompt) + offsets
            ids, scores = prompt + ids, [None, *self.jobs[i].text.prompt_scores, *scores]
        return self.tokens.plain(ids, scores, offsets)

    def parts(self, i: int, delta: Delta) -> list[dict]:
        text, ids, scores = delta.text, delta.ids, [*delta.scores]
        if not self.wanted:
            text, ids, scores = "", [], []
        first, self._begun[i] = not self._begun[i], True
        if first:
            text = self._echo(i) + text
        logprobs = self._logprobs(i, ids, scores, first)
        part = {"index": i, "text": text, "logprobs": logprobs, "finish_reason": delta.finish}
        if self.told:
            part["speculation"] = self.speculation(delta)
        return [part] if text or ids or delta.finish else []


def _call(call: Call) -> dict:
    return {
        "id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}
    }
