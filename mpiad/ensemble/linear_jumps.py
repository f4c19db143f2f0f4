"""The adjoint of events that change the state: of their affects, and of their times.

The affect A of an event at the time τ maps u⁻, the state at the end of a step or after the previous event, to the state
u⁺ = A(u⁻, p, τ). This is a jump. The transpose of the Jacobian of A maps the cotangent λ⁺ of u⁺ to the cotangent λ⁻ of u⁻.
The nonzero entries of the Jacobians are computed for all events of a run before the backward sweep.

If τ changes, all later steps are shifted; σ⁺ is the cotangent of this shift. The cotangent of a given time is σ⁺ + A_τ·λ⁺,
plus the cotangent of the size of the step that ends there. The cotangent of the time of a root is propagated to the inputs
of the condition (`pull_event`). If a given time is the start of the solve, or the time of the previous event, its change δ
changes u⁻ by u' δ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.event import affect_field
from mpiad.ensemble.jumps import FOUND, Jumps, mass_matrix_rhs
from mpiad.ensemble.linearization import transposed_columns
from mpiad.ensemble.run import Run
from mpiad.ensemble.step_sweep import Columns


class LinearJumps:
    """Linearized jumps for the backward sweep: all jumps, or only those before the first steps if a kernel does the sweep.

    - `places`: the indices of the differentiated leaves of the parameters. `timed`: whether times are differentiated.
    - `due`: shape (n, N); cotangents of the first n - 1 given times of each trajectory, and a row of zeros.
    - `at_start`: the indices of the jumps before the first steps, in order, and their trajectories.
    """

    def __init__(self, run: Run, jumps: Jumps, places: Sequence[int], timed: bool):
        self._run, self._jumps, self._places, self._timed = run, jumps, places, timed
        self.at_start = [(rows, jumps.ids[rows]) for rows in jumps.at_start()]
        # For jumps that aren't at a given time (`slot` is FOUND, -1), `pull` adds zeros to the last row.
        self.due = np.zeros((int(run.jumps.slot.max()) + 2, run.batch.size))  # type: ignore[union-attr]
        self._after = np.zeros_like(jumps.before)
        # Nonzero entries of the Jacobians: 0 or 1 for the real or imaginary part of u⁺, row, column, values for all jumps.
        self._terms: list[tuple[int, int, int, Array]] = []
        self._by_time: list[tuple[int, int, Array]] = []  # derivatives by the times: part, row, values
        self._rates: Array = None
        if timed:  # u' before the jumps at given times at which no step ends
            self._rates, rows = np.zeros_like(jumps.before), np.flatnonzero(jumps.stepless & (jumps.slot != FOUND))
            if rows.size:
                self._rates[:, rows] = rates(run, jumps.ids[rows], jumps.before[:, rows], jumps.time[rows])
        pulls = [self._transposed(e, rows, (), timed) for e, rows in jumps.kinds]
        # The real and the imaginary part of each component are differentiated separately.
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

    def _transposed(self, event: int, rows: Columns, places: Sequence[int], timed: bool) -> Callable[[Array], list[Any]]:
        """Return a function from cotangents of the states after jumps to cotangents of states, leaves and times."""
        run, u, t = self._run, self._jumps.before[:, rows], self._jumps.time[rows]
        leaves = run.columns(run.batch.p.leaves, self._jumps.ids[rows])
        field = affect_field(run.settings.events[event], run.batch)
        return transposed_columns(field, places, timed, np.empty_like(u), u, leaves, t)

    def pull(self, rows: Array, cotangent: Array, time_bar: Array) -> tuple[Array, Array]:
        """Propagate cotangents back over some jumps, at most one per trajectory; add cotangents of given times to `due`.

        `cotangent`: shape (d, n); of the states after the jumps. `time_bar`: shape (n,); of the times at which later steps
        begin. Returns the cotangents of the states before the jumps, and of the times at which earlier steps end.
        """
        self._after[:, rows] = cotangent
        before, parts = np.zeros_like(cotangent), (cotangent.real, cotangent.imag)
        for part, c, i, factor in self._terms:
            before[i] += factor[rows] * parts[part][c]
        if self._rates is None:
            return before, time_bar
        for part, c, factor in self._by_time:
            time_bar = time_bar + factor[rows] * parts[part][c]
        jumps, drift = self._jumps, (before * self._rates[:, rows]).real.sum(axis=0)
        given = jumps.slot[rows] != FOUND
        self.due[jumps.slot[rows], jumps.ids[rows]] += np.where(given, time_bar + drift, 0.0)
        return before, np.where(given, -drift, time_bar)

    def lengthened(self, rows: Array, by_size: Array) -> Array:
        """Add cotangents of step sizes to those of the given times at which these steps end; return the added numbers."""
        jumps = self._jumps
        # A given time at which a step ends determines the size of this step.
        added = np.where(~jumps.stepless[rows] & (jumps.slot[rows] != FOUND), by_size, 0.0)
        self.due[jumps.slot[rows], jumps.ids[rows]] += added
        return added

    def add_leaves(self, leaves: dict[int, Array]) -> None:
        """Add the contributions of all jumps to the cotangents of the leaves, after `pull` has processed all jumps."""
        for e, rows in self._jumps.kinds if self._places else ():
            _, *parts, _ = self._transposed(e, rows, self._places, False)(self._after[:, rows])
            add_leaves(self._run, leaves, dict(zip(self._places, parts)), self._jumps.ids[rows])


def add_leaves(run: Run, leaves: dict[int, Array], parts: dict[int, Any], ids: Array) -> None:
    """Add the contributions `parts` of the trajectories `ids`, in ascending order, to the cotangents of leaves."""
    p, first = run.batch.p, np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    # An event may occur more than once in a trajectory.
    sums = {k: np.add.reduceat(x, first, axis=-1) if p.varies[k] and x is not None else x for k, x in parts.items()}
    p.add_cotangents(leaves, sums, ids[first])


def rates(run: Run, ids: Array, u: Array, t: Array) -> Array:
    """Return u' of some trajectories at given states and times, shape (d, n)."""
    batch, columns = run.batch, run.doubled(len(ids))
    # In C order, sums over components have the same rounding for any number of columns (see `controller`).
    u, t = u[:, columns].copy(), t[columns].astype(run.coefficients.real)
    return mass_matrix_rhs(batch, run.settings.mass, u, batch.p.taken(ids[columns]), t)[:, : len(ids)]
