"""What the pages name exists, and what exists is named: public names, environment variables, files."""

from __future__ import annotations

import configparser
import functools
import re
from pathlib import Path

import pytest
from mpi4py import MPI

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
def test_packages_with_names_of_their_own_are_in_the_list(module):
    parts = reference().split(f"currentmodule:: {module.__name__}\n")[1:]
    listed = "\n".join(part.partition("currentmodule")[0] for part in parts)
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


def code_map() -> tuple[str, list[str]]:
    """Return the text of the map of the code, and its blocks: the packages and the layers."""
    parts = re.split(r"^```(?:text)?\n", page("docs/project/map.md"), flags=re.MULTILINE)
    return "".join(parts[::2]), parts[1::2]


def test_files_that_pages_name_exist():
    named = set(PATH.findall(page("docs/performance.md")))
    # Also a path that is written in another way, say relative to its package, must exist.
    named |= set(re.findall(r"`([\w.-]*/[\w./-]*|\S+\.(?:py|md|toml|cfg))`", code_map()[0]))
    assert len(named) > 80
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


def test_names_that_the_map_finds_in_files_are_there():
    found = re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", code_map()[0])
    assert len(found) > 10
    assert [(name, path) for name, path in found if not re.search(rf"\b{name}\b", page(path))] == []


def test_the_map_shows_all_packages():
    drawn, folders = set(), [ROOT / "mpiad"]
    for indent, name in re.findall(r"^( +)(\S+)", code_map()[1][0], re.MULTILINE):
        folders[len(indent) // 2 :] = [folders[len(indent) // 2 - 1] / name]
        drawn.add(folders[-1])
    package = {file.parent for file in (ROOT / "mpiad").rglob("__init__.py")} | set((ROOT / "mpiad").glob("*.py"))
    assert drawn == package - {ROOT / "mpiad"}


def test_the_map_shows_the_layers_that_are_checked():
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / "setup.cfg")
    layers = contracts["importlinter:contract:floors"]["layers"]
    assert re.findall(r"[\w|]+|\n", code_map()[1][1].strip()) == re.findall(r"[\w|]+|\n", layers.strip())


def test_a_misspelt_variable_is_told_from_all_there_are():
    assert set(VARIABLES) == variables()


def test_each_method_of_mpi4pys_communicators_has_a_counterpart():
    kinds = (MPI.Comm, MPI.Intracomm, MPI.Topocomm, MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm, MPI.Intercomm)
    names = {name for kind in kinds for name in vars(kind) if name[0] != "_"}
    text = " ".join(re.findall(r"`([^`]*)`", page("docs/start/from_mpi4py.md")))
    assert len(names) > 150
    assert sorted(names - set(re.findall(r"\w+", text))) == []
