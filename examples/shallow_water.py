"""Find the state in which a flow began from a few gauges that were read later: 4D-Var with the shallow-water equations.

    mpiexec -n 4 python examples/shallow_water.py
    mpiexec -n 4 python examples/shallow_water.py --picture shallow_water.png --animation shallow_water.gif

A layer of fluid on a rotating, doubly periodic plane obeys

    h_t + ∇·(h u) = 0,   u_t + (f + ζ) k × u + ∇(g h + |u|²/2) = -f k × W + ν Δu,   ζ the curl of u,

where the slope that balances the mean wind W is part of the equations. Highs and lows drift with the wind over gauges at
scattered points, which are read every few hours, with noise. Sought is the height h0 at the start; the wind there is W and
what is in balance with h0. A guess (the background) has the highs and lows in wrong places. The most probable start is
h0 = guess + S w for the white noise w that minimises

    J(w) = Σ (reading - h(gauge, time))² / 2σ² + |w|² / 2,

where S smoothes by steps of diffusion, and so says how errors of the guess are correlated.

The plane is divided among the ranks, and so is w, which stays there (`Domain.minimize`). The balance and the steps,
those in time and those of S, are compiled by `mpiad.jit`, with their reverse passes. Every number of ranks gives the same
answer.
"""

import argparse
from pathlib import Path

import autograd.numpy as np
import numpy

import mpiad
from mpiad.testing import check_grads

parser = argparse.ArgumentParser(description="Recover the initial height of a shallow-water flow (4D-Var).")
parser.add_argument("--cells", type=int, nargs=2, default=(60, 120), help="cells northwards and eastwards, of 50 km")
parser.add_argument("--hours", type=int, default=18, help="length of the window; the gauges are read every third hour")
parser.add_argument("--iterations", type=int, default=40, help="L-BFGS stops here at the latest")
parser.add_argument("--interpreted", action="store_true", help="don't compile")
parser.add_argument("--picture", type=Path, help="draw truth, guess, analysis and error into this file")
parser.add_argument("--animation", type=Path, help="write the window, true and found, into this GIF")
parser.add_argument("--progress", action="store_true", help="tell how far the minimisation is")
parser.add_argument("--least", type=float, default=3.0, help="fail if the guess's error isn't lowered by this factor")

# Metres and seconds: gravity, mean depth, Coriolis parameter, mean wind, viscosity.
GRAVITY, DEPTH, CORIOLIS, WIND, VISCOSITY = 9.81, 400.0, 1e-4, 20.0, 1e5
CELL, STEP, STEPS_OF_A_READING = 5e4, 360.0, 30
GAUGES, NOISE, SEED = 60, 1.0, 7
SPREAD, SMOOTHING, WEIGHT = 15.0, 24, 0.2  # standard deviation of the guess in metres; steps of diffusion, their number
# North and east in parts of the plane, height and radius in metres; how far the guess has moved them, and a factor.
EDDIES = [(0.30, 0.20, 55.0, 4.5e5), (0.65, 0.38, -60.0, 4.0e5), (0.35, 0.62, -45.0, 5.0e5), (0.70, 0.82, 50.0, 4.5e5)]
ERRORS = [(0.06, -0.03, 0.8), (-0.05, 0.03, 0.8), (0.05, 0.035, 1.2), (-0.06, -0.02, 0.75)]


def mean(a, axis):
    """Return the means of neighbours along an axis, one fewer."""
    return (a[1:] + a[:-1]) / 2 if axis == 0 else (a[:, 1:] + a[:, :-1]) / 2


def slope(a, axis):
    """Return the differences of neighbours along an axis, one fewer, over the distance."""
    return (a[1:] - a[:-1]) / CELL if axis == 0 else (a[:, 1:] - a[:, :-1]) / CELL


def curvature(a):
    """Return the Laplacian inside of an array."""
    around = a[2:, 1:-1] + a[:-2, 1:-1] + a[1:-1, 2:] + a[1:-1, :-2]
    return (around - 4 * a[1:-1, 1:-1]) / CELL**2


