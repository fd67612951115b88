"""Numbers that are not finite, and weights that are not those that were written."""
import hashlib
import json
import math

import pytest
import torch
from helpers.converting import run
from helpers.sources import HEAD_CONFIG, head_state, target_state, write_source
from safetensors.torch import load_file, save_file

import quantize
from checkpoint.convert import convert
from checkpoint.folder import verify
from checkpoint.weights import count_nonfinite
from common.errors import InputError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_is_not_finite_is_counted(dtype):
    """Where a sum of finite numbers is too large for its type, too."""
    large = torch.finfo(dtype).max
    for numbers, count in (
        ([1.0, 2.0], 0), ([large, large], 0), ([-large, -large, 3.0], 0), ([math.nan, 1.0], 1),
        ([math.inf, -math.inf], 2), ([large, large, math.inf, math.nan], 2),
    ):
        assert count_nonfinite(torch.tensor(numbers, dtype=dtype)) == count
    assert count_nonfinite(torch.tensor([1, 2])) == 0


def broken_source(folder):
    """A source with three numbers that are not finite, in the middle of one of our tensors."""
    state, odd = target_state(), torch.tensor([math.nan, math.inf, -math.inf])
    state["model.layers.1.self_attn.k_proj.weight"].view(-1)[5:8] = odd
    return write_source(folder, state)


def test_converting_numbers_that_are_not_finite(tmp_path, capsys):
    source = broken_source(tmp_path / "in")
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out")
    words = f"{source}: tensor model.layers.1.self_attn.k_proj.weight holds 3 numbers that are not finite"
    assert code == 1 and len(err) == 1 and err[0].startswith(f"error: {words}")
    assert "--allow-nonfinite" in err[0]
    assert [p.name for p in tmp_path.iterdir()] == ["in"]
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out", "--allow-nonfinite")
    assert code == 0 and f"warning: {words} (nan or infinite)" in err
    written = load_file(tmp_path / "out" / "model.safetensors")["layers.1.wqkv.weight"]
    assert int((~written.isfinite()).sum()) == 3


def test_one_head_that_fails_leaves_nothing(tmp_path, target, capsys):
    """A target is not there without the heads that were quantised with it."""
    head = convert(write_source(tmp_path / "head", head_state(), HEAD_CONFIG), target=target, quiet=True)
    state = load_file(head / "model.safetensors")
    state["fc.weight"][0, 0] = math.nan
    save_file(state, head / "model.safetensors")
    before = sorted(p.name for p in tmp_path.iterdir())
    argv = ["--checkpoint", str(target), "--out", str(tmp_path / "int8")]
    assert quantize.main(argv) == 1
    printed = capsys.readouterr()
    line = printed.err.splitlines()[-1]
    assert line.startswith(f"error: {head}/model.safetensors: tensor fc.weight holds 1 numbers that are not")
    assert "int8" not in printed.out and sorted(p.name for p in tmp_path.iterdir()) == before
    assert quantize.main([*argv, "--allow-nonfinite"]) == 0
    assert (tmp_path / "int8" / "eagle3" / "config.json").exists()
    assert "warning: " in capsys.readouterr().err


def digest(file) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def whole(tmp_path, target):
    """A converted target with a head inside."""
    convert(write_source(tmp_path / "head", head_state(), HEAD_CONFIG), target=target, quiet=True)
    return target


@pytest.mark.parametrize("which", ["model.safetensors", "eagle3/model.safetensors"])
def test_a_byte_that_changed_is_found(whole, which):
    said = []
    verify(whole, None, True, said.append)
    assert len(said) == 1 and said[0].startswith("verified ")
    file = whole / which
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError) as error:
        verify(whole, None, False, said.append)
    kept = json.loads((file.parent / "config.json").read_text())["sha256"]
    assert str(error.value).startswith(f"{file}: its sha256 is {digest(file)}; expected {kept}")


def test_folders_of_before_have_no_checksum(whole):
    file, said = whole / "eagle3" / "config.json", []
    config = json.loads(file.read_text())
    del config["sha256"]
    file.write_text(json.dumps(config))
    verify(whole, None, False, said.append)
    assert said[0].startswith(f"{file}: has no sha256") and said[1].startswith("verified ")
    with pytest.raises(InputError, match="has no sha256 to verify the weights with"):
        verify(whole, None, True, said.append)
