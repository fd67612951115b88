"""Conversion: every source layout gives the same tensors, and heads are read as published."""
import errno
import json
import os
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import refused
from helpers.launching import run as run_alone
from helpers.sources import CONFIG, HEAD_CONFIG, head_state, run, target_state, write_source
from helpers.tokenizers import write_byte_tokenizer
from safetensors.torch import load_file, save_file

from checkpoint import writer
from checkpoint.convert import convert, converted_folder, next_steps
from checkpoint.load import load_model, read_config
from common import writing
from model import Transformer
from tokens.convert import TEMPLATES
from tokens.tokenizer import Tokenizer

# Every source form, the same tensors


@pytest.mark.parametrize("form, tied", [
    ("safetensors", False), ("safetensors-sharded", True), ("bin", True), ("bin-sharded", False),
    ("bin", "before zip archives"), ("safetensors-sharded", "no index"), ("bin-sharded", "no index")])
def test_folders(tmp_path, target, form, tied):
    """The tensors are those of `target`, except the lm_head of tied targets."""
    config = {**CONFIG, "tie_word_embeddings": bool(tied)}
    state = target_state(config)
    # Old checkpoints contain this buffer, which is not converted.
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    source = write_source(tmp_path / "in", state, config, form)
    if tied == "no index":
        next(source.glob("*.index.json")).unlink()
    elif tied not in (True, False):
        torch.save(state, source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    out = convert(source, tmp_path / "out", quiet=True)
    assert next_steps(out, None).startswith(f"next: python generate.py -m {out} --speculate auto ")
    assert f"-m {out} --draft {tmp_path} " in next_steps(tmp_path, str(out))
    expected = load_file(target / "model.safetensors")
    if tied:
        del expected["lm_head.weight"]
    torch.testing.assert_close(load_file(out / "model.safetensors"), expected, rtol=0, atol=0)
    model, written = load_model(out)
    assert (model.lm_head is None) == bool(tied) and isinstance(model, Transformer)
    assert written["stop_ids"] == [3, 5] and written["bos_id"] == 1 and written["kind"] == "target"
    assert (written["norm_eps"], written["rope_base"], written["max_seq_len"]) == (1e-5, 5000.0, 128)


def test_index_selects_the_shard_of_a_tensor(tmp_path, target):
    """Every shard also holds stale copies of all other tensors."""
    state = target_state()
    source = write_source(tmp_path / "in", state, form="safetensors-sharded")
    named = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    for file in {*named.values()}:
        save_file({n: t if named[n] == file else t + 1 for n, t in state.items()}, source / file)
    out = convert(source, tmp_path / "out", quiet=True)
    exact = load_file(target / "model.safetensors")
    torch.testing.assert_close(load_file(out / "model.safetensors"), exact, rtol=0, atol=0)


@pytest.mark.parametrize("dtype, expected", [
    ("keep", torch.bfloat16), ("fp16", torch.float16), ("float32", torch.float32),
])
def test_dtype_comes_from_the_tensors(tmp_path, target, dtype, expected):
    state = target_state(dtype=torch.bfloat16)  # the config says float16
    state["model.norm.weight"] = state["model.norm.weight"].float()  # one odd tensor does not decide
    out = convert(write_source(tmp_path / "in", state), tmp_path / "out", dtype=dtype, quiet=True)
    exact = load_file(target / "model.safetensors")
    cast = {name: t.bfloat16().to(expected) for name, t in exact.items()}
    torch.testing.assert_close(load_file(out / "model.safetensors"), cast, rtol=0, atol=0)


def test_tokenizer_files_are_copied(tmp_path, capsys):
    source = write_source(tmp_path / "in", target_state())
    assert run(capsys, "--checkpoint", source, "--out", tmp_path / "bare") == (0, [
        f"warning: {source} has no tokenizer files (tokenizer.json, tokenizer.model, vocab.json with"
        " merges.txt); run it with --prompt-ids"])
    write_byte_tokenizer(source)
    (source / "chat_template.jinja").write_text("hello")
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 200]}')  # 200: no token
    known = (f"warning: {source}: its tokenizer has 258 ids, the model 96;"
             " prompts with other ids are rejected")
    assert run(capsys, "--checkpoint", source, "--out", tmp_path / "out") == (0, [known])
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "hello"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert [read_config(tmp_path / name)["stop_ids"] for name in ("bare", "out")] == [[3, 5], [7]]


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


# Downloads from the hub, without a hub


