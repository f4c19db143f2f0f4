"""What the library and autograd ask of traced arrays beyond NumPy's protocols.

For the library that is `ArrayModule`. autograd.numpy's `array`, and with it `stack`, call numpy.array, the one function
that asks nobody. So while there are traces, the name `numpy` in that module of autograd's stands for an object that does,
and is NumPy otherwise.
"""

from __future__ import annotations

from typing import Any

import autograd.numpy.numpy_wrapper
import numpy as np
from numpy.typing import DTypeLike

from mpiad._typing import Array, Index, Shape
from mpiad.programs.recorder import Recorder
from mpiad.programs.steps import Traced
from mpiad.programs.traced_array import TracedArray
from mpiad.transport.device_arrays import register_arrays

numpy_wrapper: Any = autograd.numpy.numpy_wrapper


class TracedArrays:
    """Makes arrays of one trace. There is no other place that they could be copied to."""

    name, kind, device, takes_host_arrays = "traced", TracedArray, 0, True

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedArrays) and other.recorder is self.recorder

    def __hash__(self) -> int:
        return id(self.recorder)

    def empty(self, shape: Shape, dtype: DTypeLike) -> Array:
        """Make an array that is to be filled; its values are zeros here."""
        return self.full(shape, 0, dtype)

    def full(self, shape: Shape, value: Array | float, dtype: DTypeLike) -> Array:
        """Make an array of one number."""
        return self.recorder.call(np.full, (tuple(shape), value, np.dtype(dtype)), {})

    def arange(self, stop: int) -> Array:
        """Make an array of the integers from 0 on."""
        return np.arange(stop)

    def add_at(self, x: Any, idx: Index, values: Any) -> None:
        """Add values to the elements at an index, in place."""
        total = x.recorder.call(added_at, (x, idx, values), {})
        x[...] = total

    def contiguous(self, x: Array) -> Array:
        """Return the array itself: where it lies is decided when the program is compiled."""
        return x

    def copy(self, x: Array) -> Array:
        """Return a copy."""
        return x.recorder.call(np.copy, (x,), {})

    def to_host(self, x: Array) -> Array:
        """Return the array itself."""
        return x

    def to_device(self, host: Array) -> Array:
        """Return the array itself, a constant of the trace."""
        return host


def added_at(x: Array, idx: Index, values: Array) -> Array:
    """Return a copy of x with values added at places that may be named more than once."""
    total = x.copy()
    np.add.at(total, idx, values)
    return total


def _arrays_of(x: Any) -> Any:
    x.recorder.require_open()
    return TracedArrays(x.recorder)


# Of the protocol's methods those for copies between host and device are missing: a trace is given up before them.
register_arrays(TracedArray, _arrays_of)


class _NumPy:
    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def array(x: Any, *args: Any, **kwargs: Any) -> Any:
        found = _traced(x)
        if found is None or not found.recorder.is_noting():
            return np.array(x, *args, **kwargs)
        return found.recorder.call(array_of, (x, *args), kwargs)


def array_of(x: Any, *args: Any, **kwargs: Any) -> Array:
    """Return numpy.array of what may hold traced arrays."""
    return np.array(x, *args, **kwargs)


def _traced(x: Any) -> Any:
    if isinstance(x, Traced):
        return x
    if isinstance(x, (list, tuple)):
        return next((found for part in x if (found := _traced(part)) is not None), None)
    return None


def let_arrays_be_traced(on: bool) -> None:
    """Let autograd.numpy's `array` know traced arrays, or not."""
    numpy_wrapper._np = _NumPy() if on else np
