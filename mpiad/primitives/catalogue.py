"""The operations of `mpiad.primitives`, and the types of their parameters.

They are declared in one file because an operation and its adjoint, defined in different files, refer to each other.
"""

from __future__ import annotations

from typing import NamedTuple

from mpiad._typing import Op
from mpiad.primitives.operation import Operation
from mpiad.transport import Channel, Envelope, Spec

BCAST = Operation("mpi_bcast")
SUM_TO_ROOT = Operation("mpi_sum")
ALLREDUCE = Operation("mpi_allreduce", batched_adjoint=True)
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
ISEND = Operation("mpi_isend", point_to_point=True, of_request=True)
IRECV = Operation("mpi_irecv", point_to_point=True, of_request=True)
IALLREDUCE = Operation("mpi_iallreduce", point_to_point=True, of_request=True)
WAIT = Operation("mpi_wait", point_to_point=True, of_request=True)


class Rooted(NamedTuple):
    """Parameters of a broadcast or a sum; `spec` describes the broadcast array, or is None if only the root knows it."""

    channel: Channel
    root: int
    spec: Spec | None = None


class Reduction(NamedTuple):
    """Parameters of a reduction to all ranks; `root`: the rank that returns the result, None for all ranks."""

    channel: Channel
    op: Op
    root: int | None = None


class Dividing(NamedTuple):
    """The division of an array among the ranks."""

    channel: Channel
    root: int | None  # the rank that holds the whole array; None if all ranks do
    axis: int | None  # None for one block per rank along the first axis
    lengths: list[int]  # of all ranks' parts along the axis
    spec: Spec  # of this rank's part


class Blocks(NamedTuple):
    """The blocks along an axis that a rank sends to, and receives from, each rank; None for one entry for each rank."""

    channel: Channel
    axis: int
    counts: tuple[list[int], list[int]] | None  # sent and received
    spec: Spec  # of the received array


class Prefix(NamedTuple):
    """Parameters of a sum over the ranks up to this rank, or from it if `backwards`; `exclusive` excludes this rank."""

    channel: Channel
    exclusive: bool
    backwards: bool


class Receiving(NamedTuple):
    """Parameters of a receive; `source` is None if there is no sender."""

    spec: Spec
    source: Envelope | None


class Exchange(NamedTuple):
    """Parameters of an exchange; `dest` or `source` is None for no partner."""

    dest: Envelope | None
    spec: Spec
    source: Envelope | None
