"""Sums over the segments of a vector on a device, as the rows of a sparse matrix are: each in a fixed order.

Atomic additions would do it in no certain order. Here segments of similar lengths are gathered side by side, as the columns
of a table whose shorter ones end with a zero, and the table's rows are added up. Lengths within a table differ by less than
a factor of two, so no more than half of it is zeros; there are as many tables as the longest segment has binary digits.
"""

from __future__ import annotations

import numpy as np

from mpiad._typing import LocalArray
from mpiad.device.constants import Constants
from mpiad.transport.device_arrays import arrays_of

__all__ = ["SegmentSums"]


class SegmentSums:
    """Where the entries of each segment are.

    Parameters
    ----------
    segments : array of int, of length n
        The segment that each entry belongs to.
    count : int
        How many segments there are; some may have no entry.
    """

    def __init__(self, segments: np.ndarray, count: int):
        self.count = count
        order, lengths = np.argsort(segments, kind="stable"), np.bincount(segments, minlength=count)
        starts, digits = np.cumsum(lengths) - lengths, np.frexp(lengths)[1]
        self._tables = [
            Constants(which, _table(order, starts[which], lengths[which], segments.dtype))
            for which in (np.flatnonzero(digits == number) for number in np.unique(digits[lengths > 0]))
        ]

    def __call__(self, entries: LocalArray) -> LocalArray:
        """Add up.

        Parameters
        ----------
        entries : device array of shape (..., n + 1)
            The last one is zero.

        Returns
        -------
        device array of shape (..., count)
        """
        home = arrays_of(entries)
        out = home.full((*entries.shape[:-1], self.count), 0, entries.dtype)  # type: ignore[union-attr]
        for table in self._tables:
            which, places = table.on(home)
            out[..., which] = np.sum(entries[..., places], axis=-2)
        return out


def _table(order: np.ndarray, starts: np.ndarray, lengths: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the places of some segments' entries, a column for each, filled up with that of the zero."""
    steps = np.arange(lengths.max())[:, None]
    # Beyond the end of a segment any place will do, since it isn't used.
    places = np.minimum(starts + steps, len(order) - 1)
    return np.where(steps < lengths, order[places], len(order)).astype(dtype)
