"""`mpi_allreduce`: combine every rank's array, with the result on all ranks."""

from __future__ import annotations

from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import getval, isbox

from mpiad._typing import Array, Comm, LocalArray, Op, ReplicatedArray
from mpiad.device.assembly import concatenate
from mpiad.primitives.allgather import mpi_allgather
from mpiad.primitives.catalogue import ALLREDUCE, Reduction
from mpiad.primitives.checks import reduction_of
from mpiad.primitives.operation import communicate, run
from mpiad.transport import PROD, SUM, channel, collectives
from mpiad.transport.device_arrays import arrays_of
from mpiad.transport.device_settings import divides
from mpiad.transport.prepared_messages import prepared_sum
from mpiad.transport.tracing import settled


def mpi_allreduce(x: LocalArray, op: Op = SUM, comm: Comm = None) -> ReplicatedArray:
    """Combine the arrays of all ranks, entry by entry, with the result on all ranks.

    Parameters
    ----------
    x : array or number, the same shape and dtype on all ranks
    op : mpi4py operation
        `MPI.SUM`, `PROD`, `MAX` or `MIN`; for integers and booleans any that MPI has for them. if any rank has
        NaN, so have the maximum and the minimum, as in NumPy.
    comm : mpi4py intracommunicator, optional

    Returns
    -------
    array
        Same shape and dtype as `x`, equal on all ranks; bit for bit for a maximum or a minimum, zeros being 0.0.

    Raises
    ------
    TypeError
        If `x` or `op` can't be reduced.

    Ranks
    -----
    All ranks of `comm` call it.

    Adjoint
    -------
    SUM: the sum of all ranks' cotangents, on every rank. PROD: that sum times the product of the other ranks' factors
    (right with zeros among them). MAX, MIN: that sum, shared equally among all tied entries of all ranks; if the
    result is NaN, NaN on all ranks.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> print(mpiad.mpi_allreduce(1.0) == size, mpiad.mpi_allreduce(float(rank), op=MPI.MAX) == size - 1)
    True True
    """
    return communicate(ALLREDUCE, x, Reduction(channel(comm, "mpi_allreduce"), reduction_of(op, x, "mpi_allreduce")))


def _forward(x: Array, p: Reduction) -> Any:
    return collectives.allreduce(p.channel, x, p.op, "mpi_allreduce")


def _prepared(p: Reduction, x: Array, out: Array) -> Any:
    if p.op != SUM:  # extremes check the result
        return None
    if divides(x.nbytes):
        return lambda: np.copyto(out, _forward(x, p))
    return prepared_sum(p.channel, x, out)


def _adjoint(ans: Array, x: Array, p: Reduction) -> Any:
    """Return the transpose of the Jacobian: y_r depends on every x_s, so x̄_s sums over all r."""
    total = p._replace(op=SUM)
    if p.op == SUM:
        return lambda g: communicate(ALLREDUCE, g, total)
    return lambda g: communicate(ALLREDUCE, g, total) * _slope(ans, x, p)


def _tangent(dx: Array, ans: Array, x: Array, p: Reduction) -> Any:
    total = p._replace(op=SUM)
    return communicate(ALLREDUCE, dx if p.op == SUM else dx * _slope(ans, x, p), total)


def _slope(ans: Array, x: Array, p: Reduction) -> Any:
    """Return the derivative of a product or an extremum with respect to this rank's own entries."""
    if p.op == PROD:
        # The result is the same on all ranks, and traced on all or none, so they agree on the branch. Differentiated
        # again, the quotient would be the difference of two large numbers if a factor is small.
        if not isbox(ans) and settled(_divides, ans):
            return ans / x
        factors = mpi_allgather(x, comm=p.channel.user)
        others = concatenate((factors[: p.channel.rank], factors[p.channel.rank + 1 :]))
        return _product(others) if len(others) else anp.ones_like(getval(ans))
    y = getval(ans)
    # Plain: which entries are tied is constant around almost every point, so no derivative flows through the shares.
    tied = (getval(x) == y).astype(y.dtype)
    with np.errstate(invalid="ignore"):  # if y is NaN nothing is tied, and the derivative is NaN too
        return tied / run(ALLREDUCE, tied, p._replace(op=SUM))


def _divides(y: Array) -> bool:
    """Return whether a product can be divided by its factors."""
    # Nearer to zero it may have lost digits among the subnormal numbers, and the quotient would show them.
    safe = np.finfo(y.dtype).tiny / np.finfo(y.dtype).eps
    condition = np.all((np.abs(y) > safe) & np.isfinite(y))
    # One byte is copied from a device: no work is wasted, and all ranks take the same branch.
    arrays = arrays_of(condition)
    return bool(condition if arrays is None else arrays.to_host(condition))


def _product(factors: Array) -> Any:
    # Multiplied in pairs: the derivative of a product is then right with zeros too, at any order.
    while len(factors) > 1:
        half = len(factors) // 2
        odd = factors[2 * half :]
        factors = concatenate((factors[:half] * factors[half : 2 * half], odd))
    return factors[0]


ALLREDUCE.define(_forward, _adjoint, _tangent)
ALLREDUCE.prepared = _prepared
