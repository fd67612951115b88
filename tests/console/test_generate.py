"""The command line and the Python API, on the golden target with a byte tokenizer (run in this process, not
compiled).
"""
import json
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from helpers.decoding import load
from safetensors.torch import load_file

import generate
from engine.runtime import check_compiler
from tree import TreeShape

SMALL = ("--tree-nodes", "16", "--tree-depth", "3", "--tree-width", "4")


def cli(capsys, *args) -> tuple[int, str, str]:
    """Run the command line uncompiled: (exit code, stdout, stderr)."""
    code = generate.main([*map(str, args), "--no-compile"])
    out, err = capsys.readouterr()
    return code, out, err


def rows(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_json_has_the_promised_keys(golden, capsys):
    code, out, _ = cli(
        capsys, "--checkpoint", golden, "--speculate", "eagle3", "--prompt", "Hello", "--max-new-tokens", 40,
        "--json", "--compare", *SMALL
    )
    (row,) = rows(out)
    keys = {
        "prompt", "text", "output_ids", "tokens", "seconds", "prefill_seconds", "tokens_per_second", "tau",
        "accept_lengths", "seed"
    }
    assert code == 0 and keys <= row.keys() and keys <= row["plain"].keys()
    assert row["prompt"] == "Hello" and row["tokens"] == len(row["output_ids"]) == 40
    assert row["equal"] is True and row["plain"]["tau"] == 1 and row["tau"] > 1.5
    assert all(row["plain"][key] == row[key] for key in ("output_ids", "text"))
    assert sum(row["accept_lengths"]) == 39 and row["tau"] == pytest.approx(39 / len(row["accept_lengths"]))
    assert row["tokens_per_second"] == pytest.approx(39 / row["seconds"])
    assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["plain"]["tokens_per_second"])


def test_what_a_request_may_ask_for(golden, capsys):
    """Penalties, biases, stop texts and log-probabilities: with speculation the text of plain decoding."""
    args = (
        "--checkpoint", golden, "--speculate", "eagle3", "--prompt", "Hello", "--max-new-tokens", 40,
        "--json", "--temperature", 0.7, *SMALL,
    )
    asked = (
        "--min-p", 0.05, "--presence-penalty", 0.5, "--frequency-penalty", 0.2, "--repetition-penalty", 1.1,
        "--logit-bias", "101=2", "--logit-bias", "97=-100", "--logprobs", 2,
    )
    (usual,) = rows(cli(capsys, *args)[1])
    (row,) = rows(cli(capsys, *args, *asked, "--compare")[1])
    assert row["equal"] is True and row["text"] != usual["text"] and "a" not in row["text"]
    assert len(row["logprobs"]) == 40 and all(len(x["top"]) == 2 for x in row["logprobs"])
    assert "logprobs" not in usual and "stop" not in usual
    stop = usual["text"][10:12]
    (row,) = rows(cli(capsys, *args, "--stop", stop, "--stop", "never there", "--compare")[1])
    assert row["equal"] is True and row["text"] == usual["text"].split(stop)[0]
    assert (row["finish"], row["stop"]) == ("stop", stop)


@pytest.mark.parametrize("bad, words", [
    (("--logprobs", 3), "--logprobs 3: log-probabilities are printed with --json"),
    (("--stop", ""), "stop must be"),
    (("--logit-bias", "99999999=1"), "--logit-bias 99999999: no token id"),
])
def test_bad_requests_are_one_line(golden, capsys, bad, words):
    code, out, err = cli(capsys, "--checkpoint", golden, "--prompt", "Hello", *bad)
    assert code == 1 and not out and err.splitlines()[-1].startswith("error: ") and words in err


def test_text_goes_to_stdout_and_figures_to_stderr(golden, capsys):
    args = (
        "--checkpoint", golden, "--speculate", "eagle3", "--prompt", "Hello", "--max-new-tokens", 30, *SMALL
    )
    code, out, err = cli(capsys, *args, "--compare")
    _, as_json, _ = cli(capsys, *args, "--json")
    assert code == 0 and out == rows(as_json)[0]["text"] + "\n"
    for words in (
        "tau ", "tok/s", "prefill", "GB/s of weights", "peak memory", "1 tokens", "speedup",
        "texts equal: yes"
    ):
        assert words in err


