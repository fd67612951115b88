"""Bad input of train.py is one line of error, before anything slow is done."""
import json
import shutil
from pathlib import Path

import pytest
from helpers.training import options, users

import train
from checkpoint.quantizing import quantize_folder
from common.errors import InputError
from kernels.quantized import Scheme
from training.out import check_out

FILES = {
    "file": b"",
    "log/log.jsonl": b'{"step": 1, "loss": 2.0}\n',
    "text.jsonl": b'{"text": "no chat"}\n',
    "unknown-id/a.jsonl": b'{"ids": [1, 2, 999999], "answers": [[0, 3]]}\n',
    "three-numbers/a.jsonl": b'{"ids": [1, 2, 3, 4, 5, 6], "answers": [[1, 3, 6]]}\n',
    "no-utf8/a.jsonl": b"\xff\xfe\n",
}
ANSWERED = {"work": "{folder}/work"}  # the prompts are answered once for all shards
BAD_INPUT = {  # id: what the error says, and the options that are changed
    "nothing to train on": ("nothing to train on", {"prompts": None, "synthesize": 0}),
    "checkpoint that is not there": ("not a folder; convert", {"checkpoint": "{folder}/nowhere"}),
    "out is a file": ("not a folder that can be written", {"out": "{folder}/file"}),
    "device that is not there": ("--device cuda:9", {"device": "cuda:9"}),
    "empty prompts": ("holds no prompts", {"prompts": "{folder}/file"}),
    "prompts without a chat": ("line 1: no conversation", {"prompts": "{folder}/text.jsonl"}),
    "conversations without a chat": ("line 1: no conversation", {"conversations": "{folder}/text.jsonl"}),
    "empty openings": ("holds no lines", {"openings": "{folder}/file"}),
    "folder without shards": ("holds no shards", {"shards": "{folder}/empty"}),
    "prompts longer than the context": ("the target's context is", {"max-prompt-tokens": 10**6}),
    "every prompt too long": (
        "24 prompts or conversations were left out (empty, longer than --max-prompt-t",
        {"max-prompt-tokens": 3, "synthesize": 0},
    ),
    "a single prompt": ("fewer than two different prompts", {"limit": 1, "synthesize": 0}),
    "out is a target": ("holds something else", {"out": "{golden}"}),
    "shards are a log": ("--shards takes the data folder", {"shards": "{folder}/log", **ANSWERED}),
    "EAGLE-1 of another width": ("EAGLE-1 head predicts", {"kind": "eagle", "hidden-size": 32}),
    "heads that do not divide": ("expected a divisor of num_heads, 4", {"heads": 4, "kv-heads": 3}),
    "shard with an unknown id": ("line 1 is no row", {"shards": "{folder}/unknown-id", **ANSWERED}),
    "shard with a long answer": ("line 1 is no row", {"shards": "{folder}/three-numbers", **ANSWERED}),
    "shard that is no UTF-8": ("cannot be read", {"shards": "{folder}/no-utf8", **ANSWERED}),
    "enormous decode batch": ("--decode-batch", {"decode-batch": 10**8}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`FILES` and an empty folder."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty").mkdir()
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("words, changes", BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_line(golden, prompt_file, folder, tmp_path, capsys, words, changes):
    changes = {
        flag: value.format(folder=folder, golden=golden) if isinstance(value, str) else value
        for flag, value in changes.items()
    }
    prompts = changes.pop("prompts", prompt_file)
    assert train.main(options(golden, prompts, tmp_path, **changes)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ") and words in lines[-1], lines
    assert not (tmp_path / "head").exists()


def test_a_quantised_target_is_refused(golden, prompt_file, tmp_path, capsys):
    quantize_folder(golden, tmp_path / "int8", Scheme("int8", 0, "int8"))
    shutil.copyfile(golden / "tokenizer_config.json", tmp_path / "int8" / "tokenizer_config.json")
    assert train.main(options(tmp_path / "int8", prompt_file, tmp_path)) == 1
    assert "is quantised already; name the checkpoint before" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("flag", ["writer", "reader"])
def test_a_copy_of_another_target_is_refused(golden, prompt_file, tmp_path, capsys, flag):
    """Before any text is written."""
    other = tmp_path / "other"
    shutil.copytree(golden, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"stop_ids": [7]}))
    assert train.main(options(golden, prompt_file, tmp_path, **{flag: other})) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: --{flag} {other}: no copy of {golden}: its stop_ids is [7]; expected")
    assert not list((tmp_path / "work").glob("data/*"))


def test_what_a_template_refuses_is_left_out(golden, tmp_path, capsys):
    """A strict template costs the prompts and conversations it refuses, and says why; not the run."""
    strict = tmp_path / "strict"
    shutil.copytree(golden, strict)
    config = json.loads((strict / "tokenizer_config.json").read_text())
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    config["chat_template"] = refusal + config["chat_template"]
    (strict / "tokenizer_config.json").write_text(json.dumps(config))
    chats = [users(f"question {i}") for i in range(6)] + [[{"role": "system", "content": "s"}, *users("u")]]
    lines = [json.dumps({"messages": messages}) + "\n" for messages in chats]
    (tmp_path / "p.jsonl").write_text("".join(lines) + '{"prompt": ""}\n')
    answered = [[*m, {"role": "assistant", "content": "some answer or other"}] for m in chats]
    answered.append([{"role": "tool", "content": "x"}])
    conversations = tmp_path / "c.jsonl"
    conversations.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in answered))
    text = {"conversations": conversations, "synthesize": 0}
    assert train.main([*options(strict, tmp_path / "p.jsonl", tmp_path, **text), "--collect-only"]) == 0
    error = capsys.readouterr().err
    assert "3 prompts or conversations were left out" in error and "no system messages" in error
    assert "c.jsonl: 1 rows are left out" in error
    conversations.write_text(json.dumps({"messages": answered[6]}) + "\n")
    assert train.main([*options(strict, None, tmp_path / "b", **text), "--collect-only"]) == 1
    assert "takes none of them" in capsys.readouterr().err


def test_a_target_without_a_template_is_refused(golden, prompt_file, tmp_path, capsys):
    shutil.copytree(golden, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer_config.json"))
    assert train.main(options(tmp_path / "bare", prompt_file, tmp_path)) == 1
    assert "chats need a tokenizer and a chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config", ["", "[]", "{}", '{"architectures": []}', '{"architectures": ["MedusaModel"]}']
)
def test_a_folder_that_holds_something_else(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match="holds something else than a trained head of this kind"):
        check_out(tmp_path, "eagle3", Path("work"))
    if "Medusa" in config:
        with pytest.raises(InputError, match="holds a head that was not trained in --work work"):
            check_out(tmp_path, "medusa", Path("work"))
