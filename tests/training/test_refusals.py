"""Bad input of train.py is one line of error, before anything slow is done."""
import json
import shutil
from pathlib import Path

import pytest
from helpers.training import options, users

import train
from checkpoint.quantizing import quantize_folder
from common.errors import InputError
from training.session import check_out


def test_bad_input_is_one_line(golden, prompt_file, tmp_path, capsys):
    def refused(words: str, checkpoint=golden, prompts=prompt_file, **changes) -> None:
        assert train.main(options(checkpoint, prompts, tmp_path, **changes)) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("error: ") and words in lines[-1], lines

    refused("nothing to train on", prompts=None, synthesize=0)
    refused("not a folder; convert", checkpoint=tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    refused("not a folder that can be written", out=tmp_path / "file")
    refused("--device cuda:9", device="cuda:9")
    refused("holds no prompts", prompts=tmp_path / "file")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "text.jsonl").write_text('{"text": "no chat"}\n')
    refused("line 1: no conversation", prompts=tmp_path / "text.jsonl")
    refused("line 1: no conversation", conversations=tmp_path / "text.jsonl")
    refused("holds no lines", openings=tmp_path / "file")
    (tmp_path / "empty").mkdir()
    refused("holds no shards", shards=tmp_path / "empty")
    refused("the target's context is", **{"max-prompt-tokens": 10**6})
    refused(
        "24 prompts or conversations were left out (empty, longer than --max-prompt-t",
        **{"max-prompt-tokens": 3, "synthesize": 0},
    )
    refused("fewer than two different prompts", limit=1, synthesize=0)
    refused("holds something else", out=golden)
    refused("--shards takes the data folder", shards=tmp_path / "log")
    refused("EAGLE-1 head predicts", kind="eagle", **{"hidden-size": 32})
    refused("not a multiple", heads=4, **{"kv-heads": 3})
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jsonl").write_text('{"ids": [1, 2, 999999], "answers": [[0, 3]]}\n')
    refused("line 1 is no row", shards=tmp_path / "bad")
    (tmp_path / "bad" / "a.jsonl").write_text('{"ids": [1, 2, 3, 4, 5, 6], "answers": [[1, 3, 6]]}\n')
    refused("line 1 is no row", shards=tmp_path / "bad")
    (tmp_path / "bad" / "a.jsonl").write_bytes(b"\xff\xfe\n")
    refused("cannot be read", shards=tmp_path / "bad")
    refused("--decode-batch", **{"decode-batch": 10**8})
    assert not (tmp_path / "head").exists()


def test_a_quantised_target_is_refused(golden, prompt_file, tmp_path, capsys):
    quantize_folder(golden, tmp_path / "int8", "int8", 64, True, False)
    shutil.copyfile(golden / "tokenizer_config.json", tmp_path / "int8" / "tokenizer_config.json")
    assert train.main(options(tmp_path / "int8", prompt_file, tmp_path)) == 1
    assert "a head is trained on unquantised weights" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "work").exists()


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
