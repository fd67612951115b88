"""Conversion: every form of a source gives the same tensors, and heads are read as their files mean."""
import json

import pytest
import torch
from helpers.converting import assert_same, fused, run
from helpers.launching import measured
from helpers.sources import CONFIG, HEAD_CONFIG, LARGE, head_state, target_state, write_source
from helpers.tokenizers import write_byte_tokenizer
from safetensors.torch import load_file

from checkpoint.convert import convert
from checkpoint.folder import read_config
from checkpoint.layouts import Answers
from checkpoint.loading import load_model
from model import Transformer
from tokens.templates import TEMPLATES
from tokens.tokenizer import Tokenizer

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
    out = convert(source, tmp_path / "out", quiet=True)
    assert_same(load_file(out / "model.safetensors"), fused(target_state()))


@pytest.mark.parametrize("dtype, expected", [
    ("keep", torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32),
    ("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32),
])
def test_dtype_comes_from_the_tensors(tmp_path, dtype, expected):
    state = target_state(dtype=torch.bfloat16)  # the config says float16
    state["model.norm.weight"] = state["model.norm.weight"].float()  # one odd tensor does not decide
    out = convert(write_source(tmp_path / "in", state), tmp_path / "out", dtype=dtype, quiet=True)
    cast = {name: t.to(expected) for name, t in fused(state).items()}
    assert_same(load_file(out / "model.safetensors"), cast)


def test_stop_ids_are_all_of_them(tmp_path):
    source = write_source(tmp_path / "in", target_state())
    # It wins over the config. 200 is beyond the vocabulary.
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 200]}')
    (source / "tokenizer_config.json").write_text(json.dumps({
        "eos_token": {"content": "<|end|>"},
        "added_tokens_decoder": {
            "12": {"content": "<|end|>", "special": True}, "13": {"content": "<|user|>", "special": True}
        },
    }))
    vocab = {chr(ord("a") + i): i for i in range(10)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    (source / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False
        },
        "added_tokens": [
            {"id": 10, "content": "<|eot_id|>", "special": True, **flags},
            {"id": 11, "content": "<|im_end|>", "special": False, **flags},
        ],
    }))
    assert read_config(convert(source, tmp_path / "out", quiet=True))["stop_ids"] == [7, 12, 10]


def test_tokenizer_files_come_along(tmp_path, capsys):
    source = write_source(tmp_path / "in", target_state())
    assert not run(capsys, "--checkpoint", source, "--out", tmp_path / "bare")[0]
    assert run(capsys, "--checkpoint", source, "--out", tmp_path / "bare2")[1] == [
        f"warning: {source} has no tokenizer files (tokenizer.json, tokenizer.model, vocab.json with"
        " merges.txt); run it with --prompt-ids"
    ]
    write_byte_tokenizer(source)
    (source / "chat_template.jinja").write_text("hello")
    known = f"warning: {source}: its tokenizer has ids up to 257, the model up to 95; prompts with others are"
    assert run(capsys, "--checkpoint", source, "--out", tmp_path / "out") == (0, [f"{known} refused"])
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "hello"
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_a_template_by_the_published_name_or_by_flag(tmp_path, capsys):
    source = write_source(tmp_path / "vicuna-7b-v1.3", target_state())
    write_byte_tokenizer(source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    for name, flags in (("vicuna", ()), ("llama2", ("--template", "llama2"))):
        assert run(capsys, "--checkpoint", source, "--out", tmp_path / name, *flags)[0] == 0
        assert Tokenizer.load(tmp_path / name).template == TEMPLATES[name]
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "bad", "--template", "nonsense")
    assert code == 1 and "--template nonsense" in err[0] and not (tmp_path / "bad").exists()


# Heads


@pytest.mark.parametrize("in_config, option, expected", [
    (None, None, [2, 4, 5]), ([1, 3, 4], None, [2, 4, 5]), ([2, 4, 8], None, [2, 4, 8]),
    ([4, 5, 6], (4, 5, 6), [4, 5, 6]), ([1, 3, 4], (1, 3, 4), [1, 3, 4]), ([0, 3, 8], None, [0, 3, 8]),
])
def test_aux_layers(tmp_path, target, in_config, option, expected):
    config = {**HEAD_CONFIG, "eagle_config": {"eagle_aux_hidden_state_layer_ids": in_config}}
    source = write_source(tmp_path / "head", head_state(), config)
    out = convert(source, target=target, answers=Answers(option), quiet=True)
    assert read_config(out)["aux_layers"] == expected


# Memory

@pytest.mark.slow
@pytest.mark.parametrize("form, bound", [
    ("safetensors", 1.5), ("bin", 1.5), ("safetensors-sharded", 0.5), ("bin-sharded", 0.5)])
def test_peak_memory(tmp_path, form, bound):
    """After a small conversion: lazy imports are not what is measured."""
    state = target_state(LARGE, torch.bfloat16)
    big = write_source(tmp_path / "big", state, LARGE, form, shard=lambda i: i * 4 // len(state))
    small = write_source(tmp_path / "small", target_state(), form=form)
    peak, size = measured(
        "from checkpoint.convert import convert; convert(argv[0], argv[1], quiet=True)",
        "result = [(convert(argv[2], argv[3], quiet=True) / 'model.safetensors').stat().st_size]",
        small, tmp_path / "a", big, tmp_path / "b",
    )
    assert size > 200e6 and peak < bound * size, f"{peak / size:.2f} of the output's size"


# The file format
