"""Mistakes answer at once: what each command says of options and files that cannot be, before torch is there.

The table is a corpus: a row for each way found so far in which an option took seconds, was taken for
something else, or was answered with several lines.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

LONGEST = 1.0  # seconds of processor time that a mistake may take
RUN = """
import contextlib, importlib, io, json, sys, time
command, lines = sys.argv[1], json.loads(sys.stdin.read())
import common.gpus
common.gpus.why_no_gpu = lambda: "NO-GPU"  # whatever this machine has
main, found = importlib.import_module(command).main, []
for argv in lines:
    said, began = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(said):
        try:
            status = main(argv)
        except SystemExit as e:
            status = e.code
    found.append([status, said.getvalue(), time.process_time() - began, "torch" in sys.modules])
print(json.dumps(found))
"""
# Of every command: options, and what is said of them. TARGET, FIFO and so on are made below.
ASKED = {
    "generate": ("--checkpoint", "TARGET", "--prompt", "x"), "serve": ("--checkpoint", "TARGET"),
    "evaluate": ("--checkpoint", "TARGET", "--out", "OUT"),
    "quantize": ("--checkpoint", "TARGET"), "convert_checkpoint": ("--checkpoint", "PUBLISHED"),
    "drafters.rest": ("build", "--checkpoint", "TARGET", "--out", "OUT"),
    "checkpoint.export": ("--checkpoint", "TARGET", "--head", "HEAD", "--out", "OUT"),
}
DECODING = "generate serve evaluate"
MISTAKES = (
    ("generate serve", "--checkpoint NOWHERE", "--checkpoint NOWHERE: no such file or folder; name a"),
    ("generate serve convert_checkpoint", "--checkpoint TEXT", "--checkpoint TEXT: not a folder, nor a .g"),
    ("generate serve convert_checkpoint", "--checkpoint FOLDER", "FOLDER: holds no config.json; name the"),
    ("generate serve convert_checkpoint", "--checkpoint /dev/zero", "/dev/zero: not a folder, nor a .gguf"),
    ("drafters.rest", "--checkpoint NOWHERE TEXT", "NOWHERE: not a folder; convert a"),
    ("evaluate", "--checkpoint NOWHERE", "NOWHERE: not a folder; convert a"),
    (DECODING, "--checkpoint HEAD", "HEAD: holds a eagle3 checkpoint where a target was expected"),
    (DECODING, "--max-seq-len 1", "--max-seq-len 1: must be at least 2"),
    (DECODING, "--max-seq-len 1000000", "--max-seq-len 1000000: must be 2 to 512, the model's maximum"),
    (DECODING, "--max-seq-len 2e3", "invalid int value: '2e3'; see --help"),
    (DECODING, "--max-seq-len " + "9" * 5000, "invalid int value: '9999"),
    (DECODING, "--threads 0", "--threads 0: must be 1 to 1,024"),
    (DECODING, "--device gpu", "--device gpu: models run on cpu, cuda and cuda:N; name one of these"),
    (DECODING, "--isa avx9", "--isa avx9: unknown; choose from amx"),
    (DECODING, "--dtype int3", "dtype 'int3': unknown; choose from bf16"),
    (DECODING, "--kv int4", "argument --kv: invalid choice: 'int4'"),
    (DECODING, "--kv fp8 --device cpu", "--kv fp8: our CPU kernels have int8 caches and none in fp8; take"),
    (DECODING, "--offload 2", "'2' is neither auto nor a whole number of at least 3: two layers have"),
    (DECODING, "--offload all", "'all' is neither auto nor a whole number of at least 3"),
    (DECODING, "--offload 9", "--offload 9: TARGET has 8 layers"),
    (DECODING, "--offload 4 --device cpu", "--offload 4: keeps weights in the host's memory, where --device"),
    (DECODING, "--offload 3", "--offload 3: needs a GPU, and NO-GPU; leave it out"),
    (DECODING, "--offload auto", "--offload auto: needs a GPU, and NO-GPU; leave it out"),
    (DECODING, "--device cuda:1", "--device cuda:1: needs a GPU, and NO-GPU; leave it out"),
    (DECODING, "--device mps", "--device mps: models run on cpu, cuda and cuda:N; name one of these"),
    (DECODING, "--speculate magic", "magic"),
    (DECODING, "--speculate rest", "--speculate rest: name a store with --datastore; python -m drafters"),
    (DECODING, "--speculate rest --datastore NOWHERE", "--datastore NOWHERE: no store, it holds no store"),
    (DECODING, "--speculate lookup+rest --datastore TEXT", "--datastore TEXT: no store, it holds no store"),
    (DECODING, "--speculate rest --datastore STORE", "STORE/suffixes.bin: is 5 bytes; expected 40, as store"),
    (DECODING, "--speculate rest --datastore OTHERS", "OTHERS: made for a vocabulary of 7, the target has"),
    (DECODING, "--speculate rest --datastore DAMAGED", "DAMAGED/store.json: tokens is 0; expected a whole"),
    (DECODING, "--speculate rest --draft-tokens 1", "--draft-tokens 1: must be 2 to 1,024"),
    (DECODING, "--speculate eagle3+eagle3", "two different methods that draft can be joined"),
    (DECODING, "--speculate eagle3 --draft NOWHERE", "--draft NOWHERE: not a folder"),
    (DECODING, "--speculate eagle3 --tree 9999999,7,10", "9999999 nodes, but depth 7 and width 10 only"),
    (DECODING, "--speculate eagle3 --tree 5000,1000,5000", "tree: 5,000 nodes on 1,001 levels, at most"),
    (DECODING, "--speculate eagle3 --tree NOWHERE", "--tree NOWHERE: none of auto, paper, T,D,K or"),
    (DECODING, "--speculate eagle3 --tree FIFO", "FIFO: is a pipe; expected a file"),
    (DECODING, "--speculate medusa", "TARGET/medusa: no medusa head there; convert one into it, name it"),
    (DECODING, "--speculate lookup+eagle2", "TARGET/eagle: no eagle head there; convert one into it"),
    (DECODING, "--speculate draft-model", "--speculate draft-model: name a smaller converted model of the"),
    (DECODING, "--speculate draft-model --draft HEAD", "HEAD: holds a eagle3 checkpoint where a target was"),
    (DECODING, "--speculate eagle3 --draft TARGET", "TARGET: holds a target checkpoint where a eagle3 was"),
    (DECODING, "--speculate lookahead --level 2", "--level 2: must be 3 to 1,024"),
    (DECODING, "--speculate lookahead --window 0", "--window 0: must be 1 to 1,024"),
    (DECODING, "--speculate eagle3 --window 3", "--window belongs to --speculate lookahead"),
    (DECODING, "--speculate eagle3 --draft-window -1", "--draft-window -1: must be at least 1 token, or 0"),
    (DECODING, "--speculate lookup --draft-window 9", "--draft-window 9: is for heads with attention (eagle"),
    (DECODING, "--speculate none --draft-window 9", "--draft-window 9: is for heads with attention (eagle"),
    (DECODING, "--speculate lookahead --level 1024", "guess set 7: 14322 rows a pass, at most 1024"),
    (DECODING, "--speculate lookup --tree 8,2,4", "--speculate lookup: has no use for --tree; leave it out"),
    (DECODING, "--speculate lookup+lookahead --draft HEAD", "lookahead: has no use for --draft; leave"),
    (DECODING, "--speculate eagle3 --tree " + "9" * 5000 + ",1,1", "...: numbers of so many digits; at most"),
    (DECODING, "--device ", "argument --device: is empty; give a value"),
    (DECODING, "--tree \udcff", "argument \\udcff: is no UTF-8"),
    (DECODING, "--no-such-flag", "unrecognized arguments: --no-such-flag; see --help"),
    (DECODING, "--no\x1b[31mred", "unrecognized arguments: --no\\x1b[31mred"),
    ("generate evaluate", "--temperature nan", "nan"),
    ("generate evaluate", "--temperature 1e400", "inf"),
    ("generate evaluate", "--max-new-tokens 0", "--max-new-tokens 0: must be at least 1"),
    ("generate evaluate", "--seed 1.5", "'1.5' is no whole number from -2^63 to 2^64 - 1"),
    ("generate evaluate", "--seed " + "9" * 30, "is no whole number from -2^63 to 2^64 - 1"),
    ("generate evaluate", "--max-new-tokens " + "9" * 30, "must be at least 1 and below 2^31"),
    ("generate", "--json-schema ", "argument --json-schema: is empty; give a value"),
    ("generate", "--trace ", "argument --trace: is empty; give a value"),
    ("generate", "--tree-width 2", "--tree-width 2: plain decoding drafts no tree; add --speculate"),
    ("generate", "--speculate lookup --tree-nodes 8", "--speculate lookup: has no use for --tree; leave it"),
    ("generate", "--top-p nan", "--top-p nan: must be above 0 and at most 1"),
    ("generate", "--top-k 4294967296", "--top-k 4294967296: must be 0 to 2,147,483,647"),
    ("generate", "--logit-bias 1=nan", "'1=nan' is no ID=X"),
    ("generate", "--logit-bias 1=1000", "'1=1000' is no ID=X"),
    ("generate", "--logit-bias 5=1 --logit-bias 300=1", "--logit-bias 300: no token id of the target, which"),
    ("generate", "--system x --raw", "--system: is written by the chat template, which --raw leaves out"),
    ("generate serve", "--speculate eagle3+medusa --draft HEAD", "--draft HEAD: both take a head; convert"),
    ("generate", "--prompt-ids 299,300", "--prompt-ids 300: no token id of the target, which has 0 to 299"),
    ("generate", "--prompt-ids 1,-1", "--prompt-ids -1: no token id of the target, which has 0 to 299"),
    ("generate", "--prompt-ids 1,x", "--prompt-ids '1,x': expected numbers separated by commas"),
    ("generate", "--prompt-ids 99999999999", "--prompt-ids '99999999999': a token id is below 2^31"),
    ("generate", "--prompt-file NOWHERE", "--prompt-file NOWHERE: no such file"),
    ("generate", "--prompt-file FOLDER", "--prompt-file FOLDER: is a folder; expected a file"),
    ("generate", "--prompt-file FIFO", "FIFO: is a pipe; expected a file"),
    ("generate", "--prompt-file /dev/zero", "/dev/zero: is a device; expected a file"),
    ("generate", "--prompt-file SPARSE", "SPARSE: is 1,099,511,627,776 bytes; expected at most 134,217,728"),
    ("generate", "--prompt-file LATIN1", "LATIN1: cannot be read, it is no UTF-8 (byte 3)"),
    ("generate", "--json-schema FIFO", "FIFO: is a pipe; expected a file"),
    ("generate", "--json-schema LATIN1", "LATIN1: cannot be read, it is no UTF-8"),
    ("generate", "--json-schema BADSCHEMA", "--json-schema BADSCHEMA: the JSON schema cannot be used"),
    ("generate", "--json-schema DEEP", "DEEP: cannot be read as JSON"),
    ("generate", "--trace /dev/full", "--trace /dev/full: cannot be written"),
    ("generate", "--trace NOWHERE/file", "--trace NOWHERE/file: not a file that can be written"),
    ("generate", "--trace FOLDER", "--trace FOLDER: not a file that can be written"),
    ("serve", "--port 70000", "--port 70000: must be 0 to 65,535"),
    ("serve", "--time-limit nan", "--time-limit nan: must be 0.1 to"),
    ("serve", "--grace inf", "--grace inf: must be 0 to"),
    ("serve", "--queue -1", "'-1' is no whole number of at least 1"),
    ("serve", "--slots 0", "--slots 0: must be 1 to 256"),
    ("serve", "--api-key k\u00e9y", "--api-key: holds what a header of HTTP cannot; take signs of ASCII"),
    ("serve", "--api-key ", "argument --api-key: is empty; give a value"),
    ("serve", "--host a..b", "--host a..b: is no name of a machine and no address"),
    ("evaluate", "--out FOLDERS", "--out FOLDERS: holds something else than an evaluation; choose another"),
    ("evaluate", "--questions ", "argument --questions: is empty; give a value"),
    ("evaluate", "--temperature 0,x", "--temperature 0,x: could not convert string to float"),
    ("evaluate", "--questions FIFO", "--questions FIFO: is a pipe; expected a file"),
    ("evaluate", "--questions NOWHERE", "--questions NOWHERE: no such file"),
    ("evaluate", "--questions TEXT", "TEXT: line 1 is no JSON object"),
    ("evaluate", "--questions FOLDER", "FOLDER: holds no question files (*.jsonl, */question.jsonl)"),
    ("evaluate", "--accept eagle3=all", "--accept eagle3=all: choose from equal"),
    ("evaluate", "--draft medusa=x", "--draft medusa=x: medusa is none of eagle3"),
    ("quantize evaluate", "--out " + "x" * 300, "cannot be written to (File name too long)"),
    ("generate", "--trace FIFO", "--trace FIFO: is a pipe; expected a file"),
    ("generate", "--trace /proc/x", "--trace /proc/x: cannot be written (No such file or directory)"),
    ("evaluate", "--out RUN --max-new-tokens 9", "RUN: holds answers made with other options (max_new"),
    ("convert_checkpoint", "--checkpoint TARGET", "--checkpoint TARGET: is already converted"),
    ("serve", "--cors nonsense", "--cors nonsense: an origin is *, or such as https://host or"),
    (DECODING, "--kv fp8", "--kv fp8: our CPU kernels have int8 caches and none in fp8; take --kv int8"),
    ("quantize", "--checkpoint NOWHERE", "NOWHERE: not a folder"),
    ("quantize", "--checkpoint QUANTISED", "QUANTISED: is quantised already; name the checkpoint before"),
    ("quantize", "--checkpoint PARTLY", "PARTLY/eagle3: is quantised already; name the checkpoint before"),
    ("quantize", "--out /dev/null", "--out /dev/null: not a folder that can be written to"),
    ("quantize", "--out TEXT", "--out TEXT: not a folder that can be written to"),
    ("quantize", "--out FOLDER", "FOLDER: exists and is not one of our checkpoint folders; choose another"),
    ("quantize", "--out HEAD --force", "HEAD: holds a 'eagle3' checkpoint, a target may not replace it"),
    ("quantize", "--mode int8 --group 64", "--group 64: is for int4 and w4a8; --mode int8 has no groups"),
    ("quantize", "--mode fp8 --group 32", "--group 32: is for int4 and w4a8; --mode fp8 has no groups"),
    ("quantize", "--mode int4 --calibrate LATIN1", "--calibrate LATIN1: cannot be read, it is no UTF-8"),
    ("quantize", "--text LATIN1", "--text LATIN1: cannot be read, it is no UTF-8 (byte 3)"),
    ("quantize", "--group 33", "argument --group: invalid choice: 33"),
    ("quantize", "--text FIFO", "--text FIFO: is a pipe; expected a file"),
    ("quantize", "--mode int4 --calibrate /dev/zero", "--calibrate /dev/zero: is a device"),
    ("convert_checkpoint", "--checkpoint NOWHERE", "--checkpoint NOWHERE: no such file or folder"),
    ("convert_checkpoint", "--out TEXT", "--out TEXT: not a folder that can be written to"),
    ("convert_checkpoint", "--target NOWHERE", "--target NOWHERE: not a folder"),
    ("convert_checkpoint", "--aux-layers 1,,2", "takes layer numbers such as 2,15,27, got '1,,2'"),
    ("convert_checkpoint", "--aux-layers " + "9" * 5000, "takes layer numbers such as 2,15,27, got"),
    ("convert_checkpoint", "--template FIFO", "FIFO: is a pipe; expected a file"),
    ("drafters.rest", "FIFO", "FIFO: is a pipe; expected a file"),
    ("drafters.rest", "TEXT NOWHERE", "NOWHERE: no such file"),
    ("drafters.rest", "TEXT --out FOLDER", "FOLDER: exists and is no store; choose another --out"),
    ("drafters.rest", "TEXT --out TEXT", "--out TEXT: not a folder that can be written to"),
    ("drafters.rest", "TEXT --out /proc", "--out /proc: is mounted, and cannot be replaced; name a"),
    ("checkpoint.export", "--out /proc", "--out /proc: is mounted, and cannot be replaced; name a"),
    ("checkpoint.export", "--checkpoint HEAD", "HEAD: holds a eagle3 checkpoint where a target was expected"),
    ("checkpoint.export", "--head NOWHERE", "--head NOWHERE: not a folder"),
    ("checkpoint.export", "--head TARGET", "--head TARGET: holds a target, no draft head"),
    ("checkpoint.export", "--head QUANTISED", "QUANTISED: quantised; export the head before quantisation"),
    ("checkpoint.export", "--layout vllm", "argument --layout: invalid choice: 'vllm'"),
    ("checkpoint.export", "--out WRITTEN", "WRITTEN: holds a model.safetensors; replace it with --force"),
    ("checkpoint.export", "--out TARGET --force", "--out TARGET: holds a converted checkpoint; choose"),
    ("checkpoint.export", "--out HEAD --force", "--out HEAD: holds a converted checkpoint; choose another"),
    ("checkpoint.export", "--out TEXT", "--out TEXT: not a folder that can be written to"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The folder in which commands are run, with what the table names. No weights: nothing may be loaded."""
    folder = tmp_path_factory.mktemp("mistakes")
    config = {"format": 2, "kind": "target", "max_seq_len": 512, "vocab_size": 300, "stop_ids": []}
    config |= {"num_layers": 8, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4}
    config |= {"num_kv_heads": 2, "head_dim": 16}
    for name, kind in (("TARGET", "target"), ("HEAD", "eagle3"), ("TARGET/eagle3", "eagle3")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config | {"kind": kind}))
    (folder / "PUBLISHED").mkdir()
    (folder / "PUBLISHED" / "config.json").write_text("{}")
    (folder / "RUN").mkdir()
    asked = {"checkpoint": str(folder / "TARGET"), "max_new_tokens": 64, "seed": 0, "dtype": None}
    (folder / "RUN" / "options.json").write_text(json.dumps(asked | {"kernels": True}))
    (folder / "QUANTISED").mkdir()
    config |= {"quantization": {}}
    config |= {"kind": "eagle3"}
    (folder / "QUANTISED" / "config.json").write_text(json.dumps(config))
    (folder / "PARTLY" / "eagle3").mkdir(parents=True)
    (folder / "PARTLY" / "config.json").write_bytes((folder / "TARGET" / "config.json").read_bytes())
    (folder / "PARTLY" / "eagle3" / "config.json").write_text(json.dumps(config))
    about = {"vocab_size": 300, "tokenizer": "0" * 64, "tokens": 10, "suffixes": "int32"}
    for name, changed in (("STORE", {}), ("OTHERS", {"vocab_size": 7}), ("DAMAGED", {"tokens": 0})):
        (folder / name).mkdir()
        (folder / name / "store.json").write_text(json.dumps(about | changed))
        (folder / name / "tokens.bin").write_bytes(bytes(40))
        (folder / name / "suffixes.bin").write_bytes(b"short")
    (folder / "WRITTEN").mkdir()
    (folder / "WRITTEN" / "model.safetensors").touch()
    (folder / "FOLDER").mkdir()
    (folder / "FOLDERS" / "inside").mkdir(parents=True)
    os.mkfifo(folder / "FIFO")
    with open(folder / "SPARSE", "wb") as file:
        file.truncate(1 << 40)
    (folder / "LATIN1").write_bytes("caf\xe9".encode("latin-1"))
    (folder / "DEEP").write_text("[" * 100_000)
    (folder / "TEXT").write_text("some words")
    (folder / "BADSCHEMA").write_text('{"type": "objec"}')
    return folder


