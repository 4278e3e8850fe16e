"""The documentation says what the code does: its examples give the numbers printed, its links lead somewhere."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# [`name`](path.py) or [`Class.name`](path.py): the file defines that name.
NAMED = re.compile(r"\[`([\w.]+)`\]\(([^)#]+\.py)\)")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")

with_examples = pytest.mark.parametrize(
    "page", [p for p in PAGES if ">>> " in p.read_text()], ids=lambda page: page.name
)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def run_examples(page: Path) -> tuple[int, str]:
    """Run a page's ``>>>`` blocks one after the other, as one session: how many there were, and what went wrong."""
    text = page.read_text()
    # Everything outside the blocks is blanked rather than cut, so that a failure names the page's own line.
    keep: set[int] = set()
    for block in BLOCK.finditer(text):
        if ">>> " in block[1]:
            first = text.count("\n", 0, block.start(1))
            keep |= set(range(first, first + block[1].count("\n")))
    source = "\n".join(line if number in keep else "" for number, line in enumerate(text.split("\n")))
    example = doctest.DocTestParser().get_doctest(source, {}, page.name, str(page), 0)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=report.append)
    return result.attempted, "".join(report)


@with_examples
def test_examples_give_the_numbers_printed(page: Path):
    attempted, report = run_examples(page)
    assert attempted > 0
    assert not report, report


def test_a_wrong_number_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\n>>> 1 + 1\n3\n\n```\n\n    >>> not run\n")
    attempted, report = run_examples(page)
    assert attempted == 1
    assert "line 4" in report


@every_page
def test_links_lead_to_files_that_exist(page: Path):
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not missing


@every_page
def test_the_functions_named_are_in_the_files_named(page: Path):
    for name, file in NAMED.findall(page.read_text()):
        source = (page.parent / file).read_text()
        for part in name.split("."):
            defined = re.search(rf"^\s*(?:def|class) {part}\b|^\s*{part}\s*[:=]", source, re.MULTILINE)
            assert defined, f"{file} defines no {part} (of {name})"
