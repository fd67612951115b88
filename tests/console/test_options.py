"""The rules of generate.py's options, one by one, without loading anything."""
import argparse

import pytest
from helpers.refusals import refused

import generate
from common.errors import InputError

PROMPT = ("--prompt", "x")
EAGLE3 = (*PROMPT, "--speculate", "eagle3")
TALK = "--interactive reads its prompts from you"
TREE = "leave out --tree-nodes, --tree-depth and --tree-width"

REFUSED = (
    ((), "no prompt: give --prompt, --prompt-ids, --prompt-file or --interactive"),
    (("--interactive", *PROMPT), TALK),
    (("--interactive", "--prompt-ids", "1,2"), TALK),
    (("--interactive", "--prompt-file", "file"), TALK),
    (("--interactive", "--json"), TALK),
    (("--interactive", "--compare"), TALK),
    (("--interactive", "--trace", "file"), TALK),
    (("--interactive", "--num-samples", "2"), TALK),
    (("--interactive", "--raw"), TALK),
    ((*PROMPT, "--batch-size", "0"), "--batch-size 0: must be at least 1"),
    ((*PROMPT, "--batch-size", "-3"), "--batch-size -3: must be at least 1"),
    ((*PROMPT, "--max-seq-len", "1"), "--max-seq-len 1: must be at least 2"),
    ((*PROMPT, "--max-new-tokens", "0"), "--max-new-tokens 0: must be at least 1"),
    ((*PROMPT, "--temperature", "nan"), "--temperature nan: must be 0 to 1,000,000"),
    ((*PROMPT, "--temperature", "-1"), "--temperature -1.0: must be 0 to 1,000,000"),
    ((*PROMPT, "--top-p", "0"), "--top-p 0.0: must be above 0 and at most 1"),
    ((*PROMPT, "--top-p", "nan"), "--top-p nan: must be above 0 and at most 1"),
    ((*PROMPT, "--top-k", "-1"), "--top-k -1: must be 0 to 2,147,483,647"),
    ((*PROMPT, "--stop", ""), "stop must be at most 16 texts, none of them empty"),
    ((*PROMPT, "--device", "gpu"), "--device gpu: models run on cpu, cuda and cuda:N; name one of these"),
    ((*PROMPT, "--speculate", "lookahead", "--window", "0"), "--window 0: must be 1 to 1,024"),
    ((*PROMPT, "--speculate", "lookahead", "--level", "2000"), "--level 2000: must be 3 to 1,024"),
    ((*PROMPT, "--speculate", "lookahead", "--guess-set", "-1"), "--guess-set -1: must be 1 to 1,024"),
    ((*PROMPT, "--speculate", "rest", "--draft-tokens", "1025"), "--draft-tokens 1025: must be 2 to 1,024"),
    ((*PROMPT, "--window", "3"), "--window belongs to --speculate lookahead"),
    ((*PROMPT, "--draft-window", "8"), "--draft-window 8: is for heads with attention"),
    ((*PROMPT, "--accept", "residual"), "--accept residual: plain decoding drafts nothing to accept"),
    ((*EAGLE3, "--accept", "residual"), "--accept residual: is for --speculate draft-model"),
    ((*PROMPT, "--tree-depth", "2"), "--tree-depth 2: plain decoding drafts no tree; add --speculate"),
    ((*EAGLE3, "--tree-nodes", "1025"), "--tree-nodes 1025: must be 2 to 1,024"),
    ((*EAGLE3, "--tree-depth", "-1"), "--tree-depth -1: must be 0 to 1,024"),
    ((*EAGLE3, "--tree-width", "0"), "--tree-width 0: must be 1 to 1,024"),
    ((*EAGLE3, "--tree-nodes", "60", "--tree-depth", "1", "--tree-width", "2"),
     "tree: 60 nodes, but depth 1 and width 2 only draft"),
    ((*PROMPT, "--num-samples", "0"), "--num-samples 0: must be 1 to 100,000"),
    ((*PROMPT, "--num-samples", "100001"), "--num-samples 100001: must be 1 to 100,000"),
    ((*PROMPT, "--min-p", "1.1"), "--min-p 1.1: must be 0 to 1"),
    ((*PROMPT, "--min-p", "nan"), "--min-p nan: must be 0 to 1"),
    ((*PROMPT, "--presence-penalty", "-2.5"), "--presence-penalty -2.5: must be -2 to 2"),
    ((*PROMPT, "--frequency-penalty", "3"), "--frequency-penalty 3.0: must be -2 to 2"),
    ((*PROMPT, "--repetition-penalty", "0"), "--repetition-penalty 0.0: must be 0.01 to 100"),
    ((*PROMPT, "--json", "--logprobs", "21"), "--logprobs 21: must be 0 to 20"),
    ((*PROMPT, "--json-object", "--json-schema", "x"), "--json-schema x: leave out --json-object"),
    ((*PROMPT, "--logprobs", "2"), "--logprobs 2: log-probabilities are printed with --json"),
    ((*PROMPT, "--threads", "0"), "--threads 0: must be 1 to 1,024"),
    ((*PROMPT, "--threads", "1025"), "--threads 1025: must be 1 to 1,024"),
    ((*PROMPT, "--isa", "avx2", "--no-kernels"), "--isa avx2: is for the kernels; leave out --no-kernels"),
    ((*PROMPT, "--isa", "avx2", "--no-compile"), "--isa avx2: is for the kernels; leave out --no-kernels"),
    ((*PROMPT, "--kv", "int8", "--no-kernels"), "--kv int8: is for the kernels; leave out --no-kernels"),
    ((*PROMPT, "--kv", "fp8", "--device", "cpu"), "--kv fp8: our CPU kernels have int8 caches and"),
    ((*PROMPT, "--offload", "4", "--device", "cpu"), "--offload 4: keeps weights in the host's memory"),
    ((*PROMPT, "--kv", "int8", "--no-compile"), "--kv int8: is for the kernels; leave out --no-kernels"),
    ((*EAGLE3, "--shard-head"), "--shard-head: deals what drafts among ranks; add --speculate, and start"),
    ((*PROMPT, "--system", "s", "--raw"), "--system: is written by the chat template, which --raw"),
    ((*PROMPT, "--draft", "folder"), "--draft folder: plain decoding uses no head"),
    ((*PROMPT, "--tree", "paper"), "--tree paper: plain decoding drafts no tree"),
    ((*EAGLE3, "--tree", "paper", "--tree-nodes", "8"), f"--tree paper: {TREE}"),
    ((*EAGLE3, "--tree", "8,2,3", "--tree-depth", "0"), f"--tree 8,2,3: {TREE}"),
    ((*EAGLE3, "--tree", "auto", "--tree-width", "0"), f"--tree auto: {TREE}"),
)
ALLOWED = (
    PROMPT, EAGLE3, ("--interactive",), ("--prompt-ids", "1"), ("--prompt-file", "x"),
    (*PROMPT, "--batch-size", "1", "--num-samples", "100000", "--threads", "1024"),
    (*PROMPT, "--min-p", "1", "--presence-penalty", "-2", "--frequency-penalty", "2", "--stop", "x"),
    (*PROMPT, "--logprobs", "0", "--json", "--logit-bias", "5=-1.5", "--repetition-penalty", "1.1"),
    (*PROMPT, "--offload", "3"), (*PROMPT, "--offload", "auto", "--device", "cuda:1"),
    (*PROMPT, "--kv", "int8"), (*PROMPT, "--kv", "auto", "--no-kernels"),
    (*PROMPT, "--kv", "fp8", "--device", "cpu", "--no-kernels"), (*PROMPT, "--kv", "fp8", "--device", "cuda"),
    (*EAGLE3, "--draft", "folder", "--tree", "auto"), (*EAGLE3, "--tree-nodes", "8", "--tree-width", "3"),
    ("--interactive", "--system", "be brief", "--speculate", "eagle3"),
)