def test_prompts_of_every_kind_in_one_batch(golden, capsys, tmp_path):
    (tmp_path / "one.txt").write_text("\ufefftwo\nlines\n", encoding="utf-8")
    (tmp_path / "many.jsonl").write_text('{"turns": ["first", "unused"]}\n\n{"prompt": "second"}\n')
    common = ("--checkpoint", golden, "--speculate", "eagle3", "--max-new-tokens", 12, "--json", *SMALL)
    code, out, _ = cli(
        capsys, *common, "--prompt", "plain", "--prompt-ids", "72,105", "--prompt-file", tmp_path / "one.txt",
        "--prompt-file", tmp_path / "many.jsonl",
    )
    found = rows(out)
    assert code == 0 and [r["prompt"] for r in found] == ["plain", [72, 105], "two\nlines", "first", "second"]
    for row in found:  # each alone gives the same text
        prompt = ("--prompt-ids", "72,105") if isinstance(row["prompt"], list) else (
            "--prompt", row["prompt"]
        )
        assert rows(cli(capsys, *common, *prompt)[1])[0]["output_ids"] == row["output_ids"]


@pytest.mark.parametrize("flags", [
    ["--speculate", "eagle"], ["--speculate", "eagle2", *SMALL], ["--speculate", "eagle3", "--tree", "paper"],
    ["--speculate", "eagle3", "--tree", "12,2,4"], ["--speculate", "eagle3", "--tree", "FILE"],
    ["--speculate", "eagle", "--tree", "FILE"],
], ids=" ".join)
def test_every_method_and_tree_gives_the_plain_text(golden, capsys, tmp_path, flags):
    (tmp_path / "paths.json").write_text("[[0], [1], [0, 0], [0, 1], [0, 0, 0]]")
    flags = [str(tmp_path / "paths.json") if f == "FILE" else f for f in flags]
    (row,) = rows(
        cli(
            capsys, "--checkpoint", golden, "--prompt", "Hello", "--max-new-tokens", 40, "--json",
            "--compare", *flags
        )[1]
    )
    assert row["equal"] is True and row["tau"] > 1.2


@pytest.mark.slow
def test_auto_tree_is_measured_once(golden, capsys, tmp_path):
    shutil.copytree(golden, tmp_path / "t", ignore=shutil.ignore_patterns("calibration.json", "costs.json"))
    common = (
        "--checkpoint", tmp_path / "t", "--speculate", "eagle3", "--tree", "auto", "--prompt", "Hello",
        "--max-new-tokens", 20
    )
    code, out, err = cli(capsys, *common)
    head = tmp_path / "t" / "eagle3"
    assert code == 0 and "is measured now" in err and "measuring what the passes" in err and "greedy: " in err
    assert (head / "calibration.json").is_file() and (head / "costs.json").is_file()
    code, again, err = cli(capsys, *common)
    assert code == 0 and again == out and "measuring" not in err and "is measured now" not in err
    assert "greedy: " in err


def test_prompts_beyond_the_batch_wait_their_turn(golden, capsys):
    common = ("--checkpoint", golden, "--speculate", "eagle3", "--max-new-tokens", 15, "--json", *SMALL)
    prompts = [x for i in range(5) for x in ("--prompt", f"question {i}" * (i + 1))]
    together, apart = (rows(cli(capsys, *common, *prompts, "--batch-size", n)[1]) for n in (5, 2))
    assert [r["output_ids"] for r in together] == [r["output_ids"] for r in apart] and len(apart) == 5


