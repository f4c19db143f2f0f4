"""Recover the temperature that a plate had at the start from thermometers that were read later.

    mpiexec -n 4 python examples/heat_source.py

Heat spreads on a square plate whose edge is kept at zero, u_t = Δu, from an unknown start u0: three warm spots. Crank and
Nicolson's scheme takes two steps of h² accuracy at once, (I - k/2 Δ) u' = (I + k/2 Δ) u: an implicit solve in each, by
conjugate gradients, whose derivative is one more solve. Thermometers at scattered points are read after each of the later
steps, with noise. The most probable smooth u0 minimises

    J(u0) = Σ (reading - u(point))² / 2σ² + smoothness · |∇u0|² / 2

The plate is divided among the ranks. Every number of ranks gives the same answer. `--picture FILE` draws it.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy

import mpiad
import mpiad.linalg

parser = argparse.ArgumentParser(description="Recover an initial temperature.")
parser.add_argument("--cells", type=int, default=48, help="cells along each side")
parser.add_argument("--steps", type=int, default=10, help="steps in time")
parser.add_argument("--iterations", type=int, default=60, help="L-BFGS stops here at the latest")
parser.add_argument("--picture", type=Path, help="draw truth and answer into this file")
parser.add_argument("--most", type=float, default=0.25, help="fail if the relative error is larger")

END, NOISE, SMOOTHNESS, THERMOMETERS, SEED = 0.004, 0.01, 0.003, 200, 3
SPOTS = [(0.3, 0.35, 0.09, 1.0), (0.7, 0.6, 0.12, 0.8), (0.35, 0.75, 0.07, 0.9)]  # y, x, width, height


class Plate:
    """The plate and its heat, on this rank's block of the grid."""

    def __init__(self, cells, steps):
        self.domain = mpiad.Domain((cells, cells))
        self.spacing, self.steps = 1.0 / (cells + 1), steps
        self.half_step = END / steps / 2
        # Cells are the points inside; the edge, where it is zero, lies one spacing further.
        self.laplacian = self.domain.laplacian(self.spacing)
        self.y, self.x = self.domain.coordinates(self.spacing, self.spacing)
        draw = numpy.random.default_rng(SEED)
        self.thermometers = draw.uniform(0.08, 0.92, (THERMOMETERS, 2))

    def implicit(self, u):
        return u - self.half_step * self.laplacian(u)

    def readings(self, u):
        """Return what the thermometers show after each step of the later half."""
        shown = []
        for step in range(self.steps):
            right = u + self.half_step * self.laplacian(u)
            u = mpiad.linalg.solve(self.implicit, right, rtol=1e-13)
            if step >= self.steps // 2:
                shown.append(self.domain.interpolate(u, self.thermometers, self.spacing, self.spacing))
        return np.stack(shown)

    def spots(self):
        squares = [((self.y - y) ** 2 + (self.x - x) ** 2) / width**2 for y, x, width, _ in SPOTS]
        return sum(height * np.exp(-square) for (_, _, _, height), square in zip(SPOTS, squares))

    def roughness(self, u):
        """Return the integral of |∇u|², which is that of -u Δu."""
        return -self.domain.dot(u, self.laplacian(u)) * self.spacing**2


def block_borders(domain):
    """Return where the ranks' blocks meet, in cells along each dimension."""
    starts = mpiad.mpi_allgather(numpy.array([cells.start for cells in domain.owned]), comm=domain.comm)
    return [numpy.unique(along)[1:] for along in starts.T]


def draw_picture(path, truth, found, points, borders):
    """Write the picture of the true start, the recovered one, and their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    fields = [(truth, "true start"), (found, "recovered"), (found - truth, "recovered - true")]
    for axis, (field, title) in zip(axes, fields):
        bound = 1.0 if axis is not axes[2] else 0.5
        image = axis.imshow(field, "RdBu_r", vmin=-bound, vmax=bound, origin="lower", extent=(0, 1, 0, 1))
        for lines, places in zip((axis.hlines, axis.vlines), borders):
            lines(places / len(field), 0, 1, colors="0.5", linewidths=0.7, linestyles="--")
        axis.set(title=title)
        figure.colorbar(image, ax=axis)
    axes[1].plot(points[:, 1], points[:, 0], "k.", markersize=2)
    axes[1].plot([], [], "k.", markersize=6, label="thermometer")  # as small as in the picture it is lost in the legend
    axes[1].legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    root = mpiad.mpi_rank() == 0
    plate = Plate(options.cells, options.steps)
    domain, truth = plate.domain, plate.spots()
    clean = plate.readings(truth)
    read = clean + NOISE * numpy.random.default_rng(SEED + 1).standard_normal(clean.shape)

    def objective(u0):
        mine = u0[domain.owned]
        misfit = np.sum((plate.readings(mine) - read) ** 2) / (2 * NOISE**2)
        return misfit + SMOOTHNESS * plate.roughness(mine) / (2 * NOISE**2)

    result = mpiad.minimize(
        objective,
        numpy.zeros(domain.shape) if root else None,
        options={"maxiter": options.iterations, "ftol": 0, "gtol": 1e-6},
        progress=True,
    )
    found = result.x[domain.owned]
    error = domain.norm(found - truth) / domain.norm(truth)
    noise = numpy.sqrt(2 * result.fun / read.size)
    whole_truth, whole, borders = domain.gather(truth), domain.gather(found), block_borders(domain)
    if not root:
        return
    print(f"{domain.shape[0]} x {domain.shape[1]} cells, {len(plate.thermometers)} thermometers, {options.steps} steps")
    print(f"{result.nit} iterations: J = {result.fun:.12e}, {noise:.4f} of the noise")
    print(f"relative error of the start: {error:.12e}")
    if options.picture:
        draw_picture(options.picture, whole_truth, whole, plate.thermometers, borders)
        print(f"written: {options.picture}")
    if not error <= options.most:
        raise SystemExit(f"not recovered: the relative error, {error:.3f}, is above {options.most}")


if __name__ == "__main__":
    main()
