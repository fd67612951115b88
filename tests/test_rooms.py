"""Imports go one way: a room knows only the rooms below it, no file imports itself by a detour, and tests do
not import tests.

Every import counts, those inside functions too.
"""
import ast
import graphlib
import subprocess
from pathlib import Path

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


def named(tree: ast.Module, folder: str) -> list[tuple[str, ...]]:
    """The modules that a file of `folder` may mean by its imports: for each name the candidates, best first.
    """
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name,) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = folder.split("/")
            above = parts[: len(parts) + 1 - node.level] if node.level else []
            module = ".".join([*above, node.module] if node.module else above)
            names += [(f"{module}.{alias.name}", module) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "Method"):  # drafters are named by `Method`
                names += [(str(node.args[0].value),)]
    return names


def imports_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """The first-party files that each file imports. sources: the text of every first-party file, by path."""

    def file_of(module: str) -> str | None:
        for folder in FOLDERS:
            path = folder + module.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if file in sources:
                    return file
        return None

    imports = {}
    for file, text in sources.items():
        modules = named(ast.parse(text), file.rpartition("/")[0])
        imports[file] = {next(filter(None, map(file_of, candidates)), None) for candidates in modules}
        imports[file] -= {None, file}
    return imports


def faults(imports: dict[str, set[str]]) -> list[str]:
    """What is wrong with what each file imports, a line each."""
    lines = [f"{file} stands in no known room" for file in imports if room_of(file) not in FLOOR]
    for file, others in sorted(imports.items()):
        for other in sorted(others):
            here, there = room_of(file), room_of(other)
            if here == there == "tests":
                lines.append(f"{file} -> {other}: a test imports a test: share by tests/helpers")
            elif here != there and FLOOR.get(there, -1) >= FLOOR.get(here, len(FLOORS)):
                lines.append(f"{file} -> {other}: {there} is not below {here}")
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as circle:
        lines.append(f"{' -> '.join(circle.args[1])}: a circle")
    return lines


def first_party() -> list[Path]:
    """All Python files of the repository, relative to its root, those not committed yet too."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).is_file()]
    patterns = ("*.py", *(f"{room}/**/*.py" for room in FLOOR))  # an archive, no checkout
    return [path.relative_to(ROOT) for pattern in patterns for path in ROOT.glob(pattern)]


def test_imports_go_one_way():
    imports = imports_of({str(file): (ROOT / file).read_text() for file in first_party()})
    assert len(imports) > 100 and sum(map(len, imports.values())) > 300
    assert not faults(imports)