def test_raw_system_and_template_reach_the_model(golden, capsys):
    model = load(golden, compile=False)
    assert model.encode("hi") == list(b"u:hi\na:")
    assert model.encode("hi", system="be") == list(b"s:be\nu:hi\na:")
    assert model.encode("hi", raw=True) == list(b"hi")
    outputs = [
        rows(
            cli(capsys, "--checkpoint", golden, "--prompt", "hi", "--json", "--max-new-tokens", 8, *flags)[1]
        )[0]["output_ids"]
        for flags in ([], ["--raw"], ["--system", "be"])
    ]
    want = [
        model.generate(list(ids), max_new_tokens=8).ids for ids in (b"u:hi\na:", b"hi", b"s:be\nu:hi\na:")
    ]
    assert outputs == want


def test_samples_have_their_own_seeds(golden, capsys):
    common = ("--checkpoint", golden, "--prompt", "x", "--temperature", "1", "--max-new-tokens", 20, "--json")
    found = rows(cli(capsys, *common, "--speculate", "eagle3", "--num-samples", 3, "--seed", 5, *SMALL)[1])
    assert [r["seed"] for r in found] == [5, 6, 7] and len({tuple(r["output_ids"]) for r in found}) == 3
    alone = rows(cli(capsys, *common, "--seed", 6)[1])[0]  # plain decoding
    assert alone["output_ids"] == found[1]["output_ids"]


def test_trace_has_the_golden_keys_and_trees(golden, capsys, tmp_path):
    reference = load_file(ROOT / "tests" / "golden" / "eagle3.T16D3K4.p0.safetensors")
    prompt = ",".join(map(str, reference["prompt"].flatten().tolist()))
    file = tmp_path / "trace.safetensors"
    code, out, _ = cli(
        capsys, "--checkpoint", golden, "--speculate", "eagle3", "--prompt-ids", prompt, "--max-new-tokens",
        60, "--trace", file, *SMALL
    )
    trace = load_file(file)
    assert code == 0 and out
    for key, value in reference.items():
        if key == "output_ids":
            value, trace[key] = value.flatten(), trace[key][: value.numel()]
        assert torch.equal(trace[key], value.reshape(trace[key].shape).to(trace[key].dtype)), key
    steps = len({k[:3] for k in reference if k[3:4] == "."})
    for n in range(steps - 1):
        nodes, parent = trace[f"{n:03d}.accepted"], trace[f"{n:03d}.parent"]
        assert nodes[0] == 0 and torch.equal(parent[nodes[1:]], nodes[:-1])
        took = len(trace[f"{n + 1:03d}.input_ids"]) - len(trace[f"{n:03d}.input_ids"])
        assert len(nodes) == took


