"""What the pages show besides programs: examples and pictures."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.serial

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
PAGES = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in FILES}
SHOWN = re.compile(r"^```\{example\} (\w+)$|\{download\}`.*?</\.\./examples/(\w+)\.py>`", re.MULTILINE)


def test_the_gallery_shows_each_example():
    gallery = "\n".join(text for name, text in PAGES.items() if name.startswith("docs/gallery/"))
    shown = {name for names in SHOWN.findall(gallery) for name in names if name}
    assert shown == {program.stem for program in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("name", PAGES)
def test_descriptions_of_pictures_are_on_one_line(name):
    """MyST drops line breaks in them, and joins the words on both sides."""
    assert not re.findall(r"!\[[^\]]*\n[^\]]*\]\(", PAGES[name])


def test_diagrams_are_those_that_the_program_draws(monkeypatch, tmp_path):
    diagrams = runpy.run_path(str(ROOT / "docs" / "diagrams.py"))
    monkeypatch.setitem(diagrams["main"].__globals__, "FOLDER", tmp_path)
    diagrams["main"]()
    folder = ROOT / "docs" / "images" / "diagrams"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {f.name: f.read_text() for f in folder.iterdir()}


def test_the_readme_states_ratios_of_the_performance_page():
    table = [row.strip("| ").split(" | ") for row in PAGES["docs/performance.md"].splitlines() if row.count(" | ") == 4]
    rows = {(workload, forward, gradient) for workload, _, forward, gradient, _ in table}
    stated = re.findall(r"\| ([^|]+): ([\d.]+)?(?:, )?with gradient ([\d.]+) \|$", PAGES["README.md"], re.MULTILINE)
    assert len(stated) == 4
    assert {(workload, forward or "–", gradient) for workload, forward, gradient in stated} <= rows


def test_the_picture_of_ratios_shows_the_tables_of_the_performance_page():
    ratios = runpy.run_path(str(ROOT / "docs" / "performance_picture.py"))["ratios"]
    found = ratios(PAGES["docs/performance.md"])
    assert ("Devito", (0.78,), (0.78,)) in found
    assert ("PyAMG", (0.08, 0.15), ()) in found
    assert "mpiad" not in {ratio.library for ratio in found}
