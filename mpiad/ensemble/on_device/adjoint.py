"""Reverse mode of a solve on the device: the adjoint of its rounds, from the last to the first.

With y_i = u + h Σ a_ij k_j and k_i = f(y_i) a cotangent λ of the new state goes back as in `transposed_step`:
k̄_j = h Σ_i a_ij ȳ_i, ȳ_j = f'(y_j)ᵀ k̄_j, ū = λ + Σ_j ȳ_j. A step that wasn't accepted has length zero here, and its
cotangents pass unchanged. What is saved inside a step, u + h Σ w_j(x) k_j, adds h w_j times its cotangent to k̄_j.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.field import Field
from mpiad.ensemble.linearization import Tracing
from mpiad.ensemble.on_device.checkpoints import backwards
from mpiad.ensemble.on_device.crossing import crossing
from mpiad.ensemble.on_device.events import Met
from mpiad.ensemble.on_device.record import Block, Record, Round
from mpiad.ensemble.on_device.stages import interpolation
from mpiad.transport.device_arrays import arrays_of

__all__ = ["of_slots", "pull"]


def pull(
    record: Record, saved: Array, end: Array, places: Sequence[int], times: Sequence[Array] = ()
) -> tuple[Array, dict[int, Array]]:
    """Return the cotangents of the initial states, shape (d, N), and of leaves of the parameters.

    Parameters
    ----------
    record : Record
    saved, end : array, shape (N, n_saved, d), (N, d)
        Cotangents of the results.
    places : sequence of int
        Of the leaves.
    times : (array, array), of shapes (N,), (m,)
        Where events were looked for, those of the times at which trajectories ended, and of all events'.
    """
    batch = record.batch
    tracing = Tracing(Field(batch), places, False)
    initial, final = record.at_ends()
    saved = np.where(np.isnan(saved), 0, saved)  # of what wasn't reached
    cotangent = record.masked(end.T) + record.masked(of_slots(saved, final))
    leaves = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
    if record.saves is not None and record.saves.looks:
        # A place more, for what nobody asked for.
        padded = np.zeros_like(saved, shape=(saved.shape[0], saved.shape[1] + 1, saved.shape[2]))
        padded[:, :-1] = saved
    else:
        padded = None
    with np.errstate(all="ignore"):
        for block in reversed(record.blocks):
            part, parts = _Sweep(record, block, tracing, padded, places, times).run(cotangent[:, block.ids])
            cotangent[:, block.ids] = part
            for place, found in parts.items():
                if batch.p.varies[place]:
                    leaves[place][..., block.ids] += found
                else:
                    leaves[place] = leaves[place] + found
    return cotangent + record.masked(of_slots(saved, initial)), leaves


def of_slots(saved: Array, mask: np.ndarray) -> Array:
    """Return the sum of the cotangents of saved values that are one state, shape (d, N)."""
    total = np.zeros_like(saved, shape=(saved.shape[2], saved.shape[0]))
    for slot in np.flatnonzero(mask.any(axis=0)).tolist():
        own = mask[:, slot]
        if own.all():
            total += saved[:, slot].T
        else:
            home: Any = arrays_of(saved)
            rows = home.to_device(np.flatnonzero(own))
            total[:, rows] += saved[rows, slot].T
    return total


class _Sweep:
    """One block of columns on the way back."""

    def __init__(
        self, record: Record, block: Block, tracing: Tracing, saved: Array | None, places: Sequence[int],
        times: Sequence[Array],
    ):  # fmt: skip
        self._record, self._block, self._tracing, self._saved, self._times = record, block, tracing, saved, times
        self._table = record.table
        self._parts: dict[int, Array] = {place: np.zeros_like(block.leaves[place]) for place in places}

    def run(self, cotangent: Array) -> tuple[Array, dict[int, Array]]:
        """Return the cotangents of the columns' first states in this block, and of the leaves."""
        for done in backwards(self._record, self._block):
            cotangent = self._pulled(done, cotangent)
        return cotangent, self._parts

    def _pulled(self, done: Round, cotangent: Array) -> Array:
        last = self._table.tableau.stages - 1
        h = done.steps().astype(self._table.real)
        sign = self._block.sign
        if sign is not None:
            h = h * sign.astype(self._table.real)
        inside: Any = None
        weights: list[Array] = []
        if done.most and self._saved is not None:
            inside, weights, at_end = self._seeds(done)
            cotangent = cotangent + at_end
        k, pulls, y = self._stages(done, h, last + (inside is not None or bool(done.met)))
        for met in done.met:
            cotangent, value, more = self._crossed(done, met, h, k, cotangent)
            inside = value if inside is None else np.concatenate([inside, value])
            weights = [np.concatenate(pair) for pair in zip(weights, more)] if weights else more
        before = cotangent if inside is None else cotangent + np.sum(inside, axis=0)
        bars: Any = np.empty_like(done.u, shape=(last, *done.u.shape))  # h ȳ_i of the stages from the second on
        if inside is not None:
            k_bar = h * np.sum(inside * weights[last][:, None], axis=0)
            y_bar = self._note(pulls[last](k_bar), y[last])
            cotangent, before = cotangent + y_bar, before + y_bar
        bars[last - 1] = h * cotangent
        for j in range(last - 1, -1, -1):
            k_bar = np.tensordot(self._table.columns[j], bars[j:], 1)
            if inside is not None:
                k_bar = k_bar + h * np.sum(inside * weights[j][:, None], axis=0)
            y_bar = self._note(pulls[j](k_bar), y[j])
            before = before + y_bar
            if j:
                bars[j - 1] = h * y_bar
        return before

    def _crossed(
        self, done: Round, met: Met, h: Array, k: Array, cotangent: Array
    ) -> tuple[Array, Array, list[Array]]:
        """Return the cotangent of the round's states, and that of states at an event, (1, d, n), with their weights."""
        end, columns = None, met.columns
        if met.terminal:
            time = self._times[0][self._block.ids[columns]]
            end, cotangent = cotangent[:, columns], cotangent.copy()
            cotangent[:, columns] = 0
        else:
            time = self._times[1][met.row]
        places = tuple(self._parts)
        found = crossing(self._record, self._block, met, done.u, h, k, end, time, places)
        for place, part in zip(places, found.leaves):
            if part is not None and self._record.batch.p.varies[place]:
                self._parts[place][..., columns] += part
            elif part is not None:
                self._parts[place] = self._parts[place] + part
        value = np.zeros_like(cotangent)
        value[:, columns] = found.value
        weights = [np.zeros_like(h) for _ in found.weights]
        for all_of_them, own in zip(weights, found.weights):
            all_of_them[columns] = own
        return cotangent, value[None], [weight[None] for weight in weights]

    def _stages(self, done: Round, h: Array, count: int) -> tuple[Array, list[Callable], list[Array]]:
        """Compute stages again, and return them, their transposed derivatives and their arguments."""
        k = np.empty_like(done.u, shape=(count, *done.u.shape))
        pulls, arguments = [], []
        for i in range(count):
            y = done.u if i == 0 else done.u + h * np.tensordot(self._table.rows[i - 1], k[:i], 1)
            t = self._table.time(i, done.t, done.h, done.t_new, self._block.sign)
            pulls.append(self._tracing.transposed(k[i], y, self._block.leaves, t))
            arguments.append(y)
        return k, pulls, arguments

    def _seeds(self, done: Round) -> tuple[Array | None, list[Array], Array]:
        """Return the cotangents of what was saved inside a step, (m, d, n), its stages' weights, and those at its end."""
        due = self._record.due(self._block, done)
        seeds = np.moveaxis(self._saved[self._block.ids, due.slot], -1, 1)  # type: ignore[index]
        at_end = np.sum(np.where(due.at_end[:, None], seeds, 0), axis=0)
        if not self._record.saves.inside:  # type: ignore[union-attr]
            return None, [], at_end
        return np.where(due.at_end[:, None], 0, seeds), interpolation(self._table, due.x), at_end

    def _note(self, found: list[Any], y: Array) -> Array:
        """Add a stage's cotangents of the leaves, and return that of its argument."""
        y_bar, *parts = found
        for place, part in zip(self._parts, parts):
            if part is not None:
                self._parts[place] = self._parts[place] + part
        return np.zeros_like(y) if y_bar is None else y_bar
