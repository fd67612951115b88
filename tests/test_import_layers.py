"""Import layers: packages import lower layers only, without cycles, and tests do not import tests.

Imports inside functions count too.
"""
import ast
import graphlib
import re
import subprocess

from helpers import ROOT

# Lowest first. Packages of one layer do not import each other. Some files are in another layer than their
# folder: STEPS implement the engine's `Step`; engine/sampling.py is below.
STEPS = {
    "kernels/cpu.py", "kernels/choose.py", "kernels/gpu/backend.py",
    "kernels/gpu/cache.py",
    "kernels/gpu/attention.py", "kernels/check_ranks.py",
}
LAYERS = (
    ("common", "extensions"), ("model", "tree"), ("families", "head", "sampling"), ("networks",),
    ("kernels",), ("tokens",), ("checkpoint",), ("engine",), ("steps", "drafters", "schedulers"),
    ("llm",),
    ("console", "training", "evaluation", "server"),
    ("generate", "convert_checkpoint", "quantize", "train", "evaluate", "serve"),
    ("demo", "benchmarks", "deploy", "eagle"), ("tests/helpers",), ("tests",),
)
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}
# Import roots: the repository, and the folders that tests and benchmark scripts add to sys.path.
FOLDERS = ("", "tests/", "benchmarks/")


def package_of(file: str) -> str:
    """Return the package of a file: its folder, or its name if it is in the root."""
    if file == "engine/sampling.py":
        return "sampling"
    if file in STEPS:
        return "steps"
    return "tests/helpers" if file.startswith("tests/helpers/") else file.split("/")[0].removesuffix(".py")


def imports_of(file: str, files: set[str]) -> set[str]:
    """Return the first-party files that a file imports."""
    names, imported, tree = [], set(), ast.parse((ROOT / file).read_text())
    tree.body = [node for node in tree.body if not ast.unparse(node).startswith("if TYPE_CHECKING:")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
            assert not node.level, f"{file}: relative import"
        elif isinstance(node, ast.Call) and re.search(r"import_module$", ast.unparse(node.func)):
            names += [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    for name in names:  # a module, or a name in a module
        modules = [name.replace(".", "/"), name.rpartition(".")[0].replace(".", "/")]
        candidates = [f"{folder}{module}{suffix}" for module in modules for folder in FOLDERS
                      for suffix in (".py", "/__init__.py")]
        imported.update([path for path in candidates if path in files][:1])
    return imported - {file}


def test_import_layers():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    files = {file for file in listed if (ROOT / file).is_file()} or {  # in an archive without git
        str(path.relative_to(ROOT)) for pattern in ("*.py", *(f"{package}/**/*.py" for package in LAYER_OF))
        for path in ROOT.glob(pattern)
    }
    imports = {file: imports_of(file, files) for file in files}
    assert len(imports) > 100 and sum(map(len, imports.values())) > 300
    errors = [f"{file}: unknown package" for file in files if package_of(file) not in LAYER_OF]
    for file, other in ((source, other) for source in imports for other in imports[source]):
        package, imported = package_of(file), package_of(other)
        if package == imported == "tests":
            errors.append(f"{file} -> {other}: move shared code to tests/helpers")
        elif package != imported and LAYER_OF.get(imported, -1) >= LAYER_OF.get(package, len(LAYERS)):
            errors.append(f"{file} -> {other}: {imported} is not below {package}")
    assert not errors, "\n".join(errors)
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError
