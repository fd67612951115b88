"""generate.py with the golden target and a byte tokenizer, in this process, with --no-compile."""
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from helpers.launching import ONE_THREAD, TORCHRUN
from safetensors.torch import load_file

import generate
from engine.runner import ModelRunner

SMALL = ("--tree-nodes", "16", "--tree-depth", "3", "--tree-width", "4")
# Noise depends on the position, so that prompts of another length give other tokens.
SAMPLING = {"max_new_tokens": 8, "temperature": 2.0, "seed": 1}
EAGLE3 = ("--speculate", "eagle3", *SMALL)


@pytest.fixture
def cli(golden, capsys):
    """A function: run generate.py with these arguments. Default --checkpoint: the golden target."""
    def run(*args) -> SimpleNamespace:
        checkpoint = () if "--checkpoint" in args else ("--checkpoint", golden)
        status = generate.main([*map(str, (*checkpoint, *args)), "--no-compile"])
        out, err = capsys.readouterr()
        rows = [json.loads(line) for line in out.splitlines()] if "--json" in args else []
        return SimpleNamespace(status=status, out=out, err=err, rows=rows, row=rows[0] if rows else None)

    return run


def test_json_keys_and_statistics(cli, monkeypatch):
    monkeypatch.setattr("console.compare.MIN_GAIN", 99.0)
    args = "--prompt", "Hello", "--max-new-tokens", 40, *EAGLE3
    run, text = cli(*args, "--json", "--compare"), cli(*args, "--compare", "--stats")
    row, plain = run.row, run.row["plain"]
    keys = {
        "prompt", "text", "output_ids", "tokens", "seconds", "prefill_seconds", "tokens_per_second", "tau",
        "accept_lengths", "trees", "step_seconds", "seed", "finish", "ranks",
    }
    assert run.status == 0 and keys <= plain.keys() and row.keys() >= keys | {"plain", "speedup", "equal"}
    assert row["prompt"] == "Hello" and row["tokens"] == len(row["output_ids"]) == 40
    assert row["equal"] is True and plain["tau"] == 1 and row["tau"] > 1.5
    assert all(plain[key] == row[key] for key in ("output_ids", "text"))
    assert sum(row["accept_lengths"]) == 39 and row["tau"] == pytest.approx(39 / len(row["accept_lengths"]))
    assert row["trees"] == {"16/3/4": len(row["accept_lengths"])} and row["finish"] == "length"
    assert row["step_seconds"] == {"drafted": pytest.approx(row["seconds"] / len(row["accept_lengths"]))}
    assert plain["step_seconds"] == {"plain": pytest.approx(plain["seconds"] / 39)}
    assert row["tokens_per_second"] == pytest.approx(39 / row["seconds"])
    assert row["speedups"][0] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
    assert len(row["speedups"]) == 3 and row["speedup"] == sorted(row["speedups"])[1]
    assert text.status == 0 and text.out == row["text"] + "\n"  # statistics are on stderr
    undrafted = cli("--prompt", "abcdefgh", "--max-new-tokens", 3, "--speculate", "lookup", "--compare").err
    assert "nothing was drafted" in undrafted and "no n-gram match" in undrafted
    assert not any(words in undrafted for words in ("peak memory", "speedup 1"))
    for words in "peak memory", "output: yes", "\n10 tokens in the prompt, prefill ", "; --max-new", (
            f"\nlimiting factors: acceptance length {row['tau']:.2f}; costs were not timed"):
        assert words in text.err


