"""Files of prompts and conversations: every format is read, every mistake is named."""
from __future__ import annotations

import json

import pytest

from common.errors import InputError
from tokens import dataset
from tokens.dataset import read_chats, read_conversations, read_prompts, read_questions, read_turns


def test_prompt_files_of_every_kind(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"turns": ["a", "b"]}\n{"prompt": "c\\u2028d"}\n\n'
        '{"conversations": [{"from": "human", "value": "e"}, {"from": "gpt", "value": "x"},'
        ' {"from": "human", "value": "g"}]}\n'
        '{"messages": [{"role": "system", "content": "s"},'
        ' {"role": "user", "content": [{"type": "text", "text": "f"}]}]}\n'
    )
    assert read_turns(file) == [["a", "b"], ["c\u2028d"], ["e", "g"], ["f"]]
    assert read_prompts(file) == ["a", "c\u2028d", "e", "f"]
    file.write_text('[{"prompt": "a"},\n {"prompt": "b"}]')
    assert read_prompts(file) == ["a", "b"]
    for bad, words in (
        ("{}\n", "line 1"), ('{"turns": ["a"]}\n{"turns": [3]}\n', "line 2: no user turns"),
        ('{"prompt": 3}', "line 1: no user turns"), ('{"turns": []}', "line 1: no user turns"),
        ("x\n", "line 1 is no JSON object"), ("", "no prompts"), ("[1]", "entry 1 is no JSON object"),
        ('{"messages": ["hello"]}', "line 1: a message is no JSON object"),
        ('[{"prompt": "a"}', "JSON array"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "unknown role 'robot'"),
        ('{"text": "just a text"}', "line 1"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "unknown role"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "no prompts"),
        ('{"prompt": ' + "9" * 5000 + "}", "line 1"),
        ('{"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}]}', "no prompts"),
    ):
        file.write_text(bad)
        with pytest.raises(InputError, match=words):
            read_prompts(file)


def test_conversation_files(tmp_path):
    file = tmp_path / "c.json"
    share = [
        {"id": "1", "conversations": [
            {"from": "gpt", "value": "cut"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "r"},
        ]},
        {"id": "2", "conversations": [{"from": "human", "value": "unanswered"}]},
        {"id": "3", "conversations": [
            {"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "r"},
            {"from": "human", "value": "t"},
        ]},
    ]
    file.write_text(json.dumps(share))
    roles = [[m["role"] for m in messages] for messages in read_conversations(file)]
    assert roles == [["user", "assistant"], ["system", "user", "assistant"]]
    unanswered = json.dumps(share[1])
    for bad, words in (
        ('{"prompt": "a"}', "no conversation"), (unanswered, "no conversation with an"),
        ("", "no conversation with")
    ):
        file.write_text(bad)
        with pytest.raises(InputError, match=words):
            read_conversations(file)


def test_rows_without_talk_are_left_out_and_counted(tmp_path):
    file, lines = tmp_path / "c.jsonl", []
    file.write_text(
        '{"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}]}\n'
        '{"messages": [{"role": "assistant", "content": "z"}]}\n'
        '{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "q"},'
        ' {"role": "developer", "content": "b"}, {"role": "assistant", "content": "r"}]}\n'
    )
    system, question = {"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "q"}
    assert read_chats(file, lines.append) == [[system, question]]
    answer = {"role": "assistant", "content": "r"}
    assert read_conversations(file, lines.append) == [[system, question, answer]]
    assert lines == [
        f"{file}: 2 rows are left out: no user speaks, or there are tools or images",
        f"{file}: 2 rows are left out: no user turn with an answer, or tools or images",
    ]


def test_questions_get_an_id_and_a_category(tmp_path):
    file = tmp_path / "question.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]}, {"prompt": "c"},
        {"question_id": 2.5, "prompt": "d"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_questions(file) == [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 1, "category": "", "turns": ["c"]},
        {"question_id": "2.5", "category": "", "turns": ["d"]},
    ]
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "assistant", "content": "b"}]}')
    with pytest.raises(InputError, match="1 rows hold no question"):
        read_questions(file)


def test_all_texts_of_a_row():
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    for row, texts in (
        ({"text": "t", "prompt": "p"}, ["t"]),
        ({"prompt": "p", "completion": "c", "output": "o", "answer": 7}, ["p", "c", "o"]),
        ({"turns": ["a", 1, "b"], "response": "r"}, ["a", "b", "r"]),
        ({"turns": "no list", "response": "r"}, ["r"]),
        ({"prompt": "p", "conversations": talk}, ["a", "b"]),
        ({"messages": [{"role": "tool", "content": "x"}]}, []),
    ):
        assert dataset.row_texts("row", row) == texts
    with pytest.raises(InputError, match="row: no conversation"):
        dataset.row_texts("row", {"title": "x"})


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\xff")
    for file in (tmp_path / "none.jsonl", tmp_path, tmp_path / "binary.jsonl"):
        with pytest.raises(InputError, match=r"cannot be read|no such file|is a folder"):
            list(dataset.read_rows(file))
