"""Responses in OpenAI's format, complete or as the chunks of a stream."""
from __future__ import annotations

import time
import uuid
from functools import partial

from common.errors import counted
from engine.request import Event, Score
from server.protocol import ChatBody, CompletionBody, Refusal
from server.worker import Job
from tokens.calls import CallStream
from tokens.channels import ChannelStream
from tokens.messages import content_of
from tokens.tokenizer import TextStream, Tokenizer

MIN_LOGPROB = -9999.0  # replaces -inf in JSON, as in vLLM


class TokenFormatter:
    """Convert single tokens to text and log-probabilities to OpenAI's formats."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Return the text of a token, with U+FFFD for invalid UTF-8."""
        return self.tokenizer.piece_or_name(token).decode("utf-8", "replace")

    def chat_logprobs(self, ids: list[int], scores: list[Score]) -> dict:
        """Return log-probabilities in the format of chat completions."""
        def entry(token: int, logprob: float) -> dict:
            piece = self.tokenizer.piece_or_name(token)
            return {"token": self.text(token), "logprob": logprob, "bytes": list(piece)}

        def top(token: int, score: Score) -> list[tuple[int, float]]:
            """Return the top tokens. OpenAI includes the sampled token: it replaces the last if missing."""
            included = not score.top or any(i == token for i, _ in score.top)
            return score.top if included else [*score.top[:-1], (token, score.logprob)]

        return {"content": [
            entry(token, score.logprob) | {"top_logprobs": [entry(*pair) for pair in top(token, score)]}
            for token, score in zip(ids, scores)
        ]}

    def logprobs(self, ids: list[int], scores: list[Score | None], offsets: list[int]) -> dict:
        """Return log-probabilities in the format of completions. offsets: start of each token in the text."""
        def top(token: int, score: Score) -> dict[str, float]:
            by_text = {self.text(token): score.logprob}
            for token, logprob in score.top:
                by_text.setdefault(self.text(token), logprob)  # equal texts: keep the most probable
            return by_text

        return {
            "tokens": [self.text(token) for token in ids],
            "token_logprobs": [score and score.logprob for score in scores],
            "top_logprobs": [score and top(token, score) for token, score in zip(ids, scores)],
            "text_offset": offsets,
        }


