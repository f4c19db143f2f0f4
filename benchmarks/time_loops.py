"""Time loops with compiled steps, as a user writes them, beside the same programs in NumPy and mpi4py.

    mpiexec -n 2 python benchmarks/time_loops.py [--programs heat fdtd bodies] [--cells 20 400] [--rounds 15]

Heat by rows, with nonblocking messages of single rows; Maxwell's equations (finite differences in time), with sources as
`inputs` and a receiver as `observe`; gravity between bodies, whose blocks travel through half a ring. Each is a `scan` of a
lambda around a jitted step. The gradients are exact, and those with 4 checkpoints must be equal to those without. All ways
alternate, and the smallest time of the slowest rank counts.

`repeated` is the number of steps that a gradient with checkpoints runs in addition, divided by the number of all steps. Its
time is compared with the time of the gradient plus `repeated` times that of the forward run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import autograd.numpy as np
import numpy
from mpi4py import MPI
from reaches import report
from timing import seconds_of

import mpiad
from mpiad.timestepping import scan
from mpiad.timestepping.checkpoints import runs, schedule_of

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
BEFORE = RANK - 1 if RANK else MPI.PROC_NULL
AFTER = RANK + 1 if RANK < SIZE - 1 else MPI.PROC_NULL
CHECKPOINTS = 4
AIMS = {  # forward and gradient, both divided by the forward run in NumPy and mpi4py
    "heat 20": (0.45, 1.3),
    "bodies 20": (0.3, 0.8),
    "fdtd 20": (0.8, 2.5),
    "heat 400": (0.16, None),
    "fdtd 400": (0.45, None),
}
AIM_OF_CHECKPOINTS = 1.1

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--programs", nargs="+", default=["heat", "fdtd", "bodies"])
parser.add_argument("--cells", type=int, nargs="+", default=[20, 400], help="in each direction; 20 bodies")
parser.add_argument("--rounds", type=int, default=15)


class Loop(NamedTuple):
    """A program: its variable on this rank, its number of steps, the sum over ranks in mpi4py, and this rank's term."""

    start: Any
    steps: int
    plain: Callable[[Any], float]
    term: Callable[[int | None], Callable[[Any], Any]]  # for a number of checkpoints


def rows_of(cells: int) -> tuple[int, int]:
    """Return the first row of this rank's block, and the one behind the last."""
    return cells * RANK // SIZE, cells * (RANK + 1) // SIZE


def heat(cells: int) -> Loop:
    """Return an explicit step of the heat equation with fixed values at the ends."""
    steps, down, right = 50, 0.25, 0.15
    low, high = rows_of(cells)
    target = numpy.random.default_rng(1).random((cells, cells))[low:high]

    @mpiad.jit
    def step(u, first, last):
        requests = [
            mpiad.mpi_irecv(u[0], BEFORE),
            mpiad.mpi_isend(u[-1], AFTER),
            mpiad.mpi_irecv(u[0], AFTER),
            mpiad.mpi_isend(u[0], BEFORE),
        ]
        inner = u[:, 1:-1] * (1 - 2 * (down + right))
        above, _, below, _ = mpiad.mpi_waitall(requests)
        above, below = (first if BEFORE == MPI.PROC_NULL else above), (last if AFTER == MPI.PROC_NULL else below)
        f = np.concatenate([above[None], u, below[None]])
        inner = inner + down * (f[2:, 1:-1] + f[:-2, 1:-1]) + right * (f[1:-1, 2:] + f[1:-1, :-2])
        return np.concatenate([u[:, :1], inner, u[:, -1:]], axis=1)

    def term(checkpoints):
        def misfit(u):
            u = scan(lambda u, k, first, last: step(u, first, last), u, steps, u[0], u[-1], checkpoints=checkpoints)
            return np.sum(np.tanh(u - target) ** 2)

        return misfit

    def plain(u):
        f = numpy.empty((high - low + 2, cells))
        f[1:-1], f[0], f[-1] = u, u[0], u[-1]
        g = f.copy()
        for _ in range(steps):
            last, first = g[-2].copy(), g[1].copy()
            requests = [COMM.Irecv(g[0], BEFORE), COMM.Isend(last, AFTER)]
            requests += [COMM.Irecv(g[-1], AFTER), COMM.Isend(first, BEFORE)]
            f[1:-1, 1:-1] = g[1:-1, 1:-1] * (1 - 2 * (down + right))
            MPI.Request.Waitall(requests)
            f[1:-1, 1:-1] += down * (g[2:, 1:-1] + g[:-2, 1:-1]) + right * (g[1:-1, 2:] + g[1:-1, :-2])
            g[1:-1] = f[1:-1]
        return COMM.allreduce(numpy.sum(numpy.tanh(g[1:-1] - target) ** 2))

    return Loop(numpy.random.default_rng(0).random((cells, cells))[low:high], steps, plain, term)


