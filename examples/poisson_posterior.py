"""Sample the posterior of a log conductivity by six methods: the tutorial problem of hIPPYlib-MUQ.

    mpiexec -n 2 python examples/poisson_posterior.py

K.-T. Kim, U. Villa, M. Parno, Y. Marzouk, O. Ghattas and N. Petra, "hIPPYlib-MUQ: a Bayesian inference software
framework for integration of data with complex predictive models under uncertainty", ACM Trans. Math. Softw. 49 (2023),
compare methods on -∇·(exp(m)∇u) = 0 on the unit square, u = 0 at the bottom, u = 1 at the top, no flux through the
other sides. u is measured in 300 random points with a noise of 0.5 % of its maximum. The prior of m has the inverse
covariance A M⁻¹ A with A = δ - γ∇·(Θ∇), γ = 0.1, δ = 0.5, an anisotropy Θ with eigenvalues 2 and 0.5 rotated by 45°,
and a Robin condition. The quantity of interest is the logarithm of the flux through the bottom. The unknown has 33 x 33
values.

The mesh nodes, the prior, the noise, the number of data and the quantity are those of the tutorial. What differs: u and
m are bilinear on 32 x 32 squares (there u is quadratic and m linear on triangles), exp(m) is constant on each square,
and the truth, the points and the noise are other draws of the same distributions, since those of the tutorial aren't
published.

1. The most probable m by Gauss-Newton's method, and the Laplace approximation around it.
2. Chains of each method of `mpiad.inverse.sample`, divided among the ranks, that start at samples of the Laplace
   approximation.
3. Effective sample sizes of the quantity of interest by Geyer's initial monotone sequence, per 1,000 samples and per minute
   of one core, and the distribution of the quantity according to the Laplace approximation. The check is the agreement of
   the methods that the approximation informs.

`benchmarks/hippylib_poisson.py` runs long chains and compares them with the published figures.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy
import scipy.sparse
import scipy.sparse.linalg
from membrane_posterior import Conduction, hats

import mpiad
from mpiad.extend import custom_operator, defadjoint
from mpiad.inverse import GaussianPrior, laplace_approximation, sample
from mpiad.tasks import RankGroups

CELLS, POINTS, RELATIVE_NOISE = 32, 300, 0.005
GAMMA, DELTA, THETA = 0.1, 0.5, (1.25, 0.75)  # diagonal and other entries of Θ
INFORMED = ("hpcn", "hmala", "dr", "hhmc")
METHODS = ("pcn", "mala", *INFORMED)

parser = argparse.ArgumentParser(description="Sample the posterior of hIPPYlib-MUQ's tutorial problem.")
parser.add_argument("--chains", type=int, default=4, help="chains per method, divided among the ranks")
parser.add_argument("--samples", type=int, default=500, help="samples per chain")
parser.add_argument("--warmup", type=int, default=300, help="steps before them, in which step sizes are adapted")
parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
parser.add_argument("--pairs", type=int, default=70, help="eigenpairs of the Laplace approximation")
parser.add_argument("--seed", type=int, default=3)
parser.add_argument("--picture", type=Path, default=Path("demo/poisson_posterior.png"))


class RotatedBilaplacian(GaussianPrior):
    """The tutorial's prior on nodes, with sparse factors: for one rank."""

    def __init__(self, domain):
        n, h = domain.shape[0], 1.0 / CELLS
        off, inner = numpy.ones(n - 1), numpy.ones(n)
        inner[[0, -1]] = 0.5
        ends = numpy.diag(1.0 - inner) * 2.0
        mass = h / 6.0 * (numpy.diag(4.0 * inner) + numpy.diag(off, 1) + numpy.diag(off, -1))
        stiff = (numpy.diag(2.0 * inner) - numpy.diag(off, 1) - numpy.diag(off, -1)) / h
        slope = 0.5 * (numpy.diag(off, -1) - numpy.diag(off, 1))
        slope[0, 0], slope[-1, -1] = -0.5, 0.5
        kron = scipy.sparse.kron
        straight, mixed = THETA
        matrix = GAMMA * straight * (kron(mass, stiff) + kron(stiff, mass))
        matrix += GAMMA * mixed * (kron(slope.T, slope) + kron(slope, slope.T))
        matrix += DELTA * kron(mass, mass) + numpy.sqrt(GAMMA * DELTA) / 1.42 * (kron(ends, mass) + kron(mass, ends))
        self.matrix, self.factors = scipy.sparse.csr_array(matrix), scipy.sparse.linalg.splu(scipy.sparse.csc_array(matrix))
        self.mass, self.mass_inverse, self.mass_root = mass, numpy.linalg.inv(mass), numpy.linalg.cholesky(mass)
        self.domain, self.mean = domain, numpy.zeros(domain.local_shape)
        roots = self.inverse(numpy.kron(self.mass_root, self.mass_root).T.reshape(-1, n, n))
        self.variance = numpy.sum(roots**2, axis=0)
        self.precision = custom_operator(self.product)
        defadjoint(self.precision, self.precision)

    def inverse(self, b):
        """Return the solutions with A, of blocks along leading axes."""
        rows = b.reshape(-1, self.mean.size)
        return self.factors.solve(numpy.ascontiguousarray(rows.T)).T.reshape(b.shape)

    def product(self, v):
        rows = v.reshape(-1, self.mean.size)
        inner = self.mass_inverse @ (self.matrix @ rows.T).T.reshape(-1, *self.mean.shape) @ self.mass_inverse
        return (self.matrix @ inner.reshape(rows.shape).T).T.reshape(v.shape)

    def apply(self, v):
        return self.precision(v)

    def solve(self, g):
        return self.inverse(self.mass @ self.inverse(g) @ self.mass)

    def precondition(self, r):
        return self.solve(r)

    def sqrt(self, xi):
        return self.inverse(self.mass_root @ xi @ self.mass_root.T)


