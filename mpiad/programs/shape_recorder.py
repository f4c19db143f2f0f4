"""A trace of shapes and dtypes alone: nothing is computed with large arrays, and nothing communicated.

What stands for a result is memory of its shape that nobody touches, which costs nothing. So a function of large arrays is
compiled before it is run, in no more time than one of small arrays. What has to know a value, or what other ranks
say, gives this trace up, and the function is traced while it runs (`Recorder`): until then no rank has heard of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from mpiad._typing import Array
from mpiad.primitives.catalogue import ALLREDUCE, EXCHANGE, SEND
from mpiad.programs.message_numbers import envelopes_of
from mpiad.programs.recorder import Recorder
from mpiad.transport import Spec

__all__ = ["ShapeRecorder", "is_large"]

# Entries of an array with which it takes longer to compute than to find out what comes out.
_LARGE = 1 << 13


def is_large(x: Any) -> bool:
    """Tell whether it takes long to compute with an array."""
    return isinstance(x, np.ndarray) and x.size > _LARGE


class ShapeRecorder(Recorder):
    """A trace under way, of shapes and dtypes."""

    def _computed(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if fun is np.full:
            return np.empty(args[0], args[2])
        by_entries = isinstance(fun, np.ufunc) and fun.signature is None or fun is np.where
        if by_entries and not kwargs and any(map(is_large, args)):
            shape = np.broadcast_shapes(*[np.shape(x) for x in args])
            made = fun(*[np.ones(1, x.dtype) if isinstance(x, np.ndarray) else x for x in args])
            several = isinstance(made, tuple)
            return tuple([np.empty(shape, part.dtype) for part in made]) if several else np.empty(shape, made.dtype)
        made = fun(*args, **kwargs)
        is_own = is_large(made) and made.base is None and not any(made is x for x in args)
        return np.empty(made.shape, made.dtype) if is_own else made

    def _written_into(self, fun: Callable, args: tuple, out: Array) -> None:
        if np.broadcast_shapes(*[np.shape(x) for x in args]) != out.shape:
            fun(*args, out=out)  # what NumPy says to that

    def _put(self, out: Array, place: Any, values: Any) -> None:
        part = out[place]
        if np.broadcast_shapes(part.shape, np.shape(values)) != part.shape:
            out[place] = values

    def _communicated(self, operation: Any, x: Any, params: Any) -> Any:
        for envelope in envelopes_of(params):
            envelope.give_back()
        if operation is SEND:
            return x
        if operation is EXCHANGE:
            return _like(params.spec)
        if operation is ALLREDUCE and hasattr(x, "dtype") and x.dtype.kind == "f":
            return _like(Spec(x.shape, x.dtype))
        self._give_up()

    def _operated(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if operator.in_place is None or kwargs or not isinstance(x, np.ndarray):
            self._give_up()
        made = tuple(operator.in_place.made(*args[1:]))
        return np.empty(x.shape[: x.ndim - len(made)] + made, x.dtype)

    def _give_up(self, *_: Any) -> NoReturn:
        self.refuse("it needs values")

    settle = opaque = once = call_as_it_is = _give_up


def _like(spec: Spec) -> Any:
    return np.empty(spec.shape, spec.dtype) if spec.shape else spec.dtype.type(1)