def fdtd(cells: int) -> Loop:
    """Return Yee's scheme in two dimensions (TMz) between conducting walls; the variable is the permittivity."""
    steps, courant = 40, 0.5
    low, high = rows_of(cells)
    rows, source, receiver = high - low, (cells // 4, cells // 2), (3 * cells // 4, cells // 3)
    inputs = numpy.zeros((steps, rows, cells))
    if low <= source[0] < high:
        inputs[:, source[0] - low, source[1]] = numpy.exp(-(((numpy.arange(steps) - 8) / 4.0) ** 2))
    inside = numpy.zeros((cells, cells))
    inside[1:-1, 1:-1] = 1.0
    inside = inside[low:high]
    weights = numpy.arange(1.0, steps + 1)

    @mpiad.jit
    def step(state, inputs, permittivity):
        e, hx, hy = state
        hx = hx - courant * (e[:, 1:] - e[:, :-1])
        after = mpiad.mpi_exchange(e[0], dest=BEFORE, source=AFTER)
        hy = hy + courant * (np.concatenate([e[1:], after[None]]) - e)
        before = mpiad.mpi_exchange(hy[-1], dest=AFTER, source=BEFORE)
        across = np.pad(hx[:, 1:] - hx[:, :-1], ((0, 0), (1, 1)))
        curl = hy - np.concatenate([before[None], hy[:-1]]) - across
        return inside * (e + courant / permittivity * curl) + inputs, hx, hy

    def received(e):
        return e[receiver[0] - low, receiver[1]] if low <= receiver[0] < high else 0.0 * e[0, 0]

    def at_rest():
        return numpy.zeros((rows, cells)), numpy.zeros((rows, cells - 1)), numpy.zeros((rows, cells))

    def term(checkpoints):
        def misfit(m):
            (e, *_), seen = scan(
                lambda state, k, inputs, permittivity: step(state, inputs, permittivity),
                at_rest(),
                steps,
                1 + m**2,
                inputs=inputs,
                observe=lambda state, k, permittivity: received(state[0]),
                checkpoints=checkpoints,
            )
            return np.sum(seen**2 * weights) + 0.1 * np.sum(e**2)

        return misfit

    def plain(m):
        (e, hx, hy), permittivity, total = at_rest(), 1 + m**2, 0.0
        after, before = numpy.zeros(cells), numpy.zeros(cells)
        for k in range(steps):
            hx -= courant * (e[:, 1:] - e[:, :-1])
            COMM.Sendrecv(e[0], BEFORE, recvbuf=after, source=AFTER)
            hy[:-1] += courant * (e[1:] - e[:-1])
            hy[-1] += courant * (after - e[-1])
            COMM.Sendrecv(hy[-1], AFTER, recvbuf=before, source=BEFORE)
            curl = hy.copy()
            curl[1:] -= hy[:-1]
            curl[0] -= before
            curl[:, 1:-1] -= hx[:, 1:] - hx[:, :-1]
            e = inside * (e + courant / permittivity * curl) + inputs[k]
            total += received(e) ** 2 * (k + 1)
        return COMM.allreduce(total + 0.1 * numpy.sum(e**2))

    return Loop(0.1 + numpy.random.default_rng(0).random((cells, cells))[low:high], steps, plain, term)


def bodies(count: int) -> Loop:
    """Return the leapfrog of bodies that attract each other; blocks of bodies travel through half of a ring of ranks."""
    steps, dt, softening = 10, 0.02, 0.05
    first = [count * rank // SIZE for rank in range(SIZE + 1)]
    masses = [numpy.random.default_rng(3).random(count)[first[r] : first[r + 1], None] + 0.5 for r in range(SIZE)]
    after, before, half = (RANK + 1) % SIZE, (RANK - 1) % SIZE, (SIZE - 1) // 2

    def pull(x, other):
        d = other[None] - x[:, None]
        return d / (np.sum(d**2, axis=2) + softening)[..., None] ** 1.5

    def acceleration(x, exchange):
        result = np.sum(pull(x, x) * masses[RANK], axis=1)
        other, collected = x, np.zeros_like(x)
        for k in range(1, half + 1):
            source = masses[RANK - k]
            template = numpy.zeros((len(source), 3))
            other = exchange(other, after, before, template, 1)
            collected = exchange(collected, after, before, template, 2)
            f = pull(x, other)
            result = result + np.sum(f * source, axis=1)
            collected = collected - np.sum(f * masses[RANK][:, None], axis=0)
        if SIZE % 2 == 0:
            source = masses[RANK - half - 1]
            other = exchange(other, after, before, numpy.zeros((len(source), 3)), 3)
            result = result + np.sum(pull(x, other) * source, axis=1)
        if half:
            result = result + exchange(collected, (RANK - half) % SIZE, (RANK + half) % SIZE, x, 4)
        return result

    def leapfrog(x, v, exchange):
        v = v + 0.5 * dt * acceleration(x, exchange)
        x = x + dt * v
        return x, v + 0.5 * dt * acceleration(x, exchange)

    def sendrecv(x, dest, source, like, tag):
        received = numpy.empty(like.shape)
        COMM.Sendrecv(numpy.ascontiguousarray(x), dest, tag, received, source, tag)
        return received

    def energy(x, v):
        return np.sum(np.tanh(x)) + 0.5 * np.sum(masses[RANK] * v**2)

    def exchange(x, dest, source, like, tag):
        return mpiad.mpi_exchange(x, dest=dest, source=source, like=like, tag=tag)

    @mpiad.jit
    def step(x, v):
        return leapfrog(x, v, exchange)

    def term(checkpoints):
        return lambda x: energy(*scan(lambda state, k: step(*state), (x, 0.1 * np.sin(x)), steps, checkpoints=checkpoints))

    def plain(x):
        v = 0.1 * numpy.sin(x)
        for _ in range(steps):
            x, v = leapfrog(x, v, sendrecv)
        return COMM.allreduce(energy(x, v))

    start = numpy.random.default_rng(0).standard_normal((count, 3))[first[RANK] : first[RANK + 1]]
    return Loop(start, steps, plain, term)


def compare(name: str, loop: Loop, rounds: int) -> None:
    """Time all ways of a program, and print and report its ratios."""
    gradients = [mpiad.value_and_grad(loop.term(count), objective="sum") for count in (None, CHECKPOINTS)]
    forward, total = loop.term(None), mpiad.mpi_allreduce
    ways = {
        "NumPy and mpi4py": lambda: loop.plain(loop.start),
        "forward": lambda: total(forward(loop.start)),
        "gradient": lambda: gradients[0](loop.start),
        "gradient, 4 checkpoints": lambda: gradients[1](loop.start),
    }
    found, slopes = zip(*[way(loop.start) for way in gradients])
    values = np.array([ways["NumPy and mpi4py"](), ways["forward"](), *found])
    numpy.testing.assert_allclose(values, values[0], rtol=1e-11)
    numpy.testing.assert_allclose(slopes[1], slopes[0], rtol=0, atol=1e-12 * abs(slopes[0]).max())
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for way, call in ways.items():
            best[way] = min(best[way], seconds_of(call, 3))
    if RANK:
        return
    plain, ahead, gradient, checkpointed = best.values()
    again = runs(loop.steps, schedule_of(CHECKPOINTS, loop.steps)) / loop.steps
    over = checkpointed / (gradient + again * ahead)
    print(", ".join(f"{way} {1e3 * took:.2f} ms" for way, took in best.items()))
    print(f"{name}: forward {ahead / plain:.2f}, gradient {gradient / plain:.2f}; {again:.2f} repeated: {over:.2f}")
    aims = AIMS.get(name, (None, None)) if SIZE == 2 else (None, None)
    report(f"{name}: forward over NumPy and mpi4py", ahead / plain, at_most=aims[0])
    report(f"{name}: gradient over NumPy's and mpi4py's forward run", gradient / plain, at_most=aims[1])
    report(f"{name}: gradient with 4 checkpoints over gradient and repeated steps", over, at_most=AIM_OF_CHECKPOINTS)


def main() -> None:
    options = parser.parse_args()
    makers = {"heat": heat, "fdtd": fdtd, "bodies": bodies}
    for program in options.programs:
        for cells in options.cells if program != "bodies" else [20]:
            compare(f"{program} {cells}", makers[program](cells), options.rounds)


if __name__ == "__main__":
    main()
