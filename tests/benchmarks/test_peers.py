"""llama-server and OpenVINO GenAI by small programs that stand in for them, transformers, random shapes.

Both stand-ins write the last token plus one; 7 ends a text, the prompt [98] the program.
"""
import sys

import gguf
import pytest
import torch
from bench import Decoded
from hugging_face import HuggingFace, as_llama
from hugging_face import main as copy_for_hugging_face
from processes import LlamaServer, OpenVino
from shapes import SHAPES, random_models, write_gguf

from checkpoint.loading import load_model
from common.errors import InputError
from drafters.eagle import Eagle
from engine.engine import Engine
from kernels.choose import choose_backend
from model import ModelArgs
from sampling.options import Sampling
from tree import TreeShape

SERVER = f"""#!{sys.executable}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

def option(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default

if option("--model") == "broken":
    sys.exit("error: no model")
chain = int(option("--spec-draft-n-max", 0))
assert bool(chain) == bool(option("--model-draft")) == (option("--spec-type") == "draft-eagle3")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [98]:
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(1)
        new = [body["prompt"][-1] + 1]
        while len(new) < body["n_predict"] and new[-1] != 7:
            new.append(new[-1] + 1)
        timings = {{"predicted_ms": 10 * (len(new) - 1)}}
        if chain:
            timings["draft_n_accepted"] = len(new) - 3
        data = json.dumps({{"tokens": new, "timings": timings}}).encode()
        self.send_response(400 if body["prompt"] == [99] else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

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
        assert options == {"INFERENCE_NUM_THREADS": 1}
        print("a message on stdout")
        if path == "broken":
            raise RuntimeError("no model")
        self.draft = draft_model

    def generate(self, prompt, config, streamer):
        if prompt == [98]:
            raise RuntimeError("out of memory")
        assert self.draft or not config.num_assistant_tokens
        new = [prompt[-1] + 1]
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
def binary(tmp_path):
    """A stand-in for llama-server."""
    file = tmp_path / "llama-server"
    file.write_text(SERVER)
    file.chmod(0o755)
    return str(file)


def test_llama_server(binary):
    with LlamaServer(binary, "m", 1) as plain, LlamaServer(binary, "m", 1, head="h", chain=2) as eagle3:
        assert plain.decode([1, 2], 3) == Decoded([3, 4, 5], pytest.approx(100), [], 2)
        assert plain.decode([2, 5], 9).ids == [6, 7] and plain.decode([6], 9).rate == 0
        assert eagle3.decode([1], 9).steps == 5 - 3
        with pytest.raises(InputError, match="answered a prompt of 1 tokens with 400"):
            plain.decode([99], 3)
        with pytest.raises(InputError, match=r"gave no answer \(out of memory\)"):
            plain.decode([98], 3)
    assert None not in (plain.process.poll(), eagle3.process.poll())
    with pytest.raises(InputError, match=r"--llama-server: ended \(error: no model\)"):
        LlamaServer(binary, "broken", 1).__enter__()


def test_openvino(tmp_path, monkeypatch):
    for name, text in LIBRARY.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    properties = {"INFERENCE_NUM_THREADS": 1}
    with OpenVino(sys.executable, "target", "head", properties) as peer:
        plain, chain = peer.contender([7]), peer.contender([7], TreeShape(3, 1, 1))
        answer = plain([1, 2], 3)
        assert answer.ids == [3, 4, 5] and answer.accept_lengths == [1, 1] and answer.rate > 0
        assert plain([6], 9).rate == 0 and chain([1], 9).accept_lengths == [3, 2]
        with pytest.raises(InputError, match=r"--openvino: ended \(RuntimeError: out of memory\)"):
            plain([98], 3)
        with pytest.raises(InputError, match="out of memory"):
            plain([1], 3)
    with pytest.raises(InputError, match="no model"):
        OpenVino(sys.executable, "broken", None, properties).__enter__()


def test_transformers_decodes_a_padded_batch(golden):
    pytest.importorskip("transformers")
    peer = HuggingFace(as_llama(load_model(golden)[0]), [ord("e")])
    prompts, limits = [[*b"u:tell me a"], [*b"x"], [*b"and 4 and 5?"]], [9, 12, 4]
    alone = [peer.decode(ids, limit).ids for ids, limit in zip(prompts, limits)]
    assert peer.decode_together(prompts, limits)[0] == alone


def test_a_hugging_face_copy_is_the_target(golden, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    argv = ["--checkpoint", str(golden), "--out", str(tmp_path / "copy"), "--threads", "1"]
    assert copy_for_hugging_face(argv) == 0
    target, config = load_model(golden)
    copy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto")
    for name, tensor in as_llama(target).state_dict().items():
        assert torch.equal(copy.state_dict()[name], tensor), name
    assert copy.generation_config.eos_token_id == config["stop_ids"]
    assert copy_for_hugging_face(argv) == 1 and "exists" in capsys.readouterr().err


@pytest.mark.compile
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("mode", (None, "int8", "int4"))
def test_models_of_a_shape_decode(mode, packed):
    """Speculative text of random weights is plain text, also of quantised ones, also on the kernels."""
    target, head = random_models("tiny", torch.float32, "cpu", mode, 32)
    if packed:
        assert choose_backend("cpu").prepare(target, head)
    texts = [
        Engine(target, drafter, compile=False, max_seq_len=100).generate([[1, 2, 3]], Sampling(20))[0].ids
        for drafter in (Eagle(head, TreeShape(8, 2, 4)), None)
    ]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def test_a_gguf_of_a_shape(tmp_path, monkeypatch):
    """Every tensor has finite weights, and the shape and kind that llama.cpp expects."""
    monkeypatch.setitem(SHAPES, "small", (ModelArgs(512, 256, 512, 4, 4, 2, 64), 256, 512))
    write_gguf("small", tmp_path / "small.gguf")
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "small.gguf").tensors}
    assert len(tensors) == 3 + 4 * 9 and [*tensors["blk.3.ffn_down.weight"].shape] == [512, 256]
    assert tensors["output.weight"].tensor_type.name == "Q6_K"
    for tensor in tensors.values():
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert values.isfinite().all() and 0 < values.abs().max() < 200
