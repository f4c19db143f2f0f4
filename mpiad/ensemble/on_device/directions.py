"""The gradient of a solve on the device by tangents: one for each number that a trajectory is differentiated by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.directions import numbers
from mpiad.ensemble.on_device.adjoint import of_slots
from mpiad.ensemble.on_device.record import Record
from mpiad.ensemble.on_device.tangents import push
from mpiad.ensemble.tangents import Directions
from mpiad.transport.device_arrays import is_device_array

__all__ = ["contracted"]

# Carried at once: each takes as much memory as the states and stages of all columns.
_AT_ONCE = 8
# Which number of a trajectory: a leaf's place (None: the initial state), where in it, and 1 or 1j.
_Number = tuple[int | None, Any, complex]


def contracted(
    record: Record, saved: Array, end: Array, by_u0: bool, places: Sequence[int]
) -> tuple[Array, dict[int, Array]]:
    """Return the cotangents of the initial states, shape (d, N), and of leaves of the parameters.

    Parameters
    ----------
    record : Record
    saved, end : array, shape (N, n_saved, d), (N, d)
        Cotangents of the results.
    by_u0 : bool
        Whether by the initial states; zeros if not.
    places : sequence of int
        Of the leaves.
    """
    batch = record.batch
    u0 = np.zeros_like(batch.u0)
    leaves: dict[int, Any] = {place: _nothing(batch.p.leaves[place]) for place in places}
    saved = np.where(np.isnan(saved), 0, saved)  # of what wasn't reached
    for group in _groups(record, by_u0, places):
        taker = None if record.saves is None else _Weighed(record, saved, len(group))
        final = push(record, _directions(record, group), taker)
        parts = np.sum((record.masked(end.T) * final).real, axis=1)
        if taker is not None:
            parts = parts + taker.total
        for j, (place, index, unit) in enumerate(group):
            # Of a real function of a + ib the derivative is ∂/∂a - i ∂/∂b: see autograd's convention.
            part = parts[j] if unit == 1.0 else -1j * parts[j]
            if place is None:
                u0[index] += part
            elif np.ndim(leaves[place]):
                leaves[place][index] += part if batch.p.varies[place] else np.sum(part)
            else:  # a number, which may be the host's
                leaves[place] = leaves[place] + np.sum(part)
    return u0, leaves


def _groups(record: Record, by_u0: bool, places: Sequence[int]) -> Iterator[list[_Number]]:
    batch = record.batch
    found: list[_Number] = [(None, *number) for number in numbers(batch.u0, True)] if by_u0 else []
    for place in places:
        found += [(place, *number) for number in numbers(batch.p.leaves[place], batch.p.varies[place])]
    for first in range(0, len(found), _AT_ONCE):
        yield found[first : first + _AT_ONCE]


def _directions(record: Record, group: list[_Number]) -> Directions:
    batch = record.batch
    u0 = np.zeros_like(batch.u0, shape=(len(group), *batch.u0.shape))
    leaves: dict[int, list[Any]] = {place: [None] * len(group) for place, *_ in group if place is not None}
    for j, (place, index, unit) in enumerate(group):
        if place is None:
            u0[j][index] = unit
        else:
            leaf = batch.p.leaves[place]
            leaves[place][j] = direction = _nothing(leaf)
            if np.ndim(leaf):
                direction[index] = unit
            else:
                leaves[place][j] = direction + np.result_type(leaf).type(unit)
    return Directions(u0, leaves)


def _nothing(leaf: Any) -> Any:
    """Return zeros like a leaf, which may be a number of the host's."""
    return np.zeros_like(leaf) if is_device_array(leaf) else np.result_type(leaf).type(0)


class _Weighed:
    """Adds up what saved states' tangents and cotangents have in common, so that no tangent needs to be kept."""

    def __init__(self, record: Record, saved: Array, count: int):
        self._saved, looks = saved, record.saves.looks  # type: ignore[union-attr]
        self.total = np.zeros_like(saved.real, shape=(count, len(saved)))
        if looks:
            # A place more, for what nobody asked for.
            self._padded = np.zeros_like(saved, shape=(saved.shape[0], saved.shape[1] + 1, saved.shape[2]))
            self._padded[:, :-1] = saved

    def inside(self, ids: Array, slot: Array, states: Array) -> None:
        weights = np.moveaxis(self._padded[ids, slot], -1, 1)
        self.total[:, ids] += np.sum((weights * states).real, axis=(1, 2))

    def at_end(self, mask: np.ndarray, states: Array) -> None:
        self.total += np.sum((of_slots(self._saved, mask) * states).real, axis=1)
