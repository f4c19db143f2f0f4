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
