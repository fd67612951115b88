"""Sources that cannot be converted: one line that says why, a status, and nothing left on disk."""
import json
import os
import pickle
import struct
from pathlib import Path

import gguf
import pytest
import torch
from helpers.converting import run
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, target_state, write_gguf, write_source

from checkpoint.convert import convert
from common.errors import InputError


def edit(config=None, drop=(), add=None, form="safetensors", **changes):
    """A maker of a source folder with these differences from a good one."""
    def make(folder: Path) -> Path:
        state = {n: t for n, t in target_state().items() if n not in drop} | (add or {})
        return write_source(folder, state, {**CONFIG, **(config or {}), **changes}, form)
    return make


def cut(form: str, keep: float):
    def make(folder: Path) -> Path:
        write_source(folder, target_state(), form=form)
        file = next(folder.glob(f"*.{form}"))
        os.truncate(file, int(file.stat().st_size * keep))
        return folder
    return make


def overwritten(name: str, data: bytes | None, form="safetensors"):
    def make(folder: Path) -> Path:
        write_source(folder, target_state(), form=form)
        (folder / name).unlink() if data is None else (folder / name).write_bytes(data)
        return folder
    return make


def pickled(state: dict):
    def make(folder: Path) -> Path:
        return write_source(folder, state, form="bin")
    return make


def gguf_file(keep: float = 1.0, **options):
    def make(folder: Path) -> Path:
        file = write_gguf(folder / "m.gguf", target_state(), **options)
        os.truncate(file, int(file.stat().st_size * keep))
        return file
    return make


def gguf_head(content: bytes):
    """A maker of a GGUF file that begins with this content, and holds nothing else."""
    def make(folder: Path) -> Path:
        folder.mkdir()
        (folder / "m.gguf").write_bytes(content + bytes(64))
        return folder / "m.gguf"
    return make


def index_promises_too_much(folder: Path) -> Path:
    write_source(folder, target_state(), form="safetensors-sharded")
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.ghost.weight"] = "model-part0.safetensors"
    file.write_text(json.dumps(index))
    return folder


def plain_file(folder: Path) -> Path:
    folder.mkdir()
    (folder / "file").write_text("x")
    return folder / "file"


def second_lm_head(folder: Path) -> Path:
    return write_source(folder, target_state(), {**CONFIG, "tie_word_embeddings": True})


U32, U64 = (lambda n: struct.pack("<I", n)), (lambda n: struct.pack("<Q", n))
K0 = "model.layers.0.self_attn.k_proj.weight"

BAD_TARGETS = {
    "a file": (plain_file, "not a folder"),
    "unknown architecture": (edit(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "truncated safetensors": (cut("safetensors", 0.5), "truncated"),
    "truncated GGUF data": (gguf_file(0.7), "truncated"),
    "2^62 tensors": (gguf_head(b"GGUF" + U32(3) + U64(2**62) + U64(0)), "truncated or damaged"),
    "a header of 2^63 bytes": (overwritten("model.safetensors", U64(2**63)), "header too large"),
    "a matrix of one number": (
        pickled({"model.norm.weight": torch.zeros(1).expand(2**20, 2**20)}), "[1048576, 1048576] is"),
    "GGUF with yarn": (gguf_file(extra=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)), "yarn"),
    "one part of a split GGUF": (gguf_file(extra=lambda w: w.add_uint16("split.count", 2)), "split GGUF"),
    "GGUF with sizes per layer": (
        gguf_file(extra=lambda w: w.add_array("llama.rope.dimension_count", [16, 8])), "from layer to layer"
    ),
    "shard elsewhere": (
        overwritten("model.safetensors.index.json", b'{"weight_map": {"a": "../a"}}', "safetensors-sharded"),
        "'../a' is not the name of a file beside it"
    ),
    "shard lacks a tensor": (index_promises_too_much, "model.ghost.weight"),
    "missing tensor": (edit(drop=[K0]), f"{K0} [32, 32] is missing"),
    "wrong shape": (edit(add={K0: torch.zeros(31, 32)}), f"{K0} has shape [31, 32], expected [32, 32]"),
    "tied and not tied": (second_lm_head, "tie_word_embeddings"),
    "integer weights": (edit(add={K0: torch.zeros(32, 32, dtype=torch.int64)}), K0),
    "sparse tensors": (pickled({K0: torch.zeros(2, 2).to_sparse()}), "state dict"),
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


def head_maker(state_changes=None, drop=(), **changes):
    def make(folder: Path) -> Path:
        state = {n: t for n, t in head_state().items() if n not in drop}
        for name, change in (state_changes or {}).items():
            state[name] = change(state.get(name))
        return write_source(folder, state, {**HEAD_CONFIG, **changes})
    return make


def wider_head(folder: Path) -> Path:
    return write_source(folder, head_state(hidden=48), {**HEAD_CONFIG, "hidden_size": 48})


def multi_token(state: dict):
    """A maker of Medusa or Hydra heads with these tensors."""
    def make(folder: Path) -> Path:
        return write_source(folder, state, config={})
    return make


BAD_HEADS = {
    "hidden size": (wider_head, "width 48"),
    "aux layers beyond the target": (
        head_maker(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}), "reads layer 9"),
    "aux layers in disorder": (
        head_maker(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 5, 4]}), "ascending"
    ),
    "no d2t": (head_maker(drop=["d2t", "t2d"]), "d2t"),
    "d2t too far": (head_maker({"d2t": lambda t: t + 90}, drop=["t2d"]), "d2t"),
    "t2d says otherwise": (head_maker({"t2d": lambda t: ~t}), "t2d"),
    "missing tensor": (head_maker(drop=["midlayer.hidden_norm.weight"]), "midlayer.hidden_norm.weight"),
    "a token_map beyond the vocabulary": (
        multi_token({"blocks.0.layers.0.weight": torch.zeros(32, 32), "token_map": torch.tensor([3, 96])}),
        "token_map"
    ),
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
    savers = {
        "zip": lambda o, f: torch.save(o, f),
        "protocol 2": lambda o, f: f.write_bytes(pickle.dumps(o, protocol=2)),
    }
    for save in savers.values():
        save({"model.norm.weight": Evil()}, source / "pytorch_model.bin")
        code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out")
        assert code == 1 and len(err) == 1 and "unsafe pickle" in err[0] and "system" in err[0], err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    Evil().__reduce__()[0](Evil().__reduce__()[1][0])  # the payload does work where it is executed
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("dtype, stored, number, words", (
    ("fp16", torch.float32, 3e38, "overflows float16: it holds 3e+38; expected at most 6.55e+04; use --dty"),
    ("fp32", torch.float64, 1e300, "overflows float32: it holds 1e+300; expected at most 3.4e+38; no --dty"),
))
def test_overflow_names_the_tensor_of_the_file(tmp_path, capsys, dtype, stored, number, words):
    """Not ours, in which several of the file's are joined."""
    name = "model.layers.0.mlp.up_proj.weight"
    state = {n: t.to(stored) for n, t in target_state().items()}
    state[name][3, 4] = number
    source = write_source(tmp_path / "in", state, CONFIG)
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out", "--dtype", dtype)
    assert code == 1 and len(err) == 1 and f"tensor {name} {words}" in err[0]
    assert not (tmp_path / "out").exists()


def test_a_converted_folder_is_no_source(tmp_path, target):
    with pytest.raises(InputError, match="already converted"):
        convert(target, tmp_path / "again")
