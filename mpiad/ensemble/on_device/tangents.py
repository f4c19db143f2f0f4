"""Forward mode of a solve on the device: a tangent carried along its rounds, from the first to the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.trace import Variables, trace_forwards
from mpiad.ensemble.field import Field, is_whole
from mpiad.ensemble.on_device.checkpoints import forwards
from mpiad.ensemble.on_device.record import Block, Record, Round
from mpiad.ensemble.on_device.stages import interpolation
from mpiad.primitives.cotangents import conform, spec_like
from mpiad.transport.device_arrays import arrays_of

__all__ = ["push"]


def push(record: Record, u0: Array, leaves: dict[int, Array]) -> tuple[Array, Array | None]:
    """Return the tangents of the saved and of the final states, of shapes (N, n_saved, d) and (N, d).

    Parameters
    ----------
    record : Record
    u0 : array, shape (d, N)
        Tangent of the initial states.
    leaves : dict
        From places of leaves of the parameters to their tangents.
    """
    u0 = record.masked(u0)
    end, saved = u0.copy(), None
    if record.saves is not None:
        # One place more, to which columns write that have nothing to save.
        saved = np.zeros_like(u0, shape=(u0.shape[1], record.saves.count + 1, len(u0)))
    with np.errstate(all="ignore"):
        for block in record.blocks:
            end[:, block.ids] = _Way(record, block, leaves, saved).run(end[:, block.ids])
    if saved is None:
        return None, end.T
    saved = saved[:, :-1].copy()
    for mask, states in zip(record.at_ends(), (u0, end)):
        for slot in np.flatnonzero(mask.any(axis=0)).tolist():
            home: Any = arrays_of(u0)
            rows = home.to_device(np.flatnonzero(mask[:, slot]))
            saved[rows, slot] = states[:, rows].T
    return saved, end.T


class _Way:
    """One block of columns on the way forwards."""

    def __init__(self, record: Record, block: Block, leaves: dict[int, Array], saved: Array | None):
        self._record, self._block, self._saved, self._table = record, block, saved, record.table
        self._field, self._places = Field(record.batch), list(leaves)
        varies = record.batch.p.varies
        self._along = [g[..., block.ids] if varies[place] else g for place, g in leaves.items()]

    def run(self, tangent: Array) -> Array:
        """Return the tangents of the columns' last states in this block."""
        for done in forwards(self._record, self._block):
            tangent = self._pushed(done, tangent)
        return tangent

    def _pushed(self, done: Round, tangent: Array) -> Array:
        last, sign = self._table.tableau.stages - 1, self._block.sign
        h = done.steps().astype(self._table.real)
        if sign is not None:
            h = h * sign.astype(self._table.real)
        k, dk = (np.empty_like(done.u, shape=(last + 1, *done.u.shape)) for _ in range(2))
        y, dy = done.u, tangent
        inside = bool(done.most) and self._record.saves.inside  # type: ignore[union-attr]
        for i in range(last + inside):  # the last stage is for what is saved inside only
            t = self._table.time(i, done.t, done.h, done.t_new, sign)
            self._stage(y, dy, t, k[i], dk[i])
            if i < last:
                row = self._table.rows[i]
                y = done.u + h * np.tensordot(row, k[: i + 1], 1)
                dy = tangent + h * np.tensordot(row, dk[: i + 1], 1)
        if done.most:
            self._save(done, tangent, dk, h, dy)
        return dy

    def _stage(self, y: Array, dy: Array, t: Array, k: Array, dk: Array) -> None:
        """Write f and its tangent into k and dk, shape (d, n) each."""
        def called(given: Sequence[Any]) -> list[Any]:
            leaves = list(self._block.leaves)
            for place, leaf in zip(self._places, given[1:]):
                leaves[place] = leaf
            return list(self._field.rows(given[0], leaves, t))

        variables = [y, *[self._block.leaves[place] for place in self._places]]
        tangents = [conform(g, *spec_like(x)) for g, x in zip([dy, *self._along], variables)]
        found = trace_forwards(called, Variables(variables, list(range(len(variables))), list), tangents, "solve")
        for out, rows in zip((k, dk), found):
            if is_whole(rows, y.shape):
                out[...] = rows[0]
            else:
                for i, row in enumerate(rows):
                    out[i] = row

    def _save(self, done: Round, tangent: Array, dk: Array, h: Array, new: Array) -> None:
        due = self._record.due(self._block, done)
        if not self._record.saves.inside:  # type: ignore[union-attr]
            self._saved[self._block.ids, due.slot] = new.T[None]  # type: ignore[index]
            return
        total = np.zeros_like(tangent, shape=(len(due.x), *tangent.shape))
        for i, weight in enumerate(interpolation(self._table, due.x)):
            total += weight[:, None] * dk[i]
        states = np.where(due.at_end[:, None], new, tangent + h * total)
        self._saved[self._block.ids, due.slot] = np.moveaxis(states, 1, -1)  # type: ignore[index]
