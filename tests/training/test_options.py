"""Bad options and bad input of train.py: one line of error, before anything is written."""
import json
import shutil
from pathlib import Path

import pytest
from helpers.training import options, users

import train
from kernels.backend import TORCH

FILES = {
    "file": b"", "one.jsonl": b'{"prompt": "what?"}\n',
    "text.jsonl": b'{"text": "no chat"}\n', "log/log.jsonl": b'{"step": 1, "loss": 2.0}\n',
    "no-utf8/a.jsonl": b"\xff\xfe\n",
}
REFUSED = {  # what the error says: the options that are changed; {} is the folder of FILES
    "nothing to train on: give --prompts FILE, --synthesize N": {"prompts": None, "synthesize": 0},
    "--out {}/file: not a folder that can be written to": {"out": "{}/file"},
    "--out {}: holds files that no run with its state in {}-work has written": {"out": "{}"},
    "{}/none: no such file": {"prompts": "{}/none"},
    "line 1: no conversation": {"conversations": "{}/text.jsonl"},
    "is no row of this target's token ids and answers; --shards takes": {"shards": "{}/log", "prompts": None},
    "--max-prompt-tokens plus --max-new-tokens 1000040: the target has 1024": {"max-prompt-tokens": 10**6},
    "that are left out: 24 longer than --max-prompt-tokens 3": {"max-prompt-tokens": 3, "synthesize": 0},
    "--markov-rank: not for --kind dflash; leave it out": {"kind": "dflash", "markov-rank": 2},
}


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    """Nothing is compiled for a refusal."""
    monkeypatch.setattr("training.session.choose_backend", lambda *_, **__: TORCH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`FILES` and an empty folder."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty").mkdir()
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def error_of(capsys, argv: list[str]) -> str:
    """The last line of a run that fails."""
    assert train.main(argv) == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("words, changes", REFUSED.items(), ids=REFUSED)
def test_bad_input_is_one_line(golden, prompt_file, folder, tmp_path, capsys, words, changes):
    changes = {k: v.replace("{}", str(folder)) if isinstance(v, str) else v for k, v in changes.items()}
    prompts = changes.pop("prompts", prompt_file)
    if "shards" in changes or prompts is None:
        changes = {"synthesize": 0, **changes}
    line = error_of(capsys, options(golden, prompts, tmp_path, **changes))
    assert line.startswith("error: ") and words.replace("{}", str(folder)) in line, line
    assert not (tmp_path / "head").exists()


def test_what_a_template_refuses_is_left_out(golden, tmp_path, capsys):
    """A strict template costs the prompts and conversations that it refuses, not the run."""
    strict = shutil.copytree(golden, tmp_path / "strict")
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
    for words in ("left out: 2 refused by the chat template (", "no system messages), 1 with an empty prompt",
                  "c.jsonl: rows that are left out: 1 with tools"):
        assert words in error, error
    conversations.write_text(json.dumps({"messages": answered[6]}) + "\n")
    assert "no usable answers" in error_of(capsys, options(strict, None, tmp_path / "b", **text))
