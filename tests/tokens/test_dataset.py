"""Files of prompts and conversations: every format is read, every mistake is named."""
from __future__ import annotations

import json

import pytest

from common.errors import InputError
from tokens.dataset import read_chats, read_conversations, read_prompts, read_questions, read_turns, row_texts


def said(*messages: str) -> list[dict]:
    """Messages of ("role: content")."""
    return [dict(zip(("role", "content"), message.split(": "))) for message in messages]


@pytest.fixture
def write(tmp_path):
    """Write rows, or a text, to a file, and return its path."""
    def write_rows(*rows: dict | str):
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return file
    return write_rows


TALK = [{"from": "human", "value": "e"}, {"from": "gpt", "value": "x"}, {"from": "human", "value": "g"}]


def test_prompt_files_of_every_kind(write):
    parts = [{"type": "text", "text": "f"}]
    file = write(
        {"turns": ["a", "b"]}, '{"prompt": "c\\u2028d"}\n', {"conversations": TALK},
        {"messages": [*said("system: s"), {"role": "user", "content": parts}]})
    assert read_turns(file) == [["a", "b"], ["c\u2028d"], ["e", "g"], ["f"]]
    assert read_prompts(file) == ["a", "c\u2028d", "e", "f"]
    assert read_prompts(write('[{"prompt": "a"},\n {"prompt": "b"}]')) == ["a", "b"]


@pytest.mark.parametrize("read, row, words", [
    (read_prompts, '{"turns": ["a"]}\n{"turns": [3]}\n', "line 2: no user turns"),
    (read_prompts, "x\n", "line 1: cannot be read as JSON"), (read_prompts, "", "holds no prompts"),
    (read_prompts, '{"messages": [{"role": "robot", "content": "x"}]}', "unknown role 'robot'"),
    (read_prompts, '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "holds no prompts"),
    (read_conversations, '{"prompt": "a"}', "line 1: no conversation"),
    (read_conversations, '{"conversations": [{"from": "human", "value": "x"}]}', "no conversation with an"),
    (read_questions, '{"prompt": "a"}\n{"messages": []}', "no question in 1 row"),
])
def test_mistakes_are_named(write, read, row, words):
    file = write(row)
    with pytest.raises(InputError, match=words):
        read(file)


def test_conversations_end_with_an_answer(write):
    cut = [{"from": "gpt", "value": "cut"}]
    rows = [{"conversations": talk} for talk in (
        cut + TALK[:2], TALK[:1], [{"from": "system", "value": "s"}, *TALK],
    )]
    expected = [said("user: e", "assistant: x"), said("system: s", "user: e", "assistant: x")]
    assert read_conversations(write(json.dumps(rows))) == expected


def test_rows_without_talk_are_left_out_and_counted(write):
    lines, file = [], write(*({"messages": messages} for messages in (
        said("tool: x", "user: y"), said("assistant: z"),
        said("system: a", "user: q", "developer: b", "assistant: r"))))
    asked = said("system: a\n\nb", "user: q")
    assert read_chats(file, lines.append) == [asked]
    assert read_conversations(file, lines.append) == [[*asked, *said("assistant: r")]]
    assert lines == [
        f"{file}: rows that are left out: 1 with tools, 1 without a user's message",
        f"{file}: rows that are left out: 1 with tools, 1 without an answer to a user",
    ]


@pytest.mark.parametrize("end, reason", [
    ({"content": "I look.", "tool_calls": [{}]}, "with tools"),
    ({"content": None, "function_call": {"name": "f"}}, "with tools"),
    ({"content": "no", "weight": 0}, "without an answer to a user"), ({"content": 3}, "with images or other"),
    ({"content": "yes", "weight": 1, "tool_calls": [], "function_call": None}, None),
])
def test_an_answer_that_is_not_to_be_learnt(write, end, reason):
    """A call would be learnt without what is called; an answer of weight 0 is only read."""
    row = {"messages": [*said("user: q"), {"role": "assistant", **end}]}
    lines = []
    kept = read_conversations(write(row, {"conversations": TALK}), lines.append)
    assert len(kept) == (1 if reason else 2)
    assert [f": rows that are left out: 1 {reason}" in line for line in lines] == [True] * bool(reason), lines


@pytest.mark.parametrize("row, texts", [
    ({"text": "t", "prompt": "p"}, ["t"]),
    ({"prompt": "p", "completion": "c", "output": "o", "answer": 7}, ["p", "c", "o"]),
    ({"turns": ["a", 1, "b"], "response": "r"}, ["a", "b", "r"]),
    ({"prompt": "p", "conversations": TALK}, ["e", "x", "g"]),
    ({"messages": said("tool: x")}, []),
])
def test_all_texts_of_a_row(row, texts):
    assert row_texts("row", row) == texts
    with pytest.raises(InputError, match="row: no conversation"):
        row_texts("row", {"title": "x"})
