"""How contagious was the influenza in a boarding school in 1978? A fit, and how sure it is, from 200 repetitions.

    mpiexec -n 4 python examples/influenza_1978.py

763 boys are susceptible, ill or recovered: S' = -β S I / 763, I' = β S I / 763 - γ I. Fitted by least squares to the boys
in bed on 14 days are β, γ and how many were ill on the first day. R₀ = β / γ is how many others each ill boy infects at
first. How well the data determine it, linearised least squares say, by the derivatives of the curve. They are compared
with 200 further outbreaks, made from the fit with noise of the same size (a parametric bootstrap), and each fitted too:
all fits run side by side in one `minimize`, their curves over the ranks.

The fit is checked against one that knows nothing of mpiad: SciPy's least_squares on solve_ivp's DOP853 at 1e-11.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, ODEProblem, solve

DATA = Path(__file__).with_name("data") / "influenza_1978.csv"
DAYS, IN_BED = numpy.loadtxt(DATA, delimiter=",", skiprows=1, unpack=True)
BOYS = 763
SPAN = float(DAYS[0]), float(DAYS[-1])
GUESS = numpy.log([2.0, 0.5, 1.0])  # β and γ per day, boys ill on the first day
# least_squares from (1.7, 0.45, 2) for β, γ and those ill at first, with xtol = ftol = 1e-15; the error of R₀ from its
# Jacobian, by s² (JᵀJ)⁻¹.
SCIPY, SCIPY_R0, SCIPY_ERROR = numpy.array([1.78810587, 0.45570098, 2.09342905]), 3.92385785, 0.18796481
SEED = 1978
OVER_RANKS = EnsembleMPI()  # kept, since it divides the next solve by the steps of the last

parser = argparse.ArgumentParser(description="Fit an epidemic to the boys in bed on 14 days.")
parser.add_argument("--repetitions", type=int, default=200, help="outbreaks made from the fit")
parser.add_argument("--result", type=Path, help="write the parameters of all fits to this file")
parser.add_argument("--picture", type=Path, default=Path("demo/influenza_1978.png"))


def epidemic(u, p, t):
    """Return the time derivatives of the susceptible and the ill; p holds the logarithms of β and γ."""
    beta, gamma = np.exp(p)
    infections = beta * u[0] * u[1] / BOYS
    return -infections, infections - gamma * u[1]


def outbreaks(theta, days=DAYS):
    """Return the solutions for parameters of shape (n, 3); `u` has shape (n, days, 2)."""
    ill = np.exp(theta[:, 2])
    one = ODEProblem(epidemic, numpy.array([BOYS - 1.0, 1.0]), SPAN, GUESS[:2])
    many = EnsembleProblem(one, u0=np.stack([BOYS - ill, ill], axis=1), p=theta[:, :2])
    # Always by a kernel: by default the choice depends on the trajectories of each rank, and sums are rounded differently.
    options = {"compile": True, "saveat": days, "rtol": 1e-7, "atol": 1e-4}
    return solve(many, ensemblealg=OVER_RANKS, trajectories=len(theta), **options)


def in_bed(theta):
    return outbreaks(theta).u[:, :, 1]


def fit(data, start, scales):
    """Return the parameters, shape (n, 3), that explain each row of data, shape (n, days), best.

    They are start + scales z for each z in the rows of what L-BFGS sees; the fits have no variable in common.
    """
    noise = 16.0  # about; it scales the sum only
    found = mpiad.minimize(
        lambda z: np.sum((in_bed(start + z @ scales.T) - data) ** 2) / (2 * noise**2),
        numpy.zeros((len(data), len(start))) if mpiad.mpi_rank() == 0 else None,
        options={"maxiter": 200, "maxcor": 20, "ftol": 1e-14, "gtol": 1e-6},
    )
    return start + found.x @ scales.T


def deviations(theta, noise):
    """Return a root of the covariance of the parameters, shape (3, 3), by linearised least squares."""
    # Few parameters and many values: a column for each direction, and not a row for each value.
    columns = [mpiad.jvp(lambda theta: in_bed(theta[None])[0], theta, direction)[1] for direction in numpy.eye(3)]
    jacobian = numpy.stack(columns, axis=1)
    return noise * numpy.linalg.inv(numpy.linalg.cholesky(jacobian.T @ jacobian)).T


def reproduction(theta):
    return np.exp(theta[:, 0] - theta[:, 1])


def draw_picture(path, days, curves, ratios):
    """Write the boys in bed with the fit, the band of the repetitions' fits (new counts scatter more), and R₀."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    low, high = numpy.quantile(curves[1:], [0.05, 0.95], axis=0)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.fill_between(days, low, high, alpha=0.3, label="5 to 95 % of the fits (parameters)")
    left.plot(days, curves[0], label="fit")
    left.plot(DAYS, IN_BED, "ko", label="in bed")
    left.set(xlabel="day", ylabel="boys", ylim=(0, 1.5 * IN_BED.max()))
    left.legend(loc="upper right")
    right.hist(ratios[1:], 20)
    right.axvline(ratios[0], color="k")
    right.set(xlabel="R₀ = β / γ", ylabel="repetitions")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    (best,) = fit(IN_BED[None], GUESS, numpy.eye(3))
    (expected,) = in_bed(best[None])
    noise = numpy.sqrt(numpy.sum((expected - IN_BED) ** 2) / (len(DAYS) - len(GUESS)))
    scales = deviations(best, noise)
    draws = numpy.random.default_rng(SEED).standard_normal((options.repetitions, len(DAYS)))
    # In units of their deviations, all parameters matter alike, and few iterations are enough.
    repeated = fit(expected + noise * draws, best, scales)
    theta = numpy.concatenate([best[None], repeated])
    days = numpy.linspace(*SPAN, 131)
    curves = outbreaks(theta, days).u[:, :, 1]
    if mpiad.mpi_rank() != 0:
        return
    ratios = reproduction(theta)
    linear = ratios[0] * numpy.linalg.norm(scales[0] - scales[1])
    for name, value, other in zip(("beta", "gamma", "ill at first"), np.exp(best), SCIPY):
        print(f"{name:12} {value:12.8f}   SciPy {other:12.8f}")
    print(f"{'R0':12} {ratios[0]:12.8f}   SciPy {SCIPY_R0:12.8f}")
    print(f"{'its error':12} {linear:12.8f}   SciPy {SCIPY_ERROR:12.8f}   repetitions {ratios[1:].std(ddof=1):.4f}")
    if options.result:
        numpy.savetxt(options.result, theta, fmt="%.17e")
    found = [*np.exp(best), ratios[0], linear]
    assert numpy.allclose(found, [*SCIPY, SCIPY_R0, SCIPY_ERROR], rtol=1e-5), "this is not where SciPy's fit ends"
    try:
        draw_picture(options.picture, days, curves, ratios)
        print(f"written: {options.picture}")
    except ImportError:
        print("no picture: matplotlib isn't installed")


if __name__ == "__main__":
    main()
