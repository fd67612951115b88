"""Files of prompts and conversations, in the formats people have them: FastChat, ShareGPT, OpenAI messages.

JSON lines, or one JSON array (as ShareGPT itself is published). A row holds one of
    {"prompt": "..."}                                                one user turn
    {"turns": ["...", "..."]}                                        user turns (FastChat's question.jsonl)
    {"conversations": [{"from": "human", "value": "..."}, ...]}      ShareGPT
    {"messages": [{"role": "user", "content": "..."}, ...]}          OpenAI
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from common.errors import InputError

ROLES = {
    "system": "system", "developer": "system", "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "assistant": "assistant", "model": "assistant",
}


def read_prompts(path: str | Path) -> list[str]:
    """The first user turn of every row. Raises InputError naming the first row that has none."""
    return [turns[0] for turns in read_turns(path)]


def read_turns(path: str | Path) -> list[list[str]]:
    """The user turns of every row. Raises InputError naming the first row that is none."""
    return [[m["content"] for m in messages if m["role"] == "user"] for messages in read_chats(path)]


def _count(path: str | Path, left_out: int, why: str, say: Callable[[str], None] | None) -> None:
    if left_out and say:
        say(f"{path}: {left_out:,} rows are left out: {why}")


def read_chats(path: str | Path, say: Callable[[str], None] | None = None) -> list[list[dict]]:
    """The user's messages of every row, and the system message before them if there is one; conversations in
    which no user speaks, or that hold tools or images, are left out, and `say` is told how many.

    Raises InputError naming the first row that is no prompt, and if there is none at all.
    """
    found, left_out = [], 0
    for where, row in read_rows(path):
        if "prompt" in row or "turns" in row:
            turns = [row["prompt"]] if "prompt" in row else row["turns"]
            if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
                raise InputError(f"{where}: no user turns; prompt is a text, turns a list of them")
            found.append([{"role": "user", "content": turn} for turn in turns])
            continue
        messages = [m for m in _messages(where, row) or [] if m["role"] != "assistant"]
        if any(m["role"] == "user" for m in messages):
            found.append(messages)
        else:
            left_out += 1
    if not found:
        raise InputError(f"{path}: holds no prompts")
    _count(path, left_out, "no user speaks, or there are tools or images", say)
    return found


def read_questions(path: str | Path) -> list[dict]:
    """FastChat questions: {"question_id", "category", "turns"}; what a row lacks is its number, "" and its
    user turns.
    """
    given, turns = [row for _, row in read_rows(path)], read_turns(path)
    if len(given) != len(turns):
        raise InputError(f"{path}: {len(given) - len(turns)} rows hold no question")
    return [
        {
            "question_id": _id(row.get("question_id"), i), "category": str(row.get("category") or ""),
            "turns": asked
        }
        for i, (row, asked) in enumerate(zip(given, turns))
    ]


def _id(given, number: int) -> int | str:
    return number if given is None else given if isinstance(given, int) else str(given)


def read_conversations(path: str | Path, say: Callable[[str], None] | None = None) -> list[list[dict]]:
    """The messages ({"role": system | user | assistant, "content"}) of every row, from the first user turn to
    the last answer; rows without both, or with tools or images, are left out, and `say` is told how many.

    Raises InputError naming the first row that is no conversation, and if there is none at all.
    """
    found, left_out = [], 0
    for where, row in read_rows(path):
        messages = _messages(where, row) or []
        system, rest = (
            messages[:1], messages[1:]
        ) if messages and messages[0]["role"] == "system" else ([], messages)
        while rest and rest[0]["role"] != "user":  # ShareGPT has conversations cut in the middle
            rest = rest[1:]
        while rest and rest[-1]["role"] != "assistant":
            rest = rest[:-1]
        if rest:
            found.append(system + rest)
        else:
            left_out += 1
    if not found:
        raise InputError(
            f"{path}: holds no conversation with an assistant's answer; prompts alone go to --prompts"
        )
    _count(path, left_out, "no user turn with an answer, or tools or images", say)
    return found


def _messages(where: str, row: dict) -> list[dict] | None:
    """The messages of a row, system messages joined in front; None if it holds what is no plain talk: tools,
    images.
    """
    given = row.get("conversations") if row.get("conversations") is not None else row.get("messages")
    if not isinstance(given, list):
        raise InputError(
            f"{where}: no conversation; a row needs conversations (ShareGPT) or messages (OpenAI)"
        )
    messages = []
    for m in given:
        if not isinstance(m, dict):
            raise InputError(f"{where}: a message is no JSON object")
        role, content = m.get("from", m.get("role")), m.get("value", m.get("content"))
        if isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") == "text" for part in content
        ):
            content = "".join(str(part.get("text", "")) for part in content)  # OpenAI's list of parts
        if role in ("tool", "function", "observation", "function_call") or not isinstance(content, str):
            return None
        if not isinstance(role, str) or role not in ROLES:
            raise InputError(f"{where}: unknown role {role!r} (known: {', '.join(ROLES)})")
        messages.append({"role": ROLES[role], "content": content})
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    return [{"role": "system", "content": system}] * bool(system) + [
        m for m in messages if m["role"] != "system"
    ]


def spoken(where: str, row: dict) -> list[str]:
    """Every text of a row, whoever says it: "text", the messages, or a prompt and what answers it. `where` is
    for errors.
    """
    if isinstance(row.get("text"), str):
        return [row["text"]]
    if row.get("messages") is None and row.get("conversations") is None and (
        "prompt" in row or "turns" in row
    ):
        given = [row["prompt"]] if "prompt" in row else row["turns"]
        given = (given if isinstance(given, list) else []) + [
            row.get(name) for name in ("completion", "response", "answer", "output")
        ]
        return [text for text in given if isinstance(text, str)]
    return [m["content"] for m in _messages(where, row) or []]


def read_rows(path: str | Path) -> Iterator[tuple[str, dict]]:
    """(what to call it in an error, row) of every row. Raises InputError if the file cannot be read or a row
    is no object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{path}: cannot be read ({e})") from None
    if text.lstrip().startswith("["):
        try:
            rows = [(f"{path}: entry {i}", row) for i, row in enumerate(json.loads(text), 1)]
        except (ValueError, RecursionError) as e:
            raise InputError(f"{path}: begins like a JSON array and is none ({e})") from None
    else:
        lines = text.split("\n")  # not splitlines: U+2028 may stand in a text
        rows = ((f"{path}: line {i}", line) for i, line in enumerate(lines, 1) if line.strip())
    for where, row in rows:
        if isinstance(row, str):
            try:
                row = json.loads(row)
            except (ValueError, RecursionError):
                raise InputError(f"{where} is no JSON object") from None
        if not isinstance(row, dict):
            raise InputError(f"{where} is no JSON object")
        yield where, row
