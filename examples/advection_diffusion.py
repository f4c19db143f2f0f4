"""Find where a substance was released in a flow around two buildings, from sensors that measure it later.

    mpiexec -n 4 python examples/advection_diffusion.py

The concentration u is carried by a steady flow v and diffuses, ∂u/∂t + ∇·(v u - κ∇u) = 0 on the unit square, without flux
through the walls. Sensors measure it with a noise of 1 % of its maximum, at every second step from t = 1 to t = 4. The
initial concentration m is unknown. It is the initial-condition problem of hIPPYlib's tutorial (Petra and Stadler 2011;
Villa, Petra and Ghattas 2021), with the same times, κ, noise and true m, here with finite volumes of first order in place
of finite elements, a flow with uniform vorticity around the buildings, and a Matérn prior.

1. A step is implicit: (1 + Δt A) u_new = u. Its matrix is factored once, `linalg.factorized`, and every step, adjoint step
   and product with the Hessian is a back-substitution.
2. The problem is linear and Gaussian, so one solve by conjugate gradients gives the most probable m, and about as many
   products as there are eigenvalues above 1 give the posterior covariance.
3. Samples of the posterior predict the mean concentration beside the second building, also after the last measurement.

The check is the share of the predicted times whose true value lies in the band of 95 %. Any number of ranks gives the same
fields, to the tolerance of the minimization.
"""

import argparse
import time
from pathlib import Path

import autograd.numpy as np
import numpy
import scipy.sparse.linalg

import mpiad
from mpiad.inverse import Bilaplacian, laplace_approximation
from mpiad.linalg import factorized
from mpiad.timestepping import scan

DIFFUSION, STEP, STEPS, LAST, FIRST = 1e-3, 0.1, 50, 40, 10  # κ; Δt; steps; the last and first ones that are measured
BUILDINGS = ((0.25, 0.5, 0.15, 0.4), (0.6, 0.75, 0.6, 0.85))  # x from and to, y from and to
REGION = (0.55, 0.8, 0.4, 0.6)  # of the predicted mean, below the second building
BAND = 1.96  # standard deviations to each side hold 95 %

parser = argparse.ArgumentParser(description="Find the initial concentration in a flow around buildings.")
parser.add_argument("--cells", type=int, default=48, help="cells of the square, each way")
parser.add_argument("--sensors", type=int, default=9, help="sensors, each way; those inside buildings are left out")
parser.add_argument("--pairs", type=int, default=120, help="the largest number of eigenpairs")
parser.add_argument("--draws", type=int, default=60, help="samples that are predicted")
parser.add_argument("--least", type=float, default=0.85, help="fail if a smaller share of the predictions is in its band")
parser.add_argument("--picture", type=Path, help="draw fields, spectrum and prediction into this file")


def is_in(box, x, y):
    return (box[0] <= x) & (x <= box[1]) & (box[2] <= y) & (y <= box[3])


def in_building(x, y):
    return numpy.logical_or.reduce([is_in(box, x, y) for box in BUILDINGS])


def flow(n):
    """Return the velocities through the faces along x, (n + 1, n), and along y, (n, n + 1), with maximum 1.

    They are differences of a stream function ψ at the corners, so no cell gains or loses volume: -Δψ = 1, and ψ = 0 on the
    walls and buildings.
    """
    x = numpy.linspace(0, 1, n + 1)
    x, y = numpy.meshgrid(x, x, indexing="ij")
    free = ~in_building(x, y)
    free[[0, -1]] = free[:, [0, -1]] = False
    line = scipy.sparse.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n + 1, n + 1))
    inside = free.ravel()
    laplacian = scipy.sparse.kronsum(line, line, format="csc")[inside][:, inside]
    psi = numpy.zeros((n + 1) ** 2)
    psi[inside] = scipy.sparse.linalg.spsolve(laplacian.tocsc(), numpy.ones(inside.sum()))
    psi = psi.reshape(n + 1, n + 1)
    along_x, along_y = numpy.diff(psi, axis=1), -numpy.diff(psi, axis=0)
    fastest = max(numpy.abs(along_x).max(), numpy.abs(along_y).max())
    return along_x / fastest, along_y / fastest


