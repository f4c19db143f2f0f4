"""`Event`: a sign change of a condition, or given times, and the effect on the state.

Arrays, kernels and derivatives read only the fields of an event. So a further kind of event that can be expressed by a
condition or by times is a function that returns an `Event`, and no other file changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.tracer import isbox

from mpiad._typing import Array, Function, Shape, Tree
from mpiad.compiling.closure import with_values_of_variables
from mpiad.ensemble.batch import Batch
from mpiad.ensemble.derivative import locked, refuse_traced
from mpiad.ensemble.problem import check_order
from mpiad.primitives.checks import positive_count
from mpiad.transport.devices.device_arrays import is_device_array


def affected(event: Event, batch: Batch, u: Array, p: Tree, t: Array) -> Array:
    """Return the states after an event, shape (d, n), n ≥ 2, at times t, shape (n,); `batch` gives the shape of a state."""
    try:
        value: Any = event.affect(locked(u) if batch.shape else locked(u)[0], p, locked(t))  # type: ignore[misc]
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise TypeError(
            "Event: affect writes into its arguments, which are read-only. Return the state after the event: a list of its "
            "components, or a new array."
        ) from error
    parts = list(value) if isinstance(value, (list, tuple)) and batch.shape else [value]
    refuse_traced("Event: affect", parts)
    is_array = not isinstance(value, (list, tuple)) and bool(batch.shape)
    got = [np.shape(part) for part in parts]
    if got != [u.shape] if is_array else (len(got) != len(u) or not set(got) <= {(), t.shape}):
        raise ValueError(
            f"Event: affect returned {f'shape {got[0]}' if len(got) == 1 else f'{len(got)} components of shapes {got}'}, "
            f"but the state after the event was expected, of shape {u.shape}: {len(u)} components, each a number or of "
            f"shape {t.shape}. It is called with columns as f is, u of shape (d, n)."
        )
    after = np.empty_like(u)
    for part in parts:
        if not np.can_cast(np.asarray(part).dtype, u.dtype, casting="same_kind"):
            raise TypeError(f"Event: affect returned {np.asarray(part).dtype} for u of {u.dtype}. Give u0 that dtype.")
    for i, part in enumerate(parts[0] if is_array else parts):
        after[i] = part
    return after


@dataclass(frozen=True)
class Event:
    """An event along a trajectory: the sign change of a condition, or given times.

    Parameters
    ----------
    condition : callable, optional
        ``condition(u, p, t)`` returns a real number per column; its arguments are those of f. Booleans raise a TypeError.
    terminal : bool, optional
        Whether the trajectory ends at the event, with the return code Terminated; by default True without an `affect`.
    direction : {-1, 0, 1}
        1: only sign changes from negative to positive; -1: only from positive to negative; 0: both.
    affect : callable, optional
        ``affect(u, p, t)`` returns the state after the event, one entry per component of u; its arguments are those of f.
        The trajectory continues from this state. It is also the saved state if a saved time coincides with the event.
    times : list of numbers, or callable, optional
        Instead of a condition: the times at which `affect` acts, in any order; ``times(p)`` returns them as functions of
        the parameters, each a number or an array with one entry per column. Times outside tspan are ignored.
    interior_points : int
        Number of equidistant points inside each step at which the condition is tested, in addition to both ends; 6 by
        default. Two sign changes between neighboring points are missed, unless the parabola through three values predicts
        them. All conditions of a solve are tested at the same points, whose number is the largest given one.

    Raises
    ------
    NotImplementedError
        If times are traced.
    TypeError
        If the condition or the affect isn't a function of (u, p, t), times aren't numbers, or `terminal` isn't a bool.
    ValueError
        If both a condition and times are given, or times without an affect, or there is no such `direction`, or
        `interior_points` isn't an integer, zero or more.

    Examples
    --------
    A ball that rebounds with 0.8 of its speed, and a tablet every 8 hours.

    >>> from mpiad.ensemble import Event
    >>> bounce = Event(lambda u, p, t: u[0], direction=-1, affect=lambda u, p, t: [u[0], -0.8 * u[1]])
    >>> tablet = Event(times=[0.0, 8.0, 16.0], affect=lambda u, p, t: [u[0] + 100.0, u[1]])
    >>> bounce.terminal, Event(lambda u, p, t: u[0]).terminal
    (False, True)
    """

    # The condition is None if `times` are given. `__post_init__` replaces None in `terminal`.
    condition: Function = None  # type: ignore[assignment]
    terminal: bool = None  # type: ignore[assignment]
    direction: int = 0
    affect: Function | None = None
    times: Any = None
    interior_points: int = 6

    def __post_init__(self) -> None:
        terminal, direction = self.affect is None if self.terminal is None else self.terminal, self.direction
        if not isinstance(terminal, (bool, np.bool_)):
            raise TypeError(f"Event: terminal must be True or False, but got {terminal!r:.60}.")
        if isinstance(direction, bool) or not isinstance(direction, Real) or direction not in (-1, 0, 1):
            raise ValueError(f"Event: direction must be -1, 0 or 1, but got {direction!r:.60}.")
        points = positive_count(self.interior_points, "Event: interior_points", 0)
        # Equal values have equal types, since ranks compare them.
        for name, value in (("terminal", bool(terminal)), ("direction", int(direction)), ("interior_points", points)):
            object.__setattr__(self, name, value)
        if self.affect is not None and not callable(self.affect):
            raise TypeError(f"Event: affect must be a function, but got {type(self.affect).__name__}.")
        for name in ("condition", "affect"):
            check_order(f"Event: {name}", getattr(self, name))
        if self.times is not None:
            object.__setattr__(self, "times", self._given_times())
        elif not callable(self.condition):
            raise TypeError(f"Event: condition must be a function, but got {type(self.condition).__name__}.")

    @classmethod
    def doses(cls, times: Array | Function, amounts: Array | Function, component: int) -> Event:
        """Return an event that adds amounts to one component of the state at given times.

        Parameters
        ----------
        times : array of shape (K,), or callable
            The times of the doses, zero or later, in any order; or ``times(p)``, which returns K times, written for one
            trajectory and called with columns. With a row of times per trajectory in p, K is the length of the longest row;
            fill up the others with `numpy.inf`.
        amounts : number, array of shape (K,), or callable
            The amount of all doses, or of each one; or ``amounts(p)``, which returns K amounts.
        component : int
            The component of the state; 0 if the state is a number.

        Raises
        ------
        NotImplementedError
            If times or amounts are traced. Pass them in p.
        TypeError, ValueError
            If times or amounts aren't numbers, or have different lengths, a time is below zero or NaN, an amount isn't
            finite, or there is no such component.

        Notes
        -----
        Simultaneous doses of a trajectory act as events of their mean amount. So the derivative with respect to the time of
        each of them is the same part of the derivative with respect to their common time.

        Examples
        --------
        >>> from mpiad.ensemble import EnsembleProblem, Event, ODEProblem, solve
        >>> drug = ODEProblem(lambda u, p, t: [-p["rate"] * u[0]], [0.0], (0.0, 24.0))
        >>> rows = {"rate": [0.1, 0.2], "times": [[0.0, 8.0], [6.0, np.inf]], "amounts": [[100.0, 50.0], [80.0, 0.0]]}
        >>> ensemble = EnsembleProblem(drug, p={name: np.array(column) for name, column in rows.items()})
        >>> tablets = Event.doses(lambda p: p["times"], lambda p: p["amounts"], component=0)
        >>> print(solve(ensemble, events=tablets, rtol=1e-8).u_end.ravel().round(3))
        [19.167  2.186]
        """
        table = DoseTable(_of_doses("times", times), _of_doses("amounts", amounts), component)
        return cls(times=table.times if callable(times) else table.time, affect=table.affect)

    def snapshot(self) -> Event:
        """Return the event with functions that keep the present values of the variables that they read."""
        return dataclasses.replace(self, **{name: with_values_of_variables(part) for name, part in vars(self).items()})

    def _given_times(self) -> Array:
        """Return the times as a tuple of numbers, or as the user's function."""
        if self.condition is not None:
            raise ValueError("Event: give either a condition or times, not both. Define two events.")
        if self.affect is None:
            raise ValueError(
                f"Event: times={self.times!r:.60}, but no affect. Give affect=, or save states at these times by saveat."
            )
        if callable(self.times):
            return self.times
        parts = self.times if isinstance(self.times, (list, tuple)) else [self.times]
        if any(map(isbox, parts)):
            raise NotImplementedError(
                "Event: times are traced values, through which no derivative can flow here. Pass them as p, and give a "
                "function that returns them: times=lambda p: [p[0]]."
            )
        times = np.atleast_1d(np.asarray(self.times))
        if times.dtype.kind not in "iuf" or times.ndim != 1 or np.isnan(times).any():
            raise TypeError(f"Event: times must be a list of numbers, or a function of p, but got {self.times!r:.80}.")
        return tuple(times.astype(float).tolist())

    def due(self, p: Tree) -> list[Array]:
        """Return the list of given times, each a number or an array with one entry per column; p may be traced."""
        times: Any = self.times(p) if callable(self.times) else self.times
        return list(times) if isinstance(times, (list, tuple)) or anp.ndim(times) == 2 else [times]

    @property
    def acts(self) -> bool:
        """Whether the event changes the state."""
        return self.affect is not None

    @property
    def stops(self) -> bool:
        """Whether a step ends at the event, because the event changes the state or ends the trajectory."""
        return self.acts or self.terminal

    def for_states(self, shape: Shape) -> Event:
        """Return the event for columns of states of this shape; raise NotImplementedError for two or more axes."""
        if len(shape) == 1:
            return self
        if shape:
            raise NotImplementedError(
                f"solve: events are supported for states of shape (d,), but u0 has shape {shape}. Flatten it, and restore "
                "its shape in f."
            )
        return self if self.condition is None else dataclasses.replace(self, condition=_ScalarCondition(self.condition))

    @property
    def written(self) -> Function:
        """The condition as the user wrote it."""
        return self.condition.written if isinstance(self.condition, _ScalarCondition) else self.condition

    def rows(self, u: Array, p: Tree, t: Array) -> slice:
        """Return a range of components of u that contains all that the condition reads."""
        reads = _Reads(u)
        try:
            self.condition(reads, p, t)
        except Exception:  # noqa: BLE001 the condition uses u as an array
            return slice(0, len(u))
        return slice(min(reads.rows, default=0), max(reads.rows, default=-1) + 1)

    def value(self, u: Array, p: Tree, t: Array) -> Array:
        """Return the value of the condition for each column, shape (n,); raise the errors of `_require_numbers`."""
        return self.checked(u, p, t.copy()).astype(float)

    def checked(self, u: Array, p: Tree, t: Array) -> Array:
        """Return what the condition returns, which may be a view of an argument; raise the errors of `_require_numbers`."""
        value = self.condition(locked(u), p, locked(t))
        _require_numbers(value, t.shape)
        return value if is_device_array(value) else np.asarray(value)

    @property
    def sided(self) -> bool:
        """Whether the event acts in both directions, so that the sign with which its condition leaves a root is stored."""
        return self.acts and not self.direction

    def crossed(self, before: Array, after: Array, side: Array | None = None) -> Array:
        """Return per column whether the condition changed its sign as `direction` requires.

        `side`: for events that act in both directions, the sign with which the condition left its last root or the start.
        """
        up, down = (before <= 0) & (after >= 0), (before >= 0) & (after <= 0)
        # A root at the start of a step belongs to the previous step.
        valid = before != 0
        if side is not None:
            up, down = up & (side <= 0), down & (side >= 0)
        chosen = up if self.direction > 0 else down if self.direction < 0 else up | down
        return chosen & valid


