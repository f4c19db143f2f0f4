"""Find how permeable the ground is under real terrain, from the water levels in a few boreholes.

    mpiexec -n 4 python examples/terrain_inversion.py

or `make demo`. The terrain is the Jacksboro fault elevation model that comes with matplotlib (344 x 403 cells; every
3 x 3 of them make one, `--coarsen 1` takes all). Groundwater flows steadily, -div(exp(m) grad u) = q, with the head u
zero around the region; m = log κ is made from the real elevation: smoothed over about a kilometre and standardised, z,
it gives m = -1.5 tanh(z), so that valleys are 20 times as permeable as ridges. One after the other, wells are pumped,
and each time the head is measured in the same 5 % of the cells, with 1 % noise. Sought is m.

The grid is divided among the ranks; all wells are solved for at once by conjugate gradients, whose derivative is one
more solve; the root holds the variables and runs L-BFGS. The variables x are white noise until they are smoothed: m is
x, smoothed, and |x|²/2 added to the misfit says that m is smooth (the most probable m, if it was drawn so). Any number
of ranks gives the same answer. The heads to explain are computed on the same grid, so that the noise is their only
error; near the sides, where heads are zero whatever κ is, and far from wells the field is found less well.
"""

import argparse
import time
from pathlib import Path

import autograd.numpy as np
import numpy
import scipy.ndimage
import scipy.sparse
from matplotlib import cbook

import mpiad
import mpiad.linalg

NOISE, OBSERVED, SEED = 0.01, 0.05, 12
ROUGHNESS, SMOOTHING = 1000.0, 750.0  # metres: smoothing of the elevation, and of x
COARSE = 10  # nodes of the preconditioner's coarse grid, each way

parser = argparse.ArgumentParser(description="Recover log κ under the Jacksboro terrain.")
parser.add_argument("--coarsen", type=int, default=3, help="cells of the elevation model in one of ours, each way")
parser.add_argument("--wells", type=int, default=6, help="wells, pumped one after the other")
parser.add_argument("--iterations", type=int, default=50, help="L-BFGS stops here at the latest")
parser.add_argument("--history", type=Path, help="write the loss at each iteration to this file")
parser.add_argument("--picture", type=Path, default=Path("demo/terrain_inversion.png"))
parser.add_argument("--least", type=float, default=0.95, help="fail if the result correlates less with the true field")


