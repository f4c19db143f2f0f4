"""Say how sure one can be of the ground under real terrain, and of water levels where nobody has measured any.

    mpiexec -n 4 python examples/groundwater_uncertainty.py

The terrain is the Jacksboro fault elevation model that comes with matplotlib (344 x 403 cells; every 3 x 3 of them make
one, `--coarsen 1` takes all). Rain seeps in and groundwater flows steadily to the sides, -div(T exp(m) grad u) = rain, with
the head u of the smoothed terrain there. m, the logarithm of the transmissivity by T, is made from the real elevation, so
that valleys are more permeable than ridges. Boreholes measure the head to 2 m; every other one is left out.

1. Before anything is measured, m is a Matérn field (a prior with a bilaplacian): a standard deviation of 1 everywhere, and
   a correlation length of 6 km.
2. The most probable m is found by Gauss-Newton's method with conjugate gradients, in the prior's inner product.
3. Around it the posterior is about a Gaussian. The leading eigenpairs of the data's Hessian, in the prior's, say what the
   boreholes tell: the standard deviation of m in each cell, and samples.
4. The flow through samples predicts the heads in the boreholes that were left out. How many of them lie in the band that
   is to hold 95 % is the check.

Grid, fields, eigenvectors and samples are divided among the ranks; any number of them gives the same answer. The truth
isn't a sample of the prior, so its bands needn't hold the share of cells that they promise; the program states it.
"""

import argparse
import sys
import time
from pathlib import Path

import autograd.numpy as np
import numpy
import scipy.ndimage
from matplotlib import cbook

import mpiad
from mpiad.inverse import Bilaplacian, laplace_approximation
from mpiad.linalg import solve_elliptic

TRANSMISSIVITY, RAIN = 200.0, 3e-4  # T, m² a day, and m a day (110 mm a year)
NOISE, SEED = 2.0, 7  # metres of head
ROUGHNESS, CORRELATION = 1000.0, 6000.0  # metres: smoothing of the elevation, and of the prior
BAND = 1.96  # standard deviations to each side hold 95 %

parser = argparse.ArgumentParser(description="Quantify the uncertainty of an aquifer under the Jacksboro terrain.")
parser.add_argument("--coarsen", type=int, default=3, help="cells of the elevation model in one of ours, each way")
parser.add_argument("--boreholes", type=int, default=160, help="every other one is left out and predicted")
parser.add_argument("--pairs", type=int, default=70, help="eigenpairs that are kept")
parser.add_argument("--draws", type=int, default=60, help="samples through which heads are predicted")
parser.add_argument("--picture", type=Path, help="draw fields, spectrum and predictions into this file")
parser.add_argument("--save", type=Path, help="write what was found to this file")
parser.add_argument("--progress", action="store_true", help="tell on standard error how far it is")
parser.add_argument(
    "--least", type=float, default=0.85, help="fail if fewer of the heads left out are in the band of 95 %%"
)


