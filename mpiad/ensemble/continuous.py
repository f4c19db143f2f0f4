"""The adjoint of the differential equation itself, solved backwards beside the interpolated states.

Between saved times λ' = -f_uᵀ λ, at each of them λ jumps by the cotangent of what is saved there, and p̄ = ∫ f_pᵀ λ dt. Each
trajectory's λ has steps of its own. The integral is taken by Gauss's rule over these steps, so that parameters which all
share need no room of their own in each trajectory.

What comes out is an approximation, to the tolerance of the solve, of the derivative of the exact solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpiad._typing import Array
from mpiad.ensemble.adjoint import Cotangents, begun, of_ends, to_start
from mpiad.ensemble.backends import EnsembleVectorized
from mpiad.ensemble.batch import Batch, Parameters
from mpiad.ensemble.coefficients import polynomials, states_at
from mpiad.ensemble.field_jacobian import OwnJacobian
from mpiad.ensemble.linear_jumps import rates
from mpiad.ensemble.linearization import Tracing, transposed_columns
from mpiad.ensemble.on_device.device_run import run_of
from mpiad.ensemble.outcome import Outcome, ReturnCode
from mpiad.ensemble.run import Run
from mpiad.ensemble.seeds import Seeds
from mpiad.ensemble.stage_systems import StageSystems
from mpiad.errors import IntegrationError

# Gauss's rule of order 6 on (0, 1).
_NODES, _WEIGHTS = (0.5 - np.sqrt(0.15), 0.5, 0.5 + np.sqrt(0.15)), (5 / 18, 8 / 18, 5 / 18)


def pull_continuous(run: Run, seeds: Seeds, places: Sequence[int], timed: bool) -> Cotangents:
    """Return the cotangents of a run's inputs by the continuous adjoint.

    `places` are of the leaves of the parameters to differentiate by; `timed` says whether by the ends of tspan, too. An
    IntegrationError where the adjoint equation can't be solved to the end; a NotImplementedError where conditions ended
    trajectories or let events act, or times of events on the way have cotangents.
    """
    _require_no_events(run, seeds)
    with np.errstate(all="ignore"):
        found = _Adjoint(run, seeds, places, timed).solved()
    if timed and seeds.reached is not None:
        # Where no event came first, the time that was reached is the end of tspan itself.
        found.end += np.where(run.placed(run.live & ~run.terminated), seeds.reached, 0)
    return found


def _require_no_events(run: Run, seeds: Seeds) -> None:
    """Raise where the results moved with the times of events."""
    if seeds.crossed is not None and run.on_host(np.any(seeds.crossed != 0)):
        raise NotImplementedError(
            "solve: adjoint='continuous' knows no derivative of the times of events. Use adjoint='discrete', the default."
        )
    if run.jumps is not None and len(run.stops.ids):
        raise NotImplementedError(
            "solve: adjoint='continuous' goes through events that act at given times only, but a condition vanished. Use "
            "adjoint='discrete', the default."
        )
    if run.jumps is None and run.terminated.any():
        raise NotImplementedError(
            f"solve: adjoint='continuous' doesn't go through terminal events, and {np.count_nonzero(run.terminated)} "
            "trajectories ended by one. Use adjoint='discrete', the default."
        )


def _require_solved(outcome: Outcome, ids: Array) -> None:
    """Raise where the adjoint equation of one of the trajectories `ids` wasn't solved to the end."""
    if outcome.failed.any():
        i, code = int(ids[np.flatnonzero(outcome.failed)[0]]), ReturnCode.names_of(outcome.codes)[outcome.failed][0]
        raise IntegrationError(
            f"solve: the adjoint equation of trajectory {i + 1} failed ({code}) on its way back. "
            "adjoint='discrete', the default, needs no such solve."
        )


