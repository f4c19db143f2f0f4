"""`segment_sum`: sums of the entries of segments, in a fixed order, and the transpose, which repeats the sums.

On the host, entries are added one after the other. On a device, atomic additions would sum in an unspecified order.
Instead, segments of similar lengths are the columns of a table, padded with zeros, and the rows of the table are added.
Lengths in a table differ by less than a factor of two, so less than half of the table is padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from autograd.extend import defjvp, defvjp, primitive
from autograd.tracer import getval

from mpiad._typing import Array, LocalArray
from mpiad.device.transfer import Constants
from mpiad.differentiation.rules.protocol import anp, recorder_of
from mpiad.primitives.checks import integer_of
from mpiad.transport.core.tracing import tracing
from mpiad.transport.devices.device_arrays import arrays_of


def segment_sum(values: LocalArray, segments: Sequence[int] | Array, count: int) -> LocalArray:
    """Add the entries of each segment.

    Parameters
    ----------
    values : array of shape (n, ...)
    segments : array of n integers
        The number of each entry's segment, from 0 to ``count - 1``, in any order. It isn't differentiated.
    count : int
        The number of segments.

    Returns
    -------
    array of shape (count, ...)
        Same dtype as `values`. Entries are added in a fixed order, on the host in the order of `values`, so that equal
        arguments give the same bits. A segment without entries is zero.

    Raises
    ------
    TypeError
        If `segments` aren't integers, or `count` isn't one.
    ValueError
        If a segment's number is negative or at least `count`, or if the lengths of `values` and `segments` differ.

    Ranks
    -----
    Each rank calls it independently.

    Adjoint
    -------
    A gather: the cotangent of an entry is that of its segment.

    Examples
    --------
    >>> print(mpiad.segment_sum(np.array([1.0, 2.0, 4.0]), [0, 2, 0], 3))
    [5. 0. 2.]
    >>> weights = np.array([1.0, 10.0, 100.0])
    >>> total = lambda x: np.sum(weights * mpiad.segment_sum(x, [0, 2, 0], 3))
    >>> print(mpiad.grad(total, objective="sum")(np.ones(3)))
    [  1. 100.   1.]
    """
    numbers: Any = segments
    if isinstance(segments, (list, tuple, range)):
        numbers = np.asarray(segments, None if len(segments) else np.int64)
    if (number := integer_of(count, "segment_sum", "count", allowed := "an integer, zero or more")) < 0:
        raise TypeError(f"segment_sum: count must be {allowed}, but got {count!r}.")
    if getattr(numbers, "ndim", None) != 1 or numbers.dtype.kind not in "iu":
        raise TypeError(
            f"segment_sum: segments must be an array of integers with one dimension, but got {type(segments).__name__} of "
            f"shape {np.shape(numbers)} and dtype {getattr(numbers, 'dtype', None)}."
        )
    values = anp.array(values) if isinstance(values, (list, tuple)) else values
    shape = np.shape(getval(values))
    if shape[:1] != numbers.shape:
        raise ValueError(
            f"segment_sum: values and segments must have the same length, but got shapes {shape} and {numbers.shape}."
        )
    # Programs of derivatives get traced numbers as an argument, since they replace no arrays that an object holds.
    is_traced = recorder_of(numbers) is not None
    return add_segments(values, (numbers, number) if is_traced else Segments(numbers, number, checked=False))


class Segments:
    """The number of each entry's segment, and the number of segments; a call returns the sums of segments."""

    def __init__(self, numbers: Array, count: int, checked: bool = True):
        # Programs keep this object, and the traced function may change the numbers later.
        is_kept = tracing.recorder is not None and type(numbers) is np.ndarray
        self.numbers, self.count, self._checked = numbers.copy() if is_kept else numbers, count, checked

    def __call__(self, values: LocalArray) -> LocalArray:
        """Return the sums (count, ...) of values (n, ...)."""
        recorder = recorder_of(values, self.numbers)
        if recorder is not None:
            return recorder.call(summed_by_segment, (values, self.numbers, self.count), {})
        if not self._checked:
            self.require_range()
        xp = arrays_of(values)
        if xp is None:
            return _added(values, self.numbers, self.count)
        entries = np.moveaxis(values, 0, -1)
        padded = xp.full((*entries.shape[:-1], entries.shape[-1] + 1), 0, entries.dtype)
        padded[..., :-1] = entries
        return xp.contiguous(np.moveaxis(self.of_padded(padded), -1, 0))

    def require_range(self) -> None:
        """Raise a ValueError for a number that isn't a segment's."""
        numbers = self._host
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.count:
            first = int(np.flatnonzero((numbers < 0) | (numbers >= self.count))[0])
            raise ValueError(
                f"segment_sum: segments must be from 0 to {self.count - 1}, but entry {first} has segment {numbers[first]}."
            )
        self._checked = True

    @cached_property
    def _host(self) -> np.ndarray:
        arrays = arrays_of(self.numbers)
        return self.numbers if arrays is None else arrays.to_host(self.numbers)

    @cached_property
    def _indices(self) -> Constants:
        return Constants(self._host)

    def taken(self, sums: LocalArray) -> LocalArray:
        """Return the entry of `sums` (count, ...) for each number: the transpose of the sums."""
        if recorder_of(sums, self.numbers) is not None:
            return sums[self.numbers]
        (numbers,) = self._indices.on(arrays_of(sums))
        return sums.take(numbers, axis=0)

    @cached_property
    def _tables(self) -> list[Constants]:
        segments = self._host
        order, lengths = np.argsort(segments, kind="stable"), np.bincount(segments, minlength=self.count)
        starts, digits = np.cumsum(lengths) - lengths, np.frexp(lengths)[1]
        return [
            Constants(indices, _table(order, starts[indices], lengths[indices], segments.dtype))
            for indices in (np.flatnonzero(digits == number) for number in np.unique(digits[lengths > 0]))
        ]

    def of_padded(self, entries: LocalArray) -> LocalArray:
        """Return sums (..., count) of entries (..., n + 1) on a device; the last entry is a zero, for padding."""
        xp: Any = arrays_of(entries)
        out = xp.full((*entries.shape[:-1], self.count), 0, entries.dtype)
        for table in self._tables:
            segment_indices, indices = table.on(xp)
            out[..., segment_indices] = np.sum(entries[..., indices], axis=-2)
        return out


