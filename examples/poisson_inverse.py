"""Recover the coefficient of a Poisson equation from its solutions: as a field, and as a small neural network.

    mpiexec -n 4 python examples/poisson_inverse.py

On the unit square, with u = 0 on its sides, -div(κ grad u) = f was solved for three sources f, and u is known at all points
of the grid. Sought is κ(x, y) > 0: once as its logarithm m in each cell, with a penalty on its slopes, once as
κ = exp(network(x, y; θ)), where each rank evaluates the network on its own block of the grid and all share the weights θ.

The grid is divided among the ranks; the three equations are solved at once (`batch=1`) by conjugate gradients with
multigrid as preconditioner, and the gradient of the misfit by every cell's m, or by θ, takes one more solve. L-BFGS runs on
the root. Any number of ranks gives the same κ.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy

import mpiad
import mpiad.linalg

SMOOTHNESS, TOLERANCE, WIDTH = 5e-5, 1e-13, 6

parser = argparse.ArgumentParser(description="Recover κ(x, y) of -div(κ grad u) = f from u.")
parser.add_argument("--cells", type=int, default=24, help="cells of the grid, each way")
parser.add_argument("--iterations", type=int, nargs=2, default=(40, 80), help="of L-BFGS, for the field and the network")
parser.add_argument("--picture", type=Path, default=Path("demo/poisson_inverse.png"))
parser.add_argument("--save", type=Path, help="write the recovered fields to this file")
parser.add_argument("--most", type=float, default=0.05, help="fail if the relative error of log κ is larger")


class Poisson:
    """The equation on a grid that is divided among the ranks: square cells, κ on their faces the mean of both."""

    def __init__(self, cells):
        self.domain, self.cell = mpiad.Domain((cells, cells)), {"spacing": 1.0 / cells, "centred": True}
        self.operator = mpiad.linalg.Elliptic(self.domain, **self.cell)
        self.y, self.x = self.domain.coordinates(extent=1.0, centred=True)
        wave = numpy.pi * self.x, numpy.pi * self.y
        sources = [1.0 + 0 * wave[0] * wave[1], numpy.sin(2 * wave[0]) * numpy.sin(wave[1]),
                   numpy.sin(wave[0]) * numpy.sin(2 * wave[1])]  # fmt: skip
        self.f = 10.0 * numpy.stack(sources)

    def solutions(self, m):
        """Return u for all sources, shape (3, ny, nx), of this rank's block of m = log κ."""
        kappa = np.exp(m)
        # Set up once for an evaluation: the derivative's solve uses the same levels.
        levels = mpiad.linalg.Multigrid(self.domain, mpiad.stop_gradient(kappa), **self.cell)
        return mpiad.linalg.solve(self.operator, self.f, kappa, batch=1, preconditioner=levels, rtol=TOLERANCE)

    def roughness(self, v):
        """Return the sum of the squares of the differences between neighbours."""
        v = self.domain.exchange(v, "edge")
        down, right = v[..., 2:, 1:-1] - v[..., 1:-1, 1:-1], v[..., 1:-1, 2:] - v[..., 1:-1, 1:-1]
        return self.domain.sum(down**2 + right**2)


def true_logarithm(poisson):
    """Return log κ: two fronts, across which κ changes by factors of 5 and 2.7."""
    y, x = poisson.y, poisson.x
    return 0.8 * numpy.tanh(5 * (x + 0.5 * y - 0.75)) - 0.5 * numpy.tanh(4 * (y - 0.4 - 0.2 * x))


def network(theta, y, x):
    """Return log κ at points that each rank has of its own."""
    points = np.stack(numpy.broadcast_arrays(2 * x - 1, 2 * y - 1))
    hidden = np.tanh(np.einsum("io,iyx->oyx", theta["first"], points) + theta["shift"][:, None, None])
    return np.einsum("o,oyx->yx", theta["last"], hidden)


def first_weights():
    draw = numpy.random.default_rng(3)
    first, shift = draw.standard_normal((2, WIDTH)), draw.uniform(-1, 1, WIDTH)
    return {"first": first, "shift": shift, "last": 0.1 * draw.standard_normal(WIDTH)}


def block_borders(domain):
    """Return where the ranks' blocks meet, in cells along each dimension."""
    starts = mpiad.mpi_allgather(numpy.array([cells.start for cells in domain.owned]), comm=domain.comm)
    return [numpy.unique(along)[1:] for along in starts.T]


def draw_picture(path, fields, borders, histories):
    """Write the picture of the true and both recovered fields, and the way there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 9), layout="constrained")
    bound = numpy.abs(fields["true"]).max()
    for axis, (name, field) in zip(axes.ravel(), fields.items()):
        image = axis.imshow(field, "RdBu_r", vmin=-bound, vmax=bound, extent=(0, 1, 1, 0))
        for lines, places in zip((axis.hlines, axis.vlines), borders):
            lines(places / len(field), 0, 1, colors="0.5", linewidths=0.7, linestyles="--")
        axis.set(title=f"log κ: {name}", xlabel="x", ylabel="y")
        figure.colorbar(image, ax=axis)
    for name, history in histories.items():
        axes[1, 1].semilogy(history.loss, label=name)
    axes[1, 1].set(title="convergence of L-BFGS", xlabel="iteration", ylabel="loss")
    axes[1, 1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    poisson = Poisson(options.cells)
    domain, truth = poisson.domain, true_logarithm(poisson)
    observed = poisson.solutions(truth)
    scale = poisson.roughness(observed)

    def misfit(m):
        # κ acts on the slopes of u: compared by them, its fine structure counts as much as the coarse.
        return poisson.roughness(poisson.solutions(m) - observed) / scale

    def of_field(m):
        mine = m[domain.owned]
        return misfit(mine) + SMOOTHNESS * poisson.roughness(mine)

    def of_network(theta):
        return misfit(network(theta, poisson.y, poisson.x))

    cases = {"field": (of_field, numpy.zeros(domain.shape)), "network": (of_network, first_weights())}
    results = {}
    for (name, (fun, start)), most in zip(cases.items(), options.iterations):
        limits = {"maxiter": most, "gtol": 0.0, "ftol": 0.0}
        results[name] = mpiad.minimize(fun, start, options=limits, progress=True)
    found = {"true": truth, "field": results["field"].x[domain.owned]}
    found["network"] = network(results["network"].x, poisson.y, poisson.x)
    errors = {name: domain.norm(found[name] - truth) / domain.norm(truth) for name in results}
    fields, borders = {name: domain.gather(m) for name, m in found.items()}, block_borders(domain)
    if mpiad.mpi_rank() == 0:
        print(f"{options.cells} x {options.cells} cells on {mpiad.mpi_size()} ranks")
        for name, result in results.items():
            said = f"loss {result.fun:.3e}  relative error of log κ {errors[name]:.6f}"
            print(f"{name:8s} {result.nit:4d} iterations  {said}")
        if options.save:
            numpy.savez(options.save, **fields)
        draw_picture(options.picture, fields, borders, {name: result.history for name, result in results.items()})
    if max(errors.values()) > options.most:
        raise SystemExit(f"κ was not recovered: the relative error of log κ is {max(errors.values()):.3f}")


if __name__ == "__main__":
    main()
