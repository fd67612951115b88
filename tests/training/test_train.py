"""train.py as a user runs it, on the golden target: heads learn, text is collected, folders are written."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.training import log_of, loss_on, options
from safetensors.torch import load_file, save_file

import train
from checkpoint.calibration import Calibration
from checkpoint.convert import convert
from checkpoint.loading import load_head, load_model
from engine.engine import Engine
from sampling.options import Sampling
from training import data
from training.heads import KINDS, HeadShape, new_head
from training.validate import drafter_of
from tree import TreeShape

pytestmark = pytest.mark.slow


def last_line(capsys) -> str:
    return capsys.readouterr().err.splitlines()[-1]


@torch.no_grad()
def quality(target, kind: str, head, rows: list[dict]) -> tuple[float, float]:
    """Loss and number of right first choices of a head on rows, as it drafts."""
    loss, hits, *_ = loss_on(KINDS[kind].objective(target, head, 4), rows=rows)
    return float(loss), float(hits.sum())


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.dear] * (k != "eagle3")) for k in KINDS])
def test_heads_learn_are_exported_and_decode(golden, trained, tmp_path, kind):
    """Better than an untrained head on held-out text; what comes back drafts the plain text."""
    argv, folder = trained(kind)
    log = log_of(folder)
    assert sum("held_out" in row and row["tau"] >= 1 for row in log) == 6
    target, _ = load_model(golden)
    converted = convert(folder / "head", tmp_path / "converted", target=golden, quiet=True)
    head = load_head(converted, target, kind)
    shape = {"num_layers": head.args.num_layers, "states": 3 if kind == "dspark" else None}
    shape |= {name: getattr(head.args, name, None) for name in ("drafts", "markov_rank")}
    untrained = new_head(target, kind, head.draft_ids, HeadShape(**shape), 0)
    paths = data.shards_in(folder / "head-work" / "data")
    rows, *_ = data.rows_of(data.read_shards(paths, 320, target_of(folder)), 200)
    (loss, right), (control, guessed) = (
        quality(target, kind, x, data.hold_out(rows)[0]) for x in (head, untrained)
    )
    assert loss < 0.95 * control and right >= guessed
    drafter, prompt = drafter_of(head, TreeShape(16, 3, 4)), list(b"u:question 3\na:")
    texts = [
        Engine(target, x, compile=False, max_seq_len=200).generate([prompt], Sampling(60))[0].ids
        for x in (None, drafter)
    ]
    assert texts[0] == texts[1]
    files = sorted(p.name for p in (folder / "head").iterdir())
    assert files == ["README.md", "calibration.json", "config.json", "curves.png", "model.safetensors"]
    card = (folder / "head" / "README.md").read_text()
    assert card.startswith(f"# {KINDS[kind].title}") and "answers" in card and "- epoch 6: held-out" in card
    assert f"python train.py {' '.join(argv)}" in card and Calibration.read(converted) is not None


def target_of(folder: Path) -> str:
    """The identity of the target that the shards of a run name."""
    path = data.shards_in(folder / "head-work" / "data")[0]
    return json.loads(path.read_text().splitlines()[0])["target"]


def test_a_run_is_a_run_of_its_settings_data_and_target(golden, trained, tmp_path, capsys):
    argv, folder = trained("eagle3")
    shutil.copytree(folder, tmp_path / "run")
    argv = [word.replace(str(folder), str(tmp_path / "run")) for word in argv]
    head, work = tmp_path / "run" / "head", tmp_path / "run" / "head-work"
    assert {len(row["accuracy"]) for row in log_of(folder) if "loss" in row} == {3, 4}  # of short epochs
    assert {len(row["held_out"]) for row in log_of(folder) if "held_out" in row} == {4}
    before = (head / "model.safetensors").read_bytes()
    (head / "LICENSE").write_text("mine")
    assert train.main(argv) == 0  # nothing is left to do
    assert (head / "LICENSE").read_text() == "mine" and (head / "model.safetensors").read_bytes() == before
    assert train.main([*argv, "--steps", "2"]) == 1
    assert "other settings or data (steps)" in last_line(capsys)
    tuned = shutil.copytree(golden, tmp_path / "tuned")  # a fine-tune differs in its inner weights only
    state = load_file(tuned / "model.safetensors")
    state["layers.3.mlp.w_down.weight"] *= 1.1
    save_file(state, tuned / "model.safetensors")
    assert train.main([*argv, "--checkpoint", str(tuned)]) == 1
    assert "target); use another --out" in last_line(capsys)
    assert train.main([*argv, "--checkpoint", str(tuned), "--shards", str(work / "data")]) == 1
    assert "was written by another target" in last_line(capsys)
    (work / "state.pt").unlink()
    assert train.main(argv) == 1
    assert "holds files that no run with its state in" in last_line(capsys)


def test_all_kinds_of_text_are_mixed(golden, prompt_file, tmp_path, capsys):
    answer = {"from": "gpt", "value": "good day to you"}
    rows = [{"conversations": [{"from": "human", "value": f"hello {i}"}, answer]} for i in range(9)]
    (tmp_path / "share.json").write_text(json.dumps(rows))
    (tmp_path / "openings.txt").write_text("Write \n\nSum\n")
    target = shutil.copytree(golden, tmp_path / "target")  # one that ends its turns with a line
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"stop_ids": [ord("\n")]}))
    text = {
        "conversations": tmp_path / "share.json", "openings": tmp_path / "openings.txt",
        "synthesize": 24,
    }
    assert train.main([*options(target, prompt_file, tmp_path, **text), "--collect-only"]) == 0
    text = {"shards": tmp_path / "head-work" / "data", "synthesize": 0}
    assert train.main([*options(target, None, tmp_path / "again", **text), "--collect-only"]) == 0
    first, again = (line for line in capsys.readouterr().err.splitlines() if " conversations (" in line)
    assert all(f"{source} " in first for source in ("prompts", "synthesized", "conversations"))
    assert first.split(" ")[0] == again.split(" ")[0]  # the same text, read back
