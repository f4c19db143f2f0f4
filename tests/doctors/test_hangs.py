"""Programs of plain mpi4py that hang: the watch ends each of them, and explains it by calls and lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import wrong_programs

PROGRAMS = [wrong_programs.read(file) for file in sorted((Path(__file__).parent / "hanging").glob("*.py"))]
AT_LEAST = 20


@pytest.mark.launches
@pytest.mark.parametrize("program", [pytest.param(program, id=program.path.stem) for program in PROGRAMS])
@pytest.mark.unguarded
def test_a_hang_is_explained(program: wrong_programs.WrongProgram) -> None:
    missed = wrong_programs.complaints(program)
    assert not missed, "\n".join(missed)


@pytest.mark.serial
def test_there_are_enough() -> None:
    assert len(PROGRAMS) >= AT_LEAST