def terrain(coarsen):
    """Return the elevation in metres, and the size (y, x) of a cell."""
    with cbook.get_sample_data("jacksboro_fault_dem.npz") as data:
        elevation = data["elevation"].astype(float)
        degrees = float(data["dy"]), float(data["dx"]) * numpy.cos(numpy.radians(float(data["ymin"])))
    ny, nx = (n // coarsen for n in elevation.shape)
    blocks = elevation[: ny * coarsen, : nx * coarsen].reshape(ny, coarsen, nx, coarsen)
    return blocks.mean(axis=(1, 3)), tuple(coarsen * 111_200.0 * angle for angle in degrees)


class Aquifer:
    """The steady flow, the boreholes, and what was measured there."""

    def __init__(self, elevation, cell, boreholes, noise=NOISE):
        self.domain, self.cell, self.shape = mpiad.Domain(elevation.shape), cell, elevation.shape
        self.noise = noise
        smooth = scipy.ndimage.gaussian_filter(elevation, [ROUGHNESS / h for h in cell], mode="nearest")
        self.true_field = -1.5 * numpy.tanh((smooth - smooth.mean()) / smooth.std())
        self.truth = self.true_field[self.domain.owned].copy()
        self.from_sides = self.sides(smooth)[self.domain.owned].copy()

        draw = numpy.random.default_rng(SEED)
        self.places = draw.uniform(0.03, 0.97, (boreholes, 2)) * self.shape * numpy.array(cell)
        self.left_out = numpy.arange(boreholes) % 2 == 1
        self.mine = self.at_boreholes(numpy.ones(self.domain.local_shape))  # 1 in those of this rank, otherwise 0
        self.heads = self.observed(self.truth) + noise * draw.standard_normal(boreholes)

    def sides(self, smooth):
        """Return what heads at the sides give to the cells beside them, for a transmissivity of 1."""
        given = numpy.zeros(smooth.shape)
        for axis, h in enumerate(self.cell):
            for end in (0, -1):
                beside = (slice(None),) * axis + (end,)
                given[beside] += 2.0 * smooth[beside] / h**2
        return given

    def head(self, m):
        """Return this rank's block of the head in metres."""
        transmissivity = TRANSMISSIVITY * np.exp(m)
        gains = RAIN + transmissivity * self.from_sides
        return solve_elliptic(self.domain, transmissivity, gains, spacing=self.cell, centred=True, rtol=1e-9)

    def at_boreholes(self, field):
        """Return a field's values in the boreholes, zeros in those of other ranks."""
        return self.domain.interpolate(field, self.places, self.cell, centred=True, result="share")

    def observed(self, m):
        """Return the heads in all boreholes, on all ranks."""
        return mpiad.mpi_allreduce(self.at_boreholes(self.head(m)))

    def residuals(self, m):
        """Return this rank's misfits in the boreholes that aren't left out, in units of the noise."""
        misfits = (self.at_boreholes(self.head(m)) - self.mine * self.heads) / self.noise
        return misfits[~self.left_out]


class Heads:
    """What is predicted of the heads that were left out: noise of a measurement is part of it."""

    def __init__(self, measured, samples, noise=NOISE):
        self.measured, (mean, deviation) = measured, samples
        self.mean, self.deviation = mean, numpy.sqrt(deviation**2 + noise**2)
        self.away = (measured - mean) / self.deviation

    @property
    def coverage(self):
        return numpy.mean(numpy.abs(self.away) <= BAND)


def draw_picture(path, aquifer, elevation, fields, values, heads):
    """Write the picture of the fields, the spectrum and the predictions."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cell = aquifer.cell
    height, width = (n * h / 1000 for n, h in zip(elevation.shape, cell))
    figure, axes = pyplot.subplots(2, 4, figsize=(19, 9), layout="constrained")
    limit = numpy.abs(fields["truth"]).max() * 1.2

    def panel(axis, name, title, colours="viridis", low=-limit, high=limit):
        image = axis.imshow(fields[name], colours, vmin=low, vmax=high, extent=(0, width, height, 0))
        axis.set(title=title, xlabel="east (km)", ylabel="south (km)")
        figure.colorbar(image, ax=axis, shrink=0.8)

    panel(axes[0, 0], "truth", "true m = log(transmissivity / T)")
    axes[0, 0].contour(elevation, 4, colors="k", linewidths=0.4, alpha=0.6, extent=(0, width, 0, height))
    panel(axes[0, 1], "mean", "MAP estimate of m")
    panel(axes[0, 2], "deviation", "standard deviation of m; prior: 1", "magma", 0, 1)
    y, x = aquifer.places.T / 1000
    for chosen, marker, colour, label in (
        (~aquifer.left_out, "o", "cyan", "used"),
        (aquifer.left_out, "^", "white", "held out"),
    ):
        axes[0, 2].plot(x[chosen], y[chosen], marker, color=colour, markeredgecolor="black", markersize=7, label=label)
    axes[0, 2].legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, title="boreholes")
    panel(axes[1, 0], "prior sample", "a sample of the prior")
    panel(axes[1, 1], "sample", "a sample of the posterior")
    panel(axes[1, 2], "other sample", "another sample of the posterior")

    axes[0, 3].semilogy(1 + numpy.arange(len(values)), values, "C0.-")
    axes[0, 3].axhline(1, color="0.5", linestyle=":", label="as informative as the prior")
    axes[0, 3].set(title="eigenvalues of the data's Hessian", xlabel="number")
    axes[0, 3].legend()

    order = numpy.argsort(heads.mean)
    centre, place = heads.mean[order], numpy.arange(len(order))
    axes[1, 3].errorbar(place, 0 * centre, BAND * heads.deviation[order], fmt="none", color="C0", label="95 % interval")
    axes[1, 3].plot(place, heads.measured[order] - centre, "k.", label="measured")
    axes[1, 3].set(title="held-out heads minus their predicted mean", xlabel="borehole, by its head", ylabel="m")
    axes[1, 3].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main():
    options = parser.parse_args()
    began, root = time.perf_counter(), mpiad.mpi_rank() == 0

    def tell(text):
        if options.progress and root:
            print(f"{time.perf_counter() - began:6.1f} s: {text}", file=sys.stderr, flush=True)

    elevation, cell = terrain(options.coarsen)
    aquifer = Aquifer(elevation, cell, options.boreholes)
    domain, left_out = aquifer.domain, aquifer.left_out
    prior = Bilaplacian(domain, CORRELATION, 1.0, spacing=cell)
    tell(f"{domain.shape[0]} x {domain.shape[1]} cells")
    result = domain.minimize(
        aquifer.residuals,
        prior.mean,
        method="Newton-CG-sharded",
        options={"product": "gauss-newton", "regularizer": prior, "inner_product": prior, "gtol": 1e-2},
        progress=options.progress,
    )
    tell("the most probable field is found")
    kept = mpiad.linearize(aquifer.residuals)(result.x)

    def several(vs: numpy.ndarray) -> numpy.ndarray:  # products with the misfit's Hessian
        return kept.vjp(kept.jvp(vs, batch=True), batch=True)

    posterior = laplace_approximation(several, result.x, prior, options.pairs, batch=True)
    tell("its uncertainty, too")
    samples = posterior.predict(lambda m: aquifer.observed(m)[left_out], options.draws, rng=3)
    heads = Heads(aquifer.heads[left_out], samples)
    tell("the heads are predicted")

    deviation = numpy.sqrt(posterior.variance)
    inside = domain.mean((numpy.abs(aquifer.truth - result.x) <= BAND * deviation).astype(float))
    facts = domain.mean(posterior.variance), domain.norm(result.x - aquifer.truth) / domain.norm(aquifer.truth)
    gain = posterior.information_gain()
    before = aquifer.observed(prior.mean)[left_out]
    fields = {"truth": aquifer.truth, "mean": result.x, "deviation": deviation, "prior sample": prior.sample(1)}
    fields |= {"sample": posterior.sample(1), "other sample": posterior.sample(2)}
    fields = {name: domain.gather(field) for name, field in fields.items()}
    if not root:
        return
    print(f"{domain.shape[0]} x {domain.shape[1]} cells on {mpiad.mpi_size()} ranks, {numpy.sum(~left_out)} boreholes")
    print(f"{result.nit} steps of Gauss-Newton, {result.nhev} products; relative error of m {facts[1]:.3f}")
    print(f"{numpy.sum(posterior.values > 1)} directions that the data tell; {gain:.1f} nats gained")
    print(f"mean variance of m: 1 before, {facts[0]:.3f} after; {inside:.1%} of the true cells in the band of 95 %")
    print(f"{len(heads.mean)} heads left out: {heads.coverage:.1%} in the band of 95 %")
    errors = [numpy.sqrt(numpy.mean((guess - heads.measured) ** 2)) for guess in (before, heads.mean)]
    print("root mean square of their errors: {:.1f} m before, {:.2f} m after".format(*errors), end="")
    print(f"; {heads.deviation.mean():.2f} m expected")
    tell("done")
    if options.save:
        numpy.savez(options.save, **fields, values=posterior.values, heads=heads.mean, deviations=heads.deviation)
    if options.picture:
        draw_picture(options.picture, aquifer, elevation, fields, posterior.values, heads)
        print(f"written: {options.picture}")
    if not heads.coverage >= options.least:
        raise SystemExit(f"not covered: {heads.coverage:.1%} of the heads left out are in the band of 95 %")


if __name__ == "__main__":
    main()
