"""Files of prompts and conversations, in the formats people have them: FastChat, ShareGPT, OpenAI messages.

A file is JSON lines, or one JSON array (as ShareGPT is published). A row holds one of
    {"prompt": "..."}                                                one user turn
    {"turns": ["...", "..."]}                                        user turns (FastChat's question.jsonl)
    {"conversations": [{"from": "human", "value": "..."}, ...]}      ShareGPT
    {"messages": [{"role": "user", "content": "..."}, ...]}          OpenAI

All readers raise InputError if the file cannot be read; the message names the first row that is at fault.
Messages are dictionaries of "role" (system, user or assistant) and "content" (a text).
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from common.errors import InputError
from common.files import HALF, MOST_OF_DATA, check_characters, check_readable, read_lines, read_text

# The names that files give the roles.
ROLES = {
    "system": "system", "developer": "system", "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "assistant": "assistant", "model": "assistant",
}
TOOL_ROLES = ("tool", "function", "observation", "function_call")
SOON = 8 << 20  # bytes that are read and judged in a fraction of a second
ANSWER_KEYS = ("completion", "response", "answer", "output")  # of rows that hold a prompt and its answer


def read_prompts(path: str | Path) -> list[str]:
    """The first user turn of every row."""
    return [turns[0] for turns in read_turns(path)]


def read_turns(path: str | Path) -> list[list[str]]:
    """The user turns of every row."""
    return [[m["content"] for m in messages if m["role"] == "user"] for messages in read_chats(path)]


def read_chats(path: str | Path, say: Callable[[str], None] | None = None) -> list[list[dict]]:
    """The user's messages of every row, after the system message if there is one.

    Rows in which no user speaks, or that hold tools or images, are left out; `say` is told how many. Raises
    InputError if no row is left.
    """
    chats, left_out = [], 0
    for where, row in read_rows(path):
        if "prompt" in row or "turns" in row:
            turns = [row["prompt"]] if "prompt" in row else row["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
                raise InputError(f"{where}: no user turns; prompt is a text, turns a list of them")
            chats.append([{"role": "user", "content": turn} for turn in turns])
            continue
        messages = [m for m in _messages(where, row) or [] if m["role"] != "assistant"]
        if any(m["role"] == "user" for m in messages):
            chats.append(messages)
        else:
            left_out += 1
    if not chats:
        raise InputError(f"{path}: holds no prompts")
    if left_out and say:
        say(f"{path}: {left_out:,} rows are left out: no user speaks, or there are tools or images")
    return chats


def read_questions(path: str | Path) -> list[dict]:
    """FastChat's questions: {"question_id", "category", "turns"}.

    A row without an id gets its number, counted from 0; a row without a category gets "". Raises InputError
    if a row holds no user turn.
    """
    rows, turns = [row for _, row in read_rows(path)], read_turns(path)
    if len(rows) != len(turns):
        raise InputError(f"{path}: {len(rows) - len(turns)} rows hold no question")
    questions = []
    for number, row in enumerate(rows):
        question_id = row.get("question_id")
        if question_id is None:
            question_id = number
        elif not isinstance(question_id, int):
            question_id = str(question_id)
        category = str(row.get("category") or "")
        questions.append({"question_id": question_id, "category": category, "turns": turns[number]})
    return questions


def read_conversations(path: str | Path, say: Callable[[str], None] | None = None) -> list[list[dict]]:
    """The messages of every row: the system message if there is one, the first user turn to the last answer.

    Rows without a user turn and an answer, or with tools or images, are left out; `say` is told how many.
    Raises InputError if no row is left.
    """
    conversations, left_out = [], 0
    for where, row in read_rows(path):
        messages = _messages(where, row) or []
        system = [m for m in messages if m["role"] == "system"]
        talk = messages[len(system) :]
        while talk and talk[0]["role"] != "user":  # ShareGPT has conversations cut in the middle
            talk = talk[1:]
        while talk and talk[-1]["role"] != "assistant":
            talk = talk[:-1]
        if talk:
            conversations.append(system + talk)
        else:
            left_out += 1
    if not conversations:
        raise InputError(
            f"{path}: holds no conversation with an assistant's answer; prompts alone go to --prompts"
        )
    if left_out and say:
        say(f"{path}: {left_out:,} rows are left out: no user turn with an answer, or tools or images")
    return conversations


def read_openings(path: str | Path) -> tuple[str, ...]:
    """The lines of a text file that are not empty. Raises InputError if there are none."""
    openings = tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    if not openings:
        raise InputError(f"{path}: holds no lines")
    return openings


def check_dataset(flag: str, path: str | Path, read: Callable[[str | Path], object]) -> None:
    """Raise InputError, naming the option, unless one of the readers here can read a file.

    Of one of more than SOON bytes, and of a pipe, only that it can be opened is judged.
    """
    check_readable(flag, path)
    if Path(path).is_file() and Path(path).stat().st_size <= SOON:
        try:
            read(path)
        except InputError as e:
            raise InputError(f"{flag} {e}") from None


def row_texts(where: str, row: dict) -> list[str]:
    """Every text of a row, whoever says it: "text", the messages, or a prompt and its answer.

    where: what to call the row in an error. Raises InputError if the row holds none of these.
    """
    if isinstance(row.get("text"), str):
        return [row["text"]]
    is_conversation = row.get("messages") is not None or row.get("conversations") is not None
    if not is_conversation and ("prompt" in row or "turns" in row):
        prompts = [row["prompt"]] if "prompt" in row else row["turns"]
        texts = [*(prompts if isinstance(prompts, list) else []), *map(row.get, ANSWER_KEYS)]
        return [text for text in texts if isinstance(text, str)]
    return [m["content"] for m in _messages(where, row) or []]


def read_rows(path: str | Path) -> Iterator[tuple[str, dict]]:
    """Yield (what to call the row in an error, row). Raises InputError if a row is no JSON object."""
    lines = enumerate(read_lines(path), 1)  # not splitlines: U+2028 may stand in a text
    number, first = next(((i, line) for i, line in lines if line.strip()), (1, ""))
    if first.lstrip().startswith("["):
        try:
            entries = json.loads("\n".join(_whole(path, chain([first], (line for _, line in lines)))))
            rows = [(f"{path}: entry {i}", row) for i, row in enumerate(entries, 1)]
            check_characters(entries, str(path))
        except (ValueError, RecursionError) as e:
            raise InputError(f"{path}: begins like a JSON array and is none ({e})") from None
    else:
        lines = chain([(number, first)], lines)
        rows = ((f"{path}: line {i}", line) for i, line in lines if line.strip())
    for where, row in rows:
        if isinstance(row, str):
            spelled = HALF.search(row)
            try:
                row = json.loads(row)
            except (ValueError, RecursionError):
                raise InputError(f"{where} is no JSON object") from None
            if spelled:
                check_characters(row, where)
        if not isinstance(row, dict):
            raise InputError(f"{where} is no JSON object")
        yield where, row


def _whole(path: str | Path, lines: Iterable[str]) -> Iterator[str]:
    """The lines of a file that is read as a whole. Raises InputError if it is too long for that."""
    size = 0
    for line in lines:
        size += len(line) + 1
        if size > MOST_OF_DATA:
            raise InputError(f"{path}: is one JSON array of more than {MOST_OF_DATA:,} bytes; use JSON lines")
        yield line


def _messages(where: str, row: dict) -> list[dict] | None:
    """The messages of a row, its system messages joined in front; None if it holds tools or images."""
    entries = row.get("conversations") if row.get("conversations") is not None else row.get("messages")
    if not isinstance(entries, list):
        raise InputError(
            f"{where}: no conversation; a row needs conversations (ShareGPT) or messages (OpenAI)"
        )
    messages = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise InputError(f"{where}: a message is no JSON object")
        role, content = entry.get("from", entry.get("role")), entry.get("value", entry.get("content"))
        if isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") == "text" for part in content
        ):
            content = "".join(str(part.get("text", "")) for part in content)  # OpenAI's list of parts
        if role in TOOL_ROLES or not isinstance(content, str):
            return None
        if not isinstance(role, str) or role not in ROLES:
            raise InputError(f"{where}: unknown role {role!r} (known: {', '.join(ROLES)})")
        messages.append({"role": ROLES[role], "content": content})
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    return [{"role": "system", "content": system}] * bool(system) + [
        m for m in messages if m["role"] != "system"
    ]
