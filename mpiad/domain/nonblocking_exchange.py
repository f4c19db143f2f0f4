"""Halo exchange in two halves, so that the rank computes while the messages travel, forwards and backwards.

All messages of an exchange start together, also those between diagonal neighbours, and the block with its halo is there
at the end. Backwards the end comes first: its adjoint starts to send the halo's cotangents home, and the adjoint of the
begin receives and adds them. So each half of filling has a half of folding for its adjoint, and the other way round,
and both are made of the same operations, to any order. What one half leaves for the other lies in the cells of its
request, as with the library's other requests.

Ranks begin exchanges in one order but may end them in any: an exchange's messages, those of its adjoint and of its
tangents carry its number among those of the halo.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ref

from mpiad._typing import Array, LocalArray
from mpiad.domain.boundary import Sides, homogeneous
from mpiad.domain.halo import Halo, fill_local, fold_local
from mpiad.domain.halo_messages import Coming, add, post, put
from mpiad.errors import RequestError
from mpiad.primitives.addresses import point_to_point
from mpiad.primitives.operation import Operation, communicate, suspended
from mpiad.primitives.request import Request, claim, started
from mpiad.transport import Spec
from mpiad.transport.buffers import copied, empty_beside
from mpiad.transport.tracing import restoring_state

_FIRST_TAG, _TAGS = 32512, 224  # below those of other halos; so many exchanges may be under way
_BEGIN, _END = "Domain.begin_exchange", "Domain.end_exchange"


class Exchange(NamedTuple):
    """What both halves must know."""

    halo: Halo
    sides: Sides
    scheme: str  # one with a single stage
    number: int  # of this exchange among those of the halo
    backwards: bool = False  # whether the halo is folded, instead of filled

    @property
    def tag(self) -> int:
        """Tag of all its messages, of those of its adjoint and its tangents."""
        return _tag_of(self.number)

    @property
    def numbered(self) -> tuple[Halo, int]:
        """What it is known by among the exchanges of a compiled program."""
        return self.halo, self.number

    def renumbered(self) -> int:
        """Return the next number of the halo's, for a run of a compiled program."""
        return _next_number(self.halo)

    def transposed(self) -> Exchange:
        """Return the exchange of the cotangents."""
        return self._replace(sides=homogeneous(self.sides), backwards=not self.backwards)


class Begun(Request):
    """An exchange under way: `Domain.end_exchange` returns its result.

    `values`, of shape (..., *padded): what is being filled, or folded. `finish`: from the filled array to what the user
    gets.
    """

    __slots__ = ("__weakref__", "coming", "exchange", "finish", "values")

    def __init__(self, exchange: Exchange, values: LocalArray, coming: list[Coming]):
        lead = values.shape[: values.ndim - len(exchange.halo.shape)]
        shape = lead + (exchange.halo.shape if exchange.backwards else exchange.halo.padded)
        super().__init__(_BEGIN, None, None, None, Spec(shape, values.dtype))
        self.exchange, self.values, self.coming = exchange, values, coming
        self.finish: Any = None


def begin_fill(u: LocalArray, halo: Halo, sides: Sides, scheme: str) -> Begun:
    """Start to fill the halo of a block; all ranks of the domain begin their exchanges in the same order.

    A RequestError where as many exchanges have begun without an end as there are tags for. The adjoint is the end of
    folding.
    """
    exchange = Exchange(halo, sides, scheme, _next_number(halo))
    begun: Begun = communicate(_BEGIN_OPERATION, u, exchange)
    started(begun)
    # Weakly: an exchange that nobody holds any more can't be ended, and mustn't be kept alive here.
    halo.under_way[exchange.tag] = ref(begun)
    return begun


def _next_number(halo: Halo) -> int:
    """Count an exchange that begins."""
    used = point_to_point(halo.comm, _BEGIN)
    if halo.renewals != used.renewals:
        # After an exception that not all ranks met at the same place, `reset` lets them count alike again.
        halo.renewals, halo.begun = used.renewals, 0
        halo.under_way.clear()
    # Tags come round: with two exchanges under one tag a message could be taken for the other's.
    held = halo.under_way.get(_tag_of(halo.begun))
    earlier = None if held is None else held()
    if earlier is not None and not earlier.done:
        raise RequestError(
            f"{_BEGIN}: {_TAGS} exchanges were begun after {earlier!r}, which hasn't ended. End each with {_END}."
        )
    halo.begun += 1
    return halo.begun - 1


