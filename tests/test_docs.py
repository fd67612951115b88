"""The documents name what exists: links, files, functions, options of commands, lines of the diffs."""
import importlib
import re

import pytest
from helpers import ROOT

PAGES = [
    path.relative_to(ROOT) for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "heads/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
COMMANDS = "generate", "serve", "convert_checkpoint", "quantize", "train", "evaluate"


@pytest.fixture(params=PAGES, ids=str)
def page(request):
    """A page of the documentation: its path and its text."""
    return ROOT / request.param, (ROOT / request.param).read_text()


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_lead_somewhere(page):
    path, text = page
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        file, _, place = link.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), link
        if place:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            assert place in map(anchor, headings), link


def test_files_and_functions_exist(page):
    _, text = page
    text = re.sub(r"in git\s+history:\s+`[^`]*`", "", text)
    for file in re.findall(r"`((?:\w+/)+\w+\.(?:py|h|cpp|sh))\b", text):
        assert (ROOT / file).exists(), file
    for file, name in re.findall(r"`([\w/]+\.py): ([\w.]+)`", text):
        source, *owner, last = (ROOT / file).read_text(), *name.split(".")
        assert not owner or re.search(rf"^class {owner[0]}\b", source, re.MULTILINE), f"{file}: {name}"
        assert re.search(rf"^\s*(def|class) {last}\b", source, re.MULTILINE), f"{file}: {name}"


def test_commands_take_the_options_that_are_shown(page):
    for name, rest in re.findall(r"\b(\w+)\.py((?: +[^\s`|]+| *\\\n)+)", page[1]):
        if name in COMMANDS:
            known = importlib.import_module(name).parser()._option_string_actions
            for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
                assert flag in known, f"{name}.py {flag}"


def test_the_lines_of_the_diffs_are_in_the_files():
    count, source = 0, ""
    for diff in re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL):
        for line in diff.splitlines():
            if line.startswith("+++ b/"):
                source = (ROOT / line.removeprefix("+++ b/")).read_text()
            elif line.startswith("+"):
                count += 1
                assert f"\n{line[1:]}" in f"\n{source}", line
    assert count > 20
