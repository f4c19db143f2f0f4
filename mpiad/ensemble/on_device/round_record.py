"""The record of a solve on a device for derivatives: the states before each round, and the steps of the round."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.coefficients import DeviceCoefficients
from mpiad.ensemble.on_device.saved_slots import Due, EveryStep, SaveTimes
from mpiad.ensemble.step_sweep import LocatedEvent
from mpiad.transport.devices.device_arrays import arrays_of


class Round(NamedTuple):
    """One step of all columns (trajectories) of a block; times are multiplied by `Record.signs`, so they increase."""

    t: Array  # shape (n,), like `h` and `t_new`
    h: Array
    t_new: Array
    accepted: Array  # bool, shape (n,)
    u: Array | None  # shape (d, n); before the step; None if the states must be recomputed
    place: Array  # int, shape (n,); the number of values saved before the round (for `EveryStep` without the initial state)
    count: Array | None  # int, shape (n,); the number of saved times in the step of each column; None if all are zero
    reached: Array | None  # shape (n,); the end of the step if an event may have cut it short; None if it is `t_new`
    most: int  # the largest count
    located: list[LocatedEvent]

    def at(self, columns: Array) -> Round:
        """Return the round with only some of its columns."""
        taken: list[Any] = [None if array is None else np.take(array, columns, axis=-1) for array in self[:-2]]
        if not self.located:
            return Round._make([*taken, self.most, []])
        new_index = np.full_like(columns, -1, shape=self.t.shape)
        new_index[columns] = arrays_of(columns).arange(len(columns))  # type: ignore[union-attr]
        return Round._make([*taken, self.most, [_moved(part, new_index) for part in self.located]])


def _moved(located: LocatedEvent, new_index: Array) -> LocatedEvent:
    """Return an event without removed columns; `new_index`: the new index of each column, -1 for removed ones."""
    columns = new_index[located.columns]
    rest = np.flatnonzero(columns >= 0)
    return located._replace(columns=columns[rest], x=located.x[rest], time=located.time[rest], row=located.row[rest])


class Events(NamedTuple):
    """The times of events and the end times of trajectories."""

    reached: Array  # shape (N,); end times of the trajectories
    ids: Array  # int, shape (m,); the trajectories of all events
    times: Array  # shape (m,); the times of these events
    order: np.ndarray  # int, shape (m,), on the host; the permutation that sorts the events


class Block:
    """Rounds of the same columns. `ids`: the trajectories, shape (n,). `sign`: 1 or -1, shape (n,); None if all are 1."""

    def __init__(self, ids: Array, sign: Array | None, leaves: list[Any]):
        self.ids, self.sign, self.leaves = ids, sign, leaves
        self.rounds: list[Round] = []


class Record:
    """All rounds of a solve, block by block; `every`: the number of rounds between stored states, None if all are stored.

    When the record is closed, the columns of failed trajectories are removed from `blocks`.
    """

    def __init__(
        self, batch: Batch, table: DeviceCoefficients, saves: SaveTimes | EveryStep | None, every: int | None = None
    ):
        self.batch, self.table, self.saves, self.every = batch, table, saves, every
        # Factors of times: -1 for trajectories that are integrated backwards in time.
        self.signs = np.where(batch.end < batch.start, -1.0, 1.0)
        self.blocks: list[Block] = []
        self.events: Events | None = None  # None without event conditions

    def begin(self, ids: Array, sign: Array | None, leaves: list[Any]) -> None:
        """Begin a block of columns."""
        self.blocks.append(Block(ids, sign, leaves))

    def note(self, round_: Round) -> None:
        """Add a round to the last block."""
        rounds = self.blocks[-1].rounds
        between = self.every is not None and len(rounds) % self.every
        rounds.append(round_._replace(u=None) if between else round_)

    def close(self, failed: np.ndarray) -> None:
        """Remove failed trajectories, since f may not be finite at their states."""
        if not failed.any():
            return
        xp: Any = arrays_of(self.batch.u0)
        live, blocks, varies = xp.to_device(~failed), self.blocks, self.batch.p.varies
        self.blocks = []
        for block in blocks:
            columns = np.flatnonzero(live[block.ids])
            leaves = [np.take(leaf, columns, axis=-1) if v else leaf for leaf, v in zip(block.leaves, varies)]
            sign = None if block.sign is None else block.sign[columns]
            self.blocks.append(Block(block.ids[columns], sign, leaves))
            self.blocks[-1].rounds = [round_.at(columns) for round_ in block.rounds]

    def due(self, block: Block, round_: Round) -> Due:
        """Return the slots and times of the values saved in a round."""
        saves: Any = self.saves
        end = round_.t_new if round_.reached is None else round_.reached
        return saves.due(block.ids, round_.place, round_.count, round_.most, round_.t, round_.h, end)
