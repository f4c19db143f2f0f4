"""Twelve rates of an infection from one patient's data: fits from many starting points, sorted in a waterfall plot.

    mpiexec -n 4 python examples/infection_starts.py

Virus infects target cells, which produce virus after a delay, until immune cells clear both: five states, stiff, and twelve
rates, fitted in log scale to four measured quantities. The cost has several local minima. `fit` with ``starts=`` fits from
many starting points, divided among the ranks, and sorts the results; points at which the model can't be integrated are
drawn again. A plateau at the lowest cost of the waterfall plot shows that the minimum was found from several points.

The best fit is checked against SciPy's least_squares, which continues from it with derivatives of its own.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy
from scipy.integrate import solve_ivp
from scipy.optimize import least_squares

import mpiad
from mpiad.ensemble import EnsembleMPI, ODEProblem, Rodas5P, fit, solve

ERROR = 0.1  # standard deviation of a measurement, in powers of ten
LEAST = 1e-3  # lower limit of the assays
MEASURED = (0, 2, 3, 4)  # the states that are measured
START = numpy.array([100.0, 0.0, 0.0, 1.0, 0.1])
TRUE = numpy.array([-2.3, 1.0, -2.0, 0.5, 0.0, -1.0, 1.5, 0.7, -1.0, 0.3, 1.0, -1.0])  # powers of ten
DAYS = numpy.linspace(0.5, 12.0, 24)
TOLERANCES = {"rtol": 1e-6, "atol": 1e-8, "max_steps": 2000}

parser = argparse.ArgumentParser(description="Fit twelve rates of an infection from many starting points.")
parser.add_argument("--starts", type=int, default=40)
parser.add_argument("--width", type=float, default=2.5, help="half of the width of the bounds, in powers of ten")
parser.add_argument("--picture", type=Path, default=Path("demo/infection_starts.png"))


def infection(u, x, t):
    """Return the time derivatives of target cells, latent and productive infected cells, virus, and immune cells."""
    target, latent, infected, virus, immune = u
    k = [10.0 ** x[i] for i in range(12)]
    entry = k[0] * target * virus
    return [
        k[1] - k[2] * target - entry,
        entry - k[3] * latent,
        k[3] * latent - k[4] * infected - k[5] * infected * immune,
        k[6] * infected - k[7] * virus - k[8] * virus * immune,
        k[9] * infected / (k[10] + infected) * immune + k[11] - 0.1 * immune,
    ]


PATIENT = ODEProblem(infection, START, (0.0, DAYS[-1]), TRUE)


def residuals(u, x, data):
    return [(np.log10(u[:, state] + LEAST) - data[:, k]) / ERROR for k, state in enumerate(MEASURED)]


def fitted(data, starts, bounds):
    """Return the sorted fits from all starting points, and the best one."""
    return fit(
        PATIENT, residuals, TRUE[None], Rodas5P(), EnsembleMPI(), data=data[None], saveat=DAYS, bounds=bounds,
        starts=starts, rng=1, compile=True, **TOLERANCES,
    )  # fmt: skip


def of_scipy(x, data, bounds):
    """Return the cost of SciPy's fit from x, by differences."""

    def deviations(x):
        sol = solve_ivp(
            lambda t, u: numpy.array(infection(u, x, t)), (0.0, DAYS[-1]), START, "LSODA", DAYS, rtol=1e-9, atol=1e-11
        )
        return numpy.concatenate(residuals(sol.y.T, x, data))

    return least_squares(deviations, x, bounds=bounds, x_scale="jac", max_nfev=20).cost


def draw_picture(path, best, every, data):
    """Write the best fit with the data, and the waterfall plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    grid = numpy.linspace(0.0, DAYS[-1], 300)
    sol = solve(ODEProblem(infection, START, (0.0, DAYS[-1]), best), Rodas5P(), saveat=grid, rtol=1e-8, atol=1e-10)
    for k, (state, name) in enumerate(zip(MEASURED, ("target cells", "infected cells", "virus", "immune cells"))):
        left.plot(grid, sol.u[:, state] + LEAST, color=f"C{k}", label=name)
        left.plot(DAYS, 10.0 ** data[:, k], "o", ms=3, color=f"C{k}")
    left.set(xlabel="days", yscale="log", title="the best fit and the data")
    left.legend(loc="lower center")
    every.plot(right)
    right.set_title("fits from all starting points")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options, rng = parser.parse_args(), numpy.random.default_rng(0)
    exact = solve(PATIENT, Rodas5P(), saveat=DAYS, rtol=1e-9, atol=1e-10).u[:, MEASURED]
    data = numpy.log10(exact + LEAST) + ERROR * rng.standard_normal(exact.shape)
    bounds = TRUE - options.width, TRUE + options.width
    found = fitted(data, options.starts, bounds)
    best, every = found.p[0], found.starts
    if mpiad.mpi_rank() != 0:
        return
    same = numpy.count_nonzero(every.cost[0] < found.cost[0] + 0.01)
    successes = numpy.count_nonzero(every.retcode[0] == "Success")
    print(f"{options.starts} starting points: {successes} fits ended, {same} of them at the lowest cost")
    expected = of_scipy(best, data, bounds)
    print(f"lowest cost {found.cost[0]:.5f}   SciPy {expected:.5f}")
    assert abs(found.cost[0] - expected) < 1e-3 * expected, "SciPy finds another minimum"
    try:
        draw_picture(options.picture, best, every, data)
        print(f"written: {options.picture}")
    except ImportError:
        print("no picture: matplotlib isn't installed")


if __name__ == "__main__":
    main()