class Offsets:
    """Compute the character offset of each token in the text. start: offset of the first token.

    A token that does not complete a character has the offset of the next token.
    """

    def __init__(self, stream: TextStream, start: int = 0):
        self._stream, self._offset = stream, start

    def push(self, ids: list[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._stream.push([token]))
        return offsets


class Reply:
    """The response to one HTTP request with `n` jobs (choices) per prompt.

    Subclasses define `choice(i, job)`: the complete choice of a finished job, and `parts(i, event, finish,
    first)`: the streamed choices for one event of job i. finish: its finish reason or None. first: whether it
    is the first event of the job.
    """

    object, chunk_object, prefix, end = "", "", "", "data: [DONE]\n\n"

    def __init__(self, model: str, tokens: TokenFormatter, body: ChatBody | CompletionBody, jobs: list[Job]):
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self.model, self.tokens, self.jobs, self.body = model, tokens, jobs, body
        self._started = [False] * len(jobs)
        self.max_commit: int | None = None  # tokens that a step can commit; None: omit `metrics`

    def whole(self) -> dict:
        """Return the complete response; all jobs have finished."""
        choices = [{"index": i} | self.choice(i, job) for i, job in enumerate(self.jobs)]
        return self._object(self.object, choices) | {"usage": self.usage()} | self.metrics()

    def chunks(self, i: int, event: Event) -> list[dict]:
        """Return the stream chunks for an event of job i (possibly none)."""
        first, self._started[i] = not self._started[i], True
        finish = self.jobs[i].finish if event.finish else None
        parts = self.parts(i, event, finish, first)
        chunks = [self._object(self.chunk_object, [{"index": i} | part]) for part in parts]
        if finish and not self.body.stream_options.include_usage:
            chunks[-1] |= self.metrics()
        return chunks

    def failed(self, refusal: Refusal) -> dict:
        """Return the error chunk that ends a failed stream."""
        return refusal.body()

    def last_chunk(self) -> dict:
        """Return the usage chunk of `stream_options.include_usage`."""
        return self._object(self.chunk_object, []) | {"usage": self.usage()} | self.metrics()

    def usage(self) -> dict:
        """Return OpenAI's `usage`. A prompt is counted once for its `n` choices."""
        first = self.jobs[:: self.body.n]
        prompt = sum(len(job.prompt) for job in first)
        completion = sum(len(job.request.ids) for job in self.jobs)
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(job.request.cached for job in first)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(job.accepted for job in self.jobs),
                "rejected_prediction_tokens": sum(job.drafted - job.accepted for job in self.jobs),
            },
        }

    def metrics(self) -> dict:
        """Return vLLM's `metrics` of speculative decoding; null for several jobs or without drafting."""
        if self.max_commit is None:
            return {}
        (job, *others), drafts = self.jobs, self.max_commit - 1
        if others or not drafts:
            return {"metrics": None}
        steps, accepted = job.steps.total(), job.accepted
        return {"metrics": {"speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / max(1, steps),
            "draft_acceptance_rate": accepted / max(1, job.drafted),
            "acceptance_histogram": [job.steps[n] for n in range(drafts + 1)], "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted, "num_draft_tokens": job.drafted, "num_spec_tokens": drafts,
        }}}

    def summary(self) -> str:
        """Return the end of the request's log line: finish reasons, tokens, speed and acceptance length."""
        line = ", ".join(sorted({self.ending(i) for i in range(len(self.jobs))}))
        requests = [job.request for job in self.jobs if job.request]
        if len(requests) < len(self.jobs):
            return line
        usage, speed = self.usage(), sum(request.tokens_per_second for request in requests)
        tokens = counted(usage["completion_tokens"], "token")
        line += f", {usage['prompt_tokens']} + {tokens}"
        tau = sum(request.tau for request in requests) / len(requests)
        return f"{line}, {speed:.1f} tokens/s, tau {tau:.2f}" if speed else line  # one token has no speed

    def ending(self, i: int) -> str:
        """Return the finish reason of job i; for an error, with its message."""
        job = self.jobs[i]
        return f"error ({job.refusal})" if job.refusal else job.finish or "abort"

    def speculation(self, event: Event) -> dict:
        """Return the field of `return_speculation`: accepted draft tokens of a step, and its tree."""
        if not self.body.return_speculation:
            return {}
        drafted, tree = event.ids[: event.drafted], event.draft
        fields = {
            "drafted": event.drafted, "tokens": len(event.ids), "nodes": event.nodes,
            "text": "".join(map(self.tokens.text, drafted)),
        }
        if tree:
            fields["tree"] = {
                "texts": [self.tokens.text(token) for token in tree.tokens], "parent": tree.parent,
                "path": tree.path[: event.drafted + 1],
                "scores": tree.scores and [max(score, MIN_LOGPROB) for score in tree.scores],
            }
        return {"speculation": fields}

    def _object(self, name: str, choices: list[dict]) -> dict:
        head = {"id": self.id, "object": name, "created": self.created, "model": self.model}
        return head | {"choices": choices}