def read(*options: str) -> argparse.Namespace:
    return generate.parser().read(["--checkpoint", "folder", *options])


@pytest.mark.parametrize("options, words", REFUSED, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_a_rule_that_is_broken(options, words):
    with refused(words):
        read(*options)


@pytest.mark.parametrize("options", ALLOWED, ids=" ".join)
def test_what_no_rule_forbids(options):
    read(*options)


def test_a_closed_input_is_no_conversation(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="standard input, which is closed"):
        read("--interactive")


def test_every_rule_is_among_them(monkeypatch):
    """Each rule of the parser is the first one that some of these options break."""
    monkeypatch.setattr("sys.stdin", None)
    parser = generate.parser()
    command_lines = [options for options, _ in REFUSED] + [("--interactive",)]
    parsed = [parser.parse_args(["--checkpoint", "folder", *options]) for options in command_lines]
    broken = {next(i for i, (test, _) in enumerate(parser._rules) if test(o)) for o in parsed}
    assert broken == set(range(len(parser._rules)))


@pytest.mark.parametrize("options, words", [
    ((*PROMPT, "--dtype", "int3"), "int3"), ((*PROMPT, "--speculate", "magic"), "magic"),
    ((*PROMPT, "--logit-bias", "5"), "ID=X"), ((*PROMPT, "--logit-bias", "5=x"), "ID=X"),
    ((*PROMPT, "--accept", "all"), "all"), ((*PROMPT, "--top-k", "many"), "many"),
    (("--no-such",), "--no-such"), ((*PROMPT, "--seed", "1" * 21), "from -2^63 to 2^64 - 1"),
    ((*PROMPT, "--logit-bias", "5=nan"), "X from -100 to 100"),
], ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_what_cannot_be_parsed_is_a_usage_error(capsys, options, words):
    with pytest.raises(SystemExit) as stop:
        read(*options)
    assert stop.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


def test_a_dtype_has_two_names():
    for name, short in (("bf16", "bf16"), ("bfloat16", "bf16"), ("float32", "fp32")):
        assert read(*PROMPT, "--dtype", name).dtype == short
