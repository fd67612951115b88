"""generate.py refuses in one line: exit status 1 for a bad value, 2 for what cannot be parsed."""
import shutil

import pytest

import generate
from common.errors import InputError
from engine.runtime import check_compiler

PROMPT = "--prompt x"
EAGLE3 = "--prompt x --speculate eagle3"
TALK = "--interactive reads its prompts from you"
TREE = "leave out --tree-nodes, --tree-depth and --tree-width"
KERNELS = "is for the kernels; leave out --no-kernels"

# Options after --checkpoint GOLDEN, and the beginning of the error. FILES is a folder of `files`.
REFUSED = (
    ("", "no prompt: give --prompt TEXT (-p - reads standard input), --prompt-file, --prompt-ids or --inter"),
    ("--prompt=", "--prompt: is empty; give a text"),
    ("-p -", "--prompt -: standard input is empty; give a text"),
    ("--prompt-file -", "--prompt-file -: standard input is empty; give a text"),
    ("--prompt-file FILES/empty", "--prompt-file FILES/empty: the file is empty; give a text"),
    *((f"--interactive {other}", TALK) for other in (
        PROMPT, "--prompt-ids 1,2", "--prompt-file f", "--json", "--compare", "--trace f", "--num-samples 2",
        "--raw",
    )),
    (f"{PROMPT} --batch-size 0", "--batch-size 0: must be at least 1"),
    (f"{PROMPT} --max-seq-len 1", "--max-seq-len 1: must be at least 2"),
    (f"{PROMPT} --max-new-tokens 0", "--max-new-tokens is 0; expected at least 1"),
    (f"{PROMPT} --temperature nan", "--temperature is nan; expected a finite number"),
    (f"{PROMPT} --temperature -1", "--temperature is -1.0; expected at least 0.0"),
    (f"{PROMPT} --top-p 0", "--top-p is 0.0; expected above 0"),
    (f"{PROMPT} --top-k -1", "--top-k is -1; expected at least 0"),
    (f"{PROMPT} --min-p 1.1", "--min-p is 1.1; expected at most 1.0"),
    (f"{PROMPT} --presence-penalty -2.5", "--presence-penalty is -2.5; expected at least -2.0"),
    (f"{PROMPT} --frequency-penalty 3", "--frequency-penalty is 3.0; expected at most 2.0"),
    (f"{PROMPT} --repetition-penalty 0", "--repetition-penalty is 0.0; expected at least 0.01"),
    (f"{PROMPT} --num-samples 100001", "--num-samples 100001: must be 1 to 100,000"),
    (f"{PROMPT} --json --logprobs 21", "--logprobs is 21; expected at most 20"),
    (f"{PROMPT} --logprobs 2", "--logprobs 2: log-probabilities are printed with --json"),
    (f"{PROMPT} --json-object --json-schema x", "--json-schema x: leave out --json-object"),
    (f"{PROMPT} --threads 0", "--threads 0: must be 1 to 1,024"),
    (f"{PROMPT} --device gpu", "--device gpu: models run on cpu, cuda and cuda:N; name one of these"),
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
    (f"{EAGLE3} --tree-depth -1", "--tree-depth -1: must be 0 to 1,024"),
    (f"{EAGLE3} --tree-width 0", "--tree-width 0: must be 1 to 1,024"),
    (f"{EAGLE3} --tree-width 97", "tree: width 97 exceeds the head's vocabulary of 96"),
    (f"{EAGLE3} --tree-nodes 60 --tree-depth 1 --tree-width 2", "tree: 60 nodes, but depth 1 and width 2"),
    (f"{EAGLE3} --tree paper --tree-nodes 8", f"--tree paper: {TREE}"),
    (f"{EAGLE3} --tree nowhere.json", "--tree nowhere.json: none of auto, paper, T,D,K"),
    (f"{EAGLE3} --draft nowhere", "nowhere: no such file or folder"),
    (f"{PROMPT} --window 3", "--window belongs to --speculate lookahead"),
    (f"{PROMPT} --speculate lookahead --level 2", "--level 2: must be 3 to 1,024"),
    (f"{PROMPT} --speculate rest", "--speculate rest: needs --datastore"),
    (f"{PROMPT} --draft-window 8", "--draft-window 8: is for heads with attention"),
    (f"{PROMPT} --checkpoint /nowhere/at-all", "/nowhere/at-all: "),
    (f"{PROMPT} --checkpoint FILES/half", "FILES/half/model.safetensors: "),
    (f"{PROMPT} --prompt y --trace t", "--trace records one sequence: give one prompt and one sample"),
    (f"{PROMPT} --trace /nowhere/t", "--trace /nowhere/t: not a file that can be written"),
    (f"{PROMPT} --trace FILES", "--trace FILES: not a file that can be written"),
    (f"{PROMPT} --max-seq-len 5000", "--max-seq-len 5000: must be 2 to 1024, the model's maximum"),
    (f"--prompt {'x' * 50} --max-seq-len 20", "the prompt has "),
    (f"{PROMPT} --num-samples 100000 --batch-size 100000", "the caches of 100000 x "),
    (f"{PROMPT} --logit-bias 5=nan", "logit_bias: 5: nan: a token id is not negative, a bias -100 to 100"),
    (f"{PROMPT} --logit-bias 99999999=1", "logit_bias holds token id 99999999, the vocabulary is 0..319"),
    ("--prompt-ids 1,320", "the prompt holds token id 320, the vocabulary is 0..319"),
    *((f"--prompt-ids {ids}", f"--prompt-ids '{ids}': expected numbers separated by commas")
      for ids in ("1,", "1,two", "1.5", "1;2")),
    ("--prompt-file nowhere", "--prompt-file nowhere: no such file"),
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


def test_what_the_machine_lacks(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="standard input, which is closed"):
        generate.parser().read(["--checkpoint", "folder", "--interactive"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"no C\+\+ compiler.*--no-compile"):
        check_compiler()


@pytest.mark.parametrize("options", [
    f"{PROMPT} --batch-size 1 --num-samples 100000 --threads 1024",
    f"{PROMPT} --logprobs 0 --json --logit-bias 5=-1", f"{PROMPT} --kv auto --no-kernels",
    f"{PROMPT} --min-p 1 --presence-penalty -2 --frequency-penalty 2 --stop x",
    f"{EAGLE3} --draft folder --tree auto", f"{EAGLE3} --tree-nodes 8 --tree-width 3",
    "--interactive --system brief --speculate eagle3", f"{PROMPT} --dtype float32 --kv fp8 --device cuda",
])
def test_what_no_rule_forbids(options):
    o = generate.parser().read(["--checkpoint", "folder", *options.split()])
    assert o.dtype in (None, "fp32")  # a dtype has two names
