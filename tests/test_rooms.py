"""Imports go one way: a room knows only the rooms below it, no file imports itself by a detour, and tests do
not import tests.

Every import counts, those inside functions too.
"""
import ast
import graphlib
import subprocess

from helpers import ROOT

# From the ground up. Rooms of one floor do not know each other.
FLOORS = (
    ("common",), ("model", "tree"), ("sampling",), ("networks",), ("kernels",), ("tokens",), ("checkpoint",),
    ("drafters",), ("engine",), ("llm",), ("console", "training", "evaluation", "server"),
    ("generate", "convert_checkpoint", "quantize", "train", "evaluate", "serve"),
    ("demo", "benchmarks", "deploy"), ("tests/helpers",), ("tests",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Where an import is looked up: the root, and the folders that are put on the path for scripts and tests.
FOLDERS = ("", "tests/", "benchmarks/")


def room_of(file: str) -> str:
    """The room that a file stands in: its folder, or its own name if it lies in the root."""
    if file.startswith("tests/helpers/"):
        return "tests/helpers"
    return file.split("/")[0].removesuffix(".py")


def imports_of(file: str, files: set[str]) -> set[str]:
    """The first-party files that a file imports."""
    names, found = [], set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: imports by its own place"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "Method"):  # drafters are named by `Method`
                names.append(str(node.args[0].value))
    for name in names:  # of a module, or of something in it
        places = [name.replace(".", "/"), name.rpartition(".")[0].replace(".", "/")]
        ends = (f"{folder}{place}{end}" for place in places for folder in FOLDERS for end in (
            ".py", "/__init__.py"))
        found.add(next((path for path in ends if path in files), file))
    return found - {file}


def test_imports_go_one_way():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    files = {file for file in listed if (ROOT / file).is_file()} or {  # an archive, no checkout
        str(path.relative_to(ROOT)) for pattern in ("*.py", *(f"{room}/**/*.py" for room in FLOOR))
        for path in ROOT.glob(pattern)
    }
    imports = {file: imports_of(file, files) for file in sorted(files)}
    assert len(imports) > 100 and sum(map(len, imports.values())) > 300
    faults = [f"{file} stands in no known room" for file in imports if room_of(file) not in FLOOR]
    for file, other in ((one, other) for one in imports for other in imports[one]):
        here, there = room_of(file), room_of(other)
        if here == there == "tests":
            faults.append(f"{file} -> {other}: a test imports a test: share by tests/helpers")
        elif here != there and FLOOR.get(there, -1) >= FLOOR.get(here, len(FLOORS)):
            faults.append(f"{file} -> {other}: {there} is not below {here}")
    assert not faults, "\n".join(faults)
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError
