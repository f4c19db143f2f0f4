"""`mpi_gather`: collect the arrays of all ranks on the root."""

from __future__ import annotations

from mpiad._typing import Array, Comm, Function, LocalArray, Rank, RootArray
from mpiad.primitives.catalogue import GATHER, SCATTER, Dividing
from mpiad.primitives.checks import gathered, pieces_of_all, root_of
from mpiad.primitives.operation import communicate
from mpiad.transport import channel
from mpiad.transport.core import collectives


def mpi_gather(x: LocalArray, root: Rank = 0, axis: int | None = None, *, comm: Comm = None) -> RootArray:
    """Collect the arrays of all ranks on the root.

    Parameters
    ----------
    x, axis, comm
        As in `mpi_allgather`.
    root : int

    Returns
    -------
    array
        On the root, shape ``(size, *x.shape)``, or the shape of the concatenation. On other ranks an empty array, of length
        0 along the first axis or along `axis`.

    Raises
    ------
    TypeError, ValueError
        As in `mpi_allgather`; and if `root` isn't a rank of `comm`.

    Ranks
    -----
    All ranks of `comm` call it, with the same root and axis.

    Adjoint
    -------
    The root's cotangent is scattered: each rank gets its part.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> x = mpiad.mpi_gather(np.ones(2), axis=0)
    >>> print(len(x) == (2 * size if rank == 0 else 0))
    True
    """
    used = channel(comm, "mpi_gather")
    root = root_of(root, used, "mpi_gather")
    return communicate(GATHER, x, pieces_of_all(x, axis, used, root, "mpi_gather"))


def _forward(x: Array, p: Dividing) -> Array:
    return collectives.gather(p.channel, x, p.root, p.axis, p.lengths, "mpi_gather")


def _adjoint(ans: Array, x: Array, p: Dividing) -> Function:
    """Return the transpose of collecting arrays: each rank receives the cotangent of its array."""
    return lambda g: communicate(SCATTER, g, p)


GATHER.define(_forward, _adjoint, abstract=gathered)
