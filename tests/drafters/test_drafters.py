"""A new way to draft is a file and a line: generate.py and evaluate.py know it without another change."""
import json

import pytest
from safetensors.torch import load_file

import evaluate
import generate
from drafters import METHODS, Flag, Method

MINE = '''
import torch
from drafters.base import Drafter, Proposal, StaticTree
from tree import chains

class Again(Drafter):
    """The last tokens, said again."""
    def __init__(self, length):
        super().__init__(chains((length,)))
        self.static, self.length = StaticTree(self.shape), length
    def propose(self, state, slots, noise):
        back = (state.length[:, None] - self.length + torch.arange(self.length + 1)).clamp(min=0)
        last = state.tokens.gather(1, back)
        return Proposal(self.static.of(torch.cat((state.root()[:, None], last[:, 1:]), 1)))

def build(request):
    request.refuse(draft=request.draft, tree=request.tree)
    return Again(request.flags["again-length"])
'''


def test_traces_and_labels_of_trees_that_are_no_eagles(golden, tmp_path, capsys):
    common = [
        "--checkpoint", str(golden), "--no-compile", "--max-new-tokens", "12", "--prompt", "abcabcabc",
        "--json"
    ]
    for method, options in (("lookup", []), ("lookahead", ["--window", "2", "--level", "3"]), ("none", [])):
        assert generate.main(
            [*common, "--speculate", method, *options, "--trace", str(tmp_path / method)]
        ) == 0
        trace = load_file(tmp_path / method)
        assert trace["000.draft_tokens"].shape == trace["000.depth"].shape
        said = json.loads(capsys.readouterr().out)
        assert said["accept"] == "equal"
    assert generate.main([*common, "--speculate", "lookahead", "--level", "100000"]) == 1
    assert "must be 3 to 1,024" in capsys.readouterr().err


@pytest.mark.slow
def test_a_file_and_a_line(golden, tmp_path, monkeypatch, capsys):
    (tmp_path / "again_drafter.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"again-length": Flag(3, "how many")}
    monkeypatch.setitem(METHODS, "again", Method("again_drafter", "the last tokens again", own))
    common = [
        "--checkpoint", str(golden), "--no-compile", "--max-new-tokens", "40", "--speculate", "again",
        "--again-length", "2"
    ]
    for temperature in ("0", "1"):
        options = ["--prompt", "abcabc", "--compare", "--json", "--temperature", temperature, "--seed", "3"]
        assert generate.main([*common, *options]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["equal"] and said["tokens"] == 40 and 1 <= said["tau"] <= 3
        assert all(1 <= n <= 3 for n in said["accept_lengths"])
    assert generate.main([*common, "--prompt", "abc", "--draft", str(golden)]) == 1
    assert "--speculate again: has no use for --draft" in capsys.readouterr().err
    out = tmp_path / "out"
    assert evaluate.main(
        [
            *common[:-4], "--speculate", "again,lookup", "--again-length", "2", "--out", str(out), "--limit",
            "1"
        ]
    ) == 0
    rows = json.loads((out / "table.json").read_text())
    assert {row["method"] for row in rows} == {"none", "again", "lookup"} and all(
        row["errors"] == 0 for row in rows
    )
