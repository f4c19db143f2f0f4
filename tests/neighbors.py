"""A primitive that is written by the recipe of docs/project/map.md, whose parameters hold tuples of envelopes."""

from typing import NamedTuple

from autograd.tracer import getval

from mpiad.primitives.checks import addresses
from mpiad.primitives.operation import Operation, communicate
from mpiad.transport import Envelope, Spec
from mpiad.transport.core.buffers import outgoing, private_copy, spec_of
from mpiad.transport.core.messages import receive, send

NEIGHBORS = Operation("sum_of_neighbors", point_to_point=True)
CALL = "mpi_exchange"  # the name of a public primitive, whose communication programs record


class Partners(NamedTuple):
    sent: tuple[Envelope, ...]
    spec: Spec
    received: list[Envelope]


def sum_of_neighbors(x, dests, sources, tag=0, comm=None):
    """Send x to several ranks, and return the sum of what several ranks send."""
    sent = tuple([addresses(x, rank, None, tag, comm, CALL)[0] for rank in dests])
    received = [addresses(x, None, rank, tag, comm, CALL)[1] for rank in sources]
    return communicate(NEIGHBORS, x, Partners(sent, spec_of(getval(x), CALL, "x"), received))


def _forward(x, p):
    for envelope in p.sent:
        send(private_copy(outgoing(x, CALL), x), envelope)
    return sum([receive(p.spec, envelope, CALL) for envelope in p.received], start=p.spec.zeros())


def _adjoint(ans, x, p):
    back = Partners(tuple([one.back() for one in p.received]), p.spec, [one.back() for one in p.sent])
    return lambda g: communicate(NEIGHBORS, g, back)


def _tangent(dx, ans, x, p):
    along = Partners(tuple([one.along() for one in p.sent]), p.spec, [one.along() for one in p.received])
    return communicate(NEIGHBORS, dx, along)


NEIGHBORS.define(_forward, _adjoint, _tangent)
