"""llama-server and OpenVINO GenAI as peers, with small programs that stand in for them.

Both stand-ins write the last token plus one, or 1000, 1001, ... after a prompt of more than two tokens; 7
ends a text.
"""
import json
import sys

import gguf_copy
import peers
import pytest
from llama_peer import LlamaServer
from openvino_peer import OpenVino, as_chain, as_tree

from common.errors import InputError
from tree import TreeShape

SERVER = f"""#!{sys.executable}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

def option(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default

if open(option("--model")).read() == "broken":
    sys.exit("error: no model")
chain = int(option("--spec-draft-n-max", 0))
assert bool(chain) == bool(option("--model-draft")) == (option("--spec-type") == "draft-eagle3")
asked = []

class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        asked.append(self.path)
        self.answer(200 if len(asked) > 1 else 503, {{}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        if prompt == [98]:
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(1)
        new = [1000 if len(prompt) > 2 else prompt[-1] + 1]
        while len(new) < body["n_predict"] and new[-1] != 7:
            new.append(new[-1] + 1)
        timings = {{"predicted_ms": 10 * (len(new) - 1)}}
        if chain:
            timings["draft_n_accepted"] = len(new) - 3
        answer = {{"tokens": new, "timings": timings, "stop_type": "eos" if new[-1] == 7 else "limit"}}
        self.answer(400 if prompt == [99] else 200, answer)

    def log_message(self, *args):
        pass

HTTPServer((option("--host"), int(option("--port"))), Handler).serve_forever()
"""

LIBRARY = {
    "openvino.py": "Tensor = list\n",
    "openvino_genai.py": """
from types import SimpleNamespace
StreamerBase = object
StreamingStatus = SimpleNamespace(RUNNING=0)
TokenizedInputs = lambda ids, mask: [int(i) for i in ids[0]]

class GenerationConfig(SimpleNamespace):
    num_assistant_tokens = 0

def draft_model(path, device, **options):
    return path

class LLMPipeline:
    def __init__(self, path, device, draft_model=None, **options):
        assert options["INFERENCE_NUM_THREADS"] == 1
        self.offset = 10 * (options["INFERENCE_PRECISION_HINT"] == "bf16")
        self.draft = draft_model
        print("a message on stdout")
        if path.endswith("broken"):
            raise RuntimeError("no model")

    def generate(self, prompt, config, streamer):
        if prompt == [98]:
            raise RuntimeError("out of memory")
        assert self.draft or not config.num_assistant_tokens
        new = [1000 if len(prompt) > 2 else prompt[-1] + 1 + self.offset]
        while len(new) < config.max_new_tokens and new[-1] not in config.stop_token_ids:
            new.append(new[-1] + 1)
        streamer.write(new[:1])
        for i in range(1, len(new), 1 + config.num_assistant_tokens):
            step = new[i : i + 1 + config.num_assistant_tokens]
            streamer.write(step[0] if len(step) == 1 else step)
        streamer.write([])
        streamer.end()
""",
}


