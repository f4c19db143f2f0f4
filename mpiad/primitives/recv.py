"""`mpi_recv`: receive an array from another rank."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from autograd.tracer import getval

from mpiad._typing import Array, Comm, Function, Rank
from mpiad.primitives.catalogue import RECV, SEND, Receiving
from mpiad.primitives.checks import address_from, refuse_keywords
from mpiad.primitives.operation import communicate
from mpiad.transport import spec_of
from mpiad.transport.core.messages import Prepared, prepared_receive, receive


def mpi_recv(like: Array, source: Rank, *, tag: int = 0, comm: Comm = None, **unsupported: NoReturn) -> Array:
    """Receive an array from another rank.

    Parameters
    ----------
    like : array or number
        Template with the shape and dtype of the received array; its values are ignored.
    source : int
        The sender; `MPI.ANY_SOURCE` for any sender, None or `MPI.PROC_NULL` for no sender.
    tag : int
        The tag of the message; `MPI.ANY_TAG` for any tag.
    comm : mpi4py intracommunicator, optional
        Its first use must be a collective call, for example `mpi_init(comm)`.
    **unsupported
        There is no `status`. A receiver that must know the sender or the number of entries gets them in a message before:
        ``source, n = mpi_recv(np.zeros(2, int), MPI.ANY_SOURCE)``, then ``y = mpi_recv(np.zeros(n), source)``.

    Returns
    -------
    array
        The array sent; zeros if there is no sender.

    Raises
    ------
    TypeError, ValueError
        If `like` isn't an array that can be received, `source` isn't a rank of `comm`, `tag` is invalid, the message and
        `like` differ in size, or a keyword is unsupported.

    Ranks
    -----
    The receiver calls it, and the sender a matching `mpi_send`.

    Adjoint
    -------
    The cotangent is sent to the sender; with `MPI.ANY_SOURCE`, to the actual sender.

    Examples
    --------
    >>> rank, size = mpiad.mpi_rank(), mpiad.mpi_size()
    >>> after, before = (rank + 1) % size, (rank - 1) % size
    >>> _ = mpiad.mpi_send(np.ones(2) * rank, after)
    >>> print(mpiad.mpi_recv(np.zeros(2), before) == before)
    [ True  True]
    """
    if unsupported:
        refuse_keywords(unsupported, "mpi_recv")
    spec = spec_of(getval(like), "mpi_recv", "like")
    return communicate(RECV, None, Receiving(spec, address_from(source, tag, comm, "mpi_recv", wildcard=True)))


def _forward(x: None, p: Receiving) -> Array:
    return p.spec.zeros() if p.source is None else receive(p.spec, p.source, "mpi_recv")


def prepared(p: Receiving, x: None, out: Array | None, call: str) -> Prepared | None:
    """Return the receive of an array into `out`, or None; see `Operation`."""
    source: Any = p.source  # programs read zeros instead of a result from nobody
    return prepared_receive(p.spec.empty() if out is None else out, source, call) if source.is_fixed else None


def _adjoint(ans: Array, x: None, p: Receiving) -> Function:
    """Return the transpose of receiving: sending the cotangent to the sender."""
    if p.source is None:
        return lambda g: None
    # With a wildcard, the receive has replaced `source` by the actual sender.
    sender = p.source.back()

    def vjp(g: Array) -> None:
        communicate(SEND, g, sender)

    return vjp


def _tangent(dx: None, ans: Array, x: None, p: Receiving) -> Array:
    return communicate(RECV, None, p._replace(source=p.source and p.source.along()))


RECV.define(_forward, _adjoint, _tangent)
RECV.prepared = partial(prepared, call="mpi_recv")
