"""Fit hares and lynxes to the pelts of the Hudson's Bay Company, 1900 to 1920, from 64 starting points at once.

    mpiexec -n 4 python examples/predator_prey.py

The populations follow Lotka and Volterra, h' = (α - β l) h and l' = (δ h - γ l) with l outside, solved for their
logarithms; sought are α, β, γ, δ and both populations in 1900. The pelts scatter around them by a factor whose logarithm
is normal: the most probable parameters make S, the sum of the squared logarithms of pelts / model, smallest. A start with
the wrong period may end in a valley of its own. So 64 of them run side by side: `minimize` gets the 64 x 6 variables and
the sum of log S over the starts, which have no variable in common; each rank solves its share of the curves. After 80
iterations the best goes on alone, until nothing changes any more.

The spread of what the pelts allow is drawn as a band: 256 parameter sets, normal around the best one with the covariance
s² (JᵀJ)⁻¹ of linearised least squares, solved as an ensemble, and its quantiles.

The result is checked against one that knows nothing of mpiad: SciPy's least_squares on solve_ivp's DOP853 at 1e-11.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy

import mpiad
from mpiad.ensemble import EnsembleMPI, EnsembleProblem, ODEProblem, remake, solve

DATA = Path(__file__).with_name("data") / "lynx_hare.csv"
YEARS, *PELTS = numpy.loadtxt(DATA, delimiter=",", skiprows=1, unpack=True)
OBSERVED = numpy.log(PELTS).T  # shape (years, 2)
SPAN = float(YEARS[0]), float(YEARS[-1])
NAMES = "alpha", "beta", "gamma", "delta", "hares 1900", "lynxes 1900"
# least_squares from (0.55, 0.028, 0.8, 0.024, 34, 6), with xtol = ftol = 1e-15.
SCIPY = numpy.array([0.540158991, 0.0271653570, 0.796386050, 0.0236946387, 34.6024239, 5.84450609])
GUESS = numpy.log([0.5, 0.025, 0.8, 0.025, 30.0, 5.0])
SEED, DRAWS = 1920, 256
OVER_RANKS = EnsembleMPI()  # kept, since it divides the next solve by the steps of the last

parser = argparse.ArgumentParser(description="Fit Lotka and Volterra's equations to pelts of hare and lynx.")
parser.add_argument("--starts", type=int, default=64)
parser.add_argument("--spread", type=float, default=0.3, help="of the starts: standard deviation of their logarithms")
parser.add_argument("--iterations", type=int, default=80, help="of L-BFGS with all starts")
parser.add_argument("--result", type=Path, help="write the misfits and parameters of all starts to this file")
parser.add_argument("--picture", type=Path, default=Path("demo/predator_prey.png"))


def growth(u, p, t):
    """Return the time derivatives of log hares and log lynxes; p holds the logarithms of α, β, γ, δ."""
    alpha, beta, gamma, delta = np.exp(p)
    return alpha - beta * np.exp(u[1]), delta * np.exp(u[0]) - gamma


def populations(theta, times=YEARS):
    """Return the solutions for parameters of shape (n, 6); `u` has shape (n, times, 2)."""
    one = ODEProblem(growth, OBSERVED[0], SPAN, GUESS[:4])
    many = EnsembleProblem(one, u0=theta[:, 4:], p=theta[:, :4])
    return solve(many, ensemblealg=OVER_RANKS, trajectories=len(theta), saveat=times, rtol=1e-6, atol=1e-6)


def misfits(theta):
    """Return S for each row."""
    return np.sum((populations(theta).u - OBSERVED) ** 2, axis=(1, 2))


def fit(starts, iterations):
    """Return the parameters where L-BFGS takes all the starts, shape (n, 6)."""
    return mpiad.minimize(
        lambda theta: OBSERVED.size / 2 * np.sum(np.log(misfits(theta))),
        starts if mpiad.mpi_rank() == 0 else None,
        options={"maxiter": iterations, "maxcor": 40, "ftol": 1e-13},
        progress=True,
    ).x


def band(best, misfit):
    """Return the ensemble of populations that the pelts allow."""

    def curves(theta):
        return np.ravel(populations(theta[None]).u)

    # Few parameters and many values: a column for each direction, and not a row for each value.
    jacobian = numpy.stack([mpiad.jvp(curves, best, direction)[1] for direction in numpy.eye(len(best))], axis=1)
    variance = misfit / (OBSERVED.size - len(best))
    root = numpy.linalg.cholesky(variance * numpy.linalg.inv(jacobian.T @ jacobian))

    def drawn(one, i, repeat, rng):
        theta = best + root @ rng.standard_normal(len(best))
        return remake(one, u0=theta[4:], p=theta[:4])

    many = EnsembleProblem(ODEProblem(growth, best[4:], SPAN, best[:4]), prob_func=drawn, rng=SEED)
    return solve(many, ensemblealg=OVER_RANKS, trajectories=DRAWS, saveat=0.1, rtol=1e-6, atol=1e-6)


def draw_picture(path, best, ensemble):
    """Write the pelts, the best fit and the band of nine in ten of the populations by drawn parameters."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    low, high = np.exp(ensemble.quantile([0.05, 0.95]))
    figure, axis = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for k, (name, colour) in enumerate((("hare", "C0"), ("lynx", "C1"))):
        axis.fill_between(ensemble.t, low[:, k], high[:, k], color=colour, alpha=0.2, label=f"{name}: 5 to 95 %")
        axis.plot(ensemble.t, np.exp(best[:, k]), colour, label=f"{name}: best fit")
        axis.plot(YEARS, PELTS[k], "o", color=colour, markeredgecolor="k", label=f"{name}: pelts")
    axis.set(xlabel="year", ylabel="thousands", ylim=(0, None), xticks=YEARS[::4])
    # Pelts scatter more than the populations that the parameters allow.
    axis.set_title("bands: curves over the distribution of the parameters, without noise of the data", fontsize="small")
    axis.legend(ncols=2, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    root = mpiad.mpi_rank() == 0
    starts = GUESS + options.spread * numpy.random.default_rng(SEED).standard_normal((options.starts, len(GUESS)))
    before = misfits(starts)
    theta = fit(starts, options.iterations)
    k = int(numpy.argmin(misfits(theta)))
    theta[k] = fit(theta[k : k + 1], options.iterations)[0]
    after = misfits(theta)
    ensemble = band(theta[k], after[k])
    curves = populations(theta[k : k + 1], ensemble.t).u[0]
    if not root:
        return
    print(f"S at the {options.starts} starts: {before.min():.2f} to {before.max():.2f}")
    print(f"S where they end: {after.min():.8f} to {after.max():.4f}; {(after < after[k] * 1.01).sum()} at the smallest")
    for name, value, expected in zip(NAMES, np.exp(theta[k]), SCIPY):
        print(f"{name:12} {value:12.8f}   SciPy {expected:12.8f}")
    if options.result:
        numpy.savetxt(options.result, numpy.column_stack([after, theta]), fmt="%.17e")
    if options.iterations >= 80:
        assert numpy.allclose(np.exp(theta[k]), SCIPY, rtol=1e-4), "this is not where SciPy's least squares end"
    try:
        draw_picture(options.picture, curves, ensemble)
        print(f"written: {options.picture}")
    except ImportError:
        print("no picture: matplotlib isn't installed")


if __name__ == "__main__":
    main()
