"""What the console cannot read, write or do is one line."""
from types import SimpleNamespace

import pytest
import torch
from helpers.decoding import load

from common.errors import InputError
from console.chat import chat
from console.decoding import compile_errors
from console.prompts import gather_prompts
from console.trace import Trace
from sampling.options import Sampling


def prompts(**options) -> list:
    return gather_prompts(SimpleNamespace(**{"prompt": [], "prompt_ids": [], "prompt_file": []} | options))


@pytest.mark.parametrize("ids", ["", "1,", "1,two", "1.5", "1;2", "1 2,x"])
def test_ids_that_are_no_numbers(ids):
    assert prompts(prompt=["x"], prompt_ids=["1, 2", "3"]) == ["x", [1, 2], [3]]
    with pytest.raises(InputError, match=f"--prompt-ids '{ids}': expected numbers separated by commas"):
        prompts(prompt_ids=["1", ids])


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.jsonl").write_text('{"prompt": ')
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("nowhere", "bytes", ".", "nowhere.jsonl", "broken.jsonl", "empty.jsonl"):
        with pytest.raises(InputError, match=name) as error:
            prompts(prompt_file=[str(tmp_path / name)])
        assert "\n" not in str(error.value)


def test_a_conversation_needs_a_template():
    for tokenizer in (None, SimpleNamespace(has_template=False)):
        with pytest.raises(InputError, match="--interactive needs a tokenizer with a chat template"):
            chat(SimpleNamespace(tokenizer=tokenizer), Sampling(), None)


def test_a_turn_that_does_not_fit_is_said_and_forgotten(golden, capsys, monkeypatch):
    lines = iter(["x" * 500, "", "hi", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    model = load(golden, compile=False, max_seq_len=64)
    assert chat(model, Sampling(5), None) == 0
    out, err = capsys.readouterr()
    assert "error: the prompt has at least " in err and "tokens (505 characters)" in err
    assert "(/reset starts over)" in err
    assert out == load(golden, compile=False).generate("hi", max_new_tokens=5).text + "\n"


def test_a_trace_that_cannot_be_written(golden, tmp_path):
    model = load(golden, compile=False)
    job = model.job(["hi"], [Sampling(3)])
    trace = Trace(model.decoder)
    list(trace.watch(job))
    with pytest.raises(InputError, match=r"--trace .*: cannot be written"):
        trace.save(tmp_path / "nowhere" / "trace", job.results()[0])
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--trace .*: cannot be written"):
        trace.save(tmp_path / "file" / "trace", job.results()[0])


def test_a_failing_compiler_is_one_line():
    for text, reason in (("\nfirst line\nsecond", "first line"), ("", "TorchDynamoException")):
        with pytest.raises(InputError, match=rf"torch\.compile failed \({reason}\); try --no-compile"):
            with compile_errors():
                raise torch._dynamo.exc.TorchDynamoException(text)
    with pytest.raises(ValueError, match="ours"), compile_errors():
        raise ValueError("ours")
