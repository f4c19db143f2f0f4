"""Each wrong program ends, within its time, not with 0, and with a sentence that says what is wrong where."""

from __future__ import annotations

from pathlib import Path

import pytest
import wrong_programs

FILES = sorted((Path(__file__).parent / "programs").glob("*.py"))
AT_LEAST = 45


@pytest.mark.launches
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_wrong_program_ends_with_a_sentence(file):
    found = wrong_programs.complaints(wrong_programs.read(file))
    assert not found, "\n".join(found)


@pytest.mark.serial
def test_there_are_enough():
    assert len(FILES) >= AT_LEAST
