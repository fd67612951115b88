"""What evaluate.py refuses, on one line each."""
import shutil

import evaluate


def test_bad_input_is_one_line(golden, tmp_path, capsys):
    def refused(words: str, **changes) -> None:
        options = {"checkpoint": golden, "out": tmp_path / "out", "limit": 1, **changes}
        argv = [str(x) for k, v in options.items() for x in (f"--{k.replace('_', '-')}", v)]
        assert evaluate.main(["--no-compile", *argv]) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and words in lines[0], lines

    refused("unknown; choose from", speculate="eagle9")
    refused("not a folder", checkpoint=tmp_path / "nothing")
    refused("--temperature", temperature="hot")
    refused("temperature must be", temperature="0,-1")
    refused("--limit", limit=0)
    refused("--observe", observe=-1)
    refused("--threads", threads=0)
    refused("max_new_tokens", max_new_tokens=0)
    refused("cannot be read", questions=tmp_path / "none.jsonl")
    (tmp_path / "empty").mkdir()
    refused("holds no question files", questions=tmp_path / "empty")
    refused("none of auto, paper", tree="bush")
    refused("no draft head", draft=tmp_path / "no")
    shutil.copytree(golden, tmp_path / "mute")
    for file in (tmp_path / "mute").glob("*token*"):
        file.unlink()
    refused("need a tokenizer and a chat template", checkpoint=tmp_path / "mute")
