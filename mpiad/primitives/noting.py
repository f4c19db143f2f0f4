"""Recording of the calls of operations, with the user's lines, for debugging tools (see `transport.core.calls`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from autograd.tracer import getval

from mpiad._typing import Array
from mpiad.transport import Channel, Envelope
from mpiad.transport.core import calls
from mpiad.transport.core.calls import Arguments, Call, Site
from mpiad.transport.core.collectives import name_of
from mpiad.transport.core.tracing import restoring_state
from mpiad.transport.devices.device_arrays import is_device_array


def note_forward(operation: Any, forward: Callable) -> None:
    """Set `operation.forward` to `forward`; while recording is requested, to a function that also records the call."""
    name = operation.__name__

    def noted(x: Array, params: object) -> Array:
        return recorded_call(calls.begin, (name, x, params), forward, x, params)

    def switch(on: bool) -> None:
        # The function is replaced, so there is no overhead while recording is off.
        operation.forward = noted if on else forward

    switch(False)
    calls.register(switch)


def recorded_call(begin: Callable[..., Call], arguments: tuple, fun: Callable, *args: Any) -> Any:
    """Return ``fun(*args)``, and record the call, which ``begin(*arguments)`` describes."""
    with restoring_state():
        call = begin(*arguments)
        try:
            return fun(*args)
        finally:
            calls.end(call)


def note_rules(kind: Any) -> None:
    """Make adjoints and tangents of a class of operations record their calls, with the forward call's line, on request."""
    vjp, jvp = bare = kind.vjp, kind.jvp

    def noted_vjp(self: Any, ans: Array, args: tuple, params: Any, argnums: Sequence[int], level: int) -> Callable:
        rule = vjp(self, ans, args, params, argnums, level)
        # The forward call is on the stack now, but not when the adjoint runs.
        called, site = _forward_call(self.__name__)
        return lambda g: recorded_call(calls.begin_rule, ("adjoint", called, site, g, params), rule, g)

    def noted_jvp(self: Any, tangents: dict, ans: Array, args: tuple, params: Any, level: int) -> Array:
        called, site = _forward_call(self.__name__)
        arguments = "tangent", called, site, args[0] if args else None, params
        return recorded_call(calls.begin_rule, arguments, jvp, self, tangents, ans, args, params, level)

    def switch(on: bool) -> None:
        kind.vjp, kind.jvp = (noted_vjp, noted_jvp) if on else bare

    calls.register(switch)


def _forward_call(name: str) -> tuple[str, Site]:
    """Return name and line of the forward call that is in progress."""
    outer = calls.current()
    if outer is not None and outer.forward_site is not None:
        return outer.forward_name or name, outer.forward_site  # an adjoint of an adjoint has the line of the forward call
    # `site_of` skips the library's own frames.
    site = calls.site_of(sys._getframe(2))
    return site.named(name), site


def _arguments_of(x: Array, params: object) -> Arguments:
    candidates = [params, *[getattr(params, name, None) for name in _ADDRESSES]]
    envelopes = tuple([each for each in candidates if isinstance(each, Envelope)])
    address = envelopes[0] if envelopes else None
    channel = getattr(params, "channel", None) or getattr(address, "channel", None)
    if channel is None and isinstance(params, Channel):
        channel = params  # the parameters of a barrier
    label, members = getattr(channel, "label", None), getattr(channel, "members", ())
    peer, tag = getattr(address, "peer", None), getattr(address, "tag", None)
    root, op = getattr(params, "root", None), getattr(params, "op", None)
    reduction = None if op is None else name_of(op) or "user-defined"
    return Arguments(label, root, peer, tag, *_extent(x, params), reduction, members, envelopes)


_ADDRESSES = ("dest", "source", "envelope")


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


Call.read = staticmethod(_arguments_of)
