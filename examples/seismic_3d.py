"""Find the velocity of sound between the surface and a mine from twelve shots, and how sure one can be of it.

    mpiexec -n 4 python examples/seismic_3d.py
    mpiexec -n 2 python examples/seismic_3d.py --device gpu

Sound obeys u_tt = c² Δu + source in three dimensions, with a layer around the block in which it dies away. Each shot sends
a Ricker wavelet from a point at the surface, and a grid of receivers in the mine, at the bottom of the block, records what
arrives, with noise. Sought is m = log(c / guess) in each of 64 x 96 x 96 cells, by the misfit of the records and a prior
that says how smooth m is.

The receivers are the same for all shots, so that shots may be added up: `--encoded` of them with random signs go into one
run of the wave (source encoding), and so do their records. The ranks form groups (`--groups`), each with a
communicator of its own, which share these runs (`sum_over`), and a group's ranks share the grid. m and the prior are
divided among all ranks. The step in time is compiled (`jit`) and differentiated so; a few states are kept in single
precision for the gradient, and the others computed again.

Two ways to the most probable m are compared: Gauss-Newton's method with conjugate gradients in the prior's inner product,
and L-BFGS. Around it the leading eigenpairs of JᵀJ say what the records tell, and how sure m is in each cell; more pairs
make the deviation smaller, as the program warns. Every number of ranks gives the same answer.

With `--device gpu` the waves, their records and the kept states are on the GPU of each rank; m and the prior stay on the
host. A rank without a GPU lets all of them compute on the host.
"""

import argparse
import sys
import time
from pathlib import Path

import autograd.numpy as np
import numpy
from mpi4py import MPI

import mpiad
from mpiad.device import select, to_device, to_host
from mpiad.inverse import Bilaplacian, laplace_approximation
from mpiad.tasks import RankGroups, sum_over
from mpiad.timestepping import CheckpointSchedule, scan

parser = argparse.ArgumentParser(description="Recover a velocity model in 3-D, with its uncertainty.")
parser.add_argument("--shape", type=int, nargs=3, default=(64, 96, 96), help="cells in depth and along the surface")
parser.add_argument("--shots", type=int, nargs=2, default=(3, 4), help="shots along both sides of the surface")
parser.add_argument("--encoded", type=int, default=6, help="shots that are added up, with random signs")
parser.add_argument("--receivers", type=int, default=16, help="receivers along each side of the mine")
parser.add_argument("--steps", type=int, default=300, help="steps in time")
parser.add_argument("--recorded", type=int, default=16, help="steps between states that are kept for the gradient")
parser.add_argument("--layer", type=int, default=10, help="cells of the layer in which sound dies away")
parser.add_argument("--groups", type=int, help="groups of ranks that share the shots; by default about the square root")
parser.add_argument("--iterations", type=int, nargs=2, default=(4, 14), help="of Gauss-Newton, and of L-BFGS at the most")
parser.add_argument("--products", type=int, default=4, help="most products in a step of Gauss-Newton")
parser.add_argument("--pairs", type=int, default=6, help="eigenpairs that are kept")
parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="what the waves run on")
parser.add_argument("--picture", type=Path, help="draw slices and sections into this file")
parser.add_argument("--progress", action="store_true", help="tell on standard error how far it is")
parser.add_argument("--least", type=float, default=0.5, help="fail if more of the objective is left, but for the noise")

CELL, STEP, FREQUENCY, DAMPING = 0.025, 0.0035, 7.0, 25.0  # km, s, 1/s, 1/s at the outermost
DEVIATION, CORRELATION, NOISE, SEED = 0.1, 0.4, 0.05, 3  # of m; km; of the records, by their root mean square
CENTRE, BESIDE, BEYOND = -5 / 2, 4 / 3, -1 / 12  # the second difference of fourth order


def guess(depth):
    return 1.7 + 0.5 * depth


def true_field(depth, north, east):
    """Return m: a slow body, and a fast one that lies deeper; coordinates in parts of the block."""
    slow = numpy.exp(-(((depth - 0.38) / 0.14) ** 2) - ((north - 0.46) / 0.14) ** 2 - ((east - 0.64) / 0.15) ** 2)
    fast = numpy.exp(-(((depth - 0.6) / 0.14) ** 2) - ((north - 0.54) / 0.14) ** 2 - ((east - 0.36) / 0.15) ** 2)
    return 0.15 * fast - 0.15 * slow


