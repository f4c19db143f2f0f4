"""The number of threads of a rank: its share of the node's cores, for BLAS and loops.

NumPy and SciPy each have a BLAS with a pool of threads that poll for work. If calls of the two libraries alternate, the
threads of one occupy the cores that the other needs, so a product of vectors may take a hundred times as long. Therefore
vectors are processed by NumPy only, on the calling thread unless they are long.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import threadpoolctl
from mpi4py import MPI

from mpiad._typing import Array
from mpiad.cache_folder import first_time
from mpiad.environment_variables import switch

_log = logging.getLogger("mpiad")
_NOTICE = "told-of-threads"
# OpenBLAS wakes further threads for products of vectors that are longer than 10,000.
_ON_ONE_THREAD, _LONG = 8192, 10**6
_USERS_OWN = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def cores() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    try:
        return set(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return set(range(os.cpu_count() or 1))


_share = 1  # threads of this rank; one until the ranks on the node are known


def loop_threads() -> int:
    """Return the number of threads for a loop: the rank's share of the cores, or fewer by OMP_NUM_THREADS."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(_share, max(1, int(wanted))) if wanted.isdecimal() else _share


def vdot(x: Array, y: Array) -> Any:
    """Return `np.vdot` of two plain arrays, on the calling thread if they have fewer than a million entries."""
    if type(x) is not np.ndarray or not _ON_ONE_THREAD < x.size < _LONG:
        return np.vdot(x, y)
    x, y = x.reshape(-1), y.reshape(-1)
    return sum(np.vdot(x[k : k + _ON_ONE_THREAD], y[k : k + _ON_ONE_THREAD]) for k in range(0, x.size, _ON_ONE_THREAD))


def _by_blas(rows: np.ndarray, length: int | None) -> bool:
    """Return whether BLAS computes a product with these rows: they are short, or long enough for several threads."""
    return rows.size <= _ON_ONE_THREAD or (length or rows.shape[1]) >= _LONG


def vdots(rows: np.ndarray, x: np.ndarray, length: int | None = None) -> np.ndarray:
    """Return the inner product of each conjugated row with x, on the calling thread as in `vdot`.

    `length`: of the whole vectors, if `rows` and `x` are parts of them.
    """
    if _by_blas(rows, length):
        return (rows.conj() if rows.dtype.kind == "c" else rows) @ x
    return np.array([vdot(row, x) for row in rows])


def combination(numbers: np.ndarray, rows: np.ndarray, length: int | None = None, out: Array = None) -> np.ndarray:
    """Return the linear combination of the rows; see `vdots`."""
    if _by_blas(rows, length):
        return np.matmul(numbers, rows, out=out)
    return np.einsum("i,in->n", numbers, rows, out=out)


def gram(rows: np.ndarray) -> np.ndarray:
    """Return the inner products of real rows with each other, on the calling thread."""
    width = max(1, _ON_ONE_THREAD // len(rows))
    stretches = [rows[:, k : k + width] for k in range(0, rows.shape[1], width)]
    return sum((stretch @ stretch.T for stretch in stretches), np.zeros((len(rows), len(rows))))


def limit_threads(ranks_on_node: int) -> None:
    """Limit each rank's thread pools to its share of the node's cores, unless the user has set them; collective.

    The lowest rank that limits its pools logs this, once for each user.
    """
    global _share
    _share = max(1, len(cores()) // ranks_on_node)
    comm, share = MPI.COMM_WORLD, _limited(ranks_on_node)
    mine, first = np.array(comm.size if share is None else comm.rank, np.int32), np.empty((), np.int32)
    comm.Allreduce(mine, first, MPI.MIN)
    if first == comm.rank and first_time(_NOTICE):
        _log.warning(
            f"{MPI.Get_processor_name()}: {ranks_on_node} ranks share {len(cores())} cores: thread pools "
            f"limited to {share} thread(s) each. Set OMP_NUM_THREADS (or MPIAD_THREADS=0) to decide yourself. "
            "This message appears once."
        )


def _limited(ranks_on_node: int) -> int | None:
    """Limit this rank's pools; return their number of threads, or None if nothing was changed."""
    decided = not switch("MPIAD_THREADS", True) or any(name in os.environ for name in _USERS_OWN)
    if ranks_on_node < 2 or decided:
        return None
    share = _share
    pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
    if pools and max(pools) <= share:
        return None
    threadpoolctl.threadpool_limits(share)
    # Libraries that are loaded later, such as SciPy's BLAS, read these variables at their start.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(share)
    return share
