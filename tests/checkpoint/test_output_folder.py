"""Where a conversion writes: what it replaces and keeps, and what it leaves behind after trouble."""
import errno
import os
import shutil
import time

import pytest
import torch
from helpers.converting import run
from helpers.refusals import refused
from helpers.sources import HEAD_CONFIG, head_state, target_state, write_source

from checkpoint import writer
from checkpoint.convert import convert, converted_folder
from checkpoint.load import load_model, read_config
from common import files


def test_force_replaces_and_keeps_the_head(tmp_path, target, capsys):
    convert(write_source(tmp_path / "head", head_state(), HEAD_CONFIG), target=target, quiet=True)
    head = (target / "eagle3" / "model.safetensors").read_bytes()
    (target / "stale").write_text("from the earlier conversion")
    source = tmp_path / "target-source"
    code, err = run(capsys, "--checkpoint", source, "--out", target)
    assert code == 1 and len(err) == 1 and "--force" in err[0] and (target / "stale").exists()
    assert run(capsys, "--checkpoint", source, "--out", target, "--force", "--dtype", "bf16")[0] == 0
    assert load_model(target)[0].embed.dtype == torch.bfloat16
    assert (target / "eagle3" / "model.safetensors").read_bytes() == head and not (target / "stale").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "target", "target-source"]


def test_force_replaces_nothing_but_ours(tmp_path, target, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    head = write_source(tmp_path / "head", head_state(), HEAD_CONFIG)
    for argv in (
        ("--checkpoint", tmp_path / "target-source", "--out", tmp_path / "mine"),
        ("--checkpoint", head, "--target", target, "--out", target),
    ):
        code, err = run(capsys, *argv, "--force")
        assert code == 1 and len(err) == 1
    assert (tmp_path / "mine" / "thesis.txt").exists() and load_model(target)


@pytest.mark.parametrize("trouble, expected, status", [
    (OSError(errno.ENOSPC, "No space left on device"), "No space left", 1),
    (KeyboardInterrupt(), "interrupted", 130),
])
def test_trouble_while_writing(tmp_path, capsys, monkeypatch, trouble, expected, status):
    source, folders = write_source(tmp_path / "in", target_state()), []

    def cast(name, block, dtype):
        folders.append([p.name for p in tmp_path.iterdir() if p.name != "in"])
        if len(folders) == 5:
            raise trouble
        return block

    monkeypatch.setattr(writer, "_cast", cast)
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out")
    assert code == status and len(err) == 1 and expected in err[0]
    assert len(folders) >= 5  # tensors are cast in parallel
    assert len(folders[0]) == 1 and folders[0] != ["out"]  # a temporary one
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_source_is_converted_when_it_is_used(tmp_path, monkeypatch):
    """Once, and again when the source has changed; another source of that name is refused."""
    notes = []
    source = write_source(tmp_path / "model", target_state())
    other = write_source(tmp_path / "other" / "model", target_state())
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert converted_folder(str(source), notes.append) == "checkpoints/model"
    assert notes == [f"converting {source} into checkpoints/model"]
    assert converted_folder("checkpoints/model", notes.append) == "checkpoints/model"
    later = time.time() + 10
    os.utime(source / "config.json", (later, later))
    assert converted_folder(str(source), notes.append) == "checkpoints/model" and len(notes) == 2
    with refused(f"checkpoints/model: was converted from {source}"):
        converted_folder(str(other), notes.append)


def test_two_starts_convert_at_once(tmp_path, monkeypatch):
    """The other one ends first, after this one has found no folder."""
    source, replace = write_source(tmp_path / "model", target_state()), os.replace
    monkeypatch.chdir(tmp_path)

    def late(part, out):
        if out.name == "model" and not out.exists():
            shutil.copytree(part, out)
        replace(part, out)

    monkeypatch.setattr(files.os, "replace", late)
    assert converted_folder(str(source), print) == "checkpoints/model" and load_model("checkpoints/model")
    assert os.listdir("checkpoints") == ["model"]


def test_a_head_is_converted_into_its_target_when_it_is_used(tmp_path, target, monkeypatch):
    """One of several processes converts nothing; a target is no head."""
    head, notes = write_source(tmp_path / "Mine", head_state(), HEAD_CONFIG), []
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused(f"{head}: not converted yet; run python convert_checkpoint.py --checkpoint {head}"):
        converted_folder(head, notes.append, target)
    monkeypatch.delenv("WORLD_SIZE")
    for _ in range(2):
        assert converted_folder(head, notes.append, target) == str(target / "mine")
    assert len(notes) == 1 and read_config(target / "mine", "eagle3")
    with refused(f"{tmp_path / 'target-source'}: is no draft head"):
        converted_folder(tmp_path / "target-source", notes.append, target)
