"""A neural ODE is solved and differentiated as SciPy says, and trained alike on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

Run = Callable[..., CompletedProcess]


def train(mpirun: Run, ranks: int, folder: Path, *arguments: object) -> tuple[str, np.ndarray]:
    """Run the example, which compares with SciPy itself; return what it printed and the losses."""
    folder.mkdir()
    done = mpirun(ranks, "examples/neural_ode.py", "--history", "losses.txt", *arguments, timeout=70, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, np.loadtxt(folder / "losses.txt")


@pytest.mark.thorough
def test_ranks_share_one_history(mpirun: Run, tmp_path: Path, rank_counts: tuple) -> None:
    (_, one), *others = (train(mpirun, n, tmp_path / str(n), "--iterations", 10) for n in rank_counts)
    assert len(one) == 11
    for _, other in others:
        np.testing.assert_allclose(other, one, rtol=1e-10)


@pytest.mark.thorough
def test_the_spiral_is_learned(mpirun: Run, tmp_path: Path) -> None:
    printed, losses = train(mpirun, 2, tmp_path / "run", "--iterations", 80)
    assert losses[-1] < 0.02 * losses[0]
    assert [line.split(":")[0] for line in printed.splitlines()[:2]] == ["float64", "float32"]
    assert (tmp_path / "run" / "demo" / "neural_ode.png").read_bytes().startswith(b"\x89PNG")
