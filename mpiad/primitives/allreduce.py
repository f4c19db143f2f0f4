"""`mpi_allreduce`: combine the arrays of all ranks, with the result on all ranks."""

from __future__ import annotations

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Comm, Function, LocalArray, Op, ReplicatedArray
from mpiad.device.assembly import concatenate
from mpiad.primitives.allgather import mpi_allgather
from mpiad.primitives.catalogue import ALLREDUCE, Reduction
from mpiad.primitives.checks import reduction_of
from mpiad.primitives.operation import communicate, like_sent
from mpiad.transport import PROD, SUM, channel
from mpiad.transport.core import collectives
from mpiad.transport.core.messages import Prepared, prepared_sum
from mpiad.transport.core.tracing import checked_on_replay
from mpiad.transport.devices.device_arrays import arrays_of


def mpi_allreduce(x: LocalArray, op: Op = SUM, *, comm: Comm = None) -> ReplicatedArray:
    """Combine the arrays of all ranks, entry by entry, with the result on all ranks.

    Parameters
    ----------
    x : array or number, the same shape and dtype on all ranks
    op : mpi4py operation
        `MPI.SUM`, `PROD`, `MAX` or `MIN`; for integers and booleans any operation that MPI defines for them. Maximum and
        minimum are NaN if any rank has NaN, as in NumPy.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        Same shape and dtype as `x`, equal on all ranks. Maximum and minimum are equal in every bit; -0.0 becomes 0.0.

    Raises
    ------
    TypeError
        If `x` can't be sent, or `op` isn't supported for its dtype.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    SUM: the sum of all ranks' cotangents, on every rank. PROD: this sum times the product of the other ranks' entries,
    which may be zero. MAX, MIN: this sum, divided equally among all tied entries of all ranks; NaN on all ranks if the
    result is NaN.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> print(mpiad.mpi_allreduce(1.0) == size, mpiad.mpi_allreduce(float(rank), op=MPI.MAX) == size - 1)
    True True
    """
    return communicate(ALLREDUCE, x, Reduction(channel(comm, "mpi_allreduce"), reduction_of(op, x, "mpi_allreduce")))


def _forward(x: Array, p: Reduction) -> Array:
    return collectives.allreduce(p.channel, x, p.op, "mpi_allreduce")


def _prepared(p: Reduction, x: Array, out: Array | None) -> Prepared | None:
    # Maximum and minimum need checks for NaN.
    return prepared_sum(p.channel, x, out) if p.op == SUM and out is not None else None


def _adjoint(ans: Array, x: Array, p: Reduction) -> Function:
    """Return the transpose: the result y_r of each rank r depends on each x_s, so the cotangent of x_s is a sum over r."""
    total = p._replace(op=SUM)
    if p.op == SUM:
        return lambda g: communicate(ALLREDUCE, g, total)
    return lambda g: communicate(ALLREDUCE, g, total) * _slope(ans, x, p)


def _tangent(dx: Array, ans: Array, x: Array, p: Reduction) -> Array:
    total = p._replace(op=SUM)
    return communicate(ALLREDUCE, dx if p.op == SUM else dx * _slope(ans, x, p), total)


def _slope(ans: Array, x: Array, p: Reduction) -> Array:
    """Return the derivative of a product or an extremum with respect to this rank's entries."""
    if p.op == PROD:
        # All ranks take the same branch, since `ans` is the same on all ranks, and traced on all or none. A traced quotient
        # isn't used: its derivative would suffer from cancellation if a factor is small.
        if not isbox(ans) and checked_on_replay(_divides, ans):
            return ans / x
        factors = mpi_allgather(x, comm=p.channel.user)
        others = concatenate((factors[: p.channel.rank], factors[p.channel.rank + 1 :]))
        return _product(others) if len(others) else anp.ones_like(getval(ans))
    y = getval(ans)
    tied = (getval(x) == y).astype(y.dtype)
    with np.errstate(invalid="ignore"):  # if y is NaN, no entry equals y, and the derivative is 0/0
        return tied / ALLREDUCE.run((tied,), p._replace(op=SUM))


def _divides(y: Array) -> bool:
    """Return whether a product can be divided by its factors without loss of precision."""
    # Near zero, intermediate products may be subnormal numbers, which have fewer digits.
    safe = np.finfo(y.dtype).tiny / np.finfo(y.dtype).eps
    condition = np.all((np.abs(y) > safe) & np.isfinite(y))
    arrays = arrays_of(condition)
    return bool(condition if arrays is None else arrays.to_host(condition))


def _product(factors: Array) -> Array:
    # Pairs are multiplied, without divisions, so that derivatives of any order are correct even if factors are zero.
    while len(factors) > 1:
        half = len(factors) // 2
        odd = factors[2 * half :]
        factors = concatenate((factors[:half] * factors[half : 2 * half], odd))
    return factors[0]


ALLREDUCE.define(_forward, _adjoint, _tangent, like_sent)
ALLREDUCE.prepared = _prepared
