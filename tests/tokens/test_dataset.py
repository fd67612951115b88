"""Read prompts and conversations in every format. Invalid files: test_invalid_inputs.py."""
from __future__ import annotations

import json

import pytest

from tokens.dataset import read_chats, read_prompts, read_questions, read_turns, row_texts


def chat(*messages: str) -> list[dict]:
    """Return messages from strings "role: content"."""
    return [dict(zip(("role", "content"), message.split(": "))) for message in messages]


SHAREGPT = [{"from": "human", "value": "e"}, {"from": "gpt", "value": "x"}, {"from": "human", "value": "g"}]


def test_every_format_is_read(tmp_path):
    parts, file = [{"type": "text", "text": "f"}], tmp_path / "rows.jsonl"
    first = {"question_id": 81, "category": "writing", "turns": ["a", "b"]}
    file.write_text("\n".join((
        json.dumps(first), '{"prompt": "c\\u2028d"}\n', json.dumps({"conversations": SHAREGPT}),
        json.dumps({"messages": [*chat("system: s"), {"role": "user", "content": parts}]}))))
    turns = [["a", "b"], ["c\u2028d"], ["e", "g"], ["f"]]
    assert read_turns(file) == turns and read_prompts(file) == ["a", "c\u2028d", "e", "f"]
    assert read_chats(file)[3] == chat("system: s", "user: f")
    others = [{"question_id": i, "category": "", "turns": turns[i]} for i in (1, 2, 3)]
    assert read_questions(file) == [first, *others]
    file.write_text('[{"prompt": "a"},\n {"prompt": "b"}]')
    assert read_prompts(file) == ["a", "b"]


@pytest.mark.parametrize("messages, kept, reason", [
    ([{"from": "gpt", "value": "cut"}, *SHAREGPT], chat("user: e", "user: g"), None),
    (chat("system: a", "user: q", "developer: b", "assistant: r"), chat("system: a\n\nb", "user: q"), None),
    (SHAREGPT[1:2], None, "without a user message"), (chat("tool: x", "user: y"), None, "with tools"),
    ([*chat("user: q"), {"role": "assistant", "content": "yes", "tool_calls": []}], chat("user: q"), None),
    *(([*chat("user: q"), {"role": "assistant", **end}], None, reason) for end, reason in (
        ({"content": "I look.", "tool_calls": [{}]}, "with tools"),
        ({"content": None, "function_call": {"name": "f"}}, "with tools"),
        ({"content": 3}, "with images or other content that is not text"),
    )),
])
def test_skipped_rows_are_logged_by_reason(tmp_path, messages, kept, reason):
    lines, file, last = [], tmp_path / "rows.jsonl", chat("user: 1")
    file.write_text(json.dumps({"conversations": messages}) + "\n" + json.dumps({"messages": last}))
    assert read_chats(file, lines.append) == [*([kept] if kept else []), last]
    assert lines == [f"{file}: skipped rows: 1 {reason}"] * bool(reason)


@pytest.mark.parametrize("row, texts", [
    ({"text": "t", "prompt": "p"}, ["t"]),
    ({"prompt": "p", "completion": "c", "output": "o", "answer": 7}, ["p", "c", "o"]),
    ({"turns": ["a", 1, "b"], "response": "r"}, ["a", "b", "r"]),
    ({"prompt": "p", "conversations": SHAREGPT}, ["e", "x", "g"]), ({"messages": chat("tool: x")}, []),
])
def test_row_texts_by_format(row, texts):
    assert row_texts("row", row) == texts
