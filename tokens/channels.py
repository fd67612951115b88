"""Parse harmony channels (gpt-oss):

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text
    <|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"p": 1}

Messages in `final` are content, and those to a function of the request are tool calls. The rest is reasoning:
`analysis`, and preambles in `commentary`. Output without channels, such as JSON of a schema, is content.
"""
from __future__ import annotations

import re
from collections.abc import Mapping

from tokens.calls import call_of
from tokens.stops import partial_match

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CHANNEL_TAGS = CHANNEL, MESSAGE, START, END, "<|constrain|>"
_HEADERS = CHANNEL, START, "to="  # a header starts with one of these
_ENDS = END, START, CHANNEL  # a message ends at one of these; models sometimes omit END


def has_channels(template: str | None) -> bool:
    """Return whether the model of this chat template uses channels."""
    return CHANNEL in (template or "") and MESSAGE in (template or "")


def shown_channels(control: Mapping[str, int]) -> list[int]:
    """Return the ids of control tokens to keep in text with channels. control: text -> id."""
    return [control[tag] for tag in CHANNEL_TAGS if tag in control]


class ChannelStream:
    """Separates content, reasoning and tool calls while the output streams.

    tools: name -> schema of the parameters. prompt: the end of the prompt, which may be inside a message.
    """

    def __init__(self, tools: Mapping[str, dict] = {}, prompt: str = ""):
        self._tools, self._calls, self._reasoning = tools, [], ""
        self._channel: str | None = None  # of the current message; "to NAME": a tool call; None: in a header
        self._held = prompt.rpartition(START)[2].removeprefix("assistant") if START in prompt else ""

    def push(self, text: str) -> str:
        """Add text. Returns the content that is complete so far."""
        self._held += text
        content = ""
        while self._held and self._open_message():
            ends = [at for tag in _ENDS if (at := self._held.find(tag)) >= 0]
            end = min(ends, default=len(self._held) - partial_match(self._held, _ENDS))
            if self._channel.startswith("to ") and not ends:
                break
            content += self._consume(self._held[:end])
            self._held = self._held[end:].removeprefix(END)
            if not ends:
                break
            self._channel = None
        return content

    def reasoning(self) -> str:
        """Return the reasoning since the last call of this method."""
        reasoning, self._reasoning = self._reasoning, ""
        return reasoning

    def finish(self) -> tuple[str, list[dict]]:
        """Return the remaining content and the calls."""
        header = self._channel is None and self._held.lstrip().startswith(_HEADERS)
        return "" if header else self._consume(self._held), self._calls

    def _open_message(self) -> bool:
        """Read the header of the next message if none is open. Returns whether a message is open."""
        if self._channel is None:
            header, separator, rest = self._held.partition(MESSAGE)
            start = header.lstrip()
            if not any(start.startswith(tag) or tag.startswith(start) for tag in _HEADERS):
                self._channel = "final"
            elif separator:
                channel = re.search(r"<\|channel\|>\s*(\w+)", header)
                to = re.search(r"\bto=(?:functions\.)?([\w.-]+)", header)
                is_call = to and to[1] in self._tools
                self._channel = f"to {to[1]}" if is_call else channel[1] if channel else "final"
                self._held = rest
        return self._channel is not None

    def _consume(self, body: str) -> str:
        """Store a part of a message, or a whole call. Returns the text that is content."""
        channel_name = self._channel or "final"
        if channel_name.startswith("to "):
            try:
                self._calls.append(call_of({"name": channel_name[3:], "arguments": body}, self._tools))
            except (ValueError, RecursionError):  # malformed or truncated
                return body
        elif channel_name != "final":
            self._reasoning += body
        return body if channel_name == "final" else ""
