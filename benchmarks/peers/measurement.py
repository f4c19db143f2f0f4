"""Time a step on all ranks, and say what its answer should have been.

Both peer programs import this file, so that they differ only in the library that they drive. A step is one
value and gradient; its time is that of the slowest rank, and the reported time the smallest over the repeats
(whatever else runs on the machine can only add). The expected answers come from the closed forms below,
computed from every rank's seed without any communication.
"""

import json
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

REPEATS = {1: 2000, 1_000: 1000, 100_000: 200, 1_000_000: 60}
WARM_UP = 5


def sample(rank: int, n: int) -> np.ndarray:
    """Draw the input of one rank.

    Parameters
    ----------
    rank : int
        Whose input; any rank can draw any other's.
    n : int
        Number of entries.

    Returns
    -------
    ndarray, shape (n,), float64
    """
    return np.random.default_rng(1000 + rank).standard_normal(n)


def allreduce_answer(rank: int, size: int, n: int, copies: int) -> tuple[float, np.ndarray]:
    """Return the value and gradient of ``sum(allreduce(x**2)**2)/2``.

    With s = Σ_r x_r², one rank's loss is Σ s²/2, and its derivative with respect to x_r is 2 x_r s.

    Parameters
    ----------
    rank, size : int
        The asking rank, and how many ranks take part.
    n : int
        Number of entries on each rank.
    copies : int
        How many ranks' losses the library adds up before it differentiates.

    Returns
    -------
    value : float
        This rank's own loss.
    gradient : ndarray, shape (n,), float64
    """
    total = sum(sample(r, n) ** 2 for r in range(size))
    return 0.5 * float(np.sum(total**2)), copies * 2 * sample(rank, n) * total


def ring_answer(rank: int, size: int, n: int) -> tuple[float, np.ndarray]:
    """Return the value and gradient of ``sum(ring(x)**2)/2``, summed over the ranks.

    A ring shift permutes the ranks, so that the summed loss is Σ_r |x_r|²/2 and its derivative x_r itself.

    Parameters
    ----------
    rank, size : int
        The asking rank, and how many ranks take part.
    n : int
        Number of entries on each rank.

    Returns
    -------
    value : float
        This rank's own loss: that of what came from the rank before.
    gradient : ndarray, shape (n,), float64
    """
    received = sample((rank - 1) % size, n)
    return 0.5 * float(np.sum(received**2)), sample(rank, n)


def agrees(comm: MPI.Intracomm, answer: tuple, expected: tuple) -> bool:
    """Compare value and gradient with the closed form, on all ranks.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks that took part.
    answer, expected : tuple of (float, array of shape (n,))
        What the library returned, and the closed form.

    Returns
    -------
    bool
        True on every rank if all ranks agree to 1e-12 relative in double precision.

    Ranks
    -----
    Collective; the result is the same on all ranks.
    """
    gradient = np.asarray(answer[1])
    right = gradient.dtype == np.float64 and all(
        np.allclose(got, want, rtol=1e-12, atol=0.0)
        for got, want in ((float(answer[0]), expected[0]), (gradient, expected[1]))
    )
    return bool(comm.allreduce(right, op=MPI.LAND))


def smallest_time(comm: MPI.Intracomm, step: Callable[[], object], repeats: int) -> float:
    """Measure a step, all ranks starting from a barrier.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks that take part.
    step : callable
        Returns when its result is complete in memory.
    repeats : int
        How often it is timed, after a few untimed calls.

    Returns
    -------
    float
        Seconds: minimum over the repeats of the slowest rank's time.

    Ranks
    -----
    Collective; the result is the same on all ranks.
    """
    for _ in range(WARM_UP):
        step()
    own = np.empty(repeats)
    for i in range(repeats):
        comm.Barrier()
        start = time.perf_counter()
        step()
        own[i] = time.perf_counter() - start
    slowest = np.empty_like(own)
    comm.Allreduce(own, slowest, op=MPI.MAX)
    return float(slowest.min())


def report(comm: MPI.Intracomm, library: str, case: str, n: int, step: Callable[[], tuple], expected: tuple) -> None:
    """Check a step, time it, and print one JSON line.

    Parameters
    ----------
    comm : MPI.Intracomm
        The ranks that take part.
    library, case : str
        Names for the line.
    n : int
        Number of entries on each rank, a key of `REPEATS`.
    step : callable
        Returns (value, gradient).
    expected : tuple of (float, ndarray of shape (n,))
        The closed form on this rank.

    Ranks
    -----
    Collective; rank 0 prints.
    """
    correct = agrees(comm, step(), expected)
    microseconds = 1e6 * smallest_time(comm, step, REPEATS[n])
    if comm.rank == 0:
        line = {"library": library, "case": case, "n": n, "us": round(microseconds, 2), "correct": correct}
        print(json.dumps(line), flush=True)
