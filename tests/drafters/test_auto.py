"""What --speculate auto selects. Its output is tested in tests/engine/test_engine.py."""
import shutil

import pytest
from helpers.decoding import load
from safetensors.torch import load_file, save_file

from checkpoint.load import read_config
from common.cli import Options
from common.errors import InputError
from drafters.auto import log_unused_heads
from drafters.published import OPENINGS, advice
from engine.drafting import DraftOptions, add_drafting


@pytest.fixture
def folder(golden, tmp_path):
    return shutil.copytree(golden, tmp_path / "target")


@pytest.mark.parametrize("kept, means, says", (
    (("eagle3", "eagle"), "lookup+eagle3", "with lookup+eagle3"),
    (("eagle",), "lookup+eagle2", "with lookup+eagle2"),
    ((), "lookup", "no usable head in"),
))
def test_the_best_head_in_the_folder(folder, kept, means, says):
    for kind in {"eagle3", "eagle"} - {*kept}:
        shutil.rmtree(folder / kind)
    said: list[str] = []
    found = DraftOptions("auto").resolve(folder, said.append)
    assert found.method == means and len(said) == (1 if kept else 4) and says in said[0]
    before = len(said)
    assert found.resolve(folder, said.append) == found and len(said) == before
    if not kept:
        assert "none known" in said[1] and "at most a third" in said[2]
        shape = {"num_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
        lines = [*advice(folder, read_config(folder) | shape | {"name": "Llama-3.1-8B"})]
        names = "EAGLE3-LLaMA3.1-Instruct-8B", "EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"
        commands = (f"convert_checkpoint.py --checkpoint yuhuili/{name} --target {folder}" for name in names)
        assert len(lines) == 5 and all(line.endswith(x) for line, x in zip(lines[1:], commands))
        assert "--draft meta-llama/Llama-3.2-1B" in lines[3] and str(OPENINGS.name) in lines[4]


def test_draft_means_auto_and_plain_decoding_names_it(folder):
    """As llama.cpp's -md: what it names is a head or a model."""
    p = Options(prog="x.py")
    add_drafting(p)
    assert p.read(["--draft", "other"]).speculate == "auto" and p.read([]).speculate == "none"
    said: list[str] = []
    log_unused_heads(folder, said.append)
    assert said == [f"{folder}: has a head (eagle3 and eagle2) that is not used; to use it: --speculate auto"]


def test_head_in_another_folder(folder, tmp_path):
    (folder / "eagle").rename(tmp_path / "mine")
    found = DraftOptions("auto", draft=tmp_path / "mine").resolve(folder, lambda line: None)
    assert found.method == "lookup+eagle2" and found.draft == tmp_path / "mine"
    with pytest.raises(InputError, match="no such file"):
        DraftOptions("auto", draft=tmp_path).resolve(folder, lambda line: None)
    found = DraftOptions("auto", draft=folder).resolve(folder, lambda line: None)  # a target
    assert found.method == "lookup+draft-model" and found.draft == folder


def test_draft_model_next_to_the_target(folder, golden, tmp_path):
    """The model that reads the fewest bytes (without its embedding), at most a third of the target's.

    Here it lacks layers, so prompt lookup is used alone.
    """
    for kind in ("eagle", "eagle3"):
        shutil.rmtree(folder / kind)
    tensors = load_file(golden / "model.safetensors")
    lm_head, embedding = tensors["lm_head.weight"], tensors["embed.weight"].repeat(1, 99)
    for name, count in (("small", 8), ("smaller", 4), ("large", 999)):
        (tmp_path / name).mkdir()
        shutil.copy(golden / "config.json", tmp_path / name)
        kept = {"lm_head.weight": lm_head[:count].clone(), "embed.weight": embedding}
        save_file(tensors | kept if name == "large" else kept, tmp_path / name / "model.safetensors")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"format": 2, "kind": "target"}')
    said: list[str] = []
    found = DraftOptions("auto").resolve(folder, said.append)
    assert (found.method, found.draft) == ("lookup+draft-model", tmp_path / "smaller") and len(said) == 1
    assert load(folder, "auto", compile=False, log=said.append).engine.drafter.network is None
    assert any(str(tmp_path / "smaller") in line and "falling back to prompt" in line for line in said), said


@pytest.mark.parametrize("file", ("config.json", "model.safetensors"))
def test_damaged_head_is_skipped(folder, file):
    """With auto it is skipped; named explicitly, it is an error."""
    shutil.rmtree(folder / "eagle")
    (folder / "eagle3" / file).write_bytes(b"{}")
    said: list[str] = []
    llm = load(folder, "auto", compile=False, log=said.append)
    assert llm.engine.drafter.network is None and any(str(folder / "eagle3") in line for line in said)
    with pytest.raises(InputError, match="eagle3"):
        load(folder, "eagle3", compile=False)
