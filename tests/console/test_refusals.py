"""generate.py refuses in one line: exit status 1 for a bad value, 2 for what cannot be parsed."""
import shutil

import pytest

import generate

PROMPT = "--prompt x"
EAGLE3 = "--prompt x --speculate eagle3"
TALK = "--interactive reads its prompts from you"
TREE = "leave out --tree-nodes, --tree-depth and --tree-width"
KERNELS = "is for the kernels; leave out --no-kernels"

# Options after --checkpoint GOLDEN, and the beginning of the error. FILES is a folder of `files`.
REFUSED = (
    ("", "no prompt: give --prompt TEXT (-p - reads standard input), --prompt-file, --prompt-ids or --inter"),
    ("--prompt-file -", "--prompt-file -: standard input is empty; give a text"),
    ("--prompt-file FILES/empty", "--prompt-file FILES/empty: the file is empty; give a text"),
    *((f"--interactive {other}", TALK) for other in (
        PROMPT, "--prompt-ids 1,2", "--prompt-file f", "--json", "--compare", "--trace f", "--num-samples 2",
        "--raw",
    )),
    (f"{PROMPT} --batch-size 0", "--batch-size 0: must be at least 1"),
    (f"{PROMPT} --temperature nan", "--temperature is nan; expected a finite number"),
    (f"{PROMPT} --top-p 0", "--top-p is 0.0; expected above 0"),
    (f"{PROMPT} --logprobs 2", "--logprobs 2: log-probabilities are printed with --json"),
    (f"{PROMPT} --json-object --json-schema x", "--json-schema x: leave out --json-object"),
    (f"{PROMPT} --device cuda:7", "--device cuda:7: "),
    (f"{PROMPT} --isa avx2 --no-kernels", f"--isa avx2: {KERNELS}"),
    (f"{PROMPT} --kv int8 --no-kernels", "--kv int8: only our CPU kernels have an int8 cache"),
    (f"{PROMPT} --no-parse-special", "--no-parse-special: is for prompts without the chat template; add"),
    (f"{PROMPT} --system s --raw", "--system: is written by the chat template, which --raw"),
    (f"{PROMPT} --speculate magic", "--speculate magic: unknown; choose from none"),
    (f"{PROMPT} --draft folder", "--speculate none: has no use for --draft"),
    (f"{PROMPT} --tree paper", "--speculate none: has no use for --tree"),
    (f"{PROMPT} --tree-depth 2", "--speculate none: has no use for --tree; leave it out or name"),
    (f"{PROMPT} --accept residual", "--accept residual: is for --speculate draft-model"),
    (f"{EAGLE3} --accept residual", "--accept residual: is for --speculate draft-model"),
    (f"{EAGLE3} --shard-head", "--shard-head: deals what drafts among ranks; add --speculate, and"),
    (f"{EAGLE3} --tree-nodes 1", "--tree-nodes 1: must be 2 to 1,024"),
    (f"{EAGLE3} --tree-width 97", "tree: width 97 exceeds the head's vocabulary of 96"),
    (f"{EAGLE3} --tree-nodes 60 --tree-depth 1 --tree-width 2", "tree: 60 nodes, but depth 1 and width 2"),
    (f"{EAGLE3} --tree paper --tree-nodes 8", f"--tree paper: {TREE}"),
    (f"{PROMPT} --checkpoint FILES/half", "FILES/half/model.safetensors: "),
    (f"{PROMPT} --prompt y --trace t", "--trace records one sequence: give one prompt and one sample"),
    (f"{PROMPT} --trace FILES", "--trace FILES: not a file that can be written"),
    (f"{PROMPT} --max-seq-len 5000", "--max-seq-len 5000: must be 2 to 1024, the model's maximum"),
    (f"--prompt {'x' * 50} --max-seq-len 20", "the prompt has "),
    (f"{PROMPT} --num-samples 100000 --batch-size 100000", "the caches of 100000 x "),
    (f"{PROMPT} --logit-bias 5=nan", "--logit-bias[0][1] is nan; expected a finite number"),
    (f"{PROMPT} --logit-bias 99999999=1", "logit_bias holds token id 99999999, the vocabulary is 0..319"),
    ("--prompt-ids 1,320", "the prompt holds token id 320, the vocabulary is 0..319"),
    *((f"--prompt-ids {ids}", f"--prompt-ids '{ids}': expected numbers separated by commas")
      for ids in ("1,", "1,two", "1.5", "1;2")),
    ("--prompt-file FILES", "--prompt-file FILES: is a folder;"),
    ("--prompt-file FILES/bytes", "--prompt-file FILES/bytes: "),
    ("--prompt-file FILES/broken.jsonl", "FILES/broken.jsonl: "),
    ("--prompt-file FILES/empty.jsonl", "FILES/empty.jsonl: holds no prompts"),
)
UNPARSED = (
    (f"{PROMPT} --dtype int3", "int3"),
    (f"{PROMPT} --logit-bias 5", "ID=X"),
    (f"{PROMPT} --accept all", "all"), (f"{PROMPT} --top-k many", "many"), ("--no-such", "--no-such"),
    (f"{PROMPT} --seed {'1' * 21}", "from -2^63 to 2^64 - 1"), (f"{PROMPT} --draft=", "is empty; give a"),
)


@pytest.fixture(scope="module")
def files(golden, tmp_path_factory):
    """Prompts that cannot be read, and a target whose weights are cut short."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "bytes").write_bytes(b"\xff\xfe\x00")
    (folder / "broken.jsonl").write_text('{"prompt": ')
    for name in "empty", "empty.jsonl":
        (folder / name).write_text("")
    shutil.copytree(golden, folder / "half")
    data = (golden / "model.safetensors").read_bytes()
    (folder / "half" / "model.safetensors").write_bytes(data[: len(data) // 2])
    return folder


@pytest.mark.parametrize("options, words", REFUSED, ids=[options for options, _ in REFUSED])
def test_bad_values(golden, files, capsys, monkeypatch, options, words):
    monkeypatch.setattr(generate, "STDIN", "/dev/null")
    options = options.replace("FILES", str(files)).split()
    assert generate.main(["--checkpoint", str(golden), *options, "--no-compile"]) == 1
    out, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert not out and line.startswith(f"error: {words.replace('FILES', str(files))}"), err


@pytest.mark.parametrize("options, words", UNPARSED, ids=[options for options, _ in UNPARSED])
def test_what_cannot_be_parsed(golden, capsys, options, words):
    with pytest.raises(SystemExit) as stop:
        generate.main(["--checkpoint", str(golden), *options.split()])
    assert stop.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]