class ChatReply(Reply):
    """A chat completion.

    call_tags: see `tokens.calls.call_format`; None: no tools. channels: the model uses harmony channels, see
    `tokens.channels`.
    """

    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, *args, call_tags: tuple[str, ...] | None = None, channels: bool = False):
        super().__init__(*args)
        prompt = "".join(map(self.tokens.text, self.jobs[0].prompt[-64:]))
        stream = ChannelStream if channels else partial(CallStream, call_tags)
        self._streams = [stream(self.body.callable, prompt) for _ in self.jobs]
        # With continue_final_message, push the start of the message to detect a tool call that begins in it.
        # Characters of it that the stream holds back must not be sent later.
        self._held_back = [0] * len(self.jobs)
        if self.body.continues:
            start = "" if channels else content_of(self.body.dicts[-1]["content"])["content"]
            self._held_back = [max(0, len(start) - len(s.push(start))) for s in self._streams]
        self._tool_call_jobs: set[int] = set()  # jobs that ended in tool calls

    def choice(self, i: int, job: Job) -> dict:
        text = self._strip_held_back(i, self._streams[i].push(job.request.text))
        rest, calls = self._finish(i)
        message = {"role": "assistant", "content": (text + rest) or (None if calls else ""), "refusal": None}
        if reasoning := self._streams[i].reasoning():
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return {
            "message": message, "logprobs": self._logprobs(job.request.ids, job.request.scores),
            "finish_reason": self.ending(i),
        }

    def parts(self, i: int, event: Event, finish: str | None, first: bool) -> list[dict]:
        choices = []

        def part(content: dict, **more) -> None:
            choices.append({"delta": content, "logprobs": None, "finish_reason": None} | more)

        if first:
            part({"role": "assistant", "content": ""})
        text, calls = self._strip_held_back(i, self._streams[i].push(event.text)), []
        if finish:
            rest, calls = self._finish(i)
            text += rest
        reasoning = self._streams[i].reasoning()
        if text or reasoning or event.ids:
            logprobs = self._logprobs(event.ids, event.scores)
            delta = {"reasoning_content": reasoning} if reasoning else {}
            delta |= {"content": text} if text or not reasoning else {}
            part(delta, logprobs=logprobs, **self.speculation(event))
        if calls:
            part({"tool_calls": [{"index": n} | call for n, call in enumerate(calls)]})
        if finish:
            part({}, finish_reason=self.ending(i))
        return choices

    def _strip_held_back(self, i: int, text: str) -> str:
        """Strip held-back characters of the continued message from the start of `text`."""
        held = min(self._held_back[i], len(text))
        self._held_back[i] -= held
        return text[held:]

    def ending(self, i: int) -> str:
        return "tool_calls" if i in self._tool_call_jobs else super().ending(i)

    def _finish(self, i: int) -> tuple[str, list[dict]]:
        rest, calls = self._streams[i].finish()
        rest = rest if calls else self._strip_held_back(i, rest)
        if calls:
            self._tool_call_jobs.add(i)
        elif self.body.is_forced:  # do not return a truncated call as text
            rest = ""
        return rest, calls if self.body.parallel_tool_calls else calls[:1]

    def _logprobs(self, ids: list[int], scores: list[Score]) -> dict | None:
        return None if self.body.logprob_count is None else self.tokens.chat_logprobs(ids, scores)


class CompletionReply(Reply):
    """A text completion (/v1/completions)."""

    object = chunk_object = "text_completion"
    prefix = "cmpl"

    def __init__(self, *args):
        super().__init__(*args)
        tokenizer, echo = self.tokens.tokenizer, self.body.echo
        # Control tokens of text prompts are echoed as sent; BOS only if encoding does not add it.
        control = tokenizer.control.values() if isinstance(self.body.prompts[0], str) else ()
        self._shown = {i for i in control if not tokenizer.adds_bos or i != tokenizer.bos_id}
        self._echoes = [tokenizer.decode(job.prompt, self._shown) if echo else "" for job in self.jobs]
        self._offsets = [Offsets(tokenizer.stream(continues=True), len(echo)) for echo in self._echoes]

    def choice(self, i: int, job: Job) -> dict:
        request = job.request
        return self._choice(i, request.text, request.ids, request.scores, first=True) | {
            "finish_reason": job.finish
        }

    def parts(self, i: int, event: Event, finish: str | None, first: bool) -> list[dict]:
        part = self._choice(i, event.text, event.ids, event.scores, first) | {"finish_reason": finish}
        return [part | self.speculation(event)]

    def _choice(self, i: int, text: str, ids: list[int], scores: list, first: bool) -> dict:
        """Return text and logprobs of the next tokens of job i. first: prepend the echoed prompt."""
        if self.body.max_tokens == 0:
            text, ids, scores = "", [], []
        logprobs = None
        if self.body.logprob_count is not None:
            offsets = self._offsets[i].push(ids)
            if first and self.body.echo:
                request = self.jobs[i].request
                stream = self.tokens.tokenizer.stream(self._shown)
                offsets = Offsets(stream).push(request.prompt) + offsets
                ids, scores = request.prompt + ids, [None, *request.prompt_scores, *scores]
            logprobs = self.tokens.logprobs(ids, scores, offsets)
        return {"text": self._echoes[i] * first + text, "logprobs": logprobs}
