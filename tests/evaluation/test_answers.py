"""Question sets, the methods that answer, and what the folder of answers forgets and refuses."""

from helpers.refusals import refused

from common.writing import digest
from engine.drafting import Drafting
from evaluate import parser
from evaluation.answers import Answer, AnswerStore, Turn, read_sets
from evaluation.methods import read_draftings
from tree import TreeShape


def answer(question: dict, method: str) -> Answer:
    turns = [Turn([1], [2, 3], "text", "length", 0.1, 0.2, [1])]
    asked = digest(question["turns"], method)
    return Answer("set", question["question_id"], "", method, 0.0, 0, asked, turns)


def test_answers_outlive_the_book_and_are_forgotten_together(tmp_path):
    (tmp_path / ".options.json.1.partial").touch()  # of a run that was killed at its first write
    one, two = ({"question_id": i, "turns": [f"what is {i}?"]} for i in (1, 2))
    store = AnswerStore(tmp_path, {"seed": 0})
    for question in (one, two):
        for method in ("none", "eagle3"):
            store.add(answer(question, method))
    again = AnswerStore(tmp_path, {"seed": 0})
    assert again.answers == store.answers
    assert again.find("set", one, "eagle3", 0.0, "eagle3") == answer(one, "eagle3")
    assert not again.find("set", one, "eagle3", 0.0, "another head")
    assert not again.find("set", {**one, "turns": ["another question"]}, "eagle3", 0.0, "eagle3")
    again.forget("set", one, 0.0)
    assert {a.question for a in again.answers.values()} == {2}
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


def test_sets_are_named_by_file_or_folder(tmp_path):
    for name in ("gsm8k", "qa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "question.jsonl").write_text('{"turns": ["what is 3?"]}\n')
    assert [*read_sets(tmp_path, None)] == ["gsm8k", "qa"]
    assert [*read_sets(tmp_path / "qa" / "question.jsonl", None)] == ["qa"]
    said: list[str] = []
    assert [*read_sets(None, 2, "mt_bench,code", said.append)] == ["writing", "code"] and len(said) == 1
    (tmp_path / "qa.jsonl").write_text('{"turns": ["what is 4?"]}\n')
    with refused(f"{tmp_path / 'qa.jsonl'}: a set cannot be named qa"):
        read_sets(tmp_path, None)


def test_options_reach_the_methods_that_take_them():
    line = "--checkpoint x --out x --speculate eagle3,draft-model,lookahead --draft draft-model=DIR"
    line += " --tree eagle3=8,2,4 --draft-window 64 --level 3"
    o = parser().parse_args(line.split(" "))
    assert read_draftings(o, ["none", "eagle3", "draft-model", "lookahead"]) == {
        "none": Drafting(), "eagle3": Drafting("eagle3", tree=TreeShape(8, 2, 4), window=64),
        "draft-model": Drafting("draft-model", "DIR"),
        "lookahead": Drafting("lookahead", flags={"level": 3}),
    }
    with refused("--level belongs to --speculate lookahead"):
        read_draftings(o, ["eagle3", "draft-model"])
