"""The rules of train.py's options, one by one, without loading anything."""
import argparse

import pytest
from helpers.refusals import refused

import train

TEXT = ("--synthesize", "9")
EAGLE1, MEDUSA = (*TEXT, "--kind", "eagle"), (*TEXT, "--kind", "medusa")
BLOCK = "--kind p-eagle, dflash and dspark; leave it out"
WIDTH = "has the target's width; leave out --hidden-size and the like"

REFUSED = (
    ((), "nothing to train on: give --prompts FILE, --synthesize N, --conversations FILE, --shards FOLDER"),
    ((*TEXT, "--work", "head"), "--out head: --work head is the same or lies"),
    ((*TEXT, "--work", "head/work"), "--out head: --work head/work is the same or"),
    ((*TEXT, "--work", "file"), "--work file: not a folder that can be written to"),
    ((*TEXT, "--work", "file/work"), "--work file/work: not a folder that can be written to"),
    ((*TEXT, "--out", "file"), "--out file: not a folder that can be written to"),
    ((*TEXT, "--out", "file/head/"), "--out file/head/: not a folder that can be written to"),
    ((*TEXT, "--cache-features", "file"), "--cache-features file: not a folder that can be"),
    ((*TEXT, "--limit", "3"), "--limit: belongs to --prompts; leave it out"),
    (("--prompts", "p", "--turns", "3"), "--turns: belongs to --synthesize; leave it out"),
    (("--prompts", "p", "--openings", "o"), "--openings: belongs to --synthesize; leave it out"),
    ((*TEXT, "--max-new-tokens", "2"), "--max-new-tokens 2: must be at least 3"),
    ((*TEXT, "--max-len", "3"), "--max-len 3: must be at least 4"),
    ((*MEDUSA, "--guesses", "65"), "--guesses 65: must be 1 to 64"),
    ((*MEDUSA, "--blocks", "65"), "--blocks 65: must be 1 to 64"),
    ((*TEXT, "--guesses", "3"), "--guesses: belongs to --kind medusa and hydra; leave it out"),
    ((*EAGLE1, "--blocks", "3"), "--blocks: belongs to --kind medusa and hydra; leave it out"),
    ((*MEDUSA, "--prefix"), "--prefix: belongs to --kind hydra; leave it out"),
    ((*TEXT, "--no-prefix"), "--prefix: belongs to --kind hydra; leave it out"),
    *(((*MEDUSA, flag, "8"), f"--kind medusa: {WIDTH}") for flag in
      ("--hidden-size", "--intermediate-size", "--heads", "--kv-heads", "--head-dim")),
    ((*TEXT, "--kind", "hydra", "--heads", "8"), f"--kind hydra: {WIDTH}"),
    ((*MEDUSA, "--start", "h"), "--start h: not for --kind medusa; leave it out"),
    ((*TEXT, "--start", "h", "--states", "3"), "--start h: its sizes and states are taken; leave out"
     " --states, --hidden-size and the like"),
    ((*TEXT, "--layers", "2"), f"--layers: belongs to {BLOCK}"),
    ((*TEXT, "--drafts", "2"), f"--drafts: belongs to {BLOCK}"),
    ((*TEXT, "--markov-rank", "2"), f"--markov-rank: belongs to {BLOCK}"),
    ((*TEXT, "--kind", "dflash", "--markov-rank", "2"), "--markov-rank 2: a DFlash head with a Mark"),
    ((*TEXT, "--no-confidence"), f"--confidence: belongs to {BLOCK}"),
    ((*TEXT, "--anchors", "1"), f"--anchors: belongs to {BLOCK}"),
    ((*TEXT, "--kind", "dflash", "--anchors", "0"), "--anchors 0.0: must be 0.001 to 1"),
    ((*TEXT, "--kind", "dflash", "--steps", "3"), "--steps: belongs to --kind eagle3; leave it out"),
    ((*TEXT, "--kind", "dflash", "--keep", "0.5"), "--keep: belongs to --kind p-eagle; leave it out"),
    ((*TEXT, "--ce-share", "0.5"), "--ce-share: belongs to --loss lk and coupled; leave it out"),
    ((*TEXT, "--loss", "lk", "--ce-share", "2"), "--ce-share 2.0: must be 0 to 1"),
    ((*EAGLE1, "--loss", "coupled"), "--loss coupled: EAGLE-1 learns the target's features; leave it out"),
    ((*EAGLE1, "--states", "2"), "--states: belongs to other kinds; leave it out"),
    ((*TEXT, "--temperature", "-0.1"), "--temperature -0.1: must be 0 to 1,000,000"),
    ((*TEXT, "--temperature", "nan"), "--temperature nan: must be 0 to 1,000,000"),
    ((*TEXT, "--noise", "1001"), "--noise 1001.0: must be 0 to 1,000"),
    ((*TEXT, "--warmup", "0.91"), "--warmup 0.91: must be 0 to 0.9"),
    ((*TEXT, "--weight-decay", "-1"), "--weight-decay -1.0: must be 0 to 1"),
    ((*TEXT, "--ema", "1"), "--ema 1.0: must be 0 to 0.99999"),
    ((*TEXT, "--lr", "0"), "--lr 0.0: must be above 0 and below 1,000,000"),
    ((*TEXT, "--lr", "nan"), "--lr nan: must be above 0 and below 1,000,000"),
    ((*TEXT, "--clip", "-1"), "--clip -1.0: must be above 0 and below 1,000,000"),
    ((*TEXT, "--clip", "1e6"), "--clip 1000000.0: must be above 0 and below 1,000,000"),
    ((*TEXT, "--epochs", "2", "--short-epochs", "3"), "--short-epochs 3: there are 2 epochs"),
    ((*TEXT, "--validate-tokens", "1"), "--validate-tokens 1: must be at least 2"),
    ((*MEDUSA, "--layout", "both"), "--layout both: has no place for a head of --kind medusa"),
    ((*EAGLE1, "--layout", "speculators"), "--layout speculators: has no place for a head of --kind eagle"),
)
ALLOWED = (
    TEXT, MEDUSA, (*TEXT, "--seed", "-1"), ("--prompts", "p", "--limit", "3"), ("--conversations", "c"),
    ("--shards", "a", "--shards", "b"), (*TEXT, "--turns", "2", "--openings", "o"),
    (*MEDUSA, "--guesses", "3", "--blocks", "2"),
    (*TEXT, "--kind", "dspark", "--layers", "2", "--drafts", "5", "--markov-rank", "0", "--states", "4"),
    (*TEXT, "--kind", "p-eagle", "--keep", "0.5", "--anchors", "1", "--loss", "coupled", "--ce-share", "0"),
    (*TEXT, "--kind", "hydra", "--no-prefix"), (*TEXT, "--hidden-size", "32", "--layout", "both"),
    (*TEXT, "--temperature", "0", "--noise", "0", "--warmup", "0.9", "--ema", "0.99999"),
    (*TEXT, "--weight-decay", "0", "--lr", "1", "--clip", "99"),
    (*TEXT, "--validate-tokens", "2", "--epochs", "2", "--short-epochs", "2", "--cache-features"),
    (*TEXT, "--out", "runs/new/head", "--work", "runs/new/work", "--cache-features", "features"),
)
EXITS = (
    ("--tree", "1,2"), ("--tree", "x"), ("--tree", "60,1,2"), ("--kind", "rest"), ("--dtype", "fp16"),
    ("--dtype", "float16"), ("--dtype", "int8"), ("--layout", "none"), ("--schedule", "none"),
    ("--seed", "1.5"), ("--steps", "0"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)


def read(*options: str) -> argparse.Namespace:
    return train.parser().read(["--checkpoint", "target", "--out", "head", *options])


@pytest.mark.parametrize("options, words", REFUSED, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_a_rule_that_is_broken(options, words):
    with refused(words):
        read(*options)


@pytest.mark.parametrize("options", ALLOWED, ids=" ".join)
def test_what_no_rule_forbids(options):
    read(*options)


@pytest.mark.parametrize("options", EXITS, ids=" ".join)
def test_what_the_parser_refuses(options, capsys):
    with pytest.raises(SystemExit) as error:
        read(*TEXT, *options)
    assert error.value.code == 2 and options[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "fp32", "float32"])
def test_dtypes_have_two_names(name):
    assert read(*TEXT, "--dtype", name).dtype == ("bf16" if name.startswith("b") else "fp32")


def test_a_mistake_is_one_line_and_status_1(capsys):
    assert train.main(["--checkpoint", "target", "--out", "head"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: nothing to train on")
