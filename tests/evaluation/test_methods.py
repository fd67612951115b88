"""Question sets, their order, and the methods that answer them."""
from argparse import Namespace

import pytest

from common.errors import InputError
from drafters import Drafting
from evaluate import parser
from evaluation.answers import read_sets
from evaluation.methods import read_draftings
from evaluation.session import Evaluation
from tree import TreeShape


def test_each_method_begins_as_often():
    sets = read_sets(None, None)  # our questions
    o = Namespace(temperature=[0.0, 1.0])
    run = Namespace(sets={k: v[:3] for k, v in sets.items()}, o=o, contenders={"none": 0, "a": 0, "b": 0})
    order = list(Evaluation._rounds(run))
    assert len(order) == 36 and {name for name, *_ in order[:12]} == set(sets)
    for cell in {(name, temperature) for name, _, temperature, _ in order}:
        rounds_here = [methods for name, _, temperature, methods in order if (name, temperature) == cell]
        assert rounds_here == [["none", "a", "b"], ["a", "b", "none"], ["b", "none", "a"]]


def test_sets_are_named_by_file_or_folder(tmp_path):
    for name in ("gsm8k", "qa"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "question.jsonl").write_text('{"turns": ["what is 3?"]}\n')
    assert [*read_sets(tmp_path, None)] == ["gsm8k", "qa"]
    assert [*read_sets(tmp_path / "qa" / "question.jsonl", None)] == ["qa"]
    for taken in ("qa", "mean", ".hidden"):
        file = tmp_path / f"{taken}.jsonl"
        file.write_text('{"turns": ["what is 4?"]}\n')
        with pytest.raises(InputError, match=f"cannot be named {taken}"):
            read_sets(tmp_path, None)
        file.unlink()


def test_options_reach_the_methods_that_take_them():
    line = "--checkpoint x --out x --speculate eagle3,draft-model,lookahead --draft draft-model=DIR"
    line += " --tree eagle3=8,2,4 --accept draft-model=residual --draft-window 64 --level 3"
    o = parser().parse_args(line.split(" "))
    assert read_draftings(o, ["none", "eagle3", "draft-model", "lookahead"]) == {
        "none": Drafting(), "eagle3": Drafting("eagle3", tree=TreeShape(8, 2, 4), window=64),
        "draft-model+residual": Drafting("draft-model", "DIR", accept="residual"),
        "lookahead": Drafting("lookahead", flags={"level": 3}),
    }
    with pytest.raises(InputError, match="--level belongs to --speculate lookahead"):
        read_draftings(o, ["eagle3", "draft-model"])
