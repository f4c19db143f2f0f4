"""`exchange`, `begin_exchange` and `end_exchange`, for one or several fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import ref

import numpy as np

from mpiad._typing import Array, Function, LocalArray
from mpiad.device.assembly import concatenate
from mpiad.domain.boundary import Boundary, Sides, check_values, homogeneous, shifted, sides_of
from mpiad.domain.decomposition import Decomposition, check_reflection, checked_block
from mpiad.domain.halo import Halo, PendingReceive, complete, fill_halo, fill_local, fold_local, post
from mpiad.domain.routes import AT_ONCE, BY_AXIS, FACES_ONLY
from mpiad.errors import RequestError
from mpiad.primitives.checks import point_to_point
from mpiad.primitives.operation import Operation, communicate, suspended
from mpiad.primitives.request import Cell, Request, claim, started
from mpiad.transport import Channel, Spec
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import copied, empty_like

# Halo exchange in two halves, *begin* and *end*, so that messages overlap with computation in both passes.
#
# All messages of an exchange start at once, including those between diagonal neighbors, and the end returns the block
# with its halo. The reverse pass starts with the adjoint of *end*, which starts to send the halo's cotangents to the owners
# of the cells; the adjoint of *begin* receives and adds them. So the adjoint of each half of filling a halo is a half of
# folding (adding halo cells to the cells that they copy), and vice versa. The first half passes its data to the second
# half in a request.
#
# Ranks begin exchanges in the same order but may end them in any order. Therefore the exchanges on a communicator are
# numbered; the number determines the tag of the messages of an exchange, its adjoint and its tangents.

_FIRST_TAG, _TAGS = 32512, 224  # at most `_TAGS` exchanges may be active; blocking exchanges use higher tags
_BEGIN, _END = "Domain.begin_exchange", "Domain.end_exchange"


class Exchange(NamedTuple):
    """The parameters of an exchange, for both of its halves."""

    halo: Halo
    sides: Sides
    scheme: str  # a scheme with a single stage
    number: int  # number of this exchange among those of the communicator
    backwards: bool = False  # whether the halo is folded, instead of filled

    @property
    def tag(self) -> int:
        """Tag of the messages of the exchange, its adjoint and its tangents."""
        return _FIRST_TAG + self.number % _TAGS

    @property
    def numbered(self) -> tuple[Channel, int]:
        """Identifier of the exchange in a compiled program: the channel that numbers it, and the number."""
        return point_to_point(self.halo.comm, _BEGIN), self.number

    def renumbered(self) -> int:
        """Return a new number, for another execution of the exchange in a compiled program."""
        return _next_number(self.numbered[0])

    def transposed(self) -> Exchange:
        """Return the exchange of the cotangents."""
        return self._replace(sides=homogeneous(self.sides), backwards=not self.backwards)


Finish = Callable[[LocalArray], LocalArray | list[LocalArray]]


class ActiveExchange(Request):
    """An active exchange: `Domain.end_exchange` returns its result."""

    __slots__ = ("__weakref__", "pending", "exchange", "finish", "values")

    finish: Finish  # from the filled array to the user's result; `begin_exchange` sets it

    def __init__(self, exchange: Exchange, values: LocalArray, pending: list[PendingReceive]):
        lead = values.shape[: values.ndim - len(exchange.halo.shape)]
        shape = lead + (exchange.halo.shape if exchange.backwards else exchange.halo.padded)
        super().__init__(_BEGIN, None, None, None, Spec(shape, values.dtype))
        # `values`, of shape (..., *padded), is the array being filled or folded.
        self.exchange, self.values, self.pending = exchange, values, pending


def _next_number(group: Channel) -> int:
    """Return the number of a new exchange; raise a RequestError if its tag is still in use."""
    number = group.exchanges
    reference = group.active_exchanges.get(number % _TAGS)
    earlier = None if reference is None else reference()
    # If the numbers are equal, the counter was reset after a trace, and the same exchange is begun again.
    if earlier is not None and not earlier.done and earlier.exchange.number != number:
        raise RequestError(
            f"{_BEGIN}: {_TAGS} exchanges were begun after {earlier!r}, which hasn't ended. End each with {_END}."
        )
    group.exchanges += 1
    return number


def end_exchange(begun: ActiveExchange) -> LocalArray | list[LocalArray]:
    """See `Domain.end_exchange`. The adjoint is the first half of folding."""
    if not isinstance(begun, ActiveExchange):
        raise TypeError(f"{_END}: expected a result of {_BEGIN}, but got {type(begun).__name__}.")
    return begun.finish(communicate(_END_OPERATION, None, claim(begun, _END)))


def _start(x: LocalArray, exchange: Exchange) -> ActiveExchange:
    halo = exchange.halo
    (stage,), (local,) = halo.stages(exchange.scheme), halo.local(exchange.sides, exchange.scheme)
    if exchange.backwards:
        # A copy, because folding adds in place, and the caller may use the cotangent again.
        values = copied(x)
        fold_local(values, local, exchange.sides, len(halo.shape))
    else:
        values = empty_like(x, x.shape[: x.ndim - len(halo.shape)] + halo.padded)
        values[halo.interior] = x
    with restoring_state(), suspended():
        pending = post(values, stage.routes, exchange.backwards, exchange.tag, halo.comm)
    return ActiveExchange(exchange, values, pending)


def _finish(x: None, begun: ActiveExchange) -> LocalArray:
    exchange, values, pending = begun.exchange, begun.values, begun.pending
    # The buffers are freed even if the user retains a reference to `begun`.
    begun.done, begun.values, begun.pending = True, None, []
    halo = exchange.halo
    with restoring_state(), suspended():
        complete(values, pending, exchange.backwards)
    if exchange.backwards:
        return values[halo.interior]
    (local,) = halo.local(exchange.sides, exchange.scheme)
    fill_local(values, local, exchange.sides)
    return values


def _adjoint_of_begin(ans: ActiveExchange, x: Array, exchange: Exchange, level: int) -> Function:
    """Return the function that ends the transposed exchange, which the adjoint of `end_exchange` has begun."""
    return lambda g: _end_in(ans.cell(level))


def _adjoint_of_end(ans: Array, x: None, begun: ActiveExchange, level: int) -> Function:
    """Return the function that begins the transposed exchange."""
    shared, transposed = begun.cell(level), begun.exchange.transposed()

    def vjp(g: Array) -> None:
        shared.request = communicate(_BEGIN_OPERATION, g, transposed)

    return vjp


def _tangent_of_begin(dx: Array, ans: ActiveExchange, x: Array, exchange: Exchange, level: int) -> None:
    tangent = exchange._replace(sides=homogeneous(exchange.sides))
    ans.cell(level).request = communicate(_BEGIN_OPERATION, dx, tangent)


def _tangent_of_end(dx: None, ans: Array, x: None, begun: ActiveExchange, level: int) -> Array:
    return _end_in(begun.cell(level))


def _end_in(shared: Cell) -> Array:
    """End the exchange of a derivative."""
    request, shared.request = shared.request, None
    return communicate(_END_OPERATION, None, request)


def _abstract(x: LocalArray, exchange: Exchange) -> ActiveExchange:
    halo = exchange.halo
    shape = x.shape[: x.ndim - len(halo.shape)] + halo.padded
    return ActiveExchange(exchange, x if exchange.backwards else empty_like(x, shape), [])


_BEGIN_OPERATION = Operation(_BEGIN, point_to_point=True, of_request=True)
_END_OPERATION = Operation(_END, point_to_point=True, of_request=True)
_BEGIN_OPERATION.define(_start, _adjoint_of_begin, _tangent_of_begin, _abstract)
_END_OPERATION.define(_finish, _adjoint_of_end, _tangent_of_end)


def exchange(domain: Decomposition, u: Array | Sequence[Array], boundary: Boundary, corners: bool) -> Array | list[Array]:
    """See `Domain.exchange`."""
    u, sides, finish = _prepared(domain, u, boundary, corners, "Domain.exchange")
    return [] if u is None else finish(fill_halo(u, domain._halo, sides, BY_AXIS if corners else FACES_ONLY))


def begin_exchange(domain: Decomposition, u: Array | Sequence[Array], boundary: Boundary, corners: bool) -> ActiveExchange:
    """See `Domain.begin_exchange`. The adjoint is the second half of folding."""
    u, sides, finish = _prepared(domain, u, boundary, corners, _BEGIN)
    if u is None:
        raise ValueError(f"{_BEGIN}: expected one or several fields, but got an empty sequence.")
    group = point_to_point(domain.comm, _BEGIN)
    exchange = Exchange(domain._halo, sides, AT_ONCE if corners else FACES_ONLY, _next_number(group))
    begun: ActiveExchange = communicate(_BEGIN_OPERATION, u, exchange)
    started(begun)
    # The reference is weak: a program that has discarded the exchange can't end it, so its tag becomes free.
    group.active_exchanges[exchange.number % _TAGS], begun.finish = ref(begun), finish
    return begun


def _prepared(
    domain: Decomposition, u: Array, boundary: Boundary, corners: bool, call: str
) -> tuple[Array | None, Sides, Finish]:
    """Return one array to exchange, its boundary, and the function that converts the padded array to the result."""
    # A traced boundary value is subtracted before the exchange and added afterwards, since only u may be traced.
    value, sides = shifted(sides_of(boundary, len(domain.shape), call), call)
    if value is not None and not corners:
        raise TypeError(f"{call}: a traced boundary value needs corners=True, because it also fills the corners.")
    if isinstance(u, (tuple, list)):
        u, finish = _joined(domain, u, call)
        if u is None:
            return u, sides, finish
    else:
        u, finish = checked_block(domain, u, call), lambda padded: padded
    check_values(sides, u.dtype, call)
    check_reflection(domain, sides, call, domain.halo)
    if value is None:
        return u, sides, finish
    return u - value, sides, lambda padded: finish(padded + value)


def _joined(domain: Decomposition, fields: Sequence[LocalArray], call: str) -> tuple[LocalArray | None, Finish]:
    fields = [checked_block(domain, field, call) for field in fields]
    if len({field.dtype for field in fields}) > 1:
        raise TypeError(
            f"{call}: fields that are sent in one message must have the same dtype, but got "
            f"{', '.join(str(field.dtype) for field in fields)}. Convert them, or exchange them separately."
        )
    if not fields:
        return None, list
    leading = [field.shape[: field.ndim - len(domain.shape)] for field in fields]
    stops = np.cumsum([math.prod(lead) for lead in leading])

    def separated(padded: LocalArray) -> list[LocalArray]:
        parts = [padded[stop - math.prod(lead) : stop] for stop, lead in zip(stops, leading)]
        return [part.reshape(lead + domain.padded_shape) for part, lead in zip(parts, leading)]

    # The leading axes of each field are merged into one axis, along which the fields are concatenated.
    return concatenate([field.reshape((-1, *domain.local_shape)) for field in fields]), separated
