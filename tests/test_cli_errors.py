"""Invalid options and files: one-line errors, before anything is written."""
import importlib
import json
import re
import shutil

import pytest
from helpers import edit

from checkpoint.load import check_config
from common.schema import InvalidValue

ASKED = {  # of every command, and of two without a prompt: its options; TARGET and so on are made below
    "generate": ("--no-compile", "--checkpoint", "TARGET", "--prompt", "x"),
    "serve": ("--checkpoint", "TARGET", "--port", "0"),
    "evaluate": ("--checkpoint", "TARGET", "--out", "OUT"),
    "train": ("--checkpoint", "TARGET", "--out", "OUT", "--prompts", "PROMPTS"),
    "quantize": ("--checkpoint", "TARGET"), "convert_checkpoint": ("--checkpoint", "PUBLISHED"),
    "drafters.ngram": ("--checkpoint", "TARGET", "--out", "OUT"),
    "checkpoint.export": ("--checkpoint", "TARGET", "--head", "HEAD", "--out", "OUT"),
    "generate:": ("--checkpoint", "TARGET"), "train:": ("--checkpoint", "TARGET", "--out", "OUT"),
}
DECODING = "generate serve evaluate"
TREE = "leave out --tree-nodes, --tree-depth and --tree-width"
MISTAKES = (
    (DECODING + " quantize train convert_checkpoint checkpoint.export", "-m NOWHERE", "NOWHERE: no"),
    ("generate serve convert_checkpoint", "--checkpoint TEXT", "TEXT: not a folder"),
    (DECODING, "--checkpoint HEAD", "HEAD: is of kind eagle3, expected target; name another"),
    (DECODING, "--max-seq-len 1000000", "--max-seq-len 1000000: must be 2 to 1024, the model's maximum"),
    (DECODING, "--device gpu", "--device gpu: models run on cpu, cuda and cuda:N; name one of these"),
    (DECODING, "--speculate eagle-3", "unknown (did you mean eagle3?); choose from none, eagle, eagle2"),
    ("evaluate", "--max-tokens 5", "arguments: --max-tokens 5 (did you mean --max-new-tokens?)"),
    ("generate", "--max-tokens 5", "arguments: --max-tokens (did you mean --max-new-tokens?)"),
    ("quantize", "--mode Q8_0", "invalid choice: 'Q8_0' (choose from 'int8', 'w8a8', 'int4', 'w4a8', 'fp8')"),
    ("quantize", "--mode Q4_K_M", "(did you mean int4?)"), ("quantize", "--mode Q5_K_M", "mean w8a8?)"),
    (DECODING, "-hf a/b", "unrecognized arguments: -hf (did you mean --checkpoint?)"),
    ("generate", "--prompt=", "the prompt is empty: give a text, token ids or messages"),
    ("generate", "--chat", "(did you mean --interactive?)"),
    ("generate", "-s 3", "(did you mean --seed?)"),
    (DECODING, "--speculate eagle4", "unknown (did you mean eagle3?)"),
    ("serve evaluate quantize", "TEXT", "error: unrecognized arguments: TEXT"),
    (DECODING, "--speculate rest", "--speculate rest: needs --datastore, the token file written by"),
    (DECODING, "--speculate rest --datastore NOWHERE", "--datastore NOWHERE: no such file; name the"),
    (DECODING, "--speculate eagle3 --draft-window -1", "--draft-window -1: must be at least 1 token, or 0"),
    (DECODING, "--speculate medusa", "TARGET/medusa: no medusa head there; use the head in TARGET with"),
    (DECODING, "--speculate draft-model", "--speculate draft-model: name a smaller converted model of the"),
    (DECODING, "--speculate lookup --tree 8,2,4", "--speculate lookup: does not take --tree; leave it out"),
    (DECODING, "--speculate eagle --draft TARGET/eagle3",
     "TARGET/eagle3: is of kind eagle3, expected eagle; name another folder; --speculate eagle3"),
    (DECODING, "--kv int8 --no-kernels", "--kv int8: only our CPU kernels have an int8 cache"),
    ("serve evaluate", "--isa avx2 --no-kernels", "--isa avx2: is for our kernels; leave out --no-kernels"),
    ("generate serve", "--shard-head", "--shard-head: shards the draft head over ranks; add --speculate"),
    ("generate", "-f FOLDER/x/yy", "--prompt-file FOLDER/x/yy: no such file"),
    ("generate", "--compare", "--compare: plain decoding would be compared with itself; add --speculate"),
    ("generate", "--prompt-ids 1,two", "argument --prompt-ids: '1,two': expected token ids"),
    ("generate", "--temperature nan", "temperature is nan; expected a finite number"),
    ("generate", "--logprobs 2", "--logprobs 2: log-probabilities are printed with --json"),
    ("generate", "--speculate eagle3 --tree paper --tree-nodes 8", f"--tree paper: {TREE}"),
    ("generate", "--speculate eagle3 --tree-nodes 60 --tree-depth 1 --tree-width 2", "tree: 60 nodes, but"),
    ("generate", "--trace t --prompt y", "--trace records one sequence: give one prompt and one sample"),
    ("generate", "--trace FOLDER", "--trace FOLDER: not a file that can be written"),
    ("generate:", "--no-compile --interactive --json", "--interactive reads its prompts from stdin"),
    ("generate:", "--no-compile", "no prompt: give --prompt TEXT (-p - reads standard input), --prompt-file"),
    ("train:", "--seed 1", "no training data: give --prompts FILE, --synthesize N"),
    ("generate", "--json-schema [1]", "the JSON schema is '[1]'; expected an object"),
    ("generate", "-m GOLDEN --max-seq-len 8 --prompt sixteen_letters_",
     "at most 8 tokens: shorten it or raise --max-seq-len (at most 1,024)"),
    ("generate", "-m GOLDEN --prompt-ids 1,320", "prompt 2 holds token id 320, the vocabulary is 0..319"),
    ("generate", "-m GOLDEN --logit-bias 320=1", "logit_bias holds token id 320, the vocabulary is 0..319"),
    ("quantize", "--mode int4 --calibrate TEXT --text ./TEXT", "name two files"),
    ("serve", "--api-key ", "--api-key: is empty; expected a key"),
    ("serve", "--cors localhost:3000", "--cors localhost:3000: expected *, or an origin such as https"),
    ("serve", "--host a..b", "--host a..b --port 0: "),
    ("evaluate", "--out FOLDERS", "--out FOLDERS: not an evaluation folder; choose another"),
    ("evaluate", "--speculate eagle3,lookup --tree auto", "--tree auto: with several methods, write"),
    ("evaluate", "--sets cod", "--sets cod: no such set (did you mean code?); choose from code, math, qa"),
    ("evaluate", "--questions FOLDER", "FOLDER: holds no question files (*.jsonl, */question.jsonl)"),
    ("evaluate", "--out RUN --max-new-tokens 9", "RUN: holds answers made with other options ("),
    ("train", "--out TEXT", "--out TEXT: not a folder that can be written to"),
    ("train", "--out FOLDER", "--out FOLDER: holds files that are not of a run with state in"),
    ("train", "--out DAMAGED", "DAMAGED-work/seconds: is 'soon', not a number of seconds; delete it"),
    ("train", "--max-prompt-tokens 800", "plus --max-new-tokens 1056: the target has 1024"),
    ("train", "--kind dflash --markov-rank 2", "--markov-rank: not for --kind dflash; leave it out"),
    ("train", "--shard-target", "--shard-target: shards the target over processes; start with torchrun"),
    ("convert_checkpoint", "--checkpoint TARGET", "TARGET: is already converted"),
    ("quantize", "--checkpoint QUANTIZED", "QUANTIZED: is quantized already (int8); name the checkpoint"),
    ("quantize", "--out FOLDER", "FOLDER: exists and is not one of our checkpoint folders; choose another"),
    ("quantize", "--out TARGET --force", "--out TARGET: is the checkpoint itself; choose another folder"),
    ("quantize", "--out HEAD --force", "HEAD: is of kind 'eagle3', which target may not replace; choose"),
    ("quantize", "--mode int8 --group 64", "--group 64: only for int4 and w4a8; --mode int8 has no groups"),
    ("quantize", "--mode int8 --calibrate TEXT", "only for --mode int4"),
    ("convert_checkpoint", "--aux-layers 1,,2", "argument --aux-layers: '' is not a whole number from 0"),
    ("drafters.ngram", "NOWHERE", "NOWHERE: no such file"),
    ("checkpoint.export", "--head TARGET", "--head TARGET: is of kind target, expected eagle3"),
    ("checkpoint.export", "--out WRITTEN", "WRITTEN: holds a model.safetensors; replace it with --force"),
    ("checkpoint.export", "--out TARGET --force", "--out TARGET: holds a converted checkpoint; choose"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory, golden):
    """The working folder of the commands, with the files the table names: only GOLDEN has weights."""
    folder = tmp_path_factory.mktemp("mistakes")
    asked = {"checkpoint": str(folder / "TARGET"), "max_new_tokens": 64, "seed": 0, "dtype": None}
    for name, content in {
        "PUBLISHED/config.json": "{}", "RUN/options.json": json.dumps(asked | {"kernels": True}),
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


@pytest.mark.parametrize("command", ASKED)
def test_errors_are_one_line(command, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    main = importlib.import_module(command.rstrip(":")).main
    before, wrong = sorted(place.rglob("*")), []
    for options, words in [(o, w) for commands, o, w in MISTAKES if command in commands.split()]:
        try:
            status = main([*ASKED[command], *options.split(" ")])
        except SystemExit as e:
            status = e.code
        out, said = capsys.readouterr()
        lines = said.splitlines()[-1:] if "-m " in options else said.splitlines()  # loading prints lines
        if out or len(lines) != 1 or words not in lines[0] or status not in (1, 2):
            wrong.append(f"{command} {options}: status {status}, expected {words!r}, printed {out + said!r}")
    assert not wrong, "\n".join(wrong)
    assert sorted(place.rglob("*")) == before


# -- shapes of models that cannot be: each number that contradicts another is named --------------------------


CONFIG = {
    "kind": "target", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "somebody_elses": 1,
}
HEAD = CONFIG | {"kind": "eagle3", "draft_vocab_size": 24, "target_hidden_size": 32, "aux_layers": [1]}


@pytest.mark.parametrize("config, change, words", [
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
def test_impossible_configs(config, change, words):
    with pytest.raises(InvalidValue, match=re.escape(words)):
        check_config(config | change)
    assert check_config(config | {"mask_id": 95, "block_size": 4}).num_layers == 2
