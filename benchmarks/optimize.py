"""How far an iteration of the sharded L-BFGS is from what memory allows.

    mpiexec -n 2 python benchmarks/optimize.py [--variables 1000000] [--maxcor 10] [--own]

An iteration must read the 2m + 1 vectors of its memory twice and write a direction: (4m + 3) n doubles. The limit is the
time of that at the bandwidth which BLAS's ddot reaches on all ranks at once, in the same run. An iteration is all from the
function's return with the value of an iterate to its next call: everything but the function. Aimed at: 1.4 times the limit.

On cores that others use too, --own takes the processor's time in place of the clock's: what others take isn't counted.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from reaches import report

import mpiad

WORLD = MPI.COMM_WORLD
REACH = 1.4
CLOCK = [time.perf_counter]


def seconds(run: Callable[[], object], rounds: int = 6) -> float:
    """Return the smallest time of a call, the longest of all ranks."""
    times = []
    for _ in range(rounds):
        WORLD.Barrier()
        start = CLOCK[0]()
        run()
        times.append(WORLD.allreduce(CLOCK[0]() - start, MPI.MAX))
    return min(times)


def bandwidth(size: int, maxcor: int) -> float:
    """Return the bytes per second that ddot reads on one rank while all others read too, from as much memory."""
    size = size * (2 * maxcor + 3) // 2  # shorter vectors might stay in a cache that the solve's memory doesn't fit
    a, b = np.ones(size), np.ones(size)
    return 16.0 * size / seconds(lambda: a @ b)  # NumPy leaves it to ddot


def iterations(size: int, maxcor: int, count: int) -> tuple[float, float]:
    """Return the time of one iteration with a full memory, without the function's, and with it."""
    scale = np.linspace(1.0, 100.0, size)
    calls, returns, buffer, change = [], [], np.empty(size), np.empty(size)

    def fun(x: np.ndarray) -> tuple[float, np.ndarray]:
        calls.append(CLOCK[0]())
        np.multiply(x, scale, out=buffer)
        np.subtract(buffer, 1.0, out=change)
        out = 0.5 * float(buffer @ x) - float(np.sum(x)), change
        returns.append(CLOCK[0]())
        return out

    result = mpiad.minimize(
        fun, np.zeros(size), jac=True, objective="sum", method="L-BFGS-sharded",
        options={"m": maxcor, "gtol": 0.0, "ftol": 0.0, "maxiter": maxcor + 2 + count},
    )  # fmt: skip
    # From where the function returns the value of an iterate to where it is called for the next: an iteration, where one
    # trial was enough.
    ends = result.history.evaluations[maxcor + 1 : -1]
    alone = ends[np.diff(result.history.evaluations)[maxcor + 1 :] == 1]
    own = min(calls[end] - returns[end - 1] for end in alone)
    whole = min(calls[end] - calls[end - 1] for end in alone)
    return WORLD.allreduce(own, MPI.MAX), WORLD.allreduce(whole, MPI.MAX)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--variables", type=int, default=10**6, help="of all ranks together")
    parser.add_argument("--maxcor", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--own", action="store_true", help="processor time in place of the clock's")
    parser.add_argument("--json")
    options = parser.parse_args()
    CLOCK[0] = time.thread_time if options.own else time.perf_counter
    size = options.variables // WORLD.size
    before = bandwidth(size, options.maxcor)
    own, whole = iterations(size, options.maxcor, options.iterations)
    speed = max(before, bandwidth(size, options.maxcor))
    limit = (4 * options.maxcor + 3) * 8.0 * size / speed
    if WORLD.rank == 0:
        print(f"{options.variables} variables on {WORLD.size} ranks, m = {options.maxcor}")
        print(f"  ddot             {speed / 1e9:8.2f} GB/s a rank")
        print(f"  limit            {limit * 1e3:8.2f} ms for an iteration")
        print(f"  iteration        {own * 1e3:8.2f} ms, {own / limit:.2f} of the limit (aim: {REACH})")
        print(f"  and the function {whole * 1e3:8.2f} ms")
        line = f"iteration of the sharded L-BFGS, {options.variables:,} variables, over what memory allows"
        report(line, own / limit, at_most=REACH)
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"limit": limit, "iteration": own, "ratio": own / limit, "aim": REACH}, file)


if __name__ == "__main__":
    main()