def test_interactive_keeps_the_conversation(golden, capsys, monkeypatch):
    lines = iter(["one", "two", "/reset", "one", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    code, out, _ = cli(
        capsys, "--checkpoint", golden, "--speculate", "eagle3", "--interactive", "--max-new-tokens", 15,
        *SMALL
    )
    model = load(golden, compile=False)
    first = model.generate("one", max_new_tokens=15).text
    talk = [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": first},
        {"role": "user", "content": "two"}
    ]
    second = model.generate(talk, max_new_tokens=15).text
    assert code == 0 and out == f"{first}\n{second}\n{first}\n"


def test_ctrl_c_before_an_answer_begins_takes_back_the_turn_only(golden, capsys, monkeypatch):
    """In the middle of its beginning, when the decoder knows the new prompt and its caches do not hold it."""
    from engine.state import State

    lines, calls = iter(["one", "never", "two", "/exit"]), iter(range(100))

    def interrupted(self, *args, original=State.begin):
        original(self, *args)
        if next(calls) == 2:  # after a warm-up and the first turn
            raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    with monkeypatch.context() as m:
        m.setattr(State, "begin", interrupted)
        code, out, _ = cli(capsys, "--checkpoint", golden, "--interactive", "--max-new-tokens", 15)
    model = load(golden, compile=False)
    first = model.generate("one", max_new_tokens=15).text
    talk = [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": first},
        {"role": "user", "content": "two"}
    ]
    assert code == 0 and out == f"{first}\n\n{model.generate(talk, max_new_tokens=15).text}\n"


def test_ctrl_c_prints_the_statistics_so_far(golden, capsys, monkeypatch):
    from engine.decoder import Decoder

    calls = iter(range(100))

    def interrupted(self, *args, original=Decoder._run_step):
        if self.state.limit.max() > 50 and next(calls) == 3:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Decoder, "_run_step", interrupted)
    code, out, err = cli(capsys, "--checkpoint", golden, "--prompt", "Hello", "--max-new-tokens", 100)
    assert code == 130 and out and "interrupted" in err and "4 tokens" in err and "Traceback" not in err


def test_ctrl_c_keeps_what_there_is(golden, capsys, monkeypatch, tmp_path):
    """Several prompts still print their texts, JSON says so, a trace holds the steps made."""
    from engine.decoder import Decoder

    calls = iter(range(1000))

    def interrupted(self, *args, original=Decoder._run_step):
        if self.state.limit.max() > 50 and next(calls) % 4 == 3:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Decoder, "_run_step", interrupted)
    common = ("--checkpoint", golden, "--max-new-tokens", 100, "--speculate", "eagle3", *SMALL)
    code, out, _ = cli(capsys, *common, "--prompt", "Hello", "--prompt", "World")
    assert code == 130 and out.count("--- ") == 2 and len(out) > 40
    code, out, _ = cli(capsys, *common, "--prompt", "Hello", "--json")
    (row,) = rows(out)
    assert code == 130 and row["finish"] == "interrupted" and 4 <= row["tokens"] < 100 and len(
        row["accept_lengths"]
    ) == 3
    code, _, _ = cli(capsys, *common, "--prompt", "Hello", "--trace", tmp_path / "t")
    assert code == 130 and {k[:3] for k in load_file(tmp_path / "t") if "." in k} == {"000", "001", "002"}


def test_python_api_in_ten_lines(golden):
    from tree import TreeShape

    model = load(golden, "eagle3", tree=TreeShape(16, 3, 4), compile=False)
    pieces = list(model.stream("Tell me", max_new_tokens=25, temperature=0.8, seed=3))
    result = model.generate("Tell me", max_new_tokens=25, temperature=0.8, seed=3)
    assert "".join(p.text for p in pieces) == result.text
    assert [i for p in pieces for i in p.ids] == result.ids and len(result.ids) == 25
    assert pieces[0].drafted == 0 and all(p.drafted == max(0, len(p.ids) - 1) for p in pieces[1:-1])
    assert result.finish == "length" and result.tau > 1


def test_drafted_is_told_apart_where_a_text_is_cut(golden):
    """A step cut by the token limit ends in a drafted token, not in the target's own."""
    model = load(golden, "eagle3", compile=False, tree=TreeShape(60, 7, 10))
    whole = list(model.stream("Tell me", max_new_tokens=60))
    assert any(len(p.ids) > 2 for p in whole[2:-1])
    done, cut = 0, 0
    for piece in whole[:-1]:
        if len(piece.ids) > 2:
            last = list(model.stream("Tell me", max_new_tokens=done + len(piece.ids) - 1))[-1]
            assert last.ids == piece.ids[:-1] and last.drafted == len(last.ids)
            cut += 1
        done += len(piece.ids)
    assert cut


def test_one_text_at_a_time(golden):
    model = load(golden, compile=False)
    stream = model.stream("Tell me", max_new_tokens=20)
    next(stream)
    model.generate("Something else", max_new_tokens=2)
    with pytest.raises(RuntimeError, match="another text"):
        list(stream)


def test_warm_up_reaches_the_step_whatever_ends_a_text(golden):
    from engine.decoder import Decoder

    model = load(golden, compile=False)
    first = model.decoder.generate([[0]])[0].ids[0]
    decoder = Decoder(model.decoder.target, stop_ids=[first], compile=False)
    steps = []
    with decoder.observe(lambda tree, path: steps.append(tree)):
        decoder.warm_up()
    assert steps and decoder.state.stop_ids.tolist() == [first]
    assert decoder.generate([[0]])[0].finish == "stop"