class Release:
    """The transport from the initial concentration to the sensors, and the measurements."""

    def __init__(self, n, sensors):
        self.domain = domain = mpiad.Domain((n, n))
        self.spacing = h = 1 / n
        self.x, self.y = ((k[domain.owned] + 0.5) * h for k in numpy.indices((n, n)))
        self.faces = [self._faces_of_rank(v, axis) for axis, v in enumerate(flow(n))]
        outside = ~in_building(*((k + 0.5) * h for k in numpy.indices((n, n))))
        # Nothing diffuses into a building: a face conducts if both of its cells are outside, and those of the walls don't.
        conducting = [numpy.zeros((n + 1, n)), numpy.zeros((n, n + 1))]
        conducting[0][1:-1], conducting[1][:, 1:-1] = outside[1:] & outside[:-1], outside[:, 1:] & outside[:, :-1]
        self.diffusion = [self._faces_of_rank(DIFFUSION / h * faces, axis) for axis, faces in enumerate(conducting)]
        self.solve = factorized(self.implicit, numpy.zeros(domain.local_shape), pattern=domain)

        places = numpy.linspace(0.08, 0.92, sensors)
        grid = numpy.stack(numpy.meshgrid(places, places, indexing="ij"), axis=-1).reshape(-1, 2)
        self.sensors = grid[~in_building(*grid.T)]
        self.region = is_in(REGION, self.x, self.y).astype(float)
        self.region /= domain.sum(self.region)
        self.truth = numpy.minimum(0.5, numpy.exp(-100 * ((self.x - 0.35) ** 2 + (self.y - 0.7) ** 2)))
        exact = self.measured(self.truth)
        highest = float(mpiad.mpi_allreduce(exact).max())
        self.noise = 0.01 * highest
        drawn = self.noise * numpy.random.default_rng(11).standard_normal(exact.shape)
        mine = domain.interpolate(numpy.ones(domain.local_shape), self.sensors, h, centred=True, result="share")
        self.data = exact + mine * drawn  # this rank's share of them

    def _faces_of_rank(self, faces, axis):
        """Return the faces of this rank's cells, one more than cells along the axis."""
        owned = [slice(s.start, s.stop + (k == axis)) for k, s in enumerate(self.domain.owned)]
        return faces[tuple(owned)].copy()

    def implicit(self, u):
        """Return (1 + Δt A) u, with upwind fluxes."""
        padded = self.domain.exchange(u)
        change = 0.0
        for axis, (v, conducted) in enumerate(zip(self.faces, self.diffusion)):
            lower = padded[:-1, 1:-1] if axis == 0 else padded[1:-1, :-1]
            upper = padded[1:, 1:-1] if axis == 0 else padded[1:-1, 1:]
            flux = numpy.maximum(v, 0) * lower + numpy.minimum(v, 0) * upper - conducted * (upper - lower)
            change = change + (flux[1:] - flux[:-1] if axis == 0 else flux[:, 1:] - flux[:, :-1])
        return u + STEP / self.spacing * change

    def step(self, u, k):
        return self.solve(u)

    def at_sensors(self, u):
        """Return this rank's share of the concentrations at the sensors."""
        return self.domain.interpolate(u, self.sensors, self.spacing, centred=True, result="share")

    def measured(self, m):
        """Return this rank's share of all measurements, (times, sensors)."""
        _, found = scan(self.step, m, LAST, observe=lambda u, k: self.at_sensors(u))
        return found[FIRST - 1 :: 2]

    def residuals(self, m):
        """Return this rank's share of the misfits, in units of the noise."""
        return np.ravel((self.measured(m) - self.data) / self.noise)

    def predicted(self, m):
        """Return the mean concentration of the region after each step."""
        _, found = scan(self.step, m, STEPS, observe=lambda u, k: self.domain.dot(self.region, u))
        return found

    def after(self, m, steps):
        return scan(self.step, m, steps)


