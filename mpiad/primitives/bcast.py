"""`mpi_bcast`: copy the root's array to all ranks."""

from __future__ import annotations

from types import NotImplementedType

from mpiad._typing import Array, Comm, Function, Rank, ReplicatedArray, RootArray
from mpiad.primitives.catalogue import BCAST, SUM_TO_ROOT, Rooted
from mpiad.primitives.checks import root_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate
from mpiad.transport import Spec, channel
from mpiad.transport.core import collectives
from mpiad.transport.core.buffers import outgoing
from mpiad.transport.core.messages import Prepared, prepared_bcast


def mpi_bcast(x: RootArray, root: Rank = 0, *, comm: Comm = None) -> ReplicatedArray:
    """Copy the root's array to all ranks.

    Parameters
    ----------
    x : array or number
        The array on the root. On other ranks `x` is only a template, which may differ in shape and dtype, or None.
    root : int
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        A new array with the shape and dtype of the root's `x`, equal on all ranks. The result is on the host or device
        of this rank's `x`. If `x` is None, the result is on the host or on a device, like the root's `x`.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if the root's `x` can't be sent; if `root` isn't a rank of `comm`.

    Ranks
    -----
    All ranks of `comm` call it, with the same root.

    Adjoint
    -------
    The cotangent of the root's `x` is the sum of all ranks' cotangents; the cotangent of a template is zero.

    Examples
    --------
    >>> rank = mpiad.mpi_rank()
    >>> print(mpiad.mpi_bcast(np.arange(3.0) + 10 * rank))
    [0. 1. 2.]
    """
    used = channel(comm, "mpi_bcast")
    # The spec is None, so the root sends it in a header.
    return communicate(BCAST, x, Rooted(used, root_of(root, used, "mpi_bcast")))


def _forward(x: Array, p: Rooted) -> Array:
    if p.spec is None:
        return collectives.bcast_with_header(p.channel, x, p.root, "mpi_bcast")
    return collectives.bcast(p.channel, x, p.spec, p.root, "mpi_bcast")


def _prepared(p: Rooted, x: Array, out: Array | None) -> Prepared | None:
    return None if p.spec is None or out is None else prepared_bcast(p.channel, x, out, p.root)


def _adjoint(ans: Array, x: Array, p: Rooted) -> Function:
    """Return the transpose of copying: the sum of the copies' cotangents on the root; zeros for templates."""
    template = None if x is None or p.channel.rank == p.root else spec_like(x)

    def vjp(g: Array) -> Array:
        total = communicate(SUM_TO_ROOT, g, Rooted(p.channel, p.root))
        return total if template is None else template.zeros()

    return vjp


def _tangent(dx: Array, ans: Array, x: Array, p: Rooted) -> Array:
    # All ranks know the spec from `ans`, so no header is sent.
    return communicate(BCAST, dx, Rooted(p.channel, p.root, spec_like(ans)))


def _abstract(x: Array, p: Rooted) -> Spec | NotImplementedType:
    if p.spec is not None:
        return p.spec
    return spec_like(outgoing(x, "mpi_bcast")) if p.channel.rank == p.root else NotImplemented


BCAST.define(_forward, _adjoint, _tangent, _abstract)
BCAST.prepared = _prepared