class Ocean:
    """This rank's block: heights in the cells, winds u and v on the cells' eastern and northern faces."""

    def __init__(self, cells, compiled):
        self.domain = mpiad.Domain(cells, halo=2, periodic=(True, True))
        self.y, self.x = self.domain.coordinates(CELL)
        self.size = tuple(CELL * n for n in cells)
        draw = numpy.random.default_rng(SEED)
        self.gauges = draw.uniform(0, self.size, (GAUGES, 2))
        if compiled:
            self.step, self.balanced = mpiad.jit(self.step), mpiad.jit(self.balanced)
            self.diffused = mpiad.jit(self.diffused)

    def rates(self, h, u, v):
        """Return the rates of change, by the scheme that keeps the energy (Sadourny 1975); one exchange of halos."""
        h, u, v = self.domain.exchange([h, u, v])
        east, north = mean(h, 1) * u[:, :-1], mean(h, 0) * v[:-1]  # fluxes
        spin = (CORIOLIS + slope(v, 1)[:-1] - slope(u, 0)[:, :-1]) / mean(mean(h, 0), 1)  # at the cells' corners
        head = GRAVITY * h[1:-1, 1:-1] + (mean(u**2, 1)[1:-1, :-1] + mean(v**2, 0)[:-1, 1:-1]) / 2
        h_rate = -slope(east, 1)[2:-2, 1:-1] - slope(north, 0)[1:-1, 2:-2]
        u_rate = mean(spin * mean(north, 1), 0)[1:-1, 2:-1] - slope(head, 1)[1:-1, 1:]
        v_rate = -mean(spin * mean(east, 0), 1)[2:-1, 1:-1] - slope(head, 0)[1:, 1:-1] + CORIOLIS * WIND
        friction = [VISCOSITY * curvature(w)[1:-1, 1:-1] for w in (u, v)]
        return h_rate, u_rate + friction[0], v_rate + friction[1]

    def step(self, h, u, v):
        """Return the state one step later: three stages, the last of third order where the equations are linear."""
        start = h, u, v
        for part in (1 / 3, 1 / 2, 1):
            h, u, v = (old + part * STEP * rate for old, rate in zip(start, self.rates(h, u, v)))
        return h, u, v

    def balanced(self, h):
        """Return the state of height h whose wind its slope keeps in balance."""
        around = self.domain.exchange(h)
        u = WIND - GRAVITY / CORIOLIS * mean(mean(slope(around, 0), 0), 1)[1:-1, 2:-1]
        v = GRAVITY / CORIOLIS * mean(mean(slope(around, 1), 0), 1)[2:-1, 1:-1]
        return h, u, v

    def diffused(self, noise):
        """Return what a step of diffusion makes of a field."""
        return noise + WEIGHT * CELL**2 * curvature(self.domain.exchange(noise))[1:-1, 1:-1]

    def smoothed(self, noise):
        """Return what many make of white noise, with the standard deviation SPREAD."""
        for _ in range(SMOOTHING):
            noise = self.diffused(noise)
        # The diffusion has spread each number over a bell of this variance, in cells.
        return SPREAD * numpy.sqrt(4 * numpy.pi * 2 * WEIGHT * SMOOTHING) * noise

    def states(self, h0, count):
        """Yield the heights at the start and after each step."""
        state = self.balanced(h0)
        yield state[0]
        for _ in range(count):
            state = self.step(*state)
            yield state[0]

    def readings(self, h0, count):
        """Return what the gauges show every few hours."""
        at = [h for k, h in enumerate(self.states(h0, count)) if k and k % STEPS_OF_A_READING == 0]
        return self.domain.interpolate(np.stack(at), self.gauges, CELL)

    def eddies(self, changes):
        """Return the height of highs and lows, moved and changed."""
        total = numpy.full(self.domain.local_shape, DEPTH)
        for (north, east, height, radius), (by_north, by_east, factor) in zip(EDDIES, changes):
            away = [
                (along - part * length + length / 2) % length - length / 2
                for along, part, length in zip((self.y, self.x), (north + by_north, east + by_east), self.size)
            ]
            total = total + factor * height * numpy.exp(-(away[0] ** 2 + away[1] ** 2) / radius**2)
        return total


def block_borders(domain):
    """Return where the ranks' blocks meet, in cells along each dimension."""
    starts = mpiad.mpi_allgather(numpy.array([cells.start for cells in domain.owned]), comm=domain.comm)
    return [numpy.unique(along)[1:] for along in starts.T]