@pytest.fixture
def server(tmp_path):
    """A stand-in for llama-server, and a model file for it."""
    file, model = tmp_path / "llama-server", tmp_path / "model.gguf"
    file.write_text(SERVER)
    file.chmod(0o755)
    model.write_text("model")
    return str(file), model


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A folder that makes `import openvino_genai` find a stand-in, and in it two exported models."""
    for name, text in LIBRARY.items():
        (tmp_path / name).write_text(text)
    for name in ("target", "head"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "openvino_model.xml").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_llama_server_is_asked(server):
    binary, model = server
    with LlamaServer(binary, model, 1, [7]) as plain, LlamaServer(binary, model, 1, [7], "head", 2) as eagle3:
        answer = plain.decode([1, 2], 3)
        assert answer.ids == [3, 4, 5] and answer.tokens_per_second == pytest.approx(100)
        assert plain.decode([2, 5], 9).ids == [6, 7] and plain.decode([6], 9).tokens_per_second == 0
        assert eagle3.decode([1, 2, 3], 9).steps == 9 - 1 - 6
        processes = plain.process, eagle3.process
        assert [process.poll() for process in processes] == [None, None]
    assert None not in [process.poll() for process in processes]


def test_what_goes_wrong_in_llama_server_is_one_line(server):
    binary, model = server
    with LlamaServer(binary, model, 1, [7]) as peer:
        with pytest.raises(InputError, match="answered a prompt of 1 tokens with status 400"):
            peer.decode([99], 3)
        with pytest.raises(InputError, match=r"gave no answer \(out of memory\)"):
            peer.decode([98], 3)
    with LlamaServer(binary, model, 1, [5]) as peer, pytest.raises(InputError, match="has other stop ids"):
        peer.decode([3], 4)
    model.write_text("broken")
    broken = LlamaServer(binary, model, 1, [7])
    with pytest.raises(InputError, match=r"--llama-server: ended \(error: no model\)"):
        broken.__enter__()
    assert broken.process.returncode == 1
    with pytest.raises(InputError, match="cannot be started"):
        LlamaServer(str(model), model, 1, [7])


def test_openvino_is_asked(library):
    with OpenVino(sys.executable, "target", "head", 1, [7]) as peer:
        plain, chain = peer.contender(), peer.contender(**as_chain(2))
        answer = plain([1, 2], 3)
        assert answer.ids == [3, 4, 5] and answer.accept_lengths == [1, 1] and answer.tokens_per_second > 0
        assert plain([5], 9).ids == [6, 7] and plain([6], 9).tokens_per_second == 0
        answer = chain([1, 2, 3], 9)
        assert answer.ids == plain([1, 2, 3], 9).ids and answer.accept_lengths == [3, 3, 2]
        with pytest.raises(InputError, match=r"--openvino: ended \(RuntimeError: out of memory\)"):
            plain([98], 3)
        with pytest.raises(InputError, match="out of memory"):
            plain([1], 3)
    properties = {"INFERENCE_PRECISION_HINT": "bf16"}
    with OpenVino(sys.executable, "target", None, 1, [7], properties) as peer:
        assert peer.contender()([1], 1).ids == [12]
    with pytest.raises(InputError, match="no model"):
        OpenVino(sys.executable, "broken", None, 1, [7]).__enter__()


def test_a_tree_in_the_terms_of_openvino():
    tree = as_tree(TreeShape.parse("8,2,4"))
    assert tree == {"num_assistant_tokens": 7, "tree_depth": 3, "branching_factor": 4}


@pytest.mark.slow
def test_peers_that_are_processes_take_turns(golden, questions, results, server, library, monkeypatch):
    """All of them through peers.py; the GGUF files are no part of this."""
    def write_gguf(like, model, out, kind):
        out.write_text(kind)
        return out

    monkeypatch.setattr(gguf_copy, "write_gguf", write_gguf)
    binary, head = map(str, server)
    argv = ["--checkpoint", str(golden), "--questions", str(questions), "--no-compile", "--gguf", head]
    argv += ["--llama-server", binary, "--llama-head", head, "--llama-chains", "2", "3"]
    argv += ["--openvino", sys.executable, "--openvino-target", str(library / "target")]
    argv += ["--openvino-head", str(library / "head"), "--openvino-trees", "8,2,4"]
    assert peers.main([*argv, "--threads", "1", "--max-new-tokens", "10"]) == 0
    summary = json.loads((results / "peers.json").read_text())["summary"]
    of_peers = {name: figures for name, figures in summary.items() if not name.startswith("ours")}
    assert {name: figures["tau"] for name, figures in of_peers.items() if "tau" in figures} == {
        "llama.cpp EAGLE-3 Q8_0, chain of 2": 4.5, "llama.cpp EAGLE-3 Q8_0, chain of 3": 4.5,
        "OpenVINO EAGLE-3, chain of 3": 3, "OpenVINO EAGLE-3, tree 8,2,4": 4.5,
    }
    assert {figures["equal"] for figures in summary.values() if "equal" in figures} == {2}
    assert {*of_peers} >= {"llama.cpp bf16", "llama.cpp Q8_0", "OpenVINO"}
    assert of_peers["llama.cpp Q8_0"]["rate"] == pytest.approx(100)