def test_sampling_options_are_lossless(cli):
    """With penalties, biases and stop strings, speculative output equals plain output."""
    args = "--prompt", "Hello", "--max-new-tokens", 40, "--json", "--temperature", 0.7, *EAGLE3
    options = (
        "--min-p", 0.05, "--presence-penalty", 0.5, "--frequency-penalty", 0.2, "--repetition-penalty", 1.1,
        "--logit-bias", "101=2", "--logit-bias", "97=-100", "--logprobs", 2,
    )
    default, row = cli(*args).row, cli(*args, *options, "--compare").row
    assert row["equal"] is True and row["text"] != default["text"] and "a" not in row["text"]
    assert len(row["logprobs"]) == 40 and all(len(x["top"]) == 2 for x in row["logprobs"])
    assert "logprobs" not in default and "stop" not in default
    stop = default["text"][10:12]
    row = cli(*args, "--stop", stop, "--stop", "never there", "--compare").row
    assert row["equal"] is True and row["text"] == default["text"].split(stop)[0]
    assert (row["finish"], row["stop"]) == ("stop", stop)
    assert cli(*args, "--json-schema", '{"const": 1}').row["text"].strip() == "1"


def test_batched_prompts_and_samples_equal_single_ones(cli, tmp_path):
    """Prompts from all flags, also with more requests than slots; each sample has its own seed."""
    (tmp_path / "one.txt").write_text("two\nlines\n\n")
    (tmp_path / "many.jsonl").write_text('{"turns": ["first", "unused"]}\n\n{"prompt": "second"}\n')
    common = "--max-new-tokens", 12, "--json", *EAGLE3
    all_prompts = (
        *common, "--prompt", "plain", "--prompt-ids", "72, 105", "--prompt-file", tmp_path / "one.txt",
        "--prompt-file", tmp_path / "many.jsonl",
    )
    rows = cli(*all_prompts).rows
    assert [row["prompt"] for row in rows] == ["plain", [72, 105], "two\nlines\n", "first", "second"]
    queued = cli(*all_prompts, "--batch-size", 2).rows
    assert [row["output_ids"] for row in queued] == [row["output_ids"] for row in rows]
    single = cli(*common, "--prompt-ids", "72,105").row
    assert single["output_ids"] == rows[1]["output_ids"]
    sampled = "--prompt", "x", "--temperature", 1, "--json", "-n", 12
    samples = cli(*sampled, "--num-samples", 3, "--seed", 5, *EAGLE3).rows
    assert [r["seed"] for r in samples] == [5, 6, 7] and len({r["text"] for r in samples}) == 3
    assert cli(*sampled, "--seed", 6).row["output_ids"] == samples[1]["output_ids"]  # without drafting


@pytest.mark.parametrize("flags", [
    ("--speculate", "eagle"), ("--speculate", "eagle2", "--tree", "paper"),
    ("--speculate", "eagle3", "--tree", "FILE"), ("--speculate", "lookup+eagle3", "--tree", "6,1,3"),
    ("--speculate", "lookahead", "--window", "3", "--guess-set", "4"),
    ("--speculate", "draft-model", "--draft", "GOLDEN", "--tree", "5,3,1"), ("-md", "GOLDEN"),
    ("--speculate", "eagle3", "--draft-window", "8", "--tree", "12,2,4"),
], ids=" ".join)
def test_every_method_and_tree_is_lossless(cli, golden, tmp_path, flags):
    """Output equals plain output; --trace works with every tree."""
    (tmp_path / "paths.json").write_text("[[0], [1], [0, 0], [0, 1], [0, 0, 0]]")
    paths = {"FILE": tmp_path / "paths.json", "GOLDEN": golden}
    flags = [paths.get(flag, flag) for flag in flags]
    args = "--prompt", "abc abc abc", "--max-new-tokens", 40, "--json", "--compare", "--trace"
    row, trace = cli(*args, tmp_path / "trace", *flags).row, load_file(tmp_path / "trace")
    assert row["equal"] is True and row["tau"] > 1
    assert trace["000.draft_tokens"].shape == trace["000.depth"].shape


def test_auto_tree_is_in_the_statistics(cli):
    run = cli("--speculate", "eagle3", "--tree", "auto", "--prompt", "Hello", "-n", 20, "--stats")
    assert "trees of up to 32 nodes, sized by the cost model (measured: a" in run.err


