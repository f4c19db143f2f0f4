"""The coefficient of a Poisson equation: recovered, and the same on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from same_answers import Run, check_same_answers

pytestmark = [pytest.mark.launches, pytest.mark.limit(400)]

PROGRAM = "examples/poisson_inverse.py"


@pytest.mark.thorough
def test_same_answer_on_any_number_of_ranks(mpirun: Run, tmp_path: Path, rank_counts: tuple) -> None:
    arguments = "--cells", 10, "--iterations", 4, 4, "--most", 1
    found = check_same_answers(mpirun, rank_counts, PROGRAM, tmp_path, *arguments, timeout=120)
    for name in ("field", "network"):
        assert np.linalg.norm(found[name] - found["true"]) < 0.7 * np.linalg.norm(found["true"])


@pytest.mark.thorough
def test_coefficient_is_recovered(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun(2, PROGRAM, "--cells", 12, "--iterations", 25, 40, timeout=90, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = dict(re.findall(r"^(\w+) .* relative error of log κ ([\d.]+)$", done.stdout, re.MULTILINE))
    assert sorted(errors) == ["field", "network"] and max(map(float, errors.values())) < 0.05


@pytest.mark.thorough
def test_a_coefficient_that_is_not_recovered_fails(mpirun: Run, tmp_path: Path) -> None:
    done = mpirun(1, PROGRAM, "--cells", 8, "--iterations", 1, 1, timeout=60, cwd=tmp_path)
    assert done.returncode != 0 and "κ was not recovered" in done.stderr
