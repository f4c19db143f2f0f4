"""`mpi_scatter`: divide the root's array among the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, LocalArray, Rank, RootArray
from mpiad.primitives.catalogue import GATHER, SCATTER, Dividing
from mpiad.primitives.checks import axis_of, lengths_along, piece_of, root_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate
from mpiad.transport import Channel, Spec, channel
from mpiad.transport.core import collectives
from mpiad.transport.core.buffers import outgoing
from mpiad.transport.core.tracing import checked_on_replay


def mpi_scatter(
    x: RootArray, root: Rank = 0, axis: int | None = None, counts: list[int] | None = None, *, comm: Comm = None
) -> LocalArray:
    """Divide the root's array among the ranks: the inverse of `mpi_gather`.

    Parameters
    ----------
    x : array
        Used on the root only; other ranks may pass None. Without `axis`, the length of the first axis is the
        number of ranks.
    root : int
    axis : int, optional
        Axis along which `x` is divided. For None, rank r gets entry r along the first axis.
    counts : list of int, optional
        Each rank's length along `axis`; used on the root only. By default as in
        `numpy.array_split`: equal, or longer by one on the first ranks.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        This rank's part.

    Raises
    ------
    TypeError, ValueError
        On all ranks, if the root's `x` can't be sent, or divided by `axis` and `counts`; if `root` isn't a rank of `comm`.

    Ranks
    -----
    All ranks of `comm` call it, with the same root and axis.

    Adjoint
    -------
    The cotangents of all ranks are gathered on the root; the cotangent of `x` on other ranks is zero.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> rows = np.arange(2.0 * size).reshape(size, 2) if rank == 0 else None
    >>> print(mpiad.mpi_scatter(rows) - 2 * rank)
    [0. 1.]
    """
    used = channel(comm, "mpi_scatter")
    root = root_of(root, used, "mpi_scatter")
    whole, ndim, lengths = checked_on_replay(_agreed, used, getval(x), root, axis, counts)
    axis = axis_of(axis, ndim, "mpi_scatter")
    return communicate(SCATTER, x, Dividing(used, root, axis, lengths, piece_of(whole, axis, lengths[used.rank])))


def scatter_pieces(
    x: RootArray, root: int, lengths: list[int], error: Exception | None, channel: Channel, call: str
) -> LocalArray:
    """Divide the root's array along its first axis; `lengths` are all ranks'. All ranks raise the root's `error`."""
    whole = checked_on_replay(_spec_or_error, channel, getval(x), root, error, call)
    return communicate(SCATTER, x, Dividing(channel, root, 0, lengths, piece_of(whole, 0, lengths[channel.rank])))


def _spec_or_error(channel: Channel, x: Array, root: int, error: Exception | None, call: str) -> Spec:
    def whole() -> Spec:  # called on the root only
        if error is not None:
            raise error
        return spec_like(outgoing(x, call))

    return collectives.agree_on_spec(channel, whole, root, x)


def _agreed(
    channel: Channel, x: Array, root: int, axis: int | None, counts: Sequence[int] | None
) -> tuple[Spec, int, list[int]]:
    """Return spec, number of axes and lengths of the root's array, on all ranks; raise the root's error on all ranks."""
    lengths: list[int] = []

    def whole() -> Spec:  # called on the root only
        array = outgoing(x, "mpi_scatter")
        nonnegative = axis_of(axis, array.ndim, "mpi_scatter")
        lengths.extend(lengths_along(nonnegative, counts, array.shape, channel, "mpi_scatter"))
        return spec_like(array)

    spec = collectives.agree_on_spec(channel, whole, root, x)
    return spec, len(spec.shape), channel.data.bcast(lengths, root)


def _forward(x: Array, p: Dividing) -> Array:
    return collectives.scatter(p.channel, x, p.root, p.axis, p.lengths, p.spec, "mpi_scatter")


def _adjoint(ans: Array, x: Array, p: Dividing) -> Function:
    """Return the transpose of scattering: the cotangents are gathered on the root; zeros on other ranks."""
    template = None if x is None or p.channel.rank == p.root else spec_like(x)

    def vjp(g: Array) -> Array:
        whole = communicate(GATHER, g, p)
        return whole if template is None else template.zeros()

    return vjp


SCATTER.define(_forward, _adjoint)
