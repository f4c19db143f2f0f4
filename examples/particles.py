"""Choose the initial positions of electrons so that a plasma wave has a given shape later, by a particle-in-cell code.

    mpiexec -n 4 python examples/particles.py

Electrons, as particles of charge -1, move in a fixed background of positive charge on the circle [0, 2π), in units in which
the plasma frequency is 1. In each step,

1. particles move to the rank that owns their cell (`mpi_alltoall`),
2. each deposits its charge on the two nodes of its cell (`segment_sum`), of which the last one of a block belongs to the
   next rank (`GhostExchange.accumulate`),
3. Gauss's law dE/dx = 1 - n, with the density n of the electrons, gives the field E by a prefix sum (`mpi_exscan`),
4. the field at the nodes (`GhostExchange.fetch`), interpolated to the particles, accelerates them.

First a small sinusoidal displacement is released, and the frequency of the field's energy is compared with the theory. Then
the initial displacements are computed with which the density has a given shape after some time. Every number of ranks gives
the same answer but for rounding. `--picture FILE` draws it.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy

import mpiad

parser = argparse.ArgumentParser(description="Control a plasma wave by its initial state.")
parser.add_argument("--cells", type=int, default=64)
parser.add_argument("--per-cell", type=int, default=20, help="particles per cell")
parser.add_argument("--steps", type=int, default=30, help="steps until the density is given")
parser.add_argument("--iterations", type=int, default=40, help="maximum number of L-BFGS iterations")
parser.add_argument("--picture", type=Path, help="draw the densities into this file")
parser.add_argument("--most", type=float, default=0.05, help="fail if the remaining misfit of the density is larger")

LENGTH, STEP = 2 * numpy.pi, 0.1


class Plasma:
    """Electrons on a circle whose cells are divided among the ranks."""

    def __init__(self, cells, per_cell):
        rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
        self.size, self.cells, self.spacing = size, cells, LENGTH / cells
        self.starts = numpy.linspace(0, cells, size + 1).astype(int)  # of the ranks' blocks
        self.start, self.stop = self.starts[rank : rank + 2]
        self.nodes = numpy.arange(self.start, self.stop + 1)
        self.ghosts = mpiad.GhostExchange(self.nodes % cells, (self.start, self.stop))
        self.charge = LENGTH / (cells * per_cell)  # of a particle, for a mean density of 1
        # The rest positions of this rank's particles, all of which stay the variables of the rank on which they started.
        self.rest = (numpy.arange(self.start * per_cell, self.stop * per_cell) + 0.5) * self.charge

    def moved(self, particles):
        """Return the particles, rows (x, v), in this rank's cells."""
        cell = numpy.floor(mpiad.stop_gradient(particles[:, 0]) / self.spacing).astype(int) % self.cells
        owner = numpy.searchsorted(self.starts, cell, side="right") - 1
        order, counts = numpy.argsort(owner, kind="stable"), numpy.bincount(owner, minlength=self.size)
        return mpiad.mpi_alltoall(particles[order], counts)

    def weights(self, particles):
        """Return the left node of each particle's cell, counted in this block, and the particle's place in the cell."""
        place = particles[:, 0] / self.spacing
        left = numpy.floor(mpiad.stop_gradient(place))
        return left.astype(int) % self.cells - self.start, place - left

    def density(self, particles):
        """Return the electrons' density at this rank's nodes."""
        left, place = self.weights(particles)
        parts, nodes = np.concatenate([1 - place, place]), numpy.concatenate([left, left + 1])
        sums = mpiad.segment_sum(parts, nodes, len(self.nodes))
        return self.ghosts.accumulate(sums) * (self.charge / self.spacing)

    def field(self, density):
        """Return the electric field at this rank's nodes, with mean zero over all."""
        charges = (1 - density) * self.spacing
        before = mpiad.mpi_exscan(np.sum(charges))
        field = before + np.cumsum(charges) - charges / 2
        return field - mpiad.mpi_allreduce(np.sum(field)) / self.cells

    def step(self, particles):
        """Return the particles after a step of the leapfrog method, with positions between the velocities' times."""
        particles = self.moved(particles + STEP / 2 * np.stack([particles[:, 1], 0 * particles[:, 1]], axis=1))
        field = self.ghosts.fetch(self.field(self.density(particles)))
        left, place = self.weights(particles)
        v = particles[:, 1] - STEP * ((1 - place) * field[left] + place * field[left + 1])
        return np.stack([particles[:, 0] + STEP / 2 * v, v], axis=1)

    def after(self, displacement, steps):
        """Return the particles that start at rest, with this displacement, after some steps."""
        particles = np.stack([self.rest + displacement, 0 * displacement], axis=1)
        for _ in range(steps):
            particles = self.step(particles)
        return self.moved(particles)

    def total(self, x):
        return mpiad.mpi_allreduce(np.sum(x))


