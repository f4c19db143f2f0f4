"""Find how permeable the ground is under real terrain, from the water levels in boreholes.

    mpiexec -n 4 python examples/terrain_inversion.py

or `make demo`. The terrain is the Jacksboro fault elevation model that comes with matplotlib (344 x 403 cells; with
`--coarsen 3` every 3 x 3 of them make one). Groundwater flows steadily, -div(exp(m) grad u) = q, with the head u zero
around the region; m = log κ is made from the real elevation: smoothed over about a kilometre and standardised, z, it gives
m = -1.5 tanh(z), so that valleys are 20 times as permeable as ridges. One after the other, wells are pumped, and each time
the head is measured in the same 5 % of the cells, with 1 % noise. Sought is m.

The grid is divided among the ranks; all wells are solved for at once by multigrid, whose derivative is one more solve; the
root holds the variables and runs L-BFGS, and the loss is compiled (`mpiad.jit`), with the solves as calls. It begins on a
grid three times as coarse each way, where each rank computes some of the wells alone, and goes on with what that finds on
the whole one. The variables x are white noise until they are smoothed: m is x, smoothed, and |x|²/2 added to the misfit
says that m is smooth (the most probable m, if it was drawn so). Any number of ranks gives the same answer. The heads to
explain are computed on the same grid, so that the noise is their only error; near the sides, where heads are zero whatever
κ is, and far from wells the field is found less well.
"""

import argparse
import time
from pathlib import Path

import autograd.numpy as np
import numpy
import scipy.ndimage
from matplotlib import cbook
from mpi4py import MPI

import mpiad
from mpiad.linalg import solve_elliptic

NOISE, OBSERVED, SEED = 0.01, 0.05, 12
ROUGHNESS, SMOOTHING = 1000.0, 750.0  # metres: smoothing of the elevation, and of x

parser = argparse.ArgumentParser(description="Recover log κ under the Jacksboro terrain.")
parser.add_argument("--coarsen", type=int, default=1, help="cells of the elevation model in one of ours, each way")
parser.add_argument("--first", type=int, default=3, help="cells of ours in one of the grid that it begins on; 1: on ours")
parser.add_argument("--wells", type=int, default=6, help="wells, pumped one after the other")
parser.add_argument("--iterations", type=int, default=10, help="L-BFGS stops here at the latest")
parser.add_argument("--before", type=int, default=60, help="and here on the grid that it begins on")
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
    """The steady flow on a grid that is divided among the ranks of a communicator."""

    def __init__(self, shape, cell, comm=None):
        self.domain, self.cell = mpiad.Domain(shape, comm=comm), cell
        # In units in which a cell's area is 1 on any grid, so that a well pumps as much on each.
        self.spacing = tuple(h / numpy.sqrt(cell[0] * cell[1]) for h in cell)
        deviations = [SMOOTHING / h for h in cell]
        halo = [max(1, round(3 * each)) for each in deviations]
        self.wide = mpiad.Domain(shape, halo=halo, dims=self.domain.dims, comm=comm)
        self.blur = [blurring(*each) for each in zip(deviations, self.wide.halo, self.wide.local_shape)]

    def heads(self, m, q):
        """Return the heads for each well, shape (wells, ny, nx)."""
        return solve_elliptic(self.domain, np.exp(m), q, spacing=self.spacing, centred=True, rtol=1e-8)

    def smoothed(self, x):
        """Return x, smoothed over SMOOTHING metres and scaled so that white noise gets a standard deviation of 1."""
        return self.blur[0] @ self.wide.exchange(x, "edge") @ self.blur[1].T


def blurring(deviation, halo, cells):
    """Return the matrix that smooths `cells` numbers with a halo, so that white noise keeps its variance."""
    distance = numpy.arange(cells + 2 * halo) - halo - numpy.arange(cells)[:, None]
    kernel = numpy.where(numpy.abs(distance) <= halo, numpy.exp(-0.5 * (distance / deviation) ** 2), 0.0)
    return kernel / numpy.sqrt(numpy.sum(kernel[0] ** 2))