def _require_numbers(value: Array, shape: Shape) -> None:
    """Raise unless a condition returned one real number per column."""
    refuse_traced("Event: condition", [value])
    if np.shape(value) != shape:
        raise ValueError(
            f"Event: condition returned shape {np.shape(value)}, but one number for each column was expected: {shape}. "
            "It is called with columns as f is, u of shape (d, n); a norm or a sum must be taken along axis 0."
        )
    if (value if hasattr(value, "dtype") else np.asarray(value)).dtype.kind == "b":
        raise TypeError(
            "Event: condition returned True or False for each column, but a real number that changes its sign at the event "
            "was expected. Write the difference: u[0] - 0.5 with direction=-1 for u[0] < 0.5."
        )
    if np.iscomplexobj(value):
        raise TypeError(
            f"Event: condition returned {getattr(value, 'dtype', type(value).__name__)}, but a real number, which changes "
            "its sign at the event, was expected. Take its np.real, np.imag or np.abs."
        )


@dataclass(frozen=True)
class DoseTable:
    """Doses: their times and amounts, as arrays or functions of the parameters, and the component that they change."""

    time: Array | Function
    amount: Array | Function
    component: int

    def __post_init__(self) -> None:
        positive_count(self.component, "Event.doses: component", 0)
        if not callable(self.time) and not callable(self.amount):
            self._check_lengths(self.time, self.amount)

    def times(self, p: Tree) -> list[Array]:
        """Return the times of the doses, given the parameters."""
        times: Any = self.time(p) if callable(self.time) else self.time
        return list(times)

    def affect(self, u: Array, p: Tree, t: Array) -> Array | list[Array]:
        """Return the states after the doses at the times t."""
        amount: Any = self.amount(p) if callable(self.amount) else self.amount
        if callable(self.amount) or amount.ndim:
            amount = self._at(t, self.times(p), amount)
        if anp.ndim(u) == anp.ndim(t):
            return u + amount
        if self.component >= len(u):
            raise ValueError(f"Event.doses: component must be less than {len(u)}, but got {self.component}.")
        return [row + amount if i == self.component else row for i, row in enumerate(u)]

    def _at(self, t: Array, times: Sequence[Array], amounts: Sequence[Array]) -> Array:
        """Return the amount of one dose at the times t: the mean of simultaneous doses, each of which is an event."""
        self._check_lengths(times, amounts)
        total = count = 0.0 * t
        for time, amount in zip(times, amounts):
            total = total + anp.where(time == t, amount, 0.0)
            count = count + anp.where(time == t, 1.0, 0.0)
        return total / anp.maximum(count, 1.0)

    @staticmethod
    def _check_lengths(times: Sequence[Array], amounts: Sequence[Array]) -> None:
        # A list may mix numbers with columns.
        if (isinstance(amounts, (list, tuple)) or anp.ndim(amounts)) and len(times) != len(amounts):
            raise ValueError(
                f"Event.doses: there must be one amount per time, but got {len(times)} times and {len(amounts)} amounts."
            )