def draw_picture(path, fields, sensors, values, series):
    """Write the picture of the fields, the spectrum and the prediction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    figure, axes = pyplot.subplots(2, 4, figsize=(18, 8.5), layout="constrained")

    def panel(axis, name, title, colors="viridis", low=None, high=None):
        image = axis.imshow(fields[name].T, colors, vmin=low, vmax=high, extent=(0, 1, 0, 1), origin="lower")
        for box in BUILDINGS:
            axis.add_patch(Rectangle((box[0], box[2]), box[1] - box[0], box[3] - box[2], color="0.5"))
        axis.set(title=title, xlabel="x", ylabel="y")
        figure.colorbar(image, ax=axis, shrink=0.8)

    panel(axes[0, 0], "truth", "true initial concentration", high=0.5, low=0)
    panel(axes[0, 1], "mean", "MAP estimate", high=0.5, low=0)
    panel(axes[0, 2], "deviation", "standard deviation", "magma", low=0)
    panel(axes[0, 3], "sample", "a sample of the posterior", high=0.5, low=0)
    panel(axes[1, 0], "first", f"true concentration at t = {FIRST * STEP:.0f}", low=0)
    panel(axes[1, 1], "last", f"true concentration at t = {LAST * STEP:.0f}", low=0)
    for axis in axes[1, :2]:
        axis.plot(*sensors.T, "w.", markersize=4)
    width, height = REGION[1] - REGION[0], REGION[3] - REGION[2]
    axes[1, 1].add_patch(Rectangle((REGION[0], REGION[2]), width, height, fill=False, ec="r"))

    axes[1, 2].semilogy(1 + numpy.arange(len(values)), values, ".-")
    axes[1, 2].axhline(1, color="0.5", linestyle=":", label="as informative as the prior")
    axes[1, 2].set(title="eigenvalues of the data's Hessian", xlabel="number")
    axes[1, 2].legend()

    times, (truth, mean, deviation) = STEP * (1 + numpy.arange(STEPS)), series
    axes[1, 3].fill_between(times, mean - BAND * deviation, mean + BAND * deviation, alpha=0.4, label="95 % interval")
    axes[1, 3].plot(times, truth, "k--", label="true")
    axes[1, 3].axvspan(FIRST * STEP, LAST * STEP, color="0.9", zorder=-1, label="measurements")
    axes[1, 3].set(title="mean concentration in the red box", xlabel="t")
    axes[1, 3].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main():
    options = parser.parse_args()
    began = time.perf_counter()
    release = Release(options.cells, options.sensors)
    domain = release.domain
    prior = Bilaplacian(domain, 0.4, 0.2, mean=0.1, spacing=release.spacing)
    result = domain.minimize(
        release.residuals,
        prior.mean,
        method="Newton-CG-sharded",
        options={"product": "gauss-newton", "regularizer": prior, "inner_product": prior, "grtol": 1e-5},
    )
    kept = mpiad.linearize(release.residuals)(result.x)
    posterior = laplace_approximation(lambda v: kept.vjp(kept.jvp(v)), result.x, prior, options.pairs, tol=1e-3)
    mean, deviation = posterior.predict(release.predicted, options.draws, rng=100)
    truth = release.predicted(release.truth)
    inside = numpy.abs(truth - release.predicted(result.x)) <= BAND * deviation

    error = domain.norm(result.x - release.truth) / domain.norm(release.truth)
    gain, left = posterior.information_gain(), domain.mean(posterior.variance) / domain.mean(prior.variance)
    fields = {"truth": release.truth, "mean": result.x, "deviation": numpy.sqrt(posterior.variance)}
    fields |= {"sample": posterior.sample(1), "first": release.after(release.truth, FIRST)}
    fields = {name: domain.gather(field) for name, field in (fields | {"last": release.after(release.truth, LAST)}).items()}
    data = release.data.size
    if mpiad.mpi_rank() > 0:
        return
    print(f"{options.cells} x {options.cells} cells on {mpiad.mpi_size()} ranks, {LAST} implicit steps, {data} data")
    print(f"{result.nit} step of Gauss-Newton, {result.nhev} products; relative error of m {error:.3f}")
    above = numpy.sum(posterior.values > 1)
    print(f"{above} eigenvalues above 1, {posterior.products} products", end="; ")
    print(f"{gain:.1f} nats gained, {left:.1%} of the variance left")
    print(f"predicted at t = {STEPS * STEP:.0f}: {mean[-1]:.4f} ± {deviation[-1]:.4f}, true {truth[-1]:.4f}")
    print(f"{inside.mean():.1%} of {STEPS} times in the band of 95 %; {time.perf_counter() - began:.1f} s")
    if options.picture:
        draw_picture(options.picture, fields, release.sensors, posterior.values, (truth, mean, deviation))
        print(f"written: {options.picture}")
    if not inside.mean() >= options.least:
        raise SystemExit(f"not covered: {inside.mean():.1%} of the predictions are in the band of 95 %")


if __name__ == "__main__":
    main()