class Tutorial:
    """The problem: the prior, the data, the residuals and the quantity of interest."""

    def __init__(self, seed, comm=None):
        self.domain = mpiad.Domain((CELLS + 1, CELLS + 1), comm=comm)
        self.prior = RotatedBilaplacian(self.domain)
        height = numpy.linspace(0.0, 1.0, CELLS + 1)[:, None] * numpy.ones(CELLS + 1)
        self.conduction = Conduction((height == 0.0) | (height == 1.0), height)
        self.bottom = height == 0.0
        self.middle = hats((numpy.arange(CELLS) + 0.5) / CELLS, CELLS)
        random = numpy.random.default_rng(seed)
        self.places = random.uniform(0.05, 0.95, (2, POINTS))
        self.rows, self.columns = (hats(places, CELLS) for places in self.places)
        self.truth = self.prior.sample(seed)
        exact = self.observed(self.truth)
        self.noise = RELATIVE_NOISE * numpy.abs(exact).max()
        self.data = exact + self.noise * random.standard_normal(POINTS)

    def kappa(self, m):
        return np.exp(self.middle @ m @ self.middle.T)

    def observed(self, m):
        return np.sum((self.rows @ self.conduction.solution(self.kappa(m))) * self.columns, axis=1)

    def residuals(self, m):
        return (self.observed(m) - self.data) / self.noise

    def misfit(self, m):
        """Return minus the log likelihood."""
        return 0.5 * np.sum(self.residuals(m) ** 2)

    def log_flux(self, m):
        """Return the quantity of interest; at the field whose misfit was computed last, without another solve."""
        return numpy.log(-self.conduction.flux(self.kappa(m), self.bottom))

    def laplace(self, pairs):
        """Return the Laplace approximation around the most probable field."""
        options = {"product": "gauss-newton", "regularizer": self.prior, "inner_product": self.prior, "grtol": 1e-6}
        found = self.domain.minimize(self.residuals, self.prior.mean, method="Newton-CG-sharded", options=options)
        kept = mpiad.linearize(self.residuals)(found.x)
        return laplace_approximation(lambda v: kept.vjp(kept.jvp(v)), found.x, self.prior, pairs)


def effective_size(chain):
    """Return the effective sample size of a chain of numbers, by Geyer's initial monotone sequence.

    C. J. Geyer, "Practical Markov chain Monte Carlo", Statistical Science 7 (1992).
    """
    n = len(chain)
    spectrum = numpy.fft.rfft(chain - numpy.mean(chain), 2 * n)
    covariances = numpy.fft.irfft(numpy.abs(spectrum) ** 2)[: n - n % 2] / n
    sums = covariances[::2] + covariances[1::2]
    positive = sums[: numpy.argmax(sums <= 0.0)] if numpy.any(sums <= 0.0) else sums
    return n * covariances[0] / (2.0 * numpy.sum(numpy.minimum.accumulate(positive)) - covariances[0])


def sampled(problem, posterior, groups, method, chains, samples, warmup, seed):
    """Return the chains of a method, divided among the groups of ranks, each of which has the problem."""
    start = posterior.sample(seed)
    return sample(
        lambda comm: (problem.misfit, problem.prior, posterior, problem.log_flux),
        method=method, n_samples=samples, warmup=warmup, rng=seed, start=start, chains=chains, groups=groups,
    )  # fmt: skip