def _table(order: np.ndarray, starts: np.ndarray, lengths: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the indices of the entries of some segments, one column per segment, padded with the index of the zero."""
    steps = np.arange(lengths.max())[:, None]
    # Indices beyond the end of a segment are valid but unused.
    indices = np.minimum(starts + steps, len(order) - 1)
    return np.where(steps < lengths, order[indices], len(order)).astype(dtype)


def summed_by_segment(values: np.ndarray, numbers: np.ndarray, count: int) -> np.ndarray:
    """Return `segment_sum` of arrays on the host."""
    return Segments(numbers, count, checked=False)(values)


def _added(values: np.ndarray, numbers: np.ndarray, count: int) -> np.ndarray:
    """Return the sums on the host, added in the order of the entries."""
    rest = values.shape[1:]
    if values.ndim == 1 or values.dtype.char not in "fdFD" or not values.size:
        out = np.zeros((count, *rest), values.dtype)
        np.add.at(out, numbers, values)
        return out
    import scipy.sparse  # here, since it would double the import time of the library

    # For several columns, np.add.at takes ten times as long as SciPy's product with a matrix of one entry per column.
    real = np.ascontiguousarray(values).reshape(len(values), math.prod(rest)).view(np.finfo(values.dtype).dtype)
    entries = np.ones(len(values), real.dtype), numbers, np.arange(len(values) + 1)
    matrix = scipy.sparse.csc_array(entries, (count, len(values)))
    return (matrix @ real).view(values.dtype).reshape(count, *rest)


@primitive
def add_segments(values: LocalArray, segments: Segments | tuple[Array, int]) -> LocalArray:
    """Return the sums of the segments' entries, differentiable with respect to `values`; `segments`: or its arguments."""
    return _segments_of(segments)(values)


@primitive
def take_segments(sums: LocalArray, segments: Segments | tuple[Array, int]) -> LocalArray:
    """Return for each entry the sum of its segment: the transpose of `add_segments`."""
    return _segments_of(segments).taken(sums)


def _segments_of(segments: Segments | tuple[Array, int]) -> Segments:
    return Segments(*segments, checked=False) if isinstance(segments, tuple) else segments


defvjp(add_segments, lambda ans, values, segments: lambda g: take_segments(g, segments))
defvjp(take_segments, lambda ans, sums, segments: lambda g: add_segments(g, segments))
defjvp(add_segments, lambda g, ans, values, segments: add_segments(g, segments))
defjvp(take_segments, lambda g, ans, sums, segments: take_segments(g, segments))