def test_raw_system_and_template_set_the_prompt(cli, llm):
    for flags, options, ids in (
        ((), {}, b"u:<eos>hi\na:"), (("--raw",), {"raw": True}, [257, *b"hi"]),
        (("--raw", "--no-parse-special"), {"raw": True, "parse_special": False}, b"<eos>hi"),
        (("--system", "be"), {"system": "be"}, b"s:be\nu:<eos>hi\na:"),
    ):
        assert llm.encode("<eos>hi", **options) == list(ids)
        row = cli("--prompt", "<eos>hi", "--json", "-n", 8, "--temperature", 2, "--seed", 1, *flags).row
        expected = llm.generate(list(ids), **SAMPLING)
        assert row["output_ids"] == expected.ids == llm.generate("<eos>hi", **SAMPLING, **options).ids
        events = llm.stream("<eos>hi", **SAMPLING, **options)
        assert [id for event in events for id in event.ids] == expected.ids


def test_trace_equals_the_golden_trace(cli, tmp_path):
    reference = load_file(ROOT / "tests" / "golden" / "eagle3.T16D3K4.p0.safetensors")
    prompt = ",".join(map(str, reference["prompt"].flatten().tolist()))
    file = tmp_path / "trace.safetensors"
    assert cli("--prompt-ids", prompt, "--max-new-tokens", 60, "--trace", file, *EAGLE3).status == 0
    trace = load_file(file)
    for key, value in reference.items():
        if key == "output_ids":
            value, trace[key] = value.flatten(), trace[key][: value.numel()]
        assert torch.equal(trace[key], value.reshape(trace[key].shape).to(trace[key].dtype)), key
    nodes, parent = trace["000.accepted"], trace["000.parent"]
    assert nodes[0] == 0 and torch.equal(parent[nodes[1:]], nodes[:-1])
    assert len(nodes) == len(trace["001.input_ids"]) - len(trace["000.input_ids"])


def test_interactive_keeps_the_conversation(cli, llm, monkeypatch):
    """Turns that are too long, or interrupted during prefill, are dropped."""
    lines = iter(["one", "x" * 500, "", "/help", "never", "two", "/reset", "one", "/quit"])

    def interrupt(self, slots, *args, original=ModelRunner.prefill):
        if "never" in inputs and not interruptions:
            interruptions.append(True)
            raise KeyboardInterrupt
        return original(self, slots, *args)

    def read_input(prompt=""):
        inputs.append(next(lines))
        return inputs[-1]

    def expected_answers(*turns: str) -> list[str]:
        messages = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            answer = llm.chat(messages, max_new_tokens=15).text
            messages.append({"role": "assistant", "content": answer})
        return [message["content"] for message in messages[1::2]]

    inputs, interruptions = [], []
    monkeypatch.setattr("builtins.input", read_input)
    monkeypatch.setattr(ModelRunner, "prefill", interrupt)
    run = cli("--interactive", "--max-new-tokens", 15, "--max-seq-len", 128, *EAGLE3)
    first, second = expected_answers("one", "two")
    assert run.status == 0 and run.out == f"{first}\n\n\n{second}\n{first}\n"
    assert "error: the prompt has" in run.err and "(/reset starts over)" in run.err
    assert "/reset starts over, /exit or /quit quits" in run.err and run.err.count("\n15 tokens, ") == 3