def ricker(time):
    """Return the wavelet, its peak 1.2 periods after the start."""
    square = (numpy.pi * FREQUENCY * (time - 1.2 / FREQUENCY)) ** 2
    return (1 - 2 * square) * numpy.exp(-square)


def has_gpus():
    """Return whether each rank has a GPU, one of which it selects; else say what is missing."""
    missing = ""
    try:
        select()
    except (ImportError, RuntimeError) as error:
        missing = str(error)
    reasons = MPI.COMM_WORLD.allgather(missing)
    if any(reasons) and mpiad.mpi_rank() == 0:
        count = f"{len(list(filter(None, reasons)))} of {len(reasons)} ranks have no GPU"
        print(f"{count}, so the waves run on the host. {max(reasons)}", file=sys.stderr, flush=True)
    return not any(reasons)


class Ground:
    """The model on all ranks, the wave on those of each group, and the shots."""

    def __init__(self, options):
        size = mpiad.mpi_size()
        self.put = to_device if options.device == "gpu" and has_gpus() else lambda x: x
        self.groups = RankGroups(options.groups or max(n for n in range(1, size + 1) if size % n == 0 and n * n <= size))
        self.model = mpiad.Domain(options.shape)
        self.wave = mpiad.Domain(options.shape, halo=2, comm=self.groups.comm)
        self.prior = Bilaplacian(self.model, CORRELATION, DEVIATION, spacing=CELL)
        self.truth = true_field(*self.model.coordinates(extent=1.0, centred=True))
        self.places = self.wave.coordinates(CELL)
        self.guess = guess(self.places[0])
        self.layer = options.layer
        damping = sum(map(self.in_layer, range(3))) * DAMPING * STEP / 2
        self.before, self.after = self.put((1 - damping, 1 / (1 + damping)))
        self.compiled, self.seen = mpiad.jit(self.step), mpiad.jit(self.observe)
        self.steps = options.steps
        # With one for so many steps, whose records are held at once, each step is run twice for the gradient.
        self.kept = CheckpointSchedule(-(-self.steps // options.recorded), recorded=options.recorded, dtype="float32")
        self.wavelet = self.put(STEP**2 * ricker(STEP * numpy.arange(options.steps)) / CELL**3)

        edge = (self.layer + 2) * CELL
        lines = [edge + (n * CELL - 2 * edge) * numpy.linspace(0, 1, options.receivers) for n in options.shape[1:]]
        bottom = options.shape[0] * CELL - edge
        self.receivers = numpy.stack(numpy.meshgrid([bottom], *lines, indexing="ij"), axis=-1).reshape(-1, 3)
        shots = [(numpy.arange(k) + 0.5) / k for k in options.shots]
        shots = [edge + (n * CELL - 2 * edge) * along for n, along in zip(options.shape[1:], shots)]
        shots = numpy.stack(numpy.meshgrid([edge], *shots, indexing="ij"), axis=-1).reshape(-1, 3)
        self.shots = shots
        draw, runs = numpy.random.default_rng(SEED), -(-len(shots) // options.encoded)
        self.sources = [self.encoded(shots[k::runs], draw) for k in range(runs)]
        self.measure(draw)

    def in_layer(self, axis):
        """Return how deep each cell lies in the absorbing layer along a dimension, from 0 to 1, squared."""
        place = self.places[axis] / CELL
        return numpy.maximum(0, 1 - numpy.minimum(place, self.wave.shape[axis] - 1 - place) / self.layer) ** 2

    def encoded(self, shots, draw):
        """Return a source made of several shots with random signs: a narrow bump for each."""
        total = numpy.zeros(self.wave.local_shape)
        for shot in shots:
            squares = sum((x - at) ** 2 for x, at in zip(self.places, shot))
            total += draw.choice([-1.0, 1.0]) * numpy.exp(-squares / (2 * CELL**2)) / (2 * numpy.pi) ** 1.5
        return self.put(total)

    def step(self, state, k, sample, square, source):
        """Return the pressure after the next step and before it; `square` is that of the way in a step, in cells."""
        u, before = state
        p = self.wave.exchange(u, corners=False)
        near = p[3:-1, 2:-2, 2:-2] + p[1:-3, 2:-2, 2:-2] + p[2:-2, 3:-1, 2:-2] + p[2:-2, 1:-3, 2:-2]
        near = near + p[2:-2, 2:-2, 3:-1] + p[2:-2, 2:-2, 1:-3]
        far = p[4:, 2:-2, 2:-2] + p[:-4, 2:-2, 2:-2] + p[2:-2, 4:, 2:-2] + p[2:-2, :-4, 2:-2]
        far = far + p[2:-2, 2:-2, 4:] + p[2:-2, 2:-2, :-4]
        force = square * (3 * CENTRE * u + BESIDE * near + BEYOND * far) + sample * source
        return (2 * u - self.before * before + force) * self.after, u

    def observe(self, state, k, square, source):
        """Return what the receivers of this rank record, zeros for the others."""
        return self.wave.interpolate(state[0], self.receivers, CELL, result="share")

    def records(self, square, source):
        """Return this rank's share of the records of a source, shape (steps, receivers)."""
        still = self.put(numpy.zeros(source.shape))
        return scan(
            self.compiled, (still, still), self.steps, square, source, inputs=self.wavelet, observe=self.seen,
            checkpoints=self.kept,
        )[1]  # fmt: skip

    def square(self, m):
        """Return the square of the way in a step on this rank's block of the wave, from its block of the model."""
        whole = mpiad.mpi_bcast(self.model.gather(m))
        return self.put((self.guess * STEP / CELL * np.exp(whole[self.wave.owned])) ** 2)

    def measure(self, draw):
        """Record the runs of this rank's group in the true ground, with noise; None for those of other groups."""
        square, self.measured = self.square(self.truth), [None] * len(self.sources)
        for k in self.own:
            self.measured[k] = self.records(square, self.sources[k])
        squares = mpiad.mpi_allreduce(sum(numpy.sum(to_host(self.measured[k]) ** 2) for k in self.own))
        shape = self.steps, len(self.receivers)
        self.noise = NOISE * numpy.sqrt(squares / len(self.sources) / numpy.prod(shape))
        mine = self.wave.interpolate(numpy.ones(self.wave.local_shape), self.receivers, CELL, result="share")
        for k in range(len(self.sources)):
            noise = self.noise * draw.standard_normal(shape)
            if k in self.own:
                self.measured[k] = self.measured[k] + self.put(mine * noise)

    @property
    def expected(self):
        """Return the misfit of the true ground, from noise alone."""
        return len(self.sources) * self.steps * len(self.receivers) / 2

    @property
    def own(self):
        """Return the numbers of the runs that `sum_over` gives to this rank's group."""
        return range(self.groups.index, len(self.sources), self.groups.count)

    def misfits(self, square, source, measured):
        """Return this rank's share of the misfits of a run, in units of the noise."""
        return (self.records(square, source) - measured) / self.noise

    def residuals(self, m):
        """Return the misfits of all runs of this rank's group, for Gauss-Newton."""
        square = self.square(m)
        return [self.misfits(square, self.sources[k], self.measured[k]) for k in self.own]

    def objective(self, m):
        """Return the negative logarithm of the probability of m, for L-BFGS."""
        square = self.square(m)

        def half_squares(run, comm):
            return np.sum(self.misfits(square, *run) ** 2) / 2

        runs = zip(self.sources, self.measured)
        return sum_over(runs, half_squares, groups=self.groups, objective="sum") + self.prior.cost(m)


class Descent:
    """One way to the most probable m: where it ended, and the seconds of processor time until each iterate."""

    def __init__(self, ground, name, fun, method, options, progress):
        self.name, self.seconds, began = name, [0.0], time.process_time()
        self.result = ground.model.minimize(
            fun,
            numpy.zeros(ground.model.local_shape),
            method=method,
            options=options,
            callback=lambda m: self.seconds.append(time.process_time() - began),
            progress=progress,
        )
        self.error = ground.model.norm(self.result.x - ground.truth) / ground.model.norm(ground.truth)

    def __str__(self):
        found = self.result
        products = f", {found.nhev} products" if "nhev" in found else ""
        work = f"{self.name}: {found.nit} iterations, {found.nfev} evaluations{products}, {self.seconds[-1]:.0f} s"
        lowered = found.fun / found.history.loss[0]
        return f"{work}\n  objective lowered to {lowered:.12e}, relative error of m {self.error:.12e}"


def draw_picture(path, ground, fields, descents, values):
    """Write slices and sections of the true field, the one found and its deviation, and how it was found."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [f"{field} {row}" for row in range(3) for field in fields]
    layout = [[*panels[:3], "objective"], [*panels[3:6], "objective"], [*panels[6:], "eigenvalues"]]
    figure, axes = pyplot.subplot_mosaic(layout, figsize=(18, 12), layout="constrained", height_ratios=(2, 3, 3))
    shape, names = ground.model.shape, ("depth", "north", "east")
    for row, (axis, part) in enumerate(((1, 0.5), (0, 0.38), (0, 0.6))):
        cut = int(part * shape[axis])
        down, along = (k for k in range(3) if k != axis)
        extent = (0, shape[along] * CELL, shape[down] * CELL, 0)
        for title, (field, colours, low, high) in fields.items():
            panel, section = axes[f"{title} {row}"], numpy.take(field, cut, axis)
            image = panel.imshow(section, colours, vmin=low, vmax=high, extent=extent)
            label = f"{title}, {names[axis]} {cut * CELL:.1f} km"
            panel.set(title=label, xlabel=f"{names[along]}, km", ylabel=f"{names[down]}, km")
            panel.yaxis.set_major_locator(pyplot.MultipleLocator(0.5))
            figure.colorbar(image, ax=panel, shrink=0.9)
    for places, marker, label in ((ground.shots, "k*", "shots"), (ground.receivers, "kv", "receivers")):
        axes["true 0"].plot(places[:, 2], places[:, 0], marker, markersize=4, label=label)
    axes["true 0"].legend(loc="lower center", ncols=2, fontsize="x-small")
    for descent in descents:
        label = f"{descent.name}: relative error {descent.error:.2f}"
        losses = numpy.array(descent.result.history.loss) / ground.expected
        axes["objective"].semilogy(descent.seconds, losses, ".-", label=label)
    axes["objective"].axhline(1, color="0.5", linestyle=":", label="noise alone")
    axes["objective"].set(title="objective / misfit by noise alone", xlabel="s of processor time of a rank")
    axes["objective"].legend(loc="upper right")
    axes["eigenvalues"].semilogy(1 + numpy.arange(len(values)), values, ".-")
    axes["eigenvalues"].set(title="eigenvalues of the data's Hessian", xlabel="number")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main():
    options = parser.parse_args()
    began, root = time.perf_counter(), mpiad.mpi_rank() == 0

    def tell(text):
        if options.progress and root:
            print(f"{time.perf_counter() - began:6.1f} s: {text}", file=sys.stderr, flush=True)

    ground = Ground(options)
    model, prior = ground.model, ground.prior
    tell("measured")
    newton = {"product": "gauss-newton", "regularizer": prior, "inner_product": prior, "grtol": 1e-3}
    newton |= {"maxiter": options.iterations[0], "maxcg": options.products}
    quasi = {"maxiter": options.iterations[1], "ftol": 0.0, "gtol": 0.0}
    descents = [
        Descent(ground, "Gauss-Newton", ground.residuals, "Newton-CG-sharded", newton, options.progress),
        Descent(ground, "L-BFGS", ground.objective, "L-BFGS-sharded", quasi, options.progress),
    ]
    found = descents[0].result
    tell("found in both ways")
    kept = mpiad.linearize(ground.residuals)(found.x)
    posterior = laplace_approximation(lambda v: kept.vjp(kept.jvp(v)), found.x, prior, options.pairs, tol=1e-2)
    deviation = numpy.sqrt(posterior.variance)
    least, mean = model.min(deviation), model.mean(deviation)
    tell("its uncertainty, too")
    shown = ("true", ground.truth), ("found", found.x), ("deviation", deviation)
    fields = {name: model.gather(field) for name, field in shown}
    if not root:
        return
    cells, runs = " x ".join(map(str, model.shape)), f"{len(ground.sources)} runs of {options.steps} steps"
    print(f"{cells} cells on {mpiad.mpi_size()} ranks in {ground.groups.count} groups, {runs}")
    print(*descents, sep="\n")
    noise = ground.expected
    print(f"noise alone leaves {noise / found.history.loss[0]:.6f} of the objective")
    after = f"{mean:.6f} on average, {least:.6f} at the least"
    print(f"deviation of m: {DEVIATION} before; with {len(posterior.values)} eigenpairs {after}")
    tell("done")
    if options.picture:
        bounds = {"true": ("RdBu_r", -0.15, 0.15), "found": ("RdBu_r", -0.15, 0.15)}
        bounds["deviation"] = "magma", fields["deviation"].min() // 0.01 * 0.01, DEVIATION
        draw_picture(options.picture, ground, {k: (fields[k], *bounds[k]) for k in fields}, descents, posterior.values)
        print(f"written: {options.picture}")
    left = (found.fun - noise) / (found.history.loss[0] - noise)
    if not left <= options.least:
        raise SystemExit(f"not found: {left:.3f} of the first objective is left, but for the noise")


if __name__ == "__main__":
    main()
