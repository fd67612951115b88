"""Invalid options and files: one-line errors, before anything is written."""
import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
from helpers import edit

from checkpoint.load import check_config
from common.schema import InvalidValue

OPTIONS = {  # valid options of every command ("generate:" and "train:": without prompts); files: `folder`
    "generate": ("--no-compile", "--checkpoint", "TARGET", "--prompt", "x"),
    "serve": ("--checkpoint", "TARGET", "--port", "0"),
    "evaluate": ("--checkpoint", "TARGET", "--out", "OUT"),
    "train": ("--checkpoint", "TARGET", "--out", "OUT", "--prompts", "PROMPTS"),
    "quantize": ("--checkpoint", "TARGET"), "convert_checkpoint": ("--checkpoint", "PUBLISHED"),
    "drafters.ngram": ("--checkpoint", "TARGET", "--out", "OUT"),
    "checkpoint.export": ("--checkpoint", "TARGET", "--head", "HEAD", "--out", "OUT"),
    "generate:": ("--checkpoint", "TARGET"), "train:": ("--checkpoint", "TARGET", "--out", "OUT"),
}
# [commands, invalid options, part of the message]
ERRORS = json.loads(Path(__file__).with_name("cli_errors.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory, golden):
    """The working folder of the commands, with the files in the table. Only GOLDEN has weights."""
    folder = tmp_path_factory.mktemp("errors")
    options = {"checkpoint": str(folder / "TARGET"), "max_new_tokens": 64, "seed": 0, "dtype": None}
    for name, content in {
        "PUBLISHED/config.json": "{}", "RUN/options.json": json.dumps(options | {"kernels": True}),
        "WRITTEN/model.safetensors": "", "FOLDER/x/y": "", "FOLDERS/inside/x": "", "TEXT": "some words",
        "PROMPTS": '{"prompt": "what?"}\n', "DAMAGED-work/seconds": "soon",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    (folder / "GOLDEN").symlink_to(golden)
    for name, source in (("TARGET", golden), ("HEAD", golden / "eagle3"), ("QUANTIZED", golden / "eagle3")):
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("model.safetensors", "eagle"))
    edit(folder / "QUANTIZED", quantization={"mode": "int8", "group": 0, "lm_head": True})
    return folder


@pytest.mark.parametrize("command", OPTIONS)
def test_errors_are_one_line(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    main = importlib.import_module(command.rstrip(":")).main
    files, wrong = sorted(folder.rglob("*")), []
    for options, message in [(o, m) for commands, o, m in ERRORS if command in commands.split()]:
        try:
            status = main([*OPTIONS[command], *options.split(" ")])
        except SystemExit as e:
            status = e.code
        out, err = capsys.readouterr()
        lines = err.splitlines()[-1:] if "-m " in options else err.splitlines()  # loading prints lines
        if out or len(lines) != 1 or message not in lines[0] or status not in (1, 2):
            wrong.append(f"{command} {options}: status {status}, expected {message!r}, printed {out + err!r}")
    assert not wrong, "\n".join(wrong)
    assert sorted(folder.rglob("*")) == files


# -- invalid model shapes: the error names the field and the constraint --------------------------------------


CONFIG = {
    "kind": "target", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "somebody_elses": 1,
}
HEAD = CONFIG | {"kind": "eagle3", "draft_vocab_size": 24, "target_hidden_size": 32, "aux_layers": [1]}


@pytest.mark.parametrize("config, change, message", [
    (CONFIG, {"vocab_size": None}, "vocab_size is None; expected a valid integer"),
    (CONFIG, {"num_layers": 10_001}, "num_layers is 10001; expected less than or equal to 10000"),
    (CONFIG, {"num_heads": 3}, "num_kv_heads is 2; expected a divisor of num_heads, 3"),
    (CONFIG, {"head_dim": 7}, "head_dim is 7; expected an even number"),
    (CONFIG, {"num_experts": 4}, "experts_per_token is 0; expected 1 to num_experts, 4"),
    (CONFIG, {"norm_eps": float("nan")}, "norm_eps is nan; expected a finite number"),
    (CONFIG, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing; expected a value"),
    (CONFIG, {"rope_scaling": {"rope_type": "divisors", "divisors": [1.0] * 3}}, "expected 4 divisors"),
    (CONFIG, {"activation": "gelu"}, "activation is 'gelu'; expected one of silu, gelu_tanh"),
    (CONFIG, {"quantization": {"mode": "int4", "group": 0, "lm_head": None}}, "quantization.group is 0"),
    (HEAD, {"draft_vocab_size": 97}, "draft_vocab_size is 97; expected at most vocab_size, 96"),
    (HEAD, {"aux_layers": [2, 1]}, "aux_layers is (2, 1); expected ascending layers"),
    (HEAD | {"kind": "dflash"}, {"mask_id": 96}, "mask_id is 96; expected an id below vocab_size"),
], ids=str)
def test_invalid_configs_raise_errors(config, change, message):
    with pytest.raises(InvalidValue, match=re.escape(message)):
        check_config(config | change)
    assert check_config(config | {"mask_id": 95, "block_size": 4}).num_layers == 2
