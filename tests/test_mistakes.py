"""Mistakes in options and in the files they name: one line each, before anything is loaded or written."""
import importlib
import json

import pytest

ASKED = {  # of every command: its options; TARGET and so on are made below, without weights
    "generate": ("--checkpoint", "TARGET", "--prompt", "x"), "serve": ("--checkpoint", "TARGET"),
    "evaluate": ("--checkpoint", "TARGET", "--out", "OUT"),
    "quantize": ("--checkpoint", "TARGET"), "convert_checkpoint": ("--checkpoint", "PUBLISHED"),
    "drafters.rest": ("build", "--checkpoint", "TARGET", "--out", "OUT"),
    "checkpoint.export": ("--checkpoint", "TARGET", "--head", "HEAD", "--out", "OUT"),
}
DECODING = "generate serve evaluate"
MISTAKES = (
    ("generate serve evaluate quantize", "--checkpoint NOWHERE", "NOWHERE: no such file or folder"),
    (DECODING, "--checkpoint FOLDERS/insid", "FOLDERS/insid: no such file or folder (did you mean FOL"),
    ("generate serve convert_checkpoint", "--checkpoint TEXT", "TEXT: not a folder"),
    ("generate serve convert_checkpoint", "--checkpoint FOLDER", "FOLDER: holds no config.json"),
    ("drafters.rest", "--checkpoint NOWHERE TEXT", "NOWHERE: not a folder; convert a"),
    (DECODING, "--checkpoint HEAD", "HEAD: is of kind eagle3, expected target; name another"),
    (DECODING, "--max-seq-len 1000000", "--max-seq-len 1000000: must be 2 to 512, the model's maximum"),
    (DECODING, "--device gpu", "--device gpu: models run on cpu, cuda and cuda:N; name one of these"),
    (DECODING, "--speculate eagle-3", "unknown (did you mean eagle3?); choose from none, eagle, eagle2"),
    (DECODING, "--speculate rest", "--speculate rest: needs --datastore, the folder that python -m drafters"),
    (DECODING, "--speculate rest --datastore NOWHERE", "--datastore NOWHERE: no such folder; name the"),
    (DECODING, "--speculate eagle3 --draft NOWHERE", "NOWHERE: no such file or folder"),
    (DECODING, "--speculate medusa", "TARGET/medusa: no medusa head there; convert one into it, name it"),
    (DECODING, "--speculate lookup+eagle2", "TARGET/eagle: no eagle head there; convert one into it"),
    (DECODING, "--speculate draft-model", "--speculate draft-model: name a smaller converted model of the"),
    (DECODING, "--speculate eagle3 --window 3", "--window belongs to --speculate lookahead"),
    (DECODING, "--speculate eagle3 --draft-window -1", "--draft-window -1: must be at least 1 token, or 0"),
    (DECODING, "--speculate lookup --tree 8,2,4", "--speculate lookup: has no use for --tree; leave it out"),
    (DECODING, "--speculate eagle --draft TARGET/eagle3", "TARGET/eagle3: is of kind eagle3, expected eagle"),
    (DECODING, "--device ", "argument --device: is empty; give a value"),
    (DECODING, "--tree \udcff", "argument \\udcff: is no UTF-8"),
    ("generate evaluate", "--max-tokens 5", "arguments: --max-tokens (did you mean --max-new-tokens?)"),
    (DECODING, "--ctx-size 99", "unrecognized arguments: --ctx-size (did you mean --max-seq-len?)"),
    (DECODING, "-t 0", "--threads 0: must be 1 to 1,024"),
    ("generate", "-f FOLDER/x/yy", "--prompt-file FOLDER/x/yy: no such file (did you mean y?)"),
    (DECODING + " quantize convert_checkpoint checkpoint.export", "-m NOWHERE", "NOWHERE: no"),
    (DECODING, "--checkpoint TARGET/config.json", "TARGET/config.json: not a folder (nor a .gguf file);"),
    ("generate", "--compare", "--compare: plain decoding would be compared with itself; add --speculate"),
    ("evaluate", "--max-new-tokens 0", "--max-new-tokens 0: must be at least 1"),
    ("generate", "--json-schema ", "argument --json-schema: is empty; give a value"),
    ("generate", "--trace ", "argument --trace: is empty; give a value"),
    ("generate", "--logit-bias 1=1000", "--logit-bias[0][1] is 1000.0; expected at most 100"),
    ("generate", "--prompt-file NOWHERE", "--prompt-file NOWHERE: no such file"),
    ("generate", "--json-schema BADSCHEMA", "the JSON schema cannot be used (Invalid type: objec)"),
    ("generate", "--trace FOLDER", "--trace FOLDER: not a file that can be written"),
    ("serve", "--port 70000", "--port 70000: must be 0 to 65,535"),
    ("serve", "--api-key ", "argument --api-key: is empty; give a value"),
    ("serve", "--host a..b", "--host a..b: is no name of a machine and no address"),
    ("evaluate", "--out FOLDERS", "--out FOLDERS: holds something else than an evaluation; choose another"),
    ("evaluate", "--questions ", "argument --questions: is empty; give a value"),
    ("evaluate", "--questions TWICE", "TWICE: question_id 1 is there twice"),
    ("evaluate", "--speculate eagle3,lookup --tree auto", "--tree auto: of which method?"),
    ("evaluate", "--tree lookup=auto", "--tree lookup=auto: lookup is none of eagle3"),
    ("evaluate", "--calibrate --speculate lookup", "no head that grows trees"),
    ("evaluate", "--questions FOLDER", "FOLDER: holds no question files (*.jsonl, */question.jsonl)"),
    ("evaluate", "--out RUN --max-new-tokens 9", "RUN: holds answers made with other options ("),
    ("convert_checkpoint", "--checkpoint TARGET", "TARGET: is already converted"),
    ("quantize", "--checkpoint NOWHERE --text MISSING", "--text MISSING: no such file"),
    ("quantize", "--checkpoint QUANTISED", "QUANTISED: is quantised already; name the checkpoint before"),
    ("quantize", "--out FOLDER", "FOLDER: exists and is not one of our checkpoint folders; choose another"),
    ("quantize", "--out HEAD --force", "HEAD: is of kind 'eagle3', which target may not replace; choose"),
    ("quantize", "--mode int8 --group 64", "--group 64: is for int4 and w4a8; --mode int8 has no groups"),
    ("quantize", "--mode int8 --calibrate TEXT", "only for --mode int4"),
    ("quantize", "--mode int4 --calibrate TEXT --text ./TEXT", "name two files"),
    ("convert_checkpoint", "--aux-layers 1,,2", "takes layer numbers such as 2,15,27, got '1,,2'"),
    ("drafters.rest", "TEXT --out FOLDER", "FOLDER: exists and is no store; choose another --out"),
    ("checkpoint.export", "--head TARGET", "--head TARGET: holds a target, no draft head"),
    ("checkpoint.export", "--head QUANTISED", "QUANTISED: is quantised already; name the checkpoint"),
    ("checkpoint.export", "--out WRITTEN", "WRITTEN: holds a model.safetensors; replace it with --force"),
    ("checkpoint.export", "--out TARGET --force", "--out TARGET: holds a converted checkpoint; choose"),
)
CONFIG = {
    "format": 2, "kind": "target", "max_seq_len": 512, "vocab_size": 300, "stop_ids": [], "num_layers": 8,
    "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
}
HEAD = CONFIG | {
    "kind": "eagle3", "num_layers": 1, "draft_vocab_size": 64, "target_hidden_size": 64,
    "aux_layers": [2, 4, 5],
}
QUANTISED = {"quantization": {"mode": "int8", "group": 0, "lm_head": True}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder in which commands are run, with what the table names."""
    folder = tmp_path_factory.mktemp("mistakes")
    files = {
        **{f"{name}/config.json": json.dumps(config) for name, config in (
            ("TARGET", CONFIG), ("HEAD", HEAD), ("TARGET/eagle3", HEAD), ("PUBLISHED", {}),
            ("QUANTISED", HEAD | QUANTISED),
        )},
        "WRITTEN/model.safetensors": "", "FOLDER/x/y": "", "FOLDERS/inside/x": "", "TEXT": "some words",
        "BADSCHEMA": '{"type": "objec"}',
        "TWICE": '{"question_id": 1, "turns": ["a"]}\n{"turns": ["b"]}\n',
    }
    asked = {"checkpoint": str(folder / "TARGET"), "max_new_tokens": 64, "seed": 0, "dtype": None}
    files["RUN/options.json"] = json.dumps(asked | {"kernels": True})
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize("command", ASKED)
def test_mistakes_are_one_line(command, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    main = importlib.import_module(command).main
    before, wrong = sorted(place.rglob("*")), []
    for options, words in [(o, w) for commands, o, w in MISTAKES if command in commands.split()]:
        try:
            status = main([*ASKED[command], *options.split(" ")])
        except SystemExit as e:
            status = e.code
        said = capsys.readouterr().err
        if words not in said or status not in (1, 2) or said.count("\n") != 1:
            wrong.append(f"{command} {options}: status {status}, expected {words!r}, printed {said!r}")
    assert not wrong, "\n".join(wrong)
    assert sorted(place.rglob("*")) == before
