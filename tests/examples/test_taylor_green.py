"""The Taylor-Green vortex: the published energy, and the same perturbation on any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

pytestmark = [pytest.mark.launches, pytest.mark.limit(200)]

Run = Callable[..., CompletedProcess]
PROGRAM = "examples/taylor_green.py"
SMALL = ("--coarse", 6, 8, 9, "--steps", 4, "--iterations", 3, "--least", 1)


def printed(done: CompletedProcess) -> list[str]:
    """Return the lines with results, without the one with the time."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "isn't compiled" not in done.stderr
    return done.stdout.splitlines()[:2]


@pytest.mark.thorough
def test_ranks_have_one_answer(mpirun: Run, rank_counts: tuple) -> None:
    one, *others = (printed(mpirun(n, PROGRAM, *SMALL, "--points", 12, timeout=70)) for n in rank_counts)
    for other in others:
        assert other == one


@pytest.mark.thorough
def test_published_energy(mpirun: Run) -> None:
    (energy, published), _ = (re.findall(r"0\.\d{12}", line) for line in printed(mpirun(2, PROGRAM, *SMALL, timeout=150)))
    assert abs(float(energy) - float(published)) < 5e-11


@pytest.mark.thorough
def test_a_perturbation_that_grows_too_little_fails(mpirun: Run) -> None:
    done = mpirun(1, PROGRAM, *SMALL, "--points", 12, "--least", 1e3, timeout=70)
    assert done.returncode != 0 and "isn't larger than" in done.stderr