class _Adjoint:
    """The adjoint equation of all trajectories that moved."""

    def __init__(self, run: Run, seeds: Seeds, places: Sequence[int], timed: bool):
        self._run, self._saved, self._dense, self._timed = run, seeds.saved, DenseStates(run), timed
        self._by_state = Tracing(run.field, (), False)
        batch = run.batch
        leaves: dict[int, Any] = {place: np.zeros_like(batch.p.leaves[place]) for place in places}
        self._found = Cotangents(of_ends(run, seeds), run.numbers(batch.size), run.numbers(batch.size), leaves)
        self._linear = begun(run, seeds, self._found, places, timed)
        # The last jump of each trajectory that hasn't been gone back over.
        self._place: Any = None if run.jumps is None else run.jumps.bounds(batch.size)[1:] - 1
        self._moving = np.zeros_like(self._found.u0)

    @cached_property
    def _systems(self) -> StageSystems:
        return StageSystems(self._run, ())

    def solved(self) -> Cotangents:
        """Return the cotangents."""
        timed = self._timed
        run, found, batch, moving = self._run, self._found, self._run.batch, self._run.counts > 0
        now = batch.end.copy() if self._linear is None else run.reached.copy()
        if timed:
            # By the end of tspan the derivative is λ·f there; by its start -λ·f, since the same u0 is met later.
            self._add_flow(found.end, moving if self._linear is None else moving & ~run.cut, found.u0, batch.end)
        if self._saved is not None:
            times = run.saved_on_the_way(self._dense.ends)
            # The adjoint state jumps where a state is saved, by its cotangent: so the way back is gone piece by piece.
            for place in range(times.shape[1] - 1, -1, -1):
                self._meet(place, times[:, place], now, timed)
        self._go(moving, now, batch.start)
        if timed:
            self._add_flow(found.start, moving, -found.u0, batch.start)
        if self._saved is not None:
            run.take_up(found.u0, self._saved, at_start=True)
        if self._linear is not None:
            to_start(found, self._linear)
        return found

    def _meet(self, place: int, due: Array, now: Array, timed: bool) -> None:
        """Go back to where saved states of this place lie, and take up their cotangents."""
        here, found = np.isfinite(due), self._found
        if not here.any():
            return
        self._go(here, now, np.where(here, due, now))
        ids, value = self._run.chosen(here), np.swapaxes(self._saved[:, place], 0, 1)  # type: ignore[index]
        found.u0[:, ids] += value[:, ids]
        # What is saved where an event acts is the state after it, whenever that is.
        if self._linear is not None:
            self._moving[:, ids] += np.where(due[ids] == self._next_jump()[ids], value[:, ids], 0)
        if timed:
            self._add_flow(found.end, here & (due == self._run.batch.end), value, due)

    def _go(self, mask: Array, now: Array, end: Array) -> None:
        """Go with some trajectories back to another time, which then is `now`, over the events behind it."""
        batch = self._run.batch
        signs = np.where(batch.end < batch.start, -1.0, 1.0)
        while self._linear is not None:
            due = self._next_jump()
            # What is saved where an event acts is the state after it.
            here = mask & (signs * due > signs * end)
            if not here.any():
                break
            self._solve(here, now, np.where(here, due, now))
            self._jump(self._place[here])
        self._solve(mask, now, end)

    def _next_jump(self) -> Array:
        """Return when the next jump back of each trajectory is; NaN where none is but those at the start."""
        jumps: Any = self._run.jumps
        rows = np.maximum(self._place, 0)
        mine = (self._place >= 0) & (jumps.ids[rows] == np.arange(self._run.batch.size)) & (jumps.number[rows] > 0)
        return np.where(mine, jumps.time[rows], np.nan)

    def _jump(self, rows: Array) -> None:
        """Go back over jumps, one of each of some trajectories."""
        run, found, linear = self._run, self._found, self._linear
        jumps: Any = run.jumps
        ids, t, after = jumps.ids[rows], jumps.time[rows], found.u0[:, jumps.ids[rows]]
        first = (self._dense.counts[ids] > jumps.number[rows]) if self._timed else np.zeros(len(ids), bool)
        if first.any():
            # With the time at which what follows begins its result would move as its start does.
            own, u = ids[first], self._dense.at(ids[first], t[first])
            value = after[:, first] - self._moving[:, own]
            found.start[own] = -(value * rates(run, own, u, t[first])).real.sum(axis=0)
        self._moving[:, ids] = 0
        before, since = linear.pull(rows, after, found.start[ids])  # type: ignore[union-attr]
        found.u0[:, ids], found.start[ids] = before, since
        self._dense.counts[ids] = jumps.number[rows]
        if self._timed:
            gained = (before * rates(run, ids, jumps.before[:, rows], t)).real.sum(axis=0)
            linear.lengthened(rows, gained)  # type: ignore[union-attr]
        self._place[ids] -= 1

    def _solve(self, mask: Array, now: Array, end: Array) -> None:
        """Solve the adjoint equation of some trajectories back to another time, which then is `now`."""
        mask = mask & (now != end)
        if not mask.any():
            return
        run, found, ids = self._run, self._found, self._run.chosen(mask)
        p = Parameters([ids], [True], lambda leaves: leaves[0])
        rate = OwnJacobian(self._rate, self._write) if run.tableau.implicit else self._rate
        batch = Batch(rate, (len(found.u0),), found.u0[:, ids], p, now[mask], end[mask])
        settings = self._run.settings._replace(
            saveat=np.empty(0), record=bool(found.leaves), checkpoints=None, events=(), progress=None, ends=False,
        )  # fmt: skip
        outcome = EnsembleVectorized().run(batch, settings)
        _require_solved(outcome, np.flatnonzero(mask))
        found.u0[:, ids] = outcome.u_end
        now[mask] = end[mask]
        if found.leaves:
            self._integrate(run_of(batch, settings, outcome), ids)

    def _rate(self, cotangent: Array, ids: Array, t: Array) -> Array:
        """Return λ' = -f_uᵀ λ."""
        run, u = self._run, self._dense.at(ids, t)
        leaves = run.columns(run.batch.p.leaves, ids)
        (u_bar,) = self._by_state.transposed(np.empty_like(u), u, leaves, t)(cotangent)
        return np.zeros_like(u) if u_bar is None else -u_bar

    def _write(self, out: Array, cotangent: Array, ids: Array, t: Array) -> Array:
        """Write the Jacobian of λ', -f_uᵀ, and return the derivative of λ' by time, along which u moves."""
        leaves, ones = self._run.columns(self._run.batch.p.leaves, ids), np.ones((1, len(t)))
        u, systems = self._dense.at(ids, t), self._systems
        jacobian = np.zeros_like(out)
        systems.jacobian(jacobian, u, leaves, t)
        np.negative(np.swapaxes(jacobian, 0, 1), out=out)
        return -systems.pull(u, leaves, t, cotangent[:, None], self._dense.rates(ids, t)[:, None], ones)[0]

    def _integrate(self, solved: Run, ids: Array) -> None:
        """Add ∫ f_pᵀ λ dt over all steps of λ."""
        coefficients = solved.coefficients
        for sweep in solved.sweeps():
            for visit in sweep.forwards():
                own, h = ids[sweep.ids[: len(visit.t)]], visit.h.astype(coefficients.real, copy=False)
                terms = polynomials(coefficients, visit.u, h, solved.stages_again(sweep, visit)[0])
                for node, weight in zip(_NODES, _WEIGHTS):
                    # λ goes backwards, so h is signed; it is zero where no step was made.
                    self._note(own, visit.t + node * visit.h, states_at(terms, node) * (-weight * h))

    def _note(self, ids: Array, t: Array, value: Array) -> None:
        run, found, places = self._run, self._found, tuple(self._found.leaves)
        u, leaves = self._dense.at(ids, t), run.columns(run.batch.p.leaves, ids)
        time = t.astype(run.coefficients.real, copy=False)
        _, *parts, _ = transposed_columns(run.field, places, False, np.empty_like(u), u, leaves, time)(value)
        for place, part in zip(places, parts):
            if part is not None:
                found.add_to_leaf(place, part, ids if run.batch.p.varies[place] else None)

    def _add_flow(self, total: Array, mask: Array, value: Array, times: Array) -> None:
        """Add the products of cotangents, (d, N), and derivatives of the states of some trajectories at times, (N,)."""
        if not mask.any():
            return
        run, ids, t = self._run, self._run.chosen(mask), self._run.placed(times[mask])
        total[ids] += np.sum((value[:, ids] * rates(run, ids, self._dense.at(ids, t), t)).real, axis=0)