class Survey:
    """Wells, boreholes and what was measured there.

    Both are given as cells of the grid on which was measured; the aquifer's are coarser by a factor.
    """

    def __init__(self, aquifer, wells, boreholes, coarser=1):
        self.aquifer, domain = aquifer, aquifer.domain
        wells, boreholes = [numpy.minimum(cells // coarser, numpy.array(domain.shape) - 1) for cells in (wells, boreholes)]
        self.wells, self.boreholes = wells, boreholes
        q = numpy.zeros((len(wells), *domain.shape))
        q[numpy.arange(len(wells)), wells[:, 0], wells[:, 1]] = -1.0
        self.q = q[(slice(None), *domain.owned)].copy()
        first, stop = ([getattr(cells, end) for cells in domain.owned] for end in ("start", "stop"))
        self.mine = ((first <= boreholes) & (boreholes < stop)).all(axis=1)
        self.y, self.x = (boreholes[self.mine] - first).T
        self.scale = numpy.ones((len(wells), len(boreholes)))

    def measure(self, truth, noise):
        """Measure all boreholes: heads with noise, shape (wells, boreholes), and its deviation."""
        heads = self.whole(self.sample(truth[self.aquifer.domain.owned]))
        self.deviation = NOISE * numpy.sqrt(numpy.mean(heads**2, axis=1, keepdims=True))
        self.measured = heads + self.deviation * noise

    def whole(self, heads):
        """Return the heads in all boreholes, on all ranks."""
        found = numpy.zeros(self.scale.shape)
        found[:, self.mine] = heads
        return mpiad.mpi_allreduce(found, comm=self.aquifer.domain.comm)

    def uniform(self):
        """Return the heads in all boreholes where κ is 1."""
        return self.whole(self.sample(numpy.zeros(self.aquifer.domain.local_shape)))

    def sample(self, m):
        """Return the heads in this rank's boreholes, shape (wells, boreholes)."""
        return self.scale[:, self.mine] * self.aquifer.heads(m, self.q)[:, self.y, self.x]

    def residuals(self, m):
        """Return misfits in units of the noise."""
        return (self.sample(m) - self.measured[:, self.mine]) / self.deviation

    def loss(self, x):
        """Return this rank's share of the negative logarithm of the probability of x."""
        x = x[self.aquifer.domain.owned]
        copies = mpiad.mpi_size() / mpiad.mpi_size(self.aquifer.domain.comm)
        return (np.sum(self.residuals(self.aquifer.smoothed(x)) ** 2) + np.sum(x**2) / copies) / 2

    def misfits(self, m):
        """Return each well's root mean square misfit in units of the noise: 1 where all is explained but the noise."""
        squares = mpiad.mpi_allreduce(numpy.sum(self.residuals(m) ** 2, axis=1))
        return numpy.sqrt(squares / self.measured.shape[1])


def placed(shape, wells):
    """Return the cells of the wells, on a lattice, and of the boreholes, drawn; and the noise of what is measured there."""
    draw = numpy.random.default_rng(SEED)
    columns = int(numpy.ceil(wells**0.5 * 1.1))
    lattice = [((k // columns + 0.5) / -(-wells // columns), (k % columns + 0.5) / columns) for k in range(wells)]
    size = shape[0] * shape[1]
    boreholes = numpy.sort(draw.choice(size, round(OBSERVED * size), replace=False))
    noise = draw.standard_normal((wells, len(boreholes)))
    return (numpy.array(lattice) * shape).astype(int), numpy.stack(numpy.unravel_index(boreholes, shape), 1), noise


def refined(x, coarser, shape):
    """Return white noise of a coarser grid on a finer one: as probable, and as m much the same."""
    rows, columns = (numpy.minimum(numpy.arange(n) // coarser, m - 1) for n, m in zip(shape, x.shape))
    return x[rows][:, columns] / coarser


def on_coarser_grid(survey, factor):
    """Return the same survey on a coarser grid, where each rank has the whole grid, and wells of its own.

    Heads beside a well differ much between grids, by a factor that hardly depends on κ: it is found where κ is 1.
    """
    aquifer, mine = survey.aquifer, slice(mpiad.mpi_rank(), None, mpiad.mpi_size())
    shape, cell = [n // factor for n in aquifer.domain.shape], [factor * h for h in aquifer.cell]
    coarse = Survey(Aquifer(shape, cell, MPI.COMM_SELF), survey.wells[mine], survey.boreholes, factor)
    coarse.measured, coarse.deviation = survey.measured[mine], survey.deviation[mine]
    coarse.scale = survey.uniform()[mine] / coarse.uniform()
    return coarse


def inverted(survey, iterations, x=None):
    """Return the most probable x, from another one, or zero."""
    x = numpy.zeros(survey.aquifer.domain.shape) if x is None else x
    options = {"maxiter": iterations, "ftol": 1e-5}
    return mpiad.minimize(
        mpiad.jit(survey.loss), x if mpiad.mpi_rank() == 0 else None, objective="sum", options=options, progress=True
    )


def block_borders(domain):
    """Return where the ranks' blocks meet, in cells along each dimension."""
    starts = mpiad.mpi_allgather(numpy.array([cells.start for cells in domain.owned]), comm=domain.comm)
    return [numpy.unique(along)[1:] for along in starts.T]


def draw_picture(path, elevation, truth, found, survey, borders, results):
    """Write the picture of the true and the recovered field, their difference, and the way there."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cell = survey.aquifer.cell
    height, width = (n * h / 1000 for n, h in zip(truth.shape, cell))
    boreholes = [(k + 0.5) * h / 1000 for k, h in zip(survey.boreholes.T, cell)]
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
    axes[1, 0].plot(boreholes[1], boreholes[0], "k.", markersize=0.6)
    axes[1, 0].plot([], [], "k.", markersize=6, label="borehole")  # as small as in the picture it is lost in the legend
    axes[1, 0].legend(loc="upper left", framealpha=0.9)

    axis = axes[1, 1]
    losses = numpy.concatenate([result.history.loss for result in results])
    slopes = numpy.concatenate([result.history.gradient_norm for result in results])
    (loss,) = axis.semilogy(losses, "C0", label="loss")
    level = axis.axhline(survey.measured.size / 2, color="C0", linestyle=":", label="noise alone")
    right = axis.twinx()
    (slope,) = right.semilogy(slopes, "C1", linewidth=1, label="gradient")
    right.set_ylabel("largest entry of the gradient")
    for result in results[:-1]:
        axis.axvline(len(result.history.loss) - 0.5, color="0.5", linestyle="--", linewidth=0.7)
    axis.set(title="convergence of L-BFGS, on both grids", xlabel="iteration", ylabel="loss", xlim=(0, len(losses) - 1))
    axis.legend(handles=[loss, level, slope], loc="upper right")
    axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def print_table(survey, results, rows, error, correlation, seconds):
    shape = survey.aquifer.domain.shape
    print(f"{shape[0]} x {shape[1]} cells on {mpiad.mpi_size()} ranks, {len(survey.boreholes)} boreholes")
    iterations, evaluations = (" + ".join(str(result[name]) for result in results) for name in ("nit", "nfev"))
    print(f"{iterations} iterations, {evaluations} evaluations, {seconds:.1f} s")
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
    wells, boreholes, noise = placed(truth.shape, options.wells)
    aquifer = Aquifer(truth.shape, cell)
    survey = Survey(aquifer, wells, boreholes)
    survey.measure(truth, noise)

    results, begin = [], numpy.zeros(truth.shape)
    if options.first > 1:
        results.append(inverted(on_coarser_grid(survey, options.first), options.before))
        begin = refined(results[0].x, options.first, truth.shape)
    results.append(inverted(survey, options.iterations, begin))
    result = results[-1]

    m = aquifer.smoothed(result.x[aquifer.domain.owned])
    misfits = survey.misfits(numpy.zeros_like(m)), survey.misfits(m)
    found, borders = aquifer.domain.gather(m), block_borders(aquifer.domain)
    if not root:
        return
    error = numpy.linalg.norm(found - truth) / numpy.linalg.norm(truth)  # that of the starting point, zero, is 1
    correlation = numpy.corrcoef(found.ravel(), truth.ravel())[0, 1]
    print_table(survey, results, misfits, error, correlation, time.perf_counter() - start)
    if options.history:
        numpy.savetxt(options.history, numpy.concatenate([result.history.loss for result in results]), fmt="%.17e")
    draw_picture(options.picture, elevation, truth, found, survey, borders, results)
    print(f"written: {options.picture}")
    if not correlation >= options.least:
        raise SystemExit(f"not recovered: the correlation with the true field, {correlation:.3f}, is under {options.least}")


if __name__ == "__main__":
    main()
