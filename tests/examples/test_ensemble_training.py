"""Training through an ensemble takes the way that closed forms take, on any number of ranks and however it is solved."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import scipy.optimize

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

Run = Callable[..., CompletedProcess]
PROGRAM = "examples/ensemble_training.py"


def train(mpirun: Run, ranks: int, folder: Path, *arguments: object) -> tuple[CompletedProcess, np.ndarray]:
    """Run the example in a folder of its own; return what it printed and the losses of Adam."""
    folder.mkdir()
    done = mpirun(ranks, PROGRAM, "--history", "losses.txt", *arguments, timeout=70, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, np.loadtxt(folder / "losses.txt")


def loss_and_gradient(theta: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the loss of the exact solutions, (0.5 + i/100 a) exp(1.01 b t), and its derivatives by hand."""
    i, t = np.arange(1, 101)[:, None] / 100, np.arange(11) / 10
    rise = np.exp(1.01 * theta[1] * t)
    u = (0.5 + i * theta[0]) * rise
    gradient = -2 * np.sum((1 - u) * i * rise), -2 * np.sum((1 - u) * u * 1.01 * t)
    return float(np.sum((1 - u) ** 2)), np.array(gradient)


def losses_of_adam(steps: int) -> list[float]:
    """Return the losses on Adam's way with exact solutions."""
    theta, m, v, losses = np.array([3.0, 1.0]), np.zeros(2), np.zeros(2), []
    for k in range(1, steps + 1):
        loss, gradient = loss_and_gradient(theta)
        losses.append(loss)
        m, v = m + 0.1 * (gradient - m), v + 0.001 * (gradient**2 - v)
        theta = theta - 0.1 * m / (1 - 0.9**k) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8)
    return losses


@pytest.mark.thorough
def test_any_number_of_ranks_takes_the_same_way(mpirun: Run, tmp_path: Path, rank_counts: tuple) -> None:
    runs = {ranks: train(mpirun, ranks, tmp_path / str(ranks), "--iterations", 50) for ranks in rank_counts}
    one = runs[1][1]
    np.testing.assert_allclose(one, losses_of_adam(50), rtol=1e-6)
    for _, losses in runs.values():
        np.testing.assert_allclose(losses, one, rtol=1e-10)
    best = scipy.optimize.minimize(loss_and_gradient, [3.0, 1.0], jac=True, options={"gtol": 1e-9})
    for done, _ in runs.values():
        found = re.search(r"^L-BFGS +theta = (\S+) (\S+) +loss = (\S+)", done.stdout, re.MULTILINE)
        assert [float(number) for number in found.groups()] == pytest.approx([*best.x, best.fun], rel=1e-5)
    assert (tmp_path / str(rank_counts[-1]) / "demo" / "ensemble_training.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["serial", "threads"])
def test_other_ways_to_solve_give_the_same(mpirun: Run, tmp_path: Path, way: str) -> None:
    _, losses = train(mpirun, 1, tmp_path / way, "--ensemble", way, "--iterations", 2)
    np.testing.assert_allclose(losses, losses_of_adam(2), rtol=1e-6)