class DenseStates:
    """The interpolants of all steps of a run, trajectory after trajectory, as polynomials in the part of the step.

    `counts`, int of shape (N,): how many steps of each are looked at, from the first on.
    """

    def __init__(self, run: Run):
        self._run, batch = run, run.batch
        ends = np.cumsum(run.counts)
        total, degree = int(ends[-1]) if len(ends) else 0, run.tableau.dense.shape[1]
        # So many halvings find one of the most steps that a trajectory took.
        self._halvings = int(run.counts.max(initial=0)).bit_length()
        self.counts, self._offsets = run.placed(run.counts) + 0, run.placed(ends - run.counts)
        backward = batch.end < batch.start
        self._sign = run.placed(np.where(backward, -1.0, 1.0)) if backward.any() else None
        # A place more, for steps that weren't made.
        self._t, self._h = run.numbers(total + 1), run.numbers(total + 1) + 1.0
        self._terms = np.zeros_like(batch.u0, shape=(degree + 1, len(batch.u0), total + 1))
        number = np.zeros_like(self.counts)
        with np.errstate(all="ignore"):
            for sweep in run.sweeps():
                for visit in sweep.forwards():
                    ids, h = sweep.ids[: len(visit.t)], visit.h.astype(run.coefficients.real, copy=False)
                    place = self._offsets[ids] + number[ids]
                    if visit.made is not None:
                        place = np.where(visit.made, place, np.full_like(place, total))
                    number[ids] += 1 if visit.made is None else visit.made
                    self._t[place], self._h[place] = visit.t, visit.h
                    terms = polynomials(run.coefficients, visit.u, h, run.stages_again(sweep, visit)[0])
                    for power in range(len(terms)):
                        self._terms[power][:, place] = terms[power]

    def at(self, ids: Array, t: Array) -> Array:
        """Return the states of trajectories at times, shape (d, len(ids)); beyond their steps by the nearest one."""
        place = self._offsets[ids] + self._number(ids, t)
        x = ((t - self._t[place]) / self._h[place]).astype(self._run.coefficients.real)
        return states_at([self._terms[power][:, place] for power in range(len(self._terms))], x)

    def rates(self, ids: Array, t: Array) -> Array:
        """Return the derivatives of these states by time."""
        place = self._offsets[ids] + self._number(ids, t)
        h, real = self._h[place], self._run.coefficients.real
        x = ((t - self._t[place]) / h).astype(real)
        terms = [power * self._terms[power][:, place] for power in range(1, len(self._terms))]
        return states_at(terms, x) / h.astype(real)

    def ends(self, ids: Array, numbers: Array) -> Array:
        """Return the times after steps of trajectories, by their numbers from 0."""
        place = self._offsets[ids] + numbers
        return self._t[place] + self._h[place]

    def _number(self, ids: Array, t: Array) -> Array:
        """Return in which steps times lie, by bisection."""
        low, high, offset = np.zeros_like(ids), self.counts[ids] - 1, self._offsets[ids]
        for _ in range(self._halvings):
            middle = (low + high + 1) // 2
            gone = t - self._t[offset + middle]
            begun = (gone if self._sign is None else gone * self._sign[ids]) >= 0
            low, high = np.where(begun, middle, low), np.where(begun, high, middle - 1)
        return low
