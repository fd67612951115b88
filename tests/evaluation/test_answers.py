"""The folder of answers: what it forgets and refuses."""
import json

import pytest

from common.errors import InputError
from common.files import digest
from evaluation.answers import Answer, Book, Turn, check_out


def answer(question: dict, method: str) -> Answer:
    turns = [Turn([1], [2, 3], "text", "length", 0.1, 0.2, [1])]
    asked = digest(question["turns"], method)
    return Answer("set", question["question_id"], "", method, 0.0, 0, asked, turns)


def test_answers_outlive_the_book_and_are_forgotten_together(tmp_path):
    one, two = ({"question_id": i, "turns": [f"what is {i}?"]} for i in (1, 2))
    book = Book(tmp_path, {"seed": 0})
    for question in (one, two):
        for method in ("none", "eagle3"):
            book.add(answer(question, method))
    with open(tmp_path / "answers.jsonl", "a") as file:
        file.write('{"set": "set", "quest')  # cut off when a run was killed
    again = Book(tmp_path, {"seed": 0})
    assert again.answers == book.answers
    assert again.find("set", one, "eagle3", 0.0, "eagle3") == answer(one, "eagle3")
    assert not again.find("set", one, "eagle3", 0.0, "another head")
    assert not again.find("set", {**one, "turns": ["another question"]}, "eagle3", 0.0, "eagle3")
    again.forget("set", one, 0.0)
    assert {a.question for a in again.answers.values()} == {2}
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("file, content, message", [
    ("options.json", b"{", "options.json: cannot be read as JSON"),
    ("options.json", b"[1]", "options.json: expected a JSON object, found list; delete it"),
    ("options.json", b'{"seed": 1, "limit": 2}', "other options (limit, seed)"),
    ("answers.jsonl", b"\xff\xfe\n", "answers.jsonl: line 1: cannot be read as JSON"),
    ("answers.jsonl", b"{}\n", "answers.jsonl: line 1: set is missing; expected a value; delete it"),
    ("answers.jsonl", b'{"set": 3}\n', "answers.jsonl: line 1: set is 3; expected a text"),
])
def test_a_folder_that_cannot_be_gone_on_with(tmp_path, file, content, message):
    (tmp_path / "options.json").write_text(json.dumps({"seed": 0}))
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError) as error:
        Book(tmp_path, {"seed": 0})
    assert message in str(error.value) and "choose another --out" in str(error.value)


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / ".options.json.1.partial").touch()  # of a run that was killed at its first write
    check_out(tmp_path, {"seed": 0})
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match="holds something else"):
        check_out(tmp_path, {"seed": 0})