def terrain(coarsen):
    """Return the elevation in metres, and the size (y, x) of a cell."""
    with cbook.get_sample_data("jacksboro_fault_dem.npz") as data:
        elevation = data["elevation"].astype(float)
        degrees = float(data["dy"]), float(data["dx"]) * numpy.cos(numpy.radians(float(data["ymin"])))
    ny, nx = (n // coarsen for n in elevation.shape)
    blocks = elevation[: ny * coarsen, : nx * coarsen].reshape(ny, coarsen, nx, coarsen)
    return blocks.mean(axis=(1, 3)), tuple(coarsen * 111_200.0 * angle for angle in degrees)


def log_permeability(elevation, cell):
    smooth = scipy.ndimage.gaussian_filter(elevation, [ROUGHNESS / h for h in cell], mode="nearest")
    return -1.5 * numpy.tanh((smooth - smooth.mean()) / smooth.std())


class Aquifer:
    """The steady flow on a grid that is divided among the ranks."""

    def __init__(self, shape, cell):
        self.domain, self.cell = mpiad.Domain(shape), cell
        self.weights = cell[1] / cell[0], cell[0] / cell[1]  # of flow across faces in y and in x
        deviations = [SMOOTHING / h for h in cell]
        self.wide = mpiad.Domain(shape, halo=[round(3 * each) for each in deviations], dims=self.domain.dims)
        self.blur = [blurring(*each) for each in zip(deviations, self.wide.halo, self.wide.local_shape)]
        self.hats = coarse_hats(self.domain)
        self.prepared_for = None

    def conductances(self, m):
        """Return those of the faces in y, shape (ny + 1, nx), and in x, shape (ny, nx + 1), of this rank's block."""
        m = self.domain.exchange(m, "edge")
        in_y, in_x = (m[1:, 1:-1] + m[:-1, 1:-1]) / 2, (m[1:-1, 1:] + m[1:-1, :-1]) / 2
        return self.weights[0] * np.exp(in_y), self.weights[1] * np.exp(in_x)

    def outflow(self, u, in_y, in_x):
        """Return what leaves each cell, shape (wells, ny, nx): the operator of the linear system."""
        u = self.domain.exchange(u)
        down = in_y * (u[:, 1:, 1:-1] - u[:, :-1, 1:-1])
        right = in_x * (u[:, 1:-1, 1:] - u[:, 1:-1, :-1])
        return down[:, :-1] - down[:, 1:] + right[:, :, :-1] - right[:, :, 1:]

    def heads(self, m, q):
        """Return the heads for each well, shape (wells, ny, nx)."""
        faces = self.conductances(m)
        return mpiad.linalg.solve(self.outflow, q, *faces, preconditioner=self.precondition, rtol=1e-10)

    def precondition(self, r, in_y, in_x):
        """Apply an approximate inverse: this rank's part of the operator solved exactly, and a coarse grid for all."""
        if in_y is not self.prepared_for:
            self.factors, self.coarse_inverse = self.factorised(in_y, in_x)
            self.prepared_for = in_y
        hats_y, hats_x = self.hats
        coarse = mpiad.mpi_allreduce(hats_y @ r @ hats_x.T)
        coarse = (coarse.reshape(len(r), -1) @ self.coarse_inverse).reshape(coarse.shape)
        return self.factors.solve(r.reshape(len(r), -1).T).T.reshape(r.shape) + hats_y.T @ coarse @ hats_x

    def factorised(self, in_y, in_x):
        nx = self.domain.local_shape[1]
        diagonal = in_y[:-1] + in_y[1:] + in_x[:, :-1] + in_x[:, 1:]
        below, beside = in_y[1:-1].ravel(), numpy.where(numpy.arange(nx) < nx - 1, in_x[:, 1:], 0.0).ravel()[:-1]
        matrix = scipy.sparse.diags([diagonal.ravel(), -below, -below, -beside, -beside], [0, nx, -nx, 1, -1], format="csc")
        factors = scipy.sparse.linalg.splu(matrix, "MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
        hats = numpy.einsum("iy,jx->ijyx", *self.hats).reshape(-1, *self.domain.local_shape)
        coarse = self.hats[0] @ self.outflow(hats, in_y, in_x) @ self.hats[1].T
        return factors, numpy.linalg.inv(mpiad.mpi_allreduce(coarse.reshape(len(hats), len(hats))))

    def smoothed(self, x):
        """Return x, smoothed over SMOOTHING metres and scaled so that white noise gets a standard deviation of 1."""
        return self.blur[0] @ self.wide.exchange(x, "edge") @ self.blur[1].T


def coarse_hats(domain):
    """Return the piecewise linear functions of a coarse grid on this rank's block, shapes (COARSE, ny) and (COARSE, nx)."""
    nodes = numpy.arange(1, COARSE + 1)[:, None]
    places = [(COARSE + 1) * x.ravel() for x in domain.coordinates(extent=1.0, centred=True)]
    return [numpy.maximum(0.0, 1.0 - abs(x - nodes)) for x in places]


def blurring(deviation, halo, cells):
    """Return the matrix that smooths `cells` numbers with a halo, so that white noise keeps its variance."""
    distance = numpy.arange(cells + 2 * halo) - halo - numpy.arange(cells)[:, None]
    kernel = numpy.where(numpy.abs(distance) <= halo, numpy.exp(-0.5 * (distance / deviation) ** 2), 0.0)
    return kernel / numpy.sqrt(numpy.sum(kernel[0] ** 2))


class Survey:
    """The wells, the boreholes and what was measured there; the same on any number of ranks."""

    def __init__(self, aquifer, truth, wells):
        self.aquifer, domain = aquifer, aquifer.domain
        draw = numpy.random.default_rng(SEED)
        shape = domain.shape
        columns = int(numpy.ceil(wells**0.5 * 1.1))
        grid = [((k // columns + 0.5) / -(-wells // columns), (k % columns + 0.5) / columns) for k in range(wells)]
        self.wells = (numpy.array(grid) * shape).astype(int)
        self.boreholes = numpy.sort(draw.choice(truth.size, round(OBSERVED * truth.size), replace=False))
        noise = draw.standard_normal((wells, len(self.boreholes)))
        q = numpy.zeros((wells, *shape))
        q[numpy.arange(wells), self.wells[:, 0], self.wells[:, 1]] = -1.0
        self.q = q[(slice(None), *domain.owned)].copy()
        y, x = numpy.unravel_index(self.boreholes, shape)
        rows, cols = domain.owned
        mine = (rows.start <= y) & (y < rows.stop) & (cols.start <= x) & (x < cols.stop)
        self.y, self.x = y[mine] - rows.start, x[mine] - cols.start
        heads = self.sample(truth[domain.owned])
        squares = mpiad.mpi_allreduce(numpy.sum(heads**2, axis=1))
        self.deviation = NOISE * numpy.sqrt(squares / len(self.boreholes))[:, None]
        self.measured = heads + self.deviation * noise[:, mine]

    def sample(self, m):
        """Return the heads in this rank's boreholes, shape (wells, boreholes)."""
        return self.aquifer.heads(m, self.q)[:, self.y, self.x]

    def residuals(self, m):
        """Return misfits in units of the noise."""
        return (self.sample(m) - self.measured) / self.deviation

    def loss(self, x):
        """Return this rank's share of the negative logarithm of the probability of x."""
        x = x[self.aquifer.domain.owned]
        return (np.sum(self.residuals(self.aquifer.smoothed(x)) ** 2) + np.sum(x**2)) / 2

    def misfits(self, m):
        """Return each well's root mean square misfit in units of the noise: 1 where all is explained but the noise."""
        squares = mpiad.mpi_allreduce(numpy.sum(self.residuals(m) ** 2, axis=1))
        return numpy.sqrt(squares / len(self.boreholes))


def block_borders(domain):
    """Return where the ranks' blocks meet, in cells along each dimension."""
    starts = mpiad.mpi_allgather(numpy.array([cells.start for cells in domain.owned]), comm=domain.comm)
    return [numpy.unique(along)[1:] for along in starts.T]


def draw_picture(path, elevation, truth, found, survey, borders, history):
    """Write the picture of the true and the recovered field, their difference, and the way there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cell = survey.aquifer.cell
    height, width = (n * h / 1000 for n, h in zip(truth.shape, cell))
    boreholes = [(k + 0.5) * h / 1000 for k, h in zip(numpy.unravel_index(survey.boreholes, truth.shape), cell)]
    wells = [(k + 0.5) * h / 1000 for k, h in zip(survey.wells.T, cell)]
    figure, axes = pyplot.subplots(2, 2, figsize=(13, 11), layout="constrained")

    def panel(axis, field, title, colours, bound):
        image = axis.imshow(field, colours, vmin=-bound, vmax=bound, extent=(0, width, height, 0))
        thin = {"colors": "0.5", "linewidths": 0.7, "linestyles": "--"}
        axis.hlines(borders[0] * cell[0] / 1000, 0, width, **thin, label="border of blocks")
        axis.vlines(borders[1] * cell[1] / 1000, 0, height, **thin)
        axis.plot(wells[1], wells[0], "wv", markeredgecolor="k", markersize=9, label="pumped well")
        axis.set(title=title, xlabel="east (km)", ylabel="south (km)", xlim=(0, width), ylim=(height, 0))
        figure.colorbar(image, ax=axis, label="log κ", extend="both" if numpy.abs(field).max() > bound else "neither")

    limit, error = numpy.abs(truth).max(), found - truth
    panel(axes[0, 0], truth, "true log κ, with contours of the elevation", "viridis", limit)
    axes[0, 0].contour(elevation, 4, colors="k", linewidths=0.4, alpha=0.6, extent=(0, width, 0, height))
    panel(axes[0, 1], found, "recovered log κ", "viridis", limit)
    panel(axes[1, 0], error, f"recovered - true, mean absolute error {numpy.abs(error).mean():.2f}", "RdBu_r", limit / 2)
    axes[1, 0].plot(boreholes[1], boreholes[0], "k.", markersize=1.5)
    axes[1, 0].plot([], [], "k.", markersize=6, label="borehole")  # as small as in the picture it is lost in the legend
    axes[1, 0].legend(loc="upper left", framealpha=0.9)

    axis = axes[1, 1]
    (loss,) = axis.semilogy(history.loss, "C0", label="loss")
    level = axis.axhline(survey.wells.shape[0] * len(survey.boreholes) / 2, color="C0", linestyle=":", label="noise alone")
    (slope,) = axis.twinx().semilogy(history.gradient_norm, "C1", linewidth=1, label="gradient, largest entry (right)")
    axis.set(title="convergence of L-BFGS", xlabel="iteration", ylabel="loss", xlim=(0, len(history.loss) - 1))
    axis.legend(handles=[loss, level, slope], loc="upper right")
    axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, bbox_inches="tight")


def print_table(survey, result, rows, error, correlation, seconds):
    shape = survey.aquifer.domain.shape
    print(f"{shape[0]} x {shape[1]} cells on {mpiad.mpi_size()} ranks, {len(survey.boreholes)} boreholes")
    print(f"{result.nit} iterations, {result.nfev} evaluations, {seconds:.1f} s")
    print(f"{'':34s}{'start':>10s}{'recovered':>12s}")
    print(f"{'relative error of log κ':34s}{1:10.3f}{error:12.3f}")
    print(f"{'correlation with the true log κ':34s}{'':10s}{correlation:12.3f}")
    for k, (before, after) in enumerate(zip(*rows), 1):
        print(f"{f'misfit of well {k} / noise':34s}{before:10.2f}{after:12.2f}")


def main():
    options = parser.parse_args()
    start = time.perf_counter()
    root = mpiad.mpi_rank() == 0
    elevation, cell = terrain(options.coarsen)
    truth = log_permeability(elevation, cell)
    aquifer = Aquifer(truth.shape, cell)
    survey = Survey(aquifer, truth, options.wells)

    result = mpiad.minimize(
        survey.loss,
        numpy.zeros(truth.shape) if root else None,
        objective="sum",
        options={"maxiter": options.iterations, "ftol": 1e-5},
        progress=True,
    )

    m = aquifer.smoothed(result.x[aquifer.domain.owned])
    misfits = survey.misfits(numpy.zeros_like(m)), survey.misfits(m)
    found, borders = aquifer.domain.gather(m), block_borders(aquifer.domain)
    if not root:
        return
    error = numpy.linalg.norm(found - truth) / numpy.linalg.norm(truth)  # that of the starting point, zero, is 1
    correlation = numpy.corrcoef(found.ravel(), truth.ravel())[0, 1]
    print_table(survey, result, misfits, error, correlation, time.perf_counter() - start)
    if options.history:
        numpy.savetxt(options.history, result.history.loss, fmt="%.17e")
    draw_picture(options.picture, elevation, truth, found, survey, borders, result.history)
    print(f"written: {options.picture}")
    if not correlation >= options.least:
        raise SystemExit(f"not recovered: the correlation with the true field, {correlation:.3f}, is under {options.least}")


if __name__ == "__main__":
    main()
