"""Operations that note which line of the user's called them, swapped in while somebody asks (see `transport.calls`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.transport import Channel, Envelope, calls
from mpiad.transport.calls import Arguments, Call, Site
from mpiad.transport.device_arrays import is_device_array
from mpiad.transport.mpi_operations import name_of

if TYPE_CHECKING:
    from mpiad.primitives.operation import Operation

__all__ = ["apply_to", "noted_methods"]

_operations: WeakSet[Operation] = WeakSet()


def apply_to(operation: Operation) -> None:
    """Take in an operation that was just defined."""
    _operations.add(operation)
    if calls.is_noting():
        _swap(operation)


def _switch(on: bool) -> None:
    for operation in _operations:
        if on:
            _swap(operation)
        else:
            # The bare functions are back in place, so that nothing is paid while nobody asks.
            operation.forward, operation.adjoint, operation.tangent = operation.bare


def _swap(operation: Operation) -> None:
    forward, adjoint, tangent = operation.bare
    name = operation.__name__
    operation.forward = _noted_forward(name, forward)
    operation.adjoint, operation.tangent = _noted_adjoint(name, adjoint), _noted_tangent(name, tangent)


def _noted_forward(name: str, forward: Callable) -> Callable:
    """Return a forward function that notes its call."""

    def noted(x: Array, params: object) -> Any:
        return _during(calls.begin(name, x, params), forward, x, params)

    return noted


def _during(call: Call, fun: Callable, *args: Any) -> Any:
    try:
        return fun(*args)
    finally:
        calls.end(call)


def _noted_adjoint(name: str, adjoint: Callable) -> Callable:
    """Return a maker of adjoints that remember the line of their forward call."""

    def make(ans: Array, x: Array, params: object, *level: int) -> Callable:
        return _noted_rule(name, adjoint(ans, x, params, *level), params)

    return make


def _noted_rule(name: str, rule: Callable, params: object) -> Callable:
    # Now, while the forward call is on the stack; the adjoint runs far from it.
    called, site = _recorded(name)

    def noted(g: Array) -> Any:
        return _during(calls.begin_rule("adjoint", called, site, g, params), rule, g)

    return noted


def _noted_tangent(name: str, tangent: Callable) -> Callable:
    """Return a tangent rule that notes its call."""

    def noted(dx: Array, ans: Array, x: Array, params: object, *level: int) -> Any:
        called, site = _recorded(name)
        return _during(calls.begin_rule("tangent", called, site, dx, params), tangent, dx, ans, x, params, *level)

    return noted


def noted_methods(body: Callable, vjp: Callable, jvp: Callable) -> tuple[Callable, Callable, Callable]:
    """Return the methods of a class of operators as ones that note their calls."""

    def noted_body(self: Any, args: tuple, kwargs: dict) -> Any:
        return _during(calls.begin(self.__name__, args[0] if args else None, None), body, self, args, kwargs)

    def noted_vjp(self: Any, ans: Array, args: tuple, kwargs: dict, argnums: tuple[int, ...], level: int) -> Callable:
        return _noted_rule(self.__name__, vjp(self, ans, args, kwargs, argnums, level), None)

    def noted_jvp(self: Any, tangents: dict, ans: Array, args: tuple, kwargs: dict, level: int) -> Any:
        called, site = _recorded(self.__name__)
        call = calls.begin_rule("tangent", called, site, args[0] if args else None, None)
        return _during(call, jvp, self, tangents, ans, args, kwargs, level)

    return noted_body, noted_vjp, noted_jvp


def _recorded(name: str) -> tuple[str, Site]:
    """Return name and site of the forward call that is being recorded."""
    outer = calls.current()
    if outer is not None and outer.forward_site is not None:
        return outer.forward_name or name, outer.forward_site  # an adjoint's own adjoint: the same line again
    # From the frame of whoever applies the operation: our own frames are passed over from there on.
    site = calls.site_of(sys._getframe(2))
    return site.named(name), site


def _read(x: Array, params: object) -> Arguments:
    """Return what an operation was given, whatever kind it is."""
    named = [params, *[getattr(params, name, None) for name in _ADDRESSES]]
    envelopes = tuple([found for found in named if isinstance(found, Envelope)])
    address = envelopes[0] if envelopes else None
    channel = getattr(params, "channel", None) or getattr(address, "channel", None)
    if channel is None and isinstance(params, Channel):
        channel = params  # a barrier has nothing else
    op = getattr(params, "op", None)
    shape, dtype, nbytes = _extent(x, params)
    return Arguments(
        getattr(channel, "label", None), getattr(params, "root", None), getattr(address, "peer", None),
        getattr(address, "tag", None), shape, dtype, nbytes,
        None if op is None else name_of(op) or "user-defined", getattr(channel, "members", ()), envelopes,
    )  # fmt: skip


_ADDRESSES = ("there", "back", "envelope")


def _extent(x: Array, params: object) -> tuple[Any, Any, int]:
    value = getval(x)
    if isinstance(value, (np.ndarray, np.generic)) or is_device_array(value):
        return value.shape, value.dtype, value.nbytes
    if isinstance(value, (bool, int, float, complex)):
        dtype = np.result_type(value)
        return (), dtype, dtype.itemsize
    spec = getattr(params, "spec", None)
    if spec is None or spec.dtype is None:
        return None, None, 0
    return spec.shape, spec.dtype, spec.dtype.itemsize * int(np.prod(spec.shape))


Call.read = staticmethod(_read)
calls.register(_switch)