def drawn(axis, field, ocean, borders, title, bound=70.0):
    """Draw a field, the gauges (dots) and the borders of the blocks; return the image."""
    north, east = (length / 1e3 for length in ocean.size)
    image = axis.imshow(field, "RdBu_r", vmin=-bound, vmax=bound, origin="lower", extent=(0, east, 0, north))
    for lines, places, end in zip((axis.hlines, axis.vlines), borders, (east, north)):
        lines(places * CELL / 1e3, 0, end, colors="0.5", linewidths=0.7, linestyles="--")
    axis.plot(ocean.gauges[:, 1] / 1e3, ocean.gauges[:, 0] / 1e3, "k.", markersize=2)
    axis.set(title=title, xlabel="km", xticks=[0, east / 2, east], yticks=[0, north / 2, north])
    return image


def draw_picture(path, ocean, borders, truth, guess, found):
    """Write the picture of the start: the truth, the guess, the analysis, and what is wrong with it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.6), layout="constrained")
    axes = figure.subplots(2, 2)
    parts = [(truth - DEPTH, "truth"), (guess - DEPTH, "guess"), (found - DEPTH, "analysis"), (found - truth, "error")]
    for axis, (field, title) in zip(axes.flat, parts):
        image = drawn(axis, field, ocean, borders, f"{title} at the start")
    figure.colorbar(image, ax=axes, label="height above the mean depth, in metres", shrink=0.7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def write_animation(path, ocean, borders, frames):
    """Write the window as a GIF: the truth above, the analysis below."""
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6.4), layout="constrained")
    axes = figure.subplots(2, 1)
    images = [drawn(axis, frames[0][0] - DEPTH, ocean, borders, "") for axis in axes]

    def show(k):
        for axis, image, field, title in zip(axes, images, frames[k], ("truth", "analysis")):
            image.set_data(field - DEPTH)
            axis.set_title(f"{title} after {k * STEPS_OF_A_READING // 3 * STEP / 3600:.0f} hours")
        return images

    path.parent.mkdir(parents=True, exist_ok=True)
    FuncAnimation(figure, show, frames=len(frames)).save(path, writer=PillowWriter(fps=4))


def main():
    options = parser.parse_args()
    ocean = Ocean(tuple(options.cells), not options.interpreted)
    domain, count = ocean.domain, int(options.hours * 3600 / STEP)
    truth, guess = ocean.eddies([(0, 0, 1)] * len(EDDIES)), ocean.eddies(ERRORS)
    read = ocean.readings(truth, count)
    read = read + NOISE * numpy.random.default_rng(SEED + 1).standard_normal(read.shape)

    def objective(noise):
        shown = ocean.readings(guess + ocean.smoothed(noise), count)
        return np.sum((shown - read) ** 2) / (2 * NOISE**2) + domain.dot(noise, noise) / 2

    zero = numpy.zeros(domain.local_shape)
    # Raises where the remainder of the first-order Taylor expansion doesn't shrink with the square of the step.
    check_grads(objective, zero, order=1, modes=("rev",))
    limits = {"maxiter": options.iterations, "ftol": 0, "gtol": 1e-4}
    result = domain.minimize(objective, zero, options=limits, progress=options.progress)
    found = guess + ocean.smoothed(result.x)
    before, after = (domain.norm(h - truth) / domain.norm(truth - DEPTH) for h in (guess, found))

    root, borders = mpiad.mpi_rank() == 0, block_borders(domain)
    fields = [domain.gather(h) for h in (truth, guess, found)]
    frames = []
    if options.animation:  # all ranks take the steps, and the root gets the fields
        pairs = zip(ocean.states(truth, count), ocean.states(found, count))
        frames = [[domain.gather(h) for h in pair] for k, pair in enumerate(pairs) if k % (STEPS_OF_A_READING // 3) == 0]
    if root:
        print(f"{domain.shape[0]} x {domain.shape[1]} cells, {count} steps, {read.size} readings of {GAUGES} gauges")
        print(f"{result.nit} iterations: J from {result.history.loss[0]:.6g} to {result.fun:.6g}")
        print(f"relative error of the start: guess {before:.4f}, analysis {after:.4f}")
        if options.picture:
            draw_picture(options.picture, ocean, borders, *fields)
            print(f"written: {options.picture}")
        if options.animation:
            write_animation(options.animation, ocean, borders, frames)
            print(f"written: {options.animation}")
    if not after * options.least <= before:
        raise SystemExit(f"not recovered: the error, {after:.3f}, isn't {options.least:g} times smaller than {before:.3f}")


if __name__ == "__main__":
    main()
