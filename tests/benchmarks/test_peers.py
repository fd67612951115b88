"""peers.py, first_turns.py, tau.py, startup.py and their frame, on a small model. Speeds are not tested."""
import json
import sys
import types

import bench
import first_turns
import numpy as np
import peers
import pytest
import startup
import tau
import torch
from bench import Decoded
from hugging_face import as_llama
from hugging_face_copy import main as copy_for_hugging_face
from llama_peer import LlamaCpp

from checkpoint.loading import load_model
from common import threads
from common.errors import InputError
from tokens.tokenizer import Tokenizer

SMALL = ("--threads", "1", "--max-new-tokens", "12")


def test_contenders_take_turns_and_answers_without_speed_are_left_out(capsys):
    order = []

    def contender(name: str):
        def decode(ids: list[int], tokens: int) -> Decoded:
            order.append((name, ids[0], tokens))
            return Decoded([], float(ids[0]), [])

        return decode

    contenders = {name: contender(name) for name in "abc"}
    rows = bench.time_in_turns(contenders, [[1], [0], [3]], 9)
    assert order[:3] == [("a", 1, 16), ("b", 1, 16), ("c", 1, 16)]  # warm
    assert "".join(name for name, *_ in order[3:]) == "abcbcacab"
    assert {tokens for *_, tokens in order[3:]} == {9}
    assert [[*row] for row in rows] == [["a", "b", "c"]] * 2 and rows[1]["a"].tokens_per_second == 3
    with pytest.raises(InputError, match="nothing to time"):
        bench.time_in_turns(contenders, [[0]], 9)


def test_tau_is_that_of_all_steps():
    assert bench.pooled_tau([[4], [1, 1, 1]]) == 7 / 4
    with pytest.raises(InputError, match="no acceptance length"):
        bench.pooled_tau([[], []])


@pytest.mark.slow
def test_peers_on_a_small_model(golden, int8, questions, results):
    pytest.importorskip("transformers")
    argv = ["--checkpoint", str(golden), "--questions", str(questions), *SMALL, "--int8", str(int8)]
    assert peers.main([*argv, "--transformers", "--ladder", "--no-compile"]) == 0
    record = json.loads((results / "peers.json").read_text())
    assert set(record["summary"]) == {
        "ours plain", "ours EAGLE-3", "ours plain int8", "ours EAGLE-3 int8", "transformers",
        "transformers, prompt lookup", "ours plain, uncompiled PyTorch", "ours EAGLE-3, uncompiled PyTorch",
    }
    summary = record["summary"]
    assert summary["ours EAGLE-3"]["equal"] == 2 and summary["ours plain"]["x transformers"] > 0
    lengths = [n for row in record["rows"] for n in row["accept_lengths"]["ours EAGLE-3"]]
    assert summary["ours EAGLE-3"]["tau"] == pytest.approx(sum(lengths) / len(lengths))
    assert "| ours EAGLE-3 |" in (results / "peers.md").read_text()
    assert (results / "peers.png").stat().st_size > 5000


QUANTISED = "is quantised; name the unquantised one"
REFUSED = {  # id: what the error says, and the options; a second --checkpoint is the one that counts
    "int8 of no int8": ("is not quantised so; see quantize.py --mode int8", "--int8 {golden}"),
    "w8a8 of int8": ("is not quantised so; see quantize.py --mode w8a8", "--w8a8 {int8}"),
    "transformers on int8": (QUANTISED, "--checkpoint {int8} --transformers"),
    "gguf of int8": (QUANTISED, "--checkpoint {int8} --gguf x"),
    "no llama-cpp-python": ("llama-cpp-python is not installed", "--gguf x"),
    "gpt-fast without its checkpoint": ("go together", "--gpt-fast {folder}"),
    "no gpt-fast": ("no: is not there", "--gpt-fast {folder}/no --gpt-fast-checkpoint {folder}"),
    "no gpt-fast checkpoint": ("no: is not there", "--gpt-fast {folder} --gpt-fast-checkpoint {folder}/no"),
    "limit 0": ("--limit 0: must be at least 1", "--limit 0"),
    "no llama-server": ("no: is not there, or cannot be run", "--gguf x --llama-server {folder}/no"),
    "llama-server without gguf": ("--llama-server needs --gguf", "--llama-server x"),
    "llama-head without llama-server": ("--llama-head needs --llama-server", "--gguf x --llama-head x"),
    "no llama-head": ("no: is not there", "--gguf x --llama-server {python} --llama-head {folder}/no"),
    "openvino without its target": ("--openvino and --openvino-target go together", "--openvino x"),
    "openvino-head alone": ("--openvino-head needs --openvino-target", "--openvino-head x"),
    "no openvino": ("--openvino x/y: is not there", "--openvino x/y --openvino-target {folder}"),
    "no openvino-target": ("holds no openvino_model.xml", "--openvino {python} --openvino-target {folder}"),
    "no property": ("must be NAME=VALUE", "--openvino-set A=1 B"),
    "no tree": ("tree: '8,2' is not nodes,depth,width", "--openvino-trees 8,2"),
}