@pytest.mark.parametrize("command", ASKED)
def test_mistakes_answer_at_once(command, place):
    rows = [(options, words) for commands, options, words in MISTAKES if command in commands.split()]
    lines = [[*ASKED[command], *options.split(" ")] for options, _ in rows]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, command], input=json.dumps(lines), text=True, env=env, cwd=place,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    for (options, words), (status, said, seconds, torch) in zip(rows, json.loads(done.stdout), strict=True):
        options = options[:60]
        assert words in said, (options, said)
        assert status in (1, 2) and said.count("\n") == 1 and len(said) < 2000, (options, said)
        assert not torch and seconds < LONGEST, (options, seconds)


def test_a_negative_seed_is_a_seed():
    """64 bits count: it is what it is taken for, and no random one. In all commands."""
    import torch

    import evaluate
    import generate
    import train
    from common.cli import seed
    from sampling.noise import seed_keys

    assert torch.equal(seed_keys([seed("-1")]), seed_keys([seed(str(2**64 - 1))]))
    assert not torch.equal(seed_keys([seed("-1")]), seed_keys([1]))
    for command in (evaluate, generate, train):
        options = ["--checkpoint", "x", "--out", "x"][: 2 if command is generate else 4]
        assert command.parser().parse_args([*options, "--seed", "-1"]).seed == 2**64 - 1
    assert torch.Generator().manual_seed(seed("-1")).initial_seed() == 2**64 - 1
