"""Sources and folders that cannot be used: one line that says why, a status, and nothing left on disk."""
import hashlib
import math
import os
from pathlib import Path

import pytest
import torch
from helpers.converting import run
from helpers.refusals import refused
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, target_state, write_gguf, write_source
from safetensors.torch import load_file

from checkpoint.convert import convert
from checkpoint.folder import verify
from checkpoint.loading import load_model
from common.errors import InputError


def folder_with(drop=(), add=None, form="safetensors", then=lambda folder: None, head=False, **changes):
    """A maker of a source folder, of a target or a head, with these differences from a good one."""
    def make(folder: Path) -> Path:
        state = head_state() if head else target_state()
        state = {n: t for n, t in state.items() if n not in drop} | (add or {})
        write_source(folder, state, {**(HEAD_CONFIG if head else CONFIG), **changes}, form)
        then(folder)
        return folder
    return make


def only(state: dict, form="safetensors", config=CONFIG):
    """A maker of a source folder with these tensors."""
    return lambda folder: write_source(folder, state, config, form)


def gguf_file(keep: float = 1.0, **options):
    def make(folder: Path) -> Path:
        file = write_gguf(folder / "m.gguf", target_state(), **options)
        os.truncate(file, int(file.stat().st_size * keep))
        return file
    return make


INDEX = "model.safetensors.index.json"
K0 = "model.layers.0.self_attn.k_proj.weight"

BAD_TARGETS = {
    "unknown architecture": (folder_with(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "truncated safetensors": (
        folder_with(then=lambda f: os.truncate(f / "model.safetensors", 50_000)), "truncated"),
    "truncated GGUF data": (gguf_file(0.7), "truncated"),
    "one part of a split GGUF": (gguf_file(extra=lambda w: w.add_uint16("split.count", 2)), "split GGUF"),
    "shard elsewhere": (
        folder_with(form="safetensors-sharded", then=lambda f: (f / INDEX).write_text(
            '{"weight_map": {"a": "../a"}}')), "'../a' is not the name of a file beside it"),
    "missing tensor": (folder_with([K0]), f"{K0} [32, 32] is missing"),
    "wrong shape": (
        folder_with(add={K0: torch.zeros(31, 32)}), f"{K0} has shape [31, 32], expected [32, 32]"),
    "tied and not tied": (folder_with(tie_word_embeddings=True), "tie_word_embeddings"),
    "integer weights": (folder_with(add={K0: torch.zeros(32, 32, dtype=torch.int64)}), K0),
    "sparse tensors": (only({K0: torch.zeros(2, 2).to_sparse()}, "bin"), "state dict"),
}


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_bad_target(tmp_path, capsys, case):
    make, expected = BAD_TARGETS[case]
    source = make(tmp_path / "in")
    (tmp_path / "place").mkdir()
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "place" / "deep" / "out")
    assert code == 1 and len(err) == 1 and err[0].startswith("error: "), err
    assert expected in err[0] and "Traceback" not in err[0], err
    assert not list((tmp_path / "place").iterdir())


NORM, AUX = "midlayer.hidden_norm.weight", "eagle_aux_hidden_state_layer_ids"
D2T, T2D = head_state()["d2t"], head_state()["t2d"]
BAD_HEADS = {
    "hidden size": (only(head_state(hidden=48), config={**HEAD_CONFIG, "hidden_size": 48}), "width 48"),
    "aux layers beyond the target": (
        folder_with(head=True, eagle_config={AUX: [2, 4, 9]}), "reads layer 9"),
    "no d2t": (folder_with(["d2t", "t2d"], head=True), "d2t"),
    "d2t too far": (folder_with(["t2d"], {"d2t": D2T + 90}, head=True), "d2t"),
    "t2d says otherwise": (folder_with(add={"t2d": ~T2D}, head=True), "t2d"),
    "missing tensor": (folder_with([NORM], head=True), NORM),
    "a token_map beyond the vocabulary": (
        only({"blocks.0.layers.0.weight": torch.zeros(32, 32), "token_map": torch.tensor([3, 96])},
             config={}), "token_map"),
}


@pytest.mark.parametrize("case", BAD_HEADS)
def test_bad_head(tmp_path, target, capsys, case):
    make, expected = BAD_HEADS[case]
    before = sorted(p.name for p in target.iterdir())
    code, err = run(capsys, "--checkpoint", make(tmp_path / "head"), "--target", target)
    assert code == 1 and len(err) == 1 and err[0].startswith("error: ") and expected in err[0], err
    assert sorted(p.name for p in target.iterdir()) == before


def test_head_needs_a_converted_target(tmp_path, target, capsys):
    head = write_source(tmp_path / "head", head_state(), HEAD_CONFIG)
    for extra, expected in (
        ((), "is a draft head, which needs --target"),
        (("--target", tmp_path / "target-source"), "not converted yet"),
        (("--target", tmp_path / "nowhere"), "not a folder"),
    ):
        code, err = run(capsys, "--checkpoint", head, *extra)
        assert code == 1 and len(err) == 1 and expected in err[0], err


def test_unsafe_pickle_is_not_executed(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    source = write_source(tmp_path / "in", {})
    (source / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil()}, source / "pytorch_model.bin")
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out")
    assert code == 1 and len(err) == 1 and "more than a pickle of tensors" in err[0], err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


# Weights of converted folders


def test_lost_and_damaged_weights(target):
    os.truncate(target / "model.safetensors", 1000)
    with pytest.raises(InputError, match="damaged"):
        load_model(target)
    (target / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no such file"):
        load_model(target)


def test_converting_numbers_that_are_not_finite(tmp_path, capsys):
    """Three in the middle of one of our tensors."""
    state, odd = target_state(), torch.tensor([math.nan, math.inf, -math.inf])
    state["model.layers.1.self_attn.k_proj.weight"].view(-1)[5:8] = odd
    source = write_source(tmp_path / "in", state)
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out")
    words = f"{source}: tensor model.layers.1.self_attn.k_proj.weight holds 3 numbers that are not finite"
    assert code == 1 and len(err) == 1 and err[0].startswith(f"error: {words}")
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out", "--allow-nonfinite")
    assert code == 0 and f"warning: {words} (nan or infinite)" in err
    written = load_file(tmp_path / "out" / "model.safetensors")["layers.1.wqkv.weight"]
    assert int((~written.isfinite()).sum()) == 3


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
    with refused(f"{file}: its sha256 is {hashlib.sha256(content).hexdigest()}; expected "):
        verify(whole, None, False, said.append)
