"""The adjoint of events that change the state: of their affects, and of their times.

The affect A maps u⁻, the state at the end of a step or after the previous event, to u⁺ = A(u⁻, p, τ). The transpose of its
Jacobian maps the cotangent λ⁺ to λ⁻. Its nonzero entries are computed for all events of a run before the backward sweep.

If the time τ changes, all later steps shift; σ⁺ is the cotangent of the time at which these begin. The cotangent of a given
time is σ⁺ + A_τ·λ⁺, plus the cotangent of the size of the step that ends there. The cotangent of the time of a root is
propagated to the inputs of the condition (`pull_event`). If no step lies between a given time and an earlier event at the
same time, a shift of the given time changes u⁻ by u'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.derivative import derivative_of
from mpiad.ensemble.event import affect_field
from mpiad.ensemble.jumps import FOUND, Jumps, mass_matrix_rhs
from mpiad.ensemble.linearization import transposed_columns
from mpiad.ensemble.run import Run
from mpiad.ensemble.step_sweep import Columns


class LinearJumps:
    """Jumps of a run in the backward sweep: all, or the jumps before the first steps if a kernel processes the others.

    - `places`: the leaves to differentiate with respect to. `timed`: whether to differentiate with respect to times.
    - `due`: shape (slots, N); cotangents of the given times of events.
    - `at_start`: the indices of the jumps before the first steps, in order, and their trajectories.
    """

    def __init__(self, run: Run, jumps: Jumps, places: Sequence[int], timed: bool):
        self._run, self._jumps, self._places, self._timed = run, jumps, places, timed
        self.at_start = [(rows, jumps.ids[rows]) for rows in jumps.at_start()]
        # The last row is for jumps that aren't at a given time.
        self.due = np.zeros((int(run.jumps.slot.max()) + 2, run.batch.size))  # type: ignore[union-attr]
        self._after = np.zeros_like(jumps.before)
        # Nonzero entries: 0 (real) or 1 (imaginary part), components of the states after and before, factors of all jumps.
        self._terms: list[tuple[int, int, int, Array]] = []
        self._by_time: list[tuple[int, int, Array]] = []
        self._rates: Array = None
        if timed:  # u' before jumps at given times, if no step ends there
            self._rates, rows = np.zeros_like(jumps.before), np.flatnonzero(jumps.still & (jumps.slot != FOUND))
            if rows.size:
                self._rates[:, rows] = rates(run, jumps.ids[rows], jumps.before[:, rows], jumps.time[rows])
        pulls = [self._traced(e, rows, (), timed) for e, rows in jumps.kinds]
        # Derivatives are linear in real and imaginary parts.
        for part, unit in enumerate((1.0, 1j) if np.iscomplexobj(jumps.before) else (1.0,)):
            for c in range(len(jumps.before)):
                self._linearize(pulls, part, c, unit)

    def _linearize(self, pulls: Sequence[Callable], part: int, c: int, unit: complex) -> None:
        """Store the derivatives of component c of the states after jumps."""
        before, by_time = np.zeros_like(self._after), np.zeros(len(self._jumps.ids))
        for (_, rows), pull in zip(self._jumps.kinds, pulls):
            seed = np.zeros_like(before, shape=(len(before), len(self._jumps.ids[rows])))
            seed[c] = unit
            before[:, rows], by_time[rows] = pull(seed)
        self._terms += [(part, c, i, values.copy()) for i, values in enumerate(before) if np.count_nonzero(values)]
        if by_time.any():
            self._by_time.append((part, c, by_time))

    def _traced(self, event: int, rows: Columns, places: Sequence[int], timed: bool) -> Callable[[Array], list[Any]]:
        """Return a function from cotangents of the states after jumps to cotangents of states, leaves and times."""
        run, u, t = self._run, self._jumps.before[:, rows], self._jumps.time[rows]
        leaves = run.columns(run.batch.p.leaves, self._jumps.ids[rows])
        field = affect_field(run.settings.events[event], run.batch)
        return transposed_columns(field, places, timed, np.empty_like(u), u, leaves, t)

    def pull(self, rows: Array, cotangent: Array, since: Array) -> tuple[Array, Array]:
        """Propagate cotangents back over some jumps, at most one per trajectory, and add to `due`.

        `cotangent`, `since`: the cotangents of the states after the jumps, shape (d, n), and of the times at which later
        steps begin, (n,). Returns the cotangents of the states before, and of the times at which earlier steps end.
        """
        self._after[:, rows] = cotangent
        before, parts = np.zeros_like(cotangent), (cotangent.real, cotangent.imag)
        for part, c, i, factor in self._terms:
            before[i] += factor[rows] * parts[part][c]
        if self._rates is None:
            return before, since
        for part, c, factor in self._by_time:
            since = since + factor[rows] * parts[part][c]
        jumps, drift = self._jumps, (before * self._rates[:, rows]).real.sum(axis=0)
        given = jumps.slot[rows] != FOUND
        self.due[jumps.slot[rows], jumps.ids[rows]] += np.where(given, since + drift, 0.0)
        return before, np.where(given, -drift, since)

    def lengthened(self, rows: Array, by_size: Array) -> Array:
        """Add cotangents of step sizes to the given times at which the steps end; return the added numbers."""
        jumps = self._jumps
        gained = np.where(jumps.lengthens[rows], by_size, 0.0)
        self.due[jumps.slot[rows], jumps.ids[rows]] += gained
        return gained

    def add_leaves(self, leaves: dict[int, Array]) -> None:
        """Add the contributions to the cotangents of the leaves, after all jumps have been processed."""
        for e, rows in self._jumps.kinds if self._places else ():
            _, *parts, _ = self._traced(e, rows, self._places, False)(self._after[:, rows])
            add_leaves(self._run, leaves, dict(zip(self._places, parts)), self._jumps.ids[rows])


def add_leaves(run: Run, leaves: dict[int, Array], parts: dict[int, Any], ids: Array) -> None:
    """Add the contributions of the trajectories `ids`, in ascending order, to the cotangents of leaves; None is zero."""
    for place, part in parts.items():
        if part is None:
            continue
        if run.batch.p.varies[place]:  # a trajectory may meet an event more than once
            first = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
            leaves[place][..., ids[first]] += np.add.reduceat(part, first, axis=-1)
        else:
            leaves[place] = leaves[place] + part


def rates(run: Run, ids: Array, u: Array, t: Array) -> Array:
    """Return u' of some trajectories at given states and times, shape (d, n)."""
    batch, columns, mass = run.batch, run.doubled(len(ids)), run.settings.mass
    # In C order NumPy sums over components row by row.
    u, t = u[:, columns].copy(), t[columns].astype(run.coefficients.real)
    if mass is not None:
        return mass_matrix_rhs(batch, mass, u, run.columns(batch.p.leaves, ids[columns]), t)[:, : len(ids)]
    found = np.empty_like(u)
    derivative_of(batch.f, batch.shape).write(found, u, batch.p.columns(ids[columns], run.field.one_by_one), t)
    return found[:, : len(ids)]
