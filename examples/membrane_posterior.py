"""Sample the benchmark posterior of Aristoff and Bangerth: 64 stiffnesses of a membrane from 169 deflections.

    mpiexec -n 2 python examples/membrane_posterior.py

D. Aristoff and W. Bangerth, "A benchmark for the Bayesian inversion of coefficients in partial differential equations"
(2021), arXiv 2102.07263, define the posterior exactly: -∇·(θ∇u) = 10 on the unit square, u = 0 on the boundary, bilinear
elements on 32 x 32 cells, one stiffness θ for each of 8 x 8 squares, with log θ normal with standard deviation 2, and
deflections u in 13 x 13 points, measured with a standard deviation of 0.05. Their reference took 2·10¹¹ samples of a random
walk, some 30 years of processor time.

1. Log likelihood and log prior of ten published vectors are computed, and compared with the published values.
2. Four chains of Hamiltonian Monte Carlo in m = log θ, divided among the ranks, with the gradient by mpiad. The solver is
   a custom operator: a banded Cholesky factorization by LAPACK, which its adjoint uses again.
3. ArviZ computes effective sample sizes and R-hat of each log θ. A small R-hat is the check.

`benchmarks/aristoff_bangerth.py` runs longer chains and compares them with those of `mpiad.inverse.sample`.
"""

import argparse
import json
import time
from pathlib import Path

import autograd.numpy as np
import numpy
import scipy.sparse
from mpi4py import MPI
from scipy.linalg.lapack import dpbtrf, dpbtrs

import mpiad
from mpiad.errors import ConvergenceError
from mpiad.extend import custom_operator, defadjoint, defjvp, defvjp
from mpiad.inverse import Samples

CELLS, SQUARES, POINTS = 32, 8, 13  # along each side
NOISE, STD = 0.05, 2.0  # of the deflections, and of log θ
CHAINS = 4
DATA = Path(__file__).resolve().parent / "data" / "aristoff_bangerth.json"

parser = argparse.ArgumentParser(description="Sample the benchmark posterior of Aristoff and Bangerth.")
parser.add_argument("--samples", type=int, default=400, help="samples per chain")
parser.add_argument("--warmup", type=int, default=500, help="steps before them, in which the mass matrix is adapted")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--most", type=float, default=1.1, help="fail if the R-hat of a coefficient is larger")
parser.add_argument("--picture", type=Path, default=Path("demo/membrane_posterior.png"))


class Conduction:
    """-∇·(κ∇u) = f on the unit square: bilinear elements on square cells, and a coefficient κ for each cell.

    `fixed` are the nodes, of shape (cells + 1, cells + 1), in which u has the values `values`. There is no flux through
    other parts of the boundary. `solution(kappa)` is differentiable with respect to the coefficients, of shape
    (cells, cells). It is local to the rank.
    """

    def __init__(self, fixed, values, source=0.0):
        n = len(fixed) - 1
        nodes = numpy.arange((n + 1) ** 2).reshape(n + 1, n + 1)
        self.corners = numpy.stack([nodes[:-1, :-1], nodes[:-1, 1:], nodes[1:, 1:], nodes[1:, :-1]]).reshape(4, -1)
        self.stiffness = numpy.array([[4, -1, -2, -1], [-1, 4, -1, -2], [-2, -1, 4, -1], [-1, -2, -1, 4]]) / 6
        self.free, self.values = numpy.flatnonzero(~fixed), numpy.where(fixed, values, 0.0).ravel()
        self.load = numpy.bincount(self.corners.ravel(), minlength=nodes.size) * source / (4 * n**2)
        # The lower half of the matrix in LAPACK's banded storage is linear in the coefficients.
        number = numpy.full(nodes.size, -1)
        number[self.free] = numpy.arange(len(self.free))
        row, column = numpy.broadcast_arrays(number[self.corners][:, None], number[self.corners][None])
        entry, _, cell = chosen = numpy.nonzero((column >= 0) & (row >= column))
        row, column = row[chosen], column[chosen]
        self.width = (row - column).max() + 1
        places = column * self.width + row - column, cell
        entries = self.stiffness[entry, chosen[1]]
        self.band = scipy.sparse.csr_array((entries, places), shape=(len(self.free) * self.width, n**2))
        self.kept = None

        @custom_operator
        def solution(kappa):
            return self.factored(kappa)[2].reshape(fixed.shape)

        @custom_operator
        def inverse(b, kappa):
            u = numpy.zeros(len(self.values))
            u[self.free] = dpbtrs(self.factored(kappa)[1], b.ravel()[self.free], lower=1)[0]
            return u.reshape(b.shape)

        # The matrix is symmetric. A(κ) u = f, so that A du = -A(dκ) u, where A is linear in κ.
        defadjoint(inverse, inverse)
        defvjp(solution, lambda u, kappa: lambda g: -self.energies(inverse(g, kappa), u).reshape(kappa.shape))
        defjvp(solution, lambda v, u, kappa: -inverse(self.product(v, u).reshape(u.shape), kappa))
        self.solution = solution

    def product(self, kappa, u):
        """Return the product of the matrix of all nodes with u."""
        flows = kappa.ravel() * (self.stiffness @ u.ravel()[self.corners])
        return numpy.bincount(self.corners.ravel(), flows.ravel())

    def energies(self, w, u):
        """Return the derivative of wᵀA(κ)u with respect to the coefficient of each cell."""
        return np.sum(np.ravel(w)[self.corners] * (self.stiffness @ u.ravel()[self.corners]), axis=0)

    def factored(self, kappa):
        """Return the coefficients, factors and solution of the last call, or new ones if the coefficients differ."""
        if self.kept is None or not numpy.array_equal(self.kept[0], kappa):
            matrix = (self.band @ kappa.ravel()).reshape(len(self.free), self.width).T
            factors, info = dpbtrf(matrix, lower=1, overwrite_ab=1)
            if info != 0 or not numpy.all(numpy.isfinite(factors[0])):
                raise ConvergenceError("The matrix isn't positive definite: the coefficients are too large or too small.")
            u = self.values.copy()
            u[self.free] = dpbtrs(factors, (self.load - self.product(kappa, self.values))[self.free], lower=1)[0]
            self.kept = kappa.copy(), factors, u
        return self.kept

    def flux(self, kappa, nodes):
        """Return the flow that enters through the fixed nodes `nodes`."""
        return numpy.sum((self.product(kappa, self.factored(kappa)[2]) - self.load)[nodes.ravel()])


