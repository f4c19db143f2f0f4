"""`ShapeRecorder`: a trace of shapes and dtypes, in which large arrays are neither computed nor communicated.

Uninitialized memory stands for each result. So a function of large arrays is compiled before it runs, which takes
no longer than for small arrays. If an operation needs values of large arrays, or a message from another rank, this trace
fails before it sends a message, and the function is traced while it runs (see `Recorder`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.objective import SHARE
from mpiad.primitives.catalogue import ALLREDUCE, ALLTOALL, BARRIER, BCAST, EXCHANGE, RECV, SCAN, SEND, SUM_TO_ROOT
from mpiad.programs.message_numbers import envelopes_of
from mpiad.programs.recorder import Recorder
from mpiad.transport import Spec

_LARGE = 1 << 13  # entries above which computing with an array takes longer than finding the shape of the result


def is_large(x: Any) -> bool:
    """Return whether computing with an array takes long."""
    return isinstance(x, np.ndarray) and x.size > _LARGE


# Functions whose results have a known shape, and whose calls have no side effects if the trace fails.
_KNOWN = frozenset(
    "mpi_allreduce mpi_alltoall mpi_barrier mpi_exchange mpi_exscan mpi_recv mpi_scan mpi_send mpi_sum "
    "value_and_grad grad make_vjp make_jvp jvp hvp".split()
)
_AS_SENT = frozenset({ALLREDUCE, ALLTOALL, SCAN, SUM_TO_ROOT})


class ShapeRecorder(Recorder):
    """A trace of shapes and dtypes in progress; it overrides the methods of `Recorder` that compute or communicate."""

    def looked_up(self, call: str) -> None:
        """Handle the lookup of a channel by a function: end the trace if the shape of the function's result is unknown."""
        if call not in _KNOWN:
            self.refuse(f"the result of {call} is known only in a run")

    def _computed(self, fun: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if fun is np.full:
            return np.empty(args[0], args[2])
        if fun is np.concatenate and not kwargs and len(args) < 3 and any(map(is_large, args[0])):  # type: ignore[misc]
            return _joined(*args)
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
            fun(*args, out=out)  # raises NumPy's error

    def _put(self, out: Array, place: Any, values: Any) -> None:
        part = out[place]
        if np.broadcast_shapes(part.shape, np.shape(values)) != part.shape:
            out[place] = values

    def _communicated(self, operation: Any, x: Any, params: Any) -> Any:
        envelopes = envelopes_of(params)
        for envelope in envelopes:
            envelope.give_back()
        if operation in (SEND, BARRIER):
            return x
        # A receive from any rank, whose envelope has no number yet, needs a run.
        needs_run = operation is RECV and any(envelope.number is None for envelope in envelopes)
        if operation in (BCAST, EXCHANGE, RECV) and params.spec is not None and not needs_run:
            return like(params.spec)
        if operation in _AS_SENT and hasattr(x, "dtype") and x.dtype.kind == "f":
            return like(Spec(x.shape, x.dtype))
        if operation is SHARE and params.problem is None:
            return np.float64(1.0)
        return super()._communicated(operation, x, params)

    def _operated(self, operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if operator.preserves_spec and isinstance(x, np.ndarray):
            return np.empty(x.shape, x.dtype)
        if operator.in_place is None or kwargs or not isinstance(x, np.ndarray):
            return super()._operated(operator, args, kwargs)
        made = tuple(operator.in_place.made(*args[1:]))
        return np.empty(x.shape[: x.ndim - len(made)] + made, x.dtype)

    def _untraced(self, fun: Callable, *args: Any) -> NoReturn:
        self.refuse(f"the result of {getattr(fun, '__name__', fun)} is known only in a run")


def _joined(parts: Any, axis: int = 0) -> Array:
    # With an additional axis of length 0, NumPy finds the shape without copying entries.
    made = np.concatenate([np.empty((0, *np.shape(x)), x.dtype) for x in parts], axis if axis < 0 else axis + 1)
    return np.empty(made.shape[1:], made.dtype)


def like(spec: Spec) -> Any:
    """Return a placeholder for a value with this shape and dtype."""
    return np.empty(spec.shape, spec.dtype) if spec.shape else spec.dtype.type(1)
