"""Rows that several texts share: what is counted, and the command."""
import json

import dealt_rows
import torch


def test_the_surest_text_gets_more_rows():
    """One text's candidates are all right and likely, the other's all wrong and less so."""
    sure = [(torch.tensor([-0.1, -0.2, -0.3]), torch.tensor([True, True, True]))]
    lost = [(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([False, False, False]))]
    taus = dealt_rows.accepted([sure, lost], together=2, draws=5, size=3)
    assert taus == {1: (1.5, 2.0), 2: (2.0, 2.5), 3: (2.5, 2.5)}


def test_command(golden, tmp_path, results, capsys):
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"Say it {n} times. "]}) + "\n" for n in range(4)))
    options = ["--checkpoint", str(golden), "--questions", str(file), "--threads", "1", "--draws", "50"]
    assert dealt_rows.main([*options, "--texts", "2", "--max-new-tokens", "24"]) == 0
    rows = json.loads((results / "dealt-rows.json").read_text())["rows"]
    assert [row["levels"] for row in rows] == [1, 2, 3] * 2
    assert all(1 <= tau <= 4 for row in rows for pair in row["tau"].values() for tau in pair)
    assert dealt_rows.main([*options, "--texts", "9", "--max-new-tokens", "24"]) == 1
    assert "--texts 9" in capsys.readouterr().err
