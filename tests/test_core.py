"""The core runs without other packages, reproduces the golden traces, and does not grow."""
import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import astuple

from helpers import GOLDEN, ROOT
from helpers.decoding import Trace

# Files that an EAGLE request in PyTorch imports, and engine/graphs.py. The limits below may only decrease.
CORE = (
    "checkpoint/__init__.py", "checkpoint/load.py", "common/__init__.py",
    "common/cli.py", "common/errors.py", "common/machine.py", "common/schema.py",
    "engine/__init__.py", "engine/draft.py", "engine/drafting.py", "engine/engine.py", "engine/graphs.py",
    "engine/request.py", "engine/runner.py",
    "engine/state.py", "engine/step.py", "engine/target.py", "extensions.py",
    "generate.py", "head.py", "llm.py", "model.py", "engine/sampling.py", "tokens/__init__.py",
    "tokens/files.py", "tokens/tokenizer.py", "tree.py",
)
MAX_FILES, MAX_NODES = 23, 42_683  # with code; syntax nodes without docstrings: denser lines save nothing
REPLAY = """
import json, sys
from llm import LLM
from engine.sampling import Sampling

traces = []
for checkpoint, method, tree, prompt, count in json.loads(sys.argv[1]):
    llm = LLM(checkpoint, method, tree=tree, batch_size=1, device="cpu", compile=False, dtype="fp32")
    tokens, steps = list(prompt), []
    for event in llm.engine.run([prompt], [Sampling(count)], [], watch=True):
        if event.draft:
            steps.append([list(tokens), event.draft.tokens, event.draft.parent])
        tokens += event.ids
    traces.append(steps)
print(json.dumps(traces))
"""


def syntax_nodes(path) -> int:
    """Count the nodes of a file's syntax tree, without docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        documentable = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documentable and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return sum(1 for _ in ast.walk(tree)) - 1  # an empty file has one


def run_alone(folder, *command) -> str:
    """Run Python in a folder without the checkout on its path; return its stdout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )
    assert not result.returncode, result.stderr[-2000:]
    return result.stdout


def test_the_core_alone_decodes_the_golden_traces(golden, tmp_path):
    """Every step has the reference's tree, node for node; the command prints text."""
    for name in CORE:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    traces = {path: Trace(path) for path in sorted(GOLDEN.glob("eagle?.*.safetensors"))}
    assert len(traces) == 7
    jobs = [
        [str(golden), "eagle2" if path.name.startswith("eagle1") else "eagle3",
         ",".join(map(str, astuple(trace.shape))), trace.prompt, trace.tokens]
        for path, trace in traces.items()
    ]
    replayed = json.loads(run_alone(tmp_path, "-c", REPLAY, json.dumps(jobs)))
    for trace, steps in zip(traces.values(), replayed):
        trace.check(steps)
    command = "generate.py", "--checkpoint", golden, "--speculate", "eagle3", "--device", "cpu"
    flags = "--no-compile", "--dtype", "fp32", "--prompt", "Hello", "--max-new-tokens", "8"
    assert run_alone(tmp_path, *command, *flags)


def test_the_core_does_not_grow():
    counts = [syntax_nodes(ROOT / name) for name in CORE]
    assert sum(count > 0 for count in counts) <= MAX_FILES and sum(counts) <= MAX_NODES, sum(counts)
