"""What --speculate auto selects. Its output is tested in tests/engine/test_engine.py."""
import shutil

import pytest
from helpers import edit
from helpers.decoding import load
from safetensors.torch import load_file, save_file

from checkpoint.load import read_config
from common.cli import Options
from common.errors import InputError
from drafters import auto
from drafters.auto import log_unused_heads
from drafters.published import OPENINGS, advice
from engine.drafting import DraftOptions, add_drafting


@pytest.fixture
def folder(golden, tmp_path):
    return shutil.copytree(golden, tmp_path / "target")


@pytest.mark.parametrize("kinds, method, message", (
    (("eagle3", "eagle"), "lookup+eagle3", "with lookup+eagle3"),
    (("eagle",), "lookup+eagle2", "with lookup+eagle2"),
    ((), "lookup", "no usable head in"),
))
def test_auto_uses_the_best_head_in_the_folder(folder, kinds, method, message):
    """Without a head it logs three other options."""
    for kind in {"eagle3", "eagle"} - {*kinds}:
        shutil.rmtree(folder / kind)
    log: list[str] = []
    options = DraftOptions("auto").resolve(folder, log.append)
    assert options.method == method and len(log) == (1 if kinds else 4) and message in log[0]
    count = len(log)
    assert options.resolve(folder, log.append) == options and len(log) == count
    if not kinds:
        assert "none known" in log[1] and "at most a third" in log[2]
        shape = {"num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
        lines = [*advice(folder, read_config(folder) | shape | {"name": "Llama-3.1-8B"})]
        names = "EAGLE3-LLaMA3.1-Instruct-8B", "EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"
        commands = (f"convert_checkpoint.py --checkpoint yuhuili/{name} --target {folder}" for name in names)
        assert len(lines) == 5 and all(line.endswith(x) for line, x in zip(lines[1:], commands))
        assert "--draft meta-llama/Llama-3.2-1B" in lines[3] and str(OPENINGS.name) in lines[4]


def test_draft_implies_auto_and_unused_heads_are_logged(folder):
    """Like llama.cpp's -md, --draft alone enables drafting."""
    p = Options(prog="x.py")
    add_drafting(p)
    assert p.read(["--draft", "other"]).speculate == "auto" and p.read([]).speculate == "none"
    log: list[str] = []
    log_unused_heads(folder, log.append)
    assert log == [f"{folder}: has a head (eagle3 and eagle2) that is not used; to use it: --speculate auto"]


def test_auto_with_draft_uses_that_head_or_model(folder, tmp_path):
    (folder / "eagle").rename(tmp_path / "mine")
    options = DraftOptions("auto", draft=tmp_path / "mine").resolve(folder, lambda line: None)
    assert options.method == "lookup+eagle2" and options.draft == tmp_path / "mine"
    with pytest.raises(InputError, match="no such file"):
        DraftOptions("auto", draft=tmp_path).resolve(folder, lambda line: None)
    options = DraftOptions("auto", draft=folder).resolve(folder, lambda line: None)  # a target
    assert options.method == "lookup+draft-model" and options.draft == folder
    edit(shutil.copytree(folder, tmp_path / "other"), vocab_size=9999)
    with pytest.raises(InputError, match="has a vocabulary of 9,999, the target one of 320"):
        DraftOptions("auto", draft=tmp_path / "other").resolve(folder, print)


def test_auto_uses_the_smallest_model_next_to_the_target(folder, golden, tmp_path, monkeypatch):
    """By the bytes of its weights without the embedding, at most a third of the target's.

    Here it lacks layers, so drafting falls back to prompt lookup.
    """
    for kind in ("eagle", "eagle3"):
        shutil.rmtree(folder / kind)
    tensors = load_file(golden / "model.safetensors")
    lm_head, embedding = tensors["lm_head.weight"], tensors["embed.weight"].repeat(1, 99)
    for name, count in (("small", 8), ("smaller", 4), ("large", 999)):
        (tmp_path / name).mkdir()
        shutil.copy(golden / "config.json", tmp_path / name)
        changed = {"lm_head.weight": lm_head[:count].clone(), "embed.weight": embedding}
        save_file(tensors | changed if name == "large" else changed, tmp_path / name / "model.safetensors")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"format": 2, "kind": "target"}')
    log: list[str] = []
    options = DraftOptions("auto").resolve(folder, log.append)
    assert (options.method, options.draft) == ("lookup+draft-model", tmp_path / "smaller") and len(log) == 1
    assert load(folder, "auto", compile=False, log=log.append).engine.drafter.network is None
    assert any(str(tmp_path / "smaller") in line and "falling back to prompt" in line for line in log), log
    monkeypatch.setattr(auto, "MAX_DRAFT_SIZE", 0.0)
    edit(tmp_path / "smaller", num_layers=1)
    log.clear()
    assert DraftOptions("auto").resolve(folder, log.append).method == "lookup"
    assert f"{tmp_path / 'smaller'} reads " in log[0] and "quantize it with" in log[0]


@pytest.mark.parametrize("file", ("config.json", "model.safetensors"))
def test_auto_skips_a_damaged_head(folder, file):
    """With its method as --speculate it is an error."""
    shutil.rmtree(folder / "eagle")
    (folder / "eagle3" / file).write_bytes(b"{}")
    log: list[str] = []
    llm = load(folder, "auto", compile=False, log=log.append)
    assert llm.engine.drafter.network is None and any(str(folder / "eagle3") in line for line in log)
    with pytest.raises(InputError, match="eagle3"):
        load(folder, "eagle3", compile=False)