def test_drafted_text_is_coloured(golden):
    from console.show import coloured

    model = load(golden, "eagle3", compile=False, tree=TreeShape(16, 3, 4))
    plain, drawn, stream = "", "", model.tokenizer.stream()
    for piece in model.stream("Tell me", max_new_tokens=40):
        drawn += coloured(piece, stream.push)
        stream.push(piece.ids[piece.drafted :])
        plain += piece.text
    assert "\033[36m" in drawn
    assert drawn.replace("\033[36m", "").replace("\033[0m", "") == plain


def test_a_checkpoint_without_tokenizer_runs_on_ids(golden, capsys, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / name, tmp_path / name)
    code, out, _ = cli(
        capsys, "--checkpoint", tmp_path, "--prompt-ids", "1,2,3", "--json", "--max-new-tokens", 5
    )
    assert code == 0 and len(rows(out)[0]["output_ids"]) == 5
    ids = ",".join(map(str, rows(out)[0]["output_ids"]))
    common = ("--checkpoint", tmp_path, "--prompt-ids", "1,2,3", "--max-new-tokens", 5)
    assert cli(capsys, *common)[1] == ids + "\n"
    assert cli(capsys, *common, "--prompt-ids", "4")[1].splitlines()[1] == ids
    code, _, err = cli(capsys, "--checkpoint", tmp_path, "--prompt", "hello")
    assert code == 1 and "no tokenizer" in err


def test_a_source_is_converted_on_the_way_once(capsys, tmp_path, monkeypatch):
    """Into checkpoints/NAME, stdout left alone; a changed source again, another source of that name never
    taken for it.
    """
    monkeypatch.chdir(tmp_path)
    for place in ("a", "b"):
        shutil.copytree(ROOT / "tests" / "golden" / "target", tmp_path / place / "Model")
    command = ("--prompt-ids", "1,2", "--json", "--max-new-tokens", 5, "--checkpoint")
    code, out, err = cli(capsys, *command, "a/Model")
    assert code == 0 and len(rows(out)) == 1 and "converting a/Model into checkpoints/model" in err
    code, _, err = cli(capsys, *command, "a/Model")
    assert code == 0 and "converting" not in err
    (tmp_path / "a" / "Model" / "config.json").touch()
    code, _, err = cli(capsys, *command, "a/Model")
    assert code == 0 and "converting" in err
    code, _, err = cli(capsys, *command, "b/Model")
    assert code == 1 and "was converted from" in err and "a/Model" in err