def draw_picture(path, problem, posterior, results, predicted):
    """Write the picture of the fields, the traces, the autocorrelations and the distributions of the quantity."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(18, 8), layout="constrained")
    best = list(results)[-1]
    scale = {"vmin": problem.truth.min(), "vmax": problem.truth.max()}
    deviations = numpy.sqrt(posterior.variance), numpy.sqrt(results[best].variance)
    narrow = {"cmap": "magma", "vmin": 0.0, "vmax": max(map(numpy.max, deviations))}
    fields = (problem.truth, "true m and the points", scale), (posterior.mean, "MAP estimate", scale)
    fields += (
        (deviations[0], "standard deviation, Laplace", narrow),
        (deviations[1], f'standard deviation, "{best}"', narrow),
    )
    for axis, (field, title, options) in zip(axes[0], fields):
        figure.colorbar(axis.imshow(field, origin="lower", extent=(0, 1, 0, 1), **options), ax=axis, shrink=0.85)
        axis.set(title=title, xlabel="x", ylabel="y")
    axes[0, 0].plot(*problem.places[::-1], "k.", markersize=2)
    traces, correlations, densities, sizes = axes[1]
    densities.hist(predicted, 20, density=True, color="0.85", label="Laplace")
    for k, (method, result) in enumerate(results.items()):
        chain, color = result.quantities[0], f"C{k}"
        traces.plot(chain[:500] - 4.0 * k, linewidth=0.7, color=color)
        away = numpy.fft.rfft(chain - chain.mean(), 2 * len(chain))
        lags = numpy.fft.irfft(numpy.abs(away) ** 2)[: min(300, len(chain) // 2)]
        correlations.plot(lags / lags[0], color=color, label=method)
        if method in INFORMED:
            densities.hist(result.quantities.ravel(), 40, density=True, histtype="step", color=color, label=method)
    densities.axvline(problem.log_flux(problem.truth), color="k", linestyle=":", label="truth")
    informed = {name: result for name, result in results.items() if name in INFORMED}
    rates = [sum(map(effective_size, result.quantities)) / numpy.sum(result.seconds) * 60 for result in informed.values()]
    sizes.bar(list(informed), rates, color=[f"C{k}" for k, name in enumerate(results) if name in INFORMED])
    traces.set(title="log of the flux plus a constant, first chain", xlabel="sample")
    traces.set_yticks([-4.0 * k - 0.7 for k in range(len(results))], list(results))
    correlations.set(title="its autocorrelation", xlabel="lag", ylim=(-0.3, 1))
    densities.set(title="its distribution", xlabel="log of the flux")
    sizes.set(title="its effective samples per minute of one core")
    for axis in (correlations, densities):
        axis.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main():
    options = parser.parse_args()
    root, groups = mpiad.mpi_rank() == 0, RankGroups(mpiad.mpi_size())
    problem = Tutorial(options.seed, groups.comm)
    posterior = problem.laplace(options.pairs)
    predicted = numpy.array([problem.log_flux(posterior.sample(seed)) for seed in range(200)])
    if root:
        print(f"{problem.truth.size} unknowns, {POINTS} data, {numpy.sum(posterior.values > 1)} eigenvalues above 1")
        print(f"true log flux {problem.log_flux(problem.truth):.3f}")
        print(f"Laplace approximation   {predicted.mean():.3f} ± {predicted.std():.3f}")
        print("method     log flux          accepted   effective of 1,000   per minute   per 1,000 solves")
    results, found = {}, {}
    for method in options.methods:
        result = sampled(problem, posterior, groups, method, options.chains, options.samples, options.warmup, options.seed)
        sizes, results[method] = numpy.array([effective_size(chain) for chain in result.quantities]), result
        values, total = result.quantities, sizes.sum()
        found[method] = values.mean(), values.std() / numpy.sqrt(total)
        solves = numpy.sum(result.solves["misfit"]) + numpy.sum(result.solves["gradient"])
        if root:
            rates = " ".join(f"{rate:.2f}" for rate in numpy.atleast_1d(result.acceptance.mean(axis=0)))
            print(
                f"{method:8} {values.mean():7.3f} ± {values.std():.3f}   {rates:14} {1e3 * total / values.size:15.1f}",
                end="",
            )
            print(f"{60 * total / numpy.sum(result.seconds):14.0f} {1e3 * total / solves:16.1f}")
    if not root:
        return
    draw_picture(options.picture, problem, posterior, results, predicted)
    print(f"written: {options.picture}")
    informed = [found[method] for method in INFORMED if method in found]
    away = max(abs(a - b) / numpy.hypot(s, t) for a, s in informed for b, t in informed)
    print(f"the informed methods differ by {away:.1f} standard errors")
    if not away <= 5.0:
        raise SystemExit("not converged: use longer chains")


if __name__ == "__main__":
    main()
