"""Events: when a condition changes its sign along a trajectory, found on the step's interpolant."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Function, Shape, Tree
from mpiad.ensemble.coefficients import Coefficients
from mpiad.ensemble.interpolant import interpolate
from mpiad.ensemble.stages import locked
from mpiad.ensemble.step import Step

__all__ = ["BISECTIONS", "Event", "EventWatch", "require_numbers"]

# Halvings of a step until its parts can't be told apart.
BISECTIONS = 60


@dataclass(frozen=True)
class Event:
    """A sign change of a condition along a trajectory.

    Parameters
    ----------
    condition : callable
        ``condition(u, p, t)`` returns a number for each column, as f is called.
    terminal : bool
        Whether the trajectory ends there, with the return code Terminated.
    direction : int
        Above zero: only from negative to positive; below zero: only from positive to negative; 0: both.

    Raises
    ------
    TypeError
        Where the condition isn't a function.
    """

    condition: Function
    terminal: bool = True
    direction: int = 0

    def __post_init__(self) -> None:
        if not callable(self.condition):
            raise TypeError(f"Event: condition must be a function, but got {type(self.condition).__name__}.")

    def for_states(self, shape: Shape) -> Event:
        """Return the event with a condition of columns, where the user's sees states of a shape as f does.

        Raises
        ------
        NotImplementedError
            Where the states are matrices.
        """
        if len(shape) == 1:
            return self
        if shape:
            raise NotImplementedError(
                f"solve: events are looked for along states of shape (d,), but u0 has shape {shape}. Flatten it, and give "
                "its old shape back in f."
            )
        return dataclasses.replace(self, condition=_OfNumbers(self.condition))

    @property
    def written(self) -> Function:
        """The condition as the user wrote it."""
        return self.condition.written if isinstance(self.condition, _OfNumbers) else self.condition

    def value(self, u: Array, p: Tree, t: Array) -> Array:
        """Return the condition's value for each column, shape (n,).

        Raises
        ------
        NotImplementedError
            Where it is traced by something around it.
        TypeError
            Where it is complex.
        ValueError
            Where it has another shape.
        """
        value = self.condition(locked(u), p, locked(np.array(t)))
        require_numbers(value, t.shape)
        return np.asarray(value).astype(float)

    def crossed(self, before: Array, after: Array) -> Array:
        """Tell for each column whether the condition changed its sign as asked for."""
        up, down = (before <= 0) & (after >= 0), (before >= 0) & (after <= 0)
        # A step that starts on the root has counted it already, or starts there.
        moved = before != 0
        chosen = up if self.direction > 0 else down if self.direction < 0 else up | down
        return chosen & moved


def require_numbers(value: Any, shape: Shape) -> None:
    """Raise where a condition didn't return one real number for each column.

    Raises
    ------
    NotImplementedError
        Where it is traced by something around it.
    TypeError
        Where it is complex.
    ValueError
        Where it has another shape.
    """
    if isbox(value):
        raise NotImplementedError(
            "Event: condition uses a traced value from around it, through which no derivative can flow. Pass it as p."
        )
    if np.shape(value) != shape:
        raise ValueError(
            f"Event: condition returned shape {np.shape(value)}, but one number for each column was expected: {shape}. "
            "It is called with columns as f is, u of shape (d, n); a norm or a sum must be taken along axis 0."
        )
    if np.iscomplexobj(value):
        raise TypeError(
            f"Event: condition returned {getattr(value, 'dtype', type(value).__name__)}, but an event is where a real "
            "number changes its sign. Return the part that is meant: np.real, np.imag or np.abs of it."
        )


@dataclass(frozen=True)
class _OfNumbers:
    """The condition of columns of one component, by that of numbers."""

    written: Function

    def __call__(self, u: Array, p: Tree, t: Array) -> Array:
        return self.written(u[0], p, t)


class EventWatch:
    """The values of the conditions at the working set's columns, and what becomes of them in a step.

    Parameters
    ----------
    events : tuple of Event
    coefficients : Coefficients
    event_times, event_places : dict
        From trajectories to lists of (number of the event, time), and of (number of the step, its part), filled in.
    """

    def __init__(
        self, events: tuple[Event, ...], coefficients: Coefficients, event_times: dict[int, list[tuple[int, float]]],
        event_places: dict[int, list[tuple[int, float]]],
    ):  # fmt: skip
        self._events, self._coefficients, self._times, self._places = events, coefficients, event_times, event_places
        self._values: list[Array] = []

    def enter(self, u: Array, p: Tree, t: Array) -> None:
        """Take up the columns of a new working set, at their present states and times."""
        self._values = [event.value(u, p, t) for event in self._events]

    def after(self, step: Step, p: Tree, select: Function) -> tuple[Array, Array, Array]:
        """Find the events of a step.

        Parameters
        ----------
        step : Step
        p : nest
            The columns' parameters.
        select : callable
            ``select(ids)`` returns the parameters of some trajectories.

        Returns
        -------
        tuple
            The columns that a terminal event ends, at which part of the step (m,), and their states there (d, m).
        """
        parts = np.full((len(self._events), len(step.t)), np.inf)
        states = {}
        for number, event in enumerate(self._events):
            new = event.value(step.new, p, step.actual(step.t_new))
            columns = np.flatnonzero(step.accepted & event.crossed(self._values[number], new))
            if columns.size:
                found = self._locate(event, step.at(columns), self._values[number][columns], select)
                parts[number, columns] = found[0]
                states.update({(number, c): found[1][:, j] for j, c in enumerate(columns)})
            self._values[number] = np.where(step.accepted, new, self._values[number])
        return self._settle(step, parts, states)

    def _locate(self, event: Event, step: Step, before: Array, select: Function) -> tuple[Array, Array]:
        """Return parts and states, by bisection down to the resolution of time."""
        p, single = select(step.ids), len(before) == 1
        if single:  # two columns at least, wherever f and conditions are called
            step, before, p = step.at(np.zeros(2, int)), np.repeat(before, 2), select(np.repeat(step.ids, 2))
        low, high = np.zeros(len(before)), np.ones(len(before))
        for _ in range(BISECTIONS):
            x = 0.5 * (low + high)
            state = interpolate(self._coefficients, step.u, step.h, step.k, x)
            value = event.value(state, p, step.actual(step.t + x * step.h))
            same = np.sign(value) == np.sign(before)
            low, high = np.where(same, x, low), np.where(same, high, x)
        count = 1 if single else len(high)
        return high[:count], interpolate(self._coefficients, step.u, step.h, step.k, high)[:, :count]

    def _settle(self, step: Step, parts: Array, states: dict) -> tuple[Array, Array, Array]:
        """Note the events up to the first terminal one of each column."""
        terminal = np.array([event.terminal for event in self._events])
        last = parts[terminal].min(axis=0, initial=np.inf)
        for number, c in sorted(states, key=lambda at: parts[at]):  # in the order of time
            if parts[number, c] <= last[c]:
                time = step.actual(step.t + parts[number] * step.h)[c]
                self._times.setdefault(int(step.ids[c]), []).append((number, float(time)))
                place = int(step.number[c]), float(parts[number, c])
                self._places.setdefault(int(step.ids[c]), []).append(place)
        ended = np.flatnonzero(np.isfinite(last))
        first = [int(np.argmin(np.where(terminal, parts[:, c], np.inf))) for c in ended]
        ends = [states[number, c] for number, c in zip(first, ended)]
        return ended, last[ended], np.stack(ends, axis=1) if ends else np.empty((len(step.u), 0))
