"""`mpi_alltoall`: exchange blocks between all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, LocalArray
from mpiad.primitives.catalogue import ALLTOALL, Blocks
from mpiad.primitives.checks import axis_of, counts_of, lengths_along, piece_of
from mpiad.primitives.cotangents import spec_like
from mpiad.primitives.operation import communicate
from mpiad.transport import Channel, Spec, channel
from mpiad.transport.core import collectives
from mpiad.transport.core.buffers import require_sendable
from mpiad.transport.core.tracing import checked_on_replay

_CALL = "mpi_alltoall"


def mpi_alltoall(
    x: LocalArray,
    counts: Sequence[int] | Array | None = None,
    axis: int = 0,
    *,
    received: Sequence[int] | Array | None = None,
    comm: Comm = None,
) -> LocalArray:
    """Send a block of x to each rank, and concatenate the blocks that arrive, in rank order.

    Parameters
    ----------
    x : array
        Without `counts`, shape (size, ...), the same shape and dtype on all ranks: block s is ``x[s]``. With `counts`, the
        lengths along `axis` may differ between ranks.
    counts : sequence of int, optional
        ``counts[s]`` consecutive entries of `x` along `axis` are sent to rank s. The counts may be zero; they add up to the
        length of `x` along `axis`.
    axis : int
        Axis along which `x` is divided by `counts`.
    received : sequence of int, optional
        The number of entries that arrive from each rank: ``received[s]`` is rank s's ``counts[rank]``. By default the ranks
        exchange their counts first.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        Same dtype as `x`. Without `counts`, the same shape as `x`, and block s is the one that rank s sends to this rank.
        With `counts`, the blocks are concatenated along `axis`.

    Raises
    ------
    TypeError
        If `x` can't be sent, or `counts` or `received` isn't a sequence of integers.
    ValueError
        If `x` has no such axis, `counts` don't add up to its length, or a count is negative. If shapes differ along another
        axis, or dtypes differ between ranks. Without `counts`, if the length of the first axis isn't the number of ranks.

    Ranks
    -----
    All ranks of `comm` call it, with the same axis. Either all ranks pass `counts`, or none does; the same holds for
    `received`. With `counts` alone, all ranks raise an error of one of them before any data is sent. With `received`,
    counts that don't match are detected under ``MPIAD_DEBUG=1`` or `MPIAD_TIMEOUT` only. Otherwise MPI raises an error for
    too many entries, and entries that nobody sends are any numbers.

    Adjoint
    -------
    The cotangents return by the same exchange with `counts` and `received` interchanged. Derivatives of any order use the
    counts of the call, and don't exchange them again.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> print(np.array_equal(mpiad.mpi_alltoall(np.full(size, float(rank))), np.arange(size)))
    True

    Rank r sends one entry to each rank s ≤ r:

    >>> counts = [int(s <= rank) for s in range(size)]
    >>> y = mpiad.mpi_alltoall(np.full(rank + 1, float(rank)), counts)
    >>> print(np.array_equal(y, np.arange(rank, size)))
    True
    """
    if hasattr(counts, "Get_rank"):
        raise TypeError(f"{_CALL}: counts must be a list of integers, but got a communicator. Pass it as comm=.")
    used = channel(comm, _CALL)
    if counts is not None:
        return communicate(ALLTOALL, x, _uneven(getval(x), counts, axis, used, received))
    if axis != 0 or received is not None:
        raise ValueError(f"{_CALL}: without counts, axis must be 0 and received None, but got {axis!r} and {received!r}.")
    require_sendable(getval(x), _CALL)
    spec = spec_like(getval(x))
    if spec.shape[:1] != (used.size,):
        raise ValueError(
            f"{_CALL}: without counts, the first axis of x must be the number of ranks, {used.size}, but x has shape "
            f"{spec.shape}. Reshape x to ({used.size}, ...), pad it if its size isn't a multiple of {used.size}, or pass "
            "counts=."
        )
    return communicate(ALLTOALL, x, Blocks(used, 0, None, spec))


def _uneven(x: Array, counts: Sequence[int], axis: int, channel: Channel, received: Sequence[int] | None) -> Blocks:
    """Return the parameters of an exchange of blocks with these counts; collective unless `received` is given."""
    error = None
    try:
        require_sendable(x, _CALL)
        spec = spec_like(x)
        index = axis_of(axis, len(spec.shape), _CALL)
        sent = lengths_along(index, counts, spec.shape, channel, _CALL)
    except (TypeError, ValueError) as found:
        if received is not None:
            raise
        # Raised on all ranks by `lengths_of_all`, which exchanges the counts.
        spec, index, sent, error = Spec((0,), np.dtype(float)), 0, [0] * channel.size, found
    if received is not None:
        arriving = counts_of(received, channel.size, _CALL, "received")
    else:
        like = spec._replace(arrays=None)
        arriving = checked_on_replay(collectives.lengths_of_all, channel, like, index, _CALL, error, sent)
    return Blocks(channel, index or 0, (sent, arriving), piece_of(spec, index, sum(arriving)))  # None was refused


def _forward(x: Array, p: Blocks) -> Array:
    if p.counts is None:
        return collectives.alltoall(p.channel, x, _CALL)
    return collectives.alltoallv(p.channel, x, p.axis, *p.counts, _CALL)


def _adjoint(ans: Array, x: Array, p: Blocks) -> Function:
    """Return the transpose of a permutation: its inverse, in which each block returns to its sender."""
    back = p._replace(counts=p.counts and p.counts[::-1], spec=spec_like(x))
    return lambda g: communicate(ALLTOALL, g, back)


ALLTOALL.define(_forward, _adjoint)
