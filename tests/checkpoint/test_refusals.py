"""Sources that cannot be converted: one line that says why, a status, and nothing left on disk."""
import json
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers.converting import run
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, target_state, write_gguf, write_source

import convert_checkpoint
from checkpoint.convert import convert, open_source
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


def packed_pickle(folder: Path) -> Path:
    write_source(folder, target_state(), form="bin")
    file = folder / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return folder


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
    "no config": (overwritten("config.json", None), "holds no config.json"),
    "unknown architecture": (edit(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "truncated safetensors": (cut("safetensors", 0.5), "truncated"),
    "corrupt safetensors": (overwritten("model.safetensors", b"\xff" * 4096), "damaged"),
    "truncated bin": (cut("bin", 0.5), "damaged"),
    "truncated GGUF data": (gguf_file(0.7), "truncated"),
    "no GGUF": (gguf_head(b"GGML"), "truncated or damaged"),
    "2^62 tensors": (gguf_head(b"GGUF" + U32(3) + U64(2**62) + U64(0)), "truncated or damaged"),
    "2^40 keys": (gguf_head(b"GGUF" + U32(3) + U64(0) + U64(2**40)), "truncated or damaged"),
    "a header of 2^63 bytes": (overwritten("model.safetensors", U64(2**63)), "header too large"),
    "an archive that grows": (packed_pickle, "is compressed; expected what torch.save writes"),
    "a matrix of one number": (
        pickled({"model.norm.weight": torch.zeros(1).expand(2**20, 2**20)}), "[1048576, 1048576] is"),
    "an architecture in red": (edit(architectures=["\x1b[31mred"]), r"unknown architecture \x1b[31mred"),
    "GGUF of another architecture": (gguf_file(arch="mamba"), "unknown architecture gguf:mamba"),
    "GGUF with yarn": (gguf_file(extra=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)), "yarn"),
    "GGUF with a bias": (
        gguf_file(extra=lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))),
        "unexpected tensor blk.0.attn_q.bias"
    ),
    "one part of a split GGUF": (gguf_file(extra=lambda w: w.add_uint16("split.count", 2)), "split GGUF"),
    "GGUF of a type without dequantisation": (
        gguf_file(extra=lambda w: w.add_tensor("x", np.zeros(4, np.float64))),
        "tensor x is of type F64, which cannot be dequantised"
    ),
    "GGUF with sizes per layer": (
        gguf_file(extra=lambda w: w.add_array("llama.rope.dimension_count", [16, 8])), "from layer to layer"
    ),
    "GGUF that rotates half a head": (
        gguf_file(extra=lambda w: w.add_rope_dimension_count(8)), "differ in size"
    ),
    "GGUF with another rope scaling": (
        gguf_file(extra=lambda w: w.add_string("llama.rope.scaling.type", "longrope")), "'longrope'"
    ),
    "GGUF with a part of a head": (
        gguf_file(extra=lambda w: w.add_tensor("blk.8.attn_q.weight", np.zeros((17, 32), np.float32))),
        "blk.8.attn_q.weight [17, 32] is not a multiple"
    ),
    "shard elsewhere": (
        overwritten("model.safetensors.index.json", b'{"weight_map": {"a": "../a"}}', "safetensors-sharded"),
        "'../a' is not the name of a file beside it"
    ),
    "shard missing": (
        overwritten("model-part1.safetensors", None, "safetensors-sharded"), "model-part1.safetensors"
    ),
    "shard lacks a tensor": (index_promises_too_much, "model.ghost.weight"),
    "missing tensor": (edit(drop=[K0]), f"{K0} [32, 32] is missing"),
    "unexpected tensor": (
        edit(add={"model.extra.weight": torch.zeros(3)}), "unexpected tensor model.extra.weight"
    ),
    "wrong shape": (edit(add={K0: torch.zeros(31, 32)}), f"{K0} has shape [31, 32], expected [32, 32]"),
    "tied and not tied": (second_lm_head, "tie_word_embeddings"),
    "integer weights": (edit(add={K0: torch.zeros(32, 32, dtype=torch.int64)}), K0),
    "attention_bias": (edit(attention_bias=True), "attention_bias"),
    "gelu": (edit(hidden_act="gelu"), "gelu"),
    "quantised": (edit(quantization_config={"quant_method": "gptq"}), "gptq"),
    "yarn without a factor": (edit(rope_scaling={"type": "yarn"}), "factor"),
    "no hidden size": (edit(hidden_size=None), "hidden_size"),
    "sparse tensors": (pickled({K0: torch.zeros(2, 2).to_sparse()}), "state dict"),
    "a width that heads do not divide": (edit(hidden_size=30, head_dim=None), "hidden_size 30"),
    "rope for each kind of layer": (
        edit(rope_parameters={"full_attention": {"rope_type": "default"}}), "per kind of layer"
    ),
    "rope for a part of a head": (edit(partial_rotary_factor=0.5), "partial_rotary_factor"),
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


