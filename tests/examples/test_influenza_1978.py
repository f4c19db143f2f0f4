"""The outbreak is explained as SciPy's least squares explain it, and alike on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import scipy.optimize
from scipy.integrate import solve_ivp

pytestmark = [pytest.mark.launches, pytest.mark.limit(150)]

Run = Callable[..., CompletedProcess]


def fit(mpirun: Run, ranks: int, folder: Path, *arguments: object) -> np.ndarray:
    """Run the example in a folder of its own; return the logarithms of the parameters of all fits."""
    folder.mkdir()
    done = mpirun(ranks, "examples/influenza_1978.py", "--result", "fits.txt", *arguments, timeout=70, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return np.loadtxt(folder / "fits.txt")


def least_squares(in_bed: np.ndarray) -> scipy.optimize.OptimizeResult:
    """Fit fractions of the school, by differences: β, γ, and how many are ill at first."""

    def residuals(theta: np.ndarray) -> np.ndarray:
        beta, gamma, ill = theta
        run = solve_ivp(
            lambda t, u: (-beta * u[0] * u[1], beta * u[0] * u[1] - gamma * u[1]),
            (1, 14), (1 - ill / 763, ill / 763), "DOP853", t_eval=np.arange(1, 15), rtol=1e-11, atol=1e-13,
        )  # fmt: skip
        return 763 * run.y[1] - in_bed

    return scipy.optimize.least_squares(residuals, [1.7, 0.5, 2.0], x_scale=[1, 0.1, 1], xtol=1e-13, ftol=1e-13)


@pytest.mark.thorough
def test_any_number_of_ranks_finds_what_least_squares_find(
    mpirun: Run, tmp_path: Path, request: pytest.FixtureRequest, rank_counts: tuple
) -> None:
    one, *others = (fit(mpirun, ranks, tmp_path / str(ranks)) for ranks in rank_counts)
    for other in others:
        np.testing.assert_allclose(other, one, rtol=1e-10)
    fits = np.exp(one)
    assert fits.shape == (201, 3)
    data = request.config.rootpath / "examples" / "data" / "influenza_1978.csv"
    expected = least_squares(np.loadtxt(data, delimiter=",", skiprows=1)[:, 1])
    np.testing.assert_allclose(fits[0], expected.x, rtol=1e-5)
    variance = 2 * expected.cost / (14 - 3)
    deviations = np.sqrt(np.diag(variance * np.linalg.inv(expected.jac.T @ expected.jac)))
    # 200 repetitions know a standard deviation to about 5 %, and the model isn't quite linear.
    np.testing.assert_allclose(fits[1:].std(axis=0, ddof=1), deviations, rtol=0.25)
    assert (tmp_path / str(rank_counts[-1]) / "demo" / "influenza_1978.png").read_bytes().startswith(b"\x89PNG")
