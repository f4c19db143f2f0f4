"""How many ranks work together, and which of a node's devices is this one's."""

from __future__ import annotations

from mpiad._typing import Comm, Rank
from mpiad.primitives import mpi_local_rank, mpi_size


def local_rank() -> Rank:
    """Return this rank's number among those of its node: `mpiad.mpi_local_rank` by its name in training programs.

    Ranks
    -----
    Each by itself.

    Examples
    --------
    >>> print(0 <= mpiad.parallel.local_rank() <= rank)
    True
    """
    return mpi_local_rank()


def total_workers(comm: Comm = None) -> int:
    """Return the number of ranks: `mpiad.mpi_size` by its name in training programs.

    Examples
    --------
    >>> print(mpiad.parallel.total_workers() == size)
    True
    """
    return mpi_size(comm)
