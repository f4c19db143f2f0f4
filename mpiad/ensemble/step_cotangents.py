"""What the way back through a step leaves to others: cotangents of parameters and times, and of states inside the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.coefficients import stage_rates
from mpiad.ensemble.step_sweep import Columns
from mpiad.ensemble.transposed_step import Arrival, TransposedStep

__all__ = ["Inside", "StepCotangents"]


class Inside(NamedTuple):
    """Cotangents of states u + h Σ w_i(x) k_i inside a step.

    Parameters
    ----------
    columns : array of int, shape (m,)
        None comes twice.
    value : array, shape (d, m), or (s, d, m) for several in each column
    x : array, shape (m,), or (s, m)
    weights : sequence of array, shape (m,), or (s, 1, m)
    whole : array of bool, shape (m,), or None
        Whether the last stage's share is taken here; if not, it is that of the step after. None: everywhere.
    """

    columns: Columns
    value: Array
    x: Array
    weights: Sequence[Array]
    whole: Array | None = None

    def arrival(self, step: TransposedStep) -> Arrival:
        """Return what the stages of the step gain."""
        last = step.last
        weights = dict(enumerate(self.weights[:last]))
        if len(step.k) > last:
            weights[last] = self.weights[last] if self.whole is None else self.weights[last] * self.whole
        return Arrival(self.columns, self.value * step.h[self.columns], weights)


class StepCotangents:
    """What one step adds to.

    Parameters
    ----------
    parts : dict
        From places of leaves to their cotangents, which are added to.
    width : int
        How many columns count; the others are doubles.

    Attributes
    ----------
    t_bar, h_bar : array, shape (n,)
        Cotangents of the time before the step and of its size.
    """

    def __init__(self, step: TransposedStep, parts: dict[int, Array], varies: Sequence[bool], width: int, timed: bool):
        self._step, self._parts, self._varies, self._width, self._timed = step, parts, varies, width, timed
        if timed:
            self.t_bar, self.h_bar = (np.zeros_like(step.h, dtype=float) for _ in range(2))
            self._divisor = np.where(step.h == 0, 1, step.h)  # what makes no step doesn't move with its size

    def note_stage(self, j: int, parts: list[Any], y_bar: Array | None) -> None:
        """Note the cotangents of the leaves, of time, and of the argument of stage j."""
        self.note_leaves(parts, np.s_[: self._width], self._width)
        if not self._timed:
            return
        if parts[-1] is not None:
            self.t_bar += parts[-1]
            self.h_bar += self._step.tableau.c[j] * parts[-1]
        if j and y_bar is not None:
            # y_j = u + h Σ a k, so its derivative by h is (y_j - u) / h; and so it is of the new state.
            self.h_bar += _dot(y_bar, self._step.y[j] - self._step.y[0]) / self._divisor

    def note_leaves(self, parts: Sequence[Any], columns: Columns, count: int) -> None:
        """Add to the cotangents of the leaves; `columns` says to those of which trajectories, `count` of them."""
        for (place, total), part in zip(self._parts.items(), parts):
            if part is None:
                continue
            if self._varies[place]:
                total[..., columns] += part[..., :count]
            elif np.ndim(total):  # a number can't be added to in place
                total += part
            else:
                self._parts[place] = total + part

    def note_new(self, cotangent: Array) -> None:
        """Note how the new state moves with the size of the step."""
        step = self._step
        self.h_bar += _dot(cotangent, step.argument(step.last) - step.y[0]) / self._divisor

    def note_saved(self, inside: Sequence[Inside]) -> None:
        """Note how states at fixed times inside the step move with its time and size."""
        step = self._step
        for part in inside:
            columns = part.columns
            stages = [k[:, columns] for k in step.k]
            rates = stage_rates(step.tableau, part.x)
            rate = _dot(part.value, sum(r[..., None, :] * k for r, k in zip(rates, stages)))
            by_size = _dot(part.value, sum(w * k for w, k in zip(part.weights, stages)))
            # At a fixed time, x = (time - t) / h.
            self.t_bar[columns] -= _summed(rate)
            self.h_bar[columns] += _summed(by_size - rate * part.x)


def _dot(cotangent: Array, change: Array) -> Array:
    return (cotangent * change).real.sum(axis=-2)


def _summed(x: Array) -> Array:
    """Return the sum over several values of each column, as `over_slots` does with states."""
    return x if x.ndim == 1 else np.sum(x, axis=0)
