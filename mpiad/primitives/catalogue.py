"""All operations by name, and the types of their parameters besides the array.

An operation and its adjoint need each other, and each has a file of its own: both find the other here.
"""

from __future__ import annotations

from typing import NamedTuple

from mpiad._typing import Op
from mpiad.primitives.operation import Operation
from mpiad.transport import Channel, Envelope, Spec

BCAST = Operation("mpi_bcast")
SUM_TO_ROOT = Operation("mpi_sum")
ALLREDUCE = Operation("mpi_allreduce", several=True)
GATHER = Operation("mpi_gather")
ALLGATHER = Operation("mpi_allgather")
SCATTER = Operation("mpi_scatter")
REDUCE_SCATTER = Operation("mpi_reduce_scatter")
ALLTOALL = Operation("mpi_alltoall")
SCAN = Operation("mpi_scan")
BARRIER = Operation("mpi_barrier")
SEND = Operation("mpi_send", point_to_point=True)
RECV = Operation("mpi_recv", point_to_point=True)
EXCHANGE = Operation("mpi_exchange", point_to_point=True)
ISEND = Operation("mpi_isend", point_to_point=True, halves=True)
IRECV = Operation("mpi_irecv", point_to_point=True, halves=True)
IALLREDUCE = Operation("mpi_iallreduce", point_to_point=True, halves=True)
WAIT = Operation("mpi_wait", point_to_point=True, halves=True)


class Copying(NamedTuple):
    """Root of a copy to all; the spec of the array, if all ranks know it."""

    channel: Channel
    root: int
    spec: Spec | None


class Summing(NamedTuple):
    """Root of a sum."""

    channel: Channel
    root: int


class Reduction(NamedTuple):
    """How all ranks reduce."""

    channel: Channel
    op: Op


class Dividing(NamedTuple):
    """How an array is divided among the ranks: their lengths along an axis, or one block each if it is None.

    `spec` is that of this rank's piece, `root` None if all ranks hold the whole.
    """

    channel: Channel
    root: int | None
    axis: int | None
    lengths: list[int]
    spec: Spec


class Prefix(NamedTuple):
    """Options of a sum over the ranks before this one, or after it if `backwards`."""

    channel: Channel
    exclusive: bool
    backwards: bool


class Receiving(NamedTuple):
    """Spec of the received array, and its sender; None for no partner."""

    spec: Spec
    source: Envelope | None


class Exchange(NamedTuple):
    """Receiver, spec of the received array, and sender; None for no partner."""

    dest: Envelope | None
    spec: Spec
    source: Envelope | None
