"""Fields in 16 bits an entry: rounded to multiples of a step, of which differences between neighbours are kept.

Two bytes for the values themselves leave errors that look like noise, and a step that takes differences of a restored field
magnifies them: of a wave with 25 cells in its length the gradient is then right to 1e-3 only. Where a field is smooth its
differences are small, and so is the step by which they fit into 16 bits. Integers are added and subtracted exactly, so
that errors are half a step everywhere, however high the order of the differences, which is that with the smallest step.

References
----------
.. [1] L. Ibarria, P. Lindstrom, J. Rossignac and A. Szymczak, "Out-of-core compression and decompression of large
   n-dimensional scalar fields", Comput. Graph. Forum 22 (2003): the Lorenzo predictor, here of any order.
.. [2] S. Di and F. Cappello, "Fast error-bounded lossy HPC data compression with SZ", IPDPS 2016.
.. [3] N. Kukreja et al., "Lossy checkpoint compression in full waveform inversion", Geosci. Model Dev. 15 (2022).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["SMALLEST", "Coded", "coded", "largest_of"]

SMALLEST = 256  # entries of an array that is worth it
_LARGEST, _FULL = 32767, 10000  # of the differences, and from where on 16 bits are used well
_ORDERS = range(5)
_RANGE = 2.0**24  # multiples of the step that an entry may be: single precision is fine enough
_WIDE = 300  # entries of a layer that is worth a call
_NEAR = 8  # cells around the largest entry by which the order is chosen


class Coded(NamedTuple):
    """An array in 16 bits an entry.

    Attributes
    ----------
    differences : array of int16
        In the shape of the array; of a complex one with an axis behind for both parts.
    corner : array of int32
        The first entries, which have too few neighbours before them, in full.
    step : float
    order : int
        Of the differences, along the first dimension; of the first entries along it, which have no such differences, along
        the next one, and so on.
    """

    differences: np.ndarray
    corner: np.ndarray
    step: float
    order: int

    def array(self, dtype: np.dtype) -> np.ndarray:
        """Return the array, of which each entry is off by half a step at most."""
        found = self.differences.astype(np.int32)
        axes = _axes(found.ndim, dtype)
        found[_corner(self.order, axes)] = self.corner
        for axis in reversed(axes):
            part = found[_corner(self.order, range(axis))]
            for k in range(self.order, 0, -1):
                _add_up(part[_along(axis, slice(k - 1, None))], axis)
        entries = (found * self.step).astype(np.finfo(dtype).dtype, copy=False)
        return entries.view(dtype)[..., 0] if dtype.kind == "c" else entries


def coded(array: np.ndarray) -> Coded | None:
    """Return an array of real or complex floats in 16 bits an entry; None where it isn't finite."""
    entries = np.ascontiguousarray(array)
    if array.dtype.kind == "c":
        entries = entries[..., None].view(np.finfo(array.dtype).dtype)
    axes, largest = _axes(entries.ndim, array.dtype), largest_of(entries)
    if not np.isfinite(largest):
        return None
    if largest < np.finfo(float).tiny * _RANGE:
        return Coded(np.zeros(entries.shape, np.int16), np.zeros_like(entries[_corner(0, axes)], np.int32), 0.0, 0)
    place = np.unravel_index(np.argmax(entries), entries.shape)
    sample = entries[tuple(slice(max(k - _NEAR, 0), k + _NEAR) for k in place)]
    # One and a half times as large, since elsewhere differences may be larger.
    step, order = min((max(1.5 * _step_for(sample, k), largest / _RANGE), k) for k in _ORDERS)
    while True:
        scaled = entries / step
        numbers = np.rint(scaled, out=scaled).astype(np.int32)
        _subtract_neighbours(numbers, order, axes)
        corner = numbers[_corner(order, axes)].copy()
        numbers[_corner(order, axes)] = 0
        found = int(largest_of(numbers))
        finest = step <= largest / _RANGE
        if found <= _LARGEST and (found >= _FULL or finest):
            return Coded(numbers.astype(np.int16), corner, step, order)
        # What rounding adds to differences doesn't become less with the step: leave room for it.
        step = max(step * max(found, 1) / (0.9 * _LARGEST), largest / _RANGE)


def largest_of(entries: np.ndarray) -> float:
    """Return the largest absolute value; NaN where there is one."""
    return float(np.maximum(entries.max(), -entries.min()))


def _step_for(sample: np.ndarray, order: int) -> float:
    differences = np.diff(sample, order, 0) if len(sample) > order else sample
    return largest_of(differences) / (_LARGEST - 2**order)


def _subtract_neighbours(field: np.ndarray, order: int, axes: range) -> None:
    """Replace entries by their differences along the first dimension, the first ones of these along the next."""
    for axis in axes:
        part = field[_corner(order, range(axis))]
        for k in range(1, order + 1):
            part[_along(axis, slice(k, None))] -= part[_along(axis, slice(k - 1, -1))]


def _add_up(field: np.ndarray, axis: int) -> None:
    layers = np.moveaxis(field, axis, 0)
    if field.size < _WIDE * len(layers):
        np.cumsum(field, axis, out=field)
    else:  # layer by layer, which is faster than NumPy's sums across rows
        for k in range(1, len(layers)):
            layers[k] += layers[k - 1]


def _corner(order: int, axes: range) -> tuple[slice, ...]:
    """Return the first entries along some dimensions."""
    return (slice(max(order, 1)),) * len(axes)


def _along(axis: int, part: slice) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, part)


def _axes(ndim: int, dtype: np.dtype) -> range:
    return range(ndim - (dtype.kind == "c"))
