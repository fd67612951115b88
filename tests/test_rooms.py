"""Imports go one way: a room knows only the rooms below it, no file imports itself by a detour, and tests do
not import tests.

Every import counts, those inside functions too.
"""
import ast
import graphlib
import re
import subprocess

from helpers import ROOT

# From the lowest up. Packages of one layer do not import each other. Some files stand in another layer than
# their folder: STEPS implement the engine's `Step`, engine/sampling.py is below.
STEPS = {
    "kernels/cpu.py", "kernels/choose.py", "kernels/gpu/backend.py",
    "kernels/gpu/cache.py", "kernels/gpu/mask.py",
    "kernels/gpu/attention.py", "kernels/check_ranks.py",
}
FLOORS = (
    ("common", "extensions"), ("model", "tree"), ("families", "head", "sampling"), ("networks",),
    ("kernels",), ("tokens",), ("checkpoint",), ("engine",), ("steps", "drafters", "schedulers"),
    ("llm",),
    ("console", "training", "evaluation", "server"),
    ("generate", "convert_checkpoint", "quantize", "train", "evaluate", "serve"),
    ("demo", "benchmarks", "deploy", "eagle"), ("tests/helpers",), ("tests",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Where an import is looked up: the root, and the folders that are put on the path for scripts and tests.
FOLDERS = ("", "tests/", "benchmarks/")


def room_of(file: str) -> str:
    """The package of a file: its folder, or its own name if it lies in the root."""
    if file == "engine/sampling.py":
        return "sampling"
    if file in STEPS:
        return "steps"
    return "tests/helpers" if file.startswith("tests/helpers/") else file.split("/")[0].removesuffix(".py")


def imports_of(file: str, files: set[str]) -> set[str]:
    """The first-party files that a file imports."""
    names, found, tree = [], set(), ast.parse((ROOT / file).read_text())
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_CHECKING:")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
            assert not node.level, f"{file}: imports by its own place"
        elif isinstance(node, ast.Call) and re.search(r"import_module$", ast.unparse(node.func)):
            names += [one.value for one in node.args[:1] if isinstance(one, ast.Constant)]
    for name in names:  # of a module, or of something in it
        places = [name.replace(".", "/"), name.rpartition(".")[0].replace(".", "/")]
        ends = [f"{folder}{place}{end}" for place in places for folder in FOLDERS
                for end in (".py", "/__init__.py")]
        found.update([path for path in ends if path in files][:1])
    return found - {file}


def test_imports_go_one_way():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    files = {file for file in listed if (ROOT / file).is_file()} or {  # an archive, no checkout
        str(path.relative_to(ROOT)) for pattern in ("*.py", *(f"{room}/**/*.py" for room in FLOOR))
        for path in ROOT.glob(pattern)
    }
    imports = {file: imports_of(file, files) for file in files}
    assert len(imports) > 100 and sum(map(len, imports.values())) > 300
    faults = [f"{file} stands in no known room" for file in files if room_of(file) not in FLOOR]
    for file, other in ((one, other) for one in imports for other in imports[one]):
        here, there = room_of(file), room_of(other)
        if here == there == "tests":
            faults.append(f"{file} -> {other}: a test imports a test: share by tests/helpers")
        elif here != there and FLOOR.get(there, -1) >= FLOOR.get(here, len(FLOORS)):
            faults.append(f"{file} -> {other}: {there} is not below {here}")
    assert not faults, "\n".join(faults)
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError
