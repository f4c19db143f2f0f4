"""Forward mode of a solve on the device: tangents carried along its rounds, from the first to the last.

Values and tangents of a round make one array of shape (1 + directions, d, n), so a sum over stages is one product for all.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mpiad._typing import Array
from mpiad.differentiation.bundles import Bundle
from mpiad.ensemble.field import Field
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.on_device.checkpoints import forwards
from mpiad.ensemble.on_device.record import Block, Record, Round
from mpiad.ensemble.on_device.stages import interpolation
from mpiad.ensemble.tangents import Directions
from mpiad.transport.device_arrays import arrays_of

__all__ = ["Taker", "kept", "push"]


class Taker(Protocol):
    """What the tangents of saved states are handed to, as they come."""

    def inside(self, ids: Array, slot: Array, states: Array) -> None:
        """Take those saved in one step: of n trajectories (n,), at s of their times (s, n), of shape (m, s, d, n)."""
        ...

    def at_end(self, mask: np.ndarray, states: Array) -> None:
        """Take those saved at an end, (m, d, N), of the times that a mask on the host (N, n_saved) says."""
        ...


def push(record: Record, directions: Directions, taker: Taker | None) -> Array:
    """Return the tangents of the final states, shape (m, d, N), and hand those of saved states to a taker.

    Parameters
    ----------
    record : Record
    directions : Directions
        Of u0, shape (m, d, N), and for leaves m arrays each, or None.
    taker : Taker or None
        None where saved states aren't asked for.
    """
    begin = record.masked(directions.u0)
    end = begin.copy()
    with np.errstate(all="ignore"), Bundle() as bundle:
        for block in record.blocks:
            end[:, :, block.ids] = _Way(record, block, directions, bundle, taker).run(end[:, :, block.ids])
    if taker is not None:
        for mask, states in zip(record.at_ends(), (begin, end)):
            taker.at_end(mask, states)
    return end


def kept(record: Record, directions: Directions) -> tuple[Array | None, Array]:
    """Return the tangents of saved states, shape (m, N, n_saved, d), None without any, and of final ones, (m, N, d)."""
    taker = None if record.saves is None else _Kept(record, directions.u0)
    end = push(record, directions, taker)
    return None if taker is None else taker.saved[:, :, :-1].copy(), np.moveaxis(end, 1, 2)


class _Kept:
    """Keeps all."""

    def __init__(self, record: Record, u0: Array):
        (m, d, count), self._home = u0.shape, arrays_of(u0)
        # One place more, to which columns write that have nothing to save.
        self.saved = np.zeros_like(u0, shape=(m, count, record.saves.count + 1, d))  # type: ignore[union-attr]

    def inside(self, ids: Array, slot: Array, states: Array) -> None:
        self.saved[:, ids, slot] = np.moveaxis(states, 2, -1)

    def at_end(self, mask: np.ndarray, states: Array) -> None:
        home: Any = self._home
        for slot in np.flatnonzero(mask.any(axis=0)).tolist():
            rows = home.to_device(np.flatnonzero(mask[:, slot]))
            self.saved[:, rows, slot] = np.moveaxis(states[:, :, rows], 1, 2)


class _Way:
    """One block of columns on the way forwards."""

    def __init__(self, record: Record, block: Block, directions: Directions, bundle: Bundle, taker: Taker | None):
        self._record, self._block, self._taker, self._table = record, block, taker, record.table
        varies = record.batch.p.varies
        along = [
            [None if g is None else g[..., block.ids] if varies[place] else g for g in gs]
            for place, gs in directions.leaves.items()
        ]
        tracing = Tracing(Field(record.batch), tuple(directions.leaves), False)
        self._write = tracing.along(bundle, block.leaves, along)

    def run(self, tangents: Array) -> Array:
        """Return the tangents of the columns' last states in this block."""
        for done in forwards(self._record, self._block):
            tangents = self._pushed(done, tangents)
        return tangents

    def _pushed(self, done: Round, tangents: Array) -> Array:
        last, sign = self._table.tableau.stages - 1, self._block.sign
        h = done.steps().astype(self._table.real)
        if sign is not None:
            h = h * sign.astype(self._table.real)
        u = np.concatenate([done.u[None], tangents])
        k = np.empty_like(u, shape=(last + 1, *u.shape))
        y = u
        saving = self._taker is not None and bool(done.most)
        inside = saving and self._record.saves.inside  # type: ignore[union-attr]
        for i in range(last + inside):  # the last stage is for what is saved inside only
            t = self._table.time(i, done.t, done.h, done.t_new, sign)
            self._write(k[i], y, t)
            if i < last:
                y = u + h * np.tensordot(self._table.rows[i], k[: i + 1], 1)
        if saving:
            self._save(done, u, k, h, y)
        return y[1:]

    def _save(self, done: Round, u: Array, k: Array, h: Array, new: Array) -> None:
        due, taker = self._record.due(self._block, done), self._taker
        states = new[1:, None]
        if self._record.saves.inside:  # type: ignore[union-attr]
            total = np.zeros_like(u, shape=(len(u) - 1, len(due.x), *u.shape[1:]))
            for i, weight in enumerate(interpolation(self._table, due.x)):
                total += weight[:, None] * k[i, 1:, None]
            states = np.where(due.at_end[:, None], states, u[1:, None] + h * total)
        taker.inside(self._block.ids, due.slot, states)  # type: ignore[union-attr]
