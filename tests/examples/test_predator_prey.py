"""The pelts are explained as well as SciPy's least squares explain them, and alike on any number of ranks."""

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
PROGRAM = "examples/predator_prey.py"


def fit(mpirun: Run, ranks: int, folder: Path, *arguments: object) -> np.ndarray:
    """Run the example in a folder of its own; return the misfit and the logarithms of the parameters of all starts."""
    folder.mkdir()
    done = mpirun(ranks, PROGRAM, "--result", "fits.txt", *arguments, timeout=100, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return np.loadtxt(folder / "fits.txt")


def least_squares(data: Path) -> tuple[float, np.ndarray]:
    """Return the smallest misfit and its parameters: populations and not their logarithms, and no derivatives of ours."""
    years, *pelts = np.loadtxt(data, delimiter=",", skiprows=1, unpack=True)

    def residuals(theta: np.ndarray) -> np.ndarray:
        a, b, c, d, *u0 = np.exp(theta)
        run = solve_ivp(
            lambda t, u: (a * u[0] - b * u[0] * u[1], d * u[0] * u[1] - c * u[1]),
            (1900, 1920), u0, "DOP853", t_eval=years, rtol=1e-10, atol=1e-10,
        )  # fmt: skip
        return np.ravel(np.log(run.y / pelts))

    found = scipy.optimize.least_squares(residuals, np.log([0.55, 0.028, 0.8, 0.024, 34, 6]), xtol=1e-12, ftol=1e-12)
    return 2 * found.cost, np.exp(found.x)


@pytest.mark.thorough
def test_ranks_share_one_way(mpirun: Run, tmp_path: Path, rank_counts: tuple) -> None:
    one, *others = (fit(mpirun, ranks, tmp_path / str(ranks), "--iterations", 8) for ranks in rank_counts)
    assert one.shape == (64, 7)
    for other in others:
        np.testing.assert_allclose(other, one, rtol=1e-10)


@pytest.mark.thorough
def test_the_best_fit_is_that_of_least_squares(mpirun: Run, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    fits = fit(mpirun, 2, tmp_path / "run", "--starts", 24)
    misfit, parameters = least_squares(request.config.rootpath / "examples" / "data" / "lynx_hare.csv")
    best = fits[np.argmin(fits[:, 0])]
    # The example solves with tolerances of 1e-6.
    assert best[0] == pytest.approx(misfit, rel=1e-5)
    np.testing.assert_allclose(np.exp(best[1:]), parameters, rtol=1e-4)
    # Most starts find the same valley, whose neighbours are much higher.
    assert np.mean(fits[:, 0] < misfit * 1.01) > 0.8
    assert (tmp_path / "run" / "demo" / "predator_prey.png").read_bytes().startswith(b"\x89PNG")
