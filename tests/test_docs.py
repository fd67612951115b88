"""Names in the documentation exist: links, files, functions, command line options, lines of diffs."""
import importlib
import re

import pytest
from helpers import ROOT

PAGES = [
    path.relative_to(ROOT) for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "heads/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
COMMANDS = "generate", "serve", "convert_checkpoint", "quantize", "train", "evaluate"


def anchors(page: str) -> set[str]:
    """Return GitHub's anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_files_functions_and_flags_of_a_page_exist(page):
    path, text = ROOT / page, (ROOT / page).read_text()
    for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists() and (not anchor or anchor in anchors(linked.read_text())), link
    shown = re.sub(r"in git\s+history:\s+`[^`]*`", "", text)
    for file in re.findall(r"`((?:\w+/)+\w+\.(?:py|h|cpp|sh))\b", shown):
        assert (ROOT / file).exists(), file
    for file, name in re.findall(r"`([\w/]+\.py): ([\w.]+)`", shown):
        source, (*owner, last) = (ROOT / file).read_text(), name.split(".")
        for pattern in (*(rf"class {one}\b" for one in owner), rf"\s*(def|class) {last}\b"):
            assert re.search(rf"^{pattern}", source, re.MULTILINE), f"{file}: {name}"
    for name, rest in re.findall(rf"\b({'|'.join(COMMANDS)})\.py((?: +[^\s`|]+| *\\\n)+)", text):
        known = importlib.import_module(name).parser()._option_string_actions
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
            assert flag in known, f"{name}.py {flag}"


def test_lines_of_the_diffs_in_contributing_are_in_the_files():
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    files = re.findall(r"^\+\+\+ b/(.*)\n((?:\+[^+].*\n)+)", "".join(diffs), re.MULTILINE)
    assert len(files) >= 10
    for file, lines in files:
        source = (ROOT / file).read_text().splitlines()
        for line in lines.splitlines():
            assert any(one.startswith(line[1:]) for one in source), line
