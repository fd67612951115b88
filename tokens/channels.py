"""Channels of a model's text, as OpenAI's harmony templates (gpt-oss) have them:

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>words
    <|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"p": 1}

Messages in `final` are the text, and those to a function of the request are calls of it. All else is
thoughts: `analysis`, and preambles in `commentary`. A text without channels, such as JSON of a schema, is all
text.
"""
from __future__ import annotations

import re
from collections.abc import Mapping

from tokens.calls import call_of
from tokens.stops import begun

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CHANNEL_TAGS = CHANNEL, MESSAGE, START, END, "<|constrain|>"
_HEADERS = CHANNEL, START, "to="  # prefixes of headers
_ENDS = END, START, CHANNEL  # of a message; a model may forget the first


def has_channels(template: str | None) -> bool:
    """Return whether a model with this chat template writes in channels."""
    return CHANNEL in (template or "") and MESSAGE in (template or "")


def shown_channels(control: Mapping[str, int]) -> list[int]:
    """Return the ids of control tokens that a text in channels shows. control: text -> id."""
    return [control[tag] for tag in CHANNEL_TAGS if tag in control]


class ChannelStream:
    """Text in; out the words of the final message, as early as possible. Thoughts stand apart.

    tools: name -> schema of the parameters. prompt: its end, which may be in the midst of a message.
    """

    def __init__(self, tools: Mapping[str, dict] = {}, prompt: str = ""):
        self._tools, self._calls, self._thoughts = tools, [], ""
        self._channel: str | None = None  # the channel of the message, or "to NAME"; None: its header is read
        self._held = prompt.rpartition(START)[2].removeprefix("assistant") if START in prompt else ""

    def push(self, text: str) -> str:
        """Return the words that are certain."""
        self._held += text
        words = ""
        while self._held and self._begin():
            ends = [at for tag in _ENDS if (at := self._held.find(tag)) >= 0]
            end = min(ends, default=len(self._held) - begun(self._held, _ENDS))
            if self._channel.startswith("to ") and not ends:
                break
            words += self._take(self._held[:end])
            self._held = self._held[end:].removeprefix(END)
            if not ends:
                break
            self._channel = None
        return words

    def thoughts(self) -> str:
        """Return the thoughts since the last call of this."""
        found, self._thoughts = self._thoughts, ""
        return found

    def finish(self) -> tuple[str, list[dict]]:
        """Return the rest of the words, and the calls."""
        header = self._channel is None and self._held.lstrip().startswith(_HEADERS)
        return "" if header else self._take(self._held), self._calls

    def _begin(self) -> bool:
        """Read the header of a message if none is open. Return whether one is open then."""
        if self._channel is None:
            header, found, rest = self._held.partition(MESSAGE)
            start = header.lstrip()
            if not any(start.startswith(tag) or tag.startswith(start) for tag in _HEADERS):
                self._channel = "final"
            elif found:
                channel = re.search(r"<\|channel\|>\s*(\w+)", header)
                to = re.search(r"\bto=(?:functions\.)?([\w.-]+)", header)
                named = to and to[1] in self._tools
                self._channel = f"to {to[1]}" if named else channel[1] if channel else "final"
                self._held = rest
        return self._channel is not None

    def _take(self, body: str) -> str:
        """Keep a part of a message, or a whole call, and return it if it is words."""
        channel_name = self._channel or "final"
        if channel_name.startswith("to "):
            try:
                self._calls.append(call_of({"name": channel_name[3:], "arguments": body}, self._tools))
            except (ValueError, RecursionError):  # broken, or cut off
                return body
        elif channel_name != "final":
            self._thoughts += body
        return body if channel_name == "final" else ""
