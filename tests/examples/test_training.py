"""The trainings learn what they should, alike on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

Run = Callable[..., CompletedProcess]


def trained(mpirun: Run, ranks: int, program: str, folder: Path, *arguments: object) -> tuple[str, np.ndarray]:
    folder.mkdir()
    done = mpirun(ranks, program, "--history", "losses.txt", *arguments, timeout=70, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, np.loadtxt(folder / "losses.txt")


@pytest.mark.thorough
@pytest.mark.parametrize("program", ["examples/digits_training.py", "examples/attention_digits.py"])
def test_ranks_share_one_history(mpirun: Run, tmp_path: Path, rank_counts: tuple, program: str) -> None:
    (_, one), *others = (trained(mpirun, n, program, tmp_path / str(n), "--epochs", 3) for n in rank_counts)
    assert len(one) == 33
    for _, other in others:
        np.testing.assert_allclose(other, one, rtol=1e-10)


@pytest.mark.thorough
def test_own_heads_do_not_depend_on_the_ranks(mpirun: Run, tmp_path: Path, rank_counts: tuple) -> None:
    """The program compares its result with the accuracy that it must have."""
    (_, one), *others = (trained(mpirun, n, "examples/personal_heads.py", tmp_path / str(n)) for n in rank_counts)
    assert one.shape == (3, 30)
    for _, other in others:
        np.testing.assert_allclose(other, one, rtol=1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(4, marks=pytest.mark.thorough)]
)
def test_the_quickstart_trains_as_one_process_does(mpirun: Run, tmp_path: Path, ranks: int) -> None:
    done = mpirun(ranks, "examples/regression_quickstart.py", timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr  # it compares by itself
    lines = done.stdout.splitlines()
    assert len(lines) == ranks
    assert len({line.split(": ")[1] for line in lines}) == 1