def eagle1(folder: Path) -> Path:
    state = {"fc.weight": torch.zeros(32, 64), "layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)}
    return write_source(folder, state, {**CONFIG, "bias": True})


def wider_head(folder: Path) -> Path:
    return write_source(folder, head_state(hidden=48), {**HEAD_CONFIG, "hidden_size": 48})


def multi_token(state: dict):
    """A maker of Medusa or Hydra heads with these tensors."""
    def make(folder: Path) -> Path:
        return write_source(folder, state, config={})
    return make


BAD_HEADS = {
    "hidden size": (wider_head, "width 48"),
    "vocabulary": (head_maker(vocab_size=100), "vocabulary 100"),
    "aux layers beyond the target": (
        head_maker(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}), "reads layer 9"),
    "two aux layers": (head_maker(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4]}), "fc.weight"),
    "aux layers in disorder": (
        head_maker(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 5, 4]}), "ascending"
    ),
    "no d2t": (head_maker(drop=["d2t", "t2d"]), "d2t"),
    "d2t too far": (head_maker({"d2t": lambda t: t + 90}, drop=["t2d"]), "d2t"),
    "t2d says otherwise": (head_maker({"t2d": lambda t: ~t}), "t2d"),
    "missing tensor": (head_maker(drop=["midlayer.hidden_norm.weight"]), "midlayer.hidden_norm.weight"),
    "fc_norm": (head_maker(eagle_config={"fc_norm": True}), "fc_norm"),
    "no states of the target": (
        head_maker(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state false"
    ),
    "aux layers as text": (
        head_maker(eagle_config={"eagle_aux_hidden_state_layer_ids": "1,3,4"}),
        "eagle_config.eagle_aux_hidden_state_layer_ids is '1,3,4'; expected a list"
    ),
    "no Medusa block": (
        multi_token({"0.0.linear.weight": torch.zeros(2), "blocks.0.layers": torch.zeros(3)}),
        "no Medusa head is complete"
    ),
    "no Hydra block": (
        multi_token({"hydra_mlp.0.0.res_connection.weight": torch.zeros(2)}), "no Hydra head is complete"
    ),
    "a token_map beyond the vocabulary": (
        multi_token({"blocks.0.layers.0.weight": torch.zeros(32, 32), "token_map": torch.tensor([3, 96])}),
        "token_map"
    ),
    "a scalar lm_head": (head_maker({"lm_head.weight": lambda _: torch.tensor(1.0)}), "lm_head.weight"),
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
        # Torch gives up before it sees what is asked for.
        "protocol 4": lambda o, f: f.write_bytes(pickle.dumps(o, protocol=4)),
    }
    for kind, save in savers.items():
        save({"model.norm.weight": Evil()}, source / "pytorch_model.bin")
        code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out")
        assert code == 1 and len(err) == 1 and "unsafe pickle" in err[0], err
        assert "system" in err[0] or kind == "protocol 4", err
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


def test_gguf_needs_its_package(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "m.gguf", target_state())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match="pip install gguf"):
        open_source(file)


def test_malformed_in_an_unknown_way(tmp_path, capsys, monkeypatch):
    def broken(*args, **options):
        raise KeyError("rows")

    monkeypatch.setattr(convert_checkpoint, "convert", broken)
    (tmp_path / "config.json").write_text("{}")
    code, err = run(capsys, "--checkpoint", tmp_path)
    assert code == 1 and err == [
        f"error: {tmp_path}: malformed in a way this program does not know (KeyError: 'rows')"
    ]