def test_ctrl_c_keeps_partial_output(cli, monkeypatch, tmp_path):
    """Text, statistics, JSON and the trace have the steps before the interruption.
    """
    calls = iter(range(1000))

    def interrupt(self, *args, original=ModelRunner.step):
        if self.state.limit.max() > 50 and next(calls) % 4 == 3:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(ModelRunner, "step", interrupt)
    common = "--max-new-tokens", 100, *EAGLE3
    single = cli("--prompt", "Hello", "--max-new-tokens", 100)
    assert single.status == 130 and single.out
    assert "\n4 tokens, " in single.err and "; interrupted" in single.err
    batch = cli(*common, "--prompt", "Hello", "--prompt", "World")
    assert batch.status == 130 and batch.out.count("--- ") == 2 and len(batch.out) > 40
    run = cli(*common, "--prompt", "Hello", "--json")
    assert run.status == 130 and run.row["finish"] == "interrupted"
    assert 4 <= run.row["tokens"] < 100 and len(run.row["accept_lengths"]) == 3
    assert cli(*common, "--prompt", "Hello", "--trace", tmp_path / "t").status == 130
    assert {k[:3] for k in load_file(tmp_path / "t") if "." in k} == {"000", "001", "002"}


def test_checkpoint_without_tokenizer_decodes_ids(cli, golden, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / name, tmp_path / name)
    common = "--checkpoint", tmp_path, "--prompt-ids", "1,2,3", "--max-new-tokens", 5
    ids = ",".join(map(str, cli(*common, "--json").row["output_ids"]))
    assert ids.count(",") == 4 and cli(*common).out == ids + "\n"
    assert cli(*common, "--prompt-ids", "4").out.splitlines()[1] == ids
    for error, options in (
        ("no tokenizer", ("-p", "hello")), ("needs a tokenizer", ("--interactive",)),
        ("--stop", ("--prompt-ids", 1, "--stop", "x")), ("needs a tok", ("--prompt-ids", 1, "--json-object")),
    ):
        run = cli("--checkpoint", tmp_path, *options)
        assert run.status == 1 and error in run.err


@pytest.mark.slow
def test_runs_as_a_program(golden):
    """stdout has only the JSON; if the reader closes the pipe, the exit status is 141 without a message."""
    options = "--prompt", "Hi", "--json", "--no-compile", "--max-new-tokens", "5"
    command = [sys.executable, "generate.py", "--checkpoint", golden, *options]
    pipes = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen(command, **pipes) for _ in range(2)]
    runs[1].stdout.close()
    out, err = runs[0].communicate(timeout=300)
    assert runs[0].returncode == 0 and json.loads(out)["tokens"] == 5, err
    _, err = runs[1].communicate(timeout=300)
    assert runs[1].returncode == 141 and "error" not in err and "Traceback" not in err


def test_positional_words_are_one_prompt():
    args = generate.parser().read(["-m", "DIR", "why", "is it", "blue?", "--prompt", "another"])
    assert generate.read_options(args)[0] == ["why is it blue?", "another"]


# -- generate.py on several ranks. Output equal to one process: tests/engine/test_ranks.py -------------------


ON_RANKS = (
    "--prompt Hello --speculate eagle3 --tree 8,2,3 --shard-head --max-new-tokens 30 --dtype bf16 --kv int8"
    " --temperature 0.8 --seed 4 --json-object --json --compare"
)


@pytest.mark.slow
@pytest.mark.kernels
def test_two_ranks(golden, tmp_path):
    """In bfloat16 on the CPU kernels, whose all-reduce is batch-invariant: speculative output equals plain
    output. The head is sharded; both ranks apply the grammar.
    """
    command = *TORCHRUN, "--standalone", "--nproc-per-node", "2", "generate.py", "--checkpoint", str(golden)
    command += *ON_RANKS.split(), "--trace", str(tmp_path / "trace")
    run = subprocess.run(command, cwd=ROOT, env=ONE_THREAD, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    row = json.loads(run.stdout)
    ours = "error: ", "loaded ", "ready ", "2 ranks: "  # not torchrun's lines
    lines = [line for line in run.stderr.splitlines() if line.startswith(ours)]
    assert [line.split()[0] for line in lines] == ["2", "loaded", "ready"]
    assert row["ranks"] == row["plain"]["ranks"] == 2 and row["equal"] is True and row["tau"] > 1
    assert row["text"].startswith("{") and "000.draft_tokens" in load_file(tmp_path / "trace")
