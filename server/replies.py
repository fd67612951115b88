"""Replies in OpenAI's form: whole ones, and the chunks of a stream. Function calls are found in the text."""
from __future__ import annotations

import json
import time
import uuid

from common.errors import InputError
from engine.request import Event, Score
from server.protocol import ChatBody, CompletionBody
from server.worker import Job
from tokens.tokenizer import Tokenizer

# Forms of calls. TAGGED (Qwen and others): <tool_call>{"name": ..., "arguments": {...}}</tool_call>.
# BARE (Llama 3): {"name": ..., "parameters": {...}} as the whole text.
TAGGED, BARE = "tagged", "bare"
OPENS, CLOSES = "<tool_call>", "</tool_call>"


class TokenTexts:
    """The text of single tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._control = {i: text for text, i in tokenizer.control.items()}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; of a control token, its name."""
        return self._control[token].encode() if token in self._control else self.tokenizer.piece(token)

    def text(self, token: int) -> str:
        """Return the text of a token, bytes that are no UTF-8 replaced."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def chat_logprobs(self, ids: list[int], scores: list[Score]) -> dict:
        """Return log-probabilities as chat completions have them."""
        def entry(token: int, logprob: float) -> dict:
            return {"token": self.text(token), "logprob": logprob, "bytes": list(self.bytes_of(token))}

        return {"content": [
            entry(token, score.logprob) | {"top_logprobs": [entry(*likely) for likely in score.top]}
            for token, score in zip(ids, scores)
        ]}

    def logprobs(self, ids: list[int], scores: list[Score | None], offsets: list[int]) -> dict:
        """Return log-probabilities as completions have them. offsets: where each token begins in the text."""
        def by_text(score: Score) -> dict[str, float]:
            found: dict[str, float] = {}
            for token, logprob in score.top:
                found.setdefault(self.text(token), logprob)  # of equal texts the likeliest
            return found

        return {
            "tokens": [self.text(token) for token in ids],
            "token_logprobs": [score and score.logprob for score in scores],
            "top_logprobs": [score and by_text(score) for score in scores], "text_offset": offsets,
        }


class Offsets:
    """The characters at which tokens begin in a text. before: characters before the first token.

    A token that is no part of the text begins where the next one does.
    """

    def __init__(self, tokenizer: Tokenizer, before: int):
        self._stream, self._at = tokenizer.stream(), before

    def push(self, ids: list[int]) -> list[int]:
        """Return where each of the next tokens begins."""
        found = []
        for token in ids:
            found.append(self._at)
            self._at += len(self._stream.push([token]))
        return found


class Reply:
    """The reply to one request, made of jobs: `n` for each prompt.

    Its kinds have `choice(i, job)`, the choice of a job that has ended; and `parts(i, event, finish, first)`,
    the choices of the chunks for an event of job i, which may be its first.
    """

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, model: str, tokens: TokenTexts, body: ChatBody | CompletionBody, jobs: list[Job]):
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.model, self.tokens, self.jobs, self.body = model, tokens, jobs, body
        self._begun = [False] * len(jobs)

    def whole(self) -> dict:
        """Return the reply, after all jobs have ended."""
        choices = [{"index": i} | self.choice(i, job) for i, job in enumerate(self.jobs)]
        return self._object(self.kind, choices) | {"usage": self.usage()}

    def chunks(self, i: int, event: Event) -> list[dict]:
        """Return the chunks for an event of job i; often one, or none."""
        first, self._begun[i] = not self._begun[i], True
        finish = self.jobs[i].finish if event.finish else None
        parts = self.parts(i, event, finish, first)
        return [self._object(self.chunk_kind, [{"index": i} | part]) for part in parts]

    def last_chunk(self) -> dict:
        """Return the chunk with the usage."""
        return self._object(self.chunk_kind, []) | {"usage": self.usage()}

    def usage(self) -> dict:
        """Return the number of tokens; a prompt counts once for all its choices."""
        first = self.jobs[:: self.body.n]
        prompts = sum(len(job.prompt) for job in first)
        written = sum(len(job.request.ids) for job in self.jobs)
        return {
            "prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written,
            "prompt_tokens_details": {"cached_tokens": sum(job.request.cached for job in first)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(job.accepted for job in self.jobs),
                "rejected_prediction_tokens": sum(job.rejected for job in self.jobs),
            },
        }

    def speculation(self, event: Event) -> dict:
        """Return the drafted tokens of a step, if the request asks for them, and their tree."""
        if not self.body.return_speculation:
            return {}
        drafted, tree = event.ids[: event.drafted], event.draft
        found = {
            "drafted": event.drafted, "tokens": len(event.ids), "nodes": event.nodes,
            "text": "".join(map(self.tokens.text, drafted)),
        }
        if tree:
            found["tree"] = {
                "texts": [self.tokens.text(token) for token in tree.tokens], "parent": tree.parent,
                "path": tree.path[: event.drafted + 1], "scores": tree.scores,
            }
        return {"speculation": found}

    def _object(self, kind: str, choices: list[dict]) -> dict:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices}


class ChatReply(Reply):
    """A chat completion. form: how the model writes calls, see `form_of`; None: there are none."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, *args, form: str | None = None):
        super().__init__(*args)
        self._calls = [CallStream(form) for _ in self.jobs]

    def choice(self, i: int, job: Job) -> dict:
        text = self._calls[i].push(job.request.text)
        rest, calls = self._calls[i].finish()
        message = {"role": "assistant", "content": (text + rest) or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {
            "message": message, "logprobs": self._logprobs(job.request.ids, job.request.scores),
            "finish_reason": "tool_calls" if calls else job.finish,
        }

    def parts(self, i: int, event: Event, finish: str | None, first: bool) -> list[dict]:
        found = []

        def part(content: dict, **more) -> None:
            found.append({"delta": content, "logprobs": None, "finish_reason": None} | more)

        if first:
            part({"role": "assistant", "content": ""})
        text, calls = self._calls[i].push(event.text), []
        if finish:
            rest, calls = self._calls[i].finish()
            text += rest
        if text or event.ids:
            logprobs = self._logprobs(event.ids, event.scores)
            part({"content": text}, logprobs=logprobs, **self.speculation(event))
        if calls:
            part({"tool_calls": [{"index": n} | call for n, call in enumerate(calls)]})
        if finish:
            part({}, finish_reason="tool_calls" if calls else finish)
        return found

    def _logprobs(self, ids: list[int], scores: list[Score]) -> dict | None:
        return None if self.body.scored is None else self.tokens.chat_logprobs(ids, scores)


class CompletionReply(Reply):
    """A completion."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, *args):
        super().__init__(*args)
        tokenizer, echo = self.tokens.tokenizer, self.body.echo
        self._echoes = [tokenizer.decode(job.prompt) if echo else "" for job in self.jobs]
        self._offsets = [Offsets(tokenizer, len(echo)) for echo in self._echoes]

    def choice(self, i: int, job: Job) -> dict:
        request = job.request
        return self._choice(i, request.text, request.ids, request.scores, first=True) | {
            "finish_reason": job.finish
        }

    def parts(self, i: int, event: Event, finish: str | None, first: bool) -> list[dict]:
        part = self._choice(i, event.text, event.ids, event.scores, first) | {"finish_reason": finish}
        return [part | self.speculation(event)]

    def _choice(self, i: int, text: str, ids: list[int], scores: list, first: bool) -> dict:
        """Return text and log-probabilities of the next tokens of job i; before the first ones its echo."""
        if self.body.max_tokens == 0:
            text, ids, scores = "", [], []
        logprobs = None
        if self.body.scored is not None:
            offsets = self._offsets[i].push(ids)
            if first and self.body.echo:
                request = self.jobs[i].request
                offsets = Offsets(self.tokens.tokenizer, 0).push(request.prompt) + offsets
                ids, scores = request.prompt + ids, [None, *request.prompt_scores, *scores]
            logprobs = self.tokens.logprobs(ids, scores, offsets)
        return {"text": self._echoes[i] * first + text, "logprobs": logprobs}


def form_of(template: str | None) -> str:
    """Return how a model with this chat template writes calls. Raises InputError if it defines none."""
    if template and "tools" in template:
        if OPENS in template:
            return TAGGED
        if '"parameters"' in template and ("ipython" in template or "python_tag" in template):
            return BARE
    raise InputError(
        "tools: this model's chat template defines no calls that are known here (those of Qwen and of Llama 3"
        " are); leave tools out"
    )


class CallStream:
    """Text in; out what certainly is no call, as early as possible. The calls are known at the end.

    form: see `form_of`; None: all is text.
    """

    def __init__(self, form: str | None):
        self._form, self._held, self._is_text = form, "", form is None

    def push(self, text: str) -> str:
        """Return the text that certainly belongs to no call."""
        self._held += text
        beginning = self._held.lstrip()
        if self._form == BARE and beginning and beginning[0] != "{":
            self._is_text = True
        if self._is_text:
            at = len(self._held)
        elif self._form == BARE:
            at = 0
        else:
            at = self._held.find(OPENS)
            if at < 0:
                partial = (n for n in range(len(OPENS), 0, -1) if self._held.endswith(OPENS[:n]))
                at = len(self._held) - next(partial, 0)
        certain, self._held = self._held[:at], self._held[at:]
        return certain

    def finish(self) -> tuple[str, list[dict]]:
        """Return the rest of the text, and the calls."""
        held, self._held = self._held, ""
        if self._form == BARE:
            call = _call(held, "parameters")
            return ("", [call]) if call else (held, [])
        rest, calls = "", []
        while held:
            before, opens, after = held.partition(OPENS)
            inner, closes, held = after.partition(CLOSES)
            call = _call(inner, "arguments") if opens else None
            rest += before if call else before + opens + inner + closes
            calls += [call] if call else []
        return (rest.strip("\n") if calls else rest), calls


def _call(text: str, key: str) -> dict | None:
    """Return a call that a model wrote, None if it is none. key: the name of its arguments."""
    try:
        found = json.loads(text.strip())
        name, arguments = found["name"], found[key]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
