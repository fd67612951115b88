"""OpenAI's Responses API, stateless, on top of chat completions."""
from __future__ import annotations

import copy
import uuid
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from engine.request import Event
from server.protocol import Body, ChatBody, Refusal, Strict, Tool, refusal_of_body
from server.replies import ChatReply

JSON_HEADERS = {"content-type": "application/json"}  # bodies are parsed as JSON
# Unsupported fields that need stored state -> the value that disables them.
STATEFUL_FIELDS = {"previous_response_id": None, "conversation": None, "background": False, "prompt": None}
CHAT_FIELDS = {"model", "temperature", "top_p", "stream", "parallel_tool_calls"}  # as in chat completions


class FunctionTool(Body, extra="allow"):
    """A function tool, or a `tool_choice` that names one (flat, unlike in chat completions)."""

    type: str = "function"
    name: str = ""

    @model_validator(mode="after")
    def _check(self) -> FunctionTool:
        if self.type != "function" or not self.name:
            raise ValueError(f"type {self.type!r:.60}: only function tools with a name are supported")
        return self

    @property
    def nested(self) -> dict:
        """The tool in the format of chat completions."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class ResponsesBody(Strict, extra="allow"):
    """POST /v1/responses. Extra fields of chat completions, such as `top_k`, are accepted."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stream: bool = False
    tools: list[FunctionTool] = []
    tool_choice: Literal["auto", "none", "required"] | FunctionTool = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    metadata: dict[str, Any] = Field(default={})

    def chat(self) -> ChatBody:
        """Convert to a chat completion request. Raises Refusal."""
        extra = self.model_extra or {}
        for name, disabled in STATEFUL_FIELDS.items():
            if extra.get(name) not in (None, disabled):
                message = f"{name}: not supported, as nothing is stored; send the whole conversation as input"
                raise Refusal(400, message, "invalid_value", name)
        choice = self.tool_choice
        known = ChatBody.model_fields.keys() - {"n"}  # a response has one choice
        fields = {name: value for name, value in extra.items() if name in known} | {
            "messages": self.messages(), "tools": [tool.nested for tool in self.tools],
            "max_completion_tokens": self.max_output_tokens, "response_format": self.text.get("format"),
            "tool_choice": choice if isinstance(choice, str) else Tool(**choice.nested).model_dump(),
            "reasoning_effort": self.reasoning.get("effort"), **self.model_dump(include=CHAT_FIELDS),
        }
        try:
            return ChatBody(**fields)
        except ValidationError as e:
            errors = [{**x, "loc": ("body", *x["loc"])} for x in e.errors()]
            raise refusal_of_body(errors, JSON_HEADERS) from None

    def messages(self) -> list[dict]:
        """Convert `input` to chat messages. Reasoning and calls are merged into one assistant message."""
        messages = [{"role": "developer", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]

        def assistant() -> dict:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            return messages[-1]

        for n, item in enumerate(self.input):
            item_type = item.get("type", "message")
            if item_type == "message":
                role, content = item.get("role"), item.get("content")
                if role == "assistant" and "content" not in assistant():
                    messages[-1]["content"] = content
                else:
                    messages.append({"role": role, "content": content})
            elif item_type == "function_call":
                call = {"name": item.get("name"), "arguments": item.get("arguments", "")}
                calls = assistant().setdefault("tool_calls", [])
                calls.append({"id": str(item.get("call_id", "")), "type": "function", "function": call})
            elif item_type == "function_call_output":
                content, call_id = item.get("output"), item.get("call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            elif item_type == "reasoning":
                messages.append({"role": "assistant", "reasoning": "".join(
                    str(part.get("text", "")) for part in item.get("content") or item.get("summary") or ()
                    if isinstance(part, dict))})
            else:
                raise Refusal(400, f"input.{n}: {item_type!r:.60} is not a message, call or reasoning",
                              "invalid_value", "input")
        return messages


class ResponsesReply(ChatReply):
    """The response to POST /v1/responses. request_body: its body.

    Output items come in this order: reasoning, message, function calls.
    """

    prefix, end = "resp", ""

    def __init__(self, *args, request_body: ResponsesBody, **options):
        super().__init__(*args, **options)
        self.request_body, self.items, self._sent = request_body, [], 0

    def whole(self) -> dict:
        message = self.choice(0, self.jobs[0])["message"]
        texts = {"reasoning": message.get("reasoning_content"), "message": message["content"]}
        for item_type, text in texts.items():
            if text or (item_type == "message" and not message.get("tool_calls")):
                self.items.append(text_item(item_type, text))
        self.items += map(function_call_item, message.get("tool_calls", ()))
        return self.response(self.status)

    @property
    def status(self) -> str:
        """Status of the finished response: completed or incomplete."""
        return "incomplete" if self.ending(0) == "length" else "completed"

    def response(self, status: str, refusal: Refusal | None = None) -> dict:
        """Return the response object with the output items so far."""
        request_body, ended = self.request_body, status in ("completed", "incomplete")
        usage = self.usage() if ended else None
        reasons = {"reason": "max_output_tokens"} if status == "incomplete" else None
        echoed = request_body.model_dump(include={
            "instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "top_p",
            "tool_choice", "tools", "text", "reasoning"})
        return echoed | {
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "model": self.model, "output": self.items, "store": False, "previous_response_id": None,
            "error": refusal and {"code": "server_error", "message": refusal.message},
            "incomplete_details": reasons, "truncation": "disabled", "usage": usage and {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "total_tokens": usage["total_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        } | self.metrics()

    def failed(self, refusal: Refusal) -> dict:
        """Return the last event of a failed stream."""
        return self._event("response.failed", response=self.response("failed", refusal))

    def chunks(self, i: int, event: Event) -> list[dict]:
        """Return the server-sent events for an event of job i."""
        events = []
        if not self._started[i]:
            self._started[i] = True
            for status in "created", "in_progress":
                events.append(self._event(f"response.{status}", response=self.response("in_progress")))
        text, calls = self._strip_held_back(i, self._streams[i].push(event.text)), []
        reasoning = self._streams[i].reasoning()
        if event.finish:
            rest, calls = self._finish(i)
            text, reasoning = text + rest, reasoning + self._streams[i].reasoning()
        events += self._grow("reasoning", reasoning)
        # As in `whole`: without calls there is a message, even an empty one.
        has_message = any(item["type"] == "message" for item in self.items)
        events += self._grow("message", text, always=bool(event.finish and not calls and not has_message))
        if event.finish:
            events += self._close()
            for call in map(function_call_item, calls):
                events += self._open(call | {"arguments": "", "status": "in_progress"})
                position = {"item_id": call["id"], "output_index": len(self.items) - 1}
                arguments = call["arguments"]
                name = "response.function_call_arguments"
                events.append(self._event(f"{name}.delta", **position, delta=arguments))
                events.append(self._event(f"{name}.done", **position, arguments=arguments, name=call["name"]))
                self.items[-1] = call
                done = {"output_index": position["output_index"], "item": call}
                events.append(self._event("response.output_item.done", **done))
            events.append(self._event(f"response.{self.status}", response=self.response(self.status)))
        return events

    def _event(self, event: str, **fields) -> dict:
        self._sent += 1
        return copy.deepcopy({"type": event, "sequence_number": self._sent - 1, **fields})  # items change

    def _open(self, item: dict) -> list[dict]:
        self.items.append(item)
        if item["type"] != "function_call":
            item = {**item, "content": []}
        return [self._event("response.output_item.added", output_index=len(self.items) - 1, item=item)]

    def _part(self, change: str, **fields) -> dict:
        """Return an event about the content part of the last item."""
        position = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, "content_index": 0}
        return self._event(f"response.{change}", **position, **fields)

    def _grow(self, item_type: str, text: str, always: bool = False) -> list[dict]:
        """Append text to the last item, or open a new one if its type differs. always: even without text."""
        events = []
        if not (text or always):
            return events
        if not self.items or self.items[-1]["type"] != item_type:
            events += self._close() + self._open(text_item(item_type, "") | {"status": "in_progress"})
            events.append(self._part("content_part.added", part={**self.items[-1]["content"][0]}))
        self.items[-1]["content"][0]["text"] += text
        if text:
            more = {"logprobs": []} if item_type == "message" else {}
            events.append(self._part(f"{CONTENT_TYPES[item_type]}.delta", delta=text, **more))
        return events

    def _close(self) -> list[dict]:
        """Complete the last item and return its final events."""
        if not self.items:
            return []
        last = self.items[-1]
        last["status"], part = "completed", last["content"][0]
        more = {"logprobs": []} if last["type"] == "message" else {}
        return [
            self._part(f"{CONTENT_TYPES[last['type']]}.done", text=part["text"], **more),
            self._part("content_part.done", part=part),
            self._event("response.output_item.done", output_index=len(self.items) - 1, item=last),
        ]


CONTENT_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}
ID_PREFIXES = {"message": "msg", "reasoning": "rs"}


def text_item(item_type: str, text: str | None) -> dict:
    """Return an output item with one content part: a message or reasoning."""
    more = {"annotations": [], "logprobs": []} if item_type == "message" else {}
    item = {"id": f"{ID_PREFIXES[item_type]}_{uuid.uuid4().hex}", "type": item_type, "status": "completed"}
    item |= {"role": "assistant"} if item_type == "message" else {"summary": []}
    return item | {"content": [{"type": CONTENT_TYPES[item_type], "text": text or ""} | more]}


def function_call_item(call: dict) -> dict:
    """Return the output item of a tool call of chat completions."""
    return {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "completed",
            "call_id": call["id"], **call["function"]}
