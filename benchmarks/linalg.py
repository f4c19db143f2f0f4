"""What the derivative of a distributed solve costs beside the solves themselves, in an inverse Poisson problem.

    mpiexec -n 1 python benchmarks/linalg.py

J = |u(κ) - observed|² with -div(κ grad u) = f, multigrid as preconditioner (`--plain`: none), the gradient by each cell's
κ. The operator is the library's, or written by its user with slices of exchanged blocks. Ratios of one run, of the least of
several times; processor time, so that other work on the machine counts less.

    gradient / loss        value and gradient over the value alone; at most 2.3
    beside the solves      the part of an evaluation that is spent neither in the two iterations nor in the set-up of the
                           preconditioner: the tape, and the operator and its adjoint at the solution; at most 10 %
    default threads        a solve of 256² without derivative in a program of its own, started with the defaults of a shell,
                           over the same with one thread of BLAS; at most 1.2. One rank only. Here wall time counts too: the
                           threads of two libraries that wait for each other take little processor time
"""

import argparse
import functools
import importlib
import itertools
import os
import subprocess
import sys
import time

import autograd.numpy as np
import numpy
from reaches import report

import mpiad
import mpiad.linalg
import mpiad.linalg.solve

GRADIENT, BESIDE, THREADS = 2.3, 10.0, 1.2
# What limits BLAS, and what launchers leave: programs that are started from here are neither limited nor ranks.
LIMITS = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"
OF_THE_LAUNCHER = "PMI_", "PMIX_", "HYDRA_", "HYDI_", "MPI_LOCAL", "OMPI_", "OPAL_", "PRTE_"

parser = argparse.ArgumentParser(description="Time the derivative of a distributed solve.")
parser.add_argument("--cells", type=int, nargs="+", default=(64, 256, 512))
parser.add_argument("--plain", action="store_true", help="without a preconditioner")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--once", action="store_true", help="print the times of one solve of 256², and end")


class Clock:
    """Adds up the time that is spent in functions."""

    def __init__(self):
        self.total = 0.0

    def timed(self, fun):
        def run(*args, **kwargs):
            start = time.process_time()
            try:
                return fun(*args, **kwargs)
            finally:
                self.total += time.process_time() - start

        return run


def sliced(domain, spacing):
    """Return the operator as a user writes it; u = 0 half a cell beyond the last ones."""

    def weights(axis):
        owned, n = domain.owned[axis], domain.shape[axis]
        found = numpy.full(owned.stop - owned.start + 1, 0.5 / spacing**2)
        found[0] *= 1 + (owned.start == 0)
        found[-1] *= 1 + (owned.stop == n)
        return found[:, None] if axis == 0 else found

    across = weights(0), weights(1)

    def operator(u, kappa):
        v, k = domain.exchange(u), domain.exchange(kappa, "edge")
        down = across[0] * (k[1:, 1:-1] + k[:-1, 1:-1]) * (v[1:, 1:-1] - v[:-1, 1:-1])
        right = across[1] * (k[1:-1, 1:] + k[1:-1, :-1]) * (v[1:-1, 1:] - v[1:-1, :-1])
        return down[:-1] - down[1:] + right[:, :-1] - right[:, 1:]

    return operator


def problem(cells, own, plain, clock):
    """Return the loss of κ, and a κ to take it at."""
    domain, cell = mpiad.Domain((cells, cells)), {"spacing": 1.0 / cells, "centred": True}
    operator = sliced(domain, 1.0 / cells) if own else mpiad.linalg.Elliptic(domain, **cell)
    y, x = domain.coordinates(extent=1.0, centred=True)
    f, observed = 1.0 + 0 * x * y, 0.05 * numpy.sin(numpy.pi * x) * numpy.sin(numpy.pi * y)
    prepare = clock.timed(lambda kappa: None if plain else mpiad.linalg.Multigrid(domain, kappa, **cell))

    def loss(kappa):
        levels = prepare(mpiad.stop_gradient(kappa))
        u = mpiad.linalg.solve(operator, f, kappa, preconditioner=levels)
        return domain.sum((u - observed) ** 2)

    return loss, np.exp(numpy.sin(6 * x) * numpy.cos(5 * y))


def least(rounds, fun, clock):
    """Return the least time of a call, and the part of it that the clock counted."""
    found = []
    for _ in range(rounds):
        clock.total, start = 0.0, time.process_time()
        fun()
        found.append((time.process_time() - start, clock.total))
    return min(found)


def solve_once(rounds):
    """Print the least wall time and processor time of a solve of 256²."""
    loss, kappa = problem(256, False, False, Clock())
    loss(kappa)
    found = []
    for _ in range(4 * rounds):
        start = time.perf_counter(), time.process_time()
        loss(kappa)
        found.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    print(*numpy.min(found, axis=0))


def default_threads(rounds):
    """Compare solves with the defaults of a fresh shell with those on one thread, in programs that take turns."""
    plain = {k: v for k, v in os.environ.items() if k not in LIMITS and not k.startswith(OF_THE_LAUNCHER)}
    sides = {"default": plain, "one": {**plain, **dict.fromkeys(LIMITS, "1")}}
    found = {side: [] for side in sides}
    for _, (side, environment) in itertools.product(range(rounds), sides.items()):
        command = [sys.executable, __file__, "--once", "--rounds", str(rounds)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found[side].append([float(number) for number in done.stdout.split()])
    for k, clock in enumerate(("wall", "processor")):
        default, one = (min(times[k] for times in found[side]) for side in sides)
        print(
            f"256², {clock} time, default threads of BLAS {1e3 * default:.1f} ms, one {1e3 * one:.1f}: {default / one:.2f}"
        )
        report(f"256² solve, default threads of BLAS over one, {clock} time", default / one, at_most=THREADS)


def main():
    options, clock = parser.parse_args(), Clock()
    if options.once:
        return solve_once(options.rounds)
    if mpiad.mpi_size() == 1:
        default_threads(options.rounds)
    module = importlib.import_module("mpiad.linalg.solve")  # the attribute of this name is the function
    module.iterate = clock.timed(module.iterate)
    for cells, own in itertools.product(options.cells, (False, True)):
        loss, kappa = problem(cells, own, options.plain, clock)
        both = mpiad.value_and_grad(loss)
        both(kappa)
        alone, _ = least(options.rounds, functools.partial(loss, kappa), clock)
        total, solves = least(options.rounds, functools.partial(both, kappa), clock)
        if mpiad.mpi_rank() == 0:
            name = f"{cells}², {'slices' if own else 'Elliptic'}, ranks: {mpiad.mpi_size()}"
            beside = 100 * (total - solves) / total
            print(f"{name:28s} loss {alone:.3f} s  gradient / loss {total / alone:.2f}  beside the solves {beside:.1f} %")
            if cells == max(options.cells):  # the reaches are those of large grids
                report(f"gradient / loss of a solve, {name}", total / alone, at_most=GRADIENT)
                report(f"part beside the solves, {name}, %", beside, at_most=BESIDE)


if __name__ == "__main__":
    main()
