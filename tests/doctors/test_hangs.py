"""Programs of plain mpi4py that hang: the watch ends each of them, and explains it by calls and lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import launch
import pytest
import wrong_programs
from machine_load import slowdown

PROGRAMS = [wrong_programs.read(file) for file in sorted((Path(__file__).parent / "hanging").glob("*.py"))]
AT_LEAST = 20


def parameter(program: wrong_programs.WrongProgram) -> Any:
    """Return a program as a parameter of a test."""
    return pytest.param(program, id=program.path.stem, marks=[pytest.mark.thorough] if program.thorough else [])


@pytest.mark.launches
@pytest.mark.parametrize("program", [parameter(program) for program in PROGRAMS])
@pytest.mark.unguarded
def test_a_hang_is_explained(program: wrong_programs.WrongProgram) -> None:
    job = launch.run_captured(program.ranks, [*program.arguments, str(program.path)], limit=30, env=program.environment)
    missed = wrong_programs.missing(program, job)
    assert not missed, "\n".join(missed)
    # The wait that has begun last. Only programs in which a rank computes have a time limit.
    latest = min(float(seconds) for seconds in re.findall(r"waits ([\d.]+) s", job.stderr))
    assert program.environment or latest <= 2 * slowdown()


@pytest.mark.few(1)
@pytest.mark.launches
@pytest.mark.parametrize("source", ["any", "one"])
@pytest.mark.unguarded
def test_a_message_in_flight_is_not_taken_for_a_missing_one(source: str) -> None:
    job = launch.run_captured(2, [str(Path(__file__).parent / "late_delivery.py"), source], limit=30)
    assert job.returncode == 0 and job.stdout.split() == ["received", "1"], job.stderr


@pytest.mark.serial
def test_there_are_enough() -> None:
    assert len(PROGRAMS) >= AT_LEAST


@pytest.mark.thorough
@pytest.mark.launches
@pytest.mark.unguarded
def test_the_page_shows_what_the_watch_says(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/howto/any_mpi_program.md").read_text()
    program, expected = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python snippet", "text"))
    (tmp_path / "ring.py").write_text(program)
    job = launch.run_captured(3, ["-m", "mpiad.watch", str(tmp_path / "ring.py")], limit=30, mpiexec=True)
    assert normal(expected) in normal(job.stderr)


def normal(text: str) -> str:
    """Return a text without seconds and without repeated blanks."""
    return re.sub(" +", " ", re.sub(r"\b\d+ s(econds)?\b", "1 s", text))