def hats(places, cells):
    """Return the matrix that interpolates linearly from cells + 1 points on [0, 1] to the places."""
    return numpy.maximum(0.0, 1.0 - numpy.abs(cells * numpy.asarray(places)[:, None] - numpy.arange(cells + 1)))


class Membrane:
    """The benchmark's posterior as a function of m = log θ, of shape (8, 8)."""

    def __init__(self):
        with open(DATA) as file:
            self.published = json.load(file)
        self.measured = numpy.array(self.published["measurements"]).reshape(POINTS, POINTS)
        inner = numpy.pad(numpy.ones((CELLS - 1, CELLS - 1), bool), 1)
        self.conduction = Conduction(~inner, numpy.zeros(inner.shape), source=10.0)
        self.interpolation = hats(numpy.arange(1, POINTS + 1) / (POINTS + 1), CELLS)
        self.squares = numpy.repeat(numpy.eye(SQUARES), CELLS // SQUARES, axis=0)

    def residuals(self, m):
        """Return the misfits of the deflections, divided by the standard deviation of the noise."""
        u = self.conduction.solution(self.squares @ np.exp(m) @ self.squares.T)
        return (self.interpolation @ u.T @ self.interpolation.T - self.measured) / NOISE

    def misfit(self, m):
        """Return minus the log likelihood."""
        return 0.5 * np.sum(self.residuals(m) ** 2)

    def cost(self, m):
        """Return minus the log posterior."""
        return self.misfit(m) + 0.5 * np.sum(m**2) / STD**2

    def errors(self):
        """Return the largest relative differences from the published log likelihoods and log priors."""
        inputs = [numpy.log(theta).reshape(SQUARES, SQUARES) for theta in self.published["coefficients"]]
        likelihoods = [-self.misfit(m) for m in inputs]
        priors = [-0.5 * numpy.sum(m**2) / STD**2 for m in inputs]
        pairs = ((likelihoods, "log_likelihoods"), (priors, "log_priors"))
        return [numpy.max(numpy.abs(x - y) / numpy.maximum(numpy.abs(y), 1.0)) for x, y in self.expected(pairs)]

    def expected(self, pairs):
        return [(numpy.array(found), numpy.array(self.published[name])) for found, name in pairs]


class Hamiltonian:
    """Hamiltonian Monte Carlo with a dense mass matrix; the step size and the covariance are adapted in the warm-up."""

    def __init__(self, value_and_gradient, start, random):
        self.evaluate, self.random, self.gradients = value_and_gradient, random, 0
        self.root, self.size = numpy.eye(start.size), 0.05  # of the covariance; of a step
        self.state = start, *self.at(start)

    def at(self, x):
        self.gradients += 1
        return self.evaluate(x)

    def step(self, most=20):
        """Make up to `most` leapfrog steps, and return the probability that they are accepted."""
        x, value, gradient = self.state
        momentum = self.random.standard_normal(x.size)
        energy, size = value + 0.5 * momentum @ momentum, self.size * self.random.uniform(0.8, 1.2)
        chance = self.random.uniform()
        try:
            for _ in range(self.random.integers(1, most + 1)):
                momentum = momentum - 0.5 * size * (self.root.T @ gradient)
                x = x + size * (self.root @ momentum)
                value, gradient = self.at(x)
                momentum = momentum - 0.5 * size * (self.root.T @ gradient)
            rate = numpy.nan_to_num(numpy.exp(numpy.minimum(0.0, energy - value - 0.5 * momentum @ momentum)))
        except ConvergenceError:
            rate = 0.0
        if chance < rate:
            self.state = x, value, gradient
        return rate

    def warm_up(self, steps):
        """Adapt the covariance in windows of doubling length, and the step size to an acceptance rate of 0.8."""
        ends = [steps // 16, steps // 8, steps // 4, steps // 2]
        seen = []
        for k in range(steps):
            if k in ends and len(seen) > 1:
                count, covariance = len(seen), numpy.cov(numpy.transpose(seen))
                shrunk = (count * covariance + 10.0 * numpy.diag(covariance.diagonal())) / (count + 10.0)
                self.root, seen = numpy.linalg.cholesky(shrunk + 1e-6 * numpy.eye(len(shrunk))), []
                self.size = 0.15
            self.size *= numpy.exp(0.1 * (self.step() - 0.8))
            seen.append(self.state[0])

    def draw(self, samples):
        """Return samples, of shape (samples, number of variables)."""
        self.gradients = 0
        found = []
        for _ in range(samples):
            self.step()
            found.append(self.state[0])
        return numpy.array(found)


def hamiltonian_chains(membrane, samples, warmup, seed):
    """Return the chains of log θ, of shape (chains, samples, 64), on the root, and the number of gradients of one chain."""
    gradient = mpiad.value_and_grad(membrane.cost, comm=MPI.COMM_SELF)

    def evaluate(x):
        with numpy.errstate(all="ignore"):  # coefficients that overflow are rejected
            value, slope = gradient(x.reshape(SQUARES, SQUARES))
        return value, slope.ravel()

    found, gradients = [], 0
    for chain in range(mpiad.mpi_rank(), CHAINS, mpiad.mpi_size()):
        random = numpy.random.default_rng([seed, chain])
        sampler = Hamiltonian(evaluate, 0.1 * random.standard_normal(SQUARES**2), random)
        sampler.warm_up(warmup)
        found.append((chain, sampler.draw(samples)))
        gradients = sampler.gradients
    return gathered(found), gradients


def gathered(found):
    """Return all ranks' pairs (number of the chain, chain) as one array, in the order of the numbers; None off the root."""
    parts = MPI.COMM_WORLD.gather(dict(found))
    if parts is None:
        return None
    chains = {number: chain for part in parts for number, chain in part.items()}
    return numpy.stack([chains[number] for number in sorted(chains)])


def draw_picture(path, chains):
    """Write the picture of the means, the standard deviations and two marginals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    every = chains.reshape(-1, SQUARES, SQUARES)
    for axis, field, title in (
        (axes[0], every.mean(0), "mean of log θ"),
        (axes[1], every.std(0), "its standard deviation"),
    ):
        image = axis.imshow(field, "viridis", origin="lower", extent=(0, 1, 0, 1))
        axis.set(title=title, xlabel="x", ylabel="y")
        figure.colorbar(image, ax=axis)
    for y, x in ((1, 1), (3, 3), (6, 6), (7, 7)):
        axes[2].hist(every[:, y, x], 60, density=True, histtype="step", linewidth=1.5, label=f"square ({x}, {y})")
    axes[2].set(title="marginals", xlabel="log θ", xlim=(-5, 7))
    axes[2].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main():
    options = parser.parse_args()
    membrane, began = Membrane(), time.perf_counter()
    errors = membrane.errors()
    chains, gradients = hamiltonian_chains(membrane, options.samples, options.warmup, options.seed)
    if chains is None:
        return
    import arviz

    posterior = Samples(chains).to_arviz()
    sizes, rhat = (found.quantities.values for found in (arviz.ess(posterior), arviz.rhat(posterior)))
    print("published vectors: log likelihood to {:.0e}, log prior to {:.0e}".format(*errors))
    print(f"{CHAINS} chains of {options.samples} samples, {gradients / options.samples:.1f} gradients for each; ", end="")
    print(f"{time.perf_counter() - began:.0f} s on {mpiad.mpi_size()} ranks")
    print(f"effective samples of log θ: {sizes.min():.0f} to {sizes.max():.0f}; R-hat at most {rhat.max():.3f}")
    print("posterior mean of θ, one row per y:")
    for row in numpy.exp(chains).mean((0, 1)).reshape(SQUARES, SQUARES):
        print(" ".join(f"{theta:8.3g}" for theta in row))
    draw_picture(options.picture, chains)
    print(f"written: {options.picture}")
    if max(errors) > 1e-9 or not rhat.max() <= options.most:
        raise SystemExit(f"not converged: R-hat is {rhat.max():.3f}, differences from published values {max(errors):.1e}")


if __name__ == "__main__":
    main()
