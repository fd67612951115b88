"""Read prompts and conversations in the formats of FastChat, ShareGPT and OpenAI.

A file is JSON Lines, or one JSON array (as ShareGPT is published). A row has one of
    {"prompt": "..."}                                                one user turn
    {"turns": ["...", "..."]}                                        user turns (FastChat's question.jsonl)
    {"conversations": [{"from": "human", "value": "..."}, ...]}      ShareGPT
    {"messages": [{"role": "user", "content": "..."}, ...]}          OpenAI

All readers raise InputError if the file cannot be read; the error tells the first invalid row. Messages are
dictionaries of "role" (system, user or assistant), "content" (a string) and, if present, reasoning.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from common.errors import InputError, counted, parse_json, read_text, reading
from tokens.messages import content_of, reasoning_of

# Roles in files -> roles of chat templates.
ROLES = {"system": "system", "developer": "system", "human": "user", "user": "user"}
ROLES |= dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant")
TOOL_ROLES = "tool", "tool_call", "tool_response", "function", "function_call", "observation"
ANSWER_KEYS = ("completion", "response", "answer", "output")  # of rows with a prompt and its answer


class SkippedRow(Exception):
    """A row is skipped. The message is the reason, such as "with tools"."""


def read_prompts(path: str | Path) -> list[str]:
    """Return the first user turn of every row."""
    return [turns[0] for turns in read_turns(path)]


def read_turns(path: str | Path) -> list[list[str]]:
    """Return the user turns of every row."""
    return [[m["content"] for m in messages if m["role"] == "user"] for messages in read_chats(path)]


def read_chats(path: str | Path, log: Callable[[str], None] | None = None) -> list[list[dict]]:
    """Return the system message, if any, and the user messages of every row.

    Rows without a user message, or with tools or images, are skipped, and `log` gets their number by reason.
    Raises InputError if no row is left.
    """
    rows, reasons = [], Counter()
    for where, row in read_rows(path):
        try:
            rows.append(_prompts_of(where, row))
        except SkippedRow as e:
            reasons[str(e)] += 1
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())
    if not rows:
        raise InputError(f"{path}: has no prompts" + (f" (skipped rows: {skipped})" if skipped else ""))
    if skipped and log:
        log(f"{path}: skipped rows: {skipped}")
    return rows


def _prompts_of(where: str, row: dict) -> list[dict]:
    """Return the messages of a row without answers. Raises SkippedRow if it has no user message."""
    if "prompt" in row or "turns" in row:
        turns = [row["prompt"]] if "prompt" in row else row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise InputError(f"{where}: no user turns; expected a string as prompt or a list as turns")
        return [{"role": "user", "content": turn} for turn in turns]
    messages = [m for m in _messages(where, row) if m["role"] != "assistant"]
    if not any(m["role"] == "user" for m in messages):
        raise SkippedRow("without a user message")
    return messages


def read_questions(path: str | Path) -> list[dict]:
    """Return FastChat's questions: {"question_id", "category", "turns"}.

    A row without an id gets its number, counted from 0; a row without a category gets "". Raises InputError
    if a row has no user turn.
    """
    rows, turns = [row for _, row in read_rows(path)], read_turns(path)
    if len(rows) != len(turns):
        raise InputError(f"{path}: no question in {counted(len(rows) - len(turns), 'row')}")

    return [{"question_id": row.get("question_id", i), "category": row.get("category", ""), "turns": turns[i]}
            for i, row in enumerate(rows)]


def read_openings(path: str | Path) -> tuple[str, ...]:
    """Return the non-empty lines of a text file. Raises InputError if there are none."""
    openings = tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    if not openings:
        raise InputError(f"{path}: is empty")
    return openings


def row_texts(where: str, row: dict) -> list[str]:
    """Return all texts of a row: "text", the messages, or a prompt and its answer.

    where: the row's location for error messages. Raises InputError on a row without any of these.
    """
    if isinstance(row.get("text"), str):
        return [row["text"]]
    is_conversation = row.get("messages") is not None or row.get("conversations") is not None
    if not is_conversation and ("prompt" in row or "turns" in row):
        prompts = [row["prompt"]] if "prompt" in row else row["turns"]
        texts = [*(prompts if isinstance(prompts, list) else []), *map(row.get, ANSWER_KEYS)]
        return [text for text in texts if isinstance(text, str)]
    try:
        return [m["content"] for m in _messages(where, row)]
    except SkippedRow:
        return []


def _read_lines(path: str | Path) -> Iterator[str]:
    with reading(path), open(path, encoding="utf-8-sig", newline="\n") as file:  # U+2028 is not a line end
        for line in file:
            yield line.rstrip("\n")


def read_rows(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield (the row's location for error messages, row). Raises InputError if a row is not a JSON object."""
    lines = enumerate(_read_lines(path), 1)
    number, first = next(((i, line) for i, line in lines if line.strip()), (1, ""))
    if first.lstrip().startswith("["):
        entries = parse_json("\n".join([first, *(line for _, line in lines)]).encode(), str(path))
        rows = ((f"{path}: entry {i}", entry) for i, entry in enumerate(entries, 1))
    else:
        located = ((f"{path}: line {i}", line) for i, line in chain([(number, first)], lines) if line.strip())
        rows = ((where, parse_json(line.encode(), where)) for where, line in located)
    for where, row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{where} is not a JSON object")
        yield where, row


def _messages(where: str, row: dict) -> list[dict]:
    """Return the messages of a row. System messages are system_messages and come first.

    Raises SkippedRow if it has tools or images.
    """
    entries = row.get("conversations") if row.get("conversations") is not None else row.get("messages")
    if not isinstance(entries, list):
        raise InputError(f"{where}: no conversation; expected conversations (ShareGPT) or messages (OpenAI)")
    messages = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise InputError(f"{where}: a message is not a JSON object")
        role, content = entry.get("from", entry.get("role")), entry.get("value", entry.get("content"))
        if role in TOOL_ROLES or entry.get("tool_calls") or entry.get("function_call"):
            raise SkippedRow("with tools")
        try:
            content_fields = content_of(content if isinstance(content, list) else [content])
        except InputError:
            raise SkippedRow("with images or other content that is not text") from None
        if not isinstance(role, str) or role not in ROLES:
            raise InputError(f"{where}: unknown role {role!r} (known: {', '.join(ROLES)})")
        messages.append({"role": ROLES[role], **content_fields, **reasoning_of(entry)})
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    system_messages = [{"role": "system", "content": system}] if system else []
    return system_messages + [m for m in messages if m["role"] != "system"]
