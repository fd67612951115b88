"""The export command, and what it refuses. The layouts have their tests with the heads and the training."""
import copy
import dataclasses
import errno
import json
import shutil
from pathlib import Path

import pytest

from checkpoint.export import main
from checkpoint.heads import export
from common.errors import InputError


@pytest.mark.parametrize("flag", ("norm_before_residual", "recycle_normed"))
def test_flags_that_sglang_has_no_place_for(models, tmp_path, flag):
    head = copy.copy(models[1])
    head.args = dataclasses.replace(head.args, **{flag: True})
    with pytest.raises(InputError, match=f"{flag} has no place in the sglang layout"):
        export(head, tmp_path / "out")
    export(head, tmp_path / "out", "speculators")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config[{"recycle_normed": "norm_output"}.get(flag, flag)] is True


def test_the_command(golden, tmp_path, capsys):
    command = ["--head", str(golden / "eagle3"), "--checkpoint", str(golden), "--out", str(tmp_path / "out")]
    assert main(command) == 0 and (tmp_path / "out" / "model.safetensors").is_file()
    capsys.readouterr()
    assert main(command) == 1
    assert capsys.readouterr().err.count("replace it with --force") == 1
    assert main([*command, "--force", "--layout", "speculators"]) == 0


def test_a_full_disk_leaves_nothing(models, tmp_path, monkeypatch):
    def full(self, text):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match="out: no space left on the device"):
        export(models[1], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_else_is_in_the_folder_stays(models, tmp_path):
    """Also where a link leads to it."""
    (tmp_path / "out" / "more").mkdir(parents=True)
    for name in ("LICENSE", "more/text", "config.json"):
        (tmp_path / "out" / name).write_text("theirs")
    (tmp_path / "link").symlink_to("out")
    export(models[1], tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 2
    assert (tmp_path / "out" / "LICENSE").read_text() == (tmp_path / "out/more/text").read_text() == "theirs"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]


def test_a_quantised_head_is_not_exported(golden, tmp_path, capsys):
    head = shutil.copytree(golden / "eagle3", tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    config["quantization"] = {"mode": "int8", "group": 0, "lm_head": True}
    (head / "config.json").write_text(json.dumps(config))
    assert main(["--head", str(head), "--checkpoint", str(golden), "--out", str(tmp_path / "out")]) == 1
    assert "name the checkpoint before quantisation" in capsys.readouterr().err