def _of_doses(name: str, values: Array | Function) -> Array | Function:
    """Return the checked times or amounts of doses as an array, or the user's function."""
    if callable(values):
        return values
    if any(map(isbox, values if isinstance(values, (list, tuple)) else [values])):
        raise NotImplementedError(
            f"Event.doses: {name} are traced. Pass them in p, and give a function of p that returns them."
        )
    array = np.array(values)
    if array.dtype.kind not in "iuf" or array.ndim > 1 or (name == "times" and not array.ndim):
        shape = "shape (K,)" if name == "times" else "shape (K,), or one number"
        raise TypeError(f"Event.doses: {name} must be numbers of {shape}, or a function of p, but got {values!r:.80}.")
    bad = ~(array >= 0) if name == "times" else ~np.isfinite(array)
    if bad.any():
        expected = "zero or later" if name == "times" else "finite"
        raise ValueError(f"Event.doses: {name} must be {expected}, but got {array[bad].ravel()[0]}.")
    return array.astype(float)


class _Reads:
    """A state that notes in `rows` which components are read; the columns are those of u."""

    def __init__(self, u: Array):
        self._u, self.rows = u, set[int]()

    def __len__(self) -> int:
        return len(self._u)

    def __getitem__(self, i: int) -> Array:
        self.rows.update([i % len(self)] if isinstance(i, int) else range(len(self)))
        return self._u[i]


@dataclass(frozen=True)
class _ScalarCondition:
    """A condition for states of one component; `written`: the user's condition, for states that are numbers."""

    written: Function

    def __call__(self, u: Array, p: Tree, t: Array) -> Array:
        return self.written(u[0], p, t)
