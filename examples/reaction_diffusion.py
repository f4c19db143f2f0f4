"""Find where a population grows fast from three noisy images of its spread, and predict how it goes on.

    mpiexec -n 4 python examples/reaction_diffusion.py

The density u spreads by the equation of Fisher and Kolmogorov, ∂u/∂t = D ∆u + ρ u (1 - u), on the unit square without flux
through the sides. Its rate ρ = ρ₀ exp(m) differs from place to place, and m is unknown. Models of invading species and of
tumors have this form. Each image measures the density of every cell, with a noise of 2 % of the capacity.

1. A step is implicit, so its length isn't limited by diffusion. Newton's method solves it, with a sparse Jacobian from
   colored products whose factors serve several Newton steps: `linalg.newton(jacobian="sparse", reuse=3)`.
2. The gradient is exact: each step's adjoint is one linear solve, preconditioned by the last factors of that step.
3. m is the most probable field with a Matérn prior, by Gauss-Newton's method.

The check is the error of the predicted density at a time after the last image. Any number of ranks gives the same fields,
to the tolerance of the minimization.
"""

import argparse
import time
from pathlib import Path

import autograd.numpy as np
import numpy

import mpiad
from mpiad.inverse import Bilaplacian
from mpiad.linalg import newton
from mpiad.timestepping import scan

DIFFUSION, RATE, STEP = 4e-3, 1.5, 0.25  # D, ρ₀, length of a step
IMAGES, LAST = (4, 8, 12), 18  # steps after which the density is measured; the step that is predicted
NOISE, SEED = 0.02, 5

parser = argparse.ArgumentParser(description="Recover the growth rate of a spreading population.")
parser.add_argument("--cells", type=int, default=24, help="cells of the square, each way")
parser.add_argument("--iterations", type=int, default=12, help="the most steps of Gauss-Newton")
parser.add_argument("--most", type=float, default=0.03, help="fail if the relative error of the prediction is larger")
parser.add_argument("--picture", type=Path, help="draw the fields into this file")


class Population:
    """The spread for a given m, and the images."""

    def __init__(self, n):
        self.domain, self.spacing = mpiad.Domain((n, n)), 1 / n
        x, y = ((k[self.domain.owned] + 0.5) / n for k in numpy.indices((n, n)))
        self.start = 0.8 * numpy.exp(-((x - 0.3) ** 2 + (y - 0.4) ** 2) / 0.008)
        self.truth = 0.7 * numpy.tanh(6 * (x - 0.45)) * numpy.cos(numpy.pi * y)
        exact = self.images(self.truth)
        self.measured = exact + NOISE * numpy.stack([self.domain.normal(SEED + k) for k in range(len(IMAGES))])

    def residual(self, u, before, m):
        """Return the residual of an implicit step, of shape local_shape."""
        p = self.domain.exchange(u, boundary="edge")
        laplacian = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * u
        growth = RATE * np.exp(m) * u * (1 - u)
        return u - before - STEP * (DIFFUSION / self.spacing**2 * laplacian + growth)

    def step(self, u, k, m):
        return newton(self.residual, u, u, m, jacobian="sparse", pattern=self.domain, reuse=3, rtol=1e-9)

    def densities(self, m, steps):
        """Return the density after every step, (steps, *local_shape)."""
        return scan(self.step, self.start, steps, m, observe=lambda u, k, m: u)[1]

    def images(self, m):
        return self.densities(m, IMAGES[-1])[numpy.array(IMAGES) - 1]

    def residuals(self, m):
        """Return this rank's misfits, in units of the noise."""
        return np.ravel((self.images(m) - self.measured) / NOISE)


def draw_picture(path, fields):
    """Write the picture of the fields."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(16, 7.5), layout="constrained")
    limits = {"m": ("RdBu_r", -0.8, 0.8), "u": ("viridis", 0, 1)}
    for axis, (title, (kind, field)) in zip(axes.flat, fields.items()):
        colors, low, high = limits[kind]
        image = axis.imshow(field.T, colors, vmin=low, vmax=high, extent=(0, 1, 0, 1), origin="lower")
        axis.set(title=title)
        figure.colorbar(image, ax=axis, shrink=0.8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main():
    options = parser.parse_args()
    began = time.perf_counter()
    population = Population(options.cells)
    domain = population.domain
    prior = Bilaplacian(domain, 0.5, 0.7, spacing=population.spacing)
    result = domain.minimize(
        population.residuals,
        prior.mean,
        method="Newton-CG-sharded",
        options={
            "product": "gauss-newton", "regularizer": prior, "inner_product": prior, "grtol": 1e-4,
            "maxiter": options.iterations,
        },
    )  # fmt: skip
    predicted, unknown, truth = (population.densities(m, LAST)[-1] for m in (result.x, prior.mean, population.truth))
    size = domain.norm(truth)
    error, blind = domain.norm(predicted - truth) / size, domain.norm(unknown - truth) / size
    of_field = domain.norm(result.x - population.truth) / domain.norm(population.truth)

    images = population.measured
    fields = {f"image after {k} steps": ("u", domain.gather(image)) for k, image in zip(IMAGES, images)}
    fields[f"true density after {LAST} steps"] = "u", domain.gather(truth)
    fields["true m = log(ρ / ρ₀)"] = "m", domain.gather(population.truth)
    fields["most probable m"] = "m", domain.gather(result.x)
    fields["predicted density"] = "u", domain.gather(predicted)
    fields["density for m = 0"] = "u", domain.gather(unknown)
    if mpiad.mpi_rank() > 0:
        return
    print(f"{options.cells} x {options.cells} cells on {mpiad.mpi_size()} ranks, {IMAGES[-1]} implicit steps")
    print(f"{result.nit} steps of Gauss-Newton, {result.nhev} products; relative error of m {of_field:.3f}")
    print(f"density after {LAST} steps: relative error {error:.4f}, for m = 0 {blind:.4f}")
    print(f"{time.perf_counter() - began:.1f} s")
    if options.picture:
        draw_picture(options.picture, fields)
        print(f"written: {options.picture}")
    if not error <= options.most:
        raise SystemExit(f"not predicted: the relative error of the density is {error:.4f}")


if __name__ == "__main__":
    main()