def _tag_of(number: int) -> int:
    # By its number, on which the ranks agree without a message: all begin their exchanges in the same order.
    return _FIRST_TAG + number % _TAGS


def end_fill(begun: Begun) -> LocalArray:
    """Complete what was begun and return the block with its halo; each rank ends what it has begun, in any order.

    A TypeError where it isn't an exchange that was begun; a RequestError where it has ended before, or began in another
    trace. The adjoint is the start of folding.
    """
    if not isinstance(begun, Begun):
        raise TypeError(f"{_END}: expected what {_BEGIN} returned, but got {type(begun).__name__}.")
    return communicate(_END_OPERATION, None, claim(begun, _END))


def _start(x: LocalArray, exchange: Exchange) -> Begun:
    halo = exchange.halo
    (stage,), (local,) = halo.stages(exchange.scheme), halo.local(exchange.sides, exchange.scheme)
    if exchange.backwards:
        # A copy, because what is folded is added to in place, and the cotangent is the caller's.
        values = copied(x)
        fold_local(values, local, exchange.sides, len(halo.shape))
    else:
        values = empty_beside(x, x.shape[: x.ndim - len(halo.shape)] + halo.padded)
        values[halo.interior] = x
    with restoring_state(), suspended():
        coming = post(values, stage.routes, exchange.backwards, exchange.tag, halo.comm)
    return Begun(exchange, values, coming)


def _finish(x: None, begun: Begun) -> LocalArray:
    exchange, values, coming = begun.exchange, begun.values, begun.coming
    # Of an exchange that the user keeps, the buffers are free.
    begun.done, begun.values, begun.coming = True, None, []
    halo = exchange.halo
    # From here on as the end of `fold_in_place` or, forwards, of `fill_in_place`.
    if exchange.backwards:
        with restoring_state(), suspended():
            add(values, coming)
        return values[halo.interior]
    with restoring_state(), suspended():
        put(values, coming)
    (local,) = halo.local(exchange.sides, exchange.scheme)
    fill_local(values, local, exchange.sides)
    return values


def _adjoint_of_begin(ans: Begun, x: Array, exchange: Exchange, level: int) -> Any:
    """Return the end of the transposed exchange, which the adjoint of the end has started."""
    cell = ans.cell(level)

    def vjp(g: None) -> Any:
        request, cell.request = cell.request, None
        return communicate(_END_OPERATION, None, request)

    return vjp


def _adjoint_of_end(ans: Array, x: None, begun: Begun, level: int) -> Any:
    """Return the start of the transposed exchange."""
    cell, transposed = begun.cell(level), begun.exchange.transposed()

    def vjp(g: Array) -> None:
        # The reverse pass meets the end first: there the cotangents set out, and they travel until the begin is met.
        cell.request = communicate(_BEGIN_OPERATION, g, transposed)

    return vjp


def _tangent_of_begin(dx: Array, ans: Begun, x: Array, exchange: Exchange, level: int) -> None:
    # Values beyond sides are constants, of which the tangent is zero; factors stay.
    along = exchange._replace(sides=homogeneous(exchange.sides))
    ans.cell(level).request = communicate(_BEGIN_OPERATION, dx, along)


def _tangent_of_end(dx: None, ans: Array, x: None, begun: Begun, level: int) -> Any:
    cell = begun.cell(level)
    pending, cell.request = cell.request, None
    return communicate(_END_OPERATION, None, pending)


_BEGIN_OPERATION = Operation(_BEGIN, point_to_point=True, halves=True)
_END_OPERATION = Operation(_END, point_to_point=True, halves=True)
_BEGIN_OPERATION.define(_start, _adjoint_of_begin, _tangent_of_begin)
_END_OPERATION.define(_finish, _adjoint_of_end, _tangent_of_end)
