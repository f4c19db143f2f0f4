"""The states of a solve on the device between its rounds, for any trajectory at any time."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.on_device.checkpoints import forwards
from mpiad.ensemble.on_device.rates import parameters_of, rates_of
from mpiad.ensemble.on_device.record import Block, Record, Round
from mpiad.ensemble.on_device.stages import Stages, polynomials, states_at
from mpiad.transport.device_arrays import arrays_of

__all__ = ["DenseStates", "round_polynomials"]


def round_polynomials(record: Record, block: Block, done: Round) -> Array:
    """Return the states inside a round as polynomials in the part of the step, shape (degree + 1, d, n)."""
    batch, table, sign = record.batch, record.table, block.sign
    rates, p = rates_of(batch.f, batch.shape), parameters_of(batch, block.leaves)
    k = rates.at(done.u, p, table.time(0, done.t, done.t, done.t, sign))
    if sign is not None:
        k = k * sign.astype(table.real)
    stages = Stages(table, rates, done.u, k, p, done.t, done.h, done.t_new, sign)
    return polynomials(table, done.u, stages.h, stages.k)


class DenseStates:
    """The interpolants of all accepted steps, trajectory after trajectory.

    Parameters
    ----------
    record : Record
    """

    def __init__(self, record: Record):
        batch, home = record.batch, arrays_of(record.batch.u0)
        arrays: Any = home
        self._record, d, n = record, len(batch.u0), batch.size
        self._counts = arrays.full((n,), 0, np.int64)
        for block in record.blocks:
            for done in block.rounds:
                self._counts[block.ids] += done.accepted
        ends = np.cumsum(self._counts)
        self._offsets = ends - self._counts
        total, most = arrays.to_host(np.stack([ends[-1], np.max(self._counts)])).tolist() if n else (0, 0)
        # So many halvings find one of the most steps that a trajectory took.
        self._halvings = int(most).bit_length()
        # A place more, for steps that weren't accepted.
        self._t, self._h = (arrays.full((total + 1,), 1.0, float) for _ in range(2))
        self._terms = np.zeros_like(batch.u0, shape=(record.table.tableau.dense.shape[1] + 1, d, total + 1))
        number, trash = np.zeros_like(self._counts), np.full_like(self._counts, total)
        with np.errstate(all="ignore"):
            for block in record.blocks:
                for done in forwards(record, block):
                    own = np.where(done.accepted, self._offsets[block.ids] + number[block.ids], trash[block.ids])
                    number[block.ids] += done.accepted
                    self._t[own], self._h[own] = done.t, done.h
                    self._terms[:, :, own] = round_polynomials(record, block, done)

    def at(self, ids: Array, t: Array, sign: Array | None) -> Array:
        """Return the states of trajectories at times, shape (d, len(ids)); beyond their steps by the nearest one.

        Parameters
        ----------
        ids : array of int, shape (m,)
        t : array, shape (m,)
            Actual times.
        sign : array, shape (N,), or None
            -1 for trajectories that go backwards; None where there are none.
        """
        t = t if sign is None else t * sign[ids]
        offset, high = self._offsets[ids], self._counts[ids] - 1
        low = np.zeros_like(high)
        for _ in range(self._halvings):
            middle = (low + high + 1) // 2
            begun = self._t[offset + middle] <= t
            low, high = np.where(begun, middle, low), np.where(begun, high, middle - 1)
        place = offset + low
        x = ((t - self._t[place]) / self._h[place]).astype(self._record.table.real)
        return states_at(self._terms[:, :, place], x)
