"""Question sets, their order, and the methods that answer them."""
import pytest

from common.errors import InputError
from evaluation.asking import rotated, rounds
from evaluation.methods import read_draftings
from evaluation.sets import read_sets
from evaluation.settings import by_method
from tree import TreeShape


def test_our_questions_are_complete():
    sets = read_sets(None, None)
    assert set(sets) == {"writing", "code", "math", "summary", "translation", "qa"}
    assert all(len(questions) == 8 for questions in sets.values())
    ids = [q["question_id"] for questions in sets.values() for q in questions]
    assert len(set(ids)) == 48 and any(len(q["turns"]) > 1 for questions in sets.values() for q in questions)
    order = list(rounds({k: v[:3] for k, v in sets.items()}, [0.0, 1.0], ["none", "a", "b"]))
    assert len(order) == 36 and {name for name, *_ in order[:12]} == set(sets)
    # In each cell of the table every method begins once.
    for cell in {(name, temperature) for name, _, temperature, _ in order}:
        first = [methods[0] for name, _, temperature, methods in order if (name, temperature) == cell]
        assert sorted(first) == ["a", "b", "none"]


def test_every_item_begins_in_turn():
    assert [rotated([1, 2, 3], i) for i in range(4)] == [[1, 2, 3], [2, 3, 1], [3, 1, 2], [1, 2, 3]]


def test_data_laid_out_in_folders(tmp_path):
    """SET/question.jsonl, the layout of EAGLE and Spec-Bench, is named by its folder, alone too."""
    for name in ("gsm8k", "qa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "question.jsonl").write_text('{"turns": ["what is 3?"]}\n')
    assert [*read_sets(tmp_path, None)] == ["gsm8k", "qa"]
    assert [*read_sets(tmp_path / "qa" / "question.jsonl", None)] == ["qa"]
    (tmp_path / "qa.jsonl").write_text('{"turns": ["what is 4?"]}\n')
    with pytest.raises(InputError, match="qa"):
        read_sets(tmp_path, None)


def test_a_set_may_not_take_the_tables_own_name(tmp_path):
    (tmp_path / "mean.jsonl").write_text('{"turns": ["what is 3?"]}\n')
    with pytest.raises(InputError, match="cannot be named mean"):
        read_sets(tmp_path, None)


def test_a_flag_speaks_of_one_method_once():
    assert by_method("--tree", ["auto"], ["none", "eagle3"]) == {"eagle3": "auto"}
    assert by_method("--tree", ["eagle=paper", "eagle3=auto"], ["eagle3", "eagle"]) == {
        "eagle": "paper", "eagle3": "auto"
    }
    for values, message in (
        (["auto"], "of which method"), (["lookup=auto"], "lookup is none of eagle3, eagle"),
        (["eagle=auto", "eagle=paper"], "eagle is named twice"),
    ):
        with pytest.raises(InputError, match=message):
            by_method("--tree", values, ["eagle3", "eagle"])


def test_draftings_are_named_by_their_rule():
    methods = ["none", "eagle3", "draft-model"]
    draftings = read_draftings(
        methods, ["draft-model=DIR"], ["eagle3=8,2,4"], ["draft-model=residual"],
        {name: {} for name in methods},
    )
    assert [*draftings] == ["none", "eagle3", "draft-model+residual"]
    assert draftings["eagle3"].tree == TreeShape(8, 2, 4)
    assert draftings["draft-model+residual"].draft == "DIR"
    with pytest.raises(InputError, match="--accept eagle3=never: choose from"):
        read_draftings(methods, [], [], ["eagle3=never"], {name: {} for name in methods})
