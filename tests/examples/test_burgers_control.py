"""The controls of Burgers' equation: recovered, and the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from same_answers import Run, check_same_answers

pytestmark = [pytest.mark.launches, pytest.mark.limit(400)]

PROGRAM = "examples/burgers_control.py"


@pytest.mark.thorough
def test_same_answer_on_any_number_of_ranks(mpirun: Run, tmp_path: Path, rank_counts: tuple) -> None:
    found = check_same_answers(
        mpirun, rank_counts, PROGRAM, tmp_path, "--cells", 15, "--steps", 5, "--iterations", 6, "--most", 1, timeout=100
    )
    assert np.linalg.norm(found["found"] - found["true"]) < 0.3 * np.linalg.norm(found["true"])


@pytest.mark.thorough
def test_amplitudes_are_recovered(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun(2, PROGRAM, "--cells", 16, "--steps", 5, "--iterations", 15, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "relative error of the amplitudes 0.0" in done.stdout


@pytest.mark.thorough
def test_amplitudes_that_are_not_recovered_fail(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun(1, PROGRAM, "--cells", 12, "--steps", 3, "--iterations", 1, timeout=60, cwd=tmp_path)
    assert done.returncode != 0 and "the amplitudes were not recovered" in done.stderr
