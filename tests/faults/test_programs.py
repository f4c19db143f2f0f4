"""Each wrong program ends, within its time, not with 0, and with a sentence that says what is wrong where."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wrong_programs

PROGRAMS = [wrong_programs.read(file) for file in sorted((Path(__file__).parent / "programs").glob("*.py"))]
AT_LEAST = 45


def alone() -> Iterator[Any]:
    """Yield all programs; those that run together are run by themselves once more."""
    for program in PROGRAMS:
        thorough = program.together or program.thorough
        yield pytest.param(program, marks=[pytest.mark.thorough] if thorough else [], id=program.path.stem)


@pytest.mark.launches
@pytest.mark.parametrize("program", list(alone()))
@pytest.mark.unguarded
def test_a_wrong_program_ends_with_a_sentence(program):
    found = wrong_programs.complaints(program)
    assert not found, "\n".join(found)


@pytest.mark.launches
@pytest.mark.limit(90)
@pytest.mark.parametrize("programs", wrong_programs.jobs(PROGRAMS), ids=lambda job: f"from {job[0].path.stem} on")
@pytest.mark.unguarded
def test_what_all_ranks_raise_has_a_sentence(programs, tmp_path):
    found = wrong_programs.complaints_in_turn(programs, tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.serial
def test_there_are_enough():
    assert len(PROGRAMS) >= AT_LEAST