def frequency(plasma):
    """Return the frequency of a small wave, from the first two zeros of the field's amplitude."""
    amplitudes, particles = [], numpy.stack([plasma.rest + 0.01 * numpy.sin(plasma.rest), 0 * plasma.rest], axis=1)
    for _ in range(50):
        field = plasma.field(plasma.density(plasma.moved(particles)))
        amplitudes.append(plasma.total(field * numpy.sin(plasma.nodes[:-1] * plasma.spacing)))
        particles = plasma.step(particles)
    amplitudes = numpy.array(amplitudes)
    at = numpy.flatnonzero(amplitudes[:-1] * amplitudes[1:] < 0)
    zeros = STEP * (at + amplitudes[at] / (amplitudes[at] - amplitudes[at + 1]))
    return numpy.pi / (zeros[1] - zeros[0])


def main():
    options = parser.parse_args()
    root = mpiad.mpi_rank() == 0
    plasma = Plasma(options.cells, options.per_cell)
    x = plasma.nodes[:-1] * plasma.spacing
    target = 1 + 0.3 * numpy.cos(x) + 0.15 * numpy.sin(2 * x)
    measured = frequency(plasma)

    def misfit(displacement):
        density = plasma.density(plasma.after(displacement, options.steps))
        return plasma.total((density - target) ** 2) / plasma.total((target - 1) ** 2)

    def objective(displacement):
        return misfit(displacement) + 1e-4 * plasma.total(displacement**2) * plasma.charge

    # The gradient in a direction, compared with a central difference.
    rest, direction = 0.05 * numpy.sin(plasma.rest), numpy.cos(3 * plasma.rest)
    slope = plasma.total(mpiad.grad(objective)(rest) * direction)
    change = (objective(rest + 1e-7 * direction) - objective(rest - 1e-7 * direction)) / 2e-7
    result = mpiad.minimize(
        objective, 0 * plasma.rest, method="L-BFGS-sharded", options={"maxiter": options.iterations}, progress=True
    )
    found = plasma.density(plasma.after(result.x, options.steps))
    remaining, densities = misfit(result.x), [mpiad.mpi_gather(field, axis=0) for field in (x, target, found)]
    start = mpiad.mpi_gather(plasma.density(plasma.after(result.x, 0)), axis=0)
    if not root:
        return
    print(f"{options.cells} cells, {options.cells * options.per_cell} particles, {options.steps} steps")
    print(f"frequency of a small wave: {measured:.12e} (theory: 1)")
    print(f"derivative {slope:.6e}, by a central difference {change:.6e}")
    print(f"{result.nit} iterations: remaining misfit {remaining:.12e}")
    if options.picture:
        draw_picture(options.picture, *densities, start)
        print(f"written: {options.picture}")
    # The error of the frequency is of second order in the width of the cells.
    is_close = abs(measured - 1) < 0.15 * plasma.spacing**2 and abs(slope - change) < 1e-4 * abs(slope)
    if not is_close or not remaining <= options.most:
        raise SystemExit(f"wrong: the frequency, the derivative, or the misfit, which should be at most {options.most}")


def draw_picture(path, x, target, found, start):
    """Draw the densities at the start and at the end, and the given one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(x, start, "0.6", label="at the start, computed")
    axis.plot(x, found, "C0", label="at the end")
    axis.plot(x, target, "k--", label="given at the end")
    axis.set(xlabel="x", ylabel="density of electrons")
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main()
