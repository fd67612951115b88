"""What the documents say of the code is there: links, functions, and the lines of CONTRIBUTING.md's diffs."""
import re
from pathlib import Path

import pytest
from helpers import ROOT

PAGES = [
    path.relative_to(ROOT) for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "heads/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        if link.startswith("http"):
            continue
        file, _, place = link.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), link
        if place:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert place in map(anchor, headings), link


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_functions_are_where_they_are_said_to_be(page):
    for file, name in re.findall(r"`([\w/]+\.py): ([\w.]+)`", (ROOT / page).read_text()):
        source, *owner, last = (ROOT / file).read_text(), *name.split(".")
        assert not owner or re.search(rf"^class {owner[0]}\b", source, re.MULTILINE), f"{file}: {name}"
        assert re.search(rf"^\s*(def|class) {last}\b", source, re.MULTILINE), f"{file}: {name}"


def test_the_lines_of_the_diffs_are_in_the_files():
    count, source = 0, ""
    for diff in re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL):
        for line in diff.splitlines():
            if line.startswith("+++ b/"):
                source = (ROOT / line.removeprefix("+++ b/")).read_text()
            elif line.startswith("+"):
                count += 1
                assert f"\n{line[1:]}" in f"\n{source}", line
    assert count > 30


def test_the_readme_is_short():
    assert len(Path(ROOT / "README.md").read_text().split()) <= 900
