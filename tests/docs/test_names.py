"""What the pages name exists, and what exists is named: public names, environment variables, files."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

import mpiad
import mpiad.debug
import mpiad.ensemble
import mpiad.errors
import mpiad.extend
import mpiad.testing
from mpiad.environment_variables import VARIABLES

ROOT = Path(__file__).parents[2]
PRIMITIVES = [
    name
    for name in mpiad.__all__
    if name.startswith("mpi_") and not re.fullmatch("mpi_(init|finali|rank|size|local|print|optimize|map).*", name)
]
AUTOMATIC = re.compile(r"^\.\. auto(?:function|class|exception):: (?:mpiad\.)?(\S+)$", re.MULTILINE)
PATH = re.compile(r"`((?:mpiad|tests|examples|benchmarks|docs|\.ci)/[\w./]*|\w+\.(?:md|toml|cfg)|Makefile)`")


@functools.cache
def variables() -> set[str]:
    files = (file for folder in ("mpiad", "tests") for file in (ROOT / folder).rglob("*.py"))
    return {name for file in files for name in re.findall("MPIAD_[A-Z_]+", file.read_text())}


def page(name: str) -> str:
    return (ROOT / name).read_text()


def reference() -> str:
    return "\n".join(file.read_text() for file in sorted((ROOT / "docs" / "reference").glob("*.md")))


def test_public_names_are_in_the_list():
    assert set(mpiad.__all__) <= set(AUTOMATIC.findall(reference()))


@pytest.mark.parametrize("module", [mpiad.extend, mpiad.errors])
def test_modules_are_in_the_list(module):
    assert f".. automodule:: {module.__name__}\n   :members:" in reference()


@pytest.mark.parametrize("module", [mpiad.testing, mpiad.debug, mpiad.ensemble])
def test_rooms_with_names_of_their_own_are_in_the_list(module):
    listed = reference().partition(f"currentmodule:: {module.__name__}\n")[2].partition("currentmodule")[0]
    assert set(module.__all__) <= set(AUTOMATIC.findall(listed))


def test_primitives_are_in_the_table():
    lines = [line.split("|")[1] for line in page("docs/semantics.md").splitlines() if line.startswith("| ")]
    named = {word for line in lines for word in re.findall(r"`(mpi_\w+)", line)}
    assert set(PRIMITIVES) - {"mpi_waitall"} <= named


def test_primitives_are_derived():
    assert set(PRIMITIVES) - {"mpi_waitall"} <= set(re.findall(r"`(mpi_\w+)`", page("docs/adjoints.md")))


def test_environment_variables_are_documented():
    documented = page("docs/environment.md") + page("docs/project/development.md")
    assert variables() == set(re.findall(r"`(MPIAD_[A-Z_]+)`", documented))


def test_files_that_pages_name_exist():
    named = {path for name in ("docs/rooms.md", "docs/performance.md") for path in PATH.findall(page(name))}
    assert len(named) > 40
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_rooms_are_in_the_house():
    house = page("docs/rooms.md").partition("```text\n")[2].partition("```")[0]
    rooms = {path.name for path in (ROOT / "mpiad").iterdir() if not path.name.startswith("__pycache__")}
    assert {re.sub("/$", "", word) for word in re.findall(r"^  (\S+)", house, re.MULTILINE)} == rooms - {"py.typed"}


def test_a_misspelt_variable_is_told_from_all_there_are():
    assert set(VARIABLES) == variables()