BAD = {
    "no prompt": ([], "no prompt"),
    "no such folder": (["--checkpoint", "/nowhere/at-all", "--prompt", "x"], "/nowhere/at-all"),
    "draft missing": (["--speculate", "eagle3", "--draft", "/nowhere", "--prompt", "x"], "/nowhere"),
    "target as draft": (["--speculate", "eagle3", "--draft", "SELF", "--prompt", "x"], "target"),
    "words as ids": (["--prompt-ids", "1,two"], "1,two"),
    "id out of range": (["--prompt-ids", "1,320"], "320"),
    "missing file": (["--prompt-file", "/nowhere.txt"], "/nowhere.txt"),
    "temperature": (["--prompt", "x", "--temperature", "-1"], "temperature"),
    "top-p": (["--prompt", "x", "--top-p", "0"], "--top-p 0.0: must be"),
    "no tokens": (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens 0: must be"),
    "impossible tree": (
        ["--prompt", "x", "--speculate", "eagle3", "--tree-nodes", "60", "--tree-depth", "1"], "tree:"
    ),
    "tree wider than the head": (
        ["--prompt", "x", "--speculate", "eagle3", "--tree-width", "97"], "width 97"
    ),
    "a head for plain decoding": (["--prompt", "x", "--draft", "/tmp"], "--draft"),
    "a system message without template": (["--prompt", "x", "--raw", "--system", "be"], "--system"),
    "top-k": (["--prompt", "x", "--top-k", "99999999999999999999"], "--top-k"),
    "threads": (["--prompt", "x", "--threads", "99999999999999"], "--threads"),
    "a device that holds nothing": (["--prompt", "x", "--device", "meta"], "--device meta"),
    "batch size": (["--prompt", "x", "--batch-size", "0"], "--batch-size"),
    "two trees": (
        ["--prompt", "x", "--speculate", "eagle3", "--tree", "paper", "--tree-nodes", "8"], "--tree-nodes"
    ),
    "a tree for plain decoding": (["--prompt", "x", "--tree", "paper"], "--speculate"),
    "no tree file": (["--prompt", "x", "--speculate", "eagle", "--tree", "/nowhere.json"], "/nowhere.json"),
    "an orphan path": (["--prompt", "x", "--speculate", "eagle", "--tree", "ORPHAN"], "no parent"),
    "a head of another kind": (["--prompt", "x", "--speculate", "eagle", "--draft", "EAGLE3"], "eagle3"),
    "context too long": (["--prompt", "x", "--max-seq-len", "5000"], "5000"),
    "prompt too long": (["--prompt", "x" * 50, "--max-seq-len", "20"], "20"),
    "device": (["--prompt", "x", "--device", "cuda:7"], "cuda:7"),
    "two prompts traced": (["--prompt", "x", "--prompt", "y", "--trace", "/tmp/t"], "--trace"),
    "trace nowhere": (["--prompt", "x", "--trace", "/nowhere/t"], "/nowhere/t"),
    "trace is a folder": (["--prompt", "x", "--trace", "/tmp"], "--trace /tmp"),
    "interactive and prompt": (["--prompt", "x", "--interactive"], "--interactive"),
    "interactive and raw": (["--raw", "--interactive"], "--raw"),
    "a tree of the root alone": (
        ["--prompt", "x", "--speculate", "eagle3", "--tree-nodes", "1"], "--tree-nodes 1: must be 2 to"
    ),
    "too many samples": (["--prompt", "x", "--num-samples", "1000000000000"], "--num-samples"),
    "a batch larger than memory": (
        ["--prompt", "x", "--num-samples", "100000", "--batch-size", "100000"], "GB are free"
    ),
    "a tree deeper than memory": (
        ["--prompt", "x", "--speculate", "eagle3", "--tree-depth", "1000000000000"], "--tree-depth"
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(golden, capsys, tmp_path, name):
    args, words = BAD[name]
    (tmp_path / "orphan.json").write_text("[[0], [1, 0]]")
    places = {"SELF": golden, "EAGLE3": golden / "eagle3", "ORPHAN": tmp_path / "orphan.json"}
    args = [str(places.get(a, a)) for a in args]
    if "--checkpoint" not in args:
        args = ["--checkpoint", str(golden), *args]
    code, out, err = cli(capsys, *args)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 1 and not out and len(errors) == 1 and words in errors[0] and "Traceback" not in err


def test_damaged_weights_are_one_clear_line(golden, capsys, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(golden, folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    code, _, err = cli(capsys, "--checkpoint", folder, "--prompt", "x")
    assert code == 1 and "model.safetensors" in err and "Traceback" not in err


def test_missing_compiler_is_said(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Exception, match=r"no C\+\+ compiler.*--no-compile"):
        check_compiler()


@pytest.mark.slow
def test_runs_as_a_program(golden):
    """As a user starts it, with nothing of this process: stdout holds the JSON and nothing else."""
    command = [
        sys.executable, "generate.py", "--checkpoint", golden, "--prompt", "Hi", "--json", "--no-compile",
        "--max-new-tokens", "5"
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (row,) = rows(done.stdout)
    assert row["tokens"] == 5


@pytest.mark.slow
def test_a_reader_that_leaves_early(golden):
    """`| head`: no message, a status that says why."""
    command = [
        sys.executable, "generate.py", "--checkpoint", golden, "--prompt", "Hi", "--json", "--no-compile",
        "--max-new-tokens", "5"
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 141 and "error" not in err and "Traceback" not in err


def test_help_does_not_wait_for_torch():
    code = "import generate, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