def test_hub_downloads_only_what_is_needed(tmp_path, target, monkeypatch):
    folder = write_source(tmp_path / "repo", target_state(), form="safetensors-sharded")
    for extra in ("pytorch_model.bin", "consolidated.safetensors", "modeling_evil.py", "README.md"):
        (folder / extra).write_text("not needed")
    files, downloaded = [SimpleNamespace(rfilename=p.name) for p in folder.iterdir()], []
    hub = SimpleNamespace(model_info=lambda repo, timeout: SimpleNamespace(siblings=files))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, allow_patterns: (
        downloaded.extend(allow_patterns) or str(folder)))
    out = convert("org/some-model", tmp_path / "out", quiet=True)
    assert sorted(set(downloaded)) == [
        "config.json", *(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)),
        "model.safetensors.index.json"]
    torch.testing.assert_close(*(load_file(f / "model.safetensors") for f in (out, target)), rtol=0, atol=0)
    assert read_config(out)["name"] == "some-model" and read_config(out)["source"] == "org/some-model"


# Memory


PEAKS = """
import sys
from checkpoint.convert import convert
for source, out in zip(sys.argv[1::2], sys.argv[2::2]):
    convert(source, out, quiet=True)
    print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
"""
LARGE = CONFIG | {"hidden_size": 768, "intermediate_size": 2560, "vocab_size": 4096, "head_dim": 192}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' high-water mark")
@pytest.mark.parametrize("form", ["safetensors-sharded", "bin-sharded"])
def test_peak_memory(tmp_path, form):
    """Measured after a small conversion, so that lazy imports do not count."""
    small = write_source(tmp_path / "small", target_state(), form=form)
    big = write_source(tmp_path / "big", target_state(LARGE, torch.bfloat16), LARGE, form)
    out = tmp_path / "b"
    before, after = run_alone(sys.executable, "-c", PEAKS, small, tmp_path / "a", big, out).split()
    peak, size = 1024 * (int(after) - int(before)), (out / "model.safetensors").stat().st_size
    assert size > 100e6 and peak < size / 2, f"{peak / size:.2f} of the output's size"


# -- output folders: what --force replaces and keeps, and what a failed conversion leaves behind -------------


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


def test_force_rejects_other_folders(tmp_path, target, capsys):
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


@pytest.mark.parametrize("error, message, status", [
    (OSError(errno.ENOSPC, "No space left on device"), "No space left", 1),
    (KeyboardInterrupt(), "interrupted", 130),
])
def test_failed_conversion_leaves_no_files(tmp_path, capsys, monkeypatch, error, message, status):
    source, folders = write_source(tmp_path / "in", target_state()), []

    def cast(name, block, dtype):
        folders.append([p.name for p in tmp_path.iterdir() if p.name != "in"])
        if len(folders) == 5:
            raise error
        return block

    monkeypatch.setattr(writer, "_cast", cast)
    code, err = run(capsys, "--checkpoint", source, "--out", tmp_path / "out")
    assert code == status and len(err) == 1 and message in err[0]
    assert len(folders) >= 5  # tensors are cast in parallel
    assert len(folders[0]) == 1 and folders[0] != ["out"]  # a temporary one
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_convert_on_first_use(tmp_path, monkeypatch):
    """Once, and again after the source has changed; another source with the same folder name is rejected."""
    logged = []
    source = write_source(tmp_path / "model", target_state())
    other = write_source(tmp_path / "other" / "model", target_state())
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert converted_folder(str(source), logged.append) == "checkpoints/model"
    assert logged == [f"converting {source} into checkpoints/model"]
    assert converted_folder("checkpoints/model", logged.append) == "checkpoints/model"
    later = time.time() + 10
    os.utime(source / "config.json", (later, later))
    assert converted_folder(str(source), logged.append) == "checkpoints/model" and len(logged) == 2
    with refused(f"checkpoints/model: was converted from {source}"):
        converted_folder(str(other), logged.append)


def test_concurrent_conversion(tmp_path, monkeypatch):
    """The other process finishes after this one has found no folder."""
    source, replace = write_source(tmp_path / "model", target_state()), os.replace
    monkeypatch.chdir(tmp_path)

    def replace_late(part, out):
        if out.name == "model" and not out.exists():
            shutil.copytree(part, out)
        replace(part, out)

    monkeypatch.setattr(writing.os, "replace", replace_late)
    assert converted_folder(str(source), print) == "checkpoints/model" and load_model("checkpoints/model")
    assert os.listdir("checkpoints") == ["model"]


def test_convert_head_on_first_use(tmp_path, target, monkeypatch):
    """With several processes, nothing is converted on first use; a target is rejected as a head."""
    head, logged = write_source(tmp_path / "Mine", head_state(), HEAD_CONFIG), []
    monkeypatch.setenv("WORLD_SIZE", "2")
    with refused(f"{head}: not converted yet; run python convert_checkpoint.py --checkpoint {head}"):
        converted_folder(head, logged.append, target)
    monkeypatch.delenv("WORLD_SIZE")
    for _ in range(2):
        assert converted_folder(head, logged.append, target) == str(target / "mine")
    assert len(logged) == 1 and read_config(target / "mine", "eagle3")
    with refused(f"{tmp_path / 'target-source'}: is not a draft head"):
        converted_folder(tmp_path / "target-source", logged.append, target)
