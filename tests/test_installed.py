"""`pip install .`: one package, and a command that works in any folder."""
import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

from common.cli import VERSION


@pytest.mark.slow
def test_installed_command_runs_in_any_folder(golden, tmp_path):
    """The package has all files of the commands, and its modules do not pollute the top-level namespace."""
    ignored = (".*", "tests", "benchmarks", "docs", "checkpoints", "runs", "build", "*.egg-info",
               "__pycache__")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(*ignored))
    files = {path.relative_to(source) for path in source.rglob("*") if path.is_file()}
    site = tmp_path / "site"
    env = os.environ | {"PYTHONPATH": str(site)}

    def run(*command: object) -> str:
        result = subprocess.run([*map(str, command)], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert not result.returncode, result.stderr
        return result.stdout

    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index",
        "--disable-pip-version-check", "--target", site, source)
    assert {path.name for path in site.iterdir()} == {
        "bin", "eagle_decoder", f"eagle_decoder-{VERSION}.dist-info"}
    missing = {str(path) for path in files if not (site / "eagle_decoder" / path).exists()}
    assert not {path for path in missing if path.split("/")[0] not in ("demo", "deploy", "heads")} - {
        "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "pyproject.toml", "requirements.txt",
        "requirements-dev.txt"}
    assert "heads/openings.txt" not in missing
    eagle = site / "bin" / "eagle"
    assert "usage: eagle COMMAND" in run(eagle, "--help") and "eagle generate" in run(eagle, "generate", "-h")
    out = run(eagle, "generate", "-m", golden, "--no-compile", "--prompt-ids", "1,2,3", "-n", "4", "--json")
    assert '"tokens": 4' in out
    names = "import importlib.util as u; print([u.find_spec(x) for x in ('model', 'tree', 'common')])"
    assert run(sys.executable, "-c", names) == "[None, None, None]\n"
    api = "from eagle_decoder.eagle import LLM; print(LLM.__name__)"
    assert run(sys.executable, "-c", api) == "LLM\n"
