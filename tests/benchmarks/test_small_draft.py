"""small_draft.py: a part of the target, trained, drafts for it."""
import json

import pytest
import small_draft

import generate
import train


@pytest.fixture(scope="module")
def shards(golden, tmp_path_factory):
    """The text of a train.py run."""
    folder = tmp_path_factory.mktemp("shards")
    prompts = folder / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(24)))
    argv = ["--checkpoint", str(golden), "--prompts", str(prompts), "--out", str(folder / "x")]
    argv += ["--work", str(folder / "w"), "--collect-only", "--no-compile", "--max-new-tokens", "24"]
    assert train.main(argv) == 0
    return folder / "w" / "data"


def test_a_small_draft_of_the_target(golden, shards, tmp_path, capsys, refused):
    """Cut, trained, converted: it drafts for its target."""
    argv = ["--checkpoint", str(golden), "--shards", str(shards), "--out", str(tmp_path / "small")]
    argv += ["--device", "cpu"]
    assert small_draft.main([*argv, "--layers", "0,2", "--batch-tokens", "256"]) == 0
    draft = [
        "--speculate", "draft-model", "--draft", str(tmp_path / "small"), "--tree", "4,2,1", "--no-compile",
        "--json", "--compare",
    ]
    prompt = ["--checkpoint", str(golden), "--prompt", "abc", "--max-new-tokens", "12", "--dtype", "fp32"]
    capsys.readouterr()
    assert generate.main([*prompt, *draft]) == 0
    assert json.loads(capsys.readouterr().out)["equal"]
    refused(small_draft.main, *argv, "--layers", "0,99", words="has layers 0 to")
    refused(small_draft.main, *argv, "--layers", "0", words="exists")


def test_what_it_refuses(golden, int8, shards, tmp_path, refused):
    out = ("--out", tmp_path / "small", "--device", "cpu", "--layers", "0")
    words = "is quantised already; name the checkpoint before quantisation"
    refused(small_draft.main, "--checkpoint", int8, "--shards", shards, *out, words=words)
    argv = ("--checkpoint", golden, "--shards", shards, *out)
    refused(small_draft.main, *argv, "--limit", "0", words="hold no usable answers")
    words = "use a smaller --lr"
    refused(small_draft.main, *argv, "--lr", "1e30", "--batch-tokens", "64", words=words)