@pytest.mark.parametrize("words, options", REFUSED.values(), ids=REFUSED)
def test_what_peers_refuse(golden, int8, tmp_path, refused, monkeypatch, words, options):
    monkeypatch.setattr(peers, "load_contenders", None)  # all of this is refused before anything is loaded
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    places = {"golden": golden, "int8": int8, "folder": tmp_path, "python": sys.executable}
    options = [word.format(**places) for word in options.split()]
    refused(peers.main, "--checkpoint", golden, *SMALL, *options, words=words)


def test_gpt_fast_is_asked_for_its_own_figure(tmp_path):
    o = types.SimpleNamespace(gpt_fast=tmp_path, gpt_fast_checkpoint="model.pth", max_new_tokens=8)
    (tmp_path / "generate.py").write_text("print('Average tokens/sec: 12.50')")
    assert peers.gpt_fast(o) == 12.5
    (tmp_path / "generate.py").write_text("raise SystemExit('no GPU')")
    with pytest.raises(InputError, match=r"gave no figure \(no GPU\)"):
        peers.gpt_fast(o)


def test_llama_cpp_decodes_until_a_stop_id(monkeypatch):
    """With a stand-in for the library: the next token is the last one plus one."""

    class Llama:
        ctx = property(lambda self: self)

        def __init__(self, *args, **options):
            pass

        def reset(self):
            pass

        def n_vocab(self):
            return 10

        def eval(self, ids):
            self.logits = np.eye(10, dtype=np.float32)[ids[-1] + 1]

    library = types.SimpleNamespace(
        Llama=Llama, llama_get_logits_ith=lambda ctx, i: np.ctypeslib.as_ctypes(ctx.logits)
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    peer = LlamaCpp("file", 1, [7])
    assert peer.decode([1, 2], 3).ids == [3, 4, 5] and peer.decode([1, 4], 9).ids == [5, 6, 7]
    assert peer.decode([2], 3).tokens_per_second > 0 and peer.decode([6], 3).tokens_per_second == 0


def test_scaled_rotary_embeddings_are_not_handed_over(golden):
    pytest.importorskip("transformers")
    target, _ = load_model(golden)
    target.args = types.SimpleNamespace(rope_scaling={"factor": 8.0})
    with pytest.raises(InputError, match="scales its rotary embeddings"):
        as_llama(target)


@pytest.mark.slow
def test_a_hugging_face_copy_is_the_target(golden, tmp_path, refused):
    transformers = pytest.importorskip("transformers")
    argv = ("--checkpoint", golden, "--out", tmp_path / "copy")
    assert copy_for_hugging_face([*map(str, argv)]) == 0
    target, config = load_model(golden)
    copy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto")
    for name, tensor in as_llama(target).state_dict().items():
        assert torch.equal(copy.state_dict()[name], tensor), name
    assert copy.generation_config.eos_token_id == config["stop_ids"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert len(tokenizer) == Tokenizer.load(golden).vocab_size
    refused(copy_for_hugging_face, *argv, words="is there already")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


@pytest.mark.slow
def test_first_turns_on_a_small_model(golden, questions, results, capsys):
    pytest.importorskip("transformers")
    argv = ["--checkpoint", str(golden), "--questions", str(questions), *SMALL, "--no-compile"]
    parts = ("--equality", "--speed", "--transformers", "--coupling", "--trees", "4,1,2", "8,2,3")
    assert first_turns.main([*argv, *parts]) == 0
    record = json.loads((results / "first_turns.json").read_text())
    assert record["count"] == 2 and record["equality"]["fp32, greedy"]["equal"] == 2
    assert record["equality"]["fp32, temperature 1"]["tau"] >= 1
    speed = record["speed"]
    assert [*speed] == ["plain", "eagle3 4,1,2", "eagle3 8,2,3", "transformers", "rows"]
    assert speed["eagle3 8,2,3"]["tau"] >= 1 and speed["eagle3 8,2,3"]["times_transformers"] > 0
    assert speed["transformers"]["times_plain"] > 0 and "times_plain" not in speed["plain"]
    assert {*record["coupling"]} == {"coupled", "uncoupled"} and "coupling {" in capsys.readouterr().out


@pytest.mark.compile
def test_tau_on_a_small_model(golden, questions, results, capsys):
    argv = ["--checkpoint", str(golden), "--questions", str(questions), *SMALL, "--tree", "8,2,4", "2,0,1"]
    assert tau.main([*argv, "--temperature", "0", "1"]) == 0
    rows, said = json.loads((results / "tau.json").read_text())["rows"], capsys.readouterr().out
    assert [(row["tree"], row["temperature"]) for row in rows] == [
        ("8,2,4", 0.0), ("8,2,4", 1.0), ("2,0,1", 0.0), ("2,0,1", 1.0)
    ]
    for row in rows:
        assert row["q"]["tau"] >= 1 and row["q"]["prompts"] == 2 and f"{row['mean']['tau']:.3f}" in said
    assert rows[0]["q"]["tau"] > rows[2]["q"]["tau"]  # a larger tree


@pytest.mark.compile
def test_what_tau_refuses(golden, questions, refused):
    argv = ("--checkpoint", golden, "--questions", questions, "--tree", "8,2,4", "--threads", "1")
    refused(tau.main, *argv, "--max-new-tokens", "9999", words="no question and its answer fit in")
    refused(tau.main, *argv, "--max-new-tokens", "1", words="q: no answer has more than one token")
    refused(tau.main, *argv, "--limit", "0", words="--limit 0: must be at least 1")


NOTES = """compiling the kernels took 2.0 s
loaded x in 3.5 s; caches of 1 x 64 slots: 0.00 GB
compiling the step took 4.0 s
ready 9.0 s after the start
"""


def test_the_parts_of_a_start_add_up():
    assert startup.parts_of(NOTES) == {"kernels": 2.0, "load": 1.5, "compile step": 4.0, "import": 1.5}


def test_startup_runs_cold_and_warm(results, tmp_path, monkeypatch, refused):
    """With a stand-in for generate.py that says what it would say."""
    script = tmp_path / "generate.py"
    script.write_text(f"import sys\nsys.stderr.write({NOTES!r})\nprint('text')")
    monkeypatch.setattr(startup, "ROOT", tmp_path)
    (tmp_path / "x").mkdir()
    assert startup.main(["--checkpoint", str(tmp_path / "x"), "--repeat", "1", "--threads", "1"]) == 0
    record = json.loads((results / "startup.json").read_text())
    assert {*record["eagle3"]} == {"cold", "warm", "--no-compile"}
    assert record["none"]["cold"][0]["load"] == 1.5 and record["none"]["cold"][0]["first token"] > 0
    script.write_text("raise SystemExit('note\\nerror: no such folder')")
    argv = ("--checkpoint", tmp_path / "x", "--repeat", "1", "--threads", "1")
    refused(startup.main, *argv, words="generate.py --speculate none failed (error: no such folder)")
    refused(startup.main, "--checkpoint", "x", words="--checkpoint x: not a folder; give a converted one")


def test_threads_are_set(golden, monkeypatch, refused):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "processors", lambda: 3)
    try:
        assert bench.run(bench.options("", "x"), lambda o: None, ["--threads", "3"]) == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    refused(peers.main, "--checkpoint", golden, "--threads", "0", words="--threads 0: must be 1 to")


def test_counts_below_one_are_refused(golden, questions, refused):
    argv = ("--checkpoint", golden, "--questions", questions, "--limit", "0")
    refused(first_turns.main, *argv, words="--limit 0: must be at least 1")
    refused(startup.main, "--checkpoint", golden, "--repeat", "0", words="--repeat 0: must be at least 1")
