"""Find the velocity of sound under ground from a few shots, recorded by receivers at the surface.

    mpiexec -n 4 python examples/seismic_inversion.py

Sound obeys u_tt = c² Δu + source, with a layer around the region in which it dies away. Each shot sends a Ricker wavelet
from a point, and the receivers record what arrives: first along the surface, later from reflectors. The unknown is c in
every cell. It starts from a guess that knows nothing of the reflector, and L-BFGS lowers the squared misfit of all records
(full-waveform inversion).

Grid and shots are both divided: the ranks form groups (`--groups`), each with a communicator of its own, and `sum_over`
hands them the shots, a few at a time (`--batch`), which a group computes on a grid divided among its ranks. The time steps
are kept at a few checkpoints only, and the others are computed again in the reverse pass. Every number of ranks gives the
same answer.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy

import mpiad
from mpiad.tasks import RankGroups, sum_over
from mpiad.timestepping import scan

parser = argparse.ArgumentParser(description="Recover a velocity model by full-waveform inversion.")
parser.add_argument("--shape", type=int, nargs=2, default=(64, 96), help="cells in depth and along the surface")
parser.add_argument("--shots", type=int, default=6)
parser.add_argument("--batch", type=int, default=3, help="shots that a group computes at once")
parser.add_argument("--steps", type=int, default=330, help="steps in time")
parser.add_argument("--checkpoints", type=int, default=20, help="states that are kept for the gradient")
parser.add_argument("--groups", type=int, help="groups of ranks that share the shots; by default about the square root")
parser.add_argument("--iterations", type=int, default=40, help="L-BFGS stops here at the latest")
parser.add_argument("--picture", type=Path, help="draw the models and a record into this file")
parser.add_argument("--least", type=float, default=0.05, help="fail if the misfit isn't lowered to this part")

CELL, STEP, FREQUENCY, ORDER = 0.02, 0.003, 7.0, 4  # km, s, 1/s, order of the Laplacian
LAYER, DAMPING, SPEEDS = 10, 25.0, (1.5, 3.0)  # cells, 1/s at the outermost, bounds in km/s


def true_model(depth, along):
    """Return the velocity in km/s: faster with depth, a dipping reflector, a slow body above it."""
    reflector = 0.65 + 0.08 * along
    body = np.exp(-(((depth - 0.42) / 0.12) ** 2) - ((along - 0.9) / 0.25) ** 2)
    return guess(depth, along) + 0.4 / (1 + np.exp(-(depth - reflector) / 0.015)) - 0.25 * body


def guess(depth, along):
    return 1.7 + 0.4 * depth + 0.0 * along


def ricker(time):
    """Return the wavelet, its peak 1.2 periods after the start."""
    square = (numpy.pi * FREQUENCY * (time - 1.2 / FREQUENCY)) ** 2
    return (1 - 2 * square) * numpy.exp(-square)


class Ground:
    """This rank's block of the ground, and all shots, in batches."""

    def __init__(self, options):
        size = mpiad.mpi_size()
        self.groups = RankGroups(options.groups or max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size))
        self.domain = mpiad.Domain(options.shape, halo=ORDER // 2, comm=self.groups.comm)
        self.laplacian = self.domain.laplacian(CELL, order=ORDER)
        self.depth, self.along = self.domain.coordinates(CELL)
        self.steps, self.checkpoints = options.steps, options.checkpoints
        self.compiled = mpiad.jit(self.step)

        damping = sum(self.in_layer(axis, n) for axis, n in enumerate(self.domain.shape)) * DAMPING * STEP / 2
        self.before, self.after = 1 - damping, 1 / (1 + damping)
        width = (options.shape[1] - 2 * LAYER - 5) * CELL
        edge = (LAYER + 2) * CELL
        self.places = edge + width * (numpy.arange(options.shots) + 0.5) / options.shots
        self.receivers = numpy.stack(numpy.broadcast_arrays(edge, edge + width * numpy.linspace(0, 1, 40)), axis=-1)
        batches = -(-options.shots // options.batch)
        self.batches = [self.bumps(places) for places in numpy.array_split(self.places, batches)]
        self.wavelet = STEP**2 * ricker(STEP * numpy.arange(options.steps)) / CELL**2

    def in_layer(self, axis, cells):
        """Return how deep each cell lies in the absorbing layer along a dimension, from 0 to 1, squared."""
        place = (self.depth, self.along)[axis] / CELL
        return numpy.maximum(0, LAYER - numpy.minimum(place, cells - 1 - place)) ** 2 / LAYER**2

    def bumps(self, places):
        """Return each shot's source, a narrow bump near the surface, shape (shots, *block)."""
        depth = self.receivers[0, 0]
        squares = (self.depth - depth) ** 2 + (self.along - places[:, None, None]) ** 2
        return numpy.exp(-squares / (2 * CELL**2)) / (2 * numpy.pi)

    def step(self, state, k, sample, square, sources):
        """Return the pressure after the next step and before it; `square` is that of the way in a step."""
        u, before = state
        force = square * self.laplacian(u) + sample * sources
        return (2 * u - self.before * before + force) * self.after, u

    def observe(self, state, k, square, sources):
        """Return what the receivers of this rank record, zeros for the others."""
        return self.domain.interpolate(state[0], self.receivers, CELL, result="share")

    def records(self, c, sources):
        """Return the records of a batch of shots, shape (steps, shots, receivers), on each rank of the group."""
        still = numpy.zeros(sources.shape)
        square = (c * STEP) ** 2
        _, shares = scan(
            self.compiled, (still, still), self.steps, square, sources, inputs=self.wavelet, observe=self.observe,
            checkpoints=self.checkpoints,
        )  # fmt: skip
        return mpiad.mpi_allreduce(shares, comm=self.groups.comm)


def block_borders(domain):
    """Return where the ranks' blocks meet, in cells along each dimension."""
    starts = mpiad.mpi_allgather(numpy.array([cells.start for cells in domain.owned]), comm=domain.comm)
    return [numpy.unique(along)[1:] for along in starts.T]


def draw_picture(path, models, borders, record, distance):
    """Write the picture of the true model, the guess, the answer, and a record."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(13, 8), layout="constrained")
    truth = models["true"]
    extent = (0, CELL * truth.shape[1], CELL * truth.shape[0], 0)
    for axis, (title, model) in zip(axes.ravel(), models.items()):
        image = axis.imshow(model, "viridis", vmin=truth.min(), vmax=truth.max(), extent=extent)
        axis.hlines(CELL * borders[0], 0, extent[1], colors="0.5", linewidths=0.7, linestyles="--")
        axis.vlines(CELL * borders[1], 0, extent[2], colors="0.5", linewidths=0.7, linestyles="--")
        axis.set(title=f"{title} velocity, km/s", xlabel="along the surface, km", ylabel="depth, km")
        figure.colorbar(image, ax=axis)
    bound = 0.1 * numpy.abs(record).max()
    times = (distance[0], distance[-1], len(record) * STEP, 0)
    axes[1, 1].imshow(record, "gray", vmin=-bound, vmax=bound, aspect="auto", extent=times)
    axes[1, 1].set(title="record of the first shot", xlabel="receiver along the surface, km", ylabel="time, s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main():
    options = parser.parse_args()
    root = mpiad.mpi_rank() == 0
    ground = Ground(options)
    domain = ground.domain
    truth = true_model(ground.depth, ground.along)
    start = guess(ground.depth, ground.along)
    recorded = [ground.records(truth, sources) for sources in ground.batches]

    def misfit(c):
        def of(shots, comm):
            sources, seen = shots
            return np.sum((ground.records(c, sources) - seen) ** 2) / 2

        return sum_over(zip(ground.batches, recorded), of, groups=ground.groups)

    before = misfit(start)
    guesses = numpy.meshgrid(*[CELL * numpy.arange(n) for n in domain.shape], indexing="ij")
    result = mpiad.minimize(
        lambda c: misfit(c[domain.owned]) / before,
        guess(*guesses) if root else None,
        bounds=[SPEEDS] * (domain.shape[0] * domain.shape[1]) if root else None,
        options={"maxiter": options.iterations, "ftol": 0, "gtol": 0},
        progress=True,
    )
    found = result.x[domain.owned]
    errors = [domain.norm(model - truth) / domain.norm(truth) for model in (start, found)]
    models = {"true": domain.gather(truth), "guessed": domain.gather(start), "recovered": domain.gather(found)}
    borders = block_borders(domain)
    if not root:
        return
    print(f"{options.shots} shots, {domain.shape[0]} x {domain.shape[1]} cells, {options.steps} steps")
    print(f"{result.nit} iterations: misfit lowered to {result.fun:.12e}")
    print(f"relative error of the velocity: guess {errors[0]:.6e}, recovered {errors[1]:.12e}")
    if options.picture:
        draw_picture(options.picture, models, borders, recorded[0][:, 0], ground.receivers[:, 1])
        print(f"written: {options.picture}")
    if not result.fun <= options.least:
        raise SystemExit(f"not recovered on {ground.groups.count} group(s): the misfit is {result.fun:.3f} of the first")


if __name__ == "__main__":
    main()
